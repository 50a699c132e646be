"""Reads the descendants of a process from /proc, and signals processes without the risk of hitting another one.

A process id may be reused: its process may have ended, and the id may belong to another one, between looking and
signalling. So a signal goes through a pidfd, and only after the start time behind it has been compared with the one
that was seen. Whole groups are signalled only through an unreaped child of the caller, which pins the number.
"""

import os
import signal
from collections.abc import Collection, Iterable

_STAT_PARENT = 1
_STAT_GROUP = 2
_STAT_SESSION = 3
_STAT_STARTED = 19


class ProcessEntry:
    """A snapshot of one process."""

    __slots__ = ("group", "parent", "pid", "session", "started", "state")

    def __init__(self, pid: int, stat: bytes) -> None:
        # The name, in brackets, may itself contain brackets and blanks; everything of interest comes after it.
        fields = stat[stat.rindex(b")") + 2 :].split()
        self.pid = pid
        self.state = fields[0]
        self.parent = int(fields[_STAT_PARENT])
        self.group = int(fields[_STAT_GROUP])
        self.session = int(fields[_STAT_SESSION])
        self.started = int(fields[_STAT_STARTED])

    @property
    def alive(self) -> bool:
        """Return False for a zombie, which runs no code and needs to be reaped, not signalled."""
        return self.state not in (b"Z", b"X")


def look(pid: int) -> ProcessEntry | None:
    """Return the process that has this id now; None if there is none."""
    try:
        with open(f"/proc/{pid}/stat", "rb", buffering=0) as file:
            stat = file.read()
    except OSError:
        return None
    return ProcessEntry(pid, stat) if stat else None


def children(parent: int) -> list[ProcessEntry]:
    """Return the direct children of a process, including zombies."""
    numbers = _listed_children(parent)
    if numbers is None:
        return [entry for entry in _all_processes() if entry.parent == parent]
    # A thread's list and the child's own entry are read at different times: the entry is authoritative.
    return [entry for entry in map(look, numbers) if entry is not None and entry.parent == parent]


def descendants(root: int, *, without: Collection[int] = ()) -> list[ProcessEntry]:
    """Return every process below `root`, parents before children, except those in `without` and their descendants.

    One pass sees no process twice and may miss one that is being forked or re-parented meanwhile: a caller that
    needs all of them repeats the pass until it has no children left to wait for.
    """
    if _listed_children(root) is not None:
        generation = [child for child in children(root) if child.pid not in without]
        found = list(generation)
        seen = {child.pid for child in found}
        while generation:
            generation = [child for parent in generation for child in children(parent.pid) if child.pid not in seen]
            found += generation
            seen.update(child.pid for child in generation)
        return found
    by_parent: dict[int, list[ProcessEntry]] = {}
    for entry in _all_processes():
        if entry.pid not in without:
            by_parent.setdefault(entry.parent, []).append(entry)
    found = list(by_parent.pop(root, ()))
    for entry in found:
        found += by_parent.pop(entry.pid, ())
    return found


def send(entry: ProcessEntry, signum: int) -> bool:
    """Signal exactly this process. Return False if it has ended or may not be signalled."""
    try:
        handle = os.pidfd_open(entry.pid)
    except ProcessLookupError:
        return False
    except OSError:
        # Without a pidfd (an old kernel, a sandbox, no descriptor left) only the start time is compared.
        return _send_by_number(entry, signum)
    try:
        now = look(entry.pid)
        if now is None or now.started != entry.started:
            return False
        signal.pidfd_send_signal(handle, signum)
    except (ProcessLookupError, PermissionError):
        return False
    finally:
        os.close(handle)
    return True


def kill_listed(entries: Iterable[ProcessEntry], parent: int) -> int:
    """Send SIGKILL to the process groups, then to each process that is alive; return their number. `parent` is the calling process.

    A process can escape a list of ids by forking, but not a signal to its group.
    """
    own_group = os.getpgrp()
    entries = list(entries)
    groups = {entry.group for entry in entries if entry.parent == parent}
    for group in groups - {own_group, 0, 1}:
        try:
            os.killpg(group, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            continue
    alive = [entry for entry in entries if entry.alive]
    for entry in alive:
        send(entry, signal.SIGKILL)
    return len(alive)


def _send_by_number(entry: ProcessEntry, signum: int) -> bool:
    now = look(entry.pid)
    if now is None or now.started != entry.started:
        return False
    try:
        os.kill(entry.pid, signum)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def _listed_children(parent: int) -> list[int] | None:
    """Return the ids in the kernel's list of children; None if the kernel was built without it."""
    numbers: list[int] = []
    try:
        threads = os.listdir(f"/proc/{parent}/task")
    except OSError:
        return numbers
    for thread in threads:
        try:
            with open(f"/proc/{parent}/task/{thread}/children", "rb", buffering=0) as file:
                numbers += map(int, file.readall().split())
        except FileNotFoundError:
            if os.path.exists(f"/proc/{parent}/task/{thread}/stat"):
                return None
        except OSError:
            continue
    return numbers


def _all_processes() -> list[ProcessEntry]:
    entries = (look(int(name)) for name in os.listdir("/proc") if name.isdigit())
    return [entry for entry in entries if entry is not None]
