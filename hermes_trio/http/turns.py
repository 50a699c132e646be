"""Starts the turns of HTTP requests. Every turn has platform `api_server`, the real session id and key, and chat id = session id.

It also chooses the session of a request: one that its client named and owns, or one derived from the opening of the conversation. Two concurrent
requests do not share a derived session: the second gets another one, which other nodes do not use. The ids of derived sessions are keyed with the
store's secret, so that no other tenant can guess them; a named session has its row, with its tenant, before its first turn begins.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Coroutine
from hashlib import blake2b
from types import TracebackType
from typing import Any, Final, final

import msgspec

from hermes_trio.runtime.budget import Budget
from hermes_trio.runtime.context import SessionContext
from hermes_trio.runtime.outcome import Outcome
from hermes_trio.runtime.ports import TurnInput
from hermes_trio.runtime.run import Run
from hermes_trio.runtime.stateless import StatelessEntry
from hermes_trio.runtime.turn import NO_HOOKS, TurnHooks, TurnSpec
from hermes_trio.store import NewSession
from hermes_trio.store.ports import SessionStore

from .auth import Principal
from .errors import not_found
from .inputs import is_reserved_id
from .settings import Limits

PLATFORM: Final = "api_server"


class SessionClaim(msgspec.Struct):
    """A session that a request may use: its owner, the session key that its client gave, and its own prompt.

    A derived session may be replaced by a `spare` one when its turn is started, because a turn of another node has it: `session_id` and `headers` are final
    after that.
    """

    session_id: str
    tenant: str
    key: str = ""
    prompt: str = ""
    key_id: str = ""
    """The API key of the request, which may determine how its commands are confined."""
    spare: Callable[[], str] | None = None
    """Returns the id of another derived session."""

    def context(self) -> SessionContext:
        """Return the context of the session's turns. A key that a client chooses is never another tenant's, or a chat's."""
        tenant = self.tenant
        owner = tenant.replace("%", "%25").replace(":", "%3A") if "%" in tenant or ":" in tenant else tenant
        return SessionContext(
            platform=PLATFORM,
            source=PLATFORM,
            session_id=self.session_id,
            session_key=f"api:{owner}:{self.key or self.session_id}",
            chat_id=self.session_id,
            key_id=self.key_id,
        )

    def take_spare(self) -> SessionContext:
        """Use the spare session instead; return its context."""
        assert self.spare is not None
        self.session_id, self.spare = self.spare(), None
        return self.context()

    def headers(self, run_id: str = "") -> list[tuple[bytes, bytes]]:
        """Return the response headers: the session, and the run of a detached request's turn."""
        headers = [(b"x-hermes-session-id", self.session_id.encode("latin-1", "replace"))]
        if self.key:
            headers.append((b"x-hermes-session-key", self.key.encode("latin-1", "replace")))
        if run_id:
            headers.append((b"x-hermes-run-id", run_id.encode()))
        return headers


class _Slots:
    """The numbers of derived sessions in use for one opening: the smallest free one is assigned."""

    __slots__ = ("_free", "_next", "held")

    def __init__(self) -> None:
        self._free: list[int] = []
        self._next = 0
        self.held = 0

    def take(self) -> int:
        self.held += 1
        if self._free:
            return heapq.heappop(self._free)
        self._next += 1
        return self._next - 1

    def give(self, slot: int) -> None:
        self.held -= 1
        heapq.heappush(self._free, slot)


@final
class DerivedSession:
    """`with turns.derived(…) as claim`: no other request of this node uses the session for the body of the `with`.

    The first one is derived alike by all nodes, so that a conversation stays in it whichever node it reaches; it has a spare.
    """

    __slots__ = ("_all", "_base", "_caller", "_key", "_node", "_slot", "_slots", "_spare")

    def __init__(self, all: dict[str, _Slots], base: str, node: str, caller: Principal, key: str) -> None:
        slots = all.get(base)
        if slots is None:
            slots = all[base] = _Slots()
        self._all = all
        self._base = base
        self._caller = caller
        self._key = key
        self._node = node
        self._slots = slots
        self._slot = slots.take()
        self._spare = 0

    def __enter__(self) -> SessionClaim:
        made = f"api-{self._base}{self._node}.{self._slot}" if self._slot else f"api-{self._base}"
        spare = self._take_spare if self._node and not self._slot else None
        return SessionClaim(made, self._caller.tenant, self._key, "", self._caller.key_id, spare)

    def _take_spare(self) -> str:
        self._spare = self._slots.take()
        return f"api-{self._base}{self._node}.{self._spare}"

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._slots.give(self._slot)
        if self._spare:
            self._slots.give(self._spare)
        if not self._slots.held:
            del self._all[self._base]


class ApiTurns:
    """Starts turns for callers. It owns nothing: a turn belongs to its request, a run to the runtime."""

    def __init__(self, stateless: StatelessEntry, store: SessionStore, limits: Limits, node: str = "") -> None:
        """Make the entry. `node` is the name of this node where others share the store: the sessions that they derive for concurrent requests differ."""
        self._stateless = stateless
        self._store = store
        self._budget: Budget | None = Budget(seconds=limits.turn_seconds) if limits.turn_seconds else None
        self._derived: dict[str, _Slots] = {}
        self._node: str = f".{blake2b(node.encode('utf-8', 'replace'), digest_size=6).hexdigest()}" if node else ""

    # -- which session -----------------------------------------------------------------------------------------------------------

    def derived(self, caller: Principal, opening: str, key: str) -> DerivedSession:
        """Return a session whose id comes from the tenant and the opening of a conversation, unused by other requests meanwhile."""
        told = f"{caller.tenant}\0{opening}".encode("utf-8", "replace")
        base = blake2b(told, key=self._store.secret, digest_size=16).hexdigest()
        return DerivedSession(self._derived, base, self._node, caller, key)

    @staticmethod
    def own(caller: Principal, session_id: str, key: str = "", tenant: str | None = None) -> SessionClaim:
        """Return a session that is known to be the caller's: one that this request makes, or one whose row was read."""
        return SessionClaim(session_id, caller.tenant if tenant is None else tenant, key, "", caller.key_id)

    async def named(self, caller: Principal, session_id: str, key: str = "", *, resumes: bool = False) -> SessionClaim:
        """Return a session that the client named. Raises 404 if it is another tenant's. Its turns are those of its tenant, also if an admin starts
        them.

        One that does not exist is created at once, so that its owner is known to every process. Ids that the server makes are not created by naming
        them, unless the request `resumes` a session that it was given.
        """
        record = await self._store.get_session(session_id)
        if record is None:
            if is_reserved_id(session_id) and not resumes:
                raise not_found("session", session_id, "session_not_found")
            self._stateless.check_room()  # a turn that is refused anyway leaves no session behind
            # Its own key, not that of this request: other requests may come with another.
            routing = SessionClaim(session_id, caller.tenant).context()
            record = await self._store.claim_session(
                NewSession(
                    id=session_id,
                    source=PLATFORM,
                    tenant=caller.tenant,
                    session_key=routing.session_key,
                    routing=routing,
                )
            )
        elif not caller.owns(record.tenant):
            raise not_found("session", session_id, "session_not_found")
        prompt, _ = await self._store.session_prompt(session_id) if record.has_system_prompt else ("", None)
        return SessionClaim(session_id, record.tenant, key, prompt or "", caller.key_id)

    # -- turns -------------------------------------------------------------------------------------------------------------------

    def run(self, claim: SessionClaim, input: TurnInput, hooks: TurnHooks = NO_HOOKS) -> Coroutine[Any, Any, Outcome]:
        """Run a turn in this task; see `StatelessEntry.run_turn`. Cancelling means that the client has disconnected."""
        return self._stateless.run_turn(self._spec(claim, input, hooks))

    async def start(
        self,
        claim: SessionClaim,
        input: TurnInput,
        hooks: TurnHooks = NO_HOOKS,
        *,
        run_id: str,
        idempotency_key: str = "",
        fingerprint: str = "",
        resumable: bool = False,
    ) -> Run:
        """Start a run; it is durable when this returns. See `StatelessEntry.start_run`."""
        return await self._stateless.start_run(
            self._spec(claim, input, hooks),
            run_id=run_id,
            idempotency_key=idempotency_key,
            fingerprint=fingerprint,
            resumable=resumable,
        )

    def _spec(self, claim: SessionClaim, input: TurnInput, hooks: TurnHooks) -> TurnSpec:
        return TurnSpec(
            input=input,
            context=claim.context(),
            source=PLATFORM,
            tenant=claim.tenant,
            budget=self._budget,
            hooks=hooks,
            spare=None if claim.spare is None else claim.take_spare,
        )
