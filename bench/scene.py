"""The scripted scene of the pictures: people ask, a scripted model answers, and its tools are real processes, a delegation, approvals and a chat."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import trio

from hermes_trio.runtime.ports import ToolCall
from hermes_trio.testing.model_server import Fault, ScriptedAnswer
from hermes_trio.testing.model_server.script import ScriptedCall
from hermes_trio.testing.model_server.server import ModelServer

MODEL = "llama-3.3-70b"

MAKEFILE = """\
.PHONY: test prices links bzImage watch log bisect test-parser report
log:
\t@sleep 0.6; echo "9f31c2e Read numbers with a sign"
bisect:
\t@sleep 2.6; echo "9f31c2e is the first bad commit"
test-parser:
\t@sleep 1.4; echo "212 passed"
report:
\t@sleep 0.3; echo written
test prices links watch:
\t@sleep 900
bzImage:
\t@sleep 3; echo "Kernel: arch/x86/boot/bzImage is ready (#42)"
"""

CHANGES = (
    "Three things, most important first:\n\n"
    "1. The scheduler places short tasks by their lag instead of their wakeup order, so interactive work waits less behind batch jobs.\n"
    "2. Load balancing looks at a whole cluster of cores that share a cache before it moves anything to another one.\n"
    "3. Two knobs are gone, and the third one is "
)


def _terminal(command: str, **more: Any) -> tuple[str, dict[str, Any]]:
    return "terminal", {"command": command, **more}


DONE = "Find the commit that broke the parser"
STEPS = ("make log", "make bisect -j4", "make test-parser", "make report")
"""What the model does one after the other before it answers `DONE`."""

TOOLS: Mapping[str, tuple[str, dict[str, Any]]] = {
    "Why is the nightly build red?": _terminal("make test -j8"),
    "Compare the three price lists": (
        "delegate_task",
        {
            "tasks": [
                {"goal": "Read the price list of Northwind"},
                {"goal": "Read the price list of Contoso"},
                {"goal": "Read the price list of Fabrikam"},
            ]
        },
    ),
    "Read the price list of Northwind": _terminal("make prices"),
    "Check every link of the handbook": (
        "delegate_task",
        {"goal": "Check the links of chapters one to four", "background": True},
    ),
    "Check the links of chapters one to four": _terminal("make links"),
    "Clean the build directory and configure again": _terminal("rm -rf ./build && ./configure --release"),
    "Build the kernel, and tell me when it is done": _terminal(
        "make bzImage -j16", background=True, notify_on_complete=True
    ),
    "Watch staging over the night": _terminal("make watch", background=True, notify_on_complete=True),
    "Remove the releases that nobody uses": _terminal("rm -rf ./releases/41 ./releases/42"),
}
SAYS: Mapping[str, str] = {
    "Build the kernel, and tell me when it is done": "The kernel builds in the background. I will tell you here when it is ready.",
    "Check every link of the handbook": "A child agent checks them. What it finds comes back here.",
    "Watch staging over the night": "I watch it, and tell you when something changes.",
    "What changed in the scheduler since 6.12?": CHANGES,
}
RUNS = (
    "Why is the nightly build red?",
    "Compare the three price lists",
    "Clean the build directory and configure again",
    "Summarise the incident of Tuesday",
)
SLOW = (
    "What changed in the scheduler since 6.12?",
    "Read the price list of Contoso",
    "Read the price list of Fabrikam",
    "Summarise the incident of Tuesday",
)
"""What the model is still writing when the pictures are taken."""


def answer(call: ScriptedCall) -> ScriptedAnswer:
    """What the model says: a tool call first, words after its result; some answers take long."""
    said = [message for message in call.body["messages"] if message["role"] == "user"]
    last, text = call.body["messages"][-1], str(said[-1]["content"])
    asked = next((question for question in (*TOOLS, *SAYS, *RUNS, *SLOW) if question in text), "")
    if DONE in text:
        done = sum(message["role"] == "tool" for message in call.body["messages"])
        if done < len(STEPS):
            name, arguments = _terminal(STEPS[done])
            step = ToolCall(id=f"call_{call.number:04x}", name=name, arguments=json.dumps(arguments))
            return ScriptedAnswer(tool_calls=(step,), pause=0.15)
        return ScriptedAnswer(
            text="It was 9f31c2e, “Read numbers with a sign”. The report is in `build/report.md`.", pause=0.1
        )
    if last["role"] == "user" and asked in TOOLS and "IMPORTANT" not in text:
        name, arguments = TOOLS[asked]
        return ScriptedAnswer(
            tool_calls=(ToolCall(id=f"call_{call.number:04x}", name=name, arguments=json.dumps(arguments)),)
        )
    if "IMPORTANT" in text:
        return ScriptedAnswer(text="The kernel is ready: `arch/x86/boot/bzImage`, build 42, no warnings.")
    if asked in SLOW:
        text = SAYS.get(asked, "One moment, please: ")
        return ScriptedAnswer(text=text, piece=24, pause=0.02, fault=Fault.STALL, fault_after=len(text) // 24)
    return ScriptedAnswer(text=SAYS.get(asked, "Done."), piece=12)


@contextmanager
def open_model() -> Iterator[str]:
    """The address of the scripted model, for the body of the `with`: it works in a thread of its own."""
    ready, found = threading.Event(), list[ModelServer]()

    async def serve() -> None:
        async with trio.open_nursery() as nursery:
            found.append(await nursery.start(ModelServer(otherwise=answer).run))
            tokens.append(trio.lowlevel.current_trio_token())
            ready.set()

    tokens: list[trio.lowlevel.TrioToken] = []
    thread = threading.Thread(target=trio.run, args=(serve,), daemon=True)
    thread.start()
    ready.wait(10)
    try:
        yield found[0].openai_url
    finally:
        tokens[0].run_sync_soon(found[0].stop)
        thread.join(10)


def prepare(home: Path, model: str) -> None:
    """The configuration of the scene's server, and the folder that its tools work in."""
    work = home / "work"
    (work / "build").mkdir(parents=True)
    (work / "Makefile").write_text(MAKEFILE)
    (home / "home").mkdir()
    (home / "home" / "config.toml").write_text(
        f"""
[approvals]
timeout = 600

[models]
default = "llama"

[models.routes.llama]
provider = "openai"
model = "{MODEL}"
base_url = "{model}"

[tools.terminal]
cwd = "{work}"
"""
    )
