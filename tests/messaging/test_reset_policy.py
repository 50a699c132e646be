"""When a conversation starts afresh by itself, and what is said about it."""

from __future__ import annotations

from datetime import datetime
from zoneinfo import ZoneInfo

import pytest
import trio

from hermes_trio.base.settings import SettingsError, read_settings
from hermes_trio.messaging.platforms import Platform
from hermes_trio.messaging.reset_policy import ResetReason, policy_for, reset_reason
from hermes_trio.messaging.settings import PlatformSettings, ResetSettings
from hermes_trio.store import SessionFilter
from hermes_trio.testing.memory_platform import MemoryPlatform

from .harness import open_world, scripted, starts_job

HOUR = 3600.0
BERLIN = ZoneInfo("Europe/Berlin")


def at(text: str) -> float:
    """A local time in Berlin as an instant."""
    return datetime.fromisoformat(text).replace(tzinfo=BERLIN).timestamp()


@pytest.mark.parametrize(
    ("policy", "last", "now", "reason"),
    [
        (ResetSettings(), "2026-01-01 00:00", "2026-12-01 00:00", None),
        (ResetSettings(mode="idle", idle_minutes=60), "2026-01-01 10:00", "2026-01-01 11:00", None),
        (ResetSettings(mode="idle", idle_minutes=60), "2026-01-01 10:00", "2026-01-01 11:01", ResetReason.IDLE),
        (ResetSettings(mode="daily"), "2026-01-01 03:59", "2026-01-01 04:00", ResetReason.DAILY),
        (ResetSettings(mode="daily"), "2026-01-01 04:01", "2026-01-02 03:59", None),
        (ResetSettings(mode="daily", at_hour=2), "2026-03-29 01:30", "2026-03-29 03:05", ResetReason.DAILY),
        (ResetSettings(mode="daily", at_hour=2), "2026-03-29 03:05", "2026-03-29 12:00", None),
        (ResetSettings(mode="both", idle_minutes=60), "2026-01-01 03:30", "2026-01-01 04:10", ResetReason.DAILY),
    ],
)
def test_the_policies(policy: ResetSettings, last: str, now: str, reason: ResetReason | None) -> None:
    """Idle time, the hour of the day in its time zone (also where the clock skips it), both, or never."""
    zoned = read_settings(
        {**{name: getattr(policy, name) for name in policy.__struct_fields__}, "timezone": "Europe/Berlin"},
        ResetSettings,
        "x",
    )
    assert reset_reason(zoned, last_active=at(last), now=at(now)) is reason


def test_young_background_work_keeps_a_conversation() -> None:
    """Work that is older than the limit does not (GW-80)."""
    policy = ResetSettings(mode="idle", idle_minutes=1)
    assert reset_reason(policy, last_active=0, now=HOUR, job_ages=[23 * HOUR]) is None
    assert reset_reason(policy, last_active=0, now=HOUR, job_ages=[25 * HOUR]) is ResetReason.IDLE


def test_a_chat_type_may_have_its_own_policy() -> None:
    """The platform's is the default (GW-79)."""
    group = ResetSettings(mode="daily")
    settings = PlatformSettings(reset_by_chat_type={"group": group})
    assert policy_for(settings, "group") is group
    assert policy_for(settings, "dm").mode == "none"


async def test_an_idle_conversation_starts_afresh_and_says_so_once(virtual_clock: object) -> None:
    """The model is told, the person is told, and the old session has its reason (GW-81)."""
    chat, agent = MemoryPlatform(), scripted()
    settings = PlatformSettings(allow_all=True, reset=ResetSettings(mode="idle", idle_minutes=60))
    async with open_world(agent, Platform(chat, settings)) as world:
        await chat.say("one")
        await chat.wait_sent(1)
        await trio.sleep(2 * HOUR)
        await chat.say("two")
        await chat.say("three")
        await chat.wait_sent(3)
        sessions = await world.store.list_sessions(SessionFilter(source="memory"))
    assert "A new conversation was started" in chat.texts()[1]
    assert chat.texts()[1].endswith("echo: two")
    assert chat.texts()[2] == "echo: three"
    assert "reset policy" in agent.turns[1].input.instructions
    assert agent.turns[2].input.instructions == ""
    assert [one.end_reason for one in sessions] == [None, "idle"]


async def test_a_conversation_with_live_background_work_is_kept(virtual_clock: object) -> None:
    """Its notice must find the session that it was promised to."""
    chat, agent = MemoryPlatform(), scripted(starts_job(5 * HOUR))
    settings = PlatformSettings(allow_all=True, reset=ResetSettings(mode="idle", idle_minutes=60))
    async with open_world(agent, Platform(chat, settings)):
        await chat.say("one")
        await chat.wait_sent(1)
        await trio.sleep(2 * HOUR)
        await chat.say("two")
        await chat.wait_sent(2)
    assert agent.turns[0].context.session_id == agent.turns[1].context.session_id


async def test_a_time_zone_that_does_not_exist_is_refused_at_start(virtual_clock: object) -> None:
    """And not at four in the morning."""
    settings = PlatformSettings(reset=ResetSettings(mode="daily", timezone="Mars/Olympus"))
    with pytest.raises(SettingsError, match="Mars/Olympus"):
        async with open_world(scripted(), Platform(MemoryPlatform(), settings)):
            pass
