"""The plugin fails the test that leaks, and names the leak."""

import threading

import pytest

from hermes_trio.testing.process_leaks import ProcessWatch

pytest_plugins = ["pytester"]

CASES = {
    "a task": (
        """
        import trio
        async def test_it(runtime):
            trio.lowlevel.spawn_system_task(trio.sleep_forever, name="my own task")
        """,
        "task my own task",
    ),
    "a job": (
        """
        from hermes_trio.testing.fakes import fake_job
        async def test_it(runtime):
            await runtime.supervisor.start(fake_job(3600), runtime.owner())
        """,
        "process job_",
    ),
    "a thread": (
        """
        import threading
        async def test_it(runtime):
            threading.Thread(target=threading.Event().wait, args=(5,), name="my own thread", daemon=True).start()
        """,
        "thread my own thread",
    ),
    "a call in a worker thread": (
        """
        import threading, trio
        async def test_it(runtime):
            async def give_up():
                await trio.testing.wait_all_tasks_blocked()
                scope.cancel()
            with trio.CancelScope() as scope:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(give_up)
                    await runtime.threads.run_sync(threading.Event().wait, 3, name="deaf", grace=0.01)
        """,
        "in flight in worker threads",
    ),
    "a child process": (
        """
        import subprocess, sys
        keep = []
        async def test_it(runtime):
            keep.append(subprocess.Popen(["sleep", "5"]))
        """,
        "(sleep 5)",
    ),
    "a descriptor": (
        """
        keep = []
        async def test_it(runtime, tmp_path):
            keep.append(open(tmp_path / "forgotten.txt", "w"))
        """,
        "forgotten.txt",
    ),
}


def test_each_kind_of_leak_is_caught(pytester: pytest.Pytester):
    """The test itself fails, with one line for the leak and the tree."""
    for number, (source, _) in enumerate(CASES.values()):
        pytester.makepyfile(**{f"test_leak_{number}": source})
    result = pytester.runpytest_subprocess("-p", "no:cacheprovider", "-o", "trio_mode=true")
    result.assert_outcomes(failed=len(CASES))
    output = result.stdout.str()
    for what, (_, words) in CASES.items():
        assert words in output, what
    assert output.count("the test left something behind") >= len(CASES)
    assert "the tree:" in output


def test_a_clean_test_passes_and_the_fixtures_work_together(pytester: pytest.Pytester):
    """An embedded runtime on virtual time, a scripted agent, an adapter, and the stateless entry."""
    pytester.makepyfile(
        """
        import trio
        from hermes_trio import DeliveringTurn, SessionContext, TurnInput, TurnSpec
        from hermes_trio.testing.fakes import fake_job

        async def test_it(runtime, scripted_agent, fake_adapter, stateless):
            async def start(turn):
                assert isinstance(turn, DeliveringTurn)
                await turn.watch_job(fake_job(24 * 3600, "done"))
                return "started"

            scripted_agent.then(start, "told")
            await fake_adapter.say("go", chat="42")
            first, second = await fake_adapter.wait_for(2)
            assert (first.text, second.text, second.context.chat_id) == ("started", "told", "42")
            assert trio.current_time() == 24 * 3600
            spec = TurnSpec(input=TurnInput(text="hi"), context=SessionContext(session_id="s"))
            assert (await stateless.run_turn(spec)).text == "echo: hi"
        """
    )
    result = pytester.runpytest_subprocess("-p", "no:cacheprovider", "-o", "trio_mode=true")
    result.assert_outcomes(passed=1)


def test_ambient_identity_is_refused_inside_a_turn_and_nowhere_else(pytester: pytest.Pytester):
    """chdir, putenv and unsetenv fail in a turn, and work outside of one."""
    pytester.makepyfile(
        """
        import os
        import pytest
        from hermes_trio.testing.audit import AmbientIdentity

        @pytest.mark.parametrize("act", [
            lambda: os.chdir("."),
            lambda: os.environ.__setitem__("X_TEST", "1"),
            lambda: os.environ.__delitem__("X_THERE"),
        ])
        async def test_it(runtime, scripted_agent, monkeypatch, act):
            monkeypatch.setenv("X_THERE", "1")
            async def step(turn):
                with pytest.raises(AmbientIdentity, match="would reach every other session"):
                    act()
                return "refused"
            scripted_agent.then(step)
            assert (await runtime.run_turn("x")).text == "refused"
            act()
            monkeypatch.delenv("X_TEST", raising=False)
        """
    )
    result = pytester.runpytest_subprocess("-p", "no:cacheprovider", "-o", "trio_mode=true")
    result.assert_outcomes(passed=3)


def test_models_over_the_network_are_forbidden_unless_asked_for(pytester: pytest.Pytester):
    """A test suite does not call a provider by accident."""
    pytester.makepyfile(
        """
        import pytest
        from hermes_trio.providers.network_switch import NetworkModelForbidden
        from hermes_trio.providers.routes import build_routes

        SPEC = {"HERMES_MODEL": "openai/gpt-x", "OPENAI_API_KEY": "k" * 20}

        async def test_forbidden(runtime):
            with pytest.raises(NetworkModelForbidden):
                build_routes({}, SPEC)

        @pytest.mark.allow_network_models
        async def test_allowed(runtime):
            build_routes({}, SPEC).close()
        """
    )
    result = pytester.runpytest_subprocess("-p", "no:cacheprovider", "-o", "trio_mode=true")
    result.assert_outcomes(passed=2)


def test_options_switch_the_check(pytester: pytest.Pytester):
    """Off for all, on for all, and a marker for one."""
    pytester.makepyfile(
        """
        import pytest, threading
        def leak():
            threading.Thread(target=threading.Event().wait, args=(3,), name="left", daemon=True).start()
        async def test_plain():
            leak()
        @pytest.mark.allow_leaks
        async def test_marked(runtime):
            leak()
        """
    )
    common = ("-p", "no:cacheprovider", "-o", "trio_mode=true")
    pytester.runpytest_subprocess(*common).assert_outcomes(passed=2)
    pytester.runpytest_subprocess(*common, "--hermes-leaks=all").assert_outcomes(passed=1, failed=1)
    pytester.runpytest_subprocess(*common, "--hermes-leaks=off").assert_outcomes(passed=2)


COMMON = ("-p", "no:cacheprovider")


def test_a_fixture_without_trio_mode_says_what_to_add(pytester: pytest.Pytester):
    """The error is one sentence about the configuration, not a coroutine that was never awaited."""
    pytester.makepyfile("async def test_it(runtime): ...")
    result = pytester.runpytest_subprocess(*COMMON)
    assert result.ret != 0
    assert "trio_mode = true" in result.stdout.str()
    result = pytester.runpytest_subprocess(*COMMON, "-p", "no:trio")
    assert result.ret != 0
    assert "hermes-trio[pytest]" in result.stdout.str()
    pytester.makepyfile("def test_it(runtime): ...")
    result = pytester.runpytest_subprocess(*COMMON, "-o", "trio_mode=true")
    assert "async def test_it" in result.stdout.str()


def test_a_test_over_its_limit_fails_alone_with_the_tree(pytester: pytest.Pytester):
    """The limit fails one test and prints what it waited for; the next test runs."""
    pytester.makepyfile(
        """
        import time, threading, pytest

        async def test_waits(runtime, scripted_agent):
            async def blocked(turn):
                await turn.run_sync(threading.Event().wait, 5, name="a deaf thread")
            scripted_agent.then(blocked)
            await runtime.run_turn("go")

        @pytest.mark.hermes_seconds(0.2)
        async def test_blocks_the_loop(runtime):
            for _ in range(1000):
                time.sleep(0.01)

        async def test_is_next(runtime): ...
        """
    )
    result = pytester.runpytest_subprocess(*COMMON, "-o", "trio_mode=true", "-o", "hermes_test_seconds=0.3")
    result.assert_outcomes(passed=1, failed=2)
    assert "more than 0.3 s of real time" in result.stdout.str()
    assert "a deaf thread" in result.stdout.str()
    assert "TestTooSlow" in result.stdout.str()


def test_the_marker_limits_asyncio_tests_and_refuses_what_it_cannot_limit(pytester: pytest.Pytester):
    """A limit is enforced, or the test fails because it cannot be. It does not enable the leak check."""
    pytester.makepyfile(
        """
        import asyncio, pytest, socket

        @pytest.fixture
        def anyio_backend():
            return "asyncio"

        @pytest.mark.hermes_seconds(0.1)
        @pytest.mark.anyio
        async def test_waits():
            await asyncio.sleep(60)

        @pytest.mark.hermes_seconds(60)
        @pytest.mark.anyio
        async def test_leaves_a_socket():
            globals()["kept"] = socket.socket()

        @pytest.mark.hermes_seconds(60)
        @pytest.mark.anyio
        async def test_has_its_own_timeout():
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.01):
                    await asyncio.sleep(60)

        @pytest.mark.hermes_seconds(1)
        def test_is_synchronous(): ...

        @pytest.mark.hermes_seconds("soon")
        @pytest.mark.anyio
        async def test_has_a_wrong_limit(): ...
        """
    )
    result = pytester.runpytest_subprocess(*COMMON)
    result.assert_outcomes(passed=2, failed=3)
    printed = result.stdout.str()
    assert "the test took more than 0.1 s of real time" in printed
    assert "limits async test functions" in printed
    assert "the limit in @pytest.mark.hermes_seconds is 'soon'" in printed


def test_a_thread_that_got_the_ident_of_an_earlier_one_is_caught():
    """A thread that was there before the test ends in it, and the next one gets its ident: it is still recognised as another thread."""
    first, second = threading.Event(), threading.Event()
    before = threading.Thread(target=first.wait, daemon=True)
    before.start()
    watch = ProcessWatch.take()
    first.set()
    before.join()
    left = threading.Thread(target=second.wait, name="left behind", daemon=True)
    left.start()
    try:
        if left.ident != before.ident:
            pytest.skip("the system gave another ident")
        assert watch.found() == ["thread left behind"]
    finally:
        second.set()
        left.join()


def test_all_checks_tests_of_every_kind(pytester: pytest.Pytester):
    """asyncio and Trio through anyio, unittest and plain functions: each leak fails its own test, and clean tests pass."""
    pytester.makepyfile(
        """
        import asyncio, threading, unittest
        import pytest

        def leak():
            threading.Thread(target=threading.Event().wait, args=(60,), name="left behind", daemon=True).start()

        @pytest.mark.anyio
        async def test_a_thread():
            leak()

        @pytest.mark.anyio
        async def test_clean():
            pass

        @pytest.mark.anyio
        @pytest.mark.parametrize("anyio_backend", ["asyncio"])
        async def test_a_task():
            asyncio.get_running_loop().create_task(asyncio.sleep(3600), name="forgotten")

        def test_plain():
            leak()

        @pytest.mark.hermes_leaks("off")
        def test_exempt():
            leak()

        class TestOld(unittest.TestCase):
            def test_leaks(self):
                leak()

            def test_clean(self):
                pass

        class TestLoop(unittest.IsolatedAsyncioTestCase):
            async def test_leaks(self):
                leak()

            async def test_clean(self):
                await asyncio.sleep(0)
        """
    )
    result = pytester.runpytest_subprocess(*COMMON, "--hermes-leaks=all", "-p", "no:trio")
    result.assert_outcomes(passed=5, failed=6)
    assert "forgotten" in result.stdout.str()
    pytester.runpytest_subprocess(*COMMON, "-p", "no:trio").assert_outcomes(passed=11)


def test_a_foreign_suite_is_left_alone(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch):
    """Without our fixtures the plugin imports no Trio, sets no timer and changes nothing."""
    pytester.makepyfile(
        """
        import sys

        def test_nothing_of_ours_is_loaded():
            assert "trio" not in sys.modules
            assert [name for name in sys.modules if name.startswith("hermes_trio.runtime")] == []
        """
    )
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    pytester.runpytest_subprocess(*COMMON, "-p", "hermes_trio.testing.plugin").assert_outcomes(passed=1)
