"""The small parts of the wire clients: redaction, retry headers, transcripts, the port's own errors, the server process."""

from __future__ import annotations

import pickle
import sys
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime

import pytest
import trio

from hermes_trio.agent.model import ModelError, ModelErrorKind, ModelEvent, TextDelta, collect
from hermes_trio.base.redaction import HIDDEN, Secret, redact
from hermes_trio.providers.failures import read_failure, response_error, retry_after
from hermes_trio.providers.transcript import MISSING_RESULT, paired
from hermes_trio.runtime.ports import Message, ToolCall


@pytest.mark.parametrize(
    "secret",
    [
        "sk-proj-abcdefgh12345678",
        "sk-ant-api03-abcdefgh_12345678",
        "gsk_abcdefgh12345678",
        "AIzaSyA1234567890abcdefghijk",
        "Bearer abcdef123456",
        "authorization: secretvalue",
        '"api_key": "topsecret1"',
        "https://user:password@host/path",
        "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.abc",
        "sk-ab****************wxyz",
    ],
)
def test_what_looks_like_a_credential_is_hidden(secret: str) -> None:
    """Keys of the known shapes do not survive, wherever they stand in a text."""
    shown = redact(f"error near {secret} in request")
    assert HIDDEN in shown
    assert not any(
        part in shown
        for part in (
            "abcdefgh",
            "1234567890",
            "abcdef123456",
            "secretvalue",
            "topsecret",
            "password@",
            "wxyz",
            "eyJzdWI",
        )
    )
    assert shown.startswith("error near")


@pytest.mark.parametrize("text", ["", "the task-tree is fine", "HTTP 401 for https://api.example.com/v1", "a" * 100])
def test_plain_words_stay(text: str) -> None:
    """What is no credential is not touched."""
    assert redact(text) == text


@pytest.mark.parametrize("text", ["word " * 5000, "x" * 100_000, "sk-" + "a" * 100_000])
def test_long_texts_are_cut(text: str) -> None:
    """An error message has a length that a person can read, and no half of a key at its end."""
    assert len(redact(text)) < 4200


def test_a_secret_does_not_show_itself() -> None:
    """No usual way of looking at a secret shows it."""
    secret = Secret("my-very-own-key-0042")
    assert "own" not in f"{secret!r} {secret} {[secret]}"
    assert secret.scrub("key my-very-own-key-0042 and my-v...0042!") == f"key {HIDDEN} and {HIDDEN}!"
    assert secret.reveal().endswith("0042")
    with pytest.raises(TypeError, match="cannot be pickled"):
        pickle.dumps(secret)
    assert not Secret("")


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({}, None),
        ({"retry-after": "3"}, 3.0),
        ({"retry-after": "1.5"}, 1.5),
        ({"retry-after-ms": "250", "retry-after": "9"}, 0.25),
        ({"retry-after": "soon"}, None),
        ({"retry-after": "-4"}, 0.0),
        ({"retry-after": "nan"}, None),
        ({"retry-after": "Wed, 21 Oct 2015 07:28:00 GMT"}, 0.0),
    ],
)
def test_retry_after(headers: dict[str, str], seconds: float | None) -> None:
    """Numbers, milliseconds and dates are understood; nonsense is nothing."""
    assert retry_after(headers) == seconds


def test_retry_after_a_date() -> None:
    """A date in the future is that far away."""
    date = format_datetime(datetime.now(UTC) + timedelta(seconds=3600), usegmt=True)
    assert 3500 < (retry_after({"retry-after": date}) or 0) <= 3600


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b'{"error": {"message": "m"}}', "m"),
        (b'{"error": "m"}', "m"),
        (b'{"message": "m"}', "m"),
        (b'{"detail": "m"}', "m"),
        (b'{"detail": [{"loc": ["body"]}]}', '[{"loc":["body"]}]'),
        (b'[{"error": {"message": "m"}}]', "m"),
        (b'{"error": null, "message": "m"}', "m"),
        (b"m", "m"),
        (b"<html>nginx</html>", ""),
        (b"", ""),
        (b"[]", ""),
        (b"\xff\xfe", "\N{REPLACEMENT CHARACTER}" * 2),
        (b"[" * 100_000, "[" * 400),
    ],
)
def test_shapes_of_errors(body: bytes, message: str) -> None:
    """The message is found in every shape that servers use."""
    assert read_failure(body).message == message


def test_error_without_an_explanation() -> None:
    """A bare status still says what answered and how."""
    error = response_error("fast", 502, {"content-type": "text/html"}, b"<html>")
    assert str(error) == "fast: the server answered without an explanation (text/html) (HTTP 502)"
    assert repr(error) == f"ModelError(unavailable, {str(error)!r}, status=502)"


def test_server_that_forbids_repeating() -> None:
    """`x-should-retry: false` is obeyed."""
    assert not response_error("m", 500, {"x-should-retry": "false"}, b"").retryable


def test_pairing() -> None:
    """Calls without results get one, results without calls go, doubled results count once."""
    call = ToolCall(id="a", name="t")
    messages = [
        Message(role="tool", tool_call_id="x", content="orphan"),
        Message(role="assistant", tool_calls=(call, call, ToolCall(id="b", name="t"))),
        Message(role="tool", tool_call_id="b", content="B"),
        Message(role="tool", tool_call_id="b", content="again"),
        Message(role="user", content="hm"),
        Message(role="tool", tool_call_id="a", content="late"),
        Message(role="assistant", tool_calls=(call,)),
    ]
    found = [(message.role, message.tool_call_id, message.text) for message in paired(messages)]
    assert found == [
        ("assistant", "", ""),
        ("tool", "b", "B"),
        ("tool", "a", MISSING_RESULT),
        ("user", "", "hm"),
        ("assistant", "", ""),
        ("tool", "a", MISSING_RESULT),
    ]
    assert len(next(paired(messages)).tool_calls) == 2


async def test_collecting_an_unfinished_stream() -> None:
    """A stream that ends without `Finished` is broken, whoever made it; a memory channel will do as a stream."""
    send, receive = trio.open_memory_channel[ModelEvent](2)
    send.send_nowait(TextDelta("half"))
    send.close()
    with pytest.raises(ModelError) as caught:
        await collect(receive)
    assert caught.value.kind is ModelErrorKind.BROKEN_STREAM


async def test_server_process() -> None:
    """The scripted provider runs as a process, says its port, and ends with its standard input."""
    command = [sys.executable, "-m", "hermes_trio.testing.model_server"]
    with trio.fail_after(30):
        process = await trio.lowlevel.open_process(command, stdin=-1, stdout=-1)
        assert process.stdout is not None
        assert process.stdin is not None
        port = int(await process.stdout.receive_some())
        async with await trio.open_tcp_stream("127.0.0.1", port) as stream:
            await stream.send_all(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
            assert (await stream.receive_some()).startswith(b"HTTP/1.1 404")
        await process.stdin.aclose()
        assert await process.wait() == 0
        await process.stdout.aclose()
