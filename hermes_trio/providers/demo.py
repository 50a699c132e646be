"""The demo model: it needs no account and no network; it echoes, and on request uses tools, waits or fails.

Deterministic: the same request gives the same events and ids. If the request's metadata has `directives: True`, it obeys lines at the top of the
message that begin with `!`, each as one step, several tool calls in parallel; otherwise it echoes them like any text, and names the setting that
enables them. The name of the sender may stand in front of the first one, as in `[Ann] !run ls`. A `preface` in the
metadata, which the runtime put in front of the message, is acknowledged, and the message behind it is answered.
"""

from __future__ import annotations

import math
import re
import shlex
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Final, cast, final

import msgspec
import trio

from hermes_trio.agent.model import (
    DEFAULT_CONTEXT_WINDOW,
    NO_OPTIONS,
    Finished,
    ModelError,
    ModelErrorKind,
    ModelEvent,
    ModelOptions,
    ModelRequest,
    ModelStream,
    TextDelta,
    ToolCallReady,
)
from hermes_trio.runtime.outcome import Usage
from hermes_trio.runtime.ports import Message, ToolCall
from hermes_trio.runtime.tree import waiting

ECHO_LIMIT: Final = 500
"""The maximum of characters of a message that are echoed."""

OUTPUT_LIMIT: Final = 2000
"""The maximum of characters of a notice's output that are repeated, from its end."""

MAX_PIECES: Final = 200
"""The maximum of pieces in which a text is streamed; a short one is streamed word by word."""

LONGEST_SLEEP: Final = 86_400.0

MAX_DEPTH: Final = 20
"""The depth to which a recursive JSON schema is followed."""

DIRECTIVES: Final[Mapping[str, str]] = {
    "!run": "!run CMD: run a shell command and wait for it",
    "!bg": "!bg CMD: run a shell command in the background, and be told when it ends",
    "!watch": '!watch PATTERN CMD: the same, and be told when PATTERN shows up in its output ("quote it" if it has spaces)',
    "!delegate": "!delegate GOAL: hand a goal to a child agent in the background",
    "!tool": '!tool NAME JSON: call any tool, for example !tool process {"action": "list"}',
    "!sleep": "!sleep SECONDS: take that long to answer",
    "!fail": "!fail TEXT: let the turn fail with that text",
}

_REMARKS: Final = ("approval", "notify_unsupported", "hint", "watch_patterns_ignored", "pty_note")
"""Fields of a result that hold a sentence for the person."""

_NOTICE: Final = re.compile(r"^\[(?:IMPORTANT|ASYNC DELEGATION)\b", re.MULTILINE)
_SENDER: Final = re.compile(r"\A\[[^\[\]\n]+\] (?=!)")
"""The name of the sender in front of a message in a shared conversation."""
_WORDS: Final = re.compile(r"\s*\S+|\s+$")


class _DirectiveError(Exception):
    """Raised for a directive that cannot be obeyed. The text helps its author."""


class _Plan(msgspec.Struct):
    """The planned answer."""

    text: str = ""
    sleep: float = 0.0
    calls: list[tuple[str, Mapping[str, Any]]] = msgspec.field(default_factory=list[tuple[str, Mapping[str, Any]]])
    failure: str | None = None


@final
class DemoModel:
    """The demo model; see the module."""

    provider: Final = "demo"

    def __init__(self, name: str = "demo", context_window: int = DEFAULT_CONTEXT_WINDOW) -> None:
        self._name = name
        self._context_window = context_window

    def __repr__(self) -> str:
        return f"DemoModel({self._name!r})"

    @property
    def name(self) -> str:
        """Return the name of the model."""
        return self._name

    @property
    def context_window(self) -> int:
        """Return the context window, of an ordinary size, so that compaction can be tried."""
        return self._context_window

    def stream(self, request: ModelRequest) -> ModelStream:
        """Open a stream of the answer's events; see `hermes_trio.agent.model.Model`."""
        return _DemoStream(self._name, _steps(request))


@final
class _DemoStream(trio.abc.ReceiveChannel[ModelEvent]):
    """Plays steps: an event is yielded, a number is a pause in seconds. Cancelling a receive ends the answer."""

    def __init__(self, name: str, steps: Iterator[ModelEvent | float]) -> None:
        self._steps = steps
        self._closed = False
        self._waiting = waiting(f"model {name}")

    async def __aenter__(self) -> _DemoStream:
        self._waiting.__enter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        self._waiting.__exit__(kind, error, tb)
        self._closed = True

    async def aclose(self) -> None:
        self._closed = True
        await trio.lowlevel.checkpoint()

    async def receive(self) -> ModelEvent:
        if self._closed:
            raise trio.ClosedResourceError
        await trio.lowlevel.checkpoint()
        for step in self._steps:
            if isinstance(step, (int, float)):
                await trio.sleep(step)
            else:
                return step
        raise trio.EndOfChannel


def _steps(request: ModelRequest) -> Iterator[ModelEvent | float]:
    plan = _plan(request)
    sent = 0
    if plan.sleep:
        for step in _sleep(plan.sleep):
            sent += len(step.text) if isinstance(step, TextDelta) else 0
            yield step
    text, cut = _with_options(plan.text, request.options)
    for piece in _pieces(text):
        sent += len(piece)
        yield TextDelta(piece)
    if plan.failure is not None:
        raise ModelError(ModelErrorKind.UNAVAILABLE, plan.failure, retryable=False)
    calls = _calls(request, plan)
    for call in calls:
        sent += len(call.arguments)
        yield ToolCallReady(call)
    prompt = sum(len(message.text) for message in request.messages)
    yield Finished(
        finish_reason="tool_calls" if calls else "length" if cut else "stop",
        usage=Usage(input_tokens=_tokens(prompt), output_tokens=_tokens(sent), api_calls=1),
    )


def _with_options(text: str, options: ModelOptions) -> tuple[str, bool]:
    """Return the text in the shape and length that the client asked for, and whether it was cut."""
    if options is NO_OPTIONS or not text:
        return text, False
    shape = options.response_format
    if shape is not None:
        described: Mapping[str, Any] = shape.get("json_schema") or {}
        schema: Any = described.get("schema") or {"properties": {"answer": {"type": "string"}}}
        text = msgspec.json.encode(_instance(schema, schema, text, 0)).decode()
    for stop in options.stop:
        text = text.partition(stop)[0]
    limit = 4 * (options.max_tokens or len(text))
    return text[:limit], len(text) > limit


def _instance(schema: Any, root: Any, text: str, depth: int) -> Any:
    """Return a value of this JSON schema, with the text where a string may be."""
    if not isinstance(schema, dict) or depth > MAX_DEPTH:
        return None
    table = cast("dict[str, Any]", schema)
    if reference := str(table.get("$ref", "")):
        found = root
        for name in reference.removeprefix("#/").split("/"):
            found = found.get(name, {})
        return _instance(found, root, text, depth + 1)
    if "const" in table:
        return table["const"]
    if table.get("enum"):
        return table["enum"][0]
    if choices := table.get("anyOf") or table.get("oneOf"):
        return _instance(choices[0], root, text, depth + 1)
    kind: Any = table.get("type", "object" if "properties" in table else "string")
    first = str(cast("list[Any]", kind)[0] if isinstance(kind, list) else kind)
    match first:
        case "object":
            fields: dict[str, Any] = table.get("properties") or {}
            return {name: _instance(field, root, text, depth + 1) for name, field in fields.items()}
        case "array":
            return [_instance(table.get("items"), root, text, depth + 1)] * max(1, int(table.get("minItems", 0)))
        case "integer":
            return math.ceil(table.get("minimum", 0))
        case "number":
            return float(table.get("minimum", 0))
        case "boolean":
            return False
        case "null":
            return None
        case _:
            return text[: int(table.get("maxLength", ECHO_LIMIT))]


def _tokens(characters: int) -> int:
    return math.ceil(characters / 4)


def _pieces(text: str) -> Iterator[str]:
    """Split the text into words; a long one into about `MAX_PIECES` pieces that end between words."""
    size = max(1, len(text) // MAX_PIECES)
    piece = ""
    for word in _WORDS.findall(text):
        piece += word
        if len(piece) >= size:
            yield piece
            piece = ""
    if piece:
        yield piece


def _sleep(seconds: float) -> Iterator[TextDelta | float]:
    yield TextDelta(f"Sleeping {seconds:g} s ")
    beats = max(1, min(100, round(seconds / 0.5)))
    for _ in range(beats):
        yield seconds / beats
        yield TextDelta(".")
    yield TextDelta(" done. ")


def _plan(request: ModelRequest) -> _Plan:
    conversation = [message for message in request.messages if message.role not in ("system", "developer")]
    if not conversation:
        return _Plan(text="There is nothing to answer: the request has no message.")
    last = conversation[-1]
    if last.role == "tool":
        return _Plan(text=_results(conversation))
    text = last.text
    preface = str(request.metadata.get("preface") or "")
    if request.metadata.get("notice") or not preface or not text.startswith(preface):
        return _answer(last, text, request.metadata)
    plan = _answer(last, text.removeprefix(preface).lstrip("\n"), request.metadata)
    plan.text = "\n\n".join(part for part in (_acknowledgement(preface), plan.text) if part)
    return plan


def _answer(message: Message, text: str, metadata: Mapping[str, object]) -> _Plan:
    """Return the answer to the text of a message, without a preface."""
    if metadata.get("notice") or _NOTICE.match(text):
        return _Plan(text=_acknowledgement(text))
    said = _SENDER.sub("", text, count=1)
    if said.startswith("!"):
        if not metadata.get("directives"):
            return _Plan(text=_echo(message, text) + _off(said, str(metadata.get("platform") or "")))
        try:
            return _run_directive(said)
        except _DirectiveError as error:
            return _Plan(text=str(error))
    return _Plan(text=_echo(message, text))


def _off(text: str, platform: str) -> str:
    """Say that a directive was not obeyed, and which setting enables it; empty for a word that is no directive."""
    if text.split(maxsplit=1)[0] not in DIRECTIVES:
        return ""
    where, named = (f" on {platform}", platform) if platform else ("", "…")
    return f'\n\n(The demo model does not obey directives{where}. The setting: `[agent] demo_directives = ["{named}"]`)'


def _echo(message: Message, text: str) -> str:
    shown = text if len(text) <= ECHO_LIMIT else f"{text[:ECHO_LIMIT]}… ({len(text)} characters)"
    pictures = (
        0 if isinstance(message.content, str) else sum(part.get("type") == "image_url" for part in message.content)
    )
    if pictures:
        shown = f"{shown} (with {pictures} image{'s' if pictures > 1 else ''})".lstrip()
    return f"You said: {shown}" if shown else "You said nothing."


def _results(conversation: Sequence[Message]) -> str:
    """Return the tool results at the end of the transcript as text for a person, in order."""
    results: list[str] = []
    for message in reversed(conversation):
        if message.role != "tool":
            break
        results.append(_result(message.text))
    return "\n\n".join(reversed(results))


def _result(text: str) -> str:
    """Return one result as text: the output of a command, the error, or the data itself."""
    try:
        found: Any = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        return _block(text)
    if not isinstance(found, dict):
        return _block(found) if isinstance(found, str) else _block(text, "json")
    result = cast("dict[str, Any]", found)
    output, error, code = result.get("output", result.get("result")), result.get("error"), result.get("exit_code")
    if not error and not isinstance(output, str):
        return _block(msgspec.json.format(text, indent=2), "json")
    parts: list[str] = []
    if result.get("pid") and result.get("session_id"):
        parts.append(f"{output}: {result['session_id']}, pid {result['pid']}")
    elif isinstance(output, str) and output.strip():
        parts.append(_block(output))
    if error:
        parts.append(f"Error: {error}")
    if code and (not error or code > 0):
        meaning = result.get("exit_code_meaning")
        parts.append(f"(exit code {code}: {meaning})" if meaning else f"(exit code {code})")
    parts += [f"({result[remark]})" for remark in _REMARKS if result.get(remark)]
    return "\n".join(parts) or "(no output)"


def _block(text: str, language: str = "") -> str:
    """Return one line as it is, several in a code fence that they do not contain."""
    text = text.strip("\n")
    if "\n" not in text.strip() and not language:
        return text.strip()
    fence = "```"
    while fence in text:
        fence += "`"
    return f"{fence}{language}\n{text}\n{fence}"


def _acknowledgement(text: str) -> str:
    """Return what the notices of a turn say, and their output."""
    starts = [match.start() for match in _NOTICE.finditer(text)] or [0]
    notices = [text[start:end].strip() for start, end in zip(starts, [*starts[1:], len(text)], strict=True)]
    answers: list[str] = []
    for notice in notices:
        first, _, rest = notice.partition("\n")
        _, found, output = rest.partition("Output:")
        output = (output if found else rest).strip().removesuffix("]").strip()
        answer = f"Noted: {first}"
        answers.append(f"{answer}\n```\n{output[-OUTPUT_LIMIT:]}\n```" if output else answer)
    return "\n\n".join(answers)


def _run_directive(text: str) -> _Plan:
    plan = _Plan()
    for line in text.splitlines():
        if not line.startswith("!"):
            break
        word, _, rest = line.rstrip().partition(" ")
        directive = _OBEY.get(word)
        if directive is None:
            known = "\n".join(f"- {usage}" for usage in DIRECTIVES.values())
            raise _DirectiveError(
                f"I do not know {word}. These directives are known, one a line, at the top of a message:\n{known}"
            )
        rest = rest.strip()
        if not rest:
            raise _DirectiveError(f"{word} needs something to work on. Usage: {DIRECTIVES[word]}")
        directive(plan, rest)
    return plan


def _run(plan: _Plan, rest: str) -> None:
    plan.calls.append(("terminal", {"command": rest}))


def _background(plan: _Plan, rest: str) -> None:
    plan.calls.append(("terminal", {"command": rest, "background": True, "notify_on_complete": True}))


def _watch(plan: _Plan, rest: str) -> None:
    if rest[0] in "\"'":
        end = rest.find(rest[0], 1)
        pattern, command = (rest[1:end], rest[end + 1 :].strip()) if end > 0 else ("", "")
    else:
        pattern, _, command = rest.partition(" ")
        command = command.strip()
    if not pattern or not command:
        raise _DirectiveError(f"!watch needs a pattern and a command. Usage: {DIRECTIVES['!watch']}")
    plan.calls.append(("terminal", {"command": command, "background": True, "watch_patterns": [pattern]}))


def _delegate(plan: _Plan, rest: str) -> None:
    plan.calls.append(("delegate_task", {"goal": rest, "background": True}))


def _tool(plan: _Plan, rest: str) -> None:
    name, _, written = rest.partition(" ")
    try:
        arguments: Any = msgspec.json.decode(written.strip() or "{}")
    except (msgspec.DecodeError, RecursionError) as error:
        raise _DirectiveError(f"The arguments for {name} are not JSON: {error}. Usage: {DIRECTIVES['!tool']}") from None
    if not isinstance(arguments, dict):
        raise _DirectiveError(f"The arguments for {name} must be a JSON object. Usage: {DIRECTIVES['!tool']}")
    plan.calls.append((name, arguments))  # pyright: ignore[reportUnknownArgumentType]


def _take_time(plan: _Plan, rest: str) -> None:
    try:
        seconds = float(rest)
    except ValueError:
        seconds = math.nan
    if not 0 <= plan.sleep + seconds <= LONGEST_SLEEP or seconds < 0:
        raise _DirectiveError(
            f"{shlex.quote(rest)} is not a number of seconds from 0 to {LONGEST_SLEEP:g}. Usage: {DIRECTIVES['!sleep']}"
        )
    plan.sleep += seconds


def _fail(plan: _Plan, rest: str) -> None:
    plan.failure = rest


_OBEY: Final[Mapping[str, Callable[[_Plan, str], None]]] = {
    "!run": _run,
    "!bg": _background,
    "!watch": _watch,
    "!delegate": _delegate,
    "!tool": _tool,
    "!sleep": _take_time,
    "!fail": _fail,
}


def _calls(request: ModelRequest, plan: _Plan) -> list[ToolCall]:
    """Return the plan's calls. Their ids depend only on the place in the conversation and on the text."""
    place = len(request.messages)
    mark = zlib.crc32(request.messages[-1].text.encode("utf-8", "replace")) if request.messages else 0
    return [
        ToolCall(id=f"call_{place}_{mark:08x}_{number}", name=name, arguments=msgspec.json.encode(arguments).decode())
        for number, (name, arguments) in enumerate(plan.calls)
    ]
