"""The chat in the browser, as a delivering adapter beside the stateless API: conversations of a key's tenant, streamed answers, approvals in place.

What was said is the session's transcript, so that a page that was closed finds everything again, also what came back from the background. What a
page sees live (text as it is written, tools, questions, answers to commands) goes through a bounded feed of its owner, from which a page resumes.
"""

from __future__ import annotations

import re
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from hashlib import sha256
from typing import Any, Final, Protocol

import msgspec
import trio

from hermes_trio.base.mounts import (
    Mount,
    MountCaller,
    MountProblem,
    MountRequest,
    MountResponse,
    MountSend,
    MountStream,
)
from hermes_trio.messaging.chunking import Limit
from hermes_trio.messaging.command_text import Choice
from hermes_trio.messaging.contract import Adapter, Disposition, Incoming, Outgoing, SendResult
from hermes_trio.messaging.lru import LruMap
from hermes_trio.messaging.platforms import Platform
from hermes_trio.messaging.session_keys import Source, session_key
from hermes_trio.messaging.settings import PlatformSettings
from hermes_trio.runtime.context import SessionContext
from hermes_trio.runtime.ids import Ids
from hermes_trio.runtime.outcome import Outcome
from hermes_trio.runtime.turn import Turn
from hermes_trio.store.records import ApprovalRow, SessionRow, StoredMessage

__all__ = ["WebAdapter", "web_member"]

FEED_LENGTH: Final = 2000
"""Events of one owner that are kept for pages that come back."""

BATCH_SECONDS: Final = 0.05
HEARTBEAT_SECONDS: Final = 15.0
TEXT_LENGTH: Final = 100_000
SHOWN: Final = 500
"""Messages of a transcript that a page is given: the newest."""

RESULT_SHOWN: Final = 4000
MOST_ASIDES: Final = 1000
KEPT_ASIDES: Final = 50

_NAME: Final = re.compile(r"[A-Za-z0-9_-]{1,64}")
_TOLD: Final = frozenset(
    {"message.delta", "tool.started", "tool.completed", "approval.request", "approval.responded", "approval.expired"}
)


class WebStore(Protocol):
    """What the adapter reads of conversations that are over, or that no page has open."""

    async def list_sessions(
        self, *, limit: int = 50, source: str | None = None, tenant: str | None = None
    ) -> list[SessionRow]: ...

    async def session_of(self, session_key: str) -> SessionRow | None: ...

    async def list_messages(self, session_id: str, *, limit: int = 1_000, offset: int = 0) -> list[StoredMessage]: ...

    async def list_approvals(self, *, scope: str | None = None) -> list[ApprovalRow]: ...


class WebMessage(msgspec.Struct, forbid_unknown_fields=True):
    """What a person writes. `id` makes sending it twice harmless."""

    text: str
    id: str = ""


class WebDecision(msgspec.Struct, forbid_unknown_fields=True):
    """How a person answers a question."""

    choice: str


class OwnerFeed:
    """The live events of one owner: numbered, bounded, read by any number of pages."""

    def __init__(self) -> None:
        self.last = 0
        self._events: deque[tuple[int, bytes]] = deque(maxlen=FEED_LENGTH)
        self._wake = trio.Event()

    def put(self, event: Mapping[str, Any]) -> None:
        """Add an event. It never waits."""
        self.last += 1
        self._events.append((self.last, msgspec.json.encode(event)))
        self._wake.set()
        self._wake = trio.Event()

    def after(self, number: int) -> list[tuple[int, bytes]] | None:
        """What came after a number; None if that is not kept any more."""
        if number > self.last or (self._events and number < self._events[0][0] - 1) or (not self._events and number):
            return None
        return [one for one in self._events if one[0] > number]

    async def wait(self) -> None:
        """Wait for the next event."""
        await self._wake.wait()


class WebAdapter(Adapter):
    """See the module. `mounts` are its addresses on the server; `store` is put there when the gateway opens."""

    platform = "web"
    limit = Limit(TEXT_LENGTH)
    store: WebStore

    def __init__(self) -> None:
        self._feeds: dict[str, OwnerFeed] = {}
        self._live: dict[str, list[Mapping[str, Any]]] = {}
        """What happened in a conversation since its last turn was committed, for a page that is opened meanwhile."""
        self._asides: LruMap[str, deque[Mapping[str, Any]]] = LruMap(MOST_ASIDES)
        """Answers to commands: they are in no transcript."""
        self._ids = Ids()
        self._epoch = self._ids.hex(8)

    # -- the adapter contract ------------------------------------------------------------------------------------------------------

    async def run(self, connected: Callable[[], None]) -> None:
        """Messages come over HTTP, through the mounts: there is nothing to connect to."""
        connected()
        await trio.sleep_forever()

    async def send(self, message: Outgoing) -> SendResult:
        """Show a message to the pages of its owner. A page that is not open finds it in the transcript."""
        id = self._ids.make("web_", 12)
        approval = str(message.payload.get("approval_id", ""))
        if not approval:
            aside = {"event": "message", "id": id, "text": message.text, "timestamp": time.time()}
            if not message.payload.get("turn"):
                known = self._asides.get(message.chat_id)
                if known is None:
                    known = deque[Mapping[str, Any]](maxlen=KEPT_ASIDES)
                    self._asides.note(message.chat_id, known)
                known.append(aside)
                self._tell(message.chat_id, aside)
            else:
                self._tell(message.chat_id, {"event": "answered", "text": message.text})
        await trio.lowlevel.checkpoint()
        return SendResult.sent(id)

    def on_event(self, context: SessionContext, event: Mapping[str, Any]) -> None:
        """Show a turn's events as they happen."""
        if event.get("event") in _TOLD:
            shown = dict(event)
            if "result" in shown:
                shown["result"] = str(shown["result"])[:RESULT_SHOWN]
            self._tell(context.chat_id, shown)

    async def on_turn_start(self, turn: Turn) -> None:
        """Say that the agent works."""
        notices = [notice.text[:RESULT_SHOWN] for notice in turn.input.notices]
        self._tell(turn.context.chat_id, {"event": "turn.started", "turn": turn.id, "notices": notices})

    async def on_turn_end(self, outcome: Outcome) -> None:
        """Say that a turn is over, and how."""
        chat = outcome.session_key.rpartition(":")[2]
        self._tell(chat, {"event": "turn.ended", "turn": outcome.turn_id, "state": outcome.state.value})

    def _tell(self, chat: str, event: Mapping[str, Any]) -> None:
        owner, _, name = chat.partition(".")
        if event["event"] == "turn.ended":
            self._live.pop(chat, None)
        elif event["event"] not in ("message", "answered"):
            live = self._live.setdefault(chat, [])
            if len(live) < FEED_LENGTH:
                live.append(event)
        feed = self._feeds.get(owner)
        if feed is not None:
            feed.put({**event, "conversation": name})

    # -- the addresses -------------------------------------------------------------------------------------------------------------

    @property
    def mounts(self) -> Sequence[Mount]:
        """The addresses of the chat."""
        base = "/v1/web/conversations"
        return (
            _mount("web_conversations", "GET", base, self._list, "Your conversations in the browser"),
            _mount("web_messages", "GET", base + "/{conversation}/messages", self._history, "What was said"),
            _mount(
                "web_say",
                "POST",
                base + "/{conversation}/messages",
                self._say,
                "Say something",
                status=202,
                body=WebMessage,
            ),
            _mount(
                "web_decide",
                "POST",
                base + "/{conversation}/approvals/{approval_id}",
                self._decide,
                "Answer a question",
                body=WebDecision,
            ),
            _mount(
                "web_events", "GET", "/v1/web/events", self._events, "What happens in them, as a stream", streams=True
            ),
        )

    async def _list(self, request: MountRequest) -> MountResponse:
        owner = _owner(request.caller)
        rows = await self.store.list_sessions(limit=200, source=self.platform, tenant=request.caller.tenant)
        newest: dict[str, SessionRow] = {}
        for row in rows:
            if row.session_key.rpartition(":")[2].startswith(f"{owner}."):
                newest.setdefault(row.session_key, row)
        return MountResponse({"object": "list", "data": [_conversation(row) for row in newest.values()]})

    async def _history(self, request: MountRequest) -> MountResponse:
        source = _source(request)
        chat = source.chat_id or ""
        # Before the store is read: what is committed meanwhile is told behind this id, and read again.
        event_id = f"{self._epoch}-{self._feed(request.caller).last}"
        live = list(self._live.get(chat, ()))
        key = session_key(source, PlatformSettings().isolation)
        row = await self.store.session_of(key)
        data: list[dict[str, Any]] = []
        if row is not None:
            offset = max(0, row.message_count - SHOWN)
            data = [_message(one) for one in await self.store.list_messages(row.id, limit=SHOWN, offset=offset)]
        asked = [_question(one) for one in await self.store.list_approvals(scope=key)]
        return MountResponse(
            {
                "object": "list",
                "data": data,
                "asides": list(self._asides.get(chat) or ()),
                "live": live,
                "approvals": asked,
                "session_id": None if row is None else row.id,
                "event_id": event_id,
            }
        )

    async def _say(self, request: MountRequest) -> MountResponse:
        said = _decode(request.body, WebMessage)
        if not said.text.strip() or len(said.text) > TEXT_LENGTH:
            raise MountProblem(400, "invalid_message", f"text must have 1 to {TEXT_LENGTH} characters.")
        self._feed(request.caller)
        source = _source(request)
        event_id = f"{source.chat_id}:{said.id}" if said.id else ""
        received = await self.gateway.receive(self, Incoming(source=source, text=said.text, event_id=event_id))
        if received.receipt is Disposition.REFUSED:
            raise MountProblem(429, "mailbox_full", "Too many messages wait in this conversation.")
        if received.receipt is Disposition.ACCEPTED:
            self._tell(source.chat_id or "", {"event": "said", "text": said.text, "id": said.id})
        return MountResponse({"object": "hermes.web.received", "receipt": received.receipt.value}, 202)

    async def _decide(self, request: MountRequest) -> MountResponse:
        try:
            choice = Choice(_decode(request.body, WebDecision).choice)
        except ValueError:
            raise MountProblem(400, "invalid_choice", "choice must be once, session, always or deny.") from None
        words = await self.gateway.approval_clicked(self, _source(request), request.params["approval_id"], choice)
        return MountResponse({"object": "hermes.web.decided", "text": words})

    async def _events(self, request: MountRequest) -> MountStream:
        await trio.lowlevel.checkpoint()
        return MountStream(partial(self._follow, self._feed(request.caller), request.last_event_id))

    async def _follow(self, feed: OwnerFeed, last: str, send: MountSend) -> None:
        epoch, _, number = last.partition("-")
        known = epoch == self._epoch and number.isdecimal() and len(number) < 18
        at = int(number) if known else feed.last
        if (last and not known) or feed.after(at) is None:
            at = feed.last
            await send(self._encode(at, b'{"event":"resync"}'))
        else:
            await send(b": hello\n\n")
        while True:
            missed = feed.after(at)
            if missed is None:
                at = feed.last
                await send(self._encode(at, b'{"event":"resync"}'))
            elif missed:
                at = missed[-1][0]
                await send(b"".join(self._encode(number, body) for number, body in missed))
                await trio.sleep(BATCH_SECONDS)
            else:
                with trio.move_on_after(HEARTBEAT_SECONDS) as quiet:
                    await feed.wait()
                if quiet.cancelled_caught:
                    await send(b": keepalive\n\n")

    def _encode(self, number: int, body: bytes) -> bytes:
        return b"id: %b-%d\ndata: %b\n\n" % (self._epoch.encode(), number, body)

    def _feed(self, caller: MountCaller) -> OwnerFeed:
        return self._feeds.setdefault(_owner(caller), OwnerFeed())


def _mount(name: str, method: str, path: str, handler: Any, summary: str, **more: Any) -> Mount:
    return Mount(name=name, method=method, path=path, scope="chat", handler=handler, summary=summary, tag="web", **more)


def _owner(caller: MountCaller) -> str:
    """Whose conversations: the tenant's, by a name that has no special character."""
    return "admin" if not caller.tenant else "t" + sha256(caller.tenant.encode()).hexdigest()[:16]


def _source(request: MountRequest) -> Source:
    name = request.params["conversation"]
    if _NAME.fullmatch(name) is None:
        raise MountProblem(400, "invalid_conversation", "A conversation is called by 1 to 64 letters, digits, _ and -.")
    caller = request.caller
    return Source(
        platform=WebAdapter.platform,
        chat_type="dm",
        chat_id=f"{_owner(caller)}.{name}",
        user_id=caller.key_id,
        user_name=caller.name,
        tenant=caller.tenant,
    )


def _decode(body: bytes, kind: type[Any]) -> Any:
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.MsgspecError as error:
        raise MountProblem(400, "invalid_body", f"The body cannot be used: {error}") from None


def _question(row: ApprovalRow) -> dict[str, Any]:
    return {
        "approval_id": row.id,
        "command": row.command,
        "description": row.description,
        "pattern_keys": list(row.categories),
        "choices": [choice.value for choice in row.choices],
        "requested_at": row.created_at,
        "expires_at": row.expires_at,
        "session_key": row.session_key,
        "run_id": "",
        "tenant": "",
    }


def _conversation(row: SessionRow) -> dict[str, Any]:
    return {
        "id": row.session_key.rpartition(".")[2],
        "session_id": row.id,
        "title": row.title or row.preview,
        "message_count": row.message_count,
        "last_active": row.last_active,
        "ended": row.ended_at is not None,
    }


def _message(row: StoredMessage) -> dict[str, Any]:
    return {
        "id": row.id,
        "role": row.message.role,
        "text": row.message.text[:TEXT_LENGTH],
        "timestamp": row.message.timestamp,
        "tool": row.message.tool_name,
        "tool_call_id": row.message.tool_call_id,
        "calls": [{"id": call.id, "name": call.name, "arguments": call.arguments} for call in row.message.tool_calls],
    }


def web_member() -> Platform:
    """The chat in the browser. The server has let its people in: each holds a key."""
    return Platform(WebAdapter(), PlatformSettings(allow_all=True, unknown_dm="ignore"))
