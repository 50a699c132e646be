"""Opens what the commands change: through the running server if there is one, else in the store.

Jobs belong to the scheduler of a running server, so they are changed over its HTTP API. Dead letters and allow-lists are rows that a server reads
when it needs them; they are changed beside it, in small transactions.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Mapping
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
from hermes_trio.config import Config
from hermes_trio.messaging.settings import CronSettings
from hermes_trio.runtime.ids import Ids
from hermes_trio.store import Page, SessionFilter, StoreInUse
from hermes_trio.store.backend import open_backend, open_blocking
from hermes_trio.store.errors import StoreError
from hermes_trio.store.ports import Store
from hermes_trio.store.records import (
    NewSession,
    SessionRow,
)

T = TypeVar("T")

RECENT: Final = 20
"""The number of recent conversations among which the last one with a message is searched."""


# -- jobs --------------------------------------------------------------------------------------------------------------------------


class CronClient(Protocol):
    """Reads and changes scheduled jobs. A job is a plain object, as the HTTP API returns it."""

    async def list(self) -> list[dict[str, Any]]:
        """Return all jobs."""
        ...

    async def get(self, job_id: str) -> dict[str, Any]:
        """Return one job. Raises `CommandFailed` if there is none."""
        ...

    async def create(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Create a job."""
        ...

    async def change(self, job_id: str, verb: str) -> dict[str, Any]:
        """`pause`, `resume`, `run` or `remove` a job."""
        ...


@asynccontextmanager
async def open_cron(config: Config) -> AsyncIterator[CronClient]:
    """Open the jobs of a home directory for the body of the `async with`."""
    config.home.mkdir(mode=0o700, parents=True, exist_ok=True)
    try:
        async with open_backend(config.place) as store:
            yield _JobsInDatabase(store, config) if config.store.url else _JobsInStore(store, config)
            return
    except StoreInUse:
        pass
    async with server_client(config) as client:
        yield _JobsOverHttp(client)


def _unknown(job_id: str) -> CommandFailed:
    return CommandFailed(f"there is no job {job_id}; `hermes-trio cron list` shows those that there are")


class _JobsInStore:
    """Changes jobs in the store, while no server runs. The next server reads them."""

    def __init__(self, store: Store, config: Config) -> None:
        self._store = store
        self._config = config
        self._settings = read_settings(config.cron, CronSettings, "cron")
        assembly = build_assembly(config.tables, environment=config.environment, host=config.server.host)
        self._platforms = assembly.platforms.names

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
            raise CommandFailed("no server runs in this home directory; start one to run the job")
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


class _JobsInDatabase(_JobsInStore):
    """Changes jobs in a database that servers use at the same time; they are signalled. The server of this home directory runs a job at once."""

    async def change(self, job_id: str, verb: str) -> dict[str, Any]:
        if verb != "run":
            return await super().change(job_id, verb)
        await self.get(job_id)
        async with server_client(self._config) as client:
            try:
                await client.get("/health")
            except httpx2.HTTPError as error:
                raise CommandFailed(
                    f"no server answers at {client.base_url}: {type(error).__name__}. Run this where one does, with its --home, or"
                    " set API_SERVER_HOST, API_SERVER_PORT and API_SERVER_KEY to its address and key"
                ) from None
            return await _JobsOverHttp(client).change(job_id, verb)


class _JobsOverHttp:
    """Changes jobs through the running server."""

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


@asynccontextmanager
async def open_rows(config: Config) -> AsyncIterator[Store]:
    """Open the store of a home directory beside its server, for the body of the `async with`. Raises `StoreError` if there is none.

    A database is joined as a node, so that the other nodes get signals of its writes. The server of a file reads the rows when it needs them.
    """
    if config.store.url:
        async with open_backend(config.place) as store:
            yield store
        return
    with open_blocking(config.database) as store:
        yield store


# -- conversations of the terminal -------------------------------------------------------------------------------------------------


async def bring_conversation(store: Store, wanted: str, other: Path) -> None:
    """Copy a conversation of the terminal from another database of the same home into `store`, if it is missing or older there.

    While a server owns one database, the terminal keeps its conversations in another; the one that was used last counts. `wanted` is a session's id,
    or `last`. A database that does not exist, or has another schema version, holds no conversation.
    """
    try:
        with open_blocking(other, read_only=True) as there:
            found = await _last_conversation(there) if wanted == "last" else await there.get_session(wanted)
            if found is None or found.source != CLI:
                return
            history = await there.load_history(found.id)
    except StoreError:
        return
    if wanted == "last":
        known = await _last_conversation(store)
        if known is not None and known.last_active >= found.last_active:
            return
    here = await store.get_session(found.id)
    if here is None:
        await store.create_session(NewSession(id=found.id, source=CLI))
        await store.append_messages(found.id, history)
    elif here.last_active < found.last_active:
        await store.replace_history(found.id, history)


async def _last_conversation(store: Store) -> SessionRow | None:
    recent = await store.list_sessions(SessionFilter(source=CLI), Page(RECENT))
    return next((session for session in recent if session.message_count), None)
