"""Reads shell text into `syntax` nodes the way bash does, and refuses what bash would not read.

The guard owns its reader because a public grammar is written for editors: tree-sitter-bash silently misreads
`rm$IFS-rf$IFS/`, nested backticks and `<<EOF; cmd`, and each misreading is a way past a guard. `second_opinion`
compares the two. Reading is one pass, linear in the text, and bounded in nesting.
"""

from __future__ import annotations

import re

import msgspec

from .syntax import (
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
    Part,
    Pipeline,
    Redirect,
    Simple,
    Word,
)
from .word_reader import MAX_NESTING, TEXT_RUN, StepsLeft, TooDeep, Unreadable, WordReader

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_ASSIGNMENT = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)(\+?=|\[)")
_REDIRECT = re.compile(r"([0-9]+|\{[A-Za-z_][A-Za-z0-9_]*\})?(<<<|<<-|<<|<>|<&|>>|>\||>&|<(?!\()|>(?!\())|(&>>|&>)")
_SPLIT_OPERATOR = re.compile(r"(?:&(?:\\\n)+[&>]|\|(?:\\\n)+[|&]|;(?:\\\n)+[;&]|[<>](?:\\\n)+[<>&(|]|\((?:\\\n)+\()")
_DECLARATIONS = frozenset({"declare", "typeset", "local", "export", "readonly"})
_UNEXPECTED = frozenset({"then", "else", "elif", "fi", "do", "done", "esac", "}"})
_KEYWORDS = _UNEXPECTED | {"if", "while", "until", "for", "select", "case", "function", "coproc", "{", "[[", "!"}


class _Heredoc(msgspec.Struct):
    redirect: Redirect
    delimiter: str
    quoted: bool
    strips_tabs: bool


class Reader(WordReader):
    """One pass over one text; `starts` and `comments` are filled as a side product."""

    def __init__(self, text: str, *, nesting: int = 0, steps: StepsLeft | None = None) -> None:
        super().__init__(text, nesting=nesting, steps=steps)
        self._heredocs: list[_Heredoc] = []

    def read(self) -> list[Item]:
        """Return the whole text as a list of commands."""
        items = self._script(frozenset(), "")
        self._finish_heredocs()
        return items

    def _inner(self, text: str) -> tuple[list[Item], set[int]]:
        inner = Reader(text, nesting=self.nesting, steps=self._steps)
        return inner.read(), inner.starts

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
            if character in ";&|)" and not text.startswith("&>", self.position):
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
                at_stop = text.startswith(";", self.position) or self._reserved() in stops
                if stops and self.position < self.end and not at_stop:
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
                words.append(self._next_word())
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
            words.append(self._next_word())

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
            word = self._next_word()
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
            elements.append(self._next_word())

    def _redirect(self, match: re.Match[str]) -> Redirect:
        if _SPLIT_OPERATOR.match(self.text, match.start(2) if match.group(2) else match.start(3)):
            raise Unreadable(f"line continuation inside an operator at {match.start()}")
        operator: str = match.group(2) or match.group(3)
        self.position = match.end()
        self._skip_blanks()
        start = self.position
        word = self._next_word()
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

    def _parenthesised(self) -> list[Item]:
        outer, self._heredocs = self._heredocs, []
        body = self._script(frozenset(), ")")
        self.position += 1
        if self._heredocs:
            raise Unreadable("here-document without a body inside a substitution")
        self._heredocs = outer
        return body

    # -- here-documents

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
            inner = Reader("\n".join(lines) + "\n", nesting=self.nesting, steps=self._steps)
            body = inner._region(inner.end, TEXT_RUN, "$`\\")
        else:
            self.position = start
            body = self._region(close, TEXT_RUN, "$`\\")
        heredoc.redirect.target = Word(body)
        self.position = following

    def _line_end(self, position: int) -> int:
        close = self.text.find("\n", position, self.end)
        return self.end if close < 0 else close


def _continues(text: str, start: int, end: int) -> bool:
    backslashes = 0
    while end - 1 - backslashes >= start and text[end - 1 - backslashes] == "\\":
        backslashes += 1
    return backslashes % 2 == 1
