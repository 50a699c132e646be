"""`[tracing]` of the configuration."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta


class TracingSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[tracing]`: whether spans are made, where they are sent, and whether they carry content."""

    enabled: bool = False
    exporter: Annotated[str, Meta(min_length=1, max_length=100)] = "otlp_proto_http"
    """A name of the entry-point group `opentelemetry_traces_exporter`. The exporter reads its own variables, `OTEL_EXPORTER_OTLP_ENDPOINT` and others."""
    service_name: Annotated[str, Meta(min_length=1, max_length=200)] = "hermes-trio"
    content: bool = False
    """Whether attributes carry prompts, answers, arguments and results of tools, and commands."""
