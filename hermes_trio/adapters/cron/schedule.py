"""Schedules, their slots, and which slot to run now.

A *slot* is the UTC instant at which a schedule wants to run; a run is recorded under it, so that a slot runs at most once whatever the clock does.
Everything here is a pure function: the caller passes the time and stores the last slot that it has accounted for.

Daylight saving: a cron expression that names hours follows the wall clock: a time that the clock skips runs once, at the moment of the shift, and a
repeated time runs once, the first time. An expression that runs in every hour follows real time. Intervals are real time, counted from their anchor,
and never drift.
"""

from __future__ import annotations

import math
import re
from collections import deque
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Final, TypeAlias

import msgspec

if TYPE_CHECKING:
    from zoneinfo import ZoneInfo

    from cronsim import CronSim

# Both are loaded with the first schedule that needs them.

PAST_TOLERANCE: Final = timedelta(seconds=120)
"""A one-shot may be this far in the past: the time that it takes to type the command."""

MIN_GRACE: Final = timedelta(seconds=120)
MAX_GRACE: Final = timedelta(hours=2)

MAX_TEXT: Final = 256
"""Longer schedule texts are refused without parsing."""

MAX_DURATION: Final = timedelta(days=3660)

MISSED_LISTED: Final = 100
MISSED_COUNTED: Final = 10_000
"""Limits of one result of `due`, so that a server that was off for a year does not spend seconds listing minutes."""

_UNITS: Final[Mapping[str, timedelta]] = {
    **dict.fromkeys(("s", "sec", "secs", "second", "seconds"), timedelta(seconds=1)),
    **dict.fromkeys(("m", "min", "mins", "minute", "minutes"), timedelta(minutes=1)),
    **dict.fromkeys(("h", "hr", "hrs", "hour", "hours"), timedelta(hours=1)),
    **dict.fromkeys(("d", "day", "days"), timedelta(days=1)),
    **dict.fromkeys(("w", "week", "weeks"), timedelta(weeks=1)),
}
_ALIASES: Final[Mapping[str, str]] = {
    "@yearly": "0 0 1 1 *",
    "@annually": "0 0 1 1 *",
    "@monthly": "0 0 1 * *",
    "@weekly": "0 0 * * 0",
    "@daily": "0 0 * * *",
    "@midnight": "0 0 * * *",
    "@hourly": "0 * * * *",
}
_ALLOWED: Final[Mapping[str, str]] = {
    "second": "0-59",
    "minute": "0-59",
    "hour": "0-23",
    "day-of-month": "1-31, L or LW, on a day that the named months have",
    "month": "1-12 or JAN-DEC",
    "day-of-week": "0-7 or SUN-SAT (0 and 7 are Sunday), nL or n#k",
}
_FORMS: Final = (
    "'30m' (once, from now), 'every 2h', a cron expression with 5 fields or 6 (seconds first), or a date and time like "
    "'2027-01-31T09:00'"
)
_DURATION: Final = re.compile(r"(\d{1,9})\s*([a-z]+)\s*")
_ZONE_PREFIX: Final = re.compile(r"(?:CRON_TZ|TZ)=(\S*)\s*")
_ISO_START: Final = re.compile(r"\d{4}-?(\d\d|W)")
_SUNDAY_LAST: Final = re.compile(r"-SUN\b")


class ScheduleError(ValueError):
    """Raised for a schedule text or record that cannot be used. The message says which part and what is accepted."""


def _utc(instant: datetime) -> datetime:
    if instant.tzinfo is None:
        raise ScheduleError(f"the time {instant.isoformat()} has no time zone; pass an aware datetime")
    return instant.astimezone(UTC)


class Once(msgspec.Struct, frozen=True):
    """One slot."""

    at: datetime

    def __post_init__(self) -> None:
        msgspec.structs.force_setattr(self, "at", _utc(self.at))


class Every(msgspec.Struct, frozen=True):
    """A slot at `anchor + n * interval` for every n ≥ 1."""

    interval: timedelta
    anchor: datetime

    def __post_init__(self) -> None:
        msgspec.structs.force_setattr(self, "anchor", _utc(self.anchor))


class Cron(msgspec.Struct, frozen=True):
    """The slots of a cron expression in a time zone, later than `anchor` (usually the job's creation)."""

    expression: str
    zone: str
    anchor: datetime

    def __post_init__(self) -> None:
        msgspec.structs.force_setattr(self, "anchor", _utc(self.anchor))


Schedule: TypeAlias = Once | Every | Cron


class Due(msgspec.Struct, frozen=True):
    """The result of `due`.

    `run` is the one slot to run now, or None. `missed` are the newest slots that will not run because `run` replaces them, in order; `missed_count`
    counts all of them, and is a lower bound when `missed_exact` is False. `late` says that the oldest of them (or `run` itself) is older than the
    grace.
    """

    run: datetime | None = None
    missed: tuple[datetime, ...] = ()
    missed_count: int = 0
    missed_exact: bool = True
    late: bool = False


# Parsing


def parse_schedule(text: str, *, now: datetime, tz: str = "UTC") -> Schedule:
    """Parse a schedule. Raises `ScheduleError` with the reason.

    `tz` is the zone of naive dates and of cron fields; a `CRON_TZ=Zone ` prefix overrides it. `now` anchors durations and intervals, and decides what
    is in the past.
    """
    written = text.strip()
    if not written:
        raise ScheduleError(f"the schedule is empty; write {_FORMS}")
    if len(written) > MAX_TEXT:
        raise ScheduleError(f"the schedule has {len(written)} characters; at most {MAX_TEXT} are read")
    anchor = _utc(now)
    prefix = _ZONE_PREFIX.match(written)
    body = written[prefix.end() :] if prefix else written
    zone = prefix.group(1) if prefix else tz
    lowered = body.lower()

    if lowered.startswith("every ") or _is_duration(lowered):
        if prefix:
            raise ScheduleError(f"schedule {written!r}: a duration has no time zone; remove {prefix.group().strip()!r}")
        if lowered.startswith("every "):
            return Every(_duration(lowered[6:].strip(), written), anchor)
        return Once(anchor + _duration(lowered, written))
    if body.startswith("@"):
        if lowered not in _ALIASES:
            raise ScheduleError(f"schedule {written!r}: {body!r} is not one of {', '.join(sorted(_ALIASES))}")
        body = _ALIASES[lowered]
    if len(body.split()) >= 5:
        return _cron(body, zone, anchor, written)
    if _ISO_START.match(body):
        return _date(body, zone, anchor, written)
    raise ScheduleError(f"schedule {written!r} is not understood; write {_FORMS}")


def _is_duration(lowered: str) -> bool:
    return bool(re.fullmatch(rf"(?:{_DURATION.pattern})+", lowered))


def _duration(lowered: str, written: str) -> timedelta:
    if lowered in _UNITS:
        return _UNITS[lowered]
    if not _is_duration(lowered):
        raise ScheduleError(f"schedule {written!r}: {lowered!r} is not a duration like '30m', '2h' or '1d'")
    total = timedelta()
    for amount, unit in _DURATION.findall(lowered):
        if unit not in _UNITS:
            raise ScheduleError(f"schedule {written!r}: unknown unit {unit!r}; units are s, m, h, d and w")
        if int(amount) * _UNITS[unit].total_seconds() > MAX_DURATION.total_seconds():
            raise ScheduleError(f"schedule {written!r}: longer than {MAX_DURATION.days} days")
        total += int(amount) * _UNITS[unit]
    if not total:
        raise ScheduleError(f"schedule {written!r}: the duration is zero")
    if total > MAX_DURATION:
        raise ScheduleError(f"schedule {written!r}: longer than {MAX_DURATION.days} days")
    return total


def _date(body: str, zone: str, now: datetime, written: str) -> Once:
    try:
        at = datetime.fromisoformat(body)
    except ValueError as error:
        raise ScheduleError(f"schedule {written!r}: not a date and time ({error}); write '2027-01-31T09:00'") from None
    try:
        instant = _wall_to_utc(at, _zone(zone)) if at.tzinfo is None else at.astimezone(UTC)
    except OverflowError:
        raise ScheduleError(f"schedule {written!r}: the date is out of range") from None
    if now - instant > PAST_TOLERANCE:
        raise ScheduleError(
            f"schedule {written!r} lies in the past: {instant.isoformat()} is {_span(now - instant)} before now; "
            "give a time to come"
        )
    return Once(instant)


def _cron(body: str, zone: str, now: datetime, written: str) -> Cron:
    parts = body.upper().split()
    if len(parts) > 6:
        raise ScheduleError(
            f"schedule {written!r}: a cron expression has 5 fields, or 6 with seconds first, not {len(parts)}"
        )
    parts[-1] = _SUNDAY_LAST.sub("-7", parts[-1])
    expression = " ".join(parts)
    _zone(zone)
    from cronsim import CronSim, CronSimError

    try:
        CronSim(expression, now)
    except CronSimError as error:
        name = str(error).removeprefix("Bad ")
        names = list(_ALLOWED)[-len(parts) :]
        value = parts[names.index(name)] if name in names else expression
        raise ScheduleError(
            f"schedule {written!r}: the {name} field {value!r} is not valid; "
            f"allowed: {_ALLOWED.get(name, 'see cron(5)')}, with '*', lists, rising ranges and steps"
        ) from None
    schedule = Cron(expression, zone, now)
    if next_after(schedule, now) is None:
        raise ScheduleError(f"schedule {written!r} never comes: no day in the next 50 years matches it")
    return schedule


def _zone(name: str) -> ZoneInfo:
    from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

    try:
        return ZoneInfo(name)
    except (ZoneInfoNotFoundError, ValueError, OSError):
        raise ScheduleError(f"unknown time zone {name!r}; write an IANA name like 'Europe/Berlin' or 'UTC'") from None


# Slots


def slots(schedule: Schedule, after: datetime) -> Iterator[datetime]:
    """Yield the slots later than `after`, ascending, in UTC; endless for most recurring schedules."""
    start = _utc(after)
    match schedule:
        case Once(at):
            if at > start:
                yield at
        case Every(interval, anchor):
            number = max((start - anchor) // interval, 0) + 1
            try:
                while True:
                    yield anchor + number * interval
                    number += 1
            except OverflowError:
                return
        case Cron():
            yield from _cron_slots(schedule, max(start, schedule.anchor))


def next_after(schedule: Schedule, after: datetime) -> datetime | None:
    """Return the first slot later than `after`, or None if there is none left."""
    return next(slots(schedule, after), None)


def _cron_slots(schedule: Cron, last: datetime) -> Iterator[datetime]:
    zone = _zone(schedule.zone)
    found = _wall_clock_slots if _names_hours(schedule.expression) else _real_time_slots
    try:
        yield from found(schedule.expression, zone, last)
    except (OverflowError, ValueError):
        # The calendar ends with the year 9999.
        return


def _wall_clock_slots(expression: str, zone: ZoneInfo, last: datetime) -> Iterator[datetime]:
    for wall in _simulate(expression, last.astimezone(zone).replace(tzinfo=None, fold=0)):
        instant = _wall_to_utc(wall, zone)
        if instant > last:
            yield instant
            last = instant


def _real_time_slots(expression: str, zone: ZoneInfo, last: datetime) -> Iterator[datetime]:
    """Yield slots from one change of the clock to the next, each stretch with its own constant offset."""
    offset: timedelta | None = _offset(zone, last)
    while offset is not None:
        following = None
        for wall in _simulate(expression, (last + offset).replace(tzinfo=None)):
            instant = wall.replace(tzinfo=UTC) - offset
            # A rare schedule may step over the whole time in which the clock was changed, so the next day is searched, too.
            for seen in (min(instant, last + timedelta(days=1)), instant):
                if _offset(zone, seen) != offset:
                    shift = _change(zone, last, seen)
                    following, last = _offset(zone, shift), shift - timedelta(seconds=1)
                    break
            else:
                yield instant
                last = instant
                continue
            break
        offset = following


def _latest(schedule: Cron, until: datetime) -> datetime | None:
    """Return the newest slot not later than `until`, found backwards, whatever the distance."""
    zone = _zone(schedule.zone)
    wall_clock = _names_hours(schedule.expression)
    local = until.astimezone(zone)
    start = local.replace(tzinfo=None, fold=0)
    if local.fold:
        # Within the second pass of a repeated hour, later wall times have already had their slot.
        start += (local.replace(fold=0).utcoffset() or timedelta()) - (local.utcoffset() or timedelta())
    found: datetime | None = None
    for wall in _simulate(schedule.expression, start.replace(microsecond=0) + timedelta(seconds=1), reverse=True):
        if not wall_clock and _is_skipped(wall, zone):
            continue
        found = _wall_to_utc(wall, zone)
        if found <= until:
            break
    else:
        return None
    if not wall_clock:
        for later in _cron_slots(schedule, found):
            if later > until:
                break
            found = later
    return found if found > schedule.anchor else None


def _names_hours(expression: str) -> bool:
    """Return whether some hour of the day is left out, so that the expression refers to the wall clock."""
    return len(_simulate(expression, datetime(2000, 1, 1)).hours) < 24


def _simulate(expression: str, start: datetime, *, reverse: bool = False) -> CronSim:
    # cronsim repairs skipped and repeated times itself, but only for some spellings of a field ("0" but not "*/30") and
    # only with five of them. With six it leaves them alone, and this module has one rule for all.
    six = expression if len(expression.split()) == 6 else f"0 {expression}"
    from cronsim import CronSim

    return CronSim(six, start, reverse=reverse)


def _is_skipped(wall: datetime, zone: ZoneInfo) -> bool:
    return wall.replace(tzinfo=zone).astimezone(UTC).astimezone(zone).replace(tzinfo=None, fold=0) != wall


def _wall_to_utc(wall: datetime, zone: ZoneInfo) -> datetime:
    """Return the instant of a naive local time: the first of two, and for a skipped time the moment of the shift."""
    if not _is_skipped(wall, zone):
        return wall.replace(tzinfo=zone).astimezone(UTC)
    return _change(zone, wall.replace(tzinfo=zone, fold=1), wall.replace(tzinfo=zone, fold=0))


def _change(zone: ZoneInfo, before: datetime, after: datetime) -> datetime:
    """Return a whole second in (before, after] at which the zone's offset stops being what it was at `before`."""
    low, high = int(before.timestamp()), math.ceil(after.timestamp())
    old = _offset(zone, datetime.fromtimestamp(low, UTC))
    while high - low > 1:
        middle = (low + high) // 2
        if _offset(zone, datetime.fromtimestamp(middle, UTC)) == old:
            low = middle
        else:
            high = middle
    return datetime.fromtimestamp(high, UTC)


def _offset(zone: ZoneInfo, instant: datetime) -> timedelta:
    return instant.astimezone(zone).utcoffset() or timedelta()


# Deciding


def default_grace(schedule: Schedule, slot: datetime) -> timedelta:
    """Return how late `slot` may start and still count as on time: half the period, between two minutes and two hours."""
    following = next_after(schedule, slot)
    if following is None:
        return MIN_GRACE
    return min(max((following - _utc(slot)) / 2, MIN_GRACE), MAX_GRACE)


def due(schedule: Schedule, last_slot: datetime | None, now: datetime, grace: timedelta | None = None) -> Due:
    """Return the slot to run now, and the slots that it replaces.

    `last_slot` is the newest slot that is accounted for (ran, skipped or missed), None if there is none. All slots since then collapse into one run
    of the newest, however late; if the clock went backwards, nothing is due.
    """
    present = _utc(now)
    if isinstance(schedule, Once):
        if last_slot is not None or schedule.at > present:
            return Due()
        return Due(run=schedule.at, late=present - schedule.at > (MIN_GRACE if grace is None else grace))
    since = schedule.anchor if last_slot is None else max(_utc(last_slot), schedule.anchor)
    first = next_after(schedule, since)
    if first is None or first > present:
        return Due()
    late = present - first > (default_grace(schedule, first) if grace is None else grace)
    if isinstance(schedule, Every):
        return _due_interval(schedule, first, present, late)
    return _due_cron(schedule, since, present, late)


def _due_interval(schedule: Every, first: datetime, now: datetime, late: bool) -> Due:
    count = (now - first) // schedule.interval
    newest = first + count * schedule.interval
    listed = range(min(count, MISSED_LISTED), 0, -1)
    return Due(newest, tuple(newest - back * schedule.interval for back in listed), count, True, late)


def _due_cron(schedule: Cron, since: datetime, now: datetime, late: bool) -> Due:
    newest: deque[datetime] = deque(maxlen=MISSED_LISTED + 1)
    count = 0
    for slot in slots(schedule, since):
        if slot > now:
            break
        newest.append(slot)
        count += 1
        if count > MISSED_COUNTED:
            newest = _newest(schedule, now)
            break
    run = newest.pop()
    return Due(run, tuple(newest)[-MISSED_LISTED:], count - 1, count <= MISSED_COUNTED, late)


def _newest(schedule: Cron, now: datetime) -> deque[datetime]:
    found: deque[datetime] = deque()
    until = now
    while len(found) <= MISSED_LISTED:
        slot = _latest(schedule, until)
        assert slot is not None, "more slots than this were counted before"
        found.appendleft(slot)
        until = slot - timedelta(microseconds=1)
    return found


# Keeping


def to_record(schedule: Schedule) -> dict[str, str | float]:
    """Return a JSON-ready form that `from_record` reads; `display` is for people."""
    match schedule:
        case Once(at):
            return {"kind": "once", "run_at": at.isoformat(), "display": f"once at {at.isoformat()}"}
        case Every(interval, anchor):
            return {
                "kind": "interval",
                "seconds": interval.total_seconds(),
                "anchor": anchor.isoformat(),
                "display": f"every {_span(interval)}",
            }
        case Cron(expression, zone, anchor):
            return {
                "kind": "cron",
                "expr": expression,
                "tz": zone,
                "anchor": anchor.isoformat(),
                "display": f"{expression} ({zone})",
            }


def from_record(record: Mapping[str, object]) -> Schedule:
    """Return the schedule of a record of `to_record`. Raises `ScheduleError` naming the wrong field."""
    match record.get("kind"):
        case "once":
            return Once(_instant(record, "run_at"))
        case "interval":
            seconds = record.get("seconds")
            if not isinstance(seconds, int | float) or not 0 < seconds <= MAX_DURATION.total_seconds():
                raise ScheduleError(f"schedule record: seconds is {seconds!r}; it must be a positive number of seconds")
            return Every(timedelta(seconds=seconds), _instant(record, "anchor"))
        case "cron":
            expression, zone = record.get("expr"), record.get("tz")
            if not isinstance(expression, str) or not isinstance(zone, str):
                raise ScheduleError("schedule record: expr and tz must be texts")
            return _cron(expression, zone, _instant(record, "anchor"), expression)
        case kind:
            raise ScheduleError(f"schedule record: kind is {kind!r}; it must be 'once', 'interval' or 'cron'")


def _instant(record: Mapping[str, object], name: str) -> datetime:
    value = record.get(name)
    try:
        return _utc(datetime.fromisoformat(value if isinstance(value, str) else ""))
    except ValueError:
        raise ScheduleError(f"schedule record: {name} is {value!r}; it must be an ISO time with its zone") from None


def _span(length: timedelta) -> str:
    left = int(length.total_seconds())
    parts: list[str] = []
    for unit, size in (("d", 86_400), ("h", 3600), ("m", 60), ("s", 1)):
        amount, left = divmod(left, size)
        if amount:
            parts.append(f"{amount}{unit}")
    return " ".join(parts) or "0s"
