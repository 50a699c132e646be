"""Builtins of the shell that change its state: directory, variables, options, aliases."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hermes_trio.guard.marks import HOLE, SOLID, is_dynamic, plain
from hermes_trio.guard.options import scan
from hermes_trio.guard.paths import fold

if TYPE_CHECKING:
    from hermes_trio.guard.call import Call
    from hermes_trio.guard.state import Value


def change_directory(call: Call) -> str:
    """cd, pushd: the new directory, or an unknown one."""
    operands = [word for word in call.arguments if not word.startswith("-") or word == "-"]
    state = call.shell.state
    target = operands[0] if operands else state.home if call.name == "cd" else ""
    if call.name == "popd" or target == "-":
        state.enter((*state.visited, ""))
        return ""
    if not target or (is_dynamic(target) and HOLE not in target):
        state.enter(("",))
        return ""
    spellings = [target]
    if not target.startswith("/") and "CDPATH" in state.variables:
        folders = [value for value in state.variables["CDPATH"] if isinstance(value, str)]
        spellings.extend(f"{folder}/{target}" for value in folders for folder in value.split(":")[:8] if folder)
    if HOLE in target:
        # `cd $UNSET` goes home, `cd /$UNSET` to the root.
        spellings = [target.replace(HOLE, "") or state.home, ""]
    found: list[str] = []
    for spelling in spellings:
        for cwd in state.cwds:
            if not spelling or (not cwd and not spelling.startswith("/")):
                found.extend(place for place in state.resolve(spelling)[1:] if spelling)
                found.append("" if ".." not in spelling else "/" + "/".join(fold(spelling, "")))
            else:
                found.append("/" + "/".join(fold(spelling, cwd)))
    led = [place for path in found for place in (state.resolve(path) if path else [path])]
    state.enter(tuple(dict.fromkeys(path if SOLID not in path else "" for path in led))[:64])
    return ""


def set_options(call: Call) -> str:
    """set changes options and positional parameters."""
    words = list(call.raw)
    while words and words[0][:1] in "-+" and words[0] not in ("--", "-", ""):
        flag = words.pop(0)
        option = words.pop(0) if flag.endswith("o") and words else ""
        if "e" in flag.lstrip("-+") or option == "errexit":
            call.shell.state.errexit = flag.startswith("-") and not call.shell.state.uncertain
    if words and words[0] in ("--", "-"):
        words.pop(0)
        call.shell.state.positional = tuple(words)
    elif words:
        call.shell.state.positional = tuple(words)
    return ""


def read(call: Call) -> str:
    """read and mapfile take their values from standard input."""
    reads_lines = call.name in ("mapfile", "readarray")
    valued = (
        ("-d", "-n", "-O", "-s", "-u", "-C", "-c") if reads_lines else ("-d", "-n", "-N", "-p", "-t", "-u", "-i", "-a")
    )
    options = scan(call.arguments, valued)
    lines = None if call.stdin is None else (call.stdin.rstrip("\n").split("\n"))
    state = call.shell.state
    array = options.value("-a")
    if reads_lines:
        values: list[Value] = [HOLE] if lines is None else [tuple(lines)]
        state.assign(options.operands[0] if options.operands else "MAPFILE", values)
        return ""
    if array is not None:
        options.operands.append(array)
    names = options.operands or ["REPLY"]
    for position, name in enumerate(names):
        if lines is None:
            values = [HOLE]
        elif array is not None:
            values = [tuple(line.split()) for line in lines[:256]]
        elif len(names) == 1:
            values = [line.strip() for line in lines[:256]]
        else:
            last = position == len(names) - 1
            values = [_field(line, position, last=last, separators=state.separators()) for line in lines[:256]]
        if lines is not None and len(lines) > 256:
            values.append(HOLE)
        state.assign(name, values, certain=False)
    return ""


def _field(line: str, position: int, *, last: bool, separators: str) -> str:
    for separator in separators:
        line = line.replace(separator, " ")
    pieces = line.split(None, position)
    if len(pieces) <= position:
        return ""
    return pieces[position] if last else pieces[position].split(None, 1)[0]


def alias(call: Call) -> str:
    """alias keeps text that a later word may stand for; assignments were read by the shell."""
    state = call.shell.state
    for word in call.raw:
        name, equals, text = word.partition("=")
        if equals:
            state.aliases.setdefault(name, []).append(plain(text))
            with call.shell.muted(), state.maybe():
                call.shell.run_text(text)
    return ""


def declare(call: Call) -> str:
    """export, declare, local and readonly: what they assign was done by the shell, a computed word is done here."""
    for word in call.raw:
        name, equals, text = word.partition("=")
        if equals and name.isidentifier():
            call.shell.state.assign(name, [text], certain=False)
    return ""


def remember_path(call: Call) -> str:
    """hash -p gives a program another name."""
    options = scan(call.arguments, ("-p",))
    path = options.value("-p")
    if path is not None:
        for name in options.operands:
            call.shell.state.programs[name.lower()] = path.rpartition("/")[2].lower()
    return ""


def shift(call: Call) -> str:
    """shift drops positional parameters; both sides of it stay possible."""
    state = call.shell.state
    if state.positional is not None:
        count = int(call.arguments[0]) if call.arguments and call.arguments[0].isdigit() else 1
        state.positional = state.positional[count:] if not state.uncertain else (*state.positional[count:],)
    return ""
