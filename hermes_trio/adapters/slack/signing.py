"""Verifies Slack's request signature v0."""

from __future__ import annotations

import hashlib
import hmac

# Slack's own advice: an older request may be a replay.
MAX_AGE_SECONDS = 300


def is_signed_by_slack(signing_secret: str, *, timestamp: str, signature: str, body: bytes, now: float) -> bool:
    """Return whether `X-Slack-Signature` and `X-Slack-Request-Timestamp` fit the raw body, within five minutes of `now`."""
    if not signing_secret or not timestamp.isascii() or not timestamp.isdigit():
        return False
    if abs(now - int(timestamp)) > MAX_AGE_SECONDS:
        return False
    digest = hmac.new(signing_secret.encode(), b"v0:" + timestamp.encode() + b":" + body, hashlib.sha256)
    return hmac.compare_digest(f"v0={digest.hexdigest()}".encode(), signature.encode())
