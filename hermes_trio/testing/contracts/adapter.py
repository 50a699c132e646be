"""The contract of adapters of chat platforms, as tests."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio

from hermes_trio.adapters.assembly import AdapterAssembly, OpenAdapters
from hermes_trio.messaging.contract import Adapter, AdapterState, Disposition, Incoming, Outgoing, Received
from hermes_trio.messaging.platforms import Platform
from hermes_trio.messaging.session_keys import Source
from hermes_trio.messaging.settings import PlatformSettings
from hermes_trio.runtime.runtime import Runtime
from hermes_trio.store import open_store
from hermes_trio.store.errors import StoreError
from hermes_trio.store.records import ApprovalChoice
from hermes_trio.testing.fakes import ScriptedAgent
from hermes_trio.testing.faults import StoreFaults


class AdapterBench(ABC):
    """An adapter with the platform behind it, as the contract uses them. `chat_id` is a chat in which `write` writes and the agent may answer."""

    adapter: Adapter
    chat_id: str

    @abstractmethod
    async def write(self, text: str) -> None:
        """Send a message of a user to the agent on the platform. It may be called while the adapter does not run."""

    @abstractmethod
    async def shown(self) -> Sequence[str]:
        """Return the texts of the agent that the platform shows, oldest first."""


class RecordingHub:
    """A hub that records what an adapter hands over, keeps its cursor, and fails when told to."""

    def __init__(self) -> None:
        self.received: list[Incoming] = []
        self.attempts: list[Incoming] = []
        self.cursor: str | None = None
        self.cursors: list[tuple[str, int]] = []
        """Every cursor that was set, with the number of messages taken by then."""
        self.failures = 0
        """The number of next messages for which `receive` raises `StoreError`."""

    async def receive(self, adapter: Adapter, incoming: Incoming) -> Received:
        """Record a message. Raises `StoreError` while `failures` is above 0."""
        await trio.lowlevel.checkpoint()
        self.attempts.append(incoming)
        if self.failures:
            self.failures -= 1
            raise StoreError("the message could not be stored")
        self.received.append(incoming)
        return Received(disposition=Disposition.ACCEPTED)

    async def approval_clicked(self, adapter: Adapter, source: Source, approval_id: str, choice: ApprovalChoice) -> str:
        """Report that no approval is pending."""
        await trio.lowlevel.checkpoint()
        return "unknown"

    async def get_cursor(self, adapter: Adapter) -> str | None:
        """Return the last cursor."""
        await trio.lowlevel.checkpoint()
        return self.cursor

    async def set_cursor(self, adapter: Adapter, value: str) -> None:
        """Record the cursor."""
        await trio.lowlevel.checkpoint()
        self.cursor = value
        self.cursors.append((value, len(self.received)))


class AdapterContract(ABC):
    """Subclass it as `class TestMine(AdapterContract)` and implement `open_bench`. `seconds` limits each wait."""

    seconds: float = 10.0
    keeps_messages: bool = True
    """Whether the platform keeps messages that are written while the adapter does not run."""

    @abstractmethod
    def open_bench(self, tmp_path: Path) -> AbstractAsyncContextManager[AdapterBench]:
        """Open a new adapter and its platform for each test, for the body of the `async with`."""

    @asynccontextmanager
    async def open_gateway(
        self, adapter: Adapter, agent: ScriptedAgent, faults: StoreFaults, store: Any = None
    ) -> AsyncIterator[OpenAdapters]:
        """Open a gateway with this adapter on a store with these faults. Override it for tests on something else than one gateway on a store in memory."""
        assembly = AdapterAssembly([Platform(adapter, PlatformSettings(allow_all=True))])
        opening = faults.around(open_store(None, runner="inline") if store is None else store)
        async with (
            Runtime(agent=agent, store=opening, stages=[assembly.stage]) as runtime,
            assembly.open(runtime, None) as adapters,
        ):
            yield adapters

    @asynccontextmanager
    async def _running(self, bench: AdapterBench, hub: RecordingHub) -> AsyncIterator[None]:
        """Run the adapter for the body of the `async with`, and restart it when it fails, as the gateway does."""
        adapter = bench.adapter
        adapter.gateway = hub
        connected = trio.Event()

        async def run() -> None:
            while True:
                try:
                    await adapter.run(connected.set)
                except Exception:
                    await trio.sleep(0.01)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(run)
            with trio.fail_after(self.seconds):
                await connected.wait()
            yield
            nursery.cancel_scope.cancel()

    async def _until(self, check: Callable[[], Awaitable[object] | bool]) -> None:
        with trio.fail_after(self.seconds):
            while True:
                done = check()
                if done if isinstance(done, bool) else await done:
                    return
                await trio.sleep(0.01)

    @pytest.mark.trio
    async def test_it_has_a_name_and_a_limit(self, tmp_path: Path) -> None:
        """Keys and rows use `platform`: a short word. A message has a limit."""
        async with self.open_bench(tmp_path) as bench:
            name = bench.adapter.platform
            assert name, f"{type(bench.adapter).__name__}.platform is empty; it must name the platform"
            assert name.isascii(), name
            assert name.replace("_", "").isalnum(), name
            assert len(name) <= 64
            assert bench.adapter.limit.size > 0

    @pytest.mark.trio
    async def test_a_message_is_handed_over_with_its_source(self, tmp_path: Path) -> None:
        """The hub learns the platform, the chat, the person and the platform's id of the event."""
        hub = RecordingHub()
        async with self.open_bench(tmp_path) as bench, bench.adapter.open(), self._running(bench, hub):
            await bench.write("hello there")
            await self._until(lambda: bool(hub.received))
            (incoming,) = hub.received
            assert incoming.plain_text.strip() == "hello there"
            assert incoming.source.platform == bench.adapter.platform
            assert incoming.source.chat_id == bench.chat_id
            assert incoming.source.user_id
            assert incoming.event_id, "without an event id a redelivered message is answered twice"

    @pytest.mark.trio
    async def test_a_message_that_was_not_taken_comes_again(self, tmp_path: Path) -> None:
        """A hub that fails once gets the same event again; the cursor does not pass a message that was not taken."""
        hub = RecordingHub()
        hub.failures = 1
        async with self.open_bench(tmp_path) as bench, bench.adapter.open(), self._running(bench, hub):
            await bench.write("do not lose me")
            await self._until(lambda: bool(hub.received))
        assert {one.event_id for one in hub.attempts} == {hub.received[0].event_id}
        assert [taken for _, taken in hub.cursors if not taken] == []

    @pytest.mark.trio
    async def test_order_is_kept(self, tmp_path: Path) -> None:
        """Messages of one chat come in the order in which they were written, each with an event of its own."""
        hub = RecordingHub()
        async with self.open_bench(tmp_path) as bench, bench.adapter.open(), self._running(bench, hub):
            for number in range(5):
                await bench.write(f"message {number}")
            await self._until(lambda: len(hub.received) >= 5)
        assert [one.plain_text.strip() for one in hub.received] == [f"message {number}" for number in range(5)]
        assert len({one.event_id for one in hub.received}) == 5

    @pytest.mark.trio
    async def test_a_restart_loses_nothing_and_invents_nothing(self, tmp_path: Path) -> None:
        """What was written while the adapter was away comes in; what came in before has, if it comes again, the same event id."""
        hub = RecordingHub()
        async with self.open_bench(tmp_path) as bench, bench.adapter.open():
            async with self._running(bench, hub):
                await bench.write("before")
                await self._until(lambda: bool(hub.received))
            if self.keeps_messages:
                await bench.write("meanwhile")
            async with self._running(bench, hub):
                await bench.write("after")
                await self._until(lambda: any(one.plain_text.strip() == "after" for one in hub.received))
        texts = {one.event_id: one.plain_text.strip() for one in hub.received}
        assert list(texts.values()) == (
            ["before", "meanwhile", "after"] if self.keeps_messages else ["before", "after"]
        )

    @pytest.mark.trio
    async def test_running_ends_when_it_is_cancelled(self, tmp_path: Path) -> None:
        """Cancelling `run` ends it at once; `connected` was called before."""
        hub = RecordingHub()
        async with self.open_bench(tmp_path) as bench, bench.adapter.open():
            with trio.fail_after(self.seconds):
                async with self._running(bench, hub):
                    pass

    @pytest.mark.trio
    async def test_a_message_is_sent_and_has_an_id(self, tmp_path: Path) -> None:
        """Sending needs `open` alone: a reply goes out while nothing is received."""
        async with self.open_bench(tmp_path) as bench, bench.adapter.open():
            result = await bench.adapter.send(Outgoing(chat_id=bench.chat_id, text="an answer"))
            assert result.success, result.error
            assert result.message_id

            async def shown() -> bool:
                return [text.strip() for text in await bench.shown()] == ["an answer"]

            await self._until(shown)

    @pytest.mark.trio
    async def test_a_long_text_goes_out_in_parts_within_the_limit(self, tmp_path: Path) -> None:
        """Every part that `split` makes is within the limit and is taken by the platform; no word is lost."""
        async with self.open_bench(tmp_path) as bench, bench.adapter.open():
            adapter = bench.adapter
            if adapter.limit.size > 1_000_000:
                pytest.skip("this platform does not limit the length of a message")
            words = [f"word{number}" for number in range(1 + (2 * adapter.limit.size) // 5)]
            parts = adapter.split(" ".join(words))
            assert len(parts) > 1
            assert max(adapter.limit.length(part) for part in parts) <= adapter.limit.size
            for part in parts:
                result = await adapter.send(Outgoing(chat_id=bench.chat_id, text=part))
                assert result.success, result.error

            async def shown() -> bool:
                text = " ".join(await bench.shown())
                return words[0] in text and words[-1] in text

            await self._until(shown)

    @pytest.mark.trio
    async def test_the_whole_way_through_a_gateway_whose_store_is_slow(self, tmp_path: Path) -> None:
        """A person writes, a turn runs, and one answer is shown, although every write of the store takes its time."""
        faults = StoreFaults()
        faults.slow(seconds=0.002, times=None)
        assert await self._ask_once(tmp_path, faults, until=lambda: bool(faults.injected)) == ["the only answer"]

    @pytest.mark.parametrize(
        ("verb", "after_commit"), [("finish_turn", False), ("finish_turn", True), ("outbox_sent", True)]
    )
    @pytest.mark.trio
    async def test_the_whole_way_through_a_gateway_whose_store_fails_once(
        self, tmp_path: Path, verb: str, after_commit: bool
    ) -> None:
        """A write that fails, or whose commit is uncertain, is made again: the agent works once, and one answer is shown."""
        faults = StoreFaults()
        faults.fail(verb, after_commit=after_commit)
        assert await self._ask_once(tmp_path, faults, until=lambda: bool(faults.injected)) == ["the only answer"]

    async def _ask_once(self, tmp_path: Path, faults: StoreFaults, until: Callable[[], bool]) -> list[str]:
        """Ask a question as a user, wait for the answer and until `until` is true, and return the texts that are shown."""
        async with self.open_bench(tmp_path) as bench:
            agent = ScriptedAgent("the only answer")
            async with self.open_gateway(bench.adapter, agent, faults) as adapters:
                running = adapters.hub.runners[bench.adapter.platform]
                await self._until(lambda: running.state is AdapterState.CONNECTED)
                await bench.write("a question")

                async def answered() -> bool:
                    return bool(await bench.shown()) and until()

                await self._until(answered)
        assert [turn.input.text.strip() for turn in agent.turns] == ["a question"]
        return [text.strip() for text in await bench.shown()]
