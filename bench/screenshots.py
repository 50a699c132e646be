"""The pictures in docs/images, from a scripted scene: turns, a delegation, processes that wait, an approval, a chat with work that came back."""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx2

from bench.scene import DONE, RUNS, open_model, prepare

IMAGES = Path(__file__).parents[1] / "docs" / "images"
CHAT = "/v1/web/conversations"
VIEWS = (
    ("tree-light", "tree", "light", (1440, 900)),
    ("timeline", "timeline", "light", (1440, 900)),
    ("approvals", "approvals", "light", (1440, 900)),
    ("chat", "chat/kernel", "light", (1440, 900)),
    ("health", "health", "dark", (1440, 900)),
    ("phone", "tree", "light", (390, 844)),
    ("tree-dark", "tree", "dark", (1440, 900)),
)


def say(http: httpx2.Client, conversation: str, text: str) -> None:
    """Send a message in a conversation of the web chat."""
    http.post(f"{CHAT}/{conversation}/messages", json={"text": text}).raise_for_status()


def until(http: httpx2.Client, conversation: str, answers: int) -> None:
    """Wait until a conversation has this many text answers."""
    while True:
        data = http.get(f"{CHAT}/{conversation}/messages").json()["data"]
        if sum(one["role"] == "assistant" and bool(one["text"]) for one in data) >= answers:
            return
        time.sleep(0.2)


def play(http: httpx2.Client) -> str:
    """Start everything that the pictures show: runs, a delegation, processes that wait, approvals, a chat with work that came back.

    Returns the id of a run that has ended.
    """
    done = str(http.post("/v1/runs", json={"input": DONE}).raise_for_status().json()["run_id"])
    say(http, "kernel", "Build the kernel, and tell me when it is done")
    say(http, "staging", "Watch staging over the night")
    say(http, "handbook", "Check every link of the handbook")
    for text in RUNS:
        http.post("/v1/runs", json={"input": text}).raise_for_status()
    until(http, "kernel", 2)
    until(http, "staging", 1)
    until(http, "handbook", 1)
    say(http, "kernel", "What changed in the scheduler since 6.12?")
    say(http, "staging", "Remove the releases that nobody uses")
    http.get(f"/v1/runs/{done}?wait=ended&timeout=60").raise_for_status()
    return done


def calm(http: httpx2.Client) -> None:
    """A busy machine holds the loop up for a moment; the tree says so for a minute, and the pictures are not about that."""
    for _ in range(90):
        if "blocked" not in http.get("/v1/tree").json()["tree"]["note"]:
            return
        time.sleep(1)


def picture(
    browser: Any, http: httpx2.Client, url: str, name: str, view: str, theme: str, size: tuple[int, int]
) -> None:
    """One picture of one view."""
    calm(http)
    context = browser.new_context(viewport={"width": size[0], "height": size[1]}, color_scheme=theme)
    page = context.new_page()
    page.goto(url + http.post("/v1/console/code").json()["path"])
    page.get_by_role("treegrid").wait_for()
    page.goto(f"{url}/#/{view}")
    page.wait_for_timeout(9000 if view == "health" else 2500)
    if name == "tree-light":
        page.locator(".row:not([hidden])", has_text="Compare the three price lists").first.click()
        page.wait_for_timeout(600)
    if name == "tree-dark":
        # The last picture: it stops something, and shows the receipt.
        page.locator(".row:not([hidden])", has_text="Why is the nightly build red?").first.click()
        page.keyboard.press("x")
        page.keyboard.press("x")
        page.get_by_role("log", name="Receipt of the stop").get_by_text("Stopped").wait_for()
        page.wait_for_timeout(1600)
    page.screenshot(path=str(IMAGES / f"{name}.png"))
    context.close()
    print(IMAGES / f"{name}.png")


def main() -> None:
    """Make all of them."""
    from tests.console.browser import open_browser
    from tests.e2e.server_process import server_process

    IMAGES.mkdir(parents=True, exist_ok=True)
    only = set(sys.argv[1:])
    with tempfile.TemporaryDirectory() as folder, open_model() as model:
        prepare(Path(folder), model)
        with (
            server_process(Path(folder) / "home") as server,
            httpx2.Client(base_url=server.url, headers=server.headers, trust_env=False, timeout=60) as http,
            open_browser() as browser,
        ):
            done = play(http)
            for name, view, theme, size in VIEWS:
                if not only or name in only:
                    place = f"timeline/{done}" if view == "timeline" else view
                    picture(browser, http, server.url, name, place, theme, size)


if __name__ == "__main__":
    main()
