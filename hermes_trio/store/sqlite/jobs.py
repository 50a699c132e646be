"""Jobs: background processes and delegations. One row each, live until its one end; the end and its notice are one transaction."""

from __future__ import annotations

from typing import Any, Final

from hermes_trio.runtime.errors import Fenced, JobRefused
from hermes_trio.runtime.outcome import JobState
from hermes_trio.runtime.ports import JobFinish, JobStart, inbox_topic
from hermes_trio.store.records import FIRST_PAGE, JobRow, Page

from .encoding import clean, dump, load_mapping, load_routing, merge_patch, routing_text
from .inbox import insert_notice
from .roots import close_root
from .rows import Database, Row, changed, equalities, exists, many, one, write
from .verbs import Verbs

TAIL_LENGTH: Final = 4_000
"""Characters of a job's last output that are stored for the notice after a crash."""

JOB_COLUMNS: Final = (
    "job_id, kind, title, session_id, session_key, root_id, turn_id, routing, inbox, details, state, summary,"
    " output_tail, started_at, ended_at, owner"
)


def job_from_row(row: Row) -> JobRow:
    """Return a row as a job's record."""
    values: list[Any] = [*row[:7], load_routing(row[7]), row[8], load_mapping(row[9]), JobState(row[10]), *row[11:]]
    return JobRow(*values)


def start_job(db: Database, now: float, owner: str, job: JobStart) -> None:
    """Write the row of a job before its work exists. Idempotent. Raises `JobRefused` if another job has its id, or the job has ended."""
    made = changed(
        db,
        f"INSERT INTO jobs ({JOB_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, 'running', '', '', ?, NULL, ?)"
        " ON CONFLICT (job_id) DO NOTHING",
        (
            job.job_id,
            job.kind,
            clean(job.title),
            job.routing.session_id,
            job.routing.session_key,
            job.root_id,
            job.turn_id,
            routing_text(job.routing),
            job.inbox,
            dump(job.details),
            now,
            owner,
        ),
    )
    same = "job_id = ? AND kind = ? AND root_id = ? AND turn_id = ? AND owner = ? AND ended_at IS NULL"
    given = (job.job_id, job.kind, job.root_id, job.turn_id, owner)
    if not made and not exists(db, f"SELECT 1 FROM jobs WHERE {same}", given):
        raise JobRefused(f"job {job.job_id!r} already exists; give each job its own id, or none")


def finish_job(db: Database, now: float, owner: str, job: JobFinish) -> int | None:
    """Write a job's end and its notice; return the notice's id if it now waits. Idempotent.

    Raises `Fenced` if another owner has the job, or has ended it.
    """
    known = one(db, "SELECT details FROM jobs WHERE job_id = ?", (job.job_id,)) if job.details else None
    details = None if known is None else dump(merge_patch(load_mapping(known[0]), job.details))
    ended = one(
        db,
        "UPDATE jobs SET state = ?, summary = ?, ended_at = ?, details = coalesce(?, details)"
        " WHERE job_id = ? AND ended_at IS NULL AND owner = ? RETURNING root_id, inbox, session_key",
        (job.state.value, clean(job.summary), now, details, job.job_id, owner),
    )
    if ended is None and exists(db, "SELECT 1 FROM jobs WHERE job_id = ? AND owner <> ?", (job.job_id, owner)):
        raise Fenced(f"job {job.job_id} now belongs to another owner")
    if ended is None:
        return None
    root_id, inbox, key = ended
    number: int | None = None
    if job.notice is not None:
        state = "superseded" if job.superseded else "abandoned" if job.abandoned else "pending"
        number = insert_notice(db, now, job.notice, state, job.abandoned if state == "abandoned" else "")
        db.signals.append((inbox_topic(inbox), key))
    close_root(db, root_id)
    return number


def note_output(db: Database, job_id: str, tail: str) -> None:
    """Store the last output of a live job, for the notice that it was lost."""
    sql = "UPDATE jobs SET output_tail = ? WHERE job_id = ? AND ended_at IS NULL"
    write(db, sql, (clean(tail[-TAIL_LENGTH:]), job_id))


def get_job(db: Database, job_id: str) -> JobRow | None:
    """Return a job by its id, or None."""
    found = one(db, f"SELECT {JOB_COLUMNS} FROM jobs WHERE job_id = ?", (job_id,))
    return job_from_row(found) if found else None


def list_jobs(db: Database, session_id: str | None, live_only: bool, page: Page) -> list[JobRow]:
    """Return jobs, the newest first."""
    where, bindings = equalities({"session_id": session_id})
    if live_only:
        where.append("ended_at IS NULL")
    sql = f"SELECT {JOB_COLUMNS} FROM jobs WHERE {' AND '.join(where)} ORDER BY started_at DESC, rowid DESC LIMIT ? OFFSET ?"
    return [job_from_row(row) for row in many(db, sql, (*bindings, page.limit, page.offset))]


class SqliteJobs(Verbs):
    """The jobs' part of the store."""

    async def start_job(self, job: JobStart) -> None:
        await self._write(start_job, self._clock(), self.owner, job)

    async def finish_job(self, job: JobFinish) -> int | None:
        return await self._write(finish_job, self._clock(), self.owner, job)

    async def note_job_output(self, job_id: str, tail: str) -> None:
        await self._write(note_output, job_id, tail)

    async def get_job(self, job_id: str) -> JobRow | None:
        return await self._read(get_job, job_id)

    async def list_jobs(
        self, *, session_id: str | None = None, live_only: bool = False, page: Page = FIRST_PAGE
    ) -> list[JobRow]:
        return await self._read(list_jobs, session_id, live_only, page)
