"""An agent of your own behind the whole HTTP API: chat completions, responses, runs, sessions, keys, the tree, drain.

Run it:

    python embed_server.py            # serves on 127.0.0.1:8643 until Ctrl-C
    python embed_server.py --once     # asks itself one question and ends
"""
# ruff: noqa: T201

import json
import sys
import tempfile
import urllib.request
from pathlib import Path

import trio

from hermes_trio import Turn
from hermes_trio.config import load_config
from hermes_trio.gateway.serving import open_server
from hermes_trio.http.auth import admin_key


async def agent(turn: Turn) -> str:
    """The answer to every request. What `turn.emit` says is streamed to whoever listens."""
    for word in reversed(turn.input.text.split()):
        turn.emit("message.delta", delta=f"{word} ")
    return " ".join(reversed(turn.input.text.split()))


def ask(address: str, key: str, text: str) -> str:
    """One chat completion, with nothing but the standard library."""
    body = json.dumps({"messages": [{"role": "user", "content": text}]}).encode()
    request = urllib.request.Request(f"{address}/v1/chat/completions", body, {"Authorization": f"Bearer {key}"})
    with urllib.request.urlopen(request, timeout=30) as answer:
        return json.load(answer)["choices"][0]["message"]["content"]


async def main(home: Path, once: bool) -> None:
    """Serve; leaving the `async with` closes the connections, ends every task and closes the store."""
    config = load_config({}, home=home, server={"port": 0 if once else 8643})
    key = admin_key(config.server.key, home, [config.server.host])
    async with open_server(config, key, agent=agent) as serving:
        (address,) = serving.addresses
        if not once:
            print(f"{address}/v1 with the key {key.value}")
            await trio.sleep_forever()
        # A client that blocks belongs in a thread: the server needs this one.
        print(await trio.to_thread.run_sync(ask, address, key.value, "backwards it say"))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        try:
            trio.run(main, Path(folder), "--once" in sys.argv)
        except* KeyboardInterrupt:
            pass
