"""HTTP/2 frames that cost their sender nothing and the server work: each flood ends its own connection, and nobody else notices."""

from __future__ import annotations

import selectors
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import urlsplit

import h2.config
import h2.connection
import httpx2
import pytest
from hyperframe import frame as frames

from tests.e2e.server_process import ServerProcess, server_process

FRAMES = 20_000
LAST = b"the last"
SECONDS = 120.0


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """One real server for all floods."""
    with server_process(tmp_path_factory.mktemp("floods")) as started:
        yield started


def memory(pid: int) -> int:
    """Bytes that a process has in memory."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096


def head(stream: int, path: str = "/health") -> bytes:
    """A request with a body that is still to come."""
    connection = h2.connection.H2Connection(h2.config.H2Configuration(header_encoding=False))
    connection.initiate_connection()
    connection.data_to_send()
    connection.send_headers(
        stream, [(":method", "POST"), (":path", path), (":authority", "test"), (":scheme", "http"), ("host", "test")]
    )
    return connection.data_to_send()


def resets(_: int) -> bytes:
    """A request and its reset, many times over: at most a thousand requests are taken on one connection anyway."""
    return b"".join(head(stream) + frames.RstStreamFrame(stream, 8).serialize() for stream in range(1, 2001, 2))


def priorities(count: int) -> bytes:
    """Streams that depend on one another and never come."""
    return b"".join(
        frames.PriorityFrame(2 * number + 1, depends_on=0, stream_weight=9).serialize()
        for number in range(1, count // 4)
    )


FLOODS: dict[str, Callable[[int], bytes]] = {
    "ping": lambda count: frames.PingFrame(0, opaque_data=b"12345678").serialize() * count,
    "settings": lambda count: frames.SettingsFrame(0).serialize() * count,
    "settings that change": lambda count: frames.SettingsFrame(0, settings={4: 1}).serialize() * count,
    "window": lambda count: frames.WindowUpdateFrame(0, window_increment=1).serialize() * count,
    "empty data": lambda count: head(1, "/v1/chat/completions") + frames.DataFrame(1, b"").serialize() * count,
    "continuation": lambda count: (
        frames.HeadersFrame(1, b"").serialize() + frames.ContinuationFrame(1, b"").serialize() * count
    ),
    "resets": resets,
    "priorities": priorities,
    "unknown": lambda count: b"\0\0\0\xee\0\0\0\0\0" * count,
}


def flooded(server: ServerProcess, flood: bytes) -> bool:
    """Send all of it while the server takes it; whether a ping behind it is answered, or the server ends the connection before."""
    address = urlsplit(server.url)
    client = h2.connection.H2Connection(h2.config.H2Configuration(header_encoding=False))
    client.initiate_connection()
    waiting = client.data_to_send() + flood + frames.PingFrame(0, opaque_data=LAST).serialize()
    received = b""
    with (
        socket.create_connection((address.hostname or "", address.port or 0), timeout=SECONDS) as sock,
        selectors.DefaultSelector() as ready,
    ):
        sock.setblocking(False)
        ready.register(sock, selectors.EVENT_READ | selectors.EVENT_WRITE)
        while True:
            events = ready.select(SECONDS)
            assert events, "the server neither reads nor writes"
            try:
                if events[0][1] & selectors.EVENT_READ:
                    part = sock.recv(65536)
                    if not part:
                        break
                    received = received[-64:] + part
                    if frames.PingFrame(0, opaque_data=LAST, flags=["ACK"]).serialize() in received:
                        return True
                if waiting and events[0][1] & selectors.EVENT_WRITE:
                    waiting = waiting[sock.send(waiting[:65536]) :]
                    if not waiting:
                        ready.modify(sock, selectors.EVENT_READ)
            except (BrokenPipeError, ConnectionResetError):
                break
    return False


@pytest.mark.parametrize("kind", FLOODS)
def test_a_flood_ends_its_own_connection(server: ServerProcess, kind: str) -> None:
    """The server stops reading a client that sends nothing but control frames; its memory stays, and it answers everybody else."""
    before = memory(server.pid)
    assert not flooded(server, FLOODS[kind](FRAMES)), "the server took the whole flood"
    assert memory(server.pid) - before < 32 << 20
    health = httpx2.get(f"{server.url}/health", timeout=SECONDS, trust_env=False)
    assert health.status_code == 200
    assert "Traceback" not in server.output
