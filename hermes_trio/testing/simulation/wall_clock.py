"""What a clock on the wall shows, for the invariants of scheduled jobs. It knows nothing of the scheduler.

The rule: a time of day comes at the first minute at which the clock of that day shows it, or a later time. So a time that is left out comes at the change
of the clock, and one that is there twice comes the first time only.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo


def times_of_day(zone: str, first: datetime, until: datetime) -> Iterator[tuple[datetime, datetime]]:
    """Yield the minutes from `first` to `until`, in UTC, with each local time that comes then; most minutes have one, and some none or many."""
    place, minute = ZoneInfo(zone), timedelta(minutes=1)
    now = first.astimezone(UTC).replace(second=0, microsecond=0) - timedelta(days=2)
    reached = now.astimezone(place).replace(tzinfo=None, hour=0, minute=0, fold=0) - minute
    while now <= until:
        shown = now.astimezone(place).replace(tzinfo=None, fold=0)
        while reached < shown:
            reached += minute
            if now >= first:
                yield now, reached
        now += minute
