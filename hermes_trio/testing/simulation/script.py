"""The scripted model. It does what the message says: `m4 bg 10` has the mark `m4` and requests a background command of ten seconds.

Every text contains the mark of the message that caused it, so that the judge can attribute it wherever it appears.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final, cast

import msgspec

from hermes_trio.runtime.ports import ToolCall
from hermes_trio.testing.model_server import ScriptedAnswer
from hermes_trio.testing.model_server.script import ScriptedCall

from .threads import THREAD_TOOL

__all__ = ["MARK", "answer", "asked_of", "marks", "options_of"]

MARK: Final = re.compile(r"\bm\d+\b")

_REQUEST: Final = re.compile(r"(m\d+) (say|think|run|bgs|bg|rm|ponder)\b ?(\d*)((?: \w+=\w+)*)")

_NOTICES: Final = {
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


def _text(message: Mapping[str, Any]) -> str:
    content: Any = message.get("content") or ""
    if isinstance(content, str):
        return content
    return " ".join(str(part.get("text", "")) for part in cast("list[dict[str, Any]]", content))


def asked_of(call: ScriptedCall) -> str:
    """Return the text of the last user message of a call, which is from a person or a notice."""
    messages = cast("list[dict[str, Any]]", call.body.get("messages") or [{}])
    return next((_text(one) for one in reversed(messages) if one.get("role") == "user"), "")


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
        case "rm":
            return _tool(mark, command=f"rm -rf build-{mark}")
        case "ponder":
            return _tool(mark, THREAD_TOOL, seconds=float(amount), says=mark)
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


def _tool(mark: str, name: str = "terminal", /, **arguments: Any) -> ScriptedAnswer:
    return ScriptedAnswer(tool_calls=(_call(mark, name, **arguments),), piece=64)


def _call(id: str, name: str, /, **arguments: Any) -> ToolCall:
    return ToolCall(id=f"call_{id}", name=name, arguments=msgspec.json.encode(arguments).decode())
