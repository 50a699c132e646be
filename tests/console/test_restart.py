"""A server that is killed under open pages: what they show afterwards is compared with the rows, by number."""

from __future__ import annotations

import re
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx2
import msgspec
import pytest

from tests.e2e.server_process import ServerProcess, server_process

from .browser import link, needs_chromium, visitor

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

pytestmark = [needs_chromium(), pytest.mark.slow]

COMMAND = (sys.executable, "-m", "hermes_trio", "serve", "--port")
STEPS = 40


@contextmanager
def client(server: ServerProcess) -> Iterator[httpx2.Client]:
    """A client with the admin key."""
    with httpx2.Client(base_url=server.url, headers=server.headers, trust_env=False, timeout=30) as http:
        yield http


def stored_events(http: httpx2.Client, run: str) -> list[str]:
    """The ids of all events of a run that has ended."""
    text = http.get(f"/v1/runs/{run}/events", timeout=30).text
    blocks = [block for block in text.split("\n\n") if "data: " in block]
    assert not any('"resync"' in block for block in blocks)
    names = [msgspec.json.decode(block.partition("data: ")[2])["event"] for block in blocks]
    return [name for name in names if name != "message.delta"]


def shown_events(page: Page) -> list[str]:
    """The names of the events that the page of a run shows."""
    return page.locator(".events li > :nth-child(2)").all_inner_texts()


def said(http: httpx2.Client, name: str) -> list[tuple[str, str]]:
    """Who said what in a conversation, from the rows."""
    found = http.get(f"/v1/web/conversations/{name}/messages").json()
    lines = [(one["timestamp"], one["role"], one["text"]) for one in found["data"] if one["role"] != "tool"]
    lines += [(one["timestamp"], "assistant", one["text"]) for one in found["asides"]]
    return [(role, text) for _, role, text in sorted(lines) if text]


def shown(page: Page) -> list[tuple[str, str]]:
    """Who said what, as the page shows it."""
    rows: list[dict[str, Any]] = page.evaluate(
        """() => [...document.querySelectorAll(".flow > .you, .flow > .agent, .flow > .notice")].map((el) =>
             ({who: el.classList[0], text: (el.querySelector("p") ?? el.querySelector("pre")).textContent}))"""
    )
    roles = {"you": "user", "agent": "assistant", "notice": "user"}
    return [(roles[row["who"]], row["text"]) for row in rows]


def settle(page: Page, read: Any, wanted: Any) -> None:
    """Wait until the page shows what the rows say; the comparison that fails is what is reported."""
    deadline = time.monotonic() + 15
    while read() != wanted() and time.monotonic() < deadline:
        page.wait_for_timeout(100)
    assert read() == wanted()


@pytest.mark.parametrize("at", [0.3, 1.1])
def test_no_event_is_lost_or_doubled_when_the_server_is_killed_under_open_pages(
    browser: Browser, tmp_path: Path, at: float
) -> None:
    """SIGKILL in the middle of a run and of a chat: each page recovers by itself and has every stored event once, in order."""
    with server_process(tmp_path) as first:
        port = first.url.rpartition(":")[2]
        with client(first) as http, visitor(browser, first.url) as one:
            one.allowed = ["ERR_", "Failed to load"]
            talk, watch = one.open(link(http)), one.open()
            run = http.post(
                "/v1/runs", json={"input": "\n".join(f"!run echo {n}; sleep 0.05" for n in range(STEPS))}
            ).json()["run_id"]
            watch.goto(f"{first.url}/#/runs/{run}")
            watch.locator(".events li").first.wait_for()
            talk.goto(f"{first.url}/#/chat/kept")
            for text in ("before the kill", "!bg sleep 0.2; echo baked", "!run sleep 7777"):
                talk.get_by_label("Message", exact=True).fill(text)
                talk.get_by_label("Message", exact=True).press("Enter")
            talk.locator(".flow .did", has_text="sleep 7777").wait_for()
            time.sleep(at)
            first.signal(signal.SIGKILL)
            for page in (talk, watch):
                page.get_by_text("The connection is lost").wait_for()
            before = shown_events(watch)
            first.wait()
            with server_process(tmp_path, command=[*COMMAND, port]) as second, client(second) as again:
                for page in (talk, watch):
                    page.get_by_text("The server was started again").wait_for(timeout=30_000)
                ended = again.get(f"/v1/runs/{run}?wait=ended&timeout=20").json()
                assert ended["status"] in ("failed", "cancelled", "completed")
                kept = stored_events(again, run)
                assert len(kept) > 2
                assert abs(len(before) - len(kept)) < STEPS * 4
                settle(watch, lambda: shown_events(watch), lambda: kept[-200:])
                talk.get_by_label("Message", exact=True).fill("after the kill")
                talk.get_by_label("Message", exact=True).press("Enter")
                talk.locator(".flow").get_by_text("You said: after the kill").wait_for()
                settle(talk, lambda: shown(talk), lambda: said(again, "kept"))
                texts = [text for _, text in shown(talk)]
                for text in ("before the kill", "!bg sleep 0.2; echo baked", "after the kill"):
                    assert texts.count(text) == 1, text
                # What was being worked on is told as what it is: not completed, and not begun again by itself. Notices may come together.
                told = "\n".join(text for text in texts if text.startswith(("[IMPORTANT", "The server stopped")))
                assert told.count("The server stopped while this message was being worked on") == 1
                assert told.count("\n!run sleep 7777") == 1
                assert told.count("Command: sleep 0.2; echo baked") == 1


def test_a_cut_connection_is_resumed_without_loss_or_repetition(
    browser: Browser, server: ServerProcess, http: httpx2.Client
) -> None:
    """The same server, a lost line: the page says so, and every event of a run that went on meanwhile is there once."""
    with visitor(browser, server.url) as one:
        one.allowed = ["ERR_", "Failed to load"]
        page = one.open(link(http))
        page.get_by_role("treegrid").wait_for()
        run = http.post(
            "/v1/runs", json={"input": "\n".join(f"!run echo {n}; sleep 0.05" for n in range(STEPS))}
        ).json()["run_id"]
        page.goto(f"{server.url}/#/runs/{run}")
        page.locator(".events li").first.wait_for()
        one.context.set_offline(True)
        page.wait_for_timeout(600)
        one.context.set_offline(False)
        assert http.get(f"/v1/runs/{run}?wait=ended&timeout=30").json()["status"] == "completed"
        kept = stored_events(http, run)
        assert len(kept) > 2 * STEPS
        settle(page, lambda: shown_events(page), lambda: kept[-200:])
        page.get_by_role("link", name=re.compile("Tree")).click()
        live = http.get("/v1/tree").json()["size"]
        settle(page, lambda: page.evaluate("hermes.store.size"), lambda: live)
