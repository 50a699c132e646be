"""Verifies that a webhook request was sent by a holder of the route's secret.

A route names its scheme; without one, the headers choose among the schemes that the secret fits, and the first scheme found decides: a request with
an invalid signature of one scheme is not tried under another. A public key (`whpk_`) verifies Ed25519 signatures and is never a shared secret.
Comparisons take constant time over bytes. Reasons name headers and what was wrong with them, never a secret or an expected signature.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import Enum
from typing import Final, TypeAlias

import msgspec

INSECURE_NO_AUTH: Final = "INSECURE_NO_AUTH"
"""A secret that disables authentication; only a server on a loopback address accepts it."""

REPLAY_WINDOW: Final = 300
"""Seconds that a signed timestamp may differ from now, in both directions, inclusive."""

MAX_SIGNATURES: Final = 16
"""Entries read from a list of signatures: rotation needs two, a flood of them only costs time."""

LOOPBACK_HOSTS: Final = frozenset({"127.0.0.1", "localhost", "::1", "[::1]", "ip6-localhost", "ip6-loopback"})


class Scheme(Enum):
    """How a request is signed, in the order in which the headers are searched.

    The schemes that senders of the reference system use come first, so that whatever it accepted is decided the same.
    """

    SVIX = "svix"
    GITHUB = "github"
    GITLAB = "gitlab"
    GENERIC_V2 = "generic_v2"
    GENERIC_V1 = "generic_v1"
    STANDARD = "standard"
    STRIPE = "stripe"


_HEADERS: Final[Mapping[Scheme, tuple[str, ...]]] = {
    Scheme.SVIX: ("svix-id", "svix-timestamp", "svix-signature"),
    Scheme.GITHUB: ("x-hub-signature-256",),
    Scheme.GITLAB: ("x-gitlab-token",),
    Scheme.GENERIC_V2: ("x-webhook-signature-v2",),
    Scheme.GENERIC_V1: ("x-webhook-signature",),
    Scheme.STANDARD: ("webhook-id", "webhook-timestamp", "webhook-signature"),
    Scheme.STRIPE: ("stripe-signature",),
}
PUBLIC_KEY: Final = "whpk_"
SIGNED_MESSAGES: Final = frozenset({Scheme.SVIX, Scheme.STANDARD})
"""The schemes that sign the delivery's id, and that know public keys."""

_ALL_HEADERS: Final = frozenset(name for names in _HEADERS.values() for name in names) | {"x-webhook-timestamp"}


class Verified(msgspec.Struct, frozen=True):
    """The sender knew the secret. `replay_protected` says that the signature covers a fresh timestamp."""

    scheme: Scheme
    replay_protected: bool


class Rejected(msgspec.Struct, frozen=True):
    """The request is not authentic, for `reason`; `scheme` is None if no signature was found."""

    reason: str
    scheme: Scheme | None = None


class _NotAuthentic(Exception):
    """Carries the reason out of a scheme's check."""


_Headers: TypeAlias = Mapping[str, bytes]


def insecure_allowed(secret: str | None, host: str | None) -> bool:
    """Return whether requests may go unauthenticated: the secret asks for it and the server is reachable from here only.

    An unset host means every interface, so it counts as public.
    """
    return secret == INSECURE_NO_AUTH and host is not None and host.strip().lower() in LOOPBACK_HOSTS


def secret_problem(route: str, secret: str | None, host: str | None) -> str | None:
    """Return why this route must not be served with this secret on this host, or None if it may."""
    if not secret:
        return f"webhook route {route!r} has no secret: set its secret, or one for all routes"
    if secret == INSECURE_NO_AUTH and not insecure_allowed(secret, host):
        where = f"host {host!r}" if host else "all interfaces"
        allowed = "127.0.0.1, localhost or ::1"
        return f"webhook route {route!r}: {INSECURE_NO_AUTH} is allowed on {allowed} only, not on {where}"
    for prefix in ("whsec_", PUBLIC_KEY):
        if secret.startswith(prefix) and _decoded(secret.removeprefix(prefix)) is None:
            return f"webhook route {route!r}: what follows {prefix!r} in the secret is not base64"
    return None


def scheme_problem(route: str, scheme: Scheme | None, secrets: Sequence[str]) -> str | None:
    """Return why this route's secrets cannot verify its scheme, or None if they can."""
    if scheme is None or scheme in SIGNED_MESSAGES or not any(secret.startswith(PUBLIC_KEY) for secret in secrets):
        return None
    fitting = " or ".join(sorted(one.value for one in SIGNED_MESSAGES))
    return (
        f"webhook route {route!r}: a public key ({PUBLIC_KEY}…) verifies signatures of {fitting} only, not of"
        f" {scheme.value}; set the secret that the sender shares with you, or another scheme"
    )


def verify(
    headers: Iterable[tuple[str, str]],
    secrets: str | Sequence[str],
    body: bytes,
    now: float,
    *,
    scheme: Scheme | None = None,
) -> Verified | Rejected:
    """Check the one signature that the headers carry, by the pinned `scheme` if there is one.

    Several secrets are alternatives, for rotation. `now` is Unix time. Never raises for anything that a sender can
    send; `INSECURE_NO_AUTH` is not a secret here and is rejected, see `insecure_allowed`.
    """
    keys = [secrets] if isinstance(secrets, str) else list(secrets)
    if not any(keys):
        return Rejected("the route has no secret")
    if INSECURE_NO_AUTH in keys:
        return Rejected(f"{INSECURE_NO_AUTH} is not a secret that can be verified against")
    found: dict[str, bytes] = {}
    for name, value in headers:
        lowered = name.lower()
        if lowered in _ALL_HEADERS:
            if lowered in found:
                return Rejected(f"the header {name} is given more than once")
            found[lowered] = _raw(value)
    for candidate in Scheme if scheme is None else (scheme,):
        if not any(name in found for name in _HEADERS[candidate]):
            continue
        usable = [key for key in keys if key and (candidate in SIGNED_MESSAGES or not key.startswith(PUBLIC_KEY))]
        if not usable:
            return Rejected(
                f"the route has only public keys, which do not verify {candidate.value} requests", candidate
            )
        try:
            _CHECKS[candidate](found, usable, body, now)
        except _NotAuthentic as reason:
            return Rejected(str(reason), candidate)
        return Verified(candidate, candidate not in (Scheme.GITHUB, Scheme.GITLAB, Scheme.GENERIC_V1))
    if scheme is not None:
        return Rejected(f"no {scheme.value} signature was found, and the route accepts no other scheme")
    return Rejected("no signature header was found")


# The schemes


def _github(headers: _Headers, secrets: Sequence[str], body: bytes, now: float) -> None:
    given = headers["x-hub-signature-256"]
    _require_match([b"sha256=" + _hex(secret.encode(), body) for secret in secrets], [given], "X-Hub-Signature-256")


def _gitlab(headers: _Headers, secrets: Sequence[str], body: bytes, now: float) -> None:
    _require_match([secret.encode() for secret in secrets], [headers["x-gitlab-token"]], "X-Gitlab-Token")


def _generic_v1(headers: _Headers, secrets: Sequence[str], body: bytes, now: float) -> None:
    given = headers["x-webhook-signature"]
    _require_match([_hex(secret.encode(), body) for secret in secrets], [given], "X-Webhook-Signature")


def _generic_v2(headers: _Headers, secrets: Sequence[str], body: bytes, now: float) -> None:
    timestamp = _fresh(headers.get("x-webhook-timestamp"), "X-Webhook-Timestamp", now)
    signed = timestamp + b"." + body
    given = headers["x-webhook-signature-v2"]
    _require_match([_hex(secret.encode(), signed) for secret in secrets], [given], "X-Webhook-Signature-V2")


def _stripe(headers: _Headers, secrets: Sequence[str], body: bytes, now: float) -> None:
    pairs = [entry.strip().partition(b"=") for entry in headers["stripe-signature"].split(b",")]
    timestamps = [value for name, _, value in pairs if name == b"t"]
    if len(timestamps) != 1:
        raise _NotAuthentic(f"the header Stripe-Signature has {len(timestamps)} timestamps (t=) instead of one")
    timestamp = _fresh(timestamps[0], "Stripe-Signature", now)
    signatures = [value for name, _, value in pairs if name == b"v1"]
    signed = timestamp + b"." + body
    _require_match([_hex(secret.encode(), signed) for secret in secrets], signatures, "Stripe-Signature")


def _svix(headers: _Headers, secrets: Sequence[str], body: bytes, now: float) -> None:
    _signed_message("svix", headers, secrets, body, now)


def _standard(headers: _Headers, secrets: Sequence[str], body: bytes, now: float) -> None:
    _signed_message("webhook", headers, secrets, body, now)


def _signed_message(family: str, headers: _Headers, secrets: Sequence[str], body: bytes, now: float) -> None:
    """Svix and Standard Webhooks: `v1` is HMAC, and with a `whpk_` public key `v1a` is Ed25519."""
    message_id = headers.get(f"{family}-id")
    listed = headers.get(f"{family}-signature")
    if not message_id:
        raise _NotAuthentic(f"the header {family}-id is missing")
    if not listed:
        raise _NotAuthentic(f"the header {family}-signature is missing")
    timestamp = _fresh(headers.get(f"{family}-timestamp"), f"{family}-timestamp", now)
    signed = message_id + b"." + timestamp + b"." + body
    entries = [entry.partition(b",") for entry in listed.split()[:MAX_SIGNATURES]]
    public = [secret for secret in secrets if secret.startswith(PUBLIC_KEY)]
    shared = [secret for secret in secrets if not secret.startswith(PUBLIC_KEY)]
    asymmetric = [value for version, _, value in entries if version == b"v1a"]
    if any(_ed25519(key, value, signed) for key in public for value in asymmetric):
        return
    expected = [base64.b64encode(hmac.digest(_shared_key(secret), signed, hashlib.sha256)) for secret in shared]
    _require_match(expected, [value for version, _, value in entries if version == b"v1"], f"{family}-signature")


_CHECKS: Final[Mapping[Scheme, Callable[[_Headers, Sequence[str], bytes, float], None]]] = {
    Scheme.SVIX: _svix,
    Scheme.GITHUB: _github,
    Scheme.GITLAB: _gitlab,
    Scheme.GENERIC_V2: _generic_v2,
    Scheme.GENERIC_V1: _generic_v1,
    Scheme.STANDARD: _standard,
    Scheme.STRIPE: _stripe,
}


# Bytes


def _raw(value: str) -> bytes:
    """Return the bytes of a header value; servers hand them over decoded as Latin-1."""
    try:
        return value.encode("latin-1")
    except UnicodeEncodeError:
        return value.encode("utf-8", "surrogatepass")


def _hex(key: bytes, message: bytes) -> bytes:
    return hmac.digest(key, message, hashlib.sha256).hex().encode()


def _shared_key(secret: str) -> bytes:
    if not secret.startswith("whsec_"):
        return secret.encode()
    key = _decoded(secret.removeprefix("whsec_"))
    if key is None:
        raise _NotAuthentic("the route's secret starts with 'whsec_' but does not continue with base64")
    return key


def _decoded(text: str) -> bytes | None:
    try:
        return base64.b64decode(text + "=" * (-len(text) % 4), validate=True)
    except (binascii.Error, ValueError):
        return None


def _ed25519(secret: str, signature: bytes, signed: bytes) -> bool:
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    key = _decoded(secret.removeprefix(PUBLIC_KEY))
    given = _decoded(signature.decode("latin-1"))
    if key is None or given is None:
        return False
    try:
        Ed25519PublicKey.from_public_bytes(key).verify(given, signed)
    except (InvalidSignature, ValueError):
        return False
    return True


def _fresh(value: bytes | None, header: str, now: float) -> bytes:
    if not value:
        raise _NotAuthentic(f"the header {header} is missing")
    if not value.isdigit() or len(value) > 12:
        raise _NotAuthentic(f"the timestamp in {header} is not a number of seconds")
    age = now - int(value)
    if abs(age) > REPLAY_WINDOW:
        direction = "old" if age > 0 else "in the future"
        raise _NotAuthentic(f"the timestamp in {header} is more than {REPLAY_WINDOW} s {direction}")
    return value


def _require_match(expected: Sequence[bytes], given: Sequence[bytes], header: str) -> None:
    # Every pair is compared, so that the time taken does not tell which one was close.
    matches = [hmac.compare_digest(one, other) for one in expected for other in given[:MAX_SIGNATURES]]
    if not any(matches):
        raise _NotAuthentic(f"the signature in {header} does not match the body")
