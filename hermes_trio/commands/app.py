"""The commands of `hermes-trio`. Each group is a sub-application that is imported when it is called."""

from __future__ import annotations

from typing import Annotated, Final

import cyclopts
from cyclopts import Parameter

from hermes_trio import __version__
from hermes_trio.commands.options import ConfigOption, HomeOption

app: Final = cyclopts.App(
    name="hermes-trio",
    help="A self-hosted gateway for LLM agents: an OpenAI-compatible API, chat platforms, webhooks and cron in front of one agent runtime.",
    version=__version__,
    backend="trio",
)
# By name: only the command that is called is imported, which keeps the start of the server quick.
app.command(
    "hermes_trio.commands.keys:keys",
    name="keys",
    help="Create, list and revoke API keys. Only their hashes are stored.",
)
app.command(
    "hermes_trio.commands.sessions:sessions",
    name="sessions",
    help="List, show, search, end, delete and export sessions.",
)
app.command(
    "hermes_trio.commands.store:store",
    name="store",
    help="Create, migrate and check a store in PostgreSQL; copy a SQLite store into it or back.",
)
app.command("hermes_trio.commands.gateway:chat", name="chat", help="Talk to the agent in this terminal.")
app.command(
    "hermes_trio.commands.gateway:run",
    name="run",
    help="Send one prompt, stream the answer, and wait until all work has settled.",
)
app.command("hermes_trio.commands.tree:console", name="console", help="Open the console in the browser, signed in.")
app.command("hermes_trio.commands.tree:top", name="top", help="Watch the live tree of the running server.")
app.command("hermes_trio.commands.tree:tree", name="tree", help="Print the live tree of the running server once.")
app.command(
    "hermes_trio.commands.gateway:cron", name="cron", help="Create, list, pause, resume, run and delete scheduled jobs."
)
app.command(
    "hermes_trio.commands.gateway:grants",
    name="grants",
    help="List and revoke grants: categories of commands that run without a question.",
)
app.command(
    "hermes_trio.commands.gateway:inbox",
    name="inbox",
    help="List messages and notices by state, and queue dead letters again.",
)
app.command(
    "hermes_trio.commands.gateway:outbox",
    name="outbox",
    help="List replies by state, and queue dead letters again.",
)
app.command(
    "hermes_trio.commands.gateway:pairing",
    name="pairing",
    help="Manage who may talk to the agent on the chat platforms.",
)
app.command(
    "hermes_trio.commands.sessions:backup",
    name="backup",
    help="Copy the database to a file, also while a server uses it.",
)
app.command(
    "hermes_trio.commands.doctor:doctor",
    name="doctor",
    help="Examine the database, the MCP servers and the confinement of commands.",
)
app.command(
    "hermes_trio.commands.simulate:simulate",
    name="simulate",
    help="Simulate whole gateways on virtual time, with faults, and check their promises.",
)
app.command("hermes_trio.commands.tools:tools", name="tools", help="List the agent's tools and their origin.")


@app.command
async def serve(
    *,
    host: Annotated[str | None, Parameter(help="The address to listen on; default: 127.0.0.1.")] = None,
    port: Annotated[int | None, Parameter(help="The port; default: 8642. 0 chooses a free one.")] = None,
    home: HomeOption = None,
    config: ConfigOption = None,
    workers: Annotated[
        int,
        Parameter(
            validator=cyclopts.validators.Number(gte=1, lte=256),
            help="The number of processes; more than one needs a store in PostgreSQL.",
        ),
    ] = 1,
) -> None:
    """Serve the API, the console and the chat adapters until SIGTERM or SIGINT, then drain and exit."""
    from hermes_trio.commands import serve as serve_command

    await serve_command.serve(host=host, port=port, home=home, config=config, workers=workers)
