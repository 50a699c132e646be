"""The directories of sessions that have one of their own: created when a command needs them, removed when their session is no longer in the store.

Commands may replace anything in the account, so nothing here follows a link or blocks on a special file.

A directory exists as long as the row of its session: until the session is deleted, or has ended and its retention is over. A mark in it names its
session and store, so that two gateways that share a parent directory never touch each other's.
"""

from __future__ import annotations

import errno
import logging
import os
import shutil
import stat
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from hashlib import sha256
from pathlib import Path
from typing import Final, final

import msgspec
import trio

from .warden import SpawnFailed

logger: Final = logging.getLogger("hermes_trio.tools.session_folders")

MARK: Final = "session.json"
UNUSED_SECONDS: Final = 86_400.0
"""A directory that was used within this time is kept, whatever the store says: a turn may be about to write its row."""
MAX_MARK: Final = 64 * 1024
"""The maximum of bytes of a mark; a longer one is ignored."""
FIRST_SECONDS: Final = 60.0
SWEEP_SECONDS: Final = 3600.0


class FolderMark(msgspec.Struct, frozen=True):
    """The mark of a directory."""

    session: str
    store: str


@final
class SessionFolders:
    """The directories below `root`. `store` names the store of their sessions; without it none is removed."""

    def __init__(self, root: str, *, store: str = "", clock: Callable[[], float] = time.time) -> None:
        self.root = root
        self.store = store
        self._clock = clock

    def make(self, session_id: str, name: str) -> str:
        """Return the directory `name` of a session, created if it is missing, and record its use. Raises `SpawnFailed`."""
        # A session's id is anything that a client may send: only its digest becomes a path.
        own = Path(self.root, sha256(session_id.encode("utf-8", "replace")).hexdigest()[:24])
        mark, folder = own / MARK, own / name
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if own.is_symlink() or folder.is_symlink():
                raise NotADirectoryError(errno.ENOTDIR, "a symbolic link is in its place")
            if not self.store:
                return str(folder)
            now = self._clock()
            try:
                os.utime(mark, (now, now), follow_symlinks=False)
            except FileNotFoundError:
                with open(mark, "xb") as file:
                    file.write(msgspec.json.encode(FolderMark(session_id, self.store)))
                os.utime(mark, (now, now), follow_symlinks=False)
        except OSError as error:
            raise SpawnFailed(
                f"could not create the session's directory in {self.root}: {error.strerror}; set tools.terminal.session_folder"
            ) from error
        return str(folder)

    @asynccontextmanager
    async def swept(self, store: str, known: Callable[[str], Awaitable[object]]) -> AsyncIterator[None]:
        """Sweep at intervals for the body of the `async with`. `known` returns a session of `store`, or None if it no longer exists."""
        self.store = store
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._sweep_periodically, known, name="session folders")
                yield
                nursery.cancel_scope.cancel()
        except BaseExceptionGroup as group:
            # Unwrap the nursery's group: the caller sees what the body raised.
            raised = group.exceptions[0] if len(group.exceptions) == 1 else group
            raise raised from raised.__cause__

    async def _sweep_periodically(self, known: Callable[[str], Awaitable[object]]) -> None:
        await trio.sleep(FIRST_SECONDS)
        while True:
            try:
                await self.sweep(known)
            except Exception:
                logger.exception("could not scan the session directories in %s; retrying in an hour", self.root)
            await trio.sleep(SWEEP_SECONDS)

    async def sweep(self, known: Callable[[str], Awaitable[object]]) -> int:
        """Remove the directories whose session was deleted and that have not been used for a day; return how many. Cancelling leaves the rest for the
        next sweep.
        """
        removed = 0
        for folder, session_id in await trio.to_thread.run_sync(self._unused):
            if await known(session_id) is None:
                removed += await trio.to_thread.run_sync(self._remove, folder, session_id)
        if removed:
            logger.info("removed %d directories of deleted sessions", removed)
        return removed

    def _unused(self) -> list[tuple[Path, str]]:
        """Return the directories of this store that have not been used lately."""
        if not self.store:
            return []
        found: list[tuple[Path, str]] = []
        try:
            folders = list(Path(self.root).iterdir())
        except OSError:
            return []
        for folder in folders:
            try:
                place = os.open(folder, _FOLDER)
            except OSError:
                continue
            try:
                said = self._unused_mark(place)
            finally:
                os.close(place)
            if said is not None:
                found.append((folder, said.session))
        return found

    def _unused_mark(self, place: int) -> FolderMark | None:
        """Return the mark of an open directory, if it belongs to this store and has not been used lately."""
        try:
            mark = os.open(MARK, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=place)
        except OSError:
            return None
        try:
            status = os.fstat(mark)
            if not stat.S_ISREG(status.st_mode) or self._clock() - status.st_mtime < UNUSED_SECONDS:
                return None
            said = msgspec.json.decode(os.pread(mark, MAX_MARK, 0), type=FolderMark)
        except (OSError, msgspec.MsgspecError):
            return None
        finally:
            os.close(mark)
        return said if said.store == self.store else None

    def _remove(self, folder: Path, session_id: str) -> bool:
        """Remove a directory with everything in it, also unreadable parts; return False if that fails, or if it no longer belongs to the session.

        The mark is removed last, so that a failure is retried.
        """
        try:
            place = os.open(folder, _FOLDER)
            try:
                said = self._unused_mark(place)
                if said is None or said.session != session_id:
                    return False
                for entry in list(os.scandir(place)):
                    if entry.name != MARK:
                        _clear(entry.name, entry.is_dir(follow_symlinks=False), place)
                os.unlink(MARK, dir_fd=place)
            finally:
                os.close(place)
            os.rmdir(folder)
        except (OSError, RecursionError) as error:
            logger.warning(
                "could not remove the directory %s of a deleted session; retrying in an hour: %s", folder, error
            )
            return False
        return True


_FOLDER: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def _clear(name: str, is_folder: bool, place: int) -> None:
    """Remove a file, or a directory with everything in it, from an open directory."""
    if not is_folder:
        os.unlink(name, dir_fd=place)
        return
    try:
        shutil.rmtree(name, dir_fd=place)
    except PermissionError:
        _open_up(name, place)
        shutil.rmtree(name, dir_fd=place)


def _open_up(path: str, above: int | None = None) -> None:
    """Restore the owner's permissions on the directories at and below a path, each reached from the one above it, without following links."""
    place = os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=above)
    try:
        os.chmod(f"/proc/self/fd/{place}", 0o700)
        inside = os.open(f"/proc/self/fd/{place}", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    finally:
        os.close(place)
    try:
        for entry in os.scandir(inside):
            if entry.is_dir(follow_symlinks=False):
                _open_up(entry.name, inside)
    finally:
        os.close(inside)
