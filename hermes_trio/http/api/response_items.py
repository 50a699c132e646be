"""The output items of one response, built from the events of its turn, and the stream events that tell of them.

Items stand in the order in which they began, and that is their `output_index`. Text before and after a tool call belongs to two messages. The same object
serves plain and streaming responses, so both have the same output.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import msgspec

from hermes_trio.runtime.ids import Ids
from hermes_trio.runtime.outcome import Outcome

__all__ = ["Items", "OutputItem"]

ARGUMENT_LENGTH: Final = 500
OUTPUT_LENGTH: Final = 1_000
_LONG_ARGUMENTS: Final = ("content", "query", "pattern", "old_string", "new_string")


class OutputItem(msgspec.Struct):
    """One item: a message, a tool call, or a tool's result."""

    id: str
    type: str
    status: str = "in_progress"
    text: list[str] = msgspec.field(default_factory=list[str])
    fields: dict[str, Any] = msgspec.field(default_factory=dict[str, Any])

    def as_dict(self) -> dict[str, Any]:
        """The item as clients read it."""
        if self.type == "message":
            text = "".join(self.text)
            content = [_part(text)] if text else []
            return {
                "id": self.id,
                "type": "message",
                "status": self.status,
                "role": "assistant",
                "content": content,
            }
        return {"id": self.id, "type": self.type, "status": self.status, **self.fields}


class Items:
    """Takes the events of a turn. `events` gives what a stream must say about them since the last call."""

    def __init__(self, ids: Ids) -> None:
        self._ids = ids
        self.output: list[OutputItem] = []
        self._events: list[tuple[str, dict[str, Any]]] = []
        self._message: int | None = None
        self._calls: dict[str, int] = {}
        self._finished = False

    def events(self) -> list[tuple[str, dict[str, Any]]]:
        """Name and fields of what happened since the last call."""
        events, self._events = self._events, []
        for name, fields in events:
            if name == "response.output_text.delta":
                fields["delta"] = "".join(fields["delta"])
        return events

    def take(self, event: Mapping[str, Any]) -> None:
        """An event of the turn."""
        match event["event"]:
            case "message.delta":
                self._text(event["delta"])
            case "tool.started":
                self._tool_started(event)
            case "tool.completed":
                self._tool_completed(event)
            case _:
                pass

    def finish(self, outcome: Outcome) -> None:
        """The turn has ended: say what was not said yet, and close what is open. Doing it again changes nothing."""
        if self._finished:
            return
        self._finished = True
        if outcome.text and not self._has_said(outcome.text):
            self._text(outcome.text)
        self._close_message("completed" if outcome.ok and not outcome.partial else "incomplete")
        for index in self._calls.values():
            item = self.output[index]
            item.status = "incomplete"
            self._events.append(("response.output_item.done", {"output_index": index, "item": item.as_dict()}))
        self._calls.clear()

    def _has_said(self, text: str) -> bool:
        """Whether the final text has been streamed: it is all of what was said, or what was said last."""
        said = ["".join(item.text) for item in self.output if item.type == "message"]
        return bool(said) and (said[-1].endswith(text) or "".join(said).endswith(text) or self._message is not None)

    # -- text --------------------------------------------------------------------------------------------------------------------

    def _add(self, item: OutputItem) -> int:
        self.output.append(item)
        index = len(self.output) - 1
        self._events.append(("response.output_item.added", {"output_index": index, "item": item.as_dict()}))
        return index

    def _text(self, delta: str) -> None:
        if not delta:
            return
        if self._message is None:
            self._message = self._add(OutputItem(self._ids.make("msg_", 24), "message"))
            self._events.append(
                (
                    "response.content_part.added",
                    self._place({"part": _part("")}),
                )
            )
        self.output[self._message].text.append(delta)
        if self._events and self._events[-1][0] == "response.output_text.delta":
            # Not written yet: one event may carry both, so that a slow reader cannot make this list grow.
            self._events[-1][1]["delta"].append(delta)
        else:
            self._events.append(("response.output_text.delta", self._place({"delta": [delta], "logprobs": []})))

    def _place(self, fields: dict[str, Any]) -> dict[str, Any]:
        assert self._message is not None
        return {
            "item_id": self.output[self._message].id,
            "output_index": self._message,
            "content_index": 0,
            **fields,
        }

    def _close_message(self, status: str = "completed") -> None:
        if self._message is None:
            return
        item = self.output[self._message]
        item.status = status
        text = "".join(item.text)
        part = _part(text)
        self._events += [
            ("response.output_text.done", self._place({"text": text, "logprobs": []})),
            ("response.content_part.done", self._place({"part": part})),
            ("response.output_item.done", {"output_index": self._message, "item": item.as_dict()}),
        ]
        self._message = None

    # -- tools -------------------------------------------------------------------------------------------------------------------

    def _tool_started(self, event: Mapping[str, Any]) -> None:
        call_id = event.get("tool_call_id", "")
        if not call_id:
            return
        self._close_message()
        fields = {
            "call_id": call_id,
            "name": event.get("tool", ""),
            "arguments": _abbreviated(event.get("arguments") or "{}"),
        }
        self._calls[call_id] = self._add(OutputItem(self._ids.make("fc_", 24), "function_call", fields=fields))

    def _tool_completed(self, event: Mapping[str, Any]) -> None:
        call_id = event.get("tool_call_id", "")
        index = self._calls.pop(call_id, None)
        if index is None:
            return
        item = self.output[index]
        item.status = "completed"
        self._events += [
            (
                "response.function_call_arguments.done",
                {
                    "item_id": item.id,
                    "output_index": index,
                    "name": item.fields["name"],
                    "arguments": item.fields["arguments"],
                },
            ),
            ("response.output_item.done", {"output_index": index, "item": item.as_dict()}),
        ]
        text = str(event.get("result") or "")
        if len(text) > OUTPUT_LENGTH:
            text = text[:OUTPUT_LENGTH] + "…"
        result = OutputItem(
            self._ids.make("fco_", 24),
            "function_call_output",
            status="completed",
            fields={"call_id": call_id, "output": text},
        )
        index = self._add(result)
        self._events.append(("response.output_item.done", {"output_index": index, "item": result.as_dict()}))


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": list[Any](), "logprobs": list[Any]()}


def _abbreviated(arguments: str) -> str:
    """Arguments as they are shown; the transcript keeps them whole."""
    if len(arguments) <= ARGUMENT_LENGTH:
        return arguments
    try:
        values = msgspec.json.decode(arguments, type=dict[str, Any])
    except msgspec.MsgspecError:
        return arguments[:ARGUMENT_LENGTH] + "…"
    for name in _LONG_ARGUMENTS:
        value = values.get(name)
        if isinstance(value, str) and len(value) > ARGUMENT_LENGTH:
            values[name] = value[:ARGUMENT_LENGTH] + "…"
    return msgspec.json.encode(values).decode()
