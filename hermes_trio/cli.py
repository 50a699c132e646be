"""The `hermes-trio` command. Each group of commands is a sub-application; this module mounts them and owns `serve`.

Exit codes: 0 for success, 1 for a start or a command that failed, with one line that says why.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, Any, Final

import cyclopts
from cyclopts import Parameter

from hermes_trio import __version__
from hermes_trio.config import Config, ConfigError, load_config

__all__ = ["app", "main"]

app: Final = cyclopts.App(
    name="hermes-trio",
    help="An agent gateway in which the task tree is the product.",
    version=__version__,
    backend="trio",
)
# By name: a command that is not called is not imported, so that starting the server stays quick.
app.command(
    "hermes_trio.key_commands:keys", name="keys", help="API keys: several, named, scoped. Only their hashes are kept."
)
app.command("hermes_trio.store_commands:sessions", name="sessions", help="The conversations in the store.")
app.command("hermes_trio.gateway_commands:chat", name="chat", help="Talk to the agent in this terminal.")
app.command(
    "hermes_trio.gateway_commands:run",
    name="run",
    help="One prompt, one answer; waits until all of its work has settled.",
)
app.command("hermes_trio.gateway_commands:cron", name="cron", help="Scheduled jobs.")
app.command(
    "hermes_trio.gateway_commands:outbox",
    name="outbox",
    help="Replies that wait for a platform, and those that could not be sent.",
)
app.command(
    "hermes_trio.gateway_commands:pairing", name="pairing", help="Who may talk to the agent on the chat platforms."
)
app.command("hermes_trio.store_commands:backup", name="backup", help="Copy the database, also while a server uses it.")
app.command(
    "hermes_trio.store_commands:doctor",
    name="doctor",
    help="Look at the database: integrity, sizes, what is stuck, what retention will remove.",
)

HomeOption = Annotated[Path | None, Parameter(help="Where state is kept; HERMES_HOME, else ~/.hermes-trio.")]
ConfigOption = Annotated[Path | None, Parameter(help="The TOML file; config.toml in the home directory if it exists.")]


def configuration(home: Path | None, config: Path | None, **server: Any) -> Config:
    """The configuration of this process."""
    return load_config(os.environ, home=home, path=config, server=server)


@app.command
async def serve(
    *,
    host: Annotated[str | None, Parameter(help="The address to listen on; 127.0.0.1.")] = None,
    port: Annotated[int | None, Parameter(help="The port; 8642. 0 takes a free one.")] = None,
    home: HomeOption = None,
    config: ConfigOption = None,
) -> None:
    """Serve the OpenAI-compatible API and the run API until SIGTERM or SIGINT, then drain and end."""
    from hermes_trio.http.auth import admin_key
    from hermes_trio.logs import configure_logging
    from hermes_trio.serving import Serving, run_server

    settings = configuration(home, config, host=host, port=port)
    settings.home.mkdir(mode=0o700, parents=True, exist_ok=True)
    key = admin_key(settings.server.key, settings.home, [settings.server.host])
    secrets = [key.value, *(value for name, value in settings.environment.items() if name.endswith(("_KEY", "_TOKEN")))]
    configure_logging(level=settings.log.level, format=settings.log.format, secrets=secrets)

    def announce(serving: Serving) -> None:
        for address in serving.addresses:
            print(f"hermes-trio {__version__} listens on {address}", flush=True)
        if key.path is not None and not key.made:
            print(f"The API key is in {key.path}", flush=True)
        if key.made:
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


def main() -> None:
    """The entry point of the `hermes-trio` script."""
    try:
        app()
    except* Exception as group:
        expected, unexpected = group.split(_for_people())
        if unexpected is not None:
            raise unexpected from None
        assert expected is not None
        for error in expected.exceptions:
            while isinstance(error, BaseExceptionGroup):
                error = error.exceptions[0]
            print(f"hermes-trio: {error}", file=sys.stderr)
        raise SystemExit(1) from None


def _for_people() -> tuple[type[Exception], ...]:
    """The errors whose text is all that the person at the terminal needs. Imported only when there is one."""
    from hermes_trio import gateway_commands
    from hermes_trio.adapters.settings import SettingsError as AdapterSettingsError
    from hermes_trio.agent.models.routes import InvalidRoute
    from hermes_trio.gateway_clients import ClientProblem
    from hermes_trio.http.auth import UnsafeKey
    from hermes_trio.key_commands import KeyProblem
    from hermes_trio.runtime.errors import RuntimeProblem
    from hermes_trio.tools.settings import SettingsError

    return (
        AdapterSettingsError,
        ClientProblem,
        ConfigError,
        InvalidRoute,
        KeyProblem,
        OSError,
        RuntimeProblem,
        SettingsError,
        UnsafeKey,
        gateway_commands.CommandFailed,
    )
