"""Clients of the nodes: they chat, start runs and follow them from other nodes, approve, deliver webhooks, write to the bot, watch its jobs, and
record what was acknowledged.
"""

from __future__ import annotations

import hmac
import itertools
import json
import random
import time
from collections import Counter
from collections.abc import AsyncGenerator, Iterable, Mapping
from contextlib import aclosing
from typing import Any, cast

import httpx2
import trio

from .cluster import HEADERS, WEBHOOK_SECRET, ChaosNode, Cluster

REFUSED = frozenset({429, 503})
"""Status codes of requests that were refused before they began."""

THINKS = (0.2, 1.6)
"""Seconds between two requests of a client: three nodes and their database share a small machine."""

CLIENTS: Mapping[str, int] = {
    "chats": 12,
    "runs": 12,
    "approvals": 4,
    "hooks": 4,
    "people": 4,
    "jobs": 2,
    "talks": 4,
    "pages": 2,
}
"""The default number of clients of each kind."""

ENDINGS = (
    "nterrupted",
    ") was lost: ",
    "was lost with its backend",
    "was terminated by kill_all",
    "The server stopped while",
    "(Stopped:",
    "(This failed:",
    "[webhook/events: failed.",
)
"""Texts by which a user is correctly told that a message gets no answer."""

SHARING = 2
"""The number of clients that share one session, on any nodes."""

TURNS = 15 // SHARING
"""Turns of each of them in a session; long sessions would dominate the load."""

TIMEOUT = 150.0
"""Seconds after which an unanswered client counts as forgotten: many times what an idle machine needs."""


class Ledger:
    """What the clients sent, what was acknowledged, and what they received."""

    def __init__(self) -> None:
        self.said: dict[str, str] = {}
        """Texts of chats, with their session."""
        self.answered: set[str] = set()
        """The texts that were answered with 200."""
        self.runs: dict[str, str] = {}
        """Idempotency keys, with the run that was acknowledged for each."""
        self.ends: dict[str, str] = {}
        """Runs, with the end that a client was told."""
        self.told: dict[str, tuple[float, float]] = {}
        """Runs whose end a client waited for, with the times of the request and of its answer."""
        self.written: dict[str, int] = {}
        """Texts that the bot must send once, because users wrote them, webhooks delivered them or jobs printed them; with their chat."""
        self.received: set[str] = set()
        """Messages of users to the bot: each must be stored once."""
        self.responses: dict[str, str] = {}
        """Texts of conversations of responses, with the response that answered each."""
        self.approved = 0
        """Approvals that were answered."""
        self.statuses: Counter[int] = Counter()
        self.broken = 0
        """Requests without an answer."""
        self.wrong: list[str] = []
        """Observed violations."""


class Load:
    """Runs clients until the nursery is cancelled, or until `stop`; then each finishes what it has begun."""

    def __init__(self, cluster: Cluster, seed: int) -> None:
        self.cluster = cluster
        self.ledger = Ledger()
        self._random = random.Random(seed)
        self._stopped = False
        self._busy = 0
        self._idle = trio.Event()

    def start(self, nursery: trio.Nursery, clients: Mapping[str, int]) -> None:
        """Start this many clients of each kind; the number in `CLIENTS` for kinds that are not named."""
        acts = {
            "chats": self._chat,
            "runs": self._run,
            "approvals": self._approve,
            "hooks": self._deliver,
            "people": self._write,
            "jobs": self._watch,
            "talks": self._talk,
            "pages": self._page,
        }
        for place, (kind, count) in enumerate({**CLIENTS, **clients}.items()):
            for number in range(count):
                self.cluster.telegram.add_private_chat(1000 * (place + 1) + number)
                nursery.start_soon(self._client, acts[kind], 1000 * (place + 1) + number)

    async def stop(self) -> None:
        """Begin nothing new, and wait until everything that was begun has ended."""
        self._stopped = True
        while self._busy:
            self._idle = trio.Event()
            await self._idle.wait()

    async def _client(self, act: Any, number: int) -> None:
        self._busy += 1
        try:
            # Without certificates: loading them blocks this loop, and with it every node's network, for a second in all.
            options: dict[str, Any] = {"timeout": httpx2.Timeout(60), "trust_env": False, "verify": False}
            async with httpx2.AsyncClient(headers=HEADERS, **options) as http:
                for turn in itertools.count():
                    if self._stopped:
                        return
                    await act(http, number, turn)
                    await trio.sleep(self._random.uniform(*THINKS))
        finally:
            self._busy -= 1
            self._idle.set()

    def _node(self, but: ChaosNode | None = None) -> ChaosNode:
        """Return a node that accepts connections, other than `but` if there is one, as a load balancer would."""
        alive = [node for node in self.cluster.nodes if node.alive and not node.paused]
        return self._random.choice([node for node in alive if node is not but] or alive or self.cluster.nodes)

    async def _ask(
        self, http: httpx2.AsyncClient, method: str, path: str, *, node: ChaosNode | None = None, **more: Any
    ) -> tuple[int, Any]:
        """Send a request to this node, or to any; return the status and the body of the response, or status 0 without one."""
        node = node or self._node()
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
        session, text = f"chat-{number // SHARING}-{turn // TURNS}", f"chat-{number}-{turn}."
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

    async def _talk(self, http: httpx2.AsyncClient, number: int, turn: int) -> None:
        """Continue a conversation of responses, which another client continues on other nodes; then repeat the request: the answer is the same."""
        text, conversation = f"talk-{number}-{turn}.", f"talk-{number // SHARING}-{turn // TURNS}"
        body = {"model": "demo", "input": text, "conversation": conversation}
        headers = {"Idempotency-Key": text}
        for _ in range(2):
            status, answer = await self._ask(http, "POST", "/v1/responses", json=body, headers=headers)
            if status == 200:
                before = self.ledger.responses.setdefault(text, answer["id"])
                if before != answer["id"]:
                    self.ledger.wrong.append(f"{text}: answered with {before}, then with {answer['id']}")
            elif status and status not in REFUSED and status != 424:
                self.ledger.wrong.append(f"response to {text}: {status} {answer}")

    async def _page(self, http: httpx2.AsyncClient, chat: int, turn: int) -> None:
        """Send a message of the web chat to two nodes, and wait at others for its answer."""
        text, path = f"page-{chat}-{turn}.", f"/v1/web/conversations/page-{chat}-{turn // TURNS}/messages"
        body = {"text": text, "id": text}
        self.ledger.received.add(text)
        for _ in range(2):
            if await self._until_done(http, text, "POST", path, {200, 202}, json=body) is None:
                return
        with trio.move_on_after(TIMEOUT):
            while True:
                status, found = await self._ask(http, "GET", path)
                shown = json.dumps(found["data"] + found["asides"]) if status == 200 else ""
                if f"You said: {text}" in shown or (shown.rpartition(text)[1] and any(one in shown for one in ENDINGS)):
                    if shown.count(f"You said: {text}") > 1:
                        self.ledger.wrong.append(f"{text}: answered twice in the web chat")
                    return
                await trio.sleep(0.2)
        self.ledger.wrong.append(
            f"{text}: no answer in the web chat within {TIMEOUT:g} s: {await self.cluster.trace(text, chat)}"
        )

    async def _until_done(
        self, http: httpx2.AsyncClient, what: str, method: str, path: str, good: set[int], **more: Any
    ) -> Any:
        with trio.move_on_after(TIMEOUT):
            while True:
                status, answer = await self._ask(http, method, path, **more)
                if status in good:
                    return answer
                if status and status not in REFUSED:
                    self.ledger.wrong.append(f"{what}: {status} {answer}")
                    return None
        self.ledger.wrong.append(f"{what}: no answer within {TIMEOUT:g} s")
        return None

    async def _run(self, http: httpx2.AsyncClient, number: int, turn: int) -> None:
        key = f"run-{number}-{turn}."
        headers = {"Idempotency-Key": key}
        body = {"input": f"!sleep {self._random.choice((0, 0.2, 0.8))}\n{key}"}
        node = self._node()
        status, started = await self._ask(http, "POST", "/v1/runs", node=node, json=body, headers=headers)
        if status not in (200, 202):
            node = None
            started = await self._until_done(http, key, "POST", "/v1/runs", {200, 202}, json=body, headers=headers)
        if started is None:
            return
        run_id = self.ledger.runs[key] = started["run_id"]
        await (self._follow(http, run_id) if turn % 2 else self._wait_for(http, run_id, node))

    async def _wait_for(self, http: httpx2.AsyncClient, run_id: str, runs_on: ChaosNode | None = None) -> None:
        """Wait for the end of a run, through another node than the one that runs it."""
        with trio.move_on_after(TIMEOUT):
            while True:
                path = f"/v1/runs/{run_id}?wait=ended&timeout=40"
                asked_at = time.time()
                status, found = await self._ask(http, "GET", path, node=self._node(runs_on))
                if status == 200 and found["status"] in ("completed", "failed", "cancelled"):
                    self._told(run_id, found["status"])
                    self.ledger.told[run_id] = (asked_at, time.time())
                    return
                if status not in (0, 200, *REFUSED):
                    self.ledger.wrong.append(f"{run_id}: {status} {found}")
                    return
        self.ledger.wrong.append(f"{run_id}: its end was not told within {TIMEOUT:g} s")

    def _told(self, run_id: str, status: str) -> None:
        before = self.ledger.ends.setdefault(run_id, status)
        if before != status:
            self.ledger.wrong.append(f"{run_id}: told {before}, then {status}")

    async def _follow(self, http: httpx2.AsyncClient, run_id: str) -> None:
        """Read the events of a run to its end; continue at another node after a few events and whenever the stream breaks."""
        last, numbers = "", list[int]()
        with trio.move_on_after(TIMEOUT):
            while True:
                headers = {"Last-Event-ID": last} if last else {}
                try:
                    address = f"{self._node().address}/v1/runs/{run_id}/events"
                    stay = self._random.randrange(1, 5)
                    async with (
                        http.stream("GET", address, headers=headers) as answer,
                        aclosing(cast("AsyncGenerator[str]", answer.aiter_lines())) as lines,
                    ):
                        if answer.status_code != 200:
                            await trio.sleep(0.1)
                            continue
                        async for line in lines:
                            if not line and stay <= 0:
                                break
                            if line.startswith("id: "):
                                stay -= 1
                                last = line[4:]
                                numbers.append(int(last.rpartition("-")[2]))
                            elif line.startswith("data: "):
                                event = json.loads(line[6:])
                                if event["event"] == "resync":
                                    # Events that the killed node had sent and not stored are replaced by others.
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
        self.ledger.wrong.append(f"{run_id}: its events had no end within {TIMEOUT:g} s")

    async def _approve(self, http: httpx2.AsyncClient, number: int, turn: int) -> None:
        """Start a run that requests an approval, refuse it through any node, and wait for the run's end."""
        key = f"ask-{number}-{turn}."
        body = {"input": f"!run rm -rf ./{key}"}
        headers = {"Idempotency-Key": key}
        started = await self._until_done(http, key, "POST", "/v1/runs", {200, 202}, json=body, headers=headers)
        if started is None:
            return
        run_id = self.ledger.runs[key] = started["run_id"]
        with trio.move_on_after(TIMEOUT):
            while True:
                status, found = await self._ask(http, "GET", f"/v1/runs/{run_id}")
                if status == 200 and found["status"] in ("completed", "failed", "cancelled"):
                    break
                if status == 200 and found.get("approvals"):
                    answer = {"choice": "deny"}
                    status, found = await self._ask(http, "POST", f"/v1/runs/{run_id}/approval", json=answer)
                    self.ledger.approved += status == 200
                    if status not in (0, 200, 409, *REFUSED):
                        self.ledger.wrong.append(f"the approval of {run_id}: {status} {found}")
                await trio.sleep(0.1)
        await self._wait_for(http, run_id)

    async def _deliver(self, http: httpx2.AsyncClient, chat: int, turn: int) -> None:
        """Deliver a webhook to two nodes, one after the other, and wait for its reply in the chat."""
        text = f"hook-{chat}-{turn}."
        body = json.dumps({"text": text, "chat": str(chat)}).encode()
        digest = hmac.digest(WEBHOOK_SECRET.encode(), body, "sha256").hex()
        headers = {"X-Hub-Signature-256": f"sha256={digest}", "X-Request-ID": text}
        before = self._endings(chat)
        for _ in range(2):
            answer = await self._until_done(
                http, text, "POST", "/webhooks/events", {200, 202}, content=body, headers=headers
            )
            if answer is None:
                return
        await self._hear(text, chat, before)

    async def _write(self, http: httpx2.AsyncClient, chat: int, turn: int) -> None:
        """Write to the bot, and wait for its reply."""
        text = f"person-{chat}-{turn}."
        self.ledger.received.add(text)
        before = self._endings(chat)
        self.cluster.telegram.say(text, user_id=chat)
        await self._hear(text, chat, before)

    async def _watch(self, http: httpx2.AsyncClient, chat: int, turn: int) -> None:
        """Let the bot run a command in the background, and wait for its output, which the text of the command does not contain."""
        text = f"!bg sleep 0.3; printf 'job%s' -{chat}-{turn}."
        self.ledger.received.add(text)
        before = self._endings(chat)
        self.cluster.telegram.say(text, user_id=chat)
        await self._hear(f"job-{chat}-{turn}.", chat, before)

    def _endings(self, chat: int) -> int:
        return endings_in(self.cluster.telegram.messages, chat)

    async def _hear(self, text: str, chat: int, before: int) -> None:
        """Wait until a text was sent to a chat, or until the chat has got more of `ENDINGS` than `before`."""
        self.ledger.written[text] = chat
        said = self.cluster.telegram.messages
        with trio.move_on_after(TIMEOUT):
            while not any(text in message.text for message in said) and self._endings(chat) == before:  # noqa: ASYNC110
                await trio.sleep(0.05)
            return
        where = await self.cluster.trace(text, chat)
        self.ledger.wrong.append(f"{text}: the bot said nothing within {TIMEOUT:g} s: {where}")


def endings_in(said: Iterable[Any], chat: int) -> int:
    """Return how often a user was told that a message gets no answer."""
    return sum(message.chat_id == chat and any(one in message.text for one in ENDINGS) for message in said)
