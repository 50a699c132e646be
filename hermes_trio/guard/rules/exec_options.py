"""Programs that run another program when an option says so: the option's value is followed as shell text."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from hermes_trio.guard.options import scan
from hermes_trio.guard.verdict import Category

from .deletes import refuse_precious
from .text import transform
from .wrappers import joined

if TYPE_CHECKING:
    from hermes_trio.guard.call import Call

# Which options of which program hold a command line.
_RUNNING: dict[str, tuple[str, ...]] = {
    "rg": ("--pre", "--hostname-bin"),
    "ag": ("--pager",),
    "ack": ("--pager",),
    "sort": ("--compress-program",),
    "split": ("--filter",),
    "tar": (
        "--to-command",
        "--checkpoint-action",
        "--use-compress-program",
        "-I",
        "--rsh-command",
        "-F",
        "--info-script",
        "--new-volume-script",
    ),
    "man": ("-P", "--pager", "-H", "--html"),
    "zip": ("-TT", "--unzip-command"),
    "scp": ("-S", "-o"),
    "sftp": ("-S", "-o"),
    "ssh": ("-o",),
    "emacs": ("--eval", "-eval", "-f"),
    "xterm": ("-e",),
    "gnome-terminal": ("-e", "--command", "-x"),
    "konsole": ("-e",),
    "apt": ("-o", "--option"),
    "apt-get": ("-o", "--option"),
    "dpkg": ("--pre-invoke", "--post-invoke"),
    "journalctl": ("--pager",),
    "gdb": ("-ex", "--eval-command"),
}
NAMES = tuple(_RUNNING)
_SETTING = re.compile(r"(?i)(?:ProxyCommand|LocalCommand|KnownHostsCommand|PermitLocalCommand|.*Invoke.*?)[ =:]+(.+)")
_PREFIX = re.compile(r"exec=|\s*(?:shell|!)\s*")
_LISP = re.compile(r"\"((?:[^\"\\]|\\.)*)\"")


def with_exec_options(call: Call) -> str | None:
    """Ask about an option that runs a program, and follow what it runs."""
    names = _RUNNING[call.name]
    options = scan(call.raw, names)
    values = [value for name in names for value in options.values.get(name, [])]
    values += [_after(word, name) for word in call.raw for name in names if len(name) > 2 and word.startswith(name)]
    for value in dict.fromkeys(values):
        _follow(call, value)
    if call.name == "tar" and options.has("--remove-files"):
        for operand in options.operands:
            refuse_precious(call, operand)
    if call.name == "ssh":
        return joined(call)
    return transform(call) if call.stdin is not None else None


def _after(word: str, name: str) -> str:
    return word[len(name) :].lstrip("=")


def _follow(call: Call, value: str) -> None:
    if call.name in ("ssh", "scp", "sftp", "apt", "apt-get") and "=" in value:
        setting = _SETTING.match(value)
        if setting is None:
            return
        value = setting.group(1)
    if not value or value.lower() == "none":
        return
    call.flag(Category.EXEC_OPTION, "an option tells the program to run another one")
    texts = [_PREFIX.sub("", value, count=1)]
    texts += [text for text in _LISP.findall(value) if call.name == "emacs"]
    for text in texts:
        with call.shell.muted(), call.shell.state.maybe():
            call.shell.run_text(text)
