"""A lane is the live side of a session key: one task that takes what waits for the key, oldest first, one turn at a time.

It is made when something arrives and gone when nothing waits. A wake-up cannot be lost: a lane looks at its flag and leaves the map in one step
without a checkpoint, and what waits is a committed row in any case.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Final

import msgspec
import trio

from .context import Binding, _binding
from .core import RuntimeCore
from .errors import BudgetExhausted
from .interface import Inbox, Interface
from .outcome import CancelCause, Cause
from .ports import InboxKind, InboxRow, NewMessage
from .settlement import Settlement
from .tree import EMPTY_CONTEXT, Node, waiting
from .turn import Turn, TurnSpec
from .turn_lifecycle import run_turn

__all__ = ["Lanes"]

logger: Final = logging.getLogger("hermes_trio.runtime.lane")

RETRY_SECONDS: Final = 1.0
"""How long a lane waits before it asks a failing store again."""

MORE_WAITS: Final = "more waits in its inbox"
"""What the node of a lane says while something is queued behind its turn. How long it has been saying so shows whether the inbox moves."""


class Lane:
    """One key's task. `flag` says that something may wait; it is level-triggered."""

    __slots__ = ("context_session", "current", "flag", "inbox", "key", "node", "root", "wake")

    def __init__(self, key: str, inbox: str, node: Node) -> None:
        self.key = key
        self.inbox = inbox
        self.node = node
        self.flag = True
        self.current: Turn | None = None
        self.root: Settlement | None = None
        self.context_session = ""
        self.wake = trio.Event()
        node.work = self

    def cancel(self, cause: Cause) -> None:
        """Cancel the turn that runs. What is queued behind it stays queued."""
        if self.current is not None:
            self.current.cancel(cause)

    def stopped_node(self) -> Node | None:
        """The node of the turn that runs, if one does."""
        return None if self.current is None else self.current.node

    def title(self) -> str:
        """Empty: a lane is called by its key."""
        return ""


class Lanes:
    """All lanes of a runtime, and the fronts that they work for."""

    def __init__(self, core: RuntimeCore, nursery: Callable[[], trio.Nursery | None]) -> None:
        self._core = core
        self._nursery = nursery
        self._lanes: dict[tuple[str, str], Lane] = {}
        """By inbox and session key: equal keys in two inboxes are two conversations."""
        self._deliveries: dict[str, Inbox] = {}

    def __len__(self) -> int:
        return len(self._lanes)

    def register(self, delivery: Inbox) -> None:
        """A front is there: its inbox can be worked on."""
        platform = delivery.front.platform
        if platform in self._deliveries:
            raise ValueError(f"a delivering front for {platform!r} is registered already")
        self._deliveries[platform] = delivery

    def unregister(self, delivery: Inbox) -> None:
        """The front is gone; what waits for it keeps waiting."""
        del self._deliveries[delivery.front.platform]

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
        elif inbox in self._deliveries and nursery is not None and not self._core.draining:
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
        """The lane's task: take, run, repeat; leave when nothing waits."""
        how = "failed"
        _binding.set(Binding(EMPTY_CONTEXT, None, lane.node))
        try:
            while True:
                lane.flag = False
                delivery = self._deliveries.get(lane.inbox)
                rows = [] if delivery is None or self._core.draining else await self._take(lane)
                if rows:
                    assert delivery is not None
                    await self._run(lane, delivery, rows)
                elif lane.root is not None and lane.root.promised > 0 and delivery and not self._core.draining:
                    await self._linger(lane, delivery.front)
                elif not lane.flag:
                    how = "finished"
                    return
        finally:
            del self._lanes[lane.inbox, lane.key]
            lane.node.close(how)

    async def _take(self, lane: Lane) -> list[InboxRow]:
        """The rows of the next turn: one message, or all notices up to the next message."""
        while True:
            try:
                rows = await self._core.store.take_inbox(lane.inbox, lane.key)
                break
            except Exception as error:
                logger.error("the inbox of %s cannot be read, trying again: %s", lane.key, error)
                with waiting("the store: its inbox cannot be read"):
                    await trio.sleep(RETRY_SECONDS)
        taken = self._next_of(rows)
        lane.node.note = MORE_WAITS if len(rows) > len(taken) else ""
        return taken

    @staticmethod
    def _next_of(rows: list[InboxRow]) -> list[InboxRow]:
        if not rows or rows[0].kind is InboxKind.MESSAGE:
            return rows[:1]
        burst: list[InboxRow] = []
        for row in rows:
            if row.kind is InboxKind.MESSAGE:
                break
            burst.append(row)
        return burst

    async def _run(self, lane: Lane, delivery: Inbox, rows: Sequence[InboxRow]) -> None:
        core, front = self._core, delivery.front
        routing = rows[-1].routing
        try:
            session_id = await self._session(front, rows)
        except Exception as error:
            logger.error("no session for %s, trying again: %s", lane.key, error)
            lane.flag = True
            with waiting("the store: no session can be found for it"):
                await trio.sleep(RETRY_SECONDS)
            return
        lane.node.tenant = routing.tenant
        root = self._root(rows)
        if rows[0].kind is InboxKind.NOTICE:
            try:
                root.allowance.spend("wakes")
            except BudgetExhausted as error:
                await self._give_up(session_id, str(error))
                return
        plan = TurnSpec(
            input=front.prepare(rows),
            context=msgspec.structs.replace(routing, session_key=lane.key, session_id=session_id),
            agent=front.agent or core.agent,
            source=front.platform,
            tenant=routing.tenant,
            budget=front.budget(rows) if rows[0].kind is InboxKind.MESSAGE else None,
            rows=tuple(rows),
            one_shot=front.one_shot,
            outer_cause=Cause(CancelCause.DRAIN),
            replies=front.replies,
            on_end=front.on_turn_end,
        )
        plan.sink = front.sink(plan.context)
        plan.asks = plan.sink if front.interactive else None
        await core.admission.admit()
        if core.draining:
            # What has not begun keeps waiting for the next start; begun now, it would be cancelled at once and be lost.
            core.admission.release()
            return
        try:
            lane.root = root if front.one_shot else None
            lane.context_session = session_id
            turn = lane.current = core.make_turn(plan, delivery.channel, root=root, below=lane.node)
            try:
                await front.on_turn_start(turn)
            except Exception:
                logger.exception("the hook before a turn of %s failed", lane.key)
            except BaseException:
                core.drop_turn(turn)
                raise
            await run_turn(core, lane.current)
        finally:
            lane.current = None
            core.admission.release()
        if front.one_shot and root.promised <= 0:
            await self._end(session_id, front.one_shot)

    async def _session(self, front: Interface, rows: Sequence[InboxRow]) -> str:
        """A notice goes to the session that started the work; a message to the one that the key stands for now."""
        first = rows[0]
        if first.kind is InboxKind.NOTICE and first.session_id:
            return first.session_id
        return await front.session_for(self._core, first.routing)

    def _root(self, rows: Sequence[InboxRow]) -> Settlement:
        first = rows[0]
        if first.kind is InboxKind.NOTICE and first.root_id:
            found = self._core.roots.find(first.root_id)
            return Settlement(first.root_id) if found is None else found
        return Settlement(self._core.ids.make("root_", 16))

    async def _give_up(self, session_id: str, reason: str) -> None:
        """The wakes are used up: what waits is abandoned with the reason, and the jobs behind it are stopped."""
        for root_id, notice in await self._core.store.abandon(session_id=session_id, reason=reason):
            self._core.told(root_id, notice)
        await self._core.supervisor.stop_session(session_id, Cause(CancelCause.BUDGET, reason))

    async def _linger(self, lane: Lane, front: Interface) -> None:
        """A one-shot session waits for its watched jobs, but not for ever."""
        assert lane.root is not None
        seconds = self._core.settings.linger_seconds if front.linger is None else front.linger
        if not lane.flag:
            lane.wake = trio.Event()
            with (
                trio.move_on_after(seconds) as bound,
                waiting(f"{lane.root.promised} watched jobs of a one-shot session", lane.node),
            ):
                await lane.wake.wait()
            if not bound.cancelled_caught:
                return
            await self._end(
                lane.context_session, front.one_shot, Cause(CancelCause.DEADLINE, f"lingered for {seconds:g} s")
            )
            lane.root = None

    async def _end(self, session_id: str, reason: str, cause: Cause | None = None) -> None:
        """End a one-shot session, whatever the store says: if it cannot write now, the next start does it."""
        try:
            await self._core.end_session(session_id, reason, cause)
        except Exception as error:
            logger.error("session %s could not be ended now; the next start does it: %s", session_id, error)
