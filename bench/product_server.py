"""The product as a benchmark serves it: everything but the model, which is an agent that answers at once or after a while.

Usage: python -m bench.product_server [--port 0 | --bind fd://N [--others N,N]] [--store memory|durable] [--url ADDRESS] [--node NAME] [--home DIR]
    [--sleep SECONDS] [--turns N] [--drain SECONDS] [--profile FILE]

Auth, limits, tree, store and server are those of `hermes-trio serve`. A prompt `#d<N>` streams N deltas, with a checkpoint after each; `#s<SECONDS>`
sleeps; `#h` holds the turn until it is cancelled; `#i` answers with the identity that the turn, a task of it and (`#it`) a thread of it see. With
`--profile` the loop is profiled until SIGUSR1, and the profile is written to FILE. Prints `READY {"port": …}` once it answers; SIGTERM drains it, and
the drain's report is its last line.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import trio

from hermes_trio.config import load_config
from hermes_trio.gateway.serving import Listening, Serving, open_server, run_server
from hermes_trio.http.auth import AdminKey
from hermes_trio.logs import configure_logging
from hermes_trio.runtime.context import get_session_env
from hermes_trio.runtime.outcome import Usage
from hermes_trio.runtime.ports import Agent, Reply
from hermes_trio.runtime.turn import Turn

KEY = "bench-key-0123456789abcdef0123456789abcdef"
ANSWER = "Hello! It is sunny in Paris today."
USAGE = Usage(input_tokens=10, output_tokens=5, api_calls=1)


def answering(seconds: float) -> Agent:
    """An agent that returns the same answer after a delay."""

    async def agent(turn: Turn) -> Reply:
        prompt = turn.input.text
        if prompt.startswith("#"):
            return await _told(turn, prompt)
        if seconds:
            await trio.sleep(seconds)
        return Reply(text=ANSWER, usage=USAGE)

    return agent


async def _told(turn: Turn, prompt: str) -> Reply:
    order, argument = prompt[1], prompt[2:].partition(" ")[0]
    if order == "h":
        await trio.sleep_forever()
    elif order == "s":
        await trio.sleep(float(argument))
    elif order == "d":
        for _ in range(int(argument)):
            turn.emit("message.delta", delta="token ")
            await trio.lowlevel.checkpoint()
        return Reply(text="token " * int(argument), usage=USAGE)
    elif order == "i":
        return Reply(text=await _identity(turn, argument), usage=USAGE)
    return Reply(text=ANSWER, usage=USAGE)


def _session() -> str:
    return get_session_env("HERMES_SESSION_ID") + "/" + get_session_env("HERMES_SESSION_KEY")


async def _identity(turn: Turn, argument: str) -> str:
    """Return the identities that a turn, a task of it and, on request, a thread of it read while other turns run."""
    seen = [_session()]

    async def task() -> None:
        await trio.sleep(0.001)
        seen.append(_session())

    turn.start_soon(task)
    await trio.sleep(0.005)
    if argument == "t":
        seen.append(await turn.run_sync(_session))
    seen.append(_session())
    return " ".join(seen)


@asynccontextmanager
async def serving(
    home: Path, *, seconds: float = 0.0, in_memory: bool = False, agent: Agent | None = None
) -> AsyncIterator[Serving]:
    """The product in this process, up and listening, for the body of the `async with`."""
    config = load_config({}, home=home, server={"port": 0, "key": KEY})
    async with open_server(config, AdminKey(KEY), agent=agent or answering(seconds), in_memory=in_memory) as this:
        yield this


def port_of(server: Serving) -> int:
    """Return the port that the kernel chose."""
    return int(server.addresses[0].rpartition(":")[2])


def _profiled(path: Path) -> None:
    """Profile this thread until SIGUSR1, then write the profile to `path`."""
    import cProfile

    profile = cProfile.Profile()

    def write(number: int, frame: object) -> None:
        profile.disable()
        profile.dump_stats(path)
        print("PROFILED", flush=True)

    signal.signal(signal.SIGUSR1, write)
    profile.enable()


async def _main(args: argparse.Namespace, home: Path) -> None:
    environment = {"HERMES_STORE_URL": args.url} if args.url else {}
    config = load_config(environment, home=home, server={"port": args.port, "key": KEY, "drain_seconds": args.drain})
    limits = msgspec.structs.replace(config.limits, concurrent_turns=args.turns, event_readers=20_000)
    store = msgspec.structs.replace(config.store, node_name=args.node)
    config = msgspec.structs.replace(config, limits=limits, store=store)

    def announce(server: Serving) -> None:
        print("READY " + json.dumps({"port": port_of(server)}), flush=True)
        if args.profile is not None:
            _profiled(args.profile)

    def report(found: dict[str, Any]) -> None:
        print("DRAINED " + json.dumps(found), flush=True)

    await run_server(
        config,
        AdminKey(KEY),
        agent=answering(args.sleep),
        in_memory=args.store == "memory",
        listening=Listening(
            bind=args.bind, announces=not args.bind, others=tuple(int(one) for one in args.others.split(",") if one)
        ),
        announce=announce,
        draining=lambda serving: None,
        report=report,
    )


def main() -> int:
    """Serve until SIGTERM."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--store", choices=["memory", "durable"], default="durable")
    parser.add_argument("--bind", default="", help="an inherited socket to listen on")
    parser.add_argument("--others", default="", help="the inherited sockets of other workers")
    parser.add_argument("--url", default="", help="of a store in PostgreSQL")
    parser.add_argument("--node", default="", help="the name of this node")
    parser.add_argument("--home", type=Path)
    parser.add_argument("--sleep", type=float, default=0.0)
    parser.add_argument("--turns", type=int, default=1000)
    parser.add_argument("--drain", type=float, default=10.0)
    parser.add_argument("--profile", type=Path)
    args = parser.parse_args()
    configure_logging(level="error", format="text", secrets=[KEY])
    if args.home is not None:
        trio.run(_main, args, args.home)
        return 0
    with tempfile.TemporaryDirectory(prefix="hermes-trio-bench-") as folder:
        trio.run(_main, args, Path(folder))
    return 0


if __name__ == "__main__":
    sys.exit(main())
