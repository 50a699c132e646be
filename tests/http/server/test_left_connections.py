"""Connections that another process of the same address leaves waiting."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
import trio

from hermes_trio.config import load_config
from hermes_trio.gateway.listening import AddressUnusable, bind_address, bind_for_workers
from hermes_trio.http.server.listener import accept_left, accept_waiting, open_copies


def listening() -> socket.socket:
    """A socket on a free port."""
    sock = socket.create_server(("127.0.0.1", 0))
    sock.setblocking(False)
    return sock


async def test_what_waits_too_long_is_taken_and_nothing_else(autojump_clock: object) -> None:
    """A connection that its own process accepts in time is left alone; one that it does not accept is taken."""
    taken: list[socket.socket] = []
    own: list[socket.socket] = []
    with listening() as sock, open_copies([sock.fileno()]) as copies:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(accept_left, copies, taken.append)
            with socket.create_connection(sock.getsockname()):
                await trio.sleep(0.3)
                accept_waiting(sock, own.append)
                await trio.sleep(2)
                assert (len(own), len(taken)) == (1, 0)
            with socket.create_connection(sock.getsockname()), socket.create_connection(sock.getsockname()):
                await trio.sleep(0.6)
                assert (len(own), len(taken)) == (1, 2)
            nursery.cancel_scope.cancel()
    for one in (*own, *taken):
        one.close()


def test_an_address_is_bound_for_all_workers_and_for_nobody_else(tmp_path: Path) -> None:
    """The sockets share a port, over which the kernel spreads connections; a second server on it is refused, with workers and without."""
    config = load_config({}, home=tmp_path, server={"port": 0})
    sockets = bind_for_workers(config, 3)
    port = sockets[0].getsockname()[1]
    clients = [socket.create_connection(("127.0.0.1", port)) for _ in range(90)]
    accepted: list[list[socket.socket]] = [[], [], []]
    try:
        assert {sock.getsockname()[1] for sock in sockets} == {port}
        for sock, those in zip(sockets, accepted, strict=True):
            accept_waiting(sock, those.append)
        assert sum(map(len, accepted)) == 90
        assert min(map(len, accepted)) > 9
        taken = load_config({}, home=tmp_path, server={"port": port})
        with pytest.raises(AddressUnusable):
            bind_for_workers(taken, 2)
        with pytest.raises(AddressUnusable):
            bind_address(taken)
    finally:
        for one in (*sockets, *clients, *(sock for those in accepted for sock in those)):
            one.close()
