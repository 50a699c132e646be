"""What the tests of the models share: a transport that is closed, a scripted provider, and a model of each protocol."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
import trio

from hermes_trio.agent.model import Model, ModelAnswer, ModelRequest, collect
from hermes_trio.base.redaction import Secret
from hermes_trio.net.http1 import ConnectionPool
from hermes_trio.providers.anthropic import AnthropicModel
from hermes_trio.providers.openai import OpenAIModel
from hermes_trio.runtime.ports import Message
from hermes_trio.testing.model_server import ModelServer

KEY = "sk-test-0123456789abcdefghij"

MakeModel = Callable[..., Model]
StartServer = Callable[..., Awaitable[ModelServer]]


@pytest.fixture
async def transport() -> AsyncIterator[ConnectionPool]:
    async with ConnectionPool() as transport:
        yield transport


@pytest.fixture
def start_server(nursery: trio.Nursery) -> StartServer:
    """Start a scripted provider that ends with the test."""

    async def start(*script: Any, **options: Any) -> ModelServer:
        return await nursery.start(ModelServer(*script, **options).run)

    return start


@pytest.fixture(params=["openai", "anthropic"])
def protocol(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def make_model(protocol: str, transport: ConnectionPool) -> MakeModel:
    """A model of the protocol under test, for a server."""

    def make(server: ModelServer, **options: Any) -> Model:
        options = {"transport": transport, "key": Secret(KEY), **options}
        if protocol == "openai":
            return OpenAIModel("test", base_url=server.openai_url, **options)
        return AnthropicModel("test", base_url=server.url, **options)

    return make


def ask(*texts: str, **more: Any) -> ModelRequest:
    """A request in which the user says this."""
    return ModelRequest(messages=tuple(Message(role="user", content=text) for text in texts or ("hi",)), **more)


async def answer_of(model: Model, request: ModelRequest | None = None) -> ModelAnswer:
    """The whole answer to a request."""
    async with model.stream(request or ask()) as stream:
        return await collect(stream)
