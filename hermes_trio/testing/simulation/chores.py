"""Chores: what clients and operators do beside conversations, over the HTTP API and with the commands that work beside a server.

A chore sends a few requests and repeats each until it is answered. What was acknowledged is a `Promise`, which the invariants compare with the rows.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast

import msgspec
import trio

import hermes_trio.commands.clients as clients
from hermes_trio.adapters.cli.chat import CLI, begin_session
from hermes_trio.messaging.access import AccessControl
from hermes_trio.messaging.session_keys import Source
from hermes_trio.messaging.settings import PlatformSettings
from hermes_trio.runtime.ports import Message
from hermes_trio.store import Runner, open_store
from hermes_trio.store.errors import SessionExists, StoreError
from hermes_trio.store.ports import Store
from hermes_trio.store.records import NewSession

from .client import Answer, NoAnswer, request
from .node import ADMIN_KEY
from .people import CONVERSATION, WEBHOOK_SECRET, Promise
from .program import Step

if TYPE_CHECKING:
    from .world import World

T = TypeVar("T")

RETRIES: Final = 40
"""The number of attempts for a verb of a command that fails, one every five seconds."""

REVOKED_SECONDS: Final = 60.0
"""Seconds after which every node refuses a revoked key."""

Ask = Callable[..., Awaitable[Answer | None]]


class Chores:
    """Performs the chores of a world. See the module."""

    def __init__(self, world: World, ask: Ask, store: Store) -> None:
        self._world = world
        self._request = ask
        self._store = store
        """The store as commands beside the server open it."""
        self._crossings = world.seen.crossings

    async def do(self, step: Step) -> None:
        """Do the chore that the step names."""
        await CHORES[step.words.split()[0]](self, step, f"m{step.number}")

    def _promise(self, text: str, sql: str, *values: Any, count: int = 1) -> None:
        self._world.seen.promises.append(Promise(text, sql, values, count))

    async def _ask(self, method: str, path: str, key: str, **more: Any) -> Answer | None:
        """Send a request until it is answered. The answer to a tenant is kept for invariant 3."""
        answer = await self._request(method, path, key, **more)
        if answer is not None and key in self._world.keys:
            self._world.seen.answers.append((self._world.keys.index(key), f"{method} {path}", answer.body))
        self._world.trace.note("chore", f"{method} {path}: {None if answer is None else answer.status}")
        return answer

    async def _again(self, verb: Callable[[], Awaitable[T]]) -> T | None:
        """Repeat a verb of a command that fails, as its user does."""
        for _ in range(RETRIES):
            try:
                return await verb()
            except SessionExists:
                return None
            except StoreError as error:
                self._world.trace.note("command fails", type(error).__name__)
                await trio.sleep(5)
        return None

    async def _once(self, path: str, key: str, body: Any, **headers: str) -> Answer | None:
        """Send a request that starts a turn. It is not repeated, because a repetition would be another turn."""
        try:
            fields = {"Authorization": f"Bearer {key}", **headers}
            answer = await request(self._world.balancer, "POST", path, json=body, headers=fields, seconds=120)
        except NoAnswer:
            return None
        self._world.trace.note("chore", f"POST {path}: {answer.status}")
        return answer

    # -- clients -------------------------------------------------------------------------------------------------------------------

    async def sessions(self, step: Step, mark: str) -> None:
        """Create a session, use it, read and search it, rename it, fork it, end the fork, and delete the first."""
        key, other = self._world.keys[step.who], self._world.keys[1 - step.who]
        id, fork = f"made{step.number}", f"fork{step.number}"
        body = {"id": id, "title": f"title {step.number}", "system_prompt": "be brief"}
        made = await self._ask("POST", "/api/sessions", key, json=body)
        if made is None or made.status not in (201, 409):
            return
        await self._once(f"/api/sessions/{id}/chat", key, {"message": f"{mark} say"})
        for path in (f"/api/sessions/{id}", f"/api/sessions/{id}/messages", "/api/sessions", "/api/search?q=done"):
            await self._ask("GET", path, key)
        await self._ask("GET", f"/v1/runs?session_id={id}", key)
        for path in (f"/api/sessions/{id}", f"/api/sessions/{id}/messages"):
            foreign = await self._ask("GET", path, other)
            if foreign is not None and foreign.status != 404:
                self._crossings.append(f"another tenant asked for {path} and got {foreign.status}")
        await self._ask("PATCH", f"/api/sessions/{id}", key, json={"title": f"renamed {step.number}"})
        forked = await self._ask("POST", f"/api/sessions/{id}/fork", key, json={"id": fork})
        if forked is not None and forked.status == 201:
            self._promise(f"the fork {fork}", "SELECT count(*) FROM sessions WHERE id = ?", fork)
            await self._ask("PATCH", f"/api/sessions/{fork}", key, json={"end_reason": "chore"})
        gone = await self._ask("DELETE", f"/api/sessions/{id}", key)
        if gone is not None and gone.status in (200, 404):
            self._promise(f"the deleted session {id}", "SELECT count(*) FROM sessions WHERE id = ?", id, count=0)

    async def responses(self, step: Step, mark: str) -> None:
        """Create two responses of a conversation and one in the background, read them, and delete the first."""
        key, other = self._world.keys[step.who], self._world.keys[1 - step.who]
        found: list[str] = []
        for part in ("say", "say again", "say later"):
            body: dict[str, Any] = {"input": f"{mark} {part}", "conversation": f"talk{step.number}"}
            if part == "say later":
                body = {"input": f"{mark} {part}", "background": True}
            answer = await self._once("/v1/responses", key, body, **{"Idempotency-Key": f"r{step.number} {part}"})
            if answer is None or answer.status != 200 or "id" not in (answer.json or {}):
                continue
            found.append(answer.json["id"])
            await self._ask("GET", f"/v1/responses/{found[-1]}", key)
            await self._ask("GET", f"/v1/responses/{found[-1]}/input_items", key)
            foreign = await self._ask("GET", f"/v1/responses/{found[-1]}", other)
            if foreign is not None and foreign.status != 404:
                self._crossings.append(f"another tenant asked for the response {found[-1]} and got {foreign.status}")
        if not found:
            return
        gone = await self._ask("DELETE", f"/v1/responses/{found[0]}", key)
        if gone is not None and gone.status in (200, 404):
            sql = "SELECT count(*) FROM responses WHERE id = ?"
            self._promise(f"the deleted response {found[0]}", sql, found[0], count=0)

    async def lists(self, step: Step, mark: str) -> None:
        """List runs, approvals and grants, and revoke the grants."""
        key = self._world.keys[step.who]
        for path in ("/v1/runs", "/v1/approvals", "/v1/approvals?state=answered", "/v1/tree", "/v1/models"):
            await self._ask("GET", path, key)
        grants = await self._ask("GET", "/v1/grants", key)
        for grant in grants.json["data"] if grants is not None and grants.status == 200 else ():
            await self._ask("DELETE", f"/v1/grants/{grant['id']}", key)

    async def page(self, step: Step, mark: str) -> None:
        """Read a conversation of the web chat, and mark it as read."""
        key = self._world.keys[step.who]
        shown = await self._ask("GET", f"{CONVERSATION}/messages", key)
        if shown is not None and shown.status == 200:
            await self._ask("POST", f"{CONVERSATION}/seen", key, json={"mark": shown.json["mark"]})

    # -- operators -----------------------------------------------------------------------------------------------------------------

    async def keys(self, step: Step, mark: str) -> None:
        """Create a key, use it, and revoke it: then no node accepts it."""
        body = {"name": f"chore{step.number}", "scopes": ["chat"], "tenant": "t0"}
        made = await self._ask("POST", "/admin/keys", ADMIN_KEY, json=body)
        if made is None or made.status != 201:
            return
        id, secret = made.json["id"], made.json["key"]
        self._promise(f"the key {id}", "SELECT count(*) FROM api_keys WHERE id = ?", id)
        used = await self._ask("GET", "/v1/models", secret)
        if used is not None and used.status != 200:
            self._crossings.append(f"the new key {id} got {used.status}")
        await self._ask("GET", "/admin/keys", ADMIN_KEY)
        gone = await self._ask("DELETE", f"/admin/keys/{id}", ADMIN_KEY)
        if gone is None or gone.status not in (200, 404):
            return
        await trio.sleep(REVOKED_SECONDS)
        used = await self._ask("GET", "/v1/models", secret)
        if used is not None and used.status != 401:
            self._crossings.append(f"the revoked key {id} got {used.status}")

    async def letters(self, step: Step, mark: str) -> None:
        """Queue the dead letters of both boxes again."""
        for box in ("outbox", "inbox"):
            found = await self._ask("GET", f"/admin/{box}?state=dead", ADMIN_KEY)
            for row in found.json["data"] if found is not None and found.status == 200 else ():
                await self._ask("POST", f"/admin/{box}/{row['id']}/retry", ADMIN_KEY)

    async def schedule(self, step: Step, mark: str) -> None:
        """Create a job of cron, change it, run it now, and delete it."""
        body = {"name": f"chore {mark}", "schedule": "* * * * *", "prompt": f"{mark} say", "repeat": 1}
        made = await self._ask("POST", "/api/jobs", ADMIN_KEY, json=body)
        if made is None or made.status != 200:
            return
        id = made.json["job"]["id"]
        await self._ask("GET", "/api/jobs?include_disabled=true", ADMIN_KEY)
        await self._ask("PATCH", f"/api/jobs/{id}", ADMIN_KEY, json={"name": f"renamed {mark}"})
        for verb in ("pause", "resume", "run"):
            await self._ask("POST", f"/api/jobs/{id}/{verb}", ADMIN_KEY)
        await trio.sleep(75)
        for path in (f"/api/jobs/{id}", f"/api/jobs/{id}/executions"):
            await self._ask("GET", path, ADMIN_KEY)
        gone = await self._ask("DELETE", f"/api/jobs/{id}", ADMIN_KEY)
        if gone is not None and gone.status in (200, 404):
            self._promise(f"the deleted job {id}", "SELECT count(*) FROM cron_jobs WHERE id = ?", id, count=0)

    async def direct(self, step: Step, mark: str) -> None:
        """Send a webhook to a route that passes its text to a chat without an agent, until it is accepted."""
        body = msgspec.json.encode({"text": f"{mark} say"})
        signature = hmac.new(WEBHOOK_SECRET.encode(), body, hashlib.sha256).hexdigest()
        headers = {
            "Content-Type": "application/json",
            "X-GitHub-Event": "push",
            "X-GitHub-Delivery": f"direct-{step.number}",
            "X-Hub-Signature-256": f"sha256={signature}",
        }
        answers: list[int] = []
        self._world.seen.direct.append((f"{mark} say", answers))
        answer = await self._ask("POST", "/webhooks/direct", "none", body=body, headers=headers, answers=answers)
        if answer is not None and answer.status == 200:
            sql = "SELECT count(*) FROM webhook_deliveries WHERE route = 'direct'"
            self._promise(f"the delivery of {mark}", sql)
            # Its sender did not get the answer, and sends it again.
            await self._ask("POST", "/webhooks/direct", "none", body=body, headers=headers, answers=answers)

    async def pairing(self, step: Step, mark: str) -> None:
        """Let a stranger ask for a code, approve it, add another user, list all, and remove the second."""
        platform, store = self._world.chat.name, self._store
        access = AccessControl(store)
        source = Source(platform=platform, chat_id=f"9{step.number}", user_id=f"9{step.number}", chat_type="dm")
        offered = await self._again(lambda: access.decide(source, PlatformSettings()))
        if offered is not None and offered.code:
            await self._again(lambda: store.redeem_pairing(platform, offered.code))
        await self._again(lambda: store.allow_user(platform, f"8{step.number}"))
        await self._again(store.list_pairings)
        await self._again(store.list_allowed)
        if await self._again(lambda: store.disallow_user(platform, f"8{step.number}")) is not None:
            sql = "SELECT count(*) FROM allowed_users WHERE user_id = ?"
            self._promise(f"the user 8{step.number}, who was removed", sql, f"8{step.number}", count=0)

    async def upkeep(self, step: Step, mark: str) -> None:
        """Delete the sessions that a chore has ended, as `hermes-trio sessions prune` does."""
        await self._again(lambda: self._store.prune_sessions(0.0, None, end_reason="none"))
        await self._again(self._store.outbox_unsent)

    async def terminal(self, step: Step, mark: str) -> None:
        """Continue conversations of the terminal that another database has, as `hermes-trio chat --resume` does."""
        store, id = self._store, f"terminal{step.number}"
        said = [Message(role="user", content=f"{mark} by hand"), Message(role="assistant", content=f"done {mark}")]
        opening = open_store(None, runner=Runner.INLINE, clock=self._world.boundary.store_wall, maintenance=False)
        async with opening as there:
            await there.create_session(NewSession(id=id, source=CLI))
            with _beside(cast("Store", there)):
                for part in (said[:1], said[1:]):
                    await trio.sleep(5)
                    await there.append_messages(id, part)
                    await self._again(lambda: clients.bring_conversation(store, id, Path("other.db")))
        for wanted in (None, id, id):
            await self._again(lambda wanted=wanted: begin_session(store, wanted))
        self._promise(f"the conversation {id}", "SELECT count(*) FROM sessions WHERE id = ?", id)


@contextmanager
def _beside(store: Store) -> Iterator[None]:
    """Let commands open this store as the other database of the home directory."""

    @contextmanager
    def opened(path: object, *, read_only: bool = False) -> Iterator[Store]:
        yield store

    real = clients.open_blocking
    cast("Any", clients).open_blocking = opened
    try:
        yield
    finally:
        clients.open_blocking = real


CHORES: Final[Mapping[str, Callable[[Chores, Step, str], Awaitable[None]]]] = {
    "sessions": Chores.sessions,
    "responses": Chores.responses,
    "lists": Chores.lists,
    "page": Chores.page,
    "keys": Chores.keys,
    "letters": Chores.letters,
    "schedule": Chores.schedule,
    "direct": Chores.direct,
    "pairing": Chores.pairing,
    "upkeep": Chores.upkeep,
    "terminal": Chores.terminal,
}
"""The chores by the name that a step has."""
