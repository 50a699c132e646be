"""One PostgreSQL connection for many Trio tasks, in libpq's pipeline mode, without threads.

Statements are sent without waiting; a segment of them ends with a Sync, and segments are answered in the order in which they were sent. Cancelling
a task abandons its wait, never the segment: its answers are read and dropped, so the connection stays in sync. When the connection
breaks, everything that was sent raises `LinkBroken`.
"""

from __future__ import annotations

import ipaddress
import os
import socket
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any, Final

import psycopg
import trio
from psycopg import pq
from psycopg.adapt import Transformer
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from hermes_trio.store.errors import StoreUnavailable

from .errors import LinkBroken, SqlError, without_secrets

CONNECT_SECONDS: Final = 10.0

DEFAULTS: Final = {
    "application_name": "hermes-trio",
    "client_encoding": "UTF8",
    "keepalives": "1",
    "keepalives_idle": "10",
    "keepalives_interval": "3",
    "keepalives_count": "3",
    "tcp_user_timeout": "15000",
}
"""A partition is noticed only with keepalives and a bound for what was sent and not acknowledged."""

_SYNC: Final = pq.ExecStatus.PIPELINE_SYNC
_ABORTED: Final = pq.ExecStatus.PIPELINE_ABORTED
_FAILED: Final = pq.ExecStatus.FATAL_ERROR

Row = tuple[Any, ...]


class StatementAnswer:
    """The answer to a statement, available when its segment is over."""

    __slots__ = ("_result", "prepares", "segment")

    def __init__(self, segment: Segment, prepares: str = "") -> None:
        self.segment: Segment = segment
        self.prepares: str = prepares
        """The statement that this one prepares, if it does."""
        self._result: Any = None

    def put(self, result: Any) -> None:
        """Keep the server's result."""
        self._result = result

    def rows(self) -> list[Row]:
        """Return the rows, decoded."""
        result = self._result
        if result is None or not result.ntuples:
            return []
        transformer = Transformer()
        transformer.set_pgresult(result)
        return list(transformer.load_rows(0, result.ntuples, tuple))

    def changed(self) -> int:
        """Return how many rows the statement changed or returned."""
        return 0 if self._result is None else int(self._result.command_tuples or 0)


class Segment:
    """Statements up to a Sync. Over when the Sync was answered; `error` is of the first failed statement, and later ones were skipped."""

    __slots__ = ("answers", "at", "error", "over", "task")

    def __init__(self) -> None:
        self.answers: list[StatementAnswer] = []
        self.at: int = 0
        self.error: Exception | None = None
        self.over: bool = False
        self.task: trio.lowlevel.Task | None = None


class PostgresLink:
    """An open connection. `open_link` makes one and reads from it."""

    def __init__(self, connection: Any, where: str) -> None:
        self._connection: Any = connection
        # libpq closes its descriptor when it finds the connection broken, even while a task waits for it: wait on our own.
        self._descriptor: int = os.dup(connection.socket)
        self._where: str = where
        self._open: Segment = Segment()
        self._sent: deque[Segment] = deque()
        self._prepared: dict[str, bytes] = {}
        self._names: int = 0
        self._full: trio.Event = trio.Event()
        self.heard_at: float = trio.current_time()
        """When the server sent something last, or the link was opened."""
        self._owed_since: float = 0.0
        self.broken: LinkBroken | None = None
        self.gone: trio.Event = trio.Event()
        self.on_notification: Callable[[str], None] | None = None
        """Called with the payload of every notification."""

    @property
    def backend(self) -> int:
        """Return the process id of the server's side, as the server reported it."""
        return int(self._connection.backend_pid)

    @property
    def version(self) -> int:
        """Return the server's version, as 150004 for 15.4."""
        return int(self._connection.server_version)

    @property
    def silent_seconds(self) -> float:
        """For how long the server owes an answer and has sent nothing. 0 if it owes none."""
        return trio.current_time() - max(self.heard_at, self._owed_since) if self._sent else 0.0

    def send(
        self, sql: str, parameters: Sequence[bytes | None] = (), formats: Sequence[int] | None = None
    ) -> StatementAnswer:
        """Send a statement in the open segment without waiting. Raises `LinkBroken` if the connection is known to be broken."""
        if self.broken is not None:
            raise LinkBroken(str(self.broken))
        segment = self._open
        try:
            name = self._prepared.get(sql)
            if name is None:
                self._names += 1
                name = self._prepared[sql] = b"s%d" % self._names
                self._connection.send_prepare(name, sql.encode())
                segment.answers.append(StatementAnswer(segment, sql))
            self._connection.send_query_prepared(name, parameters, formats)
        except psycopg.OperationalError as error:
            self.fail(error)
            raise LinkBroken(str(error)) from error
        answer = StatementAnswer(segment)
        segment.answers.append(answer)
        return answer

    def sync(self) -> Segment:
        """End the open segment and hand it to the kernel."""
        if self.broken is not None:
            raise LinkBroken(str(self.broken))
        segment, self._open = self._open, Segment()
        try:
            self._connection.pipeline_sync()
            if not self._sent:
                self._owed_since = trio.current_time()
            self._sent.append(segment)
            if self._connection.flush():
                self._full.set()
        except psycopg.OperationalError as error:
            self.fail(error)
        return segment

    async def over(self, segment: Segment) -> None:
        """Wait until a segment is over; raise its error. Cancelling abandons the wait, and the answers are dropped."""
        if not segment.over:
            if self.broken is not None:
                raise LinkBroken(str(self.broken))
            segment.task = trio.lowlevel.current_task()

            def abandon(_: trio.lowlevel.RaiseCancelT) -> trio.lowlevel.Abort:
                segment.task = None
                return trio.lowlevel.Abort.SUCCEEDED

            await trio.lowlevel.wait_task_rescheduled(abandon)
        if segment.error is not None:
            raise segment.error

    async def run(self, sql: str, parameters: Sequence[bytes | None] = ()) -> list[Row]:
        """Run one statement in a segment of its own; return its rows."""
        answer = self.send(sql, parameters)
        await self.over(self.sync())
        return answer.rows()

    def fail(self, error: BaseException) -> None:
        """Mark the connection as broken: every waiting caller gets `LinkBroken`, once."""
        if self.broken is not None:
            return
        self.broken = LinkBroken(without_secrets(str(error)).strip() or type(error).__name__)
        self.gone.set()
        waiting, self._sent = [*self._sent, self._open], deque()
        for segment in waiting:
            segment.error = LinkBroken(str(self.broken))
            self._settle(segment)
        trio.lowlevel.notify_closing(self._descriptor)
        os.close(self._descriptor)
        self._connection.finish()

    def _settle(self, segment: Segment) -> None:
        segment.over = True
        if segment.task is not None:
            task, segment.task = segment.task, None
            trio.lowlevel.reschedule(task)

    async def read(self) -> None:
        """Read answers until the connection breaks or the task is cancelled; then it is closed."""
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._flush)
                try:
                    await self._read()
                except (psycopg.Error, OSError, trio.ClosedResourceError) as error:
                    self.fail(error)
                nursery.cancel_scope.cancel()
        finally:
            self.fail(psycopg.OperationalError("the connection was closed"))

    async def _flush(self) -> None:
        """Send the data that the socket did not accept at once."""
        with suppress(psycopg.Error, OSError, trio.ClosedResourceError):
            while True:
                await self._full.wait()
                self._full = trio.Event()
                while self.broken is None and self._connection.flush():
                    await trio.lowlevel.wait_writable(self._descriptor)

    async def _read(self) -> None:
        connection = self._connection
        while True:
            await trio.lowlevel.wait_readable(self._descriptor)
            connection.consume_input()
            self.heard_at = trio.current_time()
            while self._sent and not connection.is_busy():
                result = connection.get_result()
                if result is not None:
                    self._take(self._sent[0], result)
                    if self.broken is not None:
                        return
            while (notification := connection.notifies()) is not None:
                if self.on_notification is not None:
                    self.on_notification(notification.extra.decode("utf-8", "replace"))

    def _take(self, segment: Segment, result: Any) -> None:
        status = result.status
        if status == _SYNC:
            self._sent.popleft()
            self._settle(segment)
            return
        if segment.at == len(segment.answers):
            # An error instead of the answer to the Sync: the server is ending this connection.
            self.fail(
                SqlError.of(result)
                if status == _FAILED
                else psycopg.OperationalError("the server's answers do not match the requests")
            )
            return
        answer = segment.answers[segment.at]
        segment.at += 1
        if status == _FAILED:
            error = SqlError.of(result)
            if error.fatal:
                self.fail(error)
                return
            segment.error = segment.error or error
            self._forget(answer)
        elif status == _ABORTED:
            self._forget(answer)
        else:
            answer.put(result)

    def _forget(self, answer: StatementAnswer) -> None:
        """Forget a preparation that was skipped after a failure: the next use prepares it again, under a new name."""
        if answer.prepares:
            self._prepared.pop(answer.prepares, None)


async def _addresses(options: dict[str, Any]) -> list[dict[str, Any]]:
    """Return one set of options for each address to try. Names are resolved here, because libpq would block."""
    hosts = str(options.get("host") or "").split(",")
    ports = str(options.get("port") or "").split(",")
    if options.get("hostaddr") or not options.get("host"):
        return [options]
    attempts: list[dict[str, Any]] = []
    for place, host in enumerate(hosts):
        port = ports[place] if len(ports) > 1 else ports[0]
        one = {**options, "host": host, **({"port": port} if port else {})}
        if host.startswith(("/", "@")) or _is_address(host):
            attempts.append(one)
            continue
        try:
            found = await trio.socket.getaddrinfo(host, int(port or 5432), type=socket.SOCK_STREAM)
        except OSError as error:
            if place == len(hosts) - 1 and not attempts:
                raise StoreUnavailable(f"the database's host {host!r} cannot be found: {error.strerror}") from error
            continue
        attempts += [{**one, "hostaddr": entry[4][0]} for entry in found]
    return attempts


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


async def _connect(options: dict[str, Any]) -> Any:
    connection = pq.PGconn.connect_start(make_conninfo(**options).encode())
    try:
        while True:
            if connection.status == pq.ConnStatus.BAD:
                raise psycopg.OperationalError(connection.error_message.decode("utf-8", "replace"))
            match connection.connect_poll():
                case pq.PollingStatus.OK:
                    break
                case pq.PollingStatus.READING:
                    await trio.lowlevel.wait_readable(connection.socket)
                case pq.PollingStatus.WRITING:
                    await trio.lowlevel.wait_writable(connection.socket)
                case _:
                    raise psycopg.OperationalError(connection.error_message.decode("utf-8", "replace"))
        connection.nonblocking = 1
        connection.enter_pipeline_mode()
    except BaseException:
        connection.finish()
        raise
    return connection


async def _connect_any(url: str, where: str) -> Any:
    options: dict[str, Any] = {**DEFAULTS, **conninfo_to_dict(url)}
    problem: Exception | None = None
    for attempt in await _addresses(options):
        try:
            with trio.fail_after(CONNECT_SECONDS):
                return await _connect(attempt)
        except trio.TooSlowError:
            problem = psycopg.OperationalError(f"no answer within {CONNECT_SECONDS:g} s")
        except psycopg.OperationalError as error:
            problem = error
    told = without_secrets(str(problem)).strip()
    raise StoreUnavailable(unreachable(where) + told) from None


def unreachable(where: str) -> str:
    """Return the beginning of every error that says why a database cannot be reached."""
    return f"the database {where} cannot be reached: "


@asynccontextmanager
async def open_link(url: str, where: str) -> AsyncIterator[PostgresLink]:
    """Connect for the body of the `async with`; raises `StoreUnavailable`. `where` names the database in errors, without its password.

    When the connection breaks, the calls in the body raise `LinkBroken`; the body is not cancelled.
    """
    link = PostgresLink(await _connect_any(url, where), where)
    failure: Exception | None = None
    async with trio.open_nursery() as nursery:
        nursery.start_soon(link.read, name="store link")
        try:
            yield link
        except Exception as error:
            failure = error
        nursery.cancel_scope.cancel()
    if failure is not None:
        raise failure
