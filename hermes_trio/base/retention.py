"""`Retention`: how long the store keeps ended rows. The configuration reads it, every backend applies it."""

from __future__ import annotations

from typing import Annotated, Final

import msgspec
from msgspec import Meta

DAY: Final = 86_400.0
"""Seconds of a day."""

Days = Annotated[float, Meta(ge=0)]
Count = Annotated[int, Meta(ge=1)]


class Retention(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[retention]`: days for which ended rows are kept (0: without limit), and their maximum number."""

    sessions: Days = 90.0
    session_idle: Days = 30.0
    derived_idle: Days = 1.0
    one_shot_idle: Days = 1.0
    runs: Days = 7.0
    run_count: Count = 10_000
    jobs: Days = 7.0
    job_count: Count = 10_000
    inbox: Days = 7.0
    inbox_count: Count = 50_000
    outbox: Days = 7.0
    outbox_count: Count = 50_000
    dead_letters: Days = 30.0
    waiting: Days = 30.0
    """Days after which a row that waits for a missing interface or platform becomes a dead letter."""
    approvals: Days = 30.0
    approval_count: Count = 10_000
    responses: Days = 30.0
    response_count: Count = 100
    deliveries: Days = 7.0
    delivery_count: Count = 100_000
    cron_executions: Days = 30.0
    cron_execution_count: Count = 1_000
    revoked_keys: Days = 90.0
    interval: Annotated[float, Meta(gt=0)] = 300.0
    """Seconds between two rounds of maintenance."""
    batch: Count = 200
    """Rows that one transaction of maintenance removes at most."""


def age_limit(days: float) -> float | None:
    """Convert days of `Retention` to seconds. Return None for 0 days: rows are kept without limit."""
    return days * DAY or None
