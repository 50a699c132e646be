"""The supported versions of Python that are installed, and the oldest dependencies that are allowed, each in a fresh environment.

Packages are installed by name, so these tests need a package index; without one, and for a version that is not installed, they are skipped.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.test_installed import CLEAN, call
from tests.test_docs import ROOT

pytestmark = pytest.mark.slow

VERSIONS = ("3.11", "3.12", "3.13")
EXTRAS = f"{ROOT}[pytest,otel,mcp]"
TOOLS = ("hypothesis>=6.130", "anyio")

EMBEDDING = (
    "tests/test_guest.py",
    "tests/runtime/test_agents.py",
    "tests/runtime/test_context.py",
    "tests/runtime/test_delivery.py",
    "tests/runtime/test_stop.py",
    "tests/runtime/test_store_faults.py",
    "tests/runtime/test_turn.py",
    "tests/testing/test_contracts.py",
    "tests/testing/test_plugin.py::test_all_checks_tests_of_every_kind",
    "tests/test_plugins.py",
)
"""What a program that embeds the runtime relies on: agents, asyncio hosts, stopping, the contract of the store, the pytest plugin, plugins. Not the whole
of `tests/runtime`: what differs between versions is in threads, contexts, cancellation and annotations."""

SERVING = (
    "tests/http/test_serve_words.py",
    "tests/adapters/test_web.py",
    "tests/adapters/test_webhook_signatures.py",
    "tests/adapters/test_cli.py",
    "tests/adapters/test_schedule.py",
    "tests/tracing",
)
"""What uses the other dependencies: the command line, the server, cryptography, the terminal, schedules, MCP, OpenTelemetry."""

TOO_LONG = "not used_once_leave_nothing and not told_once_or_superseded and not a_thousand_turns"


def find_python(version: str) -> str | None:
    """An interpreter of this version: this one, one on the PATH, or one of pyenv's. A shim that runs nothing does not count."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    there = sorted(pyenv.glob(f"{version}.*/bin/python")) if pyenv.exists() else []
    for candidate in (sys.executable, shutil.which(f"python{version}"), *reversed(there)):
        if candidate is None:
            continue
        words = "import sys; print('%d.%d' % sys.version_info[:2])"
        said = subprocess.run([str(candidate), "-c", words], capture_output=True, text=True, timeout=30, env=CLEAN)
        if said.returncode == 0 and said.stdout.strip() == version:
            return str(candidate)
    return None


def environment_of(version: str, folder: Path, *options: str) -> Path:
    """A fresh environment with this project's dependencies; the path of its Python. Skips where that cannot be had."""
    found = find_python(version)
    if found is None:
        pytest.skip(f"Python {version} is not installed here")
    uv = (sys.executable, "-m", "uv")
    call(*uv, "venv", "-q", "--no-python-downloads", "--python", found, folder, cwd=ROOT)
    python = folder / "bin" / "python"
    command = (*uv, "pip", "install", "-q", *options, "--python", python, "--editable", EXTRAS, *TOOLS)
    done = call(*command, cwd=ROOT, check=False)
    if done.returncode and any(word in done.stderr for word in ("dns error", "Connect", "connect", "offline")):
        pytest.skip(f"no package index can be reached: {done.stderr.strip().splitlines()[-1]}")
    assert done.returncode == 0, done.stderr
    return python


def run_tests(python: Path, *tests: str) -> None:
    """Run tests of this project with another Python. What is compiled is kept beside its environment, so that the processes of the tests share it."""
    environment = {name: value for name, value in CLEAN.items() if name != "PYTHONDONTWRITEBYTECODE"}
    environment["PYTHONPYCACHEPREFIX"] = str(python.parent.parent / "compiled")
    command = (python, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "--assert=plain", "-k", TOO_LONG, *tests)
    done = subprocess.run(
        [str(word) for word in command], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, f"{done.stdout[-6000:]}\n{done.stderr[-2000:]}"


@pytest.mark.parametrize("version", VERSIONS)
def test_a_supported_python_with_the_newest_dependencies(version: str, tmp_path: Path) -> None:
    """What embedders rely on holds on every version of Python that is supported."""
    run_tests(environment_of(version, tmp_path / "venv"), *EMBEDDING)


def test_the_oldest_dependencies_that_are_allowed(tmp_path: Path) -> None:
    """The lower bounds in pyproject.toml are true: with every direct dependency at its lowest, on the oldest Python, the same and the server work."""
    python = environment_of(VERSIONS[0], tmp_path / "venv", "--resolution", "lowest-direct")
    run_tests(python, *EMBEDDING, *SERVING)


REPLAY = """
from hermes_trio.testing.simulation import run_seed, versions
print(versions())
for seed in (1, 2, 3, 8):
    print(seed, run_seed(seed).trace.digest())
"""


@pytest.mark.parametrize("version", VERSIONS)
def test_a_seed_gives_the_same_world_on_every_python(version: str, tmp_path: Path) -> None:
    """With the same versions of the packages: the traces of some seeds, with one and several nodes and with an MCP server, are those of this Python."""
    python = environment_of(version, tmp_path / "venv", "--constraint", str(ROOT / "requirements-dev.txt"))
    here, there = (call(one, "-c", REPLAY, cwd=ROOT).stdout.splitlines() for one in (sys.executable, python))
    assert here[1:] == there[1:], f"this is {here[0]}; the other is {there[0]}"
