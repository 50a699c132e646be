"""Comments on GitHub: what is sent, how refusals are read, and that a slow answer delays no other work."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec
import pytest
import trio

from hermes_trio.adapters.github import GithubComments
from hermes_trio.messaging.addresses import comment_address
from hermes_trio.messaging.contract import Outgoing, PlatformErrorKind
from hermes_trio.testing.platforms.server import FakeReply, FakeRequest, open_loopback_server

TOKEN = "ghp_secret"


class FakeGithub:
    """The one method that is used: create an issue comment."""

    def __init__(self) -> None:
        self.comments: list[tuple[str, str]] = []
        self.status = 201
        self.answer: dict[str, object] = {"id": 7}
        self.headers: dict[str, str] = {}
        self.seconds = 0.0

    async def handle(self, request: FakeRequest) -> FakeReply:
        """Answer as it was told to."""
        await trio.sleep(self.seconds)
        assert request.headers["authorization"] == f"Bearer {TOKEN}"
        if self.status == 201:
            self.comments.append((request.path, msgspec.json.decode(request.body)["body"]))
        return FakeReply(status=self.status, body=msgspec.json.encode(self.answer), headers=self.headers)


@asynccontextmanager
async def open_comments() -> AsyncIterator[tuple[GithubComments, FakeGithub]]:
    """The adapter, with a fake behind it."""
    fake = FakeGithub()
    async with open_loopback_server(fake.handle) as server:
        adapter = GithubComments(TOKEN, base_url=server.url)
        async with adapter.open():
            yield adapter, fake


def comment(text: str = "looks good") -> Outgoing:
    """A comment on a pull request."""
    place = comment_address("ann/project", 12)
    return Outgoing(chat_id=place.chat_id or "", thread_id=place.thread_id or "", text=text)


async def test_a_comment_is_made() -> None:
    """On the discussion of the issue or pull request, with the id that GitHub gave it."""
    async with open_comments() as (adapter, fake):
        result = await adapter.send(comment())
    assert (result.success, result.message_id) == (True, "7")
    assert fake.comments == [("/repos/ann/project/issues/12/comments", "looks good")]


@pytest.mark.parametrize(
    ("status", "message", "kind", "retryable"),
    [
        (401, "Bad credentials", PlatformErrorKind.UNAUTHORIZED, False),
        (403, "Resource not accessible", PlatformErrorKind.FORBIDDEN, False),
        (403, "API rate limit exceeded", PlatformErrorKind.RATE_LIMITED, True),
        (404, "Not Found", PlatformErrorKind.NOT_FOUND, False),
        (422, "Validation Failed", PlatformErrorKind.BAD_FORMAT, False),
        (429, "slow down", PlatformErrorKind.RATE_LIMITED, True),
        (502, "oops", PlatformErrorKind.TRANSIENT, True),
    ],
)
async def test_a_refusal_says_whether_to_try_again(
    status: int, message: str, kind: PlatformErrorKind, retryable: bool
) -> None:
    """And never holds the token."""
    async with open_comments() as (adapter, fake):
        fake.status, fake.answer, fake.headers = status, {"message": message}, {"retry-after": "9"}
        result = await adapter.send(comment())
    assert (result.success, result.error_kind, result.retryable) == (False, kind, retryable)
    assert TOKEN not in result.error
    assert result.retry_after == (9.0 if kind is PlatformErrorKind.RATE_LIMITED else None)


async def test_a_slow_answer_holds_up_nobody_else() -> None:
    """The loop goes on while GitHub thinks (SC-19)."""
    async with open_comments() as (adapter, fake):
        fake.seconds = 0.5
        ticks = 0
        async with trio.open_nursery() as nursery:

            async def send() -> None:
                await adapter.send(comment())
                nursery.cancel_scope.cancel()

            nursery.start_soon(send)
            while True:
                await trio.sleep(0.01)
                ticks += 1
    assert ticks > 10


@pytest.mark.parametrize(
    ("repository", "number"),
    [
        ("project", 1),
        ("ann/project/x", 1),
        ("ann/..", 1),
        (None, 1),
        ("ann/project", 0),
        ("ann/project", "x"),
        ("ann/project", True),
    ],
)
def test_an_address_that_is_none_is_refused(repository: object, number: object) -> None:
    """With what would be right."""
    with pytest.raises(ValueError, match="must be"):
        comment_address(repository, number)
