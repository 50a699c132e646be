"""Version 1: the tables of hermes-trio 0.1."""

from __future__ import annotations

from typing import Final

from hermes_trio.store.sqlite.rows import Database

_SESSIONS: Final = """
CREATE TABLE sessions (
    n INTEGER PRIMARY KEY,
    id TEXT NOT NULL UNIQUE,
    source TEXT NOT NULL,
    tenant TEXT NOT NULL DEFAULT '',
    session_key TEXT NOT NULL DEFAULT '',
    user_id TEXT NOT NULL DEFAULT '',
    model TEXT NOT NULL DEFAULT '',
    title TEXT,
    preview TEXT NOT NULL DEFAULT '',
    parent_session_id TEXT,
    lineage TEXT NOT NULL DEFAULT '',
    routing TEXT NOT NULL DEFAULT '',
    one_shot INTEGER NOT NULL DEFAULT 0,
    open_turn TEXT,
    started_at REAL NOT NULL,
    last_active REAL NOT NULL,
    ended_at REAL,
    end_reason TEXT,
    message_count INTEGER NOT NULL DEFAULT 0,
    tool_call_count INTEGER NOT NULL DEFAULT 0,
    input_tokens INTEGER NOT NULL DEFAULT 0,
    output_tokens INTEGER NOT NULL DEFAULT 0,
    cache_read_tokens INTEGER NOT NULL DEFAULT 0,
    cache_write_tokens INTEGER NOT NULL DEFAULT 0,
    reasoning_tokens INTEGER NOT NULL DEFAULT 0,
    api_call_count INTEGER NOT NULL DEFAULT 0,
    system_prompt TEXT,
    model_config TEXT
);
CREATE INDEX sessions_activity ON sessions (last_active);
CREATE INDEX sessions_open ON sessions (last_active) WHERE ended_at IS NULL;
CREATE INDEX sessions_ended ON sessions (ended_at) WHERE ended_at IS NOT NULL;
CREATE INDEX sessions_parent ON sessions (parent_session_id) WHERE parent_session_id IS NOT NULL;
CREATE UNIQUE INDEX sessions_title ON sessions (tenant, title) WHERE title IS NOT NULL;
CREATE INDEX sessions_open_turn ON sessions (open_turn) WHERE open_turn IS NOT NULL;
CREATE TABLE routes (
    session_key TEXT PRIMARY KEY,
    session_id TEXT NOT NULL REFERENCES sessions (id) ON DELETE CASCADE,
    updated_at REAL NOT NULL
) WITHOUT ROWID;
CREATE INDEX routes_session ON routes (session_id);
CREATE TABLE messages (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    session INTEGER NOT NULL REFERENCES sessions (n) ON DELETE CASCADE,
    role TEXT NOT NULL,
    content TEXT NOT NULL,
    parts TEXT,
    tool_calls TEXT,
    tool_call_id TEXT,
    tool_name TEXT,
    finish_reason TEXT,
    reasoning TEXT,
    token_count INTEGER NOT NULL DEFAULT 0,
    platform_message_id TEXT,
    timestamp REAL NOT NULL,
    active INTEGER NOT NULL DEFAULT 1,
    compacted INTEGER NOT NULL DEFAULT 0
);
CREATE INDEX messages_session ON messages (session);
CREATE VIRTUAL TABLE message_words USING fts5 (
    content, tool_name, tool_calls, content='', contentless_delete=1, tokenize='unicode61 remove_diacritics 2'
);
CREATE VIRTUAL TABLE message_grams USING fts5 (
    content, content='', contentless_delete=1, tokenize='trigram'
);
CREATE TRIGGER messages_forgotten AFTER DELETE ON messages BEGIN
    DELETE FROM message_words WHERE rowid = old.id;
    DELETE FROM message_grams WHERE rowid = old.id;
END;
"""

_WORK: Final = """
CREATE TABLE runs (
    run_id TEXT PRIMARY KEY,
    session_id TEXT NOT NULL,
    turn_id TEXT NOT NULL DEFAULT '',
    model TEXT NOT NULL DEFAULT '',
    tenant TEXT NOT NULL DEFAULT '',
    input_preview TEXT NOT NULL DEFAULT '',
    idempotency_key TEXT NOT NULL DEFAULT '',
    fingerprint TEXT NOT NULL DEFAULT '',
    status TEXT NOT NULL,
    last_event TEXT NOT NULL DEFAULT '',
    created_at REAL NOT NULL,
    updated_at REAL NOT NULL,
    ended_at REAL,
    output TEXT,
    usage TEXT,
    error TEXT NOT NULL DEFAULT '',
    error_code TEXT NOT NULL DEFAULT ''
);
CREATE UNIQUE INDEX runs_idempotency ON runs (tenant, idempotency_key) WHERE idempotency_key <> '';
CREATE INDEX runs_session ON runs (session_id);
CREATE INDEX runs_live ON runs (run_id) WHERE ended_at IS NULL;
CREATE INDEX runs_ended ON runs (ended_at) WHERE ended_at IS NOT NULL;
CREATE TABLE events (
    run_id TEXT NOT NULL REFERENCES runs (run_id) ON DELETE CASCADE,
    number INTEGER NOT NULL,
    epoch TEXT NOT NULL,
    event TEXT NOT NULL,
    PRIMARY KEY (run_id, number)
) WITHOUT ROWID;
CREATE TABLE jobs (
    job_id TEXT PRIMARY KEY,
    kind TEXT NOT NULL,
    title TEXT NOT NULL,
    session_id TEXT NOT NULL,
    session_key TEXT NOT NULL,
    root_id TEXT NOT NULL,
    turn_id TEXT NOT NULL,
    routing TEXT NOT NULL,
    inbox TEXT NOT NULL DEFAULT '',
    details TEXT NOT NULL DEFAULT '{}',
    state TEXT NOT NULL,
    summary TEXT NOT NULL DEFAULT '',
    output_tail TEXT NOT NULL DEFAULT '',
    started_at REAL NOT NULL,
    ended_at REAL
);
CREATE INDEX jobs_session ON jobs (session_id);
CREATE INDEX jobs_live ON jobs (job_id) WHERE ended_at IS NULL;
CREATE INDEX jobs_ended ON jobs (ended_at) WHERE ended_at IS NOT NULL;
CREATE TABLE inbox (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    kind TEXT NOT NULL,
    inbox TEXT NOT NULL,
    session_key TEXT NOT NULL,
    session_id TEXT NOT NULL DEFAULT '',
    routing TEXT NOT NULL,
    text TEXT NOT NULL,
    notice TEXT,
    job_id TEXT NOT NULL DEFAULT '',
    root_id TEXT NOT NULL DEFAULT '',
    payload TEXT NOT NULL DEFAULT '{}',
    dedupe_key TEXT NOT NULL DEFAULT '',
    state TEXT NOT NULL DEFAULT 'pending',
    reason TEXT NOT NULL DEFAULT '',
    turn_id TEXT NOT NULL DEFAULT '',
    created_at REAL NOT NULL,
    settled_at REAL
);
CREATE INDEX inbox_pending ON inbox (session_key, id, inbox) WHERE state = 'pending';
CREATE INDEX inbox_session ON inbox (session_id) WHERE state = 'pending' AND session_id <> '';
CREATE INDEX inbox_taken ON inbox (turn_id) WHERE state = 'taken';
CREATE INDEX inbox_job ON inbox (job_id) WHERE job_id <> '';
CREATE UNIQUE INDEX inbox_dedupe ON inbox (inbox, dedupe_key) WHERE dedupe_key <> '';
CREATE INDEX inbox_settled ON inbox (settled_at) WHERE settled_at IS NOT NULL;
CREATE TABLE outbox (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    platform TEXT NOT NULL,
    target TEXT NOT NULL,
    text TEXT NOT NULL,
    payload TEXT NOT NULL DEFAULT '{}',
    session_id TEXT NOT NULL DEFAULT '',
    turn_id TEXT NOT NULL DEFAULT '',
    state TEXT NOT NULL DEFAULT 'pending',
    attempts INTEGER NOT NULL DEFAULT 0,
    next_at REAL NOT NULL,
    error TEXT NOT NULL DEFAULT '',
    maybe_duplicate INTEGER NOT NULL DEFAULT 0,
    created_at REAL NOT NULL,
    settled_at REAL
);
CREATE INDEX outbox_open ON outbox (platform, target, id) WHERE settled_at IS NULL;
CREATE INDEX outbox_settled ON outbox (settled_at) WHERE settled_at IS NOT NULL;
CREATE TABLE approvals (
    id TEXT PRIMARY KEY,
    scope TEXT NOT NULL,
    session_key TEXT NOT NULL DEFAULT '',
    session_id TEXT NOT NULL DEFAULT '',
    run_id TEXT NOT NULL DEFAULT '',
    tenant TEXT NOT NULL DEFAULT '',
    command TEXT NOT NULL,
    description TEXT NOT NULL DEFAULT '',
    categories TEXT NOT NULL DEFAULT '[]',
    choices TEXT NOT NULL DEFAULT '[]',
    state TEXT NOT NULL DEFAULT 'pending',
    choice TEXT NOT NULL DEFAULT '',
    reason TEXT NOT NULL DEFAULT '',
    created_at REAL NOT NULL,
    expires_at REAL NOT NULL,
    answered_at REAL
);
CREATE INDEX approvals_pending ON approvals (scope, created_at) WHERE state = 'pending';
CREATE INDEX approvals_answered ON approvals (answered_at) WHERE answered_at IS NOT NULL;
CREATE TABLE grants (
    scope TEXT NOT NULL,
    category TEXT NOT NULL,
    granted_at REAL NOT NULL,
    PRIMARY KEY (scope, category)
) WITHOUT ROWID;
"""

_SERVICES: Final = """
CREATE TABLE responses (
    id TEXT PRIMARY KEY,
    tenant TEXT NOT NULL,
    session_id TEXT NOT NULL,
    body BLOB NOT NULL,
    transcript TEXT NOT NULL,
    created_at REAL NOT NULL,
    used_at REAL NOT NULL
);
CREATE INDEX responses_use ON responses (tenant, used_at);
CREATE TABLE conversations (
    tenant TEXT NOT NULL,
    name TEXT NOT NULL,
    response_id TEXT NOT NULL REFERENCES responses (id) ON DELETE CASCADE,
    updated_at REAL NOT NULL,
    PRIMARY KEY (tenant, name)
) WITHOUT ROWID;
CREATE INDEX conversations_response ON conversations (response_id);
CREATE TABLE idempotency (
    tenant TEXT NOT NULL,
    route TEXT NOT NULL,
    key TEXT NOT NULL,
    fingerprint TEXT NOT NULL,
    status INTEGER NOT NULL,
    headers TEXT NOT NULL,
    body BLOB NOT NULL,
    created_at REAL NOT NULL,
    expires_at REAL NOT NULL,
    PRIMARY KEY (tenant, route, key)
);
CREATE INDEX idempotency_expiry ON idempotency (expires_at);
CREATE TABLE webhook_deliveries (
    route TEXT NOT NULL,
    delivery_id TEXT NOT NULL,
    inbox_id INTEGER,
    accepted_at REAL NOT NULL,
    PRIMARY KEY (route, delivery_id)
);
CREATE INDEX webhook_deliveries_age ON webhook_deliveries (accepted_at);
CREATE TABLE cron_jobs (
    id TEXT PRIMARY KEY,
    name TEXT NOT NULL,
    tenant TEXT NOT NULL DEFAULT '',
    schedule TEXT NOT NULL,
    spec TEXT NOT NULL DEFAULT '{}',
    enabled INTEGER NOT NULL DEFAULT 1,
    next_at REAL,
    created_at REAL NOT NULL,
    updated_at REAL NOT NULL
);
CREATE TABLE cron_executions (
    job_id TEXT NOT NULL,
    slot REAL NOT NULL,
    state TEXT NOT NULL,
    session_id TEXT NOT NULL DEFAULT '',
    output TEXT NOT NULL DEFAULT '',
    error TEXT NOT NULL DEFAULT '',
    claimed_at REAL NOT NULL,
    started_at REAL,
    ended_at REAL,
    PRIMARY KEY (job_id, slot)
);
CREATE INDEX cron_executions_ended ON cron_executions (ended_at) WHERE ended_at IS NOT NULL;
CREATE TABLE api_keys (
    id TEXT PRIMARY KEY,
    name TEXT NOT NULL,
    hash TEXT NOT NULL UNIQUE,
    tenant TEXT NOT NULL,
    scopes TEXT NOT NULL DEFAULT '[]',
    created_at REAL NOT NULL,
    last_used_at REAL,
    expires_at REAL,
    revoked_at REAL
);
CREATE TABLE pairing_codes (
    platform TEXT NOT NULL,
    code_hash TEXT NOT NULL,
    user_id TEXT NOT NULL,
    user_name TEXT NOT NULL DEFAULT '',
    created_at REAL NOT NULL,
    expires_at REAL NOT NULL,
    PRIMARY KEY (platform, code_hash)
) WITHOUT ROWID;
CREATE TABLE allowed_users (
    platform TEXT NOT NULL,
    user_id TEXT NOT NULL,
    user_name TEXT NOT NULL DEFAULT '',
    added_at REAL NOT NULL,
    PRIMARY KEY (platform, user_id)
) WITHOUT ROWID;
CREATE TABLE cursors (
    adapter TEXT PRIMARY KEY,
    value TEXT NOT NULL,
    updated_at REAL NOT NULL
) WITHOUT ROWID;
CREATE TABLE state_meta (
    key TEXT PRIMARY KEY,
    value TEXT NOT NULL
) WITHOUT ROWID;
"""


def to_version_1(db: Database) -> None:
    """Make the tables in an empty file."""
    for script in (_SESSIONS, _WORK, _SERVICES):
        db.execute(script)
