"""`hermes-trio` with switches for the chaos tests, read from the environment: a wrong clock, lost notifications, no poll.

It records how late its loop and its heartbeats were, so that a late takeover by a starved node can be distinguished from a defect.
"""

import os
import time
from pathlib import Path
from typing import Any

SHIFT = float(os.environ.pop("CHAOS_CLOCK_SHIFT", "0"))
LOSES_NOTIFICATIONS = bool(os.environ.pop("CHAOS_LOSE_NOTIFICATIONS", ""))
NO_POLL = bool(os.environ.pop("CHAOS_NO_POLL", ""))

if SHIFT:
    # Before anything else is imported: defaults keep the function that they were given.
    host_time = time.time
    time.time = lambda: host_time() + SHIFT

import trio  # noqa: E402

from hermes_trio.cli import main  # noqa: E402
from hermes_trio.runtime.membership import Membership  # noqa: E402
from hermes_trio.store.postgres import store  # noqa: E402
from hermes_trio.store.postgres.signal_listener import SignalListener  # noqa: E402

if LOSES_NOTIFICATIONS:
    SignalListener._payloads = lambda self, signals: []
if NO_POLL:
    opened: Any = store.open_postgres
    assert opened.__wrapped__.__kwdefaults__["poll_seconds"] > 0
    opened.__wrapped__.__kwdefaults__["poll_seconds"] = 1e9

LATE = Path(os.environ["HERMES_HOME"]) / "late"
LOOK_SECONDS = 0.1
keep: Any = Membership._keep
renew: Any = Membership._renew


def note(seconds: float) -> None:
    """Record a delay, with the time of the host's monotonic clock, which all processes share."""
    with LATE.open("a") as file:
        file.write(f"{time.monotonic():.3f} {seconds:.3f}\n")


async def watch_loop() -> None:
    """Record how late the loop is."""
    while True:
        due = trio.current_time() + LOOK_SECONDS
        await trio.sleep_until(due)
        note(trio.current_time() - due)


async def keep_watched(self: Membership, nursery: trio.Nursery) -> None:
    """Renew the lease beside the watch."""
    nursery.start_soon(watch_loop)
    await keep(self, nursery)


async def renew_watched(self: Membership, beat: float) -> float:
    """Renew the lease, and record how long the database took."""
    began = trio.current_time()
    try:
        return await renew(self, beat)
    finally:
        note(trio.current_time() - began)


Membership._keep = keep_watched
Membership._renew = renew_watched

main()
