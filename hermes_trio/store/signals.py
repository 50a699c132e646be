"""Signals: notifications that rows may have changed.

A verb records `(topic, key)` while it runs; after the commit, and only then, the subscribers are called. A signal is a hint: it carries no
data, may come too often, and on another backend may be lost until the next poll. The subscriber reads the rows. The SQLite writer calls this object
in its own process; there is no timer.

| topic | key | the rows that may have changed |
| --- | --- | --- |
| `inbox:<name>` | session key | a row waits for a session in this inbox |
| `outbox` | platform | a reply waits for a platform |
| `root` | root id | the root has settled |
| `run` | run id | a run's row or its event log |
| `approval` | approval id | a request was answered or has expired |
| `cron` | job id | a scheduled job was changed, or a run of it has ended |
| `key` | key id | an API key was revoked |
| `session` | session id | the lock of a session was released, in a store that several nodes share |
| `node` | incarnation | a node joined, left or was reaped |
| `lease` | name | no node runs a singleton any more |
| `request` | incarnation | a request waits for a node |
| `answer` | request id | a node has answered a request |
"""

from __future__ import annotations

import logging
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from typing import Final

from hermes_trio.runtime.ports import Wake

logger: Final = logging.getLogger("hermes_trio.store.signals")

Signal = tuple[str, str]
"""A topic and a key."""


_NO_SUBSCRIBERS: Final[dict[object, Wake]] = {}


class Signals:
    """The subscriptions of one store."""

    def __init__(self) -> None:
        self._subscribers: dict[tuple[str, str | None], dict[object, Wake]] = {}

    @contextmanager
    def subscribe(self, topic: str, wake: Wake, key: str | None = None) -> Generator[None]:
        """Call `wake(key)` after each commit that concerns `topic` and `key` (any key for None), for the body of the `with`.

        `wake` is called on the loop, between two steps of it: it must neither wait nor raise.
        """
        subscribers = self._subscribers.setdefault((topic, key), {})
        mine = object()
        subscribers[mine] = wake
        try:
            yield
        finally:
            del subscribers[mine]
            if not subscribers and self._subscribers.get((topic, key)) is subscribers:
                del self._subscribers[topic, key]

    def has_subscriber(self, signal: Signal) -> bool:
        """Return whether a subscriber waits for exactly this topic and key."""
        return signal in self._subscribers

    def wanted(self) -> list[tuple[str, str | None]]:
        """Return the topics and keys that have subscribers."""
        return list(self._subscribers)

    def announce(self, signals: Iterable[Signal]) -> None:
        """Call the subscribers of these signals after their commit, each once per signal."""
        for signal in dict.fromkeys(signals):
            known = self._subscribers
            for wake in (
                *known.get(signal, _NO_SUBSCRIBERS).values(),
                *known.get((signal[0], None), _NO_SUBSCRIBERS).values(),
            ):
                try:
                    wake(signal[1])
                except Exception:
                    logger.exception("a subscriber of %s %s failed; what it waits for is in the store", *signal)
