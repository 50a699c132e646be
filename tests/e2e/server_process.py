"""The real server as a process of its own, on a free loopback port, always ended."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

__all__ = ["KEY", "ServerProcess", "clean_environment", "server_process"]

KEY = "e2e-admin-key-0123456789"
START_SECONDS = 60.0
STOP_SECONDS = 60.0

_ADDRESS = re.compile(r"listens on (http://\S+)")


def clean_environment(home: Path, **more: str) -> dict[str, str]:
    """An environment without settings of this machine's user, and without the variables of a `make` that runs the tests."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(
            ("HERMES_", "API_SERVER_", "OPENAI_", "ANTHROPIC_", "TELEGRAM_", "DISCORD_", "SLACK_", "PYTEST_", "MAKE")
        )
        and name not in {"ARGS", "MFLAGS"}
    }
    return {**kept, "HERMES_HOME": str(home), "PYTHONUNBUFFERED": "1", **more}


class ServerProcess:
    """A server that was started. `output` is everything that it has written so far, to both streams."""

    def __init__(self, process: subprocess.Popen[str], key: str) -> None:
        self._process = process
        self.key = key
        self.url = ""
        self._lines: list[str] = []
        self._ready = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        """The server's process id."""
        return self._process.pid

    @property
    def output(self) -> str:
        """What it has written."""
        return "".join(self._lines)

    @property
    def headers(self) -> dict[str, str]:
        """The admin key, as a header."""
        return {"Authorization": f"Bearer {self.key}"}

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.append(line)
            if match := _ADDRESS.search(line):
                self.url = match[1]
                self._ready.set()
        self._ready.set()

    def wait_ready(self) -> None:
        """Wait until it listens; an error with its output if it ended instead."""
        if not self._ready.wait(START_SECONDS) or not self.url:
            raise AssertionError(f"the server did not start (exit {self._process.poll()}):\n{self.output}")

    def wait_for(self, pattern: str) -> re.Match[str]:
        """Wait until its output matches, and return the match; an error if it ends, or is silent for too long."""
        deadline = time.monotonic() + START_SECONDS
        while (match := re.search(pattern, self.output)) is None:
            if not self.is_alive() or time.monotonic() > deadline:
                raise AssertionError(f"{pattern!r} was never written (exit {self._process.poll()}):\n{self.output}")
            time.sleep(0.02)
        return match

    def signal(self, number: int) -> None:
        """Send a signal."""
        self._process.send_signal(number)

    def wait(self, seconds: float = STOP_SECONDS) -> int:
        """Wait for its end; the exit status."""
        code = self._process.wait(seconds)
        self._reader.join(10)
        return code

    def stop(self) -> int:
        """SIGTERM, and wait."""
        self.signal(signal.SIGTERM)
        return self.wait()

    def kill(self) -> None:
        """SIGKILL, and wait: what a crash or the kernel would do."""
        self._process.kill()
        self.wait()

    def is_alive(self) -> bool:
        """Whether it runs."""
        return self._process.poll() is None


@contextmanager
def server_process(
    home: Path,
    *,
    arguments: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
    key: str = KEY,
    command: Sequence[str] | None = None,
    wait: bool = True,
) -> Iterator[ServerProcess]:
    """`hermes-trio serve` in `home` for the body of the `with`; it has ended afterwards, whatever happened."""
    home.mkdir(parents=True, exist_ok=True)
    start = [sys.executable, "-m", "hermes_trio", "serve", "--port", "0", *arguments]
    more = {"API_SERVER_KEY": key} if key else {}
    process = subprocess.Popen(
        list(command or start),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        text=True,
        env=clean_environment(home, **more, **(environment or {})),
        start_new_session=True,
    )
    server = ServerProcess(process, key)
    try:
        if wait:
            server.wait_ready()
        yield server
    finally:
        if server.is_alive():
            server.signal(signal.SIGTERM)
            deadline = time.monotonic() + 5
            while server.is_alive() and time.monotonic() < deadline:
                time.sleep(0.02)
        if server.is_alive():
            process.kill()
        process.wait(10)
        assert process.stdout is not None
        server._reader.join(10)
        process.stdout.close()
