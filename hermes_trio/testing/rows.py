"""Reads and writes a store's rows for tests, through verbs of its port, so that it works with any backend."""

from __future__ import annotations

from collections.abc import Sequence

from hermes_trio.runtime.ports import InboxRow, NoticeKind
from hermes_trio.store.ports import ApprovalStore, InboxStore
from hermes_trio.store.records import ApprovalChoice, InboxState, NewApproval, Page

_ALL = Page(1_000_000)


async def _rows(store: InboxStore) -> list[tuple[InboxRow, str, str]]:
    """Return all rows of the inbox with their states and reasons."""
    return [(row, state.value, reason) for state in InboxState for row, reason in await store.list_inbox(state, _ALL)]


async def inbox_states(store: InboxStore, ids: Sequence[int]) -> dict[int, tuple[str, str]]:
    """Return state and reason of inbox rows, by id; a row that was deleted is missing."""
    return {row.id: (state, reason) for row, state, reason in await _rows(store) if row.id in ids}


async def completion_states(store: InboxStore, job_ids: Sequence[str]) -> dict[str, tuple[str, str]]:
    """Return the states of the completions of jobs, by job id; a job without one is missing."""
    kinds = (NoticeKind.COMPLETION, NoticeKind.DELEGATION, NoticeKind.LOST)
    return {
        row.job_id: (state, reason)
        for row, state, reason in await _rows(store)
        if row.job_id in job_ids and row.notice in kinds
    }


async def grant_category(store: ApprovalStore, category: str, *, scope: str) -> None:
    """Grant a category in a scope, as the answer `always` does."""
    asked = NewApproval(
        id=f"appr_{scope}_{category}", scope=scope, command="x", expires_at=9e9, categories=(category,), grantee=scope
    )
    await store.create_approval(asked)
    await store.answer_approval(asked.id, ApprovalChoice.ALWAYS)
