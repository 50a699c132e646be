"""When a conversation is reset: after a time without activity, or at an hour of the day (GW-78 to GW-82).

Decided at a turn boundary, from the session's last activity, the clock and the running jobs; never inside a turn. A conversation is not reset while
its background work would be orphaned.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta, tzinfo
from enum import Enum
from typing import Final

from hermes_trio.base.settings import SettingsError

from .settings import PlatformSettings, ResetSettings


class ResetReason(Enum):
    """Why a conversation was reset: the end reason of the session before."""

    IDLE = "idle"
    DAILY = "daily"

    def told_user(self, policy: ResetSettings) -> str:
        """Return the text for the person."""
        if self is ResetReason.IDLE:
            why = f"nothing was said for more than {_span(policy.idle_minutes)}"
        else:
            why = f"a new day began at {policy.at_hour:02}:00 {policy.timezone}"
        return f"(A new conversation was started, because {why}. What was said before is not remembered here.)"

    def told_model(self) -> str:
        """Return the text for the model."""
        return (
            "This conversation was started afresh by the gateway's reset policy"
            f" ({self.value}); earlier messages are not part of it."
        )


_DAY: Final = timedelta(days=1)


def policy_for(settings: PlatformSettings, chat_type: str) -> ResetSettings:
    """Return the policy of a chat: its type's own, else the platform's."""
    return settings.reset_by_chat_type.get(chat_type, settings.reset)


def check_reset(policy: ResetSettings, where: str) -> None:
    """Raise `SettingsError` for an unknown time zone, at the start of the server."""
    try:
        _zone(policy.timezone)
    except (LookupError, ValueError, OSError):
        raise SettingsError(
            f"[{where}]: unknown time zone {policy.timezone!r}; write an IANA name like 'Europe/Berlin' or 'UTC'"
        ) from None


def reset_reason(
    policy: ResetSettings, *, last_active: float, now: float, job_ages: Sequence[float] = ()
) -> ResetReason | None:
    """Return why the conversation is reset now, or None. `job_ages` are the ages of its running jobs, in seconds."""
    if policy.mode == "none" or last_active >= now:
        return None
    if any(age < policy.bg_process_max_age_hours * 3600 for age in job_ages):
        return None
    if policy.mode in ("idle", "both") and now - last_active > policy.idle_minutes * 60:
        return ResetReason.IDLE
    if policy.mode in ("daily", "both") and last_active < _boundary(policy, now):
        return ResetReason.DAILY
    return None


def _zone(name: str) -> tzinfo:
    """Return a time zone. Raises `LookupError`, `ValueError` or `OSError` for an unknown one. The default does not load `zoneinfo`."""
    if name == "UTC":
        return UTC
    from zoneinfo import ZoneInfo

    return ZoneInfo(name)


def _boundary(policy: ResetSettings, now: float) -> float:
    """Return the most recent moment of the configured hour."""
    zone = _zone(policy.timezone)
    local = datetime.fromtimestamp(now, zone)
    today = local.replace(hour=policy.at_hour, minute=0, second=0, microsecond=0, fold=0)
    # Compared as instants: on the day of a time change the wall clock does not say which of two is later.
    if today.timestamp() > now:
        today = (today.replace(tzinfo=None) - _DAY).replace(tzinfo=zone)
    return today.timestamp()


def _span(minutes: int) -> str:
    if minutes % 1440 == 0:
        days = minutes // 1440
        return "a day" if days == 1 else f"{days} days"
    return f"{minutes // 60} hours" if minutes % 60 == 0 and minutes > 60 else f"{minutes} minutes"
