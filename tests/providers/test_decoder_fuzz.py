"""Whatever a provider sends inside its events, a decoder understands it or says that it does not."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hermes_trio.agent.model import ModelError
from hermes_trio.net.sse import ServerEvent
from hermes_trio.providers.anthropic import MessagesDecoder
from hermes_trio.providers.failures import failure_error, read_failure
from hermes_trio.providers.http_model import AnswerLimits
from hermes_trio.providers.openai import ChatDecoder

KEYS = st.sampled_from(
    [
        *(
            "type",
            "index",
            "delta",
            "choices",
            "content",
            "text",
            "tool_calls",
            "function",
            "name",
            "arguments",
            "id",
            "usage",
            "error",
        ),
        *(
            "message",
            "code",
            "finish_reason",
            "content_block",
            "partial_json",
            "thinking",
            "stop_reason",
            "input",
            "detail",
        ),
        *("prompt_tokens", "output_tokens"),
    ]
)
WORDS = st.sampled_from(
    [
        *(
            "",
            "text",
            "tool_use",
            "text_delta",
            "input_json_delta",
            "content_block_start",
            "content_block_delta",
            "stop",
        ),
        *("message_start", "message_delta", "message_stop", "error", "thinking", "429"),
    ]
)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | WORDS | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=5),
    max_leaves=12,
)
DECODERS = pytest.mark.parametrize("make", [ChatDecoder, MessagesDecoder])


@DECODERS
@given(values=st.lists(st.dictionaries(KEYS, VALUES, max_size=6), max_size=4))
def test_any_json_is_understood_or_refused(make: Any, values: list[Any]) -> None:
    """An event of any shape gives events or a `ModelError`, and nothing else; so does the end after it."""
    decoder = make("m", AnswerLimits(calls=3, arguments=100))
    with suppress(ModelError):
        for value in values:
            decoder.event(ServerEvent("message", msgspec.json.encode(value)))
        decoder.end()
    for value in values:
        with suppress(ModelError):
            make("m", AnswerLimits()).whole(msgspec.json.encode(value))


@DECODERS
@given(data=st.binary(max_size=60))
def test_any_bytes_are_refused(make: Any, data: bytes) -> None:
    """Bytes that are no JSON give a `ModelError`, and nothing else."""
    with suppress(ModelError):
        make("m", AnswerLimits()).event(ServerEvent("message", data))


@DECODERS
@pytest.mark.parametrize(
    "data", [rb'{"type":"\ud800"}', b'{"index":1e400}', b'{"index":' + b"9" * 5000 + b"}", b"null"]
)
def test_oddities(make: Any, data: bytes) -> None:
    """Lone surrogates and numbers beyond measure are refused, too."""
    with suppress(ModelError):
        make("m", AnswerLimits()).event(ServerEvent("message", data))


@given(value=VALUES)
def test_errors_of_any_shape(value: Any) -> None:
    """An error response of any shape becomes an error with words."""
    assert str(failure_error("m", value))
    read_failure(msgspec.json.encode(value))
