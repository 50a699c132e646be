"""What a live page costs: 10,000 nodes that change 1,000 times a second, one viewer in a real browser.

Prints the frames a second of the page (standing, scrolling, searching), and the CPU of the server: without a viewer, with one, and with one while
nothing changes.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import trio

NODES = 10_000
CHANGES = 1_000
SECONDS = 8.0
KEY = "bench-admin-key-0123456789"

FRAMES = """(seconds) => new Promise((done) => {
  let frames = 0;
  const began = performance.now();
  const frame = () => {
    frames += 1;
    if (performance.now() - began > 1000 * seconds) done(frames / ((performance.now() - began) / 1000));
    else requestAnimationFrame(frame);
  };
  requestAnimationFrame(frame);
})"""

SCROLL = """() => {
  const list = document.querySelector(".list");
  let down = true;
  globalThis.scrolling = setInterval(() => {
    if (list.scrollTop + list.clientHeight >= list.scrollHeight - 10) down = false;
    if (list.scrollTop <= 0) down = true;
    list.scrollBy(0, down ? 40 : -40);
  }, 16);
}"""


async def serve(home: Path) -> None:
    """The server with a crowded tree: `idle` and `busy` on standard input switch the changes."""
    from hermes_trio.config import load_config
    from hermes_trio.gateway.serving import open_server, settle_heap
    from hermes_trio.http.auth import AdminKey
    from hermes_trio.runtime.tree import Node

    config = load_config({}, home=home, server={"port": 0})
    async with open_server(config, AdminKey(KEY)) as serving:
        turns = serving.gateway.runtime.core.turns_node
        tools: list[Node] = []
        for number in range(NODES // 13 + 1):
            owner = f"agent:main:telegram:dm:{number}"
            turn = turns.open("lane", owner, owner=owner).open("turn", f"turn_{number:08x}", name="Port the parser")
            for step in range(6):
                tool = turn.open("tool", f"call_{number}_{step}", name="terminal")
                tool.open("process", f"fg_{number}_{step}", name="cargo test --workspace")
                tools.append(tool)
        settle_heap()
        print(serving.addresses[0], serving.gateway.runtime.tree.size, flush=True)
        busy = True

        async def change() -> None:
            at = 0
            while True:
                if busy:
                    for _ in range(CHANGES // 50):
                        at += 1
                        tool = tools[at * 7919 % len(tools)]
                        if at % 33 == 0:
                            for child in list(tool.children or ()):
                                child.close()
                            tool.open("process", f"fg_{at}", name="cargo test --workspace")
                        else:
                            tool.waits = [f"process {at}"]
                await trio.sleep(0.02)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(change)
            async for line in trio.lowlevel.FdStream(os.dup(0)):
                if b"end" in line:
                    break
                busy = b"busy" in line
            nursery.cancel_scope.cancel()


def cpu_of(pid: int, seconds: float) -> float:
    """The share of a core that a process uses."""

    def ticks() -> int:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return int(fields[11]) + int(fields[12])

    before, began = ticks(), time.monotonic()
    time.sleep(seconds)
    return (ticks() - before) / os.sysconf("SC_CLK_TCK") / (time.monotonic() - began)


def main() -> None:
    """Measure and print."""
    from playwright.sync_api import sync_playwright

    from tests.console.browser import find_chromium

    with tempfile.TemporaryDirectory() as home:
        server = subprocess.Popen(
            [sys.executable, "-m", "bench.console", "serve", home],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert server.stdin is not None
        assert server.stdout is not None
        try:
            url, nodes = server.stdout.readline().split()
            print(f"{nodes} nodes, {CHANGES} changes a second, {os.cpu_count()} cores for the server and the browser")
            alone = cpu_of(server.pid, SECONDS)
            with sync_playwright() as playwright:
                browser = playwright.chromium.launch(executable_path=find_chromium(), args=["--no-sandbox"])
                page = browser.new_page(viewport={"width": 1440, "height": 900})
                page.goto(url)
                page.get_by_role("textbox", name="API key").fill(KEY)
                page.keyboard.press("Enter")
                page.get_by_role("treegrid").wait_for()
                page.wait_for_timeout(2000)
                watched = cpu_of(server.pid, SECONDS)
                print(f"rows in the document: {page.locator('.row').count()}")
                print(f"frames a second, standing: {page.evaluate(FRAMES, SECONDS):.1f}")
                page.evaluate(SCROLL)
                print(f"frames a second, scrolling: {page.evaluate(FRAMES, SECONDS):.1f}")
                page.evaluate("clearInterval(globalThis.scrolling)")
                page.get_by_label("Search the tree").fill("fg_9")
                print(f"frames a second, searching: {page.evaluate(FRAMES, SECONDS):.1f}")
                server.stdin.write("idle\n")
                server.stdin.flush()
                page.wait_for_timeout(2000)
                idle = cpu_of(server.pid, SECONDS)
                browser.close()
            still = cpu_of(server.pid, SECONDS)
            print(f"CPU of the server for one viewer: {100 * (watched - alone):.1f} % of a core")
            print(f"  changes alone {100 * alone:.1f} %, with a viewer {100 * watched:.1f} %")
            print(
                f"CPU for an idle viewer: {100 * (idle - still):.1f} % (with {100 * idle:.1f} %, without {100 * still:.1f} %)"
            )
            server.stdin.write("end\n")
            server.stdin.flush()
            server.wait(20)
        finally:
            if server.poll() is None:
                server.kill()
            server.wait()


if __name__ == "__main__":
    if sys.argv[1:2] == ["serve"]:
        trio.run(serve, Path(sys.argv[2]))
    else:
        main()
