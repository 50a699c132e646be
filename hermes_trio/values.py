"""Values are `msgspec.Struct`s: frozen, compared by what they hold, cheap to make and quick to define. This is one that keeps things to itself.

attrs is for the few classes that need more of a field than a default: a private name, a converter, no place in the constructor.
"""

from __future__ import annotations

from typing import ClassVar

import msgspec

__all__ = ["Discreet"]


class Discreet(msgspec.Struct, frozen=True):
    """A value of which some fields, named in `hidden`, show up in no `repr`: secrets, and what would fill pages."""

    hidden: ClassVar[tuple[str, ...]] = ()

    def __repr__(self) -> str:
        shown = (f"{name}={getattr(self, name)!r}" for name in self.__struct_fields__ if name not in self.hidden)
        return f"{type(self).__name__}({', '.join(shown)})"
