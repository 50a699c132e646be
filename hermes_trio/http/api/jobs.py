"""`/api/jobs…`: scheduled jobs. The routes exist only if a scheduler is configured."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from typing import Any, Final, cast

import msgspec

from hermes_trio.http.auth import RequiredScope
from hermes_trio.http.core import CronPort
from hermes_trio.http.errors import ApiError, not_found
from hermes_trio.http.inputs import loose_bool, whole_number
from hermes_trio.http.requests import Handler, HandlerResult, Request, Response
from hermes_trio.http.routing import Route, RouteParameter
from hermes_trio.http.schemas import LOOSE_FLAG, LOOSE_NUMBER

_ID: Final = re.compile(r"^[0-9a-f]{12}$")
_CHANGEABLE: Final = (
    "name",
    "schedule",
    "prompt",
    "deliver",
    "model",
    "deadline",
    "repeat",
    "enabled",
)
_SKILLS: Final = ("skills", "skill")
NAME_LENGTH: Final = 200
PROMPT_LENGTH: Final = 5_000
MODEL_LENGTH: Final = 200
EXECUTIONS: Final = 20
MOST_EXECUTIONS: Final = 200
OUTPUT_EXCERPT: Final = 2000
"""The maximum of characters of a slot's output in the list; the rest is in its session."""

LONGEST_DEADLINE: Final = 366 * 86_400.0


class JobRequest(msgspec.Struct):
    """A job to be created. `model` and `deadline` (seconds of a run) have the server's defaults."""

    name: Any
    schedule: Any
    prompt: Any
    deliver: Any = "local"
    model: Any = None
    deadline: Any = None
    repeat: Any = None


class JobBody(msgspec.Struct):
    """One job."""

    job: dict[str, Any]


class JobList(msgspec.Struct):
    """All jobs."""

    jobs: list[dict[str, Any]]


class ExecutionList(msgspec.Struct):
    """Slots of a job, the newest first: when each was due, and its result."""

    data: list[dict[str, Any]]
    object: str = "list"


class Done(msgspec.Struct):
    """Success."""

    ok: bool = True


_fields: Final = msgspec.json.Decoder(dict[str, Any])


def _cron(request: Request) -> CronPort:
    cron = request.core.services.cron
    assert cron is not None, "the routes of jobs exist only where there is a scheduler"
    return cron


def _job_id(request: Request) -> str:
    job_id = request.params["job_id"]
    if not _ID.match(job_id):
        raise ApiError(400, "A job id has 12 hexadecimal digits, in lower case.", code="invalid_job_id", param="job_id")
    return job_id


async def _given(request: Request, names: tuple[str, ...]) -> dict[str, Any]:
    """Return the given fields of these names. Skills are refused, because they are not supported."""
    given = await request.json(_fields)
    for name in _SKILLS:
        if given.get(name) not in (None, "", []):
            raise ApiError(
                400,
                f"This server has no skills, so a job cannot have {name}; write into its prompt what they would say.",
                code="invalid_job",
                param=name,
            )
    return {name: given[name] for name in names if name in given}


def _check(fields: dict[str, Any]) -> dict[str, Any]:
    """Check the types of the fields; the scheduler checks the schedule."""
    lengths = {"name": NAME_LENGTH, "prompt": PROMPT_LENGTH, "schedule": 500, "deliver": 500, "model": MODEL_LENGTH}
    for name, most in lengths.items():
        if name in fields and not (name == "model" and fields[name] is None):
            value = fields[name]
            least = 1 if name in ("name", "schedule", "prompt") else 0
            if not isinstance(value, str) or not least <= len(value.strip()) or len(value) > most:
                raise ApiError(
                    400, f"{name} must be a string of {least} to {most} characters.", code="invalid_job", param=name
                )
    deadline = fields.get("deadline")
    if deadline is not None and (
        not isinstance(deadline, int | float) or isinstance(deadline, bool) or not 0 < deadline <= LONGEST_DEADLINE
    ):
        raise ApiError(
            400,
            f"deadline must be a number of seconds above 0, up to {LONGEST_DEADLINE:.0f}.",
            code="invalid_job",
            param="deadline",
        )
    repeat = fields.get("repeat")
    if repeat is not None and (not isinstance(repeat, int) or isinstance(repeat, bool) or repeat < 1):
        raise ApiError(400, "repeat must be a whole number from 1 on.", code="invalid_job", param="repeat")
    if not isinstance(fields.get("enabled", True), bool):
        raise ApiError(400, "enabled must be true or false.", code="invalid_job", param="enabled")
    return fields


async def list_jobs(request: Request) -> HandlerResult:
    """Return the caller's jobs."""
    disabled = loose_bool(request.query("include_disabled"), False)
    return Response.of(JobList(await _cron(request).list_jobs(request.caller.sees, include_disabled=disabled)))


async def create_job(request: Request) -> HandlerResult:
    """Create a job."""
    given = await _given(request, JobRequest.__struct_fields__)
    fields = {"deliver": "local", **{name: value for name, value in given.items() if value is not None}}
    for name in ("name", "schedule", "prompt"):
        if name not in fields:
            raise ApiError(400, f"{name} is missing.", code="invalid_job", param=name)
    try:
        job = await _cron(request).create_job(request.caller.tenant, _check(fields))
    except ValueError as error:
        raise ApiError(400, str(error), code="invalid_job") from None
    return Response.of(JobBody(job))


async def get_job(request: Request) -> HandlerResult:
    """Return one job."""
    job_id = _job_id(request)
    return _found(job_id, await _cron(request).get_job(request.caller.sees, job_id))


def _found(job_id: str, job: dict[str, Any] | None) -> Response:
    if job is None:
        raise not_found("job", job_id, "job_not_found")
    return Response.of(JobBody(job))


async def update_job(request: Request) -> HandlerResult:
    """Change a job; fields that cannot be changed are ignored. A `model` or `deadline` of null restores the server's default."""
    job_id = _job_id(request)
    fields = await _given(request, _CHANGEABLE)
    if not fields:
        raise ApiError(400, f"There is nothing to change; {', '.join(_CHANGEABLE)} can be.", code="invalid_job")
    try:
        job = await _cron(request).update_job(request.caller.sees, job_id, _check(fields))
    except ValueError as error:
        raise ApiError(400, str(error), code="invalid_job") from None
    return _found(job_id, job)


async def delete_job(request: Request) -> HandlerResult:
    """Delete a job."""
    job_id = _job_id(request)
    if not await _cron(request).delete_job(request.caller.sees, job_id):
        raise not_found("job", job_id, "job_not_found")
    return Response.of(Done())


async def list_executions(request: Request) -> HandlerResult:
    """Return the slots of a job, the newest first."""
    job_id = _job_id(request)
    limit = whole_number(request.query("limit"), EXECUTIONS, least=1, most=MOST_EXECUTIONS)
    found = await _cron(request).executions(request.caller.sees, job_id, limit)
    if found is None:
        raise not_found("job", job_id, "job_not_found")
    return Response.of(ExecutionList([{**one, "output": one["output"][:OUTPUT_EXCERPT]} for one in found]))


def _verb(call: Callable[[CronPort, str | None, str], Awaitable[dict[str, Any] | None]]) -> Handler:
    async def handler(request: Request) -> HandlerResult:
        job_id = _job_id(request)
        return _found(job_id, await call(_cron(request), request.caller.sees, job_id))

    return handler


async def run_job(request: Request) -> HandlerResult:
    """Run a job now. Refused while the server drains."""
    request.core.check_intake()
    job_id = _job_id(request)
    return _found(job_id, await _cron(request).run_job(request.caller.sees, job_id))


def job_routes() -> list[Route]:
    """Return the routes of this module."""
    base = Route(
        name="", method="GET", path="", handler=get_job, access=RequiredScope.ADMIN, tag="jobs", answer=JobBody
    )
    one = "/api/jobs/{job_id}"

    def route(name: str, method: str, path: str, handler: Handler, summary: str, **fields: Any) -> Route:
        return msgspec.structs.replace(
            base, name=name, method=method, path=path, handler=handler, summary=summary, **fields
        )

    known = {"errors": (400, 404)}
    return [
        route(
            "jobs",
            "GET",
            "/api/jobs",
            list_jobs,
            "The scheduled jobs",
            answer=JobList,
            parameters=(RouteParameter("include_disabled", "Paused ones, too.", LOOSE_FLAG),),
        ),
        route("job_create", "POST", "/api/jobs", create_job, "Make a job", body=JobRequest, errors=(400,)),
        route("job", "GET", one, get_job, "One job", **known),
        route(
            "job_executions",
            "GET",
            f"{one}/executions",
            list_executions,
            "The slots of a job: when each was due, and what became of it",
            answer=ExecutionList,
            errors=(400, 404),
            parameters=(RouteParameter("limit", "How many.", LOOSE_NUMBER),),
        ),
        route("job_update", "PATCH", one, update_job, "Change a job", body=cast("Any", dict[str, Any]), **known),
        route("job_delete", "DELETE", one, delete_job, "Forget a job", **{**known, "answer": Done}),
        route("job_pause", "POST", f"{one}/pause", _verb(lambda c, t, i: c.pause_job(t, i)), "Pause a job", **known),
        route(
            "job_resume", "POST", f"{one}/resume", _verb(lambda c, t, i: c.resume_job(t, i)), "Resume a job", **known
        ),
        route("job_run", "POST", f"{one}/run", run_job, "Run a job now", errors=(400, 404, 503)),
    ]
