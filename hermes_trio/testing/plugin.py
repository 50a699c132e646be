"""The pytest plugin: an embedded runtime on virtual time, fakes, and a check that fails the very test that left something behind.

Fixtures: `virtual_clock`, `scripted_agent`, `runtime`, `fake_adapter`, `stateless`. A test that uses one of them runs on virtual time and is leak-checked;
`--hermes-leaks=all` checks every async test, `--hermes-leaks=off` none, and the marker `allow_leaks` exempts one. Inside a turn `os.chdir`, `os.putenv` and
`os.unsetenv` fail. Models that need a network refuse to work unless a test asks for them.
"""

from __future__ import annotations

import faulthandler
import functools
import gc
import inspect
from collections.abc import AsyncIterator, Callable, Generator
from typing import TYPE_CHECKING, Any, Final

import pytest
import trio

if TYPE_CHECKING:
    from trio.testing import MockClock

    from hermes_trio.runtime.runtime import Runtime
    from hermes_trio.runtime.stateless import StatelessEntry

    from .fakes import FakeAdapter, ScriptedAgent

OUR_FIXTURES: Final = frozenset({"virtual_clock", "scripted_agent", "runtime", "fake_adapter", "stateless"})

TEST_SECONDS: Final = 120.0
"""A test that takes longer (in real time) dumps every stack and ends the run: `trio.fail_after` is blind to a blocked loop."""


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("hermes-trio")
    group.addoption(
        "--hermes-leaks",
        choices=("ours", "all", "off"),
        default="ours",
        help="which async tests are leak-checked: those that use hermes-trio's fixtures (default), all, or none",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "allow_leaks: do not leak-check this test")
    config.addinivalue_line("markers", "allow_network_models: this test may call models over the network")


def pytest_collection_finish(session: pytest.Session) -> None:
    """Leave what collecting has made, which stays, out of every later garbage collection: a leak check makes several."""
    if session.config.getoption("--hermes-leaks") != "off" and any(map(_uses_ours, session.items)):
        gc.collect()
        gc.freeze()


def _uses_ours(item: pytest.Item) -> bool:
    return not OUR_FIXTURES.isdisjoint(getattr(item, "fixturenames", ()))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    if not _uses_ours(item):
        return
    from . import audit

    audit.install()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, Any, Any]:
    function = getattr(item, "obj", None)
    inner = getattr(getattr(function, "hypothesis", None), "inner_test", function)
    if not inspect.iscoroutinefunction(inner):
        return (yield)
    faulthandler.dump_traceback_later(TEST_SECONDS * (30 if item.get_closest_marker("slow") else 1), exit=True)
    try:
        ours = _uses_ours(item)
        if ours:
            item.add_marker(pytest.mark.trio(run=_run_virtual), append=False)
        mode = item.config.getoption("--hermes-leaks")
        if (mode == "all" or (mode == "ours" and ours)) and item.get_closest_marker("allow_leaks") is None:
            checked = _leak_checked(inner)
            if inner is function:
                item.obj = checked  # pyright: ignore[reportAttributeAccessIssue]
            else:
                function.hypothesis.inner_test = checked  # pyright: ignore[reportOptionalMemberAccess]
        with _network_models(item):
            return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()


def _network_models(item: pytest.Item) -> Any:
    from contextlib import nullcontext

    from hermes_trio.providers.network_switch import allow_network_models, forbid_network_models

    forbid_network_models()
    return nullcontext() if item.get_closest_marker("allow_network_models") is None else allow_network_models()


def _run_virtual(
    function: Callable[..., Any], *args: Any, clock: Any = None, instruments: Any = (), **rest: Any
) -> Any:
    from .clock import virtual_clock as make_clock

    return trio.run(function, *args, clock=make_clock() if clock is None else clock, instruments=instruments, **rest)


def _leak_checked(test: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(test)
    async def checked(*args: Any, **kwargs: Any) -> None:
        from hermes_trio.runtime.runtime import Runtime

        from .leaks import LeakWatch

        runtimes = tuple(value for value in kwargs.values() if isinstance(value, Runtime))
        watch = LeakWatch.take(runtimes)
        await test(*args, **kwargs)
        await watch.check()

    return checked


@pytest.fixture
def virtual_clock() -> MockClock:
    """The clock of the test: jumps when every task is blocked, stands still while a thread works."""
    from .clock import virtual_clock as make_clock

    return make_clock()


@pytest.fixture
def scripted_agent() -> ScriptedAgent:
    """The agent of the `runtime` fixture: give it steps with `then`, or let it echo."""
    from .fakes import ScriptedAgent

    return ScriptedAgent()


@pytest.fixture
async def runtime(scripted_agent: ScriptedAgent) -> AsyncIterator[Runtime]:
    """An open Runtime on virtual time, with the scripted agent and a store in memory."""
    from hermes_trio.runtime.runtime import Runtime

    async with Runtime(agent=scripted_agent, seed=1) as opened:
        yield opened


@pytest.fixture
async def fake_adapter(runtime: Runtime) -> AsyncIterator[FakeAdapter]:
    """A delivering adapter that records what it was sent, connected to the `runtime` fixture."""
    from .fakes import FakeAdapter

    async with FakeAdapter().connect(runtime) as adapter:
        yield adapter


@pytest.fixture
def stateless(runtime: Runtime) -> StatelessEntry:
    """The stateless entry of the `runtime` fixture. Resolved when the test runs: see `runtime.stateless`."""
    return _Later(runtime)  # pyright: ignore[reportReturnType]


class _Later:
    """pytest-trio gives a synchronous fixture the fixture object, not its value; this waits for the value."""

    def __init__(self, runtime: Any) -> None:
        self._runtime = runtime

    def __getattr__(self, name: str) -> Any:
        runtime = getattr(self._runtime, "fixture_value", self._runtime)
        return getattr(runtime.stateless, name)
