"""What a user would pick instead: each parses a chat completion and answers one, or streams deltas, and does nothing else.

Usage: python -m bench.baseline_server uvicorn|quart PORT [--sleep SECONDS]

`uvicorn` is Starlette on uvicorn with httptools, `quart` is Quart-Trio on Hypercorn's trio worker, both as they come, with a backlog that fits the
number of clients. With `"stream": true` a prompt `#d<N>` is answered with N events, made one at a time by a task beside the response, as an agent makes
them. Prints READY when it accepts.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import msgspec

BACKLOG = 4096
ANSWER = "Hello! It is sunny in Paris today."


class Message(msgspec.Struct):
    """A message of a request."""

    role: str
    content: str


class Ask(msgspec.Struct):
    """A request."""

    messages: list[Message]
    model: str = ""
    stream: bool = False


decode = msgspec.json.Decoder(Ask).decode
encode = msgspec.json.Encoder().encode


def answer(ask: Ask) -> bytes:
    """A completion."""
    message = {"role": "assistant", "content": ANSWER}
    return encode({"object": "chat.completion", "model": ask.model, "choices": [{"index": 0, "message": message}]})


def deltas(ask: Ask) -> int:
    """Return the requested number of events."""
    prompt = ask.messages[-1].content
    return int(prompt[2:]) if prompt.startswith("#d") else 1


def chunk(ask: Ask, delta: str) -> bytes:
    """One event of a stream."""
    choice = {"index": 0, "delta": {"content": delta}, "finish_reason": None}
    return b"data: %b\n\n" % encode({"object": "chat.completion.chunk", "model": ask.model, "choices": [choice]})


DONE = b"data: [DONE]\n\n"


def run_quart(port: int, sleep: float) -> None:
    """Stock Quart-Trio on stock Hypercorn."""
    import hypercorn.trio
    import trio
    from hypercorn.config import Config
    from quart import Response, request
    from quart_trio import QuartTrio

    app = QuartTrio("baseline")

    async def produce(count: int, channel: trio.MemorySendChannel[str]) -> None:
        async with channel:
            for _ in range(count):
                await channel.send("token ")

    async def events(ask: Ask) -> AsyncIterator[bytes]:
        sending, receiving = trio.open_memory_channel[str](100)
        app.nursery.start_soon(produce, deltas(ask), sending)
        async with receiving:
            async for delta in receiving:
                yield chunk(ask, delta)
        yield DONE

    @app.post("/v1/chat/completions")
    async def chat() -> Any:
        ask = decode(await request.get_data())
        if ask.stream:
            response = Response(events(ask), content_type="text/event-stream")
            response.timeout = None
            return response
        if sleep:
            await trio.sleep(sleep)
        return Response(answer(ask), content_type="application/json")

    config = Config()
    config.bind = [f"127.0.0.1:{port}"]
    config.backlog = BACKLOG
    config.errorlog = None

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            await nursery.start(partial(hypercorn.trio.serve, app, config, shutdown_trigger=trio.sleep_forever))
            print("READY", flush=True)

    trio.run(main)


def run_uvicorn(port: int, sleep: float) -> None:
    """Starlette on uvicorn."""
    import asyncio

    import uvicorn
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response, StreamingResponse
    from starlette.routing import Route

    async def produce(count: int, queue: asyncio.Queue[str | None]) -> None:
        for _ in range(count):
            await queue.put("token ")
            await asyncio.sleep(0)
        await queue.put(None)

    async def events(ask: Ask) -> AsyncIterator[bytes]:
        queue: asyncio.Queue[str | None] = asyncio.Queue(100)
        producer = asyncio.create_task(produce(deltas(ask), queue))
        while (delta := await queue.get()) is not None:
            yield chunk(ask, delta)
        await producer
        yield DONE

    async def chat(request: Request) -> Response:
        ask = decode(await request.body())
        if ask.stream:
            return StreamingResponse(events(ask), media_type="text/event-stream")
        if sleep:
            await asyncio.sleep(sleep)
        return Response(answer(ask), media_type="application/json")

    app = Starlette(routes=[Route("/v1/chat/completions", chat, methods=["POST"])])
    config = uvicorn.Config(
        app, port=port, loop="asyncio", http="httptools", log_level="error", access_log=False, backlog=BACKLOG
    )
    server = uvicorn.Server(config)
    started = server.startup

    async def startup(sockets: Any = None) -> None:
        await started(sockets=sockets)
        print("READY", flush=True)

    server.startup = startup  # type: ignore[method-assign]
    server.run()


def main() -> int:
    """Serve until killed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=["uvicorn", "quart"])
    parser.add_argument("port", type=int)
    parser.add_argument("--sleep", type=float, default=0.0)
    args = parser.parse_args()
    (run_quart if args.name == "quart" else run_uvicorn)(args.port, args.sleep)
    return 0


if __name__ == "__main__":
    sys.exit(main())
