"""Base classes of values. Values are frozen `msgspec.Struct`s: compared by their fields, cheap to make.

attrs is for objects whose fields change, and for the records of the test tools.
"""

from __future__ import annotations

from typing import Any, ClassVar

import msgspec


class RedactedStruct(msgspec.Struct, frozen=True):
    """A value whose repr leaves out the fields in `hidden`: secrets, and what would fill pages."""

    hidden: ClassVar[tuple[str, ...]] = ()

    def __rich_repr__(self) -> list[tuple[str, Any]]:
        # A struct has one of its own, with everything in it: what prints values in colour asks for this instead of the other.
        return [(name, getattr(self, name)) for name in self.__struct_fields__ if name not in self.hidden]

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in self.__rich_repr__())})"
