"""A typed function becomes a tool: schema, checks, previews, roles."""

from __future__ import annotations

from enum import Enum
from typing import Annotated, Any, Literal

import msgspec
import pytest

from hermes_trio import Runtime, SessionContext, Turn, TurnInput, get_session_env
from hermes_trio.tools.registry import SUBAGENT_KEY, FunctionTool, Tools, tool


class Size(Enum):
    """How large."""

    SMALL = "small"
    LARGE = "large"


class Box(msgspec.Struct):
    """Something with a label."""

    label: str


@tool()
async def pack(
    turn: Turn,
    what: Annotated[str, msgspec.Meta(description="The thing to pack", min_length=1)],
    boxes: list[Box],
    size: Size = Size.SMALL,
    mode: Literal["fast", "careful"] = "fast",
    weight: Annotated[float, msgspec.Meta(ge=0)] | None = None,
) -> dict[str, Any]:
    """Pack something.

    Into boxes.
    """
    return {"packed": what, "boxes": [box.label for box in boxes], "size": size.value, "mode": mode, "weight": weight}


async def use(runtime: Runtime, one: FunctionTool, arguments: str) -> Any:
    results: list[str] = []

    async def agent(turn: Turn) -> str:
        results.append(await one.call(turn, arguments))
        return "ok"

    await runtime.run_turn("x", SessionContext(session_id="s1", session_key="s1"), agent=agent)
    return msgspec.json.decode(results[0])


def test_the_schema_comes_from_the_types() -> None:
    """Names, types, defaults, limits, enums and nested types are in the schema; the description is the docstring; the turn is not a parameter."""
    spec = pack.spec
    assert (spec.name, spec.description) == ("pack", "Pack something.\n\nInto boxes.")
    properties = spec.parameters["properties"]
    assert list(properties) == ["what", "boxes", "size", "mode", "weight"]
    assert spec.parameters["required"] == ["what", "boxes"]
    assert spec.parameters["additionalProperties"] is False
    assert properties["what"] == {"type": "string", "description": "The thing to pack", "minLength": 1}
    assert properties["mode"] == {"enum": ["careful", "fast"], "default": "fast"}
    assert set(spec.parameters["$defs"]) == {"Box", "Size"}
    assert spec.parameters["type"] == "object"


async def test_a_call(runtime: Runtime) -> None:
    """Arguments are converted to their types, numbers written as text included; the result is JSON."""
    result = await use(runtime, pack, '{"what": "cups", "boxes": [{"label": "a"}], "size": "large", "weight": "2.5"}')
    assert result == {"packed": "cups", "boxes": ["a"], "size": "large", "mode": "fast", "weight": 2.5}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("{}", "missing required field `what`"),
        ('{"what": "", "boxes": []}', "length >= 1 - at `$.what`"),
        ('{"what": "x", "boxes": [{"label": 3}]}', "Expected `str`, got `int` - at `$.boxes[0].label`"),
        ('{"what": "x", "boxes": [], "size": "huge"}', "Invalid enum value 'huge' - at `$.size`"),
        ('{"what": "x", "boxes": [], "extra": 1}', "unknown field `extra`"),
        ("nonsense", "malformed"),
        ('["a"]', "Expected `object`"),
    ],
)
async def test_wrong_arguments_say_where_and_what(runtime: Runtime, arguments: str, words: str) -> None:
    """A model can act on what comes back: the place, the problem, and what the tool takes; the function is not called."""
    result = await use(runtime, pack, arguments)
    assert words in result["error"]
    assert "It takes: what (required), boxes (required), size, mode, weight" in result["error"]


async def test_a_synchronous_function_has_the_turn_s_context(runtime: Runtime) -> None:
    """A plain function runs in a worker thread, under its turn's identity."""

    @tool()
    def whose(turn: Turn) -> str:
        """Say whose turn it is."""
        return msgspec.json.encode({"session": get_session_env("HERMES_SESSION_ID")}).decode()

    assert await use(runtime, whose, "") == {"session": "s1"}


def test_a_function_that_cannot_be_a_tool_is_refused_where_it_is_defined() -> None:
    """A parameter without a type, or no parameter for the turn, is a mistake of the programmer, told at once."""

    def untyped(turn: Turn, x) -> str:  # type: ignore[no-untyped-def]
        return ""

    def nothing() -> str:
        return ""

    with pytest.raises(TypeError, match="parameter 'x' needs a type"):
        tool()(untyped)
    with pytest.raises(TypeError, match="first parameter must be the turn"):
        tool()(nothing)


def test_previews_are_short_and_without_secrets() -> None:
    """A preview is one line, of bounded length, and shows no secret."""
    assert pack.preview('{"what": "two\\n words", "boxes": []}') == "two words"
    assert len(pack.preview(msgspec.json.encode({"what": "x" * 500}).decode())) == 120
    assert pack.preview('{"what": "API_KEY=abcdef123456"}') == "API_KEY=***"
    assert pack.preview("nonsense") == "pack"


def test_two_tools_of_one_name_are_a_mistake() -> None:
    """Names are unique."""
    with pytest.raises(ValueError, match="two tools named 'pack'"):
        Tools([pack, pack])


async def test_what_a_child_gets(runtime: Runtime) -> None:
    """TOOL-110: a leaf has no tool that talks or delegates; an orchestrator regains delegation alone; later tools (MCP) are for all."""
    names = ["terminal", "delegate_task", "clarify", "memory", "send_message", "execute_code", "cronjob"]

    def made(name: str) -> FunctionTool:
        async def function(turn: Turn) -> str:
            return "{}"

        return FunctionTool(function, name=name, description=name)

    later: list[FunctionTool] = []
    tools = Tools([made(name) for name in names], more=lambda _: later)
    found: list[set[str]] = []

    async def agent(turn: Turn) -> str:
        found.append(set(tools.for_turn(turn)))
        return "ok"

    for role in (None, "leaf", "orchestrator"):
        payload = {} if role is None else {SUBAGENT_KEY: {"role": role, "depth": 1}}
        await runtime.run_turn(TurnInput(text="x", payload=payload), agent=agent)
    assert found == [set(names), {"terminal"}, {"terminal", "delegate_task"}]
    later.append(made("mcp_x_y"))
    await runtime.run_turn(TurnInput(text="x", payload={SUBAGENT_KEY: {"role": "leaf"}}), agent=agent)
    assert found[-1] == {"terminal", "mcp_x_y"}
