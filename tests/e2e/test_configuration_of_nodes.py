"""Nodes of one store that were configured differently say so; what they publish about their configuration depends on no secret."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import httpx2
import msgspec
import pytest
import trio

from hermes_trio.adapters.discord.events import DiscordSettings
from hermes_trio.adapters.slack.events import SlackSettings
from hermes_trio.adapters.telegram.events import TelegramSettings
from hermes_trio.base.structs import RedactedStruct
from hermes_trio.config import Config, load_config
from hermes_trio.gateway.fingerprint import SHARED_SECTIONS, configuration_fingerprint, shared_settings
from hermes_trio.gateway.serving import open_server
from hermes_trio.http.auth import AdminKey
from hermes_trio.messaging.settings import RouteSettings, WebhookSettings
from hermes_trio.store import open_store
from hermes_trio.tools.mcp.settings import McpServer

KEY = "admin-key-0123456789abcdef"
SECRET = "s3cr3t-value-1234567890"
ROUTE = '[webhook.routes.{}]\nsecret = "0123456789abcdef"\nprompt = "{{message}}"\n'


def config_of(home: Path, text: str, environment: Mapping[str, str] | None = None) -> Config:
    """The configuration of a file with this text."""
    home.mkdir(exist_ok=True)
    (home / "config.toml").write_text(text)
    return load_config(environment or {}, home=home, server={"port": 0})


async def checked(tmp_path: Path, *texts: str) -> dict[str, Any]:
    """What the health report of the first of so many nodes says about them."""
    with trio.fail_after(60):
        async with AsyncExitStack() as stack:
            base: Any = await stack.enter_async_context(open_store(tmp_path / "state.db"))
            urls: list[str] = []
            for number, text in enumerate(texts):
                config = config_of(tmp_path / f"node-{number}", text)
                store = base.shared(f"node-{number}", lease_seconds=1.5)
                serving = await stack.enter_async_context(open_server(config, AdminKey(KEY), store=store))
                urls += serving.addresses
            headers = {"Authorization": f"Bearer {KEY}"}
            async with httpx2.AsyncClient(base_url=urls[0], headers=headers, trust_env=False) as http:
                while True:
                    found = (await http.get("/health/detailed")).json()
                    if all(node["configuration"] for node in found["nodes"]):
                        return found["readiness"]["checks"]["nodes"]
                    await trio.sleep(0.05)


async def test_nodes_that_differ_in_a_webhook_route_are_reported(tmp_path: Path) -> None:
    """Every second request of its sender would get 404."""
    one = await checked(tmp_path, ROUTE.format("issues"), ROUTE.format("issues") + ROUTE.format("pushes"))
    assert one == {"status": "degraded", "detail": "the nodes have different configurations"}


async def test_nodes_with_the_same_configuration_are_not_reported(tmp_path: Path) -> None:
    """Their homes differ, which is no difference."""
    assert await checked(tmp_path, ROUTE.format("issues"), ROUTE.format("issues")) == {"status": "ok", "count": 2}


@pytest.mark.parametrize(
    "text",
    [
        ROUTE.format("issues"),
        "[webhook]\nrate_limit = 31",
        '[cron]\ntimezone = "Europe/Berlin"',
        '[telegram]\nallowed_users = ["1"]',
        '[discord]\nfree_channels = ["1"]',
        '[slack]\nmode = "events"',
        "[store]\nlease_seconds = 6",
        '[models]\ndefault = "openai/other"',
        '[models.routes.a]\nprovider = "openai"\nmodel = "m"\nbase_url = "http://other.example/v1"',
        '[mcp.servers.a]\ncommand = "a"\nenv = {TOKEN = "x"}',
        "[plugins.adapters.mine]\nlimit = 3",
    ],
)
def test_a_setting_of_all_nodes_is_in_the_fingerprint(tmp_path: Path, text: str) -> None:
    """Its section, its names and its values."""
    plain, other = (config_of(tmp_path, one) for one in ("", text))
    assert configuration_fingerprint(plain, b"s") != configuration_fingerprint(other, b"s")


def test_a_platform_that_a_variable_enables_is_in_the_fingerprint(tmp_path: Path) -> None:
    """That it is set, and not its value."""
    found = [
        configuration_fingerprint(config_of(tmp_path, "", {"SLACK_BOT_TOKEN": token} if token else {}), b"s")
        for token in ("", "one", "two")
    ]
    assert found[0] != found[1] == found[2]


@pytest.mark.parametrize(
    "text",
    [
        '[webhook]\nsecret = "{}"',
        '[webhook]\nsecret = ["{}", "{}"]',
        '[webhook.routes.a]\nsecret = "{}"',
        '[telegram]\ntoken = "{}"\nproxy = "http://me:{}@proxy.example"',
        '[discord]\ntoken = "{}"',
        '[slack]\ntoken = "{}"\napp_token = "{}"\nsigning_secret = "{}"',
        '[models.routes.a]\nprovider = "openai"\napi_key = "{}"\nbase_url = "https://me:{}@host.example/{}?key={}"',
        '[models.routes.a]\nprovider = "openai"\nheaders = {{x-anything = "{}"}}',
        '[mcp.servers.a]\ncommand = "a"\nargs = ["--flag", "{}"]\nenv = {{ANY = "{}"}}',
        '[mcp.servers.a]\nurl = "https://host.example/?anything={}"\nheaders = {{any = "{}"}}',
        '[plugins.adapters.mine]\nanything = "{}"\n[plugins.adapters.mine.more]\nlist = ["{}"]',
    ],
)
def test_a_secret_is_not_in_the_fingerprint(tmp_path: Path, text: str) -> None:
    """Neither it nor anything computed from it: another one gives the same."""
    given = [
        config_of(tmp_path, text.replace("{}", value).replace("{{", "{").replace("}}", "}"))
        for value in (SECRET, "another")
    ]
    assert SECRET not in str(shared_settings(given[0]))
    assert shared_settings(given[0]) == shared_settings(given[1])


def test_whatever_a_section_hides_is_left_out() -> None:
    """Each key that its settings do not show."""
    hiding: list[tuple[str, type[RedactedStruct]]] = [
        ("telegram", TelegramSettings),
        ("discord", DiscordSettings),
        ("slack", SlackSettings),
        ("webhook", WebhookSettings),
        ("webhook", RouteSettings),
        ("mcp", McpServer),
    ]
    for section, kind in hiding:
        table = {key: {"any": SECRET} if key in ("env", "headers") else SECRET for key in kind.hidden}
        config = msgspec.structs.replace(Config(), **{section: table})
        assert SECRET not in str(shared_settings(config)), kind


def test_every_section_is_shared_or_of_one_host() -> None:
    """A new one is put into one of the two."""
    own = {"server", "log", "store", "tracing", "cli"}
    assert {*SHARED_SECTIONS, *own, "home", "path", "environment"} == set(Config.__struct_fields__)
