"""A person at a real pseudo-terminal, for tests: types, reads what the screen shows, presses keys.

It answers the terminal's cursor position requests, as every terminal does. The program is ended when the `with` block is left, whatever happened.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

CONTROL = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|\x1b\][^\x07]*\x07|\x1b[()][A-Z0-9]|\x1b[=>]|\r|\x07|\x08")
TIMEOUT = 30.0


class Terminal:
    """One program at one terminal."""

    def __init__(self, process: subprocess.Popen[bytes], master: int) -> None:
        self.process = process
        self._master = master
        self._raw = b""
        self._answered = 0
        self._mark = 0

    @property
    def screen(self) -> str:
        """Everything that was shown, without control sequences."""
        return CONTROL.sub("", self._raw.decode("utf-8", "replace"))

    @property
    def raw(self) -> str:
        """Everything that was written to the terminal."""
        return self._raw.decode("utf-8", "replace")

    def type(self, text: str) -> None:
        """Type something, without sending it. What is waited for next is looked for from here on."""
        self._mark = len(self.screen)
        os.write(self._master, text.encode())

    def enter(self, text: str) -> None:
        """Type a line and send it."""
        self.type(text + "\r")

    def settle(self) -> None:
        """Wait until the screen stands still."""
        while self._read(0.4):
            pass

    def press(self, key: str) -> None:
        """Press Ctrl and a letter, once the screen stands still: while something is being printed the terminal is not in raw mode."""
        self.settle()
        self.type(chr(ord(key.upper()) - 64))

    def expect(self, pattern: str, *, seconds: float = TIMEOUT) -> str:
        """Wait until the screen shows something since the last input; returns what was shown since then."""
        deadline = time.monotonic() + seconds
        while True:
            shown = self.screen[self._mark :]
            if re.search(pattern, shown):
                return shown
            if time.monotonic() > deadline:
                raise AssertionError(f"the screen did not show {pattern!r}; it shows:\n{self.screen}")
            if not self._read(0.2) and self.process.poll() is not None:
                raise AssertionError(f"the program ended before it showed {pattern!r}; it had shown:\n{self.screen}")

    def wait(self, seconds: float = TIMEOUT) -> int:
        """Wait until the program has ended, and return its exit code."""
        deadline = time.monotonic() + seconds
        while self.process.poll() is None:
            if time.monotonic() > deadline:
                raise AssertionError(f"the program did not end; it shows:\n{self.screen}")
            self._read(0.05)
        while self._read(0.05):
            pass
        return self.process.returncode

    def _read(self, seconds: float) -> bool:
        ready, _, _ = select.select([self._master], [], [], seconds)
        if not ready:
            return False
        try:
            data = os.read(self._master, 65536)
        except OSError:
            return False
        self._raw += data
        asked = self._raw.count(b"\x1b[6n")
        for _ in range(asked - self._answered):
            os.write(self._master, b"\x1b[1;1R")
        self._answered = asked
        return bool(data)


@contextlib.contextmanager
def at_terminal(
    arguments: Sequence[str],
    home: Path,
    environment: Mapping[str, str] | None = None,
    *,
    program: Sequence[str] = (sys.executable, "-m", "hermes_trio"),
    cwd: Path | None = None,
) -> Iterator[Terminal]:
    """Run the gateway's commands, or another program, at a terminal for the body of the `with`."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 120, 0, 0))
    process = subprocess.Popen(
        [*program, *arguments],
        cwd=cwd,
        stdin=slave,
        stdout=slave,
        stderr=slave,
        start_new_session=True,
        # The terminal is the program's own, so that keys which are typed while it is not in raw mode become signals.
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        env={**plain_environment(home), "TERM": "xterm-256color", **(environment or {})},
    )
    os.close(slave)
    terminal = Terminal(process, master)
    try:
        yield terminal
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        os.close(master)


def plain_environment(home: Path) -> dict[str, str]:
    """An environment in which nothing of this machine's configuration counts."""
    return {"PATH": os.environ["PATH"], "HOME": str(home), "HERMES_HOME": str(home), "LANG": "C.UTF-8"}


def piped(arguments: Sequence[str], home: Path, typed: str = "") -> subprocess.CompletedProcess[str]:
    """Run the gateway's commands in a pipe."""
    return subprocess.run(
        [sys.executable, "-m", "hermes_trio", *arguments],
        input=typed,
        capture_output=True,
        text=True,
        timeout=90,
        env=plain_environment(home),
        check=False,
    )
