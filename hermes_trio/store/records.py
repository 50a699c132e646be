"""The records that the store's verbs take and return, beside those of the runtime's own port. All frozen; times are epoch seconds."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from hashlib import sha256
from typing import Any, Final

import msgspec

from hermes_trio.runtime.context import SessionContext
from hermes_trio.runtime.outcome import JobState, RunStatus
from hermes_trio.runtime.ports import Message


class Page(msgspec.Struct, frozen=True):
    """A page of a list: at most `limit` entries, after the first `offset`."""

    limit: int = 50
    offset: int = 0

    @property
    def peek(self) -> Page:
        """Return this page with one more entry, whose presence shows that more follow."""
        return Page(self.limit + 1, self.offset)


OWED: Final = "one_shot:"
"""The prefix of the `set_meta` key of a one-shot session, under which is kept where the answer of its present turn goes."""

FIRST_PAGE: Final = Page()
FIRST_HITS: Final = Page(20)
FIRST_MESSAGES: Final = Page(1_000)


class Lineage(Enum):
    """The relation of a session to its parent."""

    ROOT = ""
    SUBAGENT = "subagent"
    BRANCH = "branch"


class InboxState(Enum):
    """The states of an inbox row; see `hermes_trio.store.sqlite.inbox`."""

    PENDING = "pending"
    TAKEN = "taken"
    DELIVERED = "delivered"
    SUPERSEDED = "superseded"
    ABANDONED = "abandoned"
    INTERRUPTED = "interrupted"
    DEAD = "dead"


class SessionRow(msgspec.Struct, frozen=True):
    """A session's row."""

    id: str
    source: str
    tenant: str
    session_key: str
    user_id: str
    model: str
    title: str | None
    preview: str
    parent_session_id: str | None
    lineage: Lineage
    one_shot: bool
    started_at: float
    last_active: float
    ended_at: float | None
    end_reason: str | None
    message_count: int
    tool_call_count: int
    input_tokens: int
    output_tokens: int
    cache_read_tokens: int
    cache_write_tokens: int
    reasoning_tokens: int
    api_call_count: int
    has_system_prompt: bool
    has_model_config: bool

    @property
    def label(self) -> str:
        """Return the title, or the start of the first message."""
        return self.title or self.preview


class SessionFilter(msgspec.Struct, frozen=True, kw_only=True):
    """Which sessions a list shows; a field that is None selects all."""

    source: str | None = None
    tenant: str | None = None
    include_children: bool = False
    """Whether the sessions of sub-agents are listed, too."""
    open_only: bool = False


ALL_SESSIONS: Final = SessionFilter()


class NewSession(msgspec.Struct, frozen=True, kw_only=True):
    """A session that is made explicitly, not by its first turn. Without an id it is given one."""

    id: str = ""
    source: str
    tenant: str = ""
    session_key: str = ""
    user_id: str = ""
    model: str = ""
    title: str | None = None
    system_prompt: str | None = None
    model_config: Mapping[str, Any] | None = None
    parent_session_id: str | None = None
    routing: SessionContext = msgspec.field(default_factory=SessionContext)


class StoredMessage(msgspec.Struct, frozen=True):
    """A message with its number. `active` is false for one that a compaction archived."""

    id: int
    session_id: str
    message: Message
    active: bool = True


class SearchHit(msgspec.Struct, frozen=True, kw_only=True):
    """A message that a search found: a snippet with the match between `>>>` and `<<<`, and one neighbour on each side."""

    session_id: str
    message_id: int
    role: str
    snippet: str
    timestamp: float
    source: str
    title: str | None
    before: str = ""
    after: str = ""


class SearchOrder(Enum):
    """The order of the hits of a search."""

    RELEVANCE = "relevance"
    NEWEST = "newest"
    OLDEST = "oldest"


class SearchQuery(msgspec.Struct, frozen=True, kw_only=True):
    """What a search looks for, and where.

    In `text`, `"…"` is a phrase, `word*` a beginning, `a OR b` either; the other terms must all occur. A field that is None, or empty `roles`,
    selects all.
    """

    text: str
    source: str | None = None
    tenant: str | None = None
    session_id: str | None = None
    roles: tuple[str, ...] = ()
    order: SearchOrder = SearchOrder.RELEVANCE


class RunFilter(msgspec.Struct, frozen=True, kw_only=True):
    """Which runs a list shows; a field that is None selects all."""

    status: RunStatus | None = None
    session_id: str | None = None
    tenant: str | None = None


ALL_RUNS: Final = RunFilter()


class RunRow(msgspec.Struct, frozen=True):
    """A run's row."""

    run_id: str
    session_id: str
    turn_id: str
    model: str
    tenant: str
    input_preview: str
    idempotency_key: str
    fingerprint: str
    status: RunStatus
    last_event: str
    created_at: float
    updated_at: float
    ended_at: float | None
    output: str | None
    usage: Mapping[str, int] | None
    error: str
    error_code: str
    owner: str = ""
    """The node that runs it, or that has ended it. Empty while an interrupted run waits for its next attempt."""
    attempt: int = 0
    """Which attempt this is, if the run is begun again when it is interrupted; else 0."""


class JobRow(msgspec.Struct, frozen=True):
    """A job's row."""

    job_id: str
    kind: str
    title: str
    session_id: str
    session_key: str
    root_id: str
    turn_id: str
    routing: SessionContext
    inbox: str
    details: Mapping[str, Any]
    state: JobState
    summary: str
    output_tail: str
    started_at: float
    ended_at: float | None
    owner: str = ""
    """The node that it runs on, or that has ended it."""


class OutboxState(Enum):
    """The states of a reply: waiting, being sent, sent, or dead (given up after too many attempts)."""

    PENDING = "pending"
    ATTEMPTING = "attempting"
    SENT = "sent"
    DEAD = "dead"


class OutboxRow(msgspec.Struct, frozen=True):
    """A reply to a platform. `maybe_duplicate`: how many attempts the platform may have executed without an answer; 0 if it cannot have the reply."""

    id: int
    platform: str
    target: Mapping[str, Any]
    text: str
    payload: Mapping[str, Any]
    session_id: str
    turn_id: str
    state: OutboxState
    attempts: int
    next_at: float
    error: str
    maybe_duplicate: int
    created_at: float
    settled_at: float | None


EVENT_PAGE_BYTES: Final = 262_144
"""The most that a page of a run's events holds, unless its first event is larger."""

LISTED_OUTPUT: Final = 2_000
"""Characters of a run's output in a list of runs (and one more, which says that there are more)."""


class ApprovalState(Enum):
    """The states of a request: waiting, answered, or expired without an answer."""

    PENDING = "pending"
    APPROVED = "approved"
    DENIED = "denied"
    EXPIRED = "expired"


class ApprovalChoice(Enum):
    """The answers that a person may give. `session` and `always` also grant the categories of the request."""

    ONCE = "once"
    SESSION = "session"
    ALWAYS = "always"
    DENY = "deny"


class NewApproval(msgspec.Struct, frozen=True, kw_only=True):
    """A request for approval. `scope` is the run id or session key in which it is asked, and whose grants apply.

    `grantee` receives the grant of an `always` answer: the tenant or the platform that the request comes from. `asker` is the platform's id of the
    person whose turn waits; empty where no person has asked.
    """

    id: str
    scope: str
    command: str
    expires_at: float
    description: str = ""
    categories: tuple[str, ...] = ()
    choices: tuple[ApprovalChoice, ...] = tuple(ApprovalChoice)
    session_key: str = ""
    session_id: str = ""
    run_id: str = ""
    tenant: str = ""
    grantee: str = ""
    asker: str = ""
    """The person whose turn asks, if one does."""


def tenant_grantee(tenant: str) -> str:
    """Return the scope of a tenant's permanent grants."""
    return f"tenant {tenant}"


class Grant(msgspec.Struct, frozen=True):
    """A category of commands that is allowed in a scope without asking: a run, a conversation, a tenant or a platform."""

    scope: str
    category: str
    granted_at: float

    @property
    def id(self) -> str:
        """Return the public id of the grant."""
        return "grant_" + sha256(f"{self.scope}\0{self.category}".encode()).hexdigest()[:16]


class ApprovalRow(msgspec.Struct, frozen=True):
    """An approval's row."""

    id: str
    scope: str
    session_key: str
    session_id: str
    run_id: str
    tenant: str
    command: str
    description: str
    categories: tuple[str, ...]
    choices: tuple[ApprovalChoice, ...]
    state: ApprovalState
    choice: ApprovalChoice | None
    reason: str
    created_at: float
    expires_at: float
    answered_at: float | None
    grantee: str = ""
    asker: str = ""
    asked: bool = True
    """False if the request was withdrawn because it could not be shown to any person."""


class StoredResponse(msgspec.Struct, frozen=True, kw_only=True):
    """A response that can be read and continued later. In `TurnFinish.also` it commits with its turn.

    With a `conversation`, the name is moved to this response, if it still points to `expected_previous` ("" = to nothing yet; None =
    whatever it points to); else the whole commit fails with `ConversationMoved`.
    """

    id: str
    tenant: str
    session_id: str
    body: bytes
    transcript: str = "[]"
    conversation: str = ""
    expected_previous: str | None = None
    created_at: float = 0.0


class IdempotentReply(msgspec.Struct, frozen=True, kw_only=True):
    """The reply to a request with an idempotency key, kept byte for byte. In `TurnFinish.also` it commits with its turn."""

    tenant: str
    route: str
    key: str
    fingerprint: str
    status: int
    headers: tuple[tuple[str, str], ...]
    body: bytes
    ttl: float = 86_400.0


class CronState(Enum):
    """The states of one slot of a cron job."""

    CLAIMED = "claimed"
    RUNNING = "running"
    COMPLETED = "completed"
    FAILED = "failed"
    SKIPPED = "skipped"
    MISSED = "missed"

    @property
    def terminal(self) -> bool:
        """Return whether the slot is over."""
        return self not in (CronState.CLAIMED, CronState.RUNNING)


class CronJob(msgspec.Struct, frozen=True, kw_only=True):
    """A scheduled job. `spec` is opaque to the store: prompt, delivery target, limits."""

    id: str
    name: str
    schedule: str
    tenant: str = ""
    spec: Mapping[str, Any] = msgspec.field(default_factory=dict[str, Any])
    enabled: bool = True
    next_at: float | None = None
    created_at: float = 0.0
    updated_at: float = 0.0


class CronExecution(msgspec.Struct, frozen=True):
    """One slot of a cron job: there is at most one row for each (job, slot)."""

    job_id: str
    slot: float
    state: CronState
    session_id: str
    output: str
    error: str
    claimed_at: float
    started_at: float | None
    ended_at: float | None


class ApiKey(msgspec.Struct, frozen=True):
    """The record of an API key. The key itself is not stored, only its hash."""

    id: str
    name: str
    tenant: str
    scopes: tuple[str, ...]
    created_at: float
    last_used_at: float | None
    expires_at: float | None
    revoked_at: float | None


class PairingRequest(msgspec.Struct, frozen=True):
    """A user who was offered a pairing code and is not on the allow-list yet. Only the hash of the code is stored."""

    platform: str
    user_id: str
    user_name: str
    created_at: float
    expires_at: float


class AllowedUser(msgspec.Struct, frozen=True):
    """A user who may talk to the agent on a platform."""

    platform: str
    user_id: str
    user_name: str
    added_at: float


class MaintenanceReport(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a round of maintenance. `removed` counts rows by table."""

    sessions_ended: int = 0
    removed: Mapping[str, int] = msgspec.field(default_factory=dict[str, int])
    messages_indexed: int = 0
    pages_freed: int = 0
    seconds: float = 0.0
