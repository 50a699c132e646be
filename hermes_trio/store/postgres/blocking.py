"""A blocking connection for command-line tools: it implements `Database`, the protocol of the store's verbs, without a loop."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final, NoReturn

import psycopg
from psycopg import pq
from psycopg.adapt import Transformer
from psycopg.conninfo import make_conninfo

from hermes_trio.store.errors import StoreUnavailable

from .address import parse_address
from .database import encode, translated
from .errors import SqlError, translate_sql, without_secrets
from .link import DEFAULTS, Row
from .schema import SCHEMA, check_found

CONNECT_SECONDS: Final = "10"
BULK_MILLISECONDS: Final = "300000"

PIECE: Final = 262_144
"""The bytes after which the rows of a COPY are sent. A longer row is a piece of its own."""

_ESCAPES: Final = str.maketrans({"\\": r"\\", "\t": r"\t", "\n": r"\n", "\r": r"\r", "\0": "\ufffd"})


def _field(value: object, of_bytes: bool) -> bytes:
    """Return a value in the text form of COPY, for a column of bytes or another one."""
    if value is None:
        return rb"\N"
    if of_bytes:
        return rb"\\x" + (encode(value) or b"").hex().encode()
    if isinstance(value, bytes):
        value = value.decode("utf-8", "replace")
    if isinstance(value, str):
        return value.translate(_ESCAPES).encode("utf-8", "replace")
    return encode(value) or b""


class _Rows:
    """The rows of a statement."""

    def __init__(self, result: Any) -> None:
        self._result = result

    def fetchall(self) -> list[Row]:
        """Return all rows."""
        if not self._result.ntuples:
            return []
        transformer = Transformer()
        transformer.set_pgresult(self._result)
        return list(transformer.load_rows(0, self._result.ntuples, tuple))


class BlockingDatabase:
    """A connection to one database. Errors are the store's."""

    def __init__(self, connection: Any, where: str) -> None:
        self._connection = connection
        self._prepared: dict[str, bytes] = {}
        self._changed = 0
        self.where = where
        self.signals: list[tuple[str, str]] = []

    @property
    def in_transaction(self) -> bool:
        """Return whether a transaction is open."""
        return self._connection.transaction_status != pq.TransactionStatus.IDLE

    def execute(self, statements: str, bindings: Any = None, /) -> _Rows:
        """Run a statement."""
        sql = translated(statements).replace("BEGIN IMMEDIATE", "BEGIN")
        values: Sequence[object] = () if bindings is None else bindings
        if sql not in self._prepared:
            name = self._prepared[sql] = b"s%d" % len(self._prepared)
            self._checked(self._connection.prepare(name, sql.encode()))
        result = self._connection.exec_prepared(
            self._prepared[sql],
            [encode(value) for value in values],
            [1 if isinstance(value, bytes) else 0 for value in values],
        )
        self._changed = int(self._checked(result).command_tuples or 0)
        return _Rows(result)

    def _checked(self, result: Any) -> Any:
        if result.status in (pq.ExecStatus.COMMAND_OK, pq.ExecStatus.TUPLES_OK):
            return result
        if self._connection.status == pq.ConnStatus.BAD:
            raise StoreUnavailable(f"the connection to the database {self.where} broke")
        raise translate_sql(SqlError.of(result), self.where)

    def executemany(self, statements: str, bindings: Iterable[Sequence[object]], /) -> _Rows:
        """Run a statement once for each set of bindings."""
        done = self.execute("SELECT 1")
        for given in bindings:
            done = self.execute(statements, given)
        return done

    def stream(self, sql: str) -> Iterator[Row]:
        """Iterate over the rows of a statement without parameters as they arrive, one in memory at a time. Read them all before the next statement."""
        transformer = Transformer()
        with self._connected():
            self._connection.send_query_params(sql.encode(), None)
            self._connection.set_single_row_mode()
            while (result := self._connection.get_result()) is not None:
                if result.status == pq.ExecStatus.SINGLE_TUPLE:
                    transformer.set_pgresult(result)
                    yield transformer.load_rows(0, 1, tuple)[0]
                else:
                    self._checked(result)

    def copy_in(self, table: str, columns: Mapping[str, bool], rows: Iterable[Sequence[object]]) -> None:
        """Insert rows with one COPY. `columns` says which columns are of bytes. After an error, nothing of them is inserted."""
        of_bytes = tuple(columns.values())
        with self._connected():
            begun = self._connection.exec_(f"COPY {table} ({', '.join(columns)}) FROM STDIN".encode())
            if begun.status != pq.ExecStatus.COPY_IN:
                self._checked(begun)
            piece = bytearray()
            for row in rows:
                piece += b"\t".join(map(_field, row, of_bytes)) + b"\n"
                if len(piece) >= PIECE:
                    self._connection.put_copy_data(bytes(piece))
                    piece.clear()
            self._connection.put_copy_data(bytes(piece))
            self._connection.put_copy_end()
            while (result := self._connection.get_result()) is not None:
                self._checked(result)

    @contextmanager
    def _connected(self) -> Iterator[None]:
        try:
            yield
        except psycopg.Error:
            raise StoreUnavailable(f"the connection to the database {self.where} broke") from None

    def changes(self) -> int:
        """Return how many rows the last statement changed."""
        return self._changed

    def pragma(self, name: str, value: Any = None, /) -> NoReturn:
        """Raise: PostgreSQL has no pragmas."""
        raise NotImplementedError(f"pragma {name}")

    def set_busy_timeout(self, milliseconds: int, /) -> None:
        """Do nothing: the session's own time-outs apply."""

    def interrupt(self) -> None:
        """Do nothing: a command is ended by its signal."""

    def close(self) -> None:
        """Close the connection; an open transaction is rolled back."""
        self._connection.finish()


@contextmanager
def connect_blocking(url: str, *, any_schema: bool = False, bulk: bool = False) -> Iterator[BlockingDatabase]:
    """Connect for the body of the `with`. Raises `StoreUnavailable`, and what a server raises at its start for a schema that does not fit.

    With `bulk`, a server may leave what it was sent for minutes: it writes the rows of a COPY before it takes more of them.
    """
    options, where = parse_address(url)
    defaults = {**DEFAULTS, **({"tcp_user_timeout": BULK_MILLISECONDS} if bulk else {})}
    try:
        text = make_conninfo("", **{**defaults, "connect_timeout": CONNECT_SECONDS, **options})
        connection: Any = pq.PGconn.connect(text.encode())
    except psycopg.Error as error:
        raise StoreUnavailable(f"the database {where} cannot be reached: {without_secrets(str(error))}") from None
    db = BlockingDatabase(connection, where)
    try:
        if connection.status != pq.ConnStatus.OK:
            told = without_secrets(connection.error_message.decode("utf-8", "replace")).strip()
            raise StoreUnavailable(f"the database {where} cannot be reached: {told}")
        db.execute("SELECT set_config('search_path', ?, false)", (SCHEMA,))
        if not any_schema:
            check_found(_version(db), where)
        yield db
    finally:
        db.close()


def _version(db: BlockingDatabase) -> int:
    if not db.execute("SELECT 1 WHERE to_regclass('hermes_trio.schema_version') IS NOT NULL").fetchall():
        return 0
    return int(db.execute("SELECT coalesce(max(version), 0) FROM schema_version").fetchall()[0][0])
