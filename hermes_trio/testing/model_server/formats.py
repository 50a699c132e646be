"""The two wire formats, from the provider's side: checks requests and writes answers.

A `Format` has no state and no sockets; the tests run the providers' own client libraries against it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final, Protocol, cast, final

import msgspec

from hermes_trio.runtime.outcome import Usage
from hermes_trio.runtime.ports import ToolCall

from .script import ScriptedAnswer, ScriptedCall, ScriptedRefusal

Json = dict[str, Any]


class Format(Protocol):
    """The server's side of one provider's API."""

    def key(self, headers: Mapping[str, str]) -> str:
        """Return the API key of a request."""
        ...

    def problem(self, body: Mapping[str, Any], headers: Mapping[str, str]) -> str:
        """Return the message with which the real API would refuse this request; empty if it would not."""
        ...

    def refusal(self, refusal: ScriptedRefusal) -> Json: ...

    def whole(self, answer: ScriptedAnswer, call: ScriptedCall) -> Json: ...

    def events(self, answer: ScriptedAnswer, call: ScriptedCall) -> Iterator[bytes]: ...

    def text(self, call: ScriptedCall, text: str) -> bytes: ...

    def overload(self) -> bytes: ...

    def closing(self, call: ScriptedCall) -> Iterator[bytes]: ...

    def open_call(self, call: ScriptedCall) -> bytes: ...

    def arguments(self, call: ScriptedCall, arguments: str) -> bytes: ...


_TYPES: Final[Mapping[int, str]] = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    529: "overloaded_error",
}

_ENDLESS: Final = ToolCall(id="call_endless", name="terminal")


def _refusal_type(refusal: ScriptedRefusal) -> str:
    return refusal.type or _TYPES.get(refusal.status, "api_error" if refusal.status >= 500 else "invalid_request_error")


def _event(value: object, name: str = "") -> bytes:
    prefix = f"event: {name}\n".encode() if name else b""
    return prefix + b"data: " + msgspec.json.encode(value) + b"\n\n"


def _split(text: str, size: int) -> Iterator[str]:
    return (text[start : start + size] for start in range(0, len(text), max(1, size)))


@final
class _ChatFormat:
    """OpenAI chat completions."""

    def key(self, headers: Mapping[str, str]) -> str:
        return headers.get("authorization", "").removeprefix("Bearer ")

    def problem(self, body: Mapping[str, Any], headers: Mapping[str, str]) -> str:
        if not isinstance(body.get("model"), str) or not isinstance(body.get("messages"), list) or not body["messages"]:
            return "you must provide a model parameter and messages"
        open_calls: list[str] = []
        for message in cast("list[Json]", body["messages"]):
            role = message.get("role")
            if role == "tool":
                if message.get("tool_call_id") not in open_calls:
                    return "messages with role 'tool' must be a response to a preceding message with 'tool_calls'"
                open_calls.remove(message["tool_call_id"])
                continue
            if open_calls:
                return (
                    "an assistant message with 'tool_calls' must be followed by tool messages for each 'tool_call_id'"
                )
            if role not in ("system", "developer", "user", "assistant"):
                return f"Invalid value: {role!r}. Supported values are: 'system', 'assistant', 'user' and 'tool'"
            open_calls = [call["id"] for call in message.get("tool_calls") or ()]
        return "an assistant message with 'tool_calls' must be followed by tool messages" if open_calls else ""

    def refusal(self, refusal: ScriptedRefusal) -> Json:
        error = {"message": refusal.message, "type": _refusal_type(refusal), "param": None, "code": refusal.code}
        return {"error": error}

    def whole(self, answer: ScriptedAnswer, call: ScriptedCall) -> Json:
        message: Json = {"role": "assistant", "content": answer.text or None, "refusal": None}
        if answer.tool_calls:
            calls = enumerate(answer.tool_calls)
            message["tool_calls"] = [self._call(index, one, one.arguments) for index, one in calls]
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": answer.reason}
        return {**self._base(call, "chat.completion"), "choices": [choice], "usage": self._usage(answer.usage)}

    def events(self, answer: ScriptedAnswer, call: ScriptedCall) -> Iterator[bytes]:
        yield self._chunk(call, {"role": "assistant", "content": "", "refusal": None})
        for piece in _split(answer.reasoning, answer.piece):
            yield self._chunk(call, {"reasoning_content": piece})
        for piece in _split(answer.text, answer.piece):
            yield self.text(call, piece)
        for index, tool_call in enumerate(answer.tool_calls):
            yield self._chunk(call, {"tool_calls": [self._call(index, tool_call, "")]})
            for piece in _split(tool_call.arguments, answer.piece):
                yield self._chunk(call, {"tool_calls": [{"index": index, "function": {"arguments": piece}}]})
        yield self._chunk(call, {}, answer.reason)
        options: Json = call.body.get("stream_options") or {}
        if options.get("include_usage"):
            yield self._chunk(call, None, usage=self._usage(answer.usage))
        yield b"data: [DONE]\n\n"

    def text(self, call: ScriptedCall, text: str) -> bytes:
        return self._chunk(call, {"content": text})

    def overload(self) -> bytes:
        return _event({"error": {"type": "overloaded_error", "message": "Overloaded", "code": 529}})

    def closing(self, call: ScriptedCall) -> Iterator[bytes]:
        yield self._chunk(call, {}, "stop")
        yield b"data: [DONE]\n\n"

    def open_call(self, call: ScriptedCall) -> bytes:
        return self._chunk(call, {"tool_calls": [self._call(0, _ENDLESS, "")]})

    def arguments(self, call: ScriptedCall, arguments: str) -> bytes:
        return self._chunk(call, {"tool_calls": [{"index": 0, "function": {"arguments": arguments}}]})

    def _chunk(self, call: ScriptedCall, delta: Json | None, finish_reason: str | None = None, **more: Any) -> bytes:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
        choices = [] if delta is None else [choice]
        return _event({**self._base(call, "chat.completion.chunk"), "choices": choices, **more})

    def _base(self, call: ScriptedCall, kind: str) -> Json:
        model = call.body.get("model", "")
        return {"id": f"chatcmpl-{call.number}", "object": kind, "created": 1_700_000_000, "model": model}

    def _usage(self, usage: Usage) -> Json:
        return {
            "prompt_tokens": usage.input_tokens,
            "completion_tokens": usage.output_tokens,
            "total_tokens": usage.total_tokens,
            "prompt_tokens_details": {"cached_tokens": usage.cache_read_tokens},
            "completion_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        }

    def _call(self, index: int, call: ToolCall, arguments: str) -> Json:
        function = {"name": call.name, "arguments": arguments}
        return {"index": index, "id": call.id, "type": "function", "function": function}


_STOP_REASONS: Final[Mapping[str, str]] = {
    "stop": "end_turn",
    "length": "max_tokens",
    "tool_calls": "tool_use",
    "content_filter": "refusal",
}


@final
class _MessagesFormat:
    """Anthropic messages."""

    def key(self, headers: Mapping[str, str]) -> str:
        return headers.get("x-api-key", "") or headers.get("authorization", "").removeprefix("Bearer ")

    def problem(self, body: Mapping[str, Any], headers: Mapping[str, str]) -> str:
        if "anthropic-version" not in headers:
            return "anthropic-version: header is required"
        if not isinstance(body.get("max_tokens"), int):
            return "max_tokens: Field required"
        messages = cast("list[Json]", body.get("messages") or [])
        if not messages or messages[0].get("role") != "user":
            return "messages: first message must use the user role"
        open_calls: set[str] = set()
        for number, message in enumerate(messages):
            if message.get("role") not in ("user", "assistant"):
                return f"messages.{number}.role: Input should be 'user' or 'assistant'"
            content: Any = message.get("content")
            blocks = cast("list[Json]", content if isinstance(content, list) else [{"type": "text", "text": content}])
            if not blocks:
                return f"messages.{number}: all messages must have non-empty content"
            if any(block.get("type") == "text" and not str(block.get("text", "")).strip() for block in blocks):
                return f"messages.{number}: text content blocks must contain non-whitespace text"
            answered = {str(block["tool_use_id"]) for block in blocks if block.get("type") == "tool_result"}
            if answered != open_calls:
                return f"messages.{number}: `tool_use` and `tool_result` blocks do not match: {open_calls ^ answered}"
            open_calls = {str(block["id"]) for block in blocks if block.get("type") == "tool_use"}
        return ""

    def refusal(self, refusal: ScriptedRefusal) -> Json:
        error = {"type": _refusal_type(refusal), "message": refusal.message}
        return {"type": "error", "error": error, "request_id": "req_scripted"}

    def whole(self, answer: ScriptedAnswer, call: ScriptedCall) -> Json:
        content: list[Json] = [{"type": "text", "text": answer.text}] if answer.text else []
        content += [self._use(one, msgspec.json.decode(one.arguments)) for one in answer.tool_calls]
        usage = self._usage(answer.usage, answer.usage.output_tokens)
        return self._message(call, content, _STOP_REASONS.get(answer.reason, "end_turn"), usage)

    def events(self, answer: ScriptedAnswer, call: ScriptedCall) -> Iterator[bytes]:
        opening = self._message(call, [], None, self._usage(answer.usage, 1))
        yield _event({"type": "message_start", "message": opening}, "message_start")
        yield _event({"type": "ping"}, "ping")
        index = 0
        if answer.reasoning:
            deltas = [{"type": "thinking_delta", "thinking": piece} for piece in _split(answer.reasoning, answer.piece)]
            yield from self._block(index, {"type": "thinking", "thinking": "", "signature": ""}, deltas)
            index += 1
        if answer.text:
            deltas = [{"type": "text_delta", "text": piece} for piece in _split(answer.text, answer.piece)]
            yield from self._block(index, {"type": "text", "text": ""}, deltas)
            index += 1
        for call_ in answer.tool_calls:
            pieces = ["", *_split(call_.arguments, answer.piece)]
            deltas = [{"type": "input_json_delta", "partial_json": piece} for piece in pieces]
            yield from self._block(index, self._use(call_, {}), deltas)
            index += 1
        yield from self._end(answer.reason, answer.usage)

    def text(self, call: ScriptedCall, text: str) -> bytes:
        return self._delta(0, {"type": "text_delta", "text": text})

    def overload(self) -> bytes:
        return _event({"type": "error", "error": {"type": "overloaded_error", "message": "Overloaded"}}, "error")

    def closing(self, call: ScriptedCall) -> Iterator[bytes]:
        return self._end("stop", Usage(output_tokens=1))

    def open_call(self, call: ScriptedCall) -> bytes:
        start = {"type": "content_block_start", "index": 1, "content_block": self._use(_ENDLESS, {})}
        return _event(start, "content_block_start")

    def arguments(self, call: ScriptedCall, arguments: str) -> bytes:
        return self._delta(1, {"type": "input_json_delta", "partial_json": arguments})

    def _delta(self, index: int, delta: Mapping[str, Any]) -> bytes:
        return _event({"type": "content_block_delta", "index": index, "delta": delta}, "content_block_delta")

    def _block(self, index: int, block: Json, deltas: list[dict[str, str]]) -> Iterator[bytes]:
        yield _event({"type": "content_block_start", "index": index, "content_block": block}, "content_block_start")
        for delta in deltas:
            yield self._delta(index, delta)
        yield _event({"type": "content_block_stop", "index": index}, "content_block_stop")

    def _end(self, reason: str, usage: Usage) -> Iterator[bytes]:
        delta = {"stop_reason": _STOP_REASONS.get(reason, "end_turn"), "stop_sequence": None}
        counts = {"output_tokens": usage.output_tokens}
        yield _event({"type": "message_delta", "delta": delta, "usage": counts}, "message_delta")
        yield _event({"type": "message_stop"}, "message_stop")

    def _use(self, call: ToolCall, arguments: Json) -> Json:
        return {"type": "tool_use", "id": call.id, "name": call.name, "input": arguments}

    def _usage(self, usage: Usage, output_tokens: int) -> Json:
        return {
            "input_tokens": usage.input_tokens - usage.cache_read_tokens - usage.cache_write_tokens,
            "cache_creation_input_tokens": usage.cache_write_tokens,
            "cache_read_input_tokens": usage.cache_read_tokens,
            "output_tokens": output_tokens,
        }

    def _message(self, call: ScriptedCall, content: list[Json], stop_reason: str | None, usage: Json) -> Json:
        return {
            "id": f"msg_{call.number}",
            "type": "message",
            "role": "assistant",
            "model": call.body.get("model", ""),
            "content": content,
            "stop_reason": stop_reason,
            "stop_sequence": None,
            "usage": usage,
        }


CHAT: Final[Format] = _ChatFormat()
MESSAGES: Final[Format] = _MessagesFormat()


def format_of(path: str) -> Format | None:
    """Return the format of a path; None if there is none."""
    if path.endswith("/chat/completions"):
        return CHAT
    return MESSAGES if path.endswith("/messages") else None
