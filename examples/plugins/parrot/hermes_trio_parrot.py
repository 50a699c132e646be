"""A model that repeats what it is told. Switch it on with a route whose `provider` is `parrot`; `prefix` is what it says first."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import trio

from hermes_trio import Finished, Model, ModelRequest, TextDelta, Usage


class Parrot:
    """One route. `provider` names it in traces."""

    provider = "parrot"
    context_window = 8_000

    def __init__(self, name: str, prefix: str) -> None:
        self.name = name
        self._prefix = prefix

    @asynccontextmanager
    async def stream(self, request: ModelRequest) -> AsyncIterator[trio.abc.ReceiveChannel[Any]]:
        """The last message of the user, in one piece, then the end."""
        said = next((one.text for one in reversed(request.messages) if one.role == "user"), "")
        send, receive = trio.open_memory_channel[Any](2)
        with send, receive:
            send.send_nowait(TextDelta(f"{self._prefix}{said}"))
            send.send_nowait(Finished(usage=Usage(input_tokens=len(said.split()), output_tokens=1, api_calls=1)))
            send.close()
            yield receive


def build(name: str, table: Mapping[str, Any], environment: Mapping[str, str]) -> Model:
    """The model of a route."""
    return Parrot(name, str(table.get("prefix", "")))
