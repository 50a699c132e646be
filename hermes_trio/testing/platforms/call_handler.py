"""Handles a call of a fake platform: applies the scripted fault, carries the call out, and records it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, final

import trio

from .faults import Delay, Drop, FaultScript, RateLimited, ServerError
from .ledger import WAIT_SECONDS, CallLedger, RecordedCall
from .server import ConnectionDropped, FakeReply


@final
class FakeCallHandler:
    """The record of calls and the script of faults of one fake.

    `rate_limited` writes the platform's own 429 answer; `error_of` reads the platform's error text from an answer.
    """

    def __init__(
        self, *, rate_limited: Callable[[RateLimited], FakeReply], error_of: Callable[[FakeReply], str | None]
    ) -> None:
        self.calls: CallLedger[RecordedCall] = CallLedger("call")
        self.faults = FaultScript()
        self._rate_limited = rate_limited
        self._error_of = error_of

    async def handle(
        self, method: str, params: Mapping[str, Any], act: Callable[[], Awaitable[FakeReply]]
    ) -> FakeReply:
        """Answer one call, or raise `ConnectionDropped` where the script says so."""
        fault = self.faults.take(method)
        match fault:
            case RateLimited():
                refusal = self._rate_limited(fault)
                self._record(method, params, refusal.status, self._error_of(refusal))
                return refusal
            case ServerError():
                page = b"<html><body>upstream failure</body></html>"
                self._record(method, params, fault.status, "upstream failure")
                return FakeReply(fault.status, page, {"content-type": "text/html"})
            case Drop(before=True):
                self._record(method, params, 0, "connection dropped")
                raise ConnectionDropped
            case Delay():
                await trio.sleep(fault.seconds)
            case _:
                pass
        reply = await act()
        if isinstance(fault, Drop):
            self._record(method, params, 0, "connection dropped after the call was carried out")
            raise ConnectionDropped
        self._record(method, params, reply.status, self._error_of(reply))
        return reply

    async def wait_for_call(
        self, method: str, matches: Callable[[RecordedCall], bool] | None, count: int, timeout: float | None
    ) -> RecordedCall:
        """Return the `count`th call of a method that matches."""

        def fits(call: RecordedCall) -> bool:
            return call.method == method and (matches is None or matches(call))

        seconds = WAIT_SECONDS if timeout is None else timeout
        return await self.calls.nth(count, fits, wanted=f"of {method}", timeout=seconds)

    def _record(self, method: str, params: Mapping[str, Any], status: int, error: str | None) -> None:
        self.calls.append(RecordedCall(len(self.calls), method, dict(params), status, error, trio.current_time()))
