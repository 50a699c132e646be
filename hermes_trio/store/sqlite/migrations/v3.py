"""Version 3: tenants that hold. Keys of HTTP sessions name their tenant; "always" belongs to the user who gave it."""

from __future__ import annotations

from typing import Final

from hermes_trio.store.sqlite.rows import Database

_API_KEY: Final = "'api:' || replace(replace({tenant}, '%', '%25'), ':', '%3A') || ':'"

_SESSIONS: Final = """
UPDATE sessions SET session_key = {prefix} || session_key
WHERE source = 'api_server' AND session_key <> '' AND substr(session_key, 1, length({prefix})) <> {prefix}
""".format(prefix=_API_KEY.format(tenant="tenant"))

_ROUTING: Final = """
UPDATE {table} SET routing = json_set(routing, '$.session_key', (SELECT s.session_key FROM sessions s WHERE s.id = {id}))
WHERE routing <> '' AND json_valid(routing) AND json_extract(routing, '$.session_key') IS NOT NULL
    AND {id} IN (SELECT id FROM sessions WHERE source = 'api_server' AND session_key <> '')
"""

_JOBS: Final = """
UPDATE jobs SET session_key = (SELECT s.session_key FROM sessions s WHERE s.id = jobs.session_id)
WHERE session_id IN (SELECT id FROM sessions WHERE source = 'api_server' AND session_key <> '')
"""

_GRANTS: Final = """
ALTER TABLE approvals ADD COLUMN grantee TEXT NOT NULL DEFAULT '';
INSERT OR IGNORE INTO grants (scope, category, granted_at)
    SELECT 'platform api_server', category, granted_at FROM grants WHERE scope = '';
DELETE FROM grants WHERE scope = '';
"""
"""A grant without a grantee does not say who gave it. It becomes the operator's own, over HTTP; elsewhere a person is asked again."""


def to_version_3(db: Database) -> None:
    """Name the tenant in every key of an HTTP session, and give the grants without a grantee to the operator."""
    db.execute(_SESSIONS)
    db.execute(_JOBS)
    db.execute(_ROUTING.format(table="sessions", id="sessions.id"))
    db.execute(_ROUTING.format(table="jobs", id="jobs.session_id"))
    db.execute(_GRANTS)
