"""Sets the OOM score, so that the kernel kills a command before the server that runs it.

The score is inherited by every descendant and can be read for a zombie, whose environment cannot; so it is also
how the server recognises a dead orphan that a dead warden has left to it.
"""

import os

COMMAND_OFFSET = 217
"""Added to the server's score for commands; an unusual number, so that it identifies them."""

HIGHEST = 1000


def score(pid: int) -> int | None:
    """Return the score adjustment of a process, alive or a zombie; None if it cannot be read."""
    try:
        with open(f"/proc/{pid}/oom_score_adj", "rb", buffering=0) as file:
            return int(file.read())
    except (OSError, ValueError):
        return None


def command_score(server_score: int) -> int:
    """Return the adjustment of commands for the adjustment of their server."""
    return min(server_score + COMMAND_OFFSET, HIGHEST)


def prefer_own_process() -> None:
    """Set this process to a command's score. Does nothing if that is not permitted (a sandbox, a read-only /proc)."""
    own = score(os.getpid())
    if own is None:
        return
    try:
        with open("/proc/self/oom_score_adj", "wb", buffering=0) as file:
            file.write(b"%d" % command_score(own))
    except OSError:
        return
