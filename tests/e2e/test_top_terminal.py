"""`hermes-trio top`, `tree` and `console` beside a real server: at a pseudo-terminal, and in a pipe."""

from __future__ import annotations

import json
from pathlib import Path

import httpx2

from .pseudo_terminal import at_terminal, piped
from .server_process import KEY, server_process


def test_the_tree_in_a_terminal(tmp_path: Path) -> None:
    """It finds the server beside its lock, shows what runs, filters, stops with a receipt, shows that it is gone, and leaves the terminal as it was."""
    (tmp_path / "api_server.key").write_text(KEY)  # the commands have no other way to the server's key here
    with (
        server_process(tmp_path) as server,
        httpx2.Client(base_url=server.url, headers=server.headers, trust_env=False) as http,
    ):
        http.post("/v1/runs", json={"input": "!run sleep 333"}).raise_for_status()
        with at_terminal(["top"], tmp_path) as terminal:
            terminal.expect(r"hermes-trio top(.|\n)*sleep 333(.|\n)*q leave")
            terminal.type("/")
            terminal.enter("fg_")
            terminal.expect("filter fg_")
            terminal.type("j")
            terminal.type("x")
            terminal.expect("Press x again to stop tool")
            terminal.type("x")
            shown = terminal.expect("Stopped · 2 nodes · empty")
            assert "SIGTERM" in shown or "cancelled" in shown
            terminal.type("q")
            assert terminal.wait() == 0
        found = piped(["tree", "--json"], tmp_path)
        assert json.loads(found.stdout)["tree"]["kind"] == "runtime"
        printed = piped(["tree"], tmp_path).stdout
        assert printed.startswith("runtime · age")
        assert "receiver http" in printed
        link = piped(["console"], tmp_path).stdout.strip()
        assert link.startswith(f"{server.url}/#/sign-in/")
        code = link.rpartition("/")[2]
        answer = http.post("/v1/console/session", json={"code": code}, headers={"Origin": server.url})
        assert answer.json()["name"] == "admin"
    gone = piped(["tree"], tmp_path)
    assert gone.returncode == 1
    assert "start one with `hermes-trio serve`" in gone.stderr
