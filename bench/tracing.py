"""What tracing costs a turn, off and on: `make bench-tracing`, or `make bench-tracing BEFORE=path` beside a checkout that has no tracing.

The rounds alternate, each in a process of its own: tracing off, on with a provider that keeps nothing, off again, and with BEFORE the other checkout. A turn
calls the demo model and is committed to a store in memory. What is printed is CPU a turn as minima, their ratio to the first, and A/A: off against itself.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).absolute().parent.parent
ROUNDS = 12
TURNS = 500


async def measure(traced: bool) -> None:
    """Print the microseconds of CPU that a turn takes."""
    from hermes_trio import ModelAgent, Runtime, SessionContext
    from hermes_trio.providers.routes import build_routes
    from hermes_trio.store import open_store
    from hermes_trio.tools.registry import Tools

    stages = []
    if traced:
        from opentelemetry.sdk.trace import TracerProvider

        from hermes_trio import Tracing

        stages.append(Tracing(TracerProvider(shutdown_on_exit=False)))
    agent = ModelAgent(build_routes({}), Tools())
    async with Runtime(agent=agent, store=open_store(None, maintenance=False), stages=stages) as runtime:
        for number in range(50 + TURNS):
            if number == 50:
                began = time.process_time()
            await runtime.run_turn("hello", SessionContext(session_id=f"s{number}"))
        print((time.process_time() - began) / TURNS * 1e6)


def one_round(checkout: Path, how: str) -> float:
    """One process of a checkout."""
    environment = {**os.environ, "PYTHONPATH": str(checkout)}
    command = [sys.executable, __file__, "--measure", how]
    ended = subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True, check=True)
    return float(ended.stdout)


def main() -> None:
    """Measure this checkout, and the one that is named."""
    ways = {"off": (HERE, "off"), "on": (HERE, "on"), "off again (A/A)": (HERE, "off")}
    if sys.argv[1:]:
        ways["the checkout before"] = (Path(sys.argv[1]).absolute(), "off")
    best = dict.fromkeys(ways, float("inf"))
    for _ in range(ROUNDS):
        for name, (checkout, how) in ways.items():
            best[name] = min(best[name], one_round(checkout, how))
    print(f"{TURNS} turns a round, minima of {ROUNDS} alternating rounds")
    for name, microseconds in best.items():
        print(f"  {name:20} {microseconds:8.1f} us of CPU a turn   {microseconds / best['off']:6.3f} x")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--measure"]:
        import trio

        trio.run(measure, sys.argv[2] == "on")
    else:
        main()
