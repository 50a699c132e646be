"""All delivering adapters of a configuration, put together: what the wiring opens beside the HTTP front end.

Give `stage` to the Runtime (the senders outlive every turn), then open the assembly inside of it with the broker of approvals.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import attrs

from hermes_trio.agent.approvals import Approvals
from hermes_trio.runtime.runtime import Runtime, Stage

from .cron import CronScheduler
from .directory import Directory, Member
from .gateway import MessageGateway
from .github import API, GithubComments
from .outbox import Senders
from .settings import CronSettings, OutboxSettings, PlatformSettings, WebhookSettings
from .webhook import WebhookFrontDoor

__all__ = ["AdapterAssembly", "OpenAdapters", "github_member"]


@attrs.frozen(kw_only=True)
class OpenAdapters:
    """What is running. `gateway.health()` is for the health report, `webhook.handle` for `POST /webhooks/{route}`, `cron` for `/api/jobs`."""

    gateway: MessageGateway
    webhook: WebhookFrontDoor | None
    cron: CronScheduler | None


def github_member(environment: Mapping[str, str]) -> Member | None:
    """The place for comments on GitHub, where a token for it is set."""
    token = environment.get("GITHUB_TOKEN") or environment.get("GH_TOKEN")
    if not token:
        return None
    base_url = environment.get("GITHUB_API_URL") or API
    return Member(GithubComments(token, base_url=base_url), PlatformSettings(unknown_dm="ignore"))


class AdapterAssembly:
    """See the module. Made once for a start; raises `SettingsError` for settings that cannot be used when it is opened."""

    def __init__(
        self,
        members: Iterable[Member],
        *,
        webhook: WebhookSettings | None = None,
        cron: CronSettings | None = None,
        outbox: OutboxSettings | None = None,
        host: str | None = None,
        environment: Mapping[str, str] | None = None,
        home: Path | None = None,
    ) -> None:
        self.directory = Directory(members)
        self.senders = Senders([member.adapter for member in self.directory.members], outbox)
        self._webhook = webhook
        self._cron = cron
        self._host = host
        self._environment: Mapping[str, str] = environment or {}
        self._home = home

    @property
    def stage(self) -> Stage:
        """The senders, as a stage of the runtime."""
        return self.senders.stage

    @asynccontextmanager
    async def open(self, runtime: Runtime, approvals: Approvals | None) -> AsyncIterator[OpenAdapters]:
        """Everything is running for the body of the `async with`; leaving it stops what brings work in, and nothing else."""
        gateway = MessageGateway(runtime, self.directory, self.senders, approvals)
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(gateway.open())
            webhook: WebhookFrontDoor | None = None
            if self._webhook is not None and self._webhook.enabled and self._webhook.routes:
                webhook = WebhookFrontDoor(
                    gateway.desk, self._webhook, host=self._host, environment=self._environment, home=self._home
                )
                await stack.enter_async_context(webhook.open())
            cron: CronScheduler | None = None
            if self._cron is not None and self._cron.enabled:
                cron = CronScheduler(gateway.desk, self._cron)
                await stack.enter_async_context(cron.open())
            yield OpenAdapters(gateway=gateway, webhook=webhook, cron=cron)
