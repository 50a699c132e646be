"""Builds the output items of one response from the events of its turn, and the stream events about them.

Items are in the order in which they began, which is their `output_index`; an item's id consists of the response's id and that index, so that a
repeated stream has the same ids. Text before and after a tool call belongs to two messages. Plain and streaming responses use the same object, so
both have the same output.

A call of a server tool is one `mcp_call` item with its output inside, which no client takes for a call of its own; the older shape, a `function_call`
and a `function_call_output`, can be requested. A call of a client tool is a `function_call`, at the end.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import msgspec

from hermes_trio.runtime.outcome import Outcome
from hermes_trio.runtime.ports import ToolCall

SERVER_LABEL: Final = "hermes"
"""The name of the server in `mcp_call` items."""

ARGUMENT_LENGTH: Final = 500
OUTPUT_LENGTH: Final = 1_000
_LONG_ARGUMENTS: Final = ("content", "query", "pattern", "old_string", "new_string")
_RESPONSE_DIGITS: Final = 28
_INDEX_DIGITS: Final = 4


class OutputItem(msgspec.Struct):
    """One item: a message, the model's reasoning, a tool call, or a tool's result."""

    id: str
    type: str
    status: str = "in_progress"
    text: list[str] = msgspec.field(default_factory=list[str])
    fields: dict[str, Any] = msgspec.field(default_factory=dict[str, Any])

    def as_dict(self) -> dict[str, Any]:
        """Return the item in the form of the API."""
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
        if self.type == "reasoning":
            text = "".join(self.text)
            return {
                "id": self.id,
                "type": "reasoning",
                "status": self.status,
                "summary": [{"type": "summary_text", "text": text}] if text else [],
            }
        return {"id": self.id, "type": self.type, "status": self.status, **self.fields}


def item_place(item_id: str) -> tuple[str, int] | None:
    """Return the response of an item and its index there; None for an id that is not one of ours."""
    _, _, digits = item_id.rpartition("_")
    if len(digits) != _RESPONSE_DIGITS + _INDEX_DIGITS:
        return None
    try:
        return f"resp_{digits[:_RESPONSE_DIGITS]}", int(digits[_RESPONSE_DIGITS:], 16)
    except ValueError:
        return None


class Items:
    """Takes the events of a turn. `events` returns the stream events since the last call.

    `mcp` False shows the server's tool calls in the older shape.
    """

    def __init__(self, response_id: str, *, mcp: bool = True) -> None:
        self._digits = response_id.removeprefix("resp_")
        self._mcp = mcp
        self.output: list[OutputItem] = []
        self._events: list[tuple[str, dict[str, Any]]] = []
        self._message: int | None = None
        self._reasoning: int | None = None
        self._calls: dict[str, int] = {}
        self._finished = False

    def events(self) -> list[tuple[str, dict[str, Any]]]:
        """Return name and fields of the stream events since the last call."""
        events, self._events = self._events, []
        for name, fields in events:
            if name in _DELTAS:
                fields["delta"] = "".join(fields["delta"])
        return events

    def take(self, event: Mapping[str, Any]) -> None:
        """Take an event of the turn."""
        match event["event"]:
            case "message.delta":
                self._text(event["delta"])
            case "reasoning.delta":
                self._think(event["delta"])
            case "tool.started":
                self._tool_started(event)
            case "tool.completed":
                self._tool_completed(event)
            case _:
                pass

    def finish(self, outcome: Outcome) -> None:
        """Finish at the end of the turn: add what was not streamed yet, and close open items. Idempotent."""
        if self._finished:
            return
        self._finished = True
        if outcome.text and not self._has_said(outcome.text):
            self._text(outcome.text)
        self._close("completed" if outcome.ok and not outcome.partial else "incomplete")
        for index in self._calls.values():
            item = self.output[index]
            item.status = "incomplete"
            self._events.append(("response.output_item.done", {"output_index": index, "item": item.as_dict()}))
        self._calls.clear()
        for call in outcome.calls:
            self._client_call(call)

    def _has_said(self, text: str) -> bool:
        """Return whether the final text has been streamed: it is the whole streamed text, or its end."""
        said = ["".join(item.text) for item in self.output if item.type == "message"]
        return bool(said) and (said[-1].endswith(text) or "".join(said).endswith(text) or self._message is not None)

    def _id(self, prefix: str) -> str:
        return f"{prefix}{self._digits}{len(self.output):0{_INDEX_DIGITS}x}"

    def _add(self, item: OutputItem) -> int:
        self.output.append(item)
        index = len(self.output) - 1
        self._events.append(("response.output_item.added", {"output_index": index, "item": item.as_dict()}))
        return index

    def _done(self, index: int) -> None:
        self._events.append(
            ("response.output_item.done", {"output_index": index, "item": self.output[index].as_dict()})
        )

    def _tell(self, event: str, index: int, /, **fields: Any) -> None:
        self._events.append((event, {"item_id": self.output[index].id, "output_index": index, **fields}))

    def _delta(self, name: str, index: int, delta: str, **fields: Any) -> None:
        if self._events and self._events[-1][0] == name:
            # Not written yet: one event may carry both, so that a slow reader cannot make this list grow.
            self._events[-1][1]["delta"].append(delta)
        else:
            self._tell(name, index, delta=[delta], **fields)

    def _close(self, status: str = "completed") -> None:
        self._close_reasoning()
        self._close_message(status)

    # -- text --------------------------------------------------------------------------------------------------------------------

    def _text(self, delta: str) -> None:
        if not delta:
            return
        if self._message is None:
            self._close_reasoning()
            self._message = self._add(OutputItem(self._id("msg_"), "message"))
            self._tell("response.content_part.added", self._message, content_index=0, part=_part(""))
        self.output[self._message].text.append(delta)
        self._delta("response.output_text.delta", self._message, delta, content_index=0, logprobs=[])

    def _close_message(self, status: str = "completed") -> None:
        index = self._message
        if index is None:
            return
        self._message = None
        item = self.output[index]
        item.status = status
        text = "".join(item.text)
        self._tell("response.output_text.done", index, content_index=0, text=text, logprobs=[])
        self._tell("response.content_part.done", index, content_index=0, part=_part(text))
        self._done(index)

    def _think(self, delta: str) -> None:
        if not delta:
            return
        if self._reasoning is None:
            self._close_message()
            self._reasoning = self._add(OutputItem(self._id("rs_"), "reasoning"))
            part = {"type": "summary_text", "text": ""}
            self._tell("response.reasoning_summary_part.added", self._reasoning, summary_index=0, part=part)
        self.output[self._reasoning].text.append(delta)
        self._delta("response.reasoning_summary_text.delta", self._reasoning, delta, summary_index=0)

    def _close_reasoning(self) -> None:
        index = self._reasoning
        if index is None:
            return
        self._reasoning = None
        item = self.output[index]
        item.status = "completed"
        text = "".join(item.text)
        self._tell("response.reasoning_summary_text.done", index, summary_index=0, text=text)
        part = {"type": "summary_text", "text": text}
        self._tell("response.reasoning_summary_part.done", index, summary_index=0, part=part)
        self._done(index)

    # -- tools -------------------------------------------------------------------------------------------------------------------

    def _tool_started(self, event: Mapping[str, Any]) -> None:
        call_id = event.get("tool_call_id", "")
        if not call_id:
            return
        self._close()
        name, arguments = event.get("tool", ""), event.get("arguments") or "{}"
        if not self._mcp:
            fields = {"call_id": call_id, "name": name, "arguments": _abbreviated(arguments)}
            self._calls[call_id] = self._add(OutputItem(self._id("fc_"), "function_call", fields=fields))
            return
        fields = {
            "server_label": SERVER_LABEL,
            "name": name,
            "arguments": "",
            "output": None,
            "error": None,
            "approval_request_id": None,
        }
        index = self._calls[call_id] = self._add(OutputItem(self._id("mcp_"), "mcp_call", fields=fields))
        fields["arguments"] = arguments
        self._tell("response.mcp_call.in_progress", index)
        self._tell("response.mcp_call_arguments.delta", index, delta=arguments)
        self._tell("response.mcp_call_arguments.done", index, arguments=arguments)

    def _tool_completed(self, event: Mapping[str, Any]) -> None:
        call_id = event.get("tool_call_id", "")
        index = self._calls.pop(call_id, None)
        if index is None:
            return
        item = self.output[index]
        text = str(event.get("result") or "")
        if self._mcp:
            failed = bool(event.get("error"))
            item.status = "failed" if failed else "completed"
            item.fields["error" if failed else "output"] = text
            self._tell(f"response.mcp_call.{item.status}", index)
            self._done(index)
            return
        item.status = "completed"
        self._tell(
            "response.function_call_arguments.done",
            index,
            name=item.fields["name"],
            arguments=item.fields["arguments"],
        )
        self._done(index)
        if len(text) > OUTPUT_LENGTH:
            text = text[:OUTPUT_LENGTH] + "…"
        result = OutputItem(
            self._id("fco_"),
            "function_call_output",
            status="completed",
            fields={"call_id": call_id, "output": text},
        )
        self._done(self._add(result))

    def _client_call(self, call: ToolCall) -> None:
        fields = {"call_id": call.id, "name": call.name, "arguments": ""}
        index = self._add(OutputItem(self._id("fc_"), "function_call", fields=fields))
        fields["arguments"] = call.arguments
        self.output[index].status = "completed"
        self._tell("response.function_call_arguments.delta", index, delta=call.arguments)
        self._tell("response.function_call_arguments.done", index, name=call.name, arguments=call.arguments)
        self._done(index)


_DELTAS: Final = frozenset({"response.output_text.delta", "response.reasoning_summary_text.delta"})


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": list[Any](), "logprobs": list[Any]()}


def _abbreviated(arguments: str) -> str:
    """Return arguments shortened; the transcript keeps them whole."""
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
