"""From configuration and environment to models: names, defaults, keys, and errors that say what would be right."""

from __future__ import annotations

from typing import Any

import pytest
import trio.testing

from hermes_trio.providers.anthropic import AnthropicModel
from hermes_trio.providers.demo import DemoModel
from hermes_trio.providers.http_model import Timeouts
from hermes_trio.providers.network_switch import (
    NetworkModelForbidden,
    allow_network_models,
    forbid_network_models,
    permit_network_models,
)
from hermes_trio.providers.openai import OpenAIModel
from hermes_trio.providers.routes import InvalidRoute, UnknownRoute, build_routes
from hermes_trio.testing.model_server import ScriptedAnswer

from .conftest import StartServer, answer_of

LOCAL = "http://127.0.0.1:9/v1"


@pytest.fixture(autouse=True)
def network_models_may_be_built():
    """These tests build models for real addresses; none is called."""
    with allow_network_models():
        yield


def test_demo_is_the_default() -> None:
    """With nothing configured there is the demo model, and it is the default."""
    routes = build_routes()
    assert routes.names == ("demo",)
    assert isinstance(routes.get(), DemoModel)


def test_default_from_the_environment() -> None:
    """`HERMES_MODEL` names the default; the provider's variables give address and key."""
    environment = {"HERMES_MODEL": "openai/meta/llama-3", "OPENAI_BASE_URL": LOCAL}
    routes = build_routes({}, environment)
    model = routes.get()
    assert isinstance(model, OpenAIModel)
    assert (routes.default, model.name, model._model) == ("openai/meta/llama-3", "openai/meta/llama-3", "meta/llama-3")
    routes = build_routes({}, {"HERMES_MODEL": "anthropic/claude", "ANTHROPIC_API_KEY": "sk-ant-secret"})
    model = routes.get()
    assert isinstance(model, AnthropicModel)
    assert ("x-api-key", "sk-ant-secret") in model._endpoint.headers


def test_named_routes() -> None:
    """Routes are tables or short forms; the default is one of them, and the environment overrides it."""
    spec: dict[str, Any] = {
        "default": "fast",
        "routes": {
            "fast": {
                "provider": "openai",
                "model": "gpt-4o-mini",
                "base_url": LOCAL,
                "context_window": 5000,
                "max_tokens": 100,
                "timeouts": {"idle": 30},
                "attempts": 5,
                "headers": {"X-Title": "hermes"},
            },
            "deep": {"provider": "anthropic", "model": "claude", "api_key_env": "MY_KEY", "bearer": True},
            "tiny": "demo",
            "slow": {"provider": "demo", "context_window": 900},
        },
    }
    routes = build_routes(spec, {"MY_KEY": "k-1"})
    assert routes.names == ("fast", "deep", "demo", "slow", "tiny")
    fast, deep = routes.get("fast"), routes.get("deep")
    assert routes.get() is fast
    assert isinstance(fast, OpenAIModel)
    assert isinstance(deep, AnthropicModel)
    assert (fast.name, fast.context_window, fast._max_tokens) == ("fast", 5000, 100)
    assert fast._endpoint.timeouts == Timeouts(idle=30)
    assert fast._endpoint.retries.attempts == 5
    assert fast._endpoint.headers == (("X-Title", "hermes"),)
    assert ("Authorization", "Bearer k-1") in deep._endpoint.headers
    assert routes.get("slow").context_window == 900
    assert build_routes(spec, {"MY_KEY": "k-1", "HERMES_MODEL": "deep"}).default == "deep"
    assert "deep" in routes


def test_unknown_route_lists_the_known_ones() -> None:
    """Asking for a name that is not there says which are."""
    with pytest.raises(UnknownRoute, match="there is no model route 'gpt'; there are: demo"):
        build_routes().get("gpt")


def test_a_providers_key_is_not_shown_to_another_server() -> None:
    """A route with an address of its own does not use the key of the provider's variable."""
    spec = {"routes": {"local": {"provider": "openai", "model": "m", "base_url": LOCAL}}}
    model = build_routes(spec, {"OPENAI_API_KEY": "sk-secret"}).get("local")
    assert isinstance(model, OpenAIModel)
    assert model._endpoint.headers == ()


@pytest.mark.parametrize(
    ("spec", "environment", "words"),
    [
        ({}, {"HERMES_MODEL": "gpt-4"}, "HERMES_MODEL is 'gpt-4'; accepted are openai/MODEL, anthropic/MODEL and demo"),
        ({}, {"HERMES_MODEL": "openai/"}, "HERMES_MODEL is 'openai/'"),
        (
            {},
            {"HERMES_MODEL": "openai/x"},
            "HERMES_MODEL needs a key for https://api.openai.com/v1: set OPENAI_API_KEY",
        ),
        ({}, {"HERMES_MODEL": "openai/x", "OPENAI_BASE_URL": "api.example.com"}, "OPENAI_BASE_URL: a base URL starts"),
        ({}, {"HERMES_MODEL": "openai/x", "OPENAI_API_KEY": "a b"}, "OPENAI_API_KEY holds white space"),
        ({}, {"HTTPS_PROXY": "socks5://localhost:1"}, "HTTPS_PROXY: only http:// proxies"),
        ({"default": "other", "routes": {"fast": "demo"}}, {}, r"models.default is 'other'; .* a route \(fast\)"),
        ({"default": 7}, {}, "models.default must be a non-empty string, not 7"),
        ({"models": {}}, {}, "models.models is not a setting; accepted are default, routes"),
        ({"routes": ["x"]}, {}, "models.routes must be a table, not a list"),
        ({"routes": {"a": 3}}, {}, "models.routes.a must be a table, not a number"),
        ({"routes": {"a": {"provider": "grok"}}}, {}, "provider is 'grok'; accepted are openai, anthropic and demo"),
        ({"routes": {"a": {"provider": "openai"}}}, {}, "models.routes.a.model is missing"),
        ({"routes": {"a": {"provider": "openai", "modle": "x"}}}, {}, "models.routes.a.modle is not a setting"),
        ({"routes": {"a": {"provider": "demo", "base_url": "x"}}}, {}, "models.routes.a.base_url is not a setting"),
        (
            {"routes": {"a": {"provider": "anthropic", "model": "m", "api_key_env": "NOPE"}}},
            {},
            "a.api_key_env names NOPE, which is not set",
        ),
        (
            {"routes": {"a": {"provider": "openai", "model": "m", "base_url": LOCAL, "timeouts": {"idle": 0}}}},
            {},
            "models.routes.a.timeouts.idle must be a number of seconds above 0 and up to 86400, not 0",
        ),
        (
            {"routes": {"a": {"provider": "openai", "model": "m", "base_url": LOCAL, "max_tokens": "many"}}},
            {},
            "models.routes.a.max_tokens must be a whole number above 0, not 'many'",
        ),
        (
            {"routes": {"a": {"provider": "openai", "model": "m", "base_url": LOCAL, "headers": {"A": "x\r\nB: y"}}}},
            {},
            "models.routes.a.headers.A must be a string of printable ASCII",
        ),
        (
            {"routes": {"a": {"provider": "openai", "model": "m", "base_url": "http://me:pw@host/"}}},
            {},
            "models.routes.a.base_url: a base URL must not hold a user name or password",
        ),
    ],
)
def test_errors_name_the_key_and_what_would_be_right(spec: Any, environment: dict[str, str], words: str) -> None:
    """Each mistake is reported with its place and with what is accepted."""
    with pytest.raises(InvalidRoute, match=words):
        build_routes(spec, environment)


@pytest.mark.parametrize("value", [{"x": 1}, ["sk-secret-value"], 123456])
def test_a_wrong_key_is_not_shown(value: object) -> None:
    """The error about a key in the wrong shape does not show it."""
    spec = {"routes": {"a": {"provider": "openai", "model": "m", "base_url": LOCAL, "api_key": value}}}
    with pytest.raises(InvalidRoute) as caught:
        build_routes(spec)
    assert str(value) not in str(caught.value)
    assert "api_key must be a non-empty string" in str(caught.value)


async def test_closing_the_routes_closes_their_connections(
    start_server: StartServer, mock_clock: trio.testing.MockClock
) -> None:
    """Models work inside the block and fail clearly after it; no connection is left."""
    server = await start_server(ScriptedAnswer(text="hello"))
    environment = {"HERMES_MODEL": "openai/m", "OPENAI_BASE_URL": server.openai_url}
    async with build_routes({}, environment) as routes:
        assert (await answer_of(routes.get())).text == "hello"
        assert routes._transport.statistics() == {server.url: 1}
    assert routes._transport.statistics() == {}
    model = build_routes({"routes": {"a": {"provider": "demo"}}}).get("a")
    assert (await answer_of(model)).text == "You said: hi"


def test_forbidden_network_models() -> None:
    """The switch refuses to build models outside this machine, lets loopback through, and has a gap on request."""
    from hermes_trio.providers import network_switch as network

    environment = {"HERMES_MODEL": "openai/m", "OPENAI_API_KEY": "sk-x"}
    allowances, network._switch.allowances = network._switch.allowances, 0
    forbidden = network._switch.forbidden
    try:
        forbid_network_models()
        with pytest.raises(NetworkModelForbidden, match=r"would call https://api\.openai\.com, and network models"):
            build_routes({}, environment)
        for url in (LOCAL, "http://localhost:8080/v1", "http://[::1]:8080"):
            build_routes({}, {**environment, "OPENAI_BASE_URL": url})
        with allow_network_models():
            model = build_routes({}, environment).get()
        with pytest.raises(NetworkModelForbidden):
            model.stream(None)  # type: ignore[arg-type]
        permit_network_models()
        build_routes({}, environment)
    finally:
        network._switch.allowances = allowances
        network._switch.forbidden = forbidden
