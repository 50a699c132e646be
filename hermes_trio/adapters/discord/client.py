"""Discord's REST API v10: one method for each operation, with its rate limits.

Its owner enters `DiscordClient`; leaving it closes its connections. Events arrive over the Gateway (`gateway`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import Any, TypeVar, final

import msgspec

from hermes_trio.adapters.wire.http import CALL_TIMEOUT, HttpLink, PlatformClient, PlatformResponse
from hermes_trio.messaging.errors import Missing, PlatformError, PlatformErrorKind, Redaction, require_token

from .rate_limits import RateLimits
from .types import Channel, GatewayBot, Interaction, Message, User

API_URL = "https://discord.com/api/v10"
# A call whose bucket resets within this time waits; a longer wait is the sender's to plan.
RATE_LIMIT_MAX_WAIT = 5.0
EPHEMERAL = 1 << 6
# A model's text mentions no one, except the author of the message that is replied to.
NO_MENTIONS: Mapping[str, Any] = {"parse": [], "replied_user": True}

T = TypeVar("T")
Components = Sequence[Mapping[str, Any]]


class InteractionResponse(IntEnum):
    """The first response to an interaction, within three seconds."""

    REPLY = 4
    REPLY_LATER = 5
    UPDATE_LATER = 6
    UPDATE = 7


@final
class DiscordClient(PlatformClient):
    """Calls of one bot. Every method raises `PlatformError`; cancelling one closes the connection it was using."""

    def __init__(
        self,
        base_url: str,
        token: str,
        *,
        timeout: float = CALL_TIMEOUT,
        proxy: str | None = None,
        max_wait: float = RATE_LIMIT_MAX_WAIT,
    ) -> None:
        self.token = require_token("Discord bot token", token)
        self.redaction = Redaction((token,))
        headers = {"user-agent": "DiscordBot (hermes-trio, 1)"}
        self._authorization = {"authorization": f"Bot {token}"}
        self._limits = RateLimits(max_wait)
        super().__init__(HttpLink(base_url, redaction=self.redaction, headers=headers, timeout=timeout, proxy=proxy))
        self.proxy = proxy

    async def get_current_user(self) -> User:
        """Return the bot itself. Raises UNAUTHORIZED if the token is wrong."""
        return await self._call("get_current_user", "GET", "/users/@me", User)

    async def get_gateway_bot(self) -> GatewayBot:
        """Return the address of the Gateway, and how many sessions may still be started."""
        return await self._call("get_gateway_bot", "GET", "/gateway/bot", GatewayBot)

    async def get_channel(self, channel_id: str) -> Channel:
        return await self._call("get_channel", "GET", f"/channels/{channel_id}", Channel, resource=channel_id)

    async def create_dm(self, user_id: str) -> Channel:
        """Return the direct-message channel with a person."""
        return await self._call("create_dm", "POST", "/users/@me/channels", Channel, body={"recipient_id": user_id})

    async def create_message(
        self,
        channel_id: str,
        content: str,
        *,
        reply_to: str | None = None,
        components: Components | None = None,
        nonce: str | None = None,
    ) -> Message:
        """Send at most 2000 characters. A deleted reply target does not fail the message.

        With a `nonce` (at most 25 characters) a repeated call returns the first message instead of sending another, as long as Discord remembers the
        nonce (some minutes).
        """
        body: dict[str, Any] = {"content": content, "allowed_mentions": NO_MENTIONS}
        if reply_to is not None:
            body["message_reference"] = {"message_id": reply_to, "fail_if_not_exists": False}
        if components is not None:
            body["components"] = components
        if nonce is not None:
            body |= {"nonce": nonce, "enforce_nonce": True}
        path = f"/channels/{channel_id}/messages"
        return await self._call("create_message", "POST", path, Message, body=body, resource=channel_id)

    async def edit_message(
        self, channel_id: str, message_id: str, content: str | None = None, *, components: Components | None = None
    ) -> Message:
        """Replace a message's text, its components, or both."""
        body: dict[str, Any] = {"allowed_mentions": NO_MENTIONS}
        if content is not None:
            body["content"] = content
        if components is not None:
            body["components"] = components
        path = f"/channels/{channel_id}/messages/{message_id}"
        return await self._call("edit_message", "PATCH", path, Message, body=body, resource=channel_id)

    async def delete_message(self, channel_id: str, message_id: str) -> None:
        path = f"/channels/{channel_id}/messages/{message_id}"
        await self._call("delete_message", "DELETE", path, None, resource=channel_id)

    async def trigger_typing(self, channel_id: str) -> None:
        """Show for ten seconds, or until the next message, that the bot is busy."""
        await self._call("trigger_typing", "POST", f"/channels/{channel_id}/typing", None, resource=channel_id)

    async def start_thread(
        self, channel_id: str, name: str, *, message_id: str | None = None, archive_after_minutes: int = 1440
    ) -> Channel:
        """Create a public thread, from a message or on its own."""
        body: dict[str, Any] = {"name": name[:100], "auto_archive_duration": archive_after_minutes}
        if message_id is None:
            path, operation = f"/channels/{channel_id}/threads", "start_thread"
            body["type"] = 11
        else:
            path, operation = f"/channels/{channel_id}/messages/{message_id}/threads", "start_thread_from_message"
        return await self._call(operation, "POST", path, Channel, body=body, resource=channel_id)

    async def respond(
        self,
        interaction: Interaction,
        response: InteractionResponse,
        content: str | None = None,
        *,
        components: Components | None = None,
        ephemeral: bool = False,
    ) -> None:
        """Send the first response to an interaction. Raises NOT_FOUND after three seconds."""
        data: dict[str, Any] = {"allowed_mentions": NO_MENTIONS}
        if content is not None:
            data["content"] = content
        if components is not None:
            data["components"] = components
        if ephemeral:
            data["flags"] = EPHEMERAL
        path = f"/interactions/{interaction.id}/{interaction.token}/callback"
        body = {"type": int(response), "data": data}
        await self._interaction_call("create_interaction_response", "POST", path, None, body, interaction)

    async def edit_response(
        self, interaction: Interaction, content: str, *, components: Components | None = None
    ) -> Message:
        """Replace (or, after REPLY_LATER, write) the first response; within 15 minutes after the interaction."""
        body: dict[str, Any] = {"content": content, "allowed_mentions": NO_MENTIONS}
        if components is not None:
            body["components"] = components
        path = f"/webhooks/{interaction.application_id}/{interaction.token}/messages/@original"
        return await self._interaction_call("edit_original_response", "PATCH", path, Message, body, interaction)

    async def follow_up(self, interaction: Interaction, content: str, *, ephemeral: bool = False) -> Message:
        """Send another message in response to an interaction; within 15 minutes after the interaction."""
        body: dict[str, Any] = {"content": content, "allowed_mentions": NO_MENTIONS}
        if ephemeral:
            body["flags"] = EPHEMERAL
        path = f"/webhooks/{interaction.application_id}/{interaction.token}"
        return await self._interaction_call("create_followup", "POST", path, Message, body, interaction)

    async def overwrite_commands(
        self, application_id: str, commands: Sequence[Mapping[str, Any]], *, guild_id: str | None = None
    ) -> None:
        """Set the bot's slash commands, everywhere or in one guild."""
        scope = "" if guild_id is None else f"/guilds/{guild_id}"
        path = f"/applications/{application_id}{scope}/commands"
        await self._call("overwrite_commands", "PUT", path, None, body=list(commands), resource=guild_id or "")

    async def _interaction_call(
        self, operation: str, method: str, path: str, result: type[T] | None, body: Any, interaction: Interaction
    ) -> T:
        # The interaction's own token is the credential here, and part of the path.
        hidden = Redaction((interaction.token,))
        try:
            return await self._call(
                operation, method, path, result, body=body, resource=interaction.token, authorized=False
            )
        except PlatformError as error:
            error.message = hidden(error.message)
            error.args = (error.message,)
            raise

    async def _call(
        self,
        operation: str,
        method: str,
        path: str,
        result: type[T] | None,
        *,
        body: Any = None,
        resource: str = "",
        authorized: bool = True,
    ) -> T:
        await self._limits.admit(operation, resource)
        headers = self._authorization if authorized else None
        answer = await self._link.call(method, path, json=body, headers=headers)
        self._limits.learn(operation, resource, answer.headers)
        if answer.status >= 300:
            raise self._refused(operation, resource, answer)
        if result is None:
            # Callers that ask for no result are typed to return None.
            return None  # pyright: ignore[reportReturnType]
        try:
            return msgspec.json.decode(answer.body, type=result)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            message = f"{operation}: the answer cannot be read: {error}"
            raise PlatformError(PlatformErrorKind.UNKNOWN, message, ambiguous=True, permanent=False) from None

    def _refused(self, operation: str, resource: str, answer: PlatformResponse) -> PlatformError:
        raw = answer.decode()
        body: dict[str, Any] = msgspec.convert(raw, dict[str, Any]) if isinstance(raw, dict) else {}
        code = body.get("code") if isinstance(body.get("code"), int) else answer.status
        text = self.redaction(str(body.get("message") or f"HTTP {answer.status}"))
        message = f"{operation}: {text} ({code or answer.status})"
        if "errors" in body:
            message += f": {'; '.join(_form_errors(body['errors'], ''))}"
        match answer.status:
            case 429:
                retry_after = _retry_after(body, answer)
                everywhere = bool(body.get("global")) or answer.headers.get("x-ratelimit-scope") == "global"
                self._limits.refused(operation, resource, retry_after, everywhere=everywhere)
                return PlatformError(PlatformErrorKind.RATE_LIMITED, message, retry_after=retry_after, code=429)
            case 401:
                return PlatformError(PlatformErrorKind.UNAUTHORIZED, message, code=401)
            case 403:
                return PlatformError(PlatformErrorKind.FORBIDDEN, message, code=code)
            case 404:
                missing = {10003: Missing.CHAT, 10008: Missing.MESSAGE}.get(code or 0, Missing.OTHER)
                return PlatformError(PlatformErrorKind.NOT_FOUND, message, missing=missing, code=code)
            case status if status >= 500:
                return PlatformError(PlatformErrorKind.TRANSIENT, message, ambiguous=True, code=status)
            case 400 if code in (50035, 50006, 50109):
                too_long = "BASE_TYPE_MAX_LENGTH" in message and "content" in message
                return PlatformError(
                    PlatformErrorKind.TOO_LONG if too_long else PlatformErrorKind.BAD_FORMAT, message, code=code
                )
            case _:
                return PlatformError(PlatformErrorKind.UNKNOWN, message, permanent=True, code=code)


def _retry_after(body: Mapping[str, Any], answer: PlatformResponse) -> float:
    try:
        return float(body.get("retry_after") or answer.headers.get("retry-after") or 1.0)
    except (TypeError, ValueError):
        return 1.0


def _form_errors(errors: Any, path: str) -> list[str]:
    """Return each of Discord's nested form errors with its path into the body."""
    if not isinstance(errors, dict):
        return []
    found: list[str] = []
    for key, value in msgspec.convert(errors, dict[str, Any]).items():
        if key == "_errors" and isinstance(value, list):
            listed = msgspec.convert(value, list[dict[str, Any]])
            found.extend(f"{path or 'body'}: {entry.get('message')} [{entry.get('code')}]" for entry in listed)
        else:
            found.extend(_form_errors(value, f"{path}.{key}" if path else key))
    return found
