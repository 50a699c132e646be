"""schemathesis over the served OpenAPI document of the real server: thousands of requests, no failure and no 5xx."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from .server_process import KEY, clean_environment, server_process

REQUESTS = 2_000

EXCLUDED_OPERATIONS = (
    # It ends the intake for good, so nothing after it would be tested; it has tests of its own.
    "drain_start",
    # Streams that go on until their run ends, or for ever; they have tests of their own.
    "run_events",
    "tree_events",
    "session_chat_stream",
)

EXCLUDED_CHECKS = (
    # Some rules are beyond a JSON schema: a message needs text that is not blank or an image, titles are unique in a tenant, `conversation` and
    # `previous_response_id` exclude each other. That such requests are 400 with the right `param` is tested by hand.
    "positive_data_acceptance",
)


@pytest.mark.slow
@pytest.mark.parametrize("fast_path", [True, False], ids=["fast", "stock"])
def test_the_document_is_kept(tmp_path: Path, fast_path: bool) -> None:
    """Every answer to generated requests, valid or not, is one that the document describes."""
    (tmp_path / "config.toml").write_text(f"[server]\nfast_path = {str(fast_path).lower()}\n[log]\nlevel = 'error'\n")
    with server_process(tmp_path) as server:
        excluded = [argument for name in EXCLUDED_OPERATIONS for argument in ("--exclude-operation-id", name)]
        ran = subprocess.run(
            [
                str(Path(sys.executable).with_name("schemathesis")),
                "run",
                f"{server.url}/openapi.json",
                *("--header", f"Authorization: Bearer {KEY}"),
                *("--phases", "examples,coverage,fuzzing,stateful"),
                *("--max-examples", "60"),
                *("--exclude-checks", ",".join(EXCLUDED_CHECKS)),
                *("--seed", "1"),
                "--no-color",
                *excluded,
            ],
            capture_output=True,
            text=True,
            timeout=900,
            check=False,
            cwd=tmp_path,
            env=clean_environment(tmp_path),
        )
        assert ran.returncode == 0, ran.stdout[-8000:]
        counted = re.search(r"(\d+) generated", ran.stdout)
        assert counted, ran.stdout[-2000:]
        assert int(counted[1]) >= REQUESTS
        assert server.is_alive()
        assert server.stop() == 0
        assert "Traceback" not in server.output
