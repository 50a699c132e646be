"""Forbids ambient identity: code inside a turn may not change the working directory or environment of the process.

An audit hook cannot be removed, so it is installed once, by the plugin only, and does nothing outside a turn.
"""

from __future__ import annotations

import sys
from typing import Final

FORBIDDEN: Final = {
    "os.chdir": "pass `cwd=` to the process, or bind a SessionContext with another `cwd`",
    "os.putenv": "pass `env=` to the process, or bind a SessionContext",
    "os.unsetenv": "pass `env=` to the process, or bind a SessionContext",
}

_installed = False


class AmbientIdentity(RuntimeError):
    """Raised if code inside a turn tries to change state that all sessions of the process share."""


def install() -> None:
    """Install the hook, once."""
    global _installed
    if _installed:
        return
    _installed = True
    from hermes_trio.runtime.context import current_turn

    def hook(event: str, args: object) -> None:
        if event in FORBIDDEN:
            turn = current_turn()
            if turn is not None:
                raise AmbientIdentity(
                    f"{event} inside turn {turn.id} would reach every other session; {FORBIDDEN[event]}"
                )

    sys.addaudithook(hook)
