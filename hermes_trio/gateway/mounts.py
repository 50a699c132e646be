"""Makes routes of the addresses that adapters offer: the server authenticates, the adapter answers."""

from __future__ import annotations

from typing import Any
from urllib.parse import quote

from hermes_trio.base.mounts import (
    Mount,
    MountCaller,
    MountFile,
    MountProblem,
    MountRequest,
    MountResponse,
    MountStream,
)
from hermes_trio.http.auth import RequiredScope
from hermes_trio.http.errors import ApiError
from hermes_trio.http.requests import EventStream, HandlerResult, Request, Response
from hermes_trio.http.routing import Route
from hermes_trio.http.streams import StreamWriter


def route_of(mount: Mount) -> Route:
    """Return the route of an address for callers with a key. The adapter receives the principal, never a credential."""

    async def handle(request: Request) -> HandlerResult:
        """Pass the request to the adapter of the address."""
        caller = request.caller
        given = MountRequest(
            method=request.method,
            path=request.path,
            params=request.params,
            query=request.query,
            body=await request.body() if request.method == "POST" else b"",
            caller=MountCaller(
                key_id=caller.key_id, name=caller.name, tenant=caller.tenant, scopes=caller.scopes, admin=caller.admin
            ),
            last_event_id=request.header(b"last-event-id") or request.query("last_event_id"),
        )
        try:
            answer = await mount.handler(given)
        except MountProblem as problem:
            raise ApiError(problem.status, str(problem), code=problem.code) from None
        if isinstance(answer, MountResponse):
            return Response.of(answer.body, answer.status)
        if isinstance(answer, MountFile):
            return _file(answer)
        return _streamed(answer)

    return Route(
        name=mount.name,
        method=mount.method,
        path=mount.path,
        handler=handle,
        access=RequiredScope(mount.scope),
        streams=mount.streams,
        summary=mount.summary,
        answer=None if mount.streams or mount.media != "application/json" else dict[str, Any],
        status=mount.status,
        media="text/event-stream" if mount.streams else mount.media,
        body=mount.body,
        errors=(400, 404) if mount.media != "application/json" else (400,),
        tag=mount.tag,
    )


def _file(file: MountFile) -> Response:
    """Serve a file that a person or an agent provided, as untrusted content: a browser shows images, downloads the rest, and executes nothing."""
    how = "inline" if file.media.startswith("image/") and file.media != "image/svg+xml" else "attachment"
    headers = (
        (b"content-security-policy", b"default-src 'none'; sandbox; frame-ancestors 'none'"),
        (b"cross-origin-resource-policy", b"same-origin"),
        (b"cache-control", b"private, max-age=3600"),
        (b"content-disposition", f"{how}; filename*=UTF-8''{quote(file.name, safe='')}".encode("ascii")),
    )
    return Response(file.body, 200, headers, file.media.encode("ascii"))


def _streamed(stream: MountStream) -> EventStream:
    async def run(writer: StreamWriter) -> None:
        async def send(piece: bytes) -> None:
            if not writer.opened:
                await writer.open(piece)
                return
            writer.put(piece)
            await writer.flush()

        await stream.run(send)

    return EventStream(run)
