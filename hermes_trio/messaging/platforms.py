"""Which platforms there are, what each of them can take, and where its home is. Made once at start; everybody who delivers asks here."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from hermes_trio.runtime.ports import NewReply

from .addresses import Address
from .contract import Adapter
from .senders import compose_entries
from .settings import PlatformSettings

__all__ = ["Platform", "Platforms"]


class Platform(msgspec.Struct, frozen=True):
    """An adapter with the settings that the gateway applies to it."""

    adapter: Adapter
    settings: PlatformSettings = msgspec.field(default_factory=PlatformSettings)

    @property
    def platform(self) -> str:
        """The name that keys, rows and targets use."""
        return self.adapter.platform


class Platforms:
    """All members, by platform."""

    def __init__(self, members: Iterable[Platform]) -> None:
        self._members: dict[str, Platform] = {}
        for member in members:
            if not member.platform:
                raise ValueError(f"{type(member.adapter).__name__}.platform is empty; it must name the platform")
            if member.platform in self._members:
                raise ValueError(f"two adapters are called {member.platform!r}; each platform has one")
            self._members[member.platform] = member

    def __iter__(self) -> Iterable[Platform]:
        return iter(self._members.values())

    @property
    def members(self) -> tuple[Platform, ...]:
        """All of them, in the order of the configuration."""
        return tuple(self._members.values())

    @property
    def platforms(self) -> tuple[str, ...]:
        """What a delivery target may name."""
        return tuple(self._members)

    @property
    def homes(self) -> Mapping[str, Address]:
        """The home channels that there are."""
        found = {name: member.settings.home_address(name) for name, member in self._members.items()}
        return {name: home for name, home in found.items() if home is not None}

    def find(self, platform: str) -> Platform | None:
        """The member of this platform, or None."""
        return self._members.get(platform)

    def compose(self, address: Address, text: str, payload: Mapping[str, Any] | None = None) -> list[NewReply]:
        """The outbox rows that bring `text` to an address."""
        member = self._members.get(address.platform)
        return compose_entries(None if member is None else member.adapter, address, text, payload)
