"""Deliberate defects on the chat platforms, in groups, with several devices and in delegation: the simulator must find each in worlds with that platform."""

from __future__ import annotations

from collections.abc import Sequence
from contextvars import copy_context
from typing import Any

import msgspec
import trio

from hermes_trio.adapters.discord import adapter as discord_adapter
from hermes_trio.adapters.discord.gateway import GatewaySession
from hermes_trio.adapters.slack import adapter as slack_adapter
from hermes_trio.adapters.slack.adapter import SlackAdapter
from hermes_trio.adapters.slack.socket import Envelope
from hermes_trio.adapters.telegram import adapter as telegram_adapter
from hermes_trio.adapters.web import adapter as web_adapter
from hermes_trio.messaging.commands import Commands
from hermes_trio.messaging.contract import Incoming
from hermes_trio.messaging.inbound import Inbound
from hermes_trio.runtime import turn_lifecycle
from hermes_trio.tools import registry
from hermes_trio.tools.delegate import Delegation, _Batch
from hermes_trio.tools.mcp import link as mcp_link

from .mutants import Patch

__all__ = ["CHAT_MUTANTS"]


def _expects_everything(real: Any) -> Any:
    """The sequence number of an event is not compared with those of earlier ones."""

    def is_expected(self: GatewaySession, sequence: int) -> bool:
        return True

    return is_expected


def _begins_anew(real: Any) -> Any:
    """An adapter that is started again begins a new session."""

    def open_discord_gateway(client: Any, session: Any, **named: Any) -> Any:
        return real(client, None, **named)

    return open_discord_gateway


def _without_identity(real: Any) -> Any:
    def incoming_of(*args: Any, **named: Any) -> Incoming | None:
        incoming = real(*args, **named)
        return None if incoming is None else msgspec.structs.replace(incoming, event_id="")

    return incoming_of


def _identified_by_its_second(real: Any) -> Any:
    """Two messages of one chat within a second are taken for one."""

    def incoming_of(*args: Any, **named: Any) -> Incoming | None:
        incoming = real(*args, **named)
        if incoming is None:
            return None
        return msgspec.structs.replace(incoming, event_id=f"{incoming.source.chat_id}/{int(trio.current_time())}")

    return incoming_of


def _lets_everybody_answer(real: Any) -> Any:
    def limits(self: Commands, source: Any) -> None:
        return None

    return limits


def _feels_addressed(real: Any) -> Any:
    async def receive(self: Inbound, adapter: Any, incoming: Incoming) -> Any:
        return await real(self, adapter, msgspec.structs.replace(incoming, addressed=True))

    return receive


def _acknowledges_at_once(real: Any) -> Any:
    async def take(self: SlackAdapter, envelope: Envelope) -> None:
        await envelope.acknowledge()
        await real(self, envelope)

    return take


def _runs_beside_its_owner(real: Any) -> Any:
    """Children run in a task of their own, which the stop of their parent does not reach."""

    async def run(self: _Batch, run_child: Any) -> None:
        over = trio.Event()

        async def live() -> None:
            try:
                await real(self, run_child)
            except Exception:
                pass
            finally:
                over.set()

        trio.lowlevel.spawn_system_task(live, context=copy_context())
        await over.wait()

    return run


def _stops_nothing(real: Any) -> Any:
    async def stop_orphans(core: Any, session_id: str) -> None:
        await trio.lowlevel.checkpoint()

    return stop_orphans


def _refuses_no_batch(real: Any) -> Any:
    def refusal(self: Delegation, batch: Sequence[Any], depth: int) -> str:
        return real(self, batch[:1], depth)

    return refusal


def _refuses_no_depth(real: Any) -> Any:
    def refusal(self: Delegation, batch: Sequence[Any], depth: int) -> str:
        return real(self, batch, 0)

    return refusal


def _message_without_identity(real: Any) -> Any:
    def incoming(**fields: Any) -> Incoming:
        return real(**{**fields, "event_id": ""})

    return incoming


def _owned_by_all(real: Any) -> Any:
    def owner(caller: Any) -> str:
        return "everybody"

    return owner


def _remembers_the_first_result(real: Any) -> Any:
    """Every call of a tool of an MCP server gets the result of the first one."""
    first: list[str] = []

    def result_of(result: Any) -> str:
        first.append(real(result))
        return first[0]

    return result_of


CHAT_MUTANTS: dict[str, tuple[str, str, tuple[Patch, ...]]] = {
    "a Discord event that is replayed after RESUME is handled twice": (
        "2 acknowledged",
        "discord",
        ((GatewaySession, "is_expected", _expects_everything), (discord_adapter, "incoming_of", _without_identity)),
    ),
    "a Discord event that could not be stored is not asked for again": (
        "2 acknowledged",
        "discord",
        ((discord_adapter, "open_discord_gateway", _begins_anew),),
    ),
    "a Slack envelope is acknowledged before it is stored": (
        "2 acknowledged",
        "slack",
        ((SlackAdapter, "_take", _acknowledges_at_once),),
    ),
    "a Slack event that is delivered again is handled twice": (
        "2 acknowledged",
        "slack",
        ((slack_adapter, "incoming_of", _without_identity),),
    ),
    "a child outlives the stop of its parent": ("7 stops", "telegram", ((_Batch, "run", _runs_beside_its_owner),)),
    "a command of a child outlives the child": (
        "8 calm",
        "telegram",
        ((turn_lifecycle, "_stop_orphans", _stops_nothing),),
    ),
    "a batch has more children than it may": ("9 limits", "telegram", ((Delegation, "_refusal", _refuses_no_batch),)),
    "a child delegates further": (
        "9 limits",
        "telegram",
        ((Delegation, "_refusal", _refuses_no_depth), (registry, "LEAF_FORBIDDEN", lambda real: frozenset[str]())),
    ),
    "a message of the web chat that is sent again is handled twice": (
        "2 acknowledged",
        "telegram",
        ((web_adapter, "Incoming", _message_without_identity),),
    ),
    "pages of the web chat show the conversations of all tenants": (
        "3 isolation",
        "telegram",
        ((web_adapter, "_owner", _owned_by_all),),
    ),
    "a call of an MCP server gets the result of another call": (
        "3 isolation",
        "telegram",
        ((mcp_link, "_result_of", _remembers_the_first_result),),
    ),
    "a bystander of a group answers an approval": (
        "3 isolation",
        "discord",
        ((Commands, "_limits", _lets_everybody_answer),),
    ),
    "what people of a group say to each other is answered": (
        "3 isolation",
        "telegram",
        ((Inbound, "receive", _feels_addressed),),
    ),
    "one of two messages from two devices of a person is taken for a repetition": (
        "2 acknowledged",
        "telegram",
        ((telegram_adapter, "incoming_of", _identified_by_its_second),),
    ),
}
"""By the defect: the invariant that it must violate, the platform of the worlds, and the patches."""
