"""An aiohttp application that hosts agents: `python aiohttp_host.py 8000`, then POST {"session": "s1", "text": "hello"} to /ask."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator

from aiohttp import web

from hermes_trio import AsyncioRuntime, SessionContext, Turn

RUNTIME = web.AppKey("runtime", AsyncioRuntime)


async def agent(turn: Turn) -> str:
    """An asyncio function: it runs on the application's own loop, and may use its clients."""
    await asyncio.sleep(0.01)
    return f"{turn.input.text} ({len(turn.context.session_id)} letters of session)"


async def runtime(app: web.Application) -> AsyncIterator[None]:
    """The runtime lives as long as the application, and ends before its loop does."""
    async with AsyncioRuntime(agent=agent) as opened:
        app[RUNTIME] = opened
        yield


async def ask(request: web.Request) -> web.Response:
    """One turn of a session. aiohttp cancels the handler of a client that leaves, and that stops the turn."""
    question = await request.json()
    context = SessionContext(session_id=question["session"], session_key=question["session"])
    outcome = await request.app[RUNTIME].run_turn(question["text"], context)
    if outcome.error:
        raise web.HTTPBadGateway(text=outcome.error)
    return web.json_response({"text": outcome.text, "state": outcome.state.value})


async def tree(request: web.Request) -> web.Response:
    """What runs now."""
    return web.json_response({"tree": await request.app[RUNTIME].render_tree()})


def make_app() -> web.Application:
    """The application with its routes and its runtime."""
    app = web.Application()
    app.cleanup_ctx.append(runtime)
    app.add_routes([web.post("/ask", ask), web.get("/tree", tree)])
    return app


if __name__ == "__main__":
    web.run_app(make_app(), host="127.0.0.1", port=int(sys.argv[1]), print=None, handler_cancellation=True)
