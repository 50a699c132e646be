"""The verbs of a turn, for many turns in few statements: each takes the arguments of all calls of its verb that share a wave of a unit.

The rows of all calls travel as one JSON parameter for each table, and the statements work on sets, so that the cost of a call in this process is little
more than writing its rows as JSON. No two calls of a wave lock the same name or write the same run. A call that is refused before anything of it is
written has a `Refusal` in the place of its value. An error that is raised fails the whole attempt, and the writer then runs every call alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Final, cast

import msgspec

from hermes_trio.runtime.errors import Fenced, MailboxFull, SessionEnded, SessionHeld
from hermes_trio.runtime.outcome import RunStatus
from hermes_trio.runtime.ports import (
    OUTBOX_TOPIC,
    ROOT_TOPIC,
    RUN_TOPIC,
    SESSION_TOPIC,
    EventRow,
    InboxRow,
    Message,
    NewMessage,
    NewRun,
    TurnFinish,
    TurnStart,
    inbox_topic,
)
from hermes_trio.store.errors import AlreadyStarted, ForeignSession, IdempotencyConflict
from hermes_trio.store.sqlite import inbox, runs, turns
from hermes_trio.store.sqlite.encoding import MESSAGE_COLUMNS, cleaned, dump
from hermes_trio.store.sqlite.rows import Row, many
from hermes_trio.store.sqlite.transcript import first_words

from .database import PostgresDatabase, run_together

Batch = Callable[[PostgresDatabase, Sequence[tuple[Any, ...]]], list[Any]]
"""Runs all calls, given by their arguments after the connection; returns the value of each."""

_encode: Final = msgspec.json.Encoder().encode

_TYPES: Final = {"str": "text", "int": "bigint", "float": "double precision", "Any": "json"}
"""The column types by the annotations of fields."""


class Refusal:
    """The error of a refused call, in place of its value. Nothing of the call was written."""

    __slots__ = ("error",)

    def __init__(self, error: Exception) -> None:
        self.error: Exception = error


def json_rows(rows: Sequence[object]) -> bytes:
    """Return rows as a JSON parameter. A NUL and a lone surrogate in a text are replaced, as in any other parameter."""
    try:
        data = _encode(rows)
    except UnicodeEncodeError:
        data = _encode(cleaned(msgspec.to_builtins(rows)))
    if b"\\u0000" not in data:
        return data
    # No escape of NUL is taken anywhere in such a parameter: what is stored as JSON goes as text, in which it is two escapes.
    plain: list[dict[str, Any]] = msgspec.json.decode(data)
    return _encode([{name: _without_nul(value) for name, value in row.items()} for row in plain])


def _without_nul(value: object) -> object:
    if isinstance(value, str):
        return value.replace("\0", "\ufffd")
    return _encode(value).decode() if isinstance(value, dict | list) else value


def _text(column: str) -> str:
    """Return SQL for the text of a column that holds JSON, as it was written."""
    return f"{column} #>> '{{}}'"


def records(kind: type[msgspec.Struct], parameter: int = 1) -> str:
    """Return SQL for the rows of a parameter as a table: the columns are the fields of `kind`, and `place` numbers the rows."""
    types = {name: _TYPES[hint.removesuffix(" | None")] for name, hint in kind.__annotations__.items()}
    columns = ", ".join(f"{name} {kind_of}" for name, kind_of in types.items())
    names = ", ".join(types)
    return f"ROWS FROM (json_to_recordset(?{parameter}) AS ({columns})) WITH ORDINALITY AS g({names}, place)"


# -- the beginning of turns ------------------------------------------------------------------------------------------------------


class _Begun(msgspec.Struct, omit_defaults=True, gc=False):
    id: str
    source: str
    tenant: str
    session_key: str
    user_id: str
    model: str
    routing: Any
    one_shot: int
    turn_id: str
    now: float
    owner: str
    hold: int
    reopens: int
    waited: int
    parent: str | None = None


class _NewRun(msgspec.Struct, gc=False):
    run_id: str
    session_id: str
    turn_id: str
    model: str
    tenant: str
    input_preview: str
    idempotency_key: str
    fingerprint: str
    now: float
    owner: str
    attempt: int


class _Kept(msgspec.Struct, gc=False):
    run_id: str
    spec: str
    key_id: str


class _Held(msgspec.Struct, gc=False):
    id: int
    turn_id: str
    owner: str
    session_id: str
    now: float


class _Waking(msgspec.Struct, gc=False):
    call: int
    root_id: str
    turn_id: str
    most: int


class _Moved(msgspec.Struct, gc=False):
    run_id: str
    status: str
    now: float


_KNOWN: Final = f"""
SELECT g.place, r.run_id, r.fingerprint FROM {records(_NewRun)}
JOIN runs r ON r.tenant = g.tenant AND r.idempotency_key = g.idempotency_key AND r.idempotency_key <> ''
"""

_WOKEN: Final = f"""
SELECT g.call, g.most, w.used FROM {records(_Waking)} CROSS JOIN LATERAL (
    SELECT count(DISTINCT i.turn_id) AS used FROM inbox i
    WHERE i.root_id = g.root_id AND i.root_id <> '' AND i.kind = 'notice' AND i.turn_id <> '' AND i.turn_id <> g.turn_id
) AS w WHERE w.used >= g.most
"""

_AMONG: Final = "s.id = ANY (ARRAY(SELECT id FROM given))"
_UNKNOWN: Final = "NOT EXISTS (SELECT 1 FROM sessions s WHERE s.id = g.id OFFSET 0)"
"""Sessions by their ids, in words that the planner can only take as a search in the index: a join may read the whole table."""

_BEGIN: Final = f"""
WITH given AS MATERIALIZED (SELECT * FROM {records(_Begun)}),
begun AS (
    UPDATE sessions s SET
        open_turn = CASE g.turn_id WHEN '' THEN coalesce(s.open_turn, '') ELSE g.turn_id END,
        owner = CASE WHEN g.turn_id = '' AND s.open_turn <> '' THEN s.owner ELSE g.owner END,
        one_shot = greatest(s.one_shot, g.one_shot),
        last_active = g.now,
        model = CASE s.model WHEN '' THEN g.model ELSE s.model END,
        end_reason = CASE WHEN g.reopens = 0 OR (s.one_shot = 1 AND g.one_shot = 1) THEN s.end_reason END,
        ended_at = CASE WHEN g.reopens = 0 OR (s.one_shot = 1 AND g.one_shot = 1) THEN s.ended_at END
    FROM given g
    WHERE s.id = g.id AND {_AMONG} AND s.tenant = g.tenant AND (g.hold = 0 OR coalesce(s.open_turn, '') = '' OR s.owner = g.owner)
        AND (g.waited = 0 OR coalesce(s.end_reason, '') <> 'session_reset' OR (s.one_shot = 1 AND g.one_shot = 1))
    RETURNING g.place
), made AS (
    INSERT INTO sessions (id, source, tenant, session_key, user_id, model, parent_session_id, lineage, routing, one_shot,
        open_turn, started_at, last_active, owner)
    SELECT id, source, tenant, session_key, user_id, model, parent, CASE WHEN parent IS NULL THEN '' ELSE 'subagent' END,
        {_text("routing")}, one_shot, turn_id, now, now, owner
    FROM given g WHERE {_UNKNOWN} ORDER BY place
    RETURNING id
)
SELECT place FROM begun UNION ALL SELECT g.place FROM made JOIN given g USING (id)
"""
"""A begin without a turn is a promise, and takes nothing from the turn that is open. With `hold`, that of another owner is left alone, too. A turn that
only takes the lock, and of which nothing was promised, does not open a session again: its end decides. A turn of rows that `waited` does not begin in a
session that has ended since it was chosen."""

_HOLDERS: Final = f"""
SELECT g.place, coalesce(s.open_turn, ''), g.waited = 1 AND coalesce(s.end_reason, '') = 'session_reset'
FROM {records(_Begun)} JOIN sessions s ON s.id = g.id AND s.tenant = g.tenant WHERE g.hold = 1 OR g.waited = 1
"""
"""For beginnings that were refused. The holder may have ended, or been reaped, since then."""

_MAKE_RUNS: Final = f"""
INSERT INTO runs (run_id, session_id, turn_id, model, tenant, input_preview, idempotency_key, fingerprint, status, created_at, updated_at, owner,
    attempt)
SELECT run_id, session_id, turn_id, model, tenant, input_preview, idempotency_key, fingerprint, 'queued', now, now, owner, attempt
FROM {records(_NewRun)} ORDER BY place ON CONFLICT (run_id) DO NOTHING
"""

_KEEP_RESUMPTIONS: Final = f"""
INSERT INTO resumptions (run_id, spec, key_id) SELECT run_id, spec, key_id FROM {records(_Kept)} ON CONFLICT DO NOTHING
"""

_FORGET_RESUMPTIONS: Final = f"DELETE FROM resumptions i USING {records(_Kept)} WHERE i.run_id = g.run_id"

_MOVE_RUNS: Final = f"""
UPDATE runs r SET status = g.status, updated_at = g.now FROM {records(_Moved)} WHERE r.run_id = g.run_id AND r.ended_at IS NULL
"""

_TAKE: Final = f"""
UPDATE inbox i SET state = 'taken', turn_id = g.turn_id, owner = g.owner,
    session_id = CASE i.kind WHEN 'message' THEN g.session_id ELSE i.session_id END
FROM {records(_Held)} WHERE i.id = g.id
    AND (i.state = 'pending' OR (i.state = 'taken' AND i.owner = g.owner AND (i.turn_id = '' OR i.turn_id = g.turn_id)))
RETURNING i.id
"""


def _new_run(now: float, owner: str, start: TurnStart, run: NewRun) -> _NewRun:
    return _NewRun(
        run.run_id,
        run.session_id,
        start.turn_id,
        run.model,
        run.tenant,
        run.input_preview,
        run.idempotency_key,
        run.fingerprint,
        now,
        owner,
        int(run.resumable),
    )


def _known_runs(db: PostgresDatabase, calls: Sequence[tuple[float, str, TurnStart]]) -> dict[int, Exception]:
    """Return the error of each call, by its place, whose idempotency key belongs to another run."""
    keyed = [
        (place, _new_run(now, owner, start, start.run))
        for place, (now, owner, start) in enumerate(calls)
        if start.run is not None and start.run.idempotency_key
    ]
    refused: dict[int, Exception] = {}
    if keyed:
        for count, run_id, fingerprint in many(db, _KNOWN, (json_rows([run for _, run in keyed]),)):
            place, run = keyed[int(count) - 1]
            if fingerprint != run.fingerprint:
                refused[place] = IdempotencyConflict(run.idempotency_key)
            elif run_id != run.run_id:
                refused[place] = AlreadyStarted(run_id)
    return refused


def _spent(db: PostgresDatabase, calls: Sequence[tuple[float, str, TurnStart]]) -> dict[int, Exception]:
    """Return the error of each call, by its place, of which a root has no wakes left. The roots are locked."""
    asked = [
        _Waking(place, root_id, start.turn_id, start.wakes)
        for place, (_, _, start) in enumerate(calls)
        if start.wakes is not None
        for root_id in start.roots
    ]
    found = many(db, _WOKEN, (json_rows(asked),)) if asked else ()
    return {int(place): turns.no_wakes_left(used, most) for place, most, used in found}


def begin_turns(db: PostgresDatabase, calls: Sequence[tuple[Any, ...]]) -> list[Any]:
    """Write the beginnings of turns; see `begin_turn`."""
    asked = cast("Sequence[tuple[float, str, TurnStart]]", calls)
    refused = _known_runs(db, asked)
    refused.update(_spent(db, asked))
    places = [place for place in range(len(asked)) if place not in refused]
    begun: list[_Begun] = []
    for place in places:
        now, owner, start = asked[place]
        context = start.context
        begun.append(
            _Begun(
                context.session_id,
                start.source,
                start.tenant,
                context.session_key,
                context.user_id,
                start.model,
                context,
                int(start.one_shot),
                start.turn_id,
                now,
                owner,
                int(start.hold),
                int(not start.hold or start.one_shot or start.run is not None or bool(start.inbox_ids)),
                int(bool(start.inbox_ids)),
                start.parent_session_id or None,
            )
        )
    data = json_rows(begun)
    written = {places[int(count) - 1] for (count,) in many(db, _BEGIN, (data,))} if begun else set[int]()
    if len(written) < len(begun):
        others = {places[int(count) - 1]: (turn, over) for count, turn, over in many(db, _HOLDERS, (data,))}
        for place in places:
            session = asked[place][2].context.session_id
            if place in written:
                continue
            if place in others:
                turn, over = others[place]
                held = f"turn {turn or '(ended)'} of another node has session {session!r}"
                refused[place] = SessionEnded(f"session {session!r} has ended") if over else SessionHeld(held)
            else:
                refused[place] = ForeignSession(f"there is no session {session!r}")
    _begin_runs(db, [asked[place] for place in places if place in written])
    return [Refusal(refused[place]) if place in refused else None for place in range(len(asked))]


def _begin_runs(db: PostgresDatabase, calls: Sequence[tuple[float, str, TurnStart]]) -> None:
    """Write the runs of turns whose sessions are written, and take their inbox rows."""
    made: list[_NewRun] = []
    moved: list[_Moved] = []
    held: list[_Held] = []
    kept: list[_Kept] = []
    for now, owner, start in calls:
        if start.run is not None:
            made.append(_new_run(now, owner, start, start.run))
            if start.resumption is not None:
                kept.append(_Kept(start.run.run_id, dump(start.resumption), start.resumption.context.key_id))
            db.signals.append((RUN_TOPIC, start.run.run_id))
            if start.hold:
                moved.append(_Moved(start.run.run_id, RunStatus.RUNNING.value, now))
        held += [_Held(number, start.turn_id, owner, start.context.session_id, now) for number in start.inbox_ids]
    if made:
        db.execute(_MAKE_RUNS, (json_rows(made),))
    if kept:
        db.execute(_KEEP_RESUMPTIONS, (json_rows(kept),))
    if moved:
        db.execute(_MOVE_RUNS, (json_rows(moved),))
    if held:
        taken = {number for (number,) in many(db, _TAKE, (json_rows(held),))}
        for _, _, start in calls:
            if missing := len(set(start.inbox_ids) - taken):
                raise Fenced(
                    f"{missing} of {len(start.inbox_ids)} inbox rows of turn {start.turn_id} are not held by this owner any more"
                )


# -- the log of runs -------------------------------------------------------------------------------------------------------------

_EVENTS: Final = "json_to_recordset(?1) AS e(run_id text, number bigint, epoch text, event json)"

_ADD_EVENTS: Final = f"""
INSERT INTO events (run_id, number, epoch, event) SELECT run_id, number, epoch, {_text("event")} FROM {_EVENTS}
WHERE EXISTS (SELECT 1 FROM runs r WHERE r.run_id = e.run_id) ON CONFLICT DO NOTHING
"""


class _Last(msgspec.Struct, gc=False):
    run_id: str
    name: str
    now: float


_FOLLOW: Final = f"""
UPDATE runs r SET last_event = g.name, updated_at = g.now FROM {records(_Last)} WHERE r.run_id = g.run_id AND r.ended_at IS NULL
"""


def _add_events(db: PostgresDatabase, events: Sequence[EventRow]) -> None:
    """Append to run logs. Idempotent: an event that exists is not changed. Events of a removed run are ignored."""
    if events:
        db.execute(_ADD_EVENTS, (json_rows(events),))
        db.signals.extend([(RUN_TOPIC, run_id) for run_id in {event.run_id for event in events}])


def append_events(db: PostgresDatabase, calls: Sequence[tuple[Any, ...]]) -> list[Any]:
    """Append to the logs of live runs, and update their `last_event`; see `append_events`."""
    asked = cast("Sequence[tuple[float, Sequence[EventRow]]]", calls)
    _add_events(db, [event for _, events in asked for event in events])
    last = {run_id: (name, now) for now, events in asked for run_id, name in runs.last_events(events).items()}
    if last:
        db.execute(_FOLLOW, (json_rows([_Last(run_id, name, now) for run_id, (name, now) in last.items()]),))
    return [None] * len(calls)


def update_statuses(db: PostgresDatabase, calls: Sequence[tuple[Any, ...]]) -> list[Any]:
    """Set the statuses of live runs to other live ones; see `update_status`."""
    db.execute(_MOVE_RUNS, (json_rows([_Moved(run_id, status, now) for now, run_id, status in calls]),))
    db.signals.extend([(RUN_TOPIC, run_id) for _, run_id, _ in calls])
    return [None] * len(calls)


# -- the end of turns ------------------------------------------------------------------------------------------------------------


class _Ended(msgspec.Struct, omit_defaults=True, gc=False):
    id: str
    source: str
    tenant: str
    session_key: str
    user_id: str
    model: str
    routing: Any
    one_shot: int
    now: float
    preview: str
    message_count: int
    tool_call_count: int
    input_tokens: int
    output_tokens: int
    cache_read_tokens: int
    cache_write_tokens: int
    reasoning_tokens: int
    api_call_count: int
    began_at: float
    mark: str
    held: str
    parent: str | None = None
    reason: str | None = None


class _Said(msgspec.Struct, omit_defaults=True, gc=False):
    id: str
    role: str
    content: str
    token_count: int
    timestamp: float
    parts: Any = None
    tool_calls: Any = None
    tool_call_id: str | None = None
    tool_name: str | None = None
    finish_reason: str | None = None
    reasoning: str | None = None
    platform_message_id: str | None = None


class _Reply(msgspec.Struct, gc=False):
    id: str
    platform: str
    target: Any
    text: str
    payload: Any
    turn_id: str
    now: float
    owner: str


class _EndedRun(msgspec.Struct, gc=False):
    run_id: str
    session_id: str
    turn_id: str
    model: str
    tenant: str
    input_preview: str
    idempotency_key: str
    fingerprint: str
    status: str
    now: float
    output: str
    usage: Any
    error: str
    error_code: str
    owner: str


class _Mark(msgspec.Struct, omit_defaults=True, gc=False):
    id: str
    mark: str
    turn_id: str
    first: int | None = None


class _Name(msgspec.Struct, gc=False):
    name: str
    now: float = 0.0


_COUNTED: Final = (
    "message_count",
    "tool_call_count",
    "input_tokens",
    "output_tokens",
    "cache_read_tokens",
    "cache_write_tokens",
    "reasoning_tokens",
    "api_call_count",
)
_GOES_ON: Final = "s.ended_at IS NULL OR s.end_reason = 'idle' OR (s.one_shot = 0 AND s.ended_at <= g.began_at)"

_FINISH: Final = f"""
WITH given AS MATERIALIZED (SELECT * FROM {records(_Ended)}),
changed AS (
    UPDATE sessions s SET
        open_turn = CASE WHEN g.held <> '' AND s.open_turn <> g.held THEN s.open_turn END,
        last_turn = CASE g.mark WHEN '' THEN s.last_turn ELSE g.mark END,
        one_shot = greatest(s.one_shot, g.one_shot),
        last_active = g.now,
        model = CASE s.model WHEN '' THEN g.model ELSE s.model END,
        preview = CASE s.preview WHEN '' THEN g.preview ELSE s.preview END,
        end_reason = CASE WHEN {_GOES_ON} THEN g.reason ELSE s.end_reason END,
        ended_at = CASE WHEN {_GOES_ON} THEN CASE WHEN g.reason IS NOT NULL THEN g.now END ELSE s.ended_at END,
        {", ".join(f"{name} = s.{name} + g.{name}" for name in _COUNTED)}
    FROM given g WHERE s.id = g.id AND {_AMONG} AND s.tenant = g.tenant AND (g.mark = '' OR s.last_turn <> g.mark)
    RETURNING s.id, s.n
), made AS (
    INSERT INTO sessions (id, source, tenant, session_key, user_id, model, parent_session_id, lineage, routing, one_shot,
        started_at, last_active, preview, ended_at, end_reason, last_turn, {", ".join(_COUNTED)})
    SELECT id, source, tenant, session_key, user_id, model, parent, CASE WHEN parent IS NULL THEN '' ELSE 'subagent' END,
        {_text("routing")}, one_shot, now, now, preview, CASE WHEN reason IS NOT NULL THEN now END, reason, mark, {", ".join(_COUNTED)}
    FROM given g WHERE {_UNKNOWN} ORDER BY place
    RETURNING id, n
), written AS (SELECT id, n FROM changed UNION ALL SELECT id, n FROM made),
said AS (
    INSERT INTO messages (session, {MESSAGE_COLUMNS})
    SELECT w.n, {MESSAGE_COLUMNS.replace("parts", _text("parts")).replace("tool_calls", _text("tool_calls"))}
    FROM {records(_Said, 2)} JOIN written w ON w.id = g.id ORDER BY place
)
SELECT id FROM written
"""
"""Makes the sessions that are not there, and changes those of the same tenant in which this end is not written; returns both."""

_ADD_REPLIES: Final = f"""
INSERT INTO outbox (platform, target, text, payload, session_id, turn_id, next_at, created_at, owner)
SELECT platform, {_text("target")}, text, {_text("payload")}, id, turn_id, now, now, owner FROM {records(_Reply)} ORDER BY place
"""

_FINISH_RUNS: Final = f"""
INSERT INTO runs (run_id, session_id, turn_id, model, tenant, input_preview, idempotency_key, fingerprint, status, last_event, created_at,
    updated_at, ended_at, output, usage, error, error_code, owner)
SELECT run_id, session_id, turn_id, model, tenant, input_preview, idempotency_key, fingerprint, status, 'run.' || status, now,
    now, now, output, {_text("usage")}, error, error_code, owner
FROM {records(_EndedRun)} ORDER BY place
ON CONFLICT (run_id) DO UPDATE SET
    session_id = excluded.session_id, model = coalesce(nullif(excluded.model, ''), runs.model), status = excluded.status,
    last_event = excluded.last_event, updated_at = excluded.updated_at, ended_at = excluded.ended_at,
    output = excluded.output, usage = excluded.usage, error = excluded.error, error_code = excluded.error_code
WHERE runs.ended_at IS NULL AND runs.tenant = excluded.tenant AND runs.owner = excluded.owner
RETURNING run_id
"""

_FOREIGN_RUNS: Final = (
    f"SELECT r.run_id FROM {records(_EndedRun)} JOIN runs r ON r.run_id = g.run_id WHERE r.owner <> g.owner LIMIT 1"
)

_WRITTEN: Final = f"""
SELECT g.place FROM {records(_Mark)}
WHERE (g.mark <> '' AND EXISTS (SELECT 1 FROM sessions s WHERE s.id = g.id AND s.last_turn = g.mark))
    OR EXISTS (SELECT 1 FROM inbox i WHERE i.id = g.first AND i.state = 'delivered' AND i.turn_id = g.turn_id)
"""
"""The ends that are there already: the session stays locked until its turn's end is written, so that no other can have come after it. What a turn took
says so for one that ended while it waited for the lock of its session."""

_FOREIGN_ROWS: Final = f"""
SELECT g.id, g.turn_id FROM {records(_Held)} JOIN inbox i ON i.id = g.id WHERE i.owner <> '' AND i.owner <> g.owner LIMIT 1
"""

_TELL: Final = f"""
UPDATE inbox i SET state = 'delivered', reason = '', turn_id = g.turn_id, settled_at = g.now FROM {records(_Held)}
WHERE i.id = g.id AND i.state IN ('pending', 'taken', 'superseded', 'abandoned') AND (i.owner = '' OR i.owner = g.owner)
RETURNING i.root_id
"""

_DELIVER: Final = f"""
UPDATE inbox i SET state = 'delivered', turn_id = g.turn_id, settled_at = g.now FROM {records(_Held)}
WHERE i.id = g.id AND i.kind = 'message' AND i.state IN ('pending', 'taken')
"""

_WAIT_AGAIN: Final = f"""
UPDATE inbox i SET state = 'pending', owner = '', turn_id = '' FROM {records(_Held)}
WHERE i.id = g.id AND i.state = 'taken' AND i.owner = g.owner RETURNING i.inbox, i.session_key
"""

_PROMISED: Final = f"""
SELECT g.name FROM {records(_Name)}
WHERE EXISTS (SELECT 1 FROM jobs j WHERE j.session_id = g.name AND j.ended_at IS NULL AND j.inbox <> '')
    OR EXISTS (SELECT 1 FROM inbox i WHERE i.session_id = g.name AND i.session_id <> '' AND i.settled_at IS NULL)
"""

_ABANDON: Final = f"""
UPDATE inbox i SET state = 'abandoned', reason = '{inbox.SESSION_ENDED}', settled_at = g.now FROM {records(_Name)}
WHERE i.session_id = g.name AND i.session_id <> '' AND i.settled_at IS NULL AND i.state = 'pending'
RETURNING i.root_id, i.inbox, i.session_key
"""

_CLOSED_ROOTS: Final = f"""
SELECT DISTINCT g.name FROM {records(_Name)}
WHERE NOT EXISTS (SELECT 1 FROM jobs j WHERE j.root_id = g.name AND j.ended_at IS NULL)
    AND NOT EXISTS (SELECT 1 FROM inbox i WHERE i.root_id = g.name AND i.root_id <> '' AND i.settled_at IS NULL)
"""


class _End:
    """One end of a turn that is to be written, with its state between the statements."""

    __slots__ = ("finish", "limit", "mark", "now", "owner", "place", "reason")

    def __init__(self, place: int, now: float, owner: str, finish: TurnFinish, limit: int) -> None:
        self.place = place
        self.now = now
        self.owner = owner
        self.finish = finish
        self.limit = limit
        # Turn ids are unique for one owner. A turn that never had its session leaves no mark: another turn has it, and may have to write its end again.
        self.mark = "" if finish.waited else f"{owner}.{finish.start.turn_id}"
        self.reason = finish.end_session

    def session(self) -> _Ended:
        """Return the new values of the session's row."""
        finish = self.finish
        start, usage, messages = finish.start, finish.usage, finish.messages
        context = start.context
        return _Ended(
            context.session_id,
            start.source,
            start.tenant,
            context.session_key,
            context.user_id,
            finish.model or start.model,
            context,
            int(start.one_shot),
            self.now,
            first_words(messages),
            len(messages),
            usage.tool_calls or sum([len(message.tool_calls) for message in messages]),
            usage.input_tokens,
            usage.output_tokens,
            usage.cache_read_tokens,
            usage.cache_write_tokens,
            usage.reasoning_tokens,
            usage.api_calls,
            turns.reopens_before(start),
            self.mark,
            start.turn_id if start.hold else "",
            start.parent_session_id or None,
            self.reason or None,
        )

    def run(self, run: NewRun) -> _EndedRun:
        """Return the new values of the run's row."""
        finish = self.finish
        return _EndedRun(
            run.run_id,
            finish.start.context.session_id or run.session_id,
            finish.start.turn_id,
            finish.model or run.model,
            run.tenant,
            run.input_preview,
            run.idempotency_key,
            run.fingerprint,
            finish.state.value,
            self.now,
            finish.text,
            runs.usage_report(finish.usage),
            finish.error,
            finish.error_code,
            self.owner,
        )

    def rows(self, ids: Iterable[int]) -> list[_Held]:
        """Return the inbox rows of these ids, held by the turn."""
        start = self.finish.start
        return [_Held(number, start.turn_id, self.owner, start.context.session_id, self.now) for number in ids]


def _said(session_id: str, message: Message, now: float) -> _Said:
    content = message.content
    plain = isinstance(content, str)
    return _Said(
        session_id,
        message.role,
        content if plain else message.text,
        message.token_count,
        message.timestamp or now,
        None if plain else content,
        [(call.id, call.name, call.arguments) for call in message.tool_calls] if message.tool_calls else None,
        message.tool_call_id or None,
        message.tool_name or None,
        message.finish_reason or None,
        message.reasoning or None,
        message.platform_message_id or None,
    )


def finish_turns(db: PostgresDatabase, calls: Sequence[tuple[Any, ...]]) -> list[Any]:
    """Write everything that turns leave behind; see `finish_turn`."""
    ends = [_End(place, *cast("tuple[float, str, TurnFinish, int]", args)) for place, args in enumerate(calls)]
    known = _settle_rows(db, [end for end in ends if end.finish.acknowledged or end.finish.start.inbox_ids])
    if known:
        ends = [end for end in ends if end.place not in known]
    _keep_promised(db, [end for end in ends if end.reason and end.finish.branched])
    ends = _write_ends(db, ends)
    _write_others(db, ends)
    values: list[Any] = [False] * len(calls)
    for end in ends:
        values[end.place] = bool(end.reason)
    return values


def _settle_rows(db: PostgresDatabase, ends: Sequence[_End]) -> set[int]:
    """Settle the inbox rows of these turns; return the places of those whose end is written already."""
    if not ends:
        return set()
    marks = [
        _Mark(start.context.session_id, end.mark, start.turn_id, start.inbox_ids[0] if start.inbox_ids else None)
        for end in ends
        for start in (end.finish.start,)
    ]
    asked = db.execute(_WRITTEN, (json_rows(marks),))
    held = json_rows([row for end in ends for row in end.rows(end.finish.start.inbox_ids)])
    foreign = many(db, _FOREIGN_ROWS, (held,))
    known = {ends[int(place) - 1].place for (place,) in asked.fetchall()}
    if foreign:
        number, turn_id = foreign[0]
        if not known:
            raise Fenced(f"inbox row {number} of turn {turn_id} now belongs to another owner")
        return known | _settle_rows(db, [end for end in ends if end.place not in known])
    told: list[_Held] = []
    rest: list[_Held] = []
    for end in ends:
        if end.place not in known:
            said = end.finish.acknowledged
            told += end.rows(said)
            rest += end.rows(number for number in end.finish.start.inbox_ids if number not in said)
    closed = db.execute(_TELL, (json_rows(told),)) if told else None
    if rest:
        data = json_rows(rest)
        db.execute(_DELIVER, (data,))
        db.signals.extend([(inbox_topic(name), key) for name, key in many(db, _WAIT_AGAIN, (data,))])
    if closed is not None:
        _close_roots(db, [root for (root,) in closed.fetchall()])
    return known


def _close_roots(db: PostgresDatabase, roots: Iterable[str]) -> None:
    """Signal the roots among these of which nothing is open any more."""
    names = [_Name(root) for root in dict.fromkeys(roots) if root]
    if names:
        db.signals.extend([(ROOT_TOPIC, root) for (root,) in many(db, _CLOSED_ROOTS, (json_rows(names),))])


def _keep_promised(db: PostgresDatabase, ends: Sequence[_End]) -> None:
    """Keep sessions open that still have pending completions."""
    if ends:
        names = [_Name(end.finish.start.context.session_id) for end in ends]
        promised = {name for (name,) in many(db, _PROMISED, (json_rows(names),))}
        for end in ends:
            if end.finish.start.context.session_id in promised:
                end.reason = ""


def _write_ends(db: PostgresDatabase, ends: list[_End]) -> list[_End]:
    """Write sessions, messages, runs and events; return the ends that were not written before. Raises `ForeignSession` and `Fenced`."""
    if not ends:
        return ends
    sessions = json_rows([end.session() for end in ends])
    said = [
        _said(end.finish.start.context.session_id, message, end.now) for end in ends for message in end.finish.messages
    ]
    asked = db.execute(_FINISH, (sessions, json_rows(said)))
    # An end that was written before has ended its run, too: the statements for it change nothing.
    ended = {run.run_id: end.run(run) for end in ends if (run := end.finish.start.run) is not None}
    closed = db.execute(_FINISH_RUNS, (json_rows([*ended.values()]),)) if ended else None
    written = {name for (name,) in asked.fetchall()}
    if len(written) < len(ends):
        ends = _new_ends(db, ends, written)
    if closed is not None:
        open_runs = ended.keys() - {run_id for (run_id,) in closed.fetchall()}
        left = [ended[run.run_id] for end in ends if (run := end.finish.start.run) and run.run_id in open_runs]
        if left and (foreign := many(db, _FOREIGN_RUNS, (json_rows(left),))):
            raise Fenced(f"run {foreign[0][0]} now belongs to another owner")
    over = [_Kept(run.run_id, "", "") for end in ends if (run := end.finish.start.run) is not None and run.resumable]
    if over:
        db.execute(_FORGET_RESUMPTIONS, (json_rows(over),))
    return ends


def _new_ends(db: PostgresDatabase, ends: list[_End], written: set[str]) -> list[_End]:
    """Return the ends whose sessions were written just now. Raises `ForeignSession` unless the others were written before."""
    marks = [_Mark(end.finish.start.context.session_id, end.mark, "") for end in ends]
    known = {place - 1 for (place,) in many(db, _WRITTEN, (json_rows(marks),))}
    for place, end in enumerate(ends):
        name = end.finish.start.context.session_id
        if name not in written and place not in known:
            raise ForeignSession(f"there is no session {name!r}")
    return [end for end in ends if end.finish.start.context.session_id in written]


def _write_others(db: PostgresDatabase, ends: Sequence[_End]) -> None:
    """Write the records that only some turns leave behind, and the signals of all."""
    replies: list[_Reply] = []
    events: list[EventRow] = []
    others: list[Callable[[PostgresDatabase], None]] = []
    ended: list[_Name] = []
    roots: list[str] = []
    for end in ends:
        finish = end.finish
        start, session_id = finish.start, finish.start.context.session_id
        for reply in finish.outbox:
            target, owner = dict(sorted(reply.target.items())), end.owner if start.hold else ""
            replies.append(
                _Reply(session_id, reply.platform, target, reply.text, reply.payload, start.turn_id, end.now, owner)
            )
            db.signals.append((OUTBOX_TOPIC, reply.platform))
        if start.run is not None:
            db.signals.append((RUN_TOPIC, start.run.run_id))
        events += finish.events
        if finish.also:
            others.append(partial(_put_also, end))
        if end.reason:
            ended.append(_Name(session_id, end.now))
        if finish.branched:
            roots.append(finish.root_id)
        if start.hold:
            db.signals.append((SESSION_TOPIC, session_id))
    if replies:
        db.execute(_ADD_REPLIES, (json_rows(replies),))
    _add_events(db, events)
    if others:
        run_together(db, others)
    if ended:
        for root, name, key in many(db, _ABANDON, (json_rows(ended),)):
            db.signals.append((inbox_topic(name), key))
            roots.append(root)
    _close_roots(db, roots)


def _put_also(end: _End, db: PostgresDatabase) -> None:
    for record in end.finish.also:
        turns.put_also(db, end.now, record, end.limit)


# -- the inbox -------------------------------------------------------------------------------------------------------------------


class _NewMessage(msgspec.Struct, omit_defaults=True, gc=False):
    inbox: str
    session_key: str
    session_id: str
    routing: Any
    text: str
    payload: Any
    dedupe_key: str
    now: float
    most: int | None = None


class _Lane(msgspec.Struct, gc=False):
    owner: str
    inbox: str
    session_key: str
    most: int
    alone: int


class _Claimed(msgspec.Struct, gc=False):
    id: int
    owner: str


_WAITING: Final = f"""
SELECT g.place, count(i.id) FROM {records(_NewMessage)} JOIN inbox i ON i.settled_at IS NULL AND i.session_key = g.session_key
    AND i.inbox = g.inbox AND i.kind = 'message' AND i.state = 'pending'
WHERE g.most IS NOT NULL GROUP BY g.place, g.most HAVING count(i.id) >= g.most
"""

_ACCEPT: Final = f"""
WITH given AS MATERIALIZED (SELECT nextval(pg_get_serial_sequence('inbox', 'id')) AS id, g.* FROM {records(_NewMessage)}),
accepted AS (
    INSERT INTO inbox (id, kind, inbox, session_key, session_id, routing, text, payload, dedupe_key, created_at)
    SELECT id, 'message', inbox, session_key, session_id, {_text("routing")}, text, {_text("payload")}, dedupe_key, now FROM given ORDER BY id
    ON CONFLICT DO NOTHING RETURNING id
)
SELECT place, id FROM accepted JOIN given USING (id)
"""

_ELSEWHERE: Final = inbox.ELSEWHERE.replace("?1", "g.session_key").replace("?2", "g.inbox").replace("?3", "g.owner")

_CLAIMABLE: Final = f"""
SELECT g.place, c.* FROM {records(_Lane)} CROSS JOIN LATERAL (
    SELECT {inbox.COLUMNS} FROM inbox i WHERE i.settled_at IS NULL AND i.session_key = g.session_key AND i.inbox = g.inbox
        AND (i.state = 'pending' OR (i.state = 'taken' AND i.owner = g.owner AND i.turn_id = ''))
    ORDER BY i.id LIMIT g.most
) AS c
WHERE g.alone = 0 OR NOT EXISTS ({_ELSEWHERE})
ORDER BY g.place, c.id
"""
"""The rows that lanes may claim. With `alone`, a lane that another node has is not claimed."""

_CLAIM: Final = f"""
UPDATE inbox i SET state = 'taken', owner = g.owner, attempts = i.attempts + 1 FROM {records(_Claimed)}
WHERE i.id = g.id AND (i.state = 'pending' OR (i.state = 'taken' AND i.owner = g.owner AND i.turn_id = '')) RETURNING i.id
"""


def accept_messages(db: PostgresDatabase, calls: Sequence[tuple[Any, ...]]) -> list[Any]:
    """Write messages, unless their dedupe keys are known or too many wait; see `accept_message`."""
    asked = cast("Sequence[tuple[float, NewMessage, int | None]]", [(*args, None)[:3] for args in calls])
    rows = [
        _NewMessage(
            message.inbox,
            message.session_key,
            message.routing.session_id,
            message.routing,
            message.text,
            message.payload,
            message.dedupe_key,
            now,
            limit,
        )
        for now, message, limit in asked
    ]
    values: list[Any] = [None] * len(rows)
    if any(row.most is not None for row in rows):
        for place, count in many(db, _WAITING, (json_rows(rows),)):
            values[place - 1] = Refusal(
                MailboxFull(
                    f"{count} messages already wait in this conversation; wait for an answer, or stop the current turn"
                )
            )
    places = [place for place, value in enumerate(values) if value is None]
    if places:
        for place, number in many(db, _ACCEPT, (json_rows([rows[place] for place in places]),)):
            row = rows[places[int(place) - 1]]
            values[places[int(place) - 1]] = number
            db.signals.append((inbox_topic(row.inbox), row.session_key))
    return values


def _claim(db: PostgresDatabase, calls: Sequence[tuple[Any, ...]], *, alone: bool) -> list[Any]:
    lanes = [_Lane(owner, name, key, limit, int(alone)) for owner, name, key, limit in calls]
    found: dict[int, list[InboxRow]] = {}
    for place, *row in many(db, _CLAIMABLE, (json_rows(lanes),)):
        found.setdefault(place - 1, []).append(inbox.row_of(cast(Row, row)))
    chosen = {place: inbox.first_of(rows) for place, rows in found.items()}
    if chosen:
        wanted = [_Claimed(row.id, lanes[place].owner) for place, rows in chosen.items() for row in rows]
        claimed = {number for (number,) in many(db, _CLAIM, (json_rows(wanted),))}
        for place, rows in chosen.items():
            if missing := sum(row.id not in claimed for row in rows):
                raise Fenced(f"{missing} inbox rows of {lanes[place].session_key} were claimed by another owner")
    return [inbox.claimed_again(chosen.get(place, ())) for place in range(len(lanes))]


BATCHES: Final[dict[Callable[..., Any], Batch]] = {
    turns.begin_turn: begin_turns,
    turns.finish_turn: finish_turns,
    runs.append_events: append_events,
    runs.update_status: update_statuses,
    inbox.accept_message: accept_messages,
    inbox.claim_rows: partial(_claim, alone=False),
    inbox.claim_lane: partial(_claim, alone=True),
}
"""The verbs of which this backend runs many calls at a time."""
