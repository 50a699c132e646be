"""Explains failures of confined commands, and what to do instead."""

from __future__ import annotations

import re
from typing import Final

from hermes_trio.tools.warden import Profile

LOOKED_AT: Final = 4000
"""The number of characters at the end of the output that are examined."""

_KILL: Final = re.compile(r"\bp?kill(?:all)?\b.*(?:not permitted|no such process)", re.IGNORECASE)
_SUDO: Final = re.compile(
    r"no new privileges|sudo: .*(?:setuid|nosuid|owned by uid 0|effective uid)|\bsu: .*(?:setuid|cannot set)|must be (?:super)?user|must be root",
    re.IGNORECASE,
)
_REFUSED: Final = re.compile(r"permission denied|operation not permitted|read-only file system", re.IGNORECASE)


def confinement_hint(output: str, profile: Profile) -> str:
    """Return a sentence for the result of a confined command that failed; empty if its confinement is unlikely to be the reason."""
    if profile is Profile.OFF:
        return ""
    end = output[-LOOKED_AT:]
    if _SUDO.search(end):
        return (
            f"commands run confined (profile {str(profile)!r}) and cannot gain privileges: sudo, su and other setuid programs do not"
            ' work. The operator can change that with [tools.confinement] profile = "off", or for one platform, route or tenant'
        )
    if _KILL.search(end):
        return (
            "a command cannot signal the processes of another command: end a background process with"
            " process(action='kill', session_id=<its id, or its pid>)"
        )
    if profile.confines_files and _REFUSED.search(end):
        return (
            f"commands run confined (profile {str(profile)!r}): they write only below the session's own folder ($HOME) and /tmp,"
            " and read only those and system folders"
        )
    return ""
