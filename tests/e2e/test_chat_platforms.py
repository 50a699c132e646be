"""Each chat platform from end to end, over real sockets: message in, turn, reply out; background work; stop; approvals."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from .chat_drivers import PLATFORMS, Driver, Place, Shown, open_driver, open_drivers
from .chat_world import ChatWorld, open_gateway_with


@pytest.fixture(params=PLATFORMS)
async def driver(request: pytest.FixtureRequest) -> AsyncIterator[Driver]:
    """One platform, with people on it."""
    async with open_driver(request.param) as opened:
        yield opened


@pytest.fixture
async def world(driver: Driver, tmp_path: Path) -> AsyncIterator[ChatWorld]:
    """A gateway that is connected to it."""
    async with open_gateway_with({driver.name: driver.table()}, tmp_path / "state.db", directory=tmp_path) as opened:
        await opened.connected()
        yield opened


@pytest.fixture(params=["direct", "threaded"])
def place(request: pytest.FixtureRequest, driver: Driver) -> Place:
    """A direct chat, or a thread in a group."""
    return driver.direct(1) if request.param == "direct" else driver.threaded(1)


def is_in(shown: Shown, place: Place, anchor: str) -> bool:
    """Whether a message is where it belongs, and hangs on what it answers."""
    return (shown.chat, shown.thread, shown.reply_to) == (place.chat, place.thread, anchor)


async def test_a_message_becomes_a_turn_and_its_reply_hangs_on_it(
    driver: Driver, world: ChatWorld, place: Place
) -> None:
    """The reply is in the same chat and thread, anchored to the message, and nothing else is said."""
    anchor = driver.say(place, "good morning")
    reply = await driver.next(place, "good morning")
    assert is_in(reply, place, anchor)
    await world.idle()
    assert len(driver.seen()) == 1


async def test_a_background_process_reports_back_to_where_it_was_started(
    driver: Driver, world: ChatWorld, place: Place
) -> None:
    """The notice comes after the turn, with the output, to the chat, thread and anchor of the message that started it."""
    anchor = driver.say(place, "!bg sleep 0.2; echo finished-$((6*7))")
    started = await driver.next(place, "Background process started")
    notice = await driver.next(place, "finished-42")
    assert is_in(started, place, anchor)
    assert is_in(notice, place, anchor)
    assert "exit code 0" in notice.text
    await world.idle()
    assert len(driver.seen()) == 2


async def test_a_delegated_child_reports_back_to_where_it_was_started(
    driver: Driver, world: ChatWorld, place: Place
) -> None:
    """The child's result arrives in the conversation after the turn that sent it off."""
    anchor = driver.say(place, "!delegate name three rivers")
    assert is_in(await driver.next(place, "dispatched"), place, anchor)
    notice = await driver.next(place, "DELEGATION COMPLETE")
    assert is_in(notice, place, anchor)
    assert "name three rivers" in notice.text
    await world.idle()
    assert len(driver.seen()) == 2


async def test_stop_ends_the_turn_and_says_what_ended(driver: Driver, world: ChatWorld, place: Place) -> None:
    """The receipt comes at once, and nothing of the turn is left."""
    driver.say(place, "!run sleep 60")
    await world.running("tool")
    driver.say(place, f"{driver.prefix}stop")
    receipt = await driver.next(place, "Stopped in")
    assert "nothing of it runs any more" in receipt.text
    await world.idle()
    assert not world.holds("turn")


async def test_an_approval_is_given_by_a_button(driver: Driver, world: ChatWorld, place: Place, tmp_path: Path) -> None:
    """The question has buttons and hangs on the message; pressing one runs the command, and the buttons go away."""
    (tmp_path / "old").mkdir()
    anchor = driver.say(place, "!run rm -rf old && echo removed-$((6*7))")
    question = await driver.next(place, "Approval needed")
    assert is_in(question, place, anchor)
    assert question.buttons == ("Allow once", "Allow for this session", "Always allow", "Deny")
    assert (tmp_path / "old").exists()
    driver.click(question, "Allow once", place)
    await driver.next(place, "removed-42")
    await world.idle()
    assert not (tmp_path / "old").exists()
    settled = next(one for one in driver.seen() if "Approval needed" in one.text)
    assert settled.buttons == ()
    assert "Approved (once)" in settled.text


async def test_an_approval_is_refused_by_a_word(driver: Driver, world: ChatWorld, place: Place, tmp_path: Path) -> None:
    """A bare word answers the question that waits; the command does not run."""
    (tmp_path / "old").mkdir()
    driver.say(place, "!run rm -rf old")
    await driver.next(place, "Approval needed")
    driver.say(place, "no")
    await driver.next(place, "denied")
    await world.idle()
    assert (tmp_path / "old").exists()
    assert "Refused" in next(one for one in driver.seen() if "Approval needed" in one.text).text


async def test_a_button_works_for_nobody_who_is_not_allowed(driver: Driver, tmp_path: Path) -> None:
    """Somebody else in the group sees the buttons, presses one, and nothing happens."""
    owner, stranger = driver.threaded(1), driver.threaded(2)
    stranger_here = Place(owner.chat, stranger.user, owner.thread)
    table = driver.table(allow_all=False, allowed_users=[owner.user])
    async with open_gateway_with({driver.name: table}, directory=tmp_path) as world:
        await world.connected()
        (tmp_path / "old").mkdir()
        driver.say(owner, "!run rm -rf old")
        question = await driver.next(owner, "Approval needed")
        driver.click(question, "Allow once", stranger_here)
        driver.say(owner, "no")
        await driver.next(owner, "denied")
        await world.idle()
    assert (tmp_path / "old").exists()


async def test_one_bad_token_disturbs_nobody(tmp_path: Path) -> None:
    """The platform with the bad token is off and says so; on the others everything works, background work included."""
    async with open_drivers() as drivers:
        for bad in PLATFORMS:
            tables = {name: one.table() for name, one in drivers.items()}
            tables[bad]["token"] = "999999:not-the-token"
            good = [name for name in PLATFORMS if name != bad]
            async with open_gateway_with(tables, tmp_path / f"{bad}.db") as world:
                await world.connected(*good)
                hub = await world.fatal(bad)
                for name in good:
                    place = drivers[name].direct(PLATFORMS.index(bad))
                    drivers[name].say(place, "!bg sleep 0.1; echo through")
                    await drivers[name].next(place, "Background process started")
                    await drivers[name].next(place, "through")
                health = hub.health()
                assert health["status"] == "degraded"
                line = health["platforms"][bad]
                assert (line["state"], line["error_code"], line["attempts"]) == ("fatal", "unauthorized", 1)
                assert "not-the-token" not in line["error"]
                await world.idle()
