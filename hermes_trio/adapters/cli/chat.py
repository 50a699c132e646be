"""A conversation in the terminal, through the same hub, lane and outbox as every other chat.

The answer is shown while it is being written; its outbox row ensures that text which was not shown (a crash in between, a report while the terminal
was closed) is shown the next time. Leaving ends the session; `--resume` continues it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, cast

import trio

from hermes_trio.messaging.chunking import Limit
from hermes_trio.messaging.commands import receipt_text
from hermes_trio.messaging.contract import Adapter, Incoming, Outgoing, SendResult
from hermes_trio.messaging.feed import settled_text
from hermes_trio.messaging.session_keys import Source, session_key
from hermes_trio.runtime.context import SessionContext
from hermes_trio.runtime.interface import Inbox
from hermes_trio.runtime.outcome import CancelCause, Cause, Outcome
from hermes_trio.runtime.runtime import Runtime
from hermes_trio.runtime.turn import Turn
from hermes_trio.store import Page, SessionFilter
from hermes_trio.store.ports import Store
from hermes_trio.store.records import SessionRow

from .lines import Lines
from .screen import Screen

CLI: Final = "cli"
CHAT: Final = "local"
REMEMBERED: Final = 100
SHOWN_MESSAGES: Final = 4
SHOWN_CHARACTERS: Final = 600
STOPPED: Final = "(stopped)"
END_SECONDS: Final = 1.0
"""How long a receipt waits for the last output of its turn."""

_SOURCE: Final = Source(platform=CLI, chat_type="dm", chat_id=CHAT, user_id="owner", user_name="owner")
CLI_KEY: Final = session_key(_SOURCE)


class ResumeError(Exception):
    """Raised for a conversation that cannot be continued. The text says why."""


class ChatAdapter(Adapter):
    """See the module. `left` is set when the person has left."""

    platform = CLI
    singleton = False
    own_commands = (
        ("model [name]", "which model answers, and which there are; with a name, let that one answer from now on"),
        ("quit", "leave; so does Ctrl-D"),
    )
    supports_edit = True
    """A question is updated on the screen when it is answered."""

    def __init__(self, screen: Screen, lines: Lines, *, interactive: bool, ready: trio.Event | None = None) -> None:
        self.limit = Limit(1_000_000_000)
        self.left = trio.Event()
        self.inbox: Callable[[], Inbox]
        self.running: Callable[[], int] = int
        """The number of background jobs that run."""
        self.on_idle: Callable[[], None] = _nothing
        """Called when a turn has ended."""
        self.models: Sequence[str] = ()
        """The model routes, the default first."""
        self._interactive = interactive
        self._ready = ready
        self._screen = screen
        self._lines = lines
        self._shown: OrderedDict[str, list[str]] = OrderedDict()
        self._writing: list[str] | None = None
        self._warned = False
        self._over = trio.Event()

    # -- the person ------------------------------------------------------------------------------------------------------------------

    async def run(self, connected: Callable[[], None]) -> None:
        """Read inputs until there are no more; the first one after the session is chosen."""
        connected()
        if self._ready is not None:
            await self._ready.wait()
        while not self.left.is_set():
            text = await self._lines.next()
            words = [] if text is None else text.split()
            if text is None or words in (["/quit"], ["/exit"]):
                if self._may_leave():
                    self.left.set()
            elif words[:1] == ["/model"] and len(words) < 3:
                self.choose_model(*words[1:])
            elif words:
                self._warned = False
                await self.gateway.receive(self, Incoming(source=_SOURCE, text=text))
        await trio.sleep_forever()

    def choose_model(self, name: str = "") -> None:
        """Choose the model of later turns; without a name, print the present one."""
        if name and name not in self.models:
            self._screen.note(unknown_model(name, self.models))
            return
        if name:
            self.model = name
        now = self.model or (self.models[0] if self.models else "the default")
        others = [one for one in self.models if one != now]
        self._screen.note(f"{now} answers." + (f" There are also: {', '.join(others)}." if others else ""))

    def status(self) -> str:
        """Return what the agent is doing, and for how long, in one line; empty when it is idle."""
        turn = self.inbox().current_turn(CLI_KEY)
        if turn is None or turn.node.closed_at is not None:
            return ""
        waits = ""
        for node in turn.node.walk():
            waits = node.waits_on or waits
        age = trio.current_time() - turn.node.opened_at
        return f"… working for {age:.0f} s{f', waits on {waits}' if waits else ''} (Ctrl-C stops it)"

    def _may_leave(self) -> bool:
        """Return whether the person may leave; warn once if that would stop background work."""
        jobs = self.running()
        if not jobs or self._warned or not self._interactive:
            return True
        self._warned = True
        self._screen.note(f"{jobs} running in the background would be stopped. Ctrl-D or /quit again leaves.")
        return False

    async def interrupt(self) -> None:
        """Stop the turn on Ctrl-C, and show the receipt."""
        over = self._over
        receipt = await self.inbox().stop_turn(CLI_KEY, Cause(CancelCause.STOP, "Ctrl-C"))
        if receipt is not None:
            with trio.move_on_after(END_SECONDS):
                await over.wait()
        if receipt is None:
            self._screen.note("Nothing is running. Ctrl-D leaves.")
        else:
            self._screen.note(receipt_text(receipt))

    # -- the agent -------------------------------------------------------------------------------------------------------------------

    async def on_turn_start(self, turn: Turn) -> None:
        self._writing = self._shown[turn.id] = []
        self._over = trio.Event()
        while len(self._shown) > REMEMBERED:
            self._shown.popitem(last=False)
        if turn.input.notices:
            self._screen.note("● background work reports")

    async def on_turn_end(self, outcome: Outcome) -> None:
        self._screen.end_stream()
        if outcome.cause is not None and outcome.cause.kind is CancelCause.STOP and self._writing:
            # The reply comes later, through the outbox; the unfinished answer is marked where it was cut off.
            self._screen.note(STOPPED)
            self._writing.append(f"\n\n{STOPPED}")
        self._writing = None
        self.on_idle()
        self._over.set()

    def on_event(self, context: SessionContext, event: Mapping[str, Any]) -> None:
        match event.get("event"):
            case "message.delta":
                piece = str(event.get("delta", ""))
                if self._writing is not None:
                    self._writing.append(piece)
                self._screen.stream(piece)
            case "tool.started":
                if self._writing is not None:
                    self._writing.clear()
                self._screen.end_stream()
                self._screen.tool(f"⚙ {event.get('tool')}: {str(event.get('preview', ''))[:200]}")
            case "approval.responded" | "approval.expired":
                self._screen.note(settled_text(event))
            case "tool.completed" if event.get("error"):
                self._screen.tool(f"✗ {event.get('tool')} failed")
            case _:
                pass

    async def edit(self, chat_id: str, thread_id: str, message_id: str, text: str) -> SendResult:
        """Do nothing: the result of a question was shown when it was answered."""
        await trio.lowlevel.checkpoint()
        return SendResult.sent(message_id)

    async def send(self, message: Outgoing) -> SendResult:
        """Show what was not shown while it was written."""
        await trio.lowlevel.checkpoint()
        turn_id = str(message.payload.get("turn", ""))
        text = message.text
        if turn_id in self._shown:
            seen = " ".join("".join(self._shown[turn_id]).split())
            text = _unseen(text, seen)
        elif turn_id:
            self._screen.note("(from before; you may have seen it)")
        if text:
            self._screen.say(text)
        return SendResult.sent()


def _nothing() -> None:
    pass


def _unseen(text: str, seen: str) -> str:
    """Return the part of a text that follows what was shown; all of it if that is not its beginning."""
    if not seen:
        return text
    words = seen.split(" ")
    if text.split()[: len(words)] != words:
        return text
    rest = text
    for word in words:
        rest = rest.lstrip()[len(word) :]
    return rest.strip()


def unknown_model(name: str, models: Sequence[str]) -> str:
    """Return the error for an unknown model."""
    return f"there is no model {name!r}; there are: {', '.join(models)}"


async def begin_session(store: Store, resume: str | None) -> SessionRow:
    """Choose the session of this conversation: a new one, the last one (`resume` empty), or one by its id. Raises `ResumeError`."""
    if resume is None:
        made = await store.new_session(CLI_KEY, source=CLI, reason="new_session")
        found = await store.get_session(made)
        assert found is not None
        return found
    if not resume:
        known = [one for one in await store.list_sessions(SessionFilter(source=CLI), Page(20)) if one.message_count]
        if not known:
            raise ResumeError("there is no conversation to resume yet")
        resume = known[0].id
    found = await store.get_session(resume)
    if found is None:
        raise ResumeError(f"there is no session {resume!r}")
    if found.tenant:
        raise ResumeError(
            f"the session {resume!r} belongs to the tenant {found.tenant!r}: continue it over HTTP, with a key of its own"
        )
    current = await store.session_of(CLI_KEY)
    if current is not None and current.id == found.id:
        await store.reopen_session(found.id)
        return found
    return await store.switch_session(CLI_KEY, found.id, reason="resumed_other")


async def show_history(store: Store, screen: Screen, session: SessionRow) -> None:
    """Show the end of the earlier conversation."""
    said = [one for one in await store.load_history(session.id) if one.role in ("user", "assistant") and one.text]
    for message in said[-SHOWN_MESSAGES:]:
        text = message.text if len(message.text) <= SHOWN_CHARACTERS else f"{message.text[:SHOWN_CHARACTERS]} …"
        screen.note(f"{'›' if message.role == 'user' else '‹'} {text}")


async def end_session(runtime: Runtime, inbox: Inbox) -> str:
    """Stop what runs and end the session after the person has left; delete it if it is empty. Return its id, or nothing."""
    cause = Cause(CancelCause.SESSION_ENDED, "the person has left")
    store = cast("Store", runtime.store)
    turn = inbox.current_turn(CLI_KEY)
    if turn is not None:
        await turn.stop(cause)
    found = await store.session_of(CLI_KEY)
    if found is None or found.ended_at is not None:
        return ""
    await runtime.core.end_session(found.id, "cli_close", cause)
    if found.message_count:
        return found.id
    await store.delete_session(found.id)
    return ""
