"""Our own adapters against the published contract: the chat platforms behind their fakes, the browser, and the terminal.

Webhooks and cron are no adapters but one-shot interfaces, which accept deliveries and slots themselves; their own tests hold them to the same promises.
"""

from __future__ import annotations

import io
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any

import msgspec
import pytest
import trio

from hermes_trio.adapters.assembly import CHAT_PLATFORMS, OpenAdapters
from hermes_trio.adapters.cli.chat import ChatAdapter
from hermes_trio.adapters.cli.screen import Screen
from hermes_trio.adapters.web.adapter import WebAdapter, _owner
from hermes_trio.base.mounts import MountCaller, MountRequest
from hermes_trio.messaging.contract import Adapter, AdapterState
from hermes_trio.store import StoreError, open_store
from hermes_trio.testing.contracts import AdapterBench, AdapterContract
from hermes_trio.testing.fakes import ScriptedAgent
from hermes_trio.testing.faults import StoreFaults
from hermes_trio.testing.gateway import eventually
from hermes_trio.testing.platforms import FakeSlack, FakeTelegram
from tests import node_mode
from tests.e2e.chat_drivers import DRIVERS, Driver, open_driver
from tests.e2e.chat_world import platforms_of
from tests.messaging.harness import RotatingHub


class PlatformBench(AdapterBench):
    """A chat adapter, and a person in a direct chat of its fake platform."""

    def __init__(self, driver: Driver, adapter: Adapter) -> None:
        self.adapter = adapter
        self._driver = driver
        self._place = driver.direct(1)
        match driver.fake:
            case FakeTelegram():
                driver.fake.add_private_chat(int(self._place.user))
            case FakeSlack():
                driver.fake._dm(self._place.user)
            case _:
                pass
        self.chat_id = self._place.chat

    async def write(self, text: str) -> None:
        await trio.lowlevel.checkpoint()
        self._driver.say(self._place, text)

    async def shown(self) -> Sequence[str]:
        await trio.lowlevel.checkpoint()
        return [one.text for one in self._driver.seen_in(self._place)]


class NodesContract(AdapterContract):
    """The contract with a gateway that is, while `node_mode.NODES` is more than one, so many on one store; what the platform brings goes to one after
    the other.
    """

    def another(self, adapter: Adapter) -> Adapter:
        """The adapter of another node."""
        return deepcopy(adapter)

    @asynccontextmanager
    async def open_gateway(
        self, adapter: Adapter, agent: ScriptedAgent, faults: StoreFaults, store: Any = None
    ) -> AsyncIterator[OpenAdapters]:
        adapters = [adapter, *(self.another(adapter) for _ in range(node_mode.NODES - 1))]
        async with AsyncExitStack() as stack:
            stores = await stack.enter_async_context(node_mode.open_stores(open_store(None, runner="inline")))
            opened: list[OpenAdapters] = []
            for own, one in zip(adapters, stores, strict=True):
                gateway = super().open_gateway(own, agent, faults, one)
                opened.append(await stack.enter_async_context(gateway))
                if own is adapter:
                    running = opened[0].hub.runners[adapter.platform]
                    await eventually(lambda running=running: running.state is AdapterState.CONNECTED)
            if len(opened) > 1:
                hub = RotatingHub([one.hub for one in opened], adapters)
                next(hub.turns)  # the message comes in on a node that is not connected to the platform
                adapter.gateway = hub
            yield opened[0]


@asynccontextmanager
async def open_platform(name: str) -> AsyncIterator[AdapterBench]:
    """The bench of a platform, for the body of the `async with`."""
    async with open_driver(name) as driver:
        (platform,) = platforms_of({name: driver.table()})
        yield PlatformBench(driver, platform.adapter)


class TestTelegram(NodesContract):
    """Long polling: Telegram keeps updates until they are confirmed."""

    def open_bench(self, tmp_path: Path):
        return open_platform("telegram")


class TestDiscord(NodesContract):
    """The Gateway: events without a connected session are not sent later."""

    keeps_messages = False

    def open_bench(self, tmp_path: Path):
        return open_platform("discord")


class TestSlack(NodesContract):
    """Socket Mode: an event that was not acknowledged comes again."""

    keeps_messages = False

    def open_bench(self, tmp_path: Path):
        return open_platform("slack")


def test_every_chat_platform_is_tested():
    """A platform of the product has a driver, and a subclass of the contract here."""
    assert set(DRIVERS) == set(CHAT_PLATFORMS)
    named = {f"Test{name.capitalize()}" for name in CHAT_PLATFORMS}
    assert named <= {kind.__name__ for kind in NodesContract.__subclasses__()}


class BrowserBench(AdapterBench):
    """A page of the chat in the browser: it sends a message again, with its id, until it was taken."""

    def __init__(self, adapter: WebAdapter) -> None:
        self.adapter = adapter
        self._caller = MountCaller(key_id="key_1", name="admin", tenant="", scopes=frozenset(), admin=True)
        self._say = {mount.name: mount for mount in adapter.mounts}["web_say"]
        owner = _owner(self._caller)
        self._feed = adapter.feeds.feed(owner)
        self.chat_id = f"{owner}.talk"
        self._count = 0

    async def write(self, text: str) -> None:
        self._count += 1
        body = msgspec.json.encode({"text": text, "id": str(self._count)})
        request = MountRequest(
            method="POST",
            path="/v1/web/conversations/talk/messages",
            params={"conversation": "talk"},
            query=lambda _: "",
            body=body,
            caller=self._caller,
        )
        while True:
            try:
                await self._say.handler(request)
            except StoreError:
                continue
            return

    async def shown(self) -> Sequence[str]:
        await trio.lowlevel.checkpoint()
        told = [msgspec.json.decode(event) for _, event in self._feed.after(0) or []]
        return [one["text"] for one in told if one["event"] == "message"]


class TestBrowser(NodesContract):
    """The browser: its page sends again what was not taken, and reads a long message from its row, not from the live event."""

    keeps_messages = False
    test_a_long_text_goes_out_in_parts_within_the_limit = None

    def another(self, adapter: Adapter) -> Adapter:
        return WebAdapter()

    @asynccontextmanager
    async def open_bench(self, tmp_path: Path) -> AsyncIterator[AdapterBench]:
        async with open_store(None, runner="inline") as store:
            adapter = WebAdapter()
            adapter.store = store
            yield BrowserBench(adapter)


class TerminalBench(AdapterBench):
    """A user at a terminal."""

    chat_id = "cli"

    def __init__(self) -> None:
        self._file = io.StringIO()
        self._lines: deque[str] = deque()
        self._typed = trio.Event()
        self.adapter = ChatAdapter(Screen(formatted=False, file=self._file), self, interactive=True)

    async def next(self) -> str | None:
        """The next line."""
        while not self._lines:
            await self._typed.wait()
        return self._lines.popleft()

    async def write(self, text: str) -> None:
        await trio.lowlevel.checkpoint()
        self._lines.append(text)
        self._typed.set()
        self._typed = trio.Event()

    async def shown(self) -> Sequence[str]:
        await trio.lowlevel.checkpoint()
        return [line for line in self._file.getvalue().splitlines() if line.strip()]


@pytest.mark.one_node
class TestTerminal(AdapterContract):
    """A terminal has no ids and gives nothing twice: what the contract says about them is not for it."""

    test_a_message_is_handed_over_with_its_source = None
    test_a_message_is_sent_and_has_an_id = None
    test_a_message_that_was_not_taken_comes_again = None
    test_a_restart_loses_nothing_and_invents_nothing = None
    test_order_is_kept = None

    @asynccontextmanager
    async def open_bench(self, tmp_path: Path) -> AsyncIterator[AdapterBench]:
        yield TerminalBench()
