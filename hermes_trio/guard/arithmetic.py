"""Integer arithmetic without variables, the kind that hides a digit or a character code."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable

_CONSTANT = re.compile(r"[0-9a-fA-FxX+\-*/%()&|^~<> \t]{1,200}\Z")
_BASED = re.compile(r"\b(\d{1,2})#([0-9A-Za-z]{1,12})\b")
_MAX_BITS = 128
_OPERATIONS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: lambda left, right: left + right,
    ast.Sub: lambda left, right: left - right,
    ast.Mult: lambda left, right: left * right,
    ast.Div: lambda left, right: int(left / right),
    ast.Mod: lambda left, right: left % right,
    ast.BitAnd: lambda left, right: left & right,
    ast.BitOr: lambda left, right: left | right,
    ast.BitXor: lambda left, right: left ^ right,
    ast.LShift: lambda left, right: left << min(right, 64),
    ast.RShift: lambda left, right: left >> min(right, 64),
}


def evaluate(text: str) -> int | None:
    """The value of a constant expression, or None when it is not one."""
    text = _BASED.sub(_in_base, text.strip())
    if not _CONSTANT.match(text) or "**" in text:
        return None
    # bash reads a leading zero as octal, where Python refuses it.
    text = re.sub(r"(?<![0-9a-zA-Z])0(\d+)", r"0o\1", text)
    try:
        return _value(ast.parse(text, mode="eval").body)
    except (SyntaxError, ValueError, ZeroDivisionError, OverflowError, MemoryError, RecursionError):
        return None


def _in_base(match: re.Match[str]) -> str:
    try:
        return str(int(match.group(2), int(match.group(1))))
    except ValueError:
        return match.group()


def _value(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.UnaryOp):
        operand = _value(node.operand)
        return -operand if isinstance(node.op, ast.USub) else ~operand if isinstance(node.op, ast.Invert) else operand
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATIONS:
        result = _OPERATIONS[type(node.op)](_value(node.left), _value(node.right))
        if result.bit_length() <= _MAX_BITS:
            return result
    raise ValueError("not a constant integer expression")
