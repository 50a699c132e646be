"""Webhook requests as senders make them, for tests."""

from __future__ import annotations

import hashlib
import hmac
import itertools
from typing import Any

import msgspec

SECRET = "a secret that only the sender knows"

_numbers = itertools.count(1)


def signed(payload: Any, *, secret: str = SECRET, event: str = "push", delivery: str = "", **headers: str):
    """Headers and body of a GitHub-style delivery."""
    body = payload if isinstance(payload, bytes) else msgspec.json.encode(payload)
    digest = hmac.digest(secret.encode(), body, hashlib.sha256).hex()
    names = {
        "Content-Type": "application/json",
        "X-Hub-Signature-256": f"sha256={digest}",
        "X-GitHub-Event": event,
        "X-GitHub-Delivery": delivery or f"d-{next(_numbers)}",
        **{name.replace("_", "-"): value for name, value in headers.items()},
    }
    return list(names.items()), body
