"""The start of the server: nothing that a command wrote into the working directory runs in it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def test_modules_in_the_working_directory_shadow_none_of_ours(tmp_path: Path) -> None:
    """`python -m` looks there first; a file named like a package would be run with the server's rights."""
    for name in ("trio", "cyclopts", "apsw", "msgspec", "platform"):
        (tmp_path / f"{name}.py").write_text("open('planted', 'w').close()\n")
    done = subprocess.run(
        [sys.executable, "-m", "hermes_trio", "doctor", "--home", str(tmp_path / "home")],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert not (tmp_path / "planted").exists(), done.stdout + done.stderr
    assert "Traceback" not in done.stderr
