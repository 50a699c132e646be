"""A FastAPI application that hosts agents: `python fastapi_host.py 8000`, then POST {"session": "s1", "text": "hello"} to /ask."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import uvicorn
from fastapi import FastAPI, HTTPException
from pydantic import BaseModel

from hermes_trio import AsyncioRuntime, SessionContext, Turn


async def agent(turn: Turn) -> str:
    """An asyncio function: it runs on the application's own loop, and may use its clients."""
    await asyncio.sleep(0.01)
    return f"{turn.input.text} ({len(turn.context.session_id)} letters of session)"


class Question(BaseModel):
    """What a client sends."""

    session: str
    text: str


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    """The runtime lives as long as the application, and ends before its loop does."""
    async with AsyncioRuntime(agent=agent) as runtime:
        app.state.runtime = runtime
        yield


app = FastAPI(lifespan=lifespan)


@app.post("/ask")
async def ask(question: Question) -> dict[str, str]:
    """One turn of a session."""
    context = SessionContext(session_id=question.session, session_key=question.session)
    outcome = await app.state.runtime.run_turn(question.text, context)
    if outcome.error:
        raise HTTPException(502, outcome.error)
    return {"text": outcome.text, "state": outcome.state.value}


@app.get("/tree")
async def tree() -> dict[str, str]:
    """What runs now."""
    return {"tree": await app.state.runtime.render_tree()}


if __name__ == "__main__":
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
