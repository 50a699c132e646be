"""Spans of OpenTelemetry from the tree, against the SDK's exporter in memory."""

from __future__ import annotations

import gzip
import logging
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import msgspec
import pytest
import trio
import trio.testing
from opentelemetry import trace as otel
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from hermes_trio import Job, JobSpec, Runtime, SessionContext, Tracing, Turn, TurnHooks, open_store
from hermes_trio.agent.loop import ModelAgent
from hermes_trio.agent.model import ModelError, ModelErrorKind
from hermes_trio.config import ConfigError, load_config
from hermes_trio.net.http1 import ConnectionPool
from hermes_trio.providers.openai import OpenAIModel
from hermes_trio.testing.model_server import ModelServer
from hermes_trio.tools.registry import Tools, tool
from hermes_trio.tracing import TracingProblem, TracingSettings
from hermes_trio.tracing import stage as stage_module
from hermes_trio.tracing.stage import configured_tracing
from tests.agent.scripted import Routes, ScriptedModel, tool_call
from tests.http.gateway import open_gateway
from tests.tools.bench_of_tools import open_bench
from tests.tools.test_mcp import stdio

SECRET_WORDS = "the treasure is under the oak"
TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = f"00-{TRACE}-b7ad6b7169203331-01"


class Spans:
    """A provider, and what it has exported."""

    def __init__(self) -> None:
        self.exporter = InMemorySpanExporter()
        self.provider = TracerProvider(shutdown_on_exit=False)
        self.provider.add_span_processor(SimpleSpanProcessor(self.exporter))

    def all(self) -> list[ReadableSpan]:
        return list(self.exporter.get_finished_spans())

    def named(self, name: str) -> list[ReadableSpan]:
        return [span for span in self.all() if span.name.startswith(name)]

    def one(self, name: str) -> ReadableSpan:
        (span,) = self.named(name)
        return span


@pytest.fixture
def spans() -> Iterator[Spans]:
    made = Spans()
    yield made
    made.provider.shutdown()


def context_of(span: ReadableSpan) -> otel.SpanContext:
    found = span.get_span_context()
    assert found is not None
    return found


def below(span: ReadableSpan, above: ReadableSpan) -> bool:
    return span.parent is not None and span.parent.span_id == context_of(above).span_id


def attributes(span: ReadableSpan) -> dict[str, Any]:
    return dict(span.attributes or {})


@tool()
async def dig(turn: Turn, where: str) -> str:
    """Dig somewhere."""
    await trio.lowlevel.checkpoint()
    return msgspec.json.encode({"found": SECRET_WORDS}).decode()


@tool()
async def explode(turn: Turn) -> str:
    """Fail."""
    raise RuntimeError("the fuse was wet")


def agent_of(*answers: Any) -> ModelAgent:
    return ModelAgent(Routes(ScriptedModel(*answers)), Tools([dig, explode]))


async def test_a_turn_with_its_model_calls_tools_and_commit(spans: Spans) -> None:
    """A turn's span holds its model calls (GenAI conventions), its tools and its commit; none of them carries content."""
    agent = agent_of([tool_call("dig", where=SECRET_WORDS)], ["it is ", SECRET_WORDS])
    async with Runtime(agent=agent, stages=[Tracing(spans.provider)]) as rt:
        outcome = await rt.run_turn(SECRET_WORDS, SessionContext(session_id="s1", session_key="s1"))
    turn = spans.one("invoke_agent")
    assert turn.parent is None
    assert attributes(turn)["gen_ai.operation.name"] == "invoke_agent"
    assert attributes(turn)["gen_ai.conversation.id"] == "s1"
    assert attributes(turn)["gen_ai.usage.input_tokens"] == outcome.usage.input_tokens == 20
    assert attributes(turn)["hermes.ended"] == "completed"
    calls = spans.named("chat scripted")
    assert len(calls) == 2
    assert all(below(call, turn) and call.kind is SpanKind.CLIENT for call in calls)
    assert attributes(calls[1]) | {
        "gen_ai.operation.name": "chat",
        "gen_ai.request.model": "scripted",
        "gen_ai.usage.input_tokens": 10,
        "gen_ai.usage.output_tokens": 5,
        "gen_ai.response.finish_reasons": ("stop",),
    } == attributes(calls[1])
    used = spans.one("execute_tool dig")
    assert below(used, turn)
    assert attributes(used)["gen_ai.tool.call.id"] == "call_1"
    commits = spans.named("commit ")
    assert commits
    assert all(context_of(commit).trace_id == context_of(turn).trace_id for commit in commits)
    assert SECRET_WORDS not in "".join(span.to_json() for span in spans.all())


async def test_content_is_carried_where_it_is_asked_for(spans: Spans) -> None:
    """With `content` the messages, arguments and results are attributes; credentials in them are hidden."""
    agent = agent_of([tool_call("dig", where="Bearer sk-abcdefghijklmnopqrstuvwxyz0123456789")], ["dug"])
    async with Runtime(agent=agent, stages=[Tracing(spans.provider, content=True)]) as rt:
        await rt.run_turn(SECRET_WORDS)
    turn, used, call = spans.one("invoke_agent"), spans.one("execute_tool"), spans.named("chat")[1]
    assert SECRET_WORDS in attributes(turn)["gen_ai.input.messages"]
    assert "dug" in attributes(turn)["gen_ai.output.messages"]
    assert SECRET_WORDS in attributes(used)["gen_ai.tool.call.result"]
    assert "where" in attributes(used)["gen_ai.tool.call.arguments"]
    roles = [message["role"] for message in msgspec.json.decode(attributes(call)["gen_ai.input.messages"])]
    assert roles == ["system", "user", "assistant", "tool"]
    assert "sk-abcdefghijklmnopqrstuvwxyz" not in "".join(span.to_json() for span in spans.all())


async def test_failures_and_stops_are_told_apart(spans: Spans) -> None:
    """A failed model call, tool or turn has the status of an error and its type; one that was stopped says so and is no error."""

    async def wait(turn: Turn) -> str:
        await trio.sleep_forever()
        return ""

    broken = ModelError(ModelErrorKind.OVERLOADED, "too much", retryable=False)
    async with Runtime(agent=agent_of([tool_call("explode")], [broken]), stages=[Tracing(spans.provider)]) as rt:
        await rt.run_turn("go")
        async with trio.open_nursery() as nursery:
            turns: list[Turn] = []

            async def stopped() -> None:
                await rt.run_turn("wait", agent=wait, hooks=TurnHooks(on_start=turns.append))

            nursery.start_soon(stopped)
            await trio.testing.wait_all_tasks_blocked()
            await turns[0].stop()
    failed, stopped_turn = spans.named("invoke_agent")
    assert failed.status.status_code is StatusCode.ERROR
    assert attributes(spans.one("execute_tool"))["error.type"] == "tool_error"
    call = spans.named("chat")[1]
    assert (call.status.status_code, attributes(call)["error.type"]) == (StatusCode.ERROR, "overloaded")
    assert stopped_turn.status.status_code is StatusCode.UNSET
    assert attributes(stopped_turn)["hermes.ended"] == "cancelled"
    assert attributes(stopped_turn)["error.type"] == "stop"
    assert [commit for commit in spans.named("commit") if below(commit, stopped_turn)]


async def test_a_job_is_linked_to_its_turn_and_not_nested(spans: Spans) -> None:
    """A job's span begins a trace of its own, with a link to the turn that started it; the turn ends before the job does."""
    finish = trio.Event()

    async def work(job: Job) -> None:
        job.started()
        await finish.wait()
        await job.run_child("child", agent=child)

    async def child(turn: Turn) -> str:
        return "done"

    async def agent(turn: Turn) -> str:
        job = await turn.start_job(JobSpec(kind="delegation", title=SECRET_WORDS, run=work))
        return job.id

    async with Runtime(agent=agent, stages=[Tracing(spans.provider)]) as rt:
        started = await rt.run_turn("go", SessionContext(session_id="s1", session_key="s1"))
        turn = spans.one("invoke_agent")
        finish.set()
        await rt.supervisor.find(started.text, session_id="s1").wait()
    job = spans.one("job delegation")
    assert job.parent is None
    assert context_of(job).trace_id != context_of(turn).trace_id
    assert [link.context.span_id for link in job.links] == [context_of(turn).span_id]
    inside = spans.named("invoke_agent")[1]
    assert below(inside, job)
    assert SECRET_WORDS not in "".join(span.to_json() for span in spans.all())


async def test_the_current_span_of_an_embedding_program_is_the_parent(spans: Spans) -> None:
    """A turn that is started inside a span of the program is below that span."""

    async def agent(turn: Turn) -> str:
        return "x"

    async with Runtime(agent=agent, stages=[Tracing(spans.provider)]) as rt:
        with spans.provider.get_tracer("program").start_as_current_span("request"):
            await rt.run_turn("go")
    assert below(spans.one("invoke_agent"), spans.one("request"))


async def test_trace_context_comes_in_and_goes_out_over_http(spans: Spans, nursery: trio.Nursery) -> None:
    """A client's `traceparent` is the parent of the turn, chat and run alike, and the model gets that of the call. A wrong one is ignored."""
    server = await nursery.start(ModelServer().run)
    async with ConnectionPool() as pool:
        model = OpenAIModel("m", base_url=server.openai_url, transport=pool)
        agent = ModelAgent(Routes(model), Tools())
        async with open_gateway(agent) as gateway, Tracing(spans.provider)(gateway.runtime):
            await gateway.chat(headers={"traceparent": PARENT})
            await gateway.chat(headers={"traceparent": "00-zz-1-x"})
            answer = await gateway.http.post("/v1/runs", json={"input": "x"}, headers={"traceparent": PARENT})
            await gateway.ended(answer.json()["run_id"])
    nursery.cancel_scope.cancel()
    turns = spans.named("invoke_agent")
    traces = [f"{context_of(turn).trace_id:032x}" for turn in turns]
    assert [trace == TRACE for trace in traces] == [True, False, True]
    sent = [request.headers["traceparent"] for request in server.calls]
    calls = spans.named("chat ")
    assert [value.rpartition("-")[0] for value in sent] == [
        f"00-{context_of(call).trace_id:032x}-{context_of(call).span_id:016x}" for call in calls
    ]
    assert {attributes(call)["gen_ai.provider.name"] for call in spans.named("chat ")} == {"openai"}
    assert {attributes(call)["gen_ai.request.model"] for call in spans.named("chat ")} == {"m"}


async def test_trace_context_goes_out_over_mcp(spans: Spans) -> None:
    """The server of an MCP tool gets the context of the tool's span in the request's `_meta`."""
    async with open_bench(mcp=stdio()) as bench, Tracing(spans.provider)(bench.runtime):
        answer = await bench.use("mcp_sample_traced", {})
    turn = spans.one("invoke_agent")
    assert f"{context_of(turn).trace_id:032x}" in str(answer)


async def test_a_foreground_process_is_below_its_tool(spans: Spans) -> None:
    """A command's span has no command in it."""
    async with open_bench() as bench, Tracing(spans.provider)(bench.runtime):
        await bench.use("terminal", {"command": "echo under-the-oak"})
    process = spans.one("process")
    assert below(process, spans.one("invoke_agent"))
    assert "under-the-oak" not in process.to_json()


async def test_a_failing_provider_fails_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    """A span processor that raises costs its spans and a line in the log, never the turn."""

    class Broken(SpanProcessor):
        def on_start(self, span: Any, parent_context: Any = None) -> None:
            raise ValueError("no room")

    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(Broken())

    async def agent(turn: Turn) -> str:
        return "fine"

    with caplog.at_level(logging.ERROR, "hermes_trio.tracing"):
        async with Runtime(agent=agent, stages=[Tracing(provider)]) as rt:
            assert (await rt.run_turn("go")).text == "fine"
    assert "the span is lost" in caplog.text


async def test_nothing_is_left_when_tracing_ends(spans: Spans, tmp_path: Path) -> None:
    """The tree and the store forget the tracer; a second one at the same time is refused."""

    async def agent(turn: Turn) -> str:
        return "x"

    async with Runtime(agent=agent, store=open_store(tmp_path / "a.db")) as rt:
        async with Tracing(spans.provider)(rt):
            with pytest.raises(ValueError, match="traced already"):
                async with Tracing(spans.provider)(rt):
                    pass
            await rt.run_turn("go")
        made = len(spans.all())
        assert made
        await rt.run_turn("go")
        assert len(spans.all()) == made
        assert rt.tree.tracer is None


async def test_a_name_that_a_model_made_up_tells_nothing() -> None:
    """A model calls a tool that is not there, under a name that is what it was told: no span has it."""
    spans = Spans()
    call = tool_call(SECRET_WORDS, where="x")
    async with Runtime(agent=agent_of([call], ["done"]), stages=[Tracing(spans.provider)]) as rt:
        await rt.run_turn("go")
    assert attributes(spans.one("execute_tool"))["gen_ai.tool.name"] == "(not a name)"
    assert SECRET_WORDS not in "".join(span.to_json() for span in spans.all())


async def test_the_title_of_a_job_tells_no_credential() -> None:
    """With content the span of a job has its title, a command for instance; what looks like a key in it is hidden."""
    spans = Spans()
    key = "sk-" + "a1B2" * 8

    async def work(job: Job) -> None:
        job.started()

    async def agent(turn: Turn) -> str:
        job = await turn.start_job(JobSpec(kind="delegation", title=f"curl -H 'Authorization: Bearer {key}'", run=work))
        await job.wait()
        return ""

    async with Runtime(agent=agent, stages=[Tracing(spans.provider, content=True)]) as rt:
        await rt.run_turn("go")
    title = attributes(spans.one("job delegation"))["hermes.title"]
    assert title.startswith("curl -H")
    assert key not in title


def test_an_exporter_that_cannot_be_made_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names the exporter and hides what looks like a key; it is not a traceback of another package."""
    entry = EntryPoint("broken", "nowhere:Exporter", "opentelemetry_traces_exporter")
    monkeypatch.setattr(stage_module, "exporters", lambda: [entry])

    def load(_: EntryPoint) -> object:
        raise ValueError(f"no access with sk-{'a1B2' * 8}")

    monkeypatch.setattr(EntryPoint, "load", load)
    with pytest.raises(TracingProblem, match="'broken' of the package nowhere cannot be used: ValueError") as raised:
        configured_tracing(TracingSettings(enabled=True, exporter="broken"))
    assert "a1B2" not in str(raised.value)


def test_the_configuration_names_what_is_missing(tmp_path: Path) -> None:
    """`[tracing]` is read; an exporter that is not installed is named, with those that are and what to install."""
    (tmp_path / "config.toml").write_text('[tracing]\nenabled = true\nexporter = "carrier_pigeon"\n')
    config = load_config({}, home=tmp_path)
    with pytest.raises(TracingProblem, match=r"'carrier_pigeon', which is not installed; installed are .*console"):
        configured_tracing(config.tracing)
    (tmp_path / "config.toml").write_text("[tracing]\ncontents = true\n")
    with pytest.raises(ConfigError, match="contents"):
        load_config({}, home=tmp_path)


async def test_the_configured_exporter_gets_the_spans(monkeypatch: pytest.MonkeyPatch) -> None:
    """The configured stage sends what is left when the runtime ends, and its thread is gone."""
    kept = InMemorySpanExporter()
    entry = EntryPoint("kept", f"{__name__}:KEPT", "opentelemetry_traces_exporter")
    monkeypatch.setattr(stage_module, "exporters", lambda: [entry])
    monkeypatch.setattr(EntryPoint, "load", lambda _: lambda: kept)
    threads = threading.active_count()

    async def agent(turn: Turn) -> str:
        return "x"

    stage = configured_tracing(TracingSettings(enabled=True, exporter="kept", service_name="gate"))
    async with Runtime(agent=agent, stages=[stage]) as rt:
        await rt.run_turn("go")
    (turn,) = [span for span in kept.get_finished_spans() if span.name.startswith("invoke_agent")]
    assert turn.resource.attributes["service.name"] == "gate"
    assert not [thread for thread in threading.enumerate() if "Span" in thread.name]
    assert threading.active_count() <= threads + 1  # Trio keeps the thread that waited for the exporter for a while


async def test_the_extra_exports_over_otlp(monkeypatch: pytest.MonkeyPatch) -> None:
    """What `hermes-trio[otel]` brings is enough: spans go to a collector as OTLP over HTTP, and the last of them before the runtime has ended."""
    bodies: list[bytes] = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert self.path == "/v1/traces"
            body = self.rfile.read(int(self.headers["content-length"]))
            bodies.append(gzip.decompress(body) if self.headers.get("content-encoding") == "gzip" else body)
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None: ...

    async def agent(turn: Turn) -> str:
        return SECRET_WORDS

    with HTTPServer(("127.0.0.1", 0), Collector) as collector:
        serving = threading.Thread(target=collector.serve_forever, kwargs={"poll_interval": 0.01})
        serving.start()
        try:
            monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{collector.server_port}")
            monkeypatch.setenv("NO_PROXY", "*")
            stage = configured_tracing(TracingSettings(enabled=True))
            async with Runtime(agent=agent, stages=[stage]) as rt:
                await rt.run_turn(SECRET_WORDS)
        finally:
            collector.shutdown()
            serving.join()
    sent = b"".join(bodies)
    assert b"invoke_agent hermes-trio" in sent
    assert b"commit finish_turn" in sent
    assert SECRET_WORDS.encode() not in sent
