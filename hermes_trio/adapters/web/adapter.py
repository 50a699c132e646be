"""The chat in the browser, a delivering adapter beside the stateless API: conversations of a key's tenant, streamed answers, approvals in place.

Everything said is in rows, so that closing a page or restarting the server loses nothing: the session's transcript, with reports of background work;
replies outside any transcript (answers to commands, failures), which are the outbox rows of the chat; pending questions; and how far each key has
read. Live events (text as it is written, tools, questions) go through a bounded feed of their owner, from which a page resumes; `feeds.py` has those of
other nodes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from hashlib import sha256
from typing import Any, Final, Protocol

import msgspec
import trio

from hermes_trio.base.mounts import (
    Mount,
    MountCaller,
    MountFile,
    MountProblem,
    MountRequest,
    MountResponse,
    MountSend,
    MountStream,
)
from hermes_trio.messaging.addresses import Address
from hermes_trio.messaging.chunking import Limit
from hermes_trio.messaging.contract import Adapter, Disposition, Incoming, Outgoing, SendResult
from hermes_trio.messaging.platforms import Platform
from hermes_trio.messaging.senders import target_of
from hermes_trio.messaging.session_keys import Source, session_key
from hermes_trio.messaging.settings import PlatformSettings
from hermes_trio.runtime.context import SessionContext
from hermes_trio.runtime.ids import Ids
from hermes_trio.runtime.outcome import Outcome
from hermes_trio.runtime.ports import Content
from hermes_trio.runtime.turn import Turn
from hermes_trio.store import Page, SessionFilter
from hermes_trio.store.records import ApprovalChoice, ApprovalRow, OutboxRow, SessionRow, StoredMessage

from .attachments import WebAttachment, attached_files, compose_content, file_of, said_text
from .feeds import NodeFeeds, OwnerFeed, waiting_messages

BATCH_SECONDS: Final = 0.05
HEARTBEAT_SECONDS: Final = 15.0
TEXT_LENGTH: Final = 100_000
SHOWN: Final = 500
"""The number of newest messages of a transcript that a page gets."""

RESULT_SHOWN: Final = 4000
ASIDES: Final = 50
"""The number of newest replies of a chat that are examined for texts in no transcript."""

CONVERSATIONS: Final = 100

_NAME: Final = re.compile(r"[A-Za-z0-9_-]{1,64}")
_TOLD: Final = frozenset(
    {"message.delta", "tool.started", "tool.completed", "approval.request", "approval.responded", "approval.expired"}
)


class WebStore(Protocol):
    """The verbs of the store for conversations that have ended, or that no page has open."""

    async def list_sessions(self, which: SessionFilter, page: Page, /) -> list[SessionRow]: ...

    async def session_of(self, session_key: str) -> SessionRow | None: ...

    async def list_messages(self, session_id: str, page: Page, /) -> list[StoredMessage]: ...

    async def list_approvals(self, *, scope: str | None = None) -> list[ApprovalRow]: ...

    async def replies_to(self, platform: str, target: Mapping[str, object], *, limit: int = 50) -> list[OutboxRow]: ...

    async def get_cursor(self, adapter: str) -> str | None: ...

    async def set_cursor(self, adapter: str, value: str) -> None: ...


class WebMessage(msgspec.Struct, forbid_unknown_fields=True):
    """A person's message. `id` makes sending it twice harmless."""

    text: str = ""
    id: str = ""
    attachments: list[WebAttachment] = []


class WebDecision(msgspec.Struct, forbid_unknown_fields=True):
    """A person's answer to a question."""

    choice: str


class WebSeen(msgspec.Struct, forbid_unknown_fields=True):
    """How far a person has read: the `mark` that came with the messages."""

    mark: str


class WebMark(msgspec.Struct, frozen=True, array_like=True):
    """How far a conversation was read: a number of messages of a session, and everything up to a reply."""

    session: str = ""
    messages: int = 0
    reply: int = 0


class WebAdapter(Adapter):
    """See the module. `mounts` are its addresses on the server; `store` is set when the gateway opens."""

    platform = "web"
    singleton = False
    limit = Limit(TEXT_LENGTH)
    store: WebStore

    def __init__(self) -> None:
        self.feeds = NodeFeeds()
        self._ids = Ids()
        self._epoch = self._ids.hex(8)

    # -- the adapter contract ------------------------------------------------------------------------------------------------------

    async def run(self, connected: Callable[[], None]) -> None:
        """Wait until cancelled: messages arrive over HTTP, through the mounts."""
        async with self.feeds.open():
            connected()
            await trio.sleep_forever()

    async def send(self, message: Outgoing) -> SendResult:
        """Notify the pages of its owner of a message, which they read from its row. A page that is not open finds it later."""
        if not message.payload.get("approval_id"):
            turn = str(message.payload.get("turn", ""))
            self._tell(message.chat_id, {"event": "message", "turn": turn, "text": message.text[:RESULT_SHOWN]})
        await trio.lowlevel.checkpoint()
        return SendResult.sent(self._ids.make("web_", 12))

    def on_event(self, context: SessionContext, event: Mapping[str, Any]) -> None:
        """Publish a turn's events as they happen."""
        if event.get("event") in _TOLD:
            shown = dict(event)
            if "result" in shown:
                shown["result"] = str(shown["result"])[:RESULT_SHOWN]
            self._tell(context.chat_id, shown)

    async def on_turn_start(self, turn: Turn) -> None:
        """Publish that a turn begins, with its message: one that waited, also before a restart, is shown from here on."""
        given = turn.input
        notices = [notice.text[:RESULT_SHOWN] for notice in given.notices]
        event: dict[str, Any] = {"event": "turn.started", "turn": turn.id, "notices": notices}
        if not notices:
            event["said"] = _said(given.text, str(given.payload.get("id", "")), given.content)
        self._tell(turn.context.chat_id, event)

    async def on_turn_end(self, outcome: Outcome) -> None:
        """Publish the end of a turn, and its outcome."""
        chat = outcome.session_key.rpartition(":")[2]
        self._tell(chat, {"event": "turn.ended", "turn": outcome.turn_id, "state": outcome.state.value})

    def _tell(self, chat: str, event: Mapping[str, Any]) -> None:
        self.feeds.tell(chat, event)

    # -- the addresses -------------------------------------------------------------------------------------------------------------

    @property
    def mounts(self) -> Sequence[Mount]:
        """Return the addresses of the chat."""
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
                "web_seen",
                "POST",
                base + "/{conversation}/seen",
                self._saw,
                "Say how far you have read",
                body=WebSeen,
            ),
            _mount(
                "web_file",
                "GET",
                base + "/{conversation}/messages/{place}/parts/{part}",
                self._file,
                "A file of a message",
                media="application/octet-stream",
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
        rows = await self.store.list_sessions(
            SessionFilter(source=self.platform, tenant=request.caller.tenant), Page(2 * CONVERSATIONS)
        )
        newest: dict[str, SessionRow] = {}
        for row in rows:
            if row.session_key.rpartition(":")[2].startswith(f"{owner}."):
                newest.setdefault(row.session_key, row)
        data = [
            {**_conversation(row), "unread": await self._unread(request.caller, row)}
            for row in list(newest.values())[:CONVERSATIONS]
        ]
        return MountResponse({"object": "list", "data": data})

    async def _unread(self, caller: MountCaller, row: SessionRow) -> int:
        """Count the answers that this key has not been shown; none for a conversation that it never opened."""
        chat = row.session_key.rpartition(":")[2]
        seen = await self._mark(caller, chat)
        if seen is None:
            return 0
        fresh = [one for one in await self._replies(chat) if one.id > seen.reply]
        read = seen.messages if seen.session == row.id else 0
        said: list[StoredMessage] = []
        if row.message_count > read:
            said = await self.store.list_messages(row.id, Page(SHOWN, read))
        texts = sum(one.message.role == "assistant" and bool(one.message.text.strip()) for one in said)
        # A turn that failed has a reply and perhaps no message; replies that were sent long ago are not kept, and messages are.
        return max(texts, sum(bool(one.turn_id) for one in fresh)) + sum(not one.turn_id for one in fresh)

    async def _mark(self, caller: MountCaller, chat: str) -> WebMark | None:
        found = await self.store.get_cursor(_seen_key(caller, chat))
        return None if found is None else msgspec.json.decode(found, type=WebMark)

    async def _replies(self, chat: str) -> list[OutboxRow]:
        """Return what was said in a chat outside transcripts or with a turn, newest first; questions have rows of their own."""
        target = target_of(Address(self.platform, chat, None))
        rows = await self.store.replies_to(self.platform, target, limit=ASIDES)
        return [row for row in rows if not row.payload.get("approval_id")]

    async def _history(self, request: MountRequest) -> MountResponse:
        source = _source(request)
        chat = source.chat_id or ""
        await self.feeds.attach(_owner(request.caller))
        # Before the store is read: what is committed meanwhile is also an event after this id.
        event_id = f"{self._epoch}-{self.feeds.feed(_owner(request.caller)).last}"
        happens = self.feeds.live_of(chat)
        key = session_key(source, PlatformSettings().isolation)
        replies = await self._replies(chat)
        while True:
            row = await self.store.session_of(key)
            offset = 0 if row is None else max(0, row.message_count - SHOWN)
            messages = [] if row is None else await self.store.list_messages(row.id, Page(SHOWN, offset))
            before, replies = replies, await self._replies(chat)
            if [one.id for one in before] == [one.id for one in replies]:
                break
        # A turn's reply is committed with its messages, a moment before the event of its end: its live events are among them already.
        ended = {one.turn_id for one in replies}
        live = [
            event for events in happens for event in (waiting_messages(events) if ended & _turns(events) else events)
        ]
        begun = {one["said"]["id"] for events in happens for one in events if "said" in one}
        live = [one for one in live if one["event"] != "said" or one["id"] not in begun]
        mark = WebMark(
            "" if row is None else row.id, offset + len(messages), max((one.id for one in replies), default=0)
        )
        asked = [_question(one) for one in await self.store.list_approvals(scope=key)]
        return MountResponse(
            {
                "object": "list",
                "data": [_message(one, offset + index) for index, one in enumerate(messages)],
                "asides": _asides(row, messages, replies),
                "live": live,
                "approvals": asked,
                "session_id": None if row is None else row.id,
                "mark": msgspec.json.encode(mark).decode(),
                "event_id": event_id,
            }
        )

    async def _saw(self, request: MountRequest) -> MountResponse:
        try:
            mark = msgspec.json.decode(_decode(request.body, WebSeen).mark, type=WebMark)
        except msgspec.MsgspecError:
            raise MountProblem(400, "invalid_mark", "mark must be the one that came with the messages.") from None
        chat = _source(request).chat_id or ""
        if await self._advance(request.caller, chat, mark):
            self._tell(chat, {"event": "seen"})
        return MountResponse({"object": "hermes.web.seen"})

    async def _advance(self, caller: MountCaller, chat: str, mark: WebMark) -> bool:
        """Store how far a key has read; a page that is behind another one of the same key does not move it back."""
        known = await self._mark(caller, chat)
        if known is not None:
            messages = max(known.messages, mark.messages) if known.session == mark.session else mark.messages
            mark = WebMark(mark.session, messages, max(known.reply, mark.reply))
        if mark == known:
            return False
        await self.store.set_cursor(_seen_key(caller, chat), msgspec.json.encode(mark).decode())
        return True

    async def _file(self, request: MountRequest) -> MountFile:
        source = _source(request)
        place, _, number = request.params["place"].partition(".")
        part = request.params["part"]
        row = await self.store.session_of(session_key(source, PlatformSettings().isolation))
        if row is not None and all(one.isdecimal() and len(one) < 10 for one in (place, number, part)):
            for one in await self.store.list_messages(row.id, Page(1, int(place))):
                found = file_of(one.message.content, int(part)) if one.id == int(number) else None
                if found is not None:
                    return found
        raise MountProblem(404, "file_not_found", "This conversation has no such file (any more).")

    async def _say(self, request: MountRequest) -> MountResponse:
        said = _decode(request.body, WebMessage)
        if len(said.text) > TEXT_LENGTH or not (said.text.strip() or said.attachments):
            raise MountProblem(400, "invalid_message", f"text must have 1 to {TEXT_LENGTH} characters.")
        if said.attachments and said.text.lstrip().startswith(self.command_prefix):
            raise MountProblem(400, "invalid_message", "A command cannot have attachments.")
        content = compose_content(said.text, said.attachments)
        self.feeds.feed(_owner(request.caller))
        await self.feeds.attach(
            _owner(request.caller)
        )  # before the message is stored: its turn may begin on another node
        source = _source(request)
        chat = source.chat_id or ""
        if await self._mark(request.caller, chat) is None:
            # A writer's page waits for the answer: from here on it is counted as unread.
            await self._advance(request.caller, chat, WebMark())
        event_id = f"{chat}:{said.id}" if said.id else ""
        # By the id a page recognises that the message it shows and the input of a turn are the same; a message without an id gets one.
        id = said.id or self._ids.make("said_", 12)
        payload: dict[str, Any] = {"id": id}
        if said.attachments:
            payload["content"] = content
        received = await self.gateway.receive(
            self, Incoming(source=source, text=said.text, event_id=event_id, payload=payload)
        )
        if received.disposition is Disposition.REFUSED:
            raise MountProblem(429, "mailbox_full", "Too many messages wait in this conversation.")
        if received.disposition is Disposition.ACCEPTED and not self.feeds.began(chat, id):
            self._tell(chat, {"event": "said", **_said(said.text, id, content)})
        return MountResponse({"object": "hermes.web.received", "receipt": received.disposition.value}, 202)

    async def _decide(self, request: MountRequest) -> MountResponse:
        try:
            choice = ApprovalChoice(_decode(request.body, WebDecision).choice)
        except ValueError:
            raise MountProblem(400, "invalid_choice", "choice must be once, session, always or deny.") from None
        words = await self.gateway.approval_clicked(self, _source(request), request.params["approval_id"], choice)
        return MountResponse({"object": "hermes.web.decided", "text": words})

    async def _events(self, request: MountRequest) -> MountStream:
        await trio.lowlevel.checkpoint()
        return MountStream(partial(self._follow, _owner(request.caller), request.last_event_id))

    async def _follow(self, owner: str, last: str, send: MountSend) -> None:
        async with self.feeds.page(owner) as followed:
            await self._send_events(self.feeds.feed(owner), last, send, followed=followed)

    async def _send_events(self, feed: OwnerFeed, last: str, send: MountSend, *, followed: bool) -> None:
        """Send the events of an owner until cancelled. Unless other nodes were `followed` before, a page that resumes reads everything again."""
        epoch, _, number = last.partition("-")
        known = followed and epoch == self._epoch and number.isdecimal() and len(number) < 18
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


def _mount(name: str, method: str, path: str, handler: Any, summary: str, **more: Any) -> Mount:
    return Mount(name=name, method=method, path=path, scope="chat", handler=handler, summary=summary, tag="web", **more)


def _owner(caller: MountCaller) -> str:
    """Return the owner of conversations: the tenant, by a name without special characters."""
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
        key_id=caller.key_id,
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


def _turns(live: Sequence[Mapping[str, Any]]) -> set[str]:
    """Return the turns that have begun among live events."""
    return {one["turn"] for one in live if one["event"] == "turn.started"}


def _seen_key(caller: MountCaller, chat: str) -> str:
    return f"web:seen:{caller.key_id}:{chat}"


def _said(text: str, id: str, content: Content) -> dict[str, Any]:
    """Return a person's message for pages: its files by their names."""
    return {"text": text, "id": id, "attachments": [] if isinstance(content, str) else attached_files(content)}


def _asides(
    session: SessionRow | None, messages: Sequence[StoredMessage], replies: Sequence[OutboxRow]
) -> list[dict[str, Any]]:
    """Return what was said to a person and is in no transcript, oldest first: answers to commands, failures of turns.

    Replies of an earlier conversation, or before the messages that are shown, are left out.
    """
    since = 0.0 if session is None else session.started_at
    if messages and len(messages) == SHOWN:
        since = max(since, messages[0].message.timestamp)
    told = [one.message.text.strip() for one in messages if one.message.role == "assistant"]
    found: list[dict[str, Any]] = []
    for row in reversed(replies):
        if row.created_at < since or (row.turn_id and session is not None and row.session_id != session.id):
            continue
        text = row.text
        if row.turn_id:
            # The answer itself is in the transcript; what was said beside it is not.
            for known in sorted({one for one in told if one and one in text}, key=len, reverse=True)[:1]:
                text = text.replace(known, "", 1)
        if text.strip():
            found.append({"id": row.id, "text": text.strip(), "timestamp": row.created_at})
    return found


def _conversation(row: SessionRow) -> dict[str, Any]:
    return {
        "id": row.session_key.rpartition(".")[2],
        "session_id": row.id,
        "title": row.title or row.preview,
        "message_count": row.message_count,
        "last_active": row.last_active,
        "ended": row.ended_at is not None,
    }


def _message(row: StoredMessage, place: int) -> dict[str, Any]:
    """Return a message of the transcript; its files are fetched by its place and its number."""
    content = row.message.content
    return {
        "id": row.id,
        "place": f"{place}.{row.id}",
        "role": row.message.role,
        "text": said_text(content)[:TEXT_LENGTH],
        "attachments": [] if isinstance(content, str) else attached_files(content),
        "timestamp": row.message.timestamp,
        "tool": row.message.tool_name,
        "tool_call_id": row.message.tool_call_id,
        "calls": [{"id": call.id, "name": call.name, "arguments": call.arguments} for call in row.message.tool_calls],
    }


def web_platform() -> Platform:
    """Return the platform of the chat in the browser. The server authenticates its people: each holds a key."""
    return Platform(WebAdapter(), PlatformSettings(allow_all=True, unknown_dm="ignore"))
