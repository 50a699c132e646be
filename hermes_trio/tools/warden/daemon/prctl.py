"""The process attributes that Python has no call for: sub-reaper, parent-death signal, name, and whether others may look inside.

All of them belong to the calling process (the parent-death signal to the calling thread); only the last survives a fork, and none an exec.
"""

import ctypes
import os

_SET_PDEATHSIG = 1
_SET_DUMPABLE = 4
_SET_NAME = 15
_SET_CHILD_SUBREAPER = 36
_GET_CHILD_SUBREAPER = 37
CAPBSET_DROP = 24
SET_NO_NEW_PRIVS = 38
CAP_AMBIENT, CAP_AMBIENT_CLEAR_ALL = 47, 4

_libc = ctypes.CDLL(None, use_errno=True)


def _prctl(option: int, argument: object) -> None:
    if _libc.prctl(option, argument, 0, 0, 0) != 0:
        errno = ctypes.get_errno()
        raise OSError(errno, f"prctl({option}): {os.strerror(errno)}")


def become_subreaper(wanted: bool = True) -> None:
    """Make this process a sub-reaper: a descendant whose parent dies becomes its child instead of init's."""
    _prctl(_SET_CHILD_SUBREAPER, ctypes.c_ulong(wanted))


def is_subreaper() -> bool:
    """Return whether this process is a sub-reaper."""
    answer = ctypes.c_int(0)
    _prctl(_GET_CHILD_SUBREAPER, ctypes.byref(answer))
    return bool(answer.value)


def die_with_parent(signum: int) -> None:
    """Have the kernel send `signum` to this process when the thread that forked it ends."""
    _prctl(_SET_PDEATHSIG, ctypes.c_ulong(signum))


def set_name(name: str) -> None:
    """Set the name that `ps` and `top` show for this process, at most 15 characters."""
    _prctl(_SET_NAME, ctypes.c_char_p(name.encode()))


def set_dumpable(wanted: bool) -> None:
    """Set whether processes of the same user may read the memory and environment of this one. Root with its capabilities always may."""
    _prctl(_SET_DUMPABLE, ctypes.c_ulong(wanted))
