"""Clients of the nodes: they chat, start runs and follow them from other nodes, write to the bot, and remember what they were promised."""

from __future__ import annotations

import itertools
import json
import random
import time
from collections import Counter
from typing import Any

import httpx2
import trio

from .cluster import HEADERS, ChaosNode, Cluster

REFUSED = frozenset({429, 503})
"""Answers that promise nothing: the request was not begun."""

THINKS = (0.05, 0.3)
"""How long a client waits between two requests: three nodes and their database share the cores of a small machine."""

TURNS = 15
"""Turns of a session: a long one costs more than the nodes do."""

PATIENCE = 150.0
"""How long a client tries before it counts as forgotten: many times what a calm machine needs."""


class Ledger:
    """What the clients said, what they were promised, and what they were told."""

    def __init__(self) -> None:
        self.said: dict[str, str] = {}
        """Texts of chats, and their session."""
        self.answered: set[str] = set()
        """Those that were answered with 200."""
        self.runs: dict[str, str] = {}
        """Idempotency keys, and the run that was promised for each."""
        self.ends: dict[str, str] = {}
        """Runs, and the end that somebody was told."""
        self.told: dict[str, tuple[float, float]] = {}
        """Runs whose end was waited for, when the request that was told it was made, and when it was told."""
        self.written: dict[str, int] = {}
        """Texts that people wrote to the bot, and their chat."""
        self.statuses: Counter[int] = Counter()
        self.broken = 0
        """Requests without an answer."""
        self.wrong: list[str] = []
        """What must not happen."""


class Load:
    """Clients for as long as the nursery lives, or until `stop`; then each finishes what it has begun."""

    def __init__(self, cluster: Cluster, seed: int) -> None:
        self.cluster = cluster
        self.ledger = Ledger()
        self._random = random.Random(seed)
        self._stopped = False
        self._busy = 0
        self._idle = trio.Event()

    def start(self, nursery: trio.Nursery, *, chats: int = 4, runs: int = 4, people: int = 2) -> None:
        """Start so many clients of each kind."""
        for number in range(chats):
            nursery.start_soon(self._client, self._chat, number)
        for number in range(runs):
            nursery.start_soon(self._client, self._run, number)
        for number in range(people):
            self.cluster.telegram.add_private_chat(1000 + number)
            nursery.start_soon(self._client, self._write, number)

    async def stop(self) -> None:
        """Begin nothing new, and wait until what was begun has its end."""
        self._stopped = True
        while self._busy:
            self._idle = trio.Event()
            await self._idle.wait()

    async def _client(self, act: Any, number: int) -> None:
        self._busy += 1
        try:
            async with httpx2.AsyncClient(headers=HEADERS, timeout=httpx2.Timeout(60), trust_env=False) as http:
                for turn in itertools.count():
                    if self._stopped:
                        return
                    await act(http, number, turn)
                    await trio.sleep(self._random.uniform(*THINKS))
        finally:
            self._busy -= 1
            self._idle.set()

    def _node(self) -> ChaosNode:
        """A node that can be connected to; a load balancer sends nothing to one that refuses connections."""
        alive = [node for node in self.cluster.nodes if node.alive and not node.paused]
        return self._random.choice(alive or self.cluster.nodes)

    async def _ask(self, http: httpx2.AsyncClient, method: str, path: str, **more: Any) -> tuple[int, Any]:
        """The status and the body of an answer; 0 if there was none."""
        node = self._node()
        try:
            answer = await http.request(method, node.address + path, **more)
        except httpx2.TransportError:
            self.ledger.broken += 1
            await trio.sleep(0.05)
            return 0, None
        self.ledger.statuses[answer.status_code] += 1
        if answer.status_code in REFUSED:
            if "retry-after" not in answer.headers and "server_shutdown" not in answer.text:
                self.ledger.wrong.append(f"{answer.status_code} without Retry-After: {answer.text[:200]}")
            await trio.sleep(0.1)
        try:
            return answer.status_code, answer.json()
        except ValueError:
            return answer.status_code, None

    async def _chat(self, http: httpx2.AsyncClient, number: int, turn: int) -> None:
        session, text = f"chat-{number}-{turn // TURNS}", f"chat-{number}-{turn}."
        if turn % TURNS == 0:
            await self._until_done(
                http, f"session {session}", "POST", "/api/sessions", {201, 200, 409}, json={"id": session}
            )
        self.ledger.said[text] = session
        body = {"model": "demo", "messages": [{"role": "user", "content": text}]}
        headers = {"X-Hermes-Session-Id": session}
        status, answer = await self._ask(http, "POST", "/v1/chat/completions", json=body, headers=headers)
        if status == 200:
            self.ledger.answered.add(text)
        elif status and status not in REFUSED and status != 424:
            self.ledger.wrong.append(f"chat {text}: {status} {answer}")

    async def _until_done(
        self, http: httpx2.AsyncClient, what: str, method: str, path: str, good: set[int], **more: Any
    ) -> Any:
        with trio.move_on_after(PATIENCE):
            while True:
                status, answer = await self._ask(http, method, path, **more)
                if status in good:
                    return answer
                if status and status not in REFUSED:
                    self.ledger.wrong.append(f"{what}: {status} {answer}")
                    return None
        self.ledger.wrong.append(f"{what}: no answer within {PATIENCE:g} s")
        return None

    async def _run(self, http: httpx2.AsyncClient, number: int, turn: int) -> None:
        key = f"run-{number}-{turn}."
        headers = {"Idempotency-Key": key}
        body = {"input": f"!sleep {self._random.choice((0, 0.2, 0.8))}\n{key}"}
        started = await self._until_done(http, key, "POST", "/v1/runs", {200, 202}, json=body, headers=headers)
        if started is None:
            return
        run_id = self.ledger.runs[key] = started["run_id"]
        if turn % 2:
            await self._follow(http, run_id)
            return
        with trio.move_on_after(PATIENCE):
            while True:
                path = f"/v1/runs/{run_id}?wait=ended&timeout=40"
                asked_at = time.time()
                status, found = await self._ask(http, "GET", path)
                if status == 200 and found["status"] in ("completed", "failed", "cancelled"):
                    self._told(run_id, found["status"])
                    self.ledger.told[run_id] = (asked_at, time.time())
                    return
                if status not in (0, 200, *REFUSED):
                    self.ledger.wrong.append(f"{run_id}: {status} {found}")
                    return
        self.ledger.wrong.append(f"{run_id}: its end was not told within {PATIENCE:g} s")

    def _told(self, run_id: str, status: str) -> None:
        before = self.ledger.ends.setdefault(run_id, status)
        if before != status:
            self.ledger.wrong.append(f"{run_id}: told {before}, then {status}")

    async def _follow(self, http: httpx2.AsyncClient, run_id: str) -> None:
        """Read the events of a run to its end, going on at another node whenever the stream breaks."""
        last, numbers = "", list[int]()
        with trio.move_on_after(PATIENCE):
            while True:
                headers = {"Last-Event-ID": last} if last else {}
                try:
                    address = f"{self._node().address}/v1/runs/{run_id}/events"
                    async with http.stream("GET", address, headers=headers) as answer:
                        if answer.status_code != 200:
                            await trio.sleep(0.1)
                            continue
                        async for line in answer.aiter_lines():
                            if line.startswith("id: "):
                                last = line[4:]
                                numbers.append(int(last.rpartition("-")[2]))
                            elif line.startswith("data: "):
                                event = json.loads(line[6:])
                                if event["event"] == "resync":
                                    # What its dead node had told and not stored is told otherwise.
                                    last, numbers = "", []
                                elif event["event"] in ("run.completed", "run.failed", "run.cancelled"):
                                    self._told(run_id, event["event"].removeprefix("run."))
                                    if numbers != list(range(1, len(numbers) + 1)):
                                        self.ledger.wrong.append(f"{run_id}: a reader saw the events {numbers}")
                    if run_id in self.ledger.ends:
                        return
                except httpx2.TransportError:
                    self.ledger.broken += 1
                    await trio.sleep(0.05)
        self.ledger.wrong.append(f"{run_id}: its events had no end within {PATIENCE:g} s")

    async def _write(self, http: httpx2.AsyncClient, number: int, turn: int) -> None:
        """Write to the bot, and wait for what it says to that."""
        text, chat = f"person-{number}-{turn}.", 1000 + number
        self.ledger.written[text] = chat
        self.cluster.telegram.say(text, user_id=chat)
        with trio.move_on_after(PATIENCE):
            while not any(text in message.text for message in self.cluster.telegram.messages):  # noqa: ASYNC110
                await trio.sleep(0.05)
            await trio.sleep(0.3)
            return
        self.ledger.wrong.append(f"{text}: the bot said nothing within {PATIENCE:g} s")
