"""Signing in with a browser: one-time codes, cookie sessions, and the checks that a cookie needs and a bearer key does not.

A session stands for a key: it has the key's scopes and tenant, and ends when the key is revoked or, for the admin key, replaced. It is kept by the digest of
its cookie, in a file of the home directory that only its owner can read, or in the store where several nodes share it, so that a page survives a restart of
the server. A request with a cookie must come for a name of this server (DNS rebinding) and, if it changes something, from a page of this server (forged
requests). A request with a bearer key is not asked either question.
"""

from __future__ import annotations

import hmac
import logging
import os
import secrets
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from hashlib import blake2b, sha256
from ipaddress import ip_address
from pathlib import Path
from typing import Final

import msgspec
import trio

from hermes_trio.runtime.membership import Membership
from hermes_trio.runtime.tree import waiting
from hermes_trio.store.ports import Store

from .auth import ADMIN, REMEMBERED_SECONDS, Keyring, Principal, is_loopback
from .errors import ApiError
from .requests import Request

logger: Final = logging.getLogger("hermes_trio.http.signin")

SESSION_SECONDS: Final = 12 * 3600.0
CODE_SECONDS: Final = 600.0
"""How long a one-time code is valid."""

MOST_SESSIONS: Final = 200
MOST_CODES: Final = 100
WRITE_SECONDS: Final = 10.0
"""How long a sign-in waits for the file of browser sessions to be written."""

SESSION_FILE: Final = "console_sessions.json"
SESSION_ROW: Final = "console sessions"
"""The value of the store that holds the browser sessions, if several nodes share it."""

CODE_ROUTE: Final = "console code"
"""The name under which used codes are stored, if several nodes share the store."""

SAFE_METHODS: Final = frozenset({"GET", "HEAD"})


class BrowserSession(msgspec.Struct):
    """One signed-in browser. `key_id` is the key whose scopes it has; `admin_mark` distinguishes admin keys, which share one id."""

    key_id: str
    created_at: float
    expires_at: float
    admin_mark: str = ""


class _Kept(msgspec.Struct):
    """The content of the file: sessions by the digest of their cookie."""

    sessions: dict[str, BrowserSession]


class SharedSignIn(msgspec.Struct, frozen=True):
    """Sign-in on a store that several nodes share: a browser that has signed in on one is signed in on all."""

    store: Store
    membership: Membership


class SignIn:
    """The codes and sessions of one server. `hosts` are the names, besides loopback, under which its pages may be opened."""

    def __init__(
        self,
        keyring: Keyring,
        *,
        host: str,
        hosts: list[str],
        home: Path | None,
        shared: SharedSignIn | None = None,
    ) -> None:
        self._shared = shared
        self._keyring = keyring
        self._hosts = frozenset(name.strip().strip("[]").lower() for name in (*hosts, host) if name.strip())
        self._path = None if home is None else home / SESSION_FILE
        self._codes: dict[str, tuple[Principal, float]] = {}
        self._sessions: dict[str, BrowserSession] | None = None
        self._callers: dict[str, tuple[Principal, float]] = {}
        self._writing = trio.Lock()

    # -- names and origins -----------------------------------------------------------------------------------------------------

    def check_host(self, request: Request) -> None:
        """Refuse a request for a name that is not this server's: a page of another site whose name resolves to this address."""
        name = _hostname(request.header(b"host") or "")
        if not self.knows_host(name):
            raise ApiError(
                421,
                f"This server is not called {name[:100]!r}. To open its pages under that name, add it to `hosts` in [server].",
                code="unknown_host",
            )

    def knows_host(self, name: str) -> bool:
        """Return whether pages may be opened under this name: loopback, the bound address, or one of `hosts`."""
        if not name:
            return False
        return name in self._hosts or is_loopback(name) or (_is_address(name) and "0.0.0.0" in self._hosts)

    def knows_host_header(self, host: bytes) -> bool:
        """Return the same for a Host header."""
        return self.knows_host(_hostname(host.decode("latin-1")))

    def check_page(self, request: Request) -> None:
        """Refuse a request that a page of this server cannot have made: another name, or a change from another origin."""
        self.check_host(request)
        if request.method in SAFE_METHODS:
            return
        origin = request.raw_header(b"origin")
        if origin is None or not is_own_origin(origin, request.raw_header(b"host")):
            raise ApiError(
                403, "A change with a cookie must come from a page of this server.", code="origin_not_allowed"
            )

    # -- codes -----------------------------------------------------------------------------------------------------------------

    def make_code(self, caller: Principal, seconds: float = CODE_SECONDS) -> str:
        """Make a code that signs one browser in as `caller`, once, within `seconds`; on every node of the store."""
        if self._shared is not None:
            return self._signed(
                f"{secrets.token_urlsafe(12)}.{int((self._keyring.now() + seconds) * 1000)}.{caller.key_id}"
            )
        now = trio.current_time()
        self._codes = {digest: one for digest, one in self._codes.items() if one[1] > now}
        while len(self._codes) >= MOST_CODES:
            del self._codes[_oldest_of_the_busiest({digest: one[0].key_id for digest, one in self._codes.items()})]
        code = secrets.token_urlsafe(24)
        self._codes[_digest(code)] = (caller, now + seconds)
        return code

    async def redeem(self, code: str) -> Principal | None:
        """Use a code; return None if it is unknown, used or expired."""
        if self._shared is not None:
            return await self._redeem_signed(self._shared, code)
        found = self._codes.pop(_digest(code), None)
        return None if found is None or found[1] <= trio.current_time() else found[0]

    def _signed(self, text: str) -> str:
        assert self._shared is not None
        mac = blake2b(text.encode(), key=self._shared.store.secret, person=b"console code", digest_size=24)
        return f"{text}.{mac.hexdigest()}"

    async def _redeem_signed(self, shared: SharedSignIn, code: str) -> Principal | None:
        text, _, _ = code.rpartition(".")
        nonce, _, rest = text.partition(".")
        until, _, key_id = rest.partition(".")
        if not nonce or not hmac.compare_digest(self._signed(text).encode(), code.encode("utf-8", "replace")):
            return None
        if not until.isdecimal() or int(until) <= self._keyring.now() * 1000:
            return None
        if not await shared.store.record_delivery(CODE_ROUTE, nonce):
            return None
        return ADMIN if key_id == ADMIN.key_id else await self._keyring.find_by_id(key_id)

    # -- sessions --------------------------------------------------------------------------------------------------------------

    async def open_session(self, caller: Principal) -> tuple[str, BrowserSession]:
        """Open a session with the scopes of `caller`; return its cookie and the session. It is stored when this returns."""
        async with self._changing() as sessions:
            return self._open(sessions, caller)

    def _open(self, sessions: dict[str, BrowserSession], caller: Principal) -> tuple[str, BrowserSession]:
        now = self._keyring.now()
        for digest in [digest for digest, one in sessions.items() if one.expires_at <= now]:
            del sessions[digest]
        while len(sessions) >= MOST_SESSIONS:
            del sessions[_oldest_of_the_busiest({digest: one.key_id for digest, one in sessions.items()})]
        self._callers = {digest: one for digest, one in self._callers.items() if digest in sessions}
        token = secrets.token_urlsafe(32)
        until = now + SESSION_SECONDS if caller.expires_at is None else min(now + SESSION_SECONDS, caller.expires_at)
        mark = self._keyring.admin_mark if caller.key_id == ADMIN.key_id else ""
        session = sessions[_digest(token)] = BrowserSession(caller.key_id, now, until, mark)
        return token, session

    @asynccontextmanager
    async def _changing(self) -> AsyncIterator[dict[str, BrowserSession]]:
        """Change the sessions in the body of the `async with`, and store them when it is left."""
        if self._shared is None:
            yield await self._load()
            await self._keep()
            return
        async with self._writing, self._shared.membership.holding(SESSION_ROW):
            sessions = await self._load()
            yield sessions
            await self._shared.store.set_meta(SESSION_ROW, msgspec.json.encode(_Kept(sessions)).decode())

    async def close_session(self, request: Request) -> bool:
        """End the session of a request. Its cookie is invalid from now on."""
        token = cookie_of(request)
        if token is None or _digest(token) not in await self._load():
            return False
        async with self._changing() as sessions:
            sessions.pop(_digest(token), None)
        self._callers.pop(_digest(token), None)
        return True

    async def find(self, request: Request) -> tuple[Principal, BrowserSession] | None:
        """Return the principal of a request's cookie; None without a valid one."""
        token = cookie_of(request)
        if token is None:
            return None
        digest = _digest(token)
        session = (self._sessions if self._sessions is not None else await self._load()).get(digest)
        if session is None or session.expires_at <= self._keyring.now():
            return None
        known = self._callers.get(digest)
        if known is None or trio.current_time() - known[1] > REMEMBERED_SECONDS:
            caller = await self._caller(session)
            if caller is None:
                return None
            known = self._callers[digest] = (caller, trio.current_time())
        return known[0], session

    async def _caller(self, session: BrowserSession) -> Principal | None:
        if session.key_id != ADMIN.key_id:
            return await self._keyring.find_by_id(session.key_id)
        return ADMIN if session.admin_mark == self._keyring.admin_mark else None

    def forget(self, key_id: str) -> None:
        """Look the sessions of a revoked key up again, which ends them."""
        self._callers = {digest: one for digest, one in self._callers.items() if one[0].key_id != key_id}

    async def _load(self) -> dict[str, BrowserSession]:
        if self._shared is not None:
            text = await self._shared.store.get_meta(SESSION_ROW)
            return {} if text is None else msgspec.json.decode(text, type=_Kept).sessions
        if self._sessions is None:
            path = self._path
            found = None if path is None else await trio.to_thread.run_sync(_read, path)
            if self._sessions is None:
                self._sessions = {} if found is None else found.sessions
        return self._sessions

    async def _keep(self) -> None:
        """Write the file. If that fails, the sessions are valid until the server ends."""
        path = self._path
        if path is None:
            return
        async with self._writing:
            body = msgspec.json.encode(_Kept(self._sessions or {}))
            problem: object = f"the disk did not answer within {WRITE_SECONDS:g} s"
            with trio.move_on_after(WRITE_SECONDS, shield=True), waiting("the file of browser sessions"):
                try:
                    await trio.to_thread.run_sync(_write, path, body, abandon_on_cancel=True)
                    return
                except OSError as error:
                    problem = error
            logger.warning("could not write %s; browsers must sign in again after a restart: %s", path, problem)


def _oldest_of_the_busiest(holders: dict[str, str]) -> str:
    """Return the session to drop when there are too many: the oldest of the key that has the most, so that no key can displace another's."""
    busiest, _ = Counter(holders.values()).most_common(1)[0]
    return next(digest for digest, key_id in holders.items() if key_id == busiest)


def _read(path: Path) -> _Kept | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=_Kept)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.MsgspecError) as error:
        logger.warning("could not read %s; browsers must sign in again: %s", path, error)
        return None


def _write(path: Path, body: bytes) -> None:
    new = path.with_suffix(".new")
    descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(body)
    new.replace(path)


def _digest(text: str) -> str:
    return sha256(text.encode("utf-8", "surrogateescape")).hexdigest()


def _hostname(host: str) -> str:
    """Return the name in a Host header, without its port and brackets."""
    host = host.strip().lower()
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.rpartition(":")[0] if host.count(":") == 1 else host


def _is_address(name: str) -> bool:
    try:
        ip_address(name)
    except ValueError:
        return False
    return True


def is_own_origin(origin: bytes, host: bytes | None) -> bool:
    """Return whether an Origin header names the host of the request, whatever the scheme: a proxy may have terminated TLS."""
    scheme, separator, name = origin.partition(b"://")
    return bool(separator) and scheme in (b"http", b"https") and host is not None and name.lower() == host.lower()


def cookie_name(request: Request) -> str:
    """Return the name of this server's cookie. It includes the port: two servers on one machine must not sign each other out."""
    host = request.header(b"host") or ""
    port = host.rpartition(":")[2]
    return f"hermes_trio_{port}" if port.isdecimal() else "hermes_trio"


def cookie_of(request: Request) -> str | None:
    """Return the value of this server's cookie in a request."""
    header = request.header(b"cookie")
    if header is None:
        return None
    wanted = cookie_name(request)
    for part in header.split(";"):
        name, _, value = part.strip().partition("=")
        if name == wanted and value:
            return value
    return None


def set_cookie(request: Request, value: str, seconds: int) -> tuple[bytes, bytes]:
    """Return the header that sets the cookie, or with no seconds deletes it."""
    secure = request.scope.get("scheme") == "https" or request.header(b"x-forwarded-proto") == "https"
    text = f"{cookie_name(request)}={value}; Path=/; Max-Age={seconds}; HttpOnly; SameSite=Strict"
    return b"set-cookie", (text + ("; Secure" if secure else "")).encode("latin-1")
