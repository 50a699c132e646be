"""The locks of each verb, where several nodes write: the names that it locks for the duration of its transaction.

The conditional updates of the verbs need no lock. A lock is needed where a verb decides by rows that it reads: which rows wait in a lane, which session a
key points to, whether a session has ended, which response is the newest. All locks of a unit are taken before any of its verbs runs, in a fixed order, so
that two units never deadlock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from hashlib import blake2b
from typing import Any, Final

from hermes_trio.runtime.context import SessionContext
from hermes_trio.runtime.ports import JobFinish, NewMessage, NewNotice, TurnFinish, TurnStart
from hermes_trio.store.records import IdempotentReply, NewSession, StoredResponse
from hermes_trio.store.sqlite import (
    access,
    deliveries,
    inbox,
    jobs,
    outbox,
    responses,
    runs,
    sessions,
    turns,
)

NODES: Final = "nodes"
"""Held while nodes join, leave and are reaped."""


def lock_number(name: str) -> int:
    """Return the number of a lock in PostgreSQL."""
    return int.from_bytes(blake2b(name.encode("utf-8", "replace"), digest_size=8).digest(), "big", signed=True)


def _key(key: str) -> list[str]:
    return [f"key {key}"] if key else []


def _session(session_id: str) -> list[str]:
    return [f"session {session_id}"] if session_id else []


def _reply(reply: IdempotentReply) -> list[str]:
    return [f"reply {reply.tenant} {reply.route} {reply.key}"]


def _response(response: StoredResponse) -> list[str]:
    return [f"responses {response.tenant}"]


def _message(message: NewMessage) -> list[str]:
    return _key(message.session_key)


def _notice(notice: NewNotice) -> list[str]:
    return [*_session(notice.routing.session_id), *_key(notice.routing.session_key)]


def _start(start: TurnStart) -> list[str]:
    names = [*_session(start.context.session_id), *(_key(start.context.session_key) if start.inbox_ids else ())]
    names += [f"root {root_id}" for root_id in start.roots]
    if start.run is not None and start.run.idempotency_key:
        names.append(f"run {start.run.tenant} {start.run.idempotency_key}")
    return names


def _finish(finish: TurnFinish) -> list[str]:
    names = _start(finish.start)
    if finish.acknowledged:
        names += _key(finish.start.context.session_key)
    for record in finish.also:
        if isinstance(record, StoredResponse):
            names += _response(record)
        elif isinstance(record, IdempotentReply):
            names += _reply(record)
    return names


def _job(job: JobFinish) -> list[str]:
    return _notice(job.notice) if job.notice is not None else []


def _new(new: NewSession) -> list[str]:
    return [*_key(new.session_key), *_session(new.id)]


Names = Callable[..., list[str]]


def _first(name: Callable[[Any], list[str]], place: int) -> Names:
    """Return a function for the names by one argument of a verb, counted after the connection."""
    return lambda *args: name(args[place])


def _both(one: Names, two: Names) -> Names:
    return lambda *args: [*one(*args), *two(*args)]


def _named(kind: str) -> Callable[[Any], list[str]]:
    return lambda value: [f"{kind} {value}"]


def _context(context: SessionContext) -> list[str]:
    return _key(context.session_key)


_NAMES: Final[dict[Callable[..., Any], Names]] = {
    sessions.create_session: _first(_new, 1),
    sessions.resolve_session: _first(_context, 1),
    sessions.start_over: _first(_key, 1),
    sessions.switch_session: _both(_first(_key, 1), _first(_session, 2)),
    sessions.end_session: _first(_session, 1),
    sessions.conclude_interrupted: _first(_session, 1),
    sessions.reopen_session: _first(_session, 1),
    sessions.patch_session: _first(_session, 1),
    sessions.delete_session: _first(_session, 1),
    sessions.fork_session: _first(_session, 1),
    sessions.append_messages: _first(_session, 1),
    sessions.replace_history: _first(_session, 1),
    turns.begin_turn: _first(_start, 2),
    turns.finish_turn: _first(_finish, 2),
    inbox.insert_notice: _first(_notice, 1),
    inbox.accept_message: _first(_message, 1),
    inbox.abandon_waiting: _first(_session, 1),
    inbox.claim_rows: _first(_key, 2),
    inbox.claim_lane: _first(_key, 2),
    deliveries.accept: _first(_message, 3),
    jobs.finish_job: _first(_job, 2),
    outbox.claim: _first(_named("outbox"), 2),
    responses.put_response: _first(_response, 1),
    access.offer: _first(_named("pairing"), 1),
}


def _run_of(start: TurnStart) -> list[str]:
    return [] if start.run is None else [start.run.run_id]


_RUNS: Final[dict[Callable[..., Any], Names]] = {
    turns.begin_turn: _first(_run_of, 2),
    turns.finish_turn: _first(lambda finish: _run_of(finish.start), 2),
    runs.append_events: _first(lambda events: [event.run_id for event in events], 1),
    runs.update_status: _first(lambda run_id: [run_id], 1),
}


def locks_of(verb: Callable[..., Any], args: tuple[Any, ...]) -> frozenset[int]:
    """Return the locks of a verb that is called with these arguments."""
    names = _NAMES.get(verb)
    return frozenset() if names is None else frozenset(map(lock_number, names(*args)))


def runs_of(verb: Callable[..., Any], args: tuple[Any, ...]) -> frozenset[str]:
    """Return the runs that a verb with these arguments writes. A run has one owner, so it needs no lock; calls of one unit write it in sequence."""
    names = _RUNS.get(verb)
    return frozenset() if names is None else frozenset(names(*args))


def lock_numbers(calls: Iterable[tuple[Callable[..., Any], tuple[Any, ...]]]) -> list[int]:
    """Return the locks of these verbs, in the fixed order in which every unit takes them."""
    return sorted(frozenset[int]().union(*(locks_of(verb, args) for verb, args in calls)))
