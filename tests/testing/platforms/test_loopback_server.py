"""The server of the fakes and its record of calls: HTTP of real clients, faults, waiting, and no leaks."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import httpx2
import pytest
import trio
from trio.testing import MockClock

from hermes_trio.testing.platforms import (
    ANY,
    Drop,
    NothingArrived,
    RateLimited,
    ServerError,
    open_fake_discord,
    open_fake_slack,
    open_fake_telegram,
)
from hermes_trio.testing.platforms.callback import post
from hermes_trio.testing.platforms.faults import FaultScript
from hermes_trio.testing.platforms.ledger import CallLedger
from hermes_trio.testing.platforms.server import FakeReply, FakeRequest, open_loopback_server

FAKES: list[Callable[[], AbstractAsyncContextManager[Any]]] = [
    open_fake_telegram,
    open_fake_discord,
    open_fake_slack,
]


@pytest.fixture
async def http() -> AsyncIterator[httpx2.AsyncClient]:
    async with httpx2.AsyncClient(trust_env=False) as client:
        yield client


def open_descriptors() -> set[str]:
    folder = "/proc/self/fd"
    found: set[str] = set()
    for name in os.listdir(folder):
        try:
            found.add(os.readlink(f"{folder}/{name}"))
        except OSError:
            continue
    return {target for target in found if target.startswith("socket:")}


@pytest.mark.parametrize("opened", FAKES)
async def test_fakes_leave_nothing_behind(opened: Callable[[], AbstractAsyncContextManager[Any]]) -> None:
    """Opening and closing a fake, also with a client still connected and waiting, leaves no socket and no task."""
    before = open_descriptors()
    tasks = trio.lowlevel.current_statistics().tasks_living
    for _ in range(3):
        async with opened() as fake:
            stream = await trio.open_tcp_stream("127.0.0.1", fake._server.port)
            await stream.send_all(b"POST /bot1:x/getUpdates?timeout=50 HTTP/1.1\r\nHost: x\r\n")
        await stream.aclose()
    assert open_descriptors() == before
    assert trio.lowlevel.current_statistics().tasks_living == tasks


@pytest.mark.parametrize("opened", FAKES)
async def test_the_tests_own_error_leaves_as_it_is(opened: Callable[[], AbstractAsyncContextManager[Any]]) -> None:
    """A failed assertion inside a fake's block is not wrapped in a group."""
    with pytest.raises(AssertionError, match="mine"):
        async with opened():
            raise AssertionError("mine")


async def test_requests_of_every_form_reach_the_handler(http: httpx2.AsyncClient) -> None:
    """Query, JSON, forms, chunked bodies and several requests on one connection are understood."""
    seen: list[FakeRequest] = []

    async def handle(request: FakeRequest) -> FakeReply:
        seen.append(request)
        return FakeReply.of({"path": request.path})

    async def chunks() -> AsyncIterator[bytes]:
        yield b'{"a":'
        yield b" 1}"

    async with open_loopback_server(handle) as server:
        assert (await http.get(f"{server.url}/a%20b?x=1&y=")).json() == {"path": "/a b"}
        await http.post(server.url, data={"text": "ä & b"})
        await http.post(server.url, content=chunks())
        assert (await http.head(server.url)).content == b""
        assert len(server.connections) == 1
    assert seen[0].query == {"x": "1", "y": ""}
    assert seen[1].form() == {"text": "ä & b"}
    assert seen[2].json() == {"a": 1}
    assert seen[1].json() is None


async def test_handler_of_a_client_that_leaves_is_cancelled() -> None:
    """A held request ends when its client disconnects."""
    held, ended = trio.Event(), trio.Event()

    async def handle(request: FakeRequest) -> FakeReply:
        held.set()
        try:
            await trio.sleep_forever()
        finally:
            ended.set()

    async with open_loopback_server(handle) as server:
        stream = await trio.open_tcp_stream("127.0.0.1", server.port)
        await stream.send_all(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        with trio.fail_after(5):
            await held.wait()
            await stream.aclose()
            await ended.wait()


async def test_garbage_ends_only_its_own_connection(http: httpx2.AsyncClient) -> None:
    """Bytes that are not HTTP end their connection; the server continues."""

    async def handle(request: FakeRequest) -> FakeReply:
        return FakeReply(200)

    async with open_loopback_server(handle) as server:
        async with await trio.open_tcp_stream("127.0.0.1", server.port) as stream:
            await stream.send_all(b"\x00\x01\r\n\r\n")
            with trio.fail_after(5):
                assert await stream.receive_some() == b""
        assert (await http.get(server.url)).status_code == 200


async def test_bot_api_takes_forms_and_any_spelling(http: httpx2.AsyncClient) -> None:
    """The fake Bot API takes GET with a query, forms with JSON text inside, and method names in any case."""
    async with open_fake_telegram() as fake:
        fake.say("hello")
        url = f"{fake.base_url}/bot{fake.token}"
        assert (await http.get(f"{url}/GETME")).json()["ok"]
        markup = '{"inline_keyboard": [[{"text": "a", "callback_data": "a"}]]}'
        form = {"chat_id": "42", "text": "from a form", "reply_markup": markup}
        assert (await http.post(f"{url}/sendMessage", data=form)).json()["ok"]
        assert (await fake.wait_for_message(chat_id=42)).buttons[0][0]["text"] == "a"
        broken = await http.post(f"{url}/sendMessage", data=form | {"reply_markup": "{"})
        assert (broken.status_code, "can't parse reply markup" in broken.text) == (400, True)
        assert (await http.get(f"{fake.base_url}/nonsense")).status_code == 404
        assert (await http.get(f"{url}/noSuchMethod")).json()["description"] == "Not Found"


async def test_negative_offset_forgets_all_but_the_last_updates(http: httpx2.AsyncClient) -> None:
    """getUpdates with a negative offset counts from the end, and drops all earlier updates."""
    async with open_fake_telegram() as fake:
        for number in range(3):
            fake.say(str(number))
        url = f"{fake.base_url}/bot{fake.token}/getUpdates"
        updates = (await http.get(url, params={"offset": -1})).json()["result"]
        assert [update["message"]["text"] for update in updates] == ["2"]
        assert len(fake.pending_update_ids) == 1
        assert len((await http.get(url, params={"limit": 1})).json()["result"]) == 1


async def test_allowed_updates_filter_what_is_queued(http: httpx2.AsyncClient) -> None:
    """Kinds that were not requested are not queued."""
    async with open_fake_telegram() as fake:
        url = f"{fake.base_url}/bot{fake.token}/getUpdates"
        await http.get(url, params={"allowed_updates": '["callback_query"]'})
        fake.say("ignored")
        assert fake.pending_update_ids == []


async def test_calls_are_recorded_in_order_with_their_outcome(http: httpx2.AsyncClient) -> None:
    """Every call is in the record, the failed ones with status and error, the dropped ones with 0."""
    async with open_fake_slack() as fake:
        fake.fail("auth.test", RateLimited(2))
        fake.fail("auth.test", ServerError(500))
        fake.fail(ANY, Drop())
        headers = {"authorization": f"Bearer {fake.token}"}
        answers = [await http.post(f"{fake.base_url}/auth.test", headers=headers) for _ in range(2)]
        with pytest.raises(httpx2.RemoteProtocolError):
            await http.post(f"{fake.base_url}/auth.test", headers=headers)
        await http.post(f"{fake.base_url}/auth.test", headers=headers)
        assert answers[0].headers["retry-after"] == "2"
        assert [(call.number, call.status, call.error) for call in fake.calls] == [
            (0, 429, "ratelimited"),
            (1, 500, "upstream failure"),
            (2, 0, "connection dropped"),
            (3, 200, None),
        ]
        assert (await fake.wait_for_call("auth.test", count=4)).number == 3


async def test_waiting_for_what_never_comes_says_what_came(autojump_clock: MockClock) -> None:
    """A wait that fails lists the calls that were recorded."""
    ledger: CallLedger[str] = CallLedger("word")
    ledger.append("something else")
    with pytest.raises(NothingArrived, match="something else"):
        await ledger.first(lambda word: word == "this", wanted="this")


async def test_waiting_sees_the_past_and_changes_in_place(autojump_clock: MockClock) -> None:
    """Entries from before the wait count, and so do entries that change during it."""
    ledger: CallLedger[list[str]] = CallLedger("list")
    ledger.append(["early"])
    assert await ledger.first(lambda words: "early" in words, wanted="") == ["early"]

    async def change() -> None:
        ledger[0].append("late")
        ledger.touch()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(change)
        assert await ledger.first(lambda words: "late" in words, wanted="") == ["early", "late"]


def test_faults_are_used_up_in_order() -> None:
    """Faults of a method come before those of any method, each once, and can be withdrawn."""
    script = FaultScript()
    script.add(ANY, Drop())
    script.add("sendMessage", ServerError(), times=2)
    assert [script.take("SENDMESSAGE") for _ in range(4)] == [ServerError(), ServerError(), Drop(), None]
    script.add("getMe", Drop())
    script.clear()
    assert script.take("getMe") is None


async def test_callback_reports_any_failure_as_status_zero() -> None:
    """An endpoint that is not there, one that hangs and one that hangs up are deliveries with status 0."""

    async def hang(request: FakeRequest) -> FakeReply:
        await trio.sleep_forever()
        return FakeReply(200)

    assert (await post("http://127.0.0.1:1/", {}, b"", timeout=5)).status == 0
    async with open_loopback_server(hang) as server:
        assert (await post(server.url, {}, b"", timeout=0.05)).status == 0
