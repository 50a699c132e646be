"""The table of error codes against the source: every code that the server can send is in it beside its status, and no other."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import attrs
import pytest

ROOT = Path(__file__).parents[2]
SOURCES = [*sorted((ROOT / "hermes_trio" / "http").rglob("*.py")), ROOT / "hermes_trio" / "asgi.py"]


@attrs.frozen
class Maker:
    """What makes an error when it is called: where the code is among its arguments, and its status if that is not the first of them."""

    name: str
    code_at: int | None = None
    status: int | None = None


ERRORS = (Maker("ApiError"), Maker("ProtocolFault", code_at=1))


def calls(tree: ast.AST, makers: Iterable[Maker]) -> Iterator[tuple[ast.Call, ast.expr, int | None]]:
    """The calls that give a code: the call, the code and the status."""
    known = {maker.name: maker for maker in makers}
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name) or node.func.id not in known:
            continue
        maker = known[node.func.id]
        given = [keyword.value for keyword in node.keywords if keyword.arg == "code"]
        if maker.code_at is not None:
            given += node.args[maker.code_at : maker.code_at + 1]
        status = maker.status
        if status is None and isinstance(first := node.args[0], ast.Constant) and isinstance(first.value, int):
            status = first.value
        for code in given:
            yield node, code, status


def passing_on(tree: ast.AST) -> Iterator[tuple[ast.Call, Maker]]:
    """Functions that take the code from their callers, each with the call in which they use it."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            names = [argument.arg for argument in node.args.args]
            for call, code, status in calls(node, ERRORS):
                if isinstance(code, ast.Name) and code.id in names:
                    yield call, Maker(node.name, names.index(code.id), status)


def sent(sources: Iterable[str]) -> set[tuple[int, str]]:
    """Every status and code in the sources. Both must be written out where they are given: else this could not see them."""
    trees = [ast.parse(source) for source in sources]
    passed = {call: maker for tree in trees for call, maker in passing_on(tree)}
    found: set[tuple[int, str]] = set()
    for tree in trees:
        for call, code, status in calls(tree, (*ERRORS, *passed.values())):
            if call in passed:
                continue
            match code:
                case ast.Constant(value=str(text)) if status is not None:
                    found.add((status, text))
                case ast.Constant(value=None):
                    pass
                case _:
                    raise AssertionError(f"write the status and the code out in: {ast.unparse(call)}")
    return found


def written() -> set[tuple[int, str]]:
    """Every status and code in the table; a row with several statuses has each of its codes for all of them."""
    page = (ROOT / "docs" / "http.md").read_text()
    section = page.partition("\n## Errors\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (\d{3}(?:, \d{3})*) \| ([^|]+) \|", section, re.MULTILINE)
    return {
        (int(status), code)
        for statuses, codes in rows
        for status in statuses.split(", ")
        for code in re.findall(r"`(\w+)`", codes)
    }


def test_the_table_has_every_error_code_that_the_server_can_send() -> None:
    """A client's author finds each code, beside its status."""
    assert sorted(sent(path.read_text() for path in SOURCES) - written()) == []


def test_the_table_has_no_error_code_that_nobody_sends() -> None:
    """A code that is gone from the source is gone from the page."""
    known = {code for _, code in sent(path.read_text() for path in SOURCES)}
    assert sorted({code for _, code in written()} - known) == []


def test_codes_are_found_however_they_are_given() -> None:
    """By name, by position, through a function that passes them on; a code that is computed is not passed over."""
    source = """
def missing(what, code):
    return ApiError(404, what, code=code)

def check(value):
    if not value:
        raise missing("value", "value_not_found")
    if value < 0:
        raise ApiError(400, "negative", code="negative_value", param="value")
    raise ApiError(500, "no code")

SLOW = ProtocolFault(408, "too_slow", "It was too slow.")
"""
    assert sent([source]) == {(404, "value_not_found"), (400, "negative_value"), (408, "too_slow")}
    for hidden in ("ApiError(400, 'x', code=words[0])", "ApiError(status, 'x', code='hidden')"):
        with pytest.raises(AssertionError, match="write the status and the code out"):
            sent([hidden])
