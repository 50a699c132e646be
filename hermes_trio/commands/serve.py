"""`hermes-trio serve`: reads the configuration, prints the addresses, and runs the server."""

from __future__ import annotations

import logging
import os
import shlex
import shutil
import socket
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import msgspec

from hermes_trio import __version__
from hermes_trio.config import Config, default_home, load_config, loose_modes
from hermes_trio.console.routes import sign_in_path
from hermes_trio.gateway.listening import Listening, bind_for_workers
from hermes_trio.gateway.serving import Serving, run_server
from hermes_trio.gateway.workers import WorkerLink, WorkerPool, worker_command
from hermes_trio.http.auth import ADMIN, AdminKey, admin_key, keep_key
from hermes_trio.logs import configure_logging
from hermes_trio.providers.demo import DemoModel
from hermes_trio.store import StoreError
from hermes_trio.store.backend import address_passwords
from hermes_trio.tools.warden.custody import claim_children
from hermes_trio.tools.warden.daemon import prctl

logger: Final = logging.getLogger("hermes_trio.serve")

LINK_SECONDS: Final = 3600.0
"""How long the link that is printed at the start is valid."""


async def serve(
    *,
    host: str | None = None,
    port: int | None = None,
    home: Path | None = None,
    config: Path | None = None,
    workers: int = 1,
) -> None:
    """Serve the API, the console and the chat adapters until SIGTERM or SIGINT, then drain and exit. With several `workers`, in that many processes."""
    worker = WorkerLink.take()
    settings = load_config(os.environ, home=home, path=config, server={"host": host, "port": port})
    settings.home.mkdir(mode=0o700, parents=True, exist_ok=True)
    key = admin_key(settings.server.key, settings.home, [settings.server.host])
    secrets = [key.value, *(value for name, value in settings.environment.items() if name.endswith(("_KEY", "_TOKEN")))]
    if settings.store.url:
        secrets += address_passwords(settings.store.url)
    configure_logging(level=settings.log.level, format=settings.log.format, secrets=secrets)
    for problem in loose_modes(settings):
        logger.warning("%s", problem)
    # Commands must not be able to read the keys in this process, nor in the parent of workers.
    prctl.set_dumpable(False)
    if workers > 1 and worker is None:
        await _serve_workers(settings, key, workers)
        return
    if worker is not None:
        worker.watch()
        name = f"{settings.store.node_name or socket.gethostname()}-{worker.number}"
        settings = msgspec.structs.replace(settings, store=msgspec.structs.replace(settings.store, node_name=name))
    # This process must reap all processes of its commands.
    claim_children()

    def announce(serving: Serving) -> None:
        if worker is None:
            _say("\n".join(start_lines(serving, key)))
        else:
            worker.send("started", start_lines(serving, key))
        confinement = serving.gateway.gateway.toolbox.confinement
        for problem in confinement.warnings():
            logger.warning("%s", problem)

    def draining(serving: Serving) -> None:
        if worker is None:
            _say(_waiting_line(serving, settings.server.drain_seconds))
        else:
            worker.draining = True

    def report(found: dict[str, Any]) -> None:
        if worker is not None:
            worker.send("report", found)
            worker.release()
            return
        left = ", ".join(f"{count} {name}" for name, count in found["backlog"].items() if count) or "nothing"
        _say(
            f"drained in {found['seconds']:.1f} s: {found['turns']} turns, {found['jobs']} jobs, {found['threads']} threads left;"
            f" {found['cancelled']} turns were cancelled, {found['stopped_jobs']} jobs were stopped; waiting in the store: {left}"
        )

    await run_server(
        settings,
        key,
        listening=Listening()
        if worker is None
        else Listening(bind=worker.bind, announces=worker.number == 0, others=worker.others),
        announce=announce,
        draining=draining,
        report=report,
    )


async def _serve_workers(settings: Config, key: AdminKey, count: int) -> None:
    """Serve in several processes. Raises `StoreError` for a store that has one owner."""
    if not settings.store.url:
        raise StoreError(
            f"--workers {count} needs a store that several processes share: set [store] url (or HERMES_STORE_URL) to a PostgreSQL database."
            " A SQLite file has one owner; serve it without --workers"
        )
    with ExitStack() as stack:
        sockets = [stack.enter_context(sock) for sock in bind_for_workers(settings, count)]
        keep_key(key)
        arguments = ["--home", str(settings.home), *(["--config", str(settings.path)] if settings.path else [])]
        arguments += ["--host", settings.server.host, "--port", str(sockets[0].getsockname()[1])]
        code = await WorkerPool(worker_command(arguments), sockets, _say).run()
    if code:
        raise SystemExit(code)


def _say(text: str) -> None:
    print(text, flush=True)


def start_lines(serving: Serving, key: AdminKey) -> list[str]:
    """Return the lines that every start prints: the addresses of the server, the model, and how to talk to it."""
    config = serving.gateway.config
    address = serving.addresses[0]
    lines = [f"hermes-trio {__version__} listens on {each}" for each in serving.addresses]
    lines += [
        f"  model  {_model_line(serving)}",
        f"  chat   {chat_command(config)}",
        f"  web    {_console_link(serving, address)}",
        f"  docs   {address}/docs",
        f"  key    {_key_line(key)}",
        "Try it:",
        "",
        f"  curl {address}/v1/chat/completions -H {_authorization(key)} -H 'Content-Type: application/json'"
        """ -d '{"messages": [{"role": "user", "content": "Hello"}]}'""",
        "",
        "Ctrl-C stops the server.",
    ]
    return lines


def _model_line(serving: Serving) -> str:
    routes = serving.gateway.gateway.routes
    name = routes.names[0]
    if isinstance(routes.get(), DemoModel):
        return f"{name}, built in: it echoes, and obeys directives (a real one: HERMES_MODEL=openai/NAME with OPENAI_API_KEY)"
    served = routes.served(name)
    return name if served == name else f"{name} ({served})"


def _console_link(serving: Serving, address: str) -> str:
    """Return the address of the console: on a terminal with a code that signs in once, elsewhere without, because logs are kept."""
    if not sys.stdout.isatty():
        return f"{address}/ (a link that signs in: hermes-trio console)"
    code = serving.gateway.api.signin.make_code(ADMIN, LINK_SECONDS)
    return f"{address}{sign_in_path(code)}"


def _key_line(key: AdminKey) -> str:
    if key.path is None:
        return "the configured one (API_SERVER_KEY or server.key)"
    return f"{key.path} (made now, mode 0600)" if key.made else str(key.path)


def _authorization(key: AdminKey) -> str:
    """Return the header as words of a shell command that do not contain the key."""
    if key.path is None:
        return '"Authorization: Bearer $API_SERVER_KEY"'
    return f'"Authorization: Bearer $(cat {shlex.quote(str(key.path))})"'


def chat_command(config: Config) -> str:
    """Return the shell command that opens a conversation beside this server."""
    script = Path(sys.argv[0])
    found = shutil.which("hermes-trio")
    if found is not None and script.name == "hermes-trio" and Path(found).resolve() == script.resolve():
        words = ["hermes-trio"]
    elif script.name == "hermes-trio":
        words = [str(script)]
    else:
        words = [sys.executable, "-m", "hermes_trio"]
    words.append("chat")
    if config.home != default_home(os.environ).absolute():
        words += ["--home", str(config.home)]
    return shlex.join(words)


def _waiting_line(serving: Serving, seconds: float) -> str:
    """Return the line that says what a drain waits for, how long, and what a second signal does."""
    runtime = serving.gateway.runtime
    turns, jobs = len(runtime.core.live_turns), len(runtime.supervisor)
    background = f" {_counted(jobs, 'background job')} will be stopped." if jobs else ""
    if not turns:
        return f"Stopping.{background}"
    return (
        f"Stopping: waiting at most {seconds:g} s for {_counted(turns, 'turn')} to end.{background}"
        " Ctrl-C (or the signal) again stops everything at once."
    )


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"
