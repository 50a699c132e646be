"""Every error that the runtime raises on purpose, each with what was wrong and what to do about it."""

from __future__ import annotations

from typing import ClassVar

__all__ = [
    "AgentFailed",
    "AlreadyOpen",
    "BudgetExhausted",
    "Draining",
    "Fenced",
    "HostedElsewhere",
    "InvalidContext",
    "JobRefused",
    "MailboxFull",
    "MembershipLost",
    "NoRuntime",
    "OutcomeUnknown",
    "RuntimeClosed",
    "RuntimeProblem",
    "SessionHeld",
    "TooBusy",
    "UnknownJob",
]


class RuntimeProblem(Exception):
    """The base of all errors of the runtime. `public` is its text for a client, which names no file of the server."""

    told: ClassVar[str] = ""
    """What a client is told instead of the error's own text; empty where that is fit for it."""

    @property
    def public(self) -> str:
        """The text for a client."""
        return self.told or str(self)


class InvalidContext(RuntimeProblem, ValueError):
    """A session variable, id or key that cannot be used as one (too long, or with a NUL or a line break)."""


class NoRuntime(RuntimeProblem):
    """Something that needs an open Runtime was asked for outside of one."""


class OutcomeUnknown(RuntimeProblem):
    """Whether something was done is not known yet. Asking again tells: under the same id or idempotency key it is not done twice."""


class RuntimeClosed(RuntimeProblem):
    """Work was offered to a runtime that has been closed or has not been opened."""


class AlreadyOpen(RuntimeProblem):
    """A Runtime is a one-way thing: it is opened once."""


class Draining(RuntimeProblem):
    """New work was refused because the runtime is draining. `retry_after` is in seconds."""

    def __init__(
        self, message: str = "the runtime is draining and takes no new work", retry_after: float = 1.0
    ) -> None:
        super().__init__(message)
        self.retry_after: float = retry_after


class Fenced(RuntimeProblem):
    """What was to be ended or begun belongs to another owner by now; nothing was written. The other owner decides what becomes of it."""


class SessionHeld(RuntimeProblem):
    """A turn of another node has the session; nothing was written. Its end is signalled."""


class HostedElsewhere(RuntimeProblem):
    """The turns of a session run on another node, because its shell, its files or its jobs are there; nothing was begun. `node` is that node."""

    def __init__(self, session_id: str, node: str) -> None:
        super().__init__(
            f"session {session_id} is bound to node {node[:8]}, where its shell, its files or its jobs are"
        )
        self.node: str = node


class MembershipLost(RuntimeProblem):
    """This node can no longer know that it owns what it holds: its lease was not renewed in time, or it was taken over. What it ran has been stopped."""


class TooBusy(RuntimeProblem):
    """All turn slots are taken. `retry_after` is in seconds."""

    def __init__(self, message: str, retry_after: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after: float = retry_after


class MailboxFull(RuntimeProblem):
    """A lane already holds as many waiting messages as it may; nothing was stored."""


class JobRefused(RuntimeProblem):
    """A job was not started; the text says which limit stands in the way."""


class UnknownJob(RuntimeProblem, KeyError):
    """No job of that id belongs to the asking session."""

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else "unknown job"


class BudgetExhausted(RuntimeProblem):
    """A scope spent more of something than it was given; the scope that owned the budget is cancelled."""


class AgentFailed(RuntimeProblem):
    """An agent reported failure by raising this, with a text that may be shown to a user."""

    def __init__(self, message: str, code: str = "agent_error") -> None:
        super().__init__(message)
        self.code: str = code
