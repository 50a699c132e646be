"""What becomes of odd log records: each is one entry, none is lost, none raises, and no field passes for another."""

from __future__ import annotations

import io
import json
import logging
import math
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from hermes_trio.base.redaction import Redactor
from hermes_trio.logs import EntryFormatter, configure_logging

SECRET = "a-secret-of-the-owner"


class Unshowable:
    """A value whose `repr` and `str` raise."""

    def __repr__(self) -> str:
        raise RuntimeError("no")


class Whole(int):
    """A number of a kind of its own."""


@pytest.fixture(params=[True, False], ids=["text", "json"])
def formatter(request: pytest.FixtureRequest) -> EntryFormatter:
    """Both ways to write an entry."""
    return EntryFormatter(Redactor([SECRET]), text=request.param)


def record(
    message: object = "said", *args: object, extra: dict[Any, Any] | None = None, **more: Any
) -> logging.LogRecord:
    """A record as a logger makes it."""
    made = logging.LogRecord("hermes_trio.test", logging.WARNING, "f.py", 1, message, args, None)
    vars(made).update(extra or {})
    vars(made).update(more)
    return made


def entry_of(made: logging.LogRecord) -> dict[str, Any]:
    """What a JSON line says."""
    line = EntryFormatter(Redactor([SECRET]), text=False).format(made)
    assert "\n" not in line
    return json.loads(line)


@pytest.mark.parametrize(
    "value",
    [
        b"\xff\0",
        "half a pair \ud800",
        math.nan,
        math.inf,
        2**80,
        Whole(3),
        Unshowable(),
        [Unshowable()],
        {"a": {1, 2}},
        object(),
        None,
        "x" * 1_000_000,
        ValueError("no"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_field_may_be_anything(formatter: EntryFormatter, value: object) -> None:
    """Whatever it is, the entry is written, can be encoded, and is not longer than people read."""
    line = formatter.format(record(extra={"field": value, "exception": value, "stack": value}))
    assert "said" in line
    assert len(line.encode()) < 20_000


@pytest.mark.parametrize("name", [7, None, ("a", "b"), "\udcff", "Token"])
def test_a_field_may_be_called_anything(formatter: EntryFormatter, name: object) -> None:
    """Names that are no texts do not cost the entry."""
    assert "said" in formatter.format(record(extra={name: "v"}))


def test_a_message_whose_arguments_do_not_fit(formatter: EntryFormatter) -> None:
    """It is written with what it was given, without secrets."""
    line = formatter.format(record("%d of %s", SECRET))
    assert "%d of %s" in line
    assert SECRET not in line
    assert "cannot be shown" in formatter.format(record(Unshowable()))
    assert "cannot be shown" in formatter.format(record("%s", Unshowable()))


def test_a_field_does_not_pass_for_what_the_log_says_itself() -> None:
    """The text, the level, the time and the name of an entry are the record's; the fields are there beside them."""
    names = ("event", "timestamp", "level", "logger", "exception", "stack")
    found = entry_of(record(extra=dict.fromkeys(names, "forged")))
    assert (found["event"], found["level"], found["logger"]) == ("said", "warning", "hermes_trio.test")
    assert {name: found[f"{name}_"] for name in names} == dict.fromkeys(names, "forged")
    assert "exception" not in found


def test_an_error_and_a_stack_are_below_the_entry(formatter: EntryFormatter) -> None:
    """Tracebacks are shown, also one that was rendered elsewhere, and cleaned line by line."""
    try:
        raise LookupError(f"with {SECRET}")
    except LookupError:
        line = formatter.format(record(exc_info=sys.exc_info(), stack_info="Stack:\n  here"))
    assert "LookupError: with [hidden]" in line
    assert "here" in line
    assert "made before" in formatter.format(record(exc_text="Traceback: made before"))
    assert "said" in formatter.format(record(exc_info=(None, None, None)))


@pytest.fixture
def root() -> Iterator[logging.Logger]:
    """The root logger, as it was afterwards."""
    root, ours = logging.getLogger(), logging.getLogger("hermes_trio")
    before = (list(root.handlers), root.level, ours.level)
    yield root
    root.handlers[:] = before[0]
    root.setLevel(before[1])
    ours.setLevel(before[2])


def test_a_process_without_standard_error(root: logging.Logger, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server whose standard error is closed starts, and drops its log."""
    monkeypatch.setattr(sys, "stderr", None)
    configure_logging()
    root.error("unheard")


def test_odd_records_leave_one_line_each(root: logging.Logger) -> None:
    """Through the handler, too, nothing but entries is written."""
    stream = io.StringIO()
    configure_logging(format="json", stream=stream)
    (handler,) = [handler for handler in root.handlers if handler.get_name() == "hermes_trio"]
    handler.handle(record("a %s %s", "b"))
    handler.handle(record("name \udce4", extra={"level": 5, "value": Whole(2)}))
    lines = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert [line["level"] for line in lines] == ["warning", "warning"]
    assert lines[1]["event"] == "name \\udce4"
