"""The store's port: what the layers above may ask of it, whatever the backend.

Each verb is one transaction with one invariant, and returns only when what it promises is durable. A verb that has been called runs to
its end even if the caller is cancelled: cancelling abandons the wait, never the write. A write that fails raises a `StoreError` and leaves
nothing behind. The small protocols are for those who need only a part; `Store` is all of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from hermes_trio.runtime.ports import EventRow, InboxRow, Message, NewMessage, NewReply, RuntimeStore, SignalStore

from .records import (
    ALL_RUNS,
    ALL_SESSIONS,
    EVENT_PAGE_BYTES,
    FIRST_HITS,
    FIRST_MESSAGES,
    FIRST_PAGE,
    AllowedUser,
    ApiKey,
    ApprovalChoice,
    ApprovalRow,
    ApprovalState,
    CronExecution,
    CronJob,
    CronState,
    Grant,
    IdempotentReply,
    InboxState,
    JobRow,
    NewApproval,
    NewSession,
    OutboxRow,
    OutboxState,
    Page,
    PairingRequest,
    RunFilter,
    RunRow,
    SearchHit,
    SearchQuery,
    SessionFilter,
    SessionRow,
    StoredMessage,
    StoredResponse,
)

__all__ = [
    "AccessStore",
    "ApprovalStore",
    "CronStore",
    "CursorStore",
    "DeliveryStore",
    "InboxStore",
    "JobStore",
    "KeyStore",
    "MaintenanceStore",
    "OutboxStore",
    "ResponseStore",
    "RunStore",
    "SearchStore",
    "SessionStore",
    "Store",
]


class SessionStore(Protocol):
    """Sessions, their transcripts and the keys that lead to them."""

    @property
    def secret(self) -> bytes:
        """The secret of this store, made once and the same in every process that opens it. It keys the ids that must not be guessed."""
        ...

    async def get_session(self, session_id: str) -> SessionRow | None:
        """A session by its id, or None."""
        ...

    async def session_of(self, session_key: str) -> SessionRow | None:
        """The session behind a key, open or ended, or None."""
        ...

    async def list_sessions(self, which: SessionFilter = ALL_SESSIONS, page: Page = FIRST_PAGE) -> list[SessionRow]:
        """List sessions, the newest activity first."""
        ...

    async def create_session(self, new: NewSession) -> SessionRow:
        """Make a session; raises `SessionExists`, `InvalidTitle` or `TitleTaken`, and then nothing was made."""
        ...

    async def claim_session(self, new: NewSession) -> SessionRow:
        """The tenant's session of that id, made if there is none; raises `ForeignSession` if it is another tenant's."""
        ...

    async def patch_session(
        self,
        session_id: str,
        *,
        title: str | None = None,
        set_title: bool = False,
        end_reason: str | None = None,
        tenant: str | None = None,
    ) -> SessionRow:
        """Change the title (with `set_title`; None or empty clears it) and end the session, both or neither. See `delete_session`."""
        ...

    async def reopen_session(self, session_id: str) -> bool:
        """Take back an end; returns whether there was one."""
        ...

    async def delete_session(self, session_id: str, *, tenant: str | None = None) -> int:
        """Delete a session and its sub-agents' sessions; branches are detached. Returns how many were deleted.

        With a tenant, a session of another one raises `ForeignSession`, and nothing is deleted.
        """
        ...

    async def fork_session(
        self, session_id: str, *, new_id: str = "", title: str | None = None, tenant: str | None = None
    ) -> SessionRow:
        """Branch a session into a new one with a copy of its messages; the old one ends as `branched`. All of it or nothing."""
        ...

    async def new_session(self, session_key: str, *, source: str, reason: str = "session_reset") -> str:
        """End the session behind a key and start another one there; returns the new id."""
        ...

    async def switch_session(self, session_key: str, session_id: str, *, reason: str = "session_switch") -> SessionRow:
        """Point a key to another session: the one behind it ends, the other is reopened."""
        ...

    async def append_messages(self, session_id: str, messages: Sequence[Message]) -> None:
        """Add to a transcript outside any turn."""
        ...

    async def replace_history(self, session_id: str, messages: Sequence[Message]) -> None:
        """Compact a transcript: the live messages are set aside (search still finds them), these take their place."""
        ...

    async def list_messages(
        self, session_id: str, page: Page = FIRST_MESSAGES, *, include_archived: bool = False
    ) -> list[StoredMessage]:
        """List the messages of a session with their numbers, oldest first."""
        ...

    async def session_prompt(self, session_id: str) -> tuple[str | None, str | None]:
        """The session's own system prompt and model configuration (JSON text), each None if it has none."""
        ...


class SearchStore(Protocol):
    """Full-text search."""

    async def search_messages(self, query: SearchQuery, page: Page = FIRST_HITS) -> list[SearchHit]:
        """Find messages. No query is malformed: one without a usable term finds nothing."""
        ...


class RunStore(Protocol):
    """Runs and their event logs."""

    async def get_run(self, run_id: str) -> RunRow | None:
        """A run by its id, or None."""
        ...

    async def list_runs(self, which: RunFilter = ALL_RUNS, page: Page = FIRST_PAGE) -> list[RunRow]:
        """List runs, the newest first, each with the beginning of its output (`LISTED_OUTPUT` characters, and one more if there are more)."""
        ...

    async def events_after(
        self, run_id: str, number: int = 0, *, limit: int = 500, most_bytes: int = EVENT_PAGE_BYTES
    ) -> list[EventRow]:
        """The events of a run after a number, in order: a page of at most `limit` and `most_bytes`, and of at least one. Empty at the end."""
        ...

    async def event_epoch(self, run_id: str, number: int) -> str | None:
        """The epoch in which an event was written, or None if it is not kept: how a reader's `Last-Event-ID` is checked."""
        ...


class JobStore(Protocol):
    """Background jobs."""

    async def note_job_output(self, job_id: str, tail: str) -> None:
        """Keep the last output of a live job, so that a notice after a crash can show it."""
        ...

    async def get_job(self, job_id: str) -> JobRow | None:
        """A job by its id, or None."""
        ...

    async def list_jobs(
        self, *, session_id: str | None = None, live_only: bool = False, page: Page = FIRST_PAGE
    ) -> list[JobRow]:
        """Jobs of one session or of all, the newest first."""
        ...


class InboxStore(Protocol):
    """What waits for a session."""

    async def list_inbox(self, state: InboxState, page: Page = FIRST_PAGE) -> list[tuple[InboxRow, str]]:
        """Rows in a state, each with its reason, oldest first."""
        ...

    async def revive_inbox(self, number: int) -> bool:
        """Let a dead letter wait again; returns whether it was one."""
        ...


class OutboxStore(Protocol):
    """What waits for a platform."""

    async def add_outbox(self, entries: Sequence[NewReply], *, session_id: str = "") -> list[int]:
        """Queue replies outside any turn; return their ids."""
        ...

    async def claim_outbox(self, platform: str, *, limit: int = 16, holding: Sequence[int] = ()) -> list[OutboxRow]:
        """The oldest unsent reply of each chat of a platform, where it is due. Each row is handed out once until it is settled or retried.

        `holding` names the rows that the caller is sending: another row that this owner has claimed is one whose claim was lost, and is handed
        out again.
        """
        ...

    async def next_outbox_due(self, platform: str, *, holding: Sequence[int] = ()) -> float | None:
        """When the next reply of a platform can be claimed, or None."""
        ...

    async def outbox_sent(self, row: OutboxRow) -> bool:
        """A reply was accepted by its platform. Writing the end of an attempt twice changes nothing; `Fenced` if it is another owner's."""
        ...

    async def outbox_retry(self, row: OutboxRow, *, at: float, error: str) -> bool:
        """An attempt failed; try again at `at`. `row.maybe_duplicate` is kept: the next attempt is labelled, whoever makes it."""
        ...

    async def outbox_dead(self, row: OutboxRow, *, error: str) -> bool:
        """Give a reply up: it becomes a dead letter, with `row.maybe_duplicate`."""
        ...

    async def revive_outbox(self, number: int) -> bool:
        """Queue a dead letter again; returns whether it was one."""
        ...

    async def list_outbox(
        self, state: OutboxState, page: Page = FIRST_PAGE, *, platform: str | None = None
    ) -> list[OutboxRow]:
        """Replies in a state, oldest first."""
        ...

    async def replies_to(self, platform: str, target: Mapping[str, object], *, limit: int = 50) -> list[OutboxRow]:
        """The newest replies to one chat, whatever became of them, newest first. Sent ones are kept for as long as retention says."""
        ...

    async def outbox_unsent(self) -> int:
        """How many replies are neither sent nor dead: what a drain reports as undelivered."""
        ...


class ApprovalStore(SignalStore, Protocol):
    """Requests that wait for a human, and grants."""

    async def create_approval(self, new: NewApproval) -> ApprovalRow:
        """Write a request down before anybody is asked."""
        ...

    async def get_approval(self, approval_id: str) -> ApprovalRow | None:
        """A request by its id, or None."""
        ...

    async def answer_approval(
        self, approval_id: str, choice: ApprovalChoice, *, reason: str = ""
    ) -> ApprovalRow | None:
        """Answer a request; None if it is not pending (any more). Grants what the choice grants, if it was offered."""
        ...

    async def answer_approvals(
        self, scope: str, choice: ApprovalChoice, *, everything: bool = False, reason: str = ""
    ) -> list[ApprovalRow]:
        """Answer the oldest pending request of a scope, or all of them; returns those that were answered."""
        ...

    async def expire_approval(self, approval_id: str, *, reason: str = "timeout", asked: bool = True) -> bool:
        """Nobody answered, or, without `asked`, nobody has seen it; returns whether the request was still pending."""
        ...

    async def end_approval_scope(self, scope: str, *, reason: str) -> int:
        """A run or a conversation is over: what waits expires, its grants end. Returns how many requests expired."""
        ...

    async def list_approvals(
        self,
        *,
        state: ApprovalState | None = ApprovalState.PENDING,
        scope: str | None = None,
        tenant: str | None = None,
        newest: bool = False,
        page: Page = FIRST_PAGE,
    ) -> list[ApprovalRow]:
        """Requests, oldest first unless `newest`; by default those that are pending."""
        ...

    async def revoke_grant(self, category: str, *, scope: str) -> bool:
        """Take a grant back; returns whether there was one."""
        ...

    async def granted(self, scope: str, *, grantee: str = "") -> frozenset[str]:
        """All categories that are allowed in a scope: its own grants, and those that were given for good to `grantee`."""
        ...

    async def list_grants(self, *, scope: str | None = None) -> list[Grant]:
        """What is allowed without asking, in one scope or in all."""
        ...


class ResponseStore(Protocol):
    """Stored responses, conversations, idempotent replies."""

    async def put_response(self, response: StoredResponse) -> None:
        """Keep a response outside any turn's commit (a snapshot of one that is still in progress)."""
        ...

    async def get_response(self, tenant: str | None, response_id: str) -> StoredResponse | None:
        """A tenant's response, or None. Reading it makes it the most recently used one."""
        ...

    async def delete_response(self, tenant: str | None, response_id: str) -> bool:
        """Forget a response and the names that point to it; returns whether there was one."""
        ...

    async def latest_response(self, tenant: str, conversation: str) -> str | None:
        """The id of the newest response of a conversation, or None."""
        ...

    async def get_reply(self, tenant: str, route: str, key: str, fingerprint: str) -> IdempotentReply | None:
        """The reply that a key repeats, or None; raises `IdempotencyConflict` if the key came with another body."""
        ...


class DeliveryStore(Protocol):
    """Webhook deliveries."""

    async def accept_delivery(self, route: str, delivery_id: str, message: NewMessage) -> int | None:
        """Accept a delivery and its message in one transaction; returns the inbox id, or None for a known delivery."""
        ...

    async def record_delivery(self, route: str, delivery_id: str) -> bool:
        """Note a delivery that was handled without a turn, after it succeeded; returns False for a known one."""
        ...

    async def delivery_known(self, route: str, delivery_id: str) -> bool:
        """Whether this route has accepted this id."""
        ...


class CronStore(Protocol):
    """Cron jobs and their executions."""

    async def put_cron_job(self, job: CronJob) -> CronJob:
        """Make a job, or change the one of that id."""
        ...

    async def get_cron_job(self, job_id: str) -> CronJob | None:
        """A job by its id, or None."""
        ...

    async def list_cron_jobs(self, *, tenant: str | None = None) -> list[CronJob]:
        """All jobs, by name."""
        ...

    async def delete_cron_job(self, job_id: str) -> bool:
        """Forget a job; returns whether there was one."""
        ...

    async def set_cron_next(self, job_id: str, when: float | None) -> None:
        """Note when a job is due next; None for never again."""
        ...

    async def claim_cron_slot(
        self,
        job_id: str,
        slot: float,
        *,
        state: CronState = CronState.CLAIMED,
        error: str = "",
        next_at: float | None = None,
    ) -> bool:
        """Claim a slot (or record it as skipped or missed) and move the job on to `next_at`, in one transaction.

        Returns False if the slot has a row already: then it is somebody else's, and nothing but `next_at` changed.
        """
        ...

    async def start_cron_slot(self, job_id: str, slot: float, *, session_id: str) -> bool:
        """A claimed slot begins to run in a session."""
        ...

    async def finish_cron_slot(
        self, job_id: str, slot: float, state: CronState, *, output: str = "", error: str = ""
    ) -> bool:
        """A slot is over; the first end wins."""
        ...

    async def list_cron_executions(self, job_id: str | None = None, page: Page = FIRST_PAGE) -> list[CronExecution]:
        """Executions of one job or of all, the newest slot first."""
        ...


class KeyStore(SignalStore, Protocol):
    """API keys."""

    async def create_api_key(
        self, name: str, *, scopes: tuple[str, ...] = (), tenant: str = "", expires_at: float | None = None
    ) -> tuple[ApiKey, str]:
        """Make a key; returns its record and the key itself, which nobody can read again. Without a tenant it is a tenant of its own."""
        ...

    async def find_api_key(self, secret: str) -> ApiKey | None:
        """The record of a key that is in force, or None."""
        ...

    async def revoke_api_key(self, key_id: str) -> bool:
        """Put a key out of force, at once; returns whether it was in force."""
        ...

    async def list_api_keys(self, *, include_revoked: bool = False) -> list[ApiKey]:
        """All keys, oldest first."""
        ...


class AccessStore(Protocol):
    """Who may talk to the agent on a platform."""

    async def offer_pairing(
        self, platform: str, code: str, *, user_id: str, user_name: str = "", ttl: float = 3600.0
    ) -> bool:
        """Note a pairing code for a user; False if the user has an open one, or the platform has too many."""
        ...

    async def redeem_pairing(self, platform: str, code: str) -> AllowedUser | None:
        """Approve a code: its user is let in, and the code is used up. None if there is no such code in force."""
        ...

    async def list_pairings(self, platform: str | None = None) -> list[PairingRequest]:
        """Everybody who has an open code."""
        ...

    async def allow_user(self, platform: str, user_id: str, *, user_name: str = "") -> AllowedUser:
        """Put somebody on a platform's allow-list."""
        ...

    async def disallow_user(self, platform: str, user_id: str) -> bool:
        """Take somebody off; returns whether they were on it."""
        ...

    async def user_allowed(self, platform: str, user_id: str) -> bool:
        """Whether somebody is on a platform's allow-list."""
        ...

    async def list_allowed(self, platform: str | None = None) -> list[AllowedUser]:
        """Everybody on the allow-lists."""
        ...


class CursorStore(Protocol):
    """Cursors and single values."""

    async def get_cursor(self, adapter: str) -> str | None:
        """How far an adapter has read, or None if it never did."""
        ...

    async def set_cursor(self, adapter: str, value: str) -> None:
        """Note how far an adapter has read."""
        ...

    async def get_meta(self, key: str) -> str | None:
        """A value by its name, or None."""
        ...

    async def set_meta(self, key: str, value: str | None) -> None:
        """Keep a value under a name; None forgets it."""
        ...


class MaintenanceStore(Protocol):
    """Retention that is asked for. What the settings ask for, a backend does by itself."""

    async def prune_sessions(
        self,
        older_than_days: float = 90,
        source: str | None = None,
        *,
        end_reason: str | None = None,
        tenant: str | None = None,
        dry_run: bool = False,
    ) -> int:
        """Remove sessions that ended more than `older_than_days` ago, and return how many; with `dry_run`, only count them. Open sessions stay.

        When cancelled, what was removed until then stays removed.
        """
        ...


class Store(
    RuntimeStore,
    SessionStore,
    SearchStore,
    RunStore,
    JobStore,
    InboxStore,
    OutboxStore,
    ApprovalStore,
    ResponseStore,
    DeliveryStore,
    CronStore,
    KeyStore,
    AccessStore,
    CursorStore,
    MaintenanceStore,
    Protocol,
):
    """Everything that is written down."""
