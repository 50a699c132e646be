"""`hermes-trio serve` with a configuration file, as a process beside a test that runs on Trio; it can be stopped and killed."""

from __future__ import annotations

import re
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import attrs
import httpx2
import trio

from tests.adapters.webhook_requests import signed

from .server_process import KEY, clean_environment

TIMEOUT = 60.0


@attrs.define
class Served:
    """A server that listens."""

    process: trio.Process
    url: str
    client: httpx2.AsyncClient
    said: list[bytes]

    @property
    def output(self) -> str:
        """What it has written so far."""
        return b"".join(self.said).decode("utf-8", "replace")

    async def deliver(self, route: str, payload: Any, **options: Any) -> httpx2.Response:
        """Post a signed delivery."""
        headers, body = signed(payload, **options)
        return await self.client.post(f"{self.url}/webhooks/{route}", headers=dict(headers), content=body)

    async def ask(self, method: str, path: str, body: Any = None) -> Any:
        """Ask the API with the admin key; the JSON of a good answer."""
        answer = await self.client.request(
            method, f"{self.url}{path}", json=body, headers={"Authorization": f"Bearer {KEY}"}
        )
        assert answer.status_code < 400, answer.text
        return answer.json()

    async def kill(self) -> None:
        """What a crash or the kernel would do."""
        self.process.kill()
        await self.process.wait()

    async def stop(self) -> int:
        """Ask it to end, and wait."""
        self.process.terminate()
        with trio.fail_after(TIMEOUT):
            return await self.process.wait()


@asynccontextmanager
async def open_served(home: Path, config: str = "", **environment: str) -> AsyncIterator[Served]:
    """The real server in `home`, listening on a free port; it has ended after the body, whatever happened."""
    if config:
        (home / "config.toml").write_text(config)
    process = await trio.lowlevel.open_process(
        [sys.executable, "-m", "hermes_trio", "serve", "--port", "0"],
        stdout=-1,
        stderr=-2,
        env=clean_environment(home, API_SERVER_KEY=KEY, **environment),
    )
    said: list[bytes] = []
    found: list[str] = []
    listening = trio.Event()

    async def read() -> None:
        assert process.stdout is not None
        while data := await process.stdout.receive_some():
            said.append(bytes(data))
            if not found and (match := re.search(rb"listens on (http://\S+)", b"".join(said))):
                found.append(match[1].decode())
                listening.set()
        listening.set()

    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(read)
            with trio.fail_after(TIMEOUT):
                await listening.wait()
            assert found, b"".join(said).decode()
            async with httpx2.AsyncClient(trust_env=False, timeout=TIMEOUT) as client:
                yield Served(process, found[0], client, said)
            nursery.cancel_scope.cancel()
    finally:
        if process.poll() is None:
            process.kill()
        with trio.CancelScope(shield=True):
            await process.wait()
            assert process.stdout is not None
            await process.stdout.aclose()
