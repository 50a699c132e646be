"""Signals: called after a commit, for everything that the commit concerned, independently of the caller that wrote it."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import trio
import trio.lowlevel
import trio.testing

from hermes_trio.runtime.errors import MailboxFull
from hermes_trio.runtime.ports import OUTBOX_TOPIC, ROOT_TOPIC, NewReply, inbox_topic
from hermes_trio.store import NewSession, Runner, open_store
from hermes_trio.store.ports import Store
from hermes_trio.testing.rows import inbox_states

from .turns import KEY, finish, message, notice, start

REPLY = NewReply(platform="telegram", target={"chat_id": "1"}, text="hi")


async def test_a_subscriber_is_called_after_the_commit_and_only_for_its_key(store: Store) -> None:
    """The row is there when the signal comes; other keys and other topics stay silent; leaving the `with` ends it."""
    seen: list[str] = []
    everything: list[str] = []
    with (
        store.subscribe(inbox_topic("telegram"), seen.append, KEY),
        store.subscribe(inbox_topic("telegram"), everything.append),
    ):
        await store.accept_message(message("one"))
        await store.accept_message(message("elsewhere", key="another"))
        await store.accept_message(message("another inbox", inbox="slack"))
        await trio.testing.wait_all_tasks_blocked()
    await store.accept_message(message("nobody listens"))
    assert (seen, everything) == ([KEY], [KEY, "another"])


async def test_a_turn_signals_the_platforms_of_its_replies(store: Store) -> None:
    """The commit wakes the senders, not the task that ran the turn."""
    seen: list[str] = []
    with store.subscribe(OUTBOX_TOPIC, seen.append):
        await store.finish_turn(finish(start(), "a", "b", outbox=(REPLY, REPLY)))
        await trio.testing.wait_all_tasks_blocked()
    assert seen == ["telegram"]


async def leave(store: Store, how: str) -> None:
    """End the session `s1` of `KEY` in one of the ways that there are."""
    match how:
        case "end":
            await store.end_session("s1", "done")
        case "patch":
            await store.patch_session("s1", end_reason="done")
        case "new":
            await store.new_session(KEY, source="telegram")
        case "switch":
            await store.create_session(NewSession(id="s2", source="telegram"))
            await store.switch_session(KEY, "s2")
        case "fork":
            await store.fork_session("s1")
        case "delete":
            await store.delete_session("s1")
        case _:
            await store.abandon(session_id="s1", reason="over")


@pytest.mark.parametrize("how", ["end", "patch", "new", "switch", "fork", "delete", "abandon"])
async def test_a_root_whose_last_notice_is_abandoned_is_signalled(store: Store, how: str) -> None:
    """A task that waits until the work of an input has settled is woken, however the session of its notice ends."""
    await store.create_session(NewSession(id="s1", source="telegram", session_key=KEY))
    waiting = [await store.add_notice(msgspec.structs.replace(notice(), root_id="run_1")) for _ in range(2)]
    roots: list[str] = []
    lanes: list[str] = []
    with store.subscribe(ROOT_TOPIC, roots.append), store.subscribe(inbox_topic("telegram"), lanes.append):
        await leave(store, how)
        await trio.testing.wait_all_tasks_blocked()
    assert (set(roots), set(lanes)) == ({"run_1"}, {KEY})
    assert not await store.root_open("run_1")
    states = await inbox_states(store, [number for number in waiting if number])
    assert {state for state, _ in states.values()} == {"abandoned"}


async def test_a_write_that_fails_signals_nothing(store: Store) -> None:
    """A rollback sends no signal."""
    seen: list[str] = []
    with store.subscribe(inbox_topic("telegram"), seen.append):
        await store.accept_message(message("one"))
        with pytest.raises(MailboxFull):
            await store.accept_message(message("two"), limit=1)
        await trio.testing.wait_all_tasks_blocked()
    assert seen == [KEY]
    assert await store.inbox_waiting(inbox="telegram", session_key=KEY) == 1


async def test_a_caller_that_is_cancelled_during_its_commit_is_signalled_for(tmp_path: Path) -> None:
    """The row is durable, so the tasks that wait for it are woken, even if its writer was cancelled."""
    woken = trio.Event()
    async with open_store(tmp_path / "s.db", runner=Runner.THREADED, maintenance=False) as store:
        for number in range(40):
            # In the caller's own task and through the queue: both ways of writing are met.
            await store.set_meta("calm", str(number))
        with store.subscribe(inbox_topic("telegram"), lambda key: woken.set()):
            async with trio.open_nursery() as nursery:

                async def accept() -> None:
                    await store.accept_message(message("one"))

                nursery.start_soon(accept)
                await trio.lowlevel.checkpoint()
                nursery.cancel_scope.cancel()
            if await store.inbox_waiting():
                with trio.fail_after(5):
                    await woken.wait()
            else:
                await store.set_meta("after", "1")
                assert await store.inbox_waiting() == woken.is_set()


async def test_a_subscriber_that_fails_takes_nothing_with_it(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    """The write has happened, and the others are called."""
    seen: list[str] = []

    def fail(key: str) -> None:
        raise RuntimeError("no")

    with store.subscribe(inbox_topic("telegram"), fail), store.subscribe(inbox_topic("telegram"), seen.append):
        assert await store.accept_message(message("one")) is not None
        await trio.testing.wait_all_tasks_blocked()
    assert seen == [KEY]
    assert "a subscriber of inbox:telegram" in caplog.text
