"""The load of the last minutes: what a sample has, how many are kept, and who takes them."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing

from hermes_trio.config import load_config
from hermes_trio.gateway.serving import open_server
from hermes_trio.http import load
from hermes_trio.http.auth import AdminKey
from hermes_trio.http.load import KEPT, sample_load

from .gateway import KEY, open_gateway


async def test_samples_count_what_was_answered_and_what_is_alive_and_are_bounded() -> None:
    """Answers a second, nodes by kind, how late the loop was; the newest are kept, and a page asks for those that it has not."""
    async with open_gateway() as gateway:
        core = gateway.core
        await core.load.take(core, 2.0, 0.0)
        for _ in range(6):
            await gateway.http.get("/v1/models")
        await core.load.take(core, 2.0, 0.0123)
        first, second = (await gateway.http.get("/health/load")).json()["data"]
        assert (first["number"], second["number"], second["requests"], second["late"]) == (1, 2, 3.0, 12.3)
        assert second["kinds"]["runtime"] == 1
        newer = (await gateway.http.get("/health/load?after=1")).json()
        assert (newer["data"], newer["every"]) == ([second], 2.0)
        for after in ("x", "-1", "9" * 30, ""):
            assert len((await gateway.http.get(f"/health/load?after={after}")).json()["data"]) == 2
        for _ in range(KEPT + 5):
            await core.load.take(core, 2.0, 0.0)
        kept = (await gateway.http.get("/health/load")).json()["data"]
        assert (len(kept), kept[-1]["number"]) == (KEPT, KEPT + 7)
        # Counts of the whole server, for every key; nothing without one.
        del gateway.http.headers["Authorization"]
        assert (await gateway.http.get("/health/load")).status_code == 401


async def test_a_store_that_fails_or_hangs_costs_its_count_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sample is taken all the same, with the count of before."""

    async def fail() -> dict[str, int]:
        raise OSError("no store")

    monkeypatch.setattr(load, "STORE_SECONDS", 0.01)
    async with open_gateway() as gateway:
        core = gateway.core
        for backlog in (fail, partial(trio.sleep, 3600.0)):
            broken: Any = backlog
            with monkeypatch.context() as patch:
                patch.setattr(core.store, "backlog", broken)
                for _ in range(load.STORE_EVERY):
                    await core.load.take(core, 2.0, 0.0)
        assert [one.outbox for one in core.load.after(0)] == [0] * (2 * load.STORE_EVERY)


async def test_the_server_samples_while_it_serves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Samples are taken without a request; the sampling ends with the server."""
    monkeypatch.setattr(load, "EVERY_SECONDS", 0.01)
    config = load_config({}, home=tmp_path, server={"port": 0})
    with trio.fail_after(30):
        async with open_server(config, AdminKey(KEY), in_memory=True) as serving:
            while len(serving.gateway.api.load.after(0)) < 3:  # noqa: ASYNC110
                await trio.sleep(0.01)


async def test_nothing_is_sampled_on_a_virtual_clock(autojump_clock: trio.testing.MockClock) -> None:
    """The timer would advance the virtual clock."""
    nobody: Any = None
    before = autojump_clock.current_time()
    await sample_load(nobody)
    assert autojump_clock.current_time() == before
