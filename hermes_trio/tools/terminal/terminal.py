"""The `terminal` tool: shell commands, in the foreground as children of the turn, in the background as jobs of the supervisor.

A foreground command belongs to the tool call that started it. However the call ends (exit, time-out or cancellation), every process of the command is
gone before it returns, and the output until then is kept. A background command is passed to `Processes`, with its routing and patterns fixed
beforehand.
"""

from __future__ import annotations

import os
import re
from typing import Annotated, Any, Final, final

import msgspec
import trio
from msgspec import Meta

from hermes_trio import guard
from hermes_trio.agent.command_policy import CommandPolicy, load_guard
from hermes_trio.agent.model import ToolSpec
from hermes_trio.agent.tool import keep_partial_result
from hermes_trio.runtime.context import current_turn
from hermes_trio.runtime.errors import Draining, JobRefused, RuntimeClosed
from hermes_trio.runtime.tree import waiting, working
from hermes_trio.runtime.turn import Turn
from hermes_trio.tools.confinement import CommandConfinement
from hermes_trio.tools.context import ToolContext
from hermes_trio.tools.registry import schema_of
from hermes_trio.tools.settings import TerminalSettings
from hermes_trio.tools.warden import ExitStatus, KeptProcess, KillHow, ProcessSpec, Warden, WardenError

from .hints import confinement_hint
from .output import AnsiFilter, HeadTail, OutputDecoder, mask_secrets
from .processes import END_LIMIT, Processes
from .shell_state import Lease, ShellStates

OUTPUT_IDLE: Final = 0.3
"""After the shell has exited, output is read until none has come for this long: a process that it started may hold the pipe."""

OUTPUT_SECONDS: Final = 5.0
"""The limit of that, in all."""

TIMED_OUT: Final = 124
INTERRUPTED: Final = 130
CANNOT_RUN: Final = 126

_WORKDIR: Final = re.compile(r"[A-Za-z0-9/\\:_\-.~ +@=,]+")
_READS_STDIN: Final = re.compile(r"--(?:with-token|password-stdin)\b")
_PREVIEW: Final = 120


class TerminalArguments(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The arguments that the model may give."""

    command: Annotated[str, Meta(description="The shell command (bash)")]
    background: Annotated[
        bool, Meta(description="Start it and return at once; for servers, watchers and everything long")
    ] = False
    timeout: Annotated[int, Meta(ge=1, description="Seconds a foreground command may take")] | None = None
    workdir: Annotated[str, Meta(description="Directory for this one command; relative to the session's")] | None = None
    pty: Annotated[bool, Meta(description="Give a background command a terminal, for interactive programs")] = False
    notify_on_complete: Annotated[
        bool, Meta(description="Background only: you are told in this conversation when it ends")
    ] = False
    watch_patterns: (
        Annotated[
            list[str],
            Meta(description="Background only: you are told when a line of output contains one of these texts"),
        ]
        | None
    ) = None


_DESCRIPTION: Final = (
    "Run a shell command. Directory, exported variables, functions and aliases are remembered for this conversation. In the foreground (default) the call"
    " returns its output and exit code; it may not detach itself or run for ever. With background=true it returns at once with a session_id for the"
    " process tool; add notify_on_complete=true to be told when it ends, or watch_patterns to be told when its output contains a text."
)


@final
class Terminal:
    """The tool; see the module. A program calls it directly: `await terminal(command="ls")`."""

    def __init__(
        self,
        warden: Warden,
        shells: ShellStates,
        processes: Processes,
        policy: CommandPolicy,
        settings: TerminalSettings,
        confinement: CommandConfinement,
    ) -> None:
        self._warden = warden
        self._shells = shells
        self._processes = processes
        self._policy = policy
        self._settings = settings
        self._confinement = confinement
        self._spec = ToolSpec(name="terminal", description=_DESCRIPTION, parameters=schema_of(TerminalArguments))

    @property
    def spec(self) -> ToolSpec:
        """Return the description for the model."""
        return self._spec

    def preview(self, arguments: str) -> str:
        """Return the command, on one line, redacted."""
        try:
            line = " ".join(mask_secrets(msgspec.json.decode(arguments, type=_Preview).command).split())
        except msgspec.MsgspecError:
            return self._spec.name
        return line if len(line) <= _PREVIEW else line[: _PREVIEW - 1] + "…"

    async def call(self, turn: Turn, arguments: str) -> str:
        """Check the arguments and run the command. Cancelling ends a foreground command and everything that it started."""
        try:
            given = msgspec.json.decode(arguments or "{}", type=TerminalArguments, strict=False)
        except msgspec.MsgspecError as error:
            return _encode(_failure(f"wrong arguments for terminal: {error}", status="error"))
        return _encode(await self._run(turn, given))

    async def __call__(self, command: str, **arguments: Any) -> dict[str, Any]:
        """Use the terminal from a program: in the current turn, or in the open Runtime. Raises `NoRuntime` without either. Cancellation as for `call`."""
        given = msgspec.convert({"command": command, **arguments}, TerminalArguments)
        return await self._run(current_turn(), given)

    # -- before anything runs ----------------------------------------------------------------------------------------------------

    async def _run(self, turn: Turn | None, given: TerminalArguments) -> dict[str, Any]:
        place = await self._confinement.place(turn)
        refused = self._argument_error(given)
        if refused is not None:
            return refused
        await load_guard()
        try:
            self._shells.begin(place.context, self._confinement.folder_of(place))
            cwd = self._directory(place, given.workdir)
        except NotADirectoryError as error:
            return {"output": str(error), "exit_code": CANNOT_RUN, "error": None}
        except WardenError as error:
            return _failure(str(error))
        verdict = await self._policy.inspect(
            turn,
            given.command,
            cwd or self._shells.cwd_of(place.context),
            remembered=self._shells.remembered(place.context),
            confined=place.confined,
        )
        forbidden = self._policy.forbids(verdict)
        if forbidden is not None:
            return forbidden.refusal()
        if not given.background:
            detached = guard.detaches(given.command)
            if detached is not None:
                return _failure(f"not run: {detached.text}", status="error")
        decision = await self._policy.decide(turn, verdict)
        if not decision.allowed:
            return decision.refusal()
        await place.core.hosts.bind(place.turn)
        try:
            if given.background:
                result = await self._background(place, given, cwd)
            else:
                result = await self._foreground(place, given, cwd)
        except (JobRefused, Draining, RuntimeClosed) as error:
            return _failure(str(error))
        if decision.approval:
            result["approval"] = decision.approval
        return result

    def _argument_error(self, given: TerminalArguments) -> dict[str, Any] | None:
        limit = self._settings.max_timeout
        if not given.command.strip():
            return _failure("command is empty; say what to run", status="error")
        if "\0" in given.command:
            return _failure("command contains a NUL byte, which no shell can read", status="error")
        if not given.background and given.timeout is not None and given.timeout > limit:
            return {
                "error": f"timeout {given.timeout} s is above the limit of {limit} s for foreground commands;"
                " use background=true for longer work"
            }
        if given.workdir and not _WORKDIR.fullmatch(given.workdir):
            return _failure(
                "workdir has characters that are not allowed; use letters, digits and / \\ : _ - . ~ space + @ = ,",
                status="blocked",
            )
        return None

    def _directory(self, place: ToolContext, workdir: str | None) -> str:
        """Return the absolute directory for this call, or empty for the session's own. Raises `NotADirectoryError` with the shell's message."""
        if not workdir:
            return ""
        path = workdir
        if path == "~" or path.startswith("~/"):
            path = self._shells.home + path[1:]
        path = os.path.normpath(os.path.join(self._shells.cwd_of(place.context), path))
        if place.confined and self._confinement.sandbox.inside_home(path):
            raise NotADirectoryError(f"cd: {workdir}: is inside the gateway's home, which commands cannot see")
        if not os.path.isdir(path):
            why = "Not a directory" if os.path.exists(path) else "No such file or directory"
            raise NotADirectoryError(f"cd: {workdir}: {why}")
        return path

    # -- background --------------------------------------------------------------------------------------------------------------

    async def _background(self, place: ToolContext, given: TerminalArguments, cwd: str) -> dict[str, Any]:
        patterns = [] if given.notify_on_complete else list(given.watch_patterns or ())
        notify = given.notify_on_complete
        asked = notify or bool(patterns)
        promised = asked and place.channel is not None
        pty = given.pty and _READS_STDIN.search(given.command) is None
        try:
            record = await self._processes.start(
                place,
                given.command,
                cwd=cwd,
                pty=pty,
                notify=notify and promised,
                watch=patterns if promised else (),
            )
        except ValueError as error:
            return _failure(str(error), status="error")
        result: dict[str, Any] = {
            "output": "Background process started",
            "session_id": record.id,
            "pid": record.pid,
            "exit_code": 0,
            "error": None,
        }
        if asked and not promised:
            result["notify_on_complete"] = False
            result["notify_unsupported"] = place.unsupported
        elif notify:
            result["notify_on_complete"] = True
        elif patterns:
            result["watch_patterns"] = patterns
        else:
            result["hint"] = (
                "no notice follows when this process ends; look at it with process(action='poll') or process(action='wait')"
            )
        if given.notify_on_complete and given.watch_patterns:
            result["watch_patterns_ignored"] = (
                "notify_on_complete and watch_patterns exclude each other; the patterns were dropped"
            )
        if given.pty and not pty:
            result["pty_note"] = (
                "started without a terminal: this command reads its input from a pipe; use process write and close"
            )
        return result

    # -- foreground --------------------------------------------------------------------------------------------------------------

    async def _foreground(self, place: ToolContext, given: TerminalArguments, cwd: str) -> dict[str, Any]:
        """Run until exit, time-out or cancellation. Nothing of the command runs when this returns or raises."""
        seconds = given.timeout or self._settings.timeout
        output = HeadTail(self._settings.output_characters)
        try:
            with self._processes.slot(place.session_id), self._shells.lease(place.context, cwd=cwd) as lease:
                status, how, timed_out = await self._conduct(place, given.command, lease, output, seconds)
                if not timed_out:
                    lease.take_back()
        except WardenError as error:
            return _failure(str(error))
        except BaseException:
            if place.turn is not None:
                text = _finished(output, "[Command interrupted: the turn was stopped]")
                keep_partial_result(place.turn, _encode({"output": text, "exit_code": INTERRUPTED, "error": None}))
            raise
        if timed_out:
            text = _finished(output, f"[Command timed out after {seconds} s and was ended]")
            return {"output": text, "exit_code": TIMED_OUT, "error": None}
        return self._result(place, given, _finished(output), status, how)

    async def _conduct(
        self, place: ToolContext, command: str, lease: Lease, output: HeadTail, seconds: float
    ) -> tuple[ExitStatus, KillHow, bool]:
        lease.environment.update(self._confinement.environment(place, lease.root))
        spec = ProcessSpec(
            argv=lease.argv(command, keep=True),
            cwd=lease.cwd,
            env={**lease.environment, "TERM": "dumb", "PAGER": "cat", "GIT_PAGER": "cat", **place.context.environ()},
            inherited=lease.inherited,
            confinement=self._confinement.plan(place, lease.root),
        )
        with working("process", place.core.ids.make("fg_", 12), mask_secrets(command)[:200]) as node:
            process = await self._warden.spawn(spec)
            if node is not None:
                node.note = f"pid {process.pid}"
            reading = _Reading(process, output)
            ended = False
            how = KillHow.LOST
            async with trio.open_nursery() as nursery:
                nursery.start_soon(reading.run)
                try:
                    with trio.move_on_after(seconds) as bound, waiting(f"process {process.pid}"):
                        await process.wait()
                        ended = True
                    if ended:
                        await reading.settle()
                finally:
                    with trio.move_on_after(END_LIMIT, shield=True):
                        report = await process.kill(self._settings.foreground_grace)
                        how = report.how
                        if not ended or report.survivors:
                            process.account_for(report, node)
                        await reading.finish()
                    reading.scope.cancel()
                    if process.count_exceeded is not None:
                        output.append(_count_text(*process.count_exceeded))
            return process.status or ExitStatus(lost=True), how, bound.cancelled_caught

    def _result(
        self, place: ToolContext, given: TerminalArguments, text: str, status: ExitStatus, how: KillHow
    ) -> dict[str, Any]:
        code = status.returncode
        result: dict[str, Any] = {"output": text, "exit_code": -1 if code is None else code, "error": None}
        if status.lost:
            result["error"] = "the process layer lost this command; how it ended is not known"
        elif status.signal is not None:
            result["signal"] = str(status).removeprefix("killed by ")
        meaning = guard.exit_code_meaning(given.command, result["exit_code"])
        if meaning is not None:
            result["exit_code_meaning"] = meaning
        hint = confinement_hint(text, place.profile) if code else ""
        if hint:
            result["hint"] = hint
        if how in (KillHow.SIGTERM, KillHow.SIGKILL):
            result["note"] = (
                "processes that the command left behind were ended; use background=true for work that goes on"
            )
        if given.pty:
            result["pty_note"] = "pty is for background commands; this one had none"
        return result


def _count_text(found: int, limit: int) -> str:
    return (
        f"\n[Command killed: it had {found} processes, and {limit} is the limit (tools.confinement.limits.processes)]"
    )


class _Preview(msgspec.Struct):
    command: str


class _Reading:
    """The only reader of a foreground command's output. It also reads while the command is being killed: a full pipe would keep it from exiting."""

    def __init__(self, process: KeptProcess, output: HeadTail) -> None:
        self._process = process
        self._output = output
        self.scope = trio.CancelScope(shield=True)
        self._over = trio.Event()

    async def run(self) -> None:
        """Read until the pipe is closed. Shielded: the owner cancels `scope` when nothing more will come."""
        decoder, escapes = OutputDecoder(), AnsiFilter()
        with self.scope:
            try:
                while data := await self._process.output.receive_some():
                    self._output.append(escapes.feed(decoder.feed(data)))
            except (trio.BrokenResourceError, trio.ClosedResourceError):
                pass
            self._output.append(escapes.feed(decoder.finish()))
        self._over.set()

    async def settle(self) -> None:
        """Wait, after the command has exited, for the end of its output, or until it is idle because another process holds the pipe."""
        with trio.move_on_after(OUTPUT_SECONDS):
            before = -1
            while not self._over.is_set() and self._output.total != before:
                before = self._output.total
                with trio.move_on_after(OUTPUT_IDLE):
                    await self._over.wait()

    async def finish(self) -> None:
        """Read the rest of the output and close the streams, after every process has ended. The caller shields it, with a bound."""
        with trio.move_on_after(OUTPUT_IDLE):
            await self._over.wait()
        await self._process.close_streams()


def _finished(output: HeadTail, note: str = "") -> str:
    text = mask_secrets(output.text.strip())
    return "\n".join(part for part in (text, note) if part)


def _failure(message: str, **more: object) -> dict[str, Any]:
    return {"output": "", "exit_code": -1, "error": message, **more}


def _encode(result: dict[str, Any]) -> str:
    return msgspec.json.encode(result).decode()
