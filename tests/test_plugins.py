"""Extension points: what packages bring is found by name, loaded when it is asked for, and named when it cannot be used."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from hermes_trio.adapters.assembly import build_assembly
from hermes_trio.agent.tool import Tool
from hermes_trio.config import load_config
from hermes_trio.gateway.gateway import open_gateway
from hermes_trio.plugins import ADAPTERS, PROVIDERS, TOOLS, PluginProblem, installed_plugins, load_plugin, load_tools
from hermes_trio.providers.routes import InvalidRoute, build_routes

EXAMPLES = Path(__file__).parent.parent / "examples" / "plugins"


def install(folder: Path, monkeypatch: pytest.MonkeyPatch, group: str, name: str, code: str) -> None:
    """A package with one entry point, `thing` of a module with this code, found as an installed one is."""
    module = f"plugin_{name}"
    (folder / f"{module}.py").write_text(code)
    info = folder / f"{module}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{group}]\n{name} = {module}:thing\n")
    monkeypatch.syspath_prepend(str(folder))


def install_example(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch, group: str) -> None:
    module = f"hermes_trio_{name}"
    code = (EXAMPLES / name / f"{module}.py").read_text()
    target = {"dice": "roll"}.get(name, "build")
    install(folder, monkeypatch, group, name, f"{code}\n\nthing = {target}\n")


def test_a_missing_plugin_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names the key, the plugin and those that are installed."""
    with pytest.raises(
        PluginProblem, match=r"plugins\.tools names 'dice', which no package brings as hermes_trio\.tools"
    ):
        load_tools(["dice"], Tool)
    install(tmp_path, monkeypatch, TOOLS, "dise", "thing = 1")
    with pytest.raises(PluginProblem, match="installed are dise"):
        load_tools(["dice"], Tool)
    assert list(installed_plugins(TOOLS)) == ["dise"]


def test_a_broken_plugin_is_named_with_its_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A plugin that cannot be imported, or that brings something else, says so."""
    install(tmp_path, monkeypatch, TOOLS, "broken", "import a_module_that_is_missing")
    with pytest.raises(
        PluginProblem, match=r"'broken' of the package plugin_broken cannot be loaded: ModuleNotFoundError"
    ):
        load_plugin(TOOLS, "broken", "plugins.tools")
    install(tmp_path, monkeypatch, TOOLS, "number", "thing = 7")
    with pytest.raises(PluginProblem, match="brings a int, which is no tool"):
        load_tools(["number"], Tool)


def test_a_plugin_that_exits_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package that calls `sys.exit` when it is imported or used does not end the server without a word."""
    install(tmp_path, monkeypatch, TOOLS, "leaves", "raise SystemExit('bye')")
    with pytest.raises(PluginProblem, match="'leaves' of the package plugin_leaves cannot be loaded: SystemExit: bye"):
        load_tools(["leaves"], Tool)
    install(tmp_path, monkeypatch, PROVIDERS, "goes", "def thing(*given):\n    raise SystemExit(3)")
    with pytest.raises(PluginProblem, match="'goes' of the package plugin_goes failed: SystemExit: 3"):
        build_routes({"routes": {"x": {"provider": "goes"}}})


def test_an_error_of_a_plugin_tells_no_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A plugin that prints what it was given: its table and the server's environment. Credentials are hidden, by their form and by their name."""
    code = "def thing(*given):\n    raise ValueError(f'cannot sign in: {given!r}')"
    install(tmp_path, monkeypatch, ADAPTERS, "loud", code)
    tables = {
        "plugins": {"loud": {"password": "correct horse", "url": "https://a.example", "more": {"api_key": "k-1234"}}}
    }
    with pytest.raises(PluginProblem, match=r"'loud' of the package plugin_loud failed: ValueError") as raised:
        build_assembly(tables, environment={"MAIL_TOKEN": "battery staple", "OTHER": f"sk-{'a1B2' * 8}"}, host=None)
    told = str(raised.value)
    assert "https://a.example" in told
    for secret in ("correct horse", "k-1234", "battery staple", "a1B2"):
        assert secret not in told
    assert raised.value.__cause__ is None
    assert raised.value.__suppress_context__


def test_a_name_that_two_packages_bring_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which code runs must not depend on the order of folders; both packages are named."""
    for number in ("one", "two"):
        folder = tmp_path / number
        folder.mkdir()
        install(folder, monkeypatch, TOOLS, number, "thing = 1")
        (folder / f"plugin_{number}-1.0.dist-info" / "entry_points.txt").write_text(
            f"[{TOOLS}]\nshared = plugin_{number}:thing\n"
        )
    with pytest.raises(PluginProblem, match="'shared', which plugin_one and plugin_two bring"):
        load_plugin(TOOLS, "shared", "plugins.tools")


TERMINAL = """
from hermes_trio import Turn, tool

@tool()
async def terminal(turn: Turn, text: str) -> dict[str, str]:
    \"\"\"Mine.\"\"\"
    return {"text": text}

thing = [terminal]
"""


async def test_a_tool_that_takes_the_name_of_another_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plugin cannot stand in for a tool of the gateway, unless the owner has switched that off; nor two plugins for each other."""
    for name in ("mine", "yours"):
        install(tmp_path, monkeypatch, TOOLS, name, TERMINAL)
    with pytest.raises(
        PluginProblem, match=r"'yours' .* named 'terminal', and so does 'mine' of the package plugin_mine"
    ):
        load_tools(["mine", "yours"], Tool)
    assembly = partial(build_assembly, {}, environment={}, host=None)
    config = tmp_path / "config.toml"
    config.write_text('[plugins]\ntools = ["mine"]\n')
    with pytest.raises(PluginProblem, match="named 'terminal', and so does hermes-trio itself"):
        async with open_gateway(load_config({}, home=tmp_path), assembly(), in_memory=True):
            pass
    config.write_text('[plugins]\ntools = ["mine"]\n[tools]\ndisabled = ["terminal"]\n')
    async with open_gateway(load_config({}, home=tmp_path), assembly(), in_memory=True) as gateway:
        assert "terminal" in [tool.spec.name for tool in gateway.toolbox.tools.own()]


def test_an_installed_plugin_that_nobody_asked_for_is_not_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Being installed runs no code."""
    for group in (TOOLS, PROVIDERS):
        name = group.rpartition(".")[2]
        install(tmp_path, monkeypatch, group, name, "raise SystemExit('it was loaded')")
    assert build_routes({}).names == ("demo",)
    assert build_assembly({}, environment={}, host=None).platforms.names == ()
    assert load_tools([], Tool) == []


def test_a_provider_gets_its_route(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A route whose provider a package brings is built by it; one of an unknown provider lists what there is."""
    install_example("parrot", tmp_path, monkeypatch, PROVIDERS)
    routes = build_routes({"default": "bird", "routes": {"bird": {"provider": "parrot", "prefix": "Polly: "}}})
    assert routes.get().name == "bird"
    with pytest.raises(InvalidRoute, match="accepted are openai, anthropic and demo, parrot"):
        build_routes({"routes": {"bird": {"provider": "budgie"}}})


def test_a_provider_that_makes_something_else_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a builder returns is checked, and what it raises is told."""
    install(tmp_path, monkeypatch, PROVIDERS, "odd", "def thing(*given):\n    return given")
    with pytest.raises(PluginProblem, match="made a tuple; it must make a Model"):
        build_routes({"routes": {"x": {"provider": "odd"}}})
    install(tmp_path, monkeypatch, PROVIDERS, "mad", "def thing(*given):\n    raise ValueError('no')")
    with pytest.raises(PluginProblem, match="failed: ValueError: no"):
        build_routes({"routes": {"x": {"provider": "mad"}}})


async def test_a_gateway_with_all_three(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The configuration names them, and the gateway has them: the tool, the adapter and the model."""
    packages, home = tmp_path / "packages", tmp_path / "home"
    packages.mkdir()
    home.mkdir()
    (home / "mail" / "in").mkdir(parents=True)
    for name, group in (("dice", TOOLS), ("parrot", PROVIDERS), ("mailbox", "hermes_trio.adapters")):
        install_example(name, packages, monkeypatch, group)
    (home / "config.toml").write_text(
        f"""
        [plugins]
        tools = ["dice"]
        [plugins.adapters.mailbox]
        folder = "{home}/mail"
        allow_all = true
        [models]
        default = "bird"
        [models.routes.bird]
        provider = "parrot"
        prefix = "Polly: "
        """
    )
    config = load_config({}, home=home)
    tables: dict[str, Any] = {"plugins": config.plugins.adapters}
    assembly = build_assembly(tables, environment={}, host=None)
    async with open_gateway(config, assembly, in_memory=True) as gateway:
        outcome = await gateway.runtime.run_turn("hello")
        assert outcome.text == "Polly: hello"
        assert gateway.adapters.hub.health()["platforms"].keys() == {"mailbox"}
        names: list[str] = []

        async def look(turn: Any) -> str:
            names.extend(gateway.toolbox.for_turn(turn))
            return await gateway.toolbox.for_turn(turn)["roll"].call(turn, '{"count": 3}')

        assert '"sum"' in (await gateway.runtime.run_turn("roll", agent=look)).text
        assert "terminal" in names
