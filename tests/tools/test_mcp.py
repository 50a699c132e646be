"""MCP servers over both transports, alive, slow, dying and dead."""

from __future__ import annotations

import re
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import trio

from hermes_trio import SessionContext
from hermes_trio.base.settings import SettingsError
from hermes_trio.tools.mcp import LinkState, McpSettings, open_links
from hermes_trio.tools.mcp import link as link_module
from hermes_trio.tools.mcp.stdio import StdioServer
from hermes_trio.tools.warden import Profile, Sandbox, SandboxPaths, probe_protections

from .bench_of_tools import Bench, call, gone, open_bench, until

SERVER = str(Path(__file__).with_name("mcp_server.py"))


def stdio(**more: Any) -> McpSettings:
    """Settings with one stdio server, named `sample`."""
    server = {"command": sys.executable, "args": [SERVER, "stdio"], **more}
    return McpSettings.read({"servers": {"sample": server}, "startup_seconds": 20}, {"TOKEN": "sesame-open-wide"})


@asynccontextmanager
async def http_server(port: int = 0) -> AsyncIterator[tuple[int, trio.Process]]:
    """The sample server on a free loopback port, in a process of its own."""
    if not port:
        with trio.socket.socket() as probe:
            await probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
    async with trio.open_nursery() as nursery:
        command = [sys.executable, SERVER, "http", str(port)]
        run = partial(trio.run_process, command, capture_stderr=True, check=False)
        process: trio.Process = await nursery.start(run)
        with trio.fail_after(20):
            while True:
                try:
                    stream = await trio.open_tcp_stream("127.0.0.1", port)
                except OSError:
                    await trio.sleep(0.05)
                else:
                    await stream.aclose()
                    break
        yield port, process
        process.kill()


def over_http(port: int, **more: Any) -> McpSettings:
    return McpSettings.read(
        {"servers": {"web": {"url": f"http://127.0.0.1:{port}/mcp", **more}}, "startup_seconds": 20}, {}
    )


async def use(bench: Bench, tool: str, **arguments: Any) -> dict[str, Any]:
    return await bench.use(tool, arguments)


async def test_tools_of_a_stdio_server() -> None:
    """A server's tools have namespaced names and its own schemas; results, structured ones too, and failures come back as data."""
    async with open_bench(mcp=stdio()) as bench:
        names = {tool.spec.name: tool.spec for link in bench.box.links.links.values() for tool in link.tools}
        assert {"mcp_sample_add", "mcp_sample_fail", "mcp_sample_odd_name_with_marks"} <= names.keys()
        assert names["mcp_sample_add"].parameters["required"] == ["a", "b"]
        assert all(re.fullmatch(r"[A-Za-z0-9_-]{1,64}", name) for name in names)
        sum_ = await use(bench, "mcp_sample_add", a=2, b=3)
        assert (sum_["result"], sum_["structured_content"]) == ("5", {"result": 5})
        assert "too late" in (await use(bench, "mcp_sample_fail", reason="too late"))["error"]
        assert "error" in await use(bench, "mcp_sample_add", a="no number")
        assert (await use(bench, "mcp_sample_odd_name_with_marks"))["result"] == "odd"


async def test_a_stdio_server_gets_its_own_environment_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server sees what its table gives it, filled from variables, and none of the gateway's secrets."""
    monkeypatch.setenv("OPENAI_API_KEY", "sk-of-the-gateway")
    async with open_bench(mcp=stdio(env={"GIVEN": "${TOKEN}"})) as bench:
        assert (await use(bench, "mcp_sample_environment", name="OPENAI_API_KEY"))["result"] == "(unset)"
        assert (await use(bench, "mcp_sample_environment", name="GIVEN"))["result"] == "sesame-open-wide"


async def test_the_list_of_tools_follows_the_server() -> None:
    """A tool that a server adds while it runs is there after its notification."""
    async with open_bench(mcp=stdio()) as bench:
        await use(bench, "mcp_sample_grow")
        await until(
            lambda: (
                "mcp_sample_grown" in {tool.spec.name for link in bench.box.links.links.values() for tool in link.tools}
            )
        )
        assert (await use(bench, "mcp_sample_grown"))["result"] == "grown"


async def test_a_server_that_dies_is_an_error_and_comes_back() -> None:
    """A server that dies during a call gives an error result at once; its process is replaced, and it works again."""
    async with open_bench(mcp=stdio()) as bench:
        link = bench.box.links.links["sample"]
        first = bench.box.warden.processes[0].pid
        with trio.fail_after(20):
            assert "broke" in (await use(bench, "mcp_sample_die"))["error"]
        await until(lambda: link.connections == 2 and link.state is LinkState.READY, 20)
        assert gone(first)
        assert (await use(bench, "mcp_sample_add", a=1, b=1))["result"] == "2"


@pytest.mark.parametrize("transport", ["stdio", "http"])
async def test_an_error_of_one_call_is_told_to_its_caller_alone(transport: str) -> None:
    """Whatever its code, also that of a closed connection: the link stays, and the next caller hears nothing of it."""
    async with AsyncExitStack() as stack:
        settings, name = stdio(), "sample"
        if transport == "http":
            port, _ = await stack.enter_async_context(http_server())
            settings, name = over_http(port), "web"
        bench = await stack.enter_async_context(open_bench(mcp=settings))
        link = bench.box.links.links[name]
        for code in (-32000, -32602):
            refused = await use(bench, f"mcp_{name}_refuse", reason="the word is swordfish", code=code)
            assert "swordfish" in refused["error"]
            assert (await use(bench, f"mcp_{name}_add", a=1, b=1)).get("result") == "2"
        assert (link.connections, link.problem) == (1, "")


MISMATCH = """
import json, sys
schema = {"type": "object", "properties": {"n": {"type": "integer"}}}
tool = {"name": "count", "inputSchema": {"type": "object"}, "outputSchema": schema}
for line in sys.stdin:
    asked = json.loads(line)
    match asked["method"]:
        case "initialize":
            version = asked["params"]["protocolVersion"]
            result = {"protocolVersion": version, "capabilities": {"tools": {}}, "serverInfo": {"name": "x", "version": "1"}}
        case "tools/list":
            result = {"tools": [tool]}
        case "tools/call":
            result = {"content": [], "structuredContent": {"n": asked["params"]["arguments"]["n"]}}
        case _:
            result = {}
    if "id" in asked:
        print(json.dumps({"jsonrpc": "2.0", "id": asked["id"], "result": result}), flush=True)
"""


async def test_a_result_that_does_not_match_its_schema_is_told_to_its_caller_alone() -> None:
    """It is an error of the call; the link stays."""
    async with open_bench(mcp=stdio(args=["-c", MISMATCH])) as bench:
        link = bench.box.links.links["sample"]
        assert "swordfish" in (await use(bench, "mcp_sample_count", n="swordfish"))["error"]
        assert (await use(bench, "mcp_sample_count", n=3))["structured_content"] == {"n": 3}
        assert (link.connections, link.problem) == (1, "")


async def test_the_last_output_of_a_server_is_told_to_no_other_caller() -> None:
    """It may quote a call. Operators see it, callers that come later are told that the connection was lost."""
    async with open_bench(mcp=stdio()) as bench:
        link = bench.box.links.links["sample"]
        await use(bench, "mcp_sample_die")
        await until(lambda: link.state is LinkState.BROKEN)
        assert "I am going down" in link.problem
        error = (await use(bench, "mcp_sample_add", a=1, b=1))["error"]
        assert "the connection was lost" in error
        assert "I am going down" not in error


async def test_lost_and_recovered_is_logged_and_shown_by_name(caplog: pytest.LogCaptureFixture) -> None:
    """Connected, lost and back are log lines with the server's name, and the tree and the health report say the same."""
    caplog.set_level("INFO", logger="hermes_trio.tools.mcp")
    async with open_bench(mcp=stdio()) as bench:
        link = bench.box.links.links["sample"]
        notes = [node.note for node in bench.runtime.tree.root.walk() if node.id == "mcp_sample"]
        assert notes == [f"ready, {len(link.tools)} tools"]
        assert bench.box.links.health()["sample"]["state"] == "ready"
        await use(bench, "mcp_sample_die")
        await until(lambda: link.state is LinkState.BROKEN)
        assert bench.box.links.health()["sample"]["error"]
        assert "lost: " in next(node.note for node in bench.runtime.tree.root.walk() if node.id == "mcp_sample")
        await until(lambda: link.state is LinkState.READY, 20)
    said = [record.message for record in caplog.records]
    assert [line.split(":")[0].split(",")[0].split(" after")[0] for line in said] == [
        "connected to MCP server sample",
        "MCP server sample was lost",
        "reconnected to MCP server sample",
    ]


async def test_a_call_to_a_dead_server_is_answered_at_once(tmp_path: Path) -> None:
    """While a server is down its tools answer with what is wrong, its last words included; nothing waits."""
    flag = tmp_path / "down"
    program = f"import os, sys, runpy\nif os.path.exists({str(flag)!r}):\n    sys.exit('I will not start')\n"
    program += f"sys.argv = ['x', 'stdio']\nrunpy.run_path({SERVER!r}, run_name='__main__')"
    async with open_bench(mcp=stdio(args=["-c", program])) as bench:
        flag.touch()
        link = bench.box.links.links["sample"]
        await use(bench, "mcp_sample_die")
        await until(lambda: "I will not start" in link.problem, 20)
        with trio.fail_after(5):
            answer = await use(bench, "mcp_sample_add", a=1, b=1)
        assert "cannot be reached" in answer["error"]
        assert "I will not start" in answer["error"]


async def test_a_slow_call_ends_at_its_time_limit() -> None:
    """A call that takes longer than the server's limit is an error, and the link goes on working."""
    async with open_bench(mcp=stdio(timeout=1)) as bench:
        assert "did not answer within 1 s" in (await use(bench, "mcp_sample_hang", seconds=60))["error"]
        assert (await use(bench, "mcp_sample_add", a=1, b=2))["result"] == "3"


async def test_stopping_a_turn_abandons_its_call() -> None:
    """A turn that waits for an MCP server says so in the tree, and ends at once when it is stopped."""
    async with open_bench(mcp=stdio()) as bench:

        async def body(turn: Any) -> None:
            await call(bench.box, turn, "mcp_sample_hang", {"seconds": 60})

        async with trio.open_nursery() as nursery:
            nursery.start_soon(bench.in_turn, body)
            await until(lambda: any("mcp sample" in node.waits_on for node in bench.runtime.tree.root.walk()))
            (turn,) = bench.runtime.core.live_turns.values()
            receipt = await turn.stop()
            assert receipt.ok
        assert (await use(bench, "mcp_sample_add", a=1, b=2))["result"] == "3"


async def test_the_processes_end_with_the_runtime() -> None:
    """A server's process is gone when the runtime has closed."""
    async with open_bench(mcp=stdio()) as bench:
        pids = [process.pid for process in bench.box.warden.processes]
        assert len(pids) == 1
    assert all(gone(pid) for pid in pids)


async def test_closing_while_a_connection_fails_raises_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection that fails in the very moment in which its links are closed is a problem of the link; the close raises nothing."""
    started: list[StdioServer] = []

    class Recorded(StdioServer):
        def __init__(self, *arguments: Any, **more: Any) -> None:
            super().__init__(*arguments, **more)
            started.append(self)

    monkeypatch.setattr(link_module, "StdioServer", Recorded)
    async with open_bench() as bench:
        async with open_links(stdio(), bench.box.warden, {"HOME": "/"}, bench.box.confinement.sandbox) as links:
            assert links.links["sample"].state is LinkState.READY
            started[0].ended.set()  # the owner's task raises in the same step in which its siblings are cancelled
        assert links.links["sample"].state is LinkState.CLOSED


@pytest.mark.parametrize(
    ("profile", "sees"), [pytest.param("off", True, marks=pytest.mark.slow), ("protect", False), ("workspace", False)]
)
async def test_a_server_has_a_profile_of_its_own(tmp_path: Path, profile: str, sees: bool) -> None:
    """With `protect` it cannot see the gateway's home; with `workspace` it writes below its own folder only, and reads nothing of the account."""
    offered = await probe_protections()
    if not (offered.mount and offered.landlock):
        pytest.skip(f"this machine does not offer full confinement: {offered.missing}")
    home, work, other = (tmp_path / name for name in ("home", "work", "other"))
    for folder in (home, work, other):
        folder.mkdir()
        (folder / "secret").write_text("of the gateway")
    # The server's own program lies in the account: a workspace has to be told about it.
    paths = SandboxPaths(home=str(home), readable=(str(Path(SERVER).parents[2]), sys.prefix, sys.base_prefix))
    sandbox = Sandbox(paths, environment={}, protections=offered)
    settings = stdio(profile=profile, cwd=str(work))
    async with (
        open_bench() as bench,
        open_links(settings, bench.box.warden, {"HOME": str(tmp_path)}, sandbox) as links,
    ):
        link = links.links["sample"]
        assert link.state is LinkState.READY, link.problem
        assert ("of the gateway" in await link.call("read", {"path": str(home / "secret")})) is sees
        assert ("refused" in await link.call("write", {"path": str(other / "new")})) is (profile == "workspace")
        assert "written" in await link.call("write", {"path": str(work / "new")})


async def test_a_tenant_in_a_workspace_uses_only_the_servers_that_are_named_for_it() -> None:
    """A server acts with its own profile, so that it would be a way out: by default it is only for those who are not confined to a workspace."""
    async with open_bench(mcp=stdio(allowed=["acme", "telegram"])) as bench:
        for tenant, platform, profile, offered in (
            ("", "api_server", Profile.PROTECT, True),
            ("other", "api_server", Profile.PROTECT, True),
            ("acme", "api_server", Profile.WORKSPACE, True),
            ("other", "api_server", Profile.WORKSPACE, False),
            ("other", "api_server", Profile.OFFLINE, False),
            ("", "telegram", Profile.WORKSPACE, True),
        ):
            turn: Any = SimpleNamespace(spec=SimpleNamespace(tenant=tenant), context=SessionContext(platform=platform))
            assert bool(list(bench.box.links.tools(turn, profile))) is offered, (tenant, platform, profile)


async def test_a_command_that_does_not_exist_does_not_hold_up_the_start() -> None:
    """A server that cannot be started is a problem of its link, with the reason, and of nothing else."""
    settings = stdio(command="/no/such/program")
    async with open_bench(mcp=settings) as bench:
        link = bench.box.links.links["sample"]
        assert link.state is LinkState.BROKEN
        assert "/no/such/program" in link.problem
        assert (await bench.run("echo fine"))["output"] == "fine"


async def test_tools_of_a_streamable_http_server() -> None:
    """The same over HTTP."""
    async with http_server() as (port, _), open_bench(mcp=over_http(port)) as bench:
        assert (await use(bench, "mcp_web_add", a=20, b=22))["result"] == "42"
        assert "nope" in (await use(bench, "mcp_web_fail", reason="nope"))["error"]


async def test_an_http_server_that_goes_away_and_comes_back() -> None:
    """An HTTP server that dies is an error result; when it is back the link finds it by itself."""
    async with http_server() as (port, process), open_bench(mcp=over_http(port, timeout=10)) as bench:
        assert (await use(bench, "mcp_web_add", a=1, b=1))["result"] == "2"
        process.kill()
        await process.wait()
        with trio.fail_after(15):
            assert (await use(bench, "mcp_web_add", a=1, b=1))["error"]
        async with http_server(port):
            link = bench.box.links.links["web"]
            await until(lambda: link.connections >= 2 and link.state is LinkState.READY, 30)
            assert (await use(bench, "mcp_web_add", a=2, b=2))["result"] == "4"


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ({"servers": {"a": {}}}, "mcp.servers.a: give either a command or a url"),
        ({"servers": {"a": {"command": "x", "url": "http://x"}}}, "give either a command or a url"),
        ({"servers": {"a b": {"command": "x"}}}, "a name has 1 to 32 letters"),
        ({"servers": {"a": {"url": "ftp://x"}}}, "must start with http"),
        ({"servers": {"a": {"comand": "x"}}}, "did you mean command?"),
        ({"servers": {"a": {"command": "x", "env": {"K": "${MISSING}"}}}}, "variable MISSING, which is not set"),
        ({"server": {}}, "mcp.server is not a setting (did you mean servers?)"),
    ],
)
def test_mistakes_in_the_settings_are_named(table: dict[str, Any], words: str) -> None:
    """A mistake in `[mcp]` says which key it is about and what would be right."""
    with pytest.raises(SettingsError) as caught:
        McpSettings.read(table, {})
    assert words in str(caught.value)
