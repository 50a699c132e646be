"""The reaper: ends or requeues everything that owners that have ended still hold in the store.

One transaction handles everything that such an owner held, at the start or when another node has died: work that had begun gets its
end state, or, if it is a run that asked for that, waits without an owner for its next attempt; each pending completion is queued exactly once;
rows that were only claimed wait again, with their count of attempts. The reaper becomes the owner of what it ends, so that an owner that
still runs is fenced. Running it again finds nothing.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence

import msgspec

from hermes_trio.runtime.outcome import JobState
from hermes_trio.runtime.ports import (
    APPROVAL_TOPIC,
    OUTBOX_TOPIC,
    REAP_TOPIC,
    SESSION_TOPIC,
    NewNotice,
    NoticeKind,
    Recovery,
    inbox_topic,
)
from hermes_trio.store.records import JobRow

from .approvals import forget_grants
from .cursors import set_meta
from .encoding import load_routing
from .inbox import insert_notice, waiting_count
from .jobs import JOB_COLUMNS, job_from_row
from .nodes import insert_node, remove_gone, remove_node
from .resumptions import end_interrupted, refusal
from .roots import close_root
from .rows import Database, many, marks, write
from .sessions import INTERRUPTED, end_session
from .verbs import Verbs
from .writer import Weight


class _Reaper:
    """One run of the reaper. `gone` is the SQL condition that a row's owner is not alive."""

    def __init__(self, db: Database, now: float, owner: str, live: Sequence[str]) -> None:
        self.db = db
        self.now = now
        self.owner = owner
        self.live: tuple[str, ...] = tuple(live)
        self.gone: str = f"owner NOT IN ({marks(len(self.live))})" if self.live else "true"


def reap(db: Database, now: float, owner: str, live: Sequence[str], epoch: str) -> Recovery:
    """End or requeue everything that belongs to owners that have ended. `live` are the live owners beside the nodes."""
    live = (*live, *remove_gone(db, now))
    reaper = _Reaper(db, now, owner, live)
    gone, held = reaper.gone, reaper.live
    sessions_ended = _end_interrupted_turns(reaper)
    runs, released = _end_runs(reaper, epoch)
    jobs = _lose_jobs(reaper)
    _interrupt_messages(reaper)
    sessions_ended += _end_settled_one_shots(reaper)
    approvals = many(
        db,
        "UPDATE approvals SET state = 'expired', reason = ?, answered_at = ?, owner = ?"
        f" WHERE state = 'pending' AND {gone} RETURNING id",
        (INTERRUPTED, now, owner, *held),
    )
    db.signals.extend([(APPROVAL_TOPIC, approval_id) for (approval_id,) in approvals])
    outbox = many(
        db,
        "UPDATE outbox SET state = 'pending', maybe_duplicate = maybe_duplicate + 1, next_at = ?, owner = ''"
        f" WHERE settled_at IS NULL AND state = 'attempting' AND {gone} RETURNING platform",
        (now, *held),
    )
    reserved = many(
        db,
        "UPDATE outbox SET owner = '' WHERE settled_at IS NULL AND state = 'pending' AND owner <> ''"
        f" AND {gone} RETURNING platform",
        held,
    )
    db.signals.extend([(OUTBOX_TOPIC, platform) for (platform,) in (*outbox, *reserved)])
    write(
        db,
        "UPDATE cron_executions SET state = 'failed', error = ?, ended_at = ?, owner = ?"
        f" WHERE state IN ('claimed', 'running') AND {gone}",
        (INTERRUPTED, now, owner, *held),
    )
    forget_grants(db, now)
    return Recovery(
        epoch=epoch,
        runs_interrupted=runs,
        runs_released=released,
        jobs_lost=jobs,
        approvals_expired=len(approvals),
        outbox_requeued=len(outbox),
        sessions_ended=sessions_ended,
        messages_waiting=waiting_count(db),
    )


def _end_interrupted_turns(reaper: _Reaper) -> int:
    db = reaper.db
    open_turns = f"open_turn IS NOT NULL AND {reaper.gone}"
    ended = 0
    for session_id, one_shot in many(db, f"SELECT id, one_shot FROM sessions WHERE {open_turns}", reaper.live):
        if one_shot and end_session(db, reaper.now, session_id, INTERRUPTED):
            ended += 1
        db.signals.append((SESSION_TOPIC, session_id))
    write(db, f"UPDATE sessions SET open_turn = NULL WHERE {open_turns}", reaper.live)
    return ended


def _end_settled_one_shots(reaper: _Reaper) -> int:
    """End one-shot sessions whose turn was over and that waited only for jobs, if no completion is pending any more."""
    db = reaper.db
    sql = (
        f"SELECT id FROM sessions s WHERE one_shot = 1 AND ended_at IS NULL AND open_turn IS NULL AND {reaper.gone}"
        " AND NOT EXISTS (SELECT 1 FROM inbox WHERE session_id = s.id AND session_id <> '' AND settled_at IS NULL)"
        " AND NOT EXISTS (SELECT 1 FROM jobs WHERE session_id = s.id AND ended_at IS NULL)"
    )
    return sum(end_session(db, reaper.now, session_id, INTERRUPTED) for (session_id,) in many(db, sql, reaper.live))


def _end_runs(reaper: _Reaper, epoch: str) -> tuple[int, int]:
    """End the runs, or release those that are begun again; return the number of each."""
    db = reaper.db
    sql = f"SELECT run_id FROM runs WHERE ended_at IS NULL AND {reaper.gone} AND (owner <> '' OR attempt = 0)"
    ended = released = 0
    for (run_id,) in many(db, sql, reaper.live):
        event = refusal(db, reaper.now, run_id)
        if event is not None:
            end_interrupted(db, reaper.now, reaper.owner, epoch, run_id, event)
            ended += 1
        else:
            write(db, "UPDATE runs SET owner = '' WHERE run_id = ?", (run_id,))
            released += 1
    if released:
        db.signals.append((REAP_TOPIC, reaper.owner))
    return ended, released


def _lose_jobs(reaper: _Reaper) -> int:
    db, now = reaper.db, reaper.now
    sql = f"SELECT {JOB_COLUMNS} FROM jobs WHERE ended_at IS NULL AND {reaper.gone}"
    live = [job_from_row(row) for row in many(db, sql, reaper.live)]
    for job in live:
        write(
            db,
            "UPDATE jobs SET state = ?, summary = ?, ended_at = ?, owner = ? WHERE job_id = ?",
            (JobState.LOST.value, "lost when the server stopped", now, reaper.owner, job.job_id),
        )
        if job.inbox:
            insert_notice(db, now, _lost(job))
        close_root(db, job.root_id)
    return len(live)


def _lost(job: JobRow) -> NewNotice:
    tail = f" Its last known output:\n{job.output_tail}" if job.output_tail else " No output of it is known."
    return NewNotice(
        inbox=job.inbox,
        routing=job.routing,
        kind=NoticeKind.LOST,
        text=(
            f"The background {job.kind} {job.job_id} ({job.title}) was lost: the server stopped while it was running, and it is"
            f" not running any more. Whether it had finished its work is not known.{tail}"
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


def _interrupt_messages(reaper: _Reaper) -> None:
    """Mark messages whose turn had begun as interrupted, since they are never begun again; requeue all other taken rows."""
    db, now = reaper.db, reaper.now
    sql = (
        "SELECT id, inbox, session_key, session_id, routing, text, turn_id, kind FROM inbox"
        f" WHERE state = 'taken' AND {reaper.gone}"
    )
    for number, inbox, key, session_id, routing, text, turn_id, kind in many(db, sql, reaper.live):
        if kind == "notice" or not turn_id:
            write(db, "UPDATE inbox SET state = 'pending', owner = '', turn_id = '' WHERE id = ?", (number,))
            db.signals.append((inbox_topic(inbox), key))
            continue
        write(
            db,
            "UPDATE inbox SET state = 'interrupted', settled_at = ?, owner = ? WHERE id = ?",
            (now, reaper.owner, number),
        )
        insert_notice(
            db,
            now,
            NewNotice(
                inbox=inbox,
                routing=msgspec.structs.replace(load_routing(routing), session_key=key, session_id=session_id),
                kind=NoticeKind.INFORMATION,
                text=(
                    "The server stopped while this message was being worked on. It was not completed, and was not started"
                    f" again; what it had done until then is not known:\n{text}"
                ),
                root_id=turn_id,
                payload={"interrupted_message": number},
            ),
        )


def recover(db: Database, now: float, last: str, owner: str, member: tuple[str, float] | None, epoch: str) -> Recovery:
    """Begin an owner, as a node with that name and lease or as the only owner of the database, and reap. Its last incarnation has ended."""
    remove_node(db, last)
    if member is not None:
        insert_node(db, now, owner, *member)
    return reap(db, now, owner, () if member is not None else (owner,), epoch)


def leave(db: Database, now: float, owner: str, epoch: str) -> None:
    """End a node in order: reap its own remaining work, and announce it if that interrupted a session."""
    remove_node(db, owner)
    if reap(db, now, owner, (), epoch).sessions_ended:
        db.signals.append((REAP_TOPIC, owner))


class SqliteRecovery(Verbs):
    """The reaper's part of the store."""

    node_name: str
    """The name of this node; empty for the only owner of a database."""

    async def recover(self, epoch: str) -> Recovery:
        last, self.owner = self.owner, secrets.token_hex(16)
        member = self.lease_seconds and (self.node_name, self.lease_seconds)
        return await self._writer.submit(
            recover, self._lease_clock(), last, self.owner, member or None, epoch, weight=Weight.HEAVY
        )

    async def reap(self, epoch: str) -> Recovery:
        alone = () if self.lease_seconds else (self.owner,)
        return await self._write_heavily(reap, self._lease_clock(), self.owner, alone, epoch)

    async def leave_node(self, epoch: str) -> None:
        await self._write_heavily(leave, self._lease_clock(), self.owner, epoch)

    async def probe(self) -> None:
        await self._write(set_meta, "probe", str(self._clock()))
