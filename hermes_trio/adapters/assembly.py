"""Builds and opens all delivering adapters of a configuration.

Pass `stage` to the Runtime (the senders outlive every turn), then open the assembly inside the runtime with its approvals.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

import msgspec

from hermes_trio.agent.approvals import Approvals
from hermes_trio.base.mounts import Mount
from hermes_trio.base.settings import read_settings
from hermes_trio.messaging.callbacks import CallbackEndpoint
from hermes_trio.messaging.core import ConversationEnd
from hermes_trio.messaging.hub import MessageHub
from hermes_trio.messaging.platforms import Platform, Platforms
from hermes_trio.messaging.senders import Senders
from hermes_trio.messaging.settings import CronSettings, OutboxSettings, PlatformSettings, WebhookSettings
from hermes_trio.plugins import ADAPTERS, build_plugin
from hermes_trio.runtime.runtime import Runtime, Stage

from .cron.scheduler import CronScheduler

if TYPE_CHECKING:
    from .webhook.receiver import WebhookReceiver

# Adapters are imported by name, or where they are built, so that unused ones do not slow down the start.

CHAT_PLATFORMS: Final = {"telegram": "TELEGRAM_BOT_TOKEN", "discord": "DISCORD_BOT_TOKEN", "slack": "SLACK_BOT_TOKEN"}
"""The chat platforms, and the environment variable that enables each without a table in the configuration."""


class OpenAdapters(msgspec.Struct, frozen=True, kw_only=True):
    """The open adapters. The health report uses `hub.health()`, the server `mount` and `mounts`, and `/api/jobs` uses `cron`."""

    hub: MessageHub
    webhook: WebhookReceiver | None
    cron: CronScheduler | None
    endpoints: Mapping[str, CallbackEndpoint]
    """The endpoints that platforms call, by exact path."""
    mounts: Sequence[Mount] = ()
    """The routes of adapters for clients with an API key."""

    def mount(self, path: str) -> CallbackEndpoint | None:
        """Return the endpoint of this path: the webhook routes below `/webhooks/`, or a platform's own endpoint."""
        if self.webhook is not None and path.startswith(self.webhook.prefix):
            return self.webhook
        return self.endpoints.get(path)


def build_chat_platform(name: str, table: Mapping[str, Any], environment: Mapping[str, str]) -> Platform | None:
    """Build one of `CHAT_PLATFORMS` with its own `NAME_platform`, or return None if it is not configured. Raises `SettingsError`."""
    build = getattr(import_module(f".{name}.adapter", __package__), f"{name}_platform")
    return cast("Platform | None", build(table, environment))


def github_platform(environment: Mapping[str, str]) -> Platform | None:
    """Return the platform that posts comments on GitHub, or None if the environment has no token for it."""
    token = environment.get("GITHUB_TOKEN") or environment.get("GH_TOKEN")
    if not token:
        return None
    from .github import API, GithubComments

    base_url = environment.get("GITHUB_API_URL") or API
    return Platform(GithubComments(token, base_url=base_url), PlatformSettings(unknown_dm="ignore"))


class AdapterAssembly:
    """See the module. One assembly is made for each start. Opening it raises `SettingsError` for settings that cannot be used."""

    def __init__(
        self,
        platforms: Iterable[Platform],
        *,
        webhook: WebhookSettings | None = None,
        cron: CronSettings | None = None,
        outbox: OutboxSettings | None = None,
        host: str | None = None,
        environment: Mapping[str, str] | None = None,
        home: Path | None = None,
    ) -> None:
        self.platforms = Platforms(platforms)
        self.senders = Senders([platform.adapter for platform in self.platforms], outbox)
        self._webhook = webhook
        self._cron = cron
        self._host = host
        self._environment: Mapping[str, str] = environment or {}
        self._home = home

    @property
    def stage(self) -> Stage:
        """Return the senders, as a stage of the runtime."""
        return self.senders.stage

    @asynccontextmanager
    async def open(
        self, runtime: Runtime, approvals: Approvals | None, *, ends: ConversationEnd | None = None
    ) -> AsyncIterator[OpenAdapters]:
        """Run the hub, the webhooks and the scheduler for the body of the `async with`. Leaving it stops only these: turns and senders continue.

        `ends` is called when a new conversation replaces an old one; without it, only the approvals of the old one end.
        """
        for platform in self.platforms:
            if hasattr(platform.adapter, "mounts"):
                # These adapters read transcripts from the store; they get events through the hub.
                cast("Any", platform.adapter).store = runtime.store
                feeds = getattr(platform.adapter, "feeds", None)
                if feeds is not None and runtime.core.shared:
                    feeds.nodes, feeds.own = runtime.membership, runtime.store.owner
        gateway = MessageHub(runtime, self.platforms, self.senders, approvals, ends=ends)
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(gateway.open())
            webhook: WebhookReceiver | None = None
            if self._webhook is not None and self._webhook.enabled and self._webhook.routes:
                from .webhook.receiver import WebhookReceiver

                webhook = WebhookReceiver(
                    gateway.messaging, self._webhook, host=self._host, environment=self._environment, home=self._home
                )
                await stack.enter_async_context(webhook.open())
            cron: CronScheduler | None = None
            if self._cron is not None and self._cron.enabled:
                cron = CronScheduler(gateway.messaging, self._cron)
                await stack.enter_async_context(cron.open())
            yield OpenAdapters(
                hub=gateway, webhook=webhook, cron=cron, endpoints=self._endpoints(), mounts=self._mounts()
            )

    def _mounts(self) -> list[Mount]:
        return [mount for platform in self.platforms for mount in getattr(platform.adapter, "mounts", ())]

    def _endpoints(self) -> dict[str, CallbackEndpoint]:
        found: dict[str, CallbackEndpoint] = {}
        for platform in self.platforms:
            path = getattr(platform.adapter, "endpoint", "")
            if path:
                found[path] = cast("CallbackEndpoint", platform.adapter)
        return found


def build_assembly(
    tables: Mapping[str, Mapping[str, Any]],
    *,
    environment: Mapping[str, str],
    host: str | None,
    home: Path | None = None,
    platforms: Iterable[Platform] = (),
) -> AdapterAssembly:
    """Build the assembly of a configuration: `tables` are its sections by name (`Config.tables`), `plugins` those of adapters in other packages.

    `platforms` are added to those of the configuration. Raises `SettingsError`.
    """
    built = list(platforms)
    for name, table in tables.get("plugins", {}).items():
        where = f"plugins.adapters.{name}"
        built.append(build_plugin(ADAPTERS, name, where, (table, environment), Platform))
    for name, variable in CHAT_PLATFORMS.items():
        table = tables.get(name, {})
        if table or environment.get(variable):
            platform = build_chat_platform(name, table, environment)
            if platform is not None:
                built.append(platform)
    comments = github_platform(environment)
    if comments is not None:
        built.append(comments)
    return AdapterAssembly(
        built,
        webhook=read_settings(tables.get("webhook", {}), WebhookSettings, "webhook"),
        cron=read_settings(tables.get("cron", {}), CronSettings, "cron"),
        host=host,
        environment=environment,
        home=home,
    )
