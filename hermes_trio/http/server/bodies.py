"""Request bodies: read whole within a limit, and decoded as JSON that cannot exhaust the stack."""

from __future__ import annotations

from typing import Any, TypeVar, overload

import msgspec

from hermes_trio.http.server.asgi import Receive

MAX_DEPTH = 64

T = TypeVar("T")
_DECODER = msgspec.json.Decoder()


class BodyTooLarge(Exception):
    """The body is longer than its limit. What has not been read is left to the server."""

    def __init__(self, limit: int) -> None:
        super().__init__(f"the request body is larger than {limit} bytes")
        self.limit = limit


class ClientLeft(Exception):
    """The client disconnected, or was too slow, before its body was complete."""


class InvalidJSON(ValueError):
    """The body is not JSON that can be accepted; the message says why."""


async def read_body(receive: Receive, limit: int) -> bytes:
    """Return the whole request body.

    Cancellation loses what was read; the request is over then.

    :raises BodyTooLarge: as soon as more than `limit` bytes have arrived, chunked or not.
    :raises ClientLeft: if the body will never be complete.
    """
    message = await receive()
    if message["type"] != "http.request":
        raise ClientLeft
    body: bytes = message.get("body", b"")
    if len(body) > limit:
        raise BodyTooLarge(limit)
    if not message.get("more_body", False):
        return body
    parts = bytearray(body)
    while True:
        message = await receive()
        if message["type"] != "http.request":
            raise ClientLeft
        parts += message.get("body", b"")
        if len(parts) > limit:
            raise BodyTooLarge(limit)
        if not message.get("more_body", False):
            return bytes(parts)


def _is_deeper(body: bytes, depth: int) -> bool:
    """Return whether the nesting of this JSON text exceeds `depth`, brackets inside strings not counted."""
    if body.count(b"[") + body.count(b"{") <= depth:
        return False
    level = 0
    in_string = escaped = False
    for byte in body:
        if in_string:
            if escaped:
                escaped = False
            elif byte == 0x5C:
                escaped = True
            elif byte == 0x22:
                in_string = False
        elif byte == 0x22:
            in_string = True
        elif byte in b"[{":
            level += 1
            if level > depth:
                return True
        elif byte in b"]}":
            level -= 1
    return False


@overload
def decode_json(body: bytes, decoder: None = None, *, max_depth: int = MAX_DEPTH) -> Any: ...
@overload
def decode_json(body: bytes, decoder: msgspec.json.Decoder[T], *, max_depth: int = MAX_DEPTH) -> T: ...
def decode_json(body: bytes, decoder: msgspec.json.Decoder[Any] | None = None, *, max_depth: int = MAX_DEPTH) -> Any:
    """Decode a JSON body, typed if a decoder is given.

    :raises InvalidJSON: for text that is not JSON, not UTF-8, or nested deeper than `max_depth`.
    :raises msgspec.ValidationError: for valid JSON that is not of the decoder's type, with the path of the mistake.
    """
    try:
        value = (_DECODER if decoder is None else decoder).decode(body)
    except msgspec.ValidationError:
        raise
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidJSON(f"the body is not valid JSON: {error}") from None
    except RecursionError:
        raise InvalidJSON(f"the JSON body is nested deeper than {max_depth} levels") from None
    if _is_deeper(body, max_depth):
        raise InvalidJSON(f"the JSON body is nested deeper than {max_depth} levels")
    return value
