"""The one way in which HTTP starts turns. Every turn binds platform `api_server`, the real session id and key, and chat id = session id.

It also says which session a request talks to: one that its client named and that is its own, or one derived from how the conversation opens. Two
requests at once never share a derived session, because a conversation is one message after the other: the second gets a session beside it. The ids of
derived sessions are keyed with the store's secret, so that no other tenant can tell them; a named session has its row, with its tenant, before its
first turn begins.
"""

from __future__ import annotations

import heapq
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from hashlib import blake2b
from types import TracebackType
from typing import Any, Final, final

import msgspec

from hermes_trio.runtime.budget import Budget
from hermes_trio.runtime.context import SessionContext
from hermes_trio.runtime.outcome import Outcome
from hermes_trio.runtime.ports import Agent, Message, Reply, TurnInput
from hermes_trio.runtime.run import Run
from hermes_trio.runtime.stateless import StatelessEntry
from hermes_trio.runtime.turn import EventSink, Turn
from hermes_trio.store import NewSession, SessionRow
from hermes_trio.store.ports import SessionStore

from .auth import Principal
from .errors import not_found
from .inputs import is_reserved_id
from .settings import Limits

__all__ = ["PLATFORM", "ApiTurns", "Captured", "SessionClaim"]

PLATFORM: Final = "api_server"


class Captured(msgspec.Struct):
    """What the agent of a turn answered, beside what the outcome says: the messages that it added.

    For a turn that is a run: `tap` takes its events, beside the run's own log, and `on_end` is called after its end has been written down.
    """

    reply: Reply | None = None
    tap: EventSink | None = None
    on_end: Callable[[Outcome], Awaitable[None]] | None = None

    def messages(self, turn: Turn, outcome: Outcome) -> tuple[Message, ...]:
        """The turn's own messages, as far as it came."""
        said = self.reply or turn.progress
        if said is not None and said.messages:
            return said.messages
        asked = Message(role="user", content=turn.input.prompt)
        return (asked, Message(role="assistant", content=outcome.text)) if outcome.text else (asked,)


class SessionClaim(msgspec.Struct, frozen=True):
    """A session that a request may use, with the prompt of its own. It exists, and it is the caller's."""

    session_id: str
    record: SessionRow
    prompt: str = ""


class _Claimed:
    """The tenant of a session that requests use now, and how many of them do."""

    __slots__ = ("tenant", "uses")

    def __init__(self, tenant: str) -> None:
        self.tenant = tenant
        self.uses = 0


class _Slots:
    """Numbers of derived sessions in use at once for one opening: the smallest free one is given out."""

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
    """`with turns.derived(…) as session_id`: the id is in use for the body of the `with`."""

    __slots__ = ("_all", "_base", "_slot", "_slots")

    def __init__(self, all: dict[str, _Slots], base: str, slots: _Slots) -> None:
        self._all = all
        self._base = base
        self._slots = slots
        self._slot = slots.take()

    def __enter__(self) -> str:
        return f"api-{self._base}.{self._slot}" if self._slot else f"api-{self._base}"

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._slots.give(self._slot)
        if not self._slots.held:
            del self._all[self._base]


class ApiTurns:
    """Starts turns for callers. It owns nothing: a turn belongs to its request, a run to the runtime."""

    def __init__(self, stateless: StatelessEntry, store: SessionStore, limits: Limits) -> None:
        self._stateless = stateless
        self._store = store
        self._budget: Budget | None = Budget(seconds=limits.turn_seconds) if limits.turn_seconds else None
        self._derived: dict[str, _Slots] = {}
        self._claimed: dict[str, _Claimed] = {}

    # -- which session -----------------------------------------------------------------------------------------------------------

    def derived(self, caller: Principal, opening: str) -> DerivedSession:
        """A session id from the tenant and the opening of a conversation, not used by another request meanwhile."""
        told = f"{caller.tenant}\0{opening}".encode("utf-8", "replace")
        base = blake2b(told, key=self._store.secret, digest_size=16).hexdigest()
        slots = self._derived.get(base)
        if slots is None:
            slots = self._derived[base] = _Slots()
        return DerivedSession(self._derived, base, slots)

    @asynccontextmanager
    async def named(self, caller: Principal, session_id: str, *, resumes: bool = False) -> AsyncIterator[SessionClaim]:
        """A session that the client named, for the body of the `async with`; 404 if it is another tenant's.

        One that does not exist is made at once: whoever names it next, here or in another process, finds whose it is. Ids that the server makes
        are not made by naming them, unless the request `resumes` what it was given one for.
        """
        record = await self._store.get_session(session_id)
        if record is None:
            if is_reserved_id(session_id) and not resumes:
                raise not_found("session", session_id, "session_not_found")
            self._stateless.check_room()  # a turn that is refused anyway leaves no session behind
            routing = self.bound(caller.tenant, session_id)
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
        claimed = self._claimed.setdefault(session_id, _Claimed(record.tenant))
        claimed.uses += 1
        try:
            yield SessionClaim(session_id, record, prompt or "")
        finally:
            claimed.uses -= 1
            if not claimed.uses:
                del self._claimed[session_id]

    def _tenant(self, caller: Principal, session_id: str) -> str:
        """Whose turn it is: that of the session's tenant, where an admin talks to a session of another."""
        claimed = self._claimed.get(session_id)
        return caller.tenant if claimed is None or not caller.owns(claimed.tenant) else claimed.tenant

    @staticmethod
    def bound(tenant: str, session_id: str, session_key: str = "", key_id: str = "") -> SessionContext:
        """What every turn of the HTTP front end is bound to. No key that a client chooses is another tenant's, or a chat's."""
        owner = tenant.replace("%", "%25").replace(":", "%3A") if "%" in tenant or ":" in tenant else tenant
        return SessionContext(
            platform=PLATFORM,
            source=PLATFORM,
            session_id=session_id,
            session_key=f"api:{owner}:{session_key or session_id}",
            chat_id=session_id,
            key_id=key_id,
        )

    # -- turns -------------------------------------------------------------------------------------------------------------------

    async def run(
        self,
        caller: Principal,
        input: TurnInput,
        session_id: str,
        session_key: str = "",
        *,
        sink: EventSink | None = None,
        captured: Captured | None = None,
        also: Callable[[Turn, Outcome], Sequence[object]] | None = None,
        on_start: Callable[[Turn], None] | None = None,
    ) -> Outcome:
        """Run a turn in this task; see `StatelessEntry.run_turn`. Cancelling means that the client has left."""
        tenant = self._tenant(caller, session_id)
        return await self._stateless.run_turn(
            input,
            self.bound(tenant, session_id, session_key, caller.key_id),
            source=PLATFORM,
            tenant=tenant,
            agent=None if captured is None else _capturing(captured),
            budget=self._budget,
            sink=sink,
            also=also,
            on_start=on_start,
        )

    async def start(
        self,
        caller: Principal,
        input: TurnInput,
        session_id: str,
        session_key: str = "",
        *,
        run_id: str,
        idempotency_key: str = "",
        fingerprint: str = "",
        captured: Captured | None = None,
        also: Callable[[Turn, Outcome], Sequence[object]] | None = None,
    ) -> Run:
        """Start a run; it is durable when this returns. See `StatelessEntry.start_run`."""
        tenant = self._tenant(caller, session_id)
        return await self._stateless.start_run(
            input,
            self.bound(tenant, session_id, session_key, caller.key_id),
            run_id=run_id,
            source=PLATFORM,
            tenant=tenant,
            agent=None if captured is None else _capturing(captured),
            budget=self._budget,
            idempotency_key=idempotency_key,
            fingerprint=fingerprint,
            also=also,
            on_end=None if captured is None else captured.on_end,
        )


def _capturing(captured: Captured) -> Agent:
    async def agent(turn: Turn) -> Reply | str:
        if captured.tap is not None:
            turn.sink = _both(turn.sink, captured.tap)
        answer = await turn.core.agent(turn)
        captured.reply = Reply(text=answer) if isinstance(answer, str) else answer
        return answer

    return agent


def _both(first: EventSink | None, second: EventSink) -> EventSink:
    def sink(event: Mapping[str, Any]) -> None:
        if first is not None:
            first(event)
        second(event)

    return sink
