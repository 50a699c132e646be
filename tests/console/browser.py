"""A real browser for the tests of the console: Chromium, driven by playwright's synchronous interface in the test's own thread.

Found on the PATH or by `CHROMIUM=`. Without it the tests that need it are left out, and say so. Every page is watched: an error in the browser's console, a
violation of the policy, or a request to another host fails the test that had the page open.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import httpx2
import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser, BrowserContext, Page

NAMES = ("chromium", "chromium-browser", "google-chrome")

MARKUP = "<b>bold</b><img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>"


def find_chromium() -> str | None:
    """Where a Chromium is, if there is one."""
    return os.environ.get("CHROMIUM") or next((found for name in NAMES if (found := shutil.which(name))), None)


def needs_chromium() -> pytest.MarkDecorator:
    """Leave a test out where there is no browser, with the reason."""
    missing = find_chromium() is None
    try:
        import playwright  # noqa: F401
    except ImportError:
        missing = True
    reason = "no Chromium on the PATH (apt-get install chromium, or CHROMIUM=path), or playwright is not installed"
    return pytest.mark.skipif(missing, reason=reason)


class Visitor:
    """Somebody with a browser: one context, so one cookie jar. `allowed` are words of console errors that a test expects."""

    def __init__(self, context: BrowserContext, url: str) -> None:
        self.context = context
        self.url = url
        self.allowed: list[str] = []
        self.problems: list[str] = []

    def open(self, path: str = "/") -> Page:
        """A new tab."""
        page = self.context.new_page()
        page.set_default_timeout(15_000)
        page.on("console", self._heard)
        page.on("pageerror", lambda error: self.problems.append(f"error: {error}"))
        page.on("request", self._asked)
        page.goto(self.url + path)
        return page

    def _heard(self, message: Any) -> None:
        if message.type in ("error", "warning"):
            self.problems.append(f"{message.type}: {message.text}")

    def _asked(self, request: Any) -> None:
        parts = urlsplit(request.url)
        if parts.scheme != "data" and f"{parts.scheme}://{parts.netloc}" != self.url:
            self.problems.append(f"request to another host: {request.url}")

    def check(self) -> None:
        """Nothing went wrong that the test did not expect."""
        left = [one for one in self.problems if not any(word in one for word in self.allowed)]
        assert left == [], left


@contextmanager
def open_browser() -> Iterator[Browser]:
    """A browser for the body of the `with`."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        # Tests may run as root, in a container: both leave the browser no sandbox.
        browser = playwright.chromium.launch(executable_path=find_chromium(), args=["--no-sandbox"])
        try:
            yield browser
        finally:
            browser.close()


@contextmanager
def visitor(browser: Browser, url: str, **options: Any) -> Iterator[Visitor]:
    """Somebody with a browser of their own, for the body of the `with`."""
    context = browser.new_context(viewport={"width": 1280, "height": 800}, **options)
    try:
        one = Visitor(context, url)
        yield one
        one.check()
    finally:
        context.close()


def link(http: httpx2.Client) -> str:
    """The path of a link that signs in once."""
    return http.post("/v1/console/code").raise_for_status().json()["path"]


def row(page: Page, text: str) -> Any:
    """The visible row of the tree that has this text."""
    return page.locator(".row:not([hidden])", has_text=text).first


def start(http: httpx2.Client, text: str) -> str:
    """Start a run."""
    return http.post("/v1/runs", json={"input": text}).raise_for_status().json()["run_id"]
