"""The chat platform of a world: what its people do there, what they see, and its faults.

A `SimulatedPlatform` has the fake that speaks the platform's wire format, and gives people and chats the same numbers on every platform: a person's direct
chat has the number of the person, and the other chats have those below. `PLATFORMS` are the names that a program may have.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, ClassVar, Final, Generic, TypeVar

import trio

from hermes_trio.testing.platforms.fake import FakePlatform
from hermes_trio.testing.platforms.faults import Delay, Drop, Fault, RateLimited, ServerError
from hermes_trio.testing.platforms.server import LoopbackServer

from .node import caller_of
from .program import METHODS, PEOPLE

FIRST_PERSON: Final = 500
"""The number of the first person and of the direct chat with them; the others follow."""

GROUP_CHAT: Final = 700
"""The chat of all people."""

WEBHOOK_CHAT: Final = 900
CRON_CHAT: Final = 901

BLOCKED_SECONDS: Final = 40.0

F = TypeVar("F", bound=FakePlatform[Any])

FAULTS: Final[Mapping[str, Fault]] = {
    "drop": Drop(),
    "accept": Drop(before=False),
    "limit": RateLimited(7.0),
    "garbage": ServerError(),
    "delay": Delay(90.0),
}
"""The faults of a method of a platform's API."""


class ShownMessage:
    """A message of the bot, as people see it now."""

    def __init__(self, platform: SimulatedPlatform[Any], raw: Any) -> None:
        self.raw = raw
        self._platform = platform

    @property
    def chat(self) -> int:
        """Return the number of its chat."""
        return self._platform.chat_of(str(self._platform.read_place(self.raw)))

    @property
    def id(self) -> Any:
        """Return its id on the platform."""
        return self._platform.read_id(self.raw)

    @property
    def text(self) -> str:
        """Return its text."""
        return self._platform.read_text(self.raw)

    @property
    def versions(self) -> list[str]:
        """Return its texts, oldest first."""
        return self.raw.versions

    @property
    def buttons(self) -> list[str]:
        """Return the labels of its buttons, which it loses when it is answered."""
        return self._platform.read_buttons(self.raw)


class SimulatedPlatform(Generic[F]):
    """See the module. `note` writes an event into the trace of the world."""

    name: ClassVar[str]
    fake: F

    def __init__(self, note: Callable[[str, str], None], nursery: trio.Nursery) -> None:
        self._note = note
        self._nursery = nursery
        self._readers: list[str] = []

    # -- of each platform ----------------------------------------------------------------------------------------------------------

    def settings(self) -> dict[str, Any]:
        """Return its table of the configuration."""
        raise NotImplementedError

    def server(self) -> LoopbackServer:
        """Return a new server of the fake."""
        raise NotImplementedError

    def address(self, chat: int) -> str:
        """Return the platform's id of a chat."""
        raise NotImplementedError

    def chat_of(self, address: str) -> int:
        """Return the number of a chat; 0 if people have no such chat."""
        raise NotImplementedError

    def say(self, person: int, text: str, *, group: bool = False, mention: bool = True) -> None:
        """Write as a person, in the direct chat or in the group, there with a mention of the bot or without one."""
        raise NotImplementedError

    def attach(self, person: int, name: str) -> str:
        """Send a document as a person, in the direct chat. Return the text that the gateway makes of it; it does not fetch the document."""
        raise NotImplementedError

    def command(self, person: int, text: str, *, group: bool = False, typed: bool = True) -> None:
        """Use a command (`/stop`) as a person: typed, or as the platform offers it beside that."""
        raise NotImplementedError

    def threads(self) -> dict[str, str]:
        """Return the thread of each message of people in the group, by its marks; empty for a platform without threads."""
        return {}

    def press(self, message: ShownMessage, label: str, person: int) -> None:
        """Press the button of a message with this label, as a person."""
        raise NotImplementedError

    def confirmed(self, texts: Sequence[str]) -> set[str]:
        """Return which of the texts of people's messages the gateway has confirmed, by the rules of the platform."""
        raise NotImplementedError

    def forbid(self, address: str, forbidden: bool) -> None:
        """Let people block the bot in a chat, or end that."""
        raise NotImplementedError

    def connection_fault(self, how: str) -> None:
        """Cause a fault of the connection over which people's messages arrive."""
        raise NotImplementedError

    def read_place(self, raw: Any) -> object:
        """Return the platform's id of a message's chat."""
        raise NotImplementedError

    def read_id(self, raw: Any) -> Any:
        """Return the id of a message."""
        raise NotImplementedError

    def read_text(self, raw: Any) -> str:
        """Return the present text of a message."""
        raise NotImplementedError

    def read_buttons(self, raw: Any) -> list[str]:
        """Return the labels of a message's buttons."""
        raise NotImplementedError

    async def live(self) -> None:
        """Run what the platform does by itself, until the world ends."""

    # -- of all platforms ----------------------------------------------------------------------------------------------------------

    def open(self) -> dict[str, Callable[[trio.SocketStream], Awaitable[None]]]:
        """Start the platform. Return what serves the connections to its host."""
        server = self.server()
        self.fake.attach(server)
        self._note_senders()
        self._nursery.start_soon(self.live)
        return {f"{self.name}.localhost": server.serve}

    def _note_senders(self) -> None:
        """Note in the trace which life of a node sends a message."""
        handler: Any = self.fake.handler
        handle, sending = handler.handle, METHODS[self.name][0]

        async def noted(method: str, params: Mapping[str, Any], act: Callable[[], Awaitable[Any]]) -> Any:
            if method == sending:
                self._note(
                    "sends", f"{caller_of.get()} {str(params.get('text') or params.get('content') or '')[:60]!r}"
                )
            return await handle(method, params, act)

        handler.handle = noted

    @property
    def url(self) -> str:
        """Return the address of its API for the configuration."""
        return f"http://{self.name}.localhost{self.fake.api_path}"

    def messages(self, after: int = 0) -> list[ShownMessage]:
        """Return the messages of the bot in order, without the first `after`."""
        return [ShownMessage(self, raw) for raw in list(self.fake.messages)[after:]]

    async def next_message(self) -> None:
        """Wait until the bot has sent or changed a message."""
        await self.fake.messages._changes.wait()

    def fail(self, where: str, how: str, times: int, number: int) -> None:
        """Cause a fault: of a method, of the connection (`repeat` and what only it has), or in the chat of a person (`block`)."""
        if how == "block":
            self._nursery.start_soon(self._block, self.address(FIRST_PERSON + number % PEOPLE))
        elif how in FAULTS and not self.is_connection(where):
            self.fake.fail(where, FAULTS[how], times=times)
        else:
            self.connection_fault(how)

    def is_connection(self, where: str) -> bool:
        """Return whether this names the connection instead of a method."""
        return False

    def heal(self) -> None:
        """End all faults."""
        self.fake.handler.faults.clear()

    async def _block(self, address: str) -> None:
        """Block the bot in a chat for `BLOCKED_SECONDS`. Messages sent meanwhile are refused permanently."""
        self.forbid(address, True)
        await trio.sleep(BLOCKED_SECONDS)
        self.forbid(address, False)

    async def read_alone(self, serve: Callable[[], Awaitable[Any]]) -> Any:
        """Serve a reader of people's messages, and note in the trace if another node reads them at the same time."""
        caller = caller_of.get()
        other = next((one for one in self._readers if one != caller), "")
        if other:
            self._note("second reader", f"{caller} while {other} reads")
        self._readers.append(caller)
        try:
            return await serve()
        finally:
            self._readers.remove(caller)
