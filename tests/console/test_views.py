"""The views of the console in a real browser: search, history of jobs, dead letters, protections, the drain with its report."""

from __future__ import annotations

import re
import sqlite3
from pathlib import Path
from typing import TYPE_CHECKING

import httpx2
import pytest

from tests.e2e.server_process import ServerProcess, server_process

from .browser import link, needs_chromium, visitor

if TYPE_CHECKING:
    from playwright.sync_api import Browser

pytestmark = [needs_chromium(), pytest.mark.slow]


def test_a_search_finds_messages_and_opens_the_place(
    browser: Browser, server: ServerProcess, http: httpx2.Client
) -> None:
    """Full-text search from the page: the match is marked, and choosing it shows the message in its transcript."""
    for number in range(3):
        http.post(
            "/v1/chat/completions",
            json={"messages": [{"role": "user", "content": f"the quick brown fox number {number} jumps"}]},
            headers={"X-Hermes-Session-Id": f"fox-{number}"},
        ).raise_for_status()
    with visitor(browser, server.url) as one:
        page = one.open(link(http))
        page.goto(f"{server.url}/#/sessions")
        page.get_by_role("searchbox").fill('"fox number 1"')
        hit = page.locator(".hit", has_text="fox number 1").first
        hit.wait_for()
        assert "fox" in hit.locator("mark").first.inner_text()
        hit.click()
        page.locator(".script .found", has_text="fox number 1").wait_for()
        page.get_by_role("searchbox").fill("nothing-has-this-word")
        page.get_by_text("No session has these words").wait_for()


def test_a_job_shows_what_became_of_its_slots(browser: Browser, server: ServerProcess, http: httpx2.Client) -> None:
    """Next run, run now, and the history with state, output and the session of each slot."""
    body = {"name": "morning", "schedule": "every 1h", "prompt": "say good morning"}
    job = http.post("/api/jobs", json=body).raise_for_status().json()["job"]
    with visitor(browser, server.url) as one:
        page = one.open(link(http))
        page.goto(f"{server.url}/#/jobs")
        entry = page.locator(".entry", has_text="morning")
        entry.get_by_text(re.compile("^in ")).wait_for()
        entry.get_by_role("button", name="History").click()
        entry.get_by_text("No slot has come yet.").wait_for()
        entry.get_by_role("button", name="Run now").click()
        slots = entry.get_by_role("list", name="Slots of morning")
        slots.get_by_text("completed").wait_for()
        assert "say good morning" in slots.inner_text()
        slots.get_by_role("link", name="Session").click()
        page.get_by_role("region", name="Transcript").get_by_text("say good morning").first.wait_for()
    http.delete(f"/api/jobs/{job['id']}").raise_for_status()


def bury(home: Path) -> None:
    """Rows as a platform that is gone and an interface that refuses have left them."""
    with sqlite3.connect(home / "state.db", timeout=20) as db:
        db.execute(
            "INSERT INTO outbox (platform, target, text, state, attempts, next_at, error, created_at, settled_at)"
            " VALUES ('telegram', '{\"chat_id\": \"7\"}', 'the lost reply', 'dead', 5, 0, 'chat not found', 1, 2)"
        )
        db.execute(
            "INSERT INTO inbox (kind, inbox, session_key, routing, text, state, reason, attempts, created_at, settled_at)"
            " VALUES ('message', 'gone', 'k', '{}', 'the poisonous message', 'dead', 'refused three times', 3, 1, 2)"
        )


def test_dead_letters_of_both_directions_are_shown_and_tried_again(browser: Browser, tmp_path: Path) -> None:
    """What is dead, why, and one click that lets it wait again."""
    with (
        server_process(tmp_path) as server,
        httpx2.Client(base_url=server.url, headers=server.headers, trust_env=False, timeout=30) as http,
        visitor(browser, server.url) as one,
    ):
        bury(tmp_path)
        page = one.open(link(http))
        page.goto(f"{server.url}/#/outbox")
        for tab, text, why in (
            ("Given up", "the lost reply", "chat not found"),
            ("Not handled", "the poisonous message", "refused three times"),
        ):
            page.get_by_role("button", name=tab).click()
            entry = page.locator(".entry", has_text=text)
            entry.get_by_text(why).wait_for()
            entry.get_by_role("button", name="Try again").click()
            entry.wait_for(state="detached")
        assert http.get("/admin/outbox?state=dead").json()["data"] == []
        waiting = http.get("/admin/inbox?state=pending").json()["data"]
        assert [row["text"] for row in waiting] == ["the poisonous message"]


def test_health_says_the_protections_as_doctor_does_and_a_drain_ends_with_its_report(
    browser: Browser, tmp_path: Path
) -> None:
    """The lines of `doctor`, word for word; charts of the time before the page; the drain needs two presses, and its report says what was left."""
    (tmp_path / "config.toml").write_text("[server]\ndrain_seconds = 1.0\n")
    with (
        server_process(tmp_path) as server,
        httpx2.Client(base_url=server.url, headers=server.headers, trust_env=False, timeout=30) as http,
        visitor(browser, server.url) as one,
    ):
        page = one.open(link(http))
        page.goto(f"{server.url}/#/health")
        words = http.get("/health/detailed").json()["readiness"]["checks"]["confinement"]["words"]
        page.locator(".guards li").first.wait_for()
        shown = page.locator(".guards li").all_inner_texts()
        assert [line.strip() for line in shown] == [line.removeprefix("commands: ") for line in words]
        http.post("/v1/runs", json={"input": "!run sleep 7777"}).raise_for_status()
        while len(http.get("/health/load").json()["data"]) < 2:
            page.wait_for_timeout(100)
        page.reload()
        page.locator(".tile .line[d*=L]").first.wait_for(state="attached")
        page.get_by_role("button", name="Drain the server…").click()
        page.get_by_role("button", name="Refuse new work for good").click()
        page.get_by_text("Drained · nothing runs").wait_for()
        assert "turns cancelled" in page.locator(".drain .receipt").inner_text()
        page.get_by_text("Draining: no new work is taken").wait_for()
        one.allowed = ["503"]
        assert http.post("/v1/runs", json={"input": "x"}).status_code == 503
