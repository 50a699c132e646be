"""Executes commands. Commands are never queued: they run at once, whatever the conversation is doing, and their result is the reply.

`/stop` replies with the receipt: what was running and how it ended. `/new` first moves the conversation to a new session and then stops the work of
the old one, so that nothing queued enters a session that is ending. Grants of the old conversation do not hold in the new one.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Final

import msgspec
import trio

from hermes_trio.runtime.outcome import CancelCause, Cause
from hermes_trio.runtime.stop_receipt import StopReceipt
from hermes_trio.store.errors import StoreBusy
from hermes_trio.store.records import ApprovalChoice, ApprovalRow, SessionRow

from .command_text import ApprovalAnswer, Command, CommandTextError, approval_answer
from .core import MessagingCore
from .session_keys import Source

RECEIPT_LINES: Final = 12
TREE_LINES: Final = 40
NOT_YOURS: Final = "Only the person who asked for this, or an admin of approvals, may answer it here."


class CommandContext(msgspec.Struct, frozen=True, kw_only=True):
    """Who typed a command, and in which conversation."""

    platform: str
    session_key: str
    source: Source
    prefix: str = "/"


class _Entry(msgspec.Struct, frozen=True):
    usage: str
    help: str
    run: Callable[[CommandContext, Command], Awaitable[str]]


def receipt_text(receipt: StopReceipt) -> str:
    """Return a stop receipt as text: what ended, how, and after how long."""
    if receipt.already_ended:
        return "It had ended already."
    head = f"Stopped in {receipt.milliseconds:.0f} ms; nothing of it runs any more."
    if not receipt.ok:
        head = f"Not everything has stopped after {receipt.milliseconds:.0f} ms; still there: {', '.join(receipt.remaining)}."
    lines = [
        f"- {line.kind} {line.name or line.node}: {line.how} after {line.milliseconds:.0f} ms"
        for line in receipt.lines[:RECEIPT_LINES]
    ]
    more = len(receipt.lines) - RECEIPT_LINES
    return "\n".join([head, *lines, *([f"- and {more} more"] if more > 0 else [])])


class Commands:
    """The commands that every chat understands."""

    def __init__(self, messaging: MessagingCore) -> None:
        self._messaging = messaging
        self._entries: Mapping[str, _Entry] = {
            "new": _Entry("new", "start a new conversation; what runs in the old one is stopped", self._new),
            "stop": _Entry("stop [all]", "stop what the agent is doing; with all, its background work too", self._stop),
            "status": _Entry("status", "what this conversation is doing", self._status),
            "approve": _Entry("approve [all] [once|session|always]", "allow what waits for approval", self._answer),
            "deny": _Entry("deny [all] [reason]", "refuse what waits for approval", self._answer),
            "tree": _Entry("tree", "everything that runs for this conversation", self._tree),
            "help": _Entry("help", "this list", self._help),
        }
        self._aliases: Mapping[str, str] = {"reset": "new", "start": "help", "commands": "help"}

    @property
    def names(self) -> Sequence[tuple[str, str]]:
        """Return the commands and their descriptions, for platforms that show a menu."""
        return [(name, entry.help) for name, entry in self._entries.items()]

    async def run(self, caller: CommandContext, command: Command) -> str:
        """Execute a command and return the reply. Cancelling it may end the wait for a stop, never the stop."""
        entry = self._entries.get(self._aliases.get(command.name, command.name))
        if entry is None:
            return f"There is no command {caller.prefix}{command.name}; {caller.prefix}help lists those that there are."
        return await entry.run(caller, command)

    async def answer(
        self, source: Source, key: str, answer: ApprovalAnswer, approval_id: str = ""
    ) -> list[ApprovalRow] | None:
        """Answer an approval of a conversation: one by its id, the oldest, or all that this person may answer.

        Return None if something is pending, and none of it is for this person to answer: in a group, people answer their own requests, and those
        without an asker. The platform's `approval_admins` may answer all (`*`: everyone may).
        """
        approvals = self._messaging.approvals
        if approvals is None:
            return []
        may = self._limits(source)
        answered = await approvals.answer(
            key,
            answer.choice,
            approval_id=approval_id,
            everything=answer.everything,
            reason=answer.reason,
            may=may,
        )
        if answered or may is None:
            return answered
        waiting = [row for row in await approvals.pending(key) if approval_id in ("", row.id)]
        return None if any(not may(row) for row in waiting) else []

    def _limits(self, source: Source) -> Callable[[ApprovalRow], bool] | None:
        """Return a predicate for the requests that a person may answer; None for all."""
        platform = self._messaging.platforms.find(source.platform)
        if source.chat_type == "dm" or platform is None:
            return None
        admins = platform.settings.approval_admins
        if "*" in admins or (source.user_id or "") in admins:
            return None
        return lambda row: row.asker == source.user_id if row.asker else not admins

    # -- the commands ----------------------------------------------------------------------------------------------------------------

    async def _help(self, caller: CommandContext, command: Command) -> str:
        lines = [f"{caller.prefix}{entry.usage}: {entry.help}" for entry in self._entries.values()]
        platform = self._messaging.platforms.find(caller.platform)
        own = () if platform is None else platform.adapter.own_commands
        lines += [f"{caller.prefix}{usage}: {told}" for usage, told in own]
        return "\n".join(["Whatever is not a command is for the agent.", "", *lines])

    async def _stop(self, caller: CommandContext, command: Command) -> str:
        words = command.arguments.split()
        if words not in ([], ["all"]):
            return f"{caller.prefix}stop knows no {command.arguments!r}; write {caller.prefix}stop or {caller.prefix}stop all."
        cause = Cause(CancelCause.STOP, f"{caller.prefix}stop")
        queued = await self._queued(caller)
        receipt = await self._messaging.inboxes[caller.platform].stop_turn(caller.session_key, cause)
        said = [receipt_text(receipt)] if receipt is not None else ["Nothing was running."]
        session = await self._session(caller)
        jobs = 0 if session is None else await self._job_count(session.id)
        if words and session is not None:
            receipts = await self._messaging.runtime.supervisor.stop_session(session.id, cause)
            said += [f"Background {one.target}: {receipt_text(one)}" for one in receipts]
        elif jobs:
            said.append(f"{_count(jobs, 'background job')} still running; {caller.prefix}stop all stops them too.")
        if queued:
            said.append(f"{_count(queued, 'message')} waiting, and coming next.")
        return "\n".join(said)

    async def _new(self, caller: CommandContext, command: Command) -> str:
        messaging, key = self._messaging, caller.session_key
        old = await self._session(caller)
        new = ""
        cause = Cause(CancelCause.SESSION_ENDED, f"{caller.prefix}new")
        # All of it or none: a new session that keeps what the old one was allowed would be the worst of both. And before the stopping, which may take
        # seconds: a question of the new conversation must not be refused for the old one's sake.
        with messaging.committing() as bound:
            new = await messaging.store.new_session(key, source=caller.platform, reason="session_reset")
            await messaging.end_conversation(key, "" if old is None else old.id)
        if bound.cancelled_caught:
            raise StoreBusy(
                f"{caller.prefix}new could not be stored in time; it is retried when the platform redelivers it"
            )
        said = ["A new conversation begins."]
        # Read after the commit: from then on no turn begins in the old session, and the lane may be in the new one already.
        turn = messaging.inboxes[caller.platform].current_turn(key)
        if turn is not None and turn.context.session_id != new:
            said.append(receipt_text(await turn.stop(cause)))
        elif old is not None and messaging.runtime.core.shared:
            receipt = await messaging.runtime.peers.stop_turn(caller.platform, key, cause, session_id=old.id)
            said += [] if receipt is None else [receipt_text(receipt)]
        if old is not None:
            stopped = await messaging.runtime.supervisor.stop_session(old.id, cause)
            said += [f"Background {one.target}: {receipt_text(one)}" for one in stopped]
        return "\n".join(said)

    async def _status(self, caller: CommandContext, command: Command) -> str:
        messaging, key = self._messaging, caller.session_key
        session = await self._session(caller)
        turn = messaging.inboxes[caller.platform].current_turn(key)
        lines: list[str] = []
        if session is None:
            lines.append("No conversation has begun here yet.")
        else:
            lines.append(
                f"Session {session.id}: {_count(session.message_count, 'message')},"
                f" {session.input_tokens + session.output_tokens} tokens."
            )
        if turn is None and await messaging.remote_lanes.node_of(caller.platform, key):
            lines.append("The agent is working, on another node.")
        elif turn is None:
            lines.append("The agent is idle.")
        else:
            age = trio.current_time() - turn.node.opened_at
            waits = next((node.waits_on for node in turn.node.walk() if node.waits_on), "")
            lines.append(f"The agent has been working for {age:.0f} s{f', waiting on {waits}' if waits else ''}.")
        queued = await self._queued(caller)
        if queued:
            lines.append(f"{_count(queued, 'message')} waiting.")
        for job in [] if session is None else messaging.runtime.supervisor.jobs(session.id):
            age = trio.current_time() - job.node.opened_at
            told = "you will be told" if job.watched else "not watched"
            lines.append(f"- background {job.spec.kind} {job.id}: {job.spec.title[:80]} ({age:.0f} s, {told})")
        lines += [] if session is None else await self._jobs_elsewhere(session.id)
        if messaging.approvals is not None:
            pending = await messaging.approvals.pending(key)
            lines += [f"- waits for approval: `{short_command(approval.command, 200)}`" for approval in pending]
        if messaging.runtime.draining:
            lines.append("The server is being stopped; new messages are kept for the next start.")
        return "\n".join(lines)

    async def _job_count(self, session_id: str) -> int:
        here = len(self._messaging.runtime.supervisor.jobs(session_id))
        return here + len(await self._jobs_elsewhere(session_id))

    async def _jobs_elsewhere(self, session_id: str) -> list[str]:
        """Return a line for each job of a session that runs on another node."""
        core = self._messaging.runtime.core
        if not core.shared:
            return []
        rows = await self._messaging.store.list_jobs(session_id=session_id, live_only=True)
        return [
            f"- background {row.kind} {row.job_id}: {row.title[:80]} (on another node)"
            for row in rows
            if row.owner != core.store.owner
        ]

    async def _tree(self, caller: CommandContext, command: Command) -> str:
        """Return the part of the tree that belongs to this conversation."""
        tree = self._messaging.runtime.tree
        session = await self._session(caller)
        wanted = {("lane", caller.session_key), ("session", "" if session is None else session.id)}
        nodes = [node for node in tree.root.walk() if (node.kind, node.id) in wanted]
        if not nodes:
            return "Nothing runs for this conversation."
        lines = "\n".join(tree.render(node) for node in nodes).splitlines()
        if len(lines) > TREE_LINES:
            lines = [*lines[:TREE_LINES], f"… and {len(lines) - TREE_LINES} more"]
        return "```\n" + "\n".join(lines).replace("```", "'''") + "\n```"

    async def _answer(self, caller: CommandContext, command: Command) -> str:
        try:
            answer = approval_answer(command)
        except CommandTextError as error:
            return str(error)
        return answered_text(await self.answer(caller.source, caller.session_key, answer), answer)

    # -- what they show ------------------------------------------------------------------------------------------------------------

    async def _session(self, caller: CommandContext) -> SessionRow | None:
        found = await self._messaging.store.session_of(caller.session_key)
        return None if found is None or found.ended_at is not None else found

    async def _queued(self, caller: CommandContext) -> int:
        return await self._messaging.store.inbox_waiting(inbox=caller.platform, session_key=caller.session_key)


def answered_text(answered: Sequence[ApprovalRow] | None, answer: ApprovalAnswer) -> str:
    """Return the reply to an answer; see `Commands.answer`."""
    if answered is None:
        return NOT_YOURS
    if not answered:
        return "Nothing waits for approval here (any more)."
    if answer.choice is ApprovalChoice.DENY:
        return f"Refused: {_shown(answered)}"
    return f"Approved ({answer.choice.value}): {_shown(answered)}"


def _shown(approvals: Sequence[ApprovalRow]) -> str:
    return "; ".join(f"`{short_command(approval.command, 120)}`" for approval in approvals)


def short_command(command: str, length: int) -> str:
    """Return one line of a command that was shown whole before, for inline code: no fence, and an ellipsis where it was cut."""
    line = " ".join(command.replace("`", "'").split())
    return line if len(line) <= length else line[: length - 1] + "…"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
