"""The files of docs/scale.md, tried without a container engine and without systemd as process 1: their commands, environments and signals are run as they are
written, with loopback, free ports and the PostgreSQL of the tests in the place of the addresses."""

from __future__ import annotations

import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from itertools import cycle
from pathlib import Path
from string import Template
from typing import Any

import httpx2
import pytest

from hermes_trio.config import load_config
from hermes_trio.http.settings import ServerSettings
from tests.postgres_server import PASSWORD, PostgresServer

from .server_process import ServerProcess, clean_environment, server_process

ROOT = Path(__file__).parents[2]
PROGRAM = Path(sys.executable).parent / "hermes-trio"
UNIT = ROOT / "examples/systemd/hermes-trio.service"
INSTALLED = "/opt/hermes-trio/.venv/bin/hermes-trio"

SERVICE_KEYS = {
    "image",
    "environment",
    "volumes",
    "healthcheck",
    "command",
    "depends_on",
    "ports",
    "stop_grace_period",
    "restart",
}
"""The keys of a service of the compose specification that the file uses."""


def blocks(language: str) -> list[str]:
    """The code blocks of the page in a language."""
    text = (ROOT / "docs/scale.md").read_text()
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


def compose() -> dict[str, Any]:
    """The compose file, with its anchors and merges resolved."""
    yaml = pytest.importorskip("yaml", reason="PyYAML is not installed")
    [text] = blocks("yaml")
    return yaml.safe_load(text)


def container() -> tuple[list[str], list[str], dict[str, str]]:
    """The entry point, the default command and the environment of the image."""
    text = (ROOT / "examples/container/Containerfile").read_text()
    entry, command = (re.findall(rf'^{word} \["(.*)"\]$', text, re.MULTILINE)[0] for word in ("ENTRYPOINT", "CMD"))
    [line] = re.findall(r"^ENV (.*)$", text, re.MULTILINE)
    return entry.split('", "'), command.split('", "'), dict(pair.split("=") for pair in line.split())


def settle(environment: dict[str, Any], **values: str) -> dict[str, str]:
    """An environment of the file, with its variables replaced as compose does."""
    return {name: Template(str(value)).substitute(values) for name, value in environment.items()}


def test_the_compose_file_means_what_it_says(tmp_path: Path) -> None:
    """Its services depend on each other in an order that ends, its variables are ones that the configuration reads, and its ports are the server's."""
    found = compose()
    services = found["services"]
    assert set(found) == {"services", "volumes"}
    for name, service in services.items():
        assert set(service) <= SERVICE_KEYS, name
        for needed, how in service.get("depends_on", {}).items():
            assert needed in services
            known = {"service_healthy": "healthcheck" in services[needed], "service_completed_successfully": True}
            assert known[how["condition"]], (name, needed)
        for volume in service.get("volumes", ()):
            assert volume.partition(":")[0] in found["volumes"]
    values = {"DB_PASSWORD": "secret", "API_SERVER_KEY": "the-same-key-0123456789"}
    gateways = [one for one in services.values() if "ports" in one]
    assert len(gateways) == 2
    assert len({port for one in gateways for port in one["ports"]}) == 2
    for service in (*gateways, services["init"]):
        config = load_config(settle(service["environment"], **values), home=tmp_path)
        assert config.store.url == "postgresql://hermes:secret@db:5432/hermes"
        assert config.server.key == values["API_SERVER_KEY"]
        assert {port.rpartition(":")[2] for port in service.get("ports", ())} <= {str(ServerSettings().port)}
    seconds = int(services["one"]["stop_grace_period"].removesuffix("s"))
    assert seconds > ServerSettings().drain_seconds + ServerSettings().graceful_seconds
    database = services["db"]["environment"]
    assert (database["POSTGRES_USER"], database["POSTGRES_DB"]) == ("hermes", "hermes")


@pytest.mark.slow
def test_the_services_of_the_compose_file_run(tmp_path: Path, postgres: PostgresServer) -> None:
    """`init` twice, as with each `up`, then both gateways with the image's command: requests go to them in turn, and each ends its stop with 0."""
    services = compose()["services"]
    entry, default, image = container()
    assert entry == ["hermes-trio"]
    url = postgres.url(postgres.new_database())

    def environment(service: dict[str, Any]) -> dict[str, str]:
        settled = settle(service["environment"], DB_PASSWORD=PASSWORD, API_SERVER_KEY="the-same-key-0123456789")
        assert set(settled) == {"API_SERVER_KEY", "HERMES_STORE_URL"}
        # In the place of the container's network: loopback, a free port, and the tests' database.
        return {**image, **settled, "HERMES_STORE_URL": url, "API_SERVER_HOST": "127.0.0.1", "API_SERVER_PORT": "0"}

    for _ in range(2):
        done = subprocess.run(
            [str(PROGRAM), *services["init"]["command"]],
            env=clean_environment(tmp_path / "init", **{**environment(services["init"]), "HERMES_HOME": str(tmp_path)}),
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 0, done.stderr
    with ExitStack() as stack:
        servers: list[ServerProcess] = []
        for name in ("one", "two"):
            home = tmp_path / name
            own = {**environment(services[name]), "HERMES_HOME": str(home)}
            command = [str(PROGRAM), *(services[name].get("command") or default)]
            servers.append(
                stack.enter_context(
                    server_process(home, environment=own, key=own.pop("API_SERVER_KEY"), command=command)
                )
            )
        talk(servers)
        for server in servers:
            began = time.monotonic()
            assert server.stop() == 0, server.output
            assert "drained in" in server.output
            assert time.monotonic() - began < 60


def talk(servers: Sequence[ServerProcess]) -> None:
    """Use servers in turn: a run that one of them has started is read on the next, and a session goes on."""
    turns = cycle(servers)

    def ask(method: str, path: str, **more: Any) -> Any:
        server = next(turns)
        with httpx2.Client(base_url=server.url, headers=server.headers, timeout=30, trust_env=False) as http:
            return http.request(method, path, **more).raise_for_status().json()

    for number in range(4):
        run = ask("POST", "/v1/runs", json={"input": f"hello {number}", "session_id": "talk"})
        assert ask("GET", f"/v1/runs/{run['run_id']}?wait=settled")["status"] == "completed"
    nodes = ask("GET", "/health/detailed")["nodes"]
    assert len(nodes) == 2
    assert len({node["configuration"] for node in nodes} - {""}) <= 1  # it is told with the first heartbeat
    whole = ask("GET", "/v1/tree")
    assert [other["answers"] for other in whole["others"]] == [True]


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
def test_systemd_accepts_the_unit_with_the_drop_in(tmp_path: Path) -> None:
    """The drop-in replaces the command of the unit, and leaves no directive that systemd does not know."""
    [drop_in] = [block for block in blocks("ini") if "workers.conf" in block]
    (tmp_path / UNIT.name).write_text(UNIT.read_text().replace(INSTALLED, str(PROGRAM)))
    (tmp_path / f"{UNIT.name}.d").mkdir()
    (tmp_path / f"{UNIT.name}.d" / "workers.conf").write_text(drop_in.replace(INSTALLED, str(PROGRAM)))
    done = subprocess.run(
        ["systemd-analyze", "verify", tmp_path / UNIT.name], capture_output=True, text=True, timeout=30
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.slow
def test_the_command_of_the_unit_runs_with_its_environment_and_stops_on_its_signal(
    tmp_path: Path, postgres_url: str
) -> None:
    """ExecStart of the drop-in with the lines of the environment file: all workers serve the key, and SIGTERM to the main process drains them, with 0."""
    drop_in, lines = blocks("ini")
    [command] = re.findall(r"^ExecStart=(.+)$", drop_in, re.MULTILINE)
    words = shlex.split(command)
    assert words[0] == INSTALLED
    words = [str(PROGRAM), *words[1:]]
    assert words[words.index("--host") + 1] == "0.0.0.0"
    words[words.index("--host") + 1] = "127.0.0.1"
    given = dict(line.split("=", 1) for line in lines.splitlines() if line and not line.startswith("#"))
    assert set(given) == {"API_SERVER_KEY", "HERMES_STORE_URL"}
    own = {"HERMES_STORE_URL": postgres_url, "XDG_STATE_HOME": str(tmp_path / "work")}
    unit = UNIT.read_text()
    assert "KillMode=mixed" in unit
    assert "KillSignal=" not in unit  # SIGTERM is the default
    with server_process(tmp_path, environment=own, command=[*words, "--port", "0"]) as server:
        assert "with 4 workers" in server.output
        with httpx2.Client(base_url=server.url, headers=server.headers, timeout=30, trust_env=False) as http:
            server.wait_for(r"listens on")
            assert http.get("/v1/runs").status_code == 200
        server.signal(signal.SIGTERM)
        assert server.wait() == 0, server.output
        assert "4 workers drained in" in server.output
