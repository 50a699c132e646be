"""The pages about the terminal, webhooks and cron, and the example configuration: what they show works as it stands there."""

from __future__ import annotations

import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import httpx2
import pytest

from hermes_trio.adapters.assembly import build_assembly
from hermes_trio.config import load_config

from .server_process import clean_environment, server_process

ROOT = Path(__file__).parents[2]
TOML = re.compile(r"^```toml\n(.*?)^```", re.MULTILINE | re.DOTALL)
PAGES = ("cli", "webhook", "cron")
VARIABLES = {"GITHUB_TOKEN": "ghp_example", "GITHUB_WEBHOOK_SECRET": "a secret"}


@pytest.mark.parametrize("page", PAGES)
def test_every_configuration_on_the_page_can_be_used(page: str, tmp_path: Path) -> None:
    """It is read, and every route and platform in it can be built."""
    for number, block in enumerate(TOML.findall((ROOT / f"docs/adapters/{page}.md").read_text())):
        file = tmp_path / f"{number}.toml"
        file.write_text(block)
        config = load_config(VARIABLES, home=tmp_path, path=file)
        assembly = build_assembly(config.tables, environment=VARIABLES, host="127.0.0.1")
        routes = tomllib.loads(block).get("webhook", {}).get("routes", {})
        assert set(routes) <= {"deploys", "reviews"}
        assert assembly.platforms is not None


def test_the_example_configuration_starts_as_it_is(tmp_path: Path) -> None:
    """And its webhook answers."""
    with server_process(tmp_path, arguments=["--config", str(ROOT / "examples/config.toml")]) as server:
        answer = httpx2.post(f"{server.url}/webhooks/hello", json={"name": "Ann"}, trust_env=False)
        assert answer.status_code == 202
        server.wait_for("Say hello to Ann")
        assert server.stop() == 0


@pytest.mark.skipif(shutil.which("openssl") is None or shutil.which("curl") is None, reason="needs openssl and curl")
def test_the_first_webhook_of_the_page_works(tmp_path: Path) -> None:
    """The commands are run as they stand there, against a server with the page's first configuration."""
    text = (ROOT / "docs/adapters/webhook.md").read_text()
    (tmp_path / "config.toml").write_text(TOML.findall(text)[0])
    shown = re.search(r"^```console\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    assert shown is not None
    lines = [line.removeprefix("$ ") for line in shown[1].splitlines()]
    *commands, expected = [line for line in lines if not line.startswith("hermes-trio serve")]
    with server_process(tmp_path) as server:
        script = "\n".join(commands).replace("http://127.0.0.1:8642", server.url)
        done = subprocess.run(
            ["bash", "-euc", script],
            capture_output=True,
            text=True,
            timeout=60,
            env=clean_environment(tmp_path),
            check=False,
        )
        assert done.stdout.strip() == expected, done.stderr
