"""`PlatformError`, the one error of every platform client, and how failures leave a scope.

A platform's refusal, an unreachable host and a lost connection all become a `PlatformError` whose `kind` a sender can act on without knowing the
platform. Texts never hold a credential: each client redacts what it quotes with its own `Redaction`.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from enum import Enum
from typing import ClassVar, cast, final

from hermes_trio.base.structs import RedactedStruct


class PlatformErrorKind(Enum):
    """What went wrong, as far as senders decide by it (GW-5)."""

    TOO_LONG = "too_long"
    BAD_FORMAT = "bad_format"
    FORBIDDEN = "forbidden"
    NOT_FOUND = "not_found"
    RATE_LIMITED = "rate_limited"
    TRANSIENT = "transient"
    UNAUTHORIZED = "unauthorized"
    UNKNOWN = "unknown"


class Missing(Enum):
    """What a NOT_FOUND error refers to."""

    CHAT = "chat"
    THREAD = "thread"
    MESSAGE = "message"
    OTHER = "other"


PERMANENT_KINDS = frozenset(
    {
        PlatformErrorKind.TOO_LONG,
        PlatformErrorKind.BAD_FORMAT,
        PlatformErrorKind.FORBIDDEN,
        PlatformErrorKind.NOT_FOUND,
        PlatformErrorKind.UNAUTHORIZED,
    }
)


@final
class PlatformError(Exception):
    """Raised when a platform refused a call, or could not be reached.

    `permanent` says that the same call will never succeed. `ambiguous` says that the platform may have executed the call although no response
    arrived: repeating it may show a message twice. `code` is the platform's own code for the error. `moved_to` is the chat that replaced the
    addressed one, if the platform says so.
    """

    def __init__(
        self,
        kind: PlatformErrorKind,
        message: str,
        *,
        retry_after: float | None = None,
        permanent: bool | None = None,
        ambiguous: bool = False,
        code: int | str | None = None,
        missing: Missing | None = None,
        moved_to: str | None = None,
    ) -> None:
        super().__init__(message)
        self.kind = kind
        self.message = message
        self.retry_after = retry_after
        self.permanent = kind in PERMANENT_KINDS if permanent is None else permanent
        self.ambiguous = ambiguous
        self.code = code
        self.missing = missing
        self.moved_to = moved_to

    def __str__(self) -> str:
        return f"{self.kind.value}: {self.message}"

    def __repr__(self) -> str:
        return f"PlatformError({self.kind.value}, {self.message!r}, code={self.code!r}, permanent={self.permanent})"


@final
class Redaction(RedactedStruct, frozen=True):
    """Removes a client's secrets from text that people will read."""

    hidden: ClassVar[tuple[str, ...]] = ("secrets",)
    secrets: tuple[str, ...]

    def __call__(self, text: str) -> str:
        for secret in self.secrets:
            if secret:
                text = text.replace(secret, "***")
        return text

    def __repr__(self) -> str:
        return "Redaction(***)"


def require_token(name: str, token: str) -> str:
    """Return the token. Raises for an empty one or one with white space, without quoting it.

    Otherwise it would fail deep in the HTTP client with an error that quotes it.
    """
    if not token or not token.isascii() or not token.isprintable() or " " in token:
        message = f"the {name} is empty, or has spaces or other characters that no token has"
        raise PlatformError(PlatformErrorKind.UNAUTHORIZED, message)
    return token


def _leaves(group: BaseExceptionGroup[BaseException]) -> list[BaseException]:
    found: list[BaseException] = []
    for member in group.exceptions:
        if isinstance(member, BaseExceptionGroup):
            found.extend(_leaves(cast("BaseExceptionGroup[BaseException]", member)))
        else:
            found.append(member)
    return found


@contextmanager
def single_failure() -> Generator[None, None, None]:
    """Unwrap an exception group that has a single exception.

    For a nursery whose tasks belong to one connection, so that its user catches `PlatformError` and not a group. A group with several causes is
    raised as it is.
    """
    try:
        yield
    except BaseExceptionGroup as group:
        causes = _leaves(group)
        if len(causes) == 1:
            # Its own cause and context are more useful than the group's.
            raise causes[0] from causes[0].__cause__
        raise
