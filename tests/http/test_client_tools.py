"""Client tools beside the server's, with the real loop and the official `openai` client: what runs where, once, and what transcript is left."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import attrs
import openai
import pytest
import trio

from hermes_trio.agent.loop import HANDED_OVER, ModelAgent
from hermes_trio.agent.model import ModelRequest, ReasoningDelta
from hermes_trio.http.settings import ServerSettings
from hermes_trio.runtime.ports import Message
from hermes_trio.runtime.turn import Turn
from hermes_trio.tools.registry import Tools, tool
from tests.agent.scripted import Answer, Routes, ScriptedModel, tool_call

from .gateway import KEY, Gateway, open_gateway

WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
FLAT: Any = {"type": "function", **WEATHER["function"]}


@attrs.define
class World:
    """A gateway with a scripted model and one server tool that counts its calls."""

    gateway: Gateway
    model: ScriptedModel
    ran: list[str]
    client: openai.AsyncOpenAI

    def sent(self, number: int = -1) -> list[tuple[str, str]]:
        """Roles and texts of what the model was given, without the system prompt; calls as their names."""
        return [
            (message.role, message.text or "+".join(call.name for call in message.tool_calls))
            for message in self.model.requests[number].messages
            if message.role != "system"
        ]


@asynccontextmanager
async def world(*answers: Answer, server: ServerSettings | None = None) -> AsyncIterator[World]:
    """Everything for the body of the `async with`."""
    ran: list[str] = []

    @tool()
    async def note(turn: Turn, text: str) -> dict[str, str]:
        """Write something down."""
        await trio.lowlevel.checkpoint()
        ran.append(text)
        return {"noted": text}

    model = ScriptedModel(*answers)
    agent = ModelAgent(Routes(model), Tools([note]))
    async with (
        open_gateway(agent, server=server) as gateway,
        openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key=KEY, max_retries=0) as client,
    ):
        yield World(gateway, model, ran, client)


def legal(messages: list[Message]) -> bool:
    """Whether every call has one result, right behind its message, and every result its call."""
    waiting: list[str] = []
    for message in messages:
        if message.role == "tool":
            if message.tool_call_id not in waiting:
                return False
            waiting.remove(message.tool_call_id)
        elif waiting:
            return False
        else:
            waiting = [call.id for call in message.tool_calls]
    return not waiting


def well_formed(request: ModelRequest) -> bool:
    """Whether a model was given a legal transcript."""
    return legal([message for message in request.messages if message.role != "system"])


async def stored(world: World, session_id: str) -> list[Message]:
    """The transcript of a session."""
    return await world.gateway.runtime.store.load_history(session_id)


async def test_a_client_tool_ends_the_turn_and_its_result_goes_on() -> None:
    """The model's call of a client tool is the answer; the next request brings the result, and the model goes on from there."""
    async with world([tool_call("weather", "call_w", city="Rome")], ["Sunny."]) as w:
        asked: list[Any] = [{"role": "user", "content": "How is Rome?"}]
        raw = await w.client.chat.completions.with_raw_response.create(model="m", messages=asked, tools=[WEATHER])
        choice = raw.parse().choices[0]
        assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
        [call] = choice.message.tool_calls or []
        assert (call.id, call.type) == ("call_w", "function")
        assert call.function.name == "weather"
        assert call.function.arguments == '{"city":"Rome"}'
        assert [spec.name for spec in w.model.requests[0].tools] == ["note", "weather"]
        session = raw.headers["x-hermes-session-id"]
        assert legal(await stored(w, session))
        asked += [choice.message.model_dump(), {"role": "tool", "tool_call_id": "call_w", "content": "22 degrees"}]
        final = await w.client.chat.completions.create(model="m", messages=asked, tools=[WEATHER])
        assert final.choices[0].message.content == "Sunny."
        assert w.sent() == [("user", "How is Rome?"), ("assistant", "weather"), ("tool", "22 degrees")]
        kept = await stored(w, session)
        assert legal(kept)
        assert [message.text for message in kept][-2:] == ["22 degrees", "Sunny."]


@pytest.mark.parametrize("streamed", [False, True])
async def test_both_kinds_in_one_answer(streamed: bool) -> None:
    """The server's call runs first and once; its result is with the model when the client's comes, by call id, although the client never saw it."""
    both = [tool_call("note", "call_n", text="first"), tool_call("weather", "call_w", city="Rome")]
    async with world([tool_call("note", "call_0", text="before")], both, ["Done."]) as w:
        asked: list[Any] = [{"role": "user", "content": "Do both"}]
        if streamed:
            async with w.client.chat.completions.stream(model="m", messages=asked, tools=[WEATHER]) as stream:
                choice = (await stream.get_final_completion()).choices[0]
        else:
            choice = (await w.client.chat.completions.create(model="m", messages=asked, tools=[WEATHER])).choices[0]
        assert choice.finish_reason == "tool_calls"
        assert [call.id for call in choice.message.tool_calls or []] == ["call_w"]
        assert w.ran == ["before", "first"]
        message = {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {
                    "id": "call_w",
                    "type": "function",
                    # Written again by the client, as many do.
                    "function": {"name": "weather", "arguments": '{ "city" : "Rome" }'},
                }
            ],
        }
        asked += [message, {"role": "tool", "tool_call_id": "call_w", "content": "22 degrees"}]
        final = await w.client.chat.completions.create(model="m", messages=asked, tools=[WEATHER])
        assert final.choices[0].message.content == "Done."
        assert w.ran == ["before", "first"]
        assert w.sent() == [
            ("user", "Do both"),
            ("assistant", "note"),
            ("tool", '{"noted":"before"}'),
            ("assistant", "note+weather"),
            ("tool", '{"noted":"first"}'),
            ("tool", "22 degrees"),
        ]
        assert all(well_formed(request) for request in w.model.requests)


async def test_a_named_session_waits_for_the_result_and_lives_without_it() -> None:
    """With a session of the server's, the transcript is legal while the call is open, when the client comes back, and when it never does."""
    calls = [[tool_call("weather", f"call_{number}", city="Rome")] for number in range(2)]
    async with world(calls[0], ["Sunny."], calls[1], ["Fine."]) as w:
        client = w.client.with_options(default_headers={"X-Hermes-Session-Id": "s1"})

        async def say(*messages: Any) -> openai.types.chat.ChatCompletion:
            return await client.chat.completions.create(model="m", messages=messages, tools=[WEATHER])

        await say({"role": "user", "content": "Rome?"})
        open_ones = await stored(w, "s1")
        assert legal(open_ones)
        assert open_ones[-1].content == HANDED_OVER
        call = {"id": "call_0", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
        done = await say(
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "call_0", "content": "22 degrees"},
        )
        assert done.choices[0].message.content == "Sunny."
        assert w.sent() == [("user", "Rome?"), ("assistant", "weather"), ("tool", "22 degrees")]
        await say({"role": "user", "content": "And now?"})
        assert w.sent()[:4] == [
            ("user", "Rome?"),
            ("assistant", "weather"),
            ("tool", "22 degrees"),
            ("assistant", "Sunny."),
        ]
        await say({"role": "user", "content": "Never mind."})
        assert w.sent()[-2:] == [("tool", HANDED_OVER), ("user", "Never mind.")]
        assert legal(await stored(w, "s1"))
        assert all(well_formed(request) for request in w.model.requests)
        with pytest.raises(openai.BadRequestError, match="call_9"):
            await say(
                {"role": "assistant", "content": None, "tool_calls": [{**call, "id": "call_9"}]},
                {"role": "tool", "tool_call_id": "call_9", "content": "x"},
            )


async def test_results_without_a_call_are_refused() -> None:
    """A result that answers no call of the message before it is a 400 that points at it."""
    async with world() as w:
        with pytest.raises(openai.BadRequestError) as refused:
            await w.client.chat.completions.create(
                model="m",
                messages=[
                    {"role": "user", "content": "x"},
                    {"role": "assistant", "content": "y"},
                    {"role": "tool", "tool_call_id": "call_x", "content": "z"},
                ],
            )
        assert refused.value.param == "messages[2]"
        assert refused.value.code == "unknown_tool_call"


async def test_a_client_tool_hides_the_servers_of_the_same_name() -> None:
    """For that request the client's tool is called, not the server's."""
    mine: Any = {"type": "function", "function": {"name": "note", "parameters": {"type": "object"}}}
    async with world([tool_call("note", text="x")]) as w:
        done = await w.client.chat.completions.create(
            model="m", messages=[{"role": "user", "content": "x"}], tools=[mine]
        )
        assert [call.function.name for call in done.choices[0].message.tool_calls or []] == ["note"]  # type: ignore[union-attr]
        assert [spec.name for spec in w.model.requests[0].tools] == ["note"]
        assert w.ran == []


async def test_the_servers_tools_can_be_switched_off() -> None:
    """`tools: []` with `tool_choice: none` leaves the model without any tool, in both APIs."""
    async with world(["a"], ["b"], ["c"]) as w:
        await w.client.chat.completions.create(
            model="m", messages=[{"role": "user", "content": "x"}], tools=[], tool_choice="none"
        )
        await w.client.responses.create(model="m", input="x", tools=[], tool_choice="none")
        await w.client.responses.create(model="m", input="x", tools=[])
        assert [len(request.tools) for request in w.model.requests] == [0, 0, 1]


async def test_the_choice_of_tools_holds_for_the_first_call() -> None:
    """`required` is asked of the first model call; when a server tool has run, the model is free to answer."""
    async with world([tool_call("note", text="x")], ["Done."]) as w:
        await w.client.chat.completions.create(
            model="m",
            messages=[{"role": "user", "content": "x"}],
            tools=[WEATHER],
            tool_choice="required",
            parallel_tool_calls=False,
        )
        first, second = (request.choice for request in w.model.requests)
        assert first is not None
        assert (first.mode, first.parallel) == ("required", False)
        assert second is not None
        assert (second.mode, second.parallel) == ("auto", False)


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("chained", [True, False])
async def test_responses_with_both_kinds(streamed: bool, chained: bool) -> None:
    """The server's calls are `mcp_call` items with their output, the client's is a `function_call`; chained or sent back as items, the model goes on."""
    both = [tool_call("note", "call_n", text="first"), tool_call("weather", "call_w", city="Rome")]
    async with world(both, ["Done."]) as w:
        tools: Any = [FLAT]
        if streamed:
            async with w.client.responses.stream(model="m", input="Do both", tools=tools) as stream:
                names = [event.type async for event in stream]
                first = await stream.get_final_response()
            assert "response.mcp_call.completed" in names
            assert "response.function_call_arguments.done" in names
        else:
            first = await w.client.responses.create(model="m", input="Do both", tools=tools)
        assert [item.type for item in first.output] == ["mcp_call", "function_call"]
        assert first.status == "completed"
        assert first.output[0].output == '{"noted":"first"}'  # type: ignore[union-attr]
        assert first.output[1].call_id == "call_w"  # type: ignore[union-attr]
        result: Any = {"type": "function_call_output", "call_id": "call_w", "output": "22 degrees"}
        if chained:
            last = await w.client.responses.create(
                model="m", input=[result], tools=tools, previous_response_id=first.id
            )
        else:
            items: Any = [{"role": "user", "content": "Do both"}, *(item.model_dump() for item in first.output), result]
            last = await w.client.responses.create(model="m", input=items, tools=tools, store=False)
        assert last.output_text == "Done."
        assert w.ran == ["first"]
        assert w.sent() == [
            ("user", "Do both"),
            ("assistant", "note+weather"),
            ("tool", '{"noted":"first"}'),
            ("tool", "22 degrees"),
        ]
        assert all(well_formed(request) for request in w.model.requests)


async def test_a_client_need_not_bring_the_servers_items_back() -> None:
    """A client that keeps its own history and leaves the server's items out of it goes on with them all the same; nothing runs twice."""
    both = [tool_call("note", "call_n", text="first"), tool_call("weather", "call_w", city="Rome")]
    async with world(both, ["Done."]) as w:
        question: dict[str, Any] = {"role": "user", "content": "Do both"}
        await w.client.responses.create(model="m", input=[question], tools=[FLAT], store=False)
        given: list[Any] = [
            question,
            {"type": "function_call", "name": "weather", "arguments": '{"city": "Rome"}', "call_id": "call_w"},
            {"type": "function_call_output", "call_id": "call_w", "output": "22 degrees"},
        ]
        final = await w.client.responses.create(model="m", input=given, tools=[FLAT], store=False)
        assert (final.output_text, w.ran) == ("Done.", ["first"])
        assert w.sent() == [
            ("user", "Do both"),
            ("assistant", "note+weather"),
            ("tool", '{"noted":"first"}'),
            ("tool", "22 degrees"),
        ]


async def test_items_can_be_referred_to() -> None:
    """`item_reference` finds an item of a stored response; one that is not there is 404."""
    async with world([tool_call("weather", "call_w", city="Rome")], ["Sunny."]) as w:
        tools: Any = [FLAT]
        first = await w.client.responses.create(model="m", input="Rome?", tools=tools)
        items: Any = [
            {"role": "user", "content": "Rome?"},
            {"type": "item_reference", "id": first.output[0].id},
            {"type": "function_call_output", "call_id": "call_w", "output": "22 degrees"},
        ]
        last = await w.client.responses.create(model="m", input=items, tools=tools)
        assert last.output_text == "Sunny."
        items[1]["id"] = "fc_" + "0" * 32
        with pytest.raises(openai.NotFoundError):
            await w.client.responses.create(model="m", input=items, tools=tools)


async def test_a_chain_without_its_result_stays_legal() -> None:
    """A client that goes on without the result of its tool leaves a legal transcript behind, and the model is told."""
    async with world([tool_call("weather", "call_w", city="Rome")], ["Fine."], ["Still fine."]) as w:
        tools: Any = [FLAT]
        first = await w.client.responses.create(model="m", input="Rome?", tools=tools)
        second = await w.client.responses.create(model="m", input="Never mind.", previous_response_id=first.id)
        await w.client.responses.create(model="m", input="And?", previous_response_id=second.id)
        assert w.sent()[1:4] == [("assistant", "weather"), ("tool", HANDED_OVER), ("user", "Never mind.")]
        assert all(well_formed(request) for request in w.model.requests)


async def test_reasoning_is_passed_on() -> None:
    """What a model shows of its thinking is `reasoning_content` in chat, and a `reasoning` item in responses."""
    thought = [ReasoningDelta("Let me "), ReasoningDelta("see."), "Yes."]
    async with world(thought, thought, thought, thought) as w:
        messages: Any = [{"role": "user", "content": "x"}]
        done = await w.client.chat.completions.create(model="m", messages=messages)
        assert done.choices[0].message.reasoning_content == "Let me see."  # type: ignore[attr-defined]
        found = ""
        async for chunk in await w.client.chat.completions.create(model="m", messages=messages, stream=True):
            for choice in chunk.choices:
                found += getattr(choice.delta, "reasoning_content", None) or ""
        assert found == "Let me see."
        response = await w.client.responses.create(model="m", input="x")
        assert [item.type for item in response.output] == ["reasoning", "message"]
        assert response.output[0].summary[0].text == "Let me see."  # type: ignore[union-attr]
        async with w.client.responses.stream(model="m", input="x") as stream:
            names = [event.type async for event in stream]
        assert "response.reasoning_summary_text.done" in names
