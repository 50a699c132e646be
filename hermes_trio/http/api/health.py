"""Health and metrics: `/health`, `/health/detailed`, `/health/load`, `/metrics`."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import trio

from hermes_trio.http.auth import RequiredScope
from hermes_trio.http.load import EVERY_SECONDS, LoadSample
from hermes_trio.http.metrics import CONTENT_TYPE
from hermes_trio.http.nodes import node_bodies
from hermes_trio.http.requests import HandlerResult, Request, Response
from hermes_trio.http.routing import Route
from hermes_trio.http.turns import PLATFORM
from hermes_trio.runtime.outcome import RunStatus

DISK_DEGRADED = 0.9
NAMED_ENDS = 20
PROBE_SECONDS = 2.0
"""The time limit of the write that tests the store."""

_QUEUED = (RunStatus.QUEUED, RunStatus.RUNNING, RunStatus.WAITING_FOR_APPROVAL)


class Health(msgspec.Struct):
    """The server answers."""

    status: str
    platform: str
    version: str


async def health(request: Request) -> HandlerResult:
    """Return that the server answers, without checking anything else."""
    core = request.core
    if core.health_body is None:
        core.health_body = msgspec.json.encode(Health("ok", PLATFORM, core.version))
    return Response(core.health_body)


async def detailed_health(request: Request) -> HandlerResult:
    """Return the state of the server: its store, model, disk and work."""
    core = request.core
    host = core.runtime
    checks: dict[str, dict[str, Any]] = {}
    try:
        backlog = await core.store.backlog()
        checks["state_db"] = {"status": "ok"}
    except Exception as error:  # whatever is wrong with the store is what this route is there to say
        backlog = {}
        checks["state_db"] = {"status": "degraded", "detail": type(error).__name__}
    code = 200
    unwritten = host.unwritten
    if unwritten:
        checks["ends"] = {"status": "degraded", "count": len(unwritten)}
        if request.caller.admin:  # they name the work of every tenant
            checks["ends"]["waiting"] = unwritten[:NAMED_ENDS]
        code = 503  # until a write succeeds: only without one the server is not fit for work
        with trio.move_on_after(PROBE_SECONDS), suppress(Exception):
            await core.store.probe()
            code = 200
    checks["config"] = {"status": "ok"}
    checks["model"] = {"status": "ok", "detail": core.public_model}
    if core.services.confinement is not None:
        checks["confinement"] = dict(core.services.confinement())
    checks["disk"] = _disk(core.home)
    checks["gateway"] = {"status": "degraded" if host.draining else "ok"}
    platforms: Mapping[str, Any] = {} if core.services.platforms is None else core.services.platforms()
    if platforms.get("status", "ok") != "ok":
        checks["gateway"]["status"] = "degraded"
    servers: Mapping[str, Mapping[str, Any]] = {} if core.services.mcp is None else core.services.mcp()
    if servers:
        lost = [name for name, server in servers.items() if server["state"] != "ready"]
        checks["mcp"] = {"status": "degraded", "detail": f"not ready: {', '.join(lost)}"} if lost else {"status": "ok"}
    nodes = node_bodies(core, await core.store.list_nodes(), request.caller) if core.shared else []
    if nodes:
        expired = [node.name for node in nodes if node.lease_seconds <= 0]
        configurations = {node.configuration for node in nodes} - {""}  # known with the first heartbeat
        if expired:
            checks["nodes"] = {"status": "degraded", "detail": f"not renewed: {', '.join(expired)}"}
        elif len(configurations) > 1:
            checks["nodes"] = {"status": "degraded", "detail": "the nodes have different configurations"}
        else:
            checks["nodes"] = {"status": "ok", "count": len(nodes)}
    runs = host.stateless.runs.all()
    checks["background_queues"] = {
        "status": "ok",
        "active_api_runs": sum(run.status in _QUEUED for run in runs),
        "live_runs": len(runs),
        **backlog,
    }
    status = "ok" if all(check["status"] == "ok" for check in checks.values()) else "degraded"
    active = host.stateless.active
    return Response.of(
        {
            "status": status,
            "readiness": {"status": status, "checks": checks},
            "platform": PLATFORM,
            "version": core.version,
            "gateway_state": "draining" if host.draining else "running",
            "platforms": platforms.get("platforms", {}),
            "mcp": servers,
            "active_agents": active,
            "gateway_busy": active > 0,
            "gateway_drainable": not host.draining,
            "exit_reason": None,
            "updated_at": time.time(),
            "started_at": core.started_at,
            "tree_nodes": host.tree.size,
            "pid": os.getpid(),
            **({"nodes": nodes} if nodes else {}),
        },
        code,
    )


def _disk(home: Path | None) -> dict[str, Any]:
    if home is None:
        return {"status": "ok", "detail": "no home directory"}
    try:
        usage = shutil.disk_usage(home)
    except OSError as error:
        return {"status": "degraded", "detail": error.strerror or "unknown"}
    used = usage.used / usage.total if usage.total else 0.0
    return {"status": "degraded" if used >= DISK_DEGRADED else "ok", "used": round(used, 3), "free_bytes": usage.free}


async def metrics(request: Request) -> HandlerResult:
    """Return the metrics for Prometheus."""
    return Response(request.core.metrics.render(), media=CONTENT_TYPE)


class LoadBody(msgspec.Struct):
    """The load of the last minutes, the oldest sample first."""

    data: list[LoadSample]
    every: float = EVERY_SECONDS
    object: str = "list"


async def load(request: Request) -> HandlerResult:
    """Return the load of the last minutes, or since the sample `after`."""
    after = request.query("after")
    return Response.of(LoadBody(request.core.load.after(int(after) if after.isdecimal() and len(after) < 18 else 0)))


def health_routes() -> list[Route]:
    """Return the routes of this module."""
    return [
        Route(
            name=name,
            method="GET",
            path=path,
            handler=health,
            access=RequiredScope.OPEN,
            direct=True,
            summary="Check that the server answers",
            answer=Health,
            tag="health",
        )
        for name, path in (("health", "/health"), ("health_v1", "/v1/health"))
    ] + [
        Route(
            name="health_detailed",
            method="GET",
            path="/health/detailed",
            handler=detailed_health,
            summary="Show the state of the server",
            answer=dict[str, Any],
            tag="health",
        ),
        Route(
            name="health_load",
            method="GET",
            path="/health/load",
            handler=load,
            summary="Show the load of the last minutes",
            answer=LoadBody,
            tag="health",
        ),
        Route(
            name="metrics",
            method="GET",
            path="/metrics",
            handler=metrics,
            summary="Metrics for Prometheus",
            media="text/plain",
            tag="health",
        ),
    ]
