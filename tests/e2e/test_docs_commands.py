"""The commands in the pages for operators and API users are run as they stand there, against a real server; and the examples work.

A block is run if its fence says `console run`, with a server on a free port, or `console run stopped`, after the server was stopped. Variables are those
that the pages tell their readers to set. A line `# prints: TEXT` says what a block's output must contain.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import attrs
import httpx2
import pytest

from .server_process import KEY, ServerProcess, clean_environment, server_process

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"^```console run( stopped)?\n(.*?)^```", re.MULTILINE | re.DOTALL)
EXPECTED = re.compile(r"^# prints: (.+)$", re.MULTILINE)
PAGES = sorted(page.name for page in (ROOT / "docs").glob("*.md") if BLOCK.search(page.read_text()))
BLOCK_SECONDS = 120


@attrs.frozen
class Reader:
    """Somebody who follows a page: a directory, a home, and a server in it that is running or not."""

    folder: Path
    stack: ExitStack
    servers: list[ServerProcess] = attrs.Factory(list[ServerProcess])

    @property
    def home(self) -> Path:
        return self.folder / "home"

    @property
    def server(self) -> ServerProcess:
        """The running server; started if there is none."""
        if not self.servers:
            self.servers.append(self.stack.enter_context(server_process(self.home)))
        return self.servers[0]

    def stop(self) -> None:
        """Stop the server as an operator would."""
        if self.servers:
            assert self.servers.pop().stop() == 0

    def run(self, script: str) -> str:
        """Run a script to its end, with what the pages tell their readers to set; its output."""
        more = {"API_SERVER_KEY": KEY, "KEY": KEY, "HERMES_KEY": KEY, "COLUMNS": "200"}
        if self.servers:
            more |= {"URL": self.server.url, "HERMES_URL": self.server.url}
        environment = clean_environment(self.home, **more)
        environment["PATH"] = f"{Path(sys.executable).parent}:{environment['PATH']}"
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", script],
            cwd=self.folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=BLOCK_SECONDS,
        )
        assert done.returncode == 0, f"exit {done.returncode} of\n{script}\n{done.stdout}"
        return done.stdout


@contextmanager
def reading(folder: Path) -> Iterator[Reader]:
    """A reader whose server has ended afterwards. The agent's commands run in the reader's directory."""
    with ExitStack() as stack:
        reader = Reader(folder, stack)
        reader.home.mkdir()
        (reader.home / "config.toml").write_text(f'[tools.terminal]\ncwd = "{folder}"\n')
        yield reader


@pytest.mark.parametrize("page", PAGES)
def test_the_commands_of_a_page_do_what_it_says(page: str, tmp_path: Path):
    """All blocks of a page, one after the other."""
    with reading(tmp_path) as reader:
        for stopped, script in BLOCK.findall((ROOT / "docs" / page).read_text()):
            if stopped:
                reader.stop()
            else:
                reader.server.wait_ready()
            output = reader.run(script)
            for text in EXPECTED.findall(script):
                assert text in output, f"{page} says that this prints {text!r}:\n{script}\n{output}"
            if "/admin/drain?" in script:
                # A drained server waits to be stopped; the page says so, and goes on with another one.
                reader.stop()


@pytest.mark.parametrize(
    ("command", "printed"),
    [
        ("openai_client.py", "responses: You said: My name is Ada."),
        ("run_client.py '!run echo from a run'", "from a run"),
        ("run_client.py '!run rm -rf ./build' --approve deny", "denied"),
        ("embed_agent.py", "stopped, and nothing of it runs: True"),
        ("embed_server.py --once", "say it backwards"),
    ],
)
def test_an_example_works(command: str, printed: str, tmp_path: Path):
    """An example runs to its end and prints what it is an example of."""
    with reading(tmp_path) as reader:
        if "client" in command:
            reader.server.wait_ready()
        assert printed in reader.run(f"python {ROOT / 'examples'}/{command}")


# -- what needs a program that may not be there ------------------------------------------------------------------------------------


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
def test_systemd_accepts_the_unit(tmp_path: Path):
    """The unit has no unknown directive and no wrong value, and systemd counts it among the well protected ones (below 4 of 10)."""
    unit = (ROOT / "examples/systemd/hermes-trio.service").read_text()
    program = Path(sys.executable).parent / "hermes-trio"
    copy = tmp_path / "hermes-trio.service"
    copy.write_text(unit.replace("/opt/hermes-trio/.venv/bin/hermes-trio", str(program)))
    done = subprocess.run(["systemd-analyze", "verify", copy], capture_output=True, text=True, timeout=30)
    assert (done.returncode, done.stderr) == (0, "")
    judge = ["systemd-analyze", "security", "--offline=true", "--threshold=40", copy]
    judged = subprocess.run(judge, capture_output=True, text=True, timeout=30)
    assert judged.returncode == 0, judged.stdout.splitlines()[-1]


@contextmanager
def nginx_in_front(server: ServerProcess, folder: Path) -> Iterator[str]:
    """The example's nginx, with a certificate of its own, on a free port; its address."""
    nginx = shutil.which("nginx", path="/usr/sbin:/usr/local/sbin:/usr/bin:/usr/local/bin:/bin")
    openssl = shutil.which("openssl")
    if nginx is None or openssl is None:
        pytest.skip("nginx or openssl is not installed")
    request = [openssl, "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", "-subj", "/CN=localhost"]
    files = ["-keyout", folder / "tls.key", "-out", folder / "tls.crt"]
    subprocess.run([*request, *files], check=True, capture_output=True, timeout=30)
    listening = folder / "nginx.socket"
    site = (ROOT / "examples/nginx/hermes-trio.conf").read_text()
    for written, here in (
        ("listen 443 ssl", f"listen unix:{listening} ssl"),
        ("server 127.0.0.1:8642", f"server {server.url.removeprefix('http://')}"),
        ("/etc/nginx/tls/agent.example.org.", f"{folder}/tls."),
    ):
        assert written in site
        site = site.replace(written, here)
    (folder / "site.conf").write_text(site)
    temporary = " ".join(f"{kind}_temp_path {folder};" for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi"))
    (folder / "nginx.conf").write_text(
        f"daemon off; worker_processes 1; pid {folder}/nginx.pid; error_log {folder}/error.log;\n"
        f"events {{}}\nhttp {{ access_log off; {temporary} include {folder}/site.conf; }}\n"
    )
    process = subprocess.Popen(
        [nginx, "-p", folder, "-c", folder / "nginx.conf"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        transport = httpx2.HTTPTransport(uds=str(listening), verify=False, retries=20)
        with httpx2.Client(transport=transport, base_url="https://localhost") as client:
            assert client.get("/health").status_code == 200
        yield str(listening)
    finally:
        process.terminate()
        process.communicate(timeout=10)


def test_events_pass_nginx_one_by_one_and_so_does_a_client_that_leaves(tmp_path: Path):
    """Behind the example's nginx a stream's first events arrive while its turn still runs, and hanging up ends the turn."""
    with reading(tmp_path) as reader, nginx_in_front(reader.server, tmp_path) as path:
        direct = httpx2.Client(base_url=reader.server.url, headers=reader.server.headers)
        transport = httpx2.HTTPTransport(uds=path, verify=False)
        behind = httpx2.Client(transport=transport, base_url="https://localhost", headers=reader.server.headers)
        with direct, behind:
            body = {"stream": True, "messages": [{"role": "user", "content": "!sleep 600"}]}
            with behind.stream("POST", "/v1/chat/completions", json=body) as stream:
                lines = stream.iter_lines()
                while "Sleeping" not in next(lines):
                    pass
                assert '"kind":"turn"' in direct.get("/v1/tree").text
            reader.run(
                'until ! curl -sf "$URL/v1/tree" -H "Authorization: Bearer $KEY" | grep -q \'"kind":"turn"\'; do sleep 0.05; done'
            )
