"""The `process` tool: list, read, wait for, write to and kill the background processes of one's own session.

Reading has no effect, with one exception: a session that has waited for an end, read the log of an ended process to its last line, or killed it, gets
no notice of that end. No call waits longer than it says: a process that does not respond cannot block the turn (H8).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from datetime import UTC, datetime
from typing import Annotated, Any, Final, cast, final

import msgspec
import trio
from msgspec import Meta

from hermes_trio.agent.model import ToolSpec
from hermes_trio.agent.tool import error_result, keep_partial_result
from hermes_trio.runtime.context import current_turn
from hermes_trio.runtime.outcome import CancelCause, Cause
from hermes_trio.runtime.ports import NodeRequest
from hermes_trio.runtime.runtime import current_runtime
from hermes_trio.runtime.tree import waiting
from hermes_trio.runtime.turn import Turn
from hermes_trio.store.ports import JobStore
from hermes_trio.tools.context import ToolContext
from hermes_trio.tools.registry import schema_of
from hermes_trio.tools.warden import StdinClosed

from .output import LOG_LINES, mask_secrets
from .processes import KILLED_BY_TOOL, BackgroundProcess, Processes

LIST_COMMAND: Final = 200
LIST_OUTPUT: Final = 200
POLL_OUTPUT: Final = 1000
END_OUTPUT: Final = 2000

WRITE_SECONDS: Final = 10.0
"""How long a process may take to read what is written to it."""

ASK_SECONDS: Final = 40.0
"""The time limit for an answer of another node: killing a process takes up to thirty seconds."""

PROCESS_REQUEST: Final = "process"

ACTIONS: Final = ("list", "poll", "log", "wait", "kill", "write", "submit", "close")


class ProcessArguments(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The arguments that the model may give."""

    action: Annotated[
        str,
        Meta(
            description="list; poll (status and last output); log (lines); wait (for its end); kill; write (data as it is); submit (data and Enter); close (end"
            " of input)",
            extra_json_schema={"enum": list(ACTIONS)},
        ),
    ]
    session_id: Annotated[
        str | int,
        Meta(description="The id from terminal, or the pid of one of your processes; for everything but list"),
    ] = ""
    data: Annotated[str, Meta(description="For write and submit")] = ""
    timeout: Annotated[int, Meta(ge=1, description="Seconds to wait")] | None = None
    offset: Annotated[int, Meta(ge=0, description="For log: first line; 0 for the last lines")] = 0
    limit: Annotated[int, Meta(ge=1, description="For log: how many lines")] = LOG_LINES


_DESCRIPTION: Final = "Look at and control the background processes that you started with terminal(background=true)."

Result = dict[str, Any]


@final
class ProcessTool:
    """The tool; see the module."""

    def __init__(self, processes: Processes) -> None:
        self._processes = processes
        self._spec = ToolSpec(name="process", description=_DESCRIPTION, parameters=schema_of(ProcessArguments))
        self._actions: Mapping[str, Callable[[BackgroundProcess, ProcessArguments, ToolContext], Awaitable[Result]]] = {
            "poll": self._poll,
            "log": self._log,
            "wait": self._wait,
            "kill": self._kill,
            "write": self._write,
            "submit": self._write,
            "close": self._close,
        }

    @property
    def spec(self) -> ToolSpec:
        """Return the description for the model."""
        return self._spec

    def preview(self, arguments: str) -> str:
        """Return the action and the process."""
        try:
            given = msgspec.json.decode(arguments, type=ProcessArguments, strict=False)
        except msgspec.MsgspecError:
            return self._spec.name
        return f"{given.action} {given.session_id}".strip()[:120]

    async def call(self, turn: Turn, arguments: str) -> str:
        """Run the action. Cancelling abandons a wait, not the process; a kill that has begun is completed."""
        try:
            given = msgspec.json.decode(arguments or "{}", type=ProcessArguments, strict=False)
        except msgspec.MsgspecError as error:
            return error_result(f"wrong arguments for process: {error}")
        return msgspec.json.encode(await self._act(turn, given)).decode()

    async def __call__(self, action: str, session_id: str = "", **arguments: Any) -> Result:
        """Use the tool from a program, in the current turn or in the open Runtime. Raises `NoRuntime` without either. Cancellation as for `call`."""
        given = msgspec.convert({"action": action, "session_id": session_id, **arguments}, ProcessArguments)
        return await self._act(current_turn(), given)

    async def _act(self, turn: Turn | None, given: ProcessArguments) -> Result:
        place = ToolContext.of(turn)
        if given.action == "list":
            here = [self._line(record) for record in self._processes.of_session(place.session_id)]
            return {"processes": here + await self._list_elsewhere(place, given)}
        action = self._actions.get(given.action)
        if action is None:
            return {"error": f"unknown action {given.action!r}; the actions are {', '.join(ACTIONS)}"}
        id = str(given.session_id).strip()
        if not id:
            return {"error": f"session_id is needed for {given.action}: the id that terminal returned"}
        record = self._processes.find(id, place.session_id)
        if record is None and id.isascii() and id.isdigit():
            record = self._processes.find_pid(int(id), place.session_id)
        if record is None:
            found = await self._act_elsewhere(place, given, id)
            if found is not None:
                return found
            return {"status": "not_found", "error": f"this session has no process {id!r}; see process(action='list')"}
        return await action(record, given, place)

    # -- on other nodes ----------------------------------------------------------------------------------------------------------

    async def _list_elsewhere(self, place: ToolContext, given: ProcessArguments) -> list[Result]:
        """Return the processes of this session on other nodes of the store."""
        found: list[Result] = []
        for node in await self._others(place):
            answer = await self._ask(place, node, given)
            found += (answer or {}).get("processes", ())
        return found

    async def _act_elsewhere(self, place: ToolContext, given: ProcessArguments, id: str) -> Result | None:
        """Return the answer of the node that runs a process; None if no node has one of that id for this session."""
        if not place.core.shared:
            return None
        row = await cast("JobStore", place.core.store).get_job(id)
        if row is not None and row.session_id == place.session_id and row.owner != place.core.store.owner:
            answer = await self._ask(place, row.owner, given)
            if answer is not None:
                return answer
            status = row.state.value if row.state.terminal else "unknown"
            told = f"its node does not answer; its last known state: {row.summary or status}"
            return {"status": status, "session_id": id, "error": told, "output": mask_secrets(row.output_tail)}
        for node in await self._others(place) if id.isdigit() else ():
            answer = await self._ask(place, node, given)
            if answer is not None and answer.get("status") != "not_found":
                return answer
        return None

    async def _others(self, place: ToolContext) -> list[str]:
        core = place.core
        if not core.shared:
            return []
        return [node for node in await core.store.session_owners(place.session_id) if node != core.store.owner]

    async def _ask(self, place: ToolContext, node: str, given: ProcessArguments) -> Result | None:
        payload = {"session_id": place.session_id, "arguments": msgspec.to_builtins(given)}
        seconds = ASK_SECONDS + (min(given.timeout or self._limit, self._limit) if given.action == "wait" else 0)
        answer = await place.core.membership.ask(node, PROCESS_REQUEST, given.action, payload, seconds=seconds)
        return None if answer is None or answer.gone or "result" not in answer.value else answer.value["result"]

    @property
    def _limit(self) -> float:
        return self._processes.settings.timeout

    async def answer(self, request: NodeRequest) -> Mapping[str, Any]:
        """Run an action that a turn on another node asks for, on a process of its session that runs here."""
        given = msgspec.convert(request.payload["arguments"], ProcessArguments)
        session_id = str(request.payload["session_id"])
        if given.action == "list":
            return {"result": {"processes": [self._line(one) for one in self._processes.of_session(session_id)]}}
        id = str(given.session_id).strip()
        record = self._processes.find(id, session_id)
        if record is None and id.isascii() and id.isdigit():
            record = self._processes.find_pid(int(id), session_id)
        action = self._actions.get(given.action)
        if record is None or action is None:
            return {"result": {"status": "not_found", "error": f"this session has no process {id!r}"}}
        runtime = current_runtime()
        place = ToolContext(core=runtime.core, owner=runtime.owner(record.job.context))
        return {"result": await action(record, given, place)}

    # -- looking -----------------------------------------------------------------------------------------------------------------

    def _line(self, record: BackgroundProcess) -> Result:
        line: Result = {
            "session_id": record.id,
            "command": record.shown[:LIST_COMMAND],
            "cwd": record.cwd,
            "pid": record.pid,
            "started_at": datetime.fromtimestamp(record.started_at, UTC).astimezone().isoformat(timespec="seconds"),
            "uptime_seconds": record.uptime(trio.current_time()),
            "status": "running" if record.running else "exited",
            "output_preview": record.tail(LIST_OUTPUT),
        }
        if not record.running:
            line["exit_code"] = record.exit_code
        if record.notify:
            line["notify_on_complete"] = True
        if record.watch is not None:
            line["watch_patterns"] = list(record.watch.patterns)
            line["watch_hit"] = record.watch.events > 0
        return line

    def _facts(self, record: BackgroundProcess) -> Result:
        return {
            "session_id": record.id,
            "command": record.shown,
            "status": "running" if record.running else "exited",
        }

    async def _poll(self, record: BackgroundProcess, given: ProcessArguments, place: ToolContext) -> Result:
        """Return the status. The promised notice is still sent."""
        await trio.lowlevel.checkpoint()
        return {
            **self._facts(record),
            "pid": record.pid,
            "uptime_seconds": record.uptime(trio.current_time()),
            "output_preview": record.tail(POLL_OUTPUT),
            **_end_of(record),
        }

    async def _log(self, record: BackgroundProcess, given: ProcessArguments, place: ToolContext) -> Result:
        part = record.output.log(given.offset, given.limit)
        last = part.first + part.lines
        if not record.running and last >= part.total_lines:
            await record.job.mark_seen()
        showing = (
            f"lines {part.first + 1}-{last} of {part.total_lines}" if part.lines else f"no lines of {part.total_lines}"
        )
        return {
            **self._facts(record),
            "output": mask_secrets(part.text),
            "total_lines": part.total_lines,
            "showing": showing,
            **({"dropped_characters": record.output.dropped} if record.output.dropped else {}),
        }

    async def _wait(self, record: BackgroundProcess, given: ProcessArguments, place: ToolContext) -> Result:
        limit = self._processes.settings.timeout
        seconds = min(given.timeout or limit, limit)
        note = ""
        if given.timeout is not None and given.timeout > limit:
            note = f"timeout {given.timeout} s was shortened to the limit of {limit} s"
        try:
            with trio.move_on_after(seconds), waiting(f"process {record.id}"):
                await record.job.wait()
        except BaseException:
            if place.turn is not None:
                left = {"status": "interrupted", "command": record.shown, "output": record.tail(POLL_OUTPUT)}
                left["note"] = "the wait was cancelled; the process is still running"
                keep_partial_result(place.turn, msgspec.json.encode(left).decode())
            raise
        if record.job.state.terminal:
            await record.job.mark_seen()
            ended: Result = {
                **self._facts(record),
                "status": "exited",
                "output": record.tail(END_OUTPUT),
                **_end_of(record),
            }
            return {**ended, "timeout_note": note} if note else ended
        waited = f"still running after {seconds} s; it is not stopped"
        return {
            "status": "timeout",
            "session_id": record.id,
            "command": record.shown,
            "output": record.tail(POLL_OUTPUT),
            "timeout_note": f"{note}; {waited}" if note else waited,
        }

    # -- acting ------------------------------------------------------------------------------------------------------------------

    async def _kill(self, record: BackgroundProcess, given: ProcessArguments, place: ToolContext) -> Result:
        job = record.job
        await job.mark_seen()
        if not job.state.terminal:
            receipt = await job.stop(Cause(CancelCause.STOP, KILLED_BY_TOOL))
            if not receipt.ok:
                error = f"it could not be ended within {receipt.milliseconds / 1000:.0f} s; still there: {', '.join(receipt.remaining)}"
                return {**self._facts(record), "status": "error", "error": error}
        if record.completion_reason == "killed" and not record.told_killed:
            record.told_killed = True
            return {
                **self._facts(record),
                "status": "killed",
                "output": record.tail(END_OUTPUT),
                **_end_of(record),
                "how": str(record.how),
            }
        return {**self._facts(record), "status": "already_exited", "output": record.tail(END_OUTPUT), **_end_of(record)}

    async def _write(self, record: BackgroundProcess, given: ProcessArguments, place: ToolContext) -> Result:
        if not record.running or record.process is None:
            return _already_exited(record)
        text = given.data + ("\n" if given.action == "submit" else "")
        try:
            with trio.move_on_after(WRITE_SECONDS) as bound, waiting(f"input of {record.id}"):
                await record.process.write(text.encode())
        except StdinClosed as error:
            return {"status": "error", "session_id": record.id, "error": str(error)}
        if bound.cancelled_caught:
            error = f"the process did not read its input within {WRITE_SECONDS:g} s; a part of the data may have been written"
            return {"status": "error", "session_id": record.id, "error": error}
        return {"status": "ok", "session_id": record.id, "bytes_written": len(text)}

    async def _close(self, record: BackgroundProcess, given: ProcessArguments, place: ToolContext) -> Result:
        if not record.running or record.process is None:
            return _already_exited(record)
        try:
            with trio.move_on_after(WRITE_SECONDS) as bound:
                await record.process.close_stdin()
        except StdinClosed as error:
            return {"status": "error", "session_id": record.id, "error": str(error)}
        if bound.cancelled_caught:
            return {"status": "error", "session_id": record.id, "error": "the process does not read its input"}
        return {"status": "ok", "session_id": record.id, "message": "end of input sent"}


def _end_of(record: BackgroundProcess) -> Result:
    if record.running:
        return {}
    end: Result = {
        "exit_code": record.exit_code,
        "completion_reason": record.completion_reason or "exited",
        "termination_source": record.termination_source,
    }
    if record.status is not None and record.status.signal is not None:
        end["signal"] = str(record.status).removeprefix("killed by ")
    return end


def _already_exited(record: BackgroundProcess) -> Result:
    return {"status": "already_exited", "session_id": record.id, "error": "the process has ended", **_end_of(record)}
