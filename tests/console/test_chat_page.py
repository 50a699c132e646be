"""The chat in a real browser: background work that comes back, unread counts of the server, attachments, a page of its own."""

from __future__ import annotations

import time
from base64 import b64decode
from typing import TYPE_CHECKING

import httpx2
import pytest

from tests.e2e.server_process import ServerProcess

from .browser import link, needs_chromium, visitor

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

pytestmark = [needs_chromium(), pytest.mark.slow]

PIXEL = b64decode("iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg==")


def say(page: Page, text: str) -> None:
    """Write a message and send it."""
    page.get_by_label("Message", exact=True).fill(text)
    page.get_by_label("Message", exact=True).press("Enter")


def test_background_work_comes_back_to_a_closed_tab_and_to_a_second_browser(
    browser: Browser, server: ServerProcess, http: httpx2.Client
) -> None:
    """The chat starts something, its tab is closed, and both a new tab and another browser find what came of it."""
    with visitor(browser, server.url) as one:
        page = one.open(link(http))
        page.goto(server.url + "/#/chat")
        page.get_by_role("button", name="New conversation").click()
        page.get_by_label("Message", exact=True).fill("!bg sleep 2; echo all-is-baked")
        page.keyboard.press("Enter")
        page.get_by_text("Background process started").first.wait_for()
        place = page.url
        page.close()
        time.sleep(2.5)
        page = one.open(place.removeprefix(server.url))
        page.locator(".notice", has_text="completed normally").wait_for()
        assert page.locator(".flow").inner_text().count("Background process started") == 1
        with visitor(browser, server.url) as two:
            other = two.open(link(http))
            other.goto(place)
            other.locator(".notice", has_text="completed normally").wait_for()


def test_what_came_meanwhile_is_unread_in_every_browser_until_it_is_read_in_one(
    browser: Browser, server: ServerProcess, http: httpx2.Client
) -> None:
    """The count is the server's: a second browser of the same key shows it, and loses it when the first one has read."""
    path = "/v1/web/conversations/counted/messages"
    http.post(path, json={"text": "hello"}).raise_for_status()
    http.post(path, json={"text": "/status"}).raise_for_status()
    with visitor(browser, server.url) as one, visitor(browser, server.url) as two:
        pages = [who.open(link(http)) for who in (one, two)]
        for page in pages:
            page.goto(f"{server.url}/#/chat/elsewhere")
            page.locator(".talks .pick", has_text="hello").locator(".count", has_text="2").wait_for()
            assert page.locator(".rail a[data-view=chat] .count").inner_text() == "2"
        pages[0].locator(".talks .pick", has_text="hello").click()
        pages[0].locator(".flow").get_by_text("You said: hello").wait_for()
        for page in pages:
            page.locator(".talks .count").first.wait_for(state="hidden")
    (row,) = [row for row in http.get("/v1/web/conversations").json()["data"] if row["id"] == "counted"]
    assert row["unread"] == 0


def test_files_are_attached_seen_by_the_agent_and_shown_again(
    browser: Browser, server: ServerProcess, http: httpx2.Client
) -> None:
    """A picture and a text file, with markup in their names: the names are text, the picture is a picture, also in a page that is opened later."""
    picture, notes = "<img src=x onerror=\"document.title='owned'\"><b>bold.png", "notes <i>now.txt"
    with visitor(browser, server.url) as one:
        page = one.open(link(http))
        page.goto(f"{server.url}/#/chat/files")
        page.locator("input[type=file]").set_input_files(
            [
                {"name": picture, "mimeType": "image/png", "buffer": PIXEL},
                {"name": notes, "mimeType": "text/plain", "buffer": b"the first line of the notes"},
            ]
        )
        page.get_by_role("list", name="Files to send").get_by_text("<b>bold").wait_for()
        say(page, "what is this?")
        page.locator(".flow").get_by_text("(with 1 image)").wait_for()
        place = page.url
        page.close()
        page = one.open(place.removeprefix(server.url))
        shown = page.get_by_role("list", name="Attachments")
        image = shown.locator("img")
        image.wait_for()
        assert image.get_attribute("alt") == picture
        image.evaluate("(image) => image.decode()")
        assert image.evaluate("(image) => image.naturalWidth") == 1
        with page.expect_download() as download:
            shown.get_by_role("link", name=notes).click()
        assert download.value.path().read_bytes() == b"the first line of the notes"
        assert page.locator("main b, main i:not(.caret), main script").count() == 0
        assert "owned" not in page.title()
        page.locator("input[type=file]").set_input_files(
            [{"name": "a.bin", "mimeType": "application/x-thing", "buffer": b"\0\1\2"}]
        )
        one.allowed = ["400"]
        say(page, "and this?")
        page.get_by_text("cannot be attached: the agent reads PNG").wait_for()
        assert page.get_by_label("Message", exact=True).input_value() == "and this?"


def test_the_chat_is_a_page_of_its_own_for_a_key_that_may_do_nothing_else(
    browser: Browser, server: ServerProcess, http: httpx2.Client
) -> None:
    """`/chat` with the scope `chat`: a conversation, commands and their answers, and nothing else in sight."""
    made = http.post("/admin/keys", json={"name": "guest", "tenant": "guests", "scopes": ["chat"]}).json()
    with visitor(browser, server.url) as one:
        page = one.open("/chat")
        page.get_by_role("textbox", name="API key").fill(made["key"])
        page.keyboard.press("Enter")
        say(page, "!sleep 300")
        page.get_by_role("button", name="Stop").click()
        page.locator(".flow").get_by_text("nothing of it runs any more").wait_for()
        assert page.locator(".rail a .word").all_inner_texts() == ["Chat"]
    http.delete(f"/admin/keys/{made['id']}").raise_for_status()
