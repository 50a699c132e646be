"""Accepting: the whole queue at a time, and without spinning when there is no descriptor left."""

from __future__ import annotations

import errno
import resource
import socket
from collections.abc import Generator

import pytest
import trio

from hermes_trio.http.server.listener import accept_forever, accept_waiting, bind_of, raise_descriptor_limit
from hermes_trio.http.server.open_connections import Connections

from .test_open_connections import Patient


class FullTable(socket.socket):
    """A listener on a machine whose descriptor table is full until `room` says otherwise."""

    attempts = 0
    room = False
    failure = errno.EMFILE

    def accept(self) -> tuple[socket.socket, object]:
        self.attempts += 1
        if not self.room:
            raise OSError(self.failure, "no descriptor")
        return super().accept()


@pytest.fixture
def listener() -> Generator[FullTable]:
    """A listening loopback socket."""
    with FullTable() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen(200)
        sock.setblocking(False)
        yield sock


def connect(listener: socket.socket, count: int) -> list[socket.socket]:
    return [socket.create_connection(listener.getsockname()) for _ in range(count)]


def close(*groups: list[socket.socket]) -> None:
    for group in groups:
        for sock in group:
            sock.close()


def test_every_waiting_connection_is_accepted_in_one_go(listener: FullTable) -> None:
    """One wake-up empties the queue, up to the number after which others get their turn."""
    listener.room = True
    clients = connect(listener, 140)
    accepted: list[socket.socket] = []
    assert accept_waiting(listener, accepted.append)
    assert len(accepted) == 128
    assert accept_waiting(listener, accepted.append)
    assert len(accepted) == 140
    assert not any(sock.getblocking() for sock in accepted)
    close(clients, accepted)


async def test_full_descriptor_table_waits_for_a_connection_to_close(listener: FullTable) -> None:
    """Without a descriptor the listener tries once and then waits; a connection that closes wakes it."""
    connections = Connections(1.0)
    patient = Patient(float("inf"))
    connections.add(patient)
    clients = connect(listener, 3)
    accepted: list[socket.socket] = []
    async with trio.open_nursery() as nursery:
        nursery.start_soon(accept_forever, listener, accepted.append, connections)
        await trio.testing.wait_all_tasks_blocked(0.01)
        assert (listener.attempts, accepted) == (1, [])
        listener.room = True
        connections.remove(patient)
        await trio.testing.wait_all_tasks_blocked(0.01)
        assert len(accepted) == 3
        nursery.cancel_scope.cancel()
    close(clients, accepted)


async def test_full_descriptor_table_is_looked_at_again(listener: FullTable, autojump_clock: object) -> None:
    """Descriptors that others free are found too, after a while."""
    clients = connect(listener, 1)
    accepted: list[socket.socket] = []
    async with trio.open_nursery() as nursery:
        nursery.start_soon(accept_forever, listener, accepted.append, Connections(1.0))
        await trio.testing.wait_all_tasks_blocked(0.01)
        listener.room = True
        await trio.sleep(2)
        assert len(accepted) == 1
        nursery.cancel_scope.cancel()
    close(clients, accepted)


def test_client_that_gave_up_in_the_queue_is_passed_over(listener: FullTable) -> None:
    """A connection that broke before it was accepted is no reason to stop accepting."""
    listener.failure = errno.ECONNABORTED
    assert accept_waiting(listener, lambda _: None)


def test_descriptor_limit_is_raised_to_the_hard_one() -> None:
    """The soft limit follows the hard one, and the limit in force is reported."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 1024), hard))
        assert raise_descriptor_limit() == hard
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_addresses_are_written_as_in_bind() -> None:
    """IPv6 addresses have their brackets."""
    with socket.socket(socket.AF_INET6) as sock:
        sock.bind(("::1", 0))
        assert bind_of(sock) == f"[::1]:{sock.getsockname()[1]}"
