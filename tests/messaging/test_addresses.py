"""Delivery targets: what may be written, and where it leads."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hermes_trio.messaging.addresses import (
    Address,
    Keyword,
    Resolution,
    TargetError,
    parse_targets,
    resolve_targets,
    target_text,
)

PLATFORMS = ["telegram", "discord", "slack"]
HOME = {"telegram": Address("telegram", "100", "5"), "slack": Address("slack", "C1")}
ORIGIN = Address("discord", "77", "8")


@pytest.mark.parametrize(
    ("value", "targets"),
    [
        ("origin", (Keyword.ORIGIN,)),
        ("LOCAL", (Keyword.LOCAL,)),
        ("all", (Keyword.ALL,)),
        ("Telegram", (Address("telegram"),)),
        ("telegram:-100123", (Address("telegram", "-100123"),)),
        ("slack:C0Ab:1712.0001", (Address("slack", "C0Ab", "1712.0001"),)),
        ("slack:C1:a:b", (Address("slack", "C1", "a:b"),)),
        ("origin, slack:#general ,origin,", (Keyword.ORIGIN, Address("slack", "#general"))),
        (["telegram:1", "discord:2,local"], (Address("telegram", "1"), Address("discord", "2"), Keyword.LOCAL)),
    ],
)
def test_targets_are_read(value: str | list[str], targets: tuple[object, ...]) -> None:
    """Words, comma lists and sequences are read in order, each target once; ids keep their case."""
    assert targets == parse_targets(value, PLATFORMS)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("", "the delivery value is empty"),
        (" , ", "the delivery value is empty"),
        ([], "the delivery value is empty"),
        ("telegrm:1", "unknown platform 'telegrm'; configured are: discord, slack, telegram"),
        ("telegram:", "the chat after ':' is empty"),
        ("telegram:1:", "the thread after ':' is empty"),
        ("local:1", "unknown platform 'local'"),
    ],
)
def test_a_bad_target_is_refused_with_its_reason(value: str | list[str], message: str) -> None:
    """A mistake is told when it is written, not when the answer is lost."""
    with pytest.raises(TargetError, match=message):
        parse_targets(value, PLATFORMS)


@pytest.mark.parametrize(
    ("value", "origin", "resolution"),
    [
        ("local", ORIGIN, Resolution(local=True)),
        ("origin", ORIGIN, Resolution((ORIGIN,))),
        ("origin", None, Resolution((HOME["telegram"],))),
        ("telegram", ORIGIN, Resolution((HOME["telegram"],))),
        ("discord", ORIGIN, Resolution((ORIGIN,))),
        ("telegram", Address("telegram", "9"), Resolution((Address("telegram", "9"),))),
        ("all", ORIGIN, Resolution((HOME["telegram"], HOME["slack"]))),
        ("all,slack,slack:C1,telegram:100:5", None, Resolution((HOME["telegram"], HOME["slack"]))),
        ("telegram:100,telegram:100:5", None, Resolution((Address("telegram", "100"), HOME["telegram"]))),
        (
            "discord,slack",
            None,
            Resolution(
                (HOME["slack"],),
                problems=(
                    "delivery target 'discord': the platform has no home channel; set one or write 'discord:chat'",
                ),
            ),
        ),
    ],
)
def test_targets_are_resolved_with_the_homes_of_the_moment(
    value: str, origin: Address | None, resolution: Resolution
) -> None:
    """Each target becomes a place, duplicates collapse, and what has no place is a problem beside the others."""
    assert resolution == resolve_targets(parse_targets(value, PLATFORMS), origin=origin, homes=HOME)


def test_without_an_origin_or_a_home_the_answer_stays_local() -> None:
    """`origin` of a job that nobody in a chat made is the local copy when there is no home channel."""
    assert Resolution(local=True) == resolve_targets([Keyword.ORIGIN], origin=None, homes={})
    unreachable = resolve_targets([Keyword.ALL], origin=None, homes={})
    assert unreachable.problems == ("delivery target 'all': no platform has a home channel",)


def test_channel_names_are_looked_up() -> None:
    """A channel's name becomes its id, and then duplicates of the id collapse."""

    def find(platform: str, name: str) -> str | None:
        return {("slack", "#general"): "C1"}.get((platform, name))

    targets = parse_targets("slack:#general,slack:C1,slack:#other", PLATFORMS)
    found = resolve_targets(targets, origin=None, homes={}, find_chat=find)
    assert found.addresses == (Address("slack", "C1"), Address("slack", "#other"))


@given(st.text(max_size=30))
def test_what_is_read_can_be_written_again(value: str) -> None:
    """Any text is refused or read, and what was read is written so that it reads the same."""
    try:
        targets = parse_targets("slack:" + value, PLATFORMS)
    except TargetError:
        return
    assert targets == parse_targets([target_text(target) for target in targets], PLATFORMS)
