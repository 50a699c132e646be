"""Slack on loopback: Web API, Socket Mode, Events API and response URLs, with their limits and error words.

Tests speak for the people (`say`, `share`, `use_command`, `click`) and read what the bot did (`messages`, `calls`). Events go over Socket Mode,
or to a request URL after `use_request_url`. `open_fake_slack` ends it. In one thing it is stricter than Slack: a reply to a
thread that does not exist in that channel is refused, because it is always a mistake.
"""

from __future__ import annotations

import math
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any, final

import attrs
import msgspec
import trio

from .fake import FakePlatform, SentMessage
from .faults import RateLimited
from .ledger import WAIT_SECONDS, CallLedger
from .server import FakeReply, FakeRequest, open_loopback_server
from .slack_blocks import POST_TEXT_LIMIT, UPDATE_TEXT_LIMIT, SlackRefusal, check_content
from .slack_delivery import FakeSlackSocket, SlackDeliveries

RESPONSE_URL_USES = 5


@final
@attrs.define
class SlackMessage(SentMessage):
    """A message that the bot sent, as people see it now. `truncated` says that Slack cut its text."""

    channel: str
    ts: str
    text: str
    thread_ts: str | None = None
    blocks: list[dict[str, Any]] = attrs.field(factory=list[dict[str, Any]])
    ephemeral_for: str | None = None
    truncated: bool = False

    @property
    def buttons(self) -> list[dict[str, Any]]:
        return [e for block in self.blocks if block["type"] == "actions" for e in block["elements"]]


@final
@attrs.define
class _Channel:
    id: str
    type: str
    name: str = ""
    user: str | None = None
    archived: bool = False
    member: bool = True
    messages: dict[str, dict[str, Any]] = attrs.field(factory=dict[str, "dict[str, Any]"])


@final
@attrs.define
class _ResponseUrl:
    channel: str
    message_ts: str | None
    uses: int = 0


@final
class FakeSlack(FakePlatform[SlackMessage]):
    """The control surface of a running fake. Made by `open_fake_slack`."""

    # In the place of https://slack.com/api.
    api_path = "/api"
    team_id, app_id, bot_id, bot_user_id = "T1", "A1", "B1", "UBOT"

    def __init__(
        self, *, token: str, app_token: str, signing_secret: str, ack_timeout: float, retry_delay: float
    ) -> None:
        super().__init__(token, rate_limited=_rate_limited, error_of=_error_of)
        self.app_token = app_token
        self.signing_secret = signing_secret
        self.reactions: CallLedger[tuple[str, str, str]] = CallLedger("reaction")
        self.deliveries = SlackDeliveries(signing_secret, ack_timeout, retry_delay, lambda: int(time.time()))
        self._channels: dict[str, _Channel] = {}
        self._response_urls: dict[str, _ResponseUrl] = {}
        self._next_ts = 100
        self._next_event = 1

    # What tests look at.

    @property
    def socket(self) -> FakeSlackSocket:
        return self.deliveries.socket

    async def wait_for_message(
        self,
        *,
        channel: str | None = None,
        containing: str = "",
        thread_ts: str | None = None,
        timeout: float = WAIT_SECONDS,
    ) -> SlackMessage:
        """Wait for the oldest fitting message that no earlier wait has returned. Compares the current text, with edits."""

        def fits(message: SlackMessage) -> bool:
            return (
                (channel is None or message.channel == channel)
                and (thread_ts is None or message.thread_ts == thread_ts)
                and containing in message.text
            )

        wanted = f"in {channel} (thread {thread_ts}) containing {containing!r}"
        return await self._claim(fits, wanted=wanted, timeout=timeout)

    # What people and the platform do.

    def add_channel(self, channel: str, name: str = "general", *, member: bool = True) -> None:
        """Add a public channel, with or without the bot as a member."""
        self._channels.setdefault(channel, _Channel(channel, "channel", name, member=member))

    def archive(self, channel: str) -> None:
        self._channels[channel].archived = True

    def use_request_url(self, url: str) -> None:
        """Deliver to this address (Events API, interactivity, commands) instead of over Socket Mode."""
        self.deliveries.request_url = url

    async def verify_request_url(self, challenge: str = "challenge-1") -> bool:
        """Perform the url_verification handshake, and return whether the app answers with the challenge."""
        body = msgspec.json.encode({"type": "url_verification", "token": "legacy", "challenge": challenge})
        callback = await self.deliveries.request(body, "application/json")
        return callback.status == 200 and challenge in callback.answer.decode("utf-8", "replace")

    def say(
        self,
        text: str,
        *,
        user: str = "U42",
        channel: str | None = None,
        thread_ts: str | None = None,
        mention: bool = False,
    ) -> str:
        """Write as a user; without `channel` in a direct message. Returns the message's ts.

        A mention in a channel arrives as two events, `message` and `app_mention`, as it does from Slack.
        """
        return self._say({}, text, user, channel, thread_ts, mention)

    def share(
        self,
        *files: dict[str, Any],
        text: str = "",
        user: str = "U42",
        channel: str | None = None,
        thread_ts: str | None = None,
        mention: bool = False,
    ) -> str:
        """Upload files as a user, with or without a text. Without `files`, the event does not describe the one file that was uploaded."""
        shared = {"files": list(files)} if files else {"x_files": ["F1"]}
        fields = {"subtype": "file_share", "upload": False, **shared}
        return self._say(fields, text, user, channel, thread_ts, mention)

    def _say(
        self,
        fields: Mapping[str, Any],
        text: str,
        user: str,
        channel: str | None,
        thread_ts: str | None,
        mention: bool,
    ) -> str:
        place = self._dm(user) if channel is None else self._place(channel)
        shown = f"<@{self.bot_user_id}> {text}".strip() if mention else text
        message = self._message(place, {"user": user, "text": shown, **fields}, thread_ts)
        self._event(message | {"channel": place.id, "channel_type": place.type, "event_ts": message["ts"]})
        if mention and place.type != "im":
            self._event(message | {"type": "app_mention", "channel": place.id, "event_ts": message["ts"]})
        return str(message["ts"])

    def use_command(self, command: str, text: str = "", *, user: str = "U42", channel: str | None = None) -> str:
        """Use a slash command as a user. Returns its response URL."""
        place = self._dm(user) if channel is None else self._place(channel)
        response_url = self._response_url(place.id, None)
        payload = {
            "token": "legacy",
            "team_id": self.team_id,
            "channel_id": place.id,
            "channel_name": place.name or "directmessage",
            "user_id": user,
            "user_name": user.lower(),
            "command": command,
            "text": text,
            "api_app_id": self.app_id,
            "response_url": response_url,
            "trigger_id": f"trigger-{self._next_event}",
        }
        self.deliveries.add("slash_commands", payload)
        return response_url

    def click(self, message: SlackMessage, button: str, *, user: str = "U42") -> str:
        """Press the button whose label, action id or value is `button`, as a user. Returns the response URL."""
        pressed = [b for b in message.buttons if button in (b["text"]["text"], b.get("action_id"), b.get("value"))]
        assert pressed, f"message {message.ts} has no button {button!r}: {message.buttons}"
        response_url = self._response_url(message.channel, message.ts)
        container = {"type": "message", "message_ts": message.ts, "channel_id": message.channel, "is_ephemeral": False}
        payload = {
            "type": "block_actions",
            "user": {"id": user, "username": user.lower(), "team_id": self.team_id},
            "api_app_id": self.app_id,
            "token": "legacy",
            "container": container,
            "trigger_id": f"trigger-{self._next_event}",
            "team": {"id": self.team_id, "domain": "fake"},
            "channel": {"id": message.channel, "name": self._channels[message.channel].name},
            "message": self._channels[message.channel].messages[message.ts],
            "response_url": response_url,
            "actions": [{**pressed[0], "block_id": "b", "action_ts": self._ts()}],
        }
        self.deliveries.add("interactive", payload)
        return response_url

    # The API.

    async def handle(self, request: FakeRequest) -> FakeReply:
        """Answer a Web API method, or a response URL."""
        if request.path.startswith("/actions/"):
            return self._respond(request)
        name = request.path.removeprefix("/api/")
        raw: Any = request.json() if "json" in request.headers.get("content-type", "") else request.form()
        params: dict[str, Any] = {**request.query}
        if isinstance(raw, dict):
            params |= msgspec.convert(raw, dict[str, Any])
        method = _METHODS.get(name)

        async def act() -> FakeReply:
            await trio.lowlevel.checkpoint()
            try:
                if method is None:
                    raise SlackRefusal("unknown_method", req_method=name)
                self._authenticate(name, request, params)
                if raw is None:
                    raise SlackRefusal("invalid_json")
                return FakeReply.of({"ok": True, **method(self, params)})
            except SlackRefusal as refusal:
                return FakeReply.of(refusal.body)

        recorded = {key: value for key, value in params.items() if key != "token"}
        return await self.handler.handle(name, recorded, act)

    def _authenticate(self, method: str, request: FakeRequest, params: Mapping[str, Any]) -> None:
        given = request.headers.get("authorization", "").removeprefix("Bearer ") or str(params.get("token") or "")
        if not given:
            raise SlackRefusal("not_authed")
        if given not in (self.token, self.app_token):
            raise SlackRefusal("invalid_auth")
        if (given == self.app_token) is not (method == "apps.connections.open"):
            raise SlackRefusal("not_allowed_token_type")

    def _auth_test(self, params: Mapping[str, Any]) -> dict[str, Any]:
        return {
            "url": "https://fake.slack.com/",
            "team": "Fake",
            "user": "hermes",
            "team_id": self.team_id,
            "user_id": self.bot_user_id,
            "bot_id": self.bot_id,
        }

    def _connections_open(self, params: Mapping[str, Any]) -> dict[str, Any]:
        return {"url": f"{self.server.socket_url}/link/?ticket={self.socket.ticket()}&app_id={self.app_id}"}

    def _post_message(self, params: Mapping[str, Any]) -> dict[str, Any]:
        place = self._writable(params)
        text, blocks = check_content(params, limit=None)
        return self._publish(place, text, blocks, self._thread(place, params))

    def _post_ephemeral(self, params: Mapping[str, Any]) -> dict[str, Any]:
        place = self._writable(params)
        text, blocks = check_content(params, limit=None)
        if not params.get("user"):
            raise SlackRefusal("user_not_in_channel")
        sent = self._publish(place, text, blocks, self._thread(place, params), ephemeral_for=str(params["user"]))
        return {"message_ts": sent["ts"]}

    def _update(self, params: Mapping[str, Any]) -> dict[str, Any]:
        place = self._writable(params)
        text, blocks = check_content(params, limit=UPDATE_TEXT_LIMIT)
        message = self._change(place.id, str(params.get("ts") or ""), text, blocks)
        return {"channel": place.id, "ts": message["ts"], "text": text, "message": message}

    def _delete(self, params: Mapping[str, Any]) -> dict[str, Any]:
        place = self._writable(params)
        self._own(place, str(params.get("ts") or ""), "cant_delete_message")
        self._remove(place, str(params["ts"]))
        return {"channel": place.id, "ts": params["ts"]}

    def _conversations_open(self, params: Mapping[str, Any]) -> dict[str, Any]:
        users: Any = params.get("users") or []
        listed = msgspec.convert(users, list[str]) if isinstance(users, list) else str(users).split(",")
        if len(listed) != 1:
            raise SlackRefusal("users_list_not_supplied" if not listed else "too_many_users")
        return {"channel": {"id": self._dm(listed[0]).id}}

    def _conversations_info(self, params: Mapping[str, Any]) -> dict[str, Any]:
        place = self._known(params)
        described = {"id": place.id, "name": place.name, "is_im": place.type == "im", "is_archived": place.archived}
        return {"channel": described | {"is_member": place.member}}

    def _users_info(self, params: Mapping[str, Any]) -> dict[str, Any]:
        user = str(params.get("user") or "")
        if not user.startswith(("U", "W")):
            raise SlackRefusal("user_not_found")
        return {"user": {"id": user, "name": user.lower(), "real_name": f"Person {user}", "is_bot": False}}

    def _reactions_add(self, params: Mapping[str, Any]) -> dict[str, Any]:
        place = self._writable(params)
        ts, name = str(params.get("timestamp") or ""), str(params.get("name") or "")
        if ts not in place.messages:
            raise SlackRefusal("message_not_found")
        if (place.id, ts, name) in self.reactions:
            raise SlackRefusal("already_reacted")
        self.reactions.append((place.id, ts, name))
        return {}

    def _respond(self, request: FakeRequest) -> FakeReply:
        target = self._response_urls.get(request.path)
        if target is None or target.uses >= RESPONSE_URL_USES:
            return FakeReply(404, b"used_url")
        target.uses += 1
        raw: Any = request.json()
        params = msgspec.convert(raw, dict[str, Any]) if isinstance(raw, dict) else {}
        place = self._channels[target.channel]
        try:
            if params.get("delete_original") and target.message_ts is not None:
                self._remove(place, target.message_ts)
            elif params.get("replace_original") and target.message_ts is not None:
                self._change(place.id, target.message_ts, *check_content(params, limit=POST_TEXT_LIMIT))
            else:
                text, blocks = check_content(params, limit=None)
                hidden = None if params.get("response_type") == "in_channel" else (place.user or "someone")
                self._publish(place, text, blocks, params.get("thread_ts"), ephemeral_for=hidden)
        except SlackRefusal as refusal:
            return FakeReply(400, refusal.error.encode())
        return FakeReply(200, b"ok")

    # The inside.

    def _ts(self) -> str:
        self._next_ts += 100
        return f"1700000000.{self._next_ts:06d}"

    def _dm(self, user: str) -> _Channel:
        return self._channels.setdefault(f"D{user[1:]}", _Channel(f"D{user[1:]}", "im", user=user))

    def _place(self, channel: str) -> _Channel:
        self.add_channel(channel)
        return self._channels[channel]

    def _known(self, params: Mapping[str, Any]) -> _Channel:
        wanted = str(params.get("channel") or "")
        if wanted.startswith("U"):
            return self._dm(wanted)
        if wanted not in self._channels:
            raise SlackRefusal("channel_not_found")
        return self._channels[wanted]

    def _writable(self, params: Mapping[str, Any]) -> _Channel:
        place = self._known(params)
        if place.archived:
            raise SlackRefusal("is_archived")
        if not place.member:
            raise SlackRefusal("not_in_channel")
        return place

    def _thread(self, place: _Channel, params: Mapping[str, Any]) -> str | None:
        thread_ts = params.get("thread_ts")
        if thread_ts is None:
            return None
        if thread_ts not in place.messages:
            raise SlackRefusal("cannot_reply_to_message")
        return str(thread_ts)

    def _message(self, place: _Channel, fields: Mapping[str, Any], thread_ts: str | None) -> dict[str, Any]:
        message: dict[str, Any] = {"type": "message", "ts": self._ts(), "team": self.team_id, **fields}
        if thread_ts is not None:
            message["thread_ts"] = thread_ts
        place.messages[message["ts"]] = message
        return message

    def _publish(
        self,
        place: _Channel,
        text: str,
        blocks: list[dict[str, Any]],
        thread_ts: str | None,
        *,
        ephemeral_for: str | None = None,
    ) -> dict[str, Any]:
        shown = text[:POST_TEXT_LIMIT]
        author = {"user": self.bot_user_id, "bot_id": self.bot_id, "app_id": self.app_id}
        message = self._message(place, {**author, "text": shown, "blocks": blocks}, thread_ts)
        self.messages.append(
            SlackMessage(
                channel=place.id,
                ts=message["ts"],
                text=shown,
                thread_ts=thread_ts,
                blocks=blocks,
                ephemeral_for=ephemeral_for,
                truncated=len(text) > POST_TEXT_LIMIT,
                versions=[shown],
            )
        )
        if ephemeral_for is None:
            # Slack also sends an app its own messages, which the app must ignore.
            self._event(message | {"channel": place.id, "channel_type": place.type, "event_ts": message["ts"]})
        return {"channel": place.id, "ts": message["ts"], "message": message}

    def _own(self, place: _Channel, ts: str, refusal: str) -> dict[str, Any]:
        message = place.messages.get(ts)
        if message is None:
            raise SlackRefusal("message_not_found")
        if message.get("bot_id") != self.bot_id:
            raise SlackRefusal(refusal)
        return message

    def _change(self, channel: str, ts: str, text: str, blocks: list[dict[str, Any]]) -> dict[str, Any]:
        message = self._own(self._channels[channel], ts, "cant_update_message")
        shown = next(m for m in self.messages if m.channel == channel and m.ts == ts)
        message |= {"text": text, "blocks": blocks}
        shown.text, shown.blocks = text, blocks
        shown.versions.append(text)
        self.messages.touch()
        return message

    def _remove(self, place: _Channel, ts: str) -> None:
        place.messages.pop(ts, None)
        for message in self.messages:
            message.deleted = message.deleted or (message.channel == place.id and message.ts == ts)
        self.messages.touch()

    def _response_url(self, channel: str, message_ts: str | None) -> str:
        path = f"/actions/{self.team_id}/{len(self._response_urls) + 1}/secret"
        self._response_urls[path] = _ResponseUrl(channel, message_ts)
        return f"{self.server.url}{path}"

    def _event(self, event: dict[str, Any]) -> None:
        event_id = f"Ev{self._next_event:08d}"
        self._next_event += 1
        payload = {
            "token": "legacy",
            "team_id": self.team_id,
            "api_app_id": self.app_id,
            "event": event,
            "type": "event_callback",
            "event_id": event_id,
            "event_time": 1_700_000_000,
            "authorizations": [{"team_id": self.team_id, "user_id": self.bot_user_id, "is_bot": True}],
        }
        self.deliveries.add("events_api", payload)


_METHODS: dict[str, Callable[[FakeSlack, Mapping[str, Any]], dict[str, Any]]] = {
    "auth.test": FakeSlack._auth_test,
    "apps.connections.open": FakeSlack._connections_open,
    "chat.postMessage": FakeSlack._post_message,
    "chat.postEphemeral": FakeSlack._post_ephemeral,
    "chat.update": FakeSlack._update,
    "chat.delete": FakeSlack._delete,
    "conversations.open": FakeSlack._conversations_open,
    "conversations.info": FakeSlack._conversations_info,
    "users.info": FakeSlack._users_info,
    "reactions.add": FakeSlack._reactions_add,
}


def _rate_limited(fault: RateLimited) -> FakeReply:
    headers = {"retry-after": str(math.ceil(fault.retry_after))}
    return FakeReply.of({"ok": False, "error": "ratelimited"}, status=429, headers=headers)


def _error_of(reply: FakeReply) -> str | None:
    return msgspec.json.decode(reply.body).get("error")


@asynccontextmanager
async def open_fake_slack(
    *,
    token: str = "xoxb-fake-bot-token",
    app_token: str = "xapp-fake-app-token",
    signing_secret: str = "fake-signing-secret",
    ack_timeout: float = 3.0,
    retry_delay: float = 0.05,
) -> AsyncGenerator[FakeSlack, None]:
    """Run a fake until the block ends; then its server and connections are closed and its deliveries have ended.

    An event that is not acknowledged within `ack_timeout` seconds is delivered again after `retry_delay`.
    """
    fake = FakeSlack(
        token=token,
        app_token=app_token,
        signing_secret=signing_secret,
        ack_timeout=ack_timeout,
        retry_delay=retry_delay,
    )
    async with open_loopback_server(fake.handle, fake.socket.serve) as server, trio.open_nursery() as nursery:
        fake.attach(server)
        nursery.start_soon(fake.deliveries.run)
        yield fake
        nursery.cancel_scope.cancel()
