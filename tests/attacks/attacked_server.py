"""A real server that is attacked through its own tools: as root and as an unprivileged user, always ended."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.e2e.server_process import ServerProcess, server_process

KEY = "attack-admin-key-0123456789"
PROVIDER_KEY = "sk-attack-provider-key-0123456789"
NOBODY = 65534

_OPEN_PYTHON = """
set -e
prefix=$1; shift
closed=$prefix
while [ "$(dirname "$closed")" != / ]; do closed=$(dirname "$closed"); done
mkdir -p "$HERMES_ATTACK_STAGE"
mount --bind "$prefix" "$HERMES_ATTACK_STAGE"
mount -t tmpfs -o mode=755 none "$closed"
mkdir -p "$prefix"
mount --bind "$HERMES_ATTACK_STAGE" "$prefix"
exec setpriv --reuid=65534 --regid=65534 --clear-groups --no-new-privs "$@"
"""
"""Gives an unprivileged user an interpreter that lies in root's own folder, in a mount namespace of its own."""


class Attacked:
    """A running server with its folders, and a client for each kind of key."""

    def __init__(self, server: ServerProcess, home: Path, work: Path, uid: int) -> None:
        self.server = server
        self.home = home
        self.work = work
        self.uid = uid

    def ask(self, text: str, *, key: str = KEY, session: str = "attack") -> str:
        """What the agent answers; the demo model runs what it is told to."""
        answer = httpx2.post(
            f"{self.server.url}/v1/chat/completions",
            headers={"Authorization": f"Bearer {key}", "X-Hermes-Session-Id": session},
            json={"messages": [{"role": "user", "content": text}]},
            timeout=60,
        )
        assert answer.status_code == 200, answer.text
        return str(answer.json()["choices"][0]["message"]["content"])

    def run(self, command: str, *, key: str = KEY, session: str = "attack") -> str:
        """The output of a command that the agent runs."""
        return self.ask(f"!run {command}", key=key, session=session)

    def get(self, path: str) -> dict[str, Any]:
        """A JSON answer for the admin."""
        return httpx2.get(f"{self.server.url}{path}", headers=self.server.headers, timeout=30).json()

    def tenant_key(self, *scopes: str) -> str:
        """A key of a tenant that is not the owner."""
        made = httpx2.post(
            f"{self.server.url}/admin/keys",
            headers=self.server.headers,
            json={"name": "guest", "scopes": list(scopes)},
            timeout=30,
        )
        assert made.status_code == 201, made.text
        return str(made.json()["key"])

    def children(self) -> list[int]:
        """The warden's and the keepers' numbers, below the server."""
        found, waiting = [], [self.server.pid]
        while waiting:
            pid = waiting.pop()
            try:
                texts = [task.read_text() for task in Path(f"/proc/{pid}/task").glob("*/children")]
            except FileNotFoundError:  # a process that ended meanwhile has no children
                continue
            for text in texts:
                numbers = [int(word) for word in text.split()]
                waiting += numbers
                found += [number for number in numbers if b"daemon/main.py" in _cmdline(number)]
        return found

    def alive(self) -> bool:
        """Whether the server answers."""
        return httpx2.get(f"{self.server.url}/health", timeout=30).status_code == 200


def _cmdline(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def eventually(condition: Callable[[], object], seconds: float = 15.0) -> None:
    """Wait for the operating system, with a bound."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come true"
        time.sleep(0.02)


@contextmanager
def attacked_server(user: str = "", *, config: str = "") -> Iterator[Attacked]:
    """A server whose working directory, home and account are temporary; `user` is `nobody`, or empty for the user of the tests.

    `config` is more of its configuration.
    """
    base = Path(tempfile.mkdtemp(prefix="hermes-attack-"))
    base.chmod(0o755)
    account, home, work = base / "account", base / "account" / ".hermes-trio", base / "work"
    for folder in (account, home, work):
        folder.mkdir(mode=0o700)
    (home / "config.toml").write_text(
        f'[models]\ndefault = "demo"\n[models.routes.other]\nprovider = "openai"\nmodel = "none"\napi_key = "{PROVIDER_KEY}"\n'
        f'[approvals]\nmode = "off"\n[tools.terminal]\ncwd = "{work}"\n{config}'
    )
    (home / "config.toml").chmod(0o600)
    uid = os.geteuid()
    command = [sys.executable, "-m", "hermes_trio", "serve", "--port", "0"]
    environment = {"HOME": str(account), "XDG_RUNTIME_DIR": f"/run/user/{uid}"}
    if user == "nobody":
        if uid != 0 or shutil.which("setpriv") is None or shutil.which("unshare") is None:
            pytest.skip("only root can become another user, with setpriv and unshare")
        uid = NOBODY
        for path in (base, account, home, work, home / "config.toml"):
            os.chown(path, NOBODY, NOBODY)
        environment["HERMES_ATTACK_STAGE"] = str(base / "stage")
        prefix = os.path.realpath(sys.base_prefix)
        command = ["unshare", "-m", "sh", "-c", _OPEN_PYTHON, "sh", prefix, *command]
    try:
        with server_process(home, key=KEY, command=command, environment=environment) as server:
            yield Attacked(server, home, work, uid)
    finally:
        shutil.rmtree(base, ignore_errors=True)
