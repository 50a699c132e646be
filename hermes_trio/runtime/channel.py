"""`CompletionChannel`: the sending end of a delivering adapter's durable inbox, which a watched job needs.

It names an inbox, not a connection: it outlives reconnects, and a job that holds it can end hours later. Only a delivering interface and the
runtime itself make one; there is no public constructor, and the stateless front end may not import this module.
"""

from __future__ import annotations

from typing import Final, final

_MINT: Final = object()


@final
class CompletionChannel:
    """The destination of a watched job's notices. Made by `Runtime.delivering(...)` and by the runtime for in-process use."""

    __slots__ = ("inbox",)

    def __init__(self, inbox: str, *, mint: object = None) -> None:
        if mint is not _MINT:
            raise TypeError(
                "a CompletionChannel cannot be constructed: a delivering adapter has one, and so has a DeliveringTurn (`turn.channel`)"
            )
        self.inbox = inbox

    def __repr__(self) -> str:
        return f"<CompletionChannel {self.inbox}>"


def mint(inbox: str) -> CompletionChannel:
    """Make a channel. Used only by `interface.py`."""
    return CompletionChannel(inbox, mint=_MINT)
