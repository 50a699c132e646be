"""The store's port: the verbs that the layers above may call, for every backend.

Each verb is one transaction with one invariant, and returns only when its writes are durable. A verb that has been called runs to
its end even if the caller is cancelled: cancelling abandons the wait, never the write. A write that fails raises a `StoreError` and leaves
nothing behind. The small protocols are for callers that need only a part; `Store` is all of it.
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


class SessionStore(Protocol):
    """Sessions, their transcripts and the keys that lead to them."""

    @property
    def secret(self) -> bytes:
        """Return the secret of this store, made once and the same in every process that opens it. It keys the ids that must not be guessable."""
        ...

    async def get_session(self, session_id: str) -> SessionRow | None:
        """Return a session by its id, or None."""
        ...

    async def session_of(self, session_key: str) -> SessionRow | None:
        """Return the session of a key, open or ended, or None."""
        ...

    async def list_sessions(self, which: SessionFilter = ALL_SESSIONS, page: Page = FIRST_PAGE) -> list[SessionRow]:
        """Return sessions, the newest activity first."""
        ...

    async def create_session(self, new: NewSession) -> SessionRow:
        """Make a session. Raises `SessionExists`, `InvalidTitle` or `TitleTaken`, with nothing written."""
        ...

    async def claim_session(self, new: NewSession) -> SessionRow:
        """Return the tenant's session of that id; make it if there is none. Raises `ForeignSession` if it belongs to another tenant."""
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
        """Change the title (with `set_title`; None or empty clears it) and end the session, in one transaction. See `delete_session`."""
        ...

    async def conclude_interrupted(
        self, session_id: str, *, reason: str, mark: str, replies: Sequence[NewReply] = ()
    ) -> bool:
        """Give a session that the reaper ended as interrupted the end reason of its interface, and report the interruption, in one transaction.

        The replies are queued if there is a value under the name `mark`, which is deleted. Returns False, with nothing written, if the session does not
        have that end, or has been concluded.
        """
        ...

    async def reopen_session(self, session_id: str) -> bool:
        """Reopen an ended session; return whether it had ended."""
        ...

    async def delete_session(self, session_id: str, *, tenant: str | None = None) -> int:
        """Delete a session and its sub-agents' sessions; branches are detached. Returns how many were deleted.

        With a tenant, a session of another one raises `ForeignSession`, and nothing is deleted.
        """
        ...

    async def fork_session(
        self, session_id: str, *, new_id: str = "", title: str | None = None, tenant: str | None = None
    ) -> SessionRow:
        """Branch a session into a new one with a copy of its messages and end the old one as `branched`, in one transaction."""
        ...

    async def new_session(self, session_key: str, *, source: str, reason: str = "session_reset") -> str:
        """End the session of a key and make a new one for the key; return the new id."""
        ...

    async def switch_session(self, session_key: str, session_id: str, *, reason: str = "session_switch") -> SessionRow:
        """Point a key to another session: end the current one and reopen the other."""
        ...

    async def append_messages(self, session_id: str, messages: Sequence[Message]) -> None:
        """Append messages to a transcript outside any turn."""
        ...

    async def replace_history(self, session_id: str, messages: Sequence[Message]) -> None:
        """Compact a transcript: archive the live messages (search still finds them) and put these in their place."""
        ...

    async def list_messages(
        self, session_id: str, page: Page = FIRST_MESSAGES, *, include_archived: bool = False
    ) -> list[StoredMessage]:
        """Return the messages of a session with their numbers, oldest first."""
        ...

    async def session_prompt(self, session_id: str) -> tuple[str | None, str | None]:
        """Return the session's own system prompt and model configuration (JSON text), each None if it has none."""
        ...


class SearchStore(Protocol):
    """Full-text search."""

    async def search_messages(self, query: SearchQuery, page: Page = FIRST_HITS) -> list[SearchHit]:
        """Find messages. No query is malformed: one without a usable term finds nothing."""
        ...


class RunStore(Protocol):
    """Runs and their event logs."""

    async def get_run(self, run_id: str) -> RunRow | None:
        """Return a run by its id, or None."""
        ...

    async def list_runs(self, which: RunFilter = ALL_RUNS, page: Page = FIRST_PAGE) -> list[RunRow]:
        """Return runs, the newest first, each with the beginning of its output (`LISTED_OUTPUT` characters, and one more if there are more)."""
        ...

    async def events_after(
        self, run_id: str, number: int = 0, *, limit: int = 500, most_bytes: int = EVENT_PAGE_BYTES
    ) -> list[EventRow]:
        """Return the events of a run after a number, in order: at most `limit` events and `most_bytes`, but at least one. Empty at the end."""
        ...

    async def event_epoch(self, run_id: str, number: int) -> str | None:
        """Return the epoch in which an event was written, or None if it is not stored. Used to check a reader's `Last-Event-ID`."""
        ...


class JobStore(Protocol):
    """Background jobs."""

    async def note_job_output(self, job_id: str, tail: str) -> None:
        """Store the last output of a live job, so that a notice after a crash can show it."""
        ...

    async def get_job(self, job_id: str) -> JobRow | None:
        """Return a job by its id, or None."""
        ...

    async def list_jobs(
        self, *, session_id: str | None = None, live_only: bool = False, page: Page = FIRST_PAGE
    ) -> list[JobRow]:
        """Return the jobs of one session or of all, the newest first."""
        ...


class InboxStore(Protocol):
    """Rows that wait for a session."""

    async def list_inbox(self, state: InboxState, page: Page = FIRST_PAGE) -> list[tuple[InboxRow, str]]:
        """Return the rows in a state, each with its reason, oldest first."""
        ...

    async def revive_inbox(self, number: int) -> bool:
        """Queue a dead letter again; return whether it was one."""
        ...


class OutboxStore(Protocol):
    """Replies that wait for a platform."""

    async def add_outbox(self, entries: Sequence[NewReply], *, session_id: str = "") -> list[int]:
        """Queue replies outside any turn; return their ids."""
        ...

    async def claim_outbox(
        self, platform: str, *, limit: int = 16, holding: Sequence[int] = (), waited: Sequence[tuple[int, int]] = ()
    ) -> list[OutboxRow]:
        """Claim and return the oldest unsent reply of each chat of a platform, where it is due. A claimed row is not returned again until it is retried.

        `holding` names the rows that the caller is sending or whose end it is writing: they are never returned. For any other row that this owner has
        claimed, the caller never got the claim, and it is returned again. `waited` names replies, each with the number of its last attempt, whose delay
        has passed by the caller's monotonic clock: they are due, whatever their stored time is, because the clock may have been set back since.
        """
        ...

    async def next_outbox_due(
        self, platform: str, *, holding: Sequence[int] = (), waited: Sequence[tuple[int, int]] = ()
    ) -> float | None:
        """Return the time at which the next reply of a platform can be claimed, or None. `holding` and `waited` are those of `claim_outbox`."""
        ...

    async def outbox_sent(self, row: OutboxRow) -> bool:
        """Record that the platform accepted a reply. Idempotent, as every end of an attempt. Raises `Fenced` if another owner has the row."""
        ...

    async def outbox_retry(self, row: OutboxRow, *, at: float, error: str) -> bool:
        """Record a failed attempt and queue the reply for `at`. `row.maybe_duplicate` is stored, so that the next attempt is labelled, and counted."""
        ...

    async def outbox_dead(self, row: OutboxRow, *, error: str) -> bool:
        """Give up a reply: it becomes a dead letter, with `row.maybe_duplicate`."""
        ...

    async def revive_outbox(self, number: int) -> bool:
        """Queue a dead letter again; return whether it was one."""
        ...

    async def list_outbox(
        self, state: OutboxState, page: Page = FIRST_PAGE, *, platform: str | None = None
    ) -> list[OutboxRow]:
        """Return the replies in a state, oldest first."""
        ...

    async def replies_to(self, platform: str, target: Mapping[str, object], *, limit: int = 50) -> list[OutboxRow]:
        """Return the newest replies to one chat, in any state, newest first. Sent ones are kept for as long as retention says."""
        ...

    async def outbox_unsent(self) -> int:
        """Return how many replies are neither sent nor dead: what a drain reports as undelivered."""
        ...


class ApprovalStore(SignalStore, Protocol):
    """Requests that wait for a human, and grants."""

    async def create_approval(self, new: NewApproval) -> ApprovalRow:
        """Store a request before a person is asked."""
        ...

    async def get_approval(self, approval_id: str) -> ApprovalRow | None:
        """Return a request by its id, or None."""
        ...

    async def answer_approval(
        self, approval_id: str, choice: ApprovalChoice, *, reason: str = ""
    ) -> ApprovalRow | None:
        """Answer a request; return None if it is not pending (any more). Grants the categories of the choice, if it was offered."""
        ...

    async def expire_approval(self, approval_id: str, *, reason: str = "timeout", asked: bool = True) -> bool:
        """Expire a request without an answer (without `asked`: one that no person was shown); return whether it was still pending."""
        ...

    async def end_approval_scope(self, scope: str, *, reason: str) -> int:
        """Expire the pending requests of a run or conversation that is over, and end its grants; return how many requests expired."""
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
        """Return requests, oldest first unless `newest`; by default the pending ones."""
        ...

    async def revoke_grant(self, category: str, *, scope: str) -> bool:
        """Revoke a grant; return whether there was one."""
        ...

    async def granted(self, scope: str, *, grantee: str = "") -> frozenset[str]:
        """Return all categories that are allowed in a scope: its own grants, and the permanent ones of `grantee`."""
        ...

    async def list_grants(self, *, scope: str | None = None) -> list[Grant]:
        """Return the grants, of one scope or of all."""
        ...


class ResponseStore(Protocol):
    """Stored responses, conversations, idempotent replies."""

    async def put_response(self, response: StoredResponse) -> None:
        """Store a response outside any turn's commit (a snapshot of one that is still in progress)."""
        ...

    async def get_response(self, tenant: str | None, response_id: str) -> StoredResponse | None:
        """Return a tenant's response, or None. Reading it makes it the most recently used one."""
        ...

    async def delete_response(self, tenant: str | None, response_id: str) -> bool:
        """Delete a response and the names that point to it; return whether there was one."""
        ...

    async def latest_response(self, tenant: str, conversation: str) -> str | None:
        """Return the id of the newest response of a conversation, or None."""
        ...

    async def get_reply(self, tenant: str, route: str, key: str, fingerprint: str) -> IdempotentReply | None:
        """Return the stored reply to an idempotency key, or None. Raises `IdempotencyConflict` if the key was used with another body."""
        ...


class DeliveryStore(Protocol):
    """Webhook deliveries."""

    async def accept_delivery(self, route: str, delivery_id: str, message: NewMessage) -> int | None:
        """Accept a delivery and its message in one transaction; return the inbox id, or None for a known delivery."""
        ...

    async def record_delivery(self, route: str, delivery_id: str) -> bool:
        """Record a delivery that was handled without a turn, after it succeeded; return False for a known one."""
        ...

    async def delivery_known(self, route: str, delivery_id: str) -> bool:
        """Return whether this route has accepted this id."""
        ...


class CronStore(Protocol):
    """Cron jobs and their executions."""

    async def put_cron_job(self, job: CronJob) -> CronJob:
        """Make a job, or update the one of that id."""
        ...

    async def get_cron_job(self, job_id: str) -> CronJob | None:
        """Return a job by its id, or None."""
        ...

    async def list_cron_jobs(self, *, tenant: str | None = None) -> list[CronJob]:
        """Return all jobs, by name."""
        ...

    async def delete_cron_job(self, job_id: str) -> bool:
        """Delete a job; return whether there was one."""
        ...

    async def set_cron_next(self, job_id: str, when: float | None) -> None:
        """Set the time at which a job is due next; None for never."""
        ...

    async def claim_cron_slot(
        self,
        job_id: str,
        slot: float,
        *,
        state: CronState = CronState.CLAIMED,
        error: str = "",
        next_at: float | None = None,
        count: bool = False,
    ) -> bool:
        """Claim a slot (or record it as skipped or missed) set the job's next time to `next_at`, and `count` the run in the job, in one transaction.

        Returns False if the slot has a row already: then it was claimed before, and only `next_at` changed.
        """
        ...

    async def start_cron_slot(self, job_id: str, slot: float, *, session_id: str) -> bool:
        """Record that a claimed slot begins to run in a session."""
        ...

    async def finish_cron_slot(
        self, job_id: str, slot: float, state: CronState, *, output: str = "", error: str = ""
    ) -> bool:
        """Record the end of a slot; the first end wins."""
        ...

    async def list_cron_executions(self, job_id: str | None = None, page: Page = FIRST_PAGE) -> list[CronExecution]:
        """Return the executions of one job or of all, the newest slot first."""
        ...


class KeyStore(SignalStore, Protocol):
    """API keys."""

    async def create_api_key(
        self, name: str, *, scopes: tuple[str, ...] = (), tenant: str = "", expires_at: float | None = None
    ) -> tuple[ApiKey, str]:
        """Make a key; return its record and the key itself, which cannot be read again. Without a tenant, the key becomes a new tenant."""
        ...

    async def find_api_key(self, secret: str) -> ApiKey | None:
        """Return the record of a valid key, or None."""
        ...

    async def revoke_api_key(self, key_id: str) -> bool:
        """Revoke a key at once; return whether it was valid."""
        ...

    async def list_api_keys(self, *, include_revoked: bool = False) -> list[ApiKey]:
        """Return all keys, oldest first."""
        ...


class AccessStore(Protocol):
    """The users who may talk to the agent on a platform."""

    async def offer_pairing(
        self, platform: str, code: str, *, user_id: str, user_name: str = "", ttl: float = 3600.0
    ) -> bool:
        """Store a pairing code for a user; return False if the user has an open one, or the platform has too many."""
        ...

    async def redeem_pairing(self, platform: str, code: str) -> AllowedUser | None:
        """Approve a code: its user is put on the allow-list, and the code is used up. Returns None if there is no such valid code."""
        ...

    async def list_pairings(self, platform: str | None = None) -> list[PairingRequest]:
        """Return the users who have an open code."""
        ...

    async def allow_user(self, platform: str, user_id: str, *, user_name: str = "") -> AllowedUser:
        """Put a user on a platform's allow-list."""
        ...

    async def disallow_user(self, platform: str, user_id: str) -> bool:
        """Remove a user from a platform's allow-list; return whether they were on it."""
        ...

    async def user_allowed(self, platform: str, user_id: str) -> bool:
        """Return whether a user is on a platform's allow-list."""
        ...

    async def list_allowed(self, platform: str | None = None) -> list[AllowedUser]:
        """Return the users on the allow-lists."""
        ...


class CursorStore(Protocol):
    """Cursors and single values."""

    async def get_cursor(self, adapter: str) -> str | None:
        """Return the read position of an adapter, or None if it has none."""
        ...

    async def set_cursor(self, adapter: str, value: str) -> None:
        """Store the read position of an adapter."""
        ...

    async def get_meta(self, key: str) -> str | None:
        """Return a value by its name, or None."""
        ...

    async def set_meta(self, key: str, value: str | None) -> None:
        """Store a value under a name; None deletes it."""
        ...


class MaintenanceStore(Protocol):
    """Retention on request. A backend applies the configured retention by itself."""

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
    """The whole port: all verbs of the store."""
