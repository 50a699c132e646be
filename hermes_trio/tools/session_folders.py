"""The folders of sessions that work in one of their own: made when a command needs them, removed when their session is gone from the store.

Commands that may write in the account may also put anything in their place, so that nothing here follows a link or waits for a file that is none.

A folder lives as long as the row of its session: until the session is deleted, or until it has ended and its retention is over. It says which session it
belongs to, and of which store, so that two gateways that share a folder never touch each other's.
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

__all__ = ["SessionFolders"]

logger: Final = logging.getLogger("hermes_trio.tools.session_folders")

MARK: Final = "session.json"
UNUSED_SECONDS: Final = 86_400.0
"""A folder that was used within this time is kept, whatever the store says: a turn may be about to write its row."""
MAX_MARK: Final = 64 * 1024
"""Bytes of a mark that are read; a longer one is none."""
FIRST_SECONDS: Final = 60.0
SWEEP_SECONDS: Final = 3600.0


class FolderMark(msgspec.Struct, frozen=True):
    """What a folder says about itself."""

    session: str
    store: str


@final
class SessionFolders:
    """The folders below `root`. `store` names the store whose sessions they belong to; without it none is ever removed."""

    def __init__(self, root: str, *, store: str = "", clock: Callable[[], float] = time.time) -> None:
        self.root = root
        self.store = store
        self._clock = clock

    def make(self, session_id: str, name: str) -> str:
        """The folder `name` of a session, made if it is missing; its use is noted. Raises `SpawnFailed`."""
        # A session's id is anything that a client may send: only its digest becomes a path.
        own = Path(self.root, sha256(session_id.encode("utf-8", "replace")).hexdigest()[:24])
        mark, folder = own / MARK, own / name
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if own.is_symlink() or folder.is_symlink():
                raise NotADirectoryError(errno.ENOTDIR, "a link lies in its place")
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
                f"the session's folder cannot be made in {self.root}: {error.strerror}; set tools.terminal.session_folder"
            ) from error
        return str(folder)

    @asynccontextmanager
    async def swept(self, store: str, known: Callable[[str], Awaitable[object]]) -> AsyncIterator[None]:
        """Sweep now and then for the body of the `async with`. `known` returns a session of `store`, or None if there is none any more."""
        self.store = store
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._look_after, known, name="session folders")
                yield
                nursery.cancel_scope.cancel()
        except BaseExceptionGroup as group:
            # The nursery is an inner matter: what the body raised leaves as it was raised.
            raised = group.exceptions[0] if len(group.exceptions) == 1 else group
            raise raised from raised.__cause__

    async def _look_after(self, known: Callable[[str], Awaitable[object]]) -> None:
        await trio.sleep(FIRST_SECONDS)
        while True:
            try:
                await self.sweep(known)
            except Exception:
                logger.exception(
                    "the folders of sessions in %s could not be looked through; next try in an hour", self.root
                )
            await trio.sleep(SWEEP_SECONDS)

    async def sweep(self, known: Callable[[str], Awaitable[object]]) -> int:
        """Remove the folders whose session is gone and that have not been used for a day; how many. Cancelling leaves the rest for the next time."""
        removed = 0
        for folder, session_id in await trio.to_thread.run_sync(self._unused):
            if await known(session_id) is None:
                removed += await trio.to_thread.run_sync(self._remove, folder, session_id)
        if removed:
            logger.info("removed %d folders of sessions that are gone", removed)
        return removed

    def _unused(self) -> list[tuple[Path, str]]:
        """The folders of this store that have not been used lately."""
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
        """What an open folder says, if it belongs to this store and has not been used lately."""
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
        """Remove a folder with everything in it, also what its commands made unreadable; False if it cannot be, or is not the session's any more.

        The mark goes last: what fails is tried again.
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
                "the folder %s of a session that is gone cannot be removed: %s; next try in an hour", folder, error
            )
            return False
        return True


_FOLDER: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def _clear(name: str, is_folder: bool, place: int) -> None:
    """Remove a file, or a folder with everything in it, from an open folder."""
    if not is_folder:
        os.unlink(name, dir_fd=place)
        return
    try:
        shutil.rmtree(name, dir_fd=place)
    except PermissionError:
        _open_up(name, place)
        shutil.rmtree(name, dir_fd=place)


def _open_up(path: str, above: int | None = None) -> None:
    """Give back to their owner the rights to the folders at and below a path. Each is reached from the one above it, and no link is followed."""
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
