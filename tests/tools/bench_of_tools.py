"""An open Runtime with the real toolbox, for tests that use tools as the loop does: real processes, real shells, real time."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import attrs
import msgspec
import trio

from hermes_trio import Outcome, Runtime, RuntimeSettings, SessionContext, Turn, TurnHooks, TurnInput, TurnSpec
from hermes_trio.agent.approvals import Approvals
from hermes_trio.agent.command_policy import ApprovalSettings
from hermes_trio.agent.loop import AgentSettings, ModelAgent
from hermes_trio.agent.model import Model
from hermes_trio.agent.tool import Tool
from hermes_trio.providers.demo import DemoModel
from hermes_trio.runtime.errors import RuntimeProblem
from hermes_trio.runtime.ports import Message
from hermes_trio.tools.mcp import McpSettings
from hermes_trio.tools.settings import ToolSettings
from hermes_trio.tools.toolbox import CommandReview, Toolbox, open_toolbox

Body = Callable[[Turn], Awaitable[Any]]


class OneModel:
    """Routes with one model."""

    def __init__(self, model: Model) -> None:
        self.model = model

    def get(self, name: str = "") -> Model:
        return self.model

    def __contains__(self, name: object) -> bool:
        return False


class _Unset:
    def __contains__(self, name: object) -> bool:
        return False

    def get(self, name: str = "") -> Model:
        raise RuntimeProblem("this test has no model")


@attrs.define
class Bench:
    """A runtime, its tools and, if a test wants one, its agent."""

    runtime: Runtime
    box: Toolbox
    approvals: Approvals

    async def in_turn(
        self, body: Body, *, session: str = "s1", stateless: bool = False, asks: Any = None, **fields: str
    ) -> Outcome:
        """Run `body(turn)` as the agent of a turn; what it raises is raised here."""
        raised: list[BaseException] = []

        async def agent(turn: Turn) -> str:
            try:
                await body(turn)
            except Exception as error:
                raised.append(error)
                raise
            return "done"

        context = SessionContext(session_id=session, session_key=session, **fields)
        if stateless:
            outcome = await self.runtime.stateless.run_turn(
                TurnSpec(input=TurnInput(text="go"), context=context, agent=agent)
            )
        else:
            outcome = await self.runtime.run_turn("go", context, agent=agent, hooks=TurnHooks(asks=asks))
        if raised:
            raise raised[0]
        return outcome

    async def run(self, command: str, *, session: str = "s1", stateless: bool = False, **more: Any) -> dict[str, Any]:
        """The result of `terminal` in a turn of its own."""
        return await self.use("terminal", {"command": command, **more}, session=session, stateless=stateless)

    async def use(
        self, tool: str, arguments: Mapping[str, Any], *, session: str = "s1", stateless: bool = False, asks: Any = None
    ) -> dict[str, Any]:
        """The result of any tool in a turn of its own."""
        results: list[dict[str, Any]] = []

        async def body(turn: Turn) -> None:
            results.append(await call(self.box, turn, tool, arguments))

        await self.in_turn(body, session=session, stateless=stateless, asks=asks)
        return results[0]


async def call(box: Toolbox, turn: Turn, tool: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """A tool's result as data."""
    found: Tool = box.for_turn(turn)[tool]
    return msgspec.json.decode(await found.call(turn, msgspec.json.encode(arguments).decode()))


@asynccontextmanager
async def open_bench(
    *,
    table: Mapping[str, Any] | None = None,
    policy: ApprovalSettings | None = None,
    bypass: bool = False,
    approval_seconds: float = 60.0,
    mcp: McpSettings | None = None,
    environment: Mapping[str, str] | None = None,
    store: Any = None,
    settings: RuntimeSettings | None = None,
    model: Model | None = None,
    agent: AgentSettings | None = None,
    more: tuple[Tool, ...] = (),
) -> AsyncIterator[Bench]:
    """A runtime with a store in memory (or `store`), the toolbox, and with `model` the real agent loop around it."""
    opened: list[tuple[Toolbox, Approvals]] = []

    @asynccontextmanager
    async def stage(runtime: Runtime) -> AsyncIterator[None]:
        approvals = Approvals(runtime.store, seconds=approval_seconds)  # type: ignore[arg-type]
        async with open_toolbox(
            runtime,
            ToolSettings.read(table or {}),
            review=CommandReview(approvals=approvals, settings=policy, bypass=bypass),
            mcp=mcp,
            environment=environment,
            more=more,
        ) as box:
            opened.append((box, approvals))
            if model is not None:
                runtime.core.agent = ModelAgent(
                    OneModel(model),
                    box,
                    settings=agent,
                    history=runtime.store,
                    directives=lambda _: True,  # type: ignore[arg-type]
                )
            yield

    async def nothing(turn: Turn) -> str:
        return "nothing to do"

    async with Runtime(agent=nothing, store=store, settings=settings, stages=[stage]) as runtime:
        yield Bench(runtime, *opened[0])


def open_demo(**more: Any) -> Any:
    """A bench whose agent is the real loop with the demo model, directives obeyed."""
    return open_bench(model=DemoModel(), **more)


def gone(pid: int) -> bool:
    """Whether a process has ended (a zombie counts)."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return True
    return status.rpartition(")")[2].split()[0] in "ZX"


def running(text: str) -> list[int]:
    """The live processes that have this text among their arguments. A command's own numbers mean nothing outside of its PID namespace."""
    found: list[int] = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                arguments = (entry / "cmdline").read_bytes()
            except OSError:
                continue
            if text.encode() in arguments.replace(b"\0", b" "):
                found.append(int(entry.name))
    return found


async def until(condition: Callable[[], object], seconds: float = 10.0) -> None:
    """Wait for something that only the operating system knows, with a bound."""
    with trio.fail_after(seconds):
        while not condition():  # noqa: ASYNC110
            await trio.sleep(0.01)


def tool_results(messages: list[Message]) -> list[dict[str, Any]]:
    """The results of the tool calls of a transcript, as data."""
    return [msgspec.json.decode(message.text) for message in messages if message.role == "tool"]


HOME = os.environ.get("HOME", "/")
