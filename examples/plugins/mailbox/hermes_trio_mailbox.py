"""A chat of files: `in/0001.txt` is a message to the agent, its answers are files in `out/`.

Switch it on with a table `[plugins.adapters.mailbox]` that has the `folder`; the other keys are those of every chat platform.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import trio

from hermes_trio import (
    Adapter,
    Incoming,
    Outgoing,
    Platform,
    PlatformError,
    PlatformErrorKind,
    SendResult,
    Source,
    split_settings,
)


class MailboxSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The adapter's own keys."""

    folder: str
    seconds: float = 1.0
    """How often the folder is read."""


class Mailbox(Adapter):
    """One folder, one conversation. The cursor is the name of the last file that was handed over."""

    platform = "mailbox"

    def __init__(self, folder: Path, seconds: float = 1.0) -> None:
        self._in = folder / "in"
        self._out = folder / "out"
        self._seconds = seconds
        self._sent = 0

    async def run(self, connected: Callable[[], None]) -> None:
        """Read the folder from time to time, in the order of the names."""
        last = await self.gateway.get_cursor(self) or ""
        try:
            names = await trio.to_thread.run_sync(os.listdir, self._in)
        except OSError as error:
            raise PlatformError(PlatformErrorKind.TRANSIENT, f"the mailbox cannot be read: {error}") from error
        connected()
        while True:
            for name in sorted(name for name in names if name.endswith(".txt") and name > last):
                text = await trio.Path(self._in / name).read_text(encoding="utf-8", errors="replace")
                source = Source(
                    platform=self.platform, chat_type="dm", chat_id="files", user_id="owner", message_id=name
                )
                # Durable when it returns: only then is the cursor moved. A file that is read twice has the same event id.
                await self.gateway.receive(self, Incoming(source=source, text=text, event_id=name))
                last = name
                await self.gateway.set_cursor(self, name)
            await trio.sleep(self._seconds)
            names = await trio.to_thread.run_sync(os.listdir, self._in)

    async def send(self, message: Outgoing) -> SendResult:
        """Write the answer beside its name and move it there, so that a reader never sees half of it."""
        self._sent += 1
        name = f"{trio.current_time():.6f}-{os.getpid()}-{self._sent}.txt"
        try:
            await trio.Path(self._out).mkdir(parents=True, exist_ok=True)
            half = self._out / f".{name}"
            await trio.Path(half).write_text(message.text, encoding="utf-8")
            await trio.Path(half).rename(self._out / name)
        except OSError as error:
            return SendResult.failed(PlatformError(PlatformErrorKind.TRANSIENT, str(error)))
        return SendResult.sent(name)


def build(table: Mapping[str, Any], environment: Mapping[str, str]) -> Platform:
    """The platform of a table."""
    shared, own = split_settings(table, "plugins.adapters.mailbox", MailboxSettings)
    return Platform(Mailbox(Path(own.folder), own.seconds), shared)
