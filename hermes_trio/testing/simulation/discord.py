"""Discord in a world: a Gateway over a WebSocket, whose sessions are resumed, and the REST API."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

import trio

from hermes_trio.net.websocket import WebSocket
from hermes_trio.testing.platforms.discord import FakeDiscord
from hermes_trio.testing.platforms.discord_channels import person as person_named
from hermes_trio.testing.platforms.server import FakeRequest, LoopbackServer

from .node import caller_of
from .platform import CRON_CHAT, FIRST_PERSON, GROUP_CHAT, WEBHOOK_CHAT, ShownMessage, SimulatedPlatform
from .program import PEOPLE

TOKEN: Final = "simulated-discord-token"
HEARTBEAT_SECONDS: Final = 41.25

REACTION_SECONDS: Final = 30.0
"""The duration of the faults `mute` and `refuse`."""

REPLAYED: Final = 4

SESSION_ENDS: Final = frozenset({4007, 4009})
"""The close codes with which the Gateway ends a session."""


class SimulatedDiscord(SimulatedPlatform[FakeDiscord]):
    """See the module. Messages that no session gets are lost, as on Discord.

    A message of a session is confirmed when a heartbeat or RESUME names its sequence number or a later one. As long as the process of the session
    lives and Discord keeps the session, the gateway can get its messages again: then they count as confirmed at the end of the world without that.
    """

    name = "discord"

    def __init__(self, note: Any, nursery: trio.Nursery) -> None:
        super().__init__(note, nursery)
        self.fake = FakeDiscord(
            token=TOKEN,
            heartbeat_interval=HEARTBEAT_SECONDS,
            interaction_deadline=3.0,
            disallowed_intents=0,
            identify_interval=5.0,
        )
        self._chats = {self.fake._dm(str(FIRST_PERSON + person)).id: FIRST_PERSON + person for person in range(PEOPLE)}
        for chat in (GROUP_CHAT, WEBHOOK_CHAT, CRON_CHAT):
            self.fake.add_channel(str(chat))
            self._chats[str(chat)] = chat
        self._addresses = {chat: address for address, chat in self._chats.items()}
        self._given: list[tuple[str, dict[str, int]]] = []
        self._owners: dict[str, str] = {}
        self._invalid: set[str] = set()
        self._refused: Counter[str] = Counter()
        self.fake.gateway._ready = partial(self._begin, self.fake.gateway._ready)

    def settings(self) -> dict[str, Any]:
        return {
            "token": TOKEN,
            "base_url": self.url,
            "allow_all": True,
            "typing": False,
            "home": {"chat_id": str(CRON_CHAT)},
        }

    def server(self) -> LoopbackServer:
        return LoopbackServer(80, self.fake.handle, self._serve, host="discord.localhost")

    def address(self, chat: int) -> str:
        return self._addresses[chat]

    def chat_of(self, address: str) -> int:
        return self._chats.get(address, 0)

    def say(self, person: int, text: str, *, group: bool = False, mention: bool = True) -> None:
        self.fake.say(
            text,
            user_id=str(FIRST_PERSON + person),
            channel_id=str(GROUP_CHAT) if group else None,
            mention=group and mention,
        )
        self._note_given(text)

    def attach(self, person: int, name: str) -> str:
        author = str(FIRST_PERSON + person)
        message = self.fake._message(self.fake._dm(author), person_named(author), "")
        message["attachments"] = [{"id": "1", "filename": name, "size": 8, "url": "", "proxy_url": ""}]
        self.fake.gateway.dispatch_message("MESSAGE_CREATE", message, self.fake.bot["id"])
        text = f"[attached: {name}]"
        self._note_given(text)
        return text

    def _note_given(self, text: str) -> None:
        numbers = {session.id: len(session.events) for session in self.fake.gateway._sessions.values()}
        self._given.append((text, numbers))

    def command(self, person: int, text: str, *, group: bool = False, typed: bool = True) -> None:
        if typed:
            self.say(person, text, group=group)
            return
        name, _, argument = text.removeprefix("/").partition(" ")
        self.fake.use_command(
            name,
            options={"argument": argument} if argument else None,
            user_id=str(FIRST_PERSON + person),
            channel_id=str(GROUP_CHAT) if group else None,
        )

    def press(self, message: ShownMessage, label: str, person: int) -> None:
        self.fake.click(message.raw, label, user_id=str(FIRST_PERSON + person))

    def confirmed(self, texts: Sequence[str]) -> set[str]:
        told: dict[str, int] = {}
        # The gateway gives up a session to which it could not connect for two runs of the adapter.
        ended = self._invalid | {session for session, times in self._refused.items() if times > 1}
        for entry in self.fake.gateway.log:
            if entry.kind in ("heartbeat", "resume"):
                told[entry.session_id] = max(entry.detail, told.get(entry.session_id, 0))
            elif entry.kind == "closed" and entry.detail in SESSION_ENDS:
                ended.add(entry.session_id)
        sessions = list(self._owners)
        for number, session in enumerate(sessions):
            if any(self._owners[later] != self._owners[session] for later in sessions[number:]):
                # The process ended, or another node has taken over the bot.
                ended.add(session)
        return {
            text
            for text, numbers in self._given
            if text in texts
            and any(told.get(session, 0) >= number or session not in ended for session, number in numbers.items())
        }

    def forbid(self, address: str, forbidden: bool) -> None:
        self.fake._channels[address].forbidden = forbidden

    def is_connection(self, where: str) -> bool:
        return where == "gateway"

    def connection_fault(self, how: str) -> None:
        self._nursery.start_soon(self._disturb, how)

    async def _disturb(self, how: str) -> None:
        gateway = self.fake.gateway
        match how:
            case "drop":
                await gateway.drop_connections()
            case "reconnect":
                await gateway.request_reconnect()
            case "invalid":
                self._invalid.update(gateway._sessions)
                await gateway.invalidate_sessions(resumable=False)
            case "repeat":
                # Events that were sent before the connection was lost are sent again after RESUME.
                gateway.replayed = REPLAYED
                await gateway.drop_connections()
            case "mute":
                gateway.mute_heartbeats = True
                await trio.sleep(3 * HEARTBEAT_SECONDS)
                gateway.mute_heartbeats = False
            case "refuse":
                self._refused.update(list(gateway._sessions))
                gateway.refuse_connections = True
                await gateway.drop_connections()
                await trio.sleep(REACTION_SECONDS)
                gateway.refuse_connections = False
            case _:
                raise ValueError(f"the Gateway has no fault {how!r}")

    def heal(self) -> None:
        super().heal()
        gateway = self.fake.gateway
        gateway.mute_heartbeats = gateway.refuse_connections = False
        gateway.replayed = 0

    def _begin(self, ready: Callable[[str], dict[str, Any]], session_id: str) -> dict[str, Any]:
        """Note which process begins a session."""
        self._owners[session_id] = caller_of.get()
        return ready(session_id)

    def read_place(self, raw: Any) -> object:
        return raw.channel_id

    def read_id(self, raw: Any) -> Any:
        return raw.id

    def read_text(self, raw: Any) -> str:
        return raw.content

    def read_buttons(self, raw: Any) -> list[str]:
        return [button["label"] for button in raw.buttons]

    async def _serve(self, request: FakeRequest, socket: WebSocket) -> None:
        await self.read_alone(partial(self.fake.gateway.serve, request, socket))
