"""The pictures in docs/images, from a scripted scene: turns, a delegation, processes that wait, an approval, a chat with work that came back."""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx2

IMAGES = Path(__file__).parents[1] / "docs" / "images"
SCENE = (
    "!run make -C services/api test -j8; sleep 600",
    "!delegate read the three price lists\n!run sleep 500",
    "!bg make -C linux bzImage -j16; sleep 900\n!run pytest -q tests/parser; sleep 400",
    "!run rm -rf ./build && ./configure",
    "!sleep 300",
)
VIEWS = (
    ("tree-light", "tree", "light", (1440, 900)),
    ("tree-dark", "tree", "dark", (1440, 900)),
    ("timeline", "timeline", "light", (1440, 900)),
    ("approvals", "approvals", "light", (1440, 900)),
    ("chat", "chat/kernel", "light", (1440, 900)),
    ("health", "health", "dark", (1440, 900)),
    ("phone", "tree", "light", (390, 844)),
)


def play(http: httpx2.Client) -> None:
    """Start everything that the pictures show."""
    for text in SCENE:
        http.post("/v1/runs", json={"input": text}).raise_for_status()
    chat = "/v1/web/conversations/kernel/messages"
    http.post(chat, json={"text": "!bg sleep 3; echo 'arch/x86/boot/bzImage is ready'"}).raise_for_status()
    time.sleep(5)
    http.post(chat, json={"text": "Thank you. What changed in the scheduler?"}).raise_for_status()
    # A start may hold the loop up for a moment; the tree says so for a minute, and the pictures are not about that.
    while "blocked" in http.get("/v1/tree").json()["tree"]["note"]:
        time.sleep(1)


def picture(
    browser: Any, http: httpx2.Client, url: str, name: str, view: str, theme: str, size: tuple[int, int]
) -> None:
    """One picture of one view."""
    context = browser.new_context(viewport={"width": size[0], "height": size[1]}, color_scheme=theme)
    page = context.new_page()
    page.goto(url + http.post("/v1/console/code").json()["path"])
    page.get_by_role("treegrid").wait_for()
    page.goto(f"{url}/#/{view}")
    page.wait_for_timeout(9000 if view == "health" else 2500)
    if name == "tree-light":
        page.locator(".row:not([hidden])", has_text="make -C services/api").first.click()
        page.wait_for_timeout(600)
    page.screenshot(path=str(IMAGES / f"{name}.png"))
    context.close()
    print(IMAGES / f"{name}.png")


def main() -> None:
    """Make all of them."""
    from tests.console.browser import open_browser
    from tests.e2e.server_process import server_process

    IMAGES.mkdir(parents=True, exist_ok=True)
    only = set(sys.argv[1:])
    with tempfile.TemporaryDirectory() as home:
        (Path(home) / "config.toml").write_text("[approvals]\ntimeout = 600\n")
        with (
            server_process(Path(home)) as server,
            httpx2.Client(base_url=server.url, headers=server.headers, trust_env=False, timeout=60) as http,
            open_browser() as browser,
        ):
            play(http)
            for name, view, theme, size in VIEWS:
                if not only or name in only:
                    picture(browser, http, server.url, name, view, theme, size)


if __name__ == "__main__":
    main()
