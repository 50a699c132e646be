"""Attacks on the console: forged requests and rebound names against every route of the URL map, and frames, in a real browser."""

from __future__ import annotations

import re
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING

import httpx2
import pytest
import trio

from hermes_trio.config import load_config
from hermes_trio.gateway.serving import Serving, open_server
from hermes_trio.http.auth import AdminKey, RequiredScope
from hermes_trio.http.routing import Route
from tests.e2e.server_process import ServerProcess

from .browser import link, needs_chromium

if TYPE_CHECKING:
    from playwright.sync_api import Browser

KEY = "attack-admin-key-0123456789"
SAFE = ("GET", "HEAD")


@asynccontextmanager
async def open_signed_in(home: Path) -> AsyncIterator[tuple[Serving, httpx2.AsyncClient, list[Route]]]:
    """The whole server with every adapter's addresses, and a client that has nothing but a cookie."""
    config = load_config({}, home=home, server={"port": 0})
    with trio.fail_after(60):
        async with open_server(config, AdminKey(KEY)) as serving:
            url = serving.addresses[0]
            async with httpx2.AsyncClient(base_url=url, trust_env=False, timeout=30) as http:
                signed = await http.post("/v1/console/session", json={"key": KEY}, headers={"Origin": url})
                assert signed.status_code == 200
                yield serving, http, [route for route in serving.gateway.api.routes if route.path]


def filled(route: Route) -> str:
    """The path of a route, with something in its placeholders."""
    return re.sub(r"\{\w+\}", "x", route.path)


async def test_no_route_that_changes_something_takes_a_cookie_from_another_origin(tmp_path: Path) -> None:
    """Walked from the URL map: another site, another port, no origin at all, an opaque one; nothing is changed by any of them."""
    async with open_signed_in(tmp_path) as (serving, http, routes):
        changing = [route for route in routes if route.method not in SAFE]
        assert len(changing) > 25
        assert {"/v1/runs", "/admin/drain", "/v1/web/conversations/{conversation}/seen"} <= {
            route.path for route in changing
        }
        before = await serving.gateway.gateway.store.list_api_keys(include_revoked=True)
        for route in changing:
            for origin in (None, "null", "https://evil.example", "http://127.0.0.1:1", "http://localhost"):
                answer = await http.request(
                    route.method, filled(route), json={}, headers={} if origin is None else {"Origin": origin}
                )
                if route.access is RequiredScope.OPEN and route.name != "console_sign_in":
                    # An address without a key (a webhook) has a signature instead: the cookie is worth nothing there.
                    assert answer.status_code in (401, 403, 404), (route.path, origin)
                    continue
                assert answer.status_code == 403, (route.method, route.path, origin, answer.text)
                assert answer.json()["error"].get("code", "origin_not_allowed") == "origin_not_allowed"
        assert not serving.gateway.runtime.draining
        assert await serving.gateway.gateway.store.list_api_keys(include_revoked=True) == before
        assert (await http.get("/v1/runs")).json()["data"] == []


async def test_no_route_answers_a_cookie_under_a_name_that_is_not_the_servers(tmp_path: Path) -> None:
    """DNS rebinding, walked from the URL map: pages and everything behind a cookie, reads and changes alike."""
    async with open_signed_in(tmp_path) as (serving, http, routes):
        port = serving.addresses[0].rpartition(":")[2]
        (cookie,) = [f"{name}={value}" for name, value in http.cookies.items()]
        checked = 0
        for route in routes:
            name = f"evil.example:{port}"
            headers = {"Host": name, "Origin": f"http://{name}", "Cookie": cookie}
            if route.access is RequiredScope.OPEN and route.tag != "console" and not route.path.startswith("/console"):
                continue
            answer = await http.request(route.method, filled(route), json={}, headers=headers)
            assert answer.status_code in (403, 421), (route.method, route.path, answer.status_code)
            assert "set-cookie" not in answer.headers
            checked += 1
        assert checked > 50
        for path in ("/", "/chat", "/console/js/app.js"):
            assert (await http.get(path, headers={"Host": f"evil.example:{port}"})).status_code == 421
        assert not serving.gateway.runtime.draining


class _Evil(BaseHTTPRequestHandler):
    """A page of somebody else, on the same machine: of the same site as the server, so that even a strict cookie is sent."""

    def do_GET(self) -> None:
        body = b"<!doctype html><title>evil</title><body></body>"
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Nothing is logged."""


@contextmanager
def evil_site() -> Iterator[str]:
    """The address of such a page, for the body of the `with`."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Evil)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


FORGE = """async (url) => {
  const tried = [];
  for (const [method, path] of [["POST", "/admin/drain"], ["POST", "/v1/runs"], ["POST", "/admin/keys"], ["POST", "/v1/web/conversations/a/messages"]]) {
    for (const mode of ["no-cors", "cors"]) {
      try { tried.push((await fetch(url + path, {method, mode, credentials: "include", body: '{"input":"x","text":"x","name":"x"}'})).type); }
      catch (error) { tried.push("refused"); }
    }
  }
  return tried;
}"""

FORM = """(url) => new Promise((done) => {
  const frame = document.createElement("iframe");
  frame.name = "target";
  document.body.append(frame);
  const form = document.createElement("form");
  Object.assign(form, {method: "POST", action: url + "/admin/drain", target: "target", enctype: "text/plain"});
  document.body.append(form);
  form.submit();
  setTimeout(done, 500);
})"""

FRAME = """(url) => new Promise((done) => {
  const frame = document.createElement("iframe");
  Object.assign(frame, {name: "victim", width: 800, height: 600, onload: () => setTimeout(done, 500)});
  frame.src = url;
  document.body.append(frame);
})"""


@needs_chromium()
@pytest.mark.slow
@pytest.mark.parametrize("path", ["/", "/chat", "/docs"])
def test_a_frame_on_another_origin_shows_nothing(
    browser: Browser, server: ServerProcess, http: httpx2.Client, path: str
) -> None:
    """Clickjacking by a page that gets the cookie along: the browser refuses to show ours, and says which policy forbids it."""
    context = browser.new_context()
    try:
        page = context.new_page()
        page.goto(server.url + link(http))
        page.get_by_role("treegrid").wait_for()
        with evil_site() as evil:
            words: list[str] = []
            page.on("console", lambda message: words.append(message.text))
            page.goto(evil)
            page.evaluate(FRAME, server.url + path)
            frame = page.frame(name="victim")
            assert frame is not None
            assert frame.url.startswith("chrome-error://"), frame.url
            assert "hermes" not in frame.content().lower()
            assert any("frame-ancestors" in text or "X-Frame-Options" in text for text in words), words
    finally:
        context.close()


@needs_chromium()
@pytest.mark.slow
def test_a_page_of_another_origin_changes_nothing_with_the_cookie_that_it_sends(
    browser: Browser, server: ServerProcess, http: httpx2.Client
) -> None:
    """Forged requests and a forged form, from the same site: the cookie goes along, and the server refuses the origin."""
    keys, runs = (http.get(path).json()["data"] for path in ("/admin/keys", "/v1/runs"))
    context = browser.new_context()
    try:
        page = context.new_page()
        page.goto(server.url + link(http))
        page.get_by_role("treegrid").wait_for()
        sent: list[bool] = []
        context.on("request", lambda request: sent.append(request.method == "POST" and "/admin/drain" in request.url))
        with evil_site() as evil:
            page.goto(evil)
            assert set(page.evaluate(FORGE, server.url)) <= {"opaque", "refused"}
            page.evaluate(FORM, server.url)
        assert sum(sent) >= 2
        assert http.get("/admin/drain").json()["draining"] is False
        assert http.get("/admin/keys").json()["data"] == keys
        assert http.get("/v1/runs").json()["data"] == runs
        assert http.get("/v1/web/conversations/a/messages").json()["data"] == []
    finally:
        context.close()
