"""The pytest plugin: an embedded runtime on virtual time, fakes, and a leak check that fails the test that leaked.

Fixtures: `virtual_clock`, `scripted_agent`, `runtime`, `fake_adapter`, `stateless`. A test that uses one of them runs on virtual time, is leak-checked and
has a limit in real time. `--hermes-leaks=all` checks every test, of whatever kind, `off` none; the marker `hermes_leaks("all" | "ours" | "off")` says so for
one test. Inside a turn `os.chdir`, `os.putenv` and `os.unsetenv` fail. Models that need a network refuse to work unless a test asks for them.

Tests that use none of the fixtures and no marker of ours are left alone, and Trio is not imported for them.
"""

from __future__ import annotations

import functools
import gc
import inspect
import sys
from collections.abc import AsyncIterator, Callable, Generator
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, Final

import pytest

if TYPE_CHECKING:
    from trio.testing import MockClock

    from hermes_trio.runtime.runtime import Runtime
    from hermes_trio.runtime.stateless import StatelessEntry

    from .fakes import FakeAdapter, ScriptedAgent

OUR_FIXTURES: Final = frozenset({"virtual_clock", "scripted_agent", "runtime", "fake_adapter", "stateless"})

LIVE_FIXTURES: Final = frozenset({"runtime", "fake_adapter", "stateless"})
"""The fixtures that are open while the test runs, so that it must be async."""

LEAK_MODES: Final = ("ours", "all", "off")


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("hermes-trio")
    group.addoption(
        "--hermes-leaks",
        choices=LEAK_MODES,
        default="ours",
        help="which tests are leak-checked: those that use hermes-trio's fixtures (default), all of every kind, or none",
    )
    parser.addini(
        "hermes_test_seconds",
        "real seconds that a test with hermes-trio's fixtures may take; 0 for no limit",
        default="120",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "hermes_leaks(mode): leak-check this test as with --hermes-leaks=mode")
    config.addinivalue_line("markers", "allow_leaks: do not leak-check this test")
    config.addinivalue_line("markers", "hermes_seconds(seconds): the limit of this test in real time; 0 for none")
    config.addinivalue_line("markers", "allow_network_models: this test may call models over the network")


def pytest_collection_finish(session: pytest.Session) -> None:
    """Freeze the objects of the collection, so that the garbage collections of leak checks leave them out."""
    if session.config.getoption("--hermes-leaks") != "off" and any(map(_uses_ours, session.items)):
        gc.collect()
        gc.freeze()


def _uses_ours(item: pytest.Item) -> bool:
    return not OUR_FIXTURES.isdisjoint(getattr(item, "fixturenames", ()))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    if not _uses_ours(item):
        return
    used = ", ".join(sorted(OUR_FIXTURES.intersection(getattr(item, "fixturenames", ()))))
    if not item.config.pluginmanager.has_plugin("trio"):
        pytest.fail(
            f"the fixture {used} needs pytest-trio: install hermes-trio[pytest], or add pytest-trio to the project",
            pytrace=False,
        )
    if not item.config.getini("trio_mode") and item.get_closest_marker("trio") is None:
        pytest.fail(
            f"the fixture {used} needs a test that runs on Trio: set `trio_mode = true` in the pytest configuration, or mark"
            " the test with @pytest.mark.trio",
            pytrace=False,
        )
    if not LIVE_FIXTURES.isdisjoint(getattr(item, "fixturenames", ())) and not inspect.iscoroutinefunction(
        _inner(item)[0]
    ):
        pytest.fail(f"the fixture {used} lives in an async test: write `async def {item.name}(...)`", pytrace=False)
    from . import audit

    audit.install()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, Any, Any]:
    ours = _uses_ours(item)
    checked = _is_checked(item, ours)
    seconds = _limit(item, ours)
    inner, replace = _inner(item)
    if not inspect.iscoroutinefunction(inner) or _is_unittest(item):
        if seconds and item.get_closest_marker("hermes_seconds") is not None:
            pytest.fail(
                "@pytest.mark.hermes_seconds limits async test functions; nothing can stop this one. pytest-timeout can end the whole process",
                pytrace=False,
            )
        if not checked:
            return (yield)
        from .process_leaks import ProcessWatch

        watch = ProcessWatch.take()
        result = yield
        watch.check()
        return result
    if ours:
        item.add_marker(pytest.mark.trio(run=_run_virtual), append=False)
    if checked or seconds:
        replace(_wrapped(inner, checked=checked, seconds=seconds))
    try:
        with _network_models(item) if ours or "hermes_trio.providers" in sys.modules else nullcontext():
            return (yield)
    finally:
        replace(inner)  # the parameters of a hypothesis test share its function, which pytest-trio replaces, too


def _is_unittest(item: pytest.Item) -> bool:
    """Return whether a `unittest.TestCase` runs the test itself, so that its body cannot be wrapped."""
    unittest = sys.modules.get("unittest")
    cls = getattr(item, "cls", None)
    return unittest is not None and isinstance(cls, type) and issubclass(cls, unittest.TestCase)


def _is_checked(item: pytest.Item, ours: bool) -> bool:
    if item.get_closest_marker("allow_leaks") is not None:
        return False
    marker = item.get_closest_marker("hermes_leaks")
    mode = item.config.getoption("--hermes-leaks") if marker is None else (marker.args or ("all",))[0]
    if mode not in LEAK_MODES:
        pytest.fail(f"@pytest.mark.hermes_leaks({mode!r}): the mode is one of {', '.join(LEAK_MODES)}", pytrace=False)
    return mode == "all" or (mode == "ours" and ours)


def _limit(item: pytest.Item, ours: bool) -> float:
    marker = item.get_closest_marker("hermes_seconds")
    if marker is None and not ours:
        return 0.0
    given = item.config.getini("hermes_test_seconds") if marker is None else (marker.args or ("",))[0]
    where = "hermes_test_seconds" if marker is None else "the limit in @pytest.mark.hermes_seconds"
    try:
        seconds = float(given)
    except (TypeError, ValueError):
        seconds = -1.0
    if not 0 <= seconds < float("inf"):
        pytest.fail(f"{where} is {given!r}; it is a number of seconds, or 0 for no limit", pytrace=False)
    return seconds


def _inner(item: pytest.Item) -> tuple[Any, Callable[[Any], None]]:
    """Return the function of the test's body, which hypothesis wraps, and a function that replaces it."""
    function = getattr(item, "obj", None)
    inside = getattr(function, "hypothesis", None)
    if inside is not None:
        return inside.inner_test, functools.partial(setattr, inside, "inner_test")
    return function, functools.partial(setattr, item, "obj")


def _network_models(item: pytest.Item) -> Any:
    from hermes_trio.providers.network_switch import allow_network_models, forbid_network_models

    forbid_network_models()
    return nullcontext() if item.get_closest_marker("allow_network_models") is None else allow_network_models()


def _run_virtual(
    function: Callable[..., Any], *args: Any, clock: Any = None, instruments: Any = (), **rest: Any
) -> Any:
    import trio

    from .clock import virtual_clock as make_clock

    return trio.run(function, *args, clock=make_clock() if clock is None else clock, instruments=instruments, **rest)


def _wrapped(test: Callable[..., Any], *, checked: bool, seconds: float) -> Callable[..., Any]:
    """Return the test with its checks, for the event loop on which it runs."""

    @functools.wraps(test)
    async def run(*args: Any, **kwargs: Any) -> None:
        if _on_asyncio():
            await _check_on_asyncio(functools.partial(test, *args, **kwargs), checked, seconds)
        else:
            await _check_on_trio(functools.partial(test, *args, **kwargs), kwargs, checked, seconds)

    return run


def _on_asyncio() -> bool:
    asyncio = sys.modules.get("asyncio")
    if asyncio is None:
        return False
    try:
        return asyncio.current_task() is not None
    except RuntimeError:
        return False


async def _check_on_trio(test: Callable[[], Any], fixtures: dict[str, Any], checked: bool, seconds: float) -> None:
    from hermes_trio.runtime.runtime import Runtime

    from .leaks import LeakWatch
    from .time_limit import run_limited

    runtimes = tuple(value for value in fixtures.values() if isinstance(value, Runtime))
    watch = LeakWatch.take(runtimes) if checked else None
    await (run_limited(test, seconds, runtimes) if seconds else test())
    if watch is not None:
        await watch.check()


async def _check_on_asyncio(test: Callable[[], Any], checked: bool, seconds: float) -> None:
    import asyncio

    from .process_leaks import ProcessWatch, blame

    before = asyncio.all_tasks()
    watch = ProcessWatch.take() if checked else None
    limit = asyncio.timeout(seconds or None)
    try:
        async with limit:
            await test()
    except TimeoutError:
        if not limit.expired():
            raise
        pytest.fail(f"the test took more than {seconds:g} s of real time", pytrace=False)
    if watch is None:
        return
    await asyncio.sleep(0)  # a task that has just ended counts until its loop has processed its end
    left = [f"task {task.get_name()}: {task.get_coro()}" for task in asyncio.all_tasks() - before if not task.done()]
    blame([*left, *watch.found()])


@pytest.fixture
def virtual_clock() -> MockClock:
    """Return the clock of the test: jumps when every task is blocked, stands still while a thread works."""
    from .clock import virtual_clock as make_clock

    return make_clock()


@pytest.fixture
def scripted_agent() -> ScriptedAgent:
    """Return the agent of the `runtime` fixture: give it steps with `then`, or let it echo."""
    from .fakes import ScriptedAgent

    return ScriptedAgent()


@pytest.fixture
async def runtime(scripted_agent: ScriptedAgent) -> AsyncIterator[Runtime]:
    """Return an open Runtime on virtual time, with the scripted agent and a store in memory."""
    from hermes_trio.runtime.runtime import Runtime

    async with Runtime(agent=scripted_agent, seed=1) as opened:
        yield opened


@pytest.fixture
async def fake_adapter(runtime: Runtime) -> AsyncIterator[FakeAdapter]:
    """Return a delivering adapter that records what it was sent, connected to the `runtime` fixture."""
    from .fakes import FakeAdapter

    async with FakeAdapter().connect(runtime) as adapter:
        yield adapter


@pytest.fixture
def stateless(runtime: Runtime) -> StatelessEntry:
    """Return the stateless entry of the `runtime` fixture. Resolved when the test runs: see `runtime.stateless`."""
    return _Later(runtime)  # pyright: ignore[reportReturnType]


class _Later:
    """pytest-trio gives a synchronous fixture the fixture object, not its value; this waits for the value."""

    def __init__(self, runtime: Any) -> None:
        self._runtime = runtime

    def __getattr__(self, name: str) -> Any:
        runtime = getattr(self._runtime, "fixture_value", self._runtime)
        return getattr(runtime.stateless, name)
