"""Logs: readable lines on a terminal, JSON lines otherwise, each with the session, turn and run that it belongs to. No secret gets in.

The package logs through the standard library; `configure_logging` puts one handler on its root, once a process. Whoever embeds the runtime leaves it
out and keeps its own logging.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable, MutableMapping
from typing import IO, Any, Final

import structlog

from hermes_trio.agent.models.redaction import HIDDEN, redact
from hermes_trio.runtime.context import current_binding

__all__ = ["Redactor", "add_identity", "configure_logging"]

_SECRET_KEYS: Final = frozenset({"key", "api_key", "token", "password", "secret", "authorization"})
_SHORTEST: Final = 8
"""Shorter values are not taken out of texts: they would be found everywhere."""


class Redactor:
    """Takes the secrets that are known, and what looks like one, out of every text of a log entry."""

    def __init__(self, secrets: Iterable[str] = ()) -> None:
        self._secrets = sorted({secret for secret in secrets if len(secret) >= _SHORTEST}, key=len, reverse=True)

    def clean(self, text: str) -> str:
        """`text` without secrets."""
        for secret in self._secrets:
            text = text.replace(secret, HIDDEN)
        return redact(text)

    def __call__(self, logger: Any, name: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
        """As a step of structlog."""
        for key, value in event.items():
            if key.lower() in _SECRET_KEYS and value:
                event[key] = HIDDEN
            elif isinstance(value, str):
                # A stack trace is longer than an error text may be: each of its lines is cleaned.
                event[key] = (
                    "\n".join(self.clean(line) for line in value.split("\n")) if "\n" in value else self.clean(value)
                )
        return event


def add_identity(logger: Any, name: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """Say which session, turn, run or job an entry belongs to, from the context that it was logged in."""
    binding = current_binding()
    if binding is None:
        return event
    if binding.context.session_id:
        event.setdefault("session", binding.context.session_id)
    turn = binding.turn
    if turn is not None:
        event.setdefault("turn", turn.id)
        if turn.root.id.startswith("run_"):
            event.setdefault("run", turn.root.id)
    node = binding.node
    if node is not None and node.kind == "job":
        event.setdefault("job", node.id)
    return event


def configure_logging(
    *, level: str = "info", format: str = "auto", secrets: Iterable[str] = (), stream: IO[str] | None = None
) -> None:
    """Send the package's logs, and warnings of everybody else, to `stream` (stderr). Calling it again replaces what it did before."""
    out = sys.stderr if stream is None else stream
    text = format == "text" or (format == "auto" and out.isatty())
    shared: list[Any] = [
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        add_identity,
        structlog.processors.format_exc_info,
        Redactor(secrets),
    ]
    renderer: Any = (
        structlog.dev.ConsoleRenderer(colors=out.isatty(), exception_formatter=structlog.dev.plain_traceback)
        if text
        else structlog.processors.JSONRenderer()
    )
    handler = logging.StreamHandler(out)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, renderer],
        )
    )
    handler.set_name("hermes_trio")
    root = logging.getLogger()
    for old in list(root.handlers):
        if old.get_name() == "hermes_trio":
            root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(logging.WARNING)
    logging.getLogger("hermes_trio").setLevel(level.upper())
