"""All tools of an agent: the warden and its processes, the shells, delegation, and the links to MCP servers.

Enter `open_toolbox` in a stage of the Runtime, inside the store and around everything that can start a job. Leaving it ends every process and link;
by then the supervisor has normally stopped the jobs.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from typing import Any, Final, final, get_args

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
from .settings import ToolName, ToolSettings
from .terminal.output import mask_command
from .terminal.process import PROCESS_REQUEST, ProcessTool
from .terminal.processes import OutputLog, Processes
from .terminal.shell_state import ShellStates, base_environment
from .terminal.terminal import Terminal
from .warden import Warden, open_warden

NAMES: Final[tuple[str, ...]] = get_args(ToolName)


@final
class Toolbox(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """The tools of one runtime. For an agent it is the `ToolSource`; programs and commands use its parts."""

    terminal: Terminal
    process: ProcessTool
    delegation: Delegation
    processes: Processes
    shells: ShellStates
    policy: CommandPolicy
    warden: Warden
    links: McpLinks
    tools: Tools
    confinement: CommandConfinement

    def for_turn(self, turn: Turn) -> Mapping[str, Tool]:
        """Return the tools of a turn."""
        return self.tools.for_turn(turn)

    async def end_conversation(self, session_key: str, session_id: str, reason: str) -> None:
        """End a conversation's grants and shell, and refuse its pending approvals with the reason.

        The shell ends whatever happens, so that no failure and no cancellation leaves it to the next conversation. It is last, without an await behind
        it: a caller that cancels the old turn at once leaves it no moment to begin another one.
        """
        try:
            await self.policy.end_scope(session_key, reason)
        finally:
            self.shells.forget(session_id)


class CommandReview(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """Who decides about flagged commands: people through `approvals`, or a model; `bypass` allows everything that is not forbidden.

    `gateway_home` is the directory of the gateway: commands that touch it are flagged.
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
    """Open the tools for the body of the `async with`.

    `confinement` restricts commands; by default as the settings say for a program without a home directory to hide. `environment` is the server's, of
    which commands get an allow-list; `output_log` stores the last output of watched jobs (default: the runtime's store, if it can). Leaving ends
    every process and link in a bounded time, also when cancelled.
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
            policy = CommandPolicy(
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
            run_commands = Terminal(warden, shells, processes, policy, terminal, rules)
            manage_processes = ProcessTool(processes)
            answering = runtime.membership.answering(PROCESS_REQUEST, manage_processes.answer)
            async with open_links(mcp, warden, base, rules.sandbox) as links:
                own: list[Tool] = [run_commands, manage_processes, delegation]
                tools = Tools(
                    [*(one for one in own if one.spec.name not in settings.disabled), *more],
                    more=lambda turn: links.tools(turn, rules.profile_of_turn(turn)),
                )
                with answering:
                    yield Toolbox(
                        terminal=run_commands,
                        process=manage_processes,
                        delegation=delegation,
                        processes=processes,
                        shells=shells,
                        policy=policy,
                        warden=warden,
                        links=links,
                        tools=tools,
                        confinement=rules,
                    )


def _log_of(store: Any) -> OutputLog | None:
    """Return the runtime's store as an `OutputLog`, if it has that verb."""
    return store if hasattr(store, "note_job_output") else None
