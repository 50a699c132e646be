"""What every part of one runtime shares: the tree, the store, the ids, the limits. Made only by `Runtime`."""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

import msgspec
import trio

from .admission import Admission, SessionLocks
from .agents import AnyAgent, as_agent
from .asyncio_loop import AsyncioLoop
from .budget import Allowance, Budget
from .channel import CompletionChannel
from .context import SessionContext
from .ends import Ends
from .hosts import Hosts
from .ids import Ids
from .outcome import CancelCause, Cause
from .ports import Agent, RuntimeStore, TurnInput
from .settlement import Settlement
from .store_waits import StoreWaits
from .threads import Threads
from .tree import Node, Tree
from .turn import EMBEDDED, NO_HOOKS, DeliveringTurn, Owner, StatelessTurn, Turn, TurnHooks, TurnOrigin, TurnSpec

if TYPE_CHECKING:
    from .event_writer import EventWriter
    from .membership import Membership
    from .peers import Peers
    from .supervisor import Supervisor

SUBAGENT: Final = "subagent"
"""The source of the sessions of child turns."""


class RuntimeSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The limits of a runtime, all in one place. Seconds where a time is meant."""

    max_turns: int = 1000
    """Turns at once, children not counted: they run on their parent's token."""
    mailbox: int = 32
    """Messages that may wait for one lane."""
    max_jobs: int = 10_000
    max_jobs_per_session: int = 64
    unwatched_job_seconds: float = 24 * 3600.0
    """An unwatched job that is older is stopped: it has no notice through which its session could learn of it."""
    finish_seconds: float = 10.0
    """The bound of the shield around the commit of an end; when a drain's time is over, of all of them together while the store does not answer."""
    inbox_attempts: int = 3
    """How often a message or a notice is claimed for a turn before it becomes a dead letter."""
    hook_seconds: float = 30.0
    """The bound of an adapter's `on_turn_end`."""
    drain_seconds: float = 0.0
    """How long `Runtime` waits for running turns when it closes, before it cancels them."""
    linger_seconds: float = 3600.0
    """How long a one-shot session stays open for its watched jobs."""
    thread_grace: float = 5.0
    agent_threads: int = 64
    leaf_threads: int = 64
    event_limit: int = 10_000
    resume_runs: bool = True
    """Whether interrupted runs that ask for it are begun again here. A process that does not serve the clients of runs leaves them to one that does."""
    watchdog_seconds: float = 0.1
    """A step of the loop that lasts longer is reported in the log and in the tree; 0 switches the watchdog off."""


class RuntimeCore:
    """The parts of one runtime, shared by reference; none of them imports `Runtime`."""

    def __init__(
        self, *, agent: Agent, store: RuntimeStore, settings: RuntimeSettings, ids: Ids, clock: Callable[[], float]
    ) -> None:
        self.agent = agent
        self.adapt: Callable[[AnyAgent], Agent] = as_agent
        """Makes an agent of a function from an embedding program; an `AsyncioRuntime` treats async functions as asyncio's."""
        self.store = store
        self.settings = settings
        self.ids = ids
        self.clock = clock
        self.epoch: str = ids.hex(8)
        self.tree = Tree(self.epoch)
        self.turns_node: Node = self.tree.root.open("turns", "turns")
        self.threads = Threads(
            self.tree, agents=settings.agent_threads, leaves=settings.leaf_threads, grace=settings.thread_grace
        )
        self.asyncio_loop = AsyncioLoop(self.tree, grace=settings.thread_grace)
        self.locks = SessionLocks()
        self.admission = Admission(settings.max_turns)
        self.waits = StoreWaits(settings.finish_seconds, self.tree.now)
        self.ends = Ends(self)
        self.live_turns: dict[str, Turn] = {}
        """Every turn from the moment it is made, so that a drain sees what is about to begin."""
        self.starting: set[trio.Event] = set()
        """Runs whose rows are being written; each event is set when that is over."""
        self.draining: bool = False
        self.drained: bool = False
        """Whether the time of a drain is over: a turn that begins now is cancelled at once."""
        self.base_context: contextvars.Context = contextvars.copy_context()
        self.supervisor: Supervisor
        self.journal: EventWriter
        self.membership: Membership
        self.peers: Peers
        self.shared: bool = store.lease_seconds > 0
        """Whether other nodes may use the store at the same time."""
        self.hosts = Hosts(self)
        self._forgets: list[Callable[[str], None]] = []

    def make_turn(
        self,
        spec: TurnSpec,
        channel: CompletionChannel | None,
        origin: TurnOrigin = EMBEDDED,
        *,
        root: Settlement | None = None,
        below: Node | None = None,
        allowance: Allowance | None = None,
    ) -> Turn:
        """Make a turn that is about to run; its node is in the tree from now on."""
        id = self.ids.make("turn_", 16)
        if root is None:
            root = Settlement(id)
        node = self.turns_node if below is None else below
        if allowance is None:
            allowance = root.allowance
        kind = StatelessTurn if channel is None else DeliveringTurn
        turn = kind(self, spec, origin, node, id=id, root=root, allowance=allowance)
        if channel is not None and isinstance(turn, DeliveringTurn):
            turn.channel = channel
        self.live_turns[id] = turn
        if spec.hooks.on_start is not None:
            try:
                spec.hooks.on_start(turn)
            except BaseException:
                self.drop_turn(turn)
                raise
        return turn

    def drop_turn(self, turn: Turn) -> None:
        """Discard a turn that was made and will not run."""
        del self.live_turns[turn.id]
        turn.node.close("cancelled")

    def child_spec(
        self,
        input: TurnInput | str,
        owner: Owner,
        *,
        agent: AnyAgent | None = None,
        context: SessionContext | None = None,
        budget: Budget | None = None,
        hooks: TurnHooks = NO_HOOKS,
    ) -> TurnSpec:
        """Return the spec of a child turn of `owner`, with its own session below the owner's. Its approvals are asked where the owner's are."""
        if context is None:
            context = msgspec.structs.replace(
                owner.context, session_id=f"{owner.context.session_id[:480]}.{self.ids.hex(8)}"
            )
        return TurnSpec(
            input=TurnInput(text=input, history=()) if isinstance(input, str) else input,
            context=context,
            agent=None if agent is None else self.adapt(agent),
            source=SUBAGENT,
            tenant=owner.tenant,
            budget=budget,
            one_shot="subagent_complete",
            hooks=msgspec.structs.replace(hooks, asks=owner.asks),
        )

    @contextmanager
    def at_session_end(self, forget: Callable[[str], None]) -> Generator[None]:
        """Call `forget` with the id of every session that ends, for the body of the `with`: for caches by session."""
        self._forgets.append(forget)
        try:
            yield
        finally:
            self._forgets.remove(forget)

    def forget_session(self, session_id: str) -> None:
        """Drop what is cached for a session that has ended."""
        for forget in self._forgets:
            forget(session_id)

    async def end_session(self, session_id: str, reason: str, cause: Cause | None = None) -> bool:
        """End a session: stop its jobs, abandon its waiting rows, and record the reason in its row. The first reason wins.

        Returns whether this call ended it. A running turn of the session is not cancelled.
        """
        why = Cause(CancelCause.SESSION_ENDED, str(cause or reason))
        await self.supervisor.stop_session(session_id, why)
        return await self.write_session_end(session_id, reason)

    async def write_session_end(self, session_id: str, reason: str) -> bool:
        """Write the end of a session without jobs: an end for `Ends.put`. Returns whether this call ended it."""
        await self.store.abandon(session_id=session_id, reason="session_ended")
        return await self.store.end_session(session_id, reason)
