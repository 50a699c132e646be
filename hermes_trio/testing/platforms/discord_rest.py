"""How Discord's REST API refuses: JSON error codes, form errors, and rate-limit buckets with their headers."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any, final

import attrs
import msgspec
import trio

from .faults import RateLimited
from .server import FakeReply

CONTENT_LIMIT = 2000
ACTION_ROW, BUTTON, LINK_STYLE = 1, 2, 5
COMMAND_NAME = re.compile(r"[-_'\w]{1,32}")
EPHEMERAL = 1 << 6


@final
class DiscordRefusal(Exception):
    """An answer that is an error, with Discord's JSON error code."""

    def __init__(self, status: int, code: int, message: str, errors: Mapping[str, Any] | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.body: dict[str, Any] = {"message": message, "code": code}
        if errors is not None:
            self.body["errors"] = errors

    def reply(self) -> FakeReply:
        return FakeReply.of(self.body, status=self.status)


def form_error(path: str, code: str, message: str) -> DiscordRefusal:
    """ "Invalid Form Body" with the one error at a dotted path into the body."""
    errors: dict[str, Any] = {"_errors": [{"code": code, "message": message}]}
    for part in reversed(path.split(".")):
        errors = {part: errors}
    return DiscordRefusal(400, 50035, "Invalid Form Body", errors)


def rate_limited(fault: RateLimited, bucket: str = "scripted") -> FakeReply:
    """Return the answer 429, for one bucket or for the whole bot."""
    body = {"message": "You are being rate limited.", "retry_after": fault.retry_after, "global": fault.everywhere}
    headers = {
        "retry-after": str(math.ceil(fault.retry_after)),
        "x-ratelimit-scope": "global" if fault.everywhere else "user",
    }
    if fault.everywhere:
        headers["x-ratelimit-global"] = "true"
    else:
        headers |= {"x-ratelimit-bucket": bucket, "x-ratelimit-reset-after": f"{fault.retry_after:.3f}"}
    return FakeReply.of(body, status=429, headers=headers)


@final
@attrs.define
class Bucket:
    """`limit` calls in each window of `per` seconds, counted for each channel (or other top-level resource)."""

    name: str
    limit: int
    per: float
    _windows: dict[str, tuple[float, int]] = attrs.field(factory=dict[str, tuple[float, int]])

    def take(self, resource: str) -> tuple[dict[str, str], FakeReply | None]:
        """Return the headers of this call's answer, and the 429 that it is answered with if the bucket is empty."""
        now = trio.current_time()
        end, used = self._windows.get(resource, (0.0, 0))
        if now >= end:
            end, used = now + self.per, 0
        if used >= self.limit:
            return {}, rate_limited(RateLimited(round(end - now, 3)), self.name)
        self._windows[resource] = (end, used + 1)
        headers = {
            "x-ratelimit-limit": str(self.limit),
            "x-ratelimit-remaining": str(self.limit - used - 1),
            "x-ratelimit-reset-after": f"{end - now:.3f}",
            "x-ratelimit-bucket": self.name,
        }
        return headers, None


def check_message(body: Mapping[str, Any], *, partial: bool = False) -> None:
    """Check what create and edit message check: content or something else to show, its length, and the components."""
    content = body.get("content")
    if content is not None and not isinstance(content, str):
        raise form_error("content", "BASE_TYPE_STRING", "Only string types are allowed here.")
    if len(content or "") > CONTENT_LIMIT:
        raise form_error("content", "BASE_TYPE_MAX_LENGTH", f"Must be {CONTENT_LIMIT} or fewer in length.")
    shown = (content or "").strip() or body.get("embeds") or body.get("components") or body.get("sticker_ids")
    if not partial and not shown:
        raise DiscordRefusal(400, 50006, "Cannot send an empty message")
    if body.get("components"):
        _check_components(msgspec.convert(body["components"], list[dict[str, Any]]))


def _check_components(rows: list[dict[str, Any]]) -> None:
    if len(rows) > 5:
        raise form_error("components", "BASE_TYPE_BAD_LENGTH", "Must be between 1 and 5 in length.")
    seen: set[str] = set()
    for r, row in enumerate(rows):
        buttons = msgspec.convert(row.get("components") or [], list[dict[str, Any]])
        if row.get("type") != ACTION_ROW:
            raise form_error(f"components.{r}.type", "BASE_TYPE_CHOICES", 'Value of field "type" must be one of (1,).')
        if not 1 <= len(buttons) <= 5:
            raise form_error(f"components.{r}.components", "BASE_TYPE_BAD_LENGTH", "Must be between 1 and 5 in length.")
        for b, button in enumerate(buttons):
            where = f"components.{r}.components.{b}"
            if button.get("type") != BUTTON or button.get("style") == LINK_STYLE:
                continue
            custom_id = str(button.get("custom_id") or "")
            if not custom_id:
                raise form_error(f"{where}.custom_id", "BASE_TYPE_REQUIRED", "This field is required")
            if len(custom_id) > 100:
                raise form_error(f"{where}.custom_id", "BASE_TYPE_BAD_LENGTH", "Must be between 1 and 100 in length.")
            if custom_id in seen:
                raise form_error(
                    f"{where}.custom_id", "COMPONENT_CUSTOM_ID_DUPLICATED", "Component custom id cannot be duplicated"
                )
            seen.add(custom_id)
            if len(str(button.get("label") or "")) > 80:
                raise form_error(f"{where}.label", "BASE_TYPE_MAX_LENGTH", "Must be 80 or fewer in length.")


def check_commands(commands: Any) -> list[dict[str, Any]]:
    """Check what overwriting application commands checks."""
    if not isinstance(commands, list):
        raise form_error("_", "LIST_TYPE_CONVERT", "Only iterables may be used in a ListType")
    listed = msgspec.convert(commands, list[dict[str, Any]])
    if len(listed) > 100:
        raise DiscordRefusal(400, 30032, "Maximum number of application commands reached (100)")
    for index, command in enumerate(listed):
        name = str(command.get("name") or "")
        if not COMMAND_NAME.fullmatch(name) or name != name.lower():
            raise form_error(f"{index}.name", "APPLICATION_COMMAND_INVALID_NAME", "Command name is invalid")
        if command.get("type", 1) == 1 and not 1 <= len(str(command.get("description") or "")) <= 100:
            message = "Must be between 1 and 100 in length."
            raise form_error(f"{index}.description", "BASE_TYPE_BAD_LENGTH", message)
    return listed
