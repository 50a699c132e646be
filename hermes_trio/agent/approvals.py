"""Asking a person: each request has an id and a row, belongs to a run or a conversation, and ends in exactly one way.

The row decides. An answer and a time-out that race each other are two transactions, and the second one finds the first: nobody is told "approved" for a
command that was blocked. Where no person can be reached the answer is no, at once, with the reason.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Final, Protocol

import attrs
import trio

from hermes_trio.runtime.tree import waiting
from hermes_trio.runtime.turn import EventSink, Turn
from hermes_trio.store.records import Approval, ApprovalChoice, ApprovalState, NewApproval

__all__ = ["Answer", "ApprovalStore", "Approvals", "Question", "approval_scope"]

logger: Final = logging.getLogger("hermes_trio.agent.approvals")

DEFAULT_SECONDS: Final = 60.0
REASON_LENGTH: Final = 280


class ApprovalStore(Protocol):
    """The verbs of the store that approvals use."""

    async def create_approval(self, new: NewApproval) -> Approval: ...

    async def get_approval(self, approval_id: str) -> Approval | None: ...

    async def answer_approval(
        self, approval_id: str, choice: ApprovalChoice, *, reason: str = ""
    ) -> Approval | None: ...

    async def answer_approvals(
        self, scope: str, choice: ApprovalChoice, *, everything: bool = False, reason: str = ""
    ) -> list[Approval]: ...

    async def expire_approval(self, approval_id: str, *, reason: str = "timeout") -> bool: ...

    async def end_approval_scope(self, scope: str, *, reason: str) -> int: ...

    async def list_approvals(
        self,
        *,
        state: ApprovalState | None = ApprovalState.PENDING,
        scope: str | None = None,
        tenant: str | None = None,
        limit: int = 50,
        offset: int = 0,
    ) -> list[Approval]: ...

    async def granted(self, scope: str) -> frozenset[str]: ...


@attrs.frozen(kw_only=True)
class Question:
    """What a person is asked. `shown` is the command as it may be displayed; the original is never stored."""

    shown: str
    description: str
    categories: tuple[str, ...] = ()
    choices: tuple[ApprovalChoice, ...] = tuple(ApprovalChoice)
    smart_denied: bool = False


@attrs.frozen(kw_only=True)
class Answer:
    """What came of a question. `reason` is for the model: why not, or the words of whoever refused."""

    allowed: bool
    choice: ApprovalChoice | None = None
    reason: str = ""
    approval_id: str = ""
    timed_out: bool = False
    asked: bool = True


def approval_scope(turn: Turn) -> str:
    """Who may answer for a turn: its run, or its conversation. Children ask through whoever owns them."""
    return turn.root.id if turn.root.id.startswith("run_") else turn.context.session_key


class Approvals:
    """The broker. A waiter lives in the tool call that asks; answers come from any interface."""

    def __init__(self, store: ApprovalStore, *, seconds: float = DEFAULT_SECONDS) -> None:
        self._store = store
        self._seconds = seconds
        self._waiters: dict[str, _Waiter] = {}

    async def granted(self, turn: Turn) -> frozenset[str]:
        """The categories that are allowed for a turn without asking."""
        return await self._store.granted(approval_scope(turn))

    async def ask(self, turn: Turn, question: Question) -> Answer:
        """Ask, and wait for the answer, the time-out, or the end of the turn, whichever is first.

        Cancelling withdraws the question: it is written down as expired, and a late answer is a conflict.
        """
        tell = turn.plan.asks
        if tell is None:
            return Answer(
                allowed=False,
                asked=False,
                reason="nobody can be asked on this interface, so it was refused; use a run (/v1/runs) or a chat to approve such commands",
            )
        scope = approval_scope(turn)
        approval = await self._store.create_approval(
            NewApproval(
                id=turn.core.ids.make("appr_", 16),
                scope=scope,
                command=question.shown,
                expires_at=turn.core.clock() + self._seconds,
                description=question.description,
                categories=question.categories,
                choices=question.choices,
                session_key=turn.context.session_key,
                session_id=turn.context.session_id,
                run_id=scope if scope.startswith("run_") else "",
                tenant=turn.plan.tenant,
            )
        )
        waiter = _Waiter(tell)
        self._waiters[approval.id] = waiter
        try:
            tell(
                {
                    "event": "approval.request",
                    "approval_id": approval.id,
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
            with trio.move_on_after(self._seconds), waiting(f"approval {approval.id}"):
                await waiter.answered.wait()
            if waiter.answer is None:
                await self._expire(approval.id, waiter, "timeout")
        except BaseException:
            with trio.CancelScope(shield=True, deadline=trio.current_time() + 5):
                await self._expire(approval.id, waiter, "the turn ended")
            raise
        finally:
            del self._waiters[approval.id]
        return _answer(waiter.answer, approval.id, self._seconds)

    async def _expire(self, approval_id: str, waiter: _Waiter, reason: str) -> None:
        if waiter.answer is not None:
            return
        if await self._store.expire_approval(approval_id, reason=reason):
            waiter.tell({"event": "approval.expired", "approval_id": approval_id, "reason": reason, "resolved": 1})
        else:
            # Somebody was faster: what the row says is what happened.
            waiter.answer = await self._store.get_approval(approval_id)

    async def answer(
        self,
        scope: str,
        choice: ApprovalChoice,
        *,
        approval_id: str = "",
        everything: bool = False,
        reason: str = "",
    ) -> list[Approval]:
        """Answer one request by its id, the oldest of a scope, or all of them; returns those that were still pending."""
        said = reason[:REASON_LENGTH]
        if approval_id:
            known = await self._store.get_approval(approval_id)
            if known is None or known.scope != scope:
                return []
            one = await self._store.answer_approval(approval_id, choice, reason=said)
            answered = [] if one is None else [one]
        else:
            answered = await self._store.answer_approvals(scope, choice, everything=everything, reason=said)
        for approval in answered:
            waiter = self._waiters.get(approval.id)
            if waiter is not None:
                waiter.answer = approval
                waiter.answered.set()
                waiter.tell(
                    {
                        "event": "approval.responded",
                        "approval_id": approval.id,
                        "choice": choice.value,
                        "resolved": 1,
                    }
                )
        return answered

    async def pending(self, scope: str) -> Sequence[Approval]:
        """What waits for an answer in a scope, oldest first."""
        return await self._store.list_approvals(scope=scope)

    async def end_scope(self, scope: str, reason: str) -> int:
        """A run or a conversation is over: what waits is refused, what was granted to it is forgotten."""
        for approval in await self._store.list_approvals(scope=scope):
            waiter = self._waiters.get(approval.id)
            if waiter is not None:
                waiter.answered.set()
        return await self._store.end_approval_scope(scope, reason=reason)


class _Waiter:
    def __init__(self, tell: EventSink) -> None:
        self.tell = tell
        self.answered = trio.Event()
        self.answer: Approval | None = None


def _answer(approval: Approval | None, approval_id: str, seconds: float) -> Answer:
    if approval is None or approval.state is ApprovalState.EXPIRED:
        return Answer(
            allowed=False,
            approval_id=approval_id,
            timed_out=True,
            reason=f"nobody answered within {seconds:g} s; silence is not consent",
        )
    allowed = approval.state is ApprovalState.APPROVED
    return Answer(
        allowed=allowed,
        choice=approval.choice,
        approval_id=approval_id,
        reason="" if allowed else approval.reason or "the user refused it",
    )
