"""The route table: paths, required scopes, which routes start turns, and which bypass Quart.

Everything that lists routes is made from it: the URL map, the OpenAPI document, `/v1/capabilities`, the metrics' labels, and the test that every
route that starts a turn is stateless.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, Final

import msgspec

from .auth import RequiredScope
from .requests import Handler

_PLACEHOLDER: Final = re.compile(r"\{(\w+)\}")


class RouteParameter(msgspec.Struct, frozen=True):
    """A query parameter or header, for the OpenAPI document."""

    name: str
    description: str = ""
    schema: Mapping[str, Any] = msgspec.field(default_factory=lambda: {"type": "string"})
    where: str = "query"


class Route(msgspec.Struct, frozen=True, kw_only=True):
    """One method of one path. `turns` says that it starts a turn, `direct` that it bypasses Quart.

    A route whose response may be a stream is direct: Quart adds nothing to a stream, and would put a timeout on it.
    """

    name: str
    method: str
    path: str
    handler: Handler
    access: RequiredScope = RequiredScope.ANY
    turns: bool = False
    streams: bool = False
    direct: bool = False
    summary: str = ""
    body: type | None = None
    """The type of the request's body."""
    body_required: bool = True
    answer: Any = None
    """The type of the answer's body; None for something that is not JSON."""
    status: int = 200
    errors: tuple[int, ...] = ()
    parameters: tuple[RouteParameter, ...] = ()
    media: str = "application/json"
    tag: str = ""
    provides: Mapping[str, str] = msgspec.field(default_factory=dict[str, str])
    """Path parameters of other routes that this one's response contains, and where."""
    listed: bool = True
    """Whether the route is in the OpenAPI document."""
    dialect: str = ""
    """The API whose shape its errors have: `anthropic`, or OpenAI's."""

    @property
    def in_front(self) -> bool:
        """Return whether the route bypasses Quart."""
        return self.direct or self.streams

    @property
    def quart_path(self) -> str:
        """Return the path in Quart's notation."""
        return _PLACEHOLDER.sub(r"<\1>", self.path)

    def pattern(self) -> re.Pattern[str] | None:
        """Return the pattern of the path, or None if it is fixed."""
        if "{" not in self.path:
            return None
        return re.compile("".join(["^", _PLACEHOLDER.sub(r"(?P<\1>[^/]+)", self.path), "$"]))


def match_direct(routes: list[Route]) -> Callable[[str, str], tuple[Route, Mapping[str, str]] | None]:
    """Return a matcher for the direct routes: fixed paths first, then the few patterns."""
    fixed = {
        (route.method, route.path): (route, _NOTHING) for route in routes if route.in_front and "{" not in route.path
    }
    patterns = [
        (route.method, pattern, route)
        for route in routes
        if route.in_front and (pattern := route.pattern()) is not None
    ]

    def match(method: str, path: str) -> tuple[Route, Mapping[str, str]] | None:
        found = fixed.get((method, path))
        if found is not None:
            return found
        for wanted, pattern, route in patterns:
            if wanted == method and (matched := pattern.match(path)):
                return route, matched.groupdict()
        return None

    return match


_NOTHING: Final[Mapping[str, str]] = {}
