"""Walks a script without running it: follows data from assignment to use, from pipe to reader, and from file to execution.

A `Shell` is made for one inspection. It ends early with `Blocked` at the first command that can never
be allowed; everything else is collected as findings. Work is bounded by a step budget and a nesting limit, so an
inspection always ends.
"""

from __future__ import annotations

import fnmatch
import itertools
import math
import re
from collections.abc import Iterable

import msgspec

from .call import MAX_EXCERPT, Call, base_name, excerpt_of, quoted
from .expansion import MAX_ALTERNATIVES, Expander
from .ledger import MAX_DEPTH, Ledger
from .marks import DECODED, HOLE, REMOTE, SOLID, is_dynamic, plain, shown
from .options import listed
from .paths import fold, is_own, is_raw_disk, read_category, write_category
from .pruning import prune
from .reader import Reader, Unreadable
from .registry import ALL_NAMES, RUNNERS, find_rule
from .rules.words import judge_words
from .state import State, Value
from .structure import leaves, literal_name, started_beside
from .syntax import (
    Assignment,
    Branches,
    Case,
    Condition,
    ForEach,
    Function,
    Group,
    Item,
    Loop,
    Node,
    Pipeline,
    Redirect,
    Simple,
)
from .values import any_of, append, bounded, chunks, items_of, union
from .verdict import BlockCategory, Blocked, Category

_CODE_VARIABLES = frozenset(
    listed(
        "EDITOR VISUAL PAGER MANPAGER GIT_PAGER GIT_EDITOR GIT_SSH_COMMAND GIT_EXTERNAL_DIFF GIT_SEQUENCE_EDITOR BROWSER PROMPT_COMMAND PS0 PS1 PS2 PS4 "
        "LESSOPEN LESSCLOSE SSH_ASKPASS SUDO_ASKPASS GIT_ASKPASS RSYNC_RSH CVS_RSH"
    )
)
_LOADED_VARIABLES = frozenset({"LD_PRELOAD", "LD_AUDIT"})
_STARTUP_VARIABLES = frozenset({"BASH_ENV", "ENV", "ZDOTDIR"})
_SUBSCRIPT = re.compile(r"\[[^\[]{0,200}(?:\$\(|`)")
_EVALUATORS = frozenset(
    {"let", "test", "[", "declare", "typeset", "local", "export", "readonly", "printf", "read", "unset"}
)
_NO_READERS = frozenset(
    listed(
        "echo printf ls gls dir stat test [ [[ mkdir rmdir touch chmod chown chgrp cd pushd popd find gfind fd fdfind git gh docker docker-compose podman "
        "source . ssh ssh-add ssh-copy-id rm grm unlink shred true which type export alias declare readonly set read eval trap ps kill curl wget du df"
    )
)
"""Programs that do not print the contents of the files they name, or whose own rule judges them."""
_PATTERN_FIRST = frozenset(listed("grep egrep fgrep rg ag ack sed gsed awk gawk jq yq perl"))
_WRITE_LAST = frozenset(listed("cp gcp mv gmv install ln gln"))
_COPIES_TREES = frozenset(listed("tar zip 7z cp rsync scp rclone"))
_KEYED = re.compile(r"\A\[[^\]]*\]\+?=")
_READ_OPERATORS = frozenset({"<", "<>"})
_WRITE_OPERATORS = frozenset({">", ">>", ">|", "&>", "&>>", "<>", ">&"})


class Redirected(msgspec.Struct):
    """The result of redirections: the text on standard input, and the files of standard output."""

    stdin: str | None
    targets: list[str]


class Shell(Ledger):
    """One walk over one command line."""

    def __init__(
        self,
        *,
        home: str,
        cwd: str,
        gateway_home: str = "",
        confined: bool = False,
        sudo_password_configured: bool = False,
    ) -> None:
        super().__init__(confined=confined)
        self.state = State(home=home, cwds=(cwd,))
        self.gateway_home = gateway_home
        self.sudo_password_configured = sudo_password_configured
        self.expander = Expander(self.state, self._substitute, self.run_sink)
        self._guesses = 0
        self._active: list[str] = []
        self.dangerous_names = ALL_NAMES
        self.bulk = 0
        """The number of searches (`find`, `xargs`) that feed the present command."""

    # -- what rules use

    def run_text(self, text: str, stdin: str | None = None, *, positional: Iterable[str] | None = None) -> str:
        """Follow text that a shell would run; unreadable text with unknown parts is left to the findings."""
        self._spend(len(text))
        self._origin(text, text)
        if (REMOTE in text or DECODED in text) and not plain(text).strip(HOLE + SOLID + "\n"):
            return HOLE
        with self._deeper():
            try:
                items = Reader(plain(text)).read()
            except Unreadable as problem:
                if self._muted or self._tentative or is_dynamic(text):
                    return HOLE
                if self._guesses:
                    # One of several possible texts; it need not be one that ever runs.
                    excerpt = shown(text)[:MAX_EXCERPT]
                    self.flag(Category.DYNAMIC_COMMAND, "runs text that is put together at run time", excerpt)
                    return HOLE
                raise Blocked(BlockCategory.UNPARSEABLE, f"a nested shell text cannot be read: {problem}") from None
            if positional is None:
                return self.script(items, stdin)
            saved, self.state.positional = self.state.positional, tuple(positional)
            try:
                with self.state.maybe():
                    return self.script(items, stdin)
            finally:
                self.state.positional = saved

    def run_file(self, path: str, stdin: str | None, arguments: list[str]) -> str | None:
        """Follow a file whose text this command line wrote; return None if the text is not known."""
        text = self.file_text(path)
        if text is None:
            return None
        self._origin(text, path)
        if not plain(text).strip(HOLE + SOLID + "\n"):
            return HOLE
        with self.state.maybe():
            return self.run_text(text, stdin, positional=arguments)

    def file_text(self, path: str) -> str | None:
        """Return the text that this command line wrote to the file; None if it wrote none."""
        if not self.state.files:
            return None
        return self.state.files.get(self.file_key(path))

    def call(self, argv: list[str], stdin: str | None) -> str:
        """Judge one command by its words; return what it would print, as far as known."""
        self.step()
        if not argv:
            return ""
        self._judge(argv)
        with self._deeper():
            return self._call(argv, stdin)

    def reads(self, path: str, excerpt: str) -> None:
        """Flag a file with credentials, or one of the gateway's own, that is handed to a program."""
        if not path or is_dynamic(path[:1]) or len(path) > 4_096:
            return
        for spelling in self.state.resolve(path) if self.state.links else [path]:
            expanded = self.state.home + spelling[1:] if spelling.startswith("~/") else spelling
            for cwd in self.state.cwds:
                question = read_category(expanded, cwd, self.gateway_home)
                if question is not None:
                    self.flag(*question, excerpt)

    def _reads_operands(self, name: str, arguments: list[str]) -> None:
        operands = [word for word in arguments if not word.startswith("-")]
        if name in _PATTERN_FIRST and "-e" not in arguments:
            operands = operands[1:]
        elif name in _WRITE_LAST and len(operands) > 1:
            self._own(operands.pop(), excerpt_of([name, *arguments]))
        if name in _NO_READERS:
            for operand in operands if self.gateway_home else ():
                self._own(operand, excerpt_of([name, *arguments]))
            return
        for operand in operands[:256]:
            self.reads(operand, excerpt_of([name, *arguments]))
            if "=" in operand:
                self.reads(operand.rpartition("=")[2].lstrip("@<"), excerpt_of([name, *arguments]))
            if (
                name in _COPIES_TREES
                and operand.startswith("/")
                and fold(operand, "/") in ((), fold(self.state.home, "/"))
            ):
                self.flag(Category.CREDENTIAL_READ, "copies the whole home directory", excerpt_of([name, *arguments]))

    def _own(self, path: str, excerpt: str) -> None:
        for cwd in self.state.cwds:
            if is_own("/" + "/".join(fold(plain(path), cwd)), self.gateway_home):
                self.flag(Category.GATEWAY_FILES, "uses the gateway's own files", excerpt)

    def write(self, path: str, text: str | None, excerpt: str) -> None:
        """Judge a write to a file and remember the text."""
        path = plain(path)
        if self.gateway_home:
            self._own(path, excerpt)
        if is_raw_disk(path):
            reason = f"writes to the raw disk {shown(path)}, which destroys what is on it"
            raise Blocked(BlockCategory.RAW_DISK_WRITE, reason)
        sink = self.state.sinks.get(path)
        if sink is not None:
            self.run_sink(sink, HOLE if text is None else text)
            return
        if path.startswith("/dev/"):
            if path.startswith(("/dev/tcp/", "/dev/udp/")):
                self.flag(Category.REMOTE_CODE, "connects a shell stream to the network", excerpt)
            elif path.startswith(("/dev/mem", "/dev/kmem", "/dev/port")):
                self.flag(Category.DISK_ACCESS, "writes to a raw device", excerpt)
            return
        if path.endswith("/sysrq-trigger") and path.startswith("/proc"):
            raise Blocked(BlockCategory.SHUTDOWN, "writes to sysrq-trigger, which can stop the machine at once")
        for cwd in self.state.cwds:
            question = write_category(path, cwd)
            if question is not None:
                self.flag(*question, excerpt)
                break
        key = self.file_key(path)
        known = self.state.files.get(key)
        fresh = HOLE if text is None else text
        if known is not None and known != fresh:
            fresh = known + "\n" + fresh
        self.state.files[key] = bounded(fresh)

    # -- scripts

    def script(self, items: list[Item], stdin: str | None) -> str:
        """Follow a list of commands; return all that they would print."""
        with self._deeper():
            return self._script(items, stdin)

    def _script(self, items: list[Item], stdin: str | None) -> str:
        outputs: list[str] = []
        state = self.state
        chain_start = state.cwds
        previous = ";"
        for position, item in enumerate(items):
            if previous not in ("&&", "||"):
                chain_start = state.cwds
            before = state.cwds
            if previous in ("&&", "||") or item.operator == "&":
                with state.maybe():
                    output = self.node(item.node, stdin)
            else:
                output = self.node(item.node, stdin)
            if output:
                outputs.append(output)
            if state.cwds is not before:
                chain_start = self._settle_directory(before, chain_start, items, position)
            elif item.operator not in ("&&", "||") and state.cwds is not chain_start and previous in ("&&", "||"):
                state.cwds = union(chain_start, state.cwds)
            previous = item.operator
        return bounded("".join(outputs))

    def _settle_directory(
        self, before: tuple[str, ...], chain_start: tuple[str, ...], items: list[Item], position: int
    ) -> tuple[str, ...]:
        """After a `cd`: where what follows may run, and where it may run once the chain of `&&` and `||` is over.

        What follows `&&` or `|| exit` runs only in the new directory, anything else maybe in the old one too.
        """
        state = self.state
        item = items[position]
        stops = state.errexit and self._depth == 1 and item.operator in (";", "\n", "")
        if stops or (item.operator == "||" and position + 1 < len(items) and self._leaves(items[position + 1])):
            return state.cwds
        if item.operator != "&&":
            state.cwds = union(union(chain_start, before), state.cwds)
        return chain_start

    def _leaves(self, item: Item) -> bool:
        """Return whether no later command runs: this one exits, `exit` was not redefined, and it is not in the background."""
        if "exit" in self.state.functions or "exit" in self.state.aliases or item.operator == "&":
            return False
        return leaves(item.node, in_function=bool(self._active))

    def node(self, node: Node, stdin: str | None) -> str:
        """Follow one command of any kind."""
        if isinstance(node, Simple):
            return self._simple(node, stdin)
        self.step()
        if isinstance(node, Pipeline):
            return self._pipeline(node, stdin)
        if isinstance(node, Function):
            return self._define(node)
        with self._deeper():
            redirected = self._redirects(node.redirects, stdin)
            output = self._compound(node, redirected.stdin)
        return self._deliver(output, redirected.targets, "redirected group")

    def _compound(self, node: Group | Branches | Loop | ForEach | Case | Condition, stdin: str | None) -> str:
        state = self.state
        if isinstance(node, Group):
            if not node.subshell:
                return self._script(node.body, stdin)
            directory = state.cwds
            with state.maybe():
                output = self._script(node.body, stdin)
            state.cwds = directory
            return output
        if isinstance(node, Condition):
            for word in node.words:
                for fields in self.expander.fields(word):
                    self._subscripts(fields)
            return ""
        with state.maybe():
            if isinstance(node, Branches):
                outputs = [self._script(script, stdin) for script in node.scripts]
                return any_of(outputs)
            if isinstance(node, Case):
                for word in (node.subject, *node.patterns):
                    self.expander.fields(word)
                return any_of([self._script(body, stdin) for body in node.bodies])
            if isinstance(node, ForEach):
                return self._for_each(node, stdin)
            self.expander.texts(node.header)
            output = ""
            for _ in range(2):
                output = self._script(node.condition, stdin) + self._script(node.body, stdin)
            return output

    def _for_each(self, node: ForEach, stdin: str | None) -> str:
        values: list[Value] = []
        if node.words is None:
            values.extend(item for value in self.state.lookup("@") for item in items_of(value))
        else:
            for word in node.words:
                for alternative in self.expander.fields(word):
                    values.extend(alternative)
        outputs: list[str] = []
        before = self.state.lookup(node.variable)
        for chunk in chunks(list(dict.fromkeys(values)) or [HOLE], 128):
            self.state.variables[node.variable] = chunk
            outputs.append(self._script(node.body, stdin))
            if len(chunk) > 1 or len(node.body) > 1:
                outputs[-1] = self._script(node.body, stdin)
        self.state.variables[node.variable] = list(dict.fromkeys([*before, *values]))[-512:]
        return bounded("".join(outputs))

    def _pipeline(self, node: Pipeline, stdin: str | None) -> str:
        if len(node.commands) == 1:
            return self.node(node.commands[0], stdin)
        directory = self.state.cwds
        flowing = stdin
        with self._deeper(), self.state.maybe():
            for command in node.commands:
                flowing = self.node(command, flowing)
                self.state.cwds = directory
        return flowing or ""

    def _define(self, node: Function) -> str:
        started = frozenset(started_beside(node.body, beside=False))
        self.state.detached[node.name] = started | self.state.detached.get(node.name, frozenset())
        if self._starts_itself(node.name):
            raise Blocked(BlockCategory.FORK_BOMB, f"function {node.name!r} starts copies of itself without end")
        self.state.functions.setdefault(node.name, []).append(node.body)
        self._enter_function(node.name, None)
        return ""

    def _starts_itself(self, name: str) -> bool:
        waiting, seen = list(self.state.detached[name]), set[str]()
        while waiting:
            started = waiting.pop()
            if started == name:
                return True
            if started not in seen:
                seen.add(started)
                waiting.extend(self.state.detached.get(started, ()))
        return False

    def _enter_function(self, name: str, arguments: list[str] | None, stdin: str | None = None) -> str:
        if self._active.count(name) > 1 or len(self._active) > MAX_DEPTH:
            return HOLE
        saved = self.state.positional
        self.state.positional = None if arguments is None else tuple(arguments)
        self._active.append(name)
        try:
            with self.state.maybe(), self._deeper():
                return bounded("".join([self.node(body, stdin) for body in self.state.functions[name][-8:]]))
        finally:
            self._active.pop()
            self.state.positional = saved

    # -- simple commands

    def _simple(self, node: Simple, stdin: str | None) -> str:
        self.step()
        words = node.words
        alternatives = [self.expander.fields(word) for word in words]
        for assignment in node.assignments:
            self._assign(assignment, certain=not words or literal_name(node) in ("export", "declare", "readonly"))
            if words and any("-n" in fields for option in alternatives for fields in option):
                self._refer(assignment.name)
            if words and (
                literal_name(node) == "readonly" or any("-r" in fields for option in alternatives for fields in option)
            ):
                self.state.fixed.add(assignment.name)
        redirected = self._redirects(node.redirects, stdin) if node.redirects else Redirected(stdin, [])
        if not words:
            text = self._read_through(node, redirected)
            return self._deliver(text, redirected.targets, "redirection")
        if len(words) == 1 and literal_name(node) == "exec" and redirected.stdin is not stdin:
            self.state.stdin = redirected.stdin
        choices = self._choices(alternatives)
        self._guesses += len(choices) > 1
        try:
            outputs = [self.call(argv, redirected.stdin) for argv in choices]
        finally:
            self._guesses -= len(choices) > 1
        last = [alternative[-1] for alternative in alternatives[-1] if alternative]
        if last:
            self.state.variables["_"] = list(last[:64])
        output = outputs[0] if len(outputs) == 1 else any_of(list(dict.fromkeys(outputs)))
        if not redirected.targets:
            return output
        return self._deliver(output, redirected.targets, " ".join(f for a in alternatives for f in a[0])[:MAX_EXCERPT])

    @staticmethod
    def _read_through(node: Simple, redirected: Redirected) -> str:
        """`$(<file)` prints the file; other bare redirections print nothing."""
        if any(redirect.operator == "<" for redirect in node.redirects):
            return HOLE if redirected.stdin is None else redirected.stdin
        return ""

    def _choices(self, alternatives: list[list[list[str]]]) -> list[list[str]]:
        count = math.prod(map(len, alternatives))
        if count == 1:
            return [[field for alternative in alternatives for field in alternative[0]]]
        if count > MAX_ALTERNATIVES:
            names = {fields[0] for fields in alternatives[0] if fields}
            if names and not any(is_dynamic(name) or find_rule(base_name(name)) is not None for name in names):
                return [[field for alternative in alternatives for field in alternative[0]]]
            alternatives = [prune(alternative, 6, " ".join, [HOLE]) for alternative in alternatives]
            count = math.prod(map(len, alternatives))
            if count > MAX_ALTERNATIVES * 4:
                raise Blocked(BlockCategory.OVER_LIMIT, "a command has too many possible spellings to inspect")
        return [list(itertools.chain.from_iterable(choice)) for choice in itertools.product(*alternatives)]

    def _assign(self, assignment: Assignment, *, certain: bool) -> None:
        state = self.state
        if assignment.index:
            self.expander.texts(assignment.index)
        values: list[Value]
        if assignment.elements is not None:
            fields: list[list[str]] = [[]]
            for word in assignment.elements:
                options = self.expander.fields(word)
                if len(fields) * len(options) > MAX_ALTERNATIVES:
                    fields = prune(fields, 20, " ".join, [HOLE])
                    options = prune(options, 20, " ".join, [HOLE])
                if len(options) == 1:
                    for items in fields:
                        items.extend(options[0])
                else:
                    fields = [left + right for left in fields for right in options]
            values = [tuple(_KEYED.sub("", item) for item in items) for items in fields]
        else:
            parts = [] if assignment.value is None else assignment.value.parts
            texts = self.expander.texts(parts, assignment=True)
            self._subscripts(texts)
            values = list(texts)
        if assignment.append or assignment.index:
            old_values: list[Value] = prune(state.lookup(assignment.name), 24, str, HOLE)
            grown = [append(old, new) for old in old_values for new in prune(values, 24, str, HOLE)]
            self._spend(sum(map(len, grown)))
            values = [*values, *grown] if assignment.index else grown
        state.assign(assignment.name, values, certain=certain and not assignment.index)
        if assignment.name in _STARTUP_VARIABLES:
            for value in values:
                self.run_file(value if isinstance(value, str) else "", None, [])
        if assignment.name in _CODE_VARIABLES:
            for value in values:
                if isinstance(value, str) and value.strip(HOLE + SOLID):
                    with self.tentative(), state.maybe():
                        self.run_text(value.lstrip("|"))
        if assignment.name in _LOADED_VARIABLES:
            self.flag(Category.PERSISTENCE, f"{assignment.name} loads code into every program", assignment.name)

    def _refer(self, name: str) -> None:
        target = self.state.lookup(name)[-1]
        if isinstance(target, str) and target.isidentifier() and target != name:
            self.state.references[name] = target

    def _subscripts(self, texts: list[str]) -> None:
        """Arithmetic evaluates array subscripts again: `x='a[$(cmd)]'; ((x))` runs the command."""
        for text in texts:
            if "[" in text and _SUBSCRIPT.search(text):
                with self.muted(), self.state.maybe():
                    self.run_text(": " + text)

    def _redirects(self, redirects: list[Redirect], stdin: str | None) -> Redirected:
        result = Redirected(stdin, [])
        for redirect in redirects:
            operator = redirect.operator
            if operator in ("<<", "<<-", "<<<"):
                texts = self.expander.texts(redirect.target.parts)
                result.stdin = "\n".join(texts) + "\n" if operator == "<<<" else "".join(texts)
                self._open(redirect.descriptor, result.stdin)
                continue
            targets = ["".join(fields) for fields in self.expander.fields(redirect.target)]
            if operator in _READ_OPERATORS:
                texts = [self.file_text(target) for target in targets]
                for target in targets:
                    self.reads(target, f"< {shown(target)}")
                result.stdin = HOLE if None in texts else "\n".join(text for text in texts if text is not None)
                self._open(redirect.descriptor, result.stdin)
            elif operator == "<&":
                known = self.state.files.get("/dev/fd/" + targets[0].rstrip("-")) if targets else None
                result.stdin = HOLE if known is None else known
            if operator in _WRITE_OPERATORS:
                names = [target for target in targets if not (operator == ">&" and _is_descriptor(target))]
                if redirect.descriptor in ("", "1") or not redirect.descriptor.isdigit():
                    result.targets.extend(names)
                else:
                    for name in names:
                        self.write(name, None, f"{redirect.descriptor}{operator} {shown(name)}")
        return result

    def _open(self, descriptor: str, text: str) -> None:
        if descriptor.isdigit() and descriptor != "0":
            self.state.files["/dev/fd/" + descriptor] = text

    def _deliver(self, output: str, targets: list[str], what: str) -> str:
        if not targets:
            return output
        for target in targets:
            self.write(target, output, shown(f"{what} > {target}")[:MAX_EXCERPT])
        return output if any(plain(t) in ("/dev/stdout", "/dev/tty", "/dev/fd/1") for t in targets) else ""

    def run_sink(self, items: list[Item], text: str) -> None:
        """Follow the script behind `>(…)` with the text it reads."""
        directory = self.state.cwds
        with self.state.maybe():
            self.script(items, text)
        self.state.cwds = directory

    def _substitute(self, items: list[Item]) -> str:
        directory = self.state.cwds
        with self.state.maybe():
            output = self.script(items, None)
        self.state.cwds = directory
        return output

    # -- calls

    def _call(self, argv: list[str], stdin: str | None) -> str:
        first = argv[0]
        self._origin(first, first)
        path = plain(first)
        if is_dynamic(path):
            path, known = self._dynamic(path, argv, stdin)
            if not known:
                return HOLE
        name = base_name(path)
        if ("*" in name or "?" in name or "[" in name) and name not in ("[", "[["):
            return self._globbed(name, path, argv, stdin)
        raw = argv[1:]
        arguments = [plain(argument) for argument in raw]
        if not self._muted:
            self._record(name, arguments)
        if stdin is None:
            stdin = self.state.stdin
        if name in _EVALUATORS:
            self._subscripts(arguments)
        outputs: list[str] = []
        before = self.state.cwds
        self._recall(path)
        if path in self.state.functions:
            outputs.append(self._enter_function(path, arguments, stdin))
        for alias in self.state.aliases.get(path, ())[:8]:
            if self._active.count("alias " + path) == 0:
                self._active.append("alias " + path)
                try:
                    outputs.append(self.run_text(" ".join([alias, *map(quoted, arguments)]), stdin))
                finally:
                    self._active.pop()
        if "/" in path and self.state.files:
            self.run_file(path, stdin, arguments)
        if self.state.programs and (program := self.state.programs.get(name)) is not None and program != name:
            outputs.append(self.call([program, *raw], stdin))
        rule = find_rule(name)
        call = Call(self, name, arguments, raw, stdin, path)
        judge_words(call)
        self._reads_operands(name, arguments)
        if rule is None:
            self._unknown(name, arguments, stdin)
            return any_of(outputs) if outputs else HOLE
        output = rule(call)
        if outputs and self.state.cwds is not before:
            # A redefined command may not have changed the directory at all.
            self.state.cwds = union(before, self.state.cwds)
        outputs.append(HOLE if output is None else output)
        return outputs[0] if len(outputs) == 1 else any_of(outputs)

    def _recall(self, name: str) -> None:
        """Define the session's function or alias of this name, when it is used for the first time."""
        text = self.state.remembered.pop(name, None)
        if text is None:
            return
        if text.startswith("alias "):
            self.state.aliases.setdefault(name, []).append(text.removeprefix("alias "))
            return
        try:
            nodes = [item.node for item in Reader(text).read()]
        except (Unreadable, RecursionError):
            self.flag(Category.DYNAMIC_COMMAND, "the session's shell redefined this command", name)
            return
        self.state.functions[name] = [node.body for node in nodes if isinstance(node, Function)]

    def _dynamic(self, path: str, argv: list[str], stdin: str | None) -> tuple[str, bool]:
        folder, _, name = path.rpartition("/")
        if folder and name and not is_dynamic(name):
            return path, True
        excerpt = excerpt_of(argv)
        self.flag(Category.DYNAMIC_COMMAND, "the command name is known only at run time", excerpt)
        rest = path.replace(HOLE, "")
        if SOLID in rest:
            self._unknown(rest, argv[1:], stdin)
            return path, False
        # An unset variable leaves nothing, so what remains is the command.
        self.call([rest, *argv[1:]] if rest else argv[1:], stdin)
        return path, False

    def _globbed(self, name: str, path: str, argv: list[str], stdin: str | None) -> str:
        self.flag(Category.DYNAMIC_COMMAND, "the command name is a pattern", excerpt_of(argv))
        if len(name) < 64:
            # A pattern without any letter fits every name; then only programs that need arguments to harm are tried.
            names = ALL_NAMES if any(map(str.isalnum, name)) else RUNNERS
            for candidate in sorted(names):
                if fnmatch.fnmatchcase(candidate, name):
                    self.call([candidate, *argv[1:]], stdin)
        return HOLE

    def _unknown(self, name: str, arguments: list[str], stdin: str | None) -> None:
        """Judge a program without a rule as a possible wrapper: only a hard block of what it might run counts."""
        tried: set[str] = set()
        for position, argument in enumerate(arguments):
            base = base_name(plain(argument))
            if base not in tried and (base in RUNNERS or base.startswith("mkfs.")):
                tried.add(base)
                with self.muted():
                    self.call(arguments[position:], stdin)

    def file_key(self, path: str) -> str:
        """Return the absolute name under which a file of this command line is remembered."""
        return "/" + "/".join(fold(plain(path), self.state.cwds[-1]))


def _is_descriptor(target: str) -> bool:
    return target == "-" or target.rstrip("-").isdigit()
