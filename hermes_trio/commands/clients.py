"""How the gateway's commands reach what they change: the running server if there is one, else the store itself.

Jobs belong to the scheduler of the running server, so that they are changed over its HTTP API. Dead letters and allow-lists are rows that a server
reads when it needs them; they are changed in small transactions beside it.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final, Protocol, TypeVar, cast

import httpx2
import msgspec

from hermes_trio.adapters.assembly import build_assembly
from hermes_trio.adapters.cli.chat import CLI
from hermes_trio.adapters.cron.jobs import changed_job, job_view, new_job
from hermes_trio.base.settings import read_settings
from hermes_trio.commands.options import CommandFailed, server_client, unanswered
from hermes_trio.config import SECTIONS, Config
from hermes_trio.messaging.settings import CronSettings
from hermes_trio.runtime.ids import Ids
from hermes_trio.runtime.ports import InboxRow, Message
from hermes_trio.store import Page, SessionFilter, StoreInUse
from hermes_trio.store.backend import open_backend
from hermes_trio.store.errors import StoreError
from hermes_trio.store.ports import Store
from hermes_trio.store.records import (
    AllowedUser,
    InboxState,
    NewSession,
    OutboxRow,
    OutboxState,
    PairingRequest,
    SessionRow,
)
from hermes_trio.store.sqlite import access as access_rows
from hermes_trio.store.sqlite import inbox as inbox_rows
from hermes_trio.store.sqlite import outbox as outbox_rows
from hermes_trio.store.sqlite import sessions as session_rows
from hermes_trio.store.sqlite import transcript
from hermes_trio.store.sqlite.files import connect, connect_reader
from hermes_trio.store.sqlite.rows import Database
from hermes_trio.store.sqlite.schema import VERSION, version_of
from hermes_trio.store.sqlite.writer import run_now

__all__ = ["CronClient", "Rows", "bring_conversation", "open_cron", "open_rows"]

T = TypeVar("T")

RECENT: Final = 20
"""Conversations among which the last one with a message is looked for."""


# -- jobs --------------------------------------------------------------------------------------------------------------------------


class CronClient(Protocol):
    """Either way to the jobs; they are plain objects, as the HTTP API answers them."""

    async def list(self) -> list[dict[str, Any]]:
        """All jobs."""
        ...

    async def get(self, job_id: str) -> dict[str, Any]:
        """One job."""
        ...

    async def create(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Make a job."""
        ...

    async def change(self, job_id: str, verb: str) -> dict[str, Any]:
        """`pause`, `resume`, `run` or `remove` a job."""
        ...


@asynccontextmanager
async def open_cron(config: Config) -> AsyncIterator[CronClient]:
    """The jobs of a home directory, for the body of the `async with`."""
    config.home.mkdir(mode=0o700, parents=True, exist_ok=True)
    try:
        async with open_backend(config.place) as store:
            yield _JobsInStore(store, config)
            return
    except StoreInUse:
        pass
    async with server_client(config) as client:
        yield _JobsOverHttp(client)


def _unknown(job_id: str) -> CommandFailed:
    return CommandFailed(f"there is no job {job_id}; `hermes-trio cron list` shows those that there are")


class _JobsInStore:
    """No server runs: the store is ours, and the next server finds what is written."""

    def __init__(self, store: Store, config: Config) -> None:
        self._store = store
        self._settings = read_settings(config.cron, CronSettings, "cron")
        tables = {name: cast("Mapping[str, Any]", getattr(config, name)) for name in SECTIONS}
        tables["plugins"] = config.plugins.adapters
        assembly = build_assembly(tables, environment=config.environment, host=config.server.host)
        self._platforms = assembly.directory.platforms

    async def list(self) -> list[dict[str, Any]]:
        return [await self.get(row.id) for row in await self._store.list_cron_jobs()]

    async def get(self, job_id: str) -> dict[str, Any]:
        row = await self._store.get_cron_job(job_id)
        if row is None:
            raise _unknown(job_id)
        latest = await self._store.list_cron_executions(job_id, Page(1))
        return job_view(row, latest[0] if latest else None)

    async def create(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        try:
            row = new_job(
                fields,
                id=Ids().hex(12),
                tenant="",
                now=time.time(),
                timezone=self._settings.timezone,
                platforms=self._platforms,
            )
        except ValueError as error:
            raise CommandFailed(str(error)) from None
        return await self.get((await self._store.put_cron_job(row)).id)

    async def change(self, job_id: str, verb: str) -> dict[str, Any]:
        row = await self._store.get_cron_job(job_id)
        if row is None:
            raise _unknown(job_id)
        if verb == "run":
            raise CommandFailed("no server runs in this home directory, so there is nobody to run it; start one first")
        if verb == "remove":
            await self._store.delete_cron_job(job_id)
            return {}
        changed = changed_job(
            row,
            {"enabled": verb == "resume"},
            now=time.time(),
            timezone=self._settings.timezone,
            platforms=self._platforms,
        )
        await self._store.put_cron_job(changed)
        return await self.get(job_id)


class _JobsOverHttp:
    """A server runs: ask it."""

    def __init__(self, client: httpx2.AsyncClient) -> None:
        self._client = client

    async def _ask(self, method: str, path: str, body: Any = None) -> dict[str, Any]:
        try:
            content = None if body is None else msgspec.json.encode(body)
            answer = await self._client.request(method, path, content=content)
        except httpx2.HTTPError as error:
            raise unanswered(self._client, error) from None
        try:
            decoded = cast("dict[str, Any]", msgspec.json.decode(answer.content))
        except msgspec.DecodeError:
            raise CommandFailed(f"{self._client.base_url} answered {answer.status_code}, not with JSON") from None
        if answer.status_code >= 400:
            raise CommandFailed(str(decoded.get("error", {}).get("message", decoded)))
        return decoded

    async def list(self) -> list[dict[str, Any]]:
        return (await self._ask("GET", "/api/jobs?include_disabled=true"))["jobs"]

    async def get(self, job_id: str) -> dict[str, Any]:
        return (await self._ask("GET", f"/api/jobs/{job_id}"))["job"]

    async def create(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        return (await self._ask("POST", "/api/jobs", dict(fields)))["job"]

    async def change(self, job_id: str, verb: str) -> dict[str, Any]:
        if verb == "remove":
            return await self._ask("DELETE", f"/api/jobs/{job_id}")
        return (await self._ask("POST", f"/api/jobs/{job_id}/{verb}"))["job"]


# -- rows --------------------------------------------------------------------------------------------------------------------------


class Rows:
    """Verbs of the store, each a transaction of its own on a connection beside whoever else has the database open."""

    def __init__(self, db: Database, path: str) -> None:
        self._db = db
        self._path = path

    def _run(self, verb: Callable[..., T], *args: Any) -> T:
        return run_now(self._db, self._path, verb, *args)

    async def list_outbox(self, state: OutboxState, page: Page, *, platform: str | None = None) -> list[OutboxRow]:
        """Replies in a state, oldest first."""
        return self._run(outbox_rows.listed, state.value, platform, page)

    async def list_inbox(self, state: InboxState, page: Page) -> list[tuple[InboxRow, str]]:
        """Rows of the inboxes in a state, each with its reason, oldest first."""
        return self._run(inbox_rows.listed, state.value, page)

    async def revive_inbox(self, number: int) -> bool:
        """Let a dead letter of an inbox wait again."""
        return self._run(inbox_rows.revive_row, time.time(), number)

    async def revive_outbox(self, number: int) -> bool:
        """Queue a dead letter again."""
        return self._run(outbox_rows.revive, time.time(), number)

    async def redeem_pairing(self, platform: str, code: str) -> AllowedUser | None:
        """Approve a pairing code."""
        return self._run(access_rows.redeem, time.time(), platform, access_rows._hash(platform, code))

    async def list_pairings(self) -> list[PairingRequest]:
        """Everybody who has an open code."""
        return self._run(access_rows.waiting, time.time(), None)

    async def list_allowed(self) -> list[AllowedUser]:
        """Everybody on the allow-lists of the store."""
        return self._run(access_rows.allowed, None)

    async def allow_user(self, platform: str, user_id: str, *, user_name: str = "") -> AllowedUser:
        """Put somebody on an allow-list."""
        return self._run(access_rows.allow, time.time(), platform, user_id, user_name)

    async def disallow_user(self, platform: str, user_id: str) -> bool:
        """Take somebody off."""
        return self._run(access_rows.disallow, platform, user_id)


@asynccontextmanager
async def open_rows(config: Config) -> AsyncIterator[Rows | Store]:
    """The rows of a home directory, for the body of the `async with`."""
    if config.store.url:
        async with open_backend(config.place) as store:
            yield store
        return
    path = config.database
    if not path.exists():
        raise CommandFailed(f"there is no store at {path}; name its directory with --home, or start the server once")
    db = connect(str(path))
    try:
        found = version_of(db)
        if found != VERSION:
            raise StoreError(
                f"{path} has schema version {found}, this program works with {VERSION}; start the server once"
            )
        yield Rows(db, str(path))
    finally:
        db.close()


# -- conversations of the terminal -------------------------------------------------------------------------------------------------


async def bring_conversation(store: Store, wanted: str, other: Path) -> None:
    """Copy a conversation of the terminal from another database of the same home into `store`, if it is missing or older there.

    While a server owns one database, the terminal's conversations are kept in another; both are looked at, and the one that was used last counts.
    `wanted` is a session's id, or `last`. A database that is not there, or not of this version, holds nothing.
    """
    found = _conversation_in(other, wanted)
    if found is None:
        return
    there, history = found
    if wanted == "last":
        known = [one for one in await store.list_sessions(SessionFilter(source=CLI), Page(RECENT)) if one.message_count]
        if known and known[0].last_active >= there.last_active:
            return
    here = await store.get_session(there.id)
    if here is None:
        await store.create_session(NewSession(id=there.id, source=CLI))
        await store.append_messages(there.id, history)
    elif here.last_active < there.last_active:
        await store.replace_history(there.id, history)


def _conversation_in(path: Path, wanted: str) -> tuple[SessionRow, list[Message]] | None:
    """A conversation of the terminal and its transcript, read beside whoever has the database open."""
    if not path.exists():
        return None
    db = connect_reader(str(path))
    try:
        if version_of(db) != VERSION:
            return None
        if wanted == "last":
            recent = session_rows.list_sessions(db, SessionFilter(source=CLI), Page(RECENT))
            session = next((one for one in recent if one.message_count), None)
        else:
            session = session_rows.get_session(db, wanted)
        if session is None or session.source != CLI:
            return None
        return session, transcript.history(db, session.id)
    finally:
        db.close()
