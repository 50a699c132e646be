"""The `hermes-trio` command line: the entry point, and the exit codes of errors.

Exit codes: 0 for success, 1 for a start or a command that failed, with one line that says why, 130 for Ctrl-C before a server runs.

A plain `serve` is parsed here: importing the parser of the other commands would take half as long as the start of the server.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

_OPTIONS: Final[dict[str, Callable[[str], Any]]] = {"host": str, "port": int, "home": Path, "config": Path}

INTERRUPTED: Final = 130
"""The exit code of a program that Ctrl-C has ended, in shells and in the commands' parser."""


def plain_serve(words: Sequence[str]) -> dict[str, Any] | None:
    """Return the options of a `serve` whose options are all `--name value`, each once. Return None for anything else, which `commands` parses."""
    if not words or words[0] != "serve" or len(words) % 2 == 0:
        return None
    found: dict[str, Any] = {}
    for option, value in zip(words[1::2], words[2::2], strict=True):
        name = option.removeprefix("--")
        if not option.startswith("--") or name in found or name not in _OPTIONS or value.startswith("-") or not value:
            return None
        try:
            found[name] = _OPTIONS[name](value)
        except ValueError:
            return None
    return found


def main() -> None:
    """Run the `hermes-trio` script. Return its exit code."""
    if sys.platform != "linux":
        print(
            f"hermes-trio: this is {sys.platform}, and the gateway runs on Linux only: it needs sub-reapers, pidfds and"
            " namespaces of the kernel to keep and confine processes",
            file=sys.stderr,
        )
        raise SystemExit(1)
    try:
        words = sys.argv[1:]
        options = plain_serve(words)
        if options is None:
            from hermes_trio.commands.app import app

            app(_reading_stdin(words))
        else:
            gc.disable()  # nothing that a start makes is garbage; `settle_heap` has the last word
            import trio

            from hermes_trio.commands.serve import serve

            trio.run(partial(serve, **options))
    except* Exception as group:
        expected, unexpected = group.split(_for_people())
        if unexpected is not None:
            raise unexpected from None
        assert expected is not None
        for error in expected.exceptions:
            while isinstance(error, BaseExceptionGroup):
                error = error.exceptions[0]
            print(f"hermes-trio: {error}", file=sys.stderr)
        raise SystemExit(1) from None
    except* KeyboardInterrupt:  # before the server listens to signals
        raise SystemExit(INTERRUPTED) from None


def _reading_stdin(words: Sequence[str]) -> list[str]:
    """Put a lone hyphen of `run -`, which means standard input, behind `--` for the parser."""
    if words[:1] != ["run"] or words.count("-") != 1 or "--" in words:
        return list(words)
    return [*(word for word in words if word != "-"), "--", "-"]


def _for_people() -> tuple[type[Exception], ...]:
    """Return the errors that are printed as one line, without a traceback. Imports them only when there is an error."""
    from hermes_trio.base.settings import SettingsError
    from hermes_trio.commands.options import CommandFailed
    from hermes_trio.http.auth import UnsafeKey
    from hermes_trio.providers.routes import InvalidRoute
    from hermes_trio.runtime.errors import RuntimeProblem

    return (
        CommandFailed,
        InvalidRoute,
        OSError,
        RuntimeProblem,
        SettingsError,
        UnsafeKey,
    )
