"""What the run API needs from whoever asks humans for approval. In a run, the scope of an approval is the run's id, and nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from hermes_trio.store import ApprovalChoice, ApprovalRow

__all__ = ["ApprovalsPort", "NoApprovals", "describe"]


class ApprovalsPort(Protocol):
    """Requests that wait for a human, by scope. Whoever implements it also emits `approval.responded` or `approval.expired`, once a request."""

    async def pending(self, scope: str) -> Sequence[ApprovalRow]:
        """What waits for an answer in a scope, oldest first."""
        ...

    async def answer(
        self, scope: str, choice: ApprovalChoice, *, approval_id: str = "", everything: bool = False
    ) -> Sequence[ApprovalRow]:
        """Answer one request by its id, the oldest of a scope, or all of them; returns those that were still pending."""
        ...


class NoApprovals:
    """For a server whose agent never asks."""

    async def pending(self, scope: str) -> Sequence[ApprovalRow]:
        """Nothing waits."""
        return ()

    async def answer(
        self, scope: str, choice: ApprovalChoice, *, approval_id: str = "", everything: bool = False
    ) -> Sequence[ApprovalRow]:
        """There is nothing to answer."""
        return ()


def describe(approval: ApprovalRow) -> dict[str, Any]:
    """A request as clients see it."""
    return {
        "approval_id": approval.id,
        "command": approval.command,
        "description": approval.description,
        "pattern_keys": list(approval.categories),
        "choices": [choice.value for choice in approval.choices],
        "requested_at": approval.created_at,
        "expires_at": approval.expires_at,
    }
