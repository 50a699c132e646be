"""Every Python block in the README and in `docs/` runs as it stands."""

import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hermes_trio.http.app import standard_routes

ROOT = Path(__file__).parent.parent
BLOCK = re.compile(r"^```(\w+)([^\n]*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def blocks(*languages: str) -> list[tuple[str, str, str]]:
    """All code blocks of these languages, as (where, info, code)."""
    found = []
    for page in PAGES:
        text = page.read_text()
        for match in BLOCK.finditer(text):
            if match[1] in languages:
                line = text.count("\n", 0, match.start()) + 1
                found.append((f"{page.relative_to(ROOT)}:{line}", match[2].strip(), match[3]))
    return found


PYTHON = [block for block in blocks("python") if block[1] != "no-run"]


@pytest.mark.parametrize(("where", "info", "code"), PYTHON, ids=[where for where, _, _ in PYTHON])
def test_a_python_block_runs(where: str, info: str, code: str, tmp_path: Path):
    """A script runs to its end; a block marked `test` passes under pytest with the plugin."""
    name = "test_block.py" if info == "test" else "block.py"
    (tmp_path / name).write_text(code)
    command = [sys.executable, name]
    if info == "test":
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-o", "trio_mode=true", name]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, f"{where}\n{done.stdout}\n{done.stderr}"


def test_commands_in_the_docs_exist():
    """A `make` target and a `hermes-trio` command that a page names can be called."""
    targets = set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for where, _, code in blocks("console", "bash", "sh"):
        for target in re.findall(r"^\s*\$?\s*make ([a-z-]+)", code, re.MULTILINE):
            assert target in targets, f"{where} names `make {target}`"


def test_every_route_is_documented():
    """A page names the path of every route of the API."""
    core: Any = SimpleNamespace(services=SimpleNamespace(cron=object()))
    pages = "".join(page.read_text() for page in PAGES)
    paths = {route.path for route in standard_routes(core)}
    assert len(paths) > 30
    assert {path for path in paths if path not in pages} == set()


def test_links_between_the_pages_lead_somewhere():
    """A relative link names a file that is there."""
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text()):
            if "://" not in target:
                assert (page.parent / target).exists(), f"{page.relative_to(ROOT)} links to {target}"
