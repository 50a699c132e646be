"""What the hooks of an interface may do: the table of the guide, row by row."""

from __future__ import annotations

import inspect
import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import trio

from hermes_trio import Adapter, Interface, NewMessage, NewReply, Runtime, SessionContext
from hermes_trio.store import OutboxState
from hermes_trio.testing.fakes import ScriptedAgent

DOCS = Path(__file__).parents[2] / "docs"
KEY = "hooked:1"
RAISED_BEFORE = ("session_for", "prepare", "budget", "sink")


class Hooked(Interface):
    """An interface one of whose hooks raises, so many times."""

    platform = "hooked"

    def __init__(self, name: str, times: int) -> None:
        self.left = times
        self.ended: list[str] = []
        if name:
            setattr(self, name, self._raising(getattr(self, name)))

    def _raising(self, hook: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            if self.left:
                self.left -= 1
                raise ValueError("the hook is broken")
            return hook(*args)

        async def wait(*args: Any) -> Any:
            return await call(*args)

        return wait if inspect.iscoroutinefunction(hook) else call

    def replies(self, turn: Any, outcome: Any) -> list[NewReply]:
        return [NewReply(platform=self.platform, target={"chat_id": "1"}, text=outcome.text)]

    def refusal(self, rows: Any, reason: str) -> list[NewReply]:
        return [NewReply(platform=self.platform, target={"chat_id": "1"}, text=f"refused: {reason}")]

    async def on_turn_end(self, outcome: Any) -> None:
        self.ended.append(outcome.state.value)


async def play(runtime: Runtime, interface: Hooked) -> list[str]:
    """What is in the outbox some hours after a message came in."""
    async with runtime.delivering(interface) as inbox:
        routing = SessionContext(platform="hooked", session_key=KEY)
        await inbox.accept(NewMessage(inbox="hooked", session_key=KEY, routing=routing, text="hello"))
        await trio.sleep(24 * 3600)
    store: Any = runtime.store
    return [row.text for row in await store.list_outbox(OutboxState.PENDING)]


@pytest.mark.parametrize("hook", RAISED_BEFORE)
async def test_a_hook_that_fails_before_the_turn_is_asked_again(
    hook: str, runtime: Runtime, scripted_agent: ScriptedAgent
) -> None:
    """The message waits, and its turn runs when the hook works."""
    interface = Hooked(hook, 2)
    assert await play(runtime, interface) == ["echo: hello"]
    assert (len(scripted_agent.turns), interface.ended) == (1, ["completed"])


@pytest.mark.parametrize("hook", RAISED_BEFORE)
async def test_a_hook_that_always_fails_makes_a_dead_letter(
    hook: str, runtime: Runtime, scripted_agent: ScriptedAgent
) -> None:
    """After a bounded number of attempts the sender is told by `refusal`, and no turn has run."""
    assert await play(runtime, Hooked(hook, 1000)) == ["refused: ValueError: the hook is broken"]
    assert scripted_agent.turns == []
    store: Any = runtime.store
    assert await store.inbox_waiting(inbox="hooked", session_key=KEY) == 0


@pytest.mark.parametrize("hook", ["on_turn_start", "on_turn_end"])
async def test_a_hook_beside_the_turn_is_logged_and_the_turn_goes_on(
    hook: str, runtime: Runtime, scripted_agent: ScriptedAgent, caplog: pytest.LogCaptureFixture
) -> None:
    """Typing indicators and the like cost no turn."""
    with caplog.at_level(logging.ERROR):
        assert await play(runtime, Hooked(hook, 1000)) == ["echo: hello"]
    assert "the hook is broken" in caplog.text
    assert len(scripted_agent.turns) == 1


async def test_replies_that_cannot_be_made_fail_the_turn(runtime: Runtime, scripted_agent: ScriptedAgent) -> None:
    """What was to be sent is part of the commit: without it the turn has failed, its end is told once, and nothing of its answer is sent."""
    interface = Hooked("replies", 2)
    assert await play(runtime, interface) == []
    assert interface.ended == ["failed"]


@pytest.mark.parametrize(("kind", "page"), [(Interface, "embedding.md"), (Adapter, "plugins.md")])
def test_the_guide_has_a_row_for_every_hook(kind: type, page: str) -> None:
    """The page describes every method that may be overridden."""
    hooks = {name for name, value in vars(kind).items() if inspect.isfunction(value) and not name.startswith("_")}
    rows = "\n".join(re.findall(r"^\|[^|]*\|", (DOCS / page).read_text(), re.MULTILINE))
    assert hooks
    assert {name for name in hooks if f"`{name}" not in rows} == set()
