"""Which server owns the store of a home directory, and where that server listens.

The owner holds an advisory lock on a file beside the database and has written its pid there; another file, locked in the same way, says at which
addresses it can be reached. A file that no process has locked is ignored.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from .errors import StoreInUse, StoreReadOnly

ADDRESS_BYTES: Final = 65_536


def lock_path(path: Path) -> Path:
    """Return the file that the owner of `path` keeps locked."""
    return path.with_name(path.name + ".lock")


def owner_pid(path: Path) -> int | None:
    """Return the pid of the server that owns `path` now (0 if it is unknown), or None if no server does."""
    try:
        descriptor = os.open(lock_path(path), os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return _written_pid(descriptor)
    else:
        return None
    finally:
        os.close(descriptor)


def _written_pid(descriptor: int) -> int:
    text = os.pread(descriptor, 32, 0).strip()
    return int(text) if text.isdigit() else 0


@contextmanager
def owned(path: Path) -> Iterator[None]:
    """Hold the owner's lock of `path` for the body of the `with`. Raises `StoreInUse` with the pid of another owner.

    The system releases the lock when the process ends, so a crash leaves nothing to clean up.
    """
    beside = lock_path(path)
    try:
        descriptor = os.open(beside, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise StoreReadOnly(
            f"{path} cannot be written ({beside}: {error.strerror}); check the owner and mode of the file and its directory"
        ) from error
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            pid = _written_pid(descriptor)
            raise StoreInUse(
                f"{path} is in use by another server, pid {pid}; stop that one first, or give this one another file",
                pid,
            ) from None
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        yield
    finally:
        os.close(descriptor)


def address_path(path: Path) -> Path:
    """Return the file in which the owner of `path` publishes its addresses."""
    return path.with_name(path.name + ".address")


@contextmanager
def announced(path: Path, addresses: Sequence[str]) -> Iterator[None]:
    """Publish the addresses of the owner of `path` for the body of the `with`. Only the owner may call it. Raises `OSError` if it cannot write.

    The file is complete and locked before it gets its name, so a locked file is never an earlier server's, and the lock ends with the process.
    """
    name = address_path(path)
    made = name.with_name(name.name + ".new")
    made.unlink(missing_ok=True)
    descriptor = os.open(made, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.write(descriptor, "".join(f"{address}\n" for address in addresses).encode())
        made.rename(name)
        try:
            yield
        finally:
            name.unlink(missing_ok=True)
    finally:
        os.close(descriptor)


def announced_addresses(path: Path) -> tuple[str, ...]:
    """Return the addresses of the server that owns `path` now; empty if there is none, or if it has not published them."""
    try:
        descriptor = os.open(address_path(path), os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return ()
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return tuple(os.pread(descriptor, ADDRESS_BYTES, 0).decode("ascii", "replace").split())
    else:
        return ()
    finally:
        os.close(descriptor)
