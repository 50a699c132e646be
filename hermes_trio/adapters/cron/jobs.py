"""A scheduled job: parsed from fields, stored, and shown.

A job's row has its name, its schedule and its next slot; `spec` holds the rest. The results of earlier slots are in the execution rows.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from datetime import UTC, datetime
from math import inf
from typing import Any, Final, cast

import msgspec

from hermes_trio.messaging.addresses import Address, Target, parse_targets
from hermes_trio.store.records import CronExecution, CronJob, CronState

from .schedule import Once, Schedule, from_record, next_after, parse_schedule, to_record

NAME_LENGTH: Final = 200
PROMPT_LENGTH: Final = 50_000
_FIELDS: Final = (
    "name",
    "schedule",
    "prompt",
    "deliver",
    "model",
    "deadline",
    "repeat",
    "timezone",
    "enabled",
    "origin",
)


class JobError(ValueError):
    """Raised for a field of a job that cannot be used. The text names it and says what is accepted."""


class ScheduledJob(msgspec.Struct, frozen=True):
    """A stored job."""

    row: CronJob
    schedule: Schedule
    prompt: str
    deliver: tuple[str, ...]
    origin: Address | None
    model: str
    deadline: float | None
    times: int | None
    completed: int

    @classmethod
    def read(cls, row: CronJob) -> ScheduledJob:
        """Return the job of a row. Raises `ValueError` if its record is damaged."""
        spec: Mapping[str, Any] = row.spec
        origin = cast("Mapping[str, str] | None", spec.get("origin"))
        return cls(
            row=row,
            schedule=from_record(cast("Mapping[str, object]", spec["schedule"])),
            prompt=str(spec.get("prompt", "")),
            deliver=tuple(cast("Sequence[str]", spec.get("deliver", ("local",)))),
            origin=None if not origin else Address(origin["platform"], origin.get("chat_id"), origin.get("thread_id")),
            model=str(spec.get("model", "")),
            deadline=cast("float | None", spec.get("deadline")),
            times=cast("int | None", spec.get("times")),
            completed=cast("int", spec.get("completed", 0)),
        )

    def targets(self, platforms: Collection[str]) -> tuple[Target, ...]:
        """Return the delivery targets, as written."""
        return parse_targets(self.deliver, platforms)

    @property
    def is_over(self) -> bool:
        """Return whether it has run as often as it should."""
        return self.times is not None and self.completed >= self.times


def new_job(
    fields: Mapping[str, Any], *, id: str, tenant: str, now: float, timezone: str, platforms: Collection[str]
) -> CronJob:
    """Make a job from a person's fields. Raises `JobError` or another `ValueError`."""
    for needed in ("name", "schedule", "prompt"):
        if not str(fields.get(needed, "")).strip():
            raise JobError(f"{needed} is missing or empty")
    blank = CronJob(id=id, name="", schedule="", tenant=tenant, created_at=now)
    given = {"deliver": "origin" if fields.get("origin") else "local", **fields}
    return changed_job(blank, given, now=now, timezone=timezone, platforms=platforms)


def changed_job(
    row: CronJob, fields: Mapping[str, Any], *, now: float, timezone: str, platforms: Collection[str]
) -> CronJob:
    """Return the job with some fields changed. A new schedule counts from now; a job that is enabled again does not catch up missed slots."""
    for name in fields:
        if name not in _FIELDS:
            raise JobError(f"a job has no field {name!r}; fields are {', '.join(_FIELDS)}")
    spec: dict[str, Any] = dict(row.spec)
    for name, check in (("prompt", _prompt), ("model", _model), ("deadline", _deadline)):
        if name in fields:
            spec[name] = check(name, fields[name])
    if fields.get("origin"):
        spec["origin"] = _origin(fields["origin"])
    if "deliver" in fields:
        spec["deliver"] = _deliver(fields["deliver"], platforms)
    present = datetime.fromtimestamp(now, UTC)
    next_at, written = row.next_at, row.schedule
    if "schedule" in fields:
        written = _text("schedule", fields["schedule"]).strip()
        schedule = parse_schedule(written, now=present, tz=str(fields.get("timezone") or timezone))
        spec["schedule"] = to_record(schedule)
        spec["times"] = 1 if isinstance(schedule, Once) else None
        spec["completed"] = 0
        # A one-shot may lie a moment in the past: the time that it took to write it.
        next_at = schedule.at.timestamp() if isinstance(schedule, Once) else _next(schedule, present)
    if "repeat" in fields:
        spec["times"] = _repeat(fields["repeat"])
        spec["completed"] = 0
    enabled = row.enabled
    if "enabled" in fields:
        enabled = _switch(fields["enabled"])
        if enabled and not row.enabled and "schedule" not in fields:
            next_at = _resumed(from_record(spec["schedule"]), row, present)
    name = row.name
    if "name" in fields:
        name = _text("name", fields["name"]).strip()
        if not 0 < len(name) <= NAME_LENGTH:
            raise JobError(f"name must have 1 to {NAME_LENGTH} characters")
    return msgspec.structs.replace(row, name=name, schedule=written, spec=spec, enabled=enabled, next_at=next_at)


def _resumed(schedule: Schedule, row: CronJob, present: datetime) -> float | None:
    if isinstance(schedule, Once):
        return row.next_at
    return _next(schedule, present)


def _next(schedule: Schedule, after: datetime) -> float | None:
    slot = next_after(schedule, after)
    return None if slot is None else slot.timestamp()


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise JobError(f"{name} must be a string")
    return value


def _model(name: str, value: Any) -> str:
    return "" if value is None else _text(name, value).strip()


def _prompt(name: str, value: Any) -> str:
    text = _text(name, value)
    if not text.strip() or len(text) > PROMPT_LENGTH:
        raise JobError(f"{name} must have 1 to {PROMPT_LENGTH} characters")
    return text


def _deadline(name: str, value: Any) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < inf:
        raise JobError(f"{name} is {value!r}; it must be a number of seconds above zero")
    return float(value)


def _repeat(value: Any) -> int | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise JobError(f"repeat is {value!r}; it must be a whole number from 1 on")
    return value


def _switch(value: Any) -> bool:
    if not isinstance(value, bool):
        raise JobError("enabled must be true or false")
    return value


def _origin(value: Any) -> dict[str, str]:
    if not isinstance(value, Mapping) or not value.get("platform") or not value.get("chat_id"):  # pyright: ignore[reportUnknownMemberType]
        raise JobError("origin must have a platform and a chat_id")
    given = cast("Mapping[str, Any]", value)
    return {name: str(given[name]) for name in ("platform", "chat_id", "thread_id") if given.get(name)}


def _deliver(value: Any, platforms: Collection[str]) -> list[str]:
    words = [value] if isinstance(value, str) else value
    if not isinstance(words, list | tuple) or not all(isinstance(word, str) for word in cast("list[Any]", words)):
        raise JobError("deliver must be a string or a list of strings")
    written = list(cast("Sequence[str]", words))
    parse_targets(written, platforms)
    return written


def job_view(job: CronJob, latest: CronExecution | None, *, running: bool = False) -> dict[str, Any]:
    """Return a job as JSON, with the names that the reference's clients know (GW-143)."""
    spec: Mapping[str, Any] = job.spec
    schedule = cast("Mapping[str, Any]", spec.get("schedule", {}))
    state = "scheduled"
    if not job.enabled:
        state = "paused"
    elif job.next_at is None:
        state = "completed"
    failed = latest is not None and latest.state is CronState.FAILED
    ran = latest is not None and latest.state in (CronState.COMPLETED, CronState.FAILED)
    return {
        "id": job.id,
        "name": job.name,
        "prompt": spec.get("prompt", ""),
        "schedule": dict(schedule),
        "schedule_display": schedule.get("display", job.schedule),
        "repeat": {"times": spec.get("times"), "completed": spec.get("completed", 0)},
        "enabled": job.enabled,
        "state": "running" if running else state,
        "next_run_at": _iso(job.next_at if job.enabled else None),
        "last_run_at": _iso(latest.slot if ran and latest is not None else None),
        "last_status": ("error" if failed else "ok") if ran else None,
        "last_error": latest.error or None if latest is not None and failed else None,
        "last_delivery_error": latest.error or None if latest is not None and not failed and ran else None,
        "deliver": ",".join(cast("Sequence[str]", spec.get("deliver", ("local",)))),
        "origin": spec.get("origin"),
        "model": spec.get("model") or None,
        "deadline": spec.get("deadline"),
        "created_at": _iso(job.created_at),
        "latest_execution": None if latest is None else execution_view(latest),
    }


def execution_view(execution: CronExecution) -> dict[str, Any]:
    """Return one slot as JSON."""
    return {
        "slot": _iso(execution.slot),
        "state": execution.state.value,
        "session_id": execution.session_id or None,
        "output": execution.output,
        "error": execution.error or None,
        "claimed_at": _iso(execution.claimed_at),
        "started_at": _iso(execution.started_at),
        "ended_at": _iso(execution.ended_at),
    }


def _iso(when: float | None) -> str | None:
    return None if when is None else datetime.fromtimestamp(when, UTC).isoformat()
