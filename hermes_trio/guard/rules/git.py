"""git and the SQL clients: tools that can discard work with one command."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from hermes_trio.guard.marks import plain, shown
from hermes_trio.guard.options import listed, scan
from hermes_trio.guard.verdict import Category

if TYPE_CHECKING:
    from hermes_trio.guard.call import Call

_GLOBAL_VALUED = listed("-C -c --git-dir --work-tree --namespace --exec-path --super-prefix --config-env")
_RUNNING_KEYS = re.compile(
    r"alias\.|core\.(?:pager|editor|sshcommand|fsmonitor|hookspath|gitproxy|askpass)|diff\.external|sequence\.editor|"
    r"credential\.helper|filter\.|pager\.|gpg\.program|uploadpack|merge\..*driver|diff\..*(?:command|textconv)",
    re.IGNORECASE,
)
_DROP = re.compile(
    r"\bdrop\s+(?:table|database|schema|view|index|user|role|column|materialized|sequence|function|type)\b", re.I
)
_TRUNCATE = re.compile(r"\btruncate\s+(?:table\s+)?[\w\"`.\[]", re.I)
_DELETE = re.compile(r"\b(?:delete\s+from|update\s+[\w.\"]+\s+set)\s+[^;]*", re.I)
_QUOTED_SQL = re.compile(r"'(?:[^']|'')*'")
_COMMENTED_SQL = re.compile(r"--[^\n]*|/\*.{0,500}?\*/", re.DOTALL)


def git(call: Call) -> str | None:
    """Follow every way in which git runs another program. Its words decide what discards work."""
    options = scan(call.raw, _GLOBAL_VALUED, permute=False)
    for setting in options.values.get("-c", []):
        key, _, value = setting.partition("=")
        if _RUNNING_KEYS.match(key) and value:
            call.flag(Category.EXEC_OPTION, "a git setting runs another program")
            _run(call, value)
    if not options.operands:
        return None
    verb, rest = plain(options.operands[0]), [plain(word) for word in options.operands[1:]]
    if verb == "bisect" and rest[:1] == ["run"]:
        call.shell.call(rest[1:], None)
    elif verb == "submodule" and "foreach" in rest:
        _run(call, " ".join(word for word in rest[rest.index("foreach") + 1 :] if not word.startswith("--")))
    elif verb == "config" and any(_RUNNING_KEYS.match(word) for word in rest):
        values = [word for word in rest if not word.startswith("--") and not _RUNNING_KEYS.match(word)]
        for value in values:
            _run(call, value)
    for position, word in enumerate(rest):
        if (
            word in ("-x", "--exec", "--tree-filter", "--index-filter", "--msg-filter", "--env-filter")
            and rest[position + 1 :]
        ):
            if verb in ("rebase", "filter-branch"):
                _run(call, rest[position + 1])
        elif (
            word.startswith(("--upload-pack=", "--receive-pack=", "--exec=", "--open-files-in-pager=", "-O"))
            and "=" in word
        ):
            call.flag(Category.EXEC_OPTION, "git is told to run another program")
            _run(call, word.partition("=")[2])
    return None


def _run(call: Call, text: str) -> None:
    with call.shell.muted(), call.shell.state.maybe():
        call.shell.run_text(text.removeprefix("!"))


def sql_client(call: Call) -> str | None:
    """psql, mysql, sqlite3 and others: statements that lose data are asked about, shell escapes are followed."""
    texts = [*call.arguments, *([] if call.stdin is None else [plain(call.stdin)])]
    for text in texts:
        problem = destructive_sql(text)
        if problem is not None:
            call.flag(Category.DESTRUCTIVE_SQL, problem)
        for line in text.splitlines()[:512]:
            escape = re.match(r"\s*(?:\\!|\.shell|\.system|system|!)\s+(.+)", line)
            if escape is not None:
                with call.shell.muted(), call.shell.state.maybe():
                    call.shell.run_text(escape.group(1))
    if call.name in ("dropdb", "dropuser") or (call.name == "mysqladmin" and "drop" in call.arguments):
        call.flag(Category.DESTRUCTIVE_SQL, "drops a database")
    return None


def destructive_sql(text: str) -> str | None:
    """Return what a statement would delete, or None."""
    bare = _COMMENTED_SQL.sub(" ", _QUOTED_SQL.sub("''", text))
    if _DROP.search(bare):
        return "SQL drops a database object"
    if _TRUNCATE.search(bare):
        return "SQL truncates a table"
    for match in _DELETE.finditer(bare):
        if not re.search(r"\bwhere\b", match.group(), re.I):
            return f"SQL changes or deletes every row: {shown(match.group())[:60].strip()}"
    return None
