"""All tools of an agent, opened around the supervisor: the warden and its processes, the shells, delegation, and the links to MCP servers.

`open_toolbox` is made to be entered in a stage of the Runtime, inside the store and around everything that can start a job. Leaving it ends every process and
every link; by then the supervisor has stopped the jobs, so there is nothing left to end unless something went wrong.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from typing import Any, Final, final

import attrs
import msgspec
import trio

from hermes_trio.agent.approvals import Approvals
from hermes_trio.agent.command_policy import ApprovalSettings, CommandPolicy, ModelReviewer
from hermes_trio.agent.tool import Tool
from hermes_trio.runtime.runtime import Runtime
from hermes_trio.runtime.turn import Turn

from .confinement import CommandConfinement, open_confinement
from .delegate import Delegation
from .mcp import McpLinks, McpSettings, open_links
from .registry import Tools
from .settings import ToolSettings
from .terminal.output import mask_command
from .terminal.process import PROCESS_REQUEST, ProcessTool
from .terminal.processes import OutputLog, Processes
from .terminal.shell_state import ShellStates, base_environment
from .terminal.terminal import Terminal
from .warden import Warden, open_warden

__all__ = ["CommandReview", "Toolbox", "open_toolbox"]

NAMES: Final = ("terminal", "process", "delegate_task")


@final
class Toolbox(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """The tools of one runtime. For an agent it is the `ToolBox`; programs and commands use its parts."""

    terminal: Terminal
    process: ProcessTool
    delegation: Delegation
    processes: Processes
    shells: ShellStates
    consent: CommandPolicy
    warden: Warden
    links: McpLinks
    tools: Tools
    confinement: CommandConfinement

    def for_turn(self, turn: Turn) -> Mapping[str, Tool]:
        """What this turn may use."""
        return self.tools.for_turn(turn)

    async def end_conversation(self, session_key: str, session_id: str, reason: str) -> None:
        """A conversation starts anew: its bypass and its grants end, what waits for approval is refused with the reason, and its shell is forgotten.

        The bypass is over before the first await and the shell whatever happens, so that no failure and no cancellation can leave them to whoever comes
        next. The shell is the last, without an await behind it: a caller that cancels the old turn at once leaves it no moment to begin another one.
        """
        try:
            await self.consent.end_scope(session_key, reason)
        finally:
            self.shells.forget(session_id)


@attrs.frozen(kw_only=True)
class CommandReview:
    """Who decides about commands that need a decision: people through `approvals`, or a model; `bypass` lets everything through that is not forbidden.

    `gateway_home` is the folder of the gateway, whose commands are asked about.
    """

    approvals: Approvals | None = None
    settings: ApprovalSettings | None = None
    reviewer: ModelReviewer | None = None
    bypass: bool = False
    gateway_home: str = ""


NO_REVIEW: Final = CommandReview()


@asynccontextmanager
async def open_toolbox(
    runtime: Runtime,
    settings: ToolSettings | None = None,
    *,
    review: CommandReview = NO_REVIEW,
    mcp: McpSettings | None = None,
    environment: Mapping[str, str] | None = None,
    output_log: OutputLog | None = None,
    more: Iterable[Tool] = (),
    confinement: CommandConfinement | None = None,
) -> AsyncIterator[Toolbox]:
    """The tools for the body of the `async with`.

    `confinement` says what commands may see and touch; without it, what the settings say for a program that has no home to hide.
    `environment` is the server's, of which commands get an allow-list; `output_log` keeps the last output of watched jobs (the runtime's store does, if it
    can). Cancelled or not, leaving ends every process and link in a bounded time.
    """
    settings = ToolSettings() if settings is None else settings
    server = os.environ if environment is None else environment
    terminal = settings.terminal
    base = base_environment(server, terminal.pass_environment)
    rules = open_confinement(settings, server) if confinement is None else confinement
    log = output_log if output_log is not None else _log_of(runtime.store)
    async with open_warden(max_processes=terminal.max_processes, cgroup=rules.sandbox.groups.root) as warden:
        shells = ShellStates(
            base,
            rules.cwd,
            trio.current_time,
            login=terminal.login_shell,
            usable=lambda path: os.path.isdir(path) and not rules.sandbox.inside_home(path),
        )
        with runtime.core.at_session_end(shells.forget):
            processes = Processes(warden, shells, terminal, log, rules)
            judge = CommandPolicy(
                review.approvals,
                review.settings,
                home=shells.home,
                gateway_home=review.gateway_home,
                shown=mask_command,
                reviewer=review.reviewer,
                bypass=review.bypass,
            )
            delegation = Delegation(
                settings.delegation,
                inherit=shells.inherit,
                forget=shells.forget,
            )
            run_commands = Terminal(warden, shells, processes, judge, terminal, rules)
            look_after = ProcessTool(processes)
            answering = runtime.membership.answering(PROCESS_REQUEST, look_after.answer)
            async with open_links(mcp, warden, base, rules.sandbox) as links:
                own: list[Tool] = [run_commands, look_after, delegation]
                tools = Tools(
                    [*(one for one in own if one.spec.name not in settings.disabled), *more],
                    more=lambda turn: links.tools(turn, rules.profile_of_turn(turn)),
                )
                with answering:
                    yield Toolbox(
                        terminal=run_commands,
                        process=look_after,
                        delegation=delegation,
                        processes=processes,
                        shells=shells,
                        consent=judge,
                        warden=warden,
                        links=links,
                        tools=tools,
                        confinement=rules,
                    )


def _log_of(store: Any) -> OutputLog | None:
    """The runtime knows its store by fewer verbs than it has."""
    return store if hasattr(store, "note_job_output") else None
