"""The server and the scripted model behind it as processes, and the clients' scripts run against them, one process each."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import attrs

from tests.clients.upstream import PERSON, ROUNDS
from tests.e2e.server_process import KEY, ServerProcess, server_process

ROOT = Path(__file__).parents[2]
SCRIPTS = Path(__file__).parent / "scripts"
PYTHON = ROOT / ".clients-venv" / "bin" / "python"
NODE_MODULES = Path(__file__).parent / "node_modules"
SECONDS = 120.0

SERVED = '"output":"served"'
SUNNY = "sunny in Paris"


@attrs.frozen
class Client:
    """A client library and the script that plays its scenarios."""

    name: str
    script: str

    @property
    def is_node(self) -> bool:
        return self.script.endswith(".mjs")

    @property
    def missing(self) -> str:
        """Why it cannot be run here; empty if it can."""
        if self.is_node and (shutil.which("node") is None or not NODE_MODULES.is_dir()):
            return "Node.js or its packages are not installed: `make clients` installs them where Node 20 or newer is on the path"
        if not self.is_node and not PYTHON.exists():
            return f"{PYTHON.parent.parent.name} is not there: `make clients` makes it"
        return ""


CLIENTS = (
    Client("openai (Python)", "openai_sdk.py"),
    Client("openai (Node)", "openai_sdk.mjs"),
    Client("OpenAI Agents SDK", "agents_sdk.py"),
    Client("LangChain", "langchain_client.py"),
    Client("litellm", "litellm_client.py"),
    Client("llm", "llm_client.py"),
    Client("instructor", "instructor_client.py"),
    Client("pydantic-ai", "pydantic_ai_client.py"),
    Client("Vercel AI SDK", "vercel_ai.mjs"),
    Client("anthropic (Python)", "anthropic_sdk.py"),
)


@attrs.frozen(kw_only=True)
class Played:
    """One scenario: what the client returned, and what ran on either side."""

    scenario: str
    version: str
    result: Any
    error: str
    trace: str
    client_calls: int
    server_calls: int

    @property
    def kind(self) -> str:
        """What is played."""
        return self.scenario.partition("__")[0]

    @property
    def way(self) -> str:
        """By which of the client's interfaces."""
        return self.scenario.partition("__")[2]

    @property
    def problem(self) -> str:
        """What is wrong with it; empty if it is as it should be."""
        ran = (self.client_calls, self.server_calls)
        wanted = {
            "client": (1, 0),
            "server": (0, 1),
            "both": (1, 1),
            "fail": (0, 1),
            "rounds": (ROUNDS // 2, ROUNDS // 2),
        }
        if ran != wanted.get(self.kind, (0, 0)):
            return f"ran {ran[0]} times on the client and {ran[1]} times on the server, not {wanted.get(self.kind, (0, 0))}; {self.result} {self.error}"
        if self.kind == "fail":
            return (
                ""
                if "the account is closed" in self.error
                else f"the error does not say why: {self.result} {self.error}"
            )
        if self.error:
            return self.error
        return "" if self._is_right() else f"returned {self.result!r}"

    def _is_right(self) -> bool:
        text = str(self.result).replace('": "', '":"')
        match self.kind:
            case "plain":
                return text == "Hello from upstream"
            case "client":
                return SUNNY in text and "served" not in text
            case "server":
                return SERVED in text and SUNNY not in text
            case "both":
                return SERVED in text and SUNNY in text
            case "handoff":
                return text == "Refunds here"
            case "json":
                return self.result == PERSON
            case "rounds":
                return text == f"{ROUNDS} rounds"
            case _:
                return self.result is True


@attrs.frozen
class Playground:
    """A server that runs, and a folder for what its tools leave behind."""

    server: ServerProcess
    ledgers: Path

    def play(self, client: Client) -> list[Played]:
        """Run a client's script to its end."""
        program = ["node"] if client.is_node else [str(PYTHON)]
        environment = {
            **os.environ,
            "HERMES_URL": self.server.url,
            "HERMES_KEY": KEY,
            "HERMES_LEDGERS": str(self.ledgers),
            "HERMES_NODE_MODULES": str(NODE_MODULES),
            "NO_PROXY": "127.0.0.1",
            "OPENAI_AGENTS_DISABLE_TRACING": "1",
        }
        done = subprocess.run(
            [*program, str(SCRIPTS / client.script)],
            env=environment,
            capture_output=True,
            text=True,
            timeout=SECONDS,
            check=False,
        )
        lines = [json.loads(line[9:]) for line in done.stdout.splitlines() if line.startswith("SCENARIO ")]
        if done.returncode or not lines:
            raise AssertionError(
                f"{client.script} ended with {done.returncode}:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
            )
        return [
            Played(
                scenario=line["scenario"],
                version=line["version"],
                result=line.get("result"),
                error=line.get("error", ""),
                trace=line.get("trace", ""),
                client_calls=line["calls"],
                server_calls=_lines_of(Path(line["ledger"])),
            )
            for line in lines
        ]


def _lines_of(path: Path) -> int:
    return len(path.read_text().splitlines()) if path.exists() else 0


@contextmanager
def open_playground(folder: Path) -> Iterator[Playground]:
    """The scripted model and the server in front of it, for the body of the `with`."""
    ledgers = folder / "ledgers"
    ledgers.mkdir(parents=True)
    with subprocess.Popen(
        [sys.executable, "-m", "tests.clients.upstream"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    ) as upstream:
        assert upstream.stdout is not None
        assert upstream.stdin is not None
        port = int(upstream.stdout.readline())
        environment = {
            "HERMES_MODEL": "openai/scripted",
            "OPENAI_BASE_URL": f"http://127.0.0.1:{port}/v1",
            "OPENAI_API_KEY": "sk-scripted",
        }
        try:
            with server_process(folder / "home", environment=environment) as server:
                yield Playground(server, ledgers)
        finally:
            upstream.stdin.close()
