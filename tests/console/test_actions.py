"""What the views of the console do, in a real browser: sessions, keys, notifications, files, and what is shown when the server or a request fails."""

from __future__ import annotations

from typing import TYPE_CHECKING

import httpx2
import pytest

from tests.e2e.server_process import KEY, ServerProcess, server_process

from .browser import link, needs_chromium, start, visitor
from .test_restart import COMMAND

if TYPE_CHECKING:
    from pathlib import Path

    from playwright.sync_api import Browser, Page

pytestmark = [needs_chromium(), pytest.mark.slow]

STUB = """
globalThis.told = [];
globalThis.heard = (count) => new Promise((done, fail) => {
  const late = setTimeout(() => fail(new Error(JSON.stringify(told))), 15000);
  const look = () => { if (told.length >= count) { clearTimeout(late); done(told); } else setTimeout(look, 20); };
  look();
});
globalThis.Notification = class {
  static permission = "default";
  static async requestPermission() { Notification.permission = "granted"; return "granted"; }
  constructor(title, { body, tag }) { told.push([title, body, tag]); }
};
"""


def say(page: Page, text: str) -> None:
    """Write a message in the chat and send it."""
    page.get_by_label("Message", exact=True).fill(text)
    page.get_by_label("Message", exact=True).press("Enter")


def test_a_session_is_forked_ended_and_deleted_by_keyboard(
    browser: Browser, server: ServerProcess, http: httpx2.Client
) -> None:
    """Each from its button, without a mouse; what cannot be undone needs a second press, and Escape takes the first one back."""
    http.post(
        "/v1/chat/completions",
        json={"messages": [{"role": "user", "content": "a talk to be forked"}]},
        headers={"X-Hermes-Session-Id": "origin"},
    ).raise_for_status()
    with visitor(browser, server.url) as one:
        page = one.open(link(http))
        page.goto(f"{server.url}/#/sessions/origin")
        text = page.get_by_role("region", name="Transcript")
        text.get_by_text("a talk to be forked").first.wait_for()
        text.get_by_role("button", name="Fork").press("Enter")
        page.get_by_text("Forked as ").wait_for()
        ids = {row["id"] for row in http.get("/api/sessions").json()["data"]}
        (fork,) = [id for id in ids if id != "origin" and page.get_by_text(f"Forked as {id}.").count()]
        text.locator("code", has_text=fork).wait_for()
        text.get_by_role("button", name="End").press("Enter")
        text.get_by_role("button", name="End this session").press("Escape")
        assert http.get(f"/api/sessions/{fork}").json()["session"]["ended_at"] is None
        text.get_by_role("button", name="End").press("Enter")
        text.get_by_role("button", name="End this session").press("Enter")
        text.get_by_role("button", name="End").wait_for(state="detached")
        assert http.get(f"/api/sessions/{fork}").json()["session"]["end_reason"] == "console"
        text.get_by_role("button", name="Delete").press("Enter")
        text.get_by_role("button", name="Delete for good").press("Enter")
        text.locator("code", has_text=fork).wait_for(state="detached")
        assert http.get(f"/api/sessions/{fork}").status_code == 404
        assert http.get("/api/sessions/origin").status_code == 200


def test_a_key_is_made_shown_once_and_revoked(browser: Browser, server: ServerProcess, http: httpx2.Client) -> None:
    """The secret works, is in no other place of the page, and is gone when the person has it; a revoked key is refused at once."""
    with visitor(browser, server.url) as one:
        page = one.open(link(http))
        page.goto(f"{server.url}/#/keys")
        page.get_by_label("Name").fill("robot")
        page.get_by_label("Tenant").fill("robots")
        page.get_by_label("chat").uncheck()
        page.get_by_role("button", name="Make a key").press("Enter")
        secret = page.locator(".secret").inner_text()
        mine = {"Authorization": f"Bearer {secret}"}
        assert http.get("/v1/runs", headers=mine).status_code == 200
        assert http.get("/api/sessions", headers=mine).status_code == 403
        page.get_by_role("button", name="I have it").press("Enter")
        assert secret not in page.content()
        page.reload()
        entry = page.locator(".entry", has_text="robot")
        entry.get_by_text("robots").wait_for()
        assert secret not in page.content()
        entry.get_by_role("button", name="Revoke").press("Enter")
        entry.get_by_role("button", name="Revoke at once").press("Enter")
        entry.get_by_text("revoked", exact=True).wait_for()
        assert http.get("/v1/runs", headers=mine).status_code == 401


def test_the_platform_notifies_of_what_the_person_does_not_look_at(
    browser: Browser, server: ServerProcess, http: httpx2.Client
) -> None:
    """Asked for by a button, once allowed: an answer and a question of a conversation that is not on the screen, and none of the one that is."""
    with visitor(browser, server.url) as one:
        one.context.add_init_script(STUB)
        page = one.open(link(http))
        page.goto(f"{server.url}/#/chat/watched")
        say(page, "before it is allowed")
        page.locator(".flow").get_by_text("You said: before it is allowed").wait_for()
        page.get_by_role("button", name="Notify me").press("Enter")
        page.get_by_role("button", name="Notify me").wait_for(state="hidden")
        other = "/v1/web/conversations/elsewhere/messages"
        http.post(other, json={"text": "hello from there"}).raise_for_status()
        ((title, body, tag),) = page.evaluate("heard(1)")
        assert (body, tag) == ("You said: hello from there", "elsewhere")
        assert title in ("hello from there", "hermes-trio")
        http.post(other, json={"text": "!run rm -rf ./notified"}).raise_for_status()
        assert page.evaluate("heard(2)")[1][1:] == ["waits for your answer", "elsewhere"]
        say(page, "while I look")
        page.locator(".flow").get_by_text("You said: while I look").wait_for()
        assert page.evaluate("told.length") == 2
        http.post(other, json={"text": "/stop"}).raise_for_status()


def test_a_command_that_hides_what_it_does_is_shown_letter_by_letter(
    browser: Browser, server: ServerProcess, http: httpx2.Client
) -> None:
    """Marks that turn the text round and characters without width are named, so that nobody allows what they cannot see."""
    hidden = "rm -rf ./a\u202e/gnp.exe\u2066\u200b"
    with visitor(browser, server.url) as one:
        page = one.open(link(http))
        page.goto(f"{server.url}/#/approvals")
        start(http, f"!run {hidden}")
        card = page.locator(".card", has_text="rm -rf ./a")
        card.wait_for()
        assert card.locator("pre").inner_text() == r"rm -rf ./a\u202e/gnp.exe\u2066\u200b"
        card.press("d")
        page.locator(".answered code", has_text=r"\u202e").wait_for()


WIDE = """() => [...document.querySelectorAll("main *")].filter((el) => {
  const box = el.getBoundingClientRect();
  const beyond = el.scrollWidth > el.clientWidth + 1 && getComputedStyle(el).overflowX === "visible" && el.clientWidth > 0;
  return box.width > 0 && (box.right > innerWidth + 1 || beyond) && !el.closest("[hidden], .head, .cut, svg, select");
}).map((el) => `${el.tagName}.${el.className}`)"""


@pytest.mark.parametrize("width", [390, 1280])
def test_long_words_and_letters_that_turn_round_stay_in_their_place(
    browser: Browser, server: ServerProcess, http: httpx2.Client, width: int
) -> None:
    """Nothing is pushed out of the window, over a button, and a name that turns its letters round leaves the id beside it readable."""
    name = f"a{width}\u202eb " + "W" * 90
    made = http.post("/admin/keys", json={"name": name, "tenant": "T" * 80, "scopes": ["runs"]}).json()
    job = http.post("/api/jobs", json={"name": name, "schedule": "every 1h", "prompt": name}).json()["job"]
    http.post(
        "/v1/chat/completions",
        json={"messages": [{"role": "user", "content": name * 3}]},
        headers={"X-Hermes-Session-Id": f"wide-{width}"},
    ).raise_for_status()
    start(http, f"!run rm -rf ./{'W' * 300}")
    with visitor(browser, server.url) as one:
        page = one.open(link(http))
        page.set_viewport_size({"width": width, "height": 800})
        for view, there in (
            ("approvals", ".card"),
            ("keys", ".entry"),
            ("jobs", ".entry"),
            (f"sessions/wide-{width}", ".script .line"),
        ):
            page.goto(f"{server.url}/#/{view}")
            page.locator(there).first.wait_for()
            assert page.evaluate(WIDE) == [], view
            if view == "keys":
                id = page.locator(".entry", has_text=made["id"]).locator("code").first
                assert id.evaluate("(el) => getComputedStyle(el).unicodeBidi") == "isolate"
        page.goto(f"{server.url}/#/approvals")
        page.locator(".card").first.get_by_role("button", name="Deny").click()
    http.delete(f"/admin/keys/{made['id']}").raise_for_status()
    http.delete(f"/api/jobs/{job['id']}").raise_for_status()


def test_files_that_no_message_can_hold_are_refused_before_they_are_read(
    browser: Browser, server: ServerProcess, http: httpx2.Client, tmp_path: Path
) -> None:
    """Too large, too many, too much together: the page says which and why, and keeps what fits."""
    huge = tmp_path / "huge.bin"
    with huge.open("wb") as file:
        file.truncate(3_000_000_000)
    with visitor(browser, server.url) as one:
        page = one.open(link(http))
        page.goto(f"{server.url}/#/chat/large")
        chooser, tray = page.locator("input[type=file]"), page.get_by_role("list", name="Files to send")
        chooser.set_input_files(huge)
        page.get_by_text("Not attached: huge.bin (3000.0 MB)").wait_for()
        assert tray.locator("li").count() == 0
        chooser.set_input_files(
            [{"name": f"n{number}.txt", "mimeType": "text/plain", "buffer": b"x"} for number in range(10)]
        )
        page.get_by_text("Not attached: n8.txt (1 B), n9.txt (1 B)").wait_for()
        assert tray.locator("li").count() == 8


def test_an_answer_that_did_not_reach_the_server_can_be_given_again(
    browser: Browser, server: ServerProcess, http: httpx2.Client
) -> None:
    """The question stays in the chat, with its buttons, until the server has taken an answer."""
    with visitor(browser, server.url) as one:
        one.allowed = ["503"]
        page = one.open(link(http))
        page.goto(f"{server.url}/#/chat/asked")
        say(page, "!run rm -rf ./answered-twice")
        card = page.locator(".card", has_text="answered-twice")
        card.wait_for()
        body = '{"error": {"message": "The store is not there.", "code": "store_unavailable"}}'
        page.route("**/approvals/*", lambda route: route.fulfill(status=503, body=body), times=1)
        card.get_by_role("button", name="Deny").click()
        page.get_by_text("The store is not there.").wait_for()
        card.get_by_role("button", name="Deny").click()
        card.wait_for(state="detached")
        page.locator(".flow").get_by_text("denied").first.wait_for(state="attached")


def test_nothing_of_one_person_is_left_in_the_page_for_the_next(
    browser: Browser, server: ServerProcess, http: httpx2.Client
) -> None:
    """Signed out and in again with another key, in one tab: the page has forgotten rows, turns and questions, also what no view shows."""
    made = http.post("/admin/keys", json={"name": "next", "tenant": "next", "scopes": ["runs"]}).json()
    start(http, "!run sleep 4444")
    with visitor(browser, server.url) as one:
        page = one.open(link(http))
        page.locator(".row", has_text="sleep 4444").first.wait_for()
        page.get_by_role("button", name="Sign out").click()
        page.get_by_role("textbox", name="API key").wait_for()
        assert page.evaluate("hermes.store.size") == 0
        page.get_by_role("textbox", name="API key").fill(made["key"])
        page.keyboard.press("Enter")
        page.get_by_role("treegrid").wait_for()
        page.goto(f"{server.url}/#/timeline")
        page.get_by_role("heading", name="Timeline").wait_for()
        assert "4444" not in page.content()
        # Another key without signing out: by a link.
        page.goto(server.url + link(http))
        page.locator(".row", has_text="sleep 4444").first.wait_for()
        page.goto(f"{server.url}/#/sessions/%E0%A4%A/%")
        page.get_by_role("heading", name="Sessions").wait_for()
        one.allowed = ["404"]
    http.delete(f"/admin/keys/{made['id']}").raise_for_status()


def test_the_page_of_the_chat_says_when_the_server_is_gone_and_when_the_session_is_over(
    browser: Browser, tmp_path: Path
) -> None:
    """`/chat` has no tree to tell it: its own stream does, and it recovers by itself."""
    with server_process(tmp_path) as first, visitor(browser, first.url) as one:
        one.allowed = ["ERR_", "401"]
        page = one.open("/chat")
        page.get_by_role("textbox", name="API key").fill(KEY)
        page.keyboard.press("Enter")
        say(page, "hello")
        page.locator(".flow").get_by_text("You said: hello").wait_for()
        first.kill()
        lost = page.get_by_text("The connection is lost.")
        lost.wait_for()
        with server_process(tmp_path, command=[*COMMAND, first.url.rpartition(":")[2]]) as second:
            lost.wait_for(state="hidden")
            say(page, "again")
            page.locator(".flow").get_by_text("You said: again").wait_for()
            body = '{"error": {"message": "no", "code": "invalid_api_key"}}'
            page.route("**/v1/web/events", lambda route: route.fulfill(status=401, body=body))
            second.kill()
            page.get_by_text("The session is over. Sign in again.").wait_for()
