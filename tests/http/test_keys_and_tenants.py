"""Who may do what: keys on every route, scopes, tenants, revocation, and the key of a first start."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import h11
import pytest
import trio

from hermes_trio.config import load_config, loose_modes
from hermes_trio.http.auth import UnsafeKey, admin_key, is_loopback, keep_key
from hermes_trio.http.errors import translate
from hermes_trio.runtime.turn import Turn
from hermes_trio.store.errors import AlreadyStarted, StoreError, UnknownRecord

from .gateway import KEY, Events, open_gateway


async def test_every_route_but_the_open_ones_needs_a_key(fast_path: bool) -> None:
    """Without a key, with a wrong one, or with another scheme, every route of the table is 401, with four keys."""
    async with open_gateway(fast_path=fast_path) as gateway:
        del gateway.http.headers["Authorization"]
        for route in gateway.core.routes:
            path = route.path.replace("{", "").replace("}", "")
            for value in (None, "Bearer wrong-key-0123456789", f"bearer {KEY}", f"Basic {KEY}", "Bearer"):
                headers = {} if value is None else {"Authorization": value}
                answer = await gateway.http.request(route.method, path, headers=headers)
                if route.access.value == "open":
                    assert answer.status_code == 200
                    continue
                assert answer.status_code == 401, (route.name, value)
                error = answer.json()["error"]
                assert set(error) == {"message", "type", "param", "code"}
                assert error["code"] == "invalid_api_key"


async def test_scopes(fast_path: bool) -> None:
    """A key opens the routes of its scopes and no others; admin opens all."""
    async with open_gateway(fast_path=fast_path) as gateway:
        tries = {
            "chat": ("POST", "/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
            "runs": ("POST", "/v1/runs", {"input": "x"}),
            "sessions": ("GET", "/api/sessions", None),
            "admin": ("GET", "/admin/keys", None),
        }
        for scope in tries:
            headers = await gateway.key(scope)
            for wanted, (method, path, body) in tries.items():
                answer = await gateway.http.request(method, path, json=body, headers=headers)
                allowed = scope in (wanted, "admin")
                assert (answer.status_code < 300) is allowed, (scope, wanted)
                if not allowed:
                    assert (answer.status_code, answer.json()["error"]["code"]) == (403, "insufficient_scope")
            assert (await gateway.http.get("/v1/models", headers=headers)).status_code == 200
        await gateway.idle()


async def test_a_key_sees_only_what_it_created() -> None:
    """Runs, sessions and responses of one key do not exist for another; the admin sees them all."""
    async with open_gateway() as gateway:
        scopes = ("chat", "runs", "sessions")
        mine, theirs = await gateway.key(*scopes, name="a"), await gateway.key(*scopes, name="b")
        run_id = (await gateway.http.post("/v1/runs", json={"input": "x"}, headers=mine)).json()["run_id"]
        await gateway.ended(run_id)
        session = "mine-1"
        await gateway.chat("secret", headers={**mine, "X-Hermes-Session-Id": session})
        response = (await gateway.http.post("/v1/responses", json={"input": "x"}, headers=mine)).json()["id"]
        for path in (f"/v1/runs/{run_id}", f"/v1/runs/{run_id}/events", f"/v1/runs/{run_id}/tree"):
            assert (await gateway.http.get(path, headers=theirs)).status_code == 404
            assert (await gateway.http.get(path, headers=mine)).status_code == 200
            assert (await gateway.http.get(path)).status_code == 200
        for path in (f"/api/sessions/{session}", f"/api/sessions/{session}/messages", f"/v1/responses/{response}"):
            assert (await gateway.http.get(path, headers=theirs)).status_code == 404
            assert (await gateway.http.get(path, headers=mine)).status_code == 200
        assert (await gateway.http.get("/v1/runs", headers=theirs)).json()["data"] == []
        assert (await gateway.http.get("/api/sessions", headers=theirs)).json()["data"] == []
        assert len((await gateway.http.get("/v1/runs", headers=mine)).json()["data"]) == 1
        assert len((await gateway.http.get("/v1/runs")).json()["data"]) == 1
        for method, path in (
            ("POST", f"/v1/runs/{run_id}/stop"),
            ("POST", f"/v1/runs/{run_id}/approval"),
            ("DELETE", f"/api/sessions/{session}"),
            ("PATCH", f"/api/sessions/{session}"),
            ("POST", f"/api/sessions/{session}/fork"),
            ("POST", f"/api/sessions/{session}/chat"),
            ("DELETE", f"/v1/responses/{response}"),
        ):
            answer = await gateway.http.request(method, path, json={"choice": "once", "message": "x"}, headers=theirs)
            assert answer.status_code == 404, path


async def test_a_session_id_cannot_be_used_to_reach_another_tenant() -> None:
    """Naming another tenant's session is 404 on every way in, also while that session is only in the making."""
    inside, go = trio.Event(), trio.Event()

    async def agent(turn: Turn) -> str:
        if turn.input.text == "hold":
            inside.set()
            await go.wait()
        return "ok"

    async with open_gateway(agent) as gateway:
        mine, theirs = await gateway.key("chat", "runs", name="a"), await gateway.key("chat", "runs", name="b")

        async def hold() -> None:
            assert (await gateway.chat("hold", headers={**mine, "X-Hermes-Session-Id": "s"})).status_code == 200

        async def refused() -> None:
            answer = await gateway.chat("x", headers={**theirs, "X-Hermes-Session-Id": "s"})
            assert (answer.status_code, answer.json()["error"]["code"]) == (404, "session_not_found")
            answer = await gateway.http.post("/v1/runs", json={"input": "x", "session_id": "s"}, headers=theirs)
            assert answer.status_code == 404

        async with trio.open_nursery() as nursery:
            nursery.start_soon(hold)
            await inside.wait()
            await refused()
            go.set()
        await refused()


async def test_derived_sessions_have_a_tenant() -> None:
    """The same opening from two keys is two sessions, and a session key of one cannot be the other's."""
    keys: list[str] = []

    async def agent(turn: Turn) -> str:
        keys.append(turn.context.session_key)
        return "ok"

    async with open_gateway(agent) as gateway:
        ids: list[str] = []
        for name in ("a", "b"):
            headers = {**await gateway.key("chat", name=name), "X-Hermes-Session-Key": "agent:main:telegram:dm:42"}
            ids.append((await gateway.chat("hello", headers=headers)).headers["x-hermes-session-id"])
        assert len(set(ids)) == 2
        assert len(set(keys)) == 2
        assert "agent:main:telegram:dm:42" not in keys


async def test_keys_are_made_listed_and_revoked_by_the_admin() -> None:
    """A key is shown once, is listed without itself, and is refused from the moment in which it is revoked."""
    async with open_gateway() as gateway:
        made = await gateway.http.post("/admin/keys", json={"name": "ci", "scopes": ["chat"]})
        assert made.status_code == 201
        key = made.json()
        headers = {"Authorization": f"Bearer {key['key']}"}
        assert (await gateway.chat(headers=headers)).status_code == 200
        listed = await gateway.http.get("/admin/keys")
        assert [entry["name"] for entry in listed.json()["data"]] == ["ci"]
        assert key["key"] not in listed.text
        assert (await gateway.http.delete(f"/admin/keys/{key['id']}")).status_code == 200
        assert (await gateway.chat(headers=headers)).status_code == 401
        assert (await gateway.http.delete(f"/admin/keys/{key['id']}")).status_code == 404
        for body in ({"name": ""}, {"name": "x", "scopes": ["root"]}, {"name": "x", "scopes": []}, {}):
            assert (await gateway.http.post("/admin/keys", json=body)).status_code == 400
        expired = await gateway.http.post("/admin/keys", json={"name": "short", "scopes": ["chat"], "days": 1e-9})
        headers = {"Authorization": f"Bearer {expired.json()['key']}"}
        assert (await gateway.chat(headers=headers)).status_code == 401


@pytest.mark.one_node
async def test_a_key_that_is_revoked_while_it_is_looked_up_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """The store's answer may be older than the signal of the revocation that arrives before it."""
    async with open_gateway() as gateway:
        store = gateway.core.store
        row, secret = await store.create_api_key("short", scopes=("chat",))
        find, list_all = store.find_api_key, store.list_api_keys

        async def find_late(secret: str) -> object:
            found = await find(secret)
            await store.revoke_api_key(row.id)
            return found

        async def list_late() -> object:
            found = await list_all()
            await store.revoke_api_key(row.id)
            return found

        with monkeypatch.context() as patched:
            patched.setattr(store, "find_api_key", find_late)
            patched.setattr(store, "list_api_keys", list_late)
            headers = {"Authorization": f"Bearer {secret}"}
            for _ in range(2):
                assert (await gateway.http.get("/v1/models", headers=headers)).status_code == 401
            row, secret = await store.create_api_key("short", scopes=("chat",))
            assert await gateway.core.keyring.find(secret) is None
            row, secret = await store.create_api_key("short", scopes=("chat",))
            assert await gateway.core.keyring.find_by_id(row.id) is None


async def patient(turn: Turn) -> str:
    """Waits to be stopped."""
    await trio.sleep_forever()
    raise AssertionError


async def read_to_the_end(events: Events) -> None:
    """Read a stream until the server ends it, whole or cut off."""
    try:
        await events.all()
    except h11.RemoteProtocolError:
        pass


@pytest.mark.parametrize("how", ["revoked", "expired"])
async def test_open_streams_end_with_the_key_that_reads_them(how: str, fast_path: bool) -> None:
    """Of the tree, of a run, and of a response: a key that is revoked or expires reads nothing more. The run that it started continues."""
    async with open_gateway(patient, fast_path=fast_path) as gateway:
        store = gateway.core.store
        until = store.now() + 1.5 if how == "expired" else None
        row, secret = await store.create_api_key("short", scopes=("runs", "chat"), tenant="t", expires_at=until)
        headers = {"Authorization": f"Bearer {secret}"}
        run_id = (await gateway.http.post("/v1/runs", json={"input": "x"}, headers=headers)).json()["run_id"]
        body = {"input": "x", "background": True}
        response = (await gateway.http.post("/v1/responses", json=body, headers=headers)).json()["id"]
        paths = ("/v1/tree/events", f"/v1/runs/{run_id}/events", f"/v1/responses/{response}?stream=true")
        with trio.fail_after(10):
            async with trio.open_nursery() as nursery:
                for path in paths:

                    async def read(path: str, task_status: trio.TaskStatus[None]) -> None:
                        async with gateway.events(path, headers=headers) as events:
                            assert events.response.status_code == 200
                            task_status.started()
                            await read_to_the_end(events)

                    await nursery.start(read, path)
                if how == "revoked":
                    assert await store.revoke_api_key(row.id)
        assert (await gateway.http.get("/v1/tree", headers=headers)).status_code == 401
        assert (await gateway.http.get(f"/v1/runs/{run_id}")).json()["status"] == "running"


async def test_a_completion_under_way_goes_on_when_its_key_is_revoked(fast_path: bool) -> None:
    """The turn was allowed when it began: its stream has the whole answer, and the next request is refused."""
    begun, may_end = trio.Event(), trio.Event()

    async def answer_later(turn: Turn) -> str:
        begun.set()
        await may_end.wait()
        return "the whole answer"

    async with open_gateway(answer_later, fast_path=fast_path) as gateway:
        store = gateway.core.store
        row, secret = await store.create_api_key("short", scopes=("chat",), tenant="t")
        headers = {"Authorization": f"Bearer {secret}"}
        body = {"messages": [{"role": "user", "content": "x"}], "stream": True}
        with trio.fail_after(10):
            async with gateway.events("/v1/chat/completions", method="POST", json=body, headers=headers) as events:
                await begun.wait()
                assert await store.revoke_api_key(row.id)
                refused = await gateway.http.post("/v1/chat/completions", json=body, headers=headers)
                assert refused.status_code == 401
                may_end.set()
                told = [event.data for event in await events.all()]
        assert told[-1] == "[DONE]"
        assert "the whole answer" in str(told)


async def test_a_stream_that_is_read_with_x_api_key_is_not_taken_for_one_of_a_browser(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It has no browser session that could have ended."""
    monkeypatch.setattr("hermes_trio.http.app.SESSION_CHECK_SECONDS", 0.01)
    monkeypatch.setattr("hermes_trio.http.api.tree.HEARTBEAT_SECONDS", 0.02)
    async with open_gateway() as gateway:
        headers = {"Host": "127.0.0.1", "x-api-key": KEY, "Cookie": "hermes_trio=not-a-session"}
        del gateway.http.headers["Authorization"]
        async with gateway.events("/v1/tree/events", headers=headers) as events:
            for _ in range(5):
                assert await events.next() is not None


@pytest.mark.one_node
def test_the_first_start_makes_a_key_that_only_its_owner_can_read(tmp_path: Path) -> None:
    """The generated key is kept, when the server is up, with mode 0600, and found again by the next start."""
    first = admin_key("", tmp_path, ["127.0.0.1"])
    assert first.made
    assert first.path is not None
    assert not first.path.exists()
    keep_key(first)
    assert stat.S_IMODE(first.path.stat().st_mode) == 0o600
    assert first.value not in repr(first)
    again = admin_key("", tmp_path, ["::1", "localhost"])
    assert (again.value, again.made) == (first.value, False)


@pytest.mark.one_node
def test_other_addresses_need_a_real_key(tmp_path: Path) -> None:
    """A public address without a key, a short key and a placeholder are refused, and nothing is written."""
    for hosts in (["0.0.0.0"], ["127.0.0.1", "192.168.1.5"], ["::"], ["example.org"]):
        with pytest.raises(UnsafeKey, match="API_SERVER_KEY"):
            admin_key("", tmp_path, hosts)
    for key in ("short", "your-secret-key-here", "a" * 32, "has a space in the middle"):
        with pytest.raises(UnsafeKey):
            admin_key(key, tmp_path, ["127.0.0.1"])
    assert admin_key(" 0123456789abcdef ", tmp_path, ["0.0.0.0"]).value == "0123456789abcdef"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.one_node
def test_loopback_addresses() -> None:
    """Only addresses that stay on this machine are loopback."""
    assert all(is_loopback(host) for host in ("127.0.0.1", "127.8.9.1", "::1", "[::1]", "localhost"))
    assert not any(is_loopback(host) for host in ("0.0.0.0", "::", "10.0.0.1", "example.org", "localhost.example.org"))


@pytest.mark.one_node
async def test_refused_keys_cannot_flood_the_log(caplog: pytest.LogCaptureFixture) -> None:
    """Ten lines a minute say who was refused; the rest is counted."""
    async with open_gateway() as gateway:
        for _ in range(30):
            answer = await gateway.http.get("/v1/models", headers={"Authorization": "Bearer wrong-key-0123456789"})
            assert answer.status_code == 401
    assert len([record for record in caplog.records if "refused" in record.message]) == 10


@pytest.mark.one_node
def test_modes_that_let_others_in_are_told(tmp_path: Path) -> None:
    """A home directory, configuration or key file that others can read or change is named, with the remedy."""
    home = tmp_path / "home"
    home.mkdir(mode=0o700)
    (home / "config.toml").touch(mode=0o600)
    (home / "api_server.key").touch(mode=0o600)
    assert loose_modes(load_config({}, home=home)) == []
    home.chmod(0o755)
    (home / "config.toml").chmod(0o660)
    (home / "api_server.key").chmod(0o644)
    assert [line.split(": ")[1] for line in loose_modes(load_config({}, home=home))] == [
        f"run `chmod 700 {home}`",
        f"run `chmod 600 {home}/config.toml`",
        f"run `chmod 600 {home}/api_server.key`",
    ]


@pytest.mark.one_node
@pytest.mark.parametrize("terminal", [True, False])
def test_a_generated_key_is_never_printed(tmp_path: Path, terminal: bool) -> None:
    """A first start says where the key is kept, and not what it is, on a terminal or not."""
    reader, writer = os.openpty() if terminal else os.pipe()
    server = subprocess.Popen(
        [sys.executable, "-m", "hermes_trio", "serve", "--port", "0", "--home", str(tmp_path / "home")],
        stdout=writer,
        stderr=subprocess.DEVNULL,
        env={"PATH": os.environ["PATH"], "HOME": str(tmp_path)},
    )
    try:
        os.close(writer)
        said = b""
        while b"Ctrl-C stops the server" not in said:
            said += os.read(reader, 65_536)
        key = (tmp_path / "home" / "api_server.key").read_bytes().strip()
        assert key not in said
        assert b"api_server.key (made now, mode 0600)" in said
        assert str(tmp_path / "home" / "api_server.key").encode() in said
    finally:
        server.terminate()
        server.wait(20)
        os.close(reader)


def _kinds(kind: type[Exception]) -> list[type[Exception]]:
    return [kind, *(below for child in kind.__subclasses__() for below in _kinds(child))]


@pytest.mark.one_node
@pytest.mark.parametrize("kind", [kind for kind in _kinds(StoreError) if kind not in (UnknownRecord, AlreadyStarted)])
def test_a_503_names_no_file_of_the_server(kind: type[Exception]) -> None:
    """Whatever the store failed with, and whatever path its text has, a client is told none of it. The two that are left out are made of ids alone."""
    error = translate(kind.__new__(kind, "/srv/hermes/state.db: disk I/O error"))
    assert error is not None
    if error.status == 503:
        assert "/srv" not in error.body().decode()
        assert "state.db" not in error.body().decode()
