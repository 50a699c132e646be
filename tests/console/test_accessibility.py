"""Accessibility of the console, checked in a real browser: roles, names, contrast, and the keyboard for every view and every action."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import httpx2
import pytest

from tests.e2e.server_process import ServerProcess, server_process

from .browser import link, needs_chromium, row, start, visitor

if TYPE_CHECKING:
    from collections.abc import Iterator

    from playwright.sync_api import Browser, Page

pytestmark = [needs_chromium(), pytest.mark.slow]

VIEWS = ("tree", "timeline", "approvals", "chat/a11y", "sessions", "runs", "jobs", "outbox", "keys", "health")

CONTROLS = "a[href], button, input, select, textarea, summary, [tabindex='0']"

FLAWS = """(controls) => {
  const seen = (el) => el.checkVisibility({ visibilityProperty: true }) && !el.closest("[aria-hidden=true]");
  const all = (what) => [...document.querySelectorAll(what)].filter(seen), said = (el) => el.outerHTML.slice(0, 160), found = [];
  const name = (el) => el.getAttribute("aria-label") || (el.getAttribute("aria-labelledby") ? "x" : "") || el.textContent.trim() || el.title
    || (el.labels && el.labels.length ? "x" : "") || [...el.querySelectorAll("img[alt]")].map((img) => img.alt).join("");
  for (const el of all(controls + ", [role=button]")) {
    if (!name(el)) found.push(`no name: ${said(el)}`);
    if (el.tabIndex > 0) found.push(`tabindex above 0: ${said(el)}`);
    if (el.matches("a, button, summary") && el.parentElement.closest("a, button, summary")) found.push(`a control in a control: ${said(el)}`);
  }
  for (const el of all("[role=toolbar], [role=log], [role=treegrid], [role=group], nav, dialog, section:not(.verdict)")) {
    if (el.matches("section") && el.querySelector(":scope > h2, :scope > h3")) continue;
    if (!el.getAttribute("aria-label") && !el.getAttribute("aria-labelledby")) found.push(`a region without a name: ${said(el)}`);
  }
  for (const el of all("img")) if (!el.hasAttribute("alt")) found.push(`a picture without words: ${said(el)}`);
  for (const el of all("li")) if (!el.parentElement.matches("ol, ul")) found.push(`an item outside a list: ${said(el)}`);
  for (const el of all("[role=row]")) {
    if (!el.closest("[role=treegrid]")) found.push(`a row outside a grid: ${said(el)}`);
    if (!el.matches(".row")) continue;
    const words = el.getAttribute("aria-label") || el.querySelector("[role=gridcell]")?.textContent.trim();
    if (!el.getAttribute("aria-level") || !words) found.push(`a row without level or words: ${said(el)}`);
    if (el.getAttribute("aria-selected") === "true" && !el.getAttribute("aria-label")) found.push(`the chosen row says no sentence: ${said(el)}`);
  }
  for (const el of all("[role=gridcell], [role=columnheader]")) if (!el.closest("[role=row]")) found.push(`a cell outside a row: ${said(el)}`);
  for (const attribute of ["aria-activedescendant", "aria-labelledby", "aria-controls", "aria-describedby"]) {
    for (const el of all(`[${attribute}]`)) {
      const named = el.getAttribute(attribute).split(" ").filter(Boolean);
      if (!named.every((id) => document.getElementById(id))) found.push(`${attribute} names nothing: ${said(el)}`);
    }
  }
  const ids = [...document.querySelectorAll("[id]")].map((el) => el.id);
  for (const id of new Set(ids.filter((one, i) => ids.indexOf(one) !== i))) found.push(`two elements are called ${id}`);
  // Whatever looks as if it could be pressed can be reached by a keyboard; rows of the tree are reached inside their grid.
  for (const el of all("main *, .rail *")) {
    if (getComputedStyle(el).cursor === "pointer" && !el.closest(controls + ", label, .row")) found.push(`for pointers only: ${said(el)}`);
  }
  if (document.documentElement.lang !== "en" || !document.title) found.push("the page has no language or title");
  if (all("main").length !== 1 || all("nav").length !== 1 || all("h1").length !== 1) found.push("landmarks or heading are missing");
  if (!all("[role=status], [aria-live]").length && !document.querySelector("[role=status]")) found.push("nothing is announced");
  return [...new Set(found)];
}"""

STAMP = """(controls) => {
  let number = 0;
  for (const el of document.querySelectorAll(controls)) {
    delete el.dataset.stamp;
    if (el.disabled || el.tabIndex < 0 || el.closest("dialog:not([open])") || !el.checkVisibility({ visibilityProperty: true })) continue;
    el.dataset.stamp = String(number += 1);
  }
  document.activeElement?.blur();
  return number;
}"""

FOCUSED = """() => {
  const el = document.activeElement;
  if (el === null || el === document.body) return ["", true];
  const { outlineStyle, boxShadow } = getComputedStyle(el);
  return [el.dataset.stamp ?? "", outlineStyle !== "none" || boxShadow !== "none" || el.matches("[data-home], .scroll, main")];
}"""

LEFT = """(reached) => [...document.querySelectorAll("[data-stamp]")]
  .filter((el) => !reached.includes(el.dataset.stamp)).map((el) => el.outerHTML.slice(0, 160))"""

PALE = """() => {
  const canvas = document.createElement("canvas");
  canvas.width = canvas.height = 1;
  const pen = canvas.getContext("2d", { willReadFrequently: true });
  const rgba = (text) => {
    pen.clearRect(0, 0, 1, 1);
    pen.fillStyle = text;
    pen.fillRect(0, 0, 1, 1);
    return [...pen.getImageData(0, 0, 1, 1).data];
  };
  const linear = (c) => (c / 255 <= 0.04045 ? c / 255 / 12.92 : ((c / 255 + 0.055) / 1.055) ** 2.4);
  const light = ([r, g, b]) => 0.2126 * linear(r) + 0.7152 * linear(g) + 0.0722 * linear(b);
  const ground = (el) => {
    for (let up = el; up; up = up.parentElement) {
      const colour = rgba(getComputedStyle(up).backgroundColor);
      if (colour[3] > 250) return colour;
    }
    return [255, 255, 255, 255];
  };
  const found = [], walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const el = walker.currentNode.parentElement, text = walker.currentNode.data.trim();
    if (!text || el.offsetParent === null) continue;
    if (el.closest("[hidden], .faded, .gone, .live, noscript, dialog:not([open])")) continue;
    const style = getComputedStyle(el);
    if (style.visibility === "hidden" || Number(style.opacity) < 1) continue;
    const [one, two] = [light(rgba(style.color)), light(ground(el))].sort((a, b) => b - a);
    const ratio = (one + 0.05) / (two + 0.05);
    if (ratio < 4.5) found.push(`${ratio.toFixed(2)} ${el.className} ${text.slice(0, 40)}`);
  }
  return found;
}"""


@pytest.fixture(scope="module")
def crowded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[ServerProcess, httpx2.Client]]:
    """A server with something in every view."""
    home = tmp_path_factory.mktemp("home")
    (home / "config.toml").write_text("[approvals]\ntimeout = 600\n")
    with (
        server_process(home) as server,
        httpx2.Client(base_url=server.url, headers=server.headers, trust_env=False, timeout=30) as http,
    ):
        for text in ("!run sleep 4444", "!delegate count the files\n!run sleep 500", "!run rm -rf ./build"):
            start(http, text)
        http.post("/v1/web/conversations/a11y/messages", json={"text": "!run echo hello"}).raise_for_status()
        http.post("/api/jobs", json={"name": "daily", "schedule": "every 1h", "prompt": "say hello"}).raise_for_status()
        http.post("/admin/keys", json={"name": "dev", "tenant": "acme", "scopes": ["chat"]}).raise_for_status()
        yield server, http


def show(page: Page, url: str, view: str) -> None:
    """Go to a view and let it fill."""
    page.goto(f"{url}/#/{view}")
    page.wait_for_timeout(700)
    if view == "tree":
        row(page, "sleep 4444").click()
        page.get_by_role("button", name=re.compile("^Stop")).first.wait_for()


@pytest.mark.parametrize(("theme", "width"), [("light", 1280), ("dark", 1280), ("light", 390), ("dark", 390)])
def test_every_view_has_roles_names_and_contrast(
    browser: Browser, crowded: tuple[ServerProcess, httpx2.Client], theme: str, width: int
) -> None:
    """In both themes and on a phone: controls and regions have names, structures are whole, text has a contrast of 4.5 to 1, nothing is cut off."""
    server, http = crowded
    with visitor(browser, server.url, color_scheme=theme) as one:
        page = one.open(link(http))
        page.set_viewport_size({"width": width, "height": 800})
        row(page, "sleep 4444").wait_for()
        for view in VIEWS:
            show(page, server.url, view)
            assert page.evaluate(FLAWS, CONTROLS) == [], view
            assert page.evaluate(PALE) == [], view
            assert page.locator("[aria-current='page']").count() == 1
            assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), f"{view} is wider than the page"
        page.keyboard.press("Escape")
        page.get_by_role("button", name="Sign out").click()
        page.get_by_role("textbox", name="API key").wait_for()
        assert page.evaluate(PALE) == []


@pytest.mark.parametrize("view", VIEWS)
def test_tab_reaches_every_control_of_a_view_and_shows_where_it_is(
    browser: Browser, crowded: tuple[ServerProcess, httpx2.Client], view: str
) -> None:
    """Each button, link and field of the view and the rail has the focus at some time, with an outline, and none keeps it."""
    server, http = crowded
    with visitor(browser, server.url) as one:
        page = one.open(link(http))
        row(page, "sleep 4444").wait_for()
        show(page, server.url, view)
        wanted = page.evaluate(STAMP, CONTROLS)
        assert wanted > 10
        reached: list[str] = []
        for _ in range(wanted + 20):
            page.keyboard.press("Tab")
            stamp, visible = page.evaluate(FOCUSED)
            assert visible, page.evaluate("document.activeElement.outerHTML.slice(0, 200)")
            reached.append(stamp)
        assert page.evaluate(LEFT, reached) == []


def test_actions_need_only_the_keyboard(browser: Browser, crowded: tuple[ServerProcess, httpx2.Client]) -> None:
    """An approval, a message, a search, a job and a signing out, without a pointer."""
    server, http = crowded
    with visitor(browser, server.url) as one:
        page = one.open(link(http))
        row(page, "sleep 4444").wait_for()
        run = start(http, "!run rm -rf ./keyboard")
        page.keyboard.press("3")
        card = page.locator(".card", has_text="rm -rf ./keyboard")
        card.wait_for()
        card.get_by_role("button", name="Deny").focus()
        page.keyboard.press("Enter")
        assert "denied" in http.get(f"/v1/runs/{run}?wait=ended&timeout=20").json()["output"]
        page.keyboard.press("4")
        page.get_by_label("Message", exact=True).focus()
        page.keyboard.type("typed by hand")
        page.keyboard.press("Enter")
        page.locator(".flow").get_by_text("You said: typed by hand").wait_for()
        page.keyboard.press("Escape")
        page.keyboard.press("5")
        page.get_by_role("region", name="Transcript").wait_for()
        page.keyboard.press("/")
        page.keyboard.type("typed by hand")
        page.locator(".hit").first.wait_for()
        page.locator(".hit").first.focus()
        page.keyboard.press("Enter")
        page.locator(".script .found").wait_for()
        page.keyboard.press("7")
        page.get_by_role("button", name="Run now").focus()
        page.keyboard.press("Space")
        page.get_by_text(re.compile("^last .* ago")).wait_for()
        page.keyboard.press("?")
        page.get_by_role("dialog", name="Keys").wait_for()
        page.keyboard.press("Escape")
        page.get_by_role("button", name="Sign out").focus()
        page.keyboard.press("Enter")
        page.get_by_role("textbox", name="API key").wait_for()
        assert page.evaluate("document.activeElement.getAttribute('aria-label')") == "API key"


def test_a_stop_needs_only_the_keyboard(browser: Browser, server: ServerProcess, http: httpx2.Client) -> None:
    """Search, choose, stop twice, and read the receipt, without a pointer."""
    with visitor(browser, server.url) as one:
        page = one.open(link(http))
        page.get_by_role("treegrid").wait_for()
        start(http, "!run sleep 3333")
        row(page, "fg_").wait_for()
        for _ in range(12):
            page.keyboard.press("j")
            if "sleep 3333" in (page.locator(".row[aria-selected=true]").get_attribute("aria-label") or ""):
                break
        page.keyboard.press("x")
        page.keyboard.press("x")
        page.get_by_text(re.compile("Stopped · .* · empty")).wait_for()
