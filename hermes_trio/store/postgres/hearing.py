"""Signals between nodes: LISTEN and NOTIFY, and a poll of the rows.

A unit's signals are sent after its commit, in a statement of their own, so that no commit waits for the queue of notifications. Notifications are lost
while a connection is down, and a node may die before it sends them: subscribers are also called for rows that a poll finds, after every LISTEN and
every `POLL_SECONDS`. A row that was there at two looks in a row is announced, so what was announced in time is not announced again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, Final

import msgspec
import trio

from hermes_trio.runtime.ports import KEY_TOPIC, OUTBOX_TOPIC, ROOT_TOPIC, RUN_TOPIC, inbox_topic
from hermes_trio.store.errors import StoreError
from hermes_trio.store.signals import Signal, Signals

from .database import encode
from .errors import LinkBroken, SqlError
from .lines import PostgresLine
from .link import PostgresLink

__all__ = ["POLL_SECONDS", "Hearing"]

CHANNEL: Final = "hermes_trio"
POLL_SECONDS: Final = 1.0
RETRY_SECONDS: Final = 0.1
PAYLOAD_BYTES: Final = 7_000
KEY_LENGTH: Final = 500
MOST_KEYS: Final = 1_000

_INBOX: Final = inbox_topic("")

_ROWS: Final = """
SELECT 'inbox:' || inbox, session_key FROM (SELECT DISTINCT inbox, session_key FROM inbox
    WHERE settled_at IS NULL AND state = 'pending' LIMIT $1) AS waiting
UNION ALL SELECT 'outbox', platform FROM (SELECT DISTINCT platform FROM outbox
    WHERE settled_at IS NULL AND state = 'pending' AND next_at <= $2 LIMIT $1) AS unsent
UNION ALL SELECT 'root', root FROM unnest($3::text[]) AS root
    WHERE NOT EXISTS (SELECT 1 FROM jobs WHERE root_id = root AND ended_at IS NULL)
    AND NOT EXISTS (SELECT 1 FROM inbox WHERE root_id = root AND root_id <> '' AND settled_at IS NULL)
UNION ALL SELECT 'key', id FROM api_keys WHERE revoked_at > $2 - 30
"""
"""The rows that wait, and the keys that were revoked while this node may not have listened."""

_RUNS: Final = """
SELECT run_id, status || ' ' || coalesce((SELECT max(number) FROM events e WHERE e.run_id = r.run_id), 0)
FROM runs r WHERE run_id = ANY ($1::text[])
"""
"""The progress of the runs that have subscribers."""

logger: Final = logging.getLogger(__name__)

_encode: Final = msgspec.json.Encoder().encode


def array_text(values: Sequence[str]) -> str:
    """Return the literal of an array of texts."""
    escaped = (value.replace("\\", "\\\\").replace('"', '\\"') for value in values)
    return "{" + ",".join(f'"{value}"' for value in escaped) + "}"


class Hearing:
    """The signals of one node."""

    def __init__(
        self, line: PostgresLine, signals: Signals, *, node: Callable[[], str], clock: Callable[[], float]
    ) -> None:
        self._line: PostgresLine = line
        self._signals: Signals = signals
        self._node: Callable[[], str] = node
        self._clock: Callable[[], float] = clock
        self._seen: set[Signal] = set()
        self._runs: dict[str, str] = {}
        self._place: int = 0
        self.heard: int = 0
        """The number of notifications from other nodes."""

    def tell(self, signals: Sequence[Signal]) -> None:
        """Announce the signals of a commit: call the subscribers here and notify the other nodes. What cannot be sent is found by their polls."""
        unique = list(dict.fromkeys(signals))
        self._signals.announce(unique)
        link = self._line.up
        if link is None:
            return
        try:
            # A key that is too long is found by the next poll of the rows.
            for payload in self._payloads(
                [signal for signal in unique if len(signal[0]) + len(signal[1]) <= KEY_LENGTH]
            ):
                link.send("SELECT pg_notify($1, $2)", [CHANNEL.encode(), payload])
            link.sync()
        except LinkBroken:
            return

    def _payloads(self, signals: Sequence[Signal]) -> list[bytes]:
        """Return the signals in as few notifications as possible."""
        payload = _encode((self._node(), signals))
        if len(payload) <= PAYLOAD_BYTES:
            return [payload] if signals else []
        half = len(signals) // 2
        return [*self._payloads(signals[:half]), *self._payloads(signals[half:])]

    def _hear(self, payload: str) -> None:
        try:
            node, signals = msgspec.json.decode(payload, type=tuple[str, list[tuple[str, str]]])
        except msgspec.DecodeError:
            logger.warning("a notification on the channel %s is not one of hermes-trio's; it is ignored", CHANNEL)
            return
        if node != self._node():
            self.heard += 1
            self._signals.announce(signals)

    async def run(self, seconds: float, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Listen, and poll the rows every `seconds`, until cancelled. Started once it listens, or once the first attempt has failed."""
        listening: PostgresLink | None = None
        started = False
        while True:
            try:
                link = await self._line.link(POLL_SECONDS)
                if link is not listening:
                    link.heard = self._hear
                    await link.run(f"LISTEN {CHANNEL}")
                    listening = link
                    self._seen = set(await self._rows(link))
                    self._signals.announce(self._seen)
                else:
                    await self.look(link)
            except (StoreError, LinkBroken, SqlError) as error:
                logger.debug("the signals of other nodes could not be read: %s; the next look tries again", error)
            if not started:
                started = True
                task_status.started()
            with trio.move_on_after(seconds):
                if (link := self._line.up) is None:
                    await trio.sleep(RETRY_SECONDS)
                    continue
                await link.gone.wait()

    async def look(self, link: PostgresLink) -> None:
        """Announce rows that have waited since the last poll, and followed runs that have changed since: at most `MOST_KEYS` per poll."""
        found = set(await self._rows(link))
        both, self._seen = found & self._seen, found
        self._signals.announce(both)
        followed = [key for topic, key in self._signals.wanted() if topic == RUN_TOPIC and key is not None]
        if followed:
            self._place = (self._place + 1) % -(-len(followed) // MOST_KEYS)
            part = followed[self._place * MOST_KEYS : (self._place + 1) * MOST_KEYS]
            rows: dict[str, str] = dict(await link.run(_RUNS, [encode(array_text(part))]))
            moved = [(RUN_TOPIC, run_id) for run_id, far in rows.items() if self._runs.get(run_id) != far]
            wanted = set(followed)
            self._runs = {run_id: far for run_id, far in self._runs.items() if run_id in wanted} | rows
            self._signals.announce(moved)

    async def _rows(self, link: PostgresLink) -> list[Signal]:
        wanted = self._signals.wanted()
        if not wanted:
            return []
        roots = [key for topic, key in wanted if topic == ROOT_TOPIC and key is not None]
        given: list[bytes | None] = [encode(MOST_KEYS), encode(self._clock()), encode(array_text(roots))]
        answer = link.send(_ROWS, given)
        await link.over(link.sync())
        topics = {topic for topic, _ in wanted}
        found: list[Any] = [(topic, key) for topic, key in answer.rows() if topic in topics]
        others = [(topic, key) for topic, key in wanted if key is not None and not self._has_rows(topic)]
        return [*found, *others]

    def _has_rows(self, topic: str) -> bool:
        return topic in (OUTBOX_TOPIC, ROOT_TOPIC, KEY_TOPIC, RUN_TOPIC) or topic.startswith(_INBOX)
