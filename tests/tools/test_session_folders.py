"""Folders of sessions: made, used, and removed with the session that they belong to."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hermes_trio.store import NewSession, open_store
from hermes_trio.tools.session_folders import UNUSED_SECONDS, SessionFolders
from hermes_trio.tools.warden import SpawnFailed

LONG = UNUSED_SECONDS * 2


class Clock:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.now = 1_700_000_000.0

    def __call__(self) -> float:
        return self.now


async def test_a_folder_goes_when_its_session_has_gone(tmp_path: Path) -> None:
    """Deleted, or ended and pruned: a day after its last use. A session that is open, and one that is ended and still kept, keep theirs."""
    clock = Clock()
    folders = SessionFolders(str(tmp_path / "folders"), store="store", clock=clock)
    async with open_store(tmp_path / "store.db", maintenance=False) as store:
        for id in ("open", "ended", "deleted", "pruned"):
            await store.create_session(NewSession(id=id, source="api_server"))
            work = Path(folders.make(id, "work"))
            (work / "file").write_text(id)
            folders.make(id, "tmp")
        await store.end_session("ended", "done")
        await store.end_session("pruned", "pruned")
        await store.delete_session("deleted")
        await store.prune_sessions(-1, end_reason="pruned")
        assert await folders.sweep(store.get_session) == 0
        clock.now += LONG
        assert await folders.sweep(store.get_session) == 2
        left = {file.read_text() for file in (tmp_path / "folders").glob("*/work/file")}
        assert left == {"open", "ended"}
        assert await folders.sweep(store.get_session) == 0


async def test_a_folder_in_use_stays(tmp_path: Path) -> None:
    """Every command notes that it is used; a day must pass after the last one."""
    clock = Clock()
    folders = SessionFolders(str(tmp_path), store="store", clock=clock)
    folders.make("busy", "work")
    clock.now += LONG
    folders.make("busy", "work")
    assert await folders.sweep(gone) == 0
    clock.now += LONG
    assert await folders.sweep(gone) == 1


async def test_another_stores_folders_are_not_touched(tmp_path: Path) -> None:
    """Two gateways may share a folder; one that keeps nothing removes nothing of the other. What has no mark is nobody's."""
    clock = Clock()
    mine, theirs = (SessionFolders(str(tmp_path), store=name, clock=clock) for name in ("mine", "theirs"))
    theirs.make("s", "work")
    (tmp_path / "notes").mkdir()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "session.json").write_text("not ours")
    clock.now += LONG
    os.utime(tmp_path / "other" / "session.json", (0, 0))
    assert await mine.sweep(gone) == 0
    assert await SessionFolders(str(tmp_path)).sweep(gone) == 0
    assert await theirs.sweep(gone) == 1
    assert sorted(os.listdir(tmp_path)) == ["notes", "other"]


async def test_what_a_command_has_closed_or_linked_is_removed_and_not_followed(tmp_path: Path) -> None:
    """Folders without rights, deep ones, and links to what is not the session's."""
    clock = Clock()
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "kept").write_text("x")
    folders = SessionFolders(str(tmp_path / "folders"), store="store", clock=clock)
    work = Path(folders.make("s", "work"))
    (work / "link").symlink_to(outside)
    closed = work / "closed" / "deeper"
    closed.mkdir(parents=True)
    (closed / "file").write_text("x")
    closed.chmod(0)
    closed.parent.chmod(0)
    clock.now += LONG
    assert await folders.sweep(gone) == 1
    assert (outside / "kept").exists()
    assert list((tmp_path / "folders").iterdir()) == []


async def gone(session_id: str) -> None:
    """No session is known."""


def test_a_folder_that_cannot_be_made_says_what_to_set(tmp_path: Path) -> None:
    """The error names the place and the setting."""
    (tmp_path / "file").write_text("")
    with pytest.raises(SpawnFailed, match=r"tools\.terminal\.session_folder"):
        SessionFolders(str(tmp_path / "file"), store="store").make("s", "work")
