"""`ApiCore`: what the handlers share, and what the API needs of other layers, as small Protocols.

Of a Runtime it sees only the stateless entry, the tree and the drain. It has no access to a channel.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Final, Protocol

import msgspec
import trio

from hermes_trio.base.structs import RedactedStruct
from hermes_trio.runtime.admission import SessionLocks
from hermes_trio.runtime.errors import Draining
from hermes_trio.runtime.ids import Ids
from hermes_trio.runtime.membership import Membership
from hermes_trio.runtime.outcome import Cause
from hermes_trio.runtime.peers import Peers, all_of
from hermes_trio.runtime.ports import KEY_TOPIC, NodeRequest
from hermes_trio.runtime.stateless import StatelessEntry
from hermes_trio.runtime.stop_receipt import StopReceipt
from hermes_trio.runtime.supervisor import Supervisor
from hermes_trio.runtime.tree import Tree
from hermes_trio.store.ports import Store

from .api.approvals import ApprovalsPort, NoApprovals
from .auth import Keyring
from .idempotency import IdempotentReplies
from .limits import RateLimiter, ReaderLimit
from .load import LoadHistory
from .metrics import Metrics
from .routing import Route
from .settings import Limits, ServerSettings
from .signin import SharedSignIn, SignIn
from .turns import ApiTurns


class DrainProof(Protocol):
    """The report of a finished drain."""

    @property
    def ok(self) -> bool: ...

    def as_dict(self) -> dict[str, Any]: ...


class RuntimePort(Protocol):
    """The part of the runtime that the API uses."""

    stateless: StatelessEntry

    @property
    def tree(self) -> Tree: ...

    @property
    def supervisor(self) -> Supervisor: ...

    @property
    def membership(self) -> Membership: ...

    @property
    def peers(self) -> Peers: ...

    @property
    def draining(self) -> bool: ...

    @property
    def unwritten(self) -> list[str]: ...

    def start_receiver(self, name: str, function: Callable[[], Awaitable[object]]) -> None: ...

    async def drain(self, seconds: float) -> DrainProof: ...

    async def stop_session(self, session_id: str, cause: Cause | None = None) -> list[StopReceipt]: ...


class CronPort(Protocol):
    """The scheduler, as the job routes use it. Jobs are plain JSON objects with at least an `id`."""

    async def list_jobs(self, tenant: str | None, *, include_disabled: bool) -> list[dict[str, Any]]: ...

    async def create_job(self, tenant: str, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Create a job. Raises `ValueError` for a wrong field."""
        ...

    async def get_job(self, tenant: str | None, job_id: str) -> dict[str, Any] | None: ...

    async def update_job(self, tenant: str | None, job_id: str, fields: Mapping[str, Any]) -> dict[str, Any] | None:
        """Change a job; return None if there is none. Raises `ValueError` for a wrong field."""
        ...

    async def delete_job(self, tenant: str | None, job_id: str) -> bool: ...

    async def pause_job(self, tenant: str | None, job_id: str) -> dict[str, Any] | None: ...

    async def resume_job(self, tenant: str | None, job_id: str) -> dict[str, Any] | None: ...

    async def run_job(self, tenant: str | None, job_id: str) -> dict[str, Any] | None: ...

    async def executions(self, tenant: str | None, job_id: str, limit: int = 20) -> list[dict[str, Any]] | None:
        """Return the newest slots of a job; None if there is no such job."""
        ...


class ModelEntry(msgspec.Struct, frozen=True):
    """A model that clients may choose. `root` is the real model behind an alias."""

    id: str
    root: str = ""
    parent: str | None = None


class DrainControl:
    """The drain of this server: done by the first caller, awaited by all others."""

    def __init__(self, runtime: RuntimePort) -> None:
        self._runtime = runtime
        self._attempt: trio.Event | None = None
        self.report: dict[str, Any] | None = None
        """The report of the drain, after it has ended."""

    async def run(self, seconds: float) -> dict[str, Any]:
        """Drain, or wait for the drain that is in progress; return its report.

        If the draining caller is cancelled, new work stays refused, and the next caller continues the drain.
        """
        while self.report is None:
            if self._attempt is not None:
                await self._attempt.wait()
                continue
            attempt = self._attempt = trio.Event()
            try:
                self.report = (await self._runtime.drain(seconds)).as_dict()
            finally:
                self._attempt = None
                attempt.set()
        return self.report


class ApiSettings(RedactedStruct, frozen=True, kw_only=True):
    """The settings of the API."""

    hidden: ClassVar[tuple[str, ...]] = ("admin_key",)
    admin_key: str
    server: ServerSettings = ServerSettings()
    limits: Limits = Limits()
    models: tuple[ModelEntry, ...] = ()
    version: str = ""
    home: Path | None = None


class ApiServices(msgspec.Struct, frozen=True, kw_only=True):
    """What the API uses of the rest of the gateway. A service that is None is not configured, and its routes say so."""

    approvals: ApprovalsPort | None = None
    cron: CronPort | None = None
    platforms: Callable[[], Mapping[str, Any]] | None = None
    """The state of the adapters, for the health report."""
    confinement: Callable[[], Mapping[str, Any]] | None = None
    """How commands are confined: `status` is ok or degraded."""
    mcp: Callable[[], Mapping[str, Mapping[str, Any]]] | None = None
    """The state of the MCP servers, by name."""


NO_SERVICES: Final = ApiServices()

SHOW_RESPONSE: Final = "response"
SHOW_SECONDS: Final = 2.0
"""Seconds that another node may take to return a response in progress."""


class ApiCore:
    """What the handlers share. Made once for each server; it owns no task and nothing that must be closed."""

    def __init__(
        self, runtime: RuntimePort, store: Store, settings: ApiSettings, services: ApiServices = NO_SERVICES
    ) -> None:
        server, limits, home = settings.server, settings.limits, settings.home
        self.runtime = runtime
        self.store = store
        self.server = server
        self.limits = limits
        self.models = list(settings.models) or [ModelEntry(server.model_name, server.model_name)]
        self.services = services
        self.approvals: ApprovalsPort = NoApprovals() if services.approvals is None else services.approvals
        self.version = settings.version
        self.home = home
        self.routes: list[Route] = []
        """The route table, set by the application."""
        self.health_body: bytes | None = None
        self.openapi_body: bytes | None = None
        self.ids = Ids()
        self.started_at: float = time.time()
        self.keyring = Keyring(settings.admin_key, store)
        shared = SharedSignIn(store, runtime.membership) if store.lease_seconds > 0 else None
        self.signin = SignIn(self.keyring, host=server.host, hosts=server.hosts, home=home, shared=shared)
        self._revocations = store.subscribe(KEY_TOPIC, self._forget_key)
        self._revocations.__enter__()  # not cancelled: the store closes after everything that uses it here
        self.rate = RateLimiter(
            limits.requests_per_minute, limits.burst, runtime.membership if store.lease_seconds > 0 else None
        )
        self.readers = ReaderLimit(limits.event_readers)
        self.turns = ApiTurns(runtime.stateless, store, limits, store.node_name if self.shared else "")
        self.replies = IdempotentReplies(store, runtime.membership)
        self.metrics = Metrics(self)
        self.load = LoadHistory()
        self.drain = DrainControl(runtime)
        self.conversations = SessionLocks()
        """Serialises turns of one named conversation of responses."""
        self.live_responses: dict[str, tuple[str, Callable[[], bytes]]] = {}
        """Responses in progress: tenant and body, by id."""
        if self.shared:
            self._shown = runtime.membership.answering(SHOW_RESPONSE, self._show_response)
            self._shown.__enter__()  # for as long as this process is a node

    async def _show_response(self, asked: NodeRequest) -> Mapping[str, Any]:
        """Return the tenant and the body of a response that is being made here, for another node that was asked for it."""
        live = self.live_responses.get(asked.target)
        return {} if live is None else {"tenant": live[0], "body": live[1]().decode()}

    async def live_elsewhere(self, response_id: str) -> tuple[str, bytes] | None:
        """Return the tenant and the body of a response that another node is making; None if no node reports it in time."""
        found: list[tuple[str, bytes]] = []

        async def ask(node: str) -> None:
            answer = await self.runtime.membership.ask(node, SHOW_RESPONSE, response_id, seconds=SHOW_SECONDS)
            if answer is not None and "body" in answer.value:
                found.append((answer.value["tenant"], answer.value["body"].encode()))
                enough.cancel()

        others = [node.incarnation for node in await self.store.list_nodes() if node.incarnation != self.store.owner]
        with trio.CancelScope() as enough:
            await all_of([partial(ask, node) for node in others])
        return found[0] if found else None

    @property
    def shared(self) -> bool:
        """Return whether other nodes may use the store: then a run that is not live here may be live there."""
        return self.store.lease_seconds > 0

    def _forget_key(self, key_id: str) -> None:
        """Drop a key that was revoked, here or on another node, from the cache."""
        if self.keyring.forget(key_id):
            self.signin.forget(key_id)

    def check_intake(self) -> None:
        """Raise if new work is refused. Reads are answered anyway."""
        if self.runtime.draining:
            raise Draining()

    @property
    def public_model(self) -> str:
        """Return the name of the default model, for responses to requests that named none."""
        return self.models[0].id
