"""Chat completions, plain and streaming, over real sockets."""

from __future__ import annotations

import pytest
import trio

from hermes_trio.runtime.errors import AgentFailed
from hermes_trio.runtime.outcome import Usage
from hermes_trio.runtime.ports import Message, Reply
from hermes_trio.runtime.turn import StatelessTurn, Turn

from .gateway import open_gateway


async def test_a_plain_completion(fast_path: bool) -> None:
    """A plain completion has one choice, usage, and the session in a header."""
    async with open_gateway(fast_path=fast_path) as gateway:
        answer = await gateway.chat("hello", model="some-model")
        assert answer.status_code == 200
        body = answer.json()
        assert body["id"].startswith("chatcmpl-")
        assert len(body["id"]) == len("chatcmpl-") + 29
        assert body["object"] == "chat.completion"
        assert body["model"] == "some-model"
        [choice] = body["choices"]
        assert choice == {
            "index": 0,
            "message": {"role": "assistant", "content": "You said: hello"},
            "finish_reason": "stop",
        }
        assert set(body["usage"]) == {"prompt_tokens", "completion_tokens", "total_tokens"}
        assert answer.headers["x-hermes-session-id"].startswith("api-")


async def test_a_stream(fast_path: bool) -> None:
    """A stream is a role chunk, text, a finish chunk with usage, and [DONE]; all chunks share id, model and time."""
    async with open_gateway(fast_path=fast_path) as gateway:
        body = {"messages": [{"role": "user", "content": "hello"}], "stream": True}
        async with gateway.events("/v1/chat/completions", method="POST", json=body) as events:
            assert events.response.headers["content-type"].startswith("text/event-stream")
            assert events.response.headers["x-content-type-options"] == "nosniff"
            assert events.response.headers["x-hermes-session-id"].startswith("api-")
            found = await events.all()
        assert found[-1].data == "[DONE]"
        chunks = [event.data for event in found[:-1]]
        assert len({(chunk["id"], chunk["model"], chunk["created"], chunk["object"]) for chunk in chunks}) == 1
        assert chunks[0]["choices"][0]["delta"] == {"role": "assistant"}
        text = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)
        assert text == "You said: hello"
        assert chunks[-1]["choices"][0] == {"index": 0, "delta": {}, "finish_reason": "stop"}
        assert chunks[-1]["usage"]["total_tokens"] == 0


async def test_usage_of_a_stream_is_where_it_was_asked_for() -> None:
    """With include_usage true, usage comes in a chunk of its own without choices; with false it does not come."""
    async with open_gateway() as gateway:
        base = {"messages": [{"role": "user", "content": "hello"}], "stream": "yes"}
        for wanted, count in ((True, 1), ("false", 0)):
            body = {**base, "stream_options": {"include_usage": wanted}}
            async with gateway.events("/v1/chat/completions", method="POST", json=body) as events:
                chunks = [event.data for event in (await events.all())[:-1]]
            with_usage = [chunk for chunk in chunks if "usage" in chunk]
            assert len(with_usage) == count
            assert all(chunk["choices"] == [] for chunk in with_usage)


async def test_final_text_without_deltas_is_streamed() -> None:
    """An agent that only returns its text is streamed, too (API-61)."""

    async def agent(turn: Turn) -> str:
        return "all at once"

    async with open_gateway(agent) as gateway:
        body = {"messages": [{"role": "user", "content": "x"}], "stream": True}
        async with gateway.events("/v1/chat/completions", method="POST", json=body) as events:
            chunks = [event.data for event in (await events.all())[:-1]]
        assert [chunk["choices"][0]["delta"].get("content") for chunk in chunks] == [None, "all at once", None]


async def test_tool_events_are_opt_in() -> None:
    """Named tool events are sent only to clients that asked for them."""

    async def agent(turn: Turn) -> str:
        turn.emit("tool.started", tool="terminal", preview="ls", tool_call_id="call_1", arguments="{}")
        turn.emit("tool.completed", tool="terminal", tool_call_id="call_1", result="{}", error=False)
        turn.emit("tool.started", tool="_hidden", preview="", tool_call_id="call_2", arguments="{}")
        return "done"

    async with open_gateway(agent) as gateway:
        base = {"messages": [{"role": "user", "content": "x"}], "stream": True}
        for options, expected in ((None, []), ({"include_tool_events": True}, ["running", "completed"])):
            async with gateway.events(
                "/v1/chat/completions", method="POST", json={**base, "stream_options": options}
            ) as events:
                found = await events.all()
            named = [event.data for event in found if event.name == "hermes.tool.progress"]
            assert [data["status"] for data in named] == expected


async def test_every_turn_is_stateless_and_bound(fast_path: bool) -> None:
    """A turn binds api_server, the session id and key, chat id = session id, and has no channel."""
    seen: list[Turn] = []

    async def agent(turn: Turn) -> str:
        seen.append(turn)
        return "ok"

    async with open_gateway(agent, fast_path=fast_path) as gateway:
        headers = {"X-Hermes-Session-Id": "my-session", "X-Hermes-Session-Key": "my-key"}
        answer = await gateway.chat(headers=headers)
        assert answer.headers["x-hermes-session-id"] == "my-session"
        assert answer.headers["x-hermes-session-key"] == "my-key"
        [turn] = seen
        assert isinstance(turn, StatelessTurn)
        assert not hasattr(turn, "channel")
        context = turn.context
        assert (context.platform, context.session_id, context.session_key) == (
            "api_server",
            "my-session",
            "api::my-key",
        )
        assert context.chat_id == "my-session"


async def test_messages_become_history_prompt_and_instructions() -> None:
    """System and developer messages are instructions, other roles are dropped, the last message is the prompt."""
    seen: list[Turn] = []

    async def agent(turn: Turn) -> str:
        seen.append(turn)
        return "ok"

    messages = [
        {"role": "system", "content": "one"},
        {"role": "user", "content": "first"},
        {"role": "assistant", "content": [{"type": "text", "text": "second"}]},
        {"role": "spectator", "content": "dropped"},
        {"role": "developer", "content": [{"type": "text", "text": "two"}]},
        {"role": "user", "content": [{"type": "input_text", "text": "a"}, "b"]},
    ]
    async with open_gateway(agent) as gateway:
        answer = await gateway.http.post("/v1/chat/completions", json={"messages": messages})
        assert answer.status_code == 200
        [turn] = seen
        assert turn.input.instructions == "one\ntwo"
        assert turn.input.text == "a\nb"
        assert turn.input.history is not None
        assert [(message.role, message.content) for message in turn.input.history] == [
            ("user", "first"),
            ("assistant", "second"),
        ]


async def test_a_named_session_brings_its_own_transcript() -> None:
    """With X-Hermes-Session-Id the stored transcript replaces the body's earlier messages."""
    histories: list[list[Message]] = []

    async def agent(turn: Turn) -> str:
        histories.append(await turn.history())
        return f"answer {len(histories)}"

    async with open_gateway(agent) as gateway:
        headers = {"X-Hermes-Session-Id": "s1"}
        await gateway.chat("one", headers=headers)
        await gateway.chat("two", headers=headers)
        assert [message.text for message in histories[1]] == ["one", "answer 1"]


@pytest.mark.one_node
async def test_derived_sessions_do_not_queue_behind_each_other() -> None:
    """Two conversations that open alike and run at once get sessions of their own; one after the other they share one."""
    release = trio.Event()
    running = 0

    async def agent(turn: Turn) -> str:
        nonlocal running
        running += 1
        if running == 2:
            release.set()
        await release.wait()
        return turn.context.session_id

    async with open_gateway(agent) as gateway:
        ids: list[str] = []

        async def one() -> None:
            ids.append((await gateway.chat("same")).headers["x-hermes-session-id"])

        async with trio.open_nursery() as nursery:
            nursery.start_soon(one)
            nursery.start_soon(one)
        assert len(set(ids)) == 2
        assert (await gateway.chat("same")).headers["x-hermes-session-id"] == min(ids)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": "x"}, "messages"),
        ({"messages": ["x"]}, "messages[0]"),
        ({"messages": [{"role": 5}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": "  "}]}, "messages"),
        ({"messages": [{"role": "system", "content": "x"}]}, "messages"),
        ({"messages": [{"role": "user", "content": 7}]}, "messages[0].content"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "ftp://x"}]}]},
            "messages[0].content",
        ),
        ({"messages": [{"role": "user", "content": [{"type": "file"}]}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": "x"}], "model": 5}, "model"),
    ],
)
async def test_mistakes_say_where(body: object, param: str) -> None:
    """A wrong body is a 400 with four keys, and `param` points at the mistake."""
    async with open_gateway() as gateway:
        answer = await gateway.http.post("/v1/chat/completions", json=body)
        assert answer.status_code == 400
        error = answer.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert error["type"] == "invalid_request_error"
        assert error["param"] == param


@pytest.mark.parametrize("content", [b"{", b"", b"[]", b'"x"', b"\xff\xfe", b"[" * 5000, b"5"])
async def test_bodies_that_are_no_json_object(content: bytes, fast_path: bool) -> None:
    """Bad JSON, JSON that is no object, and JSON that is nested too deeply are 400."""
    async with open_gateway(fast_path=fast_path) as gateway:
        for path in ("/v1/chat/completions", "/v1/responses", "/v1/runs"):
            answer = await gateway.http.post(path, content=content)
            assert answer.status_code == 400, path
            assert set(answer.json()["error"]) == {"message", "type", "param", "code"}


async def test_failures_by_how_they_fail() -> None:
    """An exception is 500; a failed turn without text 502; one with text 200 with the shortfall beside it."""

    async def agent(turn: Turn) -> Reply | str:
        match turn.input.text:
            case "raise":
                raise RuntimeError("the secret is sk-abcdefghijklmnop")
            case "fail":
                raise AgentFailed("no model today")
            case "empty":
                return Reply(error="nothing came", error_code="x")
            case _:
                return Reply(text="half", error="cut off", error_code="output_truncated", partial=True)

    async with open_gateway(agent) as gateway:
        raised = await gateway.chat("raise")
        assert raised.status_code == 500
        assert raised.json()["error"]["code"] is None
        assert "sk-" not in raised.text
        for text in ("fail", "empty"):
            failed = await gateway.chat(text)
            assert failed.status_code == 502
            error = failed.json()["error"]
            assert error["code"] == "agent_incomplete"
            code = "agent_error" if text == "fail" else "x"
            assert error["hermes"] == {"completed": False, "partial": False, "failed": True, "error_code": code}
            assert failed.headers["x-hermes-completed"] == "false"
        partial = await gateway.chat("partial")
        assert partial.status_code == 200
        body = partial.json()
        assert body["choices"][0]["finish_reason"] == "length"
        assert body["hermes"]["partial"] is True
        assert body["hermes"]["error_code"] == "output_truncated"
        assert partial.headers["x-hermes-error"] == "cut off"


async def test_a_failure_inside_a_stream_ends_it_properly() -> None:
    """A turn that fails in a stream ends with finish_reason error, an error object, and [DONE]."""

    async def agent(turn: Turn) -> str:
        turn.emit("message.delta", delta="begin")
        raise AgentFailed("broken, key sk-abcdefghijklmnop")

    async with open_gateway(agent) as gateway:
        body = {"messages": [{"role": "user", "content": "x"}], "stream": True}
        async with gateway.events("/v1/chat/completions", method="POST", json=body) as events:
            found = await events.all()
        assert found[-1].data == "[DONE]"
        last = found[-2].data
        assert last["choices"][0]["finish_reason"] == "error"
        assert "broken" in last["error"]["message"]
        assert "sk-" not in last["error"]["message"]


async def test_a_client_that_leaves_cancels_its_turn(fast_path: bool) -> None:
    """A client that leaves ends its turn at once, plain or streaming, and what there was is stored as incomplete."""
    started = trio.Event()
    ended = trio.Event()

    async def agent(turn: Turn) -> str:
        turn.emit("message.delta", delta="so far")
        turn.progress = Reply(text="so far")
        started.set()
        try:
            await trio.sleep_forever()
        finally:
            ended.set()
        raise AssertionError

    async with open_gateway(agent, fast_path=fast_path) as gateway:
        for stream in (False, True):
            started, ended = trio.Event(), trio.Event()

            async def ask(stream: bool = stream) -> None:
                await gateway.chat(headers={"X-Hermes-Session-Id": f"left-{stream}"}, stream=stream)

            async with trio.open_nursery() as nursery:
                nursery.start_soon(ask)
                await started.wait()
                nursery.cancel_scope.cancel()
            await ended.wait()
            await gateway.idle()
            messages = (await gateway.http.get(f"/api/sessions/left-{stream}/messages")).json()["data"]
            assert [(message["role"], message["content"]) for message in messages] == [
                ("user", "hello"),
                ("assistant", "so far"),
            ]


async def test_usage_is_that_of_the_whole_turn() -> None:
    """Usage is what the agent reports."""

    async def agent(turn: Turn) -> Reply:
        return Reply(text="x", usage=Usage(input_tokens=7, output_tokens=3))

    async with open_gateway(agent) as gateway:
        assert (await gateway.chat()).json()["usage"] == {
            "prompt_tokens": 7,
            "completion_tokens": 3,
            "total_tokens": 10,
        }


async def test_images_stay_parts() -> None:
    """Content with images stays a list of canonical parts."""
    seen: list[Turn] = []

    async def agent(turn: Turn) -> str:
        seen.append(turn)
        return "ok"

    content = [
        {"type": "text", "text": "look"},
        {"type": "input_image", "image_url": "https://example.org/a.png", "detail": "low"},
    ]
    async with open_gateway(agent) as gateway:
        body = {"messages": [{"role": "user", "content": content}]}
        assert (await gateway.http.post("/v1/chat/completions", json=body)).status_code == 200
        assert seen[0].input.prompt == [
            {"type": "text", "text": "look"},
            {"type": "image_url", "image_url": {"url": "https://example.org/a.png", "detail": "low"}},
        ]
