"""The shared bound of the waits for the store: what counts, what does not, and what renews it."""

from __future__ import annotations

import pytest
import trio
import trio.testing

from hermes_trio.runtime.store_waits import StoreWaits


@pytest.fixture(autouse=True)
def on_virtual_time(virtual_clock: trio.testing.MockClock) -> None:
    """Every test here runs on virtual time."""


async def wait(waits: StoreWaits, seconds: float = 3600) -> float:
    """Wait for a store that takes `seconds`; return how long this took."""
    began = trio.current_time()
    with waits.bound():
        await trio.sleep(seconds)
    return trio.current_time() - began


async def test_without_a_limit_each_wait_has_the_whole_bound() -> None:
    waits = StoreWaits(10, trio.current_time)
    assert [await wait(waits) for _ in range(3)] == pytest.approx([10, 10, 10])


async def test_under_a_limit_all_waits_share_it_and_idle_time_does_not_count() -> None:
    waits = StoreWaits(10, trio.current_time)
    waits.limit()
    assert await wait(waits, 4) == pytest.approx(4)
    await trio.sleep(100)
    waits.limit()
    assert [await wait(waits) for _ in range(3)] == pytest.approx([6, 0, 0])
    assert waits.until(30) == trio.current_time()
    waits.renew()
    assert await wait(waits) == pytest.approx(10)
    waits.lift()
    assert await wait(waits) == pytest.approx(10)


async def test_waits_at_the_same_time_count_once() -> None:
    waits = StoreWaits(10, trio.current_time)
    took: dict[float, float] = {}

    async def one(after: float) -> None:
        await trio.sleep(after)
        took[after] = await wait(waits)

    async with trio.open_nursery() as nursery:
        for after in (0, 2, 5):
            nursery.start_soon(one, after)
        await trio.sleep(1)
        waits.limit()
    # The first began before the limit, and ends by its own bound.
    assert took == pytest.approx({0: 10, 2: 9, 5: 6})
    assert await wait(waits) == pytest.approx(0)


async def test_an_answer_renews_what_is_left_and_sets_no_limit() -> None:
    waits = StoreWaits(10, trio.current_time)
    waits.answered()
    assert [await wait(waits) for _ in range(2)] == pytest.approx([10, 10])
    waits.limit()
    assert [await wait(waits) for _ in range(2)] == pytest.approx([10, 0])
    waits.answered()
    assert await wait(waits) == pytest.approx(10)


async def test_a_shorter_bound_of_a_wait_is_kept() -> None:
    waits = StoreWaits(10, trio.current_time)
    waits.limit()
    with waits.bound(3, shield=False) as scope:
        await trio.sleep(3600)
    assert scope.cancelled_caught
    assert await wait(waits) == pytest.approx(7)
