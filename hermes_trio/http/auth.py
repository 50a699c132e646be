"""Authentication: bearer keys, their scopes, and the tenant whose work each may see.

Keys are compared by their SHA-256 digests, so that the time of a comparison reveals nothing about a key. The admin key comes from the configuration
or from a file that only its owner can read; all others are in the store, as digests, each with scopes and a tenant. The keyring caches the keys that
it has seen until one is revoked.
"""

from __future__ import annotations

import hmac
import logging
import os
import secrets
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from enum import Enum
from hashlib import sha256
from ipaddress import ip_address
from pathlib import Path
from typing import ClassVar, Final

import msgspec
import trio

from hermes_trio.base.line_limiter import LineLimiter
from hermes_trio.base.structs import RedactedStruct
from hermes_trio.store import ApiKey
from hermes_trio.store.ports import KeyStore

from .errors import ApiError
from .requests import Request
from .settings import KEY_FILE

logger: Final = logging.getLogger("hermes_trio.http.auth")

MINIMUM_LENGTH: Final = 16
PREFIX: Final = "ht-"
MOST_REMEMBERED: Final = 10_000
REMEMBERED_SECONDS: Final = 60.0
"""Seconds for which a key is cached before the store is read again, which also records its use."""

PLACEHOLDERS: Final = frozenset(
    {
        "changeme",
        "change-me",
        "change_me",
        "default",
        "example",
        "key",
        "none",
        "null",
        "password",
        "placeholder",
        "secret",
        "test",
        "todo",
        "token",
        "your-api-key",
        "your-api-key-here",
        "your-secret-key",
        "your-secret-key-here",
        "your_api_key",
        "your_api_key_here",
        "replace-me-with-a-key",
        "insert-your-key-here",
    }
)


class UnsafeKey(ValueError):
    """Raised for a key that is too weak to protect a server. The text says what is required."""


class RequiredScope(Enum):
    """The scope that a route requires. `OPEN` needs no key, `ANY` accepts every key."""

    OPEN = "open"
    ANY = "any"
    CHAT = "chat"
    RUNS = "runs"
    SESSIONS = "sessions"
    ADMIN = "admin"


SCOPES: Final = tuple(
    access.value for access in (RequiredScope.CHAT, RequiredScope.RUNS, RequiredScope.SESSIONS, RequiredScope.ADMIN)
)
"""What `hermes-trio keys add --scope` accepts."""


class Principal(msgspec.Struct, frozen=True, kw_only=True):
    """The holder of a key. Its work belongs to `tenant`; an admin sees the work of all tenants."""

    key_id: str
    name: str
    tenant: str
    scopes: frozenset[str]
    admin: bool = False
    expires_at: float | None = None

    def may(self, access: RequiredScope) -> bool:
        """Return whether this key has the scope."""
        return self.admin or access is RequiredScope.ANY or access.value in self.scopes

    def owns(self, tenant: str) -> bool:
        """Return whether this key may see the work of that tenant."""
        return self.admin or tenant == self.tenant

    @property
    def sees(self) -> str | None:
        """Return the tenant to filter by, or None for no filter."""
        return None if self.admin else self.tenant


ADMIN: Final = Principal(key_id="admin", name="admin", tenant="", scopes=frozenset(SCOPES), admin=True)


def new_key() -> str:
    """Make an admin key of 256 bits."""
    return PREFIX + secrets.token_urlsafe(32)


class Keyring:
    """Finds the holder of a key. The store's signal of a revocation calls `forget`: a revoked key is refused from the next request on, and reads no stream
    any more.
    """

    def __init__(self, admin_key: str, store: KeyStore) -> None:
        self._admin_digest = sha256(admin_key.strip().encode()).digest()
        self.admin_mark = sha256(b"admin key of a browser session" + self._admin_digest).hexdigest()
        """A digest that changes with the admin key and does not reveal it."""
        self._store = store
        self._known: dict[bytes, tuple[Principal, float]] = {}
        self._revoked: set[str] = set()
        self._streams: dict[str, set[trio.CancelScope]] = {}
        self._refusals = LineLimiter()

    def now(self) -> float:
        """Return the store's time, with which the expiry of keys and sign-ins is compared."""
        return self._store.now()

    async def identify(self, request: Request) -> Principal:
        """Return the principal of a request. Raises `ApiError` 401 for a missing, unknown or expired key. A cached key costs no checkpoint."""
        value = request.raw_header(b"authorization")
        token = value[7:].strip() if value is not None and value.startswith(b"Bearer ") else None
        if not token and value is None:
            token = (request.raw_header(b"x-api-key") or b"").strip()
        if not token:
            raise self._refuse(request, "no bearer key")
        digest = sha256(token).digest()
        if hmac.compare_digest(digest, self._admin_digest):
            return ADMIN
        now = trio.current_time()
        known = self._known.get(digest)
        if known is None or now - known[1] > REMEMBERED_SECONDS:
            row = await self._store.find_api_key(token.decode("utf-8", "surrogateescape"))
            if row is None or row.id in self._revoked:  # also while it was read
                self._known.pop(digest, None)
                raise self._refuse(request, "an unknown key", token)
            if len(self._known) >= MOST_REMEMBERED:
                self._known.clear()
            known = self._known[digest] = (_caller(row), now)
        caller = known[0]
        if caller.expires_at is not None and caller.expires_at <= self.now():
            raise self._refuse(request, "an expired key", token)
        return caller

    async def find(self, secret: str) -> Principal | None:
        """Return the holder of this key, or None if the key is unknown, expired or revoked."""
        secret = secret.strip()
        if hmac.compare_digest(sha256(secret.encode("utf-8", "surrogateescape")).digest(), self._admin_digest):
            return ADMIN
        row = await self._store.find_api_key(secret) if secret else None
        return None if row is None or row.id in self._revoked else _caller(row)

    async def find_by_id(self, key_id: str) -> Principal | None:
        """Return the holder of the key with this id, or None if the key is unknown, expired or revoked."""
        for row in await self._store.list_api_keys():
            if row.id == key_id not in self._revoked and (row.expires_at is None or row.expires_at > self.now()):
                return _caller(row)
        return None

    @contextmanager
    def while_valid(self, caller: Principal) -> Iterator[trio.CancelScope]:
        """Run the body of the `with` in a cancel scope that is cancelled when the caller's key expires or is revoked."""
        scope = trio.CancelScope()
        if caller.expires_at is not None:
            scope.deadline = trio.current_time() + max(0.0, caller.expires_at - self.now())
        if caller.key_id in self._revoked:  # after the request was authorised
            scope.cancel()
        open_streams = self._streams.setdefault(caller.key_id, set())
        open_streams.add(scope)
        try:
            with scope:
                yield scope
        finally:
            open_streams.discard(scope)
            if not open_streams:
                self._streams.pop(caller.key_id, None)

    def forget(self, key_id: str) -> bool:
        """Drop a revoked key from the cache, and cancel the streams that it reads. Return False if this was done before."""
        if key_id in self._revoked:
            return False
        self._known = {digest: known for digest, known in self._known.items() if known[0].key_id != key_id}
        self._revoked.add(key_id)
        for scope in self._streams.get(key_id, ()):
            scope.cancel()
        return True

    def _refuse(self, request: Request, why: str, token: bytes = b"") -> ApiError:
        left_out = self._refusals.admit(trio.current_time())
        if left_out is not None:
            client = request.scope.get("client")
            logger.warning(
                "refused a request with %s: peer=%s forwarded_for=%s method=%s path=%s agent=%s%s",
                why,
                client[0] if client else "-",
                _shown(request.header(b"x-forwarded-for")),
                _shown(request.method),
                _shown(request.path),
                _shown(request.header(b"user-agent")),
                f" ({left_out} more refusals were not logged)" if left_out else "",
            )
        return ApiError(
            401,
            f"Incorrect API key provided: {_masked(token)}. The admin key is in the server's configuration or key file; `hermes-trio keys add` makes more keys."
            if token
            else "You didn't provide an API key. Send it in the Authorization header, after the word Bearer, or as x-api-key.",
            code="invalid_api_key",
            headers=((b"www-authenticate", b"Bearer"),),
        )


def no_longer_valid() -> ApiError:
    """Return 401 for a caller whose key or browser session has ended since its request was authorised."""
    return ApiError(
        401,
        "The key or the browser session of this request is no longer valid.",
        code="invalid_api_key",
        headers=((b"www-authenticate", b"Bearer"),),
    )


def _masked(token: bytes) -> str:
    """Return the first letters of a key, so that its owner recognises it."""
    shown = "".join(chr(byte) if 33 <= byte < 127 else "?" for byte in token[:4]) if len(token) > 16 else ""
    return f"{shown}****"


def _caller(row: ApiKey) -> Principal:
    return Principal(
        key_id=row.id,
        name=row.name,
        tenant=row.tenant,
        scopes=frozenset(row.scopes),
        admin=RequiredScope.ADMIN.value in row.scopes,
        expires_at=row.expires_at,
    )


def _shown(text: str | None) -> str:
    """Return client-controlled text in a form that is safe in a log line."""
    if not text:
        return "-"
    return "".join(character if character.isprintable() else "?" for character in text[:200])


def is_loopback(host: str) -> bool:
    """Return whether an address is reachable from this machine only."""
    if host in ("localhost", "ip6-localhost"):
        return True
    try:
        return ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def check_key(key: str) -> str:
    """Return the key, trimmed. Raises `UnsafeKey` if it is too weak."""
    trimmed = key.strip()
    if len(trimmed) < MINIMUM_LENGTH:
        raise UnsafeKey(f"the API key has {len(trimmed)} characters; it must have at least {MINIMUM_LENGTH}")
    if trimmed.lower() in PLACEHOLDERS or len(set(trimmed)) < 4:
        raise UnsafeKey("the API key is a placeholder; make one with `openssl rand -hex 32`")
    if not trimmed.isascii() or not trimmed.isprintable() or " " in trimmed:
        raise UnsafeKey("the API key has white space or characters that a header cannot carry")
    return trimmed


class AdminKey(RedactedStruct, frozen=True):
    """The admin key of a server. `path` is its file, unless it was configured; `made` is true for a new key, which `keep_key` has to write there."""

    hidden: ClassVar[tuple[str, ...]] = ("value",)
    value: str
    path: Path | None = None
    made: bool = False


def admin_key(configured: str, home: Path, hosts: Iterable[str]) -> AdminKey:
    """Return the configured key, else the one in the home directory's key file, else a new one, which `keep_key` writes there once the server
    listens.

    Raises `UnsafeKey` if the key is weak, and if a host is not a loopback address and no key is configured.
    """
    if configured.strip():
        return AdminKey(check_key(configured))
    public = [host for host in hosts if not is_loopback(host)]
    if public:
        raise UnsafeKey(
            f"{', '.join(public)} can be reached from other machines: set API_SERVER_KEY (or server.key) to a key of at least"
            f" {MINIMUM_LENGTH} characters, or bind to 127.0.0.1"
        )
    path = home / KEY_FILE
    try:
        return AdminKey(check_key(path.read_text(encoding="ascii")), path)
    except FileNotFoundError:
        pass
    except UnicodeDecodeError:
        raise UnsafeKey(f"{path} does not contain a key; remove the file, and the next start makes a new one") from None
    return AdminKey(new_key(), path, made=True)


def keep_key(key: AdminKey) -> None:
    """Write a new key to its file, with mode 0600; do nothing for any other key. Raises `OSError`, and `FileExistsError` if another process has written one."""
    if not key.made or key.path is None:
        return
    descriptor = os.open(key.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "w", encoding="ascii") as file:
        file.write(key.value + "\n")
