"""The commands for the menus of platforms: Telegram's menu and Discord's slash commands. `commands` executes them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec


class MenuEntry(msgspec.Struct, frozen=True):
    """A command. `argument` describes its argument, empty for none."""

    name: str
    description: str
    argument: str = ""

    def typed(self, prefix: str, argument: str = "") -> str:
        """Return the command as a person types it."""
        return f"{prefix}{self.name} {argument}".strip()


MENU: Final[Sequence[MenuEntry]] = (
    MenuEntry("new", "Start a new conversation; what runs in the old one is stopped"),
    MenuEntry("stop", "Stop what the agent is doing", "all: its background work too"),
    MenuEntry("status", "What this conversation is doing"),
    MenuEntry("approve", "Allow what waits for approval", "once, session or always; all for everything that waits"),
    MenuEntry("deny", "Refuse what waits for approval", "a reason; all for everything that waits"),
    MenuEntry("tree", "Everything that runs for this conversation"),
    MenuEntry("help", "What you can write here"),
)

KNOWN_COMMANDS: Final = frozenset({*(entry.name for entry in MENU), "reset", "start", "commands"})
"""The names and aliases of all commands. Where several bots listen, other commands are not for this one."""
