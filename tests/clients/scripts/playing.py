"""What the scripts of all Python clients share. They run in the clients' environment, which has no hermes-trio in it."""

import asyncio
import inspect
import json
import os
import sys
import traceback
from importlib.metadata import version

URL = os.environ["HERMES_URL"]
KEY = os.environ["HERMES_KEY"]
LEDGERS = os.environ["HERMES_LEDGERS"]

calls: list[str] = []
"""What ran on this side."""


def weather_in(city: str) -> str:
    """The client's own tool."""
    calls.append(city)
    return f"sunny in {city}"


def play(package: str, **scenarios) -> None:
    """Play each scenario (`kind__variant` is a variant of `kind`), and print what the client returned and what ran on this side, a line each."""
    for name, function in scenarios.items():
        kind = name.split("__")[0]
        ledger = os.path.join(LEDGERS, f"{os.path.basename(sys.argv[0])}.{name}")
        calls.clear()
        told: dict = {"scenario": name, "version": version(package), "ledger": ledger}
        try:
            result = function(f"scenario:{kind} ledger:{ledger}")
            if inspect.isawaitable(result):
                result = asyncio.run(_wait(result))
            told["result"] = result
        except Exception as error:
            told["error"] = f"{type(error).__module__}.{type(error).__name__}: {error}"
            told["trace"] = traceback.format_exc()[-3000:]
        told["calls"] = len(calls)
        print("SCENARIO " + json.dumps(told, default=str), flush=True)


async def _wait(awaitable):
    return await asyncio.wait_for(awaitable, 60)
