"""Asks a person for approval. Each request has an id and a row, belongs to a run or a conversation, and ends exactly once.

The row decides: an answer and a time-out that race are two transactions, and the second one fails, so that a blocked command is never reported as
approved. Where no person can be reached, the request is refused at once, with the reason.
"""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Final

import msgspec
import trio

from hermes_trio.runtime.ends import End
from hermes_trio.runtime.errors import OutcomeUnknown
from hermes_trio.runtime.ports import APPROVAL_TOPIC
from hermes_trio.runtime.tree import waiting
from hermes_trio.runtime.turn import EventSink, Turn
from hermes_trio.store.errors import StoreError
from hermes_trio.store.ports import ApprovalStore
from hermes_trio.store.records import ApprovalChoice, ApprovalRow, ApprovalState, NewApproval, Page, tenant_grantee

logger: Final = logging.getLogger("hermes_trio.agent.approvals")

DEFAULT_SECONDS: Final = 60.0
REASON_LENGTH: Final = 280

RETRY_SECONDS: Final = 1.0
"""The delay before a row that could not be read is read again."""

MOST_PER_SCOPE: Final = 20
"""How many questions of one run or conversation wait at a time: one answer of a model can hold any number of calls."""

MOST_PER_TENANT: Final = 200
"""How many questions of all runs of one tenant wait at a time on one node."""

MOST_LISTED: Final = 1000
"""The most questions of one scope that one call answers; several nodes may ask in it."""

NOT_SHOWN: Final = "the question could not be shown to any user"


_INVISIBLE: Final = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u00ad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b-\u200f\u2028-\u202e\u2060-\u206f"
    "\u3164\ud800-\udfff\ufe00-\ufe0f\ufeff\uffa0\ufff9-\ufffb\U000e0000-\U000e0fff]"
)


def visible(command: str) -> str:
    """Escape each control, bidirectional and invisible character of a command, so that a screen shows exactly what runs."""
    return _INVISIBLE.sub(lambda match: match.group().encode("unicode_escape").decode(), command)


class Question(msgspec.Struct, frozen=True, kw_only=True):
    """A question to a person. `shown` is the command as it may be displayed; the original is never stored."""

    shown: str
    description: str
    categories: tuple[str, ...] = ()
    choices: tuple[ApprovalChoice, ...] = tuple(ApprovalChoice)
    smart_denied: bool = False


class ApprovalResult(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a question. `reason` is for the model: why it was refused, or the person's words. `asked` is False if no person saw the question."""

    allowed: bool
    choice: ApprovalChoice | None = None
    reason: str = ""
    approval_id: str = ""
    timed_out: bool = False
    asked: bool = True


def approval_scope(turn: Turn) -> str:
    """Return who may answer for a turn: its run, or its conversation. Child turns use the scope of their root."""
    return turn.root.id if turn.root.id.startswith("run_") else turn.context.session_key


def grantee_of(turn: Turn) -> str:
    """Return who receives a grant of "always" for this turn: its tenant, else its platform (the operator's own, over HTTP)."""
    tenant = turn.spec.tenant
    return tenant_grantee(tenant) if tenant else f"platform {turn.context.platform or turn.spec.source}"


class Approvals:
    """Creates requests and applies answers. The waiting task is the tool call that asks; answers come from any interface."""

    def __init__(self, store: ApprovalStore, *, seconds: float = DEFAULT_SECONDS) -> None:
        self._store = store
        self._seconds = seconds
        self._waiting: Counter[tuple[str, str]] = Counter()
        """How many questions wait, by scope and by tenant."""
        self._failed: dict[tuple[str, str], tuple[float, list[ApprovalRow]]] = {}
        """The requests of answers that may have been written, by scope and the id that was given, each with the time until which a repetition may come."""

    async def granted(self, turn: Turn) -> frozenset[str]:
        """Return the categories that are allowed for a turn without a question."""
        return await self._store.granted(approval_scope(turn), grantee=grantee_of(turn))

    async def ask(self, turn: Turn, question: Question) -> ApprovalResult:
        """Ask, and wait for the answer, the time-out, or the end of the turn, whichever is first.

        Cancelling withdraws the question: it is stored as expired, and a later answer is a conflict.
        """
        tell = turn.spec.hooks.asks
        if tell is None:
            return ApprovalResult(
                allowed=False,
                asked=False,
                reason="this interface has no user to ask, so it was refused; use a run (/v1/runs) or a chat to approve such commands",
            )
        places = [("scope", approval_scope(turn)), *([("tenant", turn.spec.tenant)] if turn.spec.tenant else [])]
        for place, most in zip(places, (MOST_PER_SCOPE, MOST_PER_TENANT), strict=False):
            if self._waiting[place] >= most:
                return ApprovalResult(
                    allowed=False,
                    asked=False,
                    reason=f"{most} questions of this {'conversation' if place[0] == 'scope' else 'tenant'} wait for answers already, so it was"
                    " refused; ask for one command at a time",
                )
        self._waiting.update(places)
        try:
            return await self._wait(turn, question, tell)
        finally:
            self._waiting.subtract(places)
            self._waiting = +self._waiting

    async def _wait(self, turn: Turn, question: Question, tell: EventSink) -> ApprovalResult:
        id = turn.core.ids.make("appr_", 16)
        waiter = _Waiter(tell)
        reason = "the turn ended"
        with self._store.subscribe(APPROVAL_TOPIC, waiter.wake, id):
            try:
                await self._store.create_approval(self._row(turn, id, approval_scope(turn), question))
                if not self._show(id, waiter, question):
                    await self.withdraw(id)
                with trio.move_on_after(self._seconds), waiting(f"approval {id}"):
                    while waiter.row is None:
                        await waiter.woken.wait()
                        await self._read(id, waiter)
                reason = "timeout"
            finally:
                # The store keeps the order of writes: this finds the row even if the wait for its creation was cancelled.
                end = End(f"approval {id}", lambda: self._expire(id, waiter, reason))
                await turn.core.ends.put(end)  # noqa: ASYNC102 - bounded by finish_seconds
            if end.over is not None:
                # The row decides: a refusal is reported only after the row was read.
                await end.over.wait()
        return _answer(waiter, id, self._seconds)

    async def _read(self, id: str, waiter: _Waiter) -> None:
        """Read the row of a request after a signal. Retry while it cannot be read."""
        waiter.woken = trio.Event()
        try:
            known = await self._store.get_approval(id)
        except Exception as error:
            logger.error("could not read approval %s; retrying in %g s: %s", id, RETRY_SECONDS, error)
            await trio.sleep(RETRY_SECONDS)
            waiter.woken.set()
            return
        if known is not None and known.state is not ApprovalState.PENDING:
            waiter.take(known)

    def _row(self, turn: Turn, id: str, scope: str, question: Question) -> NewApproval:
        return NewApproval(
            id=id,
            scope=scope,
            command=question.shown,
            expires_at=turn.core.clock() + self._seconds,
            description=question.description,
            categories=question.categories,
            choices=question.choices,
            session_key=turn.context.session_key,
            session_id=turn.context.session_id,
            run_id=scope if scope.startswith("run_") else "",
            tenant=turn.spec.tenant,
            grantee=grantee_of(turn),
            asker=turn.context.user_id,
        )

    def _show(self, id: str, waiter: _Waiter, question: Question) -> bool:
        """Show the question to a person, and return whether that succeeded. There is nothing to wait for if it failed."""
        try:
            waiter.tell(
                {
                    "event": "approval.request",
                    "approval_id": id,
                    "command": question.shown,
                    "description": question.description,
                    "pattern_key": question.categories[0] if question.categories else "",
                    "pattern_keys": list(question.categories),
                    "allow_permanent": ApprovalChoice.ALWAYS in question.choices,
                    "smart_denied": question.smart_denied,
                    "choices": [choice.value for choice in question.choices],
                    "timeout": self._seconds,
                }
            )
            waiter.shown = True
        except Exception:
            logger.exception("could not show approval %s to a person; it is refused", id)
        return waiter.shown

    async def _expire(self, id: str, waiter: _Waiter, reason: str) -> None:
        """Expire a question without an answer. If an answer was committed first, that answer counts."""
        if waiter.row is not None:
            return
        await self._store.expire_approval(id, reason=reason)
        known = await self._store.get_approval(id)
        if known is not None and known.state is not ApprovalState.PENDING:
            waiter.take(known, timed_out=known.state is ApprovalState.EXPIRED and known.reason == reason)

    async def answer(
        self,
        scope: str,
        choice: ApprovalChoice,
        *,
        approval_id: str = "",
        everything: bool = False,
        reason: str = "",
        may: Callable[[ApprovalRow], bool] | None = None,
    ) -> list[ApprovalRow]:
        """Answer one request by its id, the oldest of a scope, or all of them; return those that this answer ended.

        With `may`, only requests for which it returns true are considered. Its result for a row must not change. What is answered is decided before the
        first write. If the store fails, a repetition of the call is about the same requests, also if others wait by then: it returns those that
        the failed call has answered after all.
        """
        said, place = reason[:REASON_LENGTH], (scope, approval_id)
        now = trio.current_time()
        self._failed = {one: kept for one, kept in self._failed.items() if kept[0] > now}
        repeated = [] if place not in self._failed else self._failed[place][1]
        rows = [row for row in repeated if may is None or may(row)]
        if not rows:
            rows = await self._known(scope, approval_id, everything, may)
        answered: list[ApprovalRow] = []
        try:
            for row in rows:
                one = await self._answer(row, _offered(row, choice), said, repeated=bool(repeated))
                answered += [] if one is None else [one]
        except StoreError:
            self._failed[place] = (now + self._seconds, rows)
            raise
        self._failed.pop(place, None)
        return answered

    async def _answer(
        self, row: ApprovalRow, choice: ApprovalChoice, said: str, *, repeated: bool
    ) -> ApprovalRow | None:
        """Answer a request; return it if it has this answer, from this call or (`repeated`) from one whose outcome was unknown."""
        answered: ApprovalRow | None = None
        try:
            answered = await self._store.answer_approval(row.id, choice, reason=said)
        except OutcomeUnknown:
            repeated = True
            answered = await self._store.answer_approval(row.id, choice, reason=said)
        if answered is None and repeated:
            found = await self._store.get_approval(row.id)
            answered = found if found is not None and found.choice is choice else None
        return answered

    async def _known(
        self, scope: str, approval_id: str, everything: bool, may: Callable[[ApprovalRow], bool] | None
    ) -> list[ApprovalRow]:
        if approval_id:
            one = await self._store.get_approval(approval_id)
            return [] if one is None or one.scope != scope or not (may is None or may(one)) else [one]
        found = await self._store.list_approvals(scope=scope, page=Page(MOST_LISTED))
        waiting = [row for row in found if may is None or may(row)]
        return waiting if everything else waiting[:1]

    async def withdraw(self, approval_id: str, reason: str = "") -> bool:
        """Refuse a question that could not be shown, instead of waiting for it; return whether it was pending.

        The reason is for the agent, which must not be told that a person refused.
        """
        return await self._store.expire_approval(approval_id, reason=reason or NOT_SHOWN, asked=False)

    async def pending(self, scope: str) -> Sequence[ApprovalRow]:
        """Return the pending requests of a scope, oldest first."""
        return await self._store.list_approvals(scope=scope)

    async def end_scope(self, scope: str, reason: str) -> int:
        """End a run's or conversation's scope: refuse pending requests with the reason, and delete its grants."""
        return await self._store.end_approval_scope(scope, reason=reason)


class _Waiter:
    """One task that waits for an answer. However the request ends, it emits one event for it."""

    def __init__(self, tell: EventSink) -> None:
        self.tell = tell
        self.woken = trio.Event()
        self.row: ApprovalRow | None = None
        """The request, after it was answered or has expired."""
        self.timed_out = False
        self.shown = False

    def wake(self, approval_id: str) -> None:
        """Wake the waiting task: the row may have changed."""
        self.woken.set()

    def take(self, row: ApprovalRow, *, timed_out: bool = False) -> None:
        """Take over the end that the row states, and emit it if the question was emitted."""
        self.row = row
        self.timed_out = timed_out
        if not self.shown:
            return
        self.shown = False
        event: dict[str, Any] = {
            "event": "approval.expired",
            "approval_id": row.id,
            "reason": row.reason,
            "resolved": 1,
        }
        if row.state is not ApprovalState.EXPIRED:
            choice = "" if row.choice is None else row.choice.value
            event = {"event": "approval.responded", "approval_id": row.id, "choice": choice, "resolved": 1}
        try:
            self.tell(event)
        except Exception:
            logger.exception("could not emit the end of approval %s", row.id)


def _offered(approval: ApprovalRow, choice: ApprovalChoice) -> ApprovalChoice:
    """Reduce `always` to the conversation where it was not offered, if that was."""
    if choice is ApprovalChoice.ALWAYS and choice not in approval.choices:
        return ApprovalChoice.SESSION if ApprovalChoice.SESSION in approval.choices else ApprovalChoice.ONCE
    return choice


def _answer(waiter: _Waiter, id: str, seconds: float) -> ApprovalResult:
    approval = waiter.row
    if approval is None or waiter.timed_out:
        return ApprovalResult(
            allowed=False,
            approval_id=id,
            timed_out=True,
            reason=f"no answer within {seconds:g} s; silence is not consent",
        )
    if approval.state is ApprovalState.EXPIRED:
        return ApprovalResult(allowed=False, approval_id=id, reason=approval.reason, asked=approval.asked)
    allowed = approval.state is ApprovalState.APPROVED
    return ApprovalResult(
        allowed=allowed,
        choice=approval.choice,
        approval_id=id,
        reason="" if allowed else approval.reason or "the user refused it",
    )
