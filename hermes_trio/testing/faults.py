"""Injects faults into any store: rules say which verbs fail, when, and how.

    faults = StoreFaults(seed=1)
    faults.fail("finish_turn", times=2)
    async with Runtime(agent=agent, store=faults.around(open_store(None))) as runtime: ...

The wrapped store sees every call that is not made to fail, so what is written is what the real store would have written. Nothing here
needs a thread or the real time: with a store in memory, or an inline one, a test with faults runs on virtual time.
"""

from __future__ import annotations

import functools
import inspect
import math
import random
from collections import Counter, deque
from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from difflib import get_close_matches
from enum import Enum
from typing import Any, Final, cast

import attrs
import outcome
import trio

from hermes_trio.runtime.ports import RuntimeStore
from hermes_trio.store.errors import CommitUncertain, StoreError, StoreFull
from hermes_trio.store.ports import Store

STORE_VERBS: Final[frozenset[str]] = frozenset(
    name for name, _ in inspect.getmembers(Store, inspect.iscoroutinefunction)
)
"""Every verb of the store's port."""

READ_VERBS: Final[frozenset[str]] = frozenset(
    {
        "backlog",
        "delivery_known",
        "event_epoch",
        "events_after",
        "find_api_key",
        "get_answer",
        "get_approval",
        "get_cron_job",
        "get_cursor",
        "get_job",
        "get_meta",
        "get_reply",
        "get_response",
        "get_run",
        "get_session",
        "granted",
        "inbox_waiting",
        "lane_owner",
        "latest_response",
        "list_allowed",
        "list_api_keys",
        "list_approvals",
        "list_cron_executions",
        "list_cron_jobs",
        "list_grants",
        "list_inbox",
        "list_jobs",
        "list_messages",
        "list_nodes",
        "list_outbox",
        "list_pairings",
        "list_runs",
        "list_sessions",
        "load_history",
        "next_outbox_due",
        "outbox_unsent",
        "replies_to",
        "root_open",
        "root_wakes",
        "session_host",
        "session_of",
        "session_owners",
        "session_promised",
        "session_prompt",
        "user_allowed",
        "waiting_sessions",
    }
)
"""The verbs that work on a full disk, because their caller does not wait for a commit."""


class StoreFaultKind(Enum):
    """The kind of an injected fault."""

    BEFORE = "before"
    """The verb raises, and nothing was written."""
    AFTER = "after"
    """The verb is committed, and then raises `CommitUncertain`."""
    SLOW = "slow"
    """The verb takes long. Later writes wait for it; it is written even if its caller is cancelled."""
    FULL = "full"
    """The verb raises `StoreFull`, and nothing was written. Reads do not fail."""


@attrs.frozen
class InjectedFault:
    """A fault that was injected: its verb and its kind."""

    verb: str
    kind: StoreFaultKind


@attrs.define(eq=False)
class _Rule:
    kind: StoreFaultKind
    verbs: frozenset[str]
    skip: int
    times: int | None
    chance: float
    seconds: float
    error: Callable[[str], Exception] | None
    until: float = math.inf

    def take(self, verb: str, chance: random.Random) -> bool:
        if verb not in self.verbs or self.times == 0 or (self.until < math.inf and trio.current_time() >= self.until):
            return False
        if self.skip:
            self.skip -= 1
            return False
        if self.chance < 1.0 and chance.random() >= self.chance:
            return False
        if self.times is not None:
            self.times -= 1
        return True


class StoreFaults:
    """The rules by which verbs of a store fail. They may be added and removed at any time, also while a runtime is open.

    The rules are checked in the order in which they were added, and the first that applies to a call decides. `seed` makes the rules with
    a `chance` repeatable. `calls` counts the calls of each verb; `injected` lists the faults that were injected, in order, and `told` is called
    with each of them.
    """

    def __init__(self, *, seed: int = 0) -> None:
        self.calls: Counter[str] = Counter()
        self.injected: list[InjectedFault] = []
        self.told: Callable[[InjectedFault], None] | None = None
        self._rules: list[_Rule] = []
        self._random: random.Random = random.Random(seed)

    def fail(
        self,
        *verbs: str,
        after_commit: bool = False,
        skip: int = 0,
        times: int | None = 1,
        chance: float = 1.0,
        seconds: float = math.inf,
        error: Callable[[str], Exception] | None = None,
    ) -> None:
        """Make these verbs (all, if none is named) raise: before they write anything, or after they have committed.

        `skip` calls pass first, then `times` calls fail (None: until `heal`), each with the given `chance`. `error` makes the exception
        from the name of the verb; the default is `StoreError` before the commit, and `CommitUncertain` after it. After `seconds`, which are counted
        from this call, the rule is over.
        """
        kind = StoreFaultKind.AFTER if after_commit else StoreFaultKind.BEFORE
        until = math.inf if seconds == math.inf else trio.current_time() + seconds
        self._rules.append(_Rule(kind, _known(verbs), skip, times, chance, 0.0, error, until))

    def slow(self, *verbs: str, seconds: float, skip: int = 0, times: int | None = 1, chance: float = 1.0) -> None:
        """Make these verbs (all, if none is named) take `seconds` before they are written. Cancelling the caller does not cancel a write."""
        self._rules.append(_Rule(StoreFaultKind.SLOW, _known(verbs), skip, times, chance, seconds, None))

    def full(self, *verbs: str, skip: int = 0, times: int | None = None) -> None:
        """Make these writes (all, if none is named) raise `StoreFull`, until `heal` unless `times` is given. Reads do not fail."""
        self._rules.append(_Rule(StoreFaultKind.FULL, _known(verbs) - READ_VERBS, skip, times, 1.0, 0.0, None))

    def heal(self) -> None:
        """Remove all rules. A slow write that has begun still takes its time."""
        self._rules.clear()

    @asynccontextmanager
    async def around(self, opening: AbstractAsyncContextManager[RuntimeStore]) -> AsyncGenerator[Store]:
        """Open a store with these faults for the body of the `async with`. Leaving it waits for slow writes, as a real store does."""
        async with opening as store:
            failure: Exception | None = None
            async with trio.open_nursery() as nursery:
                try:
                    yield cast(Store, _FaultyStore(store, self, nursery))
                except Exception as error:  # an exception of the body, which must not be raised as a group
                    failure = error
            if failure is not None:
                raise failure

    def _take(self, verb: str) -> _Rule | None:
        self.calls[verb] += 1
        for rule in self._rules:
            if rule.take(verb, self._random):
                self.injected.append(InjectedFault(verb, rule.kind))
                if self.told is not None:
                    self.told(self.injected[-1])
                return rule
        return None


def _known(verbs: tuple[str, ...]) -> frozenset[str]:
    for verb in verbs:
        if verb not in STORE_VERBS:
            near = get_close_matches(verb, STORE_VERBS, 1)
            raise ValueError(f"the store has no verb {verb!r}{f'; did you mean {near[0]!r}?' if near else ''}")
    return frozenset(verbs) if verbs else STORE_VERBS


class _FaultyStore:
    """The store of `around`: its verbs check the rules first, all other attributes are those of the wrapped store."""

    def __init__(self, store: RuntimeStore, faults: StoreFaults, nursery: trio.Nursery) -> None:
        self._store = store
        self._faults = faults
        self._nursery = nursery
        self._queue: deque[tuple[float, functools.partial[Any], _Pending]] = deque()

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._store, name)
        if name not in STORE_VERBS:
            return value
        called: Callable[..., Any] = functools.partial(self._call, name, value)
        self.__dict__[name] = called
        return called

    async def _call(self, name: str, verb: Callable[..., Any], *args: Any, **named: Any) -> Any:
        rule = self._faults._take(name)  # pyright: ignore[reportPrivateUsage]
        if rule is None and not self._queue:
            return await verb(*args, **named)
        bound = functools.partial(verb, *args, **named)
        kind = None if rule is None else rule.kind
        if rule is not None and kind in (StoreFaultKind.BEFORE, StoreFaultKind.FULL):
            await trio.lowlevel.checkpoint()
            raise _error(rule, name)
        seconds = 0.0 if rule is None else rule.seconds
        if name in READ_VERBS:
            if seconds:
                await trio.sleep(seconds)
            value = await bound()
        elif seconds or self._queue:
            value = await self._write_in_order(seconds, bound)
        else:
            value = await bound()
        if rule is not None and kind is StoreFaultKind.AFTER:
            raise _error(rule, name)
        return value

    async def _write_in_order(self, seconds: float, bound: functools.partial[Any]) -> Any:
        await trio.lowlevel.checkpoint_if_cancelled()
        pending = _Pending()
        self._queue.append((seconds, bound, pending))
        if len(self._queue) == 1:
            self._nursery.start_soon(self._write_slowly, name="slow store")
        await pending.done.wait()
        assert pending.result is not None
        return pending.result.unwrap()

    async def _write_slowly(self) -> None:
        """Write in the order of the calls. Shielded: every call is written."""
        with trio.CancelScope(shield=True):
            while self._queue:
                seconds, bound, pending = self._queue[0]
                await trio.sleep(seconds)
                pending.result = await outcome.acapture(bound)
                self._queue.popleft()
                pending.done.set()


@attrs.define(eq=False)
class _Pending:
    done: trio.Event = attrs.field(factory=trio.Event)
    result: outcome.Value[Any] | outcome.Error | None = None


def _error(rule: _Rule, verb: str) -> Exception:
    if rule.error is not None:
        return rule.error(verb)
    match rule.kind:
        case StoreFaultKind.FULL:
            return StoreFull(f"injected: no space left for {verb}; nothing was written")
        case StoreFaultKind.AFTER:
            return CommitUncertain(f"injected: {verb} may have been written")
        case _:
            return StoreError(f"injected: {verb} failed; nothing was written")
