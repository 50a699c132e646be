"""The errors that the runtime raises on purpose. Each message says what was wrong and what to do about it."""

from __future__ import annotations

from typing import ClassVar


class RuntimeProblem(Exception):
    """The base of all errors of the runtime. `public` is its text for a client, which names no file of the server."""

    told: ClassVar[str] = ""
    """The text for a client instead of the error's own; empty where the error's own text may be shown."""

    @property
    def public(self) -> str:
        """Return the text for a client."""
        return self.told or str(self)


class Refused(RuntimeProblem):
    """The base of the errors of a call that the rows refuse, not the store: repeating it gives the same result."""


class InvalidContext(RuntimeProblem, ValueError):
    """Raised for a session variable, id or key that is invalid (too long, or with a NUL or a line break)."""


class NoRuntime(RuntimeProblem):
    """Raised when a call that needs an open Runtime is made outside of one."""


class OutcomeUnknown(RuntimeProblem):
    """Raised when the outcome of a write is not known yet. Repeating it is safe: under the same id or idempotency key it is not done twice."""


class RuntimeClosed(RuntimeProblem):
    """Raised for work in a runtime that has been closed or has not been opened."""


class AlreadyOpen(RuntimeProblem):
    """Raised when a Runtime is opened a second time."""


class Draining(RuntimeProblem):
    """Raised for new work while the runtime is draining. `retry_after` is in seconds."""

    def __init__(
        self, message: str = "the runtime is draining and takes no new work", retry_after: float = 1.0
    ) -> None:
        super().__init__(message)
        self.retry_after: float = retry_after


class Fenced(Refused):
    """Raised when the row of a write now belongs to another owner; nothing was written. The other owner ends it."""


class SessionEnded(Refused):
    """Raised when a turn of waiting rows would begin in a session that has ended since it was chosen; nothing was written."""

    code: ClassVar[str] = "session_ended"


class SessionHeld(RuntimeProblem):
    """Raised when a turn of another node holds the session; nothing was written. The end of that turn is signalled."""


class HandledElsewhere(RuntimeProblem):
    """Raised when another node, `node`, has to handle a request; nothing was begun."""

    def __init__(self, message: str, node: str) -> None:
        super().__init__(message)
        self.node: str = node


class HostedElsewhere(HandledElsewhere):
    """Raised when a session's turns run on another node, because its shell, files or jobs are there; nothing was begun."""

    def __init__(self, session_id: str, node: str) -> None:
        super().__init__(
            f"session {session_id} is bound to node {node[:8]}, where its shell, its files or its jobs are", node
        )


class MembershipLost(RuntimeProblem):
    """Raised when this node has lost its lease: it was not renewed in time, or the node was reaped. Its work has been stopped."""


class TooBusy(RuntimeProblem):
    """Raised when all turn slots are in use. `retry_after` is in seconds."""

    def __init__(self, message: str, retry_after: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after: float = retry_after


class MailboxFull(RuntimeProblem):
    """Raised when the maximum number of messages waits for a session; nothing was stored."""


class JobRefused(RuntimeProblem):
    """Raised when a job was not started; the message names the limit."""


class UnknownJob(RuntimeProblem, KeyError):
    """Raised when the session has no job of that id."""

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else "unknown job"


class BudgetExhausted(Refused):
    """Raised when a scope spends more than its budget; the scope that owns the budget is cancelled. A turn that would exceed `wakes` does not begin."""


class AgentFailed(RuntimeProblem):
    """Raised by an agent to report a failure, with a text that may be shown to a user."""

    def __init__(self, message: str, code: str = "agent_error") -> None:
        super().__init__(message)
        self.code: str = code
