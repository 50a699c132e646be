"""A fingerprint of the configuration, by which nodes of one store see that they were configured differently.

It is written to the store and shown in the health report, so nothing that may be a secret goes into it: of such a setting only whether it is set.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from hashlib import blake2b
from typing import Any, Final, cast
from urllib.parse import urlsplit

import msgspec

from hermes_trio.adapters.assembly import CHAT_PLATFORMS
from hermes_trio.base.redaction import HIDDEN, hide_credentials
from hermes_trio.config import Config

SHARED_SECTIONS: Final = (
    "agent", "approvals", "cron", "limits", "mcp", "models", "plugins", "retention", "tools", "webhook", *CHAT_PLATFORMS,
)  # fmt: skip
"""The sections of the configuration that all nodes of a store should have in common. The others are of one host or process."""

_SECRET: Final = re.compile(
    r"(^|[_-])(secrets?|tokens?|passwords?|passphrase|keys?|credentials?|authorization|cookies?|proxy|dsn)$",
    re.IGNORECASE,
)
_SECRET_TABLES: Final = frozenset({"args", "env", "environment", "headers"})
"""Tables and lists whose texts may be secrets, whatever their names."""


def configuration_fingerprint(config: Config, secret: bytes) -> str:
    """Return a fingerprint of `shared_settings`, under the secret of the store, so that it cannot be compared with guesses."""
    shown = msgspec.json.encode(shared_settings(config), order="deterministic")
    return blake2b(shown, key=secret, digest_size=8).hexdigest()


def shared_settings(config: Config) -> dict[str, Any]:
    """Return the settings that all nodes should have in common, without secrets. Adapters of other packages are their keys, numbers and truth values."""
    shown = {name: _without_secrets(msgspec.to_builtins(getattr(config, name))) for name in SHARED_SECTIONS}
    shown["plugins"]["adapters"] = _without_texts(config.plugins.adapters)
    shown["store"] = {"lease_seconds": config.store.lease_seconds}
    # A variable enables a platform that has no table.
    shown["enabled"] = [name for name, variable in CHAT_PLATFORMS.items() if config.environment.get(variable)]
    return shown


def _without_secrets(value: Any, name: str = "") -> Any:
    if _SECRET.search(name) or name in _SECRET_TABLES:
        return _without_texts(value)
    if isinstance(value, dict):
        return {key: _without_secrets(inner, key) for key, inner in cast("Mapping[str, Any]", value).items()}
    if isinstance(value, list | tuple):
        return [_without_secrets(inner) for inner in cast("list[Any]", value)]
    return _without_credentials(value) if isinstance(value, str) else value


def _without_texts(value: Any) -> Any:
    """Replace each text by whether there is one."""
    if isinstance(value, Mapping):
        return {key: _without_texts(inner) for key, inner in cast("Mapping[str, Any]", value).items()}
    if isinstance(value, list | tuple):
        return [_without_texts(inner) for inner in cast("list[Any]", value)]
    return (HIDDEN if value else "") if isinstance(value, str) else value


def _without_credentials(text: str) -> str:
    """Reduce an address to its scheme and host: its user, path and query may hold keys. Remove what looks like a key from other texts."""
    if "://" not in text:
        return hide_credentials(text)
    try:
        parts = urlsplit(text)
        return f"{parts.scheme}://{parts.hostname or ''}:{parts.port or ''}"
    except ValueError:
        return HIDDEN
