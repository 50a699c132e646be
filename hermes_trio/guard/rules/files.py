"""Changing files: permissions, owners, and programs that write where they are told."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from hermes_trio.guard.marks import HOLE, REMOTE, is_dynamic
from hermes_trio.guard.options import Options, listed, scan
from hermes_trio.guard.paths import fold, precious
from hermes_trio.guard.verdict import Category

from .deletes import copy_target

if TYPE_CHECKING:
    from hermes_trio.guard.call import Call

_OCTAL = re.compile(r"[0-7]{3,5}\Z|[0-7]{1,2}\Z")
_WORLD_WRITE = re.compile(r"(?:^|,)(?:[ug]*[oa][ugoa]*)[+=][rxXst]*w")


def chmod(call: Call) -> str:
    """Flag world-writable modes."""
    operands = [word for word in call.arguments if not re.match(r"-[RvcfHLP]+\Z|--", word)]
    if not operands:
        return ""
    mode, targets = operands[0], operands[1:]
    recursive = any(re.match(r"-[a-zA-Z]*R|--recursive", word) for word in call.arguments)
    octal = mode.lstrip("=+-") if _OCTAL.match(mode.lstrip("=+-")) else ""
    if (octal and int(octal[-1]) & 2) or _WORLD_WRITE.search(mode):
        call.flag(Category.OPEN_PERMISSIONS, "makes files world-writable")
    state = call.shell.state
    if recursive and any(precious(target, state.cwds, state.home) for target in targets):
        call.flag(Category.OPEN_PERMISSIONS, "changes permissions of a system root recursively")
    return ""


def chown(call: Call) -> str:
    """Flag recursive changes to root, or of a root."""
    options = scan(call.arguments, ("--from", "--reference"))
    if not options.has("-R", "--recursive") or not options.operands:
        return ""
    owner, targets = options.operands[0], options.operands[1:]
    state = call.shell.state
    to_root = re.match(r"(?:root|0)(?:[:.]|\Z)|:(?:root|0)\Z", owner) is not None
    if to_root or any(precious(target, state.cwds, state.home) for target in targets):
        call.flag(Category.ROOT_OWNERSHIP, "changes the owner of a whole tree")
    return ""


def tee(call: Call) -> str | None:
    """tee and sponge write what they read."""
    for operand in scan(call.arguments).operands:
        call.shell.write(operand, call.stdin, call.excerpt)
    return call.stdin


def copy(call: Call) -> str:
    """cp, install and ln write their target."""
    options = scan(
        call.arguments, ("-t", "--target-directory", "-m", "--mode", "-o", "--owner", "-g", "--group", "-S", "--suffix")
    )
    copy_target(call, options.operands, options.value("-t", "--target-directory"))
    return ""


def link(call: Call) -> str:
    """Follow a symbolic link, which makes one path lead to another."""
    options = scan(call.arguments, ("-t", "--target-directory", "-S", "--suffix"))
    operands = options.operands
    if options.has("-s", "--symbolic") and operands:
        target = operands[0]
        name = operands[1] if len(operands) > 1 else target.rstrip("/").rpartition("/")[2] or "."
        folder = options.value("-t", "--target-directory")
        lead_to(call, f"{folder}/{name}" if folder else name, target)
    copy_target(call, operands, options.value("-t", "--target-directory"))
    return ""


def mount(call: Call) -> str | None:
    """Follow a bind mount, which makes one path lead to another, like a link."""
    options = scan(call.arguments, ("-o", "--options", "-t", "--types"))
    binds = options.has("--bind", "-B", "--rbind", "-R") or "bind" in (options.value("-o", "--options") or "")
    if binds and len(options.operands) > 1:
        lead_to(call, options.operands[1], options.operands[0])
    return None


def lead_to(call: Call, path: str, target: str) -> None:
    """Remember that `path` leads to `target`, and below it."""
    state = call.shell.state
    if not target.startswith("/"):
        target = "/" + "/".join(fold(target, state.cwds[-1]))
    key = call.shell.file_key(path)
    if key != target and len(state.links) < 64:
        state.links[key] = target


def write_operands(call: Call) -> str:
    """truncate, patch and editors without a terminal write the files they name."""
    for operand in scan(call.arguments, ("-s", "--size", "-r", "--reference", "-p", "-i", "-o")).operands:
        call.shell.write(operand, None, call.excerpt)
    return ""


_CURL_VALUED = listed(
    "-o --output -H --header -X --request -u --user -A --user-agent -e --referer -b --cookie -c --cookie-jar -m --max-time --connect-timeout --retry -x "
    "--proxy -w --write-out -K --config --cacert --cert --key -r --range -P --directory-prefix --output-document -t --tries -U --limit-rate --resolve --url -Q "
    "-y -Y -z -C --continue-at --output-dir"
)
_CURL_DATA = listed(
    "-d --data --data-raw --data-binary --data-urlencode --json -F --form -T --upload-file --post-data --post-file --body-file --body-data"
)
_CURL_FILES = frozenset({"-T", "--upload-file", "--post-file", "--body-file"})
_LOOPBACK = re.compile(
    r"(?:\w+://)?(?:[^/@]*@)?(?:localhost|127\.\d+\.\d+\.\d+|\[::1\]|::1|0\.0\.0\.0|:\d+)(?:[:/]|\Z)"
)


def download(call: Call) -> str:
    """curl and wget print or store text of unknown origin, and send what their options name."""
    remote = REMOTE + HOLE
    valued = [*_CURL_VALUED, *_CURL_DATA]
    wget = call.name == "wget"
    options = scan(call.arguments, [*valued, "-O"] if wget else valued)
    if not all(
        map(_LOOPBACK.match, [word for word in options.operands if "=" not in word and not word.isupper()] or ["?"])
    ):
        _judge_upload(call, options)
    target = options.value("-O", "--output-document") if wget else options.value("-o", "--output")
    names = [url.split("?")[0].rstrip("/").rpartition("/")[2] for url in options.operands]
    if target in ("-", "/dev/stdout"):
        return remote
    if target is not None:
        call.shell.write(target, remote, call.excerpt)
        return ""
    if wget or options.has("-O", "--remote-name", "--remote-name-all"):
        folder = options.value("-P", "--directory-prefix", "--output-dir")
        for name in names:
            if name and "." in name:
                call.shell.write(f"{folder}/{name}" if folder else name, remote, call.excerpt)
        return ""
    return remote


def _judge_upload(call: Call, options: Options) -> None:
    sent = [(name, value) for name in _CURL_DATA for value in options.values.get(name, [])]
    sent += [("-F", word) for word in options.operands if re.search(r"[=:]?@[\w./~-]", word) and "://" not in word]
    for name, value in sent:
        if name in _CURL_FILES or is_dynamic(value) or re.match(r"(?:[^=@]*=)?[@<]", value):
            call.flag(Category.UPLOAD, "sends files or unknown text to another host")
    if call.name in ("http", "https", "xh") and call.stdin is not None:
        call.flag(Category.UPLOAD, "sends files or unknown text to another host")


def netcat(call: Call) -> str:
    """Flag nc and similar programs: a program behind a port, or text that is sent away."""
    options = scan(call.arguments, ("-p", "-w", "-s", "-i", "-q", "-X", "-x", "-e", "-c", "--exec", "--sh-exec"))
    if options.has("-e", "-c", "--exec", "--sh-exec"):
        call.flag(Category.REMOTE_CODE, "connects a program to the network")
    elif call.stdin is not None and not any(map(_LOOPBACK.match, options.operands)):
        call.flag(Category.UPLOAD, "sends text to another host")
    return REMOTE + HOLE


def crontab(call: Call) -> str | None:
    """Judge a crontab from standard input, which is a script that runs later."""
    for line in (call.stdin or "").splitlines()[:512]:
        fields = line.strip().split(None, 1 if line.lstrip().startswith("@") else 5)
        if fields and not line.lstrip().startswith("#"):
            with call.shell.muted(), call.shell.state.maybe():
                call.shell.run_text(fields[-1])
    options = scan(call.arguments, ("-u",))
    if options.has("-r"):
        call.flag(Category.SYSTEM_FILE_WRITE, "removes scheduled jobs")
    elif call.stdin is not None or options.operands:
        call.flag(Category.SYSTEM_FILE_WRITE, "replaces scheduled jobs")
    return None
