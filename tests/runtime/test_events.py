"""The event log: append-only, numbered, bounded, with a cursor for every reader."""

import pytest
import trio

from hermes_trio.runtime.event_log import EventLog, Gap, LogEvent


def numbers(batch: list[LogEvent | Gap]) -> list[int]:
    """The numbers of the events in a batch."""
    return [item.number for item in batch if isinstance(item, LogEvent)]


async def test_many_readers_each_see_everything_in_order():
    """Reading destroys nothing: an early and a late reader get the same."""
    log = EventLog()
    seen: dict[str, list[int]] = {"early": [], "late": []}

    async def read(name: str) -> None:
        cursor = log.cursor()
        while batch := await cursor.read():
            seen[name] += numbers(batch)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(read, "early")
        await trio.testing.wait_all_tasks_blocked()
        for number in range(100):
            log.append({"n": number})
            if number == 50:
                nursery.start_soon(read, "late")
                await trio.testing.wait_all_tasks_blocked()
        log.close()
    assert seen["early"] == seen["late"] == list(range(1, 101))


async def test_a_reader_resumes_behind_the_event_that_it_saw_last():
    """Without loss and without repetition."""
    log = EventLog()
    for number in range(10):
        log.append({"n": number})
    log.close()
    assert numbers(await log.cursor(after=7).read()) == [8, 9, 10]
    assert await log.cursor(after=10).read() == []


async def test_a_slow_reader_is_told_about_the_gap_and_never_slows_the_writer():
    """The log is bounded; what was dropped is named."""
    log = EventLog(limit=5)
    cursor = log.cursor()
    for number in range(20):
        log.append({"n": number})
    batch = await cursor.read()
    assert batch[0] == Gap(after=0, oldest=16)
    assert numbers(batch) == [16, 17, 18, 19, 20]


async def test_a_closed_log_takes_nothing_more():
    """Its terminal event has been written."""
    log = EventLog()
    log.close()
    with pytest.raises(ValueError, match="closed; its terminal event has been written"):
        log.append({})


@pytest.mark.parametrize("after", range(12))
async def test_since_finds_the_right_place_from_either_end(after: int):
    """Both ways of looking for the place agree."""
    log = EventLog(limit=8)
    for number in range(10):
        log.append({"n": number})
    expected = [number for number in range(3, 11) if number > after]
    assert numbers(list(log.since(after, 100))) == expected
    assert numbers(list(log.since(after, 2))) == expected[:2]
