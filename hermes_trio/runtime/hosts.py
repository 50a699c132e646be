"""Session hosts: which node runs the turns of a session. Any node does, until the session is bound to one.

The first command of a session binds it to the node that runs it, because its shell and its files are there; live jobs bind it for as long as they live. A turn
that arrives on another node is refused with `HostedElsewhere`, and its caller forwards it. If the node has ended, the turn runs here, and its input
says what was lost. A store with one owner has no bindings.
"""

from __future__ import annotations

import logging
from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import TYPE_CHECKING, Final

import msgspec

from .context import SessionContext
from .ends import End
from .errors import Fenced, HostedElsewhere
from .outcome import Outcome, TurnState
from .ports import SessionHost, TurnInput

if TYPE_CHECKING:
    from .core import RuntimeCore
    from .turn import Turn, TurnSpec

logger: Final = logging.getLogger("hermes_trio.runtime.hosts")

_here: ContextVar[bool] = ContextVar("hermes_trio_running_here", default=False)


@contextmanager
def running_here() -> Generator[None]:
    """Run turns that are started in the body of the `with` on this node, whatever their sessions are bound to: another node forwarded them."""
    token = _here.set(True)
    try:
        yield
    finally:
        _here.reset(token)


class Hosts:
    """The bindings of sessions to nodes, as one node sees them."""

    def __init__(self, core: RuntimeCore) -> None:
        self._core = core

    async def place(self, spec: TurnSpec, *, anywhere: bool = False) -> TurnSpec:
        """Return the spec to run here: `spec`, or, if its session was bound to a node that has ended, `spec` with a text about what was lost.

        Raises `HostedElsewhere` if another node has to run it, unless it may run `anywhere`.
        """
        core = self._core
        session_id = spec.context.session_id
        if not core.shared or not session_id:
            return spec
        found = await core.store.session_host(session_id)
        if found is None:
            return spec
        if found.node in ("", core.store.owner):
            if not found.held or spec.spare is None:
                return spec
            return await self.place(msgspec.structs.replace(spec, context=spec.spare(), spare=None), anywhere=anywhere)
        if not found.gone:
            if anywhere or _here.get():
                return spec
            raise HostedElsewhere(session_id, found.node)
        return self._told(spec, found)

    def _told(self, spec: TurnSpec, lost: SessionHost) -> TurnSpec:
        on_end = spec.hooks.on_end

        async def ended(outcome: Outcome) -> None:
            """Remove the old binding once a turn has reported the loss."""
            if on_end is not None:
                await on_end(outcome)
            if outcome.state is TurnState.COMPLETED and outcome.committed:
                core, session_id = self._core, spec.context.session_id
                release = partial(core.store.release_host, session_id, lost.node)
                await core.ends.put(End(f"the binding of session {session_id} to a node that has ended", release))

        return msgspec.structs.replace(
            spec,
            input=with_preface(spec.input, loss_text(lost)),
            hooks=msgspec.structs.replace(spec.hooks, on_end=ended),
        )

    async def bind(self, turn: Turn | None) -> None:
        """Bind the conversation of a turn to this node before a command of it runs here. A session that ends with its work is not bound.

        If the store fails, the conversation stays unbound until its next command.
        """
        core = self._core
        if not core.shared or turn is None:
            return
        session_id = _conversation(turn)
        if not session_id:
            return
        try:
            await core.store.claim_host(session_id)
        except Fenced:
            raise
        except Exception as error:
            logger.warning("could not bind session %s to this node; its next command retries: %s", session_id, error)


def _conversation(turn: Turn) -> str:
    """Return the session of the outermost turn around this one: a child works in the folder of its parent. Empty if that session ends with its work."""
    found, one_shot = turn.context.session_id, bool(turn.spec.one_shot)
    node = turn.node.parent
    while node is not None:
        context, spec = getattr(node.work, "context", None), getattr(node.work, "spec", None)
        if isinstance(context, SessionContext) and context.session_id and spec is not None:
            found, one_shot = context.session_id, bool(getattr(spec, "one_shot", ""))
        node = node.parent
    return "" if one_shot else found


def loss_text(lost: SessionHost) -> str:
    """Return the text that tells a model which node has ended and what was lost with it."""
    lines = [
        "[IMPORTANT: The host on which the commands of this conversation ran is gone, and this turn runs on another one.",
        "Its shell is lost: directory, variables, functions and aliases are those of a new shell. Files that were only on that host are not here.",
    ]
    if lost.lost_jobs:
        lines.append("Background work that was lost with it:")
        lines += [f"- {' '.join(title.split())[:200]}" for title in lost.lost_jobs]
    return "\n".join(lines) + "]"


def with_preface(input: TurnInput, text: str) -> TurnInput:
    """Return the input with a text in front of its message."""
    content = input.content
    if content:
        parts = [{"type": "text", "text": content}] if isinstance(content, str) else list(content)
        content = [{"type": "text", "text": text}, *parts]
    return msgspec.structs.replace(
        input, text=f"{text}\n\n{input.text}" if input.text else text, content=content, preface=text
    )
