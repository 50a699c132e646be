"""The commands of `hermes-trio`, for the command line in `cli`. Each group is a sub-application that is loaded when it is called."""

from __future__ import annotations

from typing import Annotated, Final

import cyclopts
from cyclopts import Parameter

from hermes_trio import __version__
from hermes_trio.commands.options import ConfigOption, HomeOption

__all__ = ["app"]

app: Final = cyclopts.App(
    name="hermes-trio",
    help="An agent gateway in which the task tree is the product.",
    version=__version__,
    backend="trio",
)
# By name: a command that is not called is not imported, so that starting the server stays quick.
app.command(
    "hermes_trio.commands.keys:keys", name="keys", help="API keys: several, named, scoped. Only their hashes are kept."
)
app.command("hermes_trio.commands.sessions:sessions", name="sessions", help="The conversations in the store.")
app.command(
    "hermes_trio.commands.store:store",
    name="store",
    help="A store in PostgreSQL: make it, migrate it, check it, and move a SQLite store into it or back.",
)
app.command("hermes_trio.commands.gateway:chat", name="chat", help="Talk to the agent in this terminal.")
app.command(
    "hermes_trio.commands.gateway:run",
    name="run",
    help="One prompt, one answer; waits until all of its work has settled.",
)
app.command("hermes_trio.commands.tree:console", name="console", help="Open the console in the browser, signed in.")
app.command("hermes_trio.commands.tree:top", name="top", help="Watch the live tree of the running server.")
app.command("hermes_trio.commands.tree:tree", name="tree", help="Print the live tree of the running server once.")
app.command("hermes_trio.commands.gateway:cron", name="cron", help="Scheduled jobs.")
app.command("hermes_trio.commands.gateway:grants", name="grants", help="Commands that are allowed without asking.")
app.command(
    "hermes_trio.commands.gateway:inbox",
    name="inbox",
    help="Messages and notices that wait for a session, and those that could not be handled.",
)
app.command(
    "hermes_trio.commands.gateway:outbox",
    name="outbox",
    help="Replies that wait for a platform, and those that could not be sent.",
)
app.command(
    "hermes_trio.commands.gateway:pairing", name="pairing", help="Who may talk to the agent on the chat platforms."
)
app.command(
    "hermes_trio.commands.sessions:backup", name="backup", help="Copy the database, also while a server uses it."
)
app.command(
    "hermes_trio.commands.doctor:doctor",
    name="doctor",
    help="Look at the database: integrity, sizes, what is stuck, what retention will remove; and at the MCP servers.",
)
app.command(
    "hermes_trio.commands.simulate:simulate",
    name="simulate",
    help="Simulate whole gateways on virtual time, with faults, and judge what they promised.",
)
app.command(
    "hermes_trio.commands.tools:tools", name="tools", help="The tools that the agent has, and where each comes from."
)


@app.command
async def serve(
    *,
    host: Annotated[str | None, Parameter(help="The address to listen on; 127.0.0.1.")] = None,
    port: Annotated[int | None, Parameter(help="The port; 8642. 0 takes a free one.")] = None,
    home: HomeOption = None,
    config: ConfigOption = None,
    workers: Annotated[
        int,
        Parameter(
            validator=cyclopts.validators.Number(gte=1, lte=256),
            help="Processes; more than one needs a store in PostgreSQL.",
        ),
    ] = 1,
) -> None:
    """Serve the OpenAI-compatible API and the run API until SIGTERM or SIGINT, then drain and end."""
    from hermes_trio.commands import serve as serve_command

    await serve_command.serve(host=host, port=port, home=home, config=config, workers=workers)
