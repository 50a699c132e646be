"""An allowance of HTTP/2 frames that carry neither a request nor a body, for each connection: whoever sends more is told to calm down, and closed."""

from __future__ import annotations

import time
from typing import Final, final

from h2.exceptions import DenialOfServiceError
from h2.frame_buffer import FrameBuffer
from hypercorn.events import Event, RawData
from hypercorn.protocol.h2 import H2Protocol
from hyperframe.frame import DataFrame, Frame, HeadersFrame, PriorityFrame, RstStreamFrame

__all__ = ["CountedFrames", "bound_frames"]


@final
class CountedFrames(FrameBuffer):
    """The frames of one HTTP/2 connection, as h2 takes them from it. Raises `DenialOfServiceError` for too many that carry no request and no body."""

    BURST: Final = 1000.0
    PER_SECOND: Final = 100.0
    PER_SEND: Final = 4.0
    """What one write to the client adds: readers answer it with windows for the stream and for the connection."""
    SMALL: Final = 128
    """Bytes of a DATA frame below which it costs as much as an empty one."""
    COSTS: Final[dict[type[Frame], float]] = {HeadersFrame: 0.0, RstStreamFrame: 2.0, PriorityFrame: 5.0}
    """Of the kinds that do not cost 1: the head of a request has a limit of its own, a reset undoes work, and a priority is remembered."""

    def __init__(self) -> None:
        super().__init__(server=True)
        self._left = self.BURST
        self._counted_at = time.monotonic()

    def earn(self) -> None:
        """Something was sent to the client."""
        self._left = min(self.BURST, self._left + self.PER_SEND)

    def __next__(self) -> Frame:
        frame = super().__next__()
        if isinstance(frame, DataFrame) and len(frame.data) >= self.SMALL:
            return frame
        self._left -= self.COSTS.get(type(frame), 1.0)
        if self._left < 0:
            now = time.monotonic()
            self._left += min(self.BURST, (now - self._counted_at) * self.PER_SECOND)
            self._counted_at = now
            if self._left < 0:
                raise DenialOfServiceError("too many frames that carry nothing")
        return frame


def bound_frames() -> None:
    """Give every HTTP/2 connection of this process an allowance of frames. Calling it again changes nothing."""
    start = H2Protocol.initiate

    async def initiate(
        self: H2Protocol, headers: list[tuple[bytes, bytes]] | None = None, settings: bytes | None = None
    ) -> None:
        frames, send = CountedFrames(), self.send
        self.connection.incoming_buffer = frames

        async def counted_send(event: Event) -> None:
            if isinstance(event, RawData):
                frames.earn()
            await send(event)

        self.send = counted_send
        await start(self, headers, settings)

    if not getattr(start, "counts_frames", False):
        initiate.counts_frames = True  # type: ignore[attr-defined]
        H2Protocol.initiate = initiate
