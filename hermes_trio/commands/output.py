"""Printing of commands. Their texts come from messages, models, clients and other hosts, none of which may control the terminal."""

from __future__ import annotations

import sys
from typing import Any

import msgspec

from hermes_trio.base.terminal import clean_lines


def say(text: str = "") -> None:
    """Print a text, cleaned, and a line break."""
    sys.stdout.write(f"{clean_lines(text)}\n")
    sys.stdout.flush()


def say_json(value: Any, *, indent: int = 2) -> None:
    """Print a value as JSON. A program that reads it gets each character as it is; a terminal gets it cleaned."""
    text = msgspec.json.format(msgspec.json.encode(value), indent=indent).decode()
    sys.stdout.write(f"{clean_lines(text) if sys.stdout.isatty() else text}\n")
    sys.stdout.flush()
