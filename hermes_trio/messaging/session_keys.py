"""The source of a message, and the session key of its conversation.

A key is computed once, where a message arrives, and is passed along with it (SC-18). The layout is `agent:<namespace>:<platform>:<chat type>:…`;
colons within an id are written as `%3A`, so that no two places share a key by accident. Webhook ids contain colons by design and are the one
exception.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping
from typing import Final

import msgspec

MAX_ID: Final = 255
MAX_KEY: Final = 1024
MAX_SENDER: Final = 64
_WINDOWS_DRIVE: Final = re.compile(r"[A-Za-z]:")


class SessionKeyError(ValueError):
    """Raised for an id or key that must not name a session. The message says why."""


_IDENTIFIERS: Final = (
    "chat_id",
    "user_id",
    "thread_id",
    "chat_topic",
    "user_id_alt",
    "chat_id_alt",
    "scope_id",
    "parent_chat_id",
    "message_id",
    "profile",
)
"""Platforms give ids as numbers or texts, and a missing id as an empty text."""


class Source(msgspec.Struct, frozen=True, kw_only=True):
    """Where a message came from. Ids become texts, empty ones None."""

    platform: str
    chat_type: str
    chat_id: str | None = None
    chat_name: str | None = None
    user_id: str | None = None
    user_name: str | None = None
    thread_id: str | None = None
    chat_topic: str | None = None
    user_id_alt: str | None = None
    chat_id_alt: str | None = None
    scope_id: str | None = None
    parent_chat_id: str | None = None
    message_id: str | None = None
    profile: str | None = None
    tenant: str | None = None
    key_id: str | None = None
    is_bot: bool = False

    def __post_init__(self) -> None:
        for name in _IDENTIFIERS:
            value: object = getattr(self, name)
            if value is not None and (value == "" or not isinstance(value, str)):
                msgspec.structs.force_setattr(self, name, None if value == "" else str(value))

    @property
    def is_direct(self) -> bool:
        return self.chat_type == "dm"

    @property
    def participant(self) -> str | None:
        """Return the stable id of the person, if the platform has one beside the ordinary id."""
        return self.user_id_alt or self.user_id

    def to_record(self) -> dict[str, str | bool]:
        """Return a JSON-ready form without empty fields."""
        fields = msgspec.structs.asdict(self)
        return {name: value for name, value in fields.items() if value is not None and value is not False}

    @classmethod
    def from_record(cls, record: Mapping[str, object]) -> Source:
        """Return the source of a record. Unknown fields are ignored. Raises `SessionKeyError` for wrong ones."""
        known: dict[str, str] = {}
        for name in (field for field in cls.__struct_fields__ if field != "is_bot"):
            value = record.get(name)
            if value is None:
                continue
            if not isinstance(value, str):
                raise SessionKeyError(f"source record: {name} is {value!r}; it must be a string")
            known[name] = value
        missing = [name for name in ("platform", "chat_type") if not known.get(name)]
        if missing:
            raise SessionKeyError(f"source record: {missing[0]} is missing")
        return cls(**known, is_bot=record.get("is_bot") is True)


class Isolation(msgspec.Struct, frozen=True):
    """Whether people in one group, or in one thread of it, have conversations of their own."""

    group_sessions_per_user: bool = True
    thread_sessions_per_user: bool = False

    def applies_to(self, source: Source) -> bool:
        if source.is_direct or source.participant is None:
            return False
        return self.thread_sessions_per_user if source.thread_id else self.group_sessions_per_user


DEFAULT_ISOLATION: Final = Isolation()


def session_key(source: Source, isolation: Isolation = DEFAULT_ISOLATION, *, multiplex: bool = False) -> str:
    """Return the session key of a message from `source`.

    With `multiplex`, a profile other than `default` has a namespace of its own; otherwise it is `main`.
    """
    namespace = "main"
    if multiplex and source.profile and source.profile != "default":
        namespace = source.profile
    parts: list[str | None] = [namespace, source.platform, source.chat_type]
    if source.is_direct:
        place = source.chat_id or source.participant
        parts += [place, source.thread_id]
    else:
        parts += [source.chat_id, source.thread_id]
        if isolation.applies_to(source):
            parts.append(source.participant)
    escape = str if source.platform == "webhook" else _escaped
    key = ":".join(["agent", *(escape(part) for part in parts if part)])
    check_session_key(key)
    return key


def _escaped(part: str) -> str:
    return part.replace("%", "%25").replace(":", "%3A")


def webhook_source(route: str, delivery_id: str) -> Source:
    """Return the source of one webhook delivery: a conversation of its own."""
    if not route or ":" in route:
        raise SessionKeyError(f"webhook route {route!r}: a route has a name without ':'")
    return Source(
        platform="webhook",
        chat_type="webhook",
        chat_id=f"webhook:{route}:{delivery_id}",
        chat_name=f"webhook/{route}",
        user_id=f"webhook:{route}",
        user_name=route,
        message_id=delivery_id,
    )


def is_shared(source: Source, isolation: Isolation = DEFAULT_ISOLATION) -> bool:
    """Return whether several people speak in this conversation, so that each text must name its author."""
    return not source.is_direct and not isolation.applies_to(source)


def attributed_text(source: Source, text: str, isolation: Isolation = DEFAULT_ISOLATION) -> str:
    """Return the text for the model: in a shared conversation with the sender's name in front."""
    if not is_shared(source, isolation):
        return text
    sender = _plain_name(source.user_name) or _plain_name(source.participant)
    return f"[{sender}] {text}" if sender else text


def _plain_name(name: str | None) -> str:
    """Return a name on one line that cannot pass for markup, for another bracket or for more text than a name."""
    visible = "".join(
        " " if char.isspace() else char
        for char in name or ""
        if char.isspace() or (char not in "[]<>{}`" and not unicodedata.category(char).startswith("C"))
    )
    return " ".join(visible.split())[:MAX_SENDER].strip()


def check_session_id(value: str) -> str:
    """Return `value` if it may be a session id; ids end up in file names, so they must not be paths."""
    problem = _problem(value, MAX_ID)
    if problem is None and ("/" in value or "\\" in value):
        problem = "it contains a path separator"
    if problem is None and _WINDOWS_DRIVE.match(value):
        problem = "it starts with a drive letter"
    if problem is not None:
        raise SessionKeyError(f"{_shown(value)} is not a session id: {problem}")
    return value


def check_session_key(value: str) -> str:
    """Return `value` if it may be a session key: a "/" is allowed within it, but not at its start."""
    problem = _problem(value, MAX_KEY)
    if problem is None and value.startswith(("/", "\\")):
        problem = "it starts with a path separator"
    if problem is not None:
        raise SessionKeyError(f"{_shown(value)} is not a session key: {problem}")
    return value


def _problem(value: str, longest: int) -> str | None:
    if not value or value != value.strip():
        return "it is empty, or starts or ends with a space"
    if len(value) > longest:
        return f"it has {len(value)} characters, at most {longest} are allowed"
    if ".." in value:
        return "it contains '..'"
    if any(unicodedata.category(char) in ("Cc", "Cs") for char in value):
        return "it contains control characters"
    return None


def _shown(value: str) -> str:
    return repr(value if len(value) <= 80 else value[:77] + "...")
