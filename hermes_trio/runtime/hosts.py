"""Which node runs the turns of a session: any, until something of it is on one.

The first command of a session binds it to the node that runs it, because its shell and its files are there; live jobs bind it for as long as they live. A turn
that comes in on another node is refused with `HostedElsewhere`, and whoever brought it hands it on. If the node is gone, the turn runs here, and the model is
told what was lost. Where a store has one owner, nothing here is asked.
"""

from __future__ import annotations

import logging
from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Final

import msgspec

from .context import SessionContext
from .errors import Fenced, HostedElsewhere
from .outcome import Outcome, TurnState
from .ports import SessionHost, TurnInput

if TYPE_CHECKING:
    from .core import RuntimeCore
    from .turn import Turn, TurnSpec

__all__ = ["Hosts", "running_here"]

logger: Final = logging.getLogger("hermes_trio.runtime.hosts")

_here: ContextVar[bool] = ContextVar("hermes_trio_running_here", default=False)


@contextmanager
def running_here() -> Generator[None]:
    """Turns that are started in the body of the `with` run on this node, wherever their sessions are bound to: another node has handed them on."""
    token = _here.set(True)
    try:
        yield
    finally:
        _here.reset(token)


class Hosts:
    """The bindings of sessions, as one node sees them."""

    def __init__(self, core: RuntimeCore) -> None:
        self._core = core
        self._bound: set[str] = set()

    async def place(self, spec: TurnSpec, *, anywhere: bool = False) -> TurnSpec:
        """What to run here for `spec`: itself, or, where its session was bound to a node that is gone, with a message about what was lost.

        Raises `HostedElsewhere` if another node has to run it, unless it may run `anywhere`.
        """
        core = self._core
        session_id = spec.context.session_id
        if not core.shared or not session_id:
            return spec
        found = await core.store.session_host(session_id)
        if found is None or found.node == core.store.owner:
            return spec
        if not found.gone:
            if anywhere or _here.get():
                return spec
            raise HostedElsewhere(session_id, found.node)
        return self._told(spec, found)

    def _told(self, spec: TurnSpec, lost: SessionHost) -> TurnSpec:
        on_end = spec.hooks.on_end

        async def ended(outcome: Outcome) -> None:
            """The model knows it: the next turn need not say it again."""
            if outcome.state is TurnState.COMPLETED and outcome.committed:
                await self._core.store.release_host(spec.context.session_id, lost.node)
            if on_end is not None:
                await on_end(outcome)

        return msgspec.structs.replace(
            spec,
            input=with_preface(spec.input, loss_text(lost)),
            hooks=msgspec.structs.replace(spec.hooks, on_end=ended),
        )

    async def bind(self, turn: Turn | None) -> None:
        """A command of this turn is about to run here: its conversation is bound to this node. One of a session that ends with its work is not bound.

        A store that fails leaves it unbound until its next command.
        """
        core = self._core
        if not core.shared or turn is None:
            return
        session_id = _conversation(turn)
        if not session_id or session_id in self._bound:
            return
        try:
            if await core.store.claim_host(session_id):
                self._bound.add(session_id)
        except Fenced:
            raise
        except Exception as error:
            logger.warning(
                "session %s could not be bound to this node, its next command tries again: %s", session_id, error
            )

    def forget(self, session_id: str) -> None:
        """A session has ended, and its binding with it."""
        self._bound.discard(session_id)


def _conversation(turn: Turn) -> str:
    """The session of the outermost work around a turn: a child works in the folder of its parent. Empty for one that ends with its work."""
    found, one_shot = turn.context.session_id, bool(turn.spec.one_shot)
    node = turn.node.parent
    while node is not None:
        context, spec = getattr(node.work, "context", None), getattr(node.work, "spec", None)
        if isinstance(context, SessionContext) and context.session_id and spec is not None:
            found, one_shot = context.session_id, bool(getattr(spec, "one_shot", ""))
        node = node.parent
    return "" if one_shot else found


def loss_text(lost: SessionHost) -> str:
    """What a model is told about a node that is gone."""
    lines = [
        "[IMPORTANT: The host on which the commands of this conversation ran is gone, and this turn runs on another one.",
        "Its shell is lost: directory, variables, functions and aliases are those of a new shell. Files that were only on that host are not here.",
    ]
    if lost.lost_jobs:
        lines.append("Background work that was lost with it:")
        lines += [f"- {' '.join(title.split())[:200]}" for title in lost.lost_jobs]
    return "\n".join(lines) + "]"


def with_preface(input: TurnInput, text: str) -> TurnInput:
    """The input with a text in front of its message."""
    content = input.content
    if content:
        parts = [{"type": "text", "text": content}] if isinstance(content, str) else list(content)
        content = [{"type": "text", "text": text}, *parts]
    return msgspec.structs.replace(input, text=f"{text}\n\n{input.text}" if input.text else text, content=content)
