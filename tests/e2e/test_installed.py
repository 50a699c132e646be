"""The built wheel in fresh environments outside of the repository: the programs of the docs, the examples, and the test suites of others.

Packages are installed by name, so these tests need a package index.
"""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import pytest

from tests.test_docs import PYTHON, ROOT

pytestmark = pytest.mark.slow

EXAMPLES = ROOT / "examples"
PLUGINS = ("dice", "mailbox", "parrot")
DOCUMENTED = [block for block in PYTHON if block[0].startswith(("README.md", "docs/embedding.md", "docs/plugins.md"))]
FOREIGN = ("pytest>=9", "pytest-asyncio", "anyio", "pytest-xdist", "pytest-timeout")
CLEAN = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "PYTEST", "VIRTUAL_ENV"))}


def call(*command: object, cwd: Path, check: bool = True, **more: Any) -> subprocess.CompletedProcess[str]:
    """Run a command to its end, without what this environment sets for Python."""
    done = subprocess.run(
        [str(part) for part in command], cwd=cwd, env=CLEAN, capture_output=True, text=True, timeout=400, **more
    )
    assert not check or done.returncode == 0, f"{command}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return done


def build(source: Path, target: Path) -> Path:
    """The wheel of a project, built without a network."""
    before = set(target.glob("*.whl"))
    call(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", target, cwd=source)
    (wheel,) = set(target.glob("*.whl")) - before
    return wheel


def make_environment(folder: Path, *requirements: object) -> Path:
    """A fresh environment with these requirements; the path of its Python."""
    call(sys.executable, "-m", "uv", "venv", "-q", "--python", sys.executable, folder, cwd=folder.parent)
    python = folder / "bin" / "python"
    call(sys.executable, "-m", "uv", "pip", "install", "-q", "--python", python, *requirements, cwd=folder.parent)
    return python


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(ROOT, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def embedder(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of somebody who embeds us: the extras, both frameworks, and the example packages."""
    folder = tmp_path_factory.mktemp("embedder")
    examples = [build(EXAMPLES / "plugins" / name, folder) for name in PLUGINS]
    return make_environment(folder / "venv", f"{wheel}[pytest,otel]", "fastapi", "uvicorn", "aiohttp", *examples)


@pytest.fixture(scope="module")
def stranger(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of somebody who has us installed and tests something else, without pytest-trio."""
    return make_environment(tmp_path_factory.mktemp("stranger") / "venv", wheel, *FOREIGN)


@pytest.mark.parametrize(("where", "info", "code"), DOCUMENTED, ids=[where for where, _, _ in DOCUMENTED])
def test_a_documented_program_runs_from_the_wheel(
    where: str, info: str, code: str, embedder: Path, tmp_path: Path
) -> None:
    """What a reader copies works with what a reader installs."""
    name = "test_block.py" if info == "test" else "block.py"
    (tmp_path / name).write_text(code)
    test = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "-o", "trio_mode=true") if info == "test" else ()
    call(embedder, *test, name, cwd=tmp_path)


def test_the_wheel_is_what_is_imported(embedder: Path, tmp_path: Path) -> None:
    """Nothing of the repository is on the path."""
    shown = call(embedder, "-c", "import hermes_trio; print(hermes_trio.__file__)", cwd=tmp_path).stdout
    assert shown.startswith(str(embedder.parent.parent))
    assert call(embedder.parent / "hermes-trio", "--version", cwd=tmp_path).stdout.strip()


def test_the_example_packages_are_used_by_a_server(embedder: Path, tmp_path: Path) -> None:
    """A server with the installed tool, adapter and provider: a file becomes a message, the parrot answers, and the answer is a file."""
    home, mail = tmp_path / "home", tmp_path / "mail"
    home.mkdir(mode=0o700)
    (mail / "in").mkdir(parents=True)
    config = home / "config.toml"
    config.write_text(
        f"""
        [server]
        port = {free_port()}
        [plugins]
        tools = ["dice"]
        [plugins.adapters.mailbox]
        folder = "{mail}"
        seconds = 0.1
        allow_all = true
        [models]
        default = "bird"
        [models.routes.bird]
        provider = "parrot"
        prefix = "Polly says "
        """
    )
    config.chmod(0o600)
    command = [str(embedder.parent / "hermes-trio"), "serve"]
    with subprocess.Popen(
        command, cwd=tmp_path, env={**CLEAN, "HERMES_HOME": str(home)}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as server:
        try:
            (mail / "in" / "0001.txt").write_text("good morning")
            wait_for(lambda: any((mail / "out").glob("[!.]*.txt")), server)
            (answer,) = (mail / "out").glob("[!.]*.txt")
            assert answer.read_text() == "Polly says good morning"
        finally:
            server.send_signal(signal.SIGTERM)
            server.communicate(timeout=60)
    assert server.returncode == 0
    rolled = call(
        embedder,
        "-c",
        "from hermes_trio.plugins import load_tools; from hermes_trio import Tool; print(load_tools(['dice'], Tool)[0].spec.name)",
        cwd=tmp_path,
    )
    assert rolled.stdout.strip() == "roll"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def wait_for(check: Any, process: subprocess.Popen[bytes], seconds: float = 60.0) -> None:
    """Wait until something is true of a process that must not end meanwhile."""
    until = time.monotonic() + seconds
    while not check():
        assert process.poll() is None, process.communicate()[0].decode(errors="replace")
        assert time.monotonic() < until, "it took too long"
        time.sleep(0.05)


@pytest.mark.parametrize("host", ["fastapi_host", "aiohttp_host"])
def test_a_host_runs_turns_and_ends(host: str, embedder: Path, tmp_path: Path) -> None:
    """Fifty requests at once get their own answers, the tree is empty afterwards, and SIGTERM ends the host within seconds."""
    port = free_port()
    program = tmp_path / f"{host}.py"
    program.write_text((EXAMPLES / "hosts" / f"{host}.py").read_text())

    def get(path: str) -> Any:
        with urlopen(f"http://127.0.0.1:{port}{path}", timeout=30) as answer:
            return json.load(answer)

    def ask(number: int) -> Any:
        body = json.dumps({"session": "s" * (number % 7 + 1), "text": f"question {number}"}).encode()
        request = Request(f"http://127.0.0.1:{port}/ask", body, {"content-type": "application/json"})
        with urlopen(request, timeout=60) as answer:
            return json.load(answer)

    def is_up() -> bool:
        try:
            get("/tree")
        except OSError:
            return False
        return True

    with subprocess.Popen(
        [str(embedder), program.name, str(port)],
        cwd=tmp_path,
        env=CLEAN,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    ) as server:
        try:
            wait_for(is_up, server)
            with ThreadPoolExecutor(16) as pool:
                answers = list(pool.map(ask, range(50)))
            assert [one["text"] for one in answers] == [
                f"question {number} ({number % 7 + 1} letters of session)" for number in range(50)
            ]
            assert "turn_" not in get("/tree")["tree"]
        finally:
            server.send_signal(signal.SIGTERM)
            began = time.monotonic()
            said = server.communicate(timeout=30)[0].decode(errors="replace")
    assert time.monotonic() - began < 15
    assert "Traceback" not in said, said
    assert server.returncode in (0, -signal.SIGTERM)


SUITES = {
    "pytest-asyncio": (
        """
        import asyncio, sys, pytest

        @pytest.mark.asyncio
        async def test_sleeps():
            await asyncio.sleep(0.01)
            assert "trio" not in sys.modules

        @pytest.mark.asyncio
        async def test_fails():
            assert await asyncio.sleep(0, 1) == 2

        @pytest.mark.asyncio
        async def test_leaves_a_task():
            asyncio.ensure_future(asyncio.sleep(100))
        """,
        (),
    ),
    "anyio": (
        """
        import anyio, pytest

        @pytest.fixture(params=["asyncio", "trio"])
        def anyio_backend(request):
            return request.param

        @pytest.mark.anyio
        async def test_sleeps():
            await anyio.sleep(0.01)

        @pytest.mark.anyio
        async def test_fails():
            async with anyio.create_task_group() as group:
                group.start_soon(anyio.sleep, 0)
            raise ValueError("on purpose")
        """,
        (),
    ),
    "django-style": (
        """
        import asyncio, os, unittest

        class Base(unittest.TestCase):
            @classmethod
            def setUpClass(cls):
                super().setUpClass()
                os.environ["SETTINGS_MODULE"] = "settings"

            def __call__(self, result=None):
                self.before = dict(os.environ)
                return super().__call__(result)

            def debug(self):
                self.before = dict(os.environ)
                return super().debug()

        class TestViews(Base):
            def test_async_view(self):
                async def view():
                    os.chdir("/")
                    return 200
                here = os.getcwd()
                try:
                    self.assertEqual(asyncio.run(view()), 200)
                finally:
                    os.chdir(here)

            def test_fails(self):
                self.assertEqual(os.environ["SETTINGS_MODULE"], "other")
        """,
        (),
    ),
    "unittest": (
        """
        import asyncio, unittest

        class TestThings(unittest.IsolatedAsyncioTestCase):
            async def asyncSetUp(self):
                self.event = asyncio.Event()

            async def test_event(self):
                asyncio.get_running_loop().call_later(0.01, self.event.set)
                await self.event.wait()

            async def test_fails(self):
                self.fail("on purpose")

            @unittest.skip("later")
            async def test_skipped(self):
                pass
        """,
        (),
    ),
    "many": (
        """
        import pytest, sys

        @pytest.fixture
        def number(request):
            return request.param

        @pytest.mark.parametrize("number", range(1000), indirect=True)
        def test_numbers(number):
            assert "trio" not in sys.modules
            assert number != 7
        """,
        (),
    ),
    "xdist": (
        """
        import pytest, sys

        @pytest.mark.parametrize("number", range(20))
        def test_numbers(number):
            assert "trio" not in sys.modules
            assert number != 7
        """,
        ("-n", "2"),
    ),
}


@pytest.mark.parametrize("suite", SUITES)
def test_a_foreign_suite_is_untouched(suite: str, stranger: Path, tmp_path: Path) -> None:
    """With our plugin and without it the same tests pass, fail and are skipped, and the plugin takes no time worth speaking of."""
    code, options = SUITES[suite]
    if suite != "anyio":
        options = (*options, "-p", "no:anyio")  # anyio's own plugin imports Trio; ours must not
    (tmp_path / "test_theirs.py").write_text(re.sub(r"^ {8}", "", code, flags=re.MULTILINE))
    results: dict[bool, tuple[int, list[str]]] = {}
    seconds = {True: float("inf"), False: float("inf")}
    common = ("-m", "pytest", "-rA", "-p", "no:cacheprovider", "-p", "no:randomly", *options)
    for ours in (True, False) * 3:
        began = child_seconds()
        done = call(stranger, *common, *(() if ours else ("-p", "no:hermes_trio")), cwd=tmp_path, check=False)
        seconds[ours] = min(seconds[ours], child_seconds() - began)
        assert "INTERNALERROR" not in done.stdout
        results[ours] = (
            done.returncode,
            sorted(set(re.findall(r"^(?:PASSED|FAILED|ERROR|SKIPPED)\b.*", done.stdout, re.M))),
        )
        assert bool(re.search(r"^plugins: .*hermes-trio", done.stdout, re.MULTILINE)) == ours
    assert results[True] == results[False]
    assert {line.split()[0] for line in results[True][1]} >= {"PASSED", "FAILED"}, results
    assert results[True][0] == 1, "each suite has a test that fails"
    # Each process imports the plugin once (some 40 ms; with xdist there are three of them); the tests themselves cost nothing.
    assert seconds[True] < 1.1 * seconds[False] + 0.4, seconds


def child_seconds() -> float:
    """CPU seconds of all children that have ended: time that does not depend on what else the machine does."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def test_leaks_of_pytest_asyncio_are_found_where_they_are_asked_for(stranger: Path, tmp_path: Path) -> None:
    """`--hermes-leaks=all` finds the tasks and threads that tests of others leave, without pytest-trio; a marker exempts one; without it nothing fails."""
    (tmp_path / "test_theirs.py").write_text(
        "import asyncio, threading, pytest\n\n"
        "pytestmark = pytest.mark.asyncio\n\n"
        "async def test_task():\n    asyncio.get_running_loop().create_task(asyncio.sleep(100), name='forgotten')\n\n"
        "async def test_thread():\n"
        "    threading.Thread(target=threading.Event().wait, args=(3,), daemon=True, name='left').start()\n\n"
        "async def test_clean():\n    await asyncio.sleep(0)\n\n"
        "@pytest.mark.hermes_leaks('off')\n"
        "async def test_exempt():\n    asyncio.get_running_loop().create_task(asyncio.sleep(100))\n"
    )
    common = (stranger, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:anyio")
    found = call(*common, "--hermes-leaks=all", cwd=tmp_path, check=False).stdout
    assert "2 failed, 2 passed" in found
    assert "forgotten" in found
    assert "thread left" in found
    assert "4 passed" in call(*common, cwd=tmp_path).stdout


def test_a_fixture_of_ours_says_what_to_install(stranger: Path, tmp_path: Path) -> None:
    """Without pytest-trio a test that uses `runtime` fails with the name of the extra."""
    (tmp_path / "test_ours.py").write_text("async def test_it(runtime): ...\n")
    said = call(stranger, "-m", "pytest", "-p", "no:cacheprovider", cwd=tmp_path, check=False)
    assert said.returncode == 1
    assert "hermes-trio[pytest]" in said.stdout


def test_a_foreign_test_that_hangs_is_reported_by_its_own_tools(stranger: Path, tmp_path: Path) -> None:
    """pytest-timeout fails the test, and pytest's own faulthandler dumps the stacks, with our plugin there."""
    (tmp_path / "test_theirs.py").write_text(
        "import asyncio, time, pytest\n\n"
        "@pytest.mark.timeout(1)\n"
        "@pytest.mark.asyncio\n"
        "async def test_hangs():\n    await asyncio.sleep(60)\n\n"
        "def test_slow():\n    time.sleep(2)\n"
    )
    began = time.monotonic()
    options = ("-p", "no:cacheprovider", "-o", "faulthandler_timeout=1.2")
    done = call(stranger, "-m", "pytest", *options, cwd=tmp_path, check=False)
    assert time.monotonic() - began < 40
    assert "1 failed, 1 passed" in done.stdout
    assert re.search(r"Timeout \(>?1(\.0)?s\)", done.stdout)
    assert "Timeout (0:00:01" in done.stderr
