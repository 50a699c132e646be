"""One reader of a run's events. It follows the live log, reads older events from the store, and ends with the run.

Every event has the id `<epoch>-<number>`. A reader that returns with the last id that it saw gets the events after it, none twice. An unknown id
(never durable, or removed) gets a `resync` event, then all events that there are. A reader that fell behind the live log reads from the store; if the
gap cannot be closed there, it gets a `resync`, too. It never slows the run.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final

import trio

from hermes_trio.http.requests import encode_json
from hermes_trio.http.streams import HEARTBEAT_SECONDS, StreamWriter
from hermes_trio.runtime.event_log import Gap, LogEvent
from hermes_trio.runtime.peers import watch_run
from hermes_trio.runtime.run import Run

if TYPE_CHECKING:
    from hermes_trio.http.core import ApiCore

Render = Callable[[Mapping[str, Any]], bytes]
"""Renders an event of a run for a stream of another form."""

TERMINAL: Final = frozenset({"run.completed", "run.failed", "run.cancelled"})
SETTLED: Final = "run.settled"
PAGE: Final = 128
PAGE_BYTES: Final = 131_072
"""The maximum of stored events, in bytes, that one reader holds at a time: its memory while it stalls, beside one send."""
TAIL: Final = 16
"""Events that a reader of another node's run reads at a time while it keeps up; such readers do not take turns, the store reads for many at once."""
QUIET_SECONDS: Final = 3.0
"""The seconds after its last event at which such a reader reads the run's row."""
COMMIT_SECONDS: Final = 0.1
COMMIT_TRIES: Final = 3
"""How often, and how long, to wait for events that were emitted and are not committed yet."""

_ID: Final = re.compile(r"^(?P<epoch>[0-9a-f]{1,32})-(?P<number>[0-9]{1,15})$")


class EventsLost(Exception):
    """Raised if a stream that needs all events of a run cannot have them any more."""


def parse_event_id(text: str) -> tuple[str, int] | None:
    """Return epoch and number of an event id, or None if it is not one of ours."""
    match = _ID.match(text.strip())
    return None if match is None else (match["epoch"], int(match["number"]))


def _encode(epoch: str, number: int, event: Mapping[str, Any]) -> bytes:
    return b"id: %b-%d\ndata: %b\n\n" % (epoch.encode(), number, encode_json(event))


class _Reader:
    """The position of one reader. `number` is the last event that it has been sent."""

    def __init__(self, core: ApiCore, run_id: str, writer: StreamWriter, until: str, render: Render | None) -> None:
        self._render = render
        self._core = core
        self._run_id = run_id
        self._writer = writer
        self._until_settled = until == "settled"
        self.number = 0
        self.done = False

    def put(self, epoch: str, number: int, event: Mapping[str, Any]) -> None:
        """Send an event, unless it is behind the end of this stream."""
        if self.done:
            return
        name = event["event"]
        if name == SETTLED and not self._until_settled:
            self.done = True
            return
        self._writer.put(_encode(epoch, number, event) if self._render is None else self._render(event))
        self.number = number
        if name == SETTLED or (name in TERMINAL and not self._until_settled):
            self.done = True

    def resync(self, reason: str) -> None:
        """Send a `resync`: what the reader has is incomplete or wrong."""
        if self._render is not None:
            raise EventsLost(f"events of run {self._run_id} are gone: {reason}")
        self._writer.put(b"data: %b\n\n" % encode_json({"event": "resync", "run_id": self._run_id, "reason": reason}))

    async def read_stored(self, before: int | None = None) -> None:
        """Send the stored events behind `number` (and below `before`)."""
        while not self.done:
            async with self._core.readers.paging:
                more = await self._take_page(PAGE, PAGE_BYTES, before)
            if self._writer.is_full:
                await self._writer.flush()
            if not more:
                return

    async def _take_page(self, limit: int, most_bytes: int, before: int | None = None) -> bool:
        """Put the next page of stored events; return False if there is none."""
        rows = await self._core.store.events_after(self._run_id, self.number, limit=limit, most_bytes=most_bytes)
        for row in rows:
            if before is not None and row.number >= before:
                return False
            if row.number != self.number + 1:
                if before is not None:
                    return False
                self.resync("gap")
            self.put(row.epoch, row.number, row.event)
        return bool(rows)

    async def follow_live(self, run: Run, epoch: str) -> None:
        """Send the live log from `number` on, until the run's end."""
        log = run.log
        cursor = log.cursor(self.number)
        while not self.done:
            if self.number + 1 < log.oldest and self.number < log.last:
                await self._close_gap(log.oldest)
                cursor = log.cursor(self.number)
            batch: list[LogEvent | Gap] | None = None
            if cursor.after >= log.last:
                await self._writer.flush()
                over = (run.ended.is_set() and not self._until_settled) or log.closed
                if over and cursor.after >= log.last:
                    return
            with trio.move_on_after(HEARTBEAT_SECONDS):
                batch = await cursor.read()
            if batch is None:
                await self._writer.comment("keepalive")
                continue
            if not batch:
                return
            for item in batch:
                if isinstance(item, Gap):
                    # The log moved on while this reader was being served: read the missing part from the store first.
                    await self._close_gap(item.oldest)
                else:
                    self.put(epoch, item.number, item.data)
                    if self._writer.is_full:
                        await self._writer.flush()
            await self._writer.flush()

    async def follow_rows(self) -> None:
        """Send the rows of a run on another node, as they are committed, until its end."""
        store = self._core.store
        woken = trio.Event()
        with watch_run(store, self._run_id, lambda: woken.set(), settled=self._until_settled):
            while not self.done:
                # One scope for many waits: one for each event would cost a third of what the store's side of a reader does.
                with trio.CancelScope() as quiet:
                    while True:
                        woken = trio.Event()
                        before = self.number
                        if await self._take_page(TAIL, PAGE_BYTES) and self.number >= before + TAIL:
                            await self.read_stored()
                        await self._writer.flush()
                        if self.number == before or self.done:
                            break
                        # More of it is signalled. What is not, because it was committed together with this, is found a moment later.
                        if not woken.is_set():
                            quiet.deadline = trio.current_time() + QUIET_SECONDS
                            await woken.wait()
                            quiet.deadline = math.inf
                            if quiet.cancel_called:  # woken at the same moment
                                break
                if quiet.cancel_called:
                    continue
                row = None if self.done else await store.get_run(self._run_id)
                ended = row is None or row.status.terminal
                if ended and not (self._until_settled and row is not None and await store.root_open(self._run_id)):
                    with trio.move_on_after(
                        COMMIT_SECONDS * COMMIT_TRIES if self._until_settled and not self.done else 0
                    ):
                        await woken.wait()
                    await self.read_stored()
                    return
                with trio.move_on_after(HEARTBEAT_SECONDS) as quiet:
                    await woken.wait()
                if quiet.cancelled_caught:
                    await self._writer.comment("keepalive")

    async def knows(self, epoch: str, number: int) -> bool:
        """Return whether an event that a reader has seen is stored. Wait for one that is emitted and not committed yet."""
        store = self._core.store
        for attempt in range(COMMIT_TRIES):
            if attempt:
                await trio.sleep(COMMIT_SECONDS)
            if await store.event_epoch(self._run_id, number) == epoch:
                return True
            row = await store.get_run(self._run_id) if self._core.shared else None
            if row is None or row.status.terminal:
                return False
        return False

    async def _close_gap(self, oldest: int) -> None:
        """Read events that the live log has dropped from the store, where they may arrive a little later."""
        for _ in range(COMMIT_TRIES):
            await self.read_stored(before=oldest)
            if self.done or self.number + 1 >= oldest:
                return
            await trio.sleep(COMMIT_SECONDS)
        if self.number + 1 < oldest:
            self.resync("gap")
            self.number = oldest - 1


def _epoch_of(run: Run) -> str:
    return run.row(0, {}).epoch


async def follow(
    core: ApiCore,
    run_id: str,
    writer: StreamWriter,
    *,
    after: tuple[str, int] | None,
    unknown: bool,
    until: str,
    render: Render | None = None,
) -> None:
    """Write the events of a run to `writer`, to the requested end. Cancelling means that the reader has left; the run continues.

    `render` writes them in another form; it needs all of them, so a gap raises `EventsLost` then.
    """
    reader = _Reader(core, run_id, writer, until, render)
    await writer.open()
    run = core.runtime.stateless.runs.find(run_id)
    if after is not None:
        epoch, number = after
        known = (run is not None and epoch == _epoch_of(run) and number <= run.log.last) or await reader.knows(
            epoch, number
        )
        if known:
            reader.number = number
        else:
            unknown = True
    if unknown:
        reader.resync("unknown_event_id")
    run = core.runtime.stateless.runs.find(run_id)
    if run is not None:
        await reader.follow_live(run, _epoch_of(run))
    else:
        row = None if core.shared else await core.store.get_run(run_id)
        # A run of this process that is not live and has not ended is being started: its row was written, and the answer of the store was lost.
        unended = core.shared or (row is not None and not row.status.terminal)
        await (reader.follow_rows() if unended else reader.read_stored())
        if until == "settled" and not reader.done:
            # A run that is not live has settled, whether or not that was still written down.
            writer.put(b"data: %b\n\n" % encode_json({"event": SETTLED, "run_id": run_id}))
    if render is None:
        writer.put(b": stream closed\n\n")
