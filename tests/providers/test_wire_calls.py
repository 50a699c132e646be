"""What both wire clients promise: answers, failures, retries, deadlines and cancellation, over real sockets."""

from __future__ import annotations

import logging
import tracemalloc
from collections import deque

import pytest
import trio
import trio.testing

from hermes_trio.agent.model import (
    Finished,
    Model,
    ModelError,
    ModelErrorKind,
    ReasoningDelta,
    TextDelta,
    ToolCallReady,
)
from hermes_trio.net.http1 import ConnectionPool
from hermes_trio.providers.http_model import AnswerLimits, Retries, Timeouts
from hermes_trio.runtime.context import Binding, _binding
from hermes_trio.runtime.outcome import Usage
from hermes_trio.runtime.ports import ToolCall
from hermes_trio.runtime.tree import EMPTY_CONTEXT, Tree
from hermes_trio.testing.model_server import Fault, ScriptedAnswer, ScriptedRefusal

from .conftest import KEY, MakeModel, StartServer, answer_of, ask

ONCE = Retries(attempts=1)


async def listen(model: Model, said: list[str] | deque[str]) -> None:
    """Write down what a model says, as it says it."""
    async with model.stream(ask()) as stream:
        async for event in stream:
            if isinstance(event, TextDelta):
                said.append(event.text)


async def test_streams_text_reasoning_tool_calls_and_usage(start_server: StartServer, make_model: MakeModel) -> None:
    """An answer arrives in pieces, its tool calls complete, and its usage in one vocabulary for all providers."""
    calls = (
        ToolCall(id="call_a", name="terminal", arguments='{"command": "ls -l"}'),
        ToolCall(id="call_b", name="process", arguments='{"action": "list"}'),
    )
    usage = Usage(input_tokens=20, output_tokens=9, cache_read_tokens=5)
    server = await start_server(
        ScriptedAnswer(text="Let me look around.", reasoning="hm, files", tool_calls=calls, usage=usage)
    )
    async with make_model(server).stream(ask("list the files")) as stream:
        events = [event async for event in stream]
    texts = [event.text for event in events if isinstance(event, TextDelta)]
    assert len(texts) > 1
    assert "".join(texts) == "Let me look around."
    assert "".join(event.text for event in events if isinstance(event, ReasoningDelta)) == "hm, files"
    assert [event.call for event in events if isinstance(event, ToolCallReady)] == list(calls)
    finished = events[-1]
    assert finished == Finished(
        finish_reason="tool_calls",
        usage=Usage(input_tokens=20, output_tokens=9, cache_read_tokens=5, api_calls=1),
    )


async def test_events_arrive_while_the_answer_is_written(start_server: StartServer, make_model: MakeModel) -> None:
    """The first piece is there before the provider has written the rest."""
    server = await start_server(ScriptedAnswer(text="first piece then nothing", fault=Fault.STALL, fault_after=5))
    async with make_model(server).stream(ask()) as stream:
        assert isinstance(await stream.receive(), TextDelta)


async def test_connection_is_used_again(
    start_server: StartServer, make_model: MakeModel, transport: ConnectionPool, mock_clock: trio.testing.MockClock
) -> None:
    """Calls one after the other share a connection; calls at the same time do not."""
    server = await start_server()
    model = make_model(server)
    for number in range(3):
        assert (await answer_of(model, ask(f"call {number}"))).text == f"You said: call {number}"
    assert server.connections == 1
    gate = trio.Event()
    server.say(ScriptedAnswer(text="one", gate=gate), ScriptedAnswer(text="two", gate=gate))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(answer_of, model)
        nursery.start_soon(answer_of, model)
        await server.call(4)
        gate.set()
    assert server.connections == 2
    assert sum(transport.statistics().values()) == 2


async def test_server_that_does_not_stream_is_understood(start_server: StartServer, make_model: MakeModel) -> None:
    """A whole JSON answer to a request for a stream is read as one."""
    call = ToolCall(id="call_a", name="terminal", arguments='{"command":"ls"}')
    server = await start_server(ScriptedAnswer(text="all at once", tool_calls=(call,), whole=True))
    answer = await answer_of(make_model(server))
    assert (answer.text, answer.tool_calls, answer.finish_reason) == ("all at once", (call,), "tool_calls")
    assert answer.usage.output_tokens == 7


@pytest.mark.parametrize(
    ("refusal", "kind", "retryable"),
    [
        (ScriptedRefusal(status=401), ModelErrorKind.AUTH, False),
        (ScriptedRefusal(status=403), ModelErrorKind.AUTH, False),
        (ScriptedRefusal(status=400, message="no such field"), ModelErrorKind.BAD_REQUEST, False),
        (
            ScriptedRefusal(status=400, message="prompt is too long: 250000 tokens"),
            ModelErrorKind.CONTEXT_OVERFLOW,
            False,
        ),
        (
            ScriptedRefusal(status=400, code="content_filter", type="content_filter"),
            ModelErrorKind.CONTENT_FILTER,
            False,
        ),
        (ScriptedRefusal(status=404, message="model not found"), ModelErrorKind.BAD_REQUEST, False),
        (ScriptedRefusal(status=413), ModelErrorKind.CONTEXT_OVERFLOW, False),
        (ScriptedRefusal(status=429), ModelErrorKind.RATE_LIMITED, True),
        (ScriptedRefusal(status=429, type="insufficient_quota"), ModelErrorKind.RATE_LIMITED, False),
        (ScriptedRefusal(status=500), ModelErrorKind.UNAVAILABLE, True),
        (ScriptedRefusal(status=503, type="unknown"), ModelErrorKind.OVERLOADED, True),
        (ScriptedRefusal(status=529), ModelErrorKind.OVERLOADED, True),
    ],
    ids=lambda value: str(value.status) if isinstance(value, ScriptedRefusal) else None,
)
async def test_refusals_have_a_kind(
    start_server: StartServer, make_model: MakeModel, refusal: ScriptedRefusal, kind: ModelErrorKind, retryable: bool
) -> None:
    """Each refusal becomes one error that says what to do about it, with the provider's own words."""
    server = await start_server(refusal)
    with pytest.raises(ModelError, match=refusal.message) as caught:
        await answer_of(make_model(server, retries=ONCE))
    assert (caught.value.kind, caught.value.retryable, caught.value.status) == (kind, retryable, refusal.status)


async def test_retries_wait_as_long_as_the_provider_says(
    start_server: StartServer, make_model: MakeModel, mock_clock: trio.testing.MockClock
) -> None:
    """A rate limit before the first event is waited out, exactly as long as `Retry-After` says."""
    mock_clock.autojump_threshold = 0.01
    limit = ScriptedRefusal(status=429, headers={"retry-after": "7"})
    server = await start_server(
        limit, ScriptedRefusal(status=529, headers={"retry-after-ms": "1500"}), ScriptedAnswer(text="at last")
    )
    assert (await answer_of(make_model(server))).text == "at last"
    first, second, third = server.calls
    assert second.started_at - first.started_at == pytest.approx(7, abs=0.5)
    assert third.started_at - second.started_at == pytest.approx(1.5, abs=0.5)


async def test_a_long_pause_is_reported_instead_of_waited_for(start_server: StartServer, make_model: MakeModel) -> None:
    """A provider that wants to be left alone for an hour makes the call fail at once, with the hour in the error."""
    server = await start_server(ScriptedRefusal(status=429, headers={"retry-after": "3600"}))
    with pytest.raises(ModelError) as caught:
        await answer_of(make_model(server))
    assert caught.value.retry_after == 3600
    assert len(server.calls) == 1


@pytest.mark.parametrize("fault", [Fault.HANG_UP, Fault.RESET, Fault.END_EARLY, Fault.NOT_HTTP, Fault.ERROR_EVENT])
async def test_failures_before_the_first_event_are_repeated(
    start_server: StartServer, make_model: MakeModel, mock_clock: trio.testing.MockClock, fault: Fault
) -> None:
    """A stream that breaks before it has said anything is tried again, and gives up after the last attempt."""
    mock_clock.autojump_threshold = 0.01
    server = await start_server(ScriptedAnswer(fault=fault), ScriptedAnswer(text="second time lucky"))
    assert (await answer_of(make_model(server))).text == "second time lucky"
    server.say(*[ScriptedAnswer(fault=fault)] * 3)
    with pytest.raises(ModelError):
        await answer_of(make_model(server))
    assert len(server.calls) == 5


@pytest.mark.parametrize("fault", [Fault.HANG_UP, Fault.RESET, Fault.END_EARLY, Fault.GARBAGE, Fault.ERROR_EVENT])
async def test_failures_after_the_first_event_are_not_repeated(
    start_server: StartServer, make_model: MakeModel, fault: Fault
) -> None:
    """What was said before a stream broke is told, then the failure; nothing is said twice."""
    server = await start_server(ScriptedAnswer(text="the beginning of", piece=4, fault=fault, fault_after=5))
    said: list[str] = []
    with pytest.raises(ModelError) as caught:
        await listen(make_model(server), said)
    # A reset may overtake what was sent before it.
    assert "the beginning of".startswith("".join(said))
    assert said or fault is Fault.RESET
    overloaded = fault is Fault.ERROR_EVENT
    assert caught.value.kind is (ModelErrorKind.OVERLOADED if overloaded else ModelErrorKind.BROKEN_STREAM)
    assert len(server.calls) == 1 or fault is Fault.RESET


@pytest.mark.parametrize(
    "fault", [Fault.LONG_LINE, Fault.ENDLESS_LINE, Fault.ENDLESS_TOOL_CALL, Fault.ENDLESS_TEXT, Fault.ENDLESS_HEADERS]
)
async def test_hostile_streams_end_in_a_clear_failure_within_bounded_memory(
    start_server: StartServer, make_model: MakeModel, fault: Fault
) -> None:
    """A stream without measure is cut off by us, not by the machine's memory, and the provider sees us leave."""
    server = await start_server(ScriptedAnswer(text="x", fault=fault, fault_after=2))
    model = make_model(server, retries=ONCE, limits=AnswerLimits(answer=8 * 1024 * 1024, arguments=1024 * 1024))
    tracemalloc.start()
    try:
        with pytest.raises(ModelError, match="longer than") as caught:
            await listen(model, deque(maxlen=1))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert caught.value.kind is ModelErrorKind.BROKEN_STREAM
    assert peak < 40 * 1024 * 1024
    with trio.fail_after(5):
        await server.calls[0].ended.wait()


async def test_invalid_utf8_is_marked_and_survived(start_server: StartServer, make_model: MakeModel) -> None:
    """Bytes that are no text become replacement characters; the answer goes on."""
    server = await start_server(ScriptedAnswer(text="before ", piece=100, fault=Fault.INVALID_UTF8, fault_after=3))
    answer = await answer_of(make_model(server))
    assert "caf\N{REPLACEMENT CHARACTER} " in answer.text
    assert answer.finish_reason == "stop"


@pytest.mark.parametrize(
    ("fault", "timeouts", "words"),
    [
        (Fault.SILENT, Timeouts(idle=20), "silent for 20 s"),
        (Fault.STALL, Timeouts(idle=20), "silent for 20 s"),
        (Fault.STALL, Timeouts(idle=60, total=30), "within 30 s"),
    ],
)
async def test_silence_is_a_timeout_and_never_a_hang(
    start_server: StartServer,
    make_model: MakeModel,
    mock_clock: trio.testing.MockClock,
    fault: Fault,
    timeouts: Timeouts,
    words: str,
) -> None:
    """A provider that stops talking makes the call fail by the deadline that it broke."""
    mock_clock.autojump_threshold = 0.01
    server = await start_server(ScriptedAnswer(text="some text", fault=fault, fault_after=3))
    with pytest.raises(ModelError, match=words) as caught:
        await answer_of(make_model(server, timeouts=timeouts, retries=ONCE))
    assert caught.value.kind is ModelErrorKind.TIMEOUT
    await server.calls[0].ended.wait()
    assert server.calls[0].client_gone


async def test_a_slow_answer_is_no_silence(
    start_server: StartServer, make_model: MakeModel, mock_clock: trio.testing.MockClock
) -> None:
    """Pauses below the idle limit add up to an answer, however long it takes in all."""
    mock_clock.autojump_threshold = 0.01
    server = await start_server(ScriptedAnswer(text="slow but steady", piece=3, pause=15))
    assert (await answer_of(make_model(server, timeouts=Timeouts(idle=20)))).text == "slow but steady"


@pytest.mark.parametrize("fault", [Fault.SILENT, Fault.STALL])
async def test_cancellation_is_seen_by_the_provider(
    start_server: StartServer, make_model: MakeModel, fault: Fault
) -> None:
    """Cancelling a call closes its connection: the provider knows before the block is left."""
    server = await start_server(ScriptedAnswer(text="never ending", fault=fault, fault_after=3))
    model = make_model(server)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(answer_of, model)
        call = await server.call()
        if fault is Fault.STALL:
            while call.events_sent < 3:
                await trio.lowlevel.checkpoint()
        nursery.cancel_scope.cancel()
    with trio.fail_after(5):
        await call.ended.wait()
    assert call.client_gone


async def test_leaving_the_block_early_ends_the_call(
    start_server: StartServer, make_model: MakeModel, transport: ConnectionPool
) -> None:
    """A reader that has heard enough ends the call by leaving, without an error and without a connection left over."""
    server = await start_server(ScriptedAnswer(text="a long story", piece=1, fault=Fault.STALL, fault_after=6))
    async with make_model(server).stream(ask()) as stream:
        assert isinstance(await stream.receive(), TextDelta)
    with trio.fail_after(5):
        await server.calls[0].ended.wait()
    assert server.calls[0].client_gone
    assert transport.statistics() == {}
    with pytest.raises(trio.ClosedResourceError):
        await stream.receive()


async def test_an_error_of_the_reader_is_not_wrapped(start_server: StartServer, make_model: MakeModel) -> None:
    """What the body of the block raises comes out as it was raised: there is no nursery in between."""
    server = await start_server(ScriptedAnswer(text="hello"))

    async def read_badly() -> None:
        async with make_model(server).stream(ask()) as stream:
            await stream.receive()
            _ = 1 / 0

    with pytest.raises(ZeroDivisionError):
        await read_badly()


async def test_keys_are_in_no_error_and_no_log(
    start_server: StartServer,
    make_model: MakeModel,
    caplog: pytest.LogCaptureFixture,
    mock_clock: trio.testing.MockClock,
) -> None:
    """A provider that quotes the key, whole or in part, does not get it into an error, a `repr` or a log."""
    mock_clock.autojump_threshold = 0.01
    server = await start_server(key="another key")
    model = make_model(server)
    with pytest.raises(ModelError) as caught:
        await answer_of(model)
    server.say(ScriptedRefusal(status=500, message=f"cannot use {KEY}"), ScriptedAnswer(text="fine"))
    server._key = ""
    with caplog.at_level(logging.DEBUG):
        await answer_of(model)
    assert "attempt 2 of 3" in caplog.text
    shown = f"{caught.value} {caught.value!r} {caplog.text} {model!r} {model.__dict__!r}"
    assert caught.value.kind is ModelErrorKind.AUTH
    assert KEY not in shown
    assert KEY[-4:] not in shown


async def test_tree_says_what_is_waited_for(start_server: StartServer, make_model: MakeModel) -> None:
    """While a call is under way, the node that made it shows the model that it waits on."""
    server = await start_server(ScriptedAnswer(fault=Fault.SILENT))
    model = make_model(server, name="fast")
    tree = Tree()
    async with trio.open_nursery() as nursery:

        async def turn() -> None:
            _binding.set(Binding(EMPTY_CONTEXT, None, tree.root))
            await answer_of(model)

        nursery.start_soon(turn)
        await server.call()
        assert "model fast" in str(tree.snapshot())
        nursery.cancel_scope.cancel()
    assert "model fast" not in str(tree.snapshot())


async def test_nobody_listening_is_unavailable(
    make_model: MakeModel, start_server: StartServer, mock_clock: trio.testing.MockClock
) -> None:
    """A refused connection is retried, then reported with the address."""
    mock_clock.autojump_threshold = 0.01
    server = await start_server()
    server.stop()
    model: Model = make_model(server)
    with pytest.raises(ModelError, match=f"cannot connect to http://127.0.0.1:{server.port}") as caught:
        await answer_of(model)
    assert caught.value.kind is ModelErrorKind.UNAVAILABLE


async def test_many_calls_at_once_each_get_their_own_answer(start_server: StartServer, make_model: MakeModel) -> None:
    """A hundred calls share a transport and nothing else."""
    server = await start_server()
    model = make_model(server)
    answers: dict[int, str] = {}

    async def one(number: int) -> None:
        answers[number] = (await answer_of(model, ask(f"number {number}"))).text

    async with trio.open_nursery() as nursery:
        for number in range(100):
            nursery.start_soon(one, number)
    assert answers == {number: f"You said: number {number}" for number in range(100)}
