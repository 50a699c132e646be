"""Version 2: runs that are begun again after an interruption: which attempt, and what begins it."""

from __future__ import annotations

from typing import Final

VERSION_2: Final = (
    "ALTER TABLE runs ADD COLUMN attempt bigint NOT NULL DEFAULT 0",
    """CREATE TABLE resumptions (
    run_id text COLLATE "C" PRIMARY KEY REFERENCES runs (run_id) ON DELETE CASCADE,
    spec text COLLATE "C" NOT NULL,
    key_id text COLLATE "C" NOT NULL DEFAULT '',
    stopped bigint NOT NULL DEFAULT 0
)""",
)
