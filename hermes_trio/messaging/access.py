"""Access control: who may talk to the agent, and how strangers are admitted.

Allow-lists are in the configuration and in the store. A stranger who writes in a direct chat gets a pairing code, at most one an hour, and is
admitted when the operator approves it; in a group, or with `unknown_dm = "ignore"`, strangers get no reply.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from enum import Enum
from typing import Final

import msgspec

from hermes_trio.store.ports import AccessStore

from .session_keys import Source
from .settings import PlatformSettings

CODE_LENGTH: Final = 8
CODE_LETTERS: Final = "ABCDEFGHJKLMNPQRSTUVWXYZ23456789"
"""Without letters and digits that are easily confused."""

CODE_SECONDS: Final = 3600.0


class Access(Enum):
    """The decision about a message."""

    ALLOWED = "allowed"
    OFFERED = "offered"
    IGNORED = "ignored"


class AccessDecision(msgspec.Struct, frozen=True):
    """The decision about a sender, and the pairing code that was created."""

    access: Access
    code: str = ""


def make_code() -> str:
    """Make a pairing code. It cannot be guessed: 40 bits, valid for an hour, at most fifty open ones."""
    return "".join(secrets.choice(CODE_LETTERS) for _ in range(CODE_LENGTH))


class AccessControl:
    """Decides about every message before anything else is done with it."""

    def __init__(self, store: AccessStore, code: Callable[[], str] = make_code) -> None:
        self._store = store
        self._code = code

    async def allows(self, source: Source, settings: PlatformSettings) -> bool:
        """Return whether this sender may talk to the agent here."""
        if settings.allow_all:
            return True
        ids = {one for one in (source.user_id, source.user_id_alt) if one}
        if ids & set(settings.allowed_users):
            return True
        for one in ids:
            if await self._store.user_allowed(source.platform, one):
                return True
        return False

    async def decide(self, source: Source, settings: PlatformSettings) -> AccessDecision:
        """Decide whether `source` may talk to the agent. May create a pairing code, which is shown once: a user with an open code gets no further answer."""
        if await self.allows(source, settings):
            return AccessDecision(Access.ALLOWED)
        person = source.user_id or source.user_id_alt
        if settings.unknown_dm == "ignore" or not source.is_direct or not person:
            return AccessDecision(Access.IGNORED)
        code = self._code()
        offered = await self._store.offer_pairing(
            source.platform, code, user_id=person, user_name=source.user_name or "", ttl=CODE_SECONDS
        )
        return AccessDecision(Access.OFFERED, code) if offered else AccessDecision(Access.IGNORED)
