"""What an HTTP/2 connection may send: frames that carry neither a request nor a body have an allowance, and a body whose request was answered is dropped."""

from __future__ import annotations

import time
from typing import Final, final

from h2.errors import ErrorCodes
from h2.events import DataReceived, StreamEnded, StreamReset
from h2.events import Event as H2Event
from h2.exceptions import DenialOfServiceError
from h2.frame_buffer import FrameBuffer
from hypercorn.events import Event, RawData
from hypercorn.protocol.events import EndBody
from hypercorn.protocol.events import Event as StreamEvent
from hypercorn.protocol.h2 import H2Protocol
from hyperframe.frame import DataFrame, Frame, HeadersFrame, PriorityFrame, RstStreamFrame

LATE_BYTES: Final = 1024 * 1024
"""How much of a body is dropped after the answer before its stream is reset: a client that has sent all of it reads the answer undisturbed."""


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


def drop_late_bodies() -> None:
    """Let every HTTP/2 connection of this process drop the body of a request that was answered before it had arrived. Calling it again changes nothing.

    The length of such a body is not compared with the announced one: a client that reads a refusal may stop sending, and h2 would end the connection, with all
    other requests on it.
    """
    stock = H2Protocol._handle_events  # pyright: ignore[reportPrivateUsage]
    stock_send = H2Protocol.stream_send

    async def stream_send(self: H2Protocol, event: StreamEvent) -> None:
        if isinstance(event, EndBody):
            stream = self.connection.streams.get(event.stream_id)
            if stream is not None:
                stream._expected_content_length = None  # pyright: ignore[reportPrivateUsage]
        await stock_send(self, event)

    async def handle_events(self: H2Protocol, events: list[H2Event]) -> None:
        late: dict[int, int] = self.__dict__.setdefault("late_bodies", {})
        for event in events:
            if not isinstance(event, DataReceived) or event.stream_id in self.streams:
                if isinstance(event, StreamEnded | StreamReset):
                    late.pop(event.stream_id, None)
                await stock(self, [event])
                continue
            self.connection.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
            late[event.stream_id] = late.get(event.stream_id, 0) + event.flow_controlled_length
            if late[event.stream_id] > LATE_BYTES:
                del late[event.stream_id]
                self.connection.reset_stream(event.stream_id, error_code=ErrorCodes.NO_ERROR)
        await self._flush()  # pyright: ignore[reportPrivateUsage]

    if not getattr(stock, "drops_late_bodies", False):
        handle_events.drops_late_bodies = True  # type: ignore[attr-defined]
        H2Protocol._handle_events = handle_events  # pyright: ignore[reportPrivateUsage]
        H2Protocol.stream_send = stream_send


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
