"""The scripted model. It does what the message says: `m4 bg 10` has the mark `m4` and requests a background command of ten seconds.

Every text contains the mark of the message that caused it, so that an invariant can attribute it wherever it appears.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final, cast

import msgspec

from hermes_trio.runtime.ports import ToolCall
from hermes_trio.testing.model_server import ScriptedAnswer
from hermes_trio.testing.model_server.script import ScriptedCall

from .threads import THREAD_TOOL

MARK: Final = re.compile(r"\bm\d+\b")

_REQUEST: Final = re.compile(
    r"(?:\[[^]]*\] )?(m\d+) (say|think|run|bgs|bg|rm|ponder|delbg|dels|del|deeper|deep|ask|watch|ps)\b ?(\d*)((?: \w+=\w+)*)"
)

_GONE: Final = re.compile(r"\[IMPORTANT: The host [^]]*\]\n\n")
"""What is put before the first message after the loss of a conversation's host. The answer is one to the message."""

DEEPER: Final = "deeper"
"""The word of a goal that a child delegates. Children may not, so that the model is never asked for it."""

_PROCESS: Final = re.compile(r'"session_id": ?"([^"]+)"')

_NOTICES: Final = {
    "matched watch pattern": "matched",
    "stopped while this message": "interrupted",
    "was lost": "lost",
    "ends": "told",
}


def marks(text: str) -> set[str]:
    """Return the marks of messages in a text."""
    return set(MARK.findall(text))


def options_of(words: str) -> dict[str, str]:
    """Return the `name=value` words of a step."""
    return dict(cast("tuple[str, str]", tuple(word.split("=", 1))) for word in words.split() if "=" in word)


_HOW: Final[Mapping[str, tuple[int, tuple[str, ...]]]] = {
    "store": (1, ("before", "after", "busy", "full", "slow")),
    "crash": (0, ("now", "before", "after")),
    "receiver": (0, ("fails",)),
    "signal": (0, ("late", "twice", "reordered", "lost")),
    "partition": (0, ("away", "deaf")),
}
"""Where the words of a fault say how it fails, and what they may say."""

_OPTIONS: Final[Mapping[str, tuple[str, ...]]] = {
    "store": ("times", "skip", "seconds"),
    "crash": ("down",),
    "model": ("after",),
    "clock": ("step",),
    "signal": ("times",),
    "pause": ("seconds",),
    "partition": ("seconds",),
}
_NEEDED: Final = frozenset({"crash", "model", "clock", "signal", "pause", "partition"})
"""The faults that need all of their options."""


def check_fault(kind: str, words: str) -> None:
    """Raise `ValueError` for the words of a fault that would be ignored or misread."""
    place, accepted = _HOW.get(kind, (0, ()))
    said = [word for word in words.split() if "=" not in word]
    if accepted and (len(said) <= place or said[place] not in accepted):
        raise ValueError(f"the fault `{kind} {words}` does not say how: one of {', '.join(accepted)}")
    options, known = options_of(words), _OPTIONS.get(kind)
    if known is None:
        return
    if strange := sorted(set(options) - set(known)):
        raise ValueError(f"the fault `{kind} {words}` has the option {strange[0]}; it takes {', '.join(known)}")
    if kind in _NEEDED and (missing := [name for name in known if name not in options]):
        raise ValueError(f"the fault `{kind} {words}` needs the option {missing[0]}=NUMBER")


def _text(message: Mapping[str, Any]) -> str:
    content: Any = message.get("content") or ""
    if isinstance(content, str):
        return content
    return " ".join(str(part.get("text", "")) for part in cast("list[dict[str, Any]]", content))


def asked_of(call: ScriptedCall) -> str:
    """Return the text of the last user message of a call, which is from a person or a notice, without what is put before it after the loss of a host."""
    messages = cast("list[dict[str, Any]]", call.body.get("messages") or [{}])
    asked = next((_text(one) for one in reversed(messages) if one.get("role") == "user"), "")
    return _GONE.sub("", asked, count=1)


def known_to(call: ScriptedCall) -> frozenset[str]:
    """Return the marks of the user messages of a call."""
    messages = cast("list[dict[str, Any]]", call.body.get("messages") or [])
    return frozenset(marks(" ".join(_text(one) for one in messages if one.get("role") == "user")))


def is_child(call: ScriptedCall) -> bool:
    """Return whether a call is that of a child, which works on a delegated goal."""
    messages = cast("list[dict[str, Any]]", call.body.get("messages") or [{}])
    return any(one.get("role") == "system" and "delegated goal" in _text(one) for one in messages)


def _about(text: str) -> str:
    """Return the marks in a text, with the numbers of their parts."""
    return " ".join(sorted(set(re.findall(MARK.pattern + r"(?:\.\d)?", text))))


def answer(call: ScriptedCall) -> ScriptedAnswer:
    """Return the answer to a call, a pure function of its messages."""
    messages = cast("list[dict[str, Any]]", call.body.get("messages") or [{}])
    asked = asked_of(call)
    if messages[-1].get("role") == "tool":
        return ScriptedAnswer(text=f"done {_about(asked)}", piece=64)
    found = _REQUEST.match(asked)
    if found is None:
        about = _about(asked)
        kinds = [word for text, word in _NOTICES.items() if text in asked] or ["told"]
        return ScriptedAnswer(text=f"{' and '.join(kinds)} {about}" if about else "nothing to say", piece=64)
    mark, verb, amount, options = found.groups()
    match verb:
        case "say":
            return ScriptedAnswer(text=f"done {mark}", piece=64)
        case "think":
            return ScriptedAnswer(text=f"done {mark} " + "and so on " * 4, piece=12, pause=float(amount) / 8)
        case "watch":
            command = f"simulated seconds={amount} says={mark}"
            return _tool(mark, command=command, background=True, watch_patterns=["begins"])
        case "ps":
            calls = (
                _call(f"{mark}_1", "process", action="list"),
                _call(f"{mark}_2", "process", action="log", session_id=_last_process(messages)),
                _call(f"{mark}_3", "process", action="poll", session_id="proc_0"),
            )
            return ScriptedAnswer(tool_calls=calls, piece=64)
        case "rm":
            return _tool(mark, command=f"rm -rf build-{mark}")
        case "ponder":
            return _tool(mark, THREAD_TOOL, seconds=float(amount), says=mark)
        case "del":
            return _tool(mark, "delegate_task", goal=f"{mark} run {amount}{options}")
        case "deep":
            return _tool(mark, "delegate_task", goal=f"{mark} {DEEPER}")
        case "dels" | "delbg":
            goals = [f"{mark} run {amount}{options}", f"{mark} think 10", f"{mark} deep"]
            if "kept=" in options:
                # The session of a child ends with it, and with the session its commands in the background.
                goals[1] = f"{mark} bg 3600"
            if "many=" in options:
                goals += [f"{mark} think 10"] * 2
            return _tool(
                mark,
                "delegate_task",
                tasks=[{"goal": goal, "role": "orchestrator"} for goal in goals],
                background=verb == "delbg",
            )
        case "ask":
            return _tool(mark, "mcp_sim_wait", seconds=int(amount), says=mark)
        case "deeper":
            return ScriptedAnswer(text=f"done {mark}", piece=64)
        case "bgs":
            # Four commands that end one after the other: each end is reported separately.
            more = {"background": True, "notify_on_complete": True}
            calls = [
                _call(
                    f"{mark}_{part}",
                    "terminal",
                    command=f"simulated seconds={part * int(amount)} says={mark}.{part}",
                    **more,
                )
                for part in range(1, 5)
            ]
            return ScriptedAnswer(tool_calls=tuple(calls), piece=64)
        case _:
            command = f"simulated seconds={amount} says={mark}{options}"
            more = {"background": True, "notify_on_complete": True} if verb == "bg" else {}
            return _tool(mark, command=command, **more)


def _last_process(messages: Sequence[Mapping[str, Any]]) -> str:
    """Return the id of the background process that the conversation started last."""
    found = [id for one in messages if one.get("role") == "tool" for id in _PROCESS.findall(_text(one))]
    return found[-1] if found else "proc_0"


def _tool(mark: str, name: str = "terminal", /, **arguments: Any) -> ScriptedAnswer:
    return ScriptedAnswer(tool_calls=(_call(mark, name, **arguments),), piece=64)


def _call(id: str, name: str, /, **arguments: Any) -> ToolCall:
    return ToolCall(id=f"call_{id}", name=name, arguments=msgspec.json.encode(arguments).decode())
