"""The users and clients of a world: they write, start, stop, answer and read, through the platform and HTTP only."""

from __future__ import annotations

import hashlib
import hmac
import math
import random
from base64 import b64encode
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import attrs
import msgspec
import trio

from .client import Answer, Connects, NoAnswer, StreamedEvent, request, stream
from .node import ADMIN_KEY
from .platform import FIRST_PERSON, GROUP_CHAT, ShownMessage
from .program import PEOPLE, Step
from .script import marks, options_of

if TYPE_CHECKING:
    from .chores import Chores
    from .world import World

WEBHOOK_SECRET: Final = "simulated-webhook-secret-0123456789"
ATTEMPTS: Final = 40
"""The number of attempts for a request that gets no response, one every five seconds."""

CONVERSATION: Final = "/v1/web/conversations/home"
"""The conversation in the web chat; every tenant has one with this name."""

PAGE_SECONDS: Final = 150.0
"""Seconds until a page of the web chat is closed."""

READ_SECONDS: Final = 60.0
"""Seconds after which the last reader of a run gives up: its run should have settled before."""

LISTS: Final = ("/v1/runs", "/api/sessions", "/api/search?q=done", "/v1/approvals?state=answered", "/v1/grants")
"""What shows a tenant what it has. Each tenant reads all of it at the end of a world whose seed has the remainder `LISTED` by four."""

LISTED: Final = 1

FLOOD_SECONDS: Final = 2.0
"""Seconds between two requests of a flooding client, and the time limit of each."""

_OURS: Final = frozenset(
    {
        "stop",
        "leave",
        "reconnect",
        "approve",
        "poll",
        "stream",
        "repeat",
        "twice",
        "session",
        "inside",
        "group",
        "aside",
        "half",
        "torn",
        "old",
        "resume",
        "file",
    }
)


def file_text(number: int) -> str:
    """Return the content of the file that belongs to a step."""
    return f"the file of m{number}"


@attrs.define
class RunSeen:
    """A run as its client saw it."""

    number: int
    tenant: int
    text: str
    resumes: bool = False
    """Whether its client has asked that it is begun again when it is interrupted."""
    run_id: str = ""
    answers: list[int] = attrs.Factory(list[int])
    statuses: list[str] = attrs.Factory(list[str])
    live: list[StreamedEvent] = attrs.Factory(list[StreamedEvent])
    """The events of a reader that followed the run, with reconnects."""
    late: list[StreamedEvent] = attrs.Factory(list[StreamedEvent])
    """The events of a reader that began after the world had settled."""
    resyncs: int = 0
    stops: list[tuple[float, Any]] = attrs.Factory(list["tuple[float, Any]"])
    """The time of the response to each stop, and its receipt."""
    settled_at: float | None = None
    """The time at which a reader got the event that the run has settled."""
    approved: list[int] = attrs.Factory(list[int])
    foreign: list[int] = attrs.Factory(list[int])
    """The statuses of requests with the key of another tenant."""
    last: Any = None


@attrs.define
class ChatSeen:
    """A chat completion as its client saw it."""

    number: int
    tenant: int
    text: str
    status: int = 0
    answer: str = ""
    finished: str = ""
    """The reason for the end of a stream that has ended as announced."""


@attrs.define
class SaidOnPage:
    """A message that a person wrote in the web chat: the status of each attempt to send it, in order."""

    number: int
    tenant: int
    text: str
    answers: list[int] = attrs.Factory(list[int])


@attrs.define
class PageSeen:
    """A page of the web chat: the events that it received, and the messages of its conversation after the world has settled."""

    tenant: int
    events: list[StreamedEvent] = attrs.Factory(list[StreamedEvent])
    resyncs: int = 0
    connections: list[list[float]] = attrs.Factory(list["list[float]"])
    """When each of its connections was opened, and closed."""
    history: Any = None
    files: dict[str, list[tuple[int, bytes] | None]] = attrs.Factory(dict[str, "list[tuple[int, bytes] | None]"])
    """By the name of each file: what its owner and another tenant got, with status and body."""


@attrs.define
class WebhookSeen:
    """A delivery as its sender saw it: the status of each attempt, in order."""

    number: int
    text: str
    answers: list[int] = attrs.Factory(list[int])


@attrs.frozen
class Promise:
    """What was acknowledged to a client or operator: a query that counts rows, and the count that it must return at the end."""

    text: str
    sql: str
    values: tuple[Any, ...]
    count: int


class People:
    """Performs the actions of a program. See the module."""

    def __init__(self, world: World, nursery: trio.Nursery) -> None:
        self._world = world
        self._nursery = nursery
        self._seed = world.program.seed
        self.said: list[tuple[int, str]] = []
        self._askers: dict[str, int] = {}

    def _random(self, *about: object) -> random.Random:
        return random.Random(f"{self._seed} {about}")

    def arrange(self) -> None:
        """Start the task that answers requests for approval."""
        self._nursery.start_soon(self._answer_questions)

    def act(self, step: Step) -> None:
        """Perform a step, in a new task if it takes time."""
        self._world.trace.note("people", str(step).strip())
        text = f"m{step.number} " + " ".join(word for word in step.words.split() if word.partition("=")[0] not in _OURS)
        match step.kind:
            case "write":
                options = options_of(step.words)
                self._askers[f"m{step.number}"] = step.who
                if "file" in options:
                    self.said.append((step.who, self._world.chat.attach(step.who, f"m{step.number}.txt")))
                    return
                if "aside" not in options:
                    self.said.append((step.who, text))
                self._world.chat.say(step.who, text, group="group" in options, mention="aside" not in options)
            case "command":
                name = " ".join(word for word in step.words.split() if "=" not in word)
                self.said.append((step.who, name))
                self._world.chat.command(
                    step.who, name, group="group" in options_of(step.words), typed=bool(step.number % 2)
                )
            case "press":
                self._press_again(step)
            case "run":
                self._nursery.start_soon(self._run, step, text)
            case "chat":
                self._nursery.start_soon(self._chat, step, text)
            case "web":
                said = step.words if step.words.startswith("/") else text
                self._nursery.start_soon(self._web, step, said)
            case "webhook":
                self._nursery.start_soon(self._webhook, step, text)
            case "embedding":
                embedding = self._world.nodes[0].embedding
                if embedding is not None:
                    embedding.act(step.who, step.number, text, in_process="inside" in options_of(step.words))
            case "flood":
                self._nursery.start_soon(self._flood, step)
            case "chore":
                self._nursery.start_soon(self._chores().do, step)
            case _:
                raise ValueError(f"unknown kind of step {step.kind!r}")

    async def finish(self) -> None:
        """Read all runs and their events once more, after the world has settled; for every eighth seed also the health report."""
        world = self._world
        for run in world.seen.runs:
            if not run.run_id:
                continue
            key = world.keys[run.tenant]
            answer = await self._ask("GET", f"/v1/runs/{run.run_id}", key)
            run.last = None if answer is None or answer.status == 404 else answer.json
            foreign = await self._ask("GET", f"/v1/runs/{run.run_id}", world.keys[1 - run.tenant])
            run.foreign.append(0 if foreign is None else foreign.status)
            run.late = await self._read(run, key)
        for page in world.seen.pages:
            answer = await self._ask("GET", f"{CONVERSATION}/messages", world.keys[page.tenant])
            page.history = None if answer is None else answer.json
            await self._fetch_files(page)
        world.seen.confirmed = world.chat.confirmed([text for _, text in self.said])
        world.seen.said = list(self.said)
        if self._seed % 4 == LISTED:
            await self._list_everything()
        if self._seed % 8:  # the report imports modules and takes longer than any other request
            return
        health = await self._ask("GET", "/health/detailed", ADMIN_KEY)
        world.seen.health = None if health is None else health.json

    async def _fetch_files(self, page: PageSeen) -> None:
        """Fetch the files that a page shows, as their owner and as another tenant."""
        history: dict[str, Any] = page.history or {}
        shown: list[dict[str, Any]] = history.get("data", [])
        for message in shown:
            files: list[dict[str, Any]] = message["attachments"]
            for file in files:
                if file["name"] in page.files or file["part"] is None:
                    continue
                path = f"{CONVERSATION}/messages/{message['place']}/parts/{file['part']}"
                answers = [
                    await self._ask("GET", path, self._world.keys[who]) for who in (page.tenant, 1 - page.tenant)
                ]
                page.files[file["name"]] = [None if one is None else (one.status, one.body) for one in answers]

    async def _list_everything(self) -> None:
        """Let each tenant list and search everything that it may see; invariant 3 reads the responses."""
        world = self._world
        for tenant, key in enumerate(world.keys):
            for path in LISTS:
                answer = await self._ask("GET", path, key)
                if answer is not None and answer.status == 200:
                    world.seen.answers.append((tenant, f"GET {path}", answer.body))

    # -- the chat platform ---------------------------------------------------------------------------------------------------------

    async def _answer_questions(self) -> None:
        """Press a button of each request for approval: soon, late, twice, or never."""
        chat = self._world.chat
        answered: set[tuple[int, Any]] = set()
        shown = 0
        while True:
            for message in chat.messages(shown):
                shown += 1
                self._world.trace.note("chat", f"{message.chat}: {message.text!r}")
                where = (message.chat, message.id)
                if message.buttons and where not in answered:
                    answered.add(where)
                    self._nursery.start_soon(self._press, message)
            await chat.next_message()

    async def _press(self, message: ShownMessage) -> None:
        rng = self._random("press", message.id)
        how = rng.choice(("soon", "soon", "late", "twice", "never"))
        labels = [one for one in message.buttons if one in ("Allow once", "Deny")] or message.buttons
        asker = self._asker(message)
        if message.chat == GROUP_CHAT:
            # All members of a group see the buttons. Only the asker may use them.
            await trio.sleep(1.0)
            self._press_as((asker + 1) % PEOPLE, message, "Allow once")
        if how == "never":
            return
        await trio.sleep({"soon": 3.0, "twice": 3.0, "late": 70.0}[how])
        for _ in range(2 if how == "twice" else 1):
            self._press_as(asker, message, rng.choice(labels))

    def _press_as(self, person: int, message: ShownMessage, label: str) -> None:
        if label not in message.buttons:
            return
        who = "" if person == message.chat - FIRST_PERSON else f" by {FIRST_PERSON + person}"
        self._world.trace.note("press", f"{message.chat}: {label}{who}")
        if label.startswith("Allow") and person == self._asker(message):
            self._allow(message.text)
            if label != "Allow once":
                self._world.seen.trusted.add("chat")
        self._world.chat.press(message, label, person)

    def _allow(self, about: str) -> None:
        self._world.seen.allow(about, trio.current_time() - self._world.started_at)

    def _press_again(self, step: Step) -> None:
        asked = [message for message in self._world.chat.messages() if message.buttons]
        if asked:
            self._press_as(self._asker(asked[-1]), asked[-1], asked[-1].buttons[-1])

    def _asker(self, message: ShownMessage) -> int:
        """Return the person who caused a request for approval."""
        if message.chat != GROUP_CHAT:
            return message.chat - FIRST_PERSON
        return next((self._askers[mark] for mark in sorted(marks(message.text)) if mark in self._askers), 0)

    # -- HTTP ----------------------------------------------------------------------------------------------------------------------

    async def _ask(self, method: str, path: str, key: str, **more: Any) -> Answer | None:
        """Send a request, and repeat it while there is no response or one that asks for a retry. The statuses are added to `answers`."""
        headers: Mapping[str, str] = {"Authorization": f"Bearer {key}", **more.pop("headers", {})}
        answers: list[int] = more.pop("answers", [])
        for _ in range(ATTEMPTS):
            try:
                answer = await request(self._world.balancer, method, path, headers=headers, **more)
            except NoAnswer:
                answer = None
            answers.append(0 if answer is None else answer.status)
            if answer is not None and answer.status not in (429, 500, 502, 503, 504):
                return answer
            await trio.sleep(5)
        return None

    def _chores(self) -> Chores:
        from .chores import Chores  # it loads commands, which most worlds do not use

        return Chores(self._world, self._ask, self._world.beside)

    async def _run(self, step: Step, text: str) -> None:
        world = self._world
        options = options_of(step.words)
        seen = RunSeen(step.number, step.who, text, "resume" in options)
        world.seen.runs.append(seen)
        key = world.keys[step.who]
        headers = {"Authorization": f"Bearer {key}", "Idempotency-Key": f"k{step.number}"}
        body = {"input": text} | ({"session_id": f"shared{step.who}"} if "session" in options else {})
        body |= {"if_interrupted": "resume"} if seen.resumes else {}
        for _ in range(ATTEMPTS):
            try:
                # Only the first attempt: the client then repeats the request properly.
                manner = "" if seen.answers else next((one for one in ("half", "torn") if one in options), "")
                answer = await request(world.balancer, "POST", "/v1/runs", json=body, headers=headers, manner=manner)
            except NoAnswer:
                seen.answers.append(0)
                await trio.sleep(5)
                continue
            seen.answers.append(answer.status)
            if answer.status == 202:
                seen.run_id = answer.json["run_id"]
                break
            await trio.sleep(5)
        world.trace.note("run", f"m{step.number}: {seen.answers} {seen.run_id}")
        if not seen.run_id:
            return
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._follow, seen, key, options)
            if "stop" in options:
                nursery.start_soon(self._stop, seen, key, float(options["stop"]))
            if "approve" in options or "rm" in text:
                choices = ("always",) if options.get("approve") == "always" else ("once", "deny")
                nursery.start_soon(self._approve, seen, key, choices)
            if "poll" in options:
                nursery.start_soon(self._poll, seen, key)

    async def _follow(self, seen: RunSeen, key: str, options: Mapping[str, str]) -> None:
        """Follow the events of a run until it settles, and reconnect with the last id; with `leave`, disconnect and stay away."""
        leaves = 1 if "leave" in options or "reconnect" in options else 0
        for _ in range(ATTEMPTS):
            if "old" in options:
                del seen.live[1:]
            last = seen.live[-1].id if seen.live else None
            left = False
            try:
                path = f"/v1/runs/{seen.run_id}/events?until=settled"
                async with stream(self._world.balancer, "GET", path, headers=_events(key, last)) as events:
                    async for event in events:
                        if event.data.get("event") == "resync":
                            seen.resyncs += 1
                            seen.live.clear()
                            continue
                        seen.live.append(event)
                        if leaves and len(seen.live) == 2:
                            leaves, left = 0, True
                            break
            except NoAnswer:
                pass
            if seen.live and seen.live[-1].data.get("event") == "run.settled":
                seen.settled_at = trio.current_time()
                return
            if left and "leave" in options:
                return
            await trio.sleep(5)

    async def _read(self, seen: RunSeen, key: str) -> list[StreamedEvent]:
        """Read the events of a run until it settles. Returns what there is if it does not settle within `READ_SECONDS`."""
        for _ in range(5):
            read: list[StreamedEvent] = []
            try:
                path = f"/v1/runs/{seen.run_id}/events?until=settled"
                with trio.move_on_after(READ_SECONDS):
                    async with stream(self._world.balancer, "GET", path, headers=_events(key, None)) as events:
                        async for event in events:
                            read.append(event)  # noqa: PERF401 - what was read before the time ran out is kept
                return read
            except NoAnswer:
                await trio.sleep(5)
        return []

    async def _stop(self, seen: RunSeen, key: str, after: float) -> None:
        """Stop a run, and stop it again one second later; record the receipts. Before that, another tenant tries it."""
        self._nursery.start_soon(self._intrude, seen, after - 0.5, "stop")
        for pause in (after, 1.0):
            await trio.sleep(pause)
            answer = await self._ask("POST", f"/v1/runs/{seen.run_id}/stop?wait=true", key)
            if answer is not None and answer.status == 200:
                seen.stops.append((trio.current_time(), answer.json.get("receipt")))
                self._world.trace.note("stopped", f"m{seen.number}: {answer.json.get('receipt')}")

    async def _intrude(self, seen: RunSeen, after: float, what: str, **more: Any) -> None:
        """Try to stop a run of another tenant, or to answer its request for approval."""
        await trio.sleep(max(after, 0.0))
        path = f"/v1/runs/{seen.run_id}/{what}"
        answer = await self._ask("POST", path, self._world.keys[1 - seen.tenant], **more)
        seen.foreign.append(0 if answer is None else answer.status)

    async def _approve(self, seen: RunSeen, key: str, choices: Sequence[str]) -> None:
        rng = self._random("approve", seen.number)
        pause = rng.choice((2.0, 10.0, 65.0))
        self._nursery.start_soon(partial(self._intrude, seen, pause - 1.0, "approval", json={"choice": "once"}))
        await trio.sleep(pause)
        for _ in range(rng.choice((1, 2))):
            choice = rng.choice(choices)
            if choice != "deny":
                self._allow(seen.text)
            if choice == "always":
                self._world.seen.trusted.add(f"t{seen.tenant}")
            answer = await self._ask("POST", f"/v1/runs/{seen.run_id}/approval", key, json={"choice": choice})
            seen.approved.append(0 if answer is None else answer.status)
            if answer is not None and answer.status == 200:
                self._world.seen.decided += [(id, choice, f"t{seen.tenant}") for id in answer.json["approval_ids"]]

    async def _poll(self, seen: RunSeen, key: str) -> None:
        for _ in range(30):
            answer = await self._ask("GET", f"/v1/runs/{seen.run_id}", key)
            if answer is not None and answer.status == 200:
                seen.statuses.append(answer.json["status"])
                if answer.json["settled"]:
                    return
            await trio.sleep(4)

    async def _chat(self, step: Step, text: str) -> None:
        options = options_of(step.words)
        seen = ChatSeen(step.number, step.who, text)
        self._world.seen.chats.append(seen)
        body = {"messages": [{"role": "user", "content": text}], "stream": "stream" in options}
        headers = {"Authorization": f"Bearer {self._world.keys[step.who]}"}
        seconds = float(options.get("leave", "300"))
        if body["stream"]:
            reason = ""
            with trio.move_on_after(seconds):
                try:
                    path = "/v1/chat/completions"
                    async with stream(self._world.balancer, "POST", path, json=body, headers=headers) as events:
                        async for event in events:
                            seen.status = 200
                            if event.data == "[DONE]":
                                seen.finished = reason
                            elif event.data.get("choices"):
                                seen.answer += event.data["choices"][0]["delta"].get("content") or ""
                                reason = event.data["choices"][0].get("finish_reason") or reason
                except NoAnswer:
                    pass
            return
        try:
            answer = await request(
                self._world.balancer, "POST", "/v1/chat/completions", json=body, headers=headers, seconds=seconds
            )
        except NoAnswer:
            return
        seen.status = answer.status
        if answer.status == 200:
            seen.answer = answer.json["choices"][0]["message"]["content"]

    async def _web(self, step: Step, text: str) -> None:
        """Send a message in the web chat, with a new page open, and repeat the request until it is accepted; sometimes once more, as if a response was lost."""
        world = self._world
        seen = SaidOnPage(step.number, step.who, text)
        world.seen.web.append(seen)
        page = PageSeen(step.who)
        world.seen.pages.append(page)
        self._nursery.start_soon(self._look_at, page)
        headers = {"Authorization": f"Bearer {world.keys[step.who]}"}
        body: dict[str, Any] = {"text": text, "id": f"said{step.number}"}
        if "file" in options_of(step.words):
            data = b64encode(file_text(step.number).encode()).decode()
            body["attachments"] = [{"name": f"m{step.number}.txt", "data": data}]
        wanted = self._random("web", step.number).choice((1, 1, 2))
        for _ in range(ATTEMPTS):
            try:
                answer = await request(
                    world.balancer, "POST", f"{CONVERSATION}/messages", json=body, headers=headers, seconds=15
                )
            except NoAnswer:
                seen.answers.append(0)
            else:
                seen.answers.append(answer.status)
                wanted -= answer.status == 202
            if wanted <= 0:
                break
            await trio.sleep(5)
        world.trace.note("web", f"m{step.number}: {seen.answers}")

    async def _look_at(self, page: PageSeen) -> None:
        """Follow the events of a page for `PAGE_SECONDS`, with reconnects, and answer some of its requests for approval."""
        with trio.move_on_after(PAGE_SECONDS):
            while True:
                try:
                    await self._follow_page(page, self._world.keys[page.tenant])
                except NoAnswer:
                    pass
                await trio.sleep(5)

    async def _follow_page(self, page: PageSeen, key: str) -> None:
        last = page.events[-1].id if page.events else None
        async with stream(self._world.balancer, "GET", "/v1/web/events", headers=_events(key, last)) as events:
            connection = [trio.current_time() - self._world.started_at, math.inf]
            page.connections.append(connection)
            try:
                async for event in events:
                    page.events.append(event)
                    page.resyncs += event.data.get("event") == "resync"
                    if event.data.get("event") == "approval.request":
                        about = str(event.data.get("command"))
                        self._nursery.start_soon(self._decide, key, str(event.data.get("approval_id")), about)
            finally:
                connection[1] = trio.current_time() - self._world.started_at

    async def _decide(self, key: str, approval: str, about: str) -> None:
        rng = self._random("web approve", approval)
        await trio.sleep(rng.choice((2.0, 10.0, 65.0)))
        body = {"choice": rng.choice(("once", "deny"))}
        if body["choice"] == "once":
            self._allow(about)
        await self._ask("POST", f"{CONVERSATION}/approvals/{approval}", key, json=body)

    async def _flood(self, step: Step) -> None:
        """Send more requests than a key is allowed, and count those that succeed."""
        seen = self._world.seen
        headers = {"Authorization": f"Bearer {self._world.keys[step.who]}"}
        until = trio.current_time() + float(options_of(step.words)["seconds"])
        seen.flood_seconds += until - trio.current_time()
        while (now := trio.current_time()) < until:
            try:
                answer = await request(
                    self._world.balancer, "GET", "/v1/models", headers=headers, seconds=FLOOD_SECONDS
                )
            except NoAnswer:
                pass
            else:
                seen.let_through += answer.status == 200
            await trio.sleep_until(now + FLOOD_SECONDS)

    async def _webhook(self, step: Step, text: str) -> None:
        seen = WebhookSeen(step.number, text)
        self._world.seen.webhooks.append(seen)
        body = msgspec.json.encode({"text": text})
        signature = hmac.new(WEBHOOK_SECRET.encode(), body, hashlib.sha256).hexdigest()
        headers = {
            "Content-Type": "application/json",
            "X-GitHub-Event": "push",
            "X-GitHub-Delivery": f"delivery-{step.number}",
            "X-Hub-Signature-256": f"sha256={signature}",
        }
        options = options_of(step.words)
        wanted = 1 + int(options.get("repeat", "0"))
        if "twice" in options:
            # Two attempts in one instant, at two nodes where there are as many.
            async with trio.open_nursery() as nursery:
                for node in (self._world.nodes[0], self._world.nodes[-1]):
                    nursery.start_soon(self._attempt, seen, node, body, headers)
        for _ in range(ATTEMPTS):
            wanted -= await self._attempt(seen, self._world.balancer, body, headers)
            if wanted <= 0:
                break
            await trio.sleep(5)
        self._world.trace.note("webhook", f"m{step.number}: {seen.answers}")

    async def _attempt(self, seen: WebhookSeen, server: Connects, body: bytes, headers: Mapping[str, str]) -> bool:
        """Send a delivery once, and return whether it was accepted."""
        try:
            answer = await request(server, "POST", "/webhooks/hook", body=body, headers=headers, seconds=10)
        except NoAnswer:
            seen.answers.append(0)
            return False
        seen.answers.append(answer.status)
        return 200 <= answer.status < 300


def _events(key: str, last: str | None) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"} | ({"Last-Event-ID": last} if last else {})
