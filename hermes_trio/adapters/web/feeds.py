"""The live events of the web chat: those of this node, and, where several nodes share the store, those of the others.

A page may be connected to one node while its conversation runs on another. While an owner has pages or requests on this node, one task for each
other node asks it for the owner's events, one request after the other: the first answer is the state of its conversations, each further one has what
happened since. What is missed, because a node was silent or forgot it, makes the pages read the rows again.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractContextManager, asynccontextmanager
from typing import Any, Final, Protocol

import msgspec
import trio

from hermes_trio.runtime.membership import RequestHandler
from hermes_trio.runtime.ports import NodeAnswer, NodeRequest, NodeRow

FEED_LENGTH: Final = 2000
"""The number of events of one owner that are kept for pages that reconnect."""

ASKED: Final = "web_feed"
"""The kind of the requests between nodes."""

POLL_SECONDS: Final = 10.0
"""How long another node waits for an event before it answers that there is none."""
ANSWER_SECONDS: Final = 5.0
JOIN_SECONDS: Final = 0.05
"""Events that happen within this time are sent together."""
MOST_EVENTS: Final = 500
"""Events in one answer."""
ATTACH_SECONDS: Final = 1.0
"""How long a request waits for the first answers of the other nodes."""
LINGER_SECONDS: Final = 60.0
"""How long an owner's events are followed after its last page or request."""
LOOK_SECONDS: Final = 1.0
BEGUN: Final = 200
"""Messages whose turns have begun elsewhere that are remembered for each owner."""

logger: Final = logging.getLogger("hermes_trio.adapters.web")

RESYNC: Final[Mapping[str, Any]] = {"event": "resync"}

WebEvent = Mapping[str, Any]


class NodesPort(Protocol):
    """What the feeds need of the membership."""

    nodes: Sequence[NodeRow]

    async def read_nodes(self) -> None: ...

    def answering(self, kind: str, handler: RequestHandler) -> AbstractContextManager[None]: ...

    async def ask(
        self,
        node: str,
        kind: str,
        target: str,
        payload: Mapping[str, Any] | None = None,
        *,
        seconds: float = 30.0,
        shown: bool = True,
    ) -> NodeAnswer | None: ...


class OwnerFeed:
    """The live events of one owner: numbered, bounded, read by any number of pages, and by other nodes if they are of this one."""

    def __init__(self) -> None:
        self.last = 0
        self._events: deque[tuple[int, bytes, bool, bool]] = deque(maxlen=FEED_LENGTH)
        """Number, event, whether it happened on this node, and whether pages get it."""
        self._wake = trio.Event()

    def put(self, event: WebEvent, *, here: bool = True, shown: bool = True) -> None:
        """Add an event, without waiting. `here` says that it happened on this node, `shown` that pages get it."""
        self.last += 1
        self._events.append((self.last, msgspec.json.encode(event), here, shown))
        self._wake.set()
        self._wake = trio.Event()

    def after(self, number: int) -> list[tuple[int, bytes]] | None:
        """Return the events after a number; None if they are no longer kept."""
        if number > self.last or (self._events and number < self._events[0][0] - 1) or (not self._events and number):
            return None
        return [(at, body) for at, body, _, shown in self._events if at > number and shown]

    def happened_here(self, number: int) -> tuple[int, list[bytes]]:
        """Return the first events of this node after a number, and the number behind them."""
        found = [(at, body) for at, body, here, _ in self._events if at > number and here][:MOST_EVENTS]
        return (found[-1][0] if len(found) == MOST_EVENTS else self.last), [body for _, body in found]

    async def wait(self) -> None:
        """Wait for the next event."""
        await self._wake.wait()


def waiting_messages(live: Sequence[WebEvent]) -> list[WebEvent]:
    """Return the messages of the live events whose turn has not begun."""
    began = [one["said"]["id"] for one in live if one["event"] == "turn.started" and "said" in one]
    return [one for one in live if one["event"] == "said" and one["id"] not in began]


class LiveEvents:
    """What happened in each conversation since its last turn was committed, for a page that is opened meanwhile."""

    def __init__(self, chats: Mapping[str, Sequence[WebEvent]] | None = None) -> None:
        self.chats: dict[str, list[WebEvent]] = {chat: list(events) for chat, events in (chats or {}).items()}

    def add(self, chat: str, event: WebEvent) -> None:
        """Take an event. The end of a turn drops its events, because they are in the transcript; messages that wait for a turn of their own stay."""
        match event["event"]:
            case "turn.ended":
                waiting = waiting_messages(self.chats.pop(chat, []))
                if waiting:
                    self.chats[chat] = waiting
            case "message" | "seen":
                pass
            case "taken":
                self.drop_said(chat, event["id"])
            case _:
                live = self.chats.setdefault(chat, [])
                if len(live) < FEED_LENGTH:
                    live.append(event)

    def drop_said(self, chat: str, id: str | None = None) -> None:
        """Drop the message with this id, because its turn has begun on another node; None: all that wait."""
        kept = [one for one in self.chats.get(chat, ()) if one["event"] != "said" or id not in (None, one["id"])]
        if kept:
            self.chats[chat] = kept
        else:
            self.chats.pop(chat, None)

    def of_owner(self, owner: str) -> dict[str, list[WebEvent]]:
        """Return the part of one owner."""
        return {chat: events for chat, events in self.chats.items() if chat.startswith(f"{owner}.")}


class _Followed:
    """The state of one owner on other nodes."""

    def __init__(self) -> None:
        self.pages = 0
        self.until = 0.0
        self.ready = trio.Event()
        self.silent: set[str] = set()
        """Nodes that have not answered yet."""
        self.live: dict[str, LiveEvents] = {}
        self.begun: deque[str] = deque(maxlen=BEGUN)


class NodeFeeds:
    """The feeds of all owners on one node. `nodes` is None where a store has one owner: then no node is polled, and no task runs."""

    def __init__(self) -> None:
        self.nodes: NodesPort | None = None
        self.own = ""
        """The incarnation of this node."""
        self.live = LiveEvents()
        self._feeds: dict[str, OwnerFeed] = {}
        self._followed: dict[str, _Followed] = {}
        self._nursery: trio.Nursery | None = None

    @asynccontextmanager
    async def open(self) -> AsyncIterator[None]:
        """Answer other nodes, and follow them on demand, for the body of the `async with`."""
        if self.nodes is None:
            yield
            return
        with self.nodes.answering(ASKED, self._answer):
            async with trio.open_nursery() as self._nursery:
                try:
                    yield
                finally:
                    self._nursery.cancel_scope.cancel()
                    self._nursery = None
                    self._followed.clear()

    def feed(self, owner: str) -> OwnerFeed:
        """Return the feed of an owner, which begins with its first use."""
        return self._feeds.setdefault(owner, OwnerFeed())

    def tell(self, chat: str, event: WebEvent) -> None:
        """Publish an event of this node."""
        owner, _, name = chat.partition(".")
        self.live.add(chat, event)
        feed = self._feeds.get(owner)
        if feed is None and self.nodes is not None:
            feed = self.feed(owner)  # its pages may be on another node
        if feed is not None:
            feed.put({**event, "conversation": name})

    def live_of(self, chat: str) -> list[list[WebEvent]]:
        """Return what happens in a conversation now, on each node."""
        followed = self._followed.get(chat.partition(".")[0])
        places = (self.live, *(followed.live.values() if followed is not None else ()))
        return [list(found) for one in places if (found := one.chats.get(chat))]

    def began(self, chat: str, id: str) -> bool:
        """Return whether the turn of a message has begun: it has published the message."""
        followed = self._followed.get(chat.partition(".")[0])
        if followed is not None and id in followed.begun:
            return True
        return any(one.get("said", {}).get("id") == id for live in self.live_of(chat) for one in live)

    async def attach(self, owner: str) -> bool:
        """Follow an owner on the other nodes for a while, and wait a moment for their first answers. Return whether it was followed before."""
        if self.nodes is None or self._nursery is None:
            return True
        followed = self._followed.get(owner)
        known = followed is not None and followed.ready.is_set()
        if followed is None:
            followed = self._followed[owner] = _Followed()
            followed.until = trio.current_time() + LINGER_SECONDS
            self._nursery.start_soon(self._follow, owner, followed, name=f"web chat {owner} on other nodes")
        followed.until = trio.current_time() + LINGER_SECONDS
        with trio.move_on_after(ATTACH_SECONDS):
            await followed.ready.wait()
        return known

    @asynccontextmanager
    async def page(self, owner: str) -> AsyncIterator[bool]:
        """Follow an owner for the body of the `async with`; the value is that of `attach`."""
        known = await self.attach(owner)
        followed = self._followed.get(owner)
        if followed is not None:
            followed.pages += 1
        try:
            yield known
        finally:
            if followed is not None:
                followed.pages -= 1
                followed.until = trio.current_time() + LINGER_SECONDS

    # -- asking ------------------------------------------------------------------------------------------------------------------

    async def _follow(self, owner: str, followed: _Followed) -> None:
        assert self.nodes is not None
        asked: set[str] = set()
        await self.nodes.read_nodes()
        followed.silent = {row.incarnation for row in self.nodes.nodes} - {self.own}
        if not followed.silent:
            followed.ready.set()
        async with trio.open_nursery() as nursery:
            while self._wanted(owner, followed):
                for row in self.nodes.nodes:
                    if row.incarnation not in asked and row.incarnation != self.own:
                        asked.add(row.incarnation)
                        nursery.start_soon(self._poll, owner, followed, row.incarnation)
                await trio.sleep(LOOK_SECONDS)
            nursery.cancel_scope.cancel()
        if self._followed.get(owner) is followed:
            del self._followed[owner]

    def _wanted(self, owner: str, followed: _Followed) -> bool:
        waits = any(waiting_messages(events) for events in self.live.of_owner(owner).values())
        return followed.pages > 0 or waits or trio.current_time() < followed.until

    async def _poll(self, owner: str, followed: _Followed, node: str) -> None:
        """Poll one node until it has ended."""
        assert self.nodes is not None
        epoch, after, missed = "", -1, False
        while True:
            payload = {"epoch": epoch, "after": after}
            try:
                seconds = POLL_SECONDS + ANSWER_SECONDS if epoch else ATTACH_SECONDS
                answer = await self.nodes.ask(node, ASKED, owner, payload, seconds=seconds, shown=False)
            except Exception as error:
                logger.info("could not read the events of a chat from node %s; retrying: %s", node[:8], error)
                answer = None
            self._heard_of(followed, node)
            if answer is None or not (answer.gone or "epoch" in answer.value):
                epoch, after, missed = "", -1, True
                await trio.sleep(LOOK_SECONDS)
                continue
            if answer.gone:
                followed.live.pop(node, None)
                self._gap(owner)
                return
            value = answer.value
            if "live" in value:
                followed.live[node] = LiveEvents(value["live"])
                if missed or epoch or followed.ready.is_set():
                    self._gap(owner)
                for chat, events in value["live"].items():
                    for event in events:
                        self._note_begun(followed, chat, event)
                    for id in followed.begun:
                        followed.live[node].drop_said(chat, id)
            for event in value.get("events", ()):
                self._heard(owner, followed, node, event)
            epoch, after, missed = value["epoch"], value["last"], False

    def _heard_of(self, followed: _Followed, node: str) -> None:
        followed.silent.discard(node)
        if not followed.silent:
            followed.ready.set()

    def _heard(self, owner: str, followed: _Followed, node: str, event: WebEvent) -> None:
        chat = f"{owner}.{event['conversation']}"
        # The event of the node that received a message may arrive after that of the node that has begun its turn.
        if event["event"] != "said" or event["id"] not in followed.begun:
            followed.live.setdefault(node, LiveEvents()).add(chat, event)
        self._note_begun(followed, chat, event)
        if event["event"] != "taken":
            self.feed(owner).put(event, here=False)

    def _note_begun(self, followed: _Followed, chat: str, event: WebEvent) -> None:
        """The turn of a message has begun: it does not wait any more, on whichever node it was received."""
        if event["event"] == "taken":
            followed.begun.append(event["id"])
        elif event["event"] == "turn.started" and "said" in event:
            id = event["said"]["id"]
            followed.begun.append(id)
            if any(one["event"] == "said" and one["id"] == id for one in self.live.chats.get(chat, ())):
                owner, _, name = chat.partition(".")
                # Nodes that attach later read here that the message no longer waits: the turn may have ended meanwhile.
                self.feed(owner).put({"event": "taken", "id": id, "conversation": name}, shown=False)
            for live in (self.live, *followed.live.values()):
                live.drop_said(chat, id)

    def _gap(self, owner: str) -> None:
        """Events were missed: the pages read the rows again, and messages that waited are shown when their turns begin."""
        for chat in list(self.live.of_owner(owner)):
            self.live.drop_said(chat)
        self.feed(owner).put(RESYNC, here=False)

    # -- answering ---------------------------------------------------------------------------------------------------------------

    async def _answer(self, request: NodeRequest) -> Mapping[str, Any]:
        """Return the events of an owner on this node after a number, as soon as there are any; at first, and after a gap, its live events."""
        feed, after = self.feed(request.target), int(request.payload["after"])
        if request.payload["epoch"] != self.own or after < 0 or feed.after(after) is None:
            return {"epoch": self.own, "last": feed.last, "live": self.live.of_owner(request.target)}
        events: list[bytes] = []
        with trio.move_on_after(POLL_SECONDS):
            while not events:
                if feed.last == after:
                    await feed.wait()
                    await trio.sleep(JOIN_SECONDS)
                if feed.after(after) is None:
                    return {"epoch": self.own, "last": feed.last, "live": self.live.of_owner(request.target)}
                after, events = feed.happened_here(after)
        return {"epoch": self.own, "last": after, "events": [msgspec.json.decode(body) for body in events]}
