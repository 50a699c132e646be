"""The server's ends of a command's standard streams, and the descriptors that are sent to the keeper.

`open_streams` makes both sides. The command's side is closed here as soon as sending it has succeeded or failed; the server's
side belongs to the process's owner, who reads the output and closes it.
"""

import contextlib
import errno
import os
import termios
from collections.abc import Generator

import msgspec
import trio

from hermes_trio.tools.warden.errors import StdinClosed
from hermes_trio.tools.warden.spec import ProcessSpec, Stdin

READ_SIZE = 65536


class OutputStream(trio.abc.ReceiveStream):
    """The bytes that a job writes. Its end means that no process holds the other end, not that the command has exited.

    One task reads at a time. Cancelling a read loses no bytes.
    """

    def __init__(self, stream: trio.lowlevel.FdStream) -> None:
        self._stream = stream

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        """Return the next bytes, or b"" at the end. Raises `trio.ClosedResourceError` after `aclose`. Cancelling loses no bytes."""
        try:
            return bytes(await self._stream.receive_some(max_bytes or READ_SIZE))
        except trio.BrokenResourceError as error:
            # A terminal that no process has open any more returns EIO instead of an end of file.
            if isinstance(error.__cause__, OSError) and error.__cause__.errno == errno.EIO:
                return b""
            raise

    async def aclose(self) -> None:
        """Close the server's end. A job that continues to write gets SIGPIPE, or SIGHUP on a terminal."""
        await self._stream.aclose()


class InputStream:
    """The writing side of the pipe or terminal that the command reads."""

    def __init__(self, stream: trio.lowlevel.FdStream, *, terminal: bool) -> None:
        self._stream = stream
        self._terminal = terminal
        self._closed = False
        self._mid_line = False
        self._turn = trio.Lock()

    async def write(self, data: bytes) -> None:
        """Write all data, not interleaved with other writes. Cancelling may leave a part of it written."""
        if self._closed:
            raise StdinClosed("standard input was closed before: nothing more can be written to it")
        if not data:
            return
        async with self._turn:
            try:
                await self._stream.send_all(data)
            except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
                raise StdinClosed("the process no longer reads its standard input") from error
            self._mid_line = data[-1:] != b"\n"

    async def end(self) -> None:
        """Send an end of file to the command, as a character on a terminal. A second call does nothing."""
        if self._closed:
            return
        if not self._terminal:
            await self.aclose()
            return
        # On an unfinished line the first character only flushes the line.
        with contextlib.suppress(StdinClosed):
            await self.write(self._end_of_file() * (2 if self._mid_line else 1))
        self._closed = True

    async def aclose(self) -> None:
        """Close the descriptor, which on a terminal is the output's too."""
        self._closed = True
        await self._stream.aclose()

    def _end_of_file(self) -> bytes:
        characters: list[bytes] = termios.tcgetattr(self._stream.fileno())[6]
        return bytes(characters[termios.VEOF])


class OwnStreams(msgspec.Struct):
    """The server's side of the streams. Without a separate standard error, `errors` is None."""

    output: OutputStream
    errors: OutputStream | None = None
    stdin: InputStream | None = None

    async def aclose(self) -> None:
        """Close all streams, even if the caller is cancelled: closing descriptors does not block."""
        with trio.CancelScope(shield=True):
            await self.output.aclose()
            if self.errors is not None:
                await self.errors.aclose()
            if self.stdin is not None:
                await self.stdin.aclose()


@contextlib.contextmanager
def open_streams(spec: ProcessSpec) -> Generator[tuple[OwnStreams, list[int]]]:
    """Return the server's side, and the command's descriptors in the order of `wire.Streams`. The scope closes the latter."""
    with contextlib.ExitStack() as theirs, contextlib.ExitStack() as ours:

        def adopt(own: int, other: int) -> tuple[int, int]:
            ours.callback(os.close, own)
            theirs.callback(os.close, other)
            return own, other

        if spec.stdin is Stdin.PTY:
            master, slave = adopt(*os.openpty())
            termios.tcsetwinsize(master, (spec.rows, spec.cols))
            ours.pop_all()
            both = trio.lowlevel.FdStream(master)
            yield OwnStreams(OutputStream(both), stdin=InputStream(both, terminal=True)), [slave]
            return
        sent: list[int] = []
        stdin_own = stderr_own = None
        if spec.stdin is Stdin.PIPE:
            reader, writer = os.pipe()
            stdin_own, stdin_other = adopt(writer, reader)
            sent.append(stdin_other)
        output_own, output_other = adopt(*os.pipe())
        sent.append(output_other)
        if not spec.merge_stderr:
            stderr_own, stderr_other = adopt(*os.pipe())
            sent.append(stderr_other)
        ours.pop_all()
        yield (
            OwnStreams(
                output=OutputStream(trio.lowlevel.FdStream(output_own)),
                errors=OutputStream(trio.lowlevel.FdStream(stderr_own)) if stderr_own is not None else None,
                stdin=InputStream(trio.lowlevel.FdStream(stdin_own), terminal=False) if stdin_own is not None else None,
            ),
            sent,
        )
