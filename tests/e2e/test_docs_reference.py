"""The reference pages against the code: no key, default, route, metric or variable is missing from them, and none is invented."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from hermes_trio.adapters.assembly import CHAT_PLATFORMS
from hermes_trio.agent.command_policy import ApprovalSettings
from hermes_trio.agent.loop import AgentSettings
from hermes_trio.base.retention import Retention
from hermes_trio.config import (
    _SERVER_VARIABLES,
    SECTIONS,
    LogSettings,
    PluginSettings,
    StoreSettings,
    load_config,
)
from hermes_trio.gateway.api import open_api_gateway
from hermes_trio.http.api.jobs import job_routes
from hermes_trio.http.auth import AdminKey
from hermes_trio.http.settings import Limits, ServerSettings
from hermes_trio.messaging.settings import (
    CliSettings,
    CronSettings,
    HomeChannel,
    PlatformSettings,
    ResetSettings,
    RouteSettings,
    WebhookSettings,
)
from hermes_trio.providers import routes as model_routes
from hermes_trio.providers.http_model import Timeouts
from hermes_trio.providers.network_switch import allow_network_models
from hermes_trio.tools.mcp.settings import McpServer, McpSettings
from hermes_trio.tools.settings import DelegationSettings, TerminalSettings, ToolSettings
from hermes_trio.tools.terminal.shell_state import PASSED_ON
from hermes_trio.tracing.settings import TracingSettings

DOCS = Path(__file__).parents[2] / "docs"
UNSET = "–"


def platform_settings(name: str) -> type[msgspec.Struct]:
    """The settings struct `NameSettings` of a chat platform."""
    events = import_module(f"hermes_trio.adapters.{name}.events")
    return getattr(events, f"{name.capitalize()}Settings")


STRUCTS: dict[str, type[msgspec.Struct]] = {
    "[server]": ServerSettings,
    "[limits]": Limits,
    "[log]": LogSettings,
    "[retention]": Retention,
    "[approvals]": ApprovalSettings,
    "[tools]": ToolSettings,
    "[tools.terminal]": TerminalSettings,
    "[tools.delegation]": DelegationSettings,
    "[mcp]": McpSettings,
    "[mcp.servers.NAME]": McpServer,
    "[cli]": CliSettings,
    "[webhook]": WebhookSettings,
    "[webhook.routes.NAME]": RouteSettings,
    "[cron]": CronSettings,
    "All platforms": PlatformSettings,
    "reset": ResetSettings,
    "[store]": StoreSettings,
    "[tracing]": TracingSettings,
    "[plugins]": PluginSettings,
    **{f"[{name}]": platform_settings(name) for name in CHAT_PLATFORMS},
}
"""What each heading of the configuration page describes."""


def page(name: str) -> str:
    """The text of a page."""
    return (DOCS / name).read_text()


def tables() -> dict[str, dict[str, str]]:
    """The defaults on the configuration page: by heading, then by key."""
    found: dict[str, dict[str, str]] = {}
    rows: dict[str, str] = {}
    has_defaults = False
    for line in page("configuration.md").splitlines():
        if match := re.match(r"^##+ `?([^`]+)`?$", line):
            rows = found[match[1]] = {}
            has_defaults = False
        elif line.startswith("| key | default |"):
            has_defaults = True
        elif has_defaults and (match := re.match(r"^\| (`\w+`(?:, `\w+`)*) \| ([^|]+) \|", line)):
            keys = re.findall(r"\w+", match[1])
            defaults = match[2].strip().split(", ") if len(keys) > 1 else [match[2].strip()]
            if len(defaults) == 1:
                defaults *= len(keys)
            rows.update(zip(keys, (default.strip("`") for default in defaults), strict=True))
    return found


def defaults_of(kind: type[msgspec.Struct]) -> Iterator[tuple[str, Any]]:
    """Keys and defaults of a struct, as they would be written in TOML; `UNSET` for a table or nothing."""
    for field in msgspec.structs.fields(kind):
        value: Any = field.default if field.default_factory is msgspec.NODEFAULT else field.default_factory()
        value = UNSET if value is None else msgspec.to_builtins(value)
        if isinstance(value, tuple):
            value = list(cast("tuple[Any, ...]", value))
        yield field.name, UNSET if isinstance(value, dict) and value else value


@pytest.mark.parametrize("heading", STRUCTS)
def test_the_configuration_page_has_every_key_with_its_default(heading: str):
    """What the page says of a table is what the program reads."""
    written = {
        key: default if default == UNSET else tomllib.loads(f"x = {default}")["x"]
        for key, default in tables()[heading].items()
    }
    assert written == dict(defaults_of(STRUCTS[heading]))


def test_the_configuration_page_has_every_section():
    """A section of the file has a heading."""
    described = tables()
    missing = [name for name in SECTIONS if f"[{name}]" not in described]
    assert missing == []


def test_the_configuration_page_has_every_key_of_a_model_route():
    """Routes of models are read by hand, so their keys are compared by hand."""
    described = tables()
    assert set(described["[models.routes.NAME]"]) == set(model_routes._ROUTE_KEYS)
    assert set(described["[models]"]) == {"default", "routes"}
    assert set(described["[agent]"]) == set(AgentSettings.__struct_fields__)
    text = page("configuration.md")
    for field in msgspec.structs.fields(Timeouts):
        assert f"`{field.name}` ({field.default:g}" in text
    for name in HomeChannel.__struct_fields__:
        assert f"`{name}`" in text


def test_the_configuration_page_has_every_variable():
    """Variables that a start reads, and those that commands get, are listed."""
    text = page("configuration.md")
    providers = [
        name for provider in model_routes._PROVIDERS.values() for name in (provider.key_variable, provider.url_variable)
    ]
    for name in (*_SERVER_VARIABLES.values(), *providers, *PASSED_ON, "HERMES_HOME", "HERMES_MODEL"):
        assert f"`{name}`" in text, name


def test_the_example_of_a_configuration_is_accepted(tmp_path: Path):
    """The TOML block on the page is a configuration that the program takes."""
    block = re.search(r"^```toml\n(.*?)^```", page("configuration.md"), re.MULTILINE | re.DOTALL)
    assert block is not None
    (tmp_path / "config.toml").write_text(block[1])
    config = load_config({"OPENAI_API_KEY": "k-0123456789"}, home=tmp_path)
    assert config.server.port == 9000
    with allow_network_models():
        with_models = model_routes.build_routes(config.models, config.environment)
    assert with_models.default == "fast"
    assert ToolSettings.read(config.tools).terminal.cwd == "/srv/agent"


async def test_the_http_page_and_the_metrics_page_are_complete(tmp_path: Path):
    """Every route of a server is on the page about HTTP, and every metric on the page about metrics."""
    config = load_config({}, home=tmp_path)
    async with open_api_gateway(config, AdminKey("docs-admin-key-0123456789"), in_memory=True) as gateway:
        routes = {(route.method, route.path) for route in gateway.api.routes if route.listed}
        families = {family.name for family in text_string_to_metric_families(gateway.api.metrics.render().decode())}
    routes |= {(route.method, route.path) for route in job_routes()}
    written = set(re.findall(r"`(GET|POST|PATCH|DELETE) (/[^`?]*)`", page("http.md")))
    assert written - {("POST", "/webhooks/{route}")} == routes
    described = set(re.findall(r"^\| `(hermes_\w+)`", page("metrics.md"), re.MULTILINE))
    assert {name.removesuffix("_total") for name in described} == {name for name in families if "created" not in name}


def test_links_lead_to_headings_that_are_there():
    """A link with a fragment names a heading of its page."""
    for source in sorted(DOCS.rglob("*.md")):
        for target, fragment in re.findall(r"\]\(([^):#]*)#([^)]+)\)", source.read_text()):
            there = (source.parent / target) if target else source
            headings = re.findall(r"^#+ (.+)$", there.read_text(), re.MULTILINE)
            anchors = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
            assert fragment in anchors, f"{source.name} links to {there.name}#{fragment}"
