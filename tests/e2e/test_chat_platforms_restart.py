"""What people on the chat platforms see when the gateway's process is stopped or killed: nothing is lost, nothing is said twice without a word."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import apsw
import pytest
import trio

from hermes_trio.messaging.senders import DUPLICATE_LABEL
from hermes_trio.testing.platforms import Delay, Drop, FakeDiscord, FakeSlack
from hermes_trio.testing.platforms.faults import FaultScript

from .chat_drivers import PLATFORMS, Driver, Place, open_driver, open_drivers
from .chat_world import TIMEOUT, open_gateway_with, open_server_with

WORK = "!bg echo half-way; sleep 300"


@pytest.mark.one_node  # a process
@pytest.mark.parametrize("how", ["killed", "stopped"])
async def test_each_owner_of_lost_work_is_told_once_after_a_restart(how: str, tmp_path: Path) -> None:
    """Work that ran when the server ended is reported with its last output and the truth about its end, where it was started, once."""
    async with open_drivers() as opened:
        drivers = {name: opened[name] for name in PLATFORMS}
        tables = {name: one.table() for name, one in drivers.items()}
        owners: list[tuple[Driver, Place, str]] = []
        async with open_server_with(tables, tmp_path) as server:
            await _connected(drivers)
            for one in drivers.values():
                for place in (one.direct(1), one.threaded(1)):
                    anchor = one.say(place, WORK)
                    await one.next(place, "Background process started")
                    owners.append((one, place, anchor))
            await _until_sent(tmp_path)
            if how == "killed":
                await server.kill()
            else:
                assert await server.stop() == 0
        for start in range(2):
            async with open_server_with(tables, tmp_path) as server:
                await _connected(drivers)
                if start == 0:
                    for one, place, _ in owners:
                        await one.next(place, "Noted")
                    await _until_sent(tmp_path)
                # The second start has nothing more to tell.
                assert await server.stop() == 0
        for one, place, anchor in owners:
            _, notice = one.seen_in(place)
            assert ("lost" if how == "killed" else "terminated") in notice.text
            assert "half-way" in notice.text
            assert notice.reply_to == anchor
        assert {name: len(one.seen()) for name, one in drivers.items()} == dict.fromkeys(drivers, 4)


async def test_what_is_said_while_the_gateway_is_away_is_answered_after_the_start(tmp_path: Path) -> None:
    """Telegram and Slack keep what people write; the gateway answers it when it is back, once."""
    database = tmp_path / "state.db"
    for name in ("telegram", "slack"):
        async with open_driver(name) as driver:
            place = driver.direct(1)
            async with open_gateway_with({name: driver.table()}, database) as world:
                await world.connected()
                driver.say(place, "first")
                await driver.next(place, "first")
                await world.idle()
            driver.say(place, "second")
            async with open_gateway_with({name: driver.table()}, database) as world:
                await world.connected()
                await driver.next(place, "second")
                await world.idle()
            assert len(driver.seen()) == 2


async def test_a_thread_goes_on_after_a_restart_without_a_mention(tmp_path: Path) -> None:
    """In a thread in which the agent takes part nobody mentions it, whichever process answers."""
    async with open_drivers() as drivers:
        discord, slack = drivers["discord"], drivers["slack"]
        assert isinstance(discord.fake, FakeDiscord)
        assert isinstance(slack.fake, FakeSlack)
        tables = {"discord": discord.table(), "slack": slack.table()}
        here, there = discord.threaded(1), slack.threaded(1)
        async with open_gateway_with(tables, tmp_path / "state.db") as world:
            await world.connected()
            for driver, place in ((discord, here), (slack, there)):
                driver.say(place, "hello")
                await driver.next(place, "hello")
            await world.idle()
        async with open_gateway_with(tables, tmp_path / "state.db") as world:
            await world.connected()
            discord.fake.say("go on", channel_id=here.thread, user_id=here.user)
            await discord.next(here, "go on")
            slack.fake.say("go on", channel=there.chat, thread_ts=there.thread, user=there.user)
            await slack.next(there, "go on")


@pytest.mark.one_node  # a process
@pytest.mark.parametrize("name", PLATFORMS)
async def test_a_reply_whose_sending_was_cut_off_by_a_crash_arrives(name: str, tmp_path: Path) -> None:
    """Killed between the commit and the end of the send, the gateway sends again after its start: once, or a second time with a label."""
    async with open_driver(name) as driver:
        place = driver.direct(1)
        driver.fake.fail(driver.send_method, Delay(60))
        async with open_server_with({name: driver.table()}, tmp_path) as server:
            await driver.ready()
            driver.say(place, "are you there?")
            await _until_taken(driver.fake.handler.faults)
            await server.kill()
        async with open_server_with({name: driver.table()}, tmp_path) as server:
            await driver.next(place, "are you there?")
            await _until_sent(tmp_path)
            assert await server.stop() == 0
        replies = driver.seen_in(place)
        unlabelled = [one for one in replies if "may be a duplicate" not in one.text]
        assert len(unlabelled) <= 1
        assert 1 <= len(replies) <= 2
        assert all("are you there?" in one.text for one in replies)


@pytest.mark.parametrize("name", PLATFORMS)
async def test_a_reply_whose_answer_got_lost_is_not_doubled_without_a_label(name: str, tmp_path: Path) -> None:
    """The platform has it, but its answer is lost on the way: whatever is sent again says that it may be a duplicate. On Discord nothing is."""
    async with open_driver(name) as driver:
        place = driver.direct(1)
        driver.fake.fail(driver.send_method, Drop(before=False))
        async with open_gateway_with({name: driver.table()}, tmp_path / "state.db") as world:
            await world.connected()
            driver.say(place, "hello")
            await driver.next(place, "hello")
            await world.idle()
        first, *others = driver.seen_in(place)
        assert "may be a duplicate" not in first.text
        assert [DUPLICATE_LABEL.split(":")[0].strip("(") in one.text for one in others] == (
            [] if name == "discord" else [True]
        )


async def _connected(drivers: Mapping[str, Driver]) -> None:
    for one in drivers.values():
        await one.ready()


async def _until_sent(home: Path) -> None:
    """Wait until the store says that every reply was sent: a kill before that would rightly send some of them again."""
    with trio.fail_after(TIMEOUT):
        while True:
            connection = apsw.Connection(str(home / "state.db"), flags=apsw.SQLITE_OPEN_READONLY)
            try:
                (waiting,) = connection.execute("SELECT count(*) FROM outbox WHERE settled_at IS NULL").fetchall()[0]
            finally:
                connection.close()
            if not waiting:
                return
            await trio.sleep(0.02)


async def _until_taken(faults: FaultScript) -> None:
    """Wait until the platform holds the call that the fault is for."""
    with trio.fail_after(TIMEOUT):
        while any(faults._pending.values()):  # noqa: ASYNC110 - a list that another task empties
            await trio.sleep(0.01)
