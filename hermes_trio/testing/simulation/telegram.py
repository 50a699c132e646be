"""Telegram in a world: updates that the gateway polls and confirms."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Final, cast

import trio

from hermes_trio.testing.platforms.server import FakeReply, FakeRequest, LoopbackServer
from hermes_trio.testing.platforms.telegram import FakeTelegram

from .platform import CRON_CHAT, FIRST_PERSON, GROUP_CHAT, WEBHOOK_CHAT, ShownMessage, SimulatedPlatform
from .program import PEOPLE

TOKEN: Final = "123456:simulated-token"
BOT: Final = "simulated_bot"


class SimulatedTelegram(SimulatedPlatform[FakeTelegram]):
    """See the module. A message is confirmed when the gateway has asked for later updates."""

    name = "telegram"

    def __init__(self, note: Any, nursery: trio.Nursery) -> None:
        super().__init__(note, nursery)
        self.fake = FakeTelegram(TOKEN, BOT, 1.0)
        for person in range(PEOPLE):
            self.fake.add_private_chat(FIRST_PERSON + person, f"Person{person}")
        self.fake.add_private_chat(WEBHOOK_CHAT, "Hooks")
        self.fake.add_private_chat(CRON_CHAT, "Clock")
        self.fake.add_group(-GROUP_CHAT)

    def settings(self) -> dict[str, Any]:
        return {
            "token": TOKEN,
            "base_url": self.url,
            "allow_all": True,
            "typing": False,
            "home": {"chat_id": str(CRON_CHAT)},
        }

    def server(self) -> LoopbackServer:
        return LoopbackServer(80, self._handle, None)

    def address(self, chat: int) -> str:
        return str(-chat if chat == GROUP_CHAT else chat)

    def chat_of(self, address: str) -> int:
        return abs(int(address))

    def say(self, person: int, text: str, *, group: bool = False, mention: bool = True) -> None:
        said = f"@{BOT} {text}" if group and mention else text
        self.fake.say(
            said,
            user_id=FIRST_PERSON + person,
            first_name=f"Person{person}",
            chat_id=-GROUP_CHAT if group else None,
        )

    def attach(self, person: int, name: str) -> str:
        document = {"file_id": name, "file_unique_id": name, "file_name": name, "file_size": 8}
        self.fake._inject({"document": document}, FIRST_PERSON + person, None, None, None, f"Person{person}")
        return _attached(name)

    def command(self, person: int, text: str, *, group: bool = False, typed: bool = True) -> None:
        self.say(person, text, group=group, mention=False)

    def press(self, message: ShownMessage, label: str, person: int) -> None:
        self.fake.click(message.raw, label, user_id=FIRST_PERSON + person)

    def confirmed(self, texts: Sequence[str]) -> set[str]:
        pending = [_said(update.get("message", {})) for update in self.fake._updates]
        return {text for text in texts if not any(waiting.endswith(text) for waiting in pending)}

    def forbid(self, address: str, forbidden: bool) -> None:
        self.fake._chats[int(address)].forbidden = "bot was blocked by the user" if forbidden else None

    def connection_fault(self, how: str) -> None:
        """Redeliver a confirmed update, as a new poll after a broken one may."""
        known = self.fake._updates
        if known:
            known.append(known[0])

    def read_place(self, raw: Any) -> object:
        return raw.chat_id

    def read_id(self, raw: Any) -> Any:
        return raw.message_id

    def read_text(self, raw: Any) -> str:
        return raw.text

    def read_buttons(self, raw: Any) -> list[str]:
        return [button["text"] for row in raw.buttons for button in row]

    async def _handle(self, asked: FakeRequest) -> FakeReply:
        if not asked.path.endswith("/getUpdates"):
            return await self.fake.handle(asked)
        return cast("FakeReply", await self.read_alone(partial(self.fake.handle, asked)))


def _said(message: Mapping[str, Any]) -> str:
    return message["text"] if "text" in message else _attached(message.get("document", {}).get("file_name", ""))


def _attached(name: str) -> str:
    return f"[attached: document {name}]"
