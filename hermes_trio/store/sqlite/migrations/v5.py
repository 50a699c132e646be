"""Version 5: an index on the chat of a reply, for the history of one chat."""

from __future__ import annotations

from hermes_trio.store.sqlite.rows import Database


def to_version_5(db: Database) -> None:
    """Index the settled replies by their chat, beside the open ones."""
    db.execute("CREATE INDEX outbox_said ON outbox (platform, target, id) WHERE settled_at IS NOT NULL")
