"""Folders of sessions: made, used, and removed with the session that they belong to."""

from __future__ import annotations

import os
import resource
from pathlib import Path

import pytest
import trio

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


@pytest.mark.parametrize("kind", ["device", "pipe", "link"])
async def test_a_mark_that_is_no_file_is_not_read(tmp_path: Path, kind: str) -> None:
    """A command of the same account put something in its place that never ends, never answers, or lies elsewhere."""
    clock = Clock()
    folders = SessionFolders(str(tmp_path / "folders"), store="store", clock=clock)
    mark = Path(folders.make("gone", "work")).parent / "session.json"
    kept = mark.rename(tmp_path / "kept")
    if kind == "pipe":
        os.mkfifo(mark)
    else:
        mark.symlink_to("/dev/zero" if kind == "device" else kept)
    os.utime(mark, (clock.now, clock.now), follow_symlinks=False)
    clock.now += LONG
    limit = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (8 << 30, limit[1]))
    try:
        with trio.fail_after(10):
            assert await folders.sweep(gone) == 0
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limit)
    assert mark.parent.exists()


async def test_a_folder_that_becomes_a_link_before_it_is_removed_is_left_alone(tmp_path: Path) -> None:
    """Between the look and the removal its session is asked for: what lies behind the link, or behind a link above it, is not touched."""
    for above in (False, True):
        clock = Clock()
        root = tmp_path / f"folders-{above}"
        folders = SessionFolders(str(root), store="store", clock=clock)
        own = Path(folders.make("gone", "work")).parent
        other = tmp_path / f"home-{above}"
        precious = (other / own.name / "work" if above else other / "skills") / "precious"
        precious.parent.mkdir(parents=True)
        precious.write_text("kept")
        clock.now += LONG

        async def swapped(session_id: str) -> None:
            place = root if above else own  # noqa: B023 - used within the round only
            place.rename(tmp_path / f"old-{above}")  # noqa: B023
            place.symlink_to(other)  # noqa: B023

        assert await folders.sweep(swapped) == 0
        assert precious.read_text() == "kept"


def test_nothing_is_made_or_written_through_a_link(tmp_path: Path) -> None:
    """Neither a folder that is a link is given to commands, nor is a mark written where a link points."""
    folders = SessionFolders(str(tmp_path / "folders"), store="store")
    own = Path(folders.make("one", "work")).parent
    home = tmp_path / "home"
    home.mkdir()
    (own / "tmp").symlink_to(home)
    with pytest.raises(SpawnFailed, match="a symbolic link is in its place"):
        folders.make("one", "tmp")
    (own / "session.json").unlink()
    (own / "session.json").symlink_to(home / "written")
    folders.make("one", "work")
    assert list(home.iterdir()) == []
    own.rename(tmp_path / "old")
    own.symlink_to(home)
    with pytest.raises(SpawnFailed, match="a symbolic link is in its place"):
        folders.make("one", "work")
