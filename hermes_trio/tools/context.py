"""The context of a tool call: a turn, or a program that has a Runtime open. Says which session it belongs to, and whether a later notice can be delivered."""

from __future__ import annotations

import msgspec

from hermes_trio.runtime.channel import CompletionChannel
from hermes_trio.runtime.context import SessionContext, current_context
from hermes_trio.runtime.core import SUBAGENT, RuntimeCore
from hermes_trio.runtime.runtime import current_runtime
from hermes_trio.runtime.turn import DeliveringTurn, Owner, Turn

from .warden import Profile

STATELESS: str = (
    "this interface cannot deliver anything after the turn: the process runs, but no notice will follow;"
    " look at it with process(action='poll')"
)
CHILD: str = (
    "a child's processes end with the child, so no notice could be delivered; wait for it with process(action='wait'),"
    " or look at it with process(action='poll')"
)


class ToolContext(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """`channel` is needed for later notices; without one, `unsupported` says why and what to do instead."""

    core: RuntimeCore
    owner: Owner
    turn: Turn | None = None
    channel: CompletionChannel | None = None
    unsupported: str = ""
    profile: Profile = Profile.OFF
    """What the commands of this session may read and write; set by `CommandConfinement.place`."""
    confined: bool = False
    """Whether the kernel protects the gateway from them."""

    @property
    def context(self) -> SessionContext:
        """Return the session of everything that is started here."""
        return self.owner.context

    @property
    def session_id(self) -> str:
        """Return the id of that session."""
        return self.owner.context.session_id

    @classmethod
    def of(cls, turn: Turn | None) -> ToolContext:
        """Return the context of a turn; outside of one, that of the open Runtime, whose own channel delivers notices. Raises `NoRuntime`."""
        if turn is None:
            return cls._in_program()
        if turn.spec.source == SUBAGENT:
            return cls(core=turn.core, owner=turn.owner, turn=turn, unsupported=CHILD)
        if isinstance(turn, DeliveringTurn):
            return cls(core=turn.core, owner=turn.owner, turn=turn, channel=turn.channel)
        return cls(core=turn.core, owner=turn.owner, turn=turn, unsupported=STATELESS)

    @classmethod
    def _in_program(cls) -> ToolContext:
        runtime = current_runtime()
        context = current_context()
        if context is not None and context.session_id:
            if not context.session_key:
                context = msgspec.structs.replace(context, session_key=context.session_id)
        else:
            context = None
        return cls(core=runtime.core, owner=runtime.owner(context), channel=runtime.channel)
