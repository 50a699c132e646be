"""The texts of notices about background processes. Pure functions."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING, Final

from .watching import Disabled, Match, OverflowReleased, OverflowTripped, WatchEvent

if TYPE_CHECKING:
    from .processes import BackgroundProcess

OUTPUT_CHARACTERS: Final = 2000


def exit_words(code: int | None) -> str:
    """Return the exit code in words, with the name of the signal, if there was one."""
    if code is None:
        return "exit code unknown"
    number = -code if code < 0 else code - 128
    if code < 0 or number in (signal.SIGTERM, signal.SIGKILL, signal.SIGINT):
        try:
            return f"exit code {code}, {signal.Signals(number).name}"
        except ValueError:
            pass
    return f"exit code {code}"


def completion_text(record: BackgroundProcess) -> str:
    """Return the text that tells the agent how a process ended."""
    code = record.exit_code
    match record.completion_reason:
        case "lost":
            phrase = "was lost with its backend"
        case "killed":
            how = f" with {record.how}" if record.how is not None else ""
            phrase = f"was terminated by {record.termination_source}{how}"
        case _:
            phrase = "completed normally" if code == 0 else "exited"
    lines = [f"[IMPORTANT: Background process {record.id} {phrase} ({exit_words(code)}).", f"Command: {record.shown}"]
    if record.watch is not None and not record.notify and not record.watch.disabled:
        lines.append(f"It ended before any of its watch patterns had matched: {', '.join(record.watch.patterns)}")
    if record.leftovers:
        lines.append("Processes that it had left behind were ended with it.")
    output = last_lines(record.tail(OUTPUT_CHARACTERS), record.output.total > OUTPUT_CHARACTERS)
    return "\n".join([*lines, "Output:", f"{output or '(no output)'}]"])


def last_lines(text: str, cut: bool) -> str:
    """Return text whose beginning was cut off from its first whole line on."""
    if not cut:
        return text.strip()
    first, newline, rest = text.partition("\n")
    return f"[... earlier output left out ...]\n{(rest if newline else first).strip()}"


def watch_text(record: BackgroundProcess, event: WatchEvent) -> str:
    """Return the text that tells the agent what a watch found."""
    head = f"[IMPORTANT: Background process {record.id}"
    match event:
        case Match():
            from .output import mask_secrets

            lines = [
                f'{head} matched watch pattern "{event.pattern}".',
                f"Command: {record.shown}",
                "Matched output:",
                mask_secrets(event.text),
            ]
            if event.suppressed:
                lines.append(
                    f"({event.suppressed} earlier matches were not reported, to keep the conversation readable)"
                )
            return "\n".join(lines) + "]"
        case Disabled():
            return (
                f"{head} matches its watch patterns too often and is not watched any more ({event.suppressed} matches were not reported)."
                f" You will be told when it ends.\nCommand: {record.shown}]"
            )
        case OverflowTripped():
            return (
                f"{head} matched, but all processes together match too often: matches are not reported for {event.seconds:g} s."
                f"\nCommand: {record.shown}]"
            )
        case OverflowReleased():
            return (
                f"{head} matched: matches are reported again. {event.dropped} were left out meanwhile."
                f"\nCommand: {record.shown}]"
            )
