"""No ambient identity: inside a turn nobody may change the process's directory or environment.

An audit hook cannot be removed, so it is installed once, by the plugin only, and does nothing outside a turn.
"""

from __future__ import annotations

import sys
from typing import Final

__all__ = ["AmbientIdentity", "install"]

FORBIDDEN: Final = {
    "os.chdir": "pass `cwd=` to the process, or bind a SessionContext with another `cwd`",
    "os.putenv": "pass `env=` to the process, or bind a SessionContext",
    "os.unsetenv": "pass `env=` to the process, or bind a SessionContext",
}

_installed = False


class AmbientIdentity(RuntimeError):
    """Code inside a turn tried to change something that every session in the process shares."""


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
