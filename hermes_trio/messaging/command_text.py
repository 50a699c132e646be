"""Parses a person's text: a command, an answer to a pending approval, or a marker of silence.

Only text that a person typed can be a command or an answer. Generated text, such as a rendered webhook payload, is `LiteralText`, which is neither
(SC-31). This module parses; `commands` acts.
"""

from __future__ import annotations

import re
from typing import Final

import msgspec

from hermes_trio.store.records import ApprovalChoice

MAX_REASON: Final = 280
"""The maximum of characters of a refusal's reason that are passed to the agent."""

MAX_SILENCE: Final = 64
"""A longer reply is not silent, whatever it starts with."""


class CommandTextError(ValueError):
    """Raised for arguments of a command that cannot be used. The message says what is expected."""


class LiteralText(msgspec.Struct, frozen=True):
    """Text that is only content: never a command, an answer or a reference."""

    text: str

    def __post_init__(self) -> None:
        if not isinstance(self.text, str):  # pyright: ignore[reportUnnecessaryIsInstance] - what came from outside may be anything
            raise TypeError(f"a string is needed, not {type(self.text).__name__}")


# Commands


class Command(msgspec.Struct, frozen=True):
    """A command as typed. `addressee` is the bot named after an "@", for groups with several bots."""

    name: str
    arguments: str = ""
    addressee: str | None = None


_COMMAND: Final = re.compile(r"([A-Za-z][\w:-]*)(?:@(\w+))?(?=\s|$)")
_DASHES: Final = str.maketrans({"—": "--", "–": "-", "‐": "-", "‑": "-", "‒": "-", "−": "-"})


def parse_command(text: str | LiteralText, *, prefix: str = "/") -> Command | None:
    """Parse `text` as a command. Return None for ordinary text.

    A word with a further "/" in it is a path, not a command. Typographic dashes in the arguments become hyphens again.
    """
    if isinstance(text, LiteralText) or not text.startswith(prefix):
        return None
    rest = text[len(prefix) :]
    match = _COMMAND.match(rest)
    if match is None:
        return None
    arguments = rest[match.end() :].strip().translate(_DASHES)
    return Command(match.group(1).lower(), arguments, match.group(2))


# Approvals


class ApprovalAnswer(msgspec.Struct, frozen=True):
    """An answer to the oldest pending approval, or to all of them."""

    choice: ApprovalChoice
    everything: bool = False
    reason: str = ""


_BARE_WORDS: Final = {
    **dict.fromkeys(
        (
            "y",
            "yes",
            "yep",
            "yeah",
            "ok",
            "okay",
            "approve",
            "approved",
            "allow",
            "confirm",
            "sure",
            "once",
            "👍",
            "✅",
        ),
        ApprovalChoice.ONCE,
    ),
    **dict.fromkeys(
        ("n", "no", "nope", "deny", "denied", "reject", "refuse", "cancel", "👎", "❌"), ApprovalChoice.DENY
    ),
    "session": ApprovalChoice.SESSION,
    "always": ApprovalChoice.ALWAYS,
}
_EDGES: Final = " \t\r\n.,!;:\"'`*_~()"
_VARIATION: Final = re.compile("[\ufe0f\U0001f3fb-\U0001f3ff]")


def bare_answer(text: str | LiteralText, *, waiting: bool) -> ApprovalAnswer | None:
    """Return the answer in a single word like "yes" while an approval is pending; otherwise, and for longer text, None."""
    if not waiting or isinstance(text, LiteralText):
        return None
    word = _VARIATION.sub("", text.strip(_EDGES)).casefold()
    choice = _BARE_WORDS.get(word)
    return None if choice is None else ApprovalAnswer(choice)


def approval_answer(command: Command) -> ApprovalAnswer:
    """Return the answer in an `approve` or `deny` command. Raises `CommandTextError`.

    `approve [all] [session|always|once]`; `deny [all] [reason]`, whose reason is cut at 280 characters.
    """
    words = command.arguments.split()
    if command.name == "deny":
        everything = bool(words) and words[0].casefold() == "all"
        reason = command.arguments[3:].strip() if everything else command.arguments
        return ApprovalAnswer(ApprovalChoice.DENY, everything, reason[:MAX_REASON])
    if command.name != "approve":
        raise CommandTextError(f"/{command.name} does not answer an approval; use /approve or /deny")
    everything, choice = False, ApprovalChoice.ONCE
    for word in words:
        match word.casefold():
            case "all":
                everything = True
            case "once" | "session" | "always" as scope:
                choice = ApprovalChoice(scope)
            case _:
                raise CommandTextError(f"/approve does not know {word!r}; write /approve [all] [once|session|always]")
    return ApprovalAnswer(choice, everything)


# Silence

_MARKERS: Final = frozenset({"SILENT", "NO_REPLY", "NO REPLY"})
_BRACKETED_MARKER: Final = "[SILENT]"
_NARRATION: Final = frozenset(
    {"silent", "silence", "stays silent", "remains silent", "no reply", "no response", "nothing", "quiet", "no_reply"}
)
_MUTE_SIGNS: Final = frozenset("🔇🔕🤫🤐😶🙊")
_WRAPPED: Final = re.compile(r"[\[(*_<]+\s*([^\[\]()*_<>]+?)[.!…\s]*[\])*_>]+")


def _is_marker(text: str) -> bool:
    bare = text.strip(_EDGES + "[]{}<>…-")
    return bare in _MARKERS or text.strip(_EDGES).upper() == _BRACKETED_MARKER


def is_silent_reply(text: str) -> bool:
    """Return whether the whole reply is a silence marker: it is kept in the transcript and not sent.

    Bare markers count in capitals only, so that "Silent." can be an answer.
    """
    stripped = text.strip()
    return len(stripped) <= MAX_SILENCE and _is_marker(stripped)


def is_silent_job_reply(text: str) -> bool:
    """Return whether the reply of a scheduled job is silent: a marker as the whole reply, its first or last line, or its prefix."""
    stripped = text.strip()
    if not stripped:
        return False
    lines = stripped.splitlines()
    if stripped.lstrip(_EDGES).upper().startswith(_BRACKETED_MARKER):
        return True
    return any(len(line) <= MAX_SILENCE and _is_marker(line) for line in (lines[0], lines[-1]))


def is_silence_narration(text: str) -> bool:
    """Return whether a reply only expresses that there is nothing to say: a lone dot, a mute sign, "(silence)"."""
    stripped = text.strip()
    if not stripped or len(stripped) > MAX_SILENCE:
        return False
    if is_silent_reply(stripped) or not stripped.strip(".…·• "):
        return True
    if not _VARIATION.sub("", stripped).strip("".join(_MUTE_SIGNS) + " "):
        return True
    wrapped = _WRAPPED.fullmatch(stripped)
    return wrapped is not None and wrapped.group(1).casefold() in _NARRATION
