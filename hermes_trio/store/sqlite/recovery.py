"""Boot: nothing may be running in the store without a live task.

One transaction, before any work: what was under way when the last server ended is given its one truthful end, and whoever was promised
something is told exactly once. Running it again finds nothing to do.
"""

from __future__ import annotations

from typing import Final

from hermes_trio.runtime.outcome import JobState
from hermes_trio.runtime.ports import NewNotice, NoticeKind, Recovery
from hermes_trio.store.records import JobRow

from .encoding import dump, load_routing
from .inbox import insert_notice, waiting_count
from .jobs import JOB_COLUMNS, job_from_row
from .rows import Database, changed, many, write
from .sessions import end_session
from .verbs import Verbs

__all__ = ["SqliteRecovery", "recover"]

INTERRUPTED: Final = "interrupted"
_ERROR: Final = "The server stopped while this was running; it was not completed."


def recover(db: Database, now: float, epoch: str) -> Recovery:
    """Give everything that was under way its end."""
    sessions_ended = _end_interrupted_turns(db, now)
    runs = _fail_runs(db, now, epoch)
    jobs = _lose_jobs(db, now)
    _interrupt_messages(db, now)
    sessions_ended += _end_settled_one_shots(db, now)
    approvals = changed(
        db,
        "UPDATE approvals SET state = 'expired', reason = ?, answered_at = ? WHERE state = 'pending'",
        (INTERRUPTED, now),
    )
    outbox = changed(
        db, "UPDATE outbox SET state = 'pending', maybe_duplicate = 1, next_at = ? WHERE state = 'attempting'", (now,)
    )
    write(
        db,
        "UPDATE cron_executions SET state = 'failed', error = ?, ended_at = ? WHERE state IN ('claimed', 'running')",
        (INTERRUPTED, now),
    )
    write(db, "DELETE FROM grants WHERE scope <> '' AND scope NOT IN (SELECT session_key FROM routes)")
    return Recovery(
        epoch=epoch,
        runs_interrupted=runs,
        jobs_lost=jobs,
        approvals_expired=approvals,
        outbox_requeued=outbox,
        sessions_ended=sessions_ended,
        messages_waiting=waiting_count(db),
    )


def _end_interrupted_turns(db: Database, now: float) -> int:
    ended = 0
    for session_id, one_shot in many(db, "SELECT id, one_shot FROM sessions WHERE open_turn IS NOT NULL"):
        if one_shot and end_session(db, now, session_id, INTERRUPTED):
            ended += 1
    write(db, "UPDATE sessions SET open_turn = NULL WHERE open_turn IS NOT NULL")
    return ended


def _end_settled_one_shots(db: Database, now: float) -> int:
    """A one-shot session whose turn was over waited for its jobs; with nothing left to tell it, it is settled."""
    sql = (
        "SELECT id FROM sessions s WHERE one_shot = 1 AND ended_at IS NULL AND NOT EXISTS"
        " (SELECT 1 FROM inbox WHERE session_id = s.id AND session_id <> '' AND state = 'pending')"
    )
    return sum(end_session(db, now, session_id, INTERRUPTED) for (session_id,) in many(db, sql))


def _fail_runs(db: Database, now: float, epoch: str) -> int:
    live = [run_id for (run_id,) in many(db, "SELECT run_id FROM runs WHERE ended_at IS NULL")]
    for run_id in live:
        event = {
            "event": "run.failed",
            "run_id": run_id,
            "timestamp": now,
            "error": _ERROR,
            "error_code": INTERRUPTED,
        }
        write(
            db,
            "INSERT INTO events (run_id, number, epoch, event)"
            " SELECT ?1, coalesce(max(number), 0) + 1, ?2, ?3 FROM events WHERE run_id = ?1",
            (run_id, epoch, dump(event)),
        )
        write(
            db,
            "UPDATE runs SET status = 'failed', error = ?, error_code = ?, last_event = 'run.failed', updated_at = ?,"
            " ended_at = ? WHERE run_id = ?",
            (_ERROR, INTERRUPTED, now, now, run_id),
        )
    return len(live)


def _lose_jobs(db: Database, now: float) -> int:
    live = [job_from_row(row) for row in many(db, f"SELECT {JOB_COLUMNS} FROM jobs WHERE ended_at IS NULL")]
    for job in live:
        write(
            db,
            "UPDATE jobs SET state = ?, summary = ?, ended_at = ? WHERE job_id = ?",
            (JobState.LOST.value, "lost when the server stopped", now, job.job_id),
        )
        if job.inbox:
            insert_notice(db, now, _lost(job))
    return len(live)


def _lost(job: JobRow) -> NewNotice:
    tail = f" Its last known output:\n{job.output_tail}" if job.output_tail else " No output of it is known."
    return NewNotice(
        inbox=job.inbox,
        session_key=job.session_key,
        session_id=job.session_id,
        routing=job.routing,
        kind=NoticeKind.LOST,
        text=(
            f"The background {job.kind} {job.job_id} ({job.title}) was lost: the server stopped while it was running, and it"
            f" runs no more. Whether it had finished its work is not known.{tail}"
        ),
        job_id=job.job_id,
        root_id=job.root_id,
        payload={
            "job_id": job.job_id,
            "kind": job.kind,
            "title": job.title,
            "state": JobState.LOST.value,
            "output": job.output_tail,
        },
    )


def _interrupt_messages(db: Database, now: float) -> None:
    sql = "SELECT id, inbox, session_key, session_id, routing, text, turn_id FROM inbox WHERE state = 'taken'"
    for number, inbox, key, session_id, routing, text, turn_id in many(db, sql):
        write(db, "UPDATE inbox SET state = 'interrupted', settled_at = ? WHERE id = ?", (now, number))
        insert_notice(
            db,
            now,
            NewNotice(
                inbox=inbox,
                session_key=key,
                session_id=session_id,
                routing=load_routing(routing),
                kind=NoticeKind.INFORMATION,
                text=(
                    "The server stopped while this message was being worked on. It was not completed, and was not started"
                    f" again; what it had done until then is not known:\n{text}"
                ),
                root_id=turn_id,
                payload={"interrupted_message": number},
            ),
        )


class SqliteRecovery(Verbs):
    """Boot's part of the store."""

    async def recover(self, epoch: str) -> Recovery:
        """Called once, before any work: nothing may be running in the store without a live task."""
        return await self._write_heavily(recover, self._clock(), epoch)
