"""Jobs: work that outlives the turn that started it, grouped by session, each a task and a node.

`start` runs a job without a notice; `start_watched` takes a `CompletionChannel`, and its completion ends as exactly one of delivered, superseded or
abandoned. Only the job's own task sets its end state: exit, kill, time-out and failure cannot be confused. A job's failure
does not cancel its siblings.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any, Final

import msgspec
import trio

from .agents import AnyAgent
from .asyncio_loop import AsyncioLoop, awaitable_from_asyncio
from .budget import Budget
from .channel import CompletionChannel
from .context import Binding, SessionContext, _binding
from .core import RuntimeCore
from .ends import End
from .errors import Draining, JobRefused, OutcomeUnknown, RuntimeClosed, RuntimeProblem, UnknownJob
from .outcome import CancelCause, Cause, JobState, Outcome
from .ports import JobFinish, JobStart, NewNotice, NoticeKind, TurnInput
from .retrying import retried
from .stop_receipt import StopReceipt, stop_each, stop_node
from .tree import Node, Stoppable, printable, split_cancelled, waiting
from .turn import NO_HOOKS, Owner, TurnHooks
from .turn_lifecycle import first_cause, run_child

logger: Final = logging.getLogger("hermes_trio.runtime.supervisor")


class JobSpec(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """The definition of a job. `run(job)` does the work; it calls `job.started(...)` once the work exists, and returns the end state.

    `kind` names the node (`process`, `delegation`). `notice` is the kind of its completion notice. `seconds` bounds its life.
    """

    kind: str
    title: str
    run: Callable[[Job], Awaitable[JobState | None]]
    id: str = ""
    notice: NoticeKind = NoticeKind.COMPLETION
    details: Mapping[str, Any] = msgspec.field(default_factory=dict[str, Any])
    seconds: float | None = None
    uninterruptible: bool = False
    """Whether the job cannot be stopped, only abandoned by a drain: a thread that outlives its turn."""


class Job(Stoppable):
    """A running job, as its own task and its owner see it. Its fields are written to its row and its notice."""

    def __init__(
        self, core: RuntimeCore, spec: JobSpec, owner: Owner, channel: CompletionChannel | None, node: Node, id: str
    ) -> None:
        self.core = core
        self.spec = spec
        self.owner = owner
        self.channel = channel
        self.node = node
        self.id = id
        self.state: JobState = JobState.STARTING
        self.scope = trio.CancelScope()
        self.cause: Cause | None = None
        self.seen: bool = False
        self.end_tried: bool = False
        self.unstarted: bool = False
        """Whether the job ended before its start handshake."""
        self.info: object = None
        self.summary: str = ""
        self.details: dict[str, Any] = {}
        self.text: str = ""
        self.error: BaseException | None = None
        self.nursery: trio.Nursery
        self._ready = trio.Event()
        self._over = trio.Event()
        if spec.seconds is not None:
            self.scope.deadline = trio.current_time() + spec.seconds
        node.work = self
        node.scope = self.scope

    @property
    def watched(self) -> bool:
        """Return whether the job holds a channel for its completion."""
        return self.channel is not None

    @property
    def context(self) -> SessionContext:
        """Return the session that the job belongs to."""
        return self.owner.context

    @property
    def bridge(self) -> AsyncioLoop:
        """Return the asyncio loop of the runtime."""
        return self.core.asyncio_loop

    def start_on_trio(self, function: Callable[[], Awaitable[None]], name: str) -> None:
        """Start a task for a call from asyncio: a child turn in the job, the rest beside it, where it can wait for the job's end."""
        if name == "run_child":
            self.core.base_context.copy().run(self.nursery.start_soon, function)
        else:
            self.core.supervisor.start_soon(function)

    # -- for the job's own task --------------------------------------------------------------------------------------------------

    def started(self, info: object = None) -> None:
        """Complete the start handshake with `info`: the call that started the job returns."""
        self.bridge.call_soon(self._started, info)

    def _started(self, info: object) -> None:
        if self.state is JobState.STARTING:
            self.state = JobState.RUNNING
        self.info = info
        self._ready.set()

    @awaitable_from_asyncio
    async def notify(self, kind: NoticeKind, text: str, **payload: Any) -> bool:
        """Send a notice to the owner while the job runs. Returns whether it was queued: False without a channel, after `mark_seen`, or if the session ended."""
        if self.channel is None or self.seen:
            return False
        notice = await self.core.store.add_notice(
            NewNotice(
                inbox=self.channel.inbox,
                routing=self.context,
                kind=kind,
                text=text,
                job_id=self.id,
                root_id=self.owner.root.id,
                payload=payload,
            )
        )
        return notice is not None

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
        """Run a child turn of the job's owner inside this job and wait for it. It is of the owner's kind."""
        spec = self.core.child_spec(input, self.owner, agent=agent, context=context, budget=budget, hooks=hooks)
        return await run_child(self.core, spec, self.owner, self.node)

    # -- for other callers -------------------------------------------------------------------------------------------------------

    @awaitable_from_asyncio
    async def wait_started(self) -> object:
        """Wait for the start handshake and return its `info`. Raises if the job ended without starting: its error, or `JobRefused`."""
        await self._ready.wait()
        if self.unstarted and self.cause is not None:
            raise JobRefused(f"the job was stopped before it had started ({self.cause})")
        if self.unstarted and self.error is not None:
            raise self.error
        return self.info

    @awaitable_from_asyncio
    async def wait(self) -> JobState:
        """Wait until the job has ended and its end is committed. Cancelling abandons the wait, never the job."""
        await self._over.wait()
        return self.state

    @awaitable_from_asyncio
    async def mark_seen(self) -> None:
        """Record that the owner knows how this job ended: its pending notices are superseded."""
        if self.seen or self.channel is None:
            self.seen = True
            return
        self.seen = True
        if self._over.is_set():
            await self.core.ends.put(End(f"what is known of job {self.id}", lambda: self.core.store.supersede(self.id)))

    def cancel(self, cause: Cause) -> None:
        """Cancel the job's scope, from any thread. The first cause stays."""
        self.bridge.call_soon(self._cancel, cause)

    def _cancel(self, cause: Cause) -> None:
        if self.spec.uninterruptible and cause.kind is not CancelCause.DRAIN:
            return
        if self.cause is None:
            self.cause = cause
        self.scope.cancel(reason=str(cause))

    def stopped_node(self) -> Node:
        """Return the job's own node: it leaves the tree when the job's end is committed."""
        return self.node

    @awaitable_from_asyncio
    async def stop(self, cause: Cause | None = None, timeout: float = 30.0) -> StopReceipt:
        """Stop the job and everything in it; return a receipt with one line per node."""
        why = Cause(CancelCause.STOP) if cause is None else cause
        seconds = 0.0 if self.spec.uninterruptible and why.kind is not CancelCause.DRAIN else timeout
        return await stop_node(self.node, lambda: self.cancel(why), why, seconds)


class _Session(msgspec.Struct, eq=False):
    """The live jobs of one session, and their node."""

    node: Node
    jobs: dict[str, Job] = msgspec.field(default_factory=dict[str, Job])

    def cancel(self, cause: Cause) -> None:
        """Cancel every job of the session."""
        for job in list(self.jobs.values()):
            job.cancel(cause)

    def stopped_node(self) -> Node:
        """Return the session's node: it leaves the tree with its last job."""
        return self.node

    def title(self) -> str:
        """Return an empty title: the node has the session's id."""
        return ""


class Supervisor:
    """The owner of every job. Opened by the runtime around every scope that can start one."""

    def __init__(self, core: RuntimeCore) -> None:
        self._core = core
        self._nursery: trio.Nursery | None = None
        self._jobs: dict[str, Job] = {}
        self._sessions: dict[str, _Session] = {}
        self.unrecorded: dict[Job, trio.Event] = {}
        """The jobs of threads whose rows the store does not have yet. An event is set when it has the row, or when the job is over."""
        self.node: Node = core.tree.root.open("supervisor", "supervisor")

    @asynccontextmanager
    async def open(self) -> AsyncIterator[Supervisor]:
        """Accept jobs for the body of the `async with`. Leaving stops all of them and waits for their ends."""
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            try:
                yield self
            finally:
                self._nursery = None
                for job in list(self._jobs.values()):
                    job.cancel(Cause(CancelCause.DRAIN, "the runtime is closing"))

    def __len__(self) -> int:
        return len(self._jobs)

    def jobs(self, session_id: str | None = None) -> list[Job]:
        """Return the live jobs, of one session or of all, oldest first."""
        if session_id is None:
            return list(self._jobs.values())
        session = self._sessions.get(session_id)
        return [] if session is None else list(session.jobs.values())

    def jobs_of_root(self, root_id: str) -> list[Job]:
        """Return the live jobs of what one input started, oldest first."""
        return [job for job in self._jobs.values() if job.owner.root.id == root_id]

    def find(self, job_id: str, *, session_id: str) -> Job:
        """Return a live job of this session. Raises `UnknownJob` for any other: a session sees only its own."""
        job = self._jobs.get(job_id)
        if job is None or job.context.session_id != session_id:
            raise UnknownJob(f"no running job {job_id!r} belongs to this session")
        return job

    async def start(self, job: JobSpec, owner: Owner) -> Job:
        """Start a job without a completion notice, and wait for its handshake. It has a maximum lifetime."""
        if job.seconds is None:
            job = msgspec.structs.replace(job, seconds=self._core.settings.unwatched_job_seconds)
        return await self._start(job, owner, None)

    async def start_watched(self, job: JobSpec, owner: Owner, channel: CompletionChannel) -> Job:
        """Start a job whose completion goes to `channel`, and wait for its handshake."""
        return await self._start(job, owner, channel)

    async def stop(self, job_id: str, *, session_id: str, cause: Cause | None = None) -> StopReceipt:
        """Stop one job of a session."""
        return await self.find(job_id, session_id=session_id).stop(cause)

    async def stop_session(self, session_id: str, cause: Cause) -> list[StopReceipt]:
        """Stop all jobs of a session concurrently, on all nodes, and return their receipts.

        If the cause is the session's end, its cached state is dropped.
        """
        receipts = await self.stop_here(session_id, cause)
        if self._core.shared:
            receipts += await self._core.peers.stop_session(session_id, cause, turns=False)
        return receipts

    async def stop_here(self, session_id: str, cause: Cause) -> list[StopReceipt]:
        """Stop the jobs of a session that run in this process, and return their receipts."""
        try:
            return await stop_each(self.jobs(session_id), cause)
        finally:
            if cause.kind is CancelCause.SESSION_ENDED:
                self._core.forget_session(session_id)

    async def stop_all(self, cause: Cause) -> list[StopReceipt]:
        """Stop every job, and the threads that jobs leave behind, concurrently, and return the receipts."""
        jobs = self.jobs()
        receipts = await stop_each(jobs, cause)
        return receipts + await stop_each([job for job in self.jobs() if job not in jobs], cause)

    async def _start(self, spec: JobSpec, owner: Owner, channel: CompletionChannel | None) -> Job:
        core = self._core
        session_id = owner.context.session_id
        if self._nursery is None:
            raise RuntimeClosed("the runtime is closed; open one with `async with Runtime(...)` before starting jobs")
        if core.draining:
            raise Draining()
        if len(self._jobs) >= core.settings.max_jobs:
            raise JobRefused(f"{len(self._jobs)} jobs are running, which is the limit; stop some first")
        session = self._sessions.get(session_id)
        if session is not None and len(session.jobs) >= core.settings.max_jobs_per_session:
            raise JobRefused(
                f"this session already runs {core.settings.max_jobs_per_session} jobs, which is the limit; wait for one or stop one"
            )
        owner.allowance.spend("jobs")
        job = self._open(spec, owner, channel)
        try:
            await job.wait_started()
        except trio.Cancelled:
            job.seen = True
            job.cancel(Cause(CancelCause.PARENT_GONE, "the task that started it was cancelled before it had started"))
            raise
        return job

    def _open(self, spec: JobSpec, owner: Owner, channel: CompletionChannel | None) -> Job:
        """Start the task of a job; its node is in the tree from now on."""
        core, session_id = self._core, owner.context.session_id
        assert self._nursery is not None
        id = spec.id or core.ids.make("job_", 12)
        if id in self._jobs:
            raise JobRefused(f"job {id!r} already exists; give each job its own id, or none")
        session = self._sessions.get(session_id)
        if session is None:
            session = self._sessions[session_id] = _Session(
                self.node.open("session", session_id or "(none)", owner=owner.context.session_key, tenant=owner.tenant)
            )
            session.node.work = session
        node = session.node.open(spec.kind, id, name=spec.title[:200])
        job = Job(core, spec, owner, channel, node, id)
        self._jobs[id] = session.jobs[id] = job
        owner.root.branched = True
        # From the supervisor's context, not the caller's: the job has its session's identity, and no reference to the turn or the request.
        core.base_context.copy().run(self._nursery.start_soon, self._live, job)
        return job

    def start_soon(self, function: Callable[[], Awaitable[None]]) -> None:
        """Start a task that belongs to no session. Raises `RuntimeClosed` after the end."""
        if self._nursery is None:
            raise RuntimeClosed("the runtime is closed")
        self._core.base_context.copy().run(self._nursery.start_soon, function)

    def adopt_thread(self, name: str, owner: Owner, over: trio.Event) -> None:
        """Make a job of a thread that outlives its turn. The job ends when the thread does or when a drain abandons it.

        The thread exists already, so the job goes on while the store refuses its row, which is tried again until the thread has ended.
        """

        async def run(job: Job) -> JobState:
            job.started()
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._write_row, job)
                with waiting(f"thread {name}"):
                    await over.wait()
                nursery.cancel_scope.cancel()
            return JobState.EXITED

        if self._nursery is not None:
            job = self._open(JobSpec(kind="thread", title=name, run=run, uninterruptible=True), owner, None)
            self.unrecorded[job] = trio.Event()

    async def record_threads(self, root_id: str) -> None:
        """Wait until the store has the rows of the threads that outlive work of this root, before the end of that work is written.

        Other nodes know only the rows: without them they would report that the root has settled. Shielded, and bounded by `finish_seconds`: an end is not kept
        back by a store that refuses only these rows. Returns at once in a drain, which ends the jobs of threads itself.
        """
        events = [event for job, event in self.unrecorded.items() if job.owner.root.id == root_id]
        if events and not self._core.draining:
            with self._core.waits.bound(), waiting("the store, to write the rows of threads"):
                for event in events:
                    await event.wait()

    def _recorded(self, job: Job) -> None:
        event = self.unrecorded.pop(job, None)
        if event is not None:
            event.set()

    async def _live(self, job: Job) -> None:
        """Run a job from its row to its committed end."""
        token = _binding.set(Binding(job.context, None, job.node))
        state: JobState | None = None
        try:
            try:
                with job.scope:
                    if not job.spec.uninterruptible:
                        await self._write_start(job)
                    async with trio.open_nursery() as nursery:
                        job.nursery = nursery
                        with printable():
                            state = await job.spec.run(job) or JobState.EXITED
            except BaseException as error:  # noqa: ASYNC103 - the end of a job is recorded; what ends the program goes on
                job.error = first_cause(error)
                cancelled, rest = split_cancelled(error)
                if rest is not None and not isinstance(rest, Exception):
                    raise
                if cancelled is not None and rest is None:
                    job.cause = job.cause or Cause(CancelCause.DRAIN)
            self._decide(job, state)
            if self.unrecorded and not job.spec.uninterruptible:
                await self.record_threads(job.owner.root.id)
            # Also if writing the row failed: the row may exist then, and the end of a missing row changes nothing.
            end = End(f"job {job.id}", lambda: self._write_end(job), lambda _: self._write_end(job, reduced=True))
            await self._core.ends.put(end)
        finally:
            _binding.reset(token)
            self._forget(job)

    def _decide(self, job: Job, state: JobState | None) -> None:
        if not job._ready.is_set():
            # The caller that started it gets the reason as an exception (or was cancelled): a notice would repeat it.
            job.seen = job.unstarted = True
        if state is not None and job.error is None:
            job.state = state
        elif job.cause is not None:
            job.state = JobState.KILLED
            job.details.setdefault("cause", str(job.cause))
        elif job.error is not None and not isinstance(job.error, trio.Cancelled):
            job.state = JobState.FAILED
            job.summary = job.summary or f"{type(job.error).__name__}: {job.error}"
            if not isinstance(job.error, RuntimeProblem):
                logger.error("job %s failed", job.id, exc_info=job.error)
        else:
            job.state = JobState.TIMED_OUT
            job.cause = Cause(CancelCause.DEADLINE, f"older than {job.spec.seconds:g} s")

    async def _write_start(self, job: Job) -> None:
        """Write the row of a job. Retries if the outcome of a write is unknown: the write is idempotent."""
        row = JobStart(
            job_id=job.id,
            kind=job.spec.kind,
            title=job.spec.title,
            root_id=job.owner.root.id,
            turn_id=job.owner.turn_id,
            routing=job.context,
            inbox="" if job.channel is None else job.channel.inbox,
            details=job.spec.details,
        )
        try:
            await self._core.store.start_job(row)
        except OutcomeUnknown:
            await self._core.store.start_job(row)

    async def _write_row(self, job: Job) -> None:
        """Write the row of a job whose work exists already. Retries until it is written."""
        try:
            await retried(lambda: self._write_start(job), f"write the row of job {job.id}")
        except Exception as error:
            logger.error("the store refuses the row of job %s: %s", job.id, error)
        self._recorded(job)

    async def _write_end(self, job: Job, *, reduced: bool = False) -> None:
        """Write the end of a job, with its notice if it has a channel. If the owner has seen the end by then, the notice is superseded."""
        text = self._default_text(job) if reduced else job.text or self._default_text(job)
        details = {} if reduced else job.details
        notice: NewNotice | None = None
        if job.channel is not None:
            notice = NewNotice(
                inbox=job.channel.inbox,
                routing=job.context,
                kind=job.spec.notice,
                text=text,
                job_id=job.id,
                root_id=job.owner.root.id,
                payload={"state": job.state.value, **details},
            )
        ended = job.cause is not None and job.cause.kind is CancelCause.SESSION_ENDED
        seen, first = job.seen, not job.end_tried
        job.end_tried = True
        await self._core.store.finish_job(
            JobFinish(
                job_id=job.id,
                state=job.state,
                summary=job.summary,
                details=details,
                notice=notice,
                superseded=seen,
                abandoned="session_ended" if ended else "",
            )
        )
        if job.seen and not (seen and first):
            # The owner saw the end during the write, or this is a retry, which finds the end as it was written first.
            await self._core.store.supersede(job.id)

    @staticmethod
    def _default_text(job: Job) -> str:
        because = f" ({job.cause})" if job.cause is not None else ""
        return f"[IMPORTANT: Background {job.spec.kind} {job.id} {job.state.value}{because}.\n{job.spec.title}\n{job.summary}]"

    def _forget(self, job: Job) -> None:
        del self._jobs[job.id]
        self._recorded(job)
        if not job.state.terminal:
            job.state = JobState.FAILED
        job.node.close("cancelled" if job.cause is not None else job.state.value)
        session = self._sessions[job.context.session_id]
        del session.jobs[job.id]
        if not session.jobs:
            session.node.close()
            del self._sessions[job.context.session_id]
        job._ready.set()
        job._over.set()
