"""Slow clients: each wait has its bound, and its own end."""

from __future__ import annotations

import msgspec
import pytest
import trio

from hermes_trio.http.server import Ending
from hermes_trio.http.server.open_connections import Connections

from .loopback import request, running
from .sample_app import SampleApp

SOON = 0.08


async def test_idle_connection_is_closed_before_its_first_request(fast: bool) -> None:
    """A connection that never says anything is closed."""
    async with running(SampleApp(), fast=fast, keep_alive_timeout=SOON) as server:
        assert await (await server.connect()).rest() == b""


async def test_idle_connection_is_closed_between_requests(fast: bool) -> None:
    """The keep-alive timeout holds after a request as well as before the first."""
    async with running(SampleApp(), fast=fast, keep_alive_timeout=SOON) as server:
        client = await server.connect()
        for _ in range(3):
            assert (await client.get("/echo")).status == 200
        assert await client.rest() == b""


async def test_keep_alive_timeout_does_not_touch_a_request_under_way(fast: bool) -> None:
    """A handler may take longer than an idle connection may live."""
    app = SampleApp()
    async with running(app, fast=fast, keep_alive_timeout=SOON) as server:
        client = await server.connect()
        await client.send(request("/wait"))
        await app.waiting.wait()
        idle = await server.connect()
        assert await idle.rest() == b""
        app.finish.set()
        assert (await client.reply()).status == 200


async def test_slow_head_is_answered_408() -> None:
    """A head that trickles in does not live longer by trickling."""
    async with running(SampleApp(), head_timeout=SOON) as server:
        client = await server.connect()
        async with trio.open_nursery() as nursery:

            async def trickle() -> None:
                try:
                    while True:
                        await client.send(b"GET / HTTP/1.1\r\nX: 1" if not app_started else b"1")
                        app_started.append(True)
                        await trio.sleep(SOON / 10)
                except trio.BrokenResourceError:
                    return

            app_started: list[bool] = []
            nursery.start_soon(trickle)
            reply = await client.reply()
            nursery.cancel_scope.cancel()
        assert reply.status == 408
        assert msgspec.json.decode(reply.body)["error"]["code"] == "request_timeout"


async def test_line_ends_before_a_request_do_not_keep_a_connection_alive() -> None:
    """Empty lines are no request: the idle timeout goes on."""
    async with running(SampleApp(), keep_alive_timeout=SOON, head_timeout=SOON) as server:
        client = await server.connect()
        await client.send(b"\r\n\r\n")
        assert await client.rest() == b""


async def test_slow_body_is_answered_408_and_its_handler_cancelled() -> None:
    """A body that does not arrive ends its request, and the client is told why."""
    app = SampleApp()
    async with running(app, body_timeout=SOON) as server:
        client = await server.connect()
        await client.send(request("/wait", "POST", Content_Length="10") + b"half")
        reply = await client.reply()
        assert reply.status == 408
        assert not app.waiting.is_set()
        assert await client.rest() == b""


async def test_dripping_body_does_not_outlive_its_rate() -> None:
    """A byte now and then is not progress."""
    async with running(SampleApp(), body_timeout=SOON, body_rate=100_000) as server:
        client = await server.connect()
        await client.send(request("/echo", "POST", Content_Length="100000"))
        async with trio.open_nursery() as nursery:

            async def drip() -> None:
                try:
                    while True:
                        await client.send(b"x")
                        await trio.sleep(SOON / 10)
                except trio.BrokenResourceError:
                    return

            nursery.start_soon(drip)
            assert (await client.reply()).status == 408
            nursery.cancel_scope.cancel()


async def test_handler_may_think_longer_than_the_body_timeout() -> None:
    """The body's bound ends with the body."""
    app = SampleApp()
    async with running(app, body_timeout=SOON, head_timeout=SOON, keep_alive_timeout=SOON) as server:
        client = await server.connect()
        await client.send(request("/wait", "POST", b"whole"))
        await app.waiting.wait()
        assert await (await server.connect()).rest() == b""
        app.finish.set()
        assert (await client.reply()).status == 200


async def test_stalled_reader_loses_its_connection() -> None:
    """A stream that its reader does not take is ended, with the cause on record."""
    app = SampleApp()
    async with running(app, write_timeout=SOON) as server:
        client = await server.connect(receive_buffer=4096)
        await client.send(request("/flood"))
        await app.cancelled.wait()
        assert app.endings == [Ending.SLOW_READER]


async def test_reading_a_body_does_not_excuse_a_stalled_reader() -> None:
    """A client that keeps sending its body and never reads its answer is ended as a slow reader."""
    app = SampleApp()
    async with running(app, write_timeout=SOON) as server:
        client = await server.connect(receive_buffer=4096)
        await client.send(request("/both_ways", "POST", Content_Length="1000000"))
        async with trio.open_nursery() as nursery:

            async def keep_sending() -> None:
                try:
                    while True:
                        await client.send(b"x")
                        await trio.sleep(SOON / 10)
                except trio.BrokenResourceError:
                    return

            nursery.start_soon(keep_sending)
            await app.cancelled.wait()
            nursery.cancel_scope.cancel()
        assert app.endings == [Ending.SLOW_READER]


async def test_stalled_reader_ends_a_send_that_nobody_may_cancel(fast: bool) -> None:
    """A shield around the send does not let a stalled reader hold the task."""
    app = SampleApp()
    async with running(app, fast=fast, write_timeout=SOON) as server:
        client = await server.connect(receive_buffer=4096)
        await client.send(request("/shielded_flood"))
        await app.cancelled.wait()


async def test_slow_but_steady_reader_gets_everything() -> None:
    """A reader that keeps taking a little is served to the end, however long that is."""
    async with running(SampleApp(), write_timeout=SOON * 5) as server:
        client = await server.connect(receive_buffer=4096)
        await client.send(request("/large", Connection="close"))
        received = 0
        while data := await client.stream.receive_some(200_000):
            received += len(data)
            await trio.lowlevel.checkpoint()
        assert received > 5_000_000


class Patient:
    """A connection that only counts."""

    def __init__(self, due: float) -> None:
        self.due = due
        self.expired = 0

    def expire(self) -> None:
        self.due = float("inf")
        self.expired += 1

    def dismiss(self) -> None:
        raise AssertionError("nobody stops")

    def sever(self) -> None:
        raise AssertionError("nobody stops")


async def test_the_list_ends_waits_in_order_and_once(autojump_clock: object) -> None:
    """A wait ends when it is due, moving `due` postpones it, and it is told once."""
    connections = Connections(1.0)
    now = trio.current_time()
    early, late, moved = Patient(now + 1), Patient(now + 3), Patient(now + 1)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(connections.run)
        for patient in (early, late, moved):
            connections.add(patient)
        await trio.sleep(0.5)
        moved.due = trio.current_time() + 100
        await trio.sleep(1.5)
        assert (early.expired, late.expired, moved.expired) == (1, 0, 0)
        await trio.sleep(3)
        assert (early.expired, late.expired, moved.expired) == (1, 1, 0)
        nursery.cancel_scope.cancel()


async def test_the_list_sleeps_without_a_deadline_when_there_is_nobody(autojump_clock: object) -> None:
    """An idle server wakes up for nothing."""
    connections = Connections(1.0)
    patient = Patient(float("inf"))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(connections.run)
        connections.add(patient)
        await trio.sleep(1)
        connections.remove(patient)
        await trio.sleep(2)
        assert trio.lowlevel.current_statistics().seconds_to_next_deadline == float("inf")
        nursery.cancel_scope.cancel()


async def test_blocked_loop_is_not_held_against_the_clients(mock_clock: trio.testing.MockClock) -> None:
    """After the loop itself was blocked, waits get one more tick to be met."""
    connections = Connections(1.0)
    patient = Patient(trio.current_time() + 1)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(connections.run)
        connections.add(patient)
        await trio.testing.wait_all_tasks_blocked()
        mock_clock.jump(10)
        await trio.testing.wait_all_tasks_blocked()
        assert patient.expired == 0
        mock_clock.jump(0.3)
        await trio.testing.wait_all_tasks_blocked()
        assert patient.expired == 1
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("setting", ["head_timeout", "write_timeout", "head_bytes", "drain_bytes"])
def test_limits_must_be_positive(setting: str) -> None:
    """A limit of nothing is a mistake that names its setting."""
    from hermes_trio.http.server import ServerConfig

    with pytest.raises(ValueError, match=setting):
        ServerConfig(**{setting: 0})  # type: ignore[arg-type]
