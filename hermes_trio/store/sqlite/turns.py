"""The two transactions of a turn.

`begin_turn` is called only where a client or a row depends on the turn before it ends (a run id, an accepted message, a one-shot session).
`finish_turn` writes everything that a turn leaves behind in one transaction, and makes the session if it does not exist.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Any, Final

from hermes_trio.runtime.errors import BudgetExhausted, SessionEnded, SessionHeld
from hermes_trio.runtime.outcome import RunStatus
from hermes_trio.runtime.ports import SESSION_TOPIC, TurnFinish, TurnStart
from hermes_trio.store.errors import ForeignSession
from hermes_trio.store.records import IdempotentReply, StoredResponse

from .encoding import clean, routing_text
from .inbox import SESSION_ENDED, abandon_waiting, settle_rows, take_rows
from .outbox import add_replies
from .responses import put_reply, put_response
from .roots import close_root, root_wakes, session_promised
from .rows import Database, Row, changed, exists, one
from .runs import begin_run, finish_run, insert_events, update_status
from .transcript import add_messages, first_words
from .verbs import Verbs

_BEGIN: Final = """
INSERT INTO sessions (id, source, tenant, session_key, user_id, model, parent_session_id, lineage, routing, one_shot,
    open_turn, started_at, last_active, owner)
VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11, ?12, ?12, ?13)
ON CONFLICT (id) DO UPDATE SET
    open_turn = CASE WHEN excluded.open_turn = '' THEN coalesce(sessions.open_turn, '') ELSE excluded.open_turn END,
    owner = CASE WHEN excluded.open_turn = '' AND sessions.open_turn <> '' THEN sessions.owner ELSE excluded.owner END,
    one_shot = CASE WHEN sessions.one_shot > excluded.one_shot THEN sessions.one_shot ELSE excluded.one_shot END,
    last_active = excluded.last_active,
    model = CASE sessions.model WHEN '' THEN excluded.model ELSE sessions.model END,
    end_reason = CASE WHEN ?15 = 0 OR (sessions.one_shot = 1 AND excluded.one_shot = 1) THEN sessions.end_reason END,
    ended_at = CASE WHEN ?15 = 0 OR (sessions.one_shot = 1 AND excluded.one_shot = 1) THEN sessions.ended_at END
WHERE sessions.tenant = excluded.tenant
    AND (?14 = 0 OR coalesce(sessions.open_turn, '') = '' OR sessions.owner = excluded.owner)
    AND (?16 = 0 OR coalesce(sessions.end_reason, '') <> 'session_reset' OR (sessions.one_shot = 1 AND excluded.one_shot = 1))
"""
"""A begin without a turn is a promise, and takes nothing from the turn that is open. With `hold` (?14), that of another owner is left alone, too.
A turn that only takes the lock, and of which nothing was promised, does not open a session again (?15): its end decides. A turn of waiting rows (?16)
does not begin in a session that its person has ended since it was chosen."""

_FINISH: Final = """
INSERT INTO sessions (id, source, tenant, session_key, user_id, model, parent_session_id, lineage, routing, one_shot,
    started_at, last_active, preview, ended_at, end_reason, message_count, tool_call_count, input_tokens, output_tokens,
    cache_read_tokens, cache_write_tokens, reasoning_tokens, api_call_count, last_turn)
VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11, ?11, ?12, ?13, ?14, ?15, ?16, ?17, ?18, ?19, ?20, ?21, ?22, ?24)
ON CONFLICT (id) DO UPDATE SET
    open_turn = CASE WHEN ?25 <> '' AND sessions.open_turn <> ?25 THEN sessions.open_turn END,
    last_turn = CASE excluded.last_turn WHEN '' THEN sessions.last_turn ELSE excluded.last_turn END,
    one_shot = CASE WHEN sessions.one_shot > excluded.one_shot THEN sessions.one_shot ELSE excluded.one_shot END,
    last_active = excluded.last_active,
    model = CASE sessions.model WHEN '' THEN excluded.model ELSE sessions.model END,
    preview = CASE sessions.preview WHEN '' THEN excluded.preview ELSE sessions.preview END,
    end_reason = CASE WHEN sessions.ended_at IS NULL OR sessions.end_reason = 'idle' OR (sessions.one_shot = 0 AND sessions.ended_at <= ?23)
        THEN excluded.end_reason ELSE sessions.end_reason END,
    ended_at = CASE WHEN sessions.ended_at IS NULL OR sessions.end_reason = 'idle' OR (sessions.one_shot = 0 AND sessions.ended_at <= ?23)
        THEN excluded.ended_at ELSE sessions.ended_at END,
    message_count = sessions.message_count + excluded.message_count,
    tool_call_count = sessions.tool_call_count + excluded.tool_call_count,
    input_tokens = sessions.input_tokens + excluded.input_tokens,
    output_tokens = sessions.output_tokens + excluded.output_tokens,
    cache_read_tokens = sessions.cache_read_tokens + excluded.cache_read_tokens,
    cache_write_tokens = sessions.cache_write_tokens + excluded.cache_write_tokens,
    reasoning_tokens = sessions.reasoning_tokens + excluded.reasoning_tokens,
    api_call_count = sessions.api_call_count + excluded.api_call_count
WHERE sessions.tenant = excluded.tenant
RETURNING n
"""

_CONTINUE: Final = """
UPDATE sessions SET
    last_active = ?2,
    model = CASE model WHEN '' THEN ?3 ELSE model END,
    preview = CASE preview WHEN '' THEN ?4 ELSE preview END,
    message_count = message_count + ?5,
    tool_call_count = tool_call_count + ?6,
    input_tokens = input_tokens + ?7,
    output_tokens = output_tokens + ?8,
    cache_read_tokens = cache_read_tokens + ?9,
    cache_write_tokens = cache_write_tokens + ?10,
    reasoning_tokens = reasoning_tokens + ?11,
    api_call_count = api_call_count + ?12,
    last_turn = ?15
WHERE id = ?1 AND tenant = ?14 AND ended_at IS NULL AND open_turn IS NULL AND one_shot >= ?13 AND last_turn <> ?15 AND ?15 <> ''
RETURNING n
"""
"""What `_FINISH` does to an open session that goes on, as most turns do. Only the indices of `last_active` are written anew: it names no other column
that has one."""

_tool_calls: Final = attrgetter("tool_calls")

ALSO: Final[dict[type, Callable[[Database, float, Any, int], None]]] = {
    StoredResponse: put_response,
    IdempotentReply: put_reply,
}
"""The types of records that may commit with a turn, in `TurnFinish.also`, each with the function that writes it."""


def put_also(db: Database, now: float, record: object, limit: int) -> None:
    """Write a record that commits with a turn."""
    put = ALSO.get(type(record))
    if put is None:
        raise TypeError(f"TurnFinish.also: the store does not know how to write a {type(record).__name__}")
    put(db, now, record, limit)


def begin_turn(db: Database, now: float, owner: str, start: TurnStart) -> None:
    """Write the beginning of a turn. A request reopens an ended session, but not a one-shot one; waiting rows do not open one that `/new` has ended."""
    context = start.context
    if start.run is not None:
        begin_run(db, now, owner, start.run, start)
    begun = changed(
        db,
        _BEGIN,
        (
            context.session_id,
            start.source,
            start.tenant,
            context.session_key,
            context.user_id,
            clean(start.model),
            start.parent_session_id or None,
            "subagent" if start.parent_session_id else "",
            routing_text(context),
            start.one_shot,
            start.turn_id,
            now,
            owner,
            start.hold,
            not start.hold or start.one_shot or start.run is not None or bool(start.inbox_ids),
            bool(start.inbox_ids),
        ),
    )
    if not begun:
        if start.inbox_ids and _has_ended(db, start):
            raise SessionEnded(f"session {context.session_id!r} has ended")
        if start.hold and (other := _holder(db, start, owner)):
            raise SessionHeld(f"turn {other} of another node has session {context.session_id!r}")
        raise ForeignSession(f"there is no session {context.session_id!r}")
    if start.hold and start.run is not None:
        update_status(db, now, start.run.run_id, RunStatus.RUNNING.value)
    if start.inbox_ids:
        take_rows(db, owner, start.turn_id, context.session_id, start.inbox_ids)
    if start.wakes is not None:
        for root_id in start.roots:
            # This turn counts: it has taken its rows, now or in an attempt before.
            if (count := root_wakes(db, root_id)) > start.wakes:
                raise no_wakes_left(count - 1, start.wakes)


def reopens_before(start: TurnStart) -> float:
    """Return the time before which a session must have ended that the end of this turn reopens: waiting rows reopen none."""
    return 0.0 if start.inbox_ids else start.began_at


def no_wakes_left(used: int, wakes: int) -> BudgetExhausted:
    """Return the error of a turn that does not begin because the notices of a root have started as many turns as they may."""
    return BudgetExhausted(f"the budget is used up (wakes: {used} of {wakes} used)")


def finish_turn(db: Database, now: float, owner: str, finish: TurnFinish, response_limit: int) -> bool:
    """Write everything that a turn leaves behind. Idempotent: `last_turn` marks an end that is written."""
    start = finish.start
    context = start.context
    usage = finish.usage
    messages = finish.messages
    model = clean(finish.model or start.model)
    preview = clean(first_words(messages))
    counts = (
        len(messages),
        usage.tool_calls or sum(map(len, map(_tool_calls, messages))),
        usage.input_tokens,
        usage.output_tokens,
        usage.cache_read_tokens,
        usage.cache_write_tokens,
        usage.reasoning_tokens,
        usage.api_calls,
    )
    found: Row | None = None
    reason = finish.end_session
    # Turn ids are unique for one owner. A turn that never had its session leaves no mark: another turn has it, and may have to write its end again.
    mark = "" if finish.waited else f"{owner}.{start.turn_id}"
    if start.hold and _run_has_ended(db, start):
        return False
    if finish.acknowledged or start.inbox_ids:
        if _is_written(db, start, mark) or _has_told(db, start):
            return False
        settle_rows(db, now, owner, start.turn_id, start.inbox_ids, finish.acknowledged)
    if reason and finish.branched and session_promised(db, context.session_id):
        reason = ""
    if not reason:
        given = (context.session_id, now, model, preview, *counts, start.one_shot, start.tenant, mark)
        found = one(db, _CONTINUE, given)
    if found is None:
        if _is_written(db, start, mark):
            return False
        found = one(
            db,
            _FINISH,
            (
                context.session_id,
                start.source,
                start.tenant,
                context.session_key,
                context.user_id,
                model,
                start.parent_session_id or None,
                "subagent" if start.parent_session_id else "",
                routing_text(context),
                start.one_shot,
                now,
                preview,
                now if reason else None,
                reason or None,
                *counts,
                reopens_before(start),
                mark,
                start.turn_id if start.hold else "",
            ),
        )
    if found is None:
        raise ForeignSession(f"there is no session {context.session_id!r}")
    if messages:
        add_messages(db, now, found[0], messages)
    if finish.outbox:
        add_replies(db, now, context.session_id, start.turn_id, finish.outbox, owner if start.hold else "")
    if start.run is not None:
        finish_run(db, now, owner, start.run, finish)
    if finish.events:
        insert_events(db, now, finish.events)
    for record in finish.also:
        put_also(db, now, record, response_limit)
    if reason:
        abandon_waiting(db, now, context.session_id, SESSION_ENDED)
    if finish.branched:
        close_root(db, finish.root_id)
    if start.hold:
        db.signals.append((SESSION_TOPIC, context.session_id))
    return bool(reason)


def _holder(db: Database, start: TurnStart, owner: str) -> str:
    """Return the turn of another owner that holds the session; empty if none does."""
    sql = "SELECT open_turn FROM sessions WHERE id = ? AND tenant = ? AND owner <> ?"
    found = one(db, sql, (start.context.session_id, start.tenant, owner))
    return (found[0] or "") if found else ""


def _has_ended(db: Database, start: TurnStart) -> bool:
    sql = "SELECT 1 FROM sessions WHERE id = ? AND tenant = ? AND end_reason = 'session_reset'"
    return exists(db, sql, (start.context.session_id, start.tenant))


def _is_written(db: Database, start: TurnStart, mark: str) -> bool:
    """Return whether the end of this turn is written already: the session stays locked until it is, so no later turn can have replaced the mark."""
    sql = "SELECT 1 FROM sessions WHERE id = ? AND last_turn = ?"
    return bool(mark) and exists(db, sql, (start.context.session_id, mark))


def _has_told(db: Database, start: TurnStart) -> bool:
    """Return whether the rows that this turn took show its end: the only mark of a turn that ended while it waited for its session's lock."""
    sql = "SELECT 1 FROM inbox WHERE id = ? AND state = 'delivered' AND turn_id = ?"
    return bool(start.inbox_ids) and exists(db, sql, (start.inbox_ids[0], start.turn_id))


def _run_has_ended(db: Database, start: TurnStart) -> bool:
    """Return whether the run of this turn has ended: where nodes share the store, a later turn of another node may have replaced the mark."""
    sql = "SELECT 1 FROM runs WHERE run_id = ? AND ended_at IS NOT NULL"
    return start.run is not None and exists(db, sql, (start.run.run_id,))


class SqliteTurns(Verbs):
    """The turns' part of the store."""

    _response_limit: int

    async def begin_turn(self, start: TurnStart) -> None:
        await self._write(begin_turn, self._clock(), self.owner, start)

    async def finish_turn(self, finish: TurnFinish) -> bool:
        return await self._write(finish_turn, self._clock(), self.owner, finish, self._response_limit)
