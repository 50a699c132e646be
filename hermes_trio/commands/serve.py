"""`hermes-trio serve`: what it reads, what it prints, and the server between the two."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path
from typing import Any, Final

from hermes_trio import __version__
from hermes_trio.config import load_config, loose_modes
from hermes_trio.gateway.serving import Serving, run_server
from hermes_trio.http.auth import admin_key
from hermes_trio.logs import configure_logging

__all__ = ["serve"]

logger: Final = logging.getLogger("hermes_trio.serve")


async def serve(
    *, host: str | None = None, port: int | None = None, home: Path | None = None, config: Path | None = None
) -> None:
    """Serve the OpenAI-compatible API and the run API until SIGTERM or SIGINT, then drain and end."""
    settings = load_config(os.environ, home=home, path=config, server={"host": host, "port": port})
    settings.home.mkdir(mode=0o700, parents=True, exist_ok=True)
    key = admin_key(settings.server.key, settings.home, [settings.server.host])
    secrets = [key.value, *(value for name, value in settings.environment.items() if name.endswith(("_KEY", "_TOKEN")))]
    configure_logging(level=settings.log.level, format=settings.log.format, secrets=secrets)
    for problem in loose_modes(settings):
        logger.warning("%s", problem)

    def announce(serving: Serving) -> None:
        for address in serving.addresses:
            print(f"hermes-trio {__version__} listens on {address}", flush=True)
        if key.path is not None and not (key.made and sys.stdout.isatty()):
            # Whatever collects the output of a server keeps it for longer, and for more readers, than the key's file.
            made = "was made and is kept" if key.made else "is"
            print(f"The API key {made} in {key.path}", flush=True)
        elif key.made:
            print(
                f"An API key was made and kept in {key.path} (mode 0600). It is shown this once:\n\n  {key.value}\n\n"
                f"Try it:\n\n  curl {serving.addresses[0]}/v1/chat/completions -H 'Authorization: Bearer {key.value}'"
                " -H 'Content-Type: application/json'"
                """ -d '{"messages": [{"role": "user", "content": "Hello"}]}'\n""",
                flush=True,
            )

    def report(found: dict[str, Any]) -> None:
        left = ", ".join(f"{count} {name}" for name, count in found["backlog"].items() if count) or "nothing"
        print(
            f"drained in {found['seconds']:.1f} s: {found['turns']} turns, {found['jobs']} jobs, {found['threads']} threads left;"
            f" {found['cancelled']} turns were cancelled; waiting in the store: {left}",
            flush=True,
        )

    await run_server(settings, key, announce=announce, report=report)
