"""The console in a real browser: signing in, the live tree, stop with receipt, approvals, chat, tenants, a killed server, attacks, accessibility."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import httpx2
import pytest

from tests.e2e.server_process import KEY, ServerProcess

from .browser import MARKUP, link, needs_chromium, row, start, visitor

if TYPE_CHECKING:
    from playwright.sync_api import Browser

pytestmark = [needs_chromium(), pytest.mark.slow]


def test_signing_in_by_link_and_by_key_and_out(browser: Browser, server: ServerProcess, http: httpx2.Client) -> None:
    """A link works once and leaves no code behind; a wrong key says so; scripts cannot read the cookie; signing out shows the way in again."""
    path = link(http)
    with visitor(browser, server.url) as one:
        page = one.open(path)
        page.get_by_role("heading", name="Tree").wait_for()
        assert "sign-in" not in page.url
        assert page.evaluate("document.cookie") == ""
        [cookie] = one.context.cookies()
        assert (cookie["httpOnly"], cookie["sameSite"]) == (True, "Strict")
        page.get_by_role("button", name="Sign out").click()
        page.get_by_role("textbox", name="API key").wait_for()
    with visitor(browser, server.url) as other:
        other.allowed = ["401"]
        page = other.open(path)
        page.get_by_text("This link was used before").wait_for()
        page.get_by_role("textbox", name="API key").fill("not-the-key")
        page.get_by_role("button", name="Sign in").click()
        page.get_by_text("This key is not in force.").wait_for()
        page.get_by_role("textbox", name="API key").fill(KEY)
        page.keyboard.press("Enter")
        page.get_by_role("treegrid", name="Task tree").wait_for()


def test_a_tree_that_grows_and_shrinks_and_a_stop_with_its_receipt(
    browser: Browser, server: ServerProcess, http: httpx2.Client
) -> None:
    """Rows come and go with the work; two presses stop it, and the receipt has a line for each node."""
    with visitor(browser, server.url) as one:
        page = one.open(link(http))
        page.get_by_role("treegrid").wait_for()
        start(http, "!run sleep 7777")
        row(page, "fg_").wait_for()
        row(page, "!run sleep 7777").click()
        page.get_by_role("button", name=re.compile("^Stop turn and 2 below")).click()
        page.get_by_role("button", name=re.compile("^Press again to stop 3 nodes")).click()
        receipt = page.get_by_role("log", name="Receipt of the stop")
        receipt.get_by_text("Stopped · 3 nodes · empty").wait_for()
        assert receipt.locator("li").count() == 3
        assert "SIGTERM" in receipt.inner_text() or "cancelled" in receipt.inner_text()
        row(page, "fg_").wait_for(state="hidden")


def test_an_approval_is_answered_by_a_click_while_the_command_waits(
    browser: Browser, server: ServerProcess, http: httpx2.Client
) -> None:
    """It comes by itself, shows the exact command, and the run goes on with the answer."""
    with visitor(browser, server.url) as one:
        page = one.open(link(http))
        page.get_by_role("link", name=re.compile("Approvals")).click()
        page.get_by_text("Nothing waits for you").wait_for()
        run = start(http, "!run rm -rf ./build-of-a-test")
        card = page.locator(".card", has_text="rm -rf ./build-of-a-test")
        card.get_by_role("button", name="Allow once").click()
        ended = http.get(f"/v1/runs/{run}?wait=ended&timeout=20").json()
        assert "approved by the user (once)" in ended["output"]
        page.get_by_text("Allowed once").first.wait_for()
        card.wait_for(state="hidden")


def test_a_tenants_key_sees_only_its_own(browser: Browser, server: ServerProcess, http: httpx2.Client) -> None:
    """Neither the rows nor the views of others: what the key may not do is not shown."""
    made = http.post("/admin/keys", json={"name": "dev", "tenant": "acme", "scopes": ["runs", "chat"]}).json()
    start(http, "!run sleep 6666")
    with visitor(browser, server.url) as one:
        page = one.open()
        page.get_by_role("textbox", name="API key").fill(made["key"])
        page.keyboard.press("Enter")
        page.get_by_role("treegrid").wait_for()
        names = page.locator(".rail a .word").all_inner_texts()
        assert names == ["Tree", "Timeline", "Approvals", "Chat", "Runs", "Health"]
        mine = {"Authorization": f"Bearer {made['key']}"}
        http.post("/v1/runs", json={"input": "!run sleep 5555"}, headers=mine).raise_for_status()
        row(page, "sleep 5555").wait_for()
        assert "sleep 6666" not in page.locator(".list").inner_text()
        http.delete(f"/admin/keys/{made['id']}").raise_for_status()


def test_stored_markup_is_text_wherever_it_is_shown(
    browser: Browser, server: ServerProcess, http: httpx2.Client
) -> None:
    """In messages, tool output and names: nothing is ever put into the page as HTML."""
    session = "markup-session"
    http.post(
        "/v1/chat/completions",
        json={"messages": [{"role": "user", "content": MARKUP}]},
        headers={"X-Hermes-Session-Id": session},
    ).raise_for_status()
    run = start(http, f"!run echo '{MARKUP.replace(chr(39), '')}'")
    http.get(f"/v1/runs/{run}?wait=ended&timeout=20")
    http.post("/admin/keys", json={"name": MARKUP[:90], "scopes": ["chat"]}).raise_for_status()
    http.post("/v1/web/conversations/markup/messages", json={"text": MARKUP}).raise_for_status()
    with visitor(browser, server.url) as one:
        page = one.open(link(http))
        page.get_by_role("treegrid").wait_for()
        for view in (f"sessions/{session}", f"runs/{run}", f"timeline/{run}", "keys", "chat/markup"):
            page.goto(f"{server.url}/#/{view}")
            page.get_by_text("<b>bold</b>").first.wait_for()
            assert page.locator("main img[src='x'], main b:text('bold'), main script").count() == 0
            assert "owned" not in page.title()


def test_a_page_that_nobody_touches_asks_the_server_nothing(
    browser: Browser, server: ServerProcess, http: httpx2.Client
) -> None:
    """The tree is told what changes; while nothing does, no request is made."""
    with visitor(browser, server.url) as one:
        page = one.open(link(http))
        page.get_by_role("treegrid").wait_for()
        page.wait_for_timeout(1500)
        asked: list[str] = []
        page.on("request", lambda request: asked.append(request.url))
        page.wait_for_timeout(4000)
        assert asked == []
