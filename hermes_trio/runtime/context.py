"""The identity that work runs under: a frozen `SessionContext`, bound only by scopes.

One ContextVar holds one `Binding`: the context, the turn it belongs to and the tree node that is doing the work. Trio copies it to
child tasks and worker threads by itself; a child process gets it as environment variables (`SessionContext.environ`). Leaving the
scope restores the previous binding, so bindings nest.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from operator import attrgetter
from typing import TYPE_CHECKING, Final

import msgspec

from .errors import InvalidContext

if TYPE_CHECKING:
    from .tree import Node
    from .turn import Turn

MAX_ID_LENGTH: Final = 512
"""Longer than any id of a known platform; short enough that ids cannot be used to fill a disk."""

MAX_PATH_LENGTH: Final = 4096

_FORBIDDEN: Final = frozenset("\x00\r\n")
_HALF: Final = re.compile("[\ud800-\udfff]")


def check_id(value: object, what: str, limit: int = MAX_ID_LENGTH) -> str:
    """Return `value` if it can be used as an id, else raise `InvalidContext` that names `what`."""
    if not isinstance(value, str):
        raise InvalidContext(f"{what} must be a string, not {type(value).__name__}")
    if len(value) > limit:
        raise InvalidContext(f"{what} has {len(value)} characters; at most {limit} are allowed")
    if not _FORBIDDEN.isdisjoint(value):
        raise InvalidContext(f"{what} contains a NUL or a line break; remove it")
    if not value.isascii() and _HALF.search(value):
        raise InvalidContext(f"{what} contains half of a surrogate pair, which no store can keep; remove it")
    return value


class SessionContext(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The identity of a conversation, as its tools, threads and child processes see it.

    A field that is not given is bound to the empty string: binding a context binds all of it. As JSON it has the fields
    that are not empty. To change one field for a nested scope, use `msgspec.structs.replace(current_context(), cwd=...)`.
    """

    platform: str = ""
    source: str = ""
    chat_id: str = ""
    chat_name: str = ""
    thread_id: str = ""
    user_id: str = ""
    user_name: str = ""
    session_key: str = ""
    session_id: str = ""
    message_id: str = ""
    cwd: str = ""
    cron_deliver_platform: str = ""
    cron_deliver_chat_id: str = ""
    cron_deliver_thread_id: str = ""
    tenant: str = ""
    """The tenant that the work belongs to. It is stored with the routing and never passed to a child process."""
    key_id: str = ""
    """The id of the API key of the request; empty for work without a key. Never passed to a child process."""

    if TYPE_CHECKING:

        def __copy__(self) -> SessionContext: ...  # msgspec's stubs do not name it

    def __post_init__(self) -> None:
        # A context is made for each turn, so all fields are checked together first: if they pass, each of them does.
        try:
            together = "".join(_values(self))
            broken = "\0" in together or "\n" in together or "\r" in together
            if len(together) <= MAX_ID_LENGTH and not broken and (together.isascii() or not _HALF.search(together)):
                return
        except TypeError:
            pass
        for name in _FIELDS:
            check_id(getattr(self, name), f"SessionContext.{name}", MAX_PATH_LENGTH if name == "cwd" else MAX_ID_LENGTH)

    def with_own_key(self) -> SessionContext:
        """Return this context with its session id as its session key. Nothing is checked again: the id has been."""
        keyed = self.__copy__()
        msgspec.structs.force_setattr(keyed, "session_key", self.session_id)
        return keyed

    def environ(self) -> dict[str, str]:
        """Return the environment variables for a child process of this session: all of them, so that none is inherited."""
        return {variable: getattr(self, field) for variable, field in ENVIRONMENT_NAMES.items()}

    @classmethod
    def from_dict(cls, fields: Mapping[str, object]) -> SessionContext:
        """Return the context of the fields that `msgspec.to_builtins` made; unknown names are ignored, so that an older program reads a newer row."""
        return cls(**{name: str(value) for name, value in fields.items() if name in _FIELDS})


ENVIRONMENT_NAMES: Final[Mapping[str, str]] = {
    "HERMES_SESSION_PLATFORM": "platform",
    "HERMES_SESSION_SOURCE": "source",
    "HERMES_SESSION_CHAT_ID": "chat_id",
    "HERMES_SESSION_CHAT_NAME": "chat_name",
    "HERMES_SESSION_THREAD_ID": "thread_id",
    "HERMES_SESSION_USER_ID": "user_id",
    "HERMES_SESSION_USER_NAME": "user_name",
    "HERMES_SESSION_KEY": "session_key",
    "HERMES_SESSION_ID": "session_id",
    "HERMES_SESSION_MESSAGE_ID": "message_id",
    "HERMES_SESSION_CWD": "cwd",
    "HERMES_CRON_AUTO_DELIVER_PLATFORM": "cron_deliver_platform",
    "HERMES_CRON_AUTO_DELIVER_CHAT_ID": "cron_deliver_chat_id",
    "HERMES_CRON_AUTO_DELIVER_THREAD_ID": "cron_deliver_thread_id",
}

_FIELDS: Final = frozenset({*ENVIRONMENT_NAMES.values(), "tenant", "key_id"})

_values: Final = attrgetter(*ENVIRONMENT_NAMES.values(), "tenant", "key_id")


class Binding:
    """The value of the ContextVar. Immutable by convention: a nested scope binds a new one."""

    __slots__ = ("context", "node", "turn")

    def __init__(self, context: SessionContext, turn: Turn | None, node: Node | None) -> None:
        self.context = context
        self.turn = turn
        self.node = node


_binding: ContextVar[Binding | None] = ContextVar("hermes_trio_binding", default=None)


def current_binding() -> Binding | None:
    """Return the binding of this task or thread, or None outside any."""
    return _binding.get()


def current_context() -> SessionContext | None:
    """Return the `SessionContext` that is bound here, or None if none is."""
    binding = _binding.get()
    return None if binding is None else binding.context


def current_turn() -> Turn | None:
    """Return the turn that this code runs in, or None."""
    binding = _binding.get()
    return None if binding is None else binding.turn


@contextmanager
def bind(context: SessionContext) -> Iterator[SessionContext]:
    """Bind `context` for the body of the `with`, its tasks and its threads; restore the previous one afterwards."""
    outer = _binding.get()
    token = _binding.set(
        Binding(context, None, None) if outer is None else Binding(context, outer.turn, outer.node),
    )
    try:
        yield context
    finally:
        _binding.reset(token)


def get_session_env(name: str, default: str = "") -> str:
    """Return a session variable by its environment name.

    If it is bound in this scope, even to the empty string, return that value; else the process environment's, then `default`. A name that is no
    session variable is read from the environment, so this can replace `os.getenv`.
    """
    binding = _binding.get()
    if binding is not None:
        field = ENVIRONMENT_NAMES.get(name)
        if field is not None:
            return getattr(binding.context, field)
    return os.environ.get(name, default)


def async_delivery_supported() -> bool:
    """Return whether the completion of work that ends after this turn can be delivered to the conversation.

    Inside a turn this is whether the turn has a channel. Outside any turn it is true: a Runtime delivers through its own
    in-process channel.
    """
    turn = current_turn()
    return True if turn is None else turn.supports_async_delivery
