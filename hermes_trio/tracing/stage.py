"""`Tracing`: a stage of the runtime that makes spans while it is open."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import AbstractAsyncContextManager, AbstractContextManager, ExitStack, asynccontextmanager
from typing import TYPE_CHECKING, Any, Final, Protocol, runtime_checkable

import trio

from hermes_trio.base.redaction import redact
from hermes_trio.base.settings import SettingsError

from .settings import TracingSettings

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

    from opentelemetry.sdk.trace import TracerProvider as SdkTracerProvider
    from opentelemetry.trace import TracerProvider

    from hermes_trio.runtime.runtime import Runtime

EXPORTERS: Final = "opentelemetry_traces_exporter"
SHUTDOWN_SECONDS: Final = 30.0
"""How long the end of a runtime waits for its last spans to be sent."""

logger: Final = logging.getLogger("hermes_trio.tracing")
"""The entry-point group of OpenTelemetry's exporters."""


class TracingProblem(SettingsError):
    """Raised if tracing cannot be enabled as configured. The text says what is missing."""


@runtime_checkable
class ObservableStore(Protocol):
    """A store whose writes can be observed. Writes of another store make no spans."""

    def observe_writes(self, around: Callable[[str], AbstractContextManager[object]]) -> AbstractContextManager[None]:
        """Enter `around(name of the verb)` around every write that a caller waits for, for the body of the `with`."""
        ...


class Tracing:
    """Make spans of a runtime's turns, model calls, tools, processes, jobs and writes: `Runtime(agent=…, stages=[Tracing()])`.

    Without a `provider` the spans go to the program's global one. With `content` attributes carry content; without it they carry names, ids, counts
    and results. Opening raises `TracingProblem` if OpenTelemetry is not installed.
    """

    def __init__(self, provider: TracerProvider | None = None, *, content: bool = False) -> None:
        self._provider = provider
        self._content = content

    @asynccontextmanager
    async def __call__(self, runtime: Runtime) -> AsyncIterator[None]:
        """Trace `runtime` for the body of the `async with`."""
        try:
            from .tracer import SpanTracer
        except ImportError as error:
            raise TracingProblem(
                f"tracing needs OpenTelemetry ({error}); install it with `pip install hermes-trio[otel]`"
            ) from None
        tracer = SpanTracer(self._provider, content=self._content)
        with ExitStack() as stack:
            stack.enter_context(runtime.tree.trace(tracer))
            if isinstance(runtime.store, ObservableStore):
                stack.enter_context(runtime.store.observe_writes(tracer.write))
            yield


def configured_tracing(settings: TracingSettings) -> Callable[[Runtime], AbstractAsyncContextManager[None]]:
    """Return the stage that `[tracing]` configures, with a provider of its own, whose last spans are sent when the runtime has ended. Raises
    `TracingProblem`.
    """
    provider = _make_provider(settings)

    @asynccontextmanager
    async def stage(runtime: Runtime) -> AsyncIterator[None]:
        try:
            async with Tracing(provider, content=settings.content)(runtime):
                yield
        finally:
            # Blocks until the exporter has sent what it has, within its own time limit, or ours.
            with trio.move_on_after(SHUTDOWN_SECONDS, shield=True) as bound:
                await trio.to_thread.run_sync(provider.shutdown, abandon_on_cancel=True)
            if bound.cancelled_caught:
                logger.error("could not send the last spans within %g s; they are lost", SHUTDOWN_SECONDS)

    return stage


def exporters() -> Iterable[EntryPoint]:
    """Return the installed exporters, without loading them. Loads `importlib.metadata`, which a server without tracing does not need."""
    from importlib.metadata import entry_points

    return entry_points(group=EXPORTERS)


def _make_provider(settings: TracingSettings) -> SdkTracerProvider:
    try:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise TracingProblem(
            f"tracing.enabled needs OpenTelemetry ({error}); install it with `pip install hermes-trio[otel]`"
        ) from None
    found = {entry.name: entry for entry in exporters()}
    entry = found.get(settings.exporter)
    if entry is None:
        known = ", ".join(sorted(found)) or "none"
        raise TracingProblem(
            f"tracing.exporter is {settings.exporter!r}, which is not installed; installed are {known}."
            " `pip install hermes-trio[otel]` brings otlp_proto_http"
        )
    try:
        exporter: Any = entry.load()()
    except (Exception, SystemExit) as error:
        package = entry.dist.name if entry.dist is not None else entry.module
        raise TracingProblem(
            f"tracing.exporter {settings.exporter!r} of the package {package} cannot be used: {redact(f'{type(error).__name__}: {error}')}"
        ) from None
    provider = TracerProvider(resource=Resource.create({"service.name": settings.service_name}), shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(exporter))
    return provider
