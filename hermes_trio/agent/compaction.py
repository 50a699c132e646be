"""Replaces the older part of a conversation by a summary when it nearly fills the model's context window. The session keeps its id.

The model itself writes the summary. The replaced messages stay in the store, archived.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Final, Protocol

import msgspec

from hermes_trio.runtime.outcome import Usage
from hermes_trio.runtime.ports import Message
from hermes_trio.runtime.tree import working

from .model import Model, ModelError, ModelRequest, ToolSpec, collect

logger: Final = logging.getLogger("hermes_trio.agent.compaction")

CHARACTERS_PER_TOKEN: Final = 4
"""An estimate, good enough to tell when a window is nearly full; the model's own count is not known before the call."""

MESSAGE_OVERHEAD: Final = 4
KEEP_SHARE: Final = 0.3
"""The share of the window that the newest messages may keep."""

_INSTRUCTION: Final = (
    "Summarise the conversation so far for yourself, so that you can go on without it: the user's goals and wishes, decisions, facts and file names,"
    " what was tried and what came of it, what is still open. Be complete and brief. Answer with the summary only."
)

TRIMMED_RESULT: Final = 1_000
"""The length, in characters, to which older tool results are cut when the turn itself is too long."""

RECENT_RESULTS: Final = 2
"""The number of newest results that are not cut: the model is working on them."""

SUMMARY_HEADING: Final = "[Summary of the earlier conversation]"


class HistoryStore(Protocol):
    """The verb of the store that compaction uses."""

    async def replace_history(self, session_id: str, messages: Sequence[Message]) -> None: ...


def estimate_tokens(messages: Sequence[Message], tools: Sequence[ToolSpec] = ()) -> int:
    """Estimate the tokens of a request."""
    characters = 0
    for message in messages:
        characters += len(message.text) + sum(len(call.arguments) + len(call.name) for call in message.tool_calls)
    for tool in tools:
        characters += len(tool.description) + len(str(tool.parameters))
    return characters // CHARACTERS_PER_TOKEN + MESSAGE_OVERHEAD * len(messages)


def split_for_compaction(history: Sequence[Message], window: int) -> tuple[list[Message], list[Message]]:
    """Split a history into the part to summarise and the part to keep. The latter starts with a user's message, so no tool result loses its call."""
    budget = int(window * KEEP_SHARE)
    kept = len(history)
    used = 0
    for index in range(len(history) - 1, -1, -1):
        used += estimate_tokens([history[index]])
        if used > budget:
            break
        if history[index].role == "user":
            kept = index
    return list(history[:kept]), list(history[kept:])


class Compacted(msgspec.Struct, frozen=True):
    """A shorter history, and the usage of making it."""

    history: list[Message]
    usage: Usage = Usage()


async def compact(model: Model, history: Sequence[Message], store: HistoryStore | None, session_id: str) -> Compacted:
    """Summarise the history and store the result. If the model fails, drop the oldest part; a note in its place tells the model.

    Cancelled before the result is stored, it changes nothing.
    """
    older, newer = split_for_compaction(history, model.context_window)
    if not older:
        return Compacted(list(history))
    usage = Usage()
    with working("compaction", f"compaction {session_id}", f"{len(older)} messages"):
        room = int(model.context_window * 0.8) * CHARACTERS_PER_TOKEN
        told = _transcript(older, room)
        request = ModelRequest(
            messages=(Message(role="system", content=_INSTRUCTION), Message(role="user", content=told)),
            metadata={"purpose": "compaction"},
        )
        try:
            async with model.stream(request) as stream:
                answer = await collect(stream)
            summary, usage = answer.text, answer.usage
        except ModelError as error:
            logger.warning(
                "could not summarise the conversation of session %s; dropping its oldest messages: %s",
                session_id,
                error,
            )
            summary = f"{len(older)} earlier messages were dropped because they could not be summarised."
        shorter = [Message(role="user", content=f"{SUMMARY_HEADING}\n{summary}"), *newer]
        if store is not None:
            await store.replace_history(session_id, shorter)
    return Compacted(shorter, usage)


def trim_results(messages: Sequence[Message]) -> list[Message]:
    """Return the messages of a turn with older tool results cut, for a request that would be too long. The transcript keeps them whole."""
    results = [index for index, message in enumerate(messages) if message.role == "tool"]
    older = set(results[:-RECENT_RESULTS])
    return [_trimmed(message) if index in older else message for index, message in enumerate(messages)]


def _trimmed(message: Message) -> Message:
    text = message.text
    if len(text) <= TRIMMED_RESULT:
        return message
    half = TRIMMED_RESULT // 2
    left_out = len(text) - 2 * half
    return msgspec.structs.replace(
        message, content=f"{text[:half]}\n… {left_out} characters left out to make room …\n{text[-half:]}"
    )


def _transcript(messages: Sequence[Message], room: int) -> str:
    """Return the messages as text of limited length: long messages are cut first, then the oldest are dropped."""
    longest = min(4000, max(200, room // max(1, len(messages))))
    lines: list[str] = []
    for message in messages:
        lines.extend(f"{message.role} calls {call.name}({call.arguments[:longest]})" for call in message.tool_calls)
        if message.text:
            lines.append(f"{message.role}: {message.text[:longest]}")
    return "\n".join(lines)[-room:]
