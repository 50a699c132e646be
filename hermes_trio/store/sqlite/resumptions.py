"""Runs that are begun again after an interruption: what begins each, who may begin it, and when it is not begun any more.

A run that asks for it has a row here until it ends. The reaper releases it: it then has no owner, and the first node that claims it begins its next
attempt, with one event that says so. `refusal` is the one place that decides whether there is a next attempt.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import msgspec

from hermes_trio.runtime.outcome import CancelCause, RunStatus
from hermes_trio.runtime.ports import RUN_TOPIC, NewRun, ResumedRun, Resumption

from .encoding import dump
from .rows import Database, changed, exists, many, one, write
from .sessions import INTERRUPTED
from .verbs import Verbs

ATTEMPTS: Final = 3
"""How often a run is begun at most, the first time included."""

_LOST: Final = "The server stopped while this was running; it was not completed."
_NOT_AGAIN: Final = "The server stopped while this was running; it was not begun again, because "
_STOPPED: Final = "the server stopped before the run had ended; it was not begun again"

_decoder: Final = msgspec.json.Decoder(Resumption)


def keep_resumption(db: Database, run_id: str, resumption: Resumption) -> None:
    """Store what begins a run again. Idempotent."""
    sql = "INSERT INTO resumptions (run_id, spec, key_id) VALUES (?, ?, ?) ON CONFLICT DO NOTHING"
    write(db, sql, (run_id, dump(resumption), resumption.context.key_id))


def forget_resumption(db: Database, run_id: str) -> None:
    """Remove what would begin a run again: it has ended."""
    write(db, "DELETE FROM resumptions WHERE run_id = ?", (run_id,))


_FACTS: Final = """
SELECT r.attempt, r.status,
    (SELECT count(*) FROM sessions s WHERE s.id = r.session_id AND s.tenant = r.tenant AND (s.ended_at IS NULL OR s.end_reason = 'idle')),
    (SELECT max(i.stopped) FROM resumptions i WHERE i.run_id = r.run_id),
    (SELECT count(*) FROM resumptions i JOIN api_keys k ON k.id = i.key_id WHERE i.run_id = r.run_id
        AND (k.revoked_at IS NOT NULL OR k.expires_at <= ?1))
FROM runs r WHERE r.run_id = ?2
"""


def refusal(db: Database, now: float, run_id: str) -> Mapping[str, Any] | None:
    """Return the terminal event with which an interrupted run ends, or None if it is begun again."""
    found = one(db, _FACTS, (now, run_id))
    attempt, status, sessions, stopped, invalid = found or (0, "", 0, None, 0)
    if not attempt or stopped is None:
        return _failed(_LOST)
    if stopped or status == RunStatus.STOPPING.value:
        return {"event": "run.cancelled", "cause": CancelCause.STOP.value, "detail": _STOPPED}
    if not sessions:
        return _failed(f"{_NOT_AGAIN}its session has ended.")
    if invalid:
        return _failed(f"{_NOT_AGAIN}its API key was revoked or has expired.")
    if attempt >= ATTEMPTS:
        return _failed(
            f"The server stopped while this was running, in attempt {attempt} of {ATTEMPTS}; it was not completed."
        )
    return None


def _failed(error: str) -> Mapping[str, Any]:
    return {"event": "run.failed", "error": error, "error_code": INTERRUPTED}


def end_interrupted(db: Database, now: float, owner: str, epoch: str, run_id: str, event: Mapping[str, Any]) -> None:
    """End a run whose owner has ended, with this terminal event."""
    _add_event(db, now, epoch, run_id, event)
    status = str(event["event"]).removeprefix("run.")
    write(
        db,
        "UPDATE runs SET status = ?, error = ?, error_code = ?, last_event = ?, updated_at = ?, ended_at = ?, owner = ? WHERE run_id = ?",
        (
            status,
            event.get("error") or f"cancelled ({event['cause']}: {event['detail']})",
            event.get("error_code") or event["cause"],
            event["event"],
            now,
            now,
            owner,
            run_id,
        ),
    )
    forget_resumption(db, run_id)


def _add_event(db: Database, now: float, epoch: str, run_id: str, event: Mapping[str, Any]) -> None:
    """Append an event to the log of a run that no node works on."""
    write(
        db,
        "INSERT INTO events (run_id, number, epoch, event)"
        " SELECT ?1, coalesce(max(number), 0) + 1, ?2, ?3 FROM events WHERE run_id = ?1",
        (run_id, epoch, dump({"event": event["event"], "run_id": run_id, "timestamp": now, **event})),
    )
    db.signals.append((RUN_TOPIC, run_id))


def has_claimable(db: Database, owner: str, most: int | None) -> bool:
    """Return whether `claim` may return something."""
    waits = "r.owner = ''" if most != 0 else "false"
    sql = (
        "SELECT 1 FROM resumptions i JOIN runs r ON r.run_id = i.run_id"
        f" WHERE r.ended_at IS NULL AND ({waits} OR (r.owner = ? AND r.attempt > 1)) LIMIT 1"
    )
    return exists(db, sql, (owner,))


_BEGIN: Final = """
UPDATE runs SET attempt = attempt + 1, status = CASE WHEN status = 'queued' AND ?2 = 1 THEN 'queued' ELSE 'running' END,
    last_event = 'run.resumed', updated_at = ?3
WHERE run_id = ?1 RETURNING attempt
"""
"""A store with one owner does not follow a live run: there the row of a run that was running says `queued`."""

_CLAIMED: Final = """
SELECT r.run_id, r.session_id, r.model, r.tenant, r.input_preview, r.idempotency_key, r.fingerprint,
    r.attempt, r.status, r.created_at, i.stopped, i.spec, (SELECT max(number) FROM events e WHERE e.run_id = r.run_id)
FROM resumptions i JOIN runs r ON r.run_id = i.run_id WHERE r.ended_at IS NULL AND r.owner = ? AND r.attempt > 1 ORDER BY r.run_id
"""


def claim(db: Database, now: float, owner: str, shared: bool, epoch: str, most: int | None) -> list[ResumedRun]:
    """Claim interrupted runs that no node has, all or at `most` so many; return all that this one has claimed and that have not ended."""
    sql = (
        "SELECT r.run_id FROM resumptions i JOIN runs r ON r.run_id = i.run_id"
        " WHERE r.ended_at IS NULL AND r.owner = '' ORDER BY r.run_id"
    )
    taken = 0
    for (run_id,) in many(db, sql):
        if most is not None and taken >= most:
            break
        if not _take(db, owner, run_id):
            continue
        event = refusal(db, now, run_id)
        if event is not None:
            end_interrupted(db, now, owner, epoch, run_id, event)
            continue
        ((attempt,),) = many(db, _BEGIN, (run_id, int(shared), now))
        taken += 1
        _add_event(db, now, epoch, run_id, {"event": "run.resumed", "attempt": attempt, "attempts": ATTEMPTS})
    found: list[ResumedRun] = []
    for row in many(db, _CLAIMED, (owner,)):
        try:
            resumption = _decoder.decode(row[11])
        except msgspec.MsgspecError:
            error = f"{_NOT_AGAIN}this version of the server cannot read its input."
            end_interrupted(db, now, owner, epoch, row[0], _failed(error))
            continue
        run = NewRun(
            run_id=row[0],
            session_id=row[1],
            model=row[2],
            tenant=row[3],
            input_preview=row[4],
            idempotency_key=row[5],
            fingerprint=row[6],
            resumable=True,
        )
        found.append(
            ResumedRun(
                run=run,
                attempt=row[7],
                status=RunStatus(row[8]),
                created_at=row[9],
                stopped=bool(row[10]),
                resumption=resumption,
                last=row[12],
            )
        )
    return found


def _take(db: Database, owner: str, run_id: str) -> bool:
    """Take a run that no node has; return False if another node has it."""
    sql = "UPDATE runs SET owner = ? WHERE run_id = ? AND owner = '' AND ended_at IS NULL"
    return bool(changed(db, sql, (owner, run_id)))


def stop(db: Database, now: float, owner: str, epoch: str, run_id: str, session_id: str) -> None:
    """Note that runs are not to be begun again; end those that no node has."""
    sql = (
        "SELECT r.run_id FROM resumptions i JOIN runs r ON r.run_id = i.run_id"
        " WHERE r.ended_at IS NULL AND (r.run_id = ? OR (r.session_id = ? AND r.session_id <> '')) ORDER BY r.run_id"
    )
    for (found,) in many(db, sql, (run_id, session_id)):
        taken = _take(db, owner, found)
        write(db, "UPDATE resumptions SET stopped = 1 WHERE run_id = ?", (found,))
        if taken and (event := refusal(db, now, found)) is not None:
            end_interrupted(db, now, owner, epoch, found, event)


class SqliteResumptions(Verbs):
    """The part of the store for runs that are begun again."""

    async def claim_interrupted(self, epoch: str, most: int | None = None) -> list[ResumedRun]:
        if not await self._read(has_claimable, self.owner, most):
            return []
        return await self._write(claim, self._clock(), self.owner, self.lease_seconds > 0, epoch, most)

    async def stop_resuming(self, epoch: str, *, run_id: str = "", session_id: str = "") -> None:
        await self._write(stop, self._clock(), self.owner, epoch, run_id, session_id)
