"""Traces of OpenTelemetry from the task tree. OpenTelemetry is loaded when a `Tracing` is opened, never before."""

from .settings import TracingSettings
from .stage import Tracing, TracingProblem

__all__ = ["Tracing", "TracingProblem", "TracingSettings"]
