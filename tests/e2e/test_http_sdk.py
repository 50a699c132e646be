"""The official `openai` client, unmodified, against the real server: chat, responses, models, and its error classes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from .server_process import ServerProcess, server_process


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """One server for the module."""
    with server_process(tmp_path_factory.mktemp("home")) as running:
        yield running


@pytest.fixture
def client(server: ServerProcess) -> Iterator[openai.OpenAI]:
    """The synchronous client."""
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key=server.key, max_retries=0) as made:
        yield made


def test_chat(client: openai.OpenAI) -> None:
    """A plain completion."""
    completion = client.chat.completions.create(
        model="demo", messages=[{"role": "developer", "content": "x"}, {"role": "user", "content": "Hello"}]
    )
    assert completion.choices[0].message.content == "You said: Hello"
    assert completion.choices[0].finish_reason == "stop"
    assert completion.usage is not None
    assert completion.usage.total_tokens > 0


def test_chat_stream(client: openai.OpenAI) -> None:
    """A stream, with usage in a chunk of its own."""
    text = ""
    usage = None
    for chunk in client.chat.completions.create(
        model="demo",
        messages=[{"role": "user", "content": "Hello"}],
        stream=True,
        stream_options={"include_usage": True},
    ):
        usage = chunk.usage or usage
        text += "".join(choice.delta.content or "" for choice in chunk.choices)
    assert text == "You said: Hello"
    assert usage is not None
    assert usage.total_tokens > 0


def test_accumulating_chat_stream(client: openai.OpenAI) -> None:
    """The client's own accumulation works."""
    with client.chat.completions.stream(model="demo", messages=[{"role": "user", "content": "Hello"}]) as stream:
        for _ in stream:
            pass
        assert stream.get_final_completion().choices[0].message.content == "You said: Hello"


def test_responses_chain_retrieve_delete(client: openai.OpenAI) -> None:
    """Create, continue, retrieve, delete; a deleted one is NotFoundError."""
    first = client.responses.create(model="demo", input="Hello")
    assert first.output_text == "You said: Hello"
    assert first.status == "completed"
    second = client.responses.create(model="demo", input="Again", previous_response_id=first.id)
    assert second.previous_response_id == first.id
    assert client.responses.retrieve(second.id).output_text == "You said: Again"
    client.responses.delete(second.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(second.id)


def test_responses_stream_accumulates(client: openai.OpenAI) -> None:
    """The client accumulates the streamed events into the same output as the final response has."""
    with client.responses.stream(model="demo", input="Hello there") as stream:
        types = [event.type for event in stream]
        final = stream.get_final_response()
    assert final.output_text == "You said: Hello there"
    assert types[:2] == ["response.created", "response.in_progress"]
    assert types[-1] == "response.completed"
    assert "response.output_text.delta" in types


def test_a_named_conversation(client: openai.OpenAI) -> None:
    """`conversation` by name works through the client."""
    first = client.responses.create(model="demo", input="One", conversation="sdk-talk")
    second = client.responses.create(model="demo", input="Two", conversation="sdk-talk")
    assert second.previous_response_id == first.id


def test_models(client: openai.OpenAI) -> None:
    """The list and one model."""
    names = [model.id for model in client.models.list()]
    assert names[0] == "hermes-trio"
    assert client.models.retrieve("hermes-trio").id == "hermes-trio"


def test_error_classes(client: openai.OpenAI, server: ServerProcess) -> None:
    """400, 401 and 404 are the client's own classes, with code and param."""
    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(model="demo", messages=[])
    assert bad.value.param == "messages"
    with pytest.raises(openai.NotFoundError) as missing:
        client.models.retrieve("nope")
    assert missing.value.code == "model_not_found"
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="wrong-key-0123456789", max_retries=0) as other:
        with pytest.raises(openai.AuthenticationError) as wrong:
            other.models.list()
        assert wrong.value.code == "invalid_api_key"


def test_busy_servers_are_retried(tmp_path: Path) -> None:
    """429 carries Retry-After, and the client's automatic retry succeeds when the work before it has ended."""
    (tmp_path / "config.toml").write_text("[limits]\nconcurrent_turns = 1\n")
    with (
        server_process(tmp_path) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key=server.key, max_retries=0) as client,
    ):
        run = client.post("/runs", body={"input": "!sleep 1.5"}, cast_to=object)
        assert run
        with pytest.raises(openai.RateLimitError) as busy:
            client.chat.completions.create(model="demo", messages=[{"role": "user", "content": "Hello"}])
        assert busy.value.response.headers["retry-after"] == "1"
        patient = client.with_options(max_retries=5)
        completion = patient.chat.completions.create(model="demo", messages=[{"role": "user", "content": "Hello"}])
        assert completion.choices[0].message.content == "You said: Hello"


def test_the_asynchronous_client(server: ServerProcess) -> None:
    """The asynchronous client does the same: chat, streams, responses, errors."""
    import asyncio

    async def main() -> None:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key=server.key, max_retries=0) as client:
            completion = await client.chat.completions.create(
                model="demo", messages=[{"role": "user", "content": "Hello"}]
            )
            assert completion.choices[0].message.content == "You said: Hello"
            text = ""
            async for chunk in await client.chat.completions.create(
                model="demo", messages=[{"role": "user", "content": "Hello"}], stream=True
            ):
                text += chunk.choices[0].delta.content or ""
            assert text == "You said: Hello"
            async with client.responses.stream(model="demo", input="Hello") as stream:
                async for _ in stream:
                    pass
                final = await stream.get_final_response()
            assert final.output_text == "You said: Hello"
            assert (await client.responses.retrieve(final.id)).id == final.id
            await client.responses.delete(final.id)
            with pytest.raises(openai.NotFoundError):
                await client.responses.retrieve(final.id)
            with pytest.raises(openai.BadRequestError):
                await client.responses.create(model="demo", input="")

    asyncio.run(main())
