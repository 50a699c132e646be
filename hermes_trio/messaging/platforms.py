"""The configured platforms: an adapter each, with its settings and its home channel. Built once at start; every sender composes its rows here."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import msgspec

from hermes_trio.runtime.ports import NewReply

from .addresses import Address
from .contract import Adapter
from .senders import compose_entries
from .settings import PlatformSettings


class Platform(msgspec.Struct, frozen=True):
    """An adapter with the settings that the gateway applies to it."""

    adapter: Adapter
    settings: PlatformSettings = msgspec.field(default_factory=PlatformSettings)

    @property
    def name(self) -> str:
        """Return the name in session keys, rows and delivery targets."""
        return self.adapter.platform


class Platforms:
    """All configured platforms, by name, in the order of the configuration. Raises `ValueError` for an empty name or a second platform of a name."""

    def __init__(self, platforms: Iterable[Platform]) -> None:
        self._platforms: dict[str, Platform] = {}
        for platform in platforms:
            if not platform.name:
                raise ValueError(f"{type(platform.adapter).__name__}.platform is empty; it must name the platform")
            if platform.name in self._platforms:
                raise ValueError(f"two adapters are called {platform.name!r}; each platform has one")
            self._platforms[platform.name] = platform

    def __iter__(self) -> Iterator[Platform]:
        return iter(self._platforms.values())

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names that a delivery target may use."""
        return tuple(self._platforms)

    @property
    def homes(self) -> Mapping[str, Address]:
        """Return the configured home channels, by platform."""
        found = {name: platform.settings.home_address(name) for name, platform in self._platforms.items()}
        return {name: home for name, home in found.items() if home is not None}

    def find(self, name: str) -> Platform | None:
        """Return the platform of this name, or None."""
        return self._platforms.get(name)

    def compose(self, address: Address, text: str, payload: Mapping[str, Any] | None = None) -> list[NewReply]:
        """Return the outbox rows that deliver `text` to an address, split as its platform needs."""
        platform = self._platforms.get(address.platform)
        return compose_entries(None if platform is None else platform.adapter, address, text, payload)
