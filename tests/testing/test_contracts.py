"""The published contracts pass for the stores and adapters of this package, and fail for broken ones."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import trio

from hermes_trio.runtime.ports import RuntimeStore
from hermes_trio.store import Store, open_store
from hermes_trio.testing.contracts import AdapterBench, AdapterContract, GatewayStoreContract, StoreContract
from hermes_trio.testing.contracts.gateway_store import NodeStoreContract
from hermes_trio.testing.faults import STORE_VERBS, StoreFaults

EXAMPLES = Path(__file__).parents[2] / "examples" / "plugins"


class TestStoreInAFile(GatewayStoreContract):
    """The store that the gateway uses."""

    def open_store(self, path: Path) -> AbstractAsyncContextManager[Store]:
        return open_store(path / "state.db", maintenance=False)


class TestStoreInMemory(GatewayStoreContract):
    """The default store of a runtime."""

    durable = False

    def open_store(self, path: Path) -> AbstractAsyncContextManager[Store]:
        return open_store(None, runner="inline")


class TestSlowStore(StoreContract):
    """A store with slow writes: the contract does not depend on their speed."""

    def open_store(self, path: Path) -> AbstractAsyncContextManager[RuntimeStore]:
        faults = StoreFaults()
        faults.slow(seconds=0.0005, times=None)
        return faults.around(open_store(path / "state.db", runner="inline", maintenance=False))


class TestSharedStore(NodeStoreContract):
    """A store that several processes share."""

    @asynccontextmanager
    async def open_nodes(self, path: Path) -> AsyncIterator[tuple[Store, Store]]:
        async with (
            open_store(path / "state.db", runner="inline", maintenance=False) as base,
            base.shared("a", lease_seconds=60) as one,
            base.shared("b", lease_seconds=60) as two,
        ):
            yield one, two


async def test_the_contract_of_a_gateways_store_uses_every_verb(tmp_path: Path) -> None:
    """The contract calls every verb of the port."""
    faults = StoreFaults()

    class Counted(TestStoreInMemory):
        def open_store(self, path: Path) -> AbstractAsyncContextManager[Store]:
            return faults.around(super().open_store(path))

    contract = Counted()
    for name in dir(contract):
        if name.startswith("test_") and name != "test_no_query_is_an_error":
            # Tests of a restart skip themselves for a store in memory.
            with suppress(pytest.skip.Exception):
                await getattr(contract, name)(tmp_path)

    class CountedNodes(TestSharedStore):
        @asynccontextmanager
        async def open_nodes(self, path: Path) -> AsyncIterator[tuple[Store, Store]]:
            async with (
                open_store(None, runner="inline", maintenance=False) as base,
                faults.around(base.shared("a", lease_seconds=60)) as one,
                faults.around(base.shared("b", lease_seconds=60)) as two,
            ):
                yield one, two

    for name in dir(NodeStoreContract):
        if name.startswith("test_"):
            await getattr(CountedNodes(), name)(tmp_path)
    unused = sorted(STORE_VERBS - faults.calls.keys())
    assert not unused, (
        f"add a promise for {unused} to the class of its slice in hermes_trio/testing/contracts/gateway_store.py"
    )


class _Mailbox(AdapterBench):
    chat_id = "files"

    def __init__(self, folder: Path, adapter: Any) -> None:
        self.adapter = adapter
        self._folder = folder
        self._count = 0

    async def write(self, text: str) -> None:
        self._count += 1
        path = self._folder / "in" / f".{self._count:04}"
        await trio.Path(path).write_text(text)
        await trio.Path(path).rename(self._folder / "in" / f"{self._count:04}.txt")

    async def shown(self) -> Sequence[str]:
        found = sorted((self._folder / "out").glob("[!.]*.txt")) if (self._folder / "out").exists() else []
        return [path.read_text() for path in found]


def _mailbox_class(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(EXAMPLES / "mailbox"))
    import hermes_trio_mailbox  # pyright: ignore[reportMissingImports]

    return hermes_trio_mailbox.Mailbox


class TestMailbox(AdapterContract):
    """The example of an adapter."""

    @pytest.fixture(autouse=True)
    def _example(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.adapter_class = _mailbox_class(monkeypatch)

    @asynccontextmanager
    async def open_bench(self, tmp_path: Path) -> AsyncIterator[AdapterBench]:
        (tmp_path / "in").mkdir()
        yield _Mailbox(tmp_path, self.adapter_class(tmp_path, seconds=0.01))


async def test_an_adapter_that_moves_its_cursor_too_early_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The contract fails for an adapter that acknowledges a message before the hub has accepted it."""
    mailbox: Any = _mailbox_class(monkeypatch)

    class Hasty(mailbox):
        async def run(self, connected: Any) -> None:
            inner = self.gateway

            class Early:
                async def receive(self, adapter: Any, incoming: Any) -> Any:
                    await inner.set_cursor(adapter, incoming.event_id)
                    return await inner.receive(adapter, incoming)

                def __getattr__(self, name: str) -> Any:
                    return getattr(inner, name)

            self.gateway = Early()
            try:
                await super().run(connected)
            finally:
                self.gateway = inner

    class Hastily(TestMailbox):
        seconds = 0.3
        adapter_class = Hasty

    with pytest.raises((AssertionError, trio.TooSlowError, BaseExceptionGroup)):
        await Hastily().test_a_message_that_was_not_taken_comes_again(tmp_path)


async def test_a_store_that_forgets_is_found(tmp_path: Path) -> None:
    """The contract fails for a store whose commit is lost."""

    class Forgetful(TestStoreInAFile):
        def open_store(self, path: Path) -> AbstractAsyncContextManager[Store]:
            return open_store(None, runner="inline")

    with pytest.raises(AssertionError):
        await Forgetful().test_what_was_written_is_there_after_a_restart(tmp_path)
    with pytest.raises(AssertionError):
        await Forgetful().test_the_last_value_counts(tmp_path)
