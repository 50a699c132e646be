"""`SpanTracer`: spans of OpenTelemetry from what the task tree announces.

A node of a kind that is traced gets a span when it opens, below the span of the nearest node above it; where there is none, below the context that
is current in the task. A job outlives the turn that started it, so its span begins a trace of its own and links to that turn. Names of attributes
follow the GenAI semantic conventions where these have one; the others begin with `hermes.`.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from time import monotonic
from typing import Any, Final

import msgspec
from opentelemetry import context as otel_context
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import Link, Span, SpanKind, StatusCode, TracerProvider
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from hermes_trio.agent.model import Finished, ModelError, ModelRequest
from hermes_trio.base.line_limiter import LineLimiter
from hermes_trio.base.redaction import hide_credentials
from hermes_trio.runtime.outcome import Outcome, Usage
from hermes_trio.runtime.ports import Message, ToolCall
from hermes_trio.runtime.tree import Node, current_node, split_cancelled
from hermes_trio.runtime.turn import Turn

logger: Final = logging.getLogger("hermes_trio.tracing")

KINDS: Final = {
    "turn": SpanKind.INTERNAL,
    "model": SpanKind.CLIENT,
    "tool": SpanKind.INTERNAL,
    "process": SpanKind.INTERNAL,
}
"""The kinds of nodes that get a span. Jobs get one whatever their kind is."""

FAILED: Final = frozenset({"failed", "timed_out", "lost"})

_ALWAYS: Final = frozenset({"gen_ai.usage.input_tokens", "gen_ai.usage.output_tokens"})

_NAME: Final = re.compile(r"[\w.:/@+\-]{0,128}")

CONTENT_LIMIT: Final = 64 * 1024
"""Characters of one attribute that carries content; more is cut off."""


class SpanTracer:
    """Makes spans while a runtime is traced; held by `Tree.tracer`. An error of the tracing provider is logged and loses the span; the work continues."""

    def __init__(self, provider: TracerProvider | None = None, *, content: bool = False) -> None:
        self._tracer = trace.get_tracer("hermes_trio", tracer_provider=provider)
        self._content = content
        self._spans: dict[Node, Span] = {}
        self._propagator = TraceContextTextMapPropagator()
        self._lines = LineLimiter()

    # -- from the tree -----------------------------------------------------------------------------------------------------------

    def mark(self, node: Node) -> None:
        """Start the span of a new node, end that of a closed one."""
        span = self._spans.get(node)
        if node.closed_at is None:
            if span is None and (node.kind in KINDS or _is_job(node)):
                with self._guarded():
                    self._start(node)
        elif span is not None:
            del self._spans[node]
            with self._guarded():
                span.set_attribute("hermes.ended", node.how)
                if node.how in FAILED:
                    span.set_status(StatusCode.ERROR)
                span.end()

    def note(self, node: Node, **facts: object) -> None:
        """Set the attributes of these facts."""
        span = self._spans.get(node)
        if span is None or not span.is_recording():
            return
        with self._guarded():
            for fact in facts.values():
                span.set_attributes(_attributes_of(fact))
            if facts.get("failed"):
                span.set_status(StatusCode.ERROR)
                span.set_attribute("error.type", "tool_error")
            if (model := facts.get("model")) is not None:
                span.set_attribute("gen_ai.provider.name", getattr(model, "provider", "unknown"))
                span.set_attribute("gen_ai.request.model", getattr(model, "served", node.name))
            if self._content:
                span.set_attributes(_content_of(facts))

    def _start(self, node: Node) -> None:
        above = self._span_above(node)
        links: list[Link] = []
        if above is not None:
            parent = trace.set_span_in_context(above, Context())
        elif _is_job(node):
            parent = Context()
            starter = self._turn_span(current_node())
            if starter is not None:
                links.append(Link(starter.get_span_context()))
        else:
            parent = otel_context.get_current()
        name, attributes = _opening(node)
        kind = KINDS.get(node.kind, SpanKind.INTERNAL)
        span = self._tracer.start_span(name, parent, kind=kind, attributes=attributes, links=links)
        self._spans[node] = span
        if self._content and span.is_recording():
            if node.name and node.kind not in {"turn", "model", "tool"}:
                span.set_attribute("hermes.title", _shown(node.name))
            if isinstance(node.work, Turn):
                asked = Message(role="user", content=node.work.input.prompt)
                span.set_attribute("gen_ai.input.messages", _messages([asked]))

    def _span_above(self, node: Node | None) -> Span | None:
        """Return the span of the nearest node above."""
        above = None if node is None else node.parent
        while above is not None:
            span = self._spans.get(above)
            if span is not None:
                return span
            above = above.parent
        return None

    def _span_of(self, node: Node | None) -> Span | None:
        """Return the span of a node, or of the nearest one above it."""
        return None if node is None else self._spans.get(node) or self._span_above(node)

    def _turn_span(self, node: Node | None) -> Span | None:
        """Return the span of the turn that a node works for, or that of its job if there is no turn."""
        while node is not None and node.kind != "turn" and not _is_job(node):
            node = node.parent
        return None if node is None else self._spans.get(node)

    # -- in and out --------------------------------------------------------------------------------------------------------------

    def headers(self, node: Node) -> Mapping[str, str]:
        """Return `traceparent` and, if there is one, `tracestate`. No baggage: it may hold data that is not meant for a provider."""
        carrier: dict[str, str] = {}
        span = self._span_of(node)
        if span is not None:
            with self._guarded():
                self._propagator.inject(carrier, trace.set_span_in_context(span, Context()))
        return carrier

    @contextmanager
    def attached(self, node: Node) -> Generator[None]:
        """See `TreeTracer.attached`."""
        span = self._span_of(node)
        if span is None:
            yield
            return
        token = otel_context.attach(trace.set_span_in_context(span))
        try:
            yield
        finally:
            otel_context.detach(token)

    @contextmanager
    def received(self, headers: Iterable[tuple[bytes, bytes]]) -> Generator[None]:
        """See `TreeTracer.received`. A malformed context is ignored, as the standard requires."""
        carrier = {
            name.decode("latin-1"): value.decode("latin-1")
            for name, value in headers
            if name in (b"traceparent", b"tracestate")
        }
        token = otel_context.attach(self._propagator.extract(carrier, Context()))
        try:
            yield
        finally:
            otel_context.detach(token)

    def carried(self) -> AbstractContextManager[None]:
        """See `TreeTracer.carried`."""
        return _attached(otel_context.get_current())

    @contextmanager
    def write(self, verb: str) -> Iterator[None]:
        """Make a span around one write of the store that traced work waits for. Other writes get none."""
        above = self._span_of(current_node())
        if above is None:
            yield
            return
        span = self._start_write(verb, above)
        try:
            yield
        except BaseException as error:
            if span is not None:
                with self._guarded():
                    span.set_attributes(_attributes_of(error))
                    if split_cancelled(error)[1] is not None:
                        span.set_status(StatusCode.ERROR)
            raise
        finally:
            if span is not None:
                with self._guarded():
                    span.end()

    def _start_write(self, verb: str, above: Span) -> Span | None:
        with self._guarded():
            return self._tracer.start_span(
                f"commit {verb}",
                trace.set_span_in_context(above, Context()),
                kind=SpanKind.CLIENT,
                attributes={"db.system.name": "sqlite", "db.operation.name": verb},
            )
        return None

    @contextmanager
    def _guarded(self) -> Generator[None]:
        try:
            yield
        except Exception:
            left_out = self._lines.admit(monotonic())
            if left_out is not None:
                logger.exception(
                    "the tracing provider failed; the span is lost (%d more failures were not logged)", left_out
                )


def _is_job(node: Node) -> bool:
    """Return whether a node is that of a job: below its session, which is below the supervisor."""
    session = node.parent
    return (
        session is not None
        and session.kind == "session"
        and session.parent is not None
        and session.parent.kind == "supervisor"
    )


def _opening(node: Node) -> tuple[str, dict[str, str]]:
    """Return the name of a node's span, and the attributes that are known when the node opens."""
    attributes = {"hermes.node.id": _name(node.id)}
    if node.tenant:
        attributes["hermes.tenant"] = node.tenant
    if _is_job(node):
        assert node.parent is not None
        attributes["hermes.job.kind"] = node.kind
        attributes["gen_ai.conversation.id"] = node.parent.id
        return f"job {node.kind}", attributes
    match node.kind:
        case "turn":
            attributes |= {"gen_ai.operation.name": "invoke_agent", "hermes.source": node.name}
            if isinstance(node.work, Turn):
                attributes["gen_ai.conversation.id"] = node.work.context.session_id
            return "invoke_agent hermes-trio", attributes
        case "model":
            attributes |= {"gen_ai.operation.name": "chat", "gen_ai.request.model": node.name}
            return f"chat {node.name}", attributes
        case "tool":
            attributes |= {
                "gen_ai.operation.name": "execute_tool",
                "gen_ai.tool.name": _name(node.name),
                "gen_ai.tool.call.id": _name(node.id),
                "gen_ai.tool.type": "function",
            }
            return f"execute_tool {_name(node.name)}", attributes
        case _:
            return node.kind, attributes


def _attributes_of(fact: object) -> dict[str, Any]:
    """Return the attributes of a fact, without content."""
    match fact:
        case Outcome():
            told: dict[str, Any] = {**_usage(fact.usage), "hermes.turn.committed": fact.committed}
            if fact.model:
                told["gen_ai.request.model"] = _name(fact.model)
            if fact.error_code:
                told["error.type"] = _name(fact.error_code)
            return told
        case ModelRequest():
            limits = {"gen_ai.request.max_tokens": fact.max_tokens, "gen_ai.request.temperature": fact.temperature}
            return {
                "gen_ai.request.stream": True,
                **{name: value for name, value in limits.items() if value is not None},
            }
        case Finished():
            return {**_usage(fact.usage), "gen_ai.response.finish_reasons": [_name(fact.finish_reason)]}
        case ModelError():
            return {"error.type": fact.kind.value}
        case BaseException():
            _, rest = split_cancelled(fact)
            return {"error.type": "cancelled" if rest is None else type(rest).__qualname__}
        case _:
            return {}


def _usage(usage: Usage) -> dict[str, int]:
    counts = {
        "gen_ai.usage.input_tokens": usage.input_tokens,
        "gen_ai.usage.output_tokens": usage.output_tokens,
        "gen_ai.usage.cache_read.input_tokens": usage.cache_read_tokens,
        "gen_ai.usage.cache_creation.input_tokens": usage.cache_write_tokens,
        "gen_ai.usage.reasoning.output_tokens": usage.reasoning_tokens,
    }
    return {name: count for name, count in counts.items() if count or name in _ALWAYS}


def _content_of(facts: Mapping[str, object]) -> dict[str, str]:
    """Return the content of a fact, if content is enabled, with credentials redacted."""
    told: dict[str, str] = {}
    for fact in facts.values():
        match fact:
            case Outcome():
                told["gen_ai.output.messages"] = _messages([Message(role="assistant", content=fact.text)])
            case ModelRequest():
                told["gen_ai.input.messages"] = _messages(fact.messages)
            case ToolCall():
                told["gen_ai.tool.call.arguments"] = _shown(fact.arguments)
            case str() if facts.get("result") is fact:
                told["gen_ai.tool.call.result"] = _shown(fact)
            case _:
                pass
    return told


def _messages(messages: Iterable[Message]) -> str:
    """Return messages in the form of the conventions: a JSON list of roles and parts."""
    written: list[dict[str, Any]] = []
    for message in messages:
        parts: list[dict[str, Any]] = []
        if message.role == "tool":
            parts.append({"type": "tool_call_response", "id": message.tool_call_id, "response": message.text})
        elif message.text:
            parts.append({"type": "text", "content": message.text})
        parts += [
            {"type": "tool_call", "id": call.id, "name": call.name, "arguments": call.arguments}
            for call in message.tool_calls
        ]
        written.append({"role": message.role, "parts": parts})
    return _shown(msgspec.json.encode(written).decode())


def _name(text: str) -> str:
    """Return a name that comes from a model, a provider or a client, if it has the form of one: content must not pass for the name of a tool."""
    return text if _NAME.fullmatch(text) else "(not a name)"


def _shown(text: str) -> str:
    return hide_credentials(text)[:CONTENT_LIMIT]


@contextmanager
def _attached(context: Context) -> Iterator[None]:
    token = otel_context.attach(context)
    try:
        yield
    finally:
        otel_context.detach(token)
