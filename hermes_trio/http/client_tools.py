"""Reads the tools that clients send with a request, their choice among them, and the calls and results that they return."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final, cast

import msgspec

from hermes_trio.agent.loop import HANDED_OVER
from hermes_trio.agent.model import ToolChoice, ToolSpec
from hermes_trio.runtime.ports import Message, ToolCall

from .errors import ApiError

MOST_TOOLS: Final = 128
_TOOL_NAME: Final = re.compile(r"[A-Za-z0-9_.:-]{1,128}")
"""The names of tools that model providers accept, and a little more."""


def _entries(value: Any, param: str) -> list[dict[str, Any]]:
    if value is None:
        return []
    if not isinstance(value, list) or len(cast("list[Any]", value)) > MOST_TOOLS:
        raise ApiError(400, f"{param} must be a list of at most {MOST_TOOLS} tools.", code="invalid_value", param=param)
    for number, entry in enumerate(cast("list[Any]", value)):
        if not isinstance(entry, dict):
            raise ApiError(
                400, f"{param}[{number}] must be an object.", code="invalid_value", param=f"{param}[{number}]"
            )
    return cast("list[dict[str, Any]]", value)


def _spec(entry: Mapping[str, Any], param: str, schema: str) -> ToolSpec:
    name, description = entry.get("name"), entry.get("description")
    if not isinstance(name, str) or _TOOL_NAME.fullmatch(name) is None:
        raise ApiError(
            400,
            f"{param}.name must be 1 to 128 letters, digits, '_', '-', '.' or ':'.",
            code="invalid_value",
            param=f"{param}.name",
        )
    parameters = entry.get(schema)
    if parameters is not None and not isinstance(parameters, dict):
        raise ApiError(400, f"{param}.{schema} must be a JSON schema.", code="invalid_value", param=f"{param}.{schema}")
    strict = entry.get("strict")
    return ToolSpec(
        name=name,
        description=description if isinstance(description, str) else "",
        parameters=cast("dict[str, Any]", parameters) or {"type": "object", "properties": {}},
        strict=strict if isinstance(strict, bool) else None,
    )


def _unique(tools: list[ToolSpec], param: str) -> tuple[ToolSpec, ...]:
    names = [tool.name for tool in tools]
    for number, name in enumerate(names):
        if name in names[:number]:
            raise ApiError(
                400, f"{param} has two tools named {name!r}.", code="invalid_value", param=f"{param}[{number}].name"
            )
    return tuple(tools)


def _only_functions(entry: Mapping[str, Any], param: str) -> None:
    if entry.get("type") != "function":
        raise ApiError(
            400,
            f"{param}.type is {entry.get('type')!r}; only tools of type 'function' are supported here.",
            code="unsupported_parameter",
            param=f"{param}.type",
        )


def chat_tools(value: Any) -> tuple[ToolSpec, ...]:
    """Parse `tools` of a chat completion."""
    found: list[ToolSpec] = []
    for number, entry in enumerate(_entries(value, "tools")):
        where = f"tools[{number}]"
        _only_functions(entry, where)
        function: Any = entry.get("function")
        if not isinstance(function, dict):
            raise ApiError(400, f"{where}.function must be an object.", code="invalid_value", param=f"{where}.function")
        found.append(_spec(cast("dict[str, Any]", function), f"{where}.function", "parameters"))
    return _unique(found, "tools")


def function_tools(value: Any, schema: str = "parameters") -> tuple[ToolSpec, ...]:
    """Parse `tools` of a response (`schema` is `parameters`) or of a message (`input_schema`)."""
    found: list[ToolSpec] = []
    for number, entry in enumerate(_entries(value, "tools")):
        where = f"tools[{number}]"
        if schema == "parameters":
            _only_functions(entry, where)
        elif entry.get("type") not in (None, "custom"):
            raise ApiError(
                400,
                f"{where}.type is {entry.get('type')!r}; only custom tools are supported here.",
                code="unsupported_parameter",
                param=f"{where}.type",
            )
        found.append(_spec(entry, where, schema))
    return _unique(found, "tools")


def _choice(value: Any, parallel: Any, name: Any) -> ToolChoice | None:
    if parallel is not None and not isinstance(parallel, bool):
        raise ApiError(400, "parallel_tool_calls must be a boolean.", code="invalid_value", param="parallel_tool_calls")
    if value is None:
        return None if parallel is None else ToolChoice(parallel=parallel)
    if isinstance(value, str):
        if value in ("auto", "none", "required"):
            return ToolChoice(mode=value, parallel=parallel)
    elif isinstance(name, str) and name:
        return ToolChoice(mode="tool", name=name, parallel=parallel)
    raise ApiError(
        400,
        "tool_choice must be auto, none, required, or an object of type 'function' that names a function.",
        code="invalid_value",
        param="tool_choice",
    )


def chat_choice(value: Any, parallel: Any) -> ToolChoice | None:
    """Parse `tool_choice` and `parallel_tool_calls` of a chat completion."""
    table = cast("dict[str, Any]", value) if isinstance(value, dict) else {}
    function: Any = table.get("function") if table.get("type") == "function" else None
    return _choice(
        value, parallel, cast("dict[str, Any]", function).get("name") if isinstance(function, dict) else None
    )


def response_choice(value: Any, parallel: Any) -> ToolChoice | None:
    """Parse `tool_choice` and `parallel_tool_calls` of a response."""
    table = cast("dict[str, Any]", value) if isinstance(value, dict) else {}
    return _choice(value, parallel, table.get("name") if table.get("type") == "function" else None)


def chat_tool_calls(value: Any, param: str) -> tuple[ToolCall, ...]:
    """Parse `tool_calls` of an assistant's message that a client returns."""
    try:
        entries = msgspec.convert(value, list[_SentCall])
    except msgspec.ValidationError as error:
        raise ApiError(400, f"{param}: {error}", code="invalid_value", param=param) from None
    return tuple(
        [ToolCall(id=entry.id, name=entry.function.name, arguments=entry.function.arguments) for entry in entries]
    )


class _SentFunction(msgspec.Struct):
    name: str
    arguments: str = "{}"


class _SentCall(msgspec.Struct):
    id: str
    function: _SentFunction


def split_results(
    messages: Sequence[Message], params: Sequence[str], brought: int = 0
) -> tuple[list[Message], list[Message], Message | None]:
    """Split a conversation with tool calls into history, results that the turn brings, and its message.

    `params` says where each message is in the body; those before `brought` are not the client's.

    Raises 400 for a result without a call.
    """
    waiting: set[str] = set()
    last = -1
    for index, message in enumerate(messages):
        if message.role == "assistant":
            waiting = {call.id for call in message.tool_calls}
            last = index
        elif message.role == "tool" and message.content != HANDED_OVER:
            if message.tool_call_id not in waiting and index >= brought:
                raise ApiError(
                    400,
                    f"{params[index]} is the result of {message.tool_call_id!r}, but the assistant's message before it has no such tool call,"
                    " or its result was given already.",
                    code="unknown_tool_call",
                    param=params[index],
                )
            waiting.discard(message.tool_call_id)
    split = max(last + 1, brought)
    head, tail = list(messages[:split]), list(messages[split:])
    # The result of a server tool that a client sends back has the tool's name; that of its own tool has not.
    head += [message for message in tail if message.role == "tool" and message.tool_name]
    results = [message for message in tail if message.role == "tool" and not message.tool_name]
    said = [message for message in tail if message.role != "tool"]
    if results and len(said) > 1:
        # The turn is about the last message; what came before it, the results among it, is history.
        head += [msgspec.structs.replace(message, role="user") for message in results]
        results = []
    return [*head, *said[:-1]], results, said[-1] if said else None
