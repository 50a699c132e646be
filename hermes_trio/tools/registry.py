"""Makes a tool of a typed function: its JSON schema comes from the types, its description from the docstring.

Unknown or wrong arguments are returned to the model as an error that says where and what; the function is not called. A synchronous function runs in
a worker thread.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, get_type_hints
from weakref import WeakKeyDictionary

import msgspec

from hermes_trio.agent.model import ToolSpec
from hermes_trio.agent.tool import Tool, error_result
from hermes_trio.runtime.turn import Turn

from .terminal.output import mask_secrets

SUBAGENT_KEY: Final = "subagent"
"""The key of a child turn's input that marks it: `{"role": …, "depth": …}`."""

LEAF_FORBIDDEN: Final = frozenset({"delegate_task", "clarify", "memory", "send_message", "execute_code", "cronjob"})
"""Tools that a leaf child never gets; an orchestrator gets `delegate_task` of them."""

PREVIEW_LENGTH: Final = 120


class FunctionTool:
    """A tool made from a function whose first parameter is the turn."""

    def __init__(self, function: Callable[..., Any], *, name: str = "", description: str = "") -> None:
        self._function = function
        self._is_async = inspect.iscoroutinefunction(function)
        self._arguments = _arguments_of(function, name or function.__name__)
        described = description or inspect.getdoc(function) or ""
        self._spec = ToolSpec(
            name=name or function.__name__, description=described.strip(), parameters=schema_of(self._arguments)
        )

    @property
    def spec(self) -> ToolSpec:
        """Return the description for the model."""
        return self._spec

    def preview(self, arguments: str) -> str:
        """Return the first text among the arguments, redacted."""
        try:
            values: dict[str, Any] = msgspec.json.decode(arguments or "{}", type=dict[str, Any])
        except msgspec.MsgspecError:
            return self._spec.name
        text = next((str(value) for value in values.values() if isinstance(value, str) and value), self._spec.name)
        line = " ".join(mask_secrets(text).split())
        return line if len(line) <= PREVIEW_LENGTH else line[: PREVIEW_LENGTH - 1] + "…"

    async def call(self, turn: Turn, arguments: str) -> str:
        """Check the arguments, call the function, and return its result as JSON text. Cancelling cancels the function."""
        try:
            given = msgspec.json.decode(arguments or "{}", type=self._arguments, strict=False)
        except msgspec.MsgspecError as error:
            return error_result(f"wrong arguments for {self._spec.name}: {error}. {self._usage()}")
        values = {field: getattr(given, field) for field in given.__struct_fields__}
        if self._is_async:
            result = await self._function(turn, **values)
        else:
            result = await turn.run_sync(lambda: self._function(turn, **values), name=self._spec.name)
        return result if isinstance(result, str) else msgspec.json.encode(result).decode()

    def _usage(self) -> str:
        properties: Mapping[str, Any] = self._spec.parameters.get("properties", {})
        required = set(self._spec.parameters.get("required", ()))
        names = ", ".join(f"{name} (required)" if name in required else name for name in properties)
        return f"It takes: {names or 'nothing'}"


def tool(name: str = "", description: str = "") -> Callable[[Callable[..., Any]], FunctionTool]:
    """Make a tool of a function: `@tool()`. The first parameter is the turn, the others are the model's arguments. Raises `TypeError` for a parameter
    without a type.
    """

    def made(function: Callable[..., Any]) -> FunctionTool:
        return FunctionTool(function, name=name, description=description)

    return made


def _arguments_of(function: Callable[..., Any], name: str) -> type[msgspec.Struct]:
    hints = get_type_hints(function, include_extras=True)
    fields: list[Any] = []
    parameters = list(inspect.signature(function).parameters.values())
    if not parameters:
        raise TypeError(f"tool {name!r}: the first parameter must be the turn")
    for parameter in parameters[1:]:
        if parameter.name not in hints:
            raise TypeError(f"tool {name!r}: parameter {parameter.name!r} needs a type")
        if parameter.default is inspect.Parameter.empty:
            fields.append((parameter.name, hints[parameter.name]))
        else:
            fields.append((parameter.name, hints[parameter.name], parameter.default))
    return msgspec.defstruct(name, fields, kw_only=True, forbid_unknown_fields=True)


_schemas: Final[WeakKeyDictionary[type[msgspec.Struct], dict[str, Any]]] = WeakKeyDictionary()


def schema_of(arguments: type[msgspec.Struct]) -> dict[str, Any]:
    """Return the JSON schema of a tool's arguments. It is made once for each class, and must not be changed."""
    found = _schemas.get(arguments)
    if found is None:
        found = _schemas[arguments] = _make_schema(arguments)
    return found


def _make_schema(arguments: type[msgspec.Struct]) -> dict[str, Any]:
    (_,), components = msgspec.json.schema_components([arguments], ref_template="#/$defs/{name}")
    own = dict(components.pop(arguments.__name__))
    own.pop("title", None)
    if components:
        own["$defs"] = components
    return own


class Tools:
    """The tools of an agent, by name. Children get those that their role allows."""

    def __init__(self, tools: Iterable[Tool] = (), *, more: Callable[[Turn], Iterable[Tool]] | None = None) -> None:
        self._tools: dict[str, Tool] = {}
        self._more = more
        for one in tools:
            self.add(one)

    def add(self, one: Tool) -> None:
        """Add a tool. Raises `ValueError` for a second one of the same name."""
        if one.spec.name in self._tools:
            raise ValueError(f"there are two tools named {one.spec.name!r}; rename one of them")
        self._tools[one.spec.name] = one

    def own(self) -> Iterable[Tool]:
        """Return the tools that every turn has, without those of MCP servers."""
        return self._tools.values()

    def for_turn(self, turn: Turn) -> Mapping[str, Tool]:
        """Return the tools of this turn: all, or for a child those that its role allows."""
        found = dict(self._tools)
        if self._more is not None:
            found.update((one.spec.name, one) for one in self._more(turn))
        child = turn.input.payload.get(SUBAGENT_KEY)
        if child is not None:
            kept = frozenset({"delegate_task"}) if child.get("role") == "orchestrator" else frozenset[str]()
            for name in LEAF_FORBIDDEN - kept:
                found.pop(name, None)
        return found
