"""The syntax tree of a shell script: words consist of parts, commands of words.

The nodes are plain values without behaviour. `Reader` makes them, `Shell` walks them.
"""

from __future__ import annotations

import msgspec


class Literal(msgspec.Struct):
    """Text that stands for itself; unquoted text is still subject to tilde, brace and glob expansion."""

    text: str
    quoted: bool


class Parameter(msgspec.Struct):
    """`$name` or `${name…}`; `argument` is the word after the operator."""

    name: str
    quoted: bool
    index: str | None = None
    operator: str = ""
    argument: list[Part] = msgspec.field(default_factory=list["Part"])
    indirect: bool = False
    length: bool = False
    bare: bool = False
    """Whether it is written without braces: letters that brace expansion appends then become part of the name."""


class Substitution(msgspec.Struct):
    """`$(…)`, backticks or `${ …; }`."""

    body: list[Item]
    quoted: bool


class ProcessSubstitution(msgspec.Struct):
    """`<(…)` or `>(…)`."""

    body: list[Item]
    writes: bool


class Arithmetic(msgspec.Struct):
    """`$((…))` or `$[…]`."""

    parts: list[Part]
    quoted: bool


class Pattern(msgspec.Struct):
    """An extended glob such as `@(a|b)`: inspection treats it as a match for any text."""

    parts: list[Part]


Part = Literal | Parameter | Substitution | ProcessSubstitution | Arithmetic | Pattern


class Word(msgspec.Struct):
    """One shell word before expansion."""

    parts: list[Part]


class Assignment(msgspec.Struct):
    """`name=value`, `name+=value`, `name[i]=value` or `name=(…)`."""

    name: str
    append: bool
    value: Word | None
    elements: list[Word] | None
    index: list[Part]


class Redirect(msgspec.Struct):
    """One redirection; for a here-document `target` is the body."""

    operator: str
    target: Word
    descriptor: str = ""


class Simple(msgspec.Struct):
    """A simple command: assignments, words and redirections."""

    assignments: list[Assignment] = msgspec.field(default_factory=list[Assignment])
    words: list[Word] = msgspec.field(default_factory=list[Word])
    redirects: list[Redirect] = msgspec.field(default_factory=list[Redirect])


class Pipeline(msgspec.Struct):
    """Commands joined by `|` or `|&`, or a single negated or timed one."""

    commands: list[Node]


class Group(msgspec.Struct):
    """`{ …; }` or `( … )`."""

    body: list[Item]
    subshell: bool
    redirects: list[Redirect] = msgspec.field(default_factory=list[Redirect])


class Branches(msgspec.Struct):
    """`if`: conditions and bodies in reading order."""

    scripts: list[list[Item]]
    redirects: list[Redirect] = msgspec.field(default_factory=list[Redirect])


class Loop(msgspec.Struct):
    """`while`, `until` and C-style `for`."""

    condition: list[Item]
    header: list[Part]
    body: list[Item]
    redirects: list[Redirect] = msgspec.field(default_factory=list[Redirect])


class ForEach(msgspec.Struct):
    """`for name in words` and `select`; without words it iterates over the positional parameters."""

    variable: str
    words: list[Word] | None
    body: list[Item]
    redirects: list[Redirect] = msgspec.field(default_factory=list[Redirect])


class Case(msgspec.Struct):
    """`case word in pattern) …;; esac`."""

    subject: Word
    patterns: list[Word]
    bodies: list[list[Item]]
    redirects: list[Redirect] = msgspec.field(default_factory=list[Redirect])


class Function(msgspec.Struct):
    """`name() body` or `function name body`."""

    name: str
    body: Node


class Condition(msgspec.Struct):
    """`[[ … ]]` and `(( … ))`: only the substitutions inside are executed."""

    words: list[Word]
    redirects: list[Redirect] = msgspec.field(default_factory=list[Redirect])


Node = Simple | Pipeline | Group | Branches | Loop | ForEach | Case | Function | Condition


class Item(msgspec.Struct):
    """One command of a list with the operator that follows it: `;`, `&`, `&&`, `||`, a newline or nothing."""

    node: Node
    operator: str
