"""Deletion: rm and similar programs, searches that delete, mirrors that delete."""

from __future__ import annotations

import re
from itertools import pairwise
from typing import TYPE_CHECKING

from hermes_trio.guard.marks import HOLE, SOLID, TEMPORARY, is_dynamic, plain
from hermes_trio.guard.options import listed, scan
from hermes_trio.guard.paths import is_raw_disk, precious
from hermes_trio.guard.verdict import BlockCategory, Blocked, Category

if TYPE_CHECKING:
    from hermes_trio.guard.call import Call

_FIND_ACTIONS = frozenset({"-exec", "-execdir", "-ok", "-okdir"})
_FIND_NARROWING = frozenset(
    listed("-name -iname -path -ipath -wholename -iwholename -regex -iregex -lname -inum -samefile")
)
_LITERAL = re.compile(r"[A-Za-z0-9_]")
_BRACKETS = re.compile(r"\[[^\]]*\]")


def refuse_precious(call: Call, target: str) -> None:
    """Block the recursive delete of a root, in whatever spelling."""
    state = call.shell.state
    spellings = state.resolve(target) if state.links else [target]
    root = next((r for r in (precious(s, state.cwds, state.home) for s in spellings) if r is not None), None)
    if root is not None:
        reason = f"{call.name} would delete {root} and all below it; name the exact folder to delete"
        if HOLE in target:
            reason += ", and write ${NAME:?} where a variable could be empty"
        raise Blocked(BlockCategory.ROOT_DELETE, reason)


def rm(call: Call) -> str:
    """Block the deletion of roots, and flag recursive or absolute deletions. One relative file is not flagged."""
    options = scan(call.arguments)
    unknown = any(is_dynamic(flag) for flag in options.flags) or any(
        operand.startswith((HOLE, SOLID)) and "/" not in operand for operand in options.operands
    )
    recursive = options.has("-r", "-R", "--recursive")
    if options.operands and all(operand.startswith(TEMPORARY) and ".." not in operand for operand in options.operands):
        return ""
    if recursive or unknown or options.has("--no-preserve-root"):
        for target in options.operands:
            refuse_precious(call, target)
    if recursive:
        call.flag(Category.RECURSIVE_DELETE, "deletes recursively")
    elif any(operand.startswith("/") for operand in options.operands):
        call.flag(Category.ABSOLUTE_DELETE, "deletes an absolute path")
    elif not call.shell.bulk and any(map(is_dynamic, options.operands)):
        call.flag(Category.UNKNOWN_DELETE, "deletes what is known only at run time")
    if call.shell.bulk:
        call.flag(Category.BULK_DELETE, "deletes whatever a search finds")
    return ""


def unlink(call: Call) -> str:
    """Single-file deletes: asked about when absolute; shredding a disk is a write to it."""
    options = scan(call.arguments, ("-n", "-s", "--iterations", "--size"))
    for operand in options.operands:
        if is_raw_disk(operand):
            raise Blocked(BlockCategory.RAW_DISK_WRITE, f"{call.name} would overwrite the raw disk {operand}")
    if any(operand.startswith("/") for operand in options.operands):
        call.flag(Category.ABSOLUTE_DELETE, "deletes an absolute path")
    if call.shell.bulk:
        call.flag(Category.BULK_DELETE, "deletes whatever a search finds")
    return ""


def find(call: Call) -> str:
    """Judge a search that deletes or runs, with its start folders in the place of what it finds."""
    starts, rest = _find_starts(call.raw)
    narrow = _is_narrow(rest)
    shell = call.shell
    found = [_below(start) if narrow else start for start in starts]
    # A path pattern that names a root covers that root.
    found += [
        pattern
        for option, pattern in pairwise(rest)
        if option in ("-path", "-ipath", "-wholename", "-iwholename") and pattern.startswith("/") and narrow
    ]
    if "-delete" in rest:
        for start in found:
            refuse_precious(call, start)
        call.flag(Category.BULK_DELETE, "deletes whatever a search finds")
    for position, word in enumerate(rest):
        if word in ("-fprint", "-fprint0", "-fprintf", "-fls") and position + 1 < len(rest):
            shell.write(rest[position + 1], None, call.excerpt)
        if word not in _FIND_ACTIONS:
            continue
        command = _until_terminator(rest[position + 1 :])
        for start in found[:32]:
            _search_runs(call, [argument.replace("{}", start) for argument in command])
    return "\n".join(found) + "\n" + HOLE


def _find_starts(arguments: list[str]) -> tuple[list[str], list[str]]:
    position = 0
    while position < len(arguments) and re.match(r"-[HLP]\Z|-O\d|-D\Z", arguments[position]):
        position += 2 if arguments[position] == "-D" else 1
    starts: list[str] = []
    while position < len(arguments) and arguments[position][:1] not in ("-", "(", "!", ")"):
        starts.append(plain(arguments[position]))
        position += 1
    return starts or ["."], arguments[position:]


def _is_narrow(rest: list[str]) -> bool:
    """Return whether a search is specific. Alternatives and negations make it general."""
    if any(word in ("-o", "-or", ",", "!", "-not") for word in rest):
        return False
    for position, word in enumerate(rest[:-1]):
        if word in _FIND_ACTIONS or word == "-delete":
            break
        if word in _FIND_NARROWING and _LITERAL.search(_BRACKETS.sub("", rest[position + 1])):
            return True
    return "-empty" in rest


def _below(start: str) -> str:
    return start.rstrip("/") + "/" + SOLID


def _until_terminator(words: list[str]) -> list[str]:
    for position, word in enumerate(words):
        if word == ";" or (word == "+" and position and words[position - 1] == "{}"):
            return words[:position]
    return words


def _search_runs(call: Call, argv: list[str]) -> None:
    call.shell.bulk += 1
    try:
        call.shell.call(argv, HOLE)
    finally:
        call.shell.bulk -= 1


def fd(call: Call) -> str | None:
    """fd runs commands with -x and -X."""
    for position, word in enumerate(call.raw):
        if word in ("-x", "-X", "--exec", "--exec-batch"):
            command = _until_terminator(call.raw[position + 1 :])
            if not any("{" in argument for argument in command):
                command = [*command, "{}"]
            _search_runs(call, [re.sub(r"\{[/.]*\}", SOLID, argument) for argument in command])
            break
    return None


def xargs(call: Call) -> str | None:
    """xargs and parallel append what they read; known input is put in its place, unknown input is a hole."""
    valued = "-I -i -n -P -L -d -a -E -s -S -j --jobs -N --colsep --delimiter --replace --max-args --max-procs --max-lines --arg-file --results --joblog"
    options = scan(call.raw, valued.split(), permute=False)
    command = options.operands or ["echo"]
    items: list[str] = []
    for marker in (":::", "::::", ":::+"):
        if marker in command:
            cut = command.index(marker)
            items = [item for item in command[cut + 1 :] if not item.startswith(":::")]
            command = command[:cut]
    source = options.value("-a", "--arg-file")
    if not items:
        items = _input_items(
            call.stdin if source is None else call.shell.file_text(source), options.value("-d", "--delimiter")
        )
    if call.name == "parallel" and not command:
        for item in items[:64]:
            call.shell.run_text(item)
        return None
    token = options.value("-I", "--replace") or (
        "{}" if options.has("-i", "--replace") or call.name == "parallel" else ""
    )
    shell_words = call.name in ("parallel", "rush")
    if token and any(token in argument for argument in command):
        for item in items[:256]:
            argv = [argument.replace(token, item) for argument in command]
            if shell_words:
                call.shell.run_text(" ".join(argv))
            _search_runs(call, argv)
        return None
    _search_runs(call, [*command, *items])
    if options.has("-n", "-L", "--max-args", "--max-lines", "-N") or shell_words:
        for item in items[:256]:
            _search_runs(call, [*command, item])
    if shell_words:
        call.shell.run_text(" ".join([*command, *items]))
    return None


def _input_items(stdin: str | None, delimiter: str | None) -> list[str]:
    if stdin is None:
        return [HOLE]
    separators = r"[\s\x00]+" if delimiter is None else r"[\n\x00]+|" + re.escape(delimiter)
    items = [item for item in re.split(separators, stdin) if item]
    whole = [stdin.strip("\n\0")] if len(items) > 1 and len(stdin) < 4_096 else []
    unquoted = [re.sub(r"['\"\\]", "", item) for item in items if re.search(r"['\"\\]", item)]
    return [*items, *unquoted, *whole] or [HOLE]


def rsync(call: Call) -> str | None:
    """Flag --delete, which empties the target, and -e, which runs a program."""
    options = scan(
        call.raw, ("-e", "--rsh", "--exclude", "--include", "--files-from", "--rsync-path", "-f", "--filter")
    )
    if any(flag.startswith("--del") or flag == "--remove-source-files" for flag in options.flags):
        if options.operands:
            refuse_precious(call, options.operands[-1])
        call.flag(Category.RECURSIVE_DELETE, "deletes in the target what the source does not have")
    remote_shell = options.value("-e", "--rsh", "--rsync-path")
    if remote_shell:
        with call.shell.muted():
            call.shell.run_text(remote_shell)
    if options.operands and ":" not in options.operands[-1]:
        call.shell.write(options.operands[-1], None, call.excerpt)
    elif any(precious(source, call.shell.state.cwds, call.shell.state.home) for source in options.operands[:-1]):
        call.flag(Category.UPLOAD, "sends the home directory or a system folder to another host")
    return None


def move(call: Call) -> str:
    """mv writes its target, and takes its sources away."""
    options = scan(call.arguments, ("-t", "--target-directory", "-S", "--suffix"))
    state = call.shell.state
    for source in options.operands[:-1] if len(options.operands) > 1 else options.operands:
        if source.startswith(("/", "~")) and precious(source, state.cwds, state.home) is not None:
            call.flag(Category.SYSTEM_FILE_WRITE, "moves a system root or the home directory away")
        call.shell.write(source, None, call.excerpt)
    copy_target(call, options.operands, options.value("-t", "--target-directory"))
    return ""


def remember_program(call: Call, sources: list[str], target: str) -> None:
    """Remember a copy of a dangerous program, such as rm, under its new name."""
    for source in sources[:32]:
        program = source.rstrip("/").rpartition("/")[2].lower()
        if program in call.shell.dangerous_names:
            name = target.rstrip("/").rpartition("/")[2].lower()
            for alias in (name, program):
                call.shell.state.programs[alias] = program


def copy_target(call: Call, operands: list[str], folder: str | None) -> None:
    """Judge the write that cp, mv, install and ln do; a folder target is judged with the names that land in it."""
    target = folder if folder is not None else operands[-1] if len(operands) > 1 else None
    if target is None:
        return
    sources = operands if folder is not None else operands[:-1]
    remember_program(call, sources, target)
    text = call.shell.file_text(sources[0]) if len(sources) == 1 else None
    call.shell.write(target, text, call.excerpt)
    for source in sources[:32]:
        name = source.rstrip("/").rpartition("/")[2]
        if name:
            call.shell.write(target.rstrip("/") + "/" + name, call.shell.file_text(source), call.excerpt)
