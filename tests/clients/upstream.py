"""The scripted model behind the server in the clients' tests: it reads from the conversation which scenario is played, and how far it is.

`python -m tests.clients.upstream` prints its port, and ends when its standard input does.
"""

from __future__ import annotations

import json
import re
import sys
from typing import Any

import trio

from hermes_trio.runtime.ports import ToolCall
from hermes_trio.testing.model_server import ModelServer, ScriptedAnswer, ScriptedRefusal
from hermes_trio.testing.model_server.script import ScriptedCall

PERSON = {"name": "Ada", "age": 36}
ROUNDS = 20
_SCENARIO = re.compile(r"scenario:(\w+)")
_LEDGER = re.compile(r"ledger:(\S+)")


def _text(content: Any) -> str:
    if isinstance(content, list):
        return " ".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    return str(content or "")


def _function(number: int, name: str, /, **arguments: Any) -> ToolCall:
    return ToolCall(id=f"call_{number}_{name}", name=name, arguments=json.dumps(arguments))


def answer(call: ScriptedCall) -> ScriptedAnswer | ScriptedRefusal:
    """The next step of the scenario that the conversation names."""
    messages = call.body["messages"]
    users = [
        index
        for index, message in enumerate(messages)
        if message["role"] == "user" and _SCENARIO.search(_text(message["content"]))
    ]
    if not users:
        return ScriptedAnswer(text="Hello from upstream")
    prompt = _text(messages[users[-1]]["content"])
    scenario = _SCENARIO.findall(prompt)[-1]
    ledger = (_LEDGER.findall(prompt) or ["/dev/null"])[-1]
    results = [_text(message["content"]) for message in messages[users[-1] :] if message["role"] == "tool"]
    tools = {tool["function"]["name"]: tool["function"] for tool in call.body.get("tools") or ()}
    at = call.number
    server = _function(at, "terminal", command=f"echo ran >> {ledger}; echo served")
    if scenario == "json":
        return _structured(call, tools, at)
    if scenario == "rounds":
        if len(results) >= ROUNDS:
            return ScriptedAnswer(text=f"{len(results)} rounds")
        return ScriptedAnswer(tool_calls=(_function(at, "step", number=len(results)) if len(results) % 2 else server,))
    if results:
        if scenario == "fail":
            return ScriptedRefusal(status=401, message="the account is closed")
        if scenario == "handoff":
            system = " ".join(
                _text(message["content"]) for message in messages if message["role"] in ("system", "developer")
            )
            return ScriptedAnswer(text="Refunds here" if "refunds desk" in system else "Still the first one")
        return ScriptedAnswer(text=f"Results: {' and '.join(results)}")
    weather = _function(at, "weather", city="Paris")
    match scenario:
        case "client":
            return ScriptedAnswer(tool_calls=(weather,))
        case "server" | "fail":
            return ScriptedAnswer(tool_calls=(server,))
        case "both":
            return ScriptedAnswer(tool_calls=(server, weather))
        case "handoff":
            name = next((name for name in tools if name.startswith("transfer_to_")), "transfer_to_nobody")
            return ScriptedAnswer(tool_calls=(_function(at, name),))
        case _:
            return ScriptedAnswer(text="Hello from upstream")


def _structured(call: ScriptedCall, tools: dict[str, Any], at: int) -> ScriptedAnswer:
    """An object, as JSON where a schema is asked for, else by the tool that takes one with these fields."""
    if call.body.get("response_format"):
        return ScriptedAnswer(text=json.dumps(PERSON))
    for name, function in tools.items():
        if set(PERSON) <= set(function.get("parameters", {}).get("properties", {})):
            return ScriptedAnswer(tool_calls=(_function(at, name, **PERSON),))
    return ScriptedAnswer(text=f"nobody asked for an object: {sorted(tools)}")


async def _serve() -> None:
    async with trio.open_nursery() as nursery:
        server = await nursery.start(ModelServer(otherwise=answer).run)
        sys.stdout.write(f"{server.port}\n")
        sys.stdout.flush()
        await trio.to_thread.run_sync(sys.stdin.read, abandon_on_cancel=True)
        server.stop()


if __name__ == "__main__":
    trio.run(_serve)
