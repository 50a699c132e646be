"""Signing in with a browser: codes, cookies, origins, names, and what a page may and may not do."""

from __future__ import annotations

import json
import re
import stat
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest
import trio

from hermes_trio.console.routes import console_routes
from hermes_trio.http.auth import ADMIN, Keyring
from hermes_trio.http.settings import ServerSettings
from hermes_trio.http.signin import MOST_CODES, MOST_SESSIONS, SESSION_FILE, SignIn
from tests.http.gateway import KEY, Gateway, open_gateway

SESSION = "/v1/console/session"


@asynccontextmanager
async def open_console(**options: Any) -> AsyncIterator[Gateway]:
    """A gateway with the console's routes, and a client without a key."""
    async with open_gateway(routes=console_routes(), **options) as gateway:
        del gateway.http.headers["Authorization"]
        gateway.http.headers["Origin"] = gateway.url
        yield gateway


async def sign_in(gateway: Gateway, key: str = KEY) -> httpx2.Response:
    """Sign in with a key; the client keeps the cookie."""
    answer = await gateway.http.post(SESSION, json={"key": key})
    assert answer.status_code == 200, answer.text
    return answer


async def test_a_code_signs_one_browser_in_once(fast_path: bool) -> None:
    """The cookie is out of reach of scripts and other sites, and carries the rights of the key; a second use of the code is refused."""
    async with open_console(fast_path=fast_path) as gateway:
        made = await gateway.http.post("/v1/console/code", headers={"Authorization": f"Bearer {KEY}"})
        code = made.json()["code"]
        assert made.json()["path"] == f"/#/sign-in/{code}"
        answer = await gateway.http.post(SESSION, json={"code": code})
        assert answer.json()["admin"] is True
        cookie = answer.headers["set-cookie"]
        assert {"HttpOnly", "SameSite=Strict", "Path=/"} <= {part.strip() for part in cookie.split(";")}
        assert "Secure" not in cookie
        assert KEY not in cookie
        assert (await gateway.http.get(SESSION)).json()["name"] == "admin"
        assert (await gateway.http.get("/v1/tree")).status_code == 200
        again = await gateway.http.post(SESSION, json={"code": code})
        assert (again.status_code, again.json()["error"]["code"]) == (401, "invalid_code")


async def test_a_code_is_too_old_after_its_time() -> None:
    """Ten minutes, or what its maker says."""
    async with open_console() as gateway:
        code = gateway.core.signin.make_code(ADMIN, 0.01)
        await trio.sleep(0.02)
        assert (await gateway.http.post(SESSION, json={"code": code})).status_code == 401


async def test_behind_tls_the_cookie_is_secure() -> None:
    """A proxy that took TLS off says so."""
    async with open_console() as gateway:
        answer = await gateway.http.post(SESSION, json={"key": KEY}, headers={"X-Forwarded-Proto": "https"})
        assert answer.headers["set-cookie"].endswith("; Secure")


@pytest.mark.parametrize("key", ["", "wrong", "x" * 10_000])
async def test_a_wrong_key_signs_nobody_in(key: str) -> None:
    """401, and no cookie."""
    async with open_console() as gateway:
        answer = await gateway.http.post(SESSION, json={"key": key})
        assert answer.status_code == 401
        assert "set-cookie" not in answer.headers


async def test_a_session_has_the_scopes_and_the_tenant_of_its_key_and_ends_with_it() -> None:
    """What the key may not do the cookie may not either; revoking the key ends the session at once."""
    async with open_console() as gateway:
        row, secret = await gateway.core.store.create_api_key("dev", scopes=("runs",), tenant="acme")
        me = (await sign_in(gateway, secret)).json()
        assert (me["scopes"], me["tenant"], me["admin"]) == (["runs"], "acme", False)
        assert (await gateway.http.get("/v1/runs")).status_code == 200
        refused = await gateway.http.get("/admin/keys")
        assert (refused.status_code, refused.json()["error"]["code"]) == (403, "insufficient_scope")
        bearer = {"Authorization": f"Bearer {KEY}"}
        assert (await gateway.http.delete(f"/admin/keys/{row.id}", headers=bearer)).status_code == 200
        assert (await gateway.http.get("/v1/runs")).status_code == 401


async def test_signing_out_makes_the_cookie_worthless() -> None:
    """Also for a copy of it."""
    async with open_console() as gateway:
        answer = await sign_in(gateway)
        copied = answer.headers["set-cookie"].partition(";")[0]
        gone = await gateway.http.delete(SESSION)
        assert gone.json() == {"signed_out": True}
        assert "Max-Age=0" in gone.headers["set-cookie"]
        assert (await gateway.http.get("/v1/tree", headers={"Cookie": copied})).status_code == 401


async def test_a_session_survives_a_restart_and_its_file_holds_no_cookie(tmp_path: Path) -> None:
    """The file has digests, and is for its owner alone. A file that cannot be read signs everybody out, and nothing else."""
    async with open_console(home=tmp_path) as gateway:
        answer = await sign_in(gateway)
        cookie = answer.headers["set-cookie"].partition(";")[0]
        name, _, token = cookie.partition("=")
    file = tmp_path / SESSION_FILE
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert token not in file.read_text()
    assert len(json.loads(file.read_text())["sessions"]) == 1
    async with open_console(home=tmp_path) as gateway:
        port = gateway.url.rpartition(":")[2]
        headers = {"Cookie": f"hermes_trio_{port}={token}"}
        assert (await gateway.http.get("/v1/tree", headers=headers)).status_code == 200
        # The name has the port: a cookie of another server on this machine is not this server's.
        assert (await gateway.http.get("/v1/tree", headers={"Cookie": f"{name}x={token}"})).status_code == 401
    file.write_text("{")
    async with open_console(home=tmp_path) as gateway:
        headers = {"Cookie": f"hermes_trio_{gateway.url.rpartition(':')[2]}={token}"}
        assert (await gateway.http.get("/v1/tree", headers=headers)).status_code == 401
        await sign_in(gateway)


async def test_another_admin_key_ends_the_sessions_of_the_one_before(tmp_path: Path) -> None:
    """Whoever changes the admin key because it was seen shuts out the browsers that it let in, also those of a file."""
    async with open_console(home=tmp_path) as gateway:
        token = (await sign_in(gateway)).headers["set-cookie"].partition("=")[2].partition(";")[0]
    for key, status in ((KEY, 200), ("another-admin-key-0123456789", 401), (KEY, 200)):
        async with open_console(home=tmp_path) as gateway:
            keyring = Keyring(key, gateway.core.store)
            gateway.core.signin = SignIn(keyring, host="127.0.0.1", hosts=[], home=tmp_path)
            headers = {"Cookie": f"hermes_trio_{gateway.url.rpartition(':')[2]}={token}"}
            assert (await gateway.http.get("/v1/tree", headers=headers)).status_code == status, key
    assert KEY not in (tmp_path / SESSION_FILE).read_text()


async def test_no_key_pushes_out_the_sessions_or_codes_of_another() -> None:
    """A tenant's key signs in again and again, and makes codes without end: it loses its own, and nobody else loses anything."""
    async with open_console() as gateway:
        row, _ = await gateway.core.store.create_api_key("dev", scopes=("runs",), tenant="acme")
        dev = await gateway.core.keyring.find_by_id(row.id)
        assert dev is not None
        signin = gateway.core.signin
        code = signin.make_code(ADMIN)
        await sign_in(gateway)
        first, _ = await signin.open_session(dev)
        for _ in range(MOST_CODES + 5):
            signin.make_code(dev)
        for _ in range(MOST_SESSIONS + 5):
            await signin.open_session(dev)
        assert (await gateway.http.get("/v1/tree")).status_code == 200
        assert await signin.redeem(code) == ADMIN
        name = f"hermes_trio_{gateway.url.rpartition(':')[2]}"
        gateway.http.cookies.clear()
        assert (await gateway.http.get("/v1/tree", headers={"Cookie": f"{name}={first}"})).status_code == 401


@pytest.mark.parametrize("origin", [None, "https://evil.example", "null", "http://127.0.0.1:1", "http://localhost"])
async def test_a_change_with_a_cookie_must_come_from_a_page_of_this_server(origin: str | None, fast_path: bool) -> None:
    """Forged requests: another origin, another port, or none. A bearer key is not asked where it comes from."""
    async with open_console(fast_path=fast_path) as gateway:
        await sign_in(gateway)
        del gateway.http.headers["Origin"]
        headers = {} if origin is None else {"Origin": origin}
        for method, path in (("POST", "/v1/runs"), ("DELETE", SESSION), ("POST", "/admin/drain"), ("POST", SESSION)):
            answer = await gateway.http.request(method, path, json={"input": "x", "key": KEY}, headers=headers)
            assert (answer.status_code, answer.json()["error"]["code"]) == (403, "origin_not_allowed"), (method, path)
        assert not gateway.core.runtime.draining
        bearer = {"Authorization": f"Bearer {KEY}"}
        assert (await gateway.http.post("/v1/runs", json={"input": "x"}, headers=bearer)).status_code == 202
        await gateway.idle()


async def test_pages_and_cookies_are_for_names_of_this_server_and_keys_for_any() -> None:
    """A site whose name points here (DNS rebinding) gets neither the page nor anything with the cookie."""
    async with open_console(server=ServerSettings(hosts=["console.example.org"])) as gateway:
        token = (await sign_in(gateway)).headers["set-cookie"].partition("=")[2].partition(";")[0]
        del gateway.http.headers["Origin"]
        port = gateway.url.rpartition(":")[2]
        for host, status in (("evil.example", 421), (f"evil.example:{port}", 421), ("127.0.0.1.evil", 421)):
            page = await gateway.http.get("/", headers={"Host": host})
            assert page.status_code == status, host
        for host in (f"localhost:{port}", f"127.0.0.1:{port}", f"[::1]:{port}", "console.example.org"):
            assert (await gateway.http.get("/", headers={"Host": host})).status_code == 200, host
        rebound = {"Host": f"evil.example:{port}", "Origin": f"http://evil.example:{port}"}
        cookie = {"Cookie": f"hermes_trio_{port}={token}"}
        read = await gateway.http.get("/v1/tree", headers={"Host": f"evil.example:{port}", **cookie})
        assert (read.status_code, read.json()["error"]["code"]) == (421, "unknown_host")
        assert (
            await gateway.http.post("/v1/runs", json={"input": "x"}, headers={**rebound, **cookie})
        ).status_code == 403
        assert (await gateway.http.post(SESSION, json={"key": KEY}, headers=rebound)).status_code == 403
        bearer = {"Authorization": f"Bearer {KEY}", "Host": "proxy.example"}
        assert (await gateway.http.get("/v1/tree", headers=bearer)).status_code == 200


async def test_the_page_and_its_files_carry_their_protections(fast_path: bool) -> None:
    """A policy without inline code, no frames, no sniffing; files have a tag, and nothing outside the folder is served."""
    async with open_console(fast_path=fast_path) as gateway:
        page = await gateway.http.get("/")
        assert page.headers["content-type"] == "text/html; charset=utf-8"
        policy = page.headers["content-security-policy"]
        for part in ("default-src 'none'", "script-src 'self'", "frame-ancestors 'none'", "require-trusted-types-for"):
            assert part in policy
        assert "unsafe" not in policy
        assert page.headers["x-frame-options"] == "DENY"
        assert page.headers["x-content-type-options"] == "nosniff"
        script = await gateway.http.get("/console/js/app.js")
        assert script.headers["content-type"].startswith("text/javascript")
        same = await gateway.http.get("/console/js/app.js", headers={"If-None-Match": script.headers["etag"]})
        assert (same.status_code, same.content) == (304, b"")
        for path in ("/console/nothing.js", "/console/js/../../routes.py", "/console/%2e%2e/routes.py", "/console/js"):
            assert (await gateway.http.get(path)).status_code == 404, path


def test_every_file_of_the_page_is_its_own() -> None:
    """No inline script or style, no markup from text, no address of another host: what the policy forbids is not even tried."""
    folder = Path(__file__).parents[2] / "hermes_trio" / "console" / "static"
    files = [file for file in folder.rglob("*") if file.is_file()]
    assert len(files) > 20
    for file in files:
        text = file.read_text(encoding="utf-8")
        for word in (
            "innerHTML",
            "outerHTML",
            "insertAdjacentHTML",
            "document.write",
            "eval(",
            "new Function",
            "DOMParser",
        ):
            assert word not in text.replace("no innerHTML", ""), (file, word)
        addresses = text.replace("http://www.w3.org/2000/svg", "")
        assert "http://" not in addresses, file
        assert "https://" not in addresses, file
        if file.suffix == ".html":
            assert "<style" not in text
            assert " style=" not in text
            assert text.count("<script") == text.count('<script type="module" src=')


def test_every_exported_function_of_the_page_says_its_types() -> None:
    """JSDoc before each export, with a type for each parameter and for what comes back."""
    folder = Path(__file__).parents[2] / "hermes_trio" / "console" / "static" / "js"
    exported = 0
    for file in sorted(folder.rglob("*.js")):
        text = file.read_text(encoding="utf-8")
        for found in re.finditer(
            r"^export (?:async )?(function|class|const) (\w+)(?: = (?:async )?)?\(?([^\n]*)", text, re.M
        ):
            exported += 1
            before = text[: found.start()].rstrip()
            doc = before[before.rfind("/**") :] if before.endswith("*/") else ""
            where = f"{file.name}: {found[2]}"
            assert doc, f"{where} has no JSDoc"
            arguments = found[3].startswith((")", " ")) is False and (found[1] == "function" or ") =>" in found[3])
            if arguments and not found[3].startswith(")"):
                assert "@param {" in doc, f"{where} has parameters without types"
    assert exported > 45
