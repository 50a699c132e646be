"""Slack's Web API: one method for each API method, and Slack's error codes as error kinds.

Its owner enters `SlackClient`; leaving it closes its connections. Events arrive over `socket` or at an HTTP endpoint.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, final

import msgspec

from hermes_trio.adapters.wire.http import CALL_TIMEOUT, HttpLink, PlatformClient, PlatformResponse
from hermes_trio.messaging.errors import Missing, PlatformError, PlatformErrorKind, Redaction, require_token

from .types import Identity

API_URL = "https://slack.com/api"

KINDS: Mapping[PlatformErrorKind, frozenset[str]] = {
    PlatformErrorKind.UNAUTHORIZED: frozenset(
        {
            "not_authed",
            "invalid_auth",
            "account_inactive",
            "token_revoked",
            "token_expired",
            "not_allowed_token_type",
            "org_login_required",
        }
    ),
    PlatformErrorKind.FORBIDDEN: frozenset(
        {
            "access_denied",
            "not_in_channel",
            "is_archived",
            "missing_scope",
            "no_permission",
            "cant_update_message",
            "cant_delete_message",
            "edit_window_closed",
            "ekm_access_denied",
            "cannot_dm_bot",
            "user_is_restricted",
            "messages_tab_disabled",
            "team_access_not_granted",
        }
    ),
    PlatformErrorKind.TOO_LONG: frozenset({"msg_too_long", "msg_blocks_too_long"}),
    PlatformErrorKind.BAD_FORMAT: frozenset(
        {
            "no_text",
            "invalid_blocks",
            "invalid_blocks_format",
            "invalid_arguments",
            "invalid_arg_name",
            "invalid_json",
            "json_not_object",
            "invalid_form_data",
            "invalid_post_type",
            "too_many_attachments",
        }
    ),
    PlatformErrorKind.RATE_LIMITED: frozenset({"ratelimited", "rate_limited", "message_limit_exceeded"}),
    PlatformErrorKind.TRANSIENT: frozenset(
        {"internal_error", "fatal_error", "service_unavailable", "request_timeout", "team_added_to_org"}
    ),
}
MISSING: Mapping[str, Missing] = {
    "channel_not_found": Missing.CHAT,
    "message_not_found": Missing.MESSAGE,
    "cannot_reply_to_message": Missing.THREAD,
    "thread_not_found": Missing.THREAD,
    "user_not_found": Missing.OTHER,
    "users_not_found": Missing.OTHER,
}

Blocks = Sequence[Mapping[str, Any]]


@final
class SlackClient(PlatformClient):
    """Calls of one app. Every method raises `PlatformError`; cancelling one closes the connection it was using.

    `token` is the bot token (xoxb), `app_token` the app-level token (xapp) that Socket Mode needs.
    """

    def __init__(
        self,
        base_url: str,
        token: str,
        *,
        app_token: str = "",
        timeout: float = CALL_TIMEOUT,
        proxy: str | None = None,
    ) -> None:
        self._token = require_token("Slack bot token", token)
        self._app_token = app_token
        self._redaction = Redaction((token, app_token))
        super().__init__(HttpLink(base_url, redaction=self._redaction, timeout=timeout, proxy=proxy))
        self.proxy = proxy

    async def auth_test(self) -> Identity:
        """Return the owner of the token. Raises UNAUTHORIZED if the token is wrong."""
        return _read("auth.test", await self._call("auth.test", {}), Identity)

    async def open_connection(self) -> str:
        """Return a single-use WebSocket address for Socket Mode (apps.connections.open). It contains a ticket and must not be shown."""
        app_token = require_token("Slack app-level token", self._app_token)
        body = await self._call("apps.connections.open", {}, token=app_token)
        return str(body.get("url") or "")

    async def post_message(
        self, channel: str, text: str, *, thread_ts: str | None = None, blocks: Blocks | None = None
    ) -> str:
        """Send a message and return its ts. Slack cuts text after 40,000 characters without an error.

        With `blocks` the text is what notifications show.
        """
        params: dict[str, Any] = {"channel": channel, "text": text, "unfurl_links": False}
        if thread_ts is not None:
            params["thread_ts"] = thread_ts
        if blocks is not None:
            params["blocks"] = blocks
        return str((await self._call("chat.postMessage", params))["ts"])

    async def post_ephemeral(self, channel: str, user: str, text: str, *, thread_ts: str | None = None) -> None:
        """Show a message to one person only."""
        params: dict[str, Any] = {"channel": channel, "user": user, "text": text}
        if thread_ts is not None:
            params["thread_ts"] = thread_ts
        await self._call("chat.postEphemeral", params)

    async def update(self, channel: str, ts: str, text: str, *, blocks: Blocks | None = None) -> None:
        """Replace a message's text (at most 4,000 characters, unlike posting) and blocks."""
        await self._call("chat.update", {"channel": channel, "ts": ts, "text": text, "blocks": list(blocks or ())})

    async def delete(self, channel: str, ts: str) -> None:
        await self._call("chat.delete", {"channel": channel, "ts": ts})

    async def open_conversation(self, user: str) -> str:
        """Return the id of the direct-message channel with a person."""
        body = await self._call("conversations.open", {"users": user})
        return str(body["channel"]["id"])

    async def channel_name(self, channel: str) -> str:
        """Return the channel's name, empty for direct messages."""
        body = await self._call("conversations.info", {"channel": channel})
        return str(body["channel"].get("name") or "")

    async def user_name(self, user: str) -> str:
        """Return a person's name."""
        body = await self._call("users.info", {"user": user})
        return str(body["user"].get("real_name") or body["user"].get("name") or user)

    async def add_reaction(self, channel: str, ts: str, name: str) -> bool:
        """Add an emoji to a message. Return whether that changed anything."""
        try:
            await self._call("reactions.add", {"channel": channel, "timestamp": ts, "name": name})
        except PlatformError as error:
            if error.code == "already_reacted":
                return False
            raise
        return True

    async def respond(
        self,
        response_url: str,
        text: str,
        *,
        thread_ts: str | None = None,
        blocks: Blocks | None = None,
        replace_original: bool = False,
        in_channel: bool = False,
    ) -> None:
        """Respond to a click or a command at its response URL: five times at most, within 30 minutes."""
        params: dict[str, Any] = {
            "text": text,
            "replace_original": replace_original,
            "response_type": "in_channel" if in_channel else "ephemeral",
        }
        if thread_ts is not None:
            params["thread_ts"] = thread_ts
        if blocks is not None:
            params["blocks"] = blocks
        try:
            answer = await self._link.call("POST", response_url, json=params, absolute=True)
        except PlatformError as error:
            # The address is a credential, and the link names what it called.
            hidden = error.message.replace(response_url, "response_url")
            raise PlatformError(error.kind, hidden, ambiguous=error.ambiguous) from None
        if answer.status >= 300:
            raise _response_url_refused(answer)

    async def _call(self, method: str, params: Mapping[str, Any], *, token: str | None = None) -> dict[str, Any]:
        headers = {"authorization": f"Bearer {self._token if token is None else token}"}
        answer = await self._link.call("POST", f"/{method}", json=params, headers=headers)
        raw = answer.decode()
        body: dict[str, Any] = msgspec.convert(raw, dict[str, Any]) if isinstance(raw, dict) else {}
        if body.get("ok") is True:
            return body
        raise self._refused(method, answer, body)

    def _refused(self, method: str, answer: PlatformResponse, body: Mapping[str, Any]) -> PlatformError:
        word = str(body.get("error") or "")
        message = f"{method}: {self._redaction(word) or f'HTTP {answer.status}'}"
        details = body.get("response_metadata")
        if isinstance(details, dict):
            notes: Any = msgspec.convert(details, dict[str, Any]).get("messages") or []
            message += "".join(f": {note}" for note in msgspec.convert(notes, list[str]))
        if word == "missing_scope":
            message += f": the app needs the scope {body.get('needed')}"
        if answer.status == 429 or word in KINDS[PlatformErrorKind.RATE_LIMITED]:
            return PlatformError(
                PlatformErrorKind.RATE_LIMITED, message, retry_after=_retry_after(answer), code=word or 429
            )
        if word in MISSING:
            return PlatformError(PlatformErrorKind.NOT_FOUND, message, missing=MISSING[word], code=word)
        kind = next((kind for kind, words in KINDS.items() if word in words), None)
        if kind is None and word.startswith("restricted_action"):
            kind = PlatformErrorKind.FORBIDDEN
        if kind is None and (answer.status >= 500 or not word):
            kind = PlatformErrorKind.TRANSIENT
        if kind is PlatformErrorKind.TRANSIENT:
            return PlatformError(kind, message, ambiguous=True, code=word or answer.status)
        if kind is None:
            return PlatformError(PlatformErrorKind.UNKNOWN, message, permanent=True, code=word)
        return PlatformError(kind, message, code=word)


def _retry_after(answer: PlatformResponse) -> float:
    text = answer.headers.get("retry-after", "")
    return float(text) if text.isdigit() else 1.0


def _response_url_refused(answer: PlatformResponse) -> PlatformError:
    word = answer.body[:100].decode("utf-8", "replace")
    message = f"response_url: {word} (HTTP {answer.status})"
    match answer.status:
        case 404:
            return PlatformError(PlatformErrorKind.NOT_FOUND, message, missing=Missing.OTHER, code=word)
        case 429:
            return PlatformError(PlatformErrorKind.RATE_LIMITED, message, retry_after=_retry_after(answer), code=429)
        case status if status >= 500:
            return PlatformError(PlatformErrorKind.TRANSIENT, message, ambiguous=True, code=status)
        case _:
            return PlatformError(PlatformErrorKind.BAD_FORMAT, message, code=word)


def _read(method: str, body: Mapping[str, Any], kind: type[Identity]) -> Identity:
    try:
        return msgspec.convert(body, kind)
    except msgspec.ValidationError as error:
        raise PlatformError(PlatformErrorKind.UNKNOWN, f"{method}: the answer cannot be read: {error}") from None
