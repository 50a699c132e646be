"""A turn: one input through the agent, in its own nursery, with the session's context bound there and nowhere else.

There are two kinds. A `DeliveringTurn` has a `channel`, so work that it starts can report back later. A `StatelessTurn` has no such attribute: a
type checker, not an `if`, rejects a watched job in it. A child turn is of its parent's kind.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from math import inf
from typing import TYPE_CHECKING, Any, Literal, TypeVar, TypeVarTuple, final

import msgspec
import trio

from .asyncio_loop import AsyncioLoop, awaitable_from_asyncio
from .budget import UNLIMITED, Allowance, Budget
from .channel import CompletionChannel
from .context import Binding, SessionContext, _binding
from .outcome import CancelCause, Cause, Outcome
from .ports import InboxRow, Message, NewReply, NewRun, Reply, TurnInput
from .settlement import Settlement
from .stop_receipt import StopReceipt, stop_node
from .tree import Node, ended_as, printable

if TYPE_CHECKING:
    from .agents import AnyAgent
    from .core import RuntimeCore
    from .ends import End
    from .supervisor import Job, JobSpec

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

EventSink = Callable[[Mapping[str, Any]], None]
"""Receives an event of a turn (`message.delta`, `tool.started`, …). It must neither block nor raise."""

DEFAULT_STOP_TIMEOUT = 30.0
"""Seconds that a stop waits for the scope to become empty before its receipt says what remains."""


TITLE_LENGTH = 120
"""Characters of an input that name its turn in the tree."""

PARENT_GONE = Cause(CancelCause.PARENT_GONE)


class TurnHooks(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """Callbacks of a turn. Every field is optional.

    `sink` receives the turn's events. `asks` receives requests for approval for as long as the work runs; without it no person can be
    asked. `on_start(turn)` is called before the turn begins; if it raises, the turn does not begin. `replies(turn, outcome)` and
    `also(turn, outcome)` are pure: what they return is committed with the turn. `on_end(outcome)` is called once, after the commit, under a
    bounded shield; what it raises is logged.
    """

    sink: EventSink | None = None
    asks: EventSink | None = None
    on_start: Callable[[Turn], None] | None = None
    replies: Callable[[Turn, Outcome], Sequence[NewReply]] | None = None
    also: Callable[[Turn, Outcome], Sequence[object]] | None = None
    on_end: Callable[[Outcome], Awaitable[None]] | None = None


NO_HOOKS = TurnHooks()


class TurnSpec(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """Everything that the caller of a turn decides before it starts.

    `agent` defaults to the runtime's, and `source` to the platform of the context. `one_shot` is the reason with which the session ends
    when the turn and all that it started have ended; empty for a session that stays open. If a turn of another node has the session,
    `spare` returns another one to run in; without it the turn waits.
    """

    input: TurnInput
    context: SessionContext
    agent: AnyAgent | None = None
    source: str = ""
    tenant: str = ""
    budget: Budget | None = None
    one_shot: str = ""
    hooks: TurnHooks = NO_HOOKS
    spare: Callable[[], SessionContext] | None = None

    def __post_init__(self) -> None:
        if not self.source:
            msgspec.structs.force_setattr(self, "source", self.context.platform)


class TurnOrigin(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """What caused a turn; set by the runtime.

    `run` is the turn's run, if it has one; `rows` are the inbox rows that it takes; `parent_session_id` is the session of its parent.
    `outer_cause` is recorded when the task that runs the turn is cancelled from outside.
    """

    run: NewRun | None = None
    rows: tuple[InboxRow, ...] = ()
    parent_session_id: str = ""
    outer_cause: Cause = PARENT_GONE


EMBEDDED = TurnOrigin()
"""The origin of a turn that an embedding program or a parent turn starts directly."""


class Owner(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """The owner of background work: the session's identity by value, and the allowance that its turns and jobs are counted against.

    `channel` makes the child turns of the work delivering ones; it is None for work that a stateless turn started. `asks` receives its requests for approval.
    """

    context: SessionContext
    turn_id: str
    root: Settlement
    allowance: Allowance = UNLIMITED
    tenant: str = ""
    channel: CompletionChannel | None = None
    asks: EventSink | None = None


class Turn:
    """The base of both kinds of turn. Made by the runtime; an agent receives it and uses it until it returns.

    `progress` is the agent's result so far, which is stored if the turn is cancelled. `steering` holds texts that arrived while the turn ran and
    that the agent reads and removes at its next step; `steered` are the inbox rows of these texts, oldest first. `state` belongs
    to the agent. `scope` is the nursery's cancel scope, and None until the nursery is open: an earlier cancel is kept in `cause`.
    `elsewhere` is true while a turn of another node has the session.
    """

    @property
    def supports_async_delivery(self) -> bool:
        """Return whether this turn has a channel: a constant of each subclass."""
        raise NotImplementedError

    __slots__ = (
        "allowance",
        "cause",
        "context",
        "core",
        "deadline",
        "elsewhere",
        "id",
        "input",
        "locked",
        "node",
        "nursery",
        "origin",
        "progress",
        "root",
        "scope",
        "sink",
        "spec",
        "state",
        "steered",
        "steering",
        "unwritten",
    )

    def __init__(
        self,
        core: RuntimeCore,
        spec: TurnSpec,
        origin: TurnOrigin,
        node: Node,
        *,
        id: str,
        root: Settlement,
        allowance: Allowance,
    ) -> None:
        self.core = core
        self.spec = spec
        self.origin = origin
        self.id = id
        self.context: SessionContext = spec.context
        self.input: TurnInput = spec.input
        self.sink: EventSink | None = spec.hooks.sink
        self.root = root
        self.cause: Cause | None = None
        self.progress: Reply | None = None
        self.state: dict[str, Any] | None = None
        self.steering: list[str] = []
        self.steered: tuple[tuple[int, str], ...] = ()
        self.scope: trio.CancelScope | None = None
        self.unwritten: End | None = None
        self.locked: bool = False
        self.elsewhere: bool = False
        budget = spec.budget
        self.allowance: Allowance = allowance.child(budget, self.cancel)
        self.node = node.open(
            "turn", id, name=spec.source, owner=self.context.session_key, tenant=spec.tenant, work=self
        )
        seconds = None if budget is None else budget.seconds
        self.deadline: float = inf if seconds is None else self.node.opened_at + seconds
        self.nursery: trio.Nursery

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.id} session {self.context.session_id}>"

    # -- what an agent uses ------------------------------------------------------------------------------------------------------

    @awaitable_from_asyncio
    async def history(self) -> list[Message]:
        """Return the messages before this turn: those of the input if it has any, else the session's from the store."""
        if self.input.history is not None:
            return list(self.input.history)
        return await self.core.store.load_history(self.context.session_id)

    def emit(self, event: str, **fields: Any) -> None:
        """Pass an event to the turn's sink. Does nothing if the turn has none.

        The sink is called in Trio's thread: at once, or, for calls from an asyncio agent or a worker thread, in their order and before the turn ends.
        """
        if self.sink is not None:
            self.core.asyncio_loop.call_soon(self._tell, {"event": event, **fields})

    def _tell(self, event: Mapping[str, Any]) -> None:
        if self.sink is not None and self.node.closed_at is None:
            self.sink(event)

    def start_soon(self, function: Callable[[*Ts], Awaitable[object]], *args: *Ts, name: str = "") -> None:
        """Start a task in the turn's nursery, with its own node in the tree. The turn ends only after the task has."""
        self.nursery.start_soon(self._task, function, args, name or getattr(function, "__name__", "task"))

    @property
    def bridge(self) -> AsyncioLoop:
        """Return the asyncio loop of the runtime."""
        return self.core.asyncio_loop

    def start_on_trio(self, function: Callable[[], Awaitable[None]], name: str) -> None:
        """Start a task as `start_soon` does; called by the asyncio loop."""
        self.start_soon(function, name=name)

    async def _task(self, function: Callable[..., Awaitable[object]], args: tuple[Any, ...], name: str) -> None:
        node = self.node.open("task", self.core.ids.make("task_", 8), name=name)
        token = _binding.set(Binding(self.context, self, node))
        error: BaseException | None = None
        try:
            with printable():
                await function(*args)
        except BaseException as raised:
            error = raised
            raise
        finally:
            _binding.reset(token)
            node.close(ended_as(error))

    @awaitable_from_asyncio
    async def run_sync(self, function: Callable[[*Ts], T], *args: *Ts, name: str = "") -> T:
        """Run synchronous code in a worker thread with this turn's context. See `Threads.run_sync` for cancellation."""
        return await self.core.threads.run_sync(function, *args, name=name)

    @awaitable_from_asyncio
    async def start_job(self, spec: JobSpec) -> Job:
        """Start background work that outlives this turn and sends no notice; find it again with `Runtime.supervisor`.

        Raises `JobRefused` when a limit is reached. Cancelling the call before the job has started starts nothing.
        """
        return await self.core.supervisor.start(spec, self.owner)

    @awaitable_from_asyncio
    async def run_child(
        self,
        input: TurnInput | str,
        *,
        agent: AnyAgent | None = None,
        context: SessionContext | None = None,
        budget: Budget | None = None,
        hooks: TurnHooks = NO_HOOKS,
    ) -> Outcome:
        """Run a child turn inside this one and wait for it: same kind, own nursery, own session, this turn's limiter token.

        Cancelling this turn cancels the child, whose end is still committed. A failed child does not raise: its outcome has the error.
        """
        from .turn_lifecycle import run_child

        spec = self.core.child_spec(input, self.owner, agent=agent, context=context, budget=budget, hooks=hooks)
        return await run_child(self.core, spec, self.owner, self.node)

    @property
    def owner(self) -> Owner:
        """Return the owner of a job or child that is started here: values only, no reference to this turn."""
        return Owner(
            context=self.context,
            turn_id=self.id,
            root=self.root,
            allowance=self.allowance,
            tenant=self.spec.tenant,
            asks=self.spec.hooks.asks,
        )

    def steer(self, row: int, text: str) -> None:
        """Pass the text of a waiting inbox row to the running agent. The row is acknowledged with the turn's end if the agent has used the text."""
        self.steering.append(text)
        self.steered = (*self.steered, (row, text))

    def used_rows(self) -> tuple[int, ...]:
        """Return the steered inbox rows whose texts the agent has removed from `steering`. The others become turns of their own."""
        left = list(self.steering)
        used: list[int] = []
        for row, text in reversed(self.steered):
            if text in left:
                left.remove(text)
            else:
                used.append(row)
        return tuple(used)

    # -- stopping ----------------------------------------------------------------------------------------------------------------

    def cancel(self, cause: Cause) -> None:
        """Cancel the turn's scope, from any thread. The first cause stays. Also takes effect if the turn has not started its work yet."""
        self.core.asyncio_loop.call_soon(self._cancel, cause)

    def enter(self, nursery: trio.Nursery) -> None:
        """Run in this nursery, whose scope is the turn's until the turn leaves it or its end is committed."""
        self.nursery = nursery
        self.scope = self.node.scope = nursery.cancel_scope
        if self.deadline != inf:
            self.node.deadline = self.deadline
        if self.cause is not None:
            self.scope.cancel(reason=str(self.cause))

    def _cancel(self, cause: Cause) -> None:
        if self.cause is None:
            self.cause = cause
        if self.scope is not None:
            self.scope.cancel(reason=str(cause))

    def stopped_node(self) -> Node:
        """Return the turn's own node: it leaves the tree when the turn has ended."""
        return self.node

    def title(self) -> str:
        """Return the first line of the input's text, shortened; notices have their text in the input too."""
        text = self.input.text.lstrip()
        return text[: TITLE_LENGTH + 1].partition("\n")[0][:TITLE_LENGTH]

    @awaitable_from_asyncio
    async def stop(self, cause: Cause | None = None, timeout: float = DEFAULT_STOP_TIMEOUT) -> StopReceipt:
        """Stop the turn and everything in its scope; return a receipt with one line per node. Must not be called from inside the turn."""
        why = Cause(CancelCause.STOP) if cause is None else cause
        return await stop_node(self.node, lambda: self.cancel(why), why, timeout)


@final
class StatelessTurn(Turn):
    """A turn whose client cannot be reached after it has ended. It has no channel, so it cannot start watched jobs."""

    @property
    def supports_async_delivery(self) -> Literal[False]:
        """Return False: a stateless turn has no channel."""
        return False

    __slots__ = ()


@final
class DeliveringTurn(Turn):
    """A turn of an interface that can deliver later: its `channel` carries the completions of watched jobs."""

    @property
    def supports_async_delivery(self) -> Literal[True]:
        """Return True: a delivering turn has a channel."""
        return True

    __slots__ = ("channel",)
    channel: CompletionChannel

    @awaitable_from_asyncio
    async def watch_job(self, spec: JobSpec) -> Job:
        """Start background work whose completion starts a turn of its own in this conversation. Only a delivering turn has this method.

        Raises `JobRefused` when a limit is reached. Cancelling the call before the job has started starts nothing.
        """
        return await self.core.supervisor.start_watched(spec, self.owner, self.channel)

    @property
    def owner(self) -> Owner:
        """Return the owner as `Turn.owner` does, with the channel, so that children are delivering turns too."""
        return msgspec.structs.replace(super().owner, channel=self.channel)
