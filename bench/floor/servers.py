"""The floor servers: each parses a JSON body and answers one, nothing else. Usage: servers.py NAME PORT [SECONDS]

NAME is `ours` (bare ASGI on the fast path), `ours-quart` (a Quart-Trio route behind it), `stock` (bare ASGI on stock Hypercorn's trio
worker), `stock-quart`, or `uvicorn` (Starlette). With SECONDS each request sleeps that long. Prints READY when it accepts.
"""

from __future__ import annotations

import sys
from typing import Any, cast

import msgspec

NAME, PORT = sys.argv[1], int(sys.argv[2])
SLEEP = float(sys.argv[3]) if len(sys.argv) > 3 else 0.0


class Ask(msgspec.Struct):
    model: str
    messages: list[dict[str, str]]


decode = msgspec.json.Decoder(Ask).decode
encode = msgspec.json.Encoder().encode


def answer(body: bytes) -> bytes:
    ask = decode(body)
    return encode({"object": "chat.completion", "model": ask.model, "choices": [{"message": ask.messages[-1]}]})


async def lifespan(receive: Any, send: Any) -> None:
    while True:
        message = await receive()
        await send({"type": message["type"] + ".complete"})
        if message["type"] == "lifespan.shutdown":
            return


async def bare(scope: Any, receive: Any, send: Any) -> None:
    import trio

    from hermes_trio.http.server import read_body, send_json

    if scope["type"] == "lifespan":
        return await lifespan(receive, send)
    if scope["method"] == "GET":
        return await send_json(send, 200, b"{}")
    body = answer(await read_body(receive, 1_000_000))
    if SLEEP:
        await trio.sleep(SLEEP)
    return await send_json(send, 200, body)


def quart_app() -> Any:
    import trio
    from quart import Response, request
    from quart_trio import QuartTrio

    app = QuartTrio("floor")

    @app.post("/v1/chat/completions")
    async def chat() -> Response:
        body = answer(cast("bytes", await request.get_data()))
        if SLEEP:
            await trio.sleep(SLEEP)
        return Response(body, content_type="application/json")

    return app


def run_trio() -> None:
    from functools import partial

    import trio

    from hermes_trio.http.server import ServerConfig, hypercorn_config, serve

    app = quart_app() if NAME.endswith("-quart") else bare
    config = hypercorn_config(f"127.0.0.1:{PORT}")
    config.errorlog = None

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            if NAME.startswith("ours"):
                await nursery.start(partial(serve, app, ServerConfig(hypercorn=config), shutdown=trio.Event()))
            else:
                import hypercorn.trio

                config.include_server_header = True
                await nursery.start(partial(hypercorn.trio.serve, app, config, shutdown_trigger=trio.sleep_forever))
            print("READY", flush=True)

    trio.run(main)


def run_uvicorn() -> None:
    import anyio
    import uvicorn
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import JSONResponse
    from starlette.routing import Route

    async def chat(request: Request) -> JSONResponse:
        ask = await request.json()
        if SLEEP:
            await anyio.sleep(SLEEP)
        return JSONResponse(
            {"object": "chat.completion", "model": ask["model"], "choices": [{"message": ask["messages"][-1]}]}
        )

    app = Starlette(routes=[Route("/v1/chat/completions", chat, methods=["POST"])])
    config = uvicorn.Config(
        app, port=PORT, loop="asyncio", http="httptools", log_level="error", access_log=False, backlog=4096
    )
    server = uvicorn.Server(config)
    started = server.startup

    async def startup(sockets: Any = None) -> None:
        await started(sockets=sockets)
        print("READY", flush=True)

    server.startup = startup
    server.run()


run_uvicorn() if NAME == "uvicorn" else run_trio()
