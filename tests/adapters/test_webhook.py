"""The webhook front door: what is answered, what is accepted, where the answer goes, and how every session ends."""

from __future__ import annotations

import base64
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import attrs
import msgspec
import pytest
import trio

from hermes_trio import Agent, RuntimeSettings
from hermes_trio.adapters.webhook.receiver import WEBHOOK_COMPLETE, WebhookReceiver
from hermes_trio.base.settings import SettingsError, read_settings
from hermes_trio.messaging.contract import PlatformError, PlatformErrorKind
from hermes_trio.messaging.core import MessagingCore
from hermes_trio.messaging.platforms import Platform, Platforms
from hermes_trio.messaging.senders import Senders
from hermes_trio.messaging.settings import HomeChannel, PlatformSettings, WebhookSettings
from hermes_trio.runtime.ports import InboxRow
from hermes_trio.store import InboxState, Page, SessionFilter, open_store
from hermes_trio.store.errors import StoreError
from hermes_trio.testing.faults import READ_VERBS, STORE_VERBS, StoreFaults
from hermes_trio.testing.memory_platform import MemoryPlatform
from tests.messaging.harness import World, asks, memory_store, open_world, scripted, starts_job, works

from .webhook_requests import SECRET, signed

pytestmark = pytest.mark.usefixtures("virtual_clock")

HOME = PlatformSettings(allow_all=True, home=HomeChannel(chat_id="home"))


@attrs.frozen
class Hooked:
    """A gateway with a front door."""

    world: World
    doors: Sequence[WebhookReceiver]
    chat: MemoryPlatform
    _next: Iterator[int] = attrs.field(factory=count)

    @property
    def door(self) -> WebhookReceiver:
        """The front door of the node whose turn it is."""
        return self.doors[next(self._next) % len(self.doors)]

    async def post(self, route: str, payload: Any, **options: Any) -> tuple[int, dict[str, Any]]:
        """Send a delivery and return status and body."""
        headers, body = signed(payload, **options)
        answer = await self.door.handle("POST", f"/webhooks/{route}", headers, body)
        return answer.status, msgspec.json.decode(answer.body)

    async def sessions(self) -> list[Any]:
        """All webhook sessions."""
        return await self.world.store.list_sessions(SessionFilter(source="webhook"), Page(1000))


@asynccontextmanager
async def open_hooks(
    agent: Agent,
    routes: dict[str, Any],
    *,
    path: Path | None = None,
    host: str | None = "127.0.0.1",
    chat: MemoryPlatform | None = None,
    runtime_settings: RuntimeSettings | None = None,
    faults: StoreFaults | None = None,
    **table: Any,
) -> AsyncIterator[Hooked]:
    """A gateway with one platform in memory and these routes."""
    chat = MemoryPlatform() if chat is None else chat
    settings = read_settings(
        {"secret": SECRET, "rate_limit": 10_000, "routes": routes, **table}, WebhookSettings, "webhook"
    )
    async with (
        open_world(agent, Platform(chat, HOME), path=path, runtime_settings=runtime_settings, faults=faults) as world,
        AsyncExitStack() as stack,
    ):
        doors: list[WebhookReceiver] = []
        for one in world.nodes:
            door = WebhookReceiver(one.hub.messaging, settings, host=host, home=path.parent if path else None)
            doors.append(await stack.enter_async_context(door.open()))
        yield Hooked(world, doors, chat)


async def test_a_delivery_becomes_one_session_and_its_answer_goes_to_the_platform() -> None:
    """202 with the names of GW-120; the session has ended as webhook_complete when its answer has been sent."""
    route = {"prompt": "Commit by {sender.name}", "deliver": "memory"}
    async with open_hooks(scripted(), {"code": route}) as hooked:
        status, body = await hooked.post("code", {"sender": {"name": "Ann"}}, delivery="d1")
        assert (status, body) == (202, {"status": "accepted", "route": "code", "event": "push", "delivery_id": "d1"})
        (sent,) = await hooked.chat.wait_sent(1)
        assert (sent.text, sent.chat) == ("echo: Commit by Ann", "home")
        await hooked.world.idle()
        (session,) = await hooked.sessions()
        assert session.end_reason == WEBHOOK_COMPLETE
        assert session.session_key == "agent:main:webhook:webhook:webhook:code:d1:webhook:code"
        assert await hooked.world.store.prune_sessions(-1, source="webhook") == 1


async def test_the_answers_of_the_reference_in_its_order() -> None:
    """Unknown 404, method 405, disabled 403, size 413, signature 401, body 400, event and filter 200 ignored, duplicate 200 (GW-120, GW-195)."""
    routes = {
        "open": {"events": ["push"], "filters": {"field": "ref", "equals": "main"}},
        "closed": {"enabled": False},
    }
    async with open_hooks(scripted(), routes, max_body_bytes=100) as hooked:
        post = hooked.post
        assert (await post("other", {}))[0] == 404
        headers, body = signed({})
        assert (await hooked.door.handle("GET", "/webhooks/open", headers, body)).status == 405
        assert (await post("closed", {}))[0] == 403
        assert (await post("open", {"x": "y" * 200}))[0] == 413
        assert (await post("open", {}, secret="wrong"))[0] == 401
        assert (await hooked.door.handle("POST", "/webhooks/open", [], b"{}")).status == 401
        assert await post("open", b"[1]") == (400, {"error": "the body must be a JSON object, not an array"})
        assert (await post("open", b"\xff\xfe"))[0] == 400
        assert await post("open", {}, event="star") == (200, {"status": "ignored", "event": "star"})
        assert await post("open", {"ref": "x"}) == (200, {"status": "ignored", "reason": "filter", "route": "open"})
        assert (await post("open", {"ref": "main"}, delivery="same"))[0] == 202
        assert await post("open", {"ref": "main"}, delivery="same") == (
            200,
            {"status": "duplicate", "delivery_id": "same"},
        )
        await hooked.world.idle()
        assert len(await hooked.sessions()) == 1


async def test_a_declared_length_is_refused_before_the_body_is_judged() -> None:
    """A sender that announces too much is told so, whatever has arrived."""
    async with open_hooks(scripted(), {"r": {}}, max_body_bytes=100) as hooked:
        headers, body = signed({}, Content_Length="5000")
        assert (await hooked.door.handle("POST", "/webhooks/r", headers, body)).status == 413


async def test_ids_belong_to_their_route() -> None:
    """Two routes may see the same id (SC-5)."""
    async with open_hooks(scripted(), {"a": {}, "b": {}}) as hooked:
        assert (await hooked.post("a", {}, delivery="x"))[0] == 202
        assert (await hooked.post("b", {}, delivery="x"))[0] == 202
        await hooked.world.idle()
        assert len(await hooked.sessions()) == 2


async def test_a_sender_without_ids_never_collides() -> None:
    """Where bodies may repeat, requests in the same millisecond are different deliveries (SC-5)."""
    async with open_hooks(scripted(), {"a": {"repeats": True}}) as hooked:
        headers, body = signed({})
        bare = [(name, value) for name, value in headers if name != "X-GitHub-Delivery"]
        answers = [await hooked.door.handle("POST", "/webhooks/a", bare, body) for _ in range(20)]
        assert {answer.status for answer in answers} == {202}
        await hooked.world.idle()
        assert len(await hooked.sessions()) == 20


async def test_a_refusal_while_draining_does_not_use_the_id_up() -> None:
    """503 with Retry-After; nothing is stored, so the sender's retry is welcome (SC-5)."""
    async with open_hooks(scripted(), {"a": {}}) as hooked:
        await hooked.world.runtime.drain(0)
        headers, body = signed({}, delivery="x")
        answer = await hooked.door.handle("POST", "/webhooks/a", headers, body)
        assert answer.status == 503
        assert ("Retry-After", "5") in answer.headers
        assert not await hooked.world.store.delivery_known("a", "x")


async def test_overload_is_refused_before_the_202_and_never_delivered_as_an_answer() -> None:
    """Admission comes first; the target hears nothing of it (SC-6)."""
    routes = {"a": {"deliver": "memory"}}
    async with open_hooks(scripted(*[works(10)] * 2), routes, max_pending=2) as hooked:
        statuses = [(await hooked.post("a", {"n": n}, delivery=f"x{n}"))[0] for n in range(3)]
        assert statuses == [202, 202, 503]
        await hooked.chat.wait_sent(2)
        assert (await hooked.post("a", {"n": 2}, delivery="x2"))[0] == 202
        await hooked.chat.wait_sent(3)
        assert hooked.chat.texts()[:2] == ["worked", "worked"]


@pytest.mark.one_node
async def test_the_rate_limit_counts_each_route_by_itself() -> None:
    """Thirty a minute, sliding; a refused request costs nothing (GW-126)."""
    async with open_hooks(scripted(), {"a": {}, "b": {}}, rate_limit=2) as hooked:
        assert [(await hooked.post("a", {"n": n}))[0] for n in range(4)] == [202, 202, 429, 429]
        assert (await hooked.post("b", {}))[0] == 202
        await trio.sleep(61)
        assert (await hooked.post("a", {"n": 4}))[0] == 202


async def test_text_from_a_webhook_is_never_a_command() -> None:
    """A payload that begins with a slash, and a bare "yes", are only ever text (SC-31)."""
    agent = scripted()
    async with open_hooks(agent, {"a": {"prompt": "{text}"}}) as hooked:
        for text in ("/stop", "/new", "yes", "/approve all always"):
            await hooked.post("a", {"text": text})
        await hooked.world.idle()
        assert {turn.input.text for turn in agent.turns} == {"/stop", "/new", "yes", "/approve all always"}


@pytest.mark.parametrize("how", ["success", "failure", "silence", "deadline"])
async def test_the_session_ends_as_webhook_complete_however_the_turn_ends(how: str) -> None:
    """Success, failure, silence and a deadline alike."""
    step: Any = {"success": "fine", "failure": ValueError("boom"), "silence": "[SILENT]", "deadline": works(100)}[how]
    async with open_hooks(scripted(step), {"a": {"deliver": "memory", "deadline": 5}}) as hooked:
        await hooked.post("a", {})
        await hooked.world.idle()
        (session,) = await hooked.sessions()
        assert session.end_reason == WEBHOOK_COMPLETE
        said = hooked.chat.texts()
        match how:
            case "success":
                assert said == ["fine"]
            case "silence":
                assert said == []
            case _:
                assert len(said) == 1
                assert said[0].startswith("[webhook/a: ")
                assert "boom" not in said[0]


async def test_a_stop_ends_the_session_too() -> None:
    """Cancelled from outside, the row ends all the same."""
    async with open_hooks(scripted(works(1000)), {"a": {}}) as hooked:
        await hooked.post("a", {}, delivery="x")
        await trio.sleep(1)
        key = "agent:main:webhook:webhook:webhook:a:x:webhook:a"
        turn = next(turn for one in hooked.doors if (turn := one.interface.inbox.current_turn(key)) is not None)
        receipt = await turn.stop()
        assert receipt.ok
        await hooked.world.idle()
        (session,) = await hooked.sessions()
        assert session.end_reason == WEBHOOK_COMPLETE


async def test_a_watched_job_keeps_the_session_open_until_its_notice_was_handled() -> None:
    """The end of the work is the end of what it promised, and the target hears of it (SC-8)."""
    async with open_hooks(scripted(starts_job(600, "built"), "all done"), {"a": {"deliver": "memory"}}) as hooked:
        await hooked.post("a", {})
        await hooked.chat.wait_sent(1)
        (session,) = await hooked.sessions()
        assert session.ended_at is None
        await hooked.chat.wait_sent(2)
        await hooked.world.idle()
        (session,) = await hooked.sessions()
        assert (session.end_reason, hooked.chat.texts("home")) == (WEBHOOK_COMPLETE, ["started", "all done"])


async def test_a_session_lingers_no_longer_than_its_route_says() -> None:
    """Then the job is stopped, and the row ends with its reason."""
    routes = {"a": {"linger": 60}, "b": {"linger": 5000}}
    async with open_hooks(scripted(starts_job(100_000), starts_job(100_000)), routes) as hooked:
        await hooked.post("a", {})
        await hooked.post("b", {})
        await trio.sleep(100)
        by_route = {session.session_key.rpartition(":")[2]: session for session in await hooked.sessions()}
        assert by_route["a"].end_reason == WEBHOOK_COMPLETE
        assert by_route["b"].ended_at is None
        assert sum(len(one.runtime.supervisor) for one in hooked.world.nodes) == 1
        await trio.sleep(5000)
        assert {session.end_reason for session in await hooked.sessions()} == {WEBHOOK_COMPLETE}
        await hooked.world.idle()
        assert sum(len(one.runtime.supervisor) for one in hooked.world.nodes) == 0


async def test_nobody_can_be_asked_so_an_approval_is_refused_with_the_reason() -> None:
    """At once, and the session ends."""
    worlds: list[World] = []
    async with open_hooks(scripted(asks(lambda: worlds[0])), {"a": {"deliver": "memory"}}) as hooked:
        worlds.append(hooked.world)
        await hooked.post("a", {})
        (sent,) = await hooked.chat.wait_sent(1)
        assert sent.text.startswith("refused: this interface has no user to ask")


async def test_direct_delivery_is_delivered_within_the_request_without_a_session() -> None:
    """200 when it has arrived; 502 without a detail when it has not, and then the retry is welcome (SC-5)."""
    routes = {"a": {"prompt": "{text}", "deliver": "memory", "deliver_only": True}}
    async with open_hooks(scripted(), routes) as hooked:
        hooked.chat.send_faults.append(PlatformError(PlatformErrorKind.FORBIDDEN, "kicked out of secret-chat"))
        assert await hooked.post("a", {"text": "hi"}, delivery="x") == (
            502,
            {"status": "error", "error": "the delivery failed", "delivery_id": "x"},
        )
        assert await hooked.post("a", {"text": "hi"}, delivery="x") == (
            200,
            {"status": "delivered", "route": "a", "target": "memory", "delivery_id": "x"},
        )
        assert (await hooked.post("a", {"text": "hi"}, delivery="x"))[1]["status"] == "duplicate"
        assert hooked.chat.texts("home") == ["hi"]
        assert await hooked.sessions() == []


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("number", range(6))
async def test_an_interruption_is_told_once_wherever_the_next_starts_fail(
    tmp_path: Path, number: int, after: bool
) -> None:
    """Each write with which a start settles the interrupted delivery fails in turn, before or after its commit: a later start tells what is left."""
    path = tmp_path / "state.db"
    routes = {"a": {"prompt": "{n}", "deliver": "memory"}}
    faults = StoreFaults()
    async with open_hooks(scripted(works(1000)), routes, path=path, faults=faults) as hooked:
        await hooked.post("a", {"n": 0}, delivery="x0")
        await trio.sleep(1)
        faults.fail("finish_turn", "set_meta", times=None)  # as if the server were killed here
    texts = hooked.chat.texts()
    for attempt in range(3):
        faults, chat = StoreFaults(), MemoryPlatform()
        if attempt == 0:
            # Not the recovery itself, which comes first and is one transaction.
            faults.fail(*STORE_VERBS - READ_VERBS - {"recover"}, skip=number, after_commit=after)
        with suppress(StoreError):
            async with open_hooks(scripted(), routes, path=path, chat=chat, faults=faults) as again:
                await again.world.idle()
        texts += chat.texts()
    assert [text for text in texts if "interrupted" in text] == [
        "[webhook/a: interrupted. The server was stopped before this was finished; it is not started again by itself.]"
    ]
    async with open_store(path, maintenance=False) as store:
        assert [session.end_reason for session in await store.list_sessions()] == [WEBHOOK_COMPLETE]


@pytest.mark.parametrize("after", [False, True])
async def test_an_interruption_is_told_although_the_store_failed_when_the_work_began(
    tmp_path: Path, after: bool
) -> None:
    """Where the answer goes is written until the store takes it, not once."""
    path = tmp_path / "state.db"
    routes = {"a": {"prompt": "{n}", "deliver": "memory"}}
    faults, chat = StoreFaults(), MemoryPlatform()
    faults.fail("set_meta", times=2, after_commit=after)
    async with open_hooks(scripted(works(1000)), routes, path=path, faults=faults) as hooked:
        await hooked.post("a", {"n": 0}, delivery="x0")
        await trio.sleep(30)
        faults.fail("finish_turn", "set_meta", times=None)  # as if the server were killed here
    async with open_hooks(scripted(), routes, path=path, chat=chat) as again:
        await again.world.idle()
    assert [text for text in hooked.chat.texts() + chat.texts() if "interrupted" in text] == [
        "[webhook/a: interrupted. The server was stopped before this was finished; it is not started again by itself.]"
    ]


@pytest.mark.parametrize("seconds", [2, 40, 400])
async def test_an_interruption_is_told_although_it_was_unknown_whether_the_work_had_begun(
    tmp_path: Path, seconds: float
) -> None:
    """A turn that is cancelled while its beginning is written may have begun: what is owed for it is kept."""
    path = tmp_path / "state.db"
    routes = {"a": {"prompt": "{n}", "deliver": "memory"}}
    faults, chat = StoreFaults(), MemoryPlatform()
    faults.slow("begin_turn", seconds=seconds)
    async with open_hooks(scripted(works(1000)), routes, path=path, faults=faults) as hooked:
        await hooked.post("a", {"n": 0}, delivery="x0")
        await trio.sleep(1)
        faults.fail("finish_turn", "release_inbox", times=None)
    async with open_hooks(scripted(), routes, path=path, chat=chat) as again:
        await again.world.idle()
        assert len(await again.world.store.list_inbox(InboxState.INTERRUPTED)) == 1
    assert [text for text in hooked.chat.texts() + chat.texts() if "interrupted" in text] == [
        "[webhook/a: interrupted. The server was stopped before this was finished; it is not started again by itself.]"
    ]


async def test_a_direct_delivery_that_comes_twice_at_once_is_delivered_once() -> None:
    """The second one is told to come again, or, by another node, that it was delivered."""
    routes = {"a": {"prompt": "{text}", "deliver": "memory", "deliver_only": True}}
    async with open_hooks(scripted(), routes) as hooked:
        hooked.chat.gate = trio.Event()
        answers: list[tuple[int, str]] = []

        async def post() -> None:
            status, body = await hooked.post("a", {"text": "hi"}, delivery="x")
            answers.append((status, body.get("status", "")))

        async with trio.open_nursery() as nursery:
            for _ in range(2):
                nursery.start_soon(post)
                await trio.testing.wait_all_tasks_blocked()
            hooked.chat.gate.set()
        second = (503, "") if len(hooked.doors) == 1 else (200, "duplicate")
        assert sorted(answers) == sorted([second, (200, "delivered")])
        assert hooked.chat.texts("home") == ["hi"]


async def test_a_delivery_that_was_accepted_and_not_begun_begins_after_a_restart(tmp_path: Path) -> None:
    """One that had begun is not begun again; both rows end (SC-1, SC-7)."""
    path = tmp_path / "state.db"
    routes = {"a": {"prompt": "{n}", "deliver": "memory"}}
    async with open_hooks(scripted(works(1000)), routes, path=path) as hooked:
        await hooked.post("a", {"n": 0}, delivery="x0")
        await trio.sleep(1)
        # Committed, and the server is gone before the lane is woken.
        hooked.door.interface.inbox.channel = SimpleNamespace(wake=lambda key: None)  # type: ignore[assignment]
        await hooked.post("a", {"n": 1}, delivery="x1")
    assert hooked.chat.texts() == [
        "[webhook/a: interrupted. The server was stopped before this was finished; it is not started again by itself.]"
    ]
    agent = scripted()
    async with open_hooks(agent, routes, path=path) as again:
        await again.chat.wait_sent(1)
        await again.world.idle()
        assert again.chat.texts() == ["echo: 1"]
        assert [session.end_reason for session in await again.sessions()] == [WEBHOOK_COMPLETE] * 2
        assert (await again.post("a", {"n": 0}, delivery="x0"))[1]["status"] == "duplicate"


async def test_a_sender_that_leaves_does_not_leave_a_delivery_asleep() -> None:
    """Cancelled while the delivery is being committed, it is still worked on."""
    async with open_hooks(scripted(), {"a": {"deliver": "memory"}}) as hooked:
        headers, body = signed({}, delivery="x")
        with trio.CancelScope() as scope:
            scope.cancel()
            with pytest.raises(trio.Cancelled):
                await hooked.door.handle("POST", "/webhooks/a", headers, body)
        async with trio.open_nursery() as nursery:

            async def leave() -> None:
                await hooked.door.handle("POST", "/webhooks/a", headers, body)

            nursery.start_soon(leave)
            await trio.testing.wait_all_tasks_blocked(0.0)
            nursery.cancel_scope.cancel()
        if await hooked.world.store.delivery_known("a", "x"):
            await hooked.chat.wait_sent(1)


@pytest.mark.one_node
@pytest.mark.parametrize(
    ("routes", "host", "message"),
    [
        ({"a": {"secret": ""}}, "127.0.0.1", "has no secret"),
        ({"a": {"secret": "INSECURE_NO_AUTH"}}, "0.0.0.0", "INSECURE_NO_AUTH is allowed on"),
        ({"a": {"deliver": "memory", "deliver_only": True, "secrets": 1}}, "127.0.0.1", "secrets"),
        ({"a": {"deliver_only": True}}, "127.0.0.1", "deliver_only needs a place"),
        ({"a": {"deliver": "telegram"}}, "127.0.0.1", "not set up"),
        ({"a": {"deliver": "github_comment"}}, "127.0.0.1", "GITHUB_TOKEN"),
        ({"a": {"filters": {"field": "x"}}}, "127.0.0.1", "webhook.routes.a.filters"),
        ({"a/b": {}}, "127.0.0.1", "a route's name"),
        ({"a": {"secret_env": "HOOK_SECRET"}}, "127.0.0.1", "HOOK_SECRET, which is not set"),
    ],
)
async def test_a_route_that_must_not_be_served_is_refused_at_start(
    routes: dict[str, Any], host: str, message: str
) -> None:
    """With the name of the route and what would be right (GW-119)."""
    secret = "" if routes.get("a", {}).get("secret") == "" else SECRET
    directory = Platforms([Platform(MemoryPlatform(), HOME)])
    async with memory_store() as store:

        class Stub:
            """Only the store is looked at when routes are read."""

        stub: Any = Stub()
        stub.store = store
        with pytest.raises(SettingsError, match=message):
            WebhookReceiver(
                MessagingCore(stub, directory, Senders([]), None),
                read_settings({"secret": secret, "routes": routes}, WebhookSettings, "webhook"),
                host=host,
            )


async def test_a_replay_with_another_unsigned_id_is_a_duplicate() -> None:
    """The identity of a delivery is what its signature covers: a changed delivery header makes no second delivery of the same signed body."""
    async with open_hooks(scripted(), {"a": {}}) as hooked:
        headers, body = signed({"amount": 100}, delivery="d1")
        first = await hooked.door.handle("POST", "/webhooks/a", headers, body)
        assert (first.status, msgspec.json.decode(first.body)["delivery_id"]) == (202, "d1")
        for other in ("d2", ""):
            changed = [pair for pair in headers if pair[0] != "X-GitHub-Delivery"]
            changed += [("X-GitHub-Delivery", other)] if other else [("Idempotency-Key", "k"), ("svix-id", "s")][:1]
            again = await hooked.door.handle("POST", "/webhooks/a", changed, body)
            assert (again.status, msgspec.json.decode(again.body)["status"]) == (200, "duplicate")
        await hooked.world.idle()
        assert len(await hooked.sessions()) == 1


async def test_deliveries_that_were_known_by_their_id_stay_known() -> None:
    """What an earlier version accepted under the sender's id is not done again."""
    async with open_hooks(scripted(), {"a": {}}) as hooked:
        assert await hooked.world.store.record_delivery("a", "old")
        assert (await hooked.post("a", {}, delivery="old"))[0] == 200


async def test_a_route_accepts_its_own_scheme_only() -> None:
    """A pinned route takes no other scheme, even with the right secret."""
    routes = {"pinned": {"scheme": "generic_v2"}, "any": {}}
    async with open_hooks(scripted(), routes) as hooked:
        assert (await hooked.post("pinned", {}))[0] == 401
        assert (await hooked.post("any", {}))[0] == 202
        token = [("X-Gitlab-Token", SECRET)]
        assert (await hooked.door.handle("POST", "/webhooks/pinned", token, b"{}")).status == 401
        await hooked.world.idle()


async def test_a_public_key_is_no_shared_secret() -> None:
    """A `whpk_` key is known to everybody: whoever sends it as a token, or signs with it, is refused; a route that would compare it does not start."""
    public = "whpk_" + base64.b64encode(bytes(32)).decode()
    async with open_hooks(scripted(), {"a": {"secret": public}}) as hooked:
        assert (await hooked.post("a", {}, secret=public))[0] == 401
        token = [("X-Gitlab-Token", public)]
        assert (await hooked.door.handle("POST", "/webhooks/a", token, b"{}")).status == 401
    with pytest.raises(SettingsError, match="public key"):
        async with open_hooks(scripted(), {"a": {"secret": public, "scheme": "gitlab"}}):
            pass


@pytest.mark.one_node
async def test_refused_requests_cannot_flood_the_log(caplog: pytest.LogCaptureFixture) -> None:
    """Ten lines a minute say what was refused; the next ones say how many were left out."""
    async with open_hooks(scripted(), {"a": {}}) as hooked:
        for _ in range(50):
            await hooked.post("a", {}, secret="wrong")
        assert len(caplog.records) == 10
        await trio.sleep(60)
        await hooked.post("a", {}, secret="wrong")
        assert "40 more refusals were not logged" in caplog.records[-1].message


async def test_a_delivery_that_becomes_a_dead_letter_does_not_count_as_pending(monkeypatch: pytest.MonkeyPatch) -> None:
    """What cannot be handled takes no place from the deliveries that come after it."""
    async with open_hooks(scripted(), {"a": {"deliver": "memory"}}, max_pending=1) as hooked:

        def poisoned(rows: Sequence[InboxRow]) -> None:
            raise ValueError("cannot read this")

        with monkeypatch.context() as patched:
            for one in hooked.doors:
                patched.setattr(one.interface, "budget", poisoned)
            assert (await hooked.post("a", {"n": 1}, delivery="x1"))[0] == 202
            await trio.sleep(60)
        assert len(await hooked.world.store.list_inbox(InboxState.DEAD)) == 1
        assert (await hooked.post("a", {"n": 2}, delivery="x2"))[0] == 202
