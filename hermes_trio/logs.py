"""Logging: text lines on a terminal, JSON lines otherwise, each with its session, turn and run. Secrets are redacted.

The package logs through the standard library; `configure_logging` installs one handler on its root logger, once per process. A program that embeds
the runtime omits it and keeps its own logging. Fields of an entry are given in `extra`: `log.warning("…", extra={"error": text})`.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Iterable, MutableMapping
from typing import IO, Any, Final

import msgspec

from hermes_trio.base.redaction import Redactor, shown
from hermes_trio.runtime.context import current_binding

_NOT_FIELDS: Final = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}
"""The attributes of every log record. All others are fields that the caller gave."""
_OWN: Final = frozenset({"event", "timestamp", "level", "logger", "exception", "stack"})
"""The fields that this module adds. A caller's field of the same name gets an underscore as suffix."""
_COLOURS: Final = {"debug": "2", "info": "32", "warning": "33", "error": "31", "critical": "1;31"}


def _message(record: logging.LogRecord) -> str:
    """Return the message of a record, also if its arguments do not fit its format."""
    try:
        return record.getMessage()
    except Exception:
        return f"{shown(record.msg)} (with arguments that do not fit: {shown(record.args)})"


def add_identity(entry: MutableMapping[str, Any]) -> None:
    """Add the session, turn, run or job of the current context to an entry."""
    binding = current_binding()
    if binding is None:
        return
    if binding.context.session_id:
        entry.setdefault("session", binding.context.session_id)
    turn = binding.turn
    if turn is not None:
        entry.setdefault("turn", turn.id)
        if turn.root.id.startswith("run_"):
            entry.setdefault("run", turn.root.id)
    node = binding.node
    while node is not None and node.parent is not None:
        if node.parent.kind == "session":
            entry.setdefault("job", node.id)
        node = node.parent


class EntryFormatter(logging.Formatter):
    """Formats a record with all of its fields: as one line of JSON, or as text."""

    def __init__(self, redactor: Redactor, *, text: bool, colours: bool = False) -> None:
        super().__init__()
        self._redactor = redactor
        self._text = text
        self._colours = colours

    def entry(self, record: logging.LogRecord) -> dict[str, Any]:
        """Return the fields of a record, redacted."""
        whole, milliseconds = time.gmtime(record.created), int(record.created % 1 * 1000)
        entry: dict[str, Any] = {
            "event": _message(record),
            "timestamp": f"{time.strftime('%Y-%m-%dT%H:%M:%S', whole)}.{milliseconds:03}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
        }
        for name, value in vars(record).items():
            if name not in _NOT_FIELDS:
                field = shown(name)
                entry[f"{field}_" if field in _OWN else field] = value
        add_identity(entry)
        if record.exc_info and record.exc_info[0] is not None:
            entry["exception"] = self.formatException(record.exc_info)
        elif record.exc_text:
            entry["exception"] = record.exc_text
        if record.stack_info:
            entry["stack"] = self.formatStack(record.stack_info)
        self._redactor.clean_entry(entry)
        return entry

    def format(self, record: logging.LogRecord) -> str:
        """Return the text of one record, without a final newline."""
        entry = self.entry(record)
        if not self._text:
            return msgspec.json.encode(entry).decode()
        event, stamp, level, name = (entry.pop(key) for key in ("event", "timestamp", "level", "logger"))
        below = [entry.pop(key) for key in ("exception", "stack") if key in entry]
        shown = f"\x1b[{_COLOURS.get(level, '0')}m{level:<8}\x1b[0m" if self._colours else f"{level:<8}"
        fields = "".join(f" {key}={value}" for key, value in entry.items())
        return "\n".join([f"{stamp} {shown} {event} [{name}]{fields}", *below])


def configure_logging(
    *, level: str = "info", format: str = "auto", secrets: Iterable[str] = (), stream: IO[str] | None = None
) -> None:
    """Send the package's logs, and warnings of other packages, to `stream` (default: stderr). A second call replaces the first."""
    out = sys.stderr if stream is None else stream
    terminal = out is not None and out.isatty()  # None if the descriptor was closed before the start
    handler = logging.StreamHandler(out)
    handler.setFormatter(
        EntryFormatter(Redactor(secrets), text=format == "text" or (format == "auto" and terminal), colours=terminal)
    )
    handler.set_name("hermes_trio")
    root = logging.getLogger()
    for old in list(root.handlers):
        if old.get_name() == "hermes_trio":
            root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(logging.WARNING)
    logging.getLogger("hermes_trio").setLevel(level.upper())
