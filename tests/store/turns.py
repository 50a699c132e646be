"""Short ways to say what a turn, a message or a job is, for the tests of the store."""

from __future__ import annotations

from itertools import count
from typing import Any

from hermes_trio.runtime.context import SessionContext
from hermes_trio.runtime.outcome import TurnState
from hermes_trio.runtime.ports import (
    JobStart,
    Message,
    NewMessage,
    NewNotice,
    NewRun,
    NoticeKind,
    TurnFinish,
    TurnStart,
)

KEY = "agent:main:telegram:dm:42"
_NUMBERS = count(1)


def context(session_id: str = "s1", key: str = KEY, **fields: str) -> SessionContext:
    """The identity of a conversation."""
    return SessionContext(platform="telegram", session_id=session_id, session_key=key, **fields)


def start(turn_id: str = "", session_id: str = "s1", key: str = KEY, **fields: Any) -> TurnStart:
    """A turn that begins."""
    fields.setdefault("source", "telegram")
    return TurnStart(turn_id=turn_id or f"turn_{next(_NUMBERS)}", context=context(session_id, key), **fields)


def finish(begun: TurnStart, *texts: str, **fields: Any) -> TurnFinish:
    """A turn that ends, with a question and an answer or whatever texts are given in turns."""
    roles = ("user", "assistant")
    messages = tuple(Message(role=roles[place % 2], content=text) for place, text in enumerate(texts))
    fields.setdefault("state", TurnState.COMPLETED)
    fields.setdefault("messages", messages)
    fields.setdefault("text", texts[-1] if texts else "")
    return TurnFinish(start=begun, **fields)


def run(run_id: str = "run_1", session_id: str = "s1", **fields: Any) -> NewRun:
    """A run's record."""
    return NewRun(run_id=run_id, session_id=session_id, **fields)


def message(text: str = "hello", key: str = KEY, inbox: str = "telegram", dedupe: str = "") -> NewMessage:
    """A message from outside."""
    return NewMessage(inbox=inbox, session_key=key, routing=context("", key), text=text, dedupe_key=dedupe)


def notice(text: str = "done", session_id: str = "s1", key: str = KEY, job_id: str = "proc_1") -> NewNotice:
    """A notice of a job's end."""
    return NewNotice(
        inbox="telegram",
        routing=context(session_id, key),
        kind=NoticeKind.COMPLETION,
        text=text,
        job_id=job_id,
    )


def job(job_id: str = "proc_1", session_id: str = "s1", inbox: str = "telegram", key: str = KEY) -> JobStart:
    """A job that starts; watched unless `inbox` is empty."""
    return JobStart(
        job_id=job_id,
        kind="process",
        title="make test",
        root_id="turn_1",
        turn_id="turn_1",
        routing=context(session_id, key),
        inbox=inbox,
    )
