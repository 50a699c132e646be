"""Two hundred conversations on three platforms at once, each with background work: everything arrives where it belongs, in order, once."""

from __future__ import annotations

import sys
from pathlib import Path

import attrs
import trio

from .chat_drivers import PLATFORMS, Driver, Place, Shown, open_drivers
from .chat_world import open_gateway_with

CONVERSATIONS = 200


@attrs.frozen
class Conversation:
    """One person in one place, and what they wrote, in order."""

    driver: Driver
    place: Place
    tag: str
    anchors: tuple[str, ...]

    def problems(self, everywhere: list[str]) -> list[str]:
        """What is wrong with what the agent said here."""
        said = self.driver.seen_in(self.place)
        found = [
            f"{self.tag}: {one.text!r} is from another conversation"
            for one in said
            if any(tag in one.text for tag in everywhere if tag != self.tag)
        ]
        kinds = [_kind(one, self.tag) for one in said]
        if sorted(kinds) != sorted(["first", "started", "last", "notice"]):
            found.append(f"{self.tag}: saw {kinds}")
        elif [kind for kind in kinds if kind != "notice"] != ["first", "started", "last"]:
            found.append(f"{self.tag}: replies out of order: {kinds}")
        elif kinds.index("notice") < kinds.index("started"):
            found.append(f"{self.tag}: the notice came before the reply: {kinds}")
        else:
            wanted = dict(zip(("first", "started", "last"), self.anchors, strict=True)) | {"notice": self.anchors[1]}
            found += [
                f"{self.tag}: {kind} hangs on {one.reply_to!r} instead of {wanted[kind]!r}"
                for kind, one in zip(kinds, said, strict=True)
                if one.reply_to != wanted[kind]
            ]
        return found


def _kind(shown: Shown, tag: str) -> str:
    if f"first {tag}" in shown.text:
        return "first"
    if f"last {tag}" in shown.text:
        return "last"
    if f"{tag} is done" in shown.text:
        return "notice"
    return "started" if "Background process started" in shown.text else f"unexpected: {shown.text}"


async def test_two_hundred_conversations_do_not_cross(tmp_path: Path) -> None:
    """Every reply and every notice is in its own chat and thread, in order and anchored; nothing is lost or doubled."""
    async with open_drivers() as drivers:
        tables = {name: one.table() for name, one in drivers.items()}
        async with open_gateway_with(tables, tmp_path / "state.db", directory=tmp_path) as world:
            await world.connected()
            talks: list[Conversation] = []
            for number in range(CONVERSATIONS):
                driver = drivers[PLATFORMS[number % len(PLATFORMS)]]
                place = driver.direct(number) if (number // 3) % 2 else driver.threaded(number)
                tag = f"talk {number:03} on {driver.name}."
                texts = (f"first {tag}", f"!bg sleep 0.5; echo '{tag} is done'", f"last {tag}")
                talks.append(Conversation(driver, place, tag, tuple(driver.say(place, text) for text in texts)))
                await trio.lowlevel.checkpoint()
            with trio.fail_after(240):
                while sum(len(one.seen()) for one in drivers.values()) < 4 * CONVERSATIONS:  # noqa: ASYNC110
                    await trio.sleep(0.1)
            await world.idle()
    tags = [talk.tag for talk in talks]
    problems = [problem for talk in talks for problem in talk.problems(tags)]
    sys.stdout.write(f"conversations: {len(talks)}, messages: {sum(len(d.seen()) for d in drivers.values())}\n")
    sys.stdout.write(f"crossings: {len(problems)}\n")
    assert not problems, "\n".join(problems[:20])
