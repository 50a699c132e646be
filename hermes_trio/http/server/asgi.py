"""The ASGI 3 types of the serving layer.

Messages and scopes are plain dictionaries on the wire between server and application, so they are typed as `Any`; code that
reads a field converts it at once.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias

Scope: TypeAlias = dict[str, Any]
Message: TypeAlias = dict[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[Message]]
Send: TypeAlias = Callable[[Message], Awaitable[None]]
ASGIApp: TypeAlias = Callable[[Scope, Receive, Send], Awaitable[None]]

HeaderPairs: TypeAlias = list[tuple[bytes, bytes]]
