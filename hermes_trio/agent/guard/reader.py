"""Reads shell text into `syntax` nodes the way bash does, and refuses what bash would not read.

The guard owns its reader because a public grammar is written for editors: tree-sitter-bash silently misreads
`rm$IFS-rf$IFS/`, nested backticks and `<<EOF; cmd`, and each misreading is a way past a guard. `second_opinion`
compares the two. Reading is one pass, linear in the text, and bounded in nesting.
"""

from __future__ import annotations

import re

import attrs

from .quoting import ansi_c
from .syntax import (
    Arithmetic,
    Assignment,
    Branches,
    Case,
    Condition,
    ForEach,
    Function,
    Group,
    Item,
    Literal,
    Loop,
    Node,
    Parameter,
    Part,
    Pattern,
    Pipeline,
    ProcessSubstitution,
    Redirect,
    Simple,
    Substitution,
    Word,
)

MAX_NESTING = 24

_RUN = re.compile(r"[^ \t\n|&;()<>$`'\"\\]+")
_QUOTED_RUN = re.compile(r"[^$`\"\\]+")
_HEREDOC_RUN = re.compile(r"[^$`\\]+")
_BRACED_RUN = re.compile(r"[^}$`'\"\\]+")
_BLANKS = re.compile(r"(?:[ \t]|\\\n)+")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_ASSIGNMENT = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)(\+?=|\[)")
_REDIRECT = re.compile(r"([0-9]+|\{[A-Za-z_][A-Za-z0-9_]*\})?(<<<|<<-|<<|<>|<&|>>|>\||>&|<(?!\()|>(?!\())|(&>>|&>)")
_RESERVED = re.compile(
    r"(if|then|else|elif|fi|while|until|for|select|do|done|case|esac|function|coproc|time|in|\{|\}|\[\[|!(?=\())"
    r"(?=[ \t\n|&;()<>]|\\\n|$|(?<=!)\()|(!)(?=[ \t\n]|\\\n)"
)
_PARAMETER = re.compile(r"(!?)(#?)([A-Za-z_][A-Za-z0-9_]*|[0-9]+|[@*#?$!\-])")
_OPERATOR = re.compile(r":?[-=?+]|##?|%%?|/[/#%]?|\^\^?|,,?|~~?|@[A-Za-z]|:|[@*]")
_SPLIT_OPERATOR = re.compile(r"(?:&(?:\\\n)+[&>]|\|(?:\\\n)+[|&]|;(?:\\\n)+[;&]|[<>](?:\\\n)+[<>&(|]|\((?:\\\n)+\()")
_DECLARATIONS = frozenset({"declare", "typeset", "local", "export", "readonly"})
_UNEXPECTED = frozenset({"then", "else", "elif", "fi", "do", "done", "esac", "}"})
_KEYWORDS = _UNEXPECTED | {"if", "while", "until", "for", "select", "case", "function", "coproc", "{", "[[", "!"}
_LITERAL_QUOTE_OPERATORS = frozenset({"-", "=", "?", "+", ":-", ":=", ":?", ":+"})


class Unreadable(Exception):
    """The text is no shell script that the reader understands."""


class TooDeep(Unreadable):
    """The text nests deeper than the reader follows."""


@attrs.define
class _Heredoc:
    redirect: Redirect
    delimiter: str
    quoted: bool
    strips_tabs: bool


class Reader:
    """One pass over one text; `starts` and `comments` are filled as a side product."""

    def __init__(self, text: str, *, nesting: int = 0) -> None:
        self.text = text
        self.end = len(text)
        self.position = 0
        self.nesting = nesting
        self.starts: set[int] = set()
        """Offsets at which a simple command begins, substitutions included."""
        self.comments: list[tuple[int, int]] = []
        self._heredocs: list[_Heredoc] = []

    def read(self) -> list[Item]:
        """The whole text as a list of commands."""
        items = self._script(frozenset(), "")
        self._finish_heredocs()
        return items

    # -- lists and pipelines

    def _script(self, stops: frozenset[str], closer: str) -> list[Item]:
        self.nesting += 1
        if self.nesting > MAX_NESTING:
            raise TooDeep(f"nested deeper than {MAX_NESTING} levels")
        items: list[Item] = []
        text = self.text
        needs_command = False
        while True:
            self._skip_lines()
            if self.position >= self.end:
                if closer or stops:
                    raise Unreadable(f"ends before {closer or ' or '.join(sorted(stops))}")
                break
            character = text[self.position]
            if character == ")" and closer == ")":
                break
            if stops:
                if character == ";" and ";;" in stops and text[self.position + 1 : self.position + 2] in ";&":
                    break
                if self._reserved() in stops:
                    break
            if character in ";&|)":
                raise Unreadable(f"unexpected {character!r} at {self.position}")
            node = self._pipeline()
            operator = self._list_operator()
            items.append(Item(node, operator))
            needs_command = operator in ("&&", "||")
            if not operator:
                if self.position < self.end and text[self.position] == ")" and closer == ")":
                    break
                if self.position < self.end and not stops:
                    raise Unreadable(f"unexpected {text[self.position]!r} at {self.position}")
                if stops and self.position < self.end and text[self.position : self.position + 1] != ";":
                    raise Unreadable(f"unexpected {text[self.position]!r} at {self.position}")
        if needs_command:
            raise Unreadable("ends after && or ||")
        self.nesting -= 1
        return items

    def _list_operator(self) -> str:
        self._skip_blanks()
        text, position = self.text, self.position
        if position >= self.end:
            return ""
        character = text[position]
        if character == "#":
            self._skip_comment()
            return self._list_operator()
        if _SPLIT_OPERATOR.match(text, position):
            raise Unreadable(f"line continuation inside an operator at {position}")
        if character == "\n":
            self._newline()
            return "\n"
        pair = text[position : min(position + 2, self.end)]
        if pair in ("&&", "||"):
            self.position += 2
            return pair
        if pair in (";;", ";&"):
            return ""
        if character in ";&":
            self.position += 1
            return character
        return ""

    def _pipeline(self) -> Node:
        negated = False
        while True:
            self._skip_blanks()
            word = self._reserved()
            if word == "!":
                self.position += 1
            elif word == "time":
                self.position += 4
                self._skip_blanks()
                for flag in ("-p", "--"):
                    if re.compile(re.escape(flag) + r"(?=[ \t\n])").match(self.text, self.position):
                        self.position += len(flag)
                        self._skip_blanks()
                if self.position >= self.end or self.text[self.position] in "\n;&|)":
                    return Simple()
            else:
                break
            negated = True
        commands = [self._command()]
        while True:
            self._skip_blanks()
            position = self.position
            if position >= self.end or self.text[position] != "|":
                break
            if _SPLIT_OPERATOR.match(self.text, position):
                raise Unreadable(f"line continuation inside an operator at {position}")
            following = self.text[position + 1 : position + 2]
            if following == "|":
                break
            self.position += 2 if following == "&" else 1
            self._skip_lines()
            if self.position >= self.end:
                raise Unreadable("ends after |")
            if self._reserved() == "!":
                self.position += 1
                self._skip_blanks()
            commands.append(self._command())
        if len(commands) == 1 and not negated:
            return commands[0]
        return Pipeline(commands)

    def _command(self) -> Node:
        text, position = self.text, self.position
        if position >= self.end:
            raise Unreadable("ends where a command should be")
        if text[position] == "(":
            return self._redirected(self._parenthesis())
        word = self._reserved()
        if word is None or word == "in":
            return self._simple()
        if word in _UNEXPECTED:
            raise Unreadable(f"unexpected {word!r} at {position}")
        if word == "!":
            return Pipeline([self._pipeline()])
        self.position += len(word)
        if word == "time":
            self.position = position
            return self._pipeline()
        if word == "{":
            return self._redirected(Group(self._until("}"), subshell=False))
        if word == "[[":
            return self._redirected(Condition(self._test()))
        if word == "if":
            return self._redirected(self._if())
        if word in ("while", "until"):
            condition = self._until("do")
            return self._redirected(Loop(condition, [], self._until("done")))
        if word in ("for", "select"):
            return self._redirected(self._for())
        if word == "case":
            return self._redirected(self._case())
        if word == "coproc":
            return self._coprocess()
        return self._function_keyword()

    def _redirected(self, node: Group | Branches | Loop | ForEach | Case | Condition) -> Node:
        while True:
            self._skip_blanks()
            match = _REDIRECT.match(self.text, self.position, self.end)
            if match is None:
                return node
            node.redirects.append(self._redirect(match))

    # -- compound commands

    def _until(self, word: str) -> list[Item]:
        body = self._script(frozenset({word}), "")
        self._take(word)
        return body

    def _take(self, word: str) -> None:
        self._skip_lines()
        if self._reserved() != word:
            raise Unreadable(f"{word!r} expected at {self.position}")
        self.position += len(word)

    def _if(self) -> Branches:
        scripts = [self._until("then")]
        while True:
            scripts.append(self._script(frozenset({"elif", "else", "fi"}), ""))
            word = self._reserved()
            self.position += len(word or "")
            if word == "elif":
                scripts.append(self._until("then"))
            elif word == "else":
                scripts.append(self._until("fi"))
                return Branches(scripts)
            else:
                return Branches(scripts)

    def _for(self) -> Loop | ForEach:
        self._skip_blanks()
        if self.text.startswith("((", self.position):
            close = self._arithmetic_end(self.position + 2)
            if close is None:
                raise Unreadable(f"unfinished for (( at {self.position}")
            self.position += 2
            header = self._embedded(close)
            self.position = close + 2
            self._skip_blanks()
            if self.text.startswith(";", self.position):
                self.position += 1
            return Loop([], header, self._loop_body())
        match = _NAME.match(self.text, self.position, self.end)
        if match is None:
            raise Unreadable(f"variable name expected at {self.position}")
        self.position = match.end()
        self._skip_lines()
        words: list[Word] | None = None
        if self._reserved() == "in":
            self.position += 2
            words = []
            while True:
                self._skip_blanks()
                if self.position >= self.end or self.text[self.position] in "\n;&|()":
                    break
                if self.text[self.position] == "#":
                    self._skip_comment()
                    break
                words.append(self._word())
        self._skip_blanks()
        if self.text.startswith(";", self.position):
            self.position += 1
        return ForEach(match.group(), words, self._loop_body())

    def _loop_body(self) -> list[Item]:
        self._skip_lines()
        if self._reserved() == "{":
            self.position += 1
            return self._until("}")
        self._take("do")
        return self._until("done")

    def _case(self) -> Case:
        self._skip_blanks()
        subject = self._word()
        self._take("in")
        patterns: list[Word] = []
        bodies: list[list[Item]] = []
        while True:
            self._skip_lines()
            if self._reserved() == "esac":
                self.position += 4
                return Case(subject, patterns, bodies)
            if self.text.startswith("(", self.position):
                self.position += 1
            while True:
                self._skip_blanks()
                before = self.position
                patterns.append(self._word())
                self._skip_blanks()
                character = self.text[self.position : self.position + 1]
                self.position += 1
                if character == ")":
                    break
                if character != "|" or self.position == before + 1:
                    raise Unreadable(f"case pattern expected at {before}")
            bodies.append(self._script(frozenset({";;", "esac"}), ""))
            if self.text.startswith(";", self.position):
                self.position += 3 if self.text.startswith(";;&", self.position) else 2

    def _test(self) -> list[Word]:
        words: list[Word] = []
        text = self.text
        while True:
            self._skip_lines()
            if self.position >= self.end:
                raise Unreadable("unfinished [[")
            if text.startswith("]]", self.position) and text[self.position + 2 : self.position + 3] in "\n \t;&|)<>":
                self.position += 2
                return words
            character = text[self.position]
            is_process = character in "<>" and text[self.position + 1 : self.position + 2] == "("
            if character in "()<>&|;" and not is_process:
                self.position += 1
                continue
            words.append(self._word())

    def _coprocess(self) -> Node:
        self._skip_blanks()
        match = re.compile(r"[A-Za-z_][A-Za-z0-9_]*[ \t]+(?=[({]|while|until|for|if|case|\[\[)").match(
            self.text, self.position, self.end
        )
        if match is not None and self._reserved() is None:
            self.position = match.end()
        return Group([Item(self._command(), "&")], subshell=True)

    def _function_keyword(self) -> Function:
        self._skip_blanks()
        match = re.compile(r"[^ \t\n|&;()<>$`'\"\\]+").match(self.text, self.position, self.end)
        if match is None:
            raise Unreadable(f"function name expected at {self.position}")
        self.position = match.end()
        self._skip_blanks()
        if self.text.startswith("(", self.position):
            self.position += 1
            self._skip_blanks()
            if not self.text.startswith(")", self.position):
                raise Unreadable(f"')' expected at {self.position}")
            self.position += 1
        return self._function_body(match.group())

    def _function_body(self, name: str) -> Function:
        self._skip_lines()
        body = self._command()
        if isinstance(body, Simple):
            raise Unreadable(f"function {name!r} has no compound body")
        return Function(name, body)

    def _parenthesis(self) -> Group | Condition:
        if _SPLIT_OPERATOR.match(self.text, self.position):
            raise Unreadable(f"line continuation inside an operator at {self.position}")
        if self.text.startswith("((", self.position):
            close = self._arithmetic_end(self.position + 2)
            if close is not None:
                self.position += 2
                parts = self._embedded(close)
                self.position = close + 2
                return Condition([Word(parts)])
        self.position += 1
        body = self._script(frozenset(), ")")
        self.position += 1
        return Group(body, subshell=True)

    # -- simple commands

    def _simple(self) -> Node:
        text = self.text
        self.starts.add(self.position)
        node = Simple()
        declares = False
        while True:
            self._skip_blanks()
            position = self.position
            if position >= self.end:
                break
            character = text[position]
            if character in "<>&0123456789{":
                match = _REDIRECT.match(text, position, self.end)
                if match is not None:
                    node.redirects.append(self._redirect(match))
                    continue
            if character in "\n;&|)":
                break
            if character == "#":
                self._skip_comment()
                break
            if character == "(":
                name = self._function_name(node)
                if name is None:
                    raise Unreadable(f"unexpected '(' at {position}")
                return self._function_body(name)
            if not node.words or declares:
                assignment = self._assignment()
                if assignment is not None:
                    node.assignments.append(assignment)
                    continue
            word = self._word()
            if self.position == position:
                raise Unreadable(f"unexpected {character!r} at {position}")
            node.words.append(word)
            if len(node.words) == 1 and len(word.parts) == 1 and isinstance(word.parts[0], Literal):
                first = word.parts[0]
                declares = first.text in _DECLARATIONS
                if not first.quoted and first.text in _KEYWORDS and not node.assignments and not node.redirects:
                    raise Unreadable(f"reserved word {first.text!r} at {position}")
        return node

    def _function_name(self, node: Simple) -> str | None:
        if len(node.words) != 1 or node.assignments or node.redirects:
            return None
        match = re.compile(r"\([ \t]*\)").match(self.text, self.position, self.end)
        parts = node.words[0].parts
        if match is None or not all(isinstance(part, Literal) for part in parts):
            return None
        self.position = match.end()
        return "".join(part.text for part in parts if isinstance(part, Literal))

    def _assignment(self) -> Assignment | None:
        match = _ASSIGNMENT.match(self.text, self.position, self.end)
        if match is None:
            return None
        start = self.position
        self.position = match.end()
        operator = match.group(2)
        index: list[Part] = []
        if operator == "[":
            index = self._subscript()
            tail = re.compile(r"\]\+?=").match(self.text, self.position, self.end)
            if tail is None:
                self.position = start
                return None
            self.position = tail.end()
            operator = tail.group()[1:]
        append = operator == "+="
        if self.text.startswith("(", self.position):
            return Assignment(match.group(1), append, None, self._array(), index)
        return Assignment(match.group(1), append, self._word(), None, index)

    def _array(self) -> list[Word]:
        self.position += 1
        elements: list[Word] = []
        while True:
            self._skip_lines()
            if self.position >= self.end:
                raise Unreadable("unfinished array")
            if self.text[self.position] == ")":
                self.position += 1
                return elements
            before = self.position
            elements.append(self._word())
            if self.position == before:
                raise Unreadable(f"unexpected {self.text[before]!r} in an array at {before}")

    def _redirect(self, match: re.Match[str]) -> Redirect:
        if _SPLIT_OPERATOR.match(self.text, match.start(2) if match.group(2) else match.start(3)):
            raise Unreadable(f"line continuation inside an operator at {match.start()}")
        operator: str = match.group(2) or match.group(3)
        self.position = match.end()
        self._skip_blanks()
        start = self.position
        word = self._word()
        if self.position == start:
            raise Unreadable(f"{operator} without a target at {start}")
        redirect = Redirect(operator, word, match.group(1) or "")
        if operator in ("<<", "<<-"):
            quoted = any(isinstance(part, Literal) and part.quoted for part in word.parts)
            literal = all(isinstance(part, Literal) for part in word.parts)
            delimiter = (
                "".join(part.text for part in word.parts if isinstance(part, Literal))
                if literal
                else self.text[start : self.position]
            )
            redirect.target = Word([])
            self._heredocs.append(_Heredoc(redirect, delimiter, quoted, operator == "<<-"))
        return redirect

    # -- words

    def _word(self, stop: str = "") -> Word:
        parts: list[Part] = []
        text, end = self.text, self.end
        while self.position < end:
            match = _RUN.match(text, self.position, end)
            if match is not None:
                run = match.group()
                if stop and stop in run:
                    run = run[: run.index(stop)]
                    if run:
                        parts.append(Literal(run, quoted=False))
                    self.position += len(run)
                    break
                parts.append(Literal(run, quoted=False))
                self.position = match.end()
                continue
            character = text[self.position]
            if character in " \t\n|&;)":
                break
            if character == "\\":
                self._escape(parts)
            elif character == "'":
                self._single_quote(parts)
            elif character == '"':
                self._double_quote(parts)
            elif character == "$":
                self._dollar(parts, quoted=False)
            elif character == "`":
                parts.append(self._backtick(quoted=False))
            elif character in "<>":
                if text[self.position + 1 : self.position + 2] != "(":
                    break
                self.position += 2
                parts.append(ProcessSubstitution(self._parenthesised(), writes=character == ">"))
            elif self._opens_pattern(parts):
                self.position += 1
                parts.append(Pattern(self._pattern()))
            else:
                break
        return Word(parts)

    @staticmethod
    def _opens_pattern(parts: list[Part]) -> bool:
        if not parts:
            return False
        last = parts[-1]
        return isinstance(last, Literal) and not last.quoted and last.text[-1] in "?*+@!"

    def _pattern(self) -> list[Part]:
        parts: list[Part] = []
        self._enter()
        while True:
            if self.position >= self.end:
                raise Unreadable("unfinished extended pattern")
            character = self.text[self.position]
            if character == ")":
                self.position += 1
                self.nesting -= 1
                return parts
            before = self.position
            parts.extend(self._word().parts)
            if self.position == before:
                if character == "(":
                    self.position += 1
                    parts.append(Pattern(self._pattern()))
                else:
                    self.position += 1

    def _escape(self, parts: list[Part]) -> None:
        following = self.text[self.position + 1 : min(self.position + 2, self.end)]
        self.position += 2 if following else 1
        if following != "\n":
            parts.append(Literal(following or "\\", quoted=True))

    def _single_quote(self, parts: list[Part]) -> None:
        close = self.text.find("'", self.position + 1, self.end)
        if close < 0:
            raise Unreadable(f"unfinished ' at {self.position}")
        parts.append(Literal(self.text[self.position + 1 : close], quoted=True))
        self.position = close + 1

    def _double_quote(self, parts: list[Part]) -> None:
        start = self.position
        self.position += 1
        parts.append(Literal("", quoted=True))
        while self.position < self.end:
            match = _QUOTED_RUN.match(self.text, self.position, self.end)
            if match is not None:
                parts.append(Literal(match.group(), quoted=True))
                self.position = match.end()
                continue
            character = self.text[self.position]
            if character == '"':
                self.position += 1
                return
            self._quoted_special(parts, character, '$`"\\')
        raise Unreadable(f'unfinished " at {start}')

    def _quoted_special(self, parts: list[Part], character: str, escapable: str) -> None:
        if character == "\\":
            following = self.text[self.position + 1 : min(self.position + 2, self.end)]
            if following == "\n":
                self.position += 2
            elif following and following in escapable:
                parts.append(Literal(following, quoted=True))
                self.position += 2
            else:
                parts.append(Literal("\\", quoted=True))
                self.position += 1
        elif character == "$":
            self._dollar(parts, quoted=True)
        else:
            parts.append(self._backtick(quoted=True))

    def _dollar(self, parts: list[Part], *, quoted: bool) -> None:
        text, start = self.text, self.position
        following = text[start + 1 : min(start + 2, self.end)]
        if following == "(":
            if text.startswith("((", start + 1):
                close = self._arithmetic_end(start + 3)
                if close is not None:
                    self.position = start + 3
                    parts.append(Arithmetic(self._embedded(close), quoted))
                    self.position = close + 2
                    return
            self.position = start + 2
            parts.append(Substitution(self._parenthesised(), quoted))
        elif following == "{":
            parts.append(self._braced(quoted=quoted))
        elif following == "[":
            self.position = start + 2
            inner = self._subscript()
            self.position += 1
            parts.append(Arithmetic(inner, quoted))
        elif following == "'" and not quoted:
            decoded, position = ansi_c(text, start + 2, self.end)
            if position < 0:
                raise Unreadable(f"unfinished $' at {start}")
            parts.append(Literal(decoded, quoted=True))
            self.position = position
        elif following == '"' and not quoted:
            self.position += 1
            self._double_quote(parts)
        elif following == "\\" and text.startswith("\\\n", start + 1):
            raise Unreadable(f"line continuation after $ at {start}")
        else:
            match = re.compile(r"[A-Za-z_][A-Za-z0-9_]*|[0-9@*#?$!\-]").match(text, start + 1, self.end)
            if match is None:
                parts.append(Literal("$", quoted=quoted))
                self.position += 1
            else:
                parts.append(Parameter(match.group(), quoted))
                self.position = match.end()
                if self.text.startswith("\\\n", self.position):
                    raise Unreadable(f"line continuation after a variable name at {self.position}")

    def _parenthesised(self) -> list[Item]:
        outer, self._heredocs = self._heredocs, []
        body = self._script(frozenset(), ")")
        self.position += 1
        if self._heredocs:
            raise Unreadable("here-document without a body inside a substitution")
        self._heredocs = outer
        return body

    def _braced(self, *, quoted: bool) -> Part:
        start = self.position
        self.position += 2
        if self.text[self.position : self.position + 1] in (" ", "\t", "\n", "|"):
            self.position += 1
            return Substitution(self._until("}"), quoted)
        match = _PARAMETER.match(self.text, self.position, self.end)
        if match is None and self.text.startswith("#}", self.position):
            self.position += 2
            return Parameter("#", quoted)
        if match is None:
            raise Unreadable(f"bad substitution at {start}")
        self.position = match.end()
        part = Parameter(match.group(3), quoted, indirect=bool(match.group(1)), length=bool(match.group(2)))
        if self.text.startswith("[", self.position):
            self.position += 1
            index = self._subscript()
            self.position += 1
            simple = all(isinstance(piece, Literal) for piece in index)
            part.index = "".join(piece.text for piece in index if isinstance(piece, Literal)) if simple else ""
            part.argument.extend(piece for piece in index if not isinstance(piece, Literal))
        if self.text.startswith("}", self.position):
            self.position += 1
            return part
        operator = _OPERATOR.match(self.text, self.position, self.end)
        if operator is None:
            raise Unreadable(f"bad substitution at {start}")
        part.operator = operator.group()
        self.position = operator.end()
        self._enter()
        quotes_are_text = quoted and part.operator in _LITERAL_QUOTE_OPERATORS
        part.argument = part.argument + self._braced_argument(start, quotes_are_text=quotes_are_text)
        self.nesting -= 1
        return part

    def _braced_argument(self, start: int, *, quotes_are_text: bool) -> list[Part]:
        parts: list[Part] = []
        while self.position < self.end:
            match = _BRACED_RUN.match(self.text, self.position, self.end)
            if match is not None:
                parts.append(Literal(match.group(), quoted=quotes_are_text))
                self.position = match.end()
                continue
            character = self.text[self.position]
            if character == "}":
                self.position += 1
                return parts
            if character == "\\":
                self._escape(parts)
            elif character == "'" and quotes_are_text:
                parts.append(Literal("'", quoted=True))
                self.position += 1
            elif character == "'":
                self._single_quote(parts)
            elif character == '"':
                self._double_quote(parts)
            elif character == "$":
                self._dollar(parts, quoted=quotes_are_text)
            else:
                parts.append(self._backtick(quoted=quotes_are_text))
        raise Unreadable(f"unfinished ${{ at {start}")

    def _subscript(self) -> list[Part]:
        """Parts up to the matching `]`, which is not consumed; blanks and operators are text here."""
        parts: list[Part] = []
        depth = 0
        while self.position < self.end:
            character = self.text[self.position]
            if character == "]":
                if depth == 0:
                    return parts
                depth -= 1
            if character == "[":
                depth += 1
            if character in "\\'\"$`":
                parts.extend(self._word("]").parts)
                continue
            parts.append(Literal(character, quoted=False))
            self.position += 1
        raise Unreadable("unfinished [")

    def _backtick(self, *, quoted: bool) -> Substitution:
        start = self.position
        position = start + 1
        pieces: list[str] = []
        escaped = False
        while position < self.end:
            character = self.text[position]
            if character == "`":
                break
            if character == "\\" and position + 1 < self.end:
                following = self.text[position + 1]
                if following in "`$\\" or (quoted and following == '"'):
                    pieces.append(following)
                    escaped = True
                else:
                    pieces.append(character + following)
                position += 2
                continue
            close = _next_backtick(self.text, position, self.end)
            pieces.append(self.text[position:close])
            position = close
        else:
            raise Unreadable(f"unfinished ` at {start}")
        inner = Reader("".join(pieces), nesting=self.nesting)
        body = inner.read()
        if not escaped:
            self.starts.update(start + 1 + offset for offset in inner.starts)
        self.position = position + 1
        return Substitution(body, quoted)

    def _arithmetic_end(self, position: int) -> int | None:
        """Where the `))` is that closes an arithmetic opened before `position`, or None if it is none."""
        depth = 0
        text = self.text
        finder = _ARITHMETIC_SPECIAL
        while True:
            match = finder.search(text, position, self.end)
            if match is None:
                return None
            position = match.end()
            character = match.group()
            if character == "(":
                depth += 1
            elif character == ")":
                if depth == 0:
                    return match.start() if text.startswith(")", position) and position < self.end else None
                depth -= 1
            elif character == "\\":
                position += 1
            elif character == "\n#":
                return None
            else:
                close = text.find(character, position, self.end)
                if close < 0:
                    return None
                position = close + 1

    def _embedded(self, close: int) -> list[Part]:
        """Parts between here and `close`, read as inside double quotes."""
        return self._region(close, _HEREDOC_RUN, '$`"\\')

    def _region(self, close: int, run: re.Pattern[str], escapable: str) -> list[Part]:
        self._enter()
        parts: list[Part] = []
        outer, self.end = self.end, close
        while self.position < close:
            match = run.match(self.text, self.position, close)
            if match is not None:
                parts.append(Literal(match.group(), quoted=True))
                self.position = match.end()
            else:
                self._quoted_special(parts, self.text[self.position], escapable)
        self.end = outer
        self.nesting -= 1
        return parts

    def _enter(self) -> None:
        self.nesting += 1
        if self.nesting > MAX_NESTING:
            raise TooDeep(f"nested deeper than {MAX_NESTING} levels")

    # -- blanks, comments, here-documents

    def _reserved(self) -> str | None:
        match = _RESERVED.match(self.text, self.position, self.end)
        return None if match is None else match.group(1) or match.group(2)

    def _skip_blanks(self) -> None:
        match = _BLANKS.match(self.text, self.position, self.end)
        if match is not None:
            self.position = match.end()

    def _skip_comment(self) -> None:
        close = self.text.find("\n", self.position, self.end)
        start, self.position = self.position, self.end if close < 0 else close
        self.comments.append((start, self.position))

    def _skip_lines(self) -> None:
        while True:
            self._skip_blanks()
            character = self.text[self.position : self.position + 1] if self.position < self.end else ""
            if character == "\n":
                self._newline()
            elif character == "#":
                self._skip_comment()
            else:
                return

    def _newline(self) -> None:
        self.position += 1
        if self._heredocs:
            self._finish_heredocs()

    def _finish_heredocs(self) -> None:
        pending, self._heredocs = self._heredocs, []
        for heredoc in pending:
            self._heredoc(heredoc)

    def _heredoc(self, heredoc: _Heredoc) -> None:
        text = self.text
        start = position = self.position
        lines: list[str] = []
        while True:
            if position >= self.end:
                close = following = self.end
                break
            line_start = position
            position = self._line_end(position)
            if not heredoc.quoted:
                # bash joins continued lines before it looks for the delimiter.
                while position < self.end and _continues(text, line_start, position):
                    position = self._line_end(position + 1)
            line = text[line_start:position]
            if not heredoc.quoted:
                line = line.replace("\\\n", "")
            stripped = line.lstrip("\t") if heredoc.strips_tabs else line
            if stripped == heredoc.delimiter:
                close, following = line_start, min(position + 1, self.end)
                break
            lines.append(stripped)
            position += 1
        if heredoc.quoted:
            body: list[Part] = [Literal("\n".join(lines) + "\n" if lines else "", quoted=True)]
        elif heredoc.strips_tabs:
            inner = Reader("\n".join(lines) + "\n", nesting=self.nesting)
            body = inner._region(inner.end, _HEREDOC_RUN, "$`\\")
        else:
            self.position = start
            body = self._region(close, _HEREDOC_RUN, "$`\\")
        heredoc.redirect.target = Word(body)
        self.position = following

    def _line_end(self, position: int) -> int:
        close = self.text.find("\n", position, self.end)
        return self.end if close < 0 else close


_ARITHMETIC_SPECIAL = re.compile(r"[()'\"\\`]|\n#")
_BACKTICK_SPECIAL = re.compile(r"[`\\]")


def _next_backtick(text: str, position: int, end: int) -> int:
    match = _BACKTICK_SPECIAL.search(text, position, end)
    if match is None:
        return end
    return match.start() if match.start() > position else min(position + 1, end)


def _continues(text: str, start: int, end: int) -> bool:
    backslashes = 0
    while end - 1 - backslashes >= start and text[end - 1 - backslashes] == "\\":
        backslashes += 1
    return backslashes % 2 == 1

