"""A webhook route: its secrets, its filters, its template, and the target of its answers.

Routes are checked when the server starts: a route without a secret, with a wrong filter or an unknown target is refused by its name.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import ClassVar, Final

from hermes_trio.base.settings import SettingsError
from hermes_trio.base.structs import RedactedStruct
from hermes_trio.messaging.addresses import GITHUB_COMMENT, Address, comment_address
from hermes_trio.messaging.one_shot import LOG
from hermes_trio.messaging.platforms import Platforms
from hermes_trio.messaging.settings import RouteSettings, WebhookSettings

from .filters import Filters, WebhookEvent, parse_filters
from .signatures import (
    INSECURE_NO_AUTH,
    Rejected,
    Scheme,
    Verified,
    insecure_allowed,
    scheme_problem,
    secret_problem,
    verify,
)
from .template import render_extra

_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


class UnknownAddress(ValueError):
    """Raised for an event that does not name its place of delivery. The text is for the sender."""


class WebhookRoute(RedactedStruct, frozen=True, kw_only=True):
    """See the module."""

    hidden: ClassVar[tuple[str, ...]] = ("secrets", "platforms")
    name: str
    settings: RouteSettings
    secrets: tuple[str, ...]
    filters: Filters
    insecure: bool
    platforms: Platforms

    def authenticate(self, headers: Iterable[tuple[str, str]], body: bytes, now: float) -> Verified | Rejected | None:
        """Return how a request is signed, or why it is not authentic; None if the route needs no authentication."""
        if self.insecure:
            return None
        return verify(headers, self.secrets, body, now, scheme=self.scheme)

    @property
    def scheme(self) -> Scheme | None:
        """Return the scheme that the route requires, or None."""
        return Scheme(self.settings.scheme) if self.settings.scheme else None

    def wants(self, event: str) -> bool:
        """Return whether the route wants events of this name."""
        return not self.settings.events or event in self.settings.events

    def place(self, event: WebhookEvent) -> Address:
        """Return the address for the answer to this event. Raises `UnknownAddress` if its settings and the event do not give one."""
        deliver = self.settings.deliver
        extra = render_extra(self.settings.deliver_extra, event)
        if deliver == LOG:
            return Address(LOG)
        if deliver == GITHUB_COMMENT:
            try:
                return comment_address(extra.get("repo"), extra.get("pr_number"))
            except ValueError as error:
                raise UnknownAddress(f"deliver_extra: {error}") from None
        chat = extra.get("chat_id")
        if chat:
            thread = extra.get("thread_id") or extra.get("message_thread_id")
            return Address(deliver, str(chat), str(thread) if thread else None)
        home = self.platforms.homes.get(deliver)
        if home is None:
            raise UnknownAddress(f"{deliver} has no home channel, and the route gives no deliver_extra.chat_id")
        return home


def build_routes(
    settings: WebhookSettings, platforms: Platforms, *, host: str | None, environment: Mapping[str, str]
) -> dict[str, WebhookRoute]:
    """Build all routes by name. Raises `SettingsError` for one that must not be served."""
    routes: dict[str, WebhookRoute] = {}
    for name, route in settings.routes.items():
        where = f"webhook.routes.{name}"
        if not _NAME.fullmatch(name):
            raise SettingsError(f"[{where}]: a route's name has letters, digits, '.', '_' and '-', up to 64 of them")
        secrets = _secrets(route.secret, route.secret_env, environment, where) or _secrets(
            settings.secret, settings.secret_env, environment, "webhook"
        )
        for secret in secrets or ("",):
            problem = secret_problem(name, secret, host)
            if problem is not None and route.enabled:
                raise SettingsError(f"[{where}]: {problem}")
        problem = scheme_problem(name, Scheme(route.scheme) if route.scheme else None, secrets)
        if problem is not None:
            raise SettingsError(f"[{where}]: {problem}")
        filters = parse_filters(route.filters, f"{where}.filters")
        if filters.problems:
            raise SettingsError("; ".join(filters.problems))
        _check_place(route, platforms, where)
        insecure = any(insecure_allowed(secret, host) for secret in secrets)
        routes[name] = WebhookRoute(
            name=name,
            settings=route,
            secrets=tuple(secret for secret in secrets if secret != INSECURE_NO_AUTH),
            filters=filters,
            insecure=insecure,
            platforms=platforms,
        )
    return routes


def _secrets(written: str | list[str], variable: str, environment: Mapping[str, str], where: str) -> tuple[str, ...]:
    if variable:
        found = environment.get(variable, "")
        if not found:
            raise SettingsError(f"[{where}]: secret_env names {variable}, which is not set in the environment")
        return (found,)
    return tuple(secret for secret in ([written] if isinstance(written, str) else written) if secret)


def _check_place(route: RouteSettings, platforms: Platforms, where: str) -> None:
    deliver = route.deliver
    if deliver == LOG:
        if route.deliver_only:
            raise SettingsError(f"[{where}]: deliver_only needs a place; set deliver to a platform or {GITHUB_COMMENT}")
        return
    if platforms.find(deliver) is None:
        known = ", ".join(sorted({LOG, GITHUB_COMMENT, *platforms.names}))
        missing = "; it needs a token (GITHUB_TOKEN)" if deliver == GITHUB_COMMENT else ""
        raise SettingsError(f"[{where}]: deliver is {deliver!r}, which is not set up{missing}; known are {known}")
    if deliver == GITHUB_COMMENT:
        for key in ("repo", "pr_number"):
            if key not in route.deliver_extra:
                raise SettingsError(f"[{where}]: deliver_extra.{key} is missing; {GITHUB_COMMENT} needs it")
    elif not route.deliver_extra.get("chat_id") and deliver not in platforms.homes:
        raise SettingsError(
            f"[{where}]: deliver is {deliver!r}, which has no home channel; set deliver_extra.chat_id or [{deliver}.home]"
        )
