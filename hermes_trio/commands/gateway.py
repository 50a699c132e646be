"""The commands `chat`, `run`, `cron`, `grants`, `inbox`, `outbox` and `pairing`.

The store has one owner. While a server runs in the home directory, `cron` calls it over HTTP, and rows that the server reads when it needs them are
changed beside it; `chat` and `run` then use a database of their own.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Annotated, Any, Final

import cyclopts
import trio
from cyclopts import Parameter

from hermes_trio.commands.options import CommandFailed, ConfigOption, HomeOption
from hermes_trio.commands.output import say, say_json
from hermes_trio.config import Config, load_config
from hermes_trio.store import Page

cron: Final = cyclopts.App(
    name="cron", help="Create, list, pause, resume, run and delete scheduled jobs.", backend="trio"
)
grants: Final = cyclopts.App(
    name="grants",
    help="List and revoke grants: categories of commands that run without a question.",
    backend="trio",
)
inbox: Final = cyclopts.App(
    name="inbox",
    help="List messages and notices by state, and queue dead letters again.",
    backend="trio",
)
outbox: Final = cyclopts.App(name="outbox", help="List replies by state, and queue dead letters again.", backend="trio")
pairing: Final = cyclopts.App(
    name="pairing", help="Manage who may talk to the agent on the chat platforms.", backend="trio"
)


OWN_DATABASE: Final = "cli.db"
TIME: Final = "%Y-%m-%d %H:%M"


def _configuration(home: Path | None, config: Path | None) -> Config:
    return load_config(os.environ, home=home, path=config)


def _quiet() -> None:
    """Raise the log level, so that log lines do not mix with a conversation."""
    import logging

    logging.getLogger("hermes_trio").setLevel(logging.CRITICAL)


def _database(config: Config) -> tuple[Path | None, str]:
    """Return the database file for a conversation in the terminal (None: the configured PostgreSQL database), and a remark for the person."""
    from hermes_trio.store.ownership import owner_pid

    if config.store.url:
        return None, ""
    if not config.database.exists() or owner_pid(config.database) is None:
        return config.database, ""
    own = config.home / OWN_DATABASE
    pid = owner_pid(own) if own.exists() else None
    if pid is not None:
        raise CommandFailed(f"another conversation (pid {pid}) uses {own}; end it, or use another --home")
    return own, f"A server uses {config.database}; this conversation is kept in {own.name}."


def _other_database(config: Config, used: Path | None) -> Path:
    """Return the other database of the terminal's conversations: the one used while a server runs, or while none does."""
    return config.home / OWN_DATABASE if used == config.database else config.database


# -- chat --------------------------------------------------------------------------------------------------------------------------


async def chat(
    *,
    resume: Annotated[
        str | None, Parameter(help="Continue a conversation by its id; `--resume last` continues the last one.")
    ] = None,
    model: Annotated[str, Parameter(help="The model: the name of a route.")] = "",
    plain: Annotated[bool, Parameter(help="No prompt and no formatting: each line is an input.", negative="")] = False,
    home: HomeOption = None,
    config: ConfigOption = None,
) -> None:
    """Talk to the agent in the terminal. Ctrl-C stops its work, Ctrl-D or /quit quits."""
    from hermes_trio import __version__
    from hermes_trio.adapters.assembly import AdapterAssembly
    from hermes_trio.adapters.cli.chat import (
        CLI,
        ChatAdapter,
        ResumeError,
        begin_session,
        end_session,
        show_history,
        unknown_model,
    )
    from hermes_trio.adapters.cli.lines import PipedLines, PromptLines
    from hermes_trio.adapters.cli.screen import Screen
    from hermes_trio.base.settings import read_settings
    from hermes_trio.commands.clients import bring_conversation
    from hermes_trio.gateway.gateway import open_gateway
    from hermes_trio.messaging.platforms import Platform
    from hermes_trio.messaging.settings import CliSettings, PlatformSettings

    settings = _configuration(home, config)
    own = read_settings(settings.cli, CliSettings, "cli")
    settings.home.mkdir(mode=0o700, parents=True, exist_ok=True)
    interactive = not plain and sys.stdin.isatty() and sys.stdout.isatty()
    _quiet()
    database, remark = _database(settings)
    pressed_send, pressed = trio.open_memory_channel[None](16)

    def press() -> None:
        try:
            pressed_send.send_nowait(None)
        except trio.WouldBlock:
            pass

    prompt = PromptLines(settings.home / "cli_history", press) if interactive else None
    screen = Screen(
        formatted=interactive and own.markdown,
        tools=own.show_tools,
        live=None if prompt is None else prompt.show_unfinished,
    )
    chosen = trio.Event()
    adapter = ChatAdapter(screen, prompt or PipedLines(), interactive=interactive, ready=chosen)
    platform = Platform(adapter, PlatformSettings(allow_all=True, busy=own.busy))
    assembly = AdapterAssembly([platform], environment=settings.environment, home=settings.home)
    left = ""
    async with _prompting(prompt), open_gateway(settings, assembly, database=database, directives=(CLI,)) as gateway:
        adapter.inbox = lambda: gateway.adapters.hub.messaging.inboxes[CLI]
        adapter.running = lambda: len(gateway.runtime.supervisor)
        adapter.models = gateway.routes.names
        if prompt is not None:
            adapter.on_idle = lambda: prompt.show_status("")
        if model and model not in gateway.routes:
            raise CommandFailed(unknown_model(model, gateway.routes.names))
        adapter.model = model
        if interactive:
            screen.note(f"hermes-trio {__version__}: {model or gateway.routes.names[0]} answers.")
        if remark:
            screen.note(remark)
        if resume is not None:
            await bring_conversation(gateway.store, resume, _other_database(settings, database))
        try:
            session = await begin_session(gateway.store, "" if resume == "last" else resume)
        except ResumeError as error:
            raise CommandFailed(str(error)) from None
        if resume is not None:
            await show_history(gateway.store, screen, session)
        if interactive:
            screen.note(
                "Ctrl-C stops the agent, Alt-Enter makes a new line, /help lists commands, /quit or Ctrl-D leaves."
            )
        chosen.set()
        with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(_interrupts, pressed, adapter)
                nursery.start_soon(_signals, signals, press, adapter.left)
                if prompt is not None:
                    nursery.start_soon(_show_work, adapter, prompt)
                await adapter.left.wait()
                if not interactive:
                    await _settled(gateway)
                nursery.cancel_scope.cancel()
        left = await end_session(gateway.runtime, adapter.inbox())
    if interactive and left:
        screen.note(f"Take it up again with: hermes-trio chat --resume {left}")


@asynccontextmanager
async def _prompting(prompt: Any) -> AsyncIterator[None]:
    if prompt is None:
        yield
    else:
        async with prompt.open():
            yield


async def _interrupts(pressed: trio.MemoryReceiveChannel[None], adapter: Any) -> None:
    async for _ in pressed:
        await adapter.interrupt()


async def _signals(signals: AsyncIterator[int], press: Any, left: trio.Event) -> None:
    async for number in signals:
        if number == signal.SIGTERM:
            left.set()
        else:
            press()


async def _show_work(adapter: Any, prompt: Any) -> None:
    """Update the line above the prompt that shows what the agent does."""
    while True:
        prompt.show_status(adapter.status())
        await trio.sleep(1)


async def _settled(gateway: Any) -> None:
    """Wait, after the last input, until everything has been answered."""
    while gateway.runtime.lanes or len(gateway.runtime.supervisor) or await gateway.store.outbox_unsent():  # noqa: ASYNC110
        await trio.sleep(0.02)


# -- run ---------------------------------------------------------------------------------------------------------------------------


async def run(
    prompt: Annotated[str, Parameter(help="The prompt; `-` reads it from standard input.")],
    *,
    json: Annotated[bool, Parameter(help="Print one JSON object at the end instead of text.", negative="")] = False,
    model: Annotated[str, Parameter(help="The model: the name of a route.")] = "",
    deadline: Annotated[float | None, Parameter(help="Seconds after which each turn is stopped.")] = None,
    linger: Annotated[
        float | None, Parameter(help="Seconds to wait for background work after the answer; an hour.")
    ] = None,
    home: HomeOption = None,
    config: ConfigOption = None,
) -> None:
    """Send one prompt, stream the answer, and wait until all work has settled. Exit codes: 0 completed, 1 failed, 124 deadline, 130 stopped."""
    from hermes_trio.adapters.assembly import AdapterAssembly
    from hermes_trio.adapters.cli.chat import unknown_model
    from hermes_trio.adapters.cli.once import RunResult, run_once
    from hermes_trio.adapters.cli.screen import Screen
    from hermes_trio.gateway.gateway import open_gateway
    from hermes_trio.messaging.commands import receipt_text

    settings = _configuration(home, config)
    settings.home.mkdir(mode=0o700, parents=True, exist_ok=True)
    _quiet()
    database, _ = _database(settings)
    text = sys.stdin.read() if prompt == "-" else prompt
    if not text.strip():
        raise CommandFailed("the prompt is empty")
    screen = None if json else Screen(formatted=sys.stdout.isatty())
    assembly = AdapterAssembly([], environment=settings.environment, home=settings.home)
    stop = trio.Event()
    result = RunResult()
    with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
        async with (
            open_gateway(settings, assembly, database=database, directives=("cli",)) as gateway,
            trio.open_nursery() as nursery,
        ):

            async def watch() -> None:
                async for _ in signals:
                    stop.set()

            if model and model not in gateway.routes:
                raise CommandFailed(unknown_model(model, gateway.routes.names))
            nursery.start_soon(watch)
            result = await run_once(
                gateway.runtime, text, screen=screen, model=model, deadline=deadline, linger=linger, stop=stop
            )
            nursery.cancel_scope.cancel()
    if json:
        say_json(result.as_dict(), indent=-1)
    elif result.receipt is not None:
        sys.stderr.write(f"{receipt_text(result.receipt)}\n")
    if result.exit_code:
        raise SystemExit(int(result.exit_code))


# -- cron --------------------------------------------------------------------------------------------------------------------------


@cron.command(name="add")
async def add_job(
    schedule: Annotated[str, Parameter(help="'30m', 'every 2h', '0 9 * * MON-FRI', '2027-01-31T09:00', …")],
    prompt: Annotated[str, Parameter(help="The prompt of each run.")],
    *,
    name: Annotated[str, Parameter(help="A name; default: the start of the prompt.")] = "",
    deliver: Annotated[str, Parameter(help="local, a platform, platform:chat[:thread], all; a comma list.")] = "local",
    timezone: Annotated[str, Parameter(help="The time zone of the schedule, like Europe/Berlin.")] = "",
    repeat: Annotated[int | None, Parameter(help="The number of runs; default: no limit.")] = None,
    model: Annotated[str, Parameter(help="The model: the name of a route.")] = "",
    deadline: Annotated[float | None, Parameter(help="Seconds after which a run is stopped.")] = None,
    home: HomeOption = None,
    config: ConfigOption = None,
) -> None:
    """Create a scheduled job."""
    from hermes_trio.commands.clients import open_cron

    given = {
        "schedule": f"CRON_TZ={timezone} {schedule}" if timezone else schedule,
        "prompt": prompt,
        "name": name or " ".join(prompt.split())[:60],
        "deliver": deliver,
        "repeat": repeat,
        "model": model,
        "deadline": deadline,
    }
    async with open_cron(_configuration(home, config)) as client:
        job = await client.create({key: value for key, value in given.items() if value not in ("", None)})
    say(f"{job['id']}  {job['name']}  {job['schedule_display']}  next: {job['next_run_at']}")


@cron.default
@cron.command(name="list")
async def list_jobs(*, home: HomeOption = None, config: ConfigOption = None) -> None:
    """List the scheduled jobs."""
    from hermes_trio.commands.clients import open_cron

    async with open_cron(_configuration(home, config)) as client:
        jobs = await client.list()
    if not jobs:
        say("There are no jobs; make one with `hermes-trio cron add SCHEDULE PROMPT`.")
    for job in jobs:
        last = job["last_status"] or "never ran"
        say(
            f"{job['id']}  {job['name']}  {job['schedule_display']}  {job['state']}  next: {job['next_run_at'] or '-'}"
            f"  last: {last}  deliver: {job['deliver']}"
        )


@cron.command(name="show")
async def show_job(
    job_id: Annotated[str, Parameter(help="The id that `cron list` shows.")],
    *,
    home: HomeOption = None,
    config: ConfigOption = None,
) -> None:
    """Show a job and the result of its last slot."""
    from hermes_trio.commands.clients import open_cron

    async with open_cron(_configuration(home, config)) as client:
        job = await client.get(job_id)
    say_json(job)


async def _change(job_id: str, verb: str, home: Path | None, config: Path | None) -> dict[str, Any]:
    from hermes_trio.commands.clients import open_cron

    async with open_cron(_configuration(home, config)) as client:
        return await client.change(job_id, verb)


@cron.command(name="pause")
async def pause_job(job_id: str, *, home: HomeOption = None, config: ConfigOption = None) -> None:
    """Pause a job: its slots are skipped until it is resumed."""
    await _change(job_id, "pause", home, config)
    say(f"{job_id} is paused.")


@cron.command(name="resume")
async def resume_job(job_id: str, *, home: HomeOption = None, config: ConfigOption = None) -> None:
    """Resume a paused job with its next slot."""
    job = await _change(job_id, "resume", home, config)
    say(f"{job_id} is resumed; next: {job['next_run_at']}")


@cron.command(name="run")
async def run_job(job_id: str, *, home: HomeOption = None, config: ConfigOption = None) -> None:
    """Run a job now. Needs a running server."""
    await _change(job_id, "run", home, config)
    say(f"{job_id} runs.")


@cron.command(name="remove")
async def remove_job(job_id: str, *, home: HomeOption = None, config: ConfigOption = None) -> None:
    """Delete a job."""
    await _change(job_id, "remove", home, config)
    say(f"{job_id} is removed.")


# -- inbox -------------------------------------------------------------------------------------------------------------------------


@inbox.default
@inbox.command(name="list")
async def list_inbox(
    *,
    state: Annotated[str, Parameter(help="dead, pending, taken, abandoned or interrupted.")] = "dead",
    limit: Annotated[int, Parameter(help="The maximum number of results.")] = 50,
    home: HomeOption = None,
    config: ConfigOption = None,
) -> None:
    """List messages and notices; by default the dead letters."""
    from hermes_trio.commands.clients import open_rows
    from hermes_trio.store.records import InboxState

    try:
        wanted = InboxState(state)
    except ValueError:
        raise CommandFailed(
            f"{state!r} is not a state; states are {', '.join(one.value for one in InboxState)}"
        ) from None
    async with open_rows(_configuration(home, config)) as store:
        rows = await store.list_inbox(wanted, Page(limit))
    if not rows:
        say(f"There are no {wanted.value} messages or notices.")
    for row, reason in rows:
        made = time.strftime(TIME, time.localtime(row.created_at))
        text = " ".join(row.text.split())[:80]
        say(f"{row.id}  {made}  {row.session_key}  {row.kind.value}  {row.attempts} attempts  {reason or '-'}  {text}")


@inbox.command(name="retry")
async def retry_inbox(
    *numbers: Annotated[int, Parameter(help="The numbers that `inbox list` shows.")],
    home: HomeOption = None,
    config: ConfigOption = None,
) -> None:
    """Queue dead letters again. A running server takes them with the next message of their conversation, else at its next start."""
    from hermes_trio.commands.clients import open_rows

    if not numbers:
        raise CommandFailed("name at least one number; `hermes-trio inbox list` shows them")
    async with open_rows(_configuration(home, config)) as store:
        for number in numbers:
            if not await store.revive_inbox(number):
                raise CommandFailed(f"{number} is not a dead letter; `hermes-trio inbox list` shows those that are")
            say(f"{number} waits again.")


# -- grants ------------------------------------------------------------------------------------------------------------------------


@grants.default
@grants.command(name="list")
async def list_grants(*, home: HomeOption = None, config: ConfigOption = None) -> None:
    """List what was allowed with `always`, for a session, or for a run."""
    from hermes_trio.commands.clients import open_rows

    async with open_rows(_configuration(home, config)) as store:
        known = await store.list_grants()
    if not known:
        say("Nothing was allowed beforehand, except by `approvals.allow` of the configuration.")
    for grant in known:
        say(f"{grant.id}  {time.strftime(TIME, time.localtime(grant.granted_at))}  {grant.scope}  {grant.category}")


@grants.command(name="revoke")
async def revoke_grants(
    *ids: Annotated[str, Parameter(help="The ids that `grants list` shows.")],
    home: HomeOption = None,
    config: ConfigOption = None,
) -> None:
    """Revoke grants. A running server asks about such commands again, from the next one on."""
    from hermes_trio.commands.clients import open_rows

    if not ids:
        raise CommandFailed("name at least one id; `hermes-trio grants list` shows them")
    async with open_rows(_configuration(home, config)) as store:
        known = {grant.id: grant for grant in await store.list_grants()}
        for id in ids:
            grant = known.get(id)
            if grant is None or not await store.revoke_grant(grant.category, scope=grant.scope):
                raise CommandFailed(f"there is no grant {id}; `hermes-trio grants list` shows those that there are")
            say(f"{id} is revoked: {grant.category} is asked about again.")


# -- outbox ------------------------------------------------------------------------------------------------------------------------


@outbox.default
@outbox.command(name="list")
async def list_outbox(
    *,
    state: Annotated[str, Parameter(help="dead, pending, attempting or sent.")] = "dead",
    platform: Annotated[str | None, Parameter(help="Only replies to this platform.")] = None,
    limit: Annotated[int, Parameter(help="The maximum number of results.")] = 50,
    home: HomeOption = None,
    config: ConfigOption = None,
) -> None:
    """List replies; by default the dead letters."""
    from hermes_trio.commands.clients import open_rows
    from hermes_trio.store.records import OutboxState

    try:
        wanted = OutboxState(state)
    except ValueError:
        raise CommandFailed(
            f"{state!r} is not a state; states are {', '.join(one.value for one in OutboxState)}"
        ) from None
    async with open_rows(_configuration(home, config)) as store:
        rows = await store.list_outbox(wanted, Page(limit), platform=platform)
    if not rows:
        say(f"There are no {wanted.value} replies.")
    for row in rows:
        chat_id = ":".join(str(part) for part in (row.target.get("chat_id"), row.target.get("thread_id")) if part)
        made = time.strftime(TIME, time.localtime(row.created_at))
        text = " ".join(row.text.split())[:80]
        say(f"{row.id}  {made}  {row.platform}:{chat_id}  {row.attempts} attempts  {row.error or '-'}  {text}")


@outbox.command(name="retry")
async def retry_outbox(
    *numbers: Annotated[int, Parameter(help="The numbers that `outbox list` shows; default: all dead letters.")],
    home: HomeOption = None,
    config: ConfigOption = None,
) -> None:
    """Queue dead letters again. A running server sends them with its next reply, at the latest after a minute."""
    from hermes_trio.commands.clients import open_rows
    from hermes_trio.store.records import OutboxState

    async with open_rows(_configuration(home, config)) as store:
        wanted = list(numbers) or [row.id for row in await store.list_outbox(OutboxState.DEAD, Page(10_000))]
        revived = [number for number in wanted if await store.revive_outbox(number)]
    for number in wanted:
        if number not in revived:
            raise CommandFailed(f"{number} is not a dead letter; `hermes-trio outbox list` shows those that there are")
    say(f"{len(revived)} queued again.")


# -- pairing -----------------------------------------------------------------------------------------------------------------------


@pairing.command(name="approve")
async def approve_pairing(
    platform: Annotated[str, Parameter(help="The name of the platform, such as telegram.")],
    code: Annotated[str, Parameter(help="The code that the person was shown.")],
    *,
    home: HomeOption = None,
    config: ConfigOption = None,
) -> None:
    """Approve a pairing code: its user may talk to the agent."""
    from hermes_trio.commands.clients import open_rows

    async with open_rows(_configuration(home, config)) as store:
        user = await store.redeem_pairing(platform, code)
    if user is None:
        raise CommandFailed(f"there is no open code {code} for {platform}; codes are valid for an hour")
    say(f"{user.user_name or user.user_id} ({user.user_id}) may talk to the agent on {platform}.")


@pairing.default
@pairing.command(name="list")
async def list_pairings(*, home: HomeOption = None, config: ConfigOption = None) -> None:
    """List open pairing codes and allowed users."""
    from hermes_trio.commands.clients import open_rows

    async with open_rows(_configuration(home, config)) as store:
        waiting, allowed = await store.list_pairings(), await store.list_allowed()
    for one in waiting:
        say(
            f"waits    {one.platform}  {one.user_id}  {one.user_name}  since {time.strftime(TIME, time.localtime(one.created_at))}"
        )
    for user in allowed:
        say(f"allowed  {user.platform}  {user.user_id}  {user.user_name}")
    if not waiting and not allowed:
        say("There are no pairing requests, and no user was allowed by a code.")


@pairing.command(name="allow")
async def allow_user(
    platform: str, user_id: str, *, name: str = "", home: HomeOption = None, config: ConfigOption = None
) -> None:
    """Add a user to a platform's allow-list."""
    from hermes_trio.commands.clients import open_rows

    async with open_rows(_configuration(home, config)) as store:
        await store.allow_user(platform, user_id, user_name=name)
    say(f"{user_id} may talk to the agent on {platform}.")


@pairing.command(name="revoke")
async def revoke_user(platform: str, user_id: str, *, home: HomeOption = None, config: ConfigOption = None) -> None:
    """Remove a user from a platform's allow-list."""
    from hermes_trio.commands.clients import open_rows

    async with open_rows(_configuration(home, config)) as store:
        if not await store.disallow_user(platform, user_id):
            raise CommandFailed(
                f"{user_id} is not on the allow-list of {platform}; users in the configuration file are removed there"
            )
    say(f"{user_id} may not talk to the agent on {platform} any more.")
