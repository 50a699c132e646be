"""`delegate_task`: give goals to child agents. A child is a turn with its own nursery, context and session, inside its owner's scope.

Synchronous children run in the parent's tool call and end with it; finished results are kept. A background batch is one job of the supervisor with a
scope of its own: stopping the parent's turn later does not stop it, and it sends one notice when all of its children have ended.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Annotated, Any, Final

import msgspec
import trio

from hermes_trio.agent.model import ToolSpec
from hermes_trio.agent.tool import add_usage, error_result, keep_partial_result
from hermes_trio.runtime.context import SessionContext
from hermes_trio.runtime.outcome import CancelCause, JobState, Outcome, TurnState, Usage
from hermes_trio.runtime.ports import NoticeKind, TurnInput
from hermes_trio.runtime.supervisor import Job, JobSpec
from hermes_trio.runtime.turn import DeliveringTurn, Turn, TurnHooks

from .registry import SUBAGENT_KEY, FunctionTool
from .settings import DelegationSettings

SUMMARY_LIMIT: Final = 24_000
SUMMARY_FLOOR: Final = 2_000


class Task(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """One goal of a batch."""

    goal: Annotated[str, msgspec.Meta(description="What the child has to achieve, complete in itself")]
    context: Annotated[str, msgspec.Meta(description="Everything that the child must know: it sees nothing else")] = ""
    role: Annotated[str, msgspec.Meta(description="leaf (default), or orchestrator if it may delegate further")] = (
        "leaf"
    )


RunChild = Callable[..., Awaitable[Outcome]]


class Delegation:
    """Makes the tool. `inherit` receives each child's context before it runs, so that it can start in its parent's directory; `forget` receives each
    child's session when it has ended.
    """

    def __init__(
        self,
        settings: DelegationSettings | None = None,
        *,
        inherit: Callable[[SessionContext, SessionContext], None] | None = None,
        forget: Callable[[str], None] | None = None,
    ) -> None:
        self.settings: DelegationSettings = DelegationSettings() if settings is None else settings
        self._inherit = inherit
        self._forget = forget
        self._background = 0
        self._function = FunctionTool(self.delegate_task)

    @property
    def spec(self) -> ToolSpec:
        """Return the description for the model."""
        return self._function.spec

    def preview(self, arguments: str) -> str:
        """Return the goal."""
        return self._function.preview(arguments)

    async def call(self, turn: Turn, arguments: str) -> str:
        """See `delegate_task`."""
        return await self._function.call(turn, arguments)

    async def delegate_task(
        self,
        turn: Turn,
        goal: Annotated[str, msgspec.Meta(description="One goal for one child")] = "",
        context: Annotated[str, msgspec.Meta(description="What the child must know besides its goal")] = "",
        tasks: Annotated[
            list[Task] | str | None, msgspec.Meta(description="Several goals at once; wins over goal")
        ] = None,
        role: Annotated[str, msgspec.Meta(description="leaf (default) or orchestrator")] = "leaf",
        background: Annotated[
            bool, msgspec.Meta(description="Do not wait: the results arrive later as a message of their own")
        ] = False,
    ) -> str:
        """Give one goal, or several at once, to child agents that work in conversations of their own and report back.

        A child sees only its goal and context. Without `background` the call returns when all children have ended. With it the call returns at once,
        and the results arrive as one message when the last child has ended; where nothing can arrive later, the children run synchronously instead.
        """
        batch = _batch_of(goal, context, tasks, role)
        if isinstance(batch, str):
            return error_result(batch)
        depth = int(turn.input.payload.get(SUBAGENT_KEY, {}).get("depth", 0))
        refusal = self._refusal(batch, depth)
        if refusal:
            return error_result(refusal)
        plan = _Batch(self, batch, depth + 1, turn.context)
        note = ""
        if background:
            note = self._why_not_later(turn, depth)
            if not note:
                assert isinstance(turn, DeliveringTurn)
                return await self._dispatch(turn, plan)
        began = time.monotonic()
        try:
            await plan.run(turn.run_child)
            add_usage(turn, plan.usage)
        except BaseException:
            add_usage(turn, plan.usage)
            keep_partial_result(turn, _encode(plan.results(), began, "stopped: these are the results so far"))
            raise
        return _encode(plan.results(), began, note)

    def _refusal(self, batch: Sequence[Task], depth: int) -> str:
        limit = self.settings.max_concurrent_children
        if self.settings.paused:
            return "delegation is paused by the operator; do the work yourself or try later"
        if depth >= self.settings.max_spawn_depth:
            return f"children at depth {depth} may not delegate (max_spawn_depth is {self.settings.max_spawn_depth}); do the work yourself"
        if len(batch) > limit:
            return f"{len(batch)} tasks are more than max_concurrent_children ({limit}); send at most {limit} at once"
        return ""

    def _why_not_later(self, turn: Turn, depth: int) -> str:
        if depth > 0:
            return "a child's own children run synchronously; these are the results"
        if not isinstance(turn, DeliveringTurn):
            return "this interface cannot deliver anything after the turn, so the children ran synchronously; these are the results"
        if self._background >= self.settings.max_concurrent_children:
            return f"{self._background} background batches are running, which is the limit, so the children ran synchronously; these are the results"
        return ""

    async def _dispatch(self, turn: DeliveringTurn, plan: _Batch) -> str:
        """Start the batch as a watched job. The job's own scope holds its slot."""
        id = turn.core.ids.make("deleg_", 8)
        dispatched = turn.core.clock()

        slot = _Slot(self)

        async def live(job: Job) -> JobState:
            try:
                job.started(id)
                job.text = plan.report(id, dispatched, turn_clock())
                try:
                    await plan.run(job.run_child)
                finally:
                    job.text = plan.report(id, dispatched, turn_clock())
                    job.details.update(plan.details(id))
                    job.summary = plan.status()
                return JobState.EXITED if plan.status() != "error" else JobState.FAILED
            finally:
                slot.free()

        turn_clock = turn.core.clock
        job = JobSpec(
            kind="delegation",
            id=id,
            title=plan.tasks[0].goal if len(plan.tasks) == 1 else f"{len(plan.tasks)} tasks: {plan.tasks[0].goal}",
            run=live,
            notice=NoticeKind.DELEGATION,
            details={"goals": [task.goal for task in plan.tasks]},
        )
        try:
            await turn.core.supervisor.start_watched(job, turn.owner, turn.channel)
        except BaseException:
            slot.free()
            raise
        return msgspec.json.encode(
            {
                "status": "dispatched",
                "mode": "background",
                "count": len(plan.tasks),
                "delegation_id": id,
                "goals": [task.goal for task in plan.tasks],
                "note": "the children work in the background; one message with all results will arrive in this conversation when the last has ended",
            }
        ).decode()

    def inherit(self, parent: SessionContext, child: SessionContext) -> None:
        """Let the child start in its parent's directory."""
        if self._inherit is not None:
            self._inherit(parent, child)

    def forget(self, session_id: str) -> None:
        """Forget the session of a child that has ended."""
        if self._forget is not None:
            self._forget(session_id)


class _Slot:
    """One background batch's place under the limit. Freed once, by the batch's own scope, or at once if the batch never started (H10)."""

    def __init__(self, delegation: Delegation) -> None:
        self._delegation: Delegation | None = delegation
        delegation._background += 1

    def free(self) -> None:
        """Free the place. A second call does nothing."""
        if self._delegation is not None:
            self._delegation._background -= 1
            self._delegation = None


def _batch_of(goal: str, context: str, tasks: list[Task] | str | None, role: str) -> list[Task] | str:
    """Return the tasks, or what is wrong with them."""
    if isinstance(tasks, str) and tasks.strip():
        try:
            tasks = msgspec.json.decode(tasks, type=list[Task])
        except msgspec.MsgspecError as error:
            return f"tasks is not a JSON array of {{goal, context, role}}: {error}"
    if isinstance(tasks, list) and tasks:
        empty = next((index for index, task in enumerate(tasks) if not task.goal.strip()), None)
        return f"tasks[{empty}].goal is empty; every task needs a goal" if empty is not None else tasks
    if not goal.strip():
        return "give a goal, or tasks with a goal each"
    return [Task(goal=goal, context=context, role=role)]


class _Batch:
    """The tasks of a batch and their results."""

    def __init__(self, delegation: Delegation, tasks: Sequence[Task], depth: int, parent: SessionContext) -> None:
        self._delegation = delegation
        self._depth = depth
        self._parent = parent
        self.tasks = list(tasks)
        self.usage = Usage()
        self._entries: list[dict[str, Any] | None] = [None] * len(tasks)

    async def run(self, run_child: RunChild) -> None:
        """Run all children concurrently and wait for all of them. Cancelling cancels them; finished results are kept."""
        async with trio.open_nursery() as nursery:
            for index, task in enumerate(self.tasks):
                nursery.start_soon(self._run_one, run_child, index, task)

    async def _run_one(self, run_child: RunChild, index: int, task: Task) -> None:
        settings = self._delegation.settings
        orchestrator = task.role == "orchestrator" and settings.orchestrators and self._depth < settings.max_spawn_depth
        began = trio.current_time()
        trace = _Trace()
        ended: list[Outcome] = []

        async def remember(outcome: Outcome) -> None:
            if ended:
                return
            ended.append(outcome)
            self.usage = self.usage + outcome.usage
            self._delegation.forget(outcome.session_id)

        def inherit(child: Turn) -> None:
            self._delegation.inherit(self._parent, child.context)

        try:
            outcome = await run_child(
                TurnInput(
                    text=task.goal if not task.context else f"{task.goal}\n\nContext:\n{task.context}",
                    history=(),
                    instructions=_CHILD_PROMPT,
                    payload={SUBAGENT_KEY: {"role": "orchestrator" if orchestrator else "leaf", "depth": self._depth}},
                ),
                budget=settings.child_budget,
                hooks=TurnHooks(sink=trace.take, on_start=inherit, on_end=remember),
            )
            # The hook comes later if the store has not written the child's end yet.
            await remember(outcome)
            self._entries[index] = _entry(index, outcome, trace, trio.current_time() - began, self._limit())
        except BaseException:
            if ended:
                self._entries[index] = _entry(index, ended[0], trace, trio.current_time() - began, self._limit())
            raise

    def _limit(self) -> int:
        return max(SUMMARY_FLOOR, SUMMARY_LIMIT // len(self.tasks))

    def results(self) -> list[dict[str, Any]]:
        """Return one entry for each task, in order; a child that was cancelled before it answered is `interrupted`."""
        return [entry or _never_ended(index) for index, entry in enumerate(self._entries)]

    def status(self) -> str:
        """Return `error` only if every child failed."""
        return (
            "error"
            if all(entry["status"] in ("failed", "error", "timeout") for entry in self.results())
            else "completed"
        )

    def details(self, id: str) -> dict[str, Any]:
        """Return the details that are stored in the job's row."""
        return {"delegation_id": id, "status": self.status(), "results": self.results()}

    def report(self, id: str, dispatched: float, now: float) -> str:
        """Return the text of the notice, complete in itself."""
        results = self.results()
        many = len(results) > 1
        heading = f"[ASYNC DELEGATION {'BATCH ' if many else ''}COMPLETE - {id}]"
        when = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(dispatched))
        lines = [heading, f"Dispatched {when}, {now - dispatched:.0f} s ago. Status: {self.status()}."]
        for task, entry in zip(self.tasks, results, strict=True):
            mark = "✓" if entry["status"] == "completed" else "✗"
            lines.append(
                f"\n{mark} {entry['task_index'] + 1}/{len(results)} {task.goal}"
                f"\n   {entry['status']}, {entry['api_calls']} model calls, {entry['duration_seconds']} s"
            )
            if task.context:
                lines.append(f"   Context: {task.context[:500]}")
            lines.append(entry["summary"] or f"   {entry.get('error', 'no result')}")
        return "\n".join(lines)


class _Trace:
    """The tools that a child used: names and sizes, without contents."""

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []
        self._arguments: dict[str, int] = {}

    def take(self, event: Mapping[str, Any]) -> None:
        if event["event"] == "tool.started":
            self._arguments[event["tool_call_id"]] = len(str(event.get("arguments", "")).encode())
        elif event["event"] == "tool.completed":
            self.calls.append(
                {
                    "tool": event["tool"],
                    "args_bytes": self._arguments.pop(event["tool_call_id"], 0),
                    "result_bytes": len(str(event.get("result", "")).encode()),
                    "status": "error" if event["error"] else "ok",
                }
            )


def _entry(index: int, outcome: Outcome, trace: _Trace, seconds: float, limit: int) -> dict[str, Any]:
    status, reason = _status(outcome)
    text, cut = _shorten(outcome.text, limit)
    entry: dict[str, Any] = {
        "task_index": index,
        "status": status,
        "summary": text or None,
        "api_calls": outcome.usage.api_calls,
        "duration_seconds": round(seconds, 2),
        "model": outcome.model,
        "exit_reason": reason,
        "tokens": {"input": outcome.usage.input_tokens, "output": outcome.usage.output_tokens},
        "tool_trace": trace.calls,
        "session_id": outcome.session_id,
    }
    if cut:
        entry["summary_truncated"] = True
    if status in ("failed", "error", "timeout"):
        entry["error"] = outcome.error or "the child answered with nothing"
    return entry


def _status(outcome: Outcome) -> tuple[str, str]:
    if outcome.state is TurnState.CANCELLED:
        late = outcome.cause is not None and outcome.cause.kind in (CancelCause.DEADLINE, CancelCause.BUDGET)
        return ("timeout", "timeout") if late else ("interrupted", "interrupted")
    if outcome.state is TurnState.FAILED:
        return "error", "error"
    reason = "max_iterations" if outcome.finish_reason == "max_iterations" else "completed"
    return ("completed", reason) if outcome.text.strip() else ("failed", reason)


def _never_ended(index: int) -> dict[str, Any]:
    return {
        "task_index": index,
        "status": "interrupted",
        "summary": None,
        "api_calls": 0,
        "duration_seconds": 0.0,
        "model": "",
        "exit_reason": "interrupted",
        "tokens": {"input": 0, "output": 0},
        "tool_trace": [],
    }


def _shorten(text: str, limit: int) -> tuple[str, bool]:
    if len(text) <= limit:
        return text, False
    head, tail = int(limit * 0.75), int(limit * 0.25)
    return (
        f"{text[:head]}\n… {len(text) - head - tail} characters left out; the child's session has all of it …\n{text[-tail:]}",
        True,
    )


def _encode(results: list[dict[str, Any]], began: float, note: str) -> str:
    answer: dict[str, Any] = {"results": results, "total_duration_seconds": round(time.monotonic() - began, 2)}
    if note:
        answer["note"] = note
    return msgspec.json.encode(answer).decode()


_CHILD_PROMPT: Final = (
    "You are working on one delegated goal, in a conversation of its own. No user can answer questions: decide for yourself, and say what you assumed."
    " When you are done, answer with a summary for the agent that delegated it: what you did, what you found, which files you changed, what is left."
)
