"""Comments on GitHub issues and pull requests: a platform for the answers of webhooks.

It only sends (`POST /repos/{owner}/{repo}/issues/{number}/comments` of the REST API), through the outbox like every other platform, with a token. In
an address the repository is the chat and the number is the thread.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, Final

import trio

from hermes_trio.messaging.addresses import GITHUB_COMMENT
from hermes_trio.messaging.chunking import Limit
from hermes_trio.messaging.contract import Adapter, Missing, Outgoing, PlatformError, PlatformErrorKind, SendResult
from hermes_trio.messaging.errors import Redaction

from .wire.http import HttpLink, PlatformResponse

API: Final = "https://api.github.com"
LIMIT: Final = 65_000
"""GitHub accepts 65536 characters; some are reserved for the numbering of parts."""

_DEFAULT_WAIT: Final = 60.0


class GithubComments(Adapter):
    """See the module."""

    platform = GITHUB_COMMENT
    interactive = False

    def __init__(self, token: str, *, base_url: str = API) -> None:
        self.limit = Limit(LIMIT)
        self._token = token
        self._base_url = base_url
        self._link: HttpLink

    @asynccontextmanager
    async def open(self) -> AsyncIterator[None]:
        """Open one connection for all comments."""
        headers = {
            "accept": "application/vnd.github+json",
            "authorization": f"Bearer {self._token}",
            "x-github-api-version": "2022-11-28",
        }
        self._link = HttpLink(self._base_url, redaction=Redaction((self._token,)), headers=headers)
        try:
            yield
        finally:
            with trio.CancelScope(shield=True, deadline=trio.current_time() + 1):
                await self._link.aclose()

    async def run(self, connected: Callable[[], None]) -> None:
        """Receive nothing: events of GitHub arrive by webhook."""
        connected()
        await trio.sleep_forever()

    async def send(self, message: Outgoing) -> SendResult:
        """Add a comment. If it is cancelled, it is not known whether the comment was added."""
        path = f"/repos/{message.chat_id}/issues/{message.thread_id}/comments"
        answer = await self._link.call("POST", path, json={"body": message.text})
        if answer.status == 201:
            made: Any = answer.decode()
            return SendResult.sent(str(made["id"]) if isinstance(made, dict) else "")  # pyright: ignore[reportUnknownArgumentType]
        return SendResult.failed(_error(answer, path))


def _error(answer: PlatformResponse, path: str) -> PlatformError:
    body: Any = answer.decode()
    said = str(body.get("message", "")) if isinstance(body, dict) else ""  # pyright: ignore[reportUnknownMemberType,reportUnknownArgumentType]
    text = f"{path}: {answer.status} {said}".strip()
    limited = answer.status == 429 or (answer.status == 403 and "rate limit" in said.lower())
    if limited:
        return PlatformError(PlatformErrorKind.RATE_LIMITED, text, retry_after=_wait(answer), permanent=False)
    kinds = {
        401: PlatformErrorKind.UNAUTHORIZED,
        403: PlatformErrorKind.FORBIDDEN,
        404: PlatformErrorKind.NOT_FOUND,
        410: PlatformErrorKind.NOT_FOUND,
    }
    kind = kinds.get(answer.status)
    if kind is not None:
        return PlatformError(kind, text, missing=Missing.CHAT if kind is PlatformErrorKind.NOT_FOUND else None)
    if answer.status == 422:
        return PlatformError(PlatformErrorKind.BAD_FORMAT, text)
    if answer.status >= 500:
        return PlatformError(PlatformErrorKind.TRANSIENT, text, ambiguous=True)
    return PlatformError(PlatformErrorKind.UNKNOWN, text, permanent=True)


def _wait(answer: PlatformResponse) -> float:
    given = answer.headers.get("retry-after", "")
    return float(given) if given.isdigit() else _DEFAULT_WAIT
