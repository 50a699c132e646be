"""Expands words into the fields that a command would receive, as far as that is decidable without running anything.

Each word yields alternatives, one for every possible state, each a list of fields. Unknown text becomes a `HOLE`.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from .braces import expand_braces
from .marks import HOLE, PRIVATE, QUOTED, REMOTE, SOLID, SPLIT
from .parameters import apply_operator
from .pruning import prune
from .state import State, Value
from .syntax import Arithmetic, Item, Literal, Parameter, Part, ProcessSubstitution, Substitution, Word

MAX_ALTERNATIVES = 512
_FEW = 20

_FIRST_DESCRIPTOR = 63
_PLAIN = re.compile(r"[^~{]*\Z")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")
_ORIGINS = re.compile(PRIVATE)


class Expander:
    """Expands words in one `State`; `run` gives the output of a substituted script, `feed` gives one its input."""

    def __init__(self, state: State, run: Callable[[list[Item]], str], feed: Callable[[list[Item], str], None]) -> None:
        self._state = state
        self._run = run
        self._feed = feed

    def fields(self, word: Word) -> list[list[str]]:
        """Return the alternatives for one word, each a list of fields (none, one or several)."""
        parts = word.parts
        if len(parts) == 1:
            only = parts[0]
            if isinstance(only, Literal) and (only.quoted or _PLAIN.match(only.text)):
                return [[only.text]]
        results: list[list[str]] = [[]]
        for variant in expand_braces(parts):
            options = [_split(text) for text in self._join(variant)]
            if len(options) == 1:
                for result in results:
                    result.extend(options[0])
                continue
            if len(results) * len(options) > MAX_ALTERNATIVES:
                results = prune(results, _FEW, " ".join, [HOLE])
                options = prune(options, _FEW, " ".join, [HOLE])
            results = [result + option for result in results for option in options]
        return results

    def texts(self, parts: list[Part], *, assignment: bool = False) -> list[str]:
        """Return the alternatives for parts that are not split into fields (assignments, here-documents, arguments)."""
        joined = self._join(parts, assignment=assignment)
        return list(dict.fromkeys(text.replace(QUOTED, "").replace(SPLIT, " ") for text in joined))

    def _join(self, parts: list[Part], *, assignment: bool = False) -> list[str]:
        texts = [""]
        for position, part in enumerate(parts):
            options = self._part(part, first=position == 0, assignment=assignment)
            if len(options) == 1:
                texts = [text + options[0] for text in texts]
            else:
                if len(texts) * len(options) > MAX_ALTERNATIVES:
                    texts = prune(texts, _FEW, str, HOLE)
                    options = prune(options, _FEW, str, HOLE)
                texts = [text + option for text in texts for option in options]
        return texts

    def _part(self, part: Part, *, first: bool, assignment: bool) -> list[str]:
        if isinstance(part, Literal):
            if part.quoted:
                return [QUOTED + part.text]
            if "~" in part.text and (first or assignment):
                return self._tilde(part.text, assignment=assignment)
            return [part.text]
        if isinstance(part, Parameter):
            return self._parameter(part)
        if isinstance(part, Substitution):
            output = self._run(part.body).rstrip("\n")
            return [QUOTED + output] if part.quoted else [self._divide(output)]
        if isinstance(part, ProcessSubstitution):
            return [self._process(part)]
        if isinstance(part, Arithmetic):
            return [_number(text) for text in self.texts(part.parts)]
        self.texts(part.parts)
        return ["*"]

    def _tilde(self, text: str, *, assignment: bool) -> list[str]:
        if not assignment:
            return [self._home(text)]
        return [":".join(self._home(piece) for piece in text.split(":"))]

    def _home(self, text: str) -> str:
        if not text.startswith("~"):
            return text
        prefix, slash, rest = text.partition("/")
        if prefix == "~":
            return (self._state.home or HOLE) + slash + rest
        if prefix == "~root":
            return "/root" + slash + rest
        if prefix == "~+":
            return (self._state.cwds[-1] or SOLID) + slash + rest
        if prefix == "~-":
            return SOLID + slash + rest
        return "/home/" + prefix[1:] + slash + rest

    def _parameter(self, part: Parameter) -> list[str]:
        values: list[Value] = self._state.lookup(part.name)
        if part.indirect:
            values = self._indirect(values, part)
        if part.index is not None or part.name in ("@", "*"):
            values = [chosen for value in values for chosen in _element(value, part.index or part.name)]
        elif any(isinstance(value, tuple) for value in values):
            values = [(value[0] if value else "") if isinstance(value, tuple) else value for value in values]
        if part.length:
            return [str(len(v)) if isinstance(v, str) and not _ORIGINS.search(v) else SOLID for v in values]
        if part.operator:
            arguments = self.texts(part.argument)
            if len(values) * len(arguments) > MAX_ALTERNATIVES:
                values = prune(values, _FEW, str, HOLE)
                arguments = prune(arguments, _FEW, str, HOLE)
            values = [
                result
                for value in values
                for text in arguments
                for result in apply_operator(part.operator, value, text)
            ]
            if part.operator in ("=", ":="):
                self._state.assign(part.name, values, certain=False)
        elif part.argument:
            self.texts(part.argument)
        keeps_fields = (part.index or part.name) == "@"
        return list(dict.fromkeys(self._spread(value, quoted=part.quoted, fields=keeps_fields) for value in values))

    def _indirect(self, values: list[Value], part: Parameter) -> list[Value]:
        if part.operator in ("*", "@") or part.index in ("*", "@"):
            return [HOLE]
        results: list[Value] = []
        for value in values:
            if isinstance(value, str) and (_NAME.match(value) or value.isdigit()):
                results.extend(self._state.lookup(value))
            else:
                results.append(HOLE)
        return results

    def _spread(self, value: Value, *, quoted: bool, fields: bool) -> str:
        if isinstance(value, tuple):
            if quoted and fields:
                return SPLIT.join(QUOTED + item for item in value)
            if quoted:
                return QUOTED + " ".join(value)
            return SPLIT.join(self._divide(item) for item in value)
        return QUOTED + value if quoted else self._divide(value)

    def _divide(self, text: str) -> str:
        """Replace every separator of an unquoted expansion by a word border."""
        separators = self._state.separators()
        if not any(character in text for character in separators):
            return text
        return text.translate(dict.fromkeys(map(ord, separators), SPLIT))

    def _process(self, part: ProcessSubstitution) -> str:
        state = self._state
        path = f"/dev/fd/{_FIRST_DESCRIPTOR + len(state.files) + len(state.sinks)}"
        if part.writes:
            state.sinks[path] = part.body
            self._feed(part.body, HOLE)
        else:
            state.files[path] = self._run(part.body)
        return path


def _split(text: str) -> list[str]:
    return [piece.replace(QUOTED, "") for piece in text.split(SPLIT) if piece]


def _element(value: Value, index: str) -> list[Value]:
    if index in ("@", "*"):
        return [value]
    items = value if isinstance(value, tuple) else (value,)
    stripped = index.strip().lstrip("+")
    if re.fullmatch(r"-?\d{1,6}", stripped):
        position = int(stripped)
        return [items[position]] if -len(items) <= position < len(items) else [""]
    return [*items, HOLE]


def _number(text: str) -> str:
    """Return the value of an arithmetic expansion: a literal number, or an unknown one."""
    if re.fullmatch(r"\s*\d{1,12}\s*", text):
        return text.strip()
    return SOLID if REMOTE not in text else REMOTE + SOLID
