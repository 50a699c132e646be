"""Reads command-line options the way getopt does: clusters, attached values, `--name=value`, abbreviations."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec


def listed(text: str) -> tuple[str, ...]:
    """Return the words of a text, so that tables can be written as one string."""
    return tuple(text.split())


class Options(msgspec.Struct):
    """The flags, their values, and the operands of a command line."""

    flags: list[str] = msgspec.field(default_factory=list[str])
    values: dict[str, list[str]] = msgspec.field(default_factory=dict[str, list[str]])
    operands: list[str] = msgspec.field(default_factory=list[str])

    def has(self, *names: str) -> bool:
        """Return whether one of the flags was given. A long flag may be abbreviated."""
        for flag in self.flags:
            if flag in names:
                return True
            if flag.startswith("--") and len(flag) > 2 and any(name.startswith(flag) for name in names):
                return True
        return False

    def value(self, *names: str) -> str | None:
        """Return the last value given to one of the flags."""
        for name in names:
            if name in self.values:
                return self.values[name][-1]
        return None


def scan(arguments: Iterable[str], valued: Iterable[str] = (), *, permute: bool = True) -> Options:
    """Split arguments into options and operands. Without `permute` the first operand ends the options."""
    options = Options()
    takes_value = frozenset(valued)
    waiting: str | None = None
    arguments = list(arguments)
    for index, argument in enumerate(arguments):
        if waiting is not None:
            options.values.setdefault(waiting, []).append(argument)
            waiting = None
        elif argument == "--":
            options.operands.extend(arguments[index + 1 :])
            return options
        elif argument.startswith("--"):
            name, equals, value = argument.partition("=")
            options.flags.append(name)
            if equals:
                options.values.setdefault(name, []).append(value)
            elif name in takes_value:
                waiting = name
        elif len(argument) > 1 and argument[0] == "-":
            waiting = _cluster(argument, takes_value, options)
        elif permute:
            options.operands.append(argument)
        else:
            options.operands.extend(arguments[index:])
            return options
    return options


def _cluster(argument: str, takes_value: frozenset[str], options: Options) -> str | None:
    if argument in takes_value:
        options.flags.append(argument)
        return argument
    for position in range(1, len(argument)):
        flag = "-" + argument[position]
        options.flags.append(flag)
        if flag in takes_value:
            rest = argument[position + 1 :]
            if not rest:
                return flag
            options.values.setdefault(flag, []).append(rest)
            return None
    return None
