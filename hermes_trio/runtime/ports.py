"""What the runtime needs from below: an agent to run, and somebody who writes things down.

The records here are the facts that must survive a crash. `RuntimeStore` is implemented by `hermes_trio.store`; each of its verbs is one
transaction, and returns only when what it promises is durable. A verb that has been called runs to its end even if the caller is
cancelled: cancelling abandons the wait, never the write.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from enum import Enum
from typing import TYPE_CHECKING, Any, Final, Protocol

import msgspec

from .context import SessionContext
from .outcome import JobState, RunStatus, TurnState, Usage

if TYPE_CHECKING:
    from .turn import Turn

__all__ = [
    "ANSWER_TOPIC",
    "APPROVAL_TOPIC",
    "CRON_TOPIC",
    "KEY_TOPIC",
    "LEASE_TOPIC",
    "NODE_TOPIC",
    "OUTBOX_TOPIC",
    "REQUEST_TOPIC",
    "ROOT_TOPIC",
    "RUN_TOPIC",
    "SESSION_TOPIC",
    "Agent",
    "Content",
    "EventRow",
    "InboxKind",
    "InboxRow",
    "JobFinish",
    "JobStart",
    "Message",
    "NewMessage",
    "NewNotice",
    "NewReply",
    "NewRun",
    "NodeAnswer",
    "NodeRequest",
    "NodeRow",
    "NodeStore",
    "NoticeKind",
    "Recovery",
    "Reply",
    "RuntimeStore",
    "SessionHost",
    "SignalStore",
    "ToolCall",
    "TurnFinish",
    "TurnInput",
    "TurnStart",
    "Wake",
    "inbox_topic",
]

Wake = Callable[[str], None]
"""Called with a key after a commit that concerns it. It neither waits nor raises."""

OUTBOX_TOPIC: Final = "outbox"
"""The topic of replies that wait; its keys are platforms."""


ROOT_TOPIC: Final = "root"
"""The topic of roots of which nothing is open any more; its keys are root ids."""


RUN_TOPIC: Final = "run"
"""The topic of runs whose row or event log has changed; its keys are run ids."""

APPROVAL_TOPIC: Final = "approval"
"""The topic of requests that were answered or have expired; its keys are approval ids."""

CRON_TOPIC: Final = "cron"
"""The topic of scheduled jobs that were changed, or whose run has ended; its keys are job ids."""

KEY_TOPIC: Final = "key"
"""The topic of API keys that were put out of force; its keys are their ids."""

SESSION_TOPIC: Final = "session"
"""The topic of sessions whose lock was given back (in a store that several nodes share); its keys are session ids."""

NODE_TOPIC: Final = "node"
"""The topic of nodes that joined, left or were taken over; its keys are incarnations."""

LEASE_TOPIC: Final = "lease"
"""The topic of singletons that nobody holds any more; its keys are their names."""

REQUEST_TOPIC: Final = "request"
"""The topic of requests that wait for a node; its keys are incarnations."""

ANSWER_TOPIC: Final = "answer"
"""The topic of requests to nodes that were answered; its keys are request ids."""


def inbox_topic(inbox: str) -> str:
    """The topic of what waits in an inbox; its keys are session keys."""
    return f"inbox:{inbox}"


Content = str | Sequence[Mapping[str, Any]]
"""Text, or a list of OpenAI-shaped parts (`{"type": "text" | "image_url", …}`)."""


class ToolCall(msgspec.Struct, frozen=True, kw_only=True):
    """A model's wish to call a tool. `arguments` is the JSON text as the model wrote it."""

    id: str
    name: str
    arguments: str = "{}"


class Message(msgspec.Struct, frozen=True, kw_only=True):
    """One entry of a transcript."""

    role: str
    content: Content = ""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""
    tool_name: str = ""
    finish_reason: str = ""
    reasoning: str = ""
    token_count: int = 0
    platform_message_id: str = ""
    timestamp: float = 0.0

    @property
    def text(self) -> str:
        """The text of the content, parts joined by newlines."""
        if isinstance(self.content, str):
            return self.content
        return "\n".join(str(part.get("text", "")) for part in self.content if part.get("type") == "text")


class NoticeKind(Enum):
    """What a notice in a session's inbox reports."""

    COMPLETION = "completion"
    DELEGATION = "async_delegation"
    WATCH_MATCH = "watch_match"
    WATCH_DISABLED = "watch_disabled"
    WATCH_OVERFLOW = "watch_overflow"
    LOST = "lost"
    INFORMATION = "information"


class InboxKind(Enum):
    """A row of an inbox is a message from outside, or a notice from the conversation's own work."""

    MESSAGE = "message"
    NOTICE = "notice"


class InboxRow(msgspec.Struct, frozen=True, kw_only=True):
    """Something that waits for a session. Messages become one turn each; a burst of notices becomes one turn."""

    id: int
    kind: InboxKind
    inbox: str
    session_key: str
    session_id: str = ""
    routing: SessionContext
    text: str
    notice: NoticeKind | None = None
    job_id: str = ""
    root_id: str = ""
    payload: Mapping[str, Any] = msgspec.field(default_factory=dict[str, Any])
    created_at: float = 0.0
    attempts: int = 0
    """How often it was claimed, this time included."""


class NewMessage(msgspec.Struct, frozen=True, kw_only=True):
    """A message that an adapter accepts for a session. `dedupe_key` (unique per inbox) makes accepting it idempotent."""

    inbox: str
    session_key: str
    routing: SessionContext
    text: str
    payload: Mapping[str, Any] = msgspec.field(default_factory=dict[str, Any])
    dedupe_key: str = ""


class NewNotice(msgspec.Struct, frozen=True, kw_only=True):
    """A notice to the session that `routing` names, not yet numbered."""

    inbox: str
    routing: SessionContext
    kind: NoticeKind
    text: str
    job_id: str = ""
    root_id: str = ""
    payload: Mapping[str, Any] = msgspec.field(default_factory=dict[str, Any])


class NewReply(msgspec.Struct, frozen=True, kw_only=True):
    """A reply that waits for a platform. `target` is what the platform's sender needs to find the chat again after a restart."""

    platform: str
    target: Mapping[str, Any]
    text: str
    payload: Mapping[str, Any] = msgspec.field(default_factory=dict[str, Any])


class NewRun(msgspec.Struct, frozen=True, kw_only=True):
    """The row behind a run: made by `begin_turn` before the run is promised to anybody."""

    run_id: str
    session_id: str
    model: str = ""
    tenant: str = ""
    input_preview: str = ""
    idempotency_key: str = ""
    fingerprint: str = ""


class EventRow(msgspec.Struct, frozen=True, kw_only=True):
    """One event of a run's log. Its public id is `<epoch>-<number>`."""

    run_id: str
    epoch: str
    number: int
    event: Mapping[str, Any]


class TurnStart(msgspec.Struct, frozen=True, kw_only=True):
    """What `begin_turn` writes: the session if it is new, the run if one is promised, and which inbox rows this turn takes.

    A row of kind MESSAGE that was taken is never begun again; a NOTICE leaves only by the commit of the turn that told it.
    """

    turn_id: str
    context: SessionContext
    source: str
    tenant: str = ""
    model: str = ""
    parent_session_id: str = ""
    run: NewRun | None = None
    inbox_ids: tuple[int, ...] = ()
    one_shot: bool = False
    hold: bool = False
    """Whether the turn takes the lock of its session, in a store that several nodes share: `SessionHeld` if a turn of another node has it."""
    began_at: float = 0.0
    """When the turn began: a message to a session that had ended before reopens it; one that ends under its turn stays ended."""


class TurnFinish(msgspec.Struct, frozen=True, kw_only=True):
    """What `finish_turn` writes, all of it or nothing: messages, counters, replies, acknowledgements, the run's end and the session's.

    It also makes the session if `begin_turn` was not written (a turn that nobody was promised is durable in one commit).
    `also` holds records of other layers that must commit with the turn; the runtime does not look into them.
    """

    start: TurnStart
    state: TurnState
    messages: tuple[Message, ...] = ()
    usage: Usage = Usage()
    text: str = ""
    error: str = ""
    error_code: str = ""
    model: str = ""
    outbox: tuple[NewReply, ...] = ()
    acknowledged: tuple[int, ...] = ()
    events: tuple[EventRow, ...] = ()
    end_session: str = ""
    branched: bool = False
    """Whether jobs or notices belong to this turn's root: then `end_session` waits until the session has been told everything."""
    root_id: str = ""
    also: tuple[object, ...] = ()
    waited: bool = False
    """It ended while it waited for its session, which another turn has: it leaves no message, and does not end the other's turn."""


class JobStart(msgspec.Struct, frozen=True, kw_only=True):
    """A job's row, written before the job's work exists. It belongs to the session that `routing` names.

    `inbox` is empty for a job that nobody watches.
    """

    job_id: str
    kind: str
    title: str
    root_id: str
    turn_id: str
    routing: SessionContext
    inbox: str = ""
    details: Mapping[str, Any] = msgspec.field(default_factory=dict[str, Any])


class JobFinish(msgspec.Struct, frozen=True, kw_only=True):
    """A job's end: its terminal state and, if a channel was held, the notice, in one transaction.

    `superseded` says that the agent has already seen the end by itself: the notice is written as superseded, and told to nobody.
    """

    job_id: str
    state: JobState
    summary: str = ""
    details: Mapping[str, Any] = msgspec.field(default_factory=dict[str, Any])
    notice: NewNotice | None = None
    superseded: bool = False
    abandoned: str = ""


class Recovery(msgspec.Struct, frozen=True, kw_only=True):
    """What a boot found and put right."""

    epoch: str
    runs_interrupted: int = 0
    jobs_lost: int = 0
    approvals_expired: int = 0
    outbox_requeued: int = 0
    sessions_ended: int = 0
    messages_waiting: int = 0


class SignalStore(Protocol):
    """A store that says which rows may have changed."""

    def now(self) -> float:
        """The clock that decides when something in the store is due: the host's, corrected by the database's where nodes share one."""
        ...

    def subscribe(self, topic: str, wake: Wake, key: str | None = None) -> AbstractContextManager[None]:
        """Call `wake(key)` after each commit that concerns `topic` and `key` (any key for None), for the body of the `with`.

        A signal is a hint: it may come too often or late, and the woken side reads rows.
        """
        ...


class NodeRow(msgspec.Struct, frozen=True, kw_only=True):
    """A node: a process that shares the store with others. Its `incarnation` is random, and new at each start; names may repeat.

    `info` is what the node says about itself (its load, its version). `leases` are the singletons that it runs, and `hosted` is the number of sessions
    that are bound to it.
    """

    incarnation: str
    name: str
    started_at: float
    expires_at: float
    info: Mapping[str, Any] = msgspec.field(default_factory=dict[str, Any])
    leases: tuple[str, ...] = ()
    hosted: int = 0


class SessionHost(msgspec.Struct, frozen=True, kw_only=True):
    """The node to which a session is bound, because its shell, its files or its jobs are there.

    `gone` says that the node is no more; `lost_jobs` are the titles of the jobs that ended with it.
    """

    node: str
    gone: bool = False
    lost_jobs: tuple[str, ...] = ()


class NodeRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Something that only one node can do, because it holds what the request is about: stop a turn, read the output of a process."""

    id: str
    node: str
    """The incarnation that has to answer it."""
    kind: str
    target: str = ""
    payload: Mapping[str, Any] = msgspec.field(default_factory=dict[str, Any])


class NodeAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """What a node answered. `gone` says that it was taken over before it did; the answer is then the reaper's, and empty."""

    value: Mapping[str, Any] = msgspec.field(default_factory=dict[str, Any])
    gone: bool = False


class NodeStore(Protocol):
    """Membership: which nodes share a store, what only one of them may do at a time, and what they ask of each other.

    A node is a row with an expiry, decided by the store's clock alone. Every write of a node whose row is gone raises `Fenced` and writes nothing; the
    row of an expired node is removed by whoever reaps it, in the transaction that gives everything that it owned its end. A store that is opened by one
    owner at a time has `lease_seconds` 0: it is held for as long as it is open, and none of these verbs is called.
    """

    @property
    def owner(self) -> str:
        """The incarnation of this handle: what it begins from now on carries it."""
        ...

    @property
    def lease_seconds(self) -> float:
        """For how long a renewed node is alive; 0 for a store that has one owner for as long as it is open."""
        ...

    async def renew_node(self, info: Mapping[str, Any]) -> float | None:
        """Renew the lease of this node; return in how many seconds the first lease of another node expires, or None if there is no other.

        With 0 or less, one has expired: there is something to `reap`. Raises `Fenced` if the row is gone or has expired: an expired lease is never renewed.
        """
        ...

    async def leave_node(self, epoch: str) -> None:
        """End this node at once: what it still owned is given its end, its singletons are free, and its later writes raise `Fenced`."""
        ...

    async def list_nodes(self) -> list[NodeRow]:
        """The nodes that have not been taken over, oldest first; one that has expired is listed until it is."""
        ...

    async def claim_lease(self, name: str) -> bool:
        """Become the one node that runs this singleton; False while another one has it. It ends with `release_lease`, or with the node."""
        ...

    async def release_lease(self, name: str) -> None:
        """Give a singleton up: whoever waits for it is signalled. Does nothing if this node does not hold it."""
        ...

    async def ask_node(self, request: NodeRequest) -> bool:
        """Put a request to a node; False, with nothing written, if that node is gone."""
        ...

    async def take_requests(self) -> list[NodeRequest]:
        """The requests to this node that it has not taken before, oldest first."""
        ...

    async def answer_request(self, request_id: str, value: Mapping[str, Any]) -> None:
        """Answer a request. An answer that is there already stays; a request that nobody knows any more is ignored."""
        ...

    async def get_answer(self, request_id: str) -> NodeAnswer | None:
        """The answer to a request, or None while there is none."""
        ...

    async def claim_host(self, session_id: str) -> bool:
        """Bind a session to this node, where its shell and its files are from now on; False while it is bound to another node that is alive.

        The binding ends with the session. It outlives its node, so that the next turn learns what was lost.
        """
        ...

    async def release_host(self, session_id: str, node: str) -> None:
        """Undo the binding of a session to a node; nothing happens if it is bound to another one by now."""
        ...

    async def session_host(self, session_id: str) -> SessionHost | None:
        """The node to which a session is bound: by its shell and its files, else by its live jobs; None if it is bound to none."""
        ...

    async def session_owners(self, session_id: str) -> list[str]:
        """The nodes that have an open turn, a live run or a live job of a session."""
        ...

    async def lane_owner(self, inbox: str, session_key: str) -> str:
        """The node that works on a row of an inbox for this key; empty if none does."""
        ...

    async def set_run_status(self, run_id: str, status: RunStatus) -> None:
        """Move a live run of this node to another live status; one that has ended stays as it is. Only where nodes share the store."""
        ...


class RuntimeStore(SignalStore, NodeStore, Protocol):
    """The verbs that the runtime calls. See the records for what each one promises."""

    async def resolve_session(self, context: SessionContext, *, source: str, fresh: bool = False) -> str:
        """The id of the open session behind `context.session_key`, made if there is none (or if `fresh`). An ended one is not reused."""
        ...

    async def load_history(self, session_id: str) -> list[Message]:
        """The live messages of a session, oldest first; empty for an unknown session."""
        ...

    async def begin_turn(self, start: TurnStart) -> None:
        """Write down what was promised before the turn runs. With `start.hold`, `SessionHeld` if a turn of another node has the session."""
        ...

    async def finish_turn(self, finish: TurnFinish) -> bool:
        """Write the end of a turn; return whether it ended its session. Writing it twice changes nothing."""
        ...

    async def start_job(self, job: JobStart) -> None:
        """Write a job down before its work exists. Writing it twice changes nothing; `JobRefused` if another job has its id, or it has ended."""
        ...

    async def finish_job(self, job: JobFinish) -> int | None:
        """Write the end; return the id of the notice that now waits in the inbox, or None."""
        ...

    async def add_notice(self, notice: NewNotice) -> int | None:
        """Write a notice; return its id if it waits, or None if its session has ended."""
        ...

    async def supersede(self, job_id: str) -> int:
        """Mark the pending notices of a job as seen; return how many there were."""
        ...

    async def abandon(self, *, session_id: str, reason: str) -> int:
        """Mark what waits for a session as abandoned, with the reason; return how many rows there were."""
        ...

    async def root_open(self, root_id: str) -> bool:
        """Whether a job of this root is live, or a notice of it waits or is being told."""
        ...

    async def root_wakes(self, root_id: str) -> int:
        """How many turns have begun with notices of this root."""
        ...

    async def session_promised(self, session_id: str) -> int:
        """How much a session still has to be told: its watched jobs that run, and its rows that wait or are being told."""
        ...

    async def accept_message(self, message: NewMessage, *, limit: int | None = None) -> int | None:
        """Write a message into the inbox and return its id, or None if `dedupe_key` was accepted before.

        Raises `MailboxFull`, with nothing written, if `limit` messages wait for the session already.
        """
        ...

    async def take_inbox(self, inbox: str, session_key: str, limit: int = 32) -> list[InboxRow]:
        """Claim the rows of one inbox that the next turn of a session is about: its oldest message, or the notices before it.

        A claim ends when a turn that began with the rows ends, when they are acknowledged, released or buried, or when the owner is gone.
        """
        ...

    async def release_inbox(self, rows: Sequence[InboxRow]) -> None:
        """Give up the claim that gave these rows: they wait again. Rows that were claimed again since are left alone."""
        ...

    async def bury_inbox(self, rows: Sequence[InboxRow], *, reason: str, replies: Sequence[NewReply] = ()) -> None:
        """Make claimed rows dead letters and queue what their senders are told, in one transaction. Rows that were claimed again are left alone."""
        ...

    async def probe(self) -> None:
        """Write a row, to learn whether writes succeed; raises what a write would."""
        ...

    async def acknowledge(self, ids: Sequence[int]) -> None:
        """Mark notices as delivered outside any turn (the in-process reader)."""
        ...

    async def waiting_sessions(self, inbox: str) -> list[str]:
        """The session keys for which something waits in this inbox."""
        ...

    async def inbox_waiting(
        self, *, inbox: str | None = None, session_key: str | None = None, taken: bool = False
    ) -> int:
        """How many rows wait, in all inboxes (what a drain reports as undelivered), in one, or for one session.

        With `taken`, those that a turn has taken are counted, too.
        """
        ...

    async def append_events(self, events: Sequence[EventRow]) -> None: ...

    async def end_session(self, session_id: str, reason: str) -> bool:
        """End a session; the first reason wins. Returns whether this call ended it."""
        ...

    async def backlog(self) -> dict[str, int]:
        """How many rows wait, by what they wait for: `inbox`, `outbox`, `approvals`, `runs`, `jobs`."""
        ...

    async def recover(self, epoch: str) -> Recovery:
        """Begin a new incarnation, which owns what is begun from now on, and reap what belongs to owners that are gone. Called before any work.

        In a store that several nodes share, the incarnation is a node from now on; its lease expires in `lease_seconds`.
        """
        ...

    async def reap(self, epoch: str) -> Recovery:
        """Give everything that belongs to owners that are gone its end, or hand it over. A node whose lease has expired is gone."""
        ...


class TurnInput(msgspec.Struct, frozen=True, kw_only=True):
    """What a turn is about: a message, or notices from the conversation's own work.

    `history`, when given, replaces what the store holds (a stateless client brings its own). `instructions` are for this turn only.
    """

    text: str = ""
    content: Content = ""
    notices: tuple[InboxRow, ...] = ()
    history: tuple[Message, ...] | None = None
    instructions: str = ""
    model: str = ""
    payload: Mapping[str, Any] = msgspec.field(default_factory=dict[str, Any])

    @property
    def prompt(self) -> Content:
        """What the model is given as the user's message."""
        return self.content or self.text


class Reply(msgspec.Struct, frozen=True, kw_only=True):
    """What an agent answers. `messages` is what is added to the transcript; left empty, it is the prompt and the text.

    `calls` are calls of tools that run at the client: the turn ends with them, and the client's next request brings their results.
    """

    text: str = ""
    messages: tuple[Message, ...] = ()
    usage: Usage = Usage()
    error: str = ""
    error_code: str = ""
    partial: bool = False
    model: str = ""
    finish_reason: str = "stop"
    calls: tuple[ToolCall, ...] = ()
    reasoning: str = ""


class Agent(Protocol):
    """Anything that turns an input into a reply. A plain string is a reply, too."""

    def __call__(self, turn: Turn, /) -> Awaitable[Reply | str]: ...
