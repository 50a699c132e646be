"""The lifetime of a turn, from the session lock to the last hook, in the order in which it happens.

Success, failure and cancellation use one code path. Exception groups end here: what left the turn's nursery becomes one `Outcome`. Only a
cancellation from outside the turn's own scope propagates, after the end has been committed.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Sequence
from functools import partial
from typing import Final, cast

import msgspec
import trio

from .agents import as_reply
from .context import Binding, _binding
from .core import SUBAGENT, RuntimeCore
from .ends import End
from .errors import AgentFailed, BudgetExhausted, RuntimeClosed, RuntimeProblem, SessionEnded, SessionHeld
from .outcome import STORE_ERROR, CancelCause, Cause, Outcome, TurnState
from .ports import SESSION_TOPIC, EventRow, InboxKind, InboxRow, Message, NewReply, Reply, TurnFinish, TurnStart
from .retrying import retried
from .tree import Node, check_printable, split_cancelled, waiting
from .turn import Owner, Turn, TurnOrigin, TurnSpec

logger: Final = logging.getLogger("hermes_trio.runtime.turn")


class NotBegun(Exception):
    """Raised when a turn of inbox rows was not begun; the rows are still claimed."""


async def run_turn(core: RuntimeCore, turn: Turn) -> Outcome:
    """Run a turn to its end and return its outcome. An exception of the agent becomes a failed outcome.

    The caller has admitted the turn (a child uses its parent's token) and releases the token afterwards. If the task is cancelled from outside, the
    turn ends, its end is committed under a bounded shield, and then `Cancelled` propagates. Raises `NotBegun` if the turn was to take inbox rows, and
    the store refused its beginning or a drain came first: no agent has seen the rows, and nothing is stored about them.
    """
    now = core.tree.now
    began = turn.node.opened_at
    reply: Reply | None = None
    failure: BaseException | None = None
    outside: BaseException | None = None
    outcome: Outcome | None = None
    session_id = turn.context.session_id
    start = _start_of(turn)
    begun = not start.inbox_ids
    how = "failed"
    token = _binding.set(Binding(turn.context, turn, turn.node))
    try:
        try:
            async with trio.open_nursery() as nursery:
                turn.enter(nursery)
                if session_id:
                    await core.locks.acquire(session_id, turn.id, turn.node)
                    turn.locked = True
                if start.hold or (start.run is None and start.inbox_ids):
                    await _begin(core, turn, start)
                    begun = True
                    if start.run is not None:
                        core.journal.begun(turn)
                agent = core.agent if turn.spec.agent is None else core.adapt(turn.spec.agent)
                try:
                    answer = await agent(turn)
                except BaseException as error:
                    check_printable(error)
                    raise
                reply = Reply(text=answer) if isinstance(answer, str) else as_reply(answer, agent)
                if not nursery.child_tasks and not nursery.cancel_scope.cancel_called:
                    # Nothing else runs in the turn, and nothing has failed in it (that cancels its scope), so its end is known. Leaving the nursery takes
                    # a step of the scheduler; the commit need not wait for it, and borrows the scope: nothing else cancels it from here on.
                    turn.scope = None
                    ended = _outcome_of(turn, reply, None, None, now() - began)
                    outcome = await _commit(core, turn, start, ended, nursery.cancel_scope)
                    if turn.origin.run is not None and outcome.committed:
                        core.journal.ended(turn, outcome)
        except BaseException as error:  # noqa: ASYNC103 - sifted: what is not the turn's own is raised again below
            failure, outside = _split_failure(error)
            if outcome is not None and failure is not None:
                logger.error("a task of turn %s failed after the end of the turn", turn.id, exc_info=failure)
        if not begun and (failure is not None or outside is not None or _drained(turn.cause)):
            outcome = msgspec.structs.replace(
                _outcome_of(turn, None, failure, outside, 0.0), committed=False, begun=False
            )
        elif outcome is None:
            outcome = await _commit(core, turn, start, _outcome_of(turn, reply, failure, outside, now() - began))
        if core.tree.tracer is not None:
            core.tree.tracer.note(turn.node, outcome=outcome)
        how = outcome.state._value_
        if turn.spec.source == SUBAGENT:
            await _stop_orphans(core, session_id)
    finally:
        if turn.locked and turn.unwritten is None:
            core.locks.release(session_id)
        del core.live_turns[turn.id]
        turn.node.close(how)
        _binding.reset(token)
    if turn.spec.hooks.on_end is not None and turn.unwritten is None:
        await _call_hook(core, turn, outcome)
    if outside is not None:
        raise outside
    if not outcome.begun:
        raise NotBegun(outcome.error) from failure
    return outcome


async def run_child(core: RuntimeCore, spec: TurnSpec, owner: Owner, below: Node) -> Outcome:
    """Run a child turn of `owner` under the node `below`, on the token of its parent. A failure of the child is in its outcome, not raised."""
    owner.allowance.spend("turns")
    origin = TurnOrigin(parent_session_id=owner.context.session_id)
    child = core.make_turn(spec, owner.channel, origin, root=owner.root, below=below, allowance=owner.allowance)
    outcome = await run_turn(core, child)
    await trio.lowlevel.checkpoint_if_cancelled()
    return outcome


async def _begin(core: RuntimeCore, turn: Turn, start: TurnStart) -> None:
    """Commit a turn's beginning, with its inbox rows; where several nodes share the store, wait for another node's turn of the session.

    Retries while the store fails: the write is idempotent. Raises the store's error if it refuses this write four times and
    accepts another one, if the rows belong to another owner by now or their roots have no wakes left, or if a drain
    begins. After a cancellation it is unknown whether it is written.
    """

    async def attempt() -> None:
        refused = await _attempt(core, start) if not start.hold else await _attempt_free(core, turn, start)
        while isinstance(refused, SessionHeld):
            refused = await _attempt_free(core, turn, start)
        if refused is not None:
            raise refused

    await retried(attempt, f"begin turn {start.turn_id}", works=core.ends.works, over=lambda: core.draining)


async def _attempt(core: RuntimeCore, start: TurnStart) -> Exception | None:
    """Try once to commit a beginning; return the store's error, or None on success."""
    try:
        await core.store.begin_turn(start)
    except Exception as error:
        return error
    return None


async def _attempt_free(core: RuntimeCore, turn: Turn, start: TurnStart) -> Exception | None:
    """Do what `_attempt` does; if a turn of another node has the session, return only when that turn may have ended."""
    refused = await _attempt(core, start)
    turn.elsewhere = isinstance(refused, SessionHeld)
    if not turn.elsewhere:
        return refused
    free = trio.Event()
    with core.store.subscribe(SESSION_TOPIC, lambda _: free.set(), start.context.session_id):
        refused = await _attempt(core, start)  # the other turn may have ended before this node subscribed
        if isinstance(refused, SessionHeld):
            with waiting(str(refused), turn.node):
                await free.wait()
        else:
            turn.elsewhere = False
        return refused


def _drained(cause: Cause | None) -> bool:
    return cause is not None and cause.kind is CancelCause.DRAIN


async def _stop_orphans(core: RuntimeCore, session_id: str) -> None:
    """Stop the jobs of a child's session: it ends with the child."""
    if core.supervisor.jobs(session_id):
        with trio.CancelScope(shield=True, deadline=core.waits.until(core.settings.finish_seconds)):
            await core.supervisor.stop_here(session_id, Cause(CancelCause.SESSION_ENDED, "the child has ended"))


def _waited(turn: Turn) -> bool:
    """Return whether a turn waits for its session: for the lock of this node, or for a turn of another node."""
    return (turn.elsewhere or not turn.locked) and bool(turn.context.session_id)


def holds_session(turn: Turn) -> bool:
    """Return whether a turn must acquire the lock of its session in the store before it begins."""
    return turn.core.shared and bool(turn.context.session_id) and turn.spec.source != SUBAGENT


def _start_of(turn: Turn) -> TurnStart:
    spec, origin = turn.spec, turn.origin
    wakes = None if spec.budget is None or not origin.rows else spec.budget.wakes
    return TurnStart(
        turn_id=turn.id,
        context=turn.context,
        source=spec.source,
        tenant=spec.tenant,
        model=turn.input.model,
        parent_session_id=origin.parent_session_id,
        run=origin.run,
        inbox_ids=tuple(row.id for row in origin.rows) if origin.rows else (),
        one_shot=bool(spec.one_shot),
        hold=turn.core.shared and holds_session(turn),
        roots=() if wakes is None else _noticed_roots(origin.rows),
        wakes=wakes,
        began_at=turn.core.clock(),
    )


def _noticed_roots(rows: Sequence[InboxRow]) -> tuple[str, ...]:
    notices = (row for row in rows if row.kind is InboxKind.NOTICE)
    return tuple(dict.fromkeys(row.root_id for row in notices if row.root_id))


def _split_failure(error: BaseException) -> tuple[BaseException | None, BaseException | None]:
    """Split an exception that left the turn into the turn's own failure and a cancellation (or another `BaseException`) from outside."""
    if isinstance(error, Exception):
        return first_cause(error), None
    if isinstance(error, trio.Cancelled):
        return None, error
    cancelled, rest = split_cancelled(error)
    if rest is None:
        return None, error
    if isinstance(rest, Exception):
        return first_cause(rest), cancelled
    return first_cause(error), error


def first_cause(error: BaseException) -> BaseException:
    """Return the first leaf of an exception group that is not a cancellation; the other leaves are attached to it as notes."""
    leaves: list[BaseException] = []
    pending = [error]
    while pending:
        this = pending.pop(0)
        if isinstance(this, BaseExceptionGroup):
            pending[:0] = cast("BaseExceptionGroup[BaseException]", this).exceptions
        elif not isinstance(this, trio.Cancelled):
            leaves.append(this)
    if not leaves:
        return error
    first, *others = leaves
    for other in others:
        first.add_note(f"also raised: {type(other).__name__}: {other}")
    return first


def _outcome_of(
    turn: Turn, reply: Reply | None, failure: BaseException | None, outside: BaseException | None, seconds: float
) -> Outcome:
    """Return the outcome of a turn. A complete reply is kept: a cancel never discards finished work."""
    said = reply or turn.progress or Reply()
    complete = reply is not None and failure is None
    reason = said.finish_reason if complete else "error"
    context = turn.context
    outcome = Outcome(
        turn_id=turn.id,
        session_id=context.session_id,
        session_key=context.session_key,
        state=TurnState.FAILED if said.error and not said.text else TurnState.COMPLETED,
        text=said.text,
        error=said.error,
        error_code=said.error_code,
        usage=said.usage,
        partial=said.partial,
        model=said.model or turn.input.model,
        finish_reason=reason,
        calls=said.calls,
        reasoning=said.reasoning,
        messages=said.messages or _default_messages(turn, said.text, reason),
        seconds=seconds,
    )
    return outcome if complete else _judge_cut_short(turn, outcome, failure, outside)


def _judge_cut_short(
    turn: Turn, outcome: Outcome, failure: BaseException | None, outside: BaseException | None
) -> Outcome:
    """Return the outcome of a turn that was cancelled or failed: what it has so far, with the reason."""
    cause = turn.cause
    if cause is None and failure is None and outside is None:
        cause = Cause(CancelCause.DEADLINE, "the time of the turn is used up")
    if cause is None and outside is not None:
        cause = turn.origin.outer_cause
    if cause is not None:
        turn.cause = cause
        state, error, code, partial = TurnState.CANCELLED, f"cancelled ({cause})", cause.kind.value, True
    else:
        assert failure is not None
        state, partial = TurnState.FAILED, bool(outcome.text)
        if isinstance(failure, AgentFailed | BudgetExhausted | SessionEnded):
            error, code = str(failure), getattr(failure, "code", "budget")
        else:
            error, code = f"the agent failed with {type(failure).__name__}; the log has the details", "agent_error"
            logger.error("turn %s failed", turn.id, exc_info=failure)
    return msgspec.structs.replace(
        outcome, state=state, error=error, error_code=code, cause=cause, partial=partial, exception=failure
    )


def _default_messages(turn: Turn, text: str, finish_reason: str) -> tuple[Message, ...]:
    """Return the messages for an agent that adds none itself: the prompt, and the text that it returned."""
    now = turn.core.clock()
    prompt = turn.input.prompt
    asked = (Message(role="user", content=prompt, timestamp=now, platform_message_id=turn.context.message_id),)
    if text:
        return (*asked, Message(role="assistant", content=text, timestamp=now, finish_reason=finish_reason))
    return asked if prompt else ()


async def _commit(
    core: RuntimeCore, turn: Turn, start: TurnStart, outcome: Outcome, scope: trio.CancelScope | None = None
) -> Outcome:
    """Commit the turn's end in one transaction, in this `scope` of the task or in one of its own. If the store refuses it, `core.ends` retries it, and the
    session stays locked until then.

    A turn that ended while it waited for its session adds no messages to it.
    """
    spec = turn.spec
    hooks = spec.hooks
    if core.membership.lost and _drained(outcome.cause) and turn.origin.run is not None and turn.origin.run.resumable:
        core.journal.lose(turn)  # its node has lost its lease: the run goes on elsewhere
        return msgspec.structs.replace(outcome, committed=False)
    if core.supervisor.unrecorded:
        await core.supervisor.record_threads(turn.root.id)
    try:
        finish = TurnFinish(
            start=start,
            state=outcome.state,
            messages=outcome.messages,
            usage=outcome.usage,
            text=outcome.text,
            error=outcome.error,
            error_code=outcome.error_code,
            model=outcome.model,
            outbox=() if hooks.replies is None else tuple(hooks.replies(turn, outcome)),
            acknowledged=_told(turn, outcome) if turn.origin.rows or turn.steered else (),
            end_session=spec.one_shot,
            branched=turn.root.branched and spec.source != SUBAGENT,
            root_id=turn.root.id,
            also=() if hooks.also is None else tuple(hooks.also(turn, outcome)),
            # Last: it takes the waiting events from the event writer, which would be lost if a hook failed after it.
            events=core.journal.terminal(turn, outcome) if turn.origin.run is not None else _NO_EVENTS,
        )
        if _waited(turn):
            finish = msgspec.structs.replace(finish, messages=(), waited=True)
    except Exception as error:
        logger.exception("could not compose the end of turn %s; only its state and error are written", turn.id)
        outcome = _unstored(outcome, error)
        finish = _reduced(core, turn, start, outcome, _told(turn, outcome))
    end = End(
        f"turn {turn.id}",
        partial(_write, core, turn, finish),
        partial(_write_reduced, core, turn, finish, outcome),
    )
    written = await core.ends.put(end, scope)
    if end.value is True:
        core.forget_session(turn.context.session_id)
    if written and not end.was_reduced:
        return outcome
    if end.over is not None and not end.over.is_set():
        turn.unwritten = end
        end.then = partial(_written_late, core, turn, outcome)
    elif not written and turn.origin.run is not None:
        core.journal.lose(turn)
    return msgspec.structs.replace(_unstored(outcome, end.error), committed=False)


def _told(turn: Turn, outcome: Outcome) -> tuple[int, ...]:
    """Return the rows that this turn acknowledges: its notices, even if it failed, and the messages that steered it.

    The notices of a turn that a drain cancelled are delivered again after the next start.
    """
    notices = (
        () if _drained(outcome.cause) else tuple(row.id for row in turn.origin.rows if row.kind is InboxKind.NOTICE)
    )
    return notices + turn.used_rows() if turn.steered else notices


def _reduced(core: RuntimeCore, turn: Turn, start: TurnStart, outcome: Outcome, told: tuple[int, ...]) -> TurnFinish:
    """Return an end with the state and the error only, without the parts that the store may have refused. The reply reports the error."""
    spec = turn.spec
    return TurnFinish(
        start=start,
        state=outcome.state,
        error=outcome.error,
        error_code=outcome.error_code,
        outbox=_error_reply(turn, outcome),
        acknowledged=told,
        events=_NO_EVENTS if turn.origin.run is None else (core.journal.last(turn, outcome),),
        end_session=spec.one_shot,
        # A child's session ends with the child; any other stays open until its pending completions are delivered.
        branched=turn.root.branched and spec.source != SUBAGENT,
        root_id=turn.root.id,
        waited=_waited(turn),
    )


def _write(core: RuntimeCore, turn: Turn, finish: TurnFinish) -> Awaitable[object]:
    """Write an end of the turn, whole or reduced; if it is written, its last event is the one that readers of the run get."""
    if finish.events:
        core.journal.choose(turn, finish.events)
    return core.store.finish_turn(finish)


async def _write_reduced(core: RuntimeCore, turn: Turn, refused: TurnFinish, outcome: Outcome, end: End) -> object:
    """Write the reduced form of an end that was refused, after its events before the last one: a reader of the rows would take their absence for a gap."""
    await core.journal.write_before(refused.events[:-1])
    problem = _unstored(outcome, end.error)
    return await _write(core, turn, _reduced(core, turn, refused.start, problem, refused.acknowledged))


def _written_late(core: RuntimeCore, turn: Turn, outcome: Outcome, end: End) -> None:
    """Release the session of a turn whose end was written late or given up, publish the end of its run, and call the hook after it.

    The hook gets the end that the store has. It is not called if the end is given up: then the next start ends the turn.
    """
    if end.value is True:
        core.forget_session(turn.context.session_id)
    if turn.locked:
        core.locks.release(turn.context.session_id)
    written = outcome if end.written and not end.was_reduced else _unstored(outcome, end.error)
    written = msgspec.structs.replace(written, committed=end.written)
    if turn.origin.run is not None:
        if not end.written:
            core.journal.lose(turn)
        core.journal.ended(turn, written)
    if turn.spec.hooks.on_end is not None:
        hook = partial(_call_hook, core, turn, written)
        try:
            core.supervisor.start_soon(hook)
        except RuntimeClosed:
            if end.written:
                core.ends.start_soon(hook)
            else:
                logger.warning("the hook after turn %s is not called: its end is not written", turn.id)


def _error_reply(turn: Turn, outcome: Outcome) -> tuple[NewReply, ...]:
    """Return the replies that report a failure instead of an answer that was not stored; none if the hook raises."""
    replies = turn.spec.hooks.replies
    if replies is None:
        return ()
    try:
        return tuple(replies(turn, msgspec.structs.replace(outcome, text="")))
    except Exception:
        logger.exception("could not compose the error reply of turn %s; its sender gets none", turn.id)
        return ()


def _unstored(outcome: Outcome, error: Exception | None) -> Outcome:
    """Return the failed outcome of a turn whose end the store refuses."""
    problem = error.public if isinstance(error, RuntimeProblem) else type(error).__name__ if error else "it is slow"
    return msgspec.structs.replace(
        outcome,
        state=TurnState.FAILED,
        error=f"the turn's end could not be stored: {problem}",
        error_code=STORE_ERROR,
    )


_NO_EVENTS: Final[tuple[EventRow, ...]] = ()


async def _call_hook(core: RuntimeCore, turn: Turn, outcome: Outcome) -> None:
    assert turn.spec.hooks.on_end is not None
    with trio.CancelScope(shield=True, deadline=trio.current_time() + core.settings.hook_seconds) as bound:
        try:
            await turn.spec.hooks.on_end(outcome)
        except Exception:
            logger.exception("the hook after turn %s failed", turn.id)
    if bound.cancelled_caught:
        logger.error(
            "the hook after turn %s took more than %g s and was cancelled", turn.id, core.settings.hook_seconds
        )
