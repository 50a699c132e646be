"""Connects the nodes of a world: the load balancer, the signals of their commits, and the watched writer of the shared store.

Signals reach other nodes as `NOTIFY` does in the PostgreSQL store: they may be lost, late, doubled or reordered, so the nodes also poll the rows (here
every two seconds). The trace has an entry when a node has been taken over, and for every change that such a node makes afterwards.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from contextvars import Context, copy_context
from functools import wraps
from typing import Any, Final, Protocol, TypeVar, cast

import trio

from hermes_trio.runtime.ports import KEY_TOPIC, NODE_TOPIC, OUTBOX_TOPIC, ROOT_TOPIC, RUN_TOPIC, Wake, inbox_topic
from hermes_trio.store import SqliteStore
from hermes_trio.store.signals import Signal, Signals
from hermes_trio.store.sqlite.verbs import Writes
from hermes_trio.store.sqlite.writer import Weight, WriterStatistics

from .trace import Trace

T = TypeVar("T")

POLL_SECONDS: Final = 2.0
CALM_POLL_SECONDS: Final = 60.0
"""The interval after the faults have ended. No signal is lost then, and polling more often would dominate the cost of a world."""

LEASE_SECONDS: Final = 30.0
"""The lease of a node. Heartbeats of a shorter one would dominate the cost of a world."""

_INBOX: Final = inbox_topic("")

_SIGNAL_DELAYS: Final = {"late": 7.0, "reordered": 0.0, "twice": 3.0}


class Serves(Protocol):
    """What the balancer uses of a node."""

    def is_served(self) -> bool:
        """Return whether the balancer sends requests to this node."""
        ...

    def connect(self) -> trio.SocketStream:
        """Open a connection. Raises `ConnectionRefusedError` if the node does not listen."""
        ...


class Balancer:
    """Sends each connection to one of the nodes that are served, chosen by the seed."""

    def __init__(self, nodes: Sequence[Serves], seed: int) -> None:
        self._nodes = nodes
        self._random = random.Random(f"{seed} balancer")

    def connect(self) -> trio.SocketStream:
        """Open a connection to a node. Raises `ConnectionRefusedError` if none listens."""
        served = [node for node in self._nodes if node.is_served()]
        if not served:
            raise ConnectionRefusedError("no node listens")
        return (served[0] if len(served) == 1 else self._random.choice(served)).connect()


class Listens(Protocol):
    """What `NodeSignals` uses of one life of a node."""

    name: str
    dead: bool
    paused: bool

    @property
    def is_cut(self) -> bool:
        """Return whether the node is partitioned from the store."""
        ...

    @property
    def is_calm(self) -> bool:
        """Return whether the faults have ended."""
        ...

    @property
    def wake_faults(self) -> list[str]:
        """Return the faults of the next signals from other nodes."""
        ...


class _Told(tuple[str, str]):
    """A signal with the life of the node that committed it."""

    by: Listens

    def __new__(cls, signal: Signal, by: Listens) -> _Told:
        made = super().__new__(cls, signal)
        made.by = by
        return made


class SignalNetwork:
    """Sends the signals of each commit to all nodes, and records in the trace when the row of a node was removed."""

    def __init__(self, store: SqliteStore, trace: Trace) -> None:
        self.store = store
        self.trace = trace
        self._listeners: list[NodeSignals] = []
        cast("Any", store.database.signals).announce = self._announce

    def attach(self, listener: NodeSignals) -> None:
        """Add a life of a node to the receivers."""
        self._listeners.append(listener)

    def detach(self, listener: NodeSignals) -> None:
        """Remove it from the receivers."""
        self._listeners.remove(listener)

    def _announce(self, signals: Iterable[Signal]) -> None:
        told = list(dict.fromkeys(signals))
        for listener in list(self._listeners):
            if (
                any(topic == NODE_TOPIC and key == listener.handle.owner for topic, key in told)
                and not listener.is_member()
            ):
                self.trace.note("gone", listener.life.name)
                listener.gone = True
            elif listener.gone and listener.is_member():
                # Its start took longer than a lease, and it has joined with another incarnation.
                self.trace.note("joined again", listener.life.name)
                listener.gone = False
            listener.deliver(told)


class NodeSignals:
    """Delivers signals to one life of a node: its own at once, those of other nodes with faults, and those that polling the rows finds."""

    def __init__(self, life: Listens, handle: SqliteStore, network: SignalNetwork, nursery: trio.Nursery) -> None:
        self.life = life
        self.handle = handle
        self.signals = Signals()
        self.gone = False
        """Whether the row of this node was removed, and no other row has taken its place."""
        self._network = network
        self._nursery = nursery
        self._context: Context = copy_context()
        self._missed: list[Signal] = []
        self._seen: set[Signal] = set()
        self._runs: dict[str, str] = {}

    def subscribe(self, topic: str, wake: Wake, key: str | None = None) -> AbstractContextManager[None]:
        """Subscribe as in `SignalStore.subscribe`."""
        return self.signals.subscribe(topic, wake, key)

    def is_member(self) -> bool:
        """Return whether the store has the row of this node."""
        return bool(self._rows("SELECT 1 FROM nodes WHERE incarnation = ?", self.handle.owner))

    def deliver(self, told: Sequence[Signal]) -> None:
        """Deliver the signals of a commit, those of other nodes with the next fault of `wake_faults`. A partition drops them."""
        life = self.life
        if life.dead:
            return
        own = [signal for signal in told if getattr(signal, "by", None) is life]
        wanted = set(self.signals.wanted())
        others = [one for one in told if one not in own and (one in wanted or (one[0], None) in wanted)]
        if own:
            self._announce(own)
        if not others or life.is_cut:
            return
        if life.paused:
            self._missed += others
            return
        if not life.wake_faults:
            self._announce(others)
            return
        how = life.wake_faults.pop(0)
        self._network.trace.note("signal", f"{how} for {life.name}: {others}")
        if how == "twice":
            self._announce(others)
        if how != "lost":
            self._context.copy().run(self._nursery.start_soon, self._later, others, _SIGNAL_DELAYS[how])

    def catch_up(self) -> None:
        """Deliver the signals that arrived during a pause."""
        missed, self._missed = self._missed, []
        self._announce(missed)

    def _announce(self, signals: Iterable[Signal]) -> None:
        # Woken code may start tasks: they inherit the context of this node, not of the one that committed.
        self._context.copy().run(self.signals.announce, list(signals))

    async def _later(self, signals: Sequence[Signal], seconds: float) -> None:
        await trio.sleep(seconds)
        if not self.life.dead and not self.life.is_cut:
            self._announce(signals)

    # -- polling the rows, as `hermes_trio.store.postgres.signal_listener` does ----------------------------------------------------------------

    async def run(self) -> None:
        """Poll the rows until cancelled; after a partition, announce all waiting rows."""
        listening = True
        while True:
            await trio.sleep(CALM_POLL_SECONDS if self.life.is_calm else POLL_SECONDS)
            if self.life.is_cut:
                listening = False
            elif listening:
                self._look()
            else:
                listening = True
                self._seen = set(self._waiting())
                self._announce(self._seen)

    def _look(self) -> None:
        found = self._waiting()
        both = [signal for signal in found if signal in self._seen]
        self._seen = set(found)
        self._announce(both)
        followed = [key for topic, key in self.signals.wanted() if topic == RUN_TOPIC and key is not None]
        sql = (
            "SELECT status || ' ' || coalesce((SELECT max(number) FROM events e WHERE e.run_id = r.run_id), 0)"
            " FROM runs r WHERE run_id = ?"
        )
        far = {run_id: row[0] for run_id in followed for row in self._rows(sql, run_id)}
        moved = [(RUN_TOPIC, run_id) for run_id, at in far.items() if self._runs.get(run_id) != at]
        self._runs = far
        self._announce(moved)

    def _waiting(self) -> list[Signal]:
        wanted = self.signals.wanted()
        topics = {topic for topic, _ in wanted}
        now = self.handle._clock()
        found: list[Signal] = [
            (_INBOX + inbox, key)
            for inbox, key in self._rows(
                "SELECT DISTINCT inbox, session_key FROM inbox WHERE settled_at IS NULL AND state = 'pending'"
            )
            if _INBOX + inbox in topics
        ]
        if OUTBOX_TOPIC in topics:
            sql = "SELECT DISTINCT platform FROM outbox WHERE settled_at IS NULL AND state = 'pending' AND next_at <= ?"
            found += [(OUTBOX_TOPIC, platform) for (platform,) in self._rows(sql, now)]
        if KEY_TOPIC in topics:
            found += [
                (KEY_TOPIC, id) for (id,) in self._rows("SELECT id FROM api_keys WHERE revoked_at > ?", now - 400)
            ]
        still = (
            "SELECT 1 FROM jobs WHERE root_id = ?1 AND ended_at IS NULL"
            " UNION ALL SELECT 1 FROM inbox WHERE root_id = ?1 AND root_id <> '' AND settled_at IS NULL"
        )
        for topic, key in wanted:
            if key is None:
                continue
            if topic == ROOT_TOPIC:
                if not self._rows(still, key):
                    found.append((topic, key))
            elif topic not in (OUTBOX_TOPIC, KEY_TOPIC, RUN_TOPIC) and not topic.startswith(_INBOX):
                found.append((topic, key))
        return found

    def _rows(self, sql: str, *values: Any) -> list[tuple[Any, ...]]:
        writer: Any = self._network.store._writer
        return list(writer._db.execute(sql, values))


class WatchedWrites:
    """The writer of the shared store for one life of a node. Marks signals as its own, and notes changes that it makes without its row in `nodes`."""

    def __init__(self, writer: Writes, listener: NodeSignals, trace: Trace) -> None:
        self.around: Callable[[str], AbstractContextManager[object]] | None = None
        self._writer = writer
        self._signals = listener
        self._trace = trace

    async def submit(self, verb: Callable[..., T], *args: object, weight: Weight = Weight.LIGHT) -> T:
        """Submit a verb as the writer does."""
        return await self._writer.submit(self._watched(verb), *args, weight=weight)

    def post(self, verb: Callable[..., object], *args: object) -> None:
        """Post a verb as the writer does."""
        self._writer.post(self._watched(verb), *args)

    def check_file(self) -> None:
        """Check the file as the writer does."""
        self._writer.check_file()

    def statistics(self) -> WriterStatistics:
        """Return the writer's statistics."""
        return self._writer.statistics()

    def _watched(self, verb: Callable[..., T]) -> Callable[..., T]:
        name = getattr(verb, "__name__", "write")
        listener = self._signals

        @wraps(verb)
        def watched(db: Any, *args: object) -> T:
            member = name == "recover" or listener.is_member()
            changes, told = db.total_changes(), len(db.signals)
            value = verb(db, *args)
            db.signals[told:] = [_Told(signal, listener.life) for signal in db.signals[told:]]
            if not member and db.total_changes() != changes:
                self._trace.note("fenced write", f"{listener.life.name}: {name}")
            return value

        return watched
