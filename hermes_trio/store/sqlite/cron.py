"""Cron jobs and their executions. A slot (job, time) is claimed by inserting its row, so it runs at most once, on all nodes."""

from __future__ import annotations

from typing import Any, Final

from hermes_trio.runtime.errors import Fenced
from hermes_trio.runtime.ports import CRON_TOPIC
from hermes_trio.store.errors import UnknownRecord
from hermes_trio.store.records import FIRST_PAGE, CronExecution, CronJob, CronState, Page

from .encoding import clean, dump, load_mapping
from .rows import Database, Row, changed, equalities, exists, many, one, write
from .verbs import Verbs

_JOB: Final = "id, name, schedule, tenant, spec, enabled, next_at, created_at, updated_at"
_EXECUTION: Final = "job_id, slot, state, session_id, output, error, claimed_at, started_at, ended_at"


def _job(row: Row) -> CronJob:
    return CronJob(
        id=row[0],
        name=row[1],
        schedule=row[2],
        tenant=row[3],
        spec=load_mapping(row[4]),
        enabled=bool(row[5]),
        next_at=row[6],
        created_at=row[7],
        updated_at=row[8],
    )


def _execution(row: Row) -> CronExecution:
    values: list[Any] = [*row[:2], CronState(row[2]), *row[3:]]
    return CronExecution(*values)


def put_job(db: Database, now: float, job: CronJob) -> CronJob:
    """Make or update a job."""
    found = one(
        db,
        f"INSERT INTO cron_jobs ({_JOB}) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT (id) DO UPDATE SET"
        " name = excluded.name, schedule = excluded.schedule, spec = excluded.spec,"
        " enabled = excluded.enabled, next_at = excluded.next_at, updated_at = excluded.updated_at"
        f" WHERE cron_jobs.tenant = excluded.tenant RETURNING {_JOB}",
        (
            job.id,
            clean(job.name),
            job.schedule,
            job.tenant,
            dump(job.spec),
            job.enabled,
            job.next_at,
            job.created_at or now,
            now,
        ),
    )
    if found is None:
        raise UnknownRecord(f"there is no cron job {job.id!r}")
    db.signals.append((CRON_TOPIC, job.id))
    return _job(found)


def get_job(db: Database, job_id: str) -> CronJob | None:
    """Return a job by its id, or None."""
    found = one(db, f"SELECT {_JOB} FROM cron_jobs WHERE id = ?", (job_id,))
    return _job(found) if found else None


def list_jobs(db: Database, tenant: str | None) -> list[CronJob]:
    """Return all jobs, by name."""
    where = "" if tenant is None else "WHERE tenant = ?"
    sql = f"SELECT {_JOB} FROM cron_jobs {where} ORDER BY name, id"
    return [_job(row) for row in many(db, sql, () if tenant is None else (tenant,))]


def delete_job(db: Database, job_id: str) -> bool:
    """Delete a job; its executions stay until retention removes them."""
    db.signals.append((CRON_TOPIC, job_id))
    return bool(changed(db, "DELETE FROM cron_jobs WHERE id = ?", (job_id,)))


def set_next(db: Database, job_id: str, when: float | None) -> None:
    """Set the time at which a job is due next."""
    write(db, "UPDATE cron_jobs SET next_at = ? WHERE id = ?", (when, job_id))


_OTHER_NODES: Final = "owner IN (SELECT incarnation FROM nodes)"
"""The owner of a row is a node that is alive: other nodes may do its work. A store with one owner has no nodes."""


def claim_slot(
    db: Database, now: float, owner: str, job_id: str, slot: float, state: str, error: str, next_at: float | None
) -> bool:
    """Insert the row of a slot, unless there is one, and set the time at which the job is due next; return whether it was inserted."""
    ended = None if state in ("claimed", "running") else now
    claimed = changed(
        db,
        f"INSERT INTO cron_executions ({_EXECUTION}, owner) VALUES (?, ?, ?, '', '', ?, ?, NULL, ?, ?) ON CONFLICT DO NOTHING",
        (job_id, slot, state, error, now, ended, owner),
    )
    if next_at is not None:
        set_next(db, job_id, next_at)
    return bool(claimed)


def count_slot(db: Database, now: float, owner: str, job_id: str, *claim: Any) -> bool:
    """Do what `claim_slot` does, and count the run in the job if it claims the slot. What was changed in the job meanwhile stays."""
    if not claim_slot(db, now, owner, job_id, *claim):
        return False
    sql = "UPDATE cron_jobs SET spec = ? WHERE id = ? AND spec = ?"
    while (found := one(db, "SELECT spec FROM cron_jobs WHERE id = ?", (job_id,))) is not None:
        spec = load_mapping(found[0])
        if changed(db, sql, (dump({**spec, "completed": int(spec.get("completed", 0)) + 1}), job_id, found[0])):
            break
    return True


def start_slot(db: Database, now: float, owner: str, job_id: str, slot: float, session_id: str) -> bool:
    """Record that a slot begins to run. Its runner owns it from now on, also if another node has claimed it, or could not begin it."""
    sql = (
        "UPDATE cron_executions SET state = 'running', started_at = ?1, session_id = ?2, owner = ?3 WHERE job_id = ?4"
        f" AND slot = ?5 AND (state = 'claimed' OR (state = 'running' AND owner <> ?3 AND {_OTHER_NODES}))"
    )
    return bool(changed(db, sql, (now, session_id, owner, job_id, slot)))


def finish_slot(
    db: Database, now: float, owner: str, job_id: str, slot: float, state: str, output: str, error: str
) -> bool:
    """Record the end of a slot; the first end wins. Raises `Fenced` if another owner has the slot, or has ended it.

    Where nodes share the store, a slot is ended by the node that has run it: the one that has claimed it runs the clock, and may be another one.
    """
    sql = (
        "UPDATE cron_executions SET state = ?1, output = ?2, error = ?3, ended_at = ?4, owner = ?7"
        f" WHERE job_id = ?5 AND slot = ?6 AND ended_at IS NULL AND (owner = ?7 OR {_OTHER_NODES})"
    )
    ended = bool(changed(db, sql, (state, clean(output), clean(error), now, job_id, slot, owner)))
    other = "SELECT 1 FROM cron_executions WHERE job_id = ? AND slot = ? AND owner <> ?"
    if not ended and exists(db, other, (job_id, slot, owner)):
        raise Fenced(f"slot {slot} of cron job {job_id} now belongs to another owner")
    db.signals.append((CRON_TOPIC, job_id))
    return ended


def executions(db: Database, job_id: str | None, page: Page) -> list[CronExecution]:
    """Return executions, the newest slot first."""
    where, bindings = equalities({"job_id": job_id})
    sql = f"SELECT {_EXECUTION} FROM cron_executions WHERE {' AND '.join(where)} ORDER BY slot DESC, job_id LIMIT ? OFFSET ?"
    return [_execution(row) for row in many(db, sql, (*bindings, page.limit, page.offset))]


class SqliteCron(Verbs):
    """The cron jobs' part of the store."""

    async def put_cron_job(self, job: CronJob) -> CronJob:
        return await self._write(put_job, self._clock(), job)

    async def get_cron_job(self, job_id: str) -> CronJob | None:
        return await self._read(get_job, job_id)

    async def list_cron_jobs(self, *, tenant: str | None = None) -> list[CronJob]:
        return await self._read(list_jobs, tenant)

    async def delete_cron_job(self, job_id: str) -> bool:
        return await self._write(delete_job, job_id)

    async def set_cron_next(self, job_id: str, when: float | None) -> None:
        await self._write(set_next, job_id, when)

    async def claim_cron_slot(
        self,
        job_id: str,
        slot: float,
        *,
        state: CronState = CronState.CLAIMED,
        error: str = "",
        next_at: float | None = None,
        count: bool = False,
    ) -> bool:
        claim = (self._clock(), self.owner, job_id, slot, state.value, error, next_at)
        return await (self._write(count_slot, *claim) if count else self._write(claim_slot, *claim))

    async def start_cron_slot(self, job_id: str, slot: float, *, session_id: str) -> bool:
        return await self._write(start_slot, self._clock(), self.owner, job_id, slot, session_id)

    async def finish_cron_slot(
        self, job_id: str, slot: float, state: CronState, *, output: str = "", error: str = ""
    ) -> bool:
        return await self._write(finish_slot, self._clock(), self.owner, job_id, slot, state.value, output, error)

    async def list_cron_executions(self, job_id: str | None = None, page: Page = FIRST_PAGE) -> list[CronExecution]:
        return await self._scan(executions, job_id, page)
