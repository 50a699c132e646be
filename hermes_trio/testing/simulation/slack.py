"""Slack in a world: envelopes over Socket Mode, which are repeated until they are acknowledged, and the Web API."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Final

import trio

from hermes_trio.net.websocket import WebSocket
from hermes_trio.testing.platforms.server import FakeRequest, LoopbackServer
from hermes_trio.testing.platforms.slack import FakeSlack
from hermes_trio.testing.platforms.slack_delivery import SlackDelivery

from .platform import CRON_CHAT, FIRST_PERSON, GROUP_CHAT, WEBHOOK_CHAT, ShownMessage, SimulatedPlatform
from .program import PEOPLE
from .script import marks

TOKEN: Final = "xoxb-simulated-token"
APP_TOKEN: Final = "xapp-simulated-token"

RETRY_SECONDS: Final = 20.0
"""Seconds until an envelope that was not acknowledged is repeated, three times at most."""

REFUSED_SECONDS: Final = 30.0
"""The duration of the fault `refuse`."""


class SimulatedSlack(SimulatedPlatform[FakeSlack]):
    """See the module. A message is confirmed when its envelope is acknowledged; Slack gives up what is never acknowledged."""

    name = "slack"

    def __init__(self, note: Any, nursery: trio.Nursery) -> None:
        super().__init__(note, nursery)
        self.fake = FakeSlack(
            token=TOKEN, app_token=APP_TOKEN, signing_secret="", ack_timeout=3.0, retry_delay=RETRY_SECONDS
        )
        for chat in (GROUP_CHAT, WEBHOOK_CHAT, CRON_CHAT):
            self.fake.add_channel(f"C{chat}")
        for person in range(PEOPLE):
            self.fake._dm(f"U{FIRST_PERSON + person}")
        self._given: list[tuple[str, list[SlackDelivery]]] = []

    def settings(self) -> dict[str, Any]:
        return {
            "token": TOKEN,
            "app_token": APP_TOKEN,
            "base_url": self.url,
            "allow_all": True,
            "home": {"chat_id": f"C{CRON_CHAT}"},
        }

    def server(self) -> LoopbackServer:
        return LoopbackServer(80, self.fake.handle, self._serve, host="slack.localhost")

    def address(self, chat: int) -> str:
        return f"C{chat}" if chat in (GROUP_CHAT, WEBHOOK_CHAT, CRON_CHAT) else f"D{chat}"

    def chat_of(self, address: str) -> int:
        return int(address[1:])

    def say(self, person: int, text: str, *, group: bool = False, mention: bool = True) -> None:
        before = len(self.fake.deliveries.added)
        self.fake.say(
            text,
            user=f"U{FIRST_PERSON + person}",
            channel=f"C{GROUP_CHAT}" if group else None,
            mention=group and mention,
        )
        self._given.append((text, self.fake.deliveries.added[before:]))

    def threads(self) -> dict[str, str]:
        """Return the thread of each message of the group, by its marks."""
        written = self.fake._channels[f"C{GROUP_CHAT}"].messages.items()
        return {
            mark: str(one.get("thread_ts") or ts)
            for ts, one in written
            if one.get("user") != self.fake.bot_user_id
            for mark in marks(one["text"])
        }

    def attach(self, person: int, name: str) -> str:
        before = len(self.fake.deliveries.added)
        self.fake.share({"id": name, "name": name, "title": name}, user=f"U{FIRST_PERSON + person}")
        text = f"[attached: {name}]"
        self._given.append((text, self.fake.deliveries.added[before:]))
        return text

    def command(self, person: int, text: str, *, group: bool = False, typed: bool = True) -> None:
        if typed:
            self.say(person, text.replace("/", "!", 1), group=group)
            return
        self.fake.use_command(
            "/hermes",
            text.removeprefix("/"),
            user=f"U{FIRST_PERSON + person}",
            channel=f"C{GROUP_CHAT}" if group else None,
        )

    def press(self, message: ShownMessage, label: str, person: int) -> None:
        self.fake.click(message.raw, label, user=f"U{FIRST_PERSON + person}")

    def confirmed(self, texts: Sequence[str]) -> set[str]:
        # A mention in a channel is two envelopes about one message.
        return {text for text, sent in self._given if text in texts and any(one.settled.is_set() for one in sent)}

    def forbid(self, address: str, forbidden: bool) -> None:
        self.fake._channels[address].archived = forbidden

    def is_connection(self, where: str) -> bool:
        return where == "socket"

    def connection_fault(self, how: str) -> None:
        self._nursery.start_soon(self._disturb, how)

    async def _disturb(self, how: str) -> None:
        socket = self.fake.socket
        match how:
            case "drop":
                await socket.drop_connections()
            case "disconnect":
                await socket.request_disconnect()
            case "close":
                await socket.request_disconnect(close=True)
            case "repeat":
                # An event whose acknowledgement was lost on its way is delivered again.
                events = [one for one in self.fake.deliveries.added if one.kind == "events_api"]
                for one in events[-2:]:
                    self.fake.deliveries.add(one.kind, one.payload)
            case "refuse":
                socket.refuse_connections = True
                await socket.drop_connections()
                await trio.sleep(REFUSED_SECONDS)
                socket.refuse_connections = False
            case _:
                raise ValueError(f"Socket Mode has no fault {how!r}")

    def heal(self) -> None:
        super().heal()
        self.fake.socket.refuse_connections = False

    async def live(self) -> None:
        """Deliver what people do."""
        await self.fake.deliveries.run()

    def read_place(self, raw: Any) -> object:
        return raw.channel

    def read_id(self, raw: Any) -> Any:
        return raw.ts

    def read_text(self, raw: Any) -> str:
        return raw.text

    def read_buttons(self, raw: Any) -> list[str]:
        return [button["text"]["text"] for button in raw.buttons]

    async def _serve(self, request: FakeRequest, socket: WebSocket) -> None:
        await self.read_alone(partial(self.fake.socket.serve, request, socket))
