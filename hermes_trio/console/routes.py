"""The console's routes: its page and files, sign-in and sign-out.

The files are in `static/` and are read when they are first requested. Only files that exist there are served, by their exact path.
"""

from __future__ import annotations

from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any, Final

import msgspec
import trio

from hermes_trio.http.auth import RequiredScope
from hermes_trio.http.errors import ApiError, not_found
from hermes_trio.http.requests import HandlerResult, Request, Response
from hermes_trio.http.routing import Route
from hermes_trio.http.signin import SESSION_SECONDS, BrowserSession, set_cookie

POLICY: Final = (
    b"default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; font-src 'self';"
    b" base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
)

PAGE_HEADERS: Final = (
    (b"content-security-policy", POLICY),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"cache-control", b"no-cache"),
)

MEDIA: Final = {
    ".html": b"text/html; charset=utf-8",
    ".css": b"text/css; charset=utf-8",
    ".js": b"text/javascript; charset=utf-8",
    ".svg": b"image/svg+xml",
}


class StaticFile(msgspec.Struct, frozen=True):
    """A file as it is served."""

    body: bytes
    media: bytes
    tag: bytes


class StaticFiles:
    """The files below a directory of the package, each read once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._found: dict[str, StaticFile] | None = None

    async def find(self, path: str) -> StaticFile | None:
        """Return the file at a path below the directory, or None."""
        if self._found is None:
            self._found = await trio.to_thread.run_sync(_read_all, self._folder)
        return self._found.get(path)


def _read_all(folder: Path) -> dict[str, StaticFile]:
    found: dict[str, StaticFile] = {}
    pending: list[tuple[str, Path]] = [("", folder)]
    while pending:
        prefix, this = pending.pop()
        for entry in this.iterdir():
            path = f"{prefix}{entry.name}"
            if entry.is_dir():
                pending.append((f"{path}/", entry))
                continue
            media = MEDIA.get(path[path.rfind(".") :])
            if media is not None:
                body = entry.read_bytes()
                found[path] = StaticFile(body, media, b'"%b"' % sha256(body).hexdigest()[:32].encode())
    return found


class SignInRequest(msgspec.Struct, forbid_unknown_fields=True):
    """A one-time code, or a key."""

    code: str = ""
    key: str = ""


class CallerBody(msgspec.Struct):
    """Who is signed in, with which scopes, and which server the page talks to."""

    name: str
    key_id: str
    tenant: str
    scopes: list[str]
    admin: bool
    expires_at: float | None
    version: str
    epoch: str
    features: list[str]
    signed_in: bool = True
    object: str = "hermes.console.session"


class CodeBody(msgspec.Struct):
    """A one-time code and the address that uses it."""

    code: str
    path: str
    object: str = "hermes.console.code"


_sign_in: Final = msgspec.json.Decoder(SignInRequest)


async def _page(static: StaticFiles, path: str, request: Request) -> HandlerResult:
    """Serve a page or a file of the console."""
    request.core.signin.check_host(request)
    name = path or "/".join(request.params[part] for part in ("a", "b", "c") if part in request.params)
    found = await static.find(name)
    if found is None:
        raise not_found("file", name[:200], "file_not_found")
    headers = (*PAGE_HEADERS, (b"etag", found.tag))
    if request.raw_header(b"if-none-match") == found.tag:
        return Response(b"", 304, headers, found.media)
    return Response(found.body, 200, headers, found.media)


def _caller(request: Request, session: BrowserSession | None) -> CallerBody:
    core, caller = request.core, request.caller
    return CallerBody(
        name=caller.name,
        key_id=caller.key_id,
        tenant=caller.tenant,
        scopes=sorted(caller.scopes),
        admin=caller.admin,
        expires_at=caller.expires_at if session is None else session.expires_at,
        version=core.version,
        epoch=core.runtime.tree.epoch,
        features=sorted({route.tag for route in core.routes if route.tag}),
    )


async def sign_in(request: Request) -> HandlerResult:
    """Open a browser session for a one-time code or a key; the response sets its cookie."""
    signin = request.core.signin
    signin.check_page(request)
    body = await request.json(_sign_in)
    if body.code:
        caller = await signin.redeem(body.code)
        if caller is None:
            raise ApiError(
                401,
                "This link was used before, or is too old. `hermes-trio console` makes a new one.",
                code="invalid_code",
            )
    else:
        caller = await request.core.keyring.find(body.key)
        if caller is None:
            raise ApiError(401, "This key is not in force.", code="invalid_api_key")
    request.caller = caller
    token, session = await signin.open_session(caller)
    return Response.of(_caller(request, session), 200, (set_cookie(request, token, int(SESSION_SECONDS)),))


async def who(request: Request) -> HandlerResult:
    """Return who is signed in. A missing session is not an error: the page requests this before sign-in."""
    core = request.core
    if request.raw_header(b"authorization") is not None:
        request.caller = await core.keyring.identify(request)
        return Response.of(_caller(request, None))
    found = await core.signin.find(request)
    if found is None:
        return Response.of({"signed_in": False, "object": "hermes.console.session"})
    core.signin.check_page(request)
    request.caller = found[0]
    return Response.of(_caller(request, found[1]))


async def sign_out(request: Request) -> HandlerResult:
    """End the browser session and delete its cookie."""
    ended = await request.core.signin.close_session(request)
    return Response.of({"signed_out": ended}, 200, (set_cookie(request, "", 0),))


async def new_code(request: Request) -> HandlerResult:
    """Create a one-time code that signs a browser in with the scopes of this key."""
    code = request.core.signin.make_code(request.caller)
    return Response.of(CodeBody(code, sign_in_path(code)), 201)


def sign_in_path(code: str) -> str:
    """Return the path that uses a code. The code is behind the `#`, so that no log and no proxy sees it."""
    return f"/#/sign-in/{code}"


def console_routes() -> list[Route]:
    """Return the routes of the console."""
    static = StaticFiles(Path(__file__).with_name("static"))

    def page(name: str, path: str, file: str = "") -> Route:
        return Route(
            name=name,
            method="GET",
            path=path,
            handler=partial(_page, static, file),
            access=RequiredScope.OPEN,
            direct=True,
            listed=False,
        )

    def session(
        name: str, method: str, path: str, handler: Any, access: RequiredScope, summary: str, **more: Any
    ) -> Route:
        return Route(
            name=name, method=method, path=path, handler=handler, access=access, summary=summary, tag="console", **more
        )

    own = "/v1/console/session"
    return [
        page("console", "/", "index.html"),
        page("console_chat", "/chat", "index.html"),
        page("console_file", "/console/{a}"),
        page("console_file_2", "/console/{a}/{b}"),
        page("console_file_3", "/console/{a}/{b}/{c}"),
        session(
            "console_sign_in",
            "POST",
            own,
            sign_in,
            RequiredScope.OPEN,
            "Sign a browser in",
            body=SignInRequest,
            answer=CallerBody,
            errors=(400, 401, 403, 421),
        ),
        session("console_who", "GET", own, who, RequiredScope.OPEN, "Who is signed in", answer=dict[str, Any]),
        session("console_sign_out", "DELETE", own, sign_out, RequiredScope.ANY, "Sign out", answer=dict[str, bool]),
        session(
            "console_code",
            "POST",
            "/v1/console/code",
            new_code,
            RequiredScope.ANY,
            "Make a one-time code for a browser",
            answer=CodeBody,
            status=201,
        ),
    ]
