"""`hermes-trio` with switches for the chaos tests, read from the environment: a clock that is wrong, notifications that are lost, no poll."""

import os
import time
from typing import Any

SHIFT = float(os.environ.pop("CHAOS_CLOCK_SHIFT", "0"))
LOSES_NOTIFICATIONS = bool(os.environ.pop("CHAOS_LOSE_NOTIFICATIONS", ""))
NO_POLL = bool(os.environ.pop("CHAOS_NO_POLL", ""))

if SHIFT:
    # Before anything else is imported: defaults keep the function that they were given.
    host_time = time.time
    time.time = lambda: host_time() + SHIFT

from hermes_trio.cli import main  # noqa: E402
from hermes_trio.store.postgres import store  # noqa: E402
from hermes_trio.store.postgres.hearing import Hearing  # noqa: E402

if LOSES_NOTIFICATIONS:
    Hearing._payloads = lambda self, signals: []
if NO_POLL:
    opened: Any = store.open_postgres
    assert opened.__wrapped__.__kwdefaults__["poll_seconds"] > 0
    opened.__wrapped__.__kwdefaults__["poll_seconds"] = 1e9

main()
