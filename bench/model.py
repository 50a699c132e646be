"""The cost of a model call among many concurrent ones: `python -m bench.model [--quick]`.

A scripted provider in a process of its own streams an answer of 20 deltas to each of 32, 256 and 1,000 calls at a time. The CPU time of the
calling process per call is measured for our client, for one shared httpx2 client and for httpx2 clients in 32 shards, in turns within one run.
A client of httpx2 only splits the stream into lines; ours also decodes it into events. Then calls are cancelled in the middle of a stream, and
the time until the provider sees its client leave is measured.

The table goes to standard output, the figures to `bench/results/model.json`, and the last line says which bounds hold.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path

import httpx2
import trio
from rich.console import Console
from rich.table import Table

from hermes_trio.agent.model import ModelRequest, collect
from hermes_trio.net.http1 import ConnectionPool
from hermes_trio.providers.openai import OpenAIModel
from hermes_trio.runtime.ports import Message
from hermes_trio.testing.model_server import Fault, ModelServer, ScriptedAnswer

LEVELS = (32, 256, 1000)
WORDS = 20
PAUSE = 0.05
SHARDS = 32
GROWTH_BOUND = 1.5
CANCEL_BOUND = 100.0
RESULTS = Path(__file__).parent / "results" / "model.json"
REQUEST = ModelRequest(messages=(Message(role="user", content="x" * 200),))

OneCall = Callable[[int], Awaitable[None]]


@contextmanager
def provider():
    """A scripted provider in another process; gives its base URL."""
    command = [sys.executable, "-m", "hermes_trio.testing.model_server", "--words", str(WORDS), "--pause", str(PAUSE)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield f"http://127.0.0.1:{int(process.stdout.readline())}/v1"
        finally:
            assert process.stdin is not None
            process.stdin.close()


@asynccontextmanager
async def ours(url: str) -> AsyncIterator[OneCall]:
    """Our client: one transport for all calls."""
    async with ConnectionPool() as transport:
        model = OpenAIModel("bench", transport=transport, base_url=url)

        async def call(_: int) -> None:
            async with model.stream(REQUEST) as stream:
                answer = await collect(stream)
            assert answer.text == "word " * WORDS

        yield call


@asynccontextmanager
async def httpx(url: str, shards: int) -> AsyncIterator[OneCall]:
    """Clients of httpx2; the calls are distributed over them by number."""
    limits = httpx2.Limits(max_connections=None, max_keepalive_connections=None)
    body = {"model": "bench", "messages": [{"role": "user", "content": "x" * 200}], "stream": True}
    async with AsyncExitStack() as stack:
        clients = [
            await stack.enter_async_context(httpx2.AsyncClient(timeout=120, limits=limits)) for _ in range(shards)
        ]

        async def call(number: int) -> None:
            async with clients[number % shards].stream("POST", f"{url}/chat/completions", json=body) as response:
                events = 0
                async for line in response.aiter_lines():
                    events += line.startswith("data:")
            assert events > WORDS

        yield call


async def cpu_per_call(call: OneCall, calls: int) -> float:
    """Milliseconds of CPU time that one of so many concurrent calls takes."""
    before = time.process_time()
    async with trio.open_nursery() as nursery:
        for number in range(calls):
            nursery.start_soon(call, number)
    return (time.process_time() - before) / calls * 1e3


async def cancel_latencies(calls: int) -> list[float]:
    """Milliseconds from cancelling a call in the middle of its stream until its provider notices the disconnect."""
    answer = ScriptedAnswer(text="word " * 100, piece=5, fault=Fault.STALL, fault_after=10)
    latencies: list[float] = []
    async with trio.open_nursery() as nursery, ConnectionPool() as transport:
        server = await nursery.start(ModelServer(otherwise=answer).run)
        model = OpenAIModel("bench", transport=transport, base_url=server.openai_url)
        for number in range(calls):
            with trio.CancelScope() as scope:
                async with model.stream(REQUEST) as stream, trio.open_nursery() as cancelling:
                    for _ in range(9):
                        await stream.receive()
                    cancelled_at = trio.current_time()
                    cancelling.start_soon(stream.receive)
                    await trio.lowlevel.checkpoint()
                    scope.cancel()
            await server.calls[number].ended.wait()
            gone_at = server.calls[number].gone_at
            assert gone_at is not None
            latencies.append((gone_at - cancelled_at) * 1e3)
        server.stop()
    return latencies


async def measure(url: str, rounds: int, *, quick: bool) -> dict[str, dict[int, list[float]]]:
    """All samples, by client and number of calls. The first round of each opens the connections and is thrown away."""
    samples: dict[str, dict[int, list[float]]] = {}
    clients = {
        "ours": lambda: ours(url),
        "httpx2, shared": lambda: httpx(url, 1),
        f"httpx2, {SHARDS} shards": lambda: httpx(url, SHARDS),
    }
    for level in LEVELS:
        for name, opened in clients.items():
            if quick and name != "ours" and level == LEVELS[-1]:
                continue
            async with opened() as call:
                taken = [await cpu_per_call(call, level) for _ in range(rounds + 1)]
            samples.setdefault(name, {})[level] = taken[1:]
            print(f"  {name} at {level}: {statistics.median(taken[1:]):.2f} ms", file=sys.stderr, flush=True)
    return samples


def report(samples: dict[str, dict[int, list[float]]], latencies: list[float]) -> int:
    """Print the table, write the figures; return how many bounds were missed."""
    median = {name: {level: statistics.median(taken) for level, taken in by.items()} for name, by in samples.items()}
    table = Table(title=f"CPU per streamed call of {WORDS} deltas, ms (median, spread)")
    table.add_column("client")
    for level in LEVELS:
        table.add_column(f"{level} calls", justify="right")
    for name, by in samples.items():
        cells = [f"{median[name][level]:.2f}  ({min(by[level]):.2f} to {max(by[level]):.2f})" for level in by]
        table.add_row(name, *cells)
    Console(width=120).print(table)
    growth = median["ours"][LEVELS[-1]] / median["ours"][LEVELS[0]]
    ordered = sorted(latencies)
    worst = ordered[min(len(ordered) - 1, int(len(ordered) * 0.99))]
    print(
        f"cancel seen by the provider: p50 {statistics.median(ordered):.2f} ms, p99 {worst:.2f} ms, {len(ordered)} calls"
    )
    bounds = {
        f"CPU per call at {LEVELS[-1]} is {growth:.2f} x that at {LEVELS[0]} (bound {GROWTH_BOUND})": growth
        <= GROWTH_BOUND,
        f"cancel seen within {worst:.1f} ms at p99 (bound {CANCEL_BOUND:g})": worst <= CANCEL_BOUND,
    }
    RESULTS.parent.mkdir(exist_ok=True)
    figures = {
        "python": sys.version.split()[0],
        "cpu_milliseconds_per_call": median,
        "samples": samples,
        "growth": growth,
        "ratio_to_shared_httpx2": {
            level: shared / median["ours"][level] for level, shared in median["httpx2, shared"].items()
        },
        "cancel_p50_milliseconds": statistics.median(ordered),
        "cancel_p99_milliseconds": worst,
        "bounds": bounds,
    }
    RESULTS.write_text(json.dumps(figures, indent=2) + "\n")
    print("model: " + "; ".join(f"{text} {'ok' if held else 'MISSED'}" for text, held in bounds.items()))
    return sum(not held for held in bounds.values())


def main() -> int:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--quick", action="store_true", help="one round, no httpx2 at the highest level, fewer cancellations"
    )
    arguments = parser.parse_args()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 8192)), hard))
    rounds, cancellations = (1, 50) if arguments.quick else (3, 300)
    with provider() as url:
        samples = trio.run(partial(measure, url, rounds, quick=arguments.quick))
    return report(samples, trio.run(cancel_latencies, cancellations))


if __name__ == "__main__":
    sys.exit(main())
