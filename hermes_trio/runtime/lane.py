"""A lane: the task of one session key, which takes the waiting inbox rows of the key, oldest first, and runs one turn at a time.

It starts when a row arrives and ends when none waits. A wake-up cannot be lost: a lane reads its flag and leaves the map in one step
without a checkpoint, and every waiting row is committed.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Final

import msgspec
import trio

from .context import Binding, SessionContext, _binding
from .core import RuntimeCore
from .ends import End
from .errors import BudgetExhausted, Fenced, RuntimeProblem, SessionEnded
from .interface import Inbox, Interface
from .outcome import CancelCause, Cause
from .ports import SESSION_TOPIC, InboxKind, InboxRow, NewMessage, NewReply
from .settlement import Settlement
from .stop_receipt import stop_each
from .tree import EMPTY_CONTEXT, Node, Stoppable, waiting
from .turn import Turn, TurnHooks, TurnOrigin, TurnSpec
from .turn_lifecycle import NotBegun, run_turn

logger: Final = logging.getLogger("hermes_trio.runtime.lane")

RETRY_SECONDS: Final = 1.0
"""The pause of a lane after its first failure; doubled after each further one."""

LONGEST_SECONDS: Final = 60.0

STORE_FAILURE_FACTOR: Final = 4
"""Multiplies the attempts for rows that fail with an error of the store."""

MORE_WAITS: Final = "more waits in its inbox"
"""The note of a lane's node while rows are queued behind its turn. The age of the note shows whether the inbox makes progress."""


class Lane(Stoppable):
    """The state of one key's task. `flag` (level-triggered) says that a row may wait. `session` is a one-shot session that the lane has to end."""

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
        """Cancel the running turn. Rows that are queued behind it stay queued."""
        if self.current is not None:
            self.current.cancel(cause)

    def stopped_node(self) -> Node | None:
        """Return the node of the running turn, or None."""
        return None if self.current is None else self.current.node


class Lanes:
    """All lanes of a runtime, and the inboxes that they serve."""

    def __init__(self, core: RuntimeCore, nursery: Callable[[], trio.Nursery | None]) -> None:
        self._core = core
        self._nursery = nursery
        self._lanes: dict[tuple[str, str], Lane] = {}
        """Keyed by inbox and session key: equal keys in two inboxes are two conversations."""
        self._inboxes: dict[str, Inbox] = {}

    def __len__(self) -> int:
        return len(self._lanes)

    def register(self, inbox: Inbox) -> None:
        """Register an inbox, so that lanes serve it. Raises `ValueError` if its platform is registered already."""
        platform = inbox.interface.platform
        if platform in self._inboxes:
            raise ValueError(f"an interface for {platform!r} is already registered")
        self._inboxes[platform] = inbox

    def unregister(self, inbox: Inbox) -> None:
        """Remove an inbox. Its waiting rows stay in the store."""
        del self._inboxes[inbox.interface.platform]

    def current(self, inbox: str, session_key: str) -> Turn | None:
        """Return the turn that the lane of this key runs now, or None."""
        lane = self._lanes.get((inbox, session_key))
        return None if lane is None else lane.current

    async def accept(self, message: NewMessage) -> bool:
        """Commit a message; the signal of its commit wakes its lane. Raises `MailboxFull`, with nothing written, if the mailbox is full."""
        return await self._core.store.accept_message(message, limit=self._core.settings.mailbox) is not None

    def wake(self, inbox: str, session_key: str) -> None:
        """Wake or start the lane of a key for which a row may wait. Does nothing for an inbox that is not registered: registering sweeps it."""
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

    async def release_claims(self) -> None:
        """Wake every lane for a drain, so that lingering ones end, and wait for those without a turn. Waiting rows stay in the store."""
        for lane in list(self._lanes.values()):
            lane.flag = True
            lane.wake.set()
        for lane in list(self._lanes.values()):
            if lane.current is None:
                await lane.node.wait_closed()

    async def _live(self, lane: Lane) -> None:
        """Take rows and run their turn until none waits. After a failure, pause, longer each time."""
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
                            lane.node.note = MORE_WAITS if await self._more_waits(lane) else ""
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

    async def _more_waits(self, lane: Lane) -> bool:
        """Return whether rows are queued behind those that the lane has taken; False if that cannot be read: nobody but the tree needs it."""
        try:
            return await self._core.store.inbox_waiting(inbox=lane.inbox, session_key=lane.key) > 0
        except Exception as error:
            logger.warning("could not count the rows that wait for lane %s: %s", lane.key, error)
            return False

    async def _failed(
        self, lane: Lane, inbox: Inbox | None, rows: Sequence[InboxRow], error: Exception, failures: int
    ) -> None:
        """Release the rows of a turn that could not be begun, and pause. After too many attempts the rows become dead letters."""
        core = self._core
        cause = error.__cause__ if isinstance(error, NotBegun) and error.__cause__ is not None else error
        reason = f"{type(cause).__name__}: {cause}"
        seconds = min(RETRY_SECONDS * 2.0 ** (failures - 1), LONGEST_SECONDS)
        if isinstance(cause, Fenced):
            logger.warning(
                "the rows that lane %s had claimed belong to another owner; it drops them: %s", lane.key, error
            )
        elif isinstance(cause, SessionEnded):
            logger.info("the turn of lane %s does not begin: %s", lane.key, cause)
            await core.ends.put(End(f"the claim of rows of lane {lane.key}", partial(self._choose_again, rows)))
            seconds = 0.0
        elif (
            rows
            and not core.draining
            and not isinstance(cause, BudgetExhausted)
            and await self._failed_too_often(rows, error)
        ):
            ids = [row.id for row in rows]
            logger.error(
                "inbox rows %s of lane %s failed too often and become dead letters: %s",
                ids,
                lane.key,
                reason,
                exc_info=error,
            )
            replies = _refusals(inbox, rows, reason, lane.key)
            await core.ends.put(
                End(f"inbox rows {ids}", lambda: core.store.inbox_dead(rows, reason=reason, replies=replies))
            )
            if inbox is not None:
                await _call(inbox.interface.on_refused(rows, reason), f"the hook for dead letters of {lane.key}")
            seconds = 0.0
        else:
            logger.error(
                "could not begin a turn of lane %s; the next attempt is in %g s: %s", lane.key, seconds, reason
            )
            if rows:
                ids = [row.id for row in rows]
                await core.ends.put(End(f"the claim of inbox rows {ids}", lambda: core.store.release_inbox(rows)))
        until = trio.current_time() + seconds
        with waiting(f"the next attempt, in {seconds:g} s", lane.node):
            while trio.current_time() < until and not core.draining:
                lane.wake = trio.Event()
                with trio.move_on_at(until):
                    await lane.wake.wait()

    async def _choose_again(self, rows: Sequence[InboxRow]) -> None:
        """Release rows whose session has ended: a message runs in the next one of its key, notices end with the session."""
        store, first = self._core.store, rows[0]
        await store.release_inbox(rows)
        if first.kind is InboxKind.NOTICE:
            await store.abandon(session_id=first.session_id, reason=SessionEnded.code)

    async def _failed_too_often(self, rows: Sequence[InboxRow], error: Exception) -> bool:
        """Return whether rows reached their attempts. For an error of the store the limit is higher, and the store must accept other writes."""
        bound = self._core.settings.inbox_attempts
        if not isinstance(error, RuntimeProblem):
            return rows[0].attempts >= bound
        return rows[0].attempts >= STORE_FAILURE_FACTOR * bound and await self._core.ends.works()

    async def _run(self, lane: Lane, inbox: Inbox, rows: Sequence[InboxRow]) -> None:
        """Run one turn with claimed rows. Raises if it could not be begun; the end of a begun turn is in the store."""
        core, interface = self._core, inbox.interface
        session_id = await self._session(interface, rows)
        routing = rows[-1].routing
        lane.node.tenant = routing.tenant
        budget = interface.budget(rows)
        if rows[0].kind is InboxKind.NOTICE and budget is not None and budget.wakes is not None:
            rows = await self._within(budget.wakes, session_id, rows)
            if not rows:
                return
        root = self._root(rows)
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
            # The rows wait for the next start; a turn that began now would be cancelled at once, and its message lost.
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
            await run_turn(core, turn)
        finally:
            lane.current = None
            core.admission.release()
        await self._until_written(lane, turn)

    async def _until_written(self, lane: Lane, turn: Turn) -> None:
        """Wait for an end that the store has refused so far, or a drain: until it is written, rows that the turn used wait in the inbox."""
        end = turn.unwritten
        if end is None or end.over is None or end.over.is_set():
            return
        then = end.then

        def written(end: End) -> None:
            if then is not None:
                then(end)
            lane.wake.set()

        end.then = written
        with waiting(f"the store, to write the end of turn {turn.id}", lane.node):
            while not end.over.is_set() and not self._core.draining:
                lane.wake = trio.Event()
                await lane.wake.wait()

    async def _session(self, interface: Interface, rows: Sequence[InboxRow]) -> str:
        """Return the session of the rows: for notices the one that started the work, for a message the current one of the key."""
        first = rows[0]
        if first.kind is InboxKind.NOTICE and first.session_id:
            return first.session_id
        return await interface.session_for(self._core.store, first.routing)

    def _root(self, rows: Sequence[InboxRow]) -> Settlement:
        first = rows[0]
        if first.kind is InboxKind.NOTICE and first.root_id:
            return Settlement(first.root_id, branched=True)
        return Settlement(self._core.ids.make("root_", 16))

    async def _within(self, wakes: int, session_id: str, rows: Sequence[InboxRow]) -> Sequence[InboxRow]:
        """Return the claimed notices whose roots may start another turn. The notices of the other roots are abandoned, and their jobs stopped."""
        for root_id in dict.fromkeys(row.root_id for row in rows):
            used = await self._core.store.root_wakes(root_id)
            if used >= wakes:
                await self._core.store.release_inbox([row for row in rows if row.root_id == root_id])
                rows = [row for row in rows if row.root_id != root_id]
                await self._give_up(session_id, root_id, f"the budget is used up (wakes: {used} of {wakes} used)")
        return rows

    async def _give_up(self, session_id: str, root_id: str, reason: str) -> None:
        """Abandon the waiting notices of a root whose wakes are used up, with the reason, and stop its jobs.

        They are on this node: a lane of which another node has a job is not claimed here.
        """
        core = self._core
        await core.store.abandon(session_id=session_id, root_id=root_id, reason=reason)
        await stop_each(core.supervisor.jobs_of_root(root_id), Cause(CancelCause.BUDGET, reason))
        await core.store.abandon(session_id=session_id, root_id=root_id, reason=reason)

    async def _end_or_linger(self, lane: Lane, interface: Interface) -> None:
        """End a one-shot session, or wait within its linger time while completions are pending. This is the only place that waits for them."""
        lane.wake = trio.Event()
        # The end of a turn on another node does not signal this inbox, and may be the event that this lane waits for.
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
                cause = Cause(CancelCause.DEADLINE, f"its watched jobs did not end within {seconds:g} s")
            elif promised:
                return
            else:
                cause = None
        why = Cause(CancelCause.SESSION_ENDED, str(cause or interface.one_shot))
        await self._core.supervisor.stop_session(lane.session, why)  # takes as long as the jobs need, and no write does
        session_id, lane.session, lane.until = lane.session, "", None
        write = partial(self._core.write_session_end, session_id, interface.one_shot)
        await self._core.ends.put(End(f"session {session_id}", write))


async def _call(hook: Awaitable[None], name: str) -> None:
    """Await a hook of an interface; log what it raises."""
    try:
        await hook
    except Exception:
        logger.exception("%s failed", name)


def _refusals(inbox: Inbox | None, rows: Sequence[InboxRow], reason: str, key: str) -> Sequence[NewReply]:
    """Return the interface's replies to the senders of dead letters; none if the interface fails."""
    try:
        return () if inbox is None else tuple(inbox.interface.refusal(rows, reason))
    except Exception:
        logger.exception("could not compose the replies to the senders of dead letters of lane %s; they get none", key)
        return ()
