"""A lane is the live side of a session key: one task that takes what waits for the key, oldest first, one turn at a time.

It is made when something arrives and gone when nothing waits. A wake-up cannot be lost: a lane looks at its flag and leaves the map in one step
without a checkpoint, and what waits is a committed row in any case.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

import msgspec
import trio

from .context import Binding, SessionContext, _binding
from .core import RuntimeCore
from .ends import End
from .errors import Fenced, RuntimeProblem
from .interface import Inbox, Interface
from .outcome import CancelCause, Cause
from .ports import SESSION_TOPIC, InboxKind, InboxRow, NewMessage, NewReply
from .settlement import Settlement
from .tree import EMPTY_CONTEXT, Node, Stoppable, waiting
from .turn import Turn, TurnHooks, TurnOrigin, TurnSpec
from .turn_lifecycle import NotBegun, run_turn

__all__ = ["Lanes"]

logger: Final = logging.getLogger("hermes_trio.runtime.lane")

RETRY_SECONDS: Final = 1.0
"""How long a lane pauses after its first failure; twice as long after each further one."""

LONGEST_SECONDS: Final = 60.0

STORE_PATIENCE: Final = 4
"""So many times as often as otherwise rows are tried that the store refuses."""

MORE_WAITS: Final = "more waits in its inbox"
"""What the node of a lane says while something is queued behind its turn. How long it has been saying so shows whether the inbox moves."""


class Lane(Stoppable):
    """One key's task. `flag` says that something may wait; it is level-triggered. `session` is a one-shot session that it has to end."""

    __slots__ = ("context", "current", "flag", "inbox", "key", "node", "session", "until", "wake")

    def __init__(self, key: str, inbox: str, node: Node) -> None:
        self.key = key
        self.inbox = inbox
        self.node = node
        self.flag = True
        self.current: Turn | None = None
        self.session = ""
        self.context: SessionContext | None = None
        self.until: float | None = None
        self.wake = trio.Event()
        node.work = self

    def cancel(self, cause: Cause) -> None:
        """Cancel the turn that runs. What is queued behind it stays queued."""
        if self.current is not None:
            self.current.cancel(cause)

    def stopped_node(self) -> Node | None:
        """The node of the turn that runs, if one does."""
        return None if self.current is None else self.current.node


class Lanes:
    """All lanes of a runtime, and the fronts that they work for."""

    def __init__(self, core: RuntimeCore, nursery: Callable[[], trio.Nursery | None]) -> None:
        self._core = core
        self._nursery = nursery
        self._lanes: dict[tuple[str, str], Lane] = {}
        """By inbox and session key: equal keys in two inboxes are two conversations."""
        self._inboxes: dict[str, Inbox] = {}

    def __len__(self) -> int:
        return len(self._lanes)

    def register(self, inbox: Inbox) -> None:
        """A front is there: its inbox can be worked on."""
        platform = inbox.interface.platform
        if platform in self._inboxes:
            raise ValueError(f"a delivering front for {platform!r} is registered already")
        self._inboxes[platform] = inbox

    def unregister(self, inbox: Inbox) -> None:
        """The front is gone; what waits for it keeps waiting."""
        del self._inboxes[inbox.interface.platform]

    def current(self, inbox: str, session_key: str) -> Turn | None:
        """The turn that the lane of this key runs now."""
        lane = self._lanes.get((inbox, session_key))
        return None if lane is None else lane.current

    async def accept(self, message: NewMessage) -> bool:
        """Commit a message; the signal of its commit wakes its lane. A full mailbox refuses before anything is written."""
        return await self._core.store.accept_message(message, limit=self._core.settings.mailbox) is not None

    def wake(self, inbox: str, session_key: str) -> None:
        """Something may wait for this key. While no front serves the inbox it keeps waiting: a front sweeps when it comes."""
        nursery = self._nursery()
        lane = self._lanes.get((inbox, session_key))
        if lane is not None:
            lane.flag = True
            lane.wake.set()
            if lane.current is not None:
                lane.node.note = MORE_WAITS
        elif inbox in self._inboxes and nursery is not None and not self._core.draining:
            lane = Lane(session_key, inbox, self._core.turns_node.open("lane", session_key, owner=session_key))
            self._lanes[inbox, session_key] = lane
            self._core.base_context.copy().run(nursery.start_soon, self._live, lane)

    async def let_go(self) -> None:
        """For a drain: wake every lane, so that those that linger leave, and wait for those that have no turn. What waits for them keeps waiting."""
        for lane in list(self._lanes.values()):
            lane.flag = True
            lane.wake.set()
        for lane in list(self._lanes.values()):
            if lane.current is None:
                await lane.node.wait_closed()

    async def _live(self, lane: Lane) -> None:
        """The lane's task: take, run, repeat; leave when nothing waits. After a failure it pauses, longer each time."""
        how = "failed"
        _binding.set(Binding(EMPTY_CONTEXT, None, lane.node))
        failures = 0
        try:
            while True:
                lane.flag = False
                inbox = self._inboxes.get(lane.inbox)
                rows: Sequence[InboxRow] = ()
                try:
                    if inbox is not None and not self._core.draining:
                        rows = await self._core.store.take_inbox(lane.inbox, lane.key)
                        if rows:
                            more = await self._core.store.inbox_waiting(inbox=lane.inbox, session_key=lane.key)
                            lane.node.note = MORE_WAITS if more else ""
                            await self._run(lane, inbox, rows)
                        elif lane.session:
                            await self._end_or_linger(lane, inbox.interface)
                    failures = 0
                except Exception as error:
                    failures += 1
                    await self._failed(lane, inbox, rows, error, failures)
                    continue
                if not rows and not lane.flag and not lane.session:
                    how = "finished"
                    return
                if self._core.draining or inbox is None:
                    how = "finished"
                    return
        finally:
            del self._lanes[lane.inbox, lane.key]
            lane.node.close(how)

    async def _failed(
        self, lane: Lane, inbox: Inbox | None, rows: Sequence[InboxRow], error: Exception, failures: int
    ) -> None:
        """A turn could not be begun: its rows wait again. Those that fail by themselves become dead letters after too many attempts."""
        core = self._core
        cause = error.__cause__ if isinstance(error, NotBegun) and error.__cause__ is not None else error
        reason = f"{type(cause).__name__}: {cause}"
        seconds = min(RETRY_SECONDS * 2.0 ** (failures - 1), LONGEST_SECONDS)
        if isinstance(cause, Fenced):
            logger.warning("what %s had claimed belongs to another owner: %s", lane.key, error)
        elif rows and not core.draining and await self._hopeless(rows, error):
            ids = [row.id for row in rows]
            logger.error("%s of %s cannot be handled and are dead letters: %s", ids, lane.key, reason, exc_info=error)
            replies = _told(inbox, rows, reason)
            await core.ends.put(
                End(f"inbox rows {ids}", lambda: core.store.bury_inbox(rows, reason=reason, replies=replies))
            )
            if inbox is not None:
                await _call(inbox.interface.on_refused(rows, reason), f"the hook for dead letters of {lane.key}")
            seconds = 0.0
        else:
            logger.error("a turn of %s could not be begun, the next attempt is in %g s: %s", lane.key, seconds, reason)
            if rows:
                ids = [row.id for row in rows]
                await core.ends.put(End(f"the claim of inbox rows {ids}", lambda: core.store.release_inbox(rows)))
        until = trio.current_time() + seconds
        with waiting(f"the next attempt, in {seconds:g} s", lane.node):
            while trio.current_time() < until and not core.draining:
                lane.wake = trio.Event()
                with trio.move_on_at(until):
                    await lane.wake.wait()

    async def _hopeless(self, rows: Sequence[InboxRow], error: Exception) -> bool:
        """Whether rows were tried often enough. The store's own errors pass, unless it has refused these rows for long and takes other writes."""
        bound = self._core.settings.inbox_attempts
        if not isinstance(error, RuntimeProblem):
            return rows[0].attempts >= bound
        return rows[0].attempts >= STORE_PATIENCE * bound and await self._core.ends.works()

    async def _run(self, lane: Lane, inbox: Inbox, rows: Sequence[InboxRow]) -> None:
        """Run one turn with claimed rows. Raises if it could not be begun; how a turn ends that has begun is written in its rows."""
        core, interface = self._core, inbox.interface
        session_id = await self._session(interface, rows)
        routing = rows[-1].routing
        lane.node.tenant = routing.tenant
        budget = interface.budget(rows)
        root = self._root(rows)
        if rows[0].kind is InboxKind.NOTICE:
            used = 0 if budget is None or budget.wakes is None else await core.store.root_wakes(root.id)
            if budget is not None and budget.wakes is not None and used >= budget.wakes:
                await core.store.release_inbox(rows)
                await self._give_up(session_id, f"the budget is used up (wakes: {used} of {budget.wakes} used)")
                return
        context = msgspec.structs.replace(routing, session_key=lane.key, session_id=session_id)
        sink = interface.sink(context)
        spec = TurnSpec(
            input=interface.prepare(rows),
            context=context,
            agent=None if interface.agent is None else core.adapt(interface.agent),
            source=interface.platform,
            tenant=routing.tenant,
            budget=budget,
            one_shot=interface.one_shot,
            hooks=TurnHooks(
                sink=sink,
                asks=sink if interface.interactive else None,
                replies=interface.replies,
                on_end=interface.on_turn_end,
            ),
        )
        spec = await core.hosts.place(spec, anywhere=True)
        origin = TurnOrigin(rows=tuple(rows), outer_cause=Cause(CancelCause.DRAIN))
        await core.admission.admit()
        if core.draining:
            # What has not begun keeps waiting for the next start; begun now, it would be cancelled at once and be lost.
            core.admission.release()
            await core.store.release_inbox(rows)
            return
        try:
            turn = lane.current = core.make_turn(spec, inbox.channel, origin, root=root, below=lane.node)
            if interface.one_shot:
                lane.session, lane.context = session_id, context
            try:
                await _call(interface.on_turn_start(turn), f"the hook before a turn of {lane.key}")
            except BaseException:
                core.drop_turn(turn)
                raise
            await run_turn(core, lane.current)
        finally:
            lane.current = None
            core.admission.release()

    async def _session(self, interface: Interface, rows: Sequence[InboxRow]) -> str:
        """A notice goes to the session that started the work; a message to the one that the key stands for now."""
        first = rows[0]
        if first.kind is InboxKind.NOTICE and first.session_id:
            return first.session_id
        return await interface.session_for(self._core.store, first.routing)

    def _root(self, rows: Sequence[InboxRow]) -> Settlement:
        first = rows[0]
        if first.kind is InboxKind.NOTICE and first.root_id:
            return Settlement(first.root_id, branched=True)
        return Settlement(self._core.ids.make("root_", 16))

    async def _give_up(self, session_id: str, reason: str) -> None:
        """The wakes are used up: what waits is abandoned with the reason, and the jobs behind it are stopped."""
        await self._core.store.abandon(session_id=session_id, reason=reason)
        await self._core.supervisor.stop_session(session_id, Cause(CancelCause.BUDGET, reason))
        await self._core.store.abandon(session_id=session_id, reason=reason)

    async def _end_or_linger(self, lane: Lane, interface: Interface) -> None:
        """A one-shot session waits for what it was promised, but not for ever, and then ends. This is the only place that waits for it."""
        lane.wake = trio.Event()
        # The end of a turn on another node is no news in this inbox, and may be what was waited for.
        with self._core.store.subscribe(SESSION_TOPIC, lambda _: lane.wake.set(), lane.session):
            promised = await self._core.store.session_promised(lane.session)
            if promised and not lane.flag:
                assert lane.context is not None
                given = interface.linger_of(lane.context)
                seconds = self._core.settings.linger_seconds if given is None else given
                if lane.until is None:
                    lane.until = trio.current_time() + seconds
                with (
                    trio.move_on_at(lane.until) as bound,
                    waiting(f"{promised} watched jobs of a one-shot session", lane.node),
                ):
                    await lane.wake.wait()
                if not bound.cancelled_caught:
                    return
                cause = Cause(CancelCause.DEADLINE, f"it lingered for {seconds:g} s")
            elif promised:
                return
            else:
                cause = None
        session_id, lane.session, lane.until = lane.session, "", None
        end = End(f"session {session_id}", lambda: self._core.end_session(session_id, interface.one_shot, cause))
        await self._core.ends.put(end)


async def _call(hook: Awaitable[None], name: str) -> None:
    """Wait for a hook of an interface; that it fails concerns nobody else."""
    try:
        await hook
    except Exception:
        logger.exception("%s failed", name)


def _told(inbox: Inbox | None, rows: Sequence[InboxRow], reason: str) -> Sequence[NewReply]:
    """What the senders of dead letters are told; nothing if the interface cannot say it."""
    try:
        return () if inbox is None else tuple(inbox.interface.refusal(rows, reason))
    except Exception:
        logger.exception("what the senders of dead letters are told could not be composed")
        return ()
