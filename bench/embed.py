"""The cost of a turn from asyncio, compared with one from Trio: `make bench-embed`.

Four ways in one run, as alternating rounds: Trio itself (twice, for the A/A ratio), `AsyncioRuntime` with an agent on the host's loop, `AsyncioRuntime` with an
agent on Trio, and Trio's guest mode in the host's thread with an agent on Trio. Times are per turn, 64 turns at once.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Callable

import trio

from hermes_trio import AsyncioRuntime, Runtime, SessionContext, Turn, trio_agent

AT_ONCE = 64


async def on_trio(turn: Turn) -> str:
    await trio.lowlevel.checkpoint()
    return "ok"


async def on_asyncio(turn: Turn) -> str:
    await asyncio.sleep(0)
    return "ok"


async def trio_round(turns: int) -> float:
    async with Runtime(agent=on_trio) as rt:
        began = time.perf_counter()
        for batch in range(turns // AT_ONCE):
            async with trio.open_nursery() as nursery:
                for number in range(AT_ONCE):
                    nursery.start_soon(rt.run_turn, "x", SessionContext(session_id=f"s{batch}_{number}"))
        return time.perf_counter() - began


async def asyncio_round(turns: int, agent: Callable[..., object]) -> float:
    async with AsyncioRuntime(agent=agent) as rt:  # pyright: ignore[reportArgumentType]
        began = time.perf_counter()
        for batch in range(turns // AT_ONCE):
            await asyncio.gather(
                *(rt.run_turn("x", SessionContext(session_id=f"s{batch}_{number}")) for number in range(AT_ONCE))
            )
        return time.perf_counter() - began


def guest_round(turns: int) -> float:
    async def main() -> float:
        loop = asyncio.get_running_loop()
        done: asyncio.Future[float] = loop.create_future()
        trio.lowlevel.start_guest_run(
            trio_round,
            turns,
            run_sync_soon_threadsafe=loop.call_soon_threadsafe,
            done_callback=lambda outcome: done.set_result(outcome.unwrap()),
        )
        return await done

    return asyncio.run(main())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    turns = 640 if options.quick else 3200
    ways: dict[str, Callable[[], float]] = {
        "Trio": lambda: trio.run(trio_round, turns),
        "Trio again (A/A)": lambda: trio.run(trio_round, turns),
        "AsyncioRuntime, agent on asyncio": lambda: asyncio.run(asyncio_round(turns, on_asyncio)),
        "AsyncioRuntime, agent on Trio": lambda: asyncio.run(asyncio_round(turns, trio_agent(on_trio))),
        "guest mode, agent on Trio": lambda: guest_round(turns),
    }
    best = dict.fromkeys(ways, float("inf"))
    for _ in range(2 if options.quick else options.rounds):
        for name, run in ways.items():
            best[name] = min(best[name], run())
    print(f"{turns} turns, {AT_ONCE} at once, minima over alternating rounds")
    for name, seconds in best.items():
        print(f"  {name:34} {seconds / turns * 1e6:8.0f} us a turn   {seconds / best['Trio']:5.2f} x")


if __name__ == "__main__":
    main()
