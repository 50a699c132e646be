"""What is woken, retried and settled is decided by rows: the runtime's side."""

from __future__ import annotations

from typing import Any

from hermes_trio import Runtime, SessionContext
from hermes_trio.runtime.ports import NewNotice, NoticeKind

KEY = "agent:main:fake:dm:1"


def notice(inbox: str, text: str, key: str = KEY) -> NewNotice:
    """A notice for a session of an inbox."""
    context = SessionContext(session_id="s1", session_key=key)
    return NewNotice(
        inbox=inbox, session_key=key, session_id="s1", routing=context, kind=NoticeKind.INFORMATION, text=text
    )


async def test_completions_take_nothing_of_another_inbox(runtime: Runtime) -> None:
    """Two inboxes may have equal session keys: the in-process reader gets its own rows, and leaves the others waiting."""
    theirs = await runtime.store.add_notice(notice("telegram", "theirs"))
    await runtime.store.add_notice(notice("in-process", "mine"))
    row = await anext(aiter(runtime.completions()))
    assert (row.inbox, row.text) == ("in-process", "mine")
    store: Any = runtime.store
    assert await store.inbox_states([theirs]) == {theirs: ("pending", "")}
