"""Bodies and events: limits, depth, and the wire format of server-sent events."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from hermes_trio.http.server import (
    BodyTooLarge,
    ClientLeft,
    EventStreamWriter,
    InvalidJSON,
    Message,
    Receive,
    decode_json,
    encode_event,
    read_body,
)


def receiving(*messages: Message) -> Receive:
    """A `receive` that yields exactly these messages."""
    waiting = list(messages)

    async def receive() -> Message:
        return waiting.pop(0)

    return receive


def part(data: bytes, more: bool) -> Message:
    return {"type": "http.request", "body": data, "more_body": more}


async def test_body_is_read_whole() -> None:
    """One part or several, the body is their concatenation."""
    assert await read_body(receiving(part(b"one", False)), 3) == b"one"
    assert await read_body(receiving(part(b"o", True), part(b"", True), part(b"ne", False)), 3) == b"one"


@pytest.mark.parametrize("parts", [[b"four"], [b"fo", b"ur"], [b"fo", b"u", b"r"]])
async def test_body_above_the_limit_is_refused_at_once(parts: list[bytes]) -> None:
    """The limit holds for the sum, and nothing more is asked for once it is passed."""
    with pytest.raises(BodyTooLarge, match="3 bytes"):
        await read_body(receiving(*(part(data, True) for data in parts)), 3)


async def test_body_of_a_departed_client() -> None:
    """A disconnect before the end is an error of its own, at the start or in the middle."""
    for before in ([], [part(b"half", True)]):
        with pytest.raises(ClientLeft):
            await read_body(receiving(*before, {"type": "http.disconnect"}), 100)


@pytest.mark.parametrize("text", [b"", b"{", b"nul", b'{"a":1}x', b'"\xff"', b"\xff", b'{"a":\x00}', b"[1,]"])
def test_invalid_json_is_one_error(text: bytes) -> None:
    """Text that is not JSON, or not UTF-8, is refused with a sentence."""
    with pytest.raises(InvalidJSON, match="not valid JSON"):
        decode_json(text)


@pytest.mark.parametrize(
    "text", [b"[" * 100_000, b'{"a":' * 100_000, b"[" * 65 + b"]" * 65, b"[" * 100_000 + b"]" * 100_000]
)
def test_deep_json_is_an_error_and_not_a_crash(text: bytes) -> None:
    """Nesting beyond the limit is refused, closed or not, however deep."""
    with pytest.raises(InvalidJSON, match=r"deeper|not valid JSON"):
        decode_json(text)


def test_brackets_in_strings_are_not_depth() -> None:
    """Only real nesting counts, escapes included."""
    value = {"a": "[" * 500 + '\\"' + "{" * 500, "b": [[1]]}
    assert decode_json(msgspec.json.encode(value)) == value
    assert decode_json(b"[" * 64 + b"]" * 64) is not None
    wide = [[0]] * 1000
    assert decode_json(msgspec.json.encode(wide)) == wide


def test_typed_decoding_keeps_the_path_of_a_mistake() -> None:
    """A wrong type is reported by msgspec with its path, not as invalid JSON."""

    class Ask(msgspec.Struct):
        names: list[str]

    decoder = msgspec.json.Decoder(Ask)
    assert decode_json(b'{"names":["a"]}', decoder).names == ["a"]
    with pytest.raises(msgspec.ValidationError, match=r"names\[1\]"):
        decode_json(b'{"names":["a",2]}', decoder)


def parse_events(stream: bytes) -> list[dict[str, str]]:
    """Events as a browser would see them."""
    events: list[dict[str, str]] = []
    for block in stream.decode().split("\n\n")[:-1]:
        event: dict[str, str] = {}
        for line in block.split("\n"):
            name, _, value = line.partition(":")
            value = value.removeprefix(" ")
            event[name] = f"{event[name]}\n{value}" if name in event else value
        events.append(event)
    return events


@given(st.text(alphabet=st.characters(blacklist_characters="\r", codec="utf-8")))
def test_event_data_survives_the_wire(text: str) -> None:
    """Whatever the data, a client reads it back, line breaks included."""
    (event,) = parse_events(encode_event(text.encode(), event="delta", id="e-1"))
    assert event == {"data": text, "event": "delta", "id": "e-1"}


def test_carriage_returns_cannot_inject_lines() -> None:
    """All three line ends of the format are taken apart."""
    assert encode_event(b"a\r\nb\rid: 9") == b"data: a\ndata: b\ndata: id: 9\n\n"


@pytest.mark.parametrize("value", ["a\nb", "a\rb", "a\0b"])
def test_event_names_and_ids_are_one_line(value: str) -> None:
    """A line break in an id or a name is an error that says which."""
    with pytest.raises(ValueError, match="id of an event"):
        encode_event(b"", id=value)
    with pytest.raises(ValueError, match="event of an event"):
        encode_event(b"", event=value)


class Sent(list[Message]):
    """Collects messages; `send` is its method."""

    async def send(self, message: Message) -> None:
        self.append(message)

    def bodies(self) -> list[bytes]:
        return [message["body"] for message in self if message["type"] == "http.response.body"]


async def test_writer_sends_what_was_put_in_one_message() -> None:
    """Events put together leave together; the head leaves before the first."""
    sent = Sent()
    writer = EventStreamWriter(sent.send)
    await writer.open()
    for number in range(3):
        writer.put(encode_event(b"%d" % number))
    await writer.flush()
    await writer.flush()
    await writer.comment("one\r\ntwo")
    writer.put(encode_event(b"last"))
    await writer.close()
    assert sent.bodies() == [b"", b"data: 0\n\ndata: 1\n\ndata: 2\n\n", b": one two\n\n", b"data: last\n\n"]
    assert [message.get("more_body") for message in sent[1:]] == [True, True, True, False]


async def pumped(items: Iterable[int], heartbeat: float = 15.0) -> list[bytes]:
    sent = Sent()
    writer = EventStreamWriter(sent.send)
    source, sink = trio.open_memory_channel[int](1000)
    async with trio.open_nursery() as nursery:

        async def pump() -> None:
            await writer.pump(sink, lambda item: encode_event(b"%d" % item), heartbeat=heartbeat)
            await writer.close()

        nursery.start_soon(pump)
        async with source:
            for item in items:
                if item < 0:
                    await trio.sleep(-item)
                else:
                    source.send_nowait(item)
    return sent.bodies()


async def test_pump_coalesces_what_is_at_hand() -> None:
    """A burst becomes one send, and nothing is lost or reordered."""
    bodies = await pumped(range(100))
    assert b"".join(bodies) == b"".join(encode_event(b"%d" % n) for n in range(100))
    assert len(bodies) <= 3


async def test_pump_sends_heartbeats_while_it_is_quiet(autojump_clock: object) -> None:
    """Nothing to say for a while is said, so that a proxy keeps the stream."""
    bodies = await pumped([1, -35, 2], heartbeat=15)
    assert bodies == [b"data: 1\n\n", b": keep-alive\n\n", b": keep-alive\n\n", b"data: 2\n\n", b""]
