"""Signals between nodes: LISTEN and NOTIFY, and a poll of the rows.

A unit's signals are sent after its commit, in a statement of their own, so that no commit waits for the queue of notifications. Notifications are lost
while a connection is down, and a node may die before it sends them: subscribers are also called for rows that a poll finds, after every LISTEN and
every `POLL_SECONDS`. A row that two polls in a row have found is announced, so what was announced in time is not announced again; a revoked key is announced
by the first poll that finds it, because all nodes must refuse it within a second. A followed run that has come further is announced if no notification of it
has arrived `GRACE_SECONDS` later: a poll may see a commit before its notification arrives.

Every turn releases its session, and another node rarely waits for it: a waiting node announces that (`want`), and only then is the release
sent. A node that released the session a moment before answers at once.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence, Set
from time import perf_counter
from typing import Any, Final

import msgspec
import trio

from hermes_trio.runtime.outcome import RunStatus
from hermes_trio.runtime.ports import (
    KEY_TOPIC,
    LEASE_TOPIC,
    OUTBOX_TOPIC,
    ROOT_TOPIC,
    RUN_TOPIC,
    SESSION_TOPIC,
    inbox_topic,
)
from hermes_trio.store.errors import StoreError
from hermes_trio.store.signals import Signal, Signals

from .database import encode
from .errors import LinkBroken, SqlError
from .link import PostgresLink
from .reconnecting_link import ReconnectingLink

CHANNEL: Final = "hermes_trio"
POLL_SECONDS: Final = 0.8
"""With `GRACE_SECONDS` and the time of a poll less than a second: the time within which a revoked key is refused everywhere."""
RETRY_SECONDS: Final = 0.1
GRACE_SECONDS: Final = 0.1
"""How long a notification may take after its commit before a poll announces the run in its place."""
PAYLOAD_BYTES: Final = 7_000
KEY_LENGTH: Final = 500
MOST_KEYS: Final = 1_000
WANTED_TOPIC: Final = "wanted"
"""Between nodes only: the sender waits until a session is released."""
MOST_WANTED: Final = 10_000
RELEASED_SECONDS: Final = 5.0
"""How long a node remembers that it has released a session: longer than a notification takes. Later ones are found by the poll of the waiting node."""

_INBOX: Final = inbox_topic("")

_ROWS: Final = """
SELECT 'inbox:' || inbox, session_key FROM (SELECT DISTINCT inbox, session_key FROM inbox
    WHERE settled_at IS NULL AND state = 'pending' LIMIT $1) AS waiting
UNION ALL SELECT 'outbox', platform FROM (SELECT DISTINCT platform FROM outbox
    WHERE settled_at IS NULL AND state = 'pending' AND next_at <= $2 LIMIT $1) AS unsent
UNION ALL SELECT 'root', root FROM unnest($3::text[]) AS root
    WHERE NOT EXISTS (SELECT 1 FROM jobs WHERE root_id = root AND ended_at IS NULL)
    AND NOT EXISTS (SELECT 1 FROM inbox WHERE root_id = root AND root_id <> '' AND settled_at IS NULL)
UNION ALL SELECT 'lease', wanted FROM unnest($4::text[]) AS wanted
    WHERE NOT EXISTS (SELECT 1 FROM leases WHERE leases.name = wanted)
UNION ALL SELECT 'key', id FROM api_keys WHERE revoked_at > $2 - 400
"""
"""The rows that wait, the singletons that are waited for and that no node holds, and the keys that were revoked while this node may not have listened: for
no longer than the longest lease."""

_RUNS: Final = """
SELECT run_id, status || ' ' || coalesce((SELECT max(number) FROM events e WHERE e.run_id = r.run_id), 0)
FROM runs r WHERE run_id = ANY ($1::text[])
"""
"""The progress of the runs that have subscribers."""

logger: Final = logging.getLogger(__name__)

_encode: Final = msgspec.json.Encoder().encode

_TERMINAL: Final = frozenset(status.value for status in RunStatus if status.terminal)


def array_text(values: Sequence[str]) -> str:
    """Return the literal of an array of texts."""
    escaped = (value.replace("\\", "\\\\").replace('"', '\\"') for value in values)
    return "{" + ",".join(f'"{value}"' for value in escaped) + "}"


class SignalListener:
    """The signals of one node."""

    def __init__(
        self,
        line: ReconnectingLink,
        signals: Signals,
        *,
        node: Callable[[], str],
        clock: Callable[[], float],
        sleep: Callable[[float], Awaitable[object]] = trio.sleep,
    ) -> None:
        self._line: ReconnectingLink = line
        self._signals: Signals = signals
        self._node: Callable[[], str] = node
        self._clock: Callable[[], float] = clock
        self._sleep: Callable[[float], Awaitable[object]] = sleep
        self._seen: set[Signal] = set()
        self._runs: dict[str, str] = {}
        self._signalled: set[str] = set()
        """Followed runs that were announced since they were last polled."""
        self._read: dict[str, int] = {}
        """The number of the last event of a followed run that was read here."""
        self._place: int = 0
        self._wanted: dict[str, None] = {}
        """Sessions for which other nodes wait, oldest first."""
        self._released: dict[str, float] = {}
        """Sessions that were released here a moment ago, with the time, oldest first."""
        self.received: int = 0
        """The number of notifications from other nodes."""

    def publish(self, signals: Sequence[Signal]) -> None:
        """Announce the signals of a commit: call the subscribers here and notify the other nodes. What cannot be sent is found by their polls."""
        unique = list(dict.fromkeys(signals))
        self._announce(unique)
        self._send([signal for signal in unique if signal[0] != SESSION_TOPIC or self._release(signal[1])])

    def _announce(self, signals: Sequence[Signal]) -> None:
        """Call the subscribers of these signals, and note the followed runs among them."""
        followed = self._signals.has_subscriber
        self._signalled.update([signal[1] for signal in signals if signal[0] == RUN_TOPIC and followed(signal)])
        self._signals.announce(signals)

    def note_read(self, run_id: str, number: int) -> None:
        """Note that a reader on this node has the events of a run up to this one: a look need not announce them."""
        if self._signals.has_subscriber((RUN_TOPIC, run_id)) and number > self._read.get(run_id, 0):
            self._read[run_id] = number

    def want(self, sessions: Sequence[str]) -> None:
        """Ask the other nodes to send the releases of these sessions."""
        self._send([(WANTED_TOPIC, session_id) for session_id in sessions])

    def note_held(self, session_id: str) -> None:
        """Note that a turn of this node has a session: its last release is of no use to a node that waits for the next."""
        self._released.pop(session_id, None)

    def _release(self, session_id: str) -> bool:
        """Note that a session was released here; return whether another node waits for it."""
        now = perf_counter()
        released = self._released
        released.pop(session_id, None)
        released[session_id] = now
        while released[first := next(iter(released))] < now - RELEASED_SECONDS:
            del released[first]
        return self._wanted.pop(session_id, self) is None

    def _heed(self, wanted: Sequence[str]) -> None:
        """Remember the sessions for which another node waits, and send the releases of those that were released before its request arrived."""
        since = perf_counter() - RELEASED_SECONDS
        self._send([(SESSION_TOPIC, session_id) for session_id in wanted if self._released.get(session_id, 0) > since])
        for session_id in wanted:
            self._wanted[session_id] = None
            if len(self._wanted) > MOST_WANTED:
                del self._wanted[next(iter(self._wanted))]

    def _send(self, signals: Sequence[Signal]) -> None:
        # A key that is too long is found by the next poll of the rows.
        short = [signal for signal in signals if len(signal[0]) + len(signal[1]) <= KEY_LENGTH]
        link = self._line.up
        if link is None or not short:
            return
        try:
            for payload in self._payloads(short):
                link.send("SELECT pg_notify($1, $2)", [CHANNEL.encode(), payload])
            link.sync()
        except LinkBroken:
            return

    def _payloads(self, signals: Sequence[Signal]) -> list[bytes]:
        """Return the signals in as few notifications as possible."""
        payload = _encode((self._node(), signals))
        if len(payload) <= PAYLOAD_BYTES:
            return [payload]
        half = len(signals) // 2
        return [*self._payloads(signals[:half]), *self._payloads(signals[half:])]

    def _receive(self, payload: str) -> None:
        try:
            node, signals = msgspec.json.decode(payload, type=tuple[str, list[tuple[str, str]]])
        except msgspec.DecodeError:
            logger.warning("a notification on the channel %s is not one of hermes-trio's; it is ignored", CHANNEL)
            return
        if node != self._node():
            self.received += 1
            self._announce(signals)
            if wanted := [key for topic, key in signals if topic == WANTED_TOPIC]:
                self._heed(wanted)

    async def run(self, seconds: float, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Listen, and poll the rows every `seconds`, until cancelled. Started once it listens, or once the first attempt has failed."""
        listening: PostgresLink | None = None
        started = False
        while True:
            try:
                link = await self._line.link(POLL_SECONDS)
                if link is not listening:
                    link.on_notification = self._receive
                    await link.run(f"LISTEN {CHANNEL}")
                    listening = link
                    self.want([key for topic, key in self._signals.wanted() if topic == SESSION_TOPIC and key])
                    self._seen = set(await self._rows(link))
                    self._signals.announce(self._seen)
                else:
                    await self.look(link)
            except (StoreError, LinkBroken, SqlError) as error:
                logger.debug("could not read the signals of other nodes; the next poll retries: %s", error)
            if not started:
                started = True
                task_status.started()
            with trio.move_on_after(seconds):
                if (link := self._line.up) is None:
                    await trio.sleep(RETRY_SECONDS)
                    continue
                await link.gone.wait()

    async def look(self, link: PostgresLink) -> None:
        """Announce rows that have waited since the last poll, and followed runs that have changed since: at most `MOST_KEYS` per poll.

        A run is not announced again if it was announced since it was last polled and all of its events have been read here, nor if its notification
        arrives while this poll waits for it.
        """
        found = set(await self._rows(link))
        due = {signal for signal in found if signal in self._seen or signal[0] == KEY_TOPIC}
        self._seen = found
        self._signals.announce(due)
        followed = [key for topic, key in self._signals.wanted() if topic == RUN_TOPIC and key is not None]
        if followed:
            self._place = (self._place + 1) % -(-len(followed) // MOST_KEYS)
            part = followed[self._place * MOST_KEYS : (self._place + 1) * MOST_KEYS]
            rows: dict[str, str] = dict(await link.run(_RUNS, [encode(array_text(part))]))
            signalled = self._signalled.intersection(part)
            moved = [run_id for run_id, far in rows.items() if self._has_moved(run_id, far, signalled)]
            self._signalled -= signalled
            if moved:
                await self._sleep(GRACE_SECONDS)
                # What was signalled meanwhile makes its readers read everything that this poll has seen.
                late = [run_id for run_id in moved if run_id not in self._signalled]
                moved = [run_id for run_id in late if self._has_moved(run_id, rows[run_id], signalled)]
            self._runs |= rows
            if self._place == 0:
                self._forget_runs(set(followed))
            self._signals.announce([(RUN_TOPIC, run_id) for run_id in moved])
        else:
            self._forget_runs(set())

    def _has_moved(self, run_id: str, far: str, signalled: Set[str]) -> bool:
        """Return whether a followed run has come further than its subscribers know. The runs in `signalled` were announced since they were last polled.

        Subscribers have read the run when they subscribed, before it was first polled.
        """
        known = self._runs.get(run_id)
        if known == far:
            return False
        status, _, number = far.partition(" ")
        if int(number) > self._read.get(run_id, 0):
            return True
        return status in _TERMINAL if known is None else run_id not in signalled

    def _forget_runs(self, followed: set[str]) -> None:
        """Forget the runs that have no subscriber any more."""
        for known in (self._runs, self._read):
            for run_id in known.keys() - followed:
                del known[run_id]
        self._signalled &= followed

    async def _rows(self, link: PostgresLink) -> list[Signal]:
        wanted = self._signals.wanted()
        if not wanted:
            return []
        roots = [key for topic, key in wanted if topic == ROOT_TOPIC and key is not None]
        leases = [key for topic, key in wanted if topic == LEASE_TOPIC and key is not None]
        given: list[bytes | None] = [
            encode(MOST_KEYS),
            encode(self._clock()),
            encode(array_text(roots)),
            encode(array_text(leases)),
        ]
        answer = link.send(_ROWS, given)
        await link.over(link.sync())
        topics = {topic for topic, _ in wanted}
        found: list[Any] = [(topic, key) for topic, key in answer.rows() if topic in topics]
        others = [(topic, key) for topic, key in wanted if key is not None and not self._has_rows(topic)]
        return [*found, *others]

    def _has_rows(self, topic: str) -> bool:
        return topic in (OUTBOX_TOPIC, ROOT_TOPIC, KEY_TOPIC, RUN_TOPIC, LEASE_TOPIC) or topic.startswith(_INBOX)
