"""The message gateway: registers every adapter's conversations with the runtime, keeps the adapters running, and handles what they receive.

Entering `open` registers the interfaces (which sweeps their inboxes) and starts the adapters as receivers of the runtime; leaving it stops the
adapters first. Turns, lanes and the outbox belong to the runtime: they continue while an adapter is disconnected.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import trio

from hermes_trio.agent.approvals import Approvals
from hermes_trio.runtime.runtime import Runtime
from hermes_trio.store.records import ApprovalChoice, OutboxRow

from .access import AccessControl
from .adapter_runner import AdapterRunner, receiving
from .addresses import Address
from .commands import Commands
from .contract import Adapter, AdapterState, Incoming, Received, SendResult
from .conversations import ChatInterface
from .core import ConversationEnd, MessagingCore
from .feed import Previews, Prompts
from .inbound import Inbound
from .platforms import Platforms
from .reset_policy import check_reset
from .senders import Senders
from .session_keys import Source


class MessageHub:
    """See the module. It is the `HubPort` of its adapters, and the hooks of the senders."""

    def __init__(
        self,
        runtime: Runtime,
        platforms: Platforms,
        senders: Senders,
        approvals: Approvals | None = None,
        *,
        ends: ConversationEnd | None = None,
    ) -> None:
        for platform in platforms:
            for policy in (platform.settings.reset, *platform.settings.reset_by_chat_type.values()):
                check_reset(policy, platform.name)
        self.runtime = runtime
        self.platforms = platforms
        self.messaging = MessagingCore(runtime, platforms, senders, approvals, ends)
        self.commands = Commands(self.messaging)
        self.access = AccessControl(self.messaging.store)
        self.runners: dict[str, AdapterRunner] = {
            platform.name: AdapterRunner(platform.adapter, runtime.core.clock) for platform in platforms
        }
        self._pipeline = Inbound(self.messaging, self.access, self.commands)
        self._previews = Previews()
        self._prompts = Prompts()
        senders.hooks = self

    @asynccontextmanager
    async def open(self) -> AsyncIterator[MessageHub]:
        """Register and run everything for the body of the `async with`. Leaving it stops receiving, and nothing else."""
        async with AsyncExitStack() as interfaces:
            for platform in self.platforms:
                platform.adapter.gateway = self
                interface = ChatInterface(self.messaging, platform, self._previews, self._prompts)
                self.messaging.inboxes[platform.name] = await interfaces.enter_async_context(
                    self.runtime.delivering(interface)
                )
            interfaces.enter_context(self.messaging.remote_lanes.answering())
            ready = trio.Event()
            async with receiving(self.runtime, "gateway", lambda: self._receive(ready)):
                await ready.wait()
                yield self

    async def _receive(self, ready: trio.Event) -> None:
        """Run the receiver: a scope for small tasks, and in it one `AdapterRunner` for each adapter."""
        try:
            async with trio.open_nursery() as nursery:
                self.messaging.scope = nursery
                ready.set()
                for one in self.runners.values():
                    nursery.start_soon(
                        one.run_alone, self.runtime.core.membership, name=f"adapter {one.adapter.platform}"
                    )
                await trio.sleep_forever()
        finally:
            self.messaging.scope = None

    def health(self) -> dict[str, Any]:
        """Return the state of every adapter, for `/health/detailed`. One that is not connected makes it `degraded`."""
        platforms = {name: one.health() for name, one in self.runners.items()}
        sending = self.messaging.senders.statistics()
        for name, line in platforms.items():
            line["outbox"] = sending.get(name)
        fine = (AdapterState.CONNECTED, AdapterState.STANDBY)
        well = all(one.state in fine for one in self.runners.values())
        return {"status": "ok" if well else "degraded", "platforms": platforms}

    # -- for the adapters ------------------------------------------------------------------------------------------------------------

    async def receive(self, adapter: Adapter, incoming: Incoming) -> Received:
        """See `HubPort`."""
        return await self._pipeline.receive(adapter, incoming)

    async def approval_clicked(self, adapter: Adapter, source: Source, approval_id: str, choice: ApprovalChoice) -> str:
        """See `HubPort`."""
        return await self._pipeline.clicked(adapter, source, approval_id, choice)

    async def get_cursor(self, adapter: Adapter) -> str | None:
        """See `HubPort`."""
        return await self.messaging.store.get_cursor(adapter.platform)

    async def set_cursor(self, adapter: Adapter, value: str) -> None:
        """See `HubPort`."""
        await self.messaging.store.set_cursor(adapter.platform, value)

    # -- for the senders -------------------------------------------------------------------------------------------------------------

    async def before_send(self, row: OutboxRow) -> str:
        """Wait, before a reply that replaces a preview, until no edit of the preview is in progress."""
        turn_id = str(row.payload.get("preview", ""))
        return await self._previews.message_of(turn_id) if turn_id else ""

    def after_send(self, row: OutboxRow, result: SendResult) -> None:
        """Record where a question was sent, or withdraw it if it could not be sent whole; forget the preview that this reply replaced."""
        turn_id = str(row.payload.get("preview", ""))
        if turn_id:
            self._previews.forget(turn_id)
        approval_id = str(row.payload.get("approval_id", ""))
        question = approval_id or str(row.payload.get("question", ""))
        if not question or (result.success and not approval_id):
            return
        if result.success:
            address = Address(row.platform, str(row.target.get("chat_id", "")), str(row.target.get("thread_id", "")))
            self._prompts.sent(approval_id, address, result.message_id, row.text)
        elif self.messaging.approvals is not None:
            self.messaging.spawn(
                f"withdrawing approval {question}",
                self.messaging.approvals.withdraw,
                question,
                unsent_question(row, result),
            )


def unsent_question(row: OutboxRow, result: SendResult) -> str:
    """Return why a question was withdrawn, for the agent: no person refused it, no person has seen it."""
    why = result.error or "it gave no reason"
    return f"the question could not be sent to {row.platform}, and no user was asked ({why})"
