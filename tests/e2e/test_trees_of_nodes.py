"""The trees of two servers on one PostgreSQL database, at a terminal and in a browser of one of them: shown, followed and stopped."""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest

from tests.console.browser import link, needs_chromium, open_browser, row, visitor

from .pseudo_terminal import at_terminal, piped
from .server_process import KEY, ServerProcess, server_process

pytestmark = pytest.mark.slow

COMMAND = "sleep 333"


@pytest.fixture
def servers(tmp_path: Path, postgres_url: str) -> Iterator[tuple[ServerProcess, ServerProcess]]:
    """Two servers, each with a home of its own; the second one runs a command."""
    environment = {"HERMES_STORE_URL": postgres_url}
    homes = [tmp_path / name for name in ("one", "two")]
    for home in homes:
        home.mkdir()
        (home / "api_server.key").write_text(KEY)
        (home / "config.toml").write_text(f'[store]\nlease_seconds = 6\nnode_name = "{home.name}"\n')
    with (
        server_process(homes[0], environment=environment) as one,
        server_process(homes[1], environment=environment) as two,
    ):
        with client(two) as http:
            http.post("/v1/runs", json={"input": f"!run {COMMAND}"}).raise_for_status()
        yield one, two


def client(server: ServerProcess) -> httpx2.Client:
    """A client with the admin key."""
    return httpx2.Client(base_url=server.url, headers=server.headers, trust_env=False, timeout=30)


def test_the_trees_of_all_nodes_in_a_terminal(tmp_path: Path, servers: tuple[ServerProcess, ServerProcess]) -> None:
    """`tree` prints both and names a node that does not answer; `top` shows the other one, and stops its work with a receipt."""
    home = tmp_path / "one"
    with at_terminal(["top"], home) as terminal:
        terminal.expect(r"▸ one · (.|\n)*two · (.|\n)*n next node")
        terminal.type("n")
        terminal.expect(rf"▸ two · (.|\n)*{COMMAND}")
        terminal.type("/")
        terminal.enter("fg_")
        terminal.expect("filter fg_")
        terminal.type("j")
        terminal.type("x")
        terminal.expect("Press x again to stop tool")
        terminal.type("x")
        terminal.expect("Stopped · 2 nodes · empty")
        terminal.type("q")
        assert terminal.wait() == 0
    printed = piped(["tree"], home).stdout
    assert re.search(r"^runtime · age(.|\n)*^node two [0-9a-f]{8}$\n^runtime · age", printed, re.MULTILINE)
    assert piped(["tree", "--node", "two"], home).stdout.startswith("runtime · age")
    servers[1].signal(signal.SIGSTOP)
    try:
        silent = piped(["tree"], home).stdout
        assert re.search(r"^node two [0-9a-f]{8} · ! does not answer$", silent, re.MULTILINE)
    finally:
        servers[1].signal(signal.SIGCONT)


@needs_chromium()
def test_the_trees_of_all_nodes_in_a_browser(servers: tuple[ServerProcess, ServerProcess]) -> None:
    """The list of nodes leads to the tree of each; a stop there gives its receipt; when the node that is shown dies, another one is shown."""
    one, two = servers
    with client(one) as http, open_browser() as browser, visitor(browser, one.url) as person:
        person.allowed += ["404", "503", "ERR_INCOMPLETE_CHUNKED_ENCODING"]  # the node that is killed at the end
        page = person.open(link(http))
        nodes = page.locator(".cluster button")
        nodes.filter(has_text="two").wait_for()
        assert nodes.filter(has_text="one").get_attribute("aria-current") == "true"
        assert row(page, COMMAND).count() == 0
        nodes.filter(has_text="two").click()
        row(page, COMMAND).wait_for()
        assert nodes.filter(has_text="two").get_attribute("aria-current") == "true"
        row(page, COMMAND).click()
        page.keyboard.press("x")
        page.keyboard.press("x")
        page.locator(".receipt.ok").wait_for()
        with client(two) as other:
            deadline = time.monotonic() + 15
            while COMMAND in other.get("/v1/tree").text and time.monotonic() < deadline:
                page.wait_for_timeout(100)
            assert COMMAND not in other.get("/v1/tree").text
        two.kill()
        page.get_by_text("The node that was shown is gone.").wait_for(timeout=30_000)
        row(page, "runtime").wait_for()
