"""The model-tool loop: call the model, run the tools that it asks for, return their results to it, until it answers.

Tool calls of one answer run concurrently, each a task and a node of the turn. A tool's failure is reported to the model; only a failure of the model
fails the turn. Finished steps are kept in `turn.progress`, so that a turn which is cancelled loses none of them.

Tools of the client run at the client: an answer that calls one ends the turn, after the server's own calls in it have run. Until the client sends the
result, the transcript has a placeholder result for such a call, so that every transcript is valid at any time. Results from clients are stored as
messages of role `user` with the id of their call, and replace the placeholder whenever the history is used.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Annotated, Final, Protocol, Self

import msgspec
import trio

from hermes_trio.base.redaction import hide_credentials
from hermes_trio.runtime.errors import AgentFailed, BudgetExhausted, RuntimeProblem
from hermes_trio.runtime.outcome import Cause, Usage
from hermes_trio.runtime.ports import Message, Reply, ToolCall
from hermes_trio.runtime.tree import Node, working
from hermes_trio.runtime.turn import Turn
from hermes_trio.runtime.turn_lifecycle import first_cause

from .compaction import HistoryStore, compact, estimate_tokens, trim_results
from .model import (
    Finished,
    Model,
    ModelError,
    ModelErrorKind,
    ModelRequest,
    ReasoningDelta,
    TextDelta,
    ToolCallReady,
    ToolChoice,
    ToolSpec,
    TurnOptions,
    options_of,
)
from .tool import Tool, ToolSource, error_result, partial_result, usage_of_tools

logger: Final = logging.getLogger("hermes_trio.agent")

DEFAULT_PROMPT: Final = (
    "You are a capable assistant with tools. Use them when they help, say plainly what you did and what came of it,"
    " and never claim that something happened that did not."
)

RESULT_LIMIT: Final = 100_000
"""The maximum of characters of one tool result in a request; the middle of a longer one is left out."""

REASONING_EXCERPT: Final = 500

HANDED_OVER: Final = "[handed to the client, which runs this tool]"
"""The placeholder result of a call of a client's tool, until the client sends the real one."""


class Routes(Protocol):
    """Finds models by name; the empty name is the default."""

    def get(self, name: str = "") -> Model: ...

    def __contains__(self, name: object) -> bool: ...


class AgentSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[agent]`: the agent's prompt and limits, and the platforms on which the demo model obeys directives."""

    system_prompt: str = ""
    """Replaces the built-in system prompt."""
    max_iterations: Annotated[int, msgspec.Meta(ge=1)] = 90
    """The maximum of model calls in one turn."""
    compact_at: Annotated[float, msgspec.Meta(gt=0, le=1)] = 0.85
    """The share of the context window above which older messages are summarised."""
    max_tokens: Annotated[int, msgspec.Meta(ge=1)] | None = None
    temperature: Annotated[float, msgspec.Meta(ge=0, le=2)] | None = None
    demo_directives: tuple[str, ...] = ()
    """Platforms, besides the terminal and HTTP on loopback, on which the demo model obeys its directives."""


class ModelAgent:
    """An agent: models, tools and the loop. One object serves every session and holds no state of a turn."""

    def __init__(
        self,
        routes: Routes,
        tools: ToolSource | None = None,
        *,
        settings: AgentSettings | None = None,
        history: HistoryStore | None = None,
        directives: Callable[[Turn], bool] | None = None,
    ) -> None:
        self._routes = routes
        self._tools = tools
        self.settings: AgentSettings = AgentSettings() if settings is None else settings
        self._history = history
        self._directives = directives

    async def __call__(self, turn: Turn, /) -> Reply:
        """Run one turn. Cancelling ends the model call and the tools, and leaves finished steps in `turn.progress`."""
        name = turn.input.model
        model = self._routes.get(name if name in self._routes else "")
        options = options_of(turn.input)
        tools: Mapping[str, Tool] = {}
        if self._tools is not None and options.server_tools:
            tools = self._tools.for_turn(turn)
        work = _Work(self, turn, model, tools, options)
        try:
            return await work.run()
        except ModelError as error:
            work.keep_partial()
            code = f"model_{error.kind.value}"
            logger.warning("turn %s failed: its model call failed (%s): %s", turn.id, code, error)
            raise AgentFailed(str(error), code=code) from error
        except BaseException:
            work.keep_partial()
            raise

    def system_prompt(self, turn: Turn) -> str:
        """Return the system prompt: the agent's own, then what this turn adds."""
        own = self.settings.system_prompt or DEFAULT_PROMPT
        return f"{own}\n\n{turn.input.instructions}" if turn.input.instructions else own

    def metadata(self, turn: Turn) -> Mapping[str, object]:
        """Return what models in this process may know of the turn. It is never sent to a provider."""
        return {
            "directives": bool(self._directives and self._directives(turn)),
            "notice": bool(turn.input.notices),
            "platform": turn.context.platform,
            "preface": turn.input.preface,
        }


class _Work:
    """The state of one turn's loop."""

    def __init__(
        self, agent: ModelAgent, turn: Turn, model: Model, tools: Mapping[str, Tool], options: TurnOptions
    ) -> None:
        self.agent = agent
        self.turn = turn
        self.model = model
        self.options = options
        self.theirs: frozenset[str] = frozenset([spec.name for spec in options.tools])
        if self.theirs:
            tools = {name: tool for name, tool in tools.items() if name not in self.theirs}
        self.tools = tools
        self.specs: tuple[ToolSpec, ...] = (*(tool.spec for tool in tools.values()), *options.tools)
        self.metadata = agent.metadata(turn)
        self.brought: list[Message] = []
        self.said: list[Message] = []
        self.usage = Usage()
        self.text: list[str] = []
        self.reasoning: list[str] = []
        self.trimming = False

    async def run(self) -> Reply:
        turn, settings = self.turn, self.agent.settings
        history = await turn.history()
        self._begin(history)
        self._note()
        for step in range(settings.max_iterations):
            await self._make_room(history)
            answer, finish = await self._ask_with_room(history, self.specs, self._choice(step))
            if not answer.tool_calls:
                return self._reply(answer, finish)
            self.said.append(answer)
            self._note()
            if answer.text:
                turn.emit("reasoning.available", text=answer.text[:REASONING_EXCERPT])
            theirs = tuple([call for call in answer.tool_calls if call.name in self.theirs]) if self.theirs else ()
            mine = answer.tool_calls if not theirs else [call for call in answer.tool_calls if call not in theirs]
            if mine:
                self.said.extend(await self._use_tools(mine))
            if theirs:
                return self._hand_over(answer, theirs)
            self._take_steering()
            self._note()
            logger.debug("turn %s: step %d used %d tools", turn.id, step + 1, len(answer.tool_calls))
        self.said.append(
            Message(
                role="user",
                content="You have used all of your steps. Answer now with what you have; no more tools can be used.",
            )
        )
        answer, _ = await self._ask_with_room(history, (), None)
        return self._reply(answer, "max_iterations")

    def _begin(self, history: list[Message]) -> None:
        """Match the client's results to their calls, and begin the turn with its message."""
        turn, results = self.turn, self.options.results
        now = turn.core.clock()
        if results:
            waiting = {call.id: call.name for call in open_calls(history)}
            for result in results:
                if result.tool_call_id not in waiting:
                    raise AgentFailed(
                        f"no tool call waits for the result {result.tool_call_id!r}", code="unknown_tool_call"
                    )
                self.brought.append(
                    Message(
                        role="user",
                        content=result.content,
                        tool_call_id=result.tool_call_id,
                        tool_name=waiting[result.tool_call_id],
                        timestamp=now,
                    )
                )
        if history:
            history[:] = with_results([*history, *self.brought])
        if turn.input.prompt or not results:
            self.said.append(
                Message(
                    role="user",
                    content=turn.input.prompt,
                    timestamp=now,
                    platform_message_id=turn.context.message_id,
                )
            )

    def _choice(self, step: int) -> ToolChoice | None:
        """Return the client's choice of tools. A required tool is required once: later calls of the turn may answer."""
        choice = self.options.choice
        if choice is None or step == 0 or choice.mode == "none":
            return choice
        return None if choice.parallel is None else ToolChoice(parallel=choice.parallel)

    async def _make_room(self, history: list[Message]) -> None:
        """Summarise the history before the turn, then shorten results of the turn, if a request would nearly fill the window."""
        limit = self.model.context_window * self.agent.settings.compact_at
        if history and self._estimate(history) > limit:
            await self._compact(history)
        if self._estimate(history) > limit:
            self.trimming = True

    def _estimate(self, history: Sequence[Message]) -> int:
        return estimate_tokens([*history, *self._in_turn()], self.specs)

    def _in_turn(self) -> Sequence[Message]:
        return trim_results(self.said) if self.trimming else self.said

    async def _compact(self, history: list[Message]) -> None:
        store = self.agent._history if self.turn.input.history is None else None
        shorter = await compact(self.model, list(history), store, self.turn.context.session_id)
        history[:] = shorter.history
        self.usage = self.usage + shorter.usage
        self._spend(shorter.usage)

    async def _ask_with_room(
        self, history: list[Message], specs: tuple[ToolSpec, ...], choice: ToolChoice | None
    ) -> tuple[Message, str]:
        """Call the model; if it says that the request is too long, make room, once in each way, and call it again."""
        while True:
            try:
                return await self._ask(history, specs, choice)
            except ModelError as error:
                if error.kind is not ModelErrorKind.CONTEXT_OVERFLOW:
                    raise
                overflow = error
            if not await self._made_room(history):
                raise overflow

    async def _made_room(self, history: list[Message]) -> bool:
        if history:
            before = estimate_tokens(history)
            await self._compact(history)
            if estimate_tokens(history) < before:
                return True
        if self.trimming:
            return False
        self.trimming = True
        return trim_results(self.said) != self.said

    async def _ask(
        self, history: Sequence[Message], specs: tuple[ToolSpec, ...], choice: ToolChoice | None
    ) -> tuple[Message, str]:
        turn, settings = self.turn, self.agent.settings
        request = ModelRequest(
            messages=(Message(role="system", content=self.agent.system_prompt(turn)), *history, *self._in_turn()),
            tools=specs,
            choice=choice,
            max_tokens=settings.max_tokens,
            temperature=settings.temperature,
            options=self.options.model,
            metadata=self.metadata,
        )
        self.text.clear()
        reasoning: list[str] = []
        calls: list[ToolCall] = []
        finished = Finished()
        # Runs store their events, so they get one event for the whole reasoning of an answer.
        whole = turn.origin.run is not None
        with _ModelCall(turn, self.model, request) as asked:
            async with self.model.stream(request) as stream:
                async for event in stream:
                    match event:
                        case TextDelta(piece):
                            if reasoning and whole:
                                whole = False
                                turn.emit("reasoning.delta", delta="".join(reasoning))
                            self.text.append(piece)
                            turn.emit("message.delta", delta=piece)
                        case ReasoningDelta(piece):
                            reasoning.append(piece)
                            if not whole:
                                turn.emit("reasoning.delta", delta=piece)
                        case ToolCallReady(call):
                            calls.append(call)
                        case Finished():
                            finished = asked.finished = event
        if reasoning:
            if whole:
                turn.emit("reasoning.delta", delta="".join(reasoning))
            self.reasoning.append("".join(reasoning))
        self.usage = self.usage + finished.usage
        self._spend(finished.usage)
        answer = Message(
            role="assistant",
            content="".join(self.text),
            tool_calls=tuple(calls),
            reasoning="".join(reasoning),
            finish_reason=finished.finish_reason,
            token_count=finished.usage.output_tokens,
            timestamp=turn.core.clock(),
        )
        self.text.clear()
        return answer, finished.finish_reason

    def _spend(self, usage: Usage) -> None:
        """Subtract the tokens from the budget. If it is exceeded, cancel the turn's scope: the tokens are already used."""
        try:
            self.turn.allowance.spend("tokens", usage.total_tokens)
        except BudgetExhausted as error:
            logger.info("turn %s: %s", self.turn.id, error)
            raise

    async def _use_tools(self, calls: Sequence[ToolCall]) -> list[Message]:
        results: list[Message | None] = [None] * len(calls)

        async def use(index: int, call: ToolCall) -> None:
            results[index] = await self._use(call)

        self.usage = self.usage + Usage(tool_calls=len(calls))
        try:
            async with trio.open_nursery() as nursery:
                for index, call in enumerate(calls):
                    nursery.start_soon(use, index, call)
        except BaseException:
            # Finished results are kept. A call without a result would make the transcript invalid, so it gets one that says it was cancelled.
            self.said.extend(result or _cut_off(self.turn, call) for result, call in zip(results, calls, strict=True))
            self._note()
            raise
        return [result for result in results if result is not None]

    async def _use(self, call: ToolCall) -> Message:
        turn = self.turn
        tool = self.tools.get(call.name)
        preview = _preview(tool, call)
        began = trio.current_time()
        if turn.sink is not None:
            arguments = hide_credentials(call.arguments)
            turn.emit("tool.started", tool=call.name, preview=preview, tool_call_id=call.id, arguments=arguments)
        failed = True
        result = ""
        stopping = _ToolStop()
        try:
            with stopping.scope, working("tool", call.id, call.name, stopping.scope, stopping) as stopping.node:
                result = await self._call(tool, call)
                if stopping.node is not None and (tracer := stopping.node.tree.tracer) is not None:
                    tracer.note(stopping.node, call=call, result=result, failed=_is_error(result))
            if stopping.scope.cancelled_caught:
                result = partial_result(turn, call.id) or error_result(f"this call was stopped ({stopping.cause})")
            failed = _is_error(result)
        finally:
            turn.emit(
                "tool.completed",
                tool=call.name,
                tool_call_id=call.id,
                duration=round(trio.current_time() - began, 3),
                error=failed,
                result=hide_credentials(result) if turn.sink is not None else "",
            )
        return Message(
            role="tool", content=result, tool_call_id=call.id, tool_name=call.name, timestamp=turn.core.clock()
        )

    async def _call(self, tool: Tool | None, call: ToolCall) -> str:
        if tool is None:
            known = ", ".join(sorted(self.tools)) or "none"
            return error_result(f"there is no tool {call.name!r}; the tools are: {known}")
        try:
            return _shorten(await tool.call(self.turn, call.arguments))
        except Exception as error:
            cause = first_cause(error)
            if isinstance(cause, RuntimeProblem):
                return error_result(str(cause))
            logger.error("tool %s failed in turn %s", call.name, self.turn.id, exc_info=error)
            return error_result(f"the tool failed: {type(cause).__name__}: {cause}")

    def _take_steering(self) -> None:
        """Add the texts that arrived while the turn ran, between two steps."""
        while self.turn.steering:
            self.said.append(Message(role="user", content=self.turn.steering.pop(0), timestamp=self.turn.core.clock()))

    def keep_partial(self) -> None:
        """Add the text that the model has streamed so far to the transcript of a turn that is being cancelled."""
        if self.text:
            text = "".join(self.text)
            self.said.append(
                Message(role="assistant", content=text, finish_reason="error", timestamp=self.turn.core.clock())
            )
        self._note()

    def _note(self) -> None:
        self.turn.progress = Reply(
            text="".join(self.text),
            messages=(*self.brought, *self.said),
            usage=self.usage + usage_of_tools(self.turn),
            partial=True,
            model=self.model.name,
        )

    def _hand_over(self, answer: Message, calls: tuple[ToolCall, ...]) -> Reply:
        """End the turn with calls that the client has to make."""
        handed = [
            Message(role="tool", content=HANDED_OVER, tool_call_id=call.id, tool_name=call.name) for call in calls
        ]
        return Reply(
            text=answer.text,
            messages=(*self.brought, *self.said, *handed),
            usage=self.usage + usage_of_tools(self.turn),
            model=self.model.name,
            finish_reason="tool_calls",
            calls=calls,
            reasoning="\n\n".join(self.reasoning),
        )

    def _reply(self, answer: Message, finish: str) -> Reply:
        text = answer.text
        message = Message(
            role="assistant",
            content=text,
            finish_reason=finish,
            reasoning=answer.reasoning,
            timestamp=answer.timestamp,
        )
        cut = finish == "length"
        return Reply(
            text=text,
            messages=(*self.brought, *self.said, message),
            usage=self.usage + usage_of_tools(self.turn),
            model=self.model.name,
            finish_reason=finish,
            reasoning="\n\n".join(self.reasoning) if self.reasoning else "",
            partial=cut,
            error="the answer was cut off at the model's output limit" if cut else "",
            error_code="output_truncated" if cut else "",
        )


class _ModelCall:
    """Adds a node and two events around one model call: `with _ModelCall(turn, model, request) as asked`."""

    __slots__ = ("_began", "_id", "_model", "_node", "_request", "_turn", "_working", "finished")

    def __init__(self, turn: Turn, model: Model, request: ModelRequest) -> None:
        self._turn = turn
        self._model = model
        self._request = request
        self._id = turn.core.ids.make("req_", 12)
        self._node: Node | None = None
        self._working = working("model", self._id, model.name)
        self._began = 0.0
        self.finished: Finished | None = None

    def __enter__(self) -> Self:
        self._node = self._working.__enter__()
        if self._node is not None and (tracer := self._node.tree.tracer) is not None:
            tracer.note(self._node, model=self._model, request=self._request)
        if self._turn.sink is not None:
            self._began = trio.current_time()
            self._turn.emit("model.started", model=self._model.name, request_id=self._id)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self._node is not None and (tracer := self._node.tree.tracer) is not None:
            tracer.note(self._node, finished=self.finished, error=error)
        self._working.__exit__(kind, error, tb)
        if self._turn.sink is not None:
            usage = Usage() if self.finished is None else self.finished.usage
            self._turn.emit(
                "model.completed",
                model=self._model.name,
                request_id=self._id,
                duration=round(trio.current_time() - self._began, 3),
                error=error is not None,
                usage={"input_tokens": usage.input_tokens, "output_tokens": usage.output_tokens},
            )


class _ToolStop:
    """Stops one tool call through a scope of its own. The turn continues, and the model receives the cause as the result."""

    __slots__ = ("cause", "node", "scope")

    def __init__(self) -> None:
        self.scope = trio.CancelScope()
        self.cause: Cause | None = None
        self.node: Node | None = None

    def cancel(self, cause: Cause) -> None:
        """Cancel the call. The first cause is kept."""
        if self.cause is None:
            self.cause = cause
        self.scope.cancel(reason=str(cause))

    def stopped_node(self) -> Node | None:
        """Return the node of the call."""
        return self.node

    def title(self) -> str:
        """Return an empty title: the node has the tool's name."""
        return ""


def open_calls(history: Sequence[Message]) -> list[ToolCall]:
    """Return the tool calls at the end of a transcript that have no result yet, in order."""
    answered: set[str] = set()
    for message in reversed(history):
        if message.role == "tool":
            if message.content != HANDED_OVER:
                answered.add(message.tool_call_id)
        elif message.role == "assistant":
            return [call for call in message.tool_calls if call.id not in answered]
        elif message.tool_call_id:
            answered.add(message.tool_call_id)
        else:
            break
    return []


def with_results(history: Sequence[Message]) -> list[Message]:
    """Return the history with the results that clients sent in the place of the placeholders; see the module."""
    if not any(message.tool_call_id and message.role == "user" for message in history):
        return list(history)
    joined: list[Message] = []
    for message in history:
        if message.tool_call_id and message.role == "user":
            joined = _with_result(joined, msgspec.structs.replace(message, role="tool"))
        else:
            joined.append(message)
    return joined


def _with_result(history: list[Message], result: Message) -> list[Message]:
    """Replace the placeholder of a call by its result. A result without a call stays a message of the user."""
    for index in range(len(history) - 1, -1, -1):
        message = history[index]
        if message.role == "tool" and message.tool_call_id == result.tool_call_id:
            return [*history[:index], result, *history[index + 1 :]]
        if any(call.id == result.tool_call_id for call in message.tool_calls):
            end = index + 1
            while end < len(history) and history[end].role == "tool":
                end += 1
            return [*history[:end], result, *history[end:]]
    return [*history, msgspec.structs.replace(result, role="user")]


def _preview(tool: Tool | None, call: ToolCall) -> str:
    """Return the line that people see for a call. Never raises: a model can write anything as arguments."""
    if tool is None:
        return call.name
    try:
        return tool.preview(call.arguments)
    except Exception:
        logger.warning("tool %s has no preview for its arguments", call.name, exc_info=True)
        return call.name


def _cut_off(turn: Turn, call: ToolCall) -> Message:
    return Message(
        role="tool",
        content=partial_result(turn, call.id) or error_result("the turn was stopped before this call had ended"),
        tool_call_id=call.id,
        tool_name=call.name,
    )


def _is_error(result: str) -> bool:
    if '"error"' not in result:
        return False
    try:
        data = msgspec.json.decode(result)
    except msgspec.DecodeError:
        return False
    return isinstance(data, dict) and bool(data.get("error"))  # pyright: ignore[reportUnknownMemberType,reportUnknownArgumentType]


def _shorten(result: str) -> str:
    if len(result) <= RESULT_LIMIT:
        return result
    head, tail = int(RESULT_LIMIT * 0.4), int(RESULT_LIMIT * 0.6)
    dropped = len(result) - head - tail
    return f"{result[:head]}\n… {dropped} characters of {len(result)} left out …\n{result[-tail:]}"
