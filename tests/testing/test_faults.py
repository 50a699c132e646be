"""Fault injection: every verb of a store can be made to fail before or after its commit, to be slow, or to find the disk full."""

import inspect
import re
from pathlib import Path

import pytest
import trio

from hermes_trio import Runtime
from hermes_trio.store import CommitUncertain, Runner, SqliteStore, StoreError, StoreFull, open_store
from hermes_trio.testing.faults import READ_VERBS, STORE_VERBS, InjectedFault, StoreFaultKind, StoreFaults
from tests.store.turns import finish, message, start


async def test_every_verb_of_the_port_can_be_made_to_fail():
    """Every verb is forwarded to the wrapped store, and every verb raises before it if a rule applies."""
    called: list[str] = []

    class Recorder:
        def __getattr__(self, name: str):
            async def verb(*args: object, **named: object) -> str:
                called.append(name)
                return f"{name} {args} {named}"

            return verb

    class Opened:
        async def __aenter__(self):
            return Recorder()

        async def __aexit__(self, *_: object) -> None: ...

    faults = StoreFaults()
    async with faults.around(Opened()) as store:  # pyright: ignore[reportArgumentType]
        for verb in sorted(STORE_VERBS):
            assert await getattr(store, verb)(1, a=2) == f"{verb} (1,) {{'a': 2}}"
        assert called == sorted(STORE_VERBS)
        faults.fail(times=None)
        for verb in sorted(STORE_VERBS):
            with pytest.raises(StoreError):
                await getattr(store, verb)(1, a=2)
        assert len(called) == len(STORE_VERBS)
        assert faults.calls == dict.fromkeys(STORE_VERBS, 2)


def test_the_reads_are_the_verbs_that_do_not_write():
    """`full` concerns exactly the verbs that submit a write and wait for it."""
    for verb in STORE_VERBS:
        writes = re.search(r"self\._(write|write_heavily|prune)\(|\.submit\(|self\.maintain", _source(verb))
        assert (verb in READ_VERBS) == (writes is None), verb


def _source(verb: str) -> str:
    source = inspect.getsource(getattr(SqliteStore, verb))
    for other in re.findall(r"await self\.(\w+)\(", source):
        if hasattr(SqliteStore, other) and other != verb:
            source += _source(other)
    return source


async def test_a_fault_before_the_commit_leaves_nothing_and_one_after_it_leaves_everything():
    """The caller gets an error both times; only the second write is stored, and its error is `CommitUncertain`."""
    faults = StoreFaults()
    async with faults.around(open_store(None)) as store:
        faults.fail("finish_turn")
        with pytest.raises(StoreError, match="finish_turn"):
            await store.finish_turn(finish(start(), "a", "b"))
        assert await store.load_history("s1") == []
        faults.fail("finish_turn", after_commit=True)
        with pytest.raises(CommitUncertain):
            await store.finish_turn(finish(start(), "a", "b"))
        assert [entry.text for entry in await store.load_history("s1")] == ["a", "b"]
        await store.finish_turn(finish(start("turn_2"), "c", "d"))
    assert faults.injected == [
        InjectedFault("finish_turn", StoreFaultKind.BEFORE),
        InjectedFault("finish_turn", StoreFaultKind.AFTER),
    ]


async def test_a_rule_counts():
    """`skip` calls pass, `times` calls fail, and the rest pass."""
    faults = StoreFaults()
    async with faults.around(open_store(None)) as store:
        faults.fail("set_meta", skip=2, times=2)
        results: list[bool] = []
        for number in range(6):
            try:
                await store.set_meta("key", str(number))
            except StoreError:
                results.append(False)
            else:
                results.append(True)
        assert results == [True, True, False, False, True, True]


async def test_a_seed_repeats_its_faults():
    """The same seed and the same calls give the same faults; another seed gives others."""

    async def run(seed: int) -> list[int]:
        faults = StoreFaults(seed=seed)
        faults.fail("set_meta", times=None, chance=0.3)
        failed: list[int] = []
        async with faults.around(open_store(None)) as store:
            for number in range(50):
                try:
                    await store.set_meta("key", str(number))
                except StoreError:
                    failed.append(number)
        return failed

    first = await run(1)
    assert 5 < len(first) < 30
    assert first == await run(1) != await run(2)


async def test_a_full_store_reads_and_works_again_when_healed():
    """Writes raise `StoreFull` and store nothing; reads succeed; after `heal` everything works."""
    faults = StoreFaults()
    async with faults.around(open_store(None)) as store:
        faults.full()
        with pytest.raises(StoreFull):
            await store.accept_message(message())
        assert await store.waiting_sessions("telegram") == []
        faults.heal()
        await store.accept_message(message())
        assert len(await store.waiting_sessions("telegram")) == 1


@pytest.mark.parametrize("on_disk", [False, True], ids=["memory", "file-inline"])
async def test_a_slow_write_is_made_although_its_caller_left_and_later_writes_wait_behind_it(
    on_disk: bool, tmp_path: Path, virtual_clock: trio.testing.MockClock
):
    """As in a real store: cancelling abandons the wait, never the write, and writes keep their order. Works on virtual time."""
    faults = StoreFaults()
    began = trio.current_time()
    path = tmp_path / "store.db" if on_disk else None
    async with faults.around(open_store(path, runner=Runner.INLINE, maintenance=False)) as store:
        faults.slow("set_meta", seconds=30)
        with trio.move_on_after(5) as impatient:
            await store.set_meta("a", "1")
        assert impatient.cancelled_caught
        assert trio.current_time() - began == 5
        assert await store.get_meta("a") is None
        await store.set_meta("b", "2")
        assert trio.current_time() - began == 30
        assert await store.get_meta("a") == "1"
        faults.slow("set_meta", seconds=60)
        with trio.move_on_after(1):
            await store.set_meta("a", "3")
    assert trio.current_time() - began == 90


async def test_a_runtime_runs_on_it(virtual_clock: trio.testing.MockClock):
    """The wrapped store is a store like any other: a turn's end that cannot be written is an error of that turn, and the next one works."""
    faults = StoreFaults()

    async def agent(turn: object) -> str:
        return "hello"

    async with Runtime(agent=agent, store=faults.around(open_store(None))) as runtime:
        outcome = await runtime.run_turn("hi")
        assert outcome.text == "hello"
    assert faults.calls["recover"] == 1
    assert faults.calls["finish_turn"] == 1


def test_a_verb_that_does_not_exist_is_refused():
    """A rule for a verb that does not exist is refused: it would never apply."""
    with pytest.raises(ValueError, match="did you mean 'finish_turn'"):
        StoreFaults().fail("finish_turns")


async def test_the_body_raises_its_own_exception():
    """An exception of the body is raised as it is, not in a group."""
    with pytest.raises(KeyError):
        async with StoreFaults().around(open_store(None)):
            raise KeyError("mine")
