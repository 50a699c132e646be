"""Which process the kernel should end first when memory runs out: a command, before the server that runs it.

The score is inherited by every descendant and still readable of a zombie, whose environment is not; so it is also
how the server recognises a dead orphan that a dead warden has left to it.
"""

import os

COMMAND_OFFSET = 217
"""How much likelier than the server a command is to be chosen; an odd number, so that it is nobody else's."""

HIGHEST = 1000


def score(pid: int) -> int | None:
    """The adjustment of a process, alive or not yet reaped; None if it cannot be read."""
    try:
        with open(f"/proc/{pid}/oom_score_adj", "rb", buffering=0) as file:
            return int(file.read())
    except (OSError, ValueError):
        return None


def command_score(server_score: int) -> int:
    """The adjustment of the commands of a server that has this one."""
    return min(server_score + COMMAND_OFFSET, HIGHEST)


def offer_oneself() -> None:
    """Take a command's score; without the right to do so (a sandbox, a read-only /proc) nothing changes."""
    own = score(os.getpid())
    if own is None:
        return
    try:
        with open("/proc/self/oom_score_adj", "wb", buffering=0) as file:
            file.write(b"%d" % command_score(own))
    except OSError:
        return
