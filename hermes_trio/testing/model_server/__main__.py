"""Run a scripted provider as a process: it prints its port, and ends when its standard input does."""

from __future__ import annotations

import argparse
import sys
from functools import partial

import trio

from . import ModelServer, ScriptedAnswer


async def _serve(arguments: argparse.Namespace) -> None:
    answer = ScriptedAnswer(text="word " * arguments.words, piece=5, pause=arguments.pause) if arguments.words else None
    async with trio.open_nursery() as nursery:
        server = await nursery.start(ModelServer(port=arguments.port, otherwise=answer).run)
        sys.stdout.write(f"{server.port}\n")
        sys.stdout.flush()
        # The parent holds the other end of standard input: when that is closed, the server is no longer needed.
        await trio.to_thread.run_sync(sys.stdin.read, abandon_on_cancel=True)
        server.stop()


def main() -> None:
    """Parse the command line and serve."""
    parser = argparse.ArgumentParser(prog="python -m hermes_trio.testing.model_server", description=__doc__)
    parser.add_argument("--port", type=int, default=0, help="0 for any that is free")
    parser.add_argument("--words", type=int, default=0, help="answer with this many deltas instead of an echo")
    parser.add_argument("--pause", type=float, default=0.0, help="seconds before each delta")
    trio.run(partial(_serve, parser.parse_args()))


if __name__ == "__main__":
    main()
