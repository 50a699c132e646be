"""The ports of the runtime: the agent that it runs, and the store that it writes to.

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

Wake = Callable[[str], None]
"""Called with a key after a commit that concerns it. It must neither wait nor raise."""

OUTBOX_TOPIC: Final = "outbox"
"""The topic of replies that wait; its keys are platforms."""


ROOT_TOPIC: Final = "root"
"""The topic of roots that have settled; its keys are root ids."""


RUN_TOPIC: Final = "run"
"""The topic of runs whose row or event log has changed; its keys are run ids."""

APPROVAL_TOPIC: Final = "approval"
"""The topic of requests that were answered or have expired; its keys are approval ids."""

CRON_TOPIC: Final = "cron"
"""The topic of scheduled jobs that were changed, or whose run has ended; its keys are job ids."""

KEY_TOPIC: Final = "key"
"""The topic of API keys that were revoked; its keys are their ids."""

SESSION_TOPIC: Final = "session"
"""The topic of sessions whose lock was released (in a store that several nodes share); its keys are session ids."""

NODE_TOPIC: Final = "node"
"""The topic of nodes that joined, left or were reaped; its keys are incarnations."""

REAP_TOPIC: Final = "reap"
"""The topic of nodes that left and interrupted sessions of theirs, which other nodes settle, or that released runs, which other nodes begin again; its
keys are incarnations."""

LEASE_TOPIC: Final = "lease"
"""The topic of singletons that no node holds any more; its keys are their names."""

REQUEST_TOPIC: Final = "request"
"""The topic of requests that wait for a node; its keys are incarnations."""

ANSWER_TOPIC: Final = "answer"
"""The topic of requests to nodes that were answered; its keys are request ids."""


def inbox_topic(inbox: str) -> str:
    """Return the topic of rows that wait in an inbox; its keys are session keys."""
    return f"inbox:{inbox}"


Content = str | Sequence[Mapping[str, Any]]
"""Text, or a list of OpenAI-shaped parts (`{"type": "text" | "image_url", …}`)."""


class ToolCall(msgspec.Struct, frozen=True, kw_only=True):
    """A tool call that a model requests. `arguments` is the JSON text as the model wrote it."""

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
        """Return the text of the content, parts joined by newlines."""
        if isinstance(self.content, str):
            return self.content
        return "\n".join(str(part.get("text", "")) for part in self.content if part.get("type") == "text")


class NoticeKind(Enum):
    """The kinds of event that a notice in a session's inbox reports."""

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
    """A row that waits for a session. Messages become one turn each; a burst of notices becomes one turn."""

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
    """A reply that waits for a platform. `target` identifies the chat for the platform's sender, also after a restart."""

    platform: str
    target: Mapping[str, Any]
    text: str
    payload: Mapping[str, Any] = msgspec.field(default_factory=dict[str, Any])


class NewRun(msgspec.Struct, frozen=True, kw_only=True):
    """The row of a run: written by `begin_turn` before the run's id is returned to a client."""

    run_id: str
    session_id: str
    model: str = ""
    tenant: str = ""
    input_preview: str = ""
    idempotency_key: str = ""
    fingerprint: str = ""
    resumable: bool = False
    """Whether the run is begun again if it is interrupted."""


class Resumption(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What begins an interrupted run again: what its client sent, and on whose behalf. It is stored with the run's row and removed with its end."""

    context: SessionContext
    input: TurnInput
    source: str = ""
    seconds: float | None = None
    """The time limit of its turn."""


class ResumedRun(msgspec.Struct, frozen=True, kw_only=True):
    """An interrupted run that this node has claimed for its next attempt. `last` is the number of its event that says so."""

    run: NewRun
    attempt: int
    status: RunStatus
    created_at: float
    last: int
    resumption: Resumption
    stopped: bool = False
    """Whether a stop was requested since: then the attempt ends before it begins."""


class EventRow(msgspec.Struct, frozen=True, kw_only=True):
    """One event of a run's log. Its public id is `<epoch>-<number>`."""

    run_id: str
    epoch: str
    number: int
    event: Mapping[str, Any]


class TurnStart(msgspec.Struct, frozen=True, kw_only=True):
    """What `begin_turn` writes: the session if it is new, the run if there is one, and which inbox rows this turn takes.

    A MESSAGE row that a turn took is never begun again; a NOTICE row leaves only with the commit of the turn that delivered it.
    """

    turn_id: str
    context: SessionContext
    source: str
    tenant: str = ""
    model: str = ""
    parent_session_id: str = ""
    run: NewRun | None = None
    resumption: Resumption | None = None
    """What begins the run again, when a resumable one is accepted."""
    inbox_ids: tuple[int, ...] = ()
    one_shot: bool = False
    hold: bool = False
    """Whether the turn takes the lock of its session, in a store that several nodes share. Raises `SessionHeld` if another node's turn has it."""
    roots: tuple[str, ...] = ()
    """The roots whose notices start the turn, if `wakes` bounds the turns that the notices of one root start."""
    wakes: int | None = None
    """The number of turns that the notices of each of `roots` may start, this one included. Raises `BudgetExhausted` if it would be exceeded."""
    began_at: float = 0.0
    """When the turn began: a session that had ended before is reopened, but not by waiting rows; one that ends during its turn stays ended."""


class TurnFinish(msgspec.Struct, frozen=True, kw_only=True):
    """What `finish_turn` writes in one transaction: messages, counters, replies, acknowledgements, the run's end and the session's.

    It also makes the session if `begin_turn` was not called (a turn without a run or inbox rows is durable in one commit).
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
    """Whether jobs or notices belong to this turn's root: then `end_session` waits until all completions are delivered."""
    root_id: str = ""
    also: tuple[object, ...] = ()
    waited: bool = False
    """Whether the turn ended while it waited for its session, which another turn has: it adds no messages, and does not end the other turn."""


class JobStart(msgspec.Struct, frozen=True, kw_only=True):
    """A job's row, written before the job's work exists. It belongs to the session that `routing` names.

    `inbox` is empty for an unwatched job.
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

    `superseded` says that the agent has already seen the end: the notice is written as superseded, and not delivered.
    """

    job_id: str
    state: JobState
    summary: str = ""
    details: Mapping[str, Any] = msgspec.field(default_factory=dict[str, Any])
    notice: NewNotice | None = None
    superseded: bool = False
    abandoned: str = ""


class Recovery(msgspec.Struct, frozen=True, kw_only=True):
    """What the reaper found and ended or requeued."""

    epoch: str
    runs_interrupted: int = 0
    runs_released: int = 0
    """The interrupted runs that wait for their next attempt."""
    jobs_lost: int = 0
    approvals_expired: int = 0
    outbox_requeued: int = 0
    sessions_ended: int = 0
    messages_waiting: int = 0


class SignalStore(Protocol):
    """A store that signals which rows may have changed."""

    def now(self) -> float:
        """Return the time by which due times in the store are decided: the host's clock, corrected by the database's where nodes share one."""
        ...

    def subscribe(self, topic: str, wake: Wake, key: str | None = None) -> AbstractContextManager[None]:
        """Call `wake(key)` after each commit that concerns `topic` and `key` (any key for None), for the body of the `with`.

        A signal is a hint: it may come too often or late, and the woken side reads rows.
        """
        ...


class NodeRow(msgspec.Struct, frozen=True, kw_only=True):
    """A node: a process that shares the store with others. Its `incarnation` is random, and new at each start; names may repeat.

    `info` is what the node reports of itself (its load, its version). `leases` are the singletons that it runs, and `hosted` is the number of sessions
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

    `gone` says that the node has ended; `lost_jobs` are the titles of the jobs that ended with it. `held` says that a turn of another node than the one
    that asks has the session; a session that is held and not bound has an empty `node`.
    """

    node: str = ""
    gone: bool = False
    held: bool = False
    lost_jobs: tuple[str, ...] = ()


class NodeRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request that only one node can serve, because it holds the target: stop a turn, read the output of a process."""

    id: str
    node: str
    """The incarnation that has to answer it."""
    kind: str
    target: str = ""
    payload: Mapping[str, Any] = msgspec.field(default_factory=dict[str, Any])


class NodeAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of a node. `gone` says that the node was reaped before it answered; the answer is then the reaper's, and empty."""

    value: Mapping[str, Any] = msgspec.field(default_factory=dict[str, Any])
    gone: bool = False


class NodeStore(Protocol):
    """Membership: which nodes share a store, singletons, and requests between nodes.

    A node is a row with an expiry, decided by the store's clock alone. Every write of a node whose row was removed raises `Fenced` and writes nothing; the
    row of an expired node is removed by the reaper, in the transaction that ends everything that it owned. A store that is opened by one
    owner at a time has `lease_seconds` 0: it is held for as long as it is open, and none of these verbs is called.
    """

    @property
    def owner(self) -> str:
        """Return the incarnation of this handle: what it begins from now on carries it."""
        ...

    @property
    def node_name(self) -> str:
        """Return the name of this node, for display: nothing prevents two nodes from having the same."""
        ...

    @property
    def lease_seconds(self) -> float:
        """Return the length of a node's lease in seconds; 0 for a store that has one owner for as long as it is open."""
        ...

    async def renew_node(self, info: Mapping[str, Any]) -> float | None:
        """Renew the lease of this node; return in how many seconds the first lease of another node expires, or None if there is no other.

        With 0 or less, one has expired: there is something to `reap`. Raises `Fenced` if the row was removed or has expired: an expired lease is never renewed.
        """
        ...

    async def leave_node(self, epoch: str) -> None:
        """End this node at once: its remaining work is ended, its singletons are released, and its later writes raise `Fenced`."""
        ...

    async def list_nodes(self) -> list[NodeRow]:
        """Return the nodes that have not been reaped, oldest first; an expired node is listed until it is reaped."""
        ...

    async def claim_lease(self, name: str) -> bool:
        """Claim a singleton for this node; return False while another node has it. The claim ends with `release_lease`, or with the node."""
        ...

    async def release_lease(self, name: str) -> None:
        """Release a singleton and signal the nodes that wait for it. Does nothing if this node does not hold it."""
        ...

    async def ask_node(self, request: NodeRequest) -> bool:
        """Write a request to a node; return False, with nothing written, if that node has ended."""
        ...

    async def take_requests(self, got: Sequence[str] = ()) -> list[NodeRequest]:
        """Return the requests to this node of which it has not said that it has `got` them, oldest first. What those contain is dropped."""
        ...

    async def answer_request(self, request_id: str, value: Mapping[str, Any]) -> None:
        """Answer a request. An earlier answer stays; a request that no longer exists is ignored."""
        ...

    async def get_answer(self, request_id: str) -> NodeAnswer | None:
        """Return the answer to a request, or None while there is none."""
        ...

    async def claim_host(self, session_id: str) -> bool:
        """Bind a session to this node, where its shell and its files are from now on; return False while it is bound to another live node.

        The binding ends with the session. It outlives its node, so that the next turn learns what was lost.
        """
        ...

    async def release_host(self, session_id: str, node: str) -> None:
        """Remove the binding of a session to a node. Does nothing if it is bound to another one by now."""
        ...

    async def session_host(self, session_id: str) -> SessionHost | None:
        """Return the node to which a session is bound: by its shell and its files, else by its live jobs; None if it is bound to none, and no turn of
        another node has it.
        """
        ...

    async def session_owners(self, session_id: str) -> list[str]:
        """Return the nodes that have an open turn, a live run, a live job or the shell of a session."""
        ...

    async def lane_owner(self, inbox: str, session_key: str) -> str:
        """Return the node that works on a row of an inbox for this key; empty if none does."""
        ...

    async def set_run_status(self, run_id: str, status: RunStatus) -> None:
        """Set the status of a live run of this node to another live status; an ended run is not changed. Only where nodes share the store."""
        ...


class RuntimeStore(SignalStore, NodeStore, Protocol):
    """The verbs that the runtime calls. See the records for what each one guarantees."""

    async def resolve_session(self, context: SessionContext, *, source: str, fresh: bool = False) -> str:
        """Return the id of the open session of `context.session_key`; make one if there is none, or if `fresh`. An ended one is not reused."""
        ...

    async def load_history(self, session_id: str) -> list[Message]:
        """Return the live messages of a session, oldest first; empty for an unknown session."""
        ...

    async def begin_turn(self, start: TurnStart) -> None:
        """Commit the beginning of a turn before it runs: its run, its session, the messages that it takes.

        With `start.hold`, raises `SessionHeld` if a turn of another node has the session; with `start.wakes`, `BudgetExhausted` if the notices of a root
        have started that many turns; for waiting rows, `SessionEnded` if the session has ended and is not one-shot: they do not reopen it. A store also
        refuses a run whose idempotency key is known, and a session of another tenant. Nothing is written then.
        """
        ...

    async def finish_turn(self, finish: TurnFinish) -> bool:
        """Commit the end of a turn; return whether it ended its session. Idempotent."""
        ...

    async def start_job(self, job: JobStart) -> None:
        """Write the row of a job before its work exists. Idempotent. Raises `JobRefused` if another job has its id, or the job has ended."""
        ...

    async def finish_job(self, job: JobFinish) -> int | None:
        """Write the end of a job; return the id of the notice that now waits in the inbox, or None."""
        ...

    async def add_notice(self, notice: NewNotice) -> int | None:
        """Write a notice; return its id if it waits, or None if its session has ended."""
        ...

    async def supersede(self, job_id: str) -> int:
        """Mark the pending notices of a job as seen; return how many there were."""
        ...

    async def abandon(self, *, session_id: str, reason: str, root_id: str | None = None) -> int:
        """Mark the waiting rows of a session as abandoned, or only the notices of one root, with the reason; return their number."""
        ...

    async def root_open(self, root_id: str) -> bool:
        """Return whether a job of this root is live, or a notice of it waits or is in a turn."""
        ...

    async def root_wakes(self, root_id: str) -> int:
        """Return how many turns have begun with notices of this root."""
        ...

    async def session_promised(self, session_id: str) -> int:
        """Return the number of pending completions of a session: its running watched jobs, and its rows that wait or are in a turn."""
        ...

    async def accept_message(self, message: NewMessage, *, limit: int | None = None) -> int | None:
        """Write a message into the inbox and return its id, or None if `dedupe_key` was accepted before.

        Raises `MailboxFull`, with nothing written, if `limit` messages wait for the session already.
        """
        ...

    async def take_inbox(self, inbox: str, session_key: str, limit: int = 32) -> list[InboxRow]:
        """Claim the rows of one inbox for the next turn of a session: its oldest message, or the notices before it.

        A claim ends when a turn that began with the rows ends, when they are acknowledged, released or made dead letters, or when the owner is reaped.
        """
        ...

    async def release_inbox(self, rows: Sequence[InboxRow]) -> None:
        """Release the claim of these rows: they wait again. Rows that were claimed again since are not changed."""
        ...

    async def inbox_dead(self, rows: Sequence[InboxRow], *, reason: str, replies: Sequence[NewReply] = ()) -> None:
        """Make claimed rows dead letters and queue the replies to their senders, in one transaction. Rows that were claimed again are not changed."""
        ...

    async def probe(self) -> None:
        """Write a row, to learn whether writes succeed. Raises what a write would."""
        ...

    async def acknowledge(self, ids: Sequence[int]) -> None:
        """Mark notices as delivered outside any turn, for a reader in this process."""
        ...

    async def waiting_sessions(self, inbox: str) -> list[str]:
        """Return the session keys for which a row waits in this inbox."""
        ...

    async def inbox_waiting(
        self,
        *,
        inbox: str | None = None,
        session_key: str | None = None,
        taken: bool = False,
        kind: InboxKind | None = None,
    ) -> int:
        """Return how many rows wait, in all inboxes (what a drain reports as undelivered), in one, or for one session; of all kinds or of one.

        With `taken`, rows that a turn has taken are counted, too.
        """
        ...

    async def append_events(self, events: Sequence[EventRow]) -> None: ...

    async def claim_interrupted(self, epoch: str, most: int | None = None) -> list[ResumedRun]:
        """Claim interrupted runs that no node has, all or at `most` so many, for their next attempt; return all that this node has claimed and that have
        not ended.

        An attempt counts from its claim, whose transaction writes its event. Those that are not begun again are ended.
        """
        ...

    async def stop_resuming(self, epoch: str, *, run_id: str = "", session_id: str = "") -> None:
        """Note that a run, or the runs of a session, are not begun again if they are interrupted; end those that wait for their next attempt."""
        ...

    async def end_session(self, session_id: str, reason: str) -> bool:
        """End a session; the first reason wins. Returns whether this call ended it."""
        ...

    async def backlog(self) -> dict[str, int]:
        """Return how many rows wait, by kind: `inbox`, `outbox`, `approvals`, `runs`, `jobs`."""
        ...

    async def recover(self, epoch: str) -> Recovery:
        """Begin a new incarnation, which owns all later work, and reap the work of owners that have ended. Called before any work.

        In a store that several nodes share, the incarnation is a node from now on; its lease expires in `lease_seconds`.
        """
        ...

    async def reap(self, epoch: str) -> Recovery:
        """End or requeue everything that belongs to owners that have ended. A node whose lease has expired counts as ended."""
        ...


class TurnInput(msgspec.Struct, frozen=True, kw_only=True):
    """The input of a turn: a message, or notices from the conversation's own work.

    `history`, when given, replaces what the store holds (a stateless client brings its own). `instructions` are for this turn only. `preface` is the text
    that the runtime has put in front of the message, in `text` and in `content`; empty if there is none.
    """

    text: str = ""
    content: Content = ""
    preface: str = ""
    notices: tuple[InboxRow, ...] = ()
    history: tuple[Message, ...] | None = None
    instructions: str = ""
    model: str = ""
    payload: Mapping[str, Any] = msgspec.field(default_factory=dict[str, Any])

    @property
    def prompt(self) -> Content:
        """Return the content of the user's message for the model."""
        return self.content or self.text


class Reply(msgspec.Struct, frozen=True, kw_only=True):
    """The result of an agent. `messages` is added to the transcript; if empty, the prompt and the text are.

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
    """An async callable that takes a turn and returns a reply. A plain string is a reply, too."""

    def __call__(self, turn: Turn, /) -> Awaitable[Reply | str]: ...
