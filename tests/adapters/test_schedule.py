"""Schedules: what a person may write, which instants that means, and what runs after a pause."""

from __future__ import annotations

from datetime import UTC, date, datetime, timedelta
from functools import cache
from itertools import islice, pairwise
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hermes_trio.adapters.cron.schedule import (
    MISSED_COUNTED,
    MISSED_LISTED,
    Cron,
    Due,
    Every,
    Once,
    ScheduleError,
    default_grace,
    due,
    from_record,
    next_after,
    parse_schedule,
    slots,
    to_record,
)

NOW = datetime(2026, 11, 16, 10, 0, tzinfo=UTC)
MINUTE = timedelta(minutes=1)
HOUR = timedelta(hours=1)
DAY = timedelta(days=1)


def cron(expression: str, zone: str = "UTC", anchor: datetime = NOW) -> Cron:
    return Cron(expression, zone, anchor)


def local_slots(expression: str, zone: str, day: date, days: int = 1) -> list[str]:
    """The slots on some local days, as the clock on the wall shows them."""
    info = ZoneInfo(zone)
    start = datetime(day.year, day.month, day.day, tzinfo=info).astimezone(UTC)
    last = day + timedelta(days=days)
    end = datetime(last.year, last.month, last.day, tzinfo=info).astimezone(UTC)
    found: list[str] = []
    for slot in slots(cron(expression, zone, start - DAY), start - timedelta(seconds=1)):
        if slot >= end:
            break
        found.append(slot.astimezone(info).strftime("%d %H:%M%z"))
    return found


# What may be written


@pytest.mark.parametrize(
    ("text", "wait"),
    [
        ("30m", 30 * MINUTE),
        ("2h", 2 * HOUR),
        ("1d", DAY),
        ("45 min", 45 * MINUTE),
        ("3 hours", 3 * HOUR),
        ("2 days", 2 * DAY),
        ("1 week", 7 * DAY),
        ("1h30m", 90 * MINUTE),
        ("90s", timedelta(seconds=90)),
        (" 5M ", 5 * MINUTE),
    ],
)
def test_a_duration_means_once_from_now(text: str, wait: timedelta) -> None:
    """A bare duration is a one-shot that long after now."""
    assert Once(NOW + wait) == parse_schedule(text, now=NOW)


@pytest.mark.parametrize(
    ("text", "interval"),
    [("every 30m", 30 * MINUTE), ("Every 2 hours", 2 * HOUR), ("every day", DAY), ("every 1h 15m", 75 * MINUTE)],
)
def test_every_means_an_interval(text: str, interval: timedelta) -> None:
    """`every` and a duration is an interval anchored at its creation."""
    assert Every(interval, NOW) == parse_schedule(text, now=NOW)


@pytest.mark.parametrize(
    ("text", "expression", "zone"),
    [
        ("0 9 * * *", "0 9 * * *", "UTC"),
        ("0 9 * * mon-fri", "0 9 * * MON-FRI", "UTC"),
        ("0 9 1 JAN,jul *", "0 9 1 JAN,JUL *", "UTC"),
        ("0 9 * * MON-SUN", "0 9 * * MON-7", "UTC"),
        ("30 0 9 * * *", "30 0 9 * * *", "UTC"),
        ("@daily", "0 0 * * *", "UTC"),
        ("CRON_TZ=Europe/Berlin 0 9 * * *", "0 9 * * *", "Europe/Berlin"),
        ("TZ=Asia/Tokyo @hourly", "0 * * * *", "Asia/Tokyo"),
        ("  */5   *  * * *  ", "*/5 * * * *", "UTC"),
    ],
)
def test_cron_expressions_with_names_seconds_aliases_and_zones(text: str, expression: str, zone: str) -> None:
    """Cron takes five or six fields, names in any case, aliases and a zone prefix."""
    assert Cron(expression, zone, NOW) == parse_schedule(text, now=NOW)


@pytest.mark.parametrize(
    ("text", "tz", "at"),
    [
        ("2026-12-24T18:30", "UTC", "2026-12-24T18:30:00+00:00"),
        ("2026-12-24 18:30", "Europe/Berlin", "2026-12-24T17:30:00+00:00"),
        ("2026-12-24", "America/New_York", "2026-12-24T05:00:00+00:00"),
        ("2026-12-24T18:30Z", "Europe/Berlin", "2026-12-24T18:30:00+00:00"),
        ("2026-12-24T18:30+05:45", "Europe/Berlin", "2026-12-24T12:45:00+00:00"),
        ("CRON_TZ=Asia/Tokyo 2026-12-24T09:00", "Europe/Berlin", "2026-12-24T00:00:00+00:00"),
        ("2027-03-28T02:30", "Europe/Berlin", "2027-03-28T01:00:00+00:00"),
        ("2027-10-31T02:30", "Europe/Berlin", "2027-10-31T00:30:00+00:00"),
    ],
)
def test_a_date_is_read_in_its_own_zone_or_the_given_one(text: str, tz: str, at: str) -> None:
    """A naive date is local; a skipped local time means the shift, a repeated one its first pass."""
    assert Once(datetime.fromisoformat(at)) == parse_schedule(text, now=NOW, tz=tz)


def test_a_date_may_lie_two_minutes_in_the_past_and_no_more() -> None:
    """A one-shot up to 120 s old is accepted and due at once; an older one is refused with its age."""
    recent = parse_schedule("2026-11-16T09:58:00", now=NOW)
    assert Due(run=NOW - 2 * MINUTE) == due(recent, None, NOW)
    with pytest.raises(ScheduleError, match=r"lies in the past: 2026-11-16T09:57:59\+00:00 is 2m 1s before now"):
        parse_schedule("2026-11-16T09:57:59", now=NOW)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "the schedule is empty"),
        ("soon", "schedule 'soon' is not understood; write '30m'"),
        ("every", "schedule 'every' is not understood"),
        ("every blue moon", "'blue moon' is not a duration"),
        ("5 parsecs", "unknown unit 'parsecs'; units are s, m, h, d and w"),
        ("0m", "the duration is zero"),
        ("every 0h", "the duration is zero"),
        ("999999999w", "longer than 3660 days"),
        ("every 3660d 1m", "longer than 3660 days"),
        ("CRON_TZ=Europe/Berlin every 1h", "a duration has no time zone; remove 'CRON_TZ=Europe/Berlin'"),
        ("CRON_TZ=Mars/Olympus 0 9 * * *", "unknown time zone 'Mars/Olympus'"),
        ("CRON_TZ=Europe 0 9 * * *", "unknown time zone 'Europe'"),
        ("CRON_TZ=../etc/passwd 0 9 * * *", "unknown time zone '../etc/passwd'"),
        ("CRON_TZ= 0 9 * * *", "unknown time zone ''"),
        ("0 25 * * *", "the hour field '25' is not valid; allowed: 0-23"),
        ("60 0 0 * * *", "the second field '60' is not valid; allowed: 0-59"),
        ("0 9 * * FUNDAY", "the day-of-week field 'FUNDAY' is not valid"),
        ("0 9 30 2 *", "the day-of-month field '30' is not valid"),
        ("*/0 * * * *", "the minute field '\\*/0' is not valid"),
        ("0 9 */31 2 MON#5", "never comes"),
        ("* * * * * * *", "5 fields, or 6 with seconds first, not 7"),
        ("@often", "'@often' is not one of @annually, @daily"),
        ("2026-13-01", "not a date and time"),
        ("0 " * 200, "399 characters; at most 256"),
    ],
)
def test_a_bad_schedule_is_refused_with_its_reason(text: str, message: str) -> None:
    """What cannot be read is refused with the part that is wrong and what would be right."""
    with pytest.raises(ScheduleError, match=message.replace("(", r"\(")):
        parse_schedule(text, now=NOW)


@given(st.text(max_size=40) | st.from_regex(r"[0-9*/,#L A-Z@-]{1,30}", fullmatch=True))
def test_any_text_is_a_schedule_or_a_schedule_error(text: str) -> None:
    """No text makes the parser fail in another way, and what it accepts has a slot and a record."""
    try:
        schedule = parse_schedule(text, now=NOW)
    except ScheduleError:
        return
    assert next_after(schedule, NOW) is not None or isinstance(schedule, Once)
    assert schedule == from_record(to_record(schedule))


def test_a_naive_clock_is_refused() -> None:
    """Times without a zone are a programming error that is named."""
    with pytest.raises(ScheduleError, match="has no time zone; pass an aware datetime"):
        parse_schedule("30m", now=datetime(2026, 1, 1))


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({}, "kind is None"),
        ({"kind": "once", "run_at": "tomorrow"}, "run_at is 'tomorrow'"),
        ({"kind": "once", "run_at": "2026-01-01T00:00:00"}, "it must be an ISO time with its zone"),
        ({"kind": "interval", "seconds": 0, "anchor": NOW.isoformat()}, "seconds is 0"),
        ({"kind": "cron", "expr": "0 9 * * *", "anchor": NOW.isoformat()}, "expr and tz must be texts"),
    ],
)
def test_a_damaged_record_names_its_member(record: dict[str, object], message: str) -> None:
    """A stored schedule that cannot be read says which member is wrong."""
    with pytest.raises(ScheduleError, match=message):
        from_record(record)


# Slots


def test_interval_slots_stay_on_their_anchor() -> None:
    """An interval counts from its anchor, whenever it is asked, so slots never drift."""
    every = Every(7 * MINUTE, NOW)
    assert next_after(every, NOW - DAY) == NOW + 7 * MINUTE
    assert next_after(every, NOW) == NOW + 7 * MINUTE
    assert next_after(every, NOW + 7 * MINUTE) == NOW + 14 * MINUTE
    assert next_after(every, NOW + 13 * MINUTE) == NOW + 14 * MINUTE


def test_a_one_shot_has_one_slot() -> None:
    """A one-shot has a next slot until it has come."""
    assert next_after(Once(NOW + HOUR), NOW) == NOW + HOUR
    assert next_after(Once(NOW + HOUR), NOW + HOUR) is None


def test_the_end_of_the_calendar_ends_the_slots() -> None:
    """Past the year 9999 there is no next slot, and no error."""
    last = datetime(9999, 12, 31, 23, 59, tzinfo=UTC)
    assert next_after(cron("0 9 * * *"), last) is None
    assert next_after(Every(HOUR, NOW), last) is None


def test_a_skipped_time_runs_once_at_the_shift() -> None:
    """At spring-forward the named times within the gap run once together, when the clock jumps."""
    day = date(2027, 3, 28)
    assert local_slots("30 2 * * *", "Europe/Berlin", day) == ["28 03:00+0200"]
    assert local_slots("*/20 2 * * *", "Europe/Berlin", day) == ["28 03:00+0200"]
    assert local_slots("0 */2 * * *", "Europe/Berlin", day)[:3] == ["28 00:00+0100", "28 03:00+0200", "28 04:00+0200"]


def test_a_repeated_time_runs_once() -> None:
    """At fall-back the named times run in the first pass only."""
    day = date(2027, 10, 31)
    assert local_slots("30 2 * * *", "Europe/Berlin", day) == ["31 02:30+0200"]
    assert local_slots("*/30 1-3 * * *", "Europe/Berlin", day) == [
        "31 01:00+0200",
        "31 01:30+0200",
        "31 02:00+0200",
        "31 02:30+0200",
        "31 03:00+0100",
        "31 03:30+0100",
    ]


def test_every_hour_means_every_real_hour() -> None:
    """An expression for all hours runs 23 times on the short day and 25 times on the long one, in any spelling."""
    for expression in ("15 * * * *", "15 0-23 * * *", "0 15 * * * *"):
        assert len(local_slots(expression, "Europe/Berlin", date(2027, 3, 28))) == 23
        assert len(local_slots(expression, "Europe/Berlin", date(2027, 10, 31))) == 25


def test_a_midnight_that_does_not_exist_still_runs() -> None:
    """In Cairo the clock jumps at midnight: the daily job runs at the shift."""
    assert local_slots("0 0 * * *", "Africa/Cairo", date(2027, 4, 29), 3)[1] == "30 01:00+0300"


ZONES = [
    ("Europe/Berlin", 2027),
    ("America/New_York", 2027),
    ("Australia/Lord_Howe", 2027),
    ("Africa/Cairo", 2027),
    ("America/Scoresbysund", 2027),
    ("Asia/Kathmandu", 2027),
    ("Pacific/Apia", 2011),
    ("America/Havana", 2027),
]


@cache
def transitions(zone: str, year: int) -> list[datetime]:
    """The UTC hours of a year in which the zone's offset changes, or one ordinary day if it never does."""
    info = ZoneInfo(zone)
    start = datetime(year, 1, 1, tzinfo=UTC)
    hours = [start + n * HOUR for n in range(366 * 24)]
    offsets = [hour.astimezone(info).utcoffset() for hour in hours]
    found = [hours[n] for n in range(1, len(hours)) if offsets[n] != offsets[n - 1]]
    return found or [datetime(year, 6, 1, tzinfo=UTC)]


@cache
def timeline(
    zone: str, start: datetime, end: datetime
) -> tuple[dict[datetime, list[datetime]], list[tuple[datetime, datetime]]]:
    """Every minute of a stretch of time: which instants a wall clock shows as what, and in which order."""
    info = ZoneInfo(zone)
    shown: dict[datetime, list[datetime]] = {}
    order: list[tuple[datetime, datetime]] = []
    at = start
    while at < end:
        wall = at.astimezone(info).replace(tzinfo=None, fold=0)
        shown.setdefault(wall, []).append(at)
        order.append((at, wall))
        at += MINUTE
    return shown, order


def expected_slots(
    minutes: set[int], hours: set[int], weekdays: set[int], zone: str, start: datetime, end: datetime
) -> list[datetime]:
    """The slots in (start, end), by looking at every single minute: the rule of the module, said another way."""
    shown, order = timeline(zone, start - 2 * DAY, end + 2 * DAY)
    found: set[datetime] = set()

    def matches(wall: datetime) -> bool:
        return wall.minute in minutes and wall.hour in hours and (wall.weekday() + 1) % 7 in weekdays

    for wall, instants in shown.items():
        if matches(wall):
            found.update(instants if len(hours) == 24 else instants[:1])
    if len(hours) < 24:
        for (_, before), (shift, after) in pairwise(order):
            skipped = before + MINUTE
            while skipped < after:
                if matches(skipped):
                    found.add(shift)
                    break
                skipped += MINUTE
    return sorted(slot for slot in found if start < slot < end)


def field_text(values: set[int], everything: int) -> str:
    return "*" if len(values) == everything else ",".join(map(str, sorted(values)))


@pytest.mark.parametrize(("zone", "year"), ZONES)
@settings(max_examples=12, deadline=None)
@given(
    minutes=st.sets(st.integers(0, 59), min_size=1, max_size=4) | st.just(set(range(60))),
    hours=st.sets(st.integers(0, 23), min_size=1, max_size=23) | st.just(set(range(24))),
    weekdays=st.sets(st.integers(0, 6), min_size=1),
)
def test_slots_around_time_changes_agree_with_looking_at_every_minute(
    zone: str, year: int, minutes: set[int], hours: set[int], weekdays: set[int]
) -> None:
    """Around each change of the clock, slots are exactly those that a minute-by-minute reading of the rule gives."""
    expression = f"{field_text(minutes, 60)} {field_text(hours, 24)} * * {field_text(weekdays, 7)}"
    for shift in transitions(zone, year):
        start, end = shift - 36 * HOUR, shift + 36 * HOUR
        found: list[datetime] = []
        for slot in slots(cron(expression, zone, start), start):
            if slot >= end:
                break
            found.append(slot)
        assert expected_slots(minutes, hours, weekdays, zone, start, end) == found


@pytest.mark.parametrize(("zone", "year"), ZONES)
def test_a_year_of_cron_has_one_slot_a_day(zone: str, year: int) -> None:
    """Asked slot by slot, as a server does it, a daily job has one slot for each day of the year, in order."""
    info = ZoneInfo(zone)
    start = datetime(year, 1, 1, tzinfo=info).astimezone(UTC)
    end = datetime(year + 1, 1, 1, tzinfo=info).astimezone(UTC)
    for expression in ("30 2 * * *", "0 0 * * *", "*/7 1 * * *"):
        job = cron(expression, zone, start - DAY)
        stepped: list[datetime] = []
        at = next_after(job, start - timedelta(seconds=1))
        while at is not None and at < end:
            stepped.append(at)
            at = next_after(job, at)
        assert stepped == sorted(set(stepped))
        assert stepped == list(islice(slots(job, start - timedelta(seconds=1)), len(stepped)))
        per_day = 9 if expression.startswith("*/7") else 1
        days = {slot.astimezone(info).date() for slot in stepped}
        assert len(days) in (364, 365)  # Apia went from 29 to 31 December 2011
        assert per_day * 364 - 8 <= len(stepped) <= per_day * 365


# Deciding


def test_nothing_is_due_before_the_first_slot() -> None:
    """Between two slots there is nothing to run."""
    assert Due() == due(cron("0 9 * * *"), None, NOW + HOUR)
    assert Due() == due(Every(HOUR, NOW), None, NOW + 59 * MINUTE)
    assert Due() == due(Once(NOW + HOUR), None, NOW)


def test_a_slot_on_time_runs() -> None:
    """At its time a slot is the one to run and nothing was missed."""
    slot = datetime(2026, 11, 17, 9, 0, tzinfo=UTC)
    assert Due(run=slot) == due(cron("0 9 * * *"), None, slot)
    assert Due(run=slot) == due(cron("0 9 * * *"), None, slot + 90 * MINUTE)
    assert Due() == due(cron("0 9 * * *"), slot, slot + 90 * MINUTE)


def test_late_slots_collapse_into_one_run() -> None:
    """After a pause the newest slot runs once and stands for the older ones."""
    answer = due(Every(HOUR, NOW), None, NOW + 5 * HOUR + 10 * MINUTE)
    assert answer.run == NOW + 5 * HOUR
    assert tuple(NOW + n * HOUR for n in (1, 2, 3, 4)) == answer.missed
    assert answer.missed_count == 4
    assert answer.late
    assert Due() == due(Every(HOUR, NOW), answer.run, NOW + 5 * HOUR + 10 * MINUTE)


def test_a_late_one_shot_still_runs_once() -> None:
    """A one-shot that a stopped server could not run, runs late, and never twice."""
    assert Due(run=NOW, late=True) == due(Once(NOW), None, NOW + DAY)
    assert Due() == due(Once(NOW), NOW, NOW + DAY)


def test_a_clock_that_goes_back_makes_nothing_due() -> None:
    """Slots that were accounted for do not come again when the clock is set back."""
    slot = datetime(2026, 11, 17, 9, 0, tzinfo=UTC)
    job = cron("* * * * *")
    assert Due() == due(job, slot, slot - DAY)
    assert Due() == due(job, slot, slot)
    assert Due(run=slot + MINUTE) == due(job, slot, slot + MINUTE)


@pytest.mark.parametrize(
    ("schedule", "grace"),
    [
        (cron("* * * * *"), 2 * MINUTE),
        (cron("0 * * * *"), 30 * MINUTE),
        (cron("0 9 * * *"), 2 * HOUR),
        (Every(10 * MINUTE, NOW), 5 * MINUTE),
        (Once(NOW), 2 * MINUTE),
    ],
)
def test_the_grace_is_half_the_period_within_bounds(schedule: Once | Every | Cron, grace: timedelta) -> None:
    """Grace is half the period, at least two minutes and at most two hours."""
    slot = next_after(schedule, NOW) or NOW
    assert grace == default_grace(schedule, slot)


def test_a_given_grace_decides_what_is_late() -> None:
    """The caller's grace replaces the default one."""
    job, slot = Every(HOUR, NOW), NOW + HOUR
    assert not due(job, None, slot + 30 * MINUTE).late
    assert due(job, None, slot + 30 * MINUTE, timedelta(seconds=1)).late


@pytest.mark.parametrize("zone", ["UTC", "Europe/Berlin", "America/Havana"])
@pytest.mark.parametrize("expression", ["* * * * *", "*/3 1-22 * * *", "*/2 * * * SUN,MON,TUE"])
def test_a_year_asleep_is_answered_with_bounds(expression: str, zone: str) -> None:
    """After a year the answer has the newest slot, the newest missed ones, and a lower bound of their number."""
    now = datetime(2027, 10, 31, 1, 30, 30, tzinfo=UTC)
    job = cron(expression, zone, now - 365 * DAY)
    answer = due(job, None, now)
    recent = _until(job, now - 14 * DAY, now)
    assert recent[-1] == answer.run
    assert tuple(recent[-MISSED_LISTED - 1 : -1]) == answer.missed
    assert not answer.missed_exact
    assert answer.missed_count == MISSED_COUNTED


def test_a_long_interval_pause_is_counted_exactly() -> None:
    """Intervals are counted by arithmetic, so their number is exact however long the pause."""
    answer = due(Every(timedelta(seconds=1), NOW), None, NOW + 365 * DAY)
    assert answer.missed_count == 365 * 86400 - 1
    assert answer.missed_exact
    assert len(answer.missed) == MISSED_LISTED
    assert answer.missed[-1] == NOW + 365 * DAY - timedelta(seconds=1)


def _until(schedule: Cron, start: datetime, end: datetime) -> list[datetime]:
    found: list[datetime] = []
    for slot in slots(schedule, start):
        if slot > end:
            return found
        found.append(slot)
    return found


@settings(max_examples=60, deadline=None)
@given(
    expression=st.sampled_from(["* * * * *", "*/17 2,3 * * *", "30 2 * * *", "0 */5 * * MON", "59 * * * *"]),
    zone=st.sampled_from(["Europe/Berlin", "Africa/Cairo", "America/New_York", "UTC"]),
    start=st.sampled_from([datetime(2027, 3, 12, tzinfo=UTC), datetime(2027, 10, 29, tzinfo=UTC)]),
    jumps=st.lists(st.integers(-600, 3000), min_size=1, max_size=25),
)
def test_every_slot_is_accounted_for_once_whatever_the_clock_does(
    expression: str, zone: str, start: datetime, jumps: list[int]
) -> None:
    """With pauses and clock jumps both ways, each slot up to the newest run is run or missed, exactly once."""
    job = cron(expression, zone, start)
    now, last, accounted = start, None, list[datetime]()
    for minutes in jumps:
        now += minutes * MINUTE
        answer = due(job, last, now)
        if answer.run is None:
            assert answer.missed == ()
            continue
        assert answer.run <= now
        listed = _until(job, last or start, answer.run)[:-1]
        assert len(listed) == answer.missed_count
        assert tuple(listed[-MISSED_LISTED:]) == answer.missed
        accounted += [*listed, answer.run]
        last = answer.run
    assert accounted == (_until(job, start, last) if last else [])
