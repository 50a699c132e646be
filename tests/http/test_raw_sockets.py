"""Bytes that no decent client sends, on the whole application; and the server answers the next one all the same."""

from __future__ import annotations

import random

import pytest
import trio

from hermes_trio.http.settings import Limits
from hermes_trio.runtime.turn import Turn

from .gateway import KEY, Gateway, open_gateway

HEAD = f"host: x\r\nauthorization: Bearer {KEY}\r\n".encode()
CHAT = b'{"messages": [{"role": "user", "content": "hi"}]}'


async def connect(gateway: Gateway) -> trio.SocketStream:
    """A connection."""
    return await trio.open_tcp_stream("127.0.0.1", int(gateway.url.rpartition(":")[2]))


async def read_answer(stream: trio.SocketStream, buffer: bytearray) -> tuple[int, bytes]:
    """The next answer on a connection, by its Content-Length."""
    while b"\r\n\r\n" not in buffer:
        data = await stream.receive_some()
        if not data:
            return 0, bytes(buffer)
        buffer += data
    head, _, rest = bytes(buffer).partition(b"\r\n\r\n")
    length = next(
        int(line.split(b":")[1]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")
    )
    while len(rest) < length:
        data = await stream.receive_some()
        assert data
        rest += data
    buffer[:] = rest[length:]
    return int(head.split()[1]), rest[:length]


async def still_answers(gateway: Gateway) -> None:
    """The server is well."""
    assert (await gateway.http.get("/health")).status_code == 200
    assert (await gateway.chat("x")).status_code == 200
    await gateway.idle()


BAD = [
    b"\r\n\r\n",
    b"GARBAGE\r\n\r\n",
    b"GET / HTTP/9.9\r\n\r\n",
    b"GET /health HTTP/1.1\r\nbad header\r\n\r\n",
    b"POST /v1/runs HTTP/1.1\r\n" + HEAD + b"content-length: x\r\n\r\n",
    b"POST /v1/runs HTTP/1.1\r\n" + HEAD + b"content-length: -5\r\n\r\n",
    b"POST /v1/runs HTTP/1.1\r\n" + HEAD + b"content-length: 5\r\ncontent-length: 6\r\n\r\nhello",
    b"POST /v1/runs HTTP/1.1\r\n" + HEAD + b"transfer-encoding: chunked\r\n\r\nZZ\r\n",
    b"POST /v1/runs HTTP/1.1\r\n" + HEAD + b"transfer-encoding: chunked\r\n\r\nffffffffffffffff\r\n",
    b"POST /v1/runs HTTP/1.1\r\n" + HEAD + b"transfer-encoding: gzip\r\n\r\n",
    b"GET /health HTTP/1.1\r\nx: " + b"a" * 200_000 + b"\r\n\r\n",
    b"GET /" + b"a" * 200_000 + b" HTTP/1.1\r\n\r\n",
    b"GET /health HTTP/1.1\r\n" + b"x: y\r\n" * 20_000 + b"\r\n",
    b"GET /v1/runs/%ff%fe%00/events HTTP/1.1\r\n" + HEAD + b"\r\n",
    b"GET /v1/runs?limit=%ff&offset=%00 HTTP/1.1\r\n" + HEAD + b"\r\n",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\x00" * 50,
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc",
    bytes(range(256)) * 20,
]


@pytest.mark.parametrize("data", BAD, ids=range(len(BAD)))
async def test_malformed_requests(data: bytes, fast_path: bool) -> None:
    """Whatever comes, the connection is answered or closed, and the server goes on."""
    async with open_gateway(fast_path=fast_path) as gateway:
        stream = await connect(gateway)
        async with stream:
            try:
                await stream.send_all(data)
                await stream.send_eof()
                with trio.move_on_after(10) as scope:
                    while await stream.receive_some():
                        pass
                assert not scope.cancelled_caught
            except (trio.BrokenResourceError, trio.ClosedResourceError):
                pass
        await still_answers(gateway)


async def test_an_early_answer_does_not_spoil_the_connection(fast_path: bool) -> None:
    """401, 404, 413 and 429 before the body has arrived: the next request on the same connection is answered."""
    async with open_gateway(fast_path=fast_path, limits=Limits(body_bytes=100_000)) as gateway:
        for path, headers, length, status in (
            ("/v1/runs", b"host: x\r\n", 5000, 401),
            ("/nope", HEAD, 5000, 404),
            ("/v1/runs", HEAD, 120_000, 413),
        ):
            stream = await connect(gateway)
            buffer = bytearray()
            async with stream:
                head = f"POST {path} HTTP/1.1\r\n".encode() + headers + b"content-length: %d\r\n\r\n" % length
                await stream.send_all(head + b"x" * 10)
                await trio.testing.wait_all_tasks_blocked(0.01)
                await stream.send_all(b"x" * (length - 10))
                assert (await read_answer(stream, buffer))[0] == status
                await stream.send_all(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
                assert (await read_answer(stream, buffer))[0] == 200
        await still_answers(gateway)


async def test_pipelined_requests_are_answered_in_order(fast_path: bool) -> None:
    """Three requests in one packet get three answers, in order."""
    async with open_gateway(fast_path=fast_path) as gateway:
        stream = await connect(gateway)
        buffer = bytearray()
        async with stream:
            chat = b"POST /v1/chat/completions HTTP/1.1\r\n" + HEAD + b"content-length: %d\r\n\r\n" % len(CHAT) + CHAT
            models = b"GET /v1/models HTTP/1.1\r\n" + HEAD + b"\r\n"
            health = b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"
            await stream.send_all(chat + models + health)
            bodies = [await read_answer(stream, buffer) for _ in range(3)]
        assert [status for status, _ in bodies] == [200, 200, 200]
        assert b"You said: hi" in bodies[0][1]
        assert b'"model"' in bodies[1][1]
        assert b'"ok"' in bodies[2][1]


async def test_a_half_close_counts_as_leaving(fast_path: bool) -> None:
    """A client that closes its side while its turn runs has left: the turn is cancelled."""
    started, ended = trio.Event(), trio.Event()

    async def agent(turn: Turn) -> str:
        started.set()
        try:
            await trio.sleep_forever()
        finally:
            ended.set()
        raise AssertionError

    async with open_gateway(agent, fast_path=fast_path) as gateway:
        stream = await connect(gateway)
        async with stream:
            head = b"POST /v1/chat/completions HTTP/1.1\r\n" + HEAD + b"content-length: %d\r\n\r\n" % len(CHAT)
            await stream.send_all(head + CHAT)
            await started.wait()
            await stream.send_eof()
            await ended.wait()
        await gateway.idle()
        assert (await gateway.http.get("/health")).status_code == 200


@pytest.mark.slow
async def test_random_bytes(fast_path: bool) -> None:
    """Hundreds of requests with random damage, pipelined and cut at random places; the server answers after each."""
    random_ = random.Random(1)
    good = [
        b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n",
        b"POST /v1/chat/completions HTTP/1.1\r\n" + HEAD + b"content-length: %d\r\n\r\n" % len(CHAT) + CHAT,
        b"POST /v1/runs HTTP/1.1\r\n"
        + HEAD
        + b'transfer-encoding: chunked\r\n\r\n7\r\n{"input\r\n8\r\n": "hi"}\r\n0\r\n\r\n',
        b"GET /v1/runs HTTP/1.1\r\n" + HEAD + b"\r\n",
    ]
    async with open_gateway(fast_path=fast_path, seconds=110) as gateway:
        for _ in range(300):
            data = bytearray(b"".join(random_.choices(good, k=random_.randint(1, 3))))
            for _ in range(random_.randint(0, 4)):
                place = random_.randrange(len(data))
                match random_.randrange(3):
                    case 0:
                        data[place] = random_.randrange(256)
                    case 1:
                        del data[place : place + random_.randint(1, 20)]
                    case _:
                        data[place:place] = random_.randbytes(random_.randint(1, 20))
                if not data:
                    break
            stream = await connect(gateway)
            async with stream:
                try:
                    middle = random_.randint(0, len(data))
                    await stream.send_all(bytes(data[:middle]))
                    await stream.send_all(bytes(data[middle:]))
                    if random_.random() < 0.7:
                        await stream.send_eof()
                        with trio.move_on_after(10):
                            while await stream.receive_some():
                                pass
                except (trio.BrokenResourceError, trio.ClosedResourceError):
                    pass
            assert (await gateway.http.get("/health")).status_code == 200
        await still_answers(gateway)
