"""The one error type: its kinds, what it hides, and how it leaves a scope."""

from __future__ import annotations

import pytest
import trio

from hermes_trio.adapters.discord.client import DiscordClient
from hermes_trio.adapters.slack.client import SlackClient
from hermes_trio.adapters.telegram.client import TelegramClient
from hermes_trio.messaging.errors import PlatformError, PlatformErrorKind, Redaction, single_failure


@pytest.mark.parametrize("kind", PlatformErrorKind)
def test_kinds_know_whether_they_are_permanent(kind: PlatformErrorKind) -> None:
    """Only kinds that a repetition may mend are not permanent; a caller may say otherwise."""
    passing = {PlatformErrorKind.RATE_LIMITED, PlatformErrorKind.TRANSIENT, PlatformErrorKind.UNKNOWN}
    assert PlatformError(kind, "x").permanent is (kind not in passing)
    assert PlatformError(kind, "x", permanent=True).permanent


def test_kinds_are_the_senders_vocabulary() -> None:
    """The words of GW-5, and `unauthorized` for a credential that is refused."""
    words = "too_long bad_format forbidden not_found rate_limited transient unauthorized unknown"
    assert {kind.value for kind in PlatformErrorKind} == set(words.split())


def test_redaction_hides_itself() -> None:
    """Secrets are replaced, an empty secret changes nothing, and the redaction does not show what it hides."""
    redaction = Redaction(("s3cret", ""))
    assert redaction("a s3cret b") == "a *** b"
    assert "s3cret" not in repr(redaction)


@pytest.mark.parametrize("client", [TelegramClient, DiscordClient, SlackClient])
@pytest.mark.parametrize("token", ["", "line-break\n", "two words", "ünicode"])
def test_impossible_tokens_are_refused_unseen(client: type, token: str) -> None:
    """A token that no platform gives out is refused at once, without quoting it."""
    with pytest.raises(PlatformError) as caught:
        client("http://127.0.0.1:1", token)
    assert (caught.value.kind, caught.value.permanent) == (PlatformErrorKind.UNAUTHORIZED, True)
    assert not token or token.strip() not in str(caught.value)


@pytest.mark.parametrize("url", ["api.example.org", "ftp://example.org", "http://"])
def test_base_url_must_be_absolute(url: str) -> None:
    """A base URL without a scheme or host is refused with what would be right."""
    with pytest.raises(ValueError, match="absolute http"):
        TelegramClient(url, "1:token")


async def test_single_failure_unwraps_one_cause_only() -> None:
    """One cause leaves a nursery as itself; several stay together, so that none is lost."""

    async def fail(error: Exception) -> None:
        raise error

    async def run(*errors: Exception) -> None:
        with single_failure():
            async with trio.open_nursery() as outer, trio.open_nursery() as inner:
                for nursery, error in zip((outer, inner), errors, strict=False):
                    nursery.start_soon(fail, error)

    with pytest.raises(KeyError):
        await run(KeyError("a"))
    with pytest.raises(ExceptionGroup):
        await run(KeyError("a"), ValueError("b"))


async def test_single_failure_lets_cancellation_through() -> None:
    """Cancelling from outside is not turned into an error."""
    with trio.move_on_after(0) as scope, single_failure():
        async with trio.open_nursery() as nursery:
            nursery.start_soon(trio.sleep_forever)
    assert scope.cancelled_caught
