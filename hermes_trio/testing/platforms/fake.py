"""The common part of the fake platforms: the calls received, faults for the next ones, and the messages that the bot sent.

The fake of a platform is a `FakePlatform` with the actions of its users and its API. Its `open_fake_…` attaches the server and ends it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar, Generic, TypeVar

import attrs

from .call_handler import FakeCallHandler
from .faults import Fault, RateLimited
from .ledger import CallLedger, RecordedCall
from .server import FakeReply, LoopbackServer


@attrs.define
class SentMessage:
    """A message that the bot sent, as people see it now. `versions` are its texts, oldest first; a wait returns each message once (`claimed`)."""

    versions: list[str] = attrs.field(factory=list[str], kw_only=True)
    deleted: bool = attrs.field(default=False, kw_only=True)
    claimed: bool = attrs.field(default=False, repr=False, kw_only=True)


M = TypeVar("M", bound=SentMessage)


class FakePlatform(Generic[M]):
    """The control surface that the fakes share. Names of methods are the documented ones of the platform.

    `rate_limited` writes the platform's own 429 answer; `error_of` reads the platform's error text from an answer.
    """

    api_path: ClassVar[str] = ""
    """The path of the API below the address of the server."""

    def __init__(
        self,
        token: str,
        *,
        rate_limited: Callable[[RateLimited], FakeReply],
        error_of: Callable[[FakeReply], str | None],
    ) -> None:
        self.token = token
        self.handler = FakeCallHandler(rate_limited=rate_limited, error_of=error_of)
        self.messages: CallLedger[M] = CallLedger("message")
        self._server: LoopbackServer | None = None

    @property
    def base_url(self) -> str:
        """Return the address to configure in a client instead of the platform's own."""
        return f"{self.server.url}{self.api_path}"

    @property
    def server(self) -> LoopbackServer:
        """Return the server of the fake, after `attach`."""
        assert self._server is not None, "this fake has no server; it is made by its open_fake_… function"
        return self._server

    @property
    def calls(self) -> CallLedger[RecordedCall]:
        """Return every call of the API with its answer, in order."""
        return self.handler.calls

    async def wait_for_call(
        self,
        method: str,
        matches: Callable[[RecordedCall], bool] | None = None,
        *,
        count: int = 1,
        timeout: float | None = None,
    ) -> RecordedCall:
        """Wait for the `count`th call of a method and return it. Raises `NothingArrived` after `timeout` seconds."""
        return await self.handler.wait_for_call(method, matches, count, timeout)

    def fail(self, method: str, fault: Fault, *, times: int = 1) -> None:
        """Script a fault for the next calls of a method, or of `ANY`."""
        self.handler.faults.add(method, fault, times)

    def attach(self, server: LoopbackServer) -> None:
        """Set the server, once its port is known. Called by `open_fake_…`."""
        self._server = server

    async def _claim(self, fits: Callable[[M], bool], *, wanted: str, timeout: float) -> M:
        """Return the oldest fitting message that no earlier wait has returned. `fits` gets the current state, with edits."""

        def is_it(message: M) -> bool:
            return not message.claimed and not message.deleted and fits(message)

        message = await self.messages.first(is_it, wanted=wanted, timeout=timeout)
        message.claimed = True
        return message
