"""The shape of a shell script as the reader sees it: words made of parts, commands made of words.

Plain values without behaviour. `Reader` makes them, `Shell` walks them.
"""

from __future__ import annotations

import attrs


@attrs.define
class Literal:
    """Text that stands for itself; unquoted text is still subject to tilde, brace and glob expansion."""

    text: str
    quoted: bool


@attrs.define
class Parameter:
    """`$name` or `${name…}`; `argument` is the word after the operator."""

    name: str
    quoted: bool
    index: str | None = None
    operator: str = ""
    argument: list[Part] = attrs.Factory(list["Part"])
    indirect: bool = False
    length: bool = False
    bare: bool = False
    """Written without braces, so that letters which brace expansion puts behind it belong to the name."""


@attrs.define
class Substitution:
    """`$(…)`, backticks or `${ …; }`."""

    body: list[Item]
    quoted: bool


@attrs.define
class ProcessSubstitution:
    """`<(…)` or `>(…)`."""

    body: list[Item]
    writes: bool


@attrs.define
class Arithmetic:
    """`$((…))` or `$[…]`."""

    parts: list[Part]
    quoted: bool


@attrs.define
class Pattern:
    """An extended glob such as `@(a|b)`: matches anything as far as inspection is concerned."""

    parts: list[Part]


Part = Literal | Parameter | Substitution | ProcessSubstitution | Arithmetic | Pattern


@attrs.define
class Word:
    """One shell word before expansion."""

    parts: list[Part]


@attrs.define
class Assignment:
    """`name=value`, `name+=value`, `name[i]=value` or `name=(…)`."""

    name: str
    append: bool
    value: Word | None
    elements: list[Word] | None
    index: list[Part]


@attrs.define
class Redirect:
    """One redirection; for a here-document `target` is the body."""

    operator: str
    target: Word
    descriptor: str = ""


@attrs.define
class Simple:
    """Assignments, words and redirections."""

    assignments: list[Assignment] = attrs.Factory(list[Assignment])
    words: list[Word] = attrs.Factory(list[Word])
    redirects: list[Redirect] = attrs.Factory(list[Redirect])


@attrs.define
class Pipeline:
    """Commands joined by `|` or `|&`, or a single negated or timed one."""

    commands: list[Node]


@attrs.define
class Group:
    """`{ …; }` or `( … )`."""

    body: list[Item]
    subshell: bool
    redirects: list[Redirect] = attrs.Factory(list[Redirect])


@attrs.define
class Branches:
    """`if`: conditions and bodies in reading order."""

    scripts: list[list[Item]]
    redirects: list[Redirect] = attrs.Factory(list[Redirect])


@attrs.define
class Loop:
    """`while`, `until` and C-style `for`."""

    condition: list[Item]
    header: list[Part]
    body: list[Item]
    redirects: list[Redirect] = attrs.Factory(list[Redirect])


@attrs.define
class ForEach:
    """`for name in words` and `select`; without words it walks the positional parameters."""

    variable: str
    words: list[Word] | None
    body: list[Item]
    redirects: list[Redirect] = attrs.Factory(list[Redirect])


@attrs.define
class Case:
    """`case word in pattern) …;; esac`."""

    subject: Word
    patterns: list[Word]
    bodies: list[list[Item]]
    redirects: list[Redirect] = attrs.Factory(list[Redirect])


@attrs.define
class Function:
    """A function definition."""

    name: str
    body: Node


@attrs.define
class Condition:
    """`[[ … ]]` and `(( … ))`: nothing runs but the substitutions inside."""

    words: list[Word]
    redirects: list[Redirect] = attrs.Factory(list[Redirect])


Node = Simple | Pipeline | Group | Branches | Loop | ForEach | Case | Function | Condition


@attrs.define
class Item:
    """One command of a list with the operator that follows it: `;`, `&`, `&&`, `||`, a newline or nothing."""

    node: Node
    operator: str
