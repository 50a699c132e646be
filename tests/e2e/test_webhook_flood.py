"""Ten thousand deliveries against the real server: a tenth of them fail, some come twice, and the server is killed again and again in between."""

from __future__ import annotations

import random
import sqlite3
from collections import Counter
from pathlib import Path

import httpx2
import pytest
import trio

from hermes_trio.store import open_store
from tests.adapters.webhook_requests import SECRET

from .served_gateway import Served, open_served

DELIVERIES = 10_000
SENDERS = 32
KILLS = 5

CONFIG = f"""
[agent]
demo_directives = ["webhook"]

[log]
level = "error"

[webhook]
secret = "{SECRET}"
rate_limit = 1000000
max_pending = 2000

[webhook.routes.flood]
prompt = "{{text}}"
"""


class Flood:
    """Senders that retry until a delivery is taken, and keep what they were told."""

    def __init__(self, count: int, seed: int) -> None:
        chance = random.Random(seed)
        self.waiting = [f"d{number:05}" for number in range(count)]
        self.texts = {one: self._text(one, chance) for one in self.waiting}
        self.twice = {one for one in self.waiting if chance.random() < 0.05}
        chance.shuffle(self.waiting)
        self.open = count
        self.taken: dict[str, Counter[str]] = {}
        self.served: Served | None = None
        self.up = trio.Event()

    @staticmethod
    def _text(one: str, chance: random.Random) -> str:
        kind = chance.random()
        if kind < 0.1:
            return f"!fail {one}"
        return f"!sleep 0.2\n{one}" if kind < 0.2 else one

    async def send(self) -> None:
        """One sender: the next delivery, again and again until it is taken."""
        while self.waiting:
            one = self.waiting.pop()
            times = 2 if one in self.twice else 1
            while times:
                status = await self._try(one)
                if status:
                    self.taken.setdefault(one, Counter())[status] += 1
                    times -= 1
            self.open -= 1

    async def _try(self, one: str) -> str:
        await self.up.wait()
        served = self.served
        assert served is not None
        try:
            answer = await served.deliver("flood", {"text": self.texts[one]}, delivery=one)
        except (httpx2.HTTPError, RuntimeError):
            # Also the client of a server that was killed since this sender looked: it is closed, which httpx calls a RuntimeError.
            await trio.sleep(0.05)
            return ""
        if answer.status_code == 503:
            await trio.sleep(0.1)
            return ""
        assert answer.status_code in (200, 202), answer.text
        return str(answer.json()["status"])


@pytest.mark.slow
async def test_every_accepted_delivery_has_one_session_that_ended(tmp_path: Path) -> None:
    """One session row each, ended as webhook_complete and prunable, one terminal state each; what had begun is never begun again, what had not is begun."""
    flood = Flood(DELIVERIES, seed=7)
    kills = 0
    async with trio.open_nursery() as senders:
        for _ in range(SENDERS):
            senders.start_soon(flood.send)
        while flood.open:
            async with open_served(tmp_path, CONFIG) as served:
                flood.served = served
                flood.up.set()
                goal = len(flood.taken) + DELIVERIES // (KILLS + 1)
                while flood.open and (kills >= KILLS or len(flood.taken) < goal):  # noqa: ASYNC110 - counted by the senders
                    await trio.sleep(0.02)
                if flood.open:
                    flood.up = trio.Event()
                    kills += 1
                    await served.kill()
                else:
                    await _idle(served)
                    assert await served.stop() == 0
    assert kills == KILLS
    assert len(flood.taken) == DELIVERIES
    async with open_served(tmp_path, CONFIG) as served:
        # Whatever the last kill left is settled by now.
        await _idle(served)
        assert await served.stop() == 0
    _check(tmp_path / "state.db", flood)
    async with open_store(tmp_path / "state.db", maintenance=False) as store:
        assert await store.prune_sessions(-1, source="webhook") == DELIVERIES


async def _idle(served: Served) -> None:
    with trio.fail_after(120):
        while (await served.ask("GET", "/health/detailed"))["readiness"]["checks"]["background_queues"]["inbox"]:  # noqa: ASYNC110
            await trio.sleep(0.1)


def _check(path: Path, flood: Flood) -> None:
    with sqlite3.connect(path) as db:
        reasons = Counter(
            reason for (reason,) in db.execute("SELECT end_reason FROM sessions WHERE source = 'webhook' AND ended_at")
        )
        keys = [key for (key,) in db.execute("SELECT session_key FROM sessions WHERE source = 'webhook'")]
        inbox = Counter(
            state for (state,) in db.execute("SELECT state FROM inbox WHERE inbox = 'webhook' AND kind = 'message'")
        )
        begun = Counter(
            session
            for (session,) in db.execute(
                "SELECT s.session_key FROM messages m JOIN sessions s ON s.n = m.session"
                " WHERE s.source = 'webhook' AND m.role = 'user'"
            )
        )
        known = db.execute("SELECT count(*) FROM webhook_deliveries").fetchone()[0]
    assert known == DELIVERIES
    assert reasons == {"webhook_complete": DELIVERIES}
    assert len(keys) == len(set(keys)) == DELIVERIES
    assert inbox["delivered"] + inbox["interrupted"] == sum(inbox.values()) == DELIVERIES
    assert max(begun.values()) == 1, "a delivery was begun twice"
    # A sender that was told nothing (the server died) asks again and is told of the duplicate; nobody was told "accepted" twice.
    assert all(told["accepted"] <= 1 for told in flood.taken.values())
