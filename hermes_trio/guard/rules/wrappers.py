"""Programs that run another program: the wrapper is skipped, and the program that it runs is judged instead."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from hermes_trio.guard.call import base_name
from hermes_trio.guard.marks import HOLE, plain
from hermes_trio.guard.options import scan
from hermes_trio.guard.verdict import BlockCategory, Blocked, Category

if TYPE_CHECKING:
    from hermes_trio.guard.call import Call

# Options that take a value, and how many operands stand before the command.
_WRAPPERS: dict[str, tuple[str, int]] = {
    "nohup": ("", 0),
    "setsid": ("", 0),
    "nice": ("-n --adjustment", 0),
    "ionice": ("-c -n -p -P -u --class --classdata", 0),
    "chrt": ("-T -P -D -p --sched-runtime --sched-period --sched-deadline", 1),
    "taskset": ("-p", 1),
    "timeout": ("-s -k --signal --kill-after", 1),
    "gtimeout": ("-s -k --signal --kill-after", 1),
    "stdbuf": ("-i -o -e --input --output --error", 0),
    "time": ("-f -o --format --output", 0),
    "doas": ("-u -C -a", 0),
    "pkexec": ("--user", 0),
    "gosu": ("", 1),
    "su-exec": ("", 1),
    "setpriv": ("--reuid --regid --groups --inh-caps --bounding-set", 0),
    "chroot": ("--userspec --groups", 1),
    "unshare": ("-w --wd -R --root -S --setuid -G --setgid --map-user --map-group --propagation --setgroups", 0),
    "nsenter": ("-t --target -S --setuid -G --setgid", 0),
    "fakeroot": ("-l -s -i -b --lib --faked", 0),
    "proot": ("-r -b -w -q -k", 0),
    "firejail": ("", 0),
    "strace": ("-o -e -p -s -u -E -a -I -O -P -S -b -X --output --trace", 0),
    "ltrace": ("-o -e -p -s -u -a -l -n", 0),
    "valgrind": ("", 0),
    "perf": ("-e -o -F", 1),
    "prlimit": ("-p --pid -o", 0),
    "numactl": ("-N -m -C -p -i --membind --cpunodebind", 0),
    "cgexec": ("-g", 0),
    "systemd-run": ("-u --unit -p --property -M --machine -H --host --uid --gid -E --setenv -d --description", 0),
    "systemd-inhibit": ("--what --who --why --mode", 0),
    "caffeinate": ("-t -w", 0),
    "rlwrap": ("-f -H -p -s -a -b -C -D -S", 0),
    "unbuffer": ("", 0),
    "xvfb-run": ("-n -s -e -f -p -w --server-num --server-args", 0),
    "dbus-run-session": ("--config-file --dbus-daemon", 0),
    "catchsegv": ("", 0),
    "torsocks": ("", 0),
    "proxychains": ("-f", 0),
    "proxychains4": ("-f", 0),
    "winpty": ("", 0),
    "builtin": ("", 0),
    "nocorrect": ("", 0),
    "noglob": ("", 0),
    "busybox": ("", 0),
    "toybox": ("", 0),
    "uv": ("--with --python -p --project --directory", 1),
    "poetry": ("-C --directory -P --project", 1),
    "pipenv": ("", 1),
    "conda": ("", 1),
    "hatch": ("-e --env", 1),
    "bundle": ("", 1),
    "dotenv": ("-f --file", 0),
    "direnv": ("", 2),
    "start-stop-daemon": ("-p --pidfile -n --name -u --user -c --chuid -d --chdir", 0),
}
NAMES = tuple(_WRAPPERS)
_SUBCOMMANDS = {
    "uv": "run",
    "poetry": "run",
    "pipenv": "run",
    "conda": "run",
    "hatch": "run",
    "bundle": "exec",
    "direnv": "exec",
}
_EXPORTED_FUNCTION = re.compile(r"BASH_FUNC_([\w.-]+)(?:%%|\(\))=")
_OPENS_SHELL = re.compile(
    r"(?:ba|da|z|k|a|fi|c|tc)?sh|su|(?:python|perl|ruby|node|lua|php|irb)[\d.]*|n?vim?|view|nano|emacs|less|more|man|ed|env|find|awk|psql|tmux|screen|docker"
)
_ASSIGNMENT = re.compile(r"[A-Za-z_][A-Za-z0-9_]*=")


def wrapper(call: Call) -> str | None:
    """Skip the wrapper's own words, judge the rest."""
    valued, skipped = _WRAPPERS[call.name]
    options = scan(call.raw, valued.split(), permute=False)
    operands = options.operands
    wanted = _SUBCOMMANDS.get(call.name)
    if wanted is not None:
        if operands[:1] != [wanted]:
            return None
        operands = scan(
            operands[1:], ("-n", "--name", "-p", "--with", "--python", "--prefix", "-e"), permute=False
        ).operands
        skipped -= 1
    command = operands[skipped:]
    if call.name == "busybox" and not command:
        return None
    while command and _ASSIGNMENT.match(command[0]):
        command = command[1:]
    return call.shell.call(command, call.stdin) if command else None


def env(call: Call) -> str | None:
    """env sets variables for a command, or splits a string into one."""
    options = scan(call.raw, ("-u", "--unset", "-C", "--chdir", "-S", "--split-string", "-P"), permute=False)
    words = list(options.operands)
    text = options.value("-S", "--split-string")
    while words and (_ASSIGNMENT.match(words[0]) or _EXPORTED_FUNCTION.match(words[0])):
        name, _, value = words.pop(0).partition("=")
        function = _EXPORTED_FUNCTION.match(name + "=")
        if function is not None:
            call.shell.run_text(f"{function.group(1)} {value}")
        else:
            call.shell.state.assign(name, [value], certain=False)
    if text is not None:
        return call.shell.run_text(" ".join([text, *words]), call.stdin)
    return call.shell.call(words, call.stdin) if words else None


def sudo(call: Call) -> str | None:
    """Judge what sudo runs. Block a password from standard input unless one is configured; flag a shell or askpass."""
    valued = "-u -g -h -p -C -T -U -R -D -r -t -c -a --user --group --host --prompt --close-from --chdir --chroot --role --type"
    options = scan(call.raw, valued.split(), permute=False)
    if options.has("-S", "--stdin"):
        if not call.shell.sudo_password_configured:
            reason = "sudo -S reads a password from standard input, and none is configured; run sudo without -S"
            raise Blocked(BlockCategory.PASSWORD_GUESS, reason)
        call.flag(Category.PRIVILEGE, "sudo reads a password from standard input")
    elif options.has("-A", "--askpass", "-s", "--shell", "-i", "--login"):
        call.flag(Category.PRIVILEGE, "sudo opens a shell or asks another program for the password")
    words = list(options.operands)
    while words and _ASSIGNMENT.match(words[0]):
        words.pop(0)
    if options.has("-e", "--edit") or call.name == "sudoedit":
        for word in words:
            call.shell.write(word, None, call.excerpt)
        return None
    if options.has("-u", "--user", "-g", "--group") or (words and _OPENS_SHELL.fullmatch(base_name(words[0]))):
        call.flag(Category.PRIVILEGE, "opens a shell, an interpreter or an editor with other rights")
    if words:
        output = call.shell.call(words, call.stdin)
        if options.has("-s", "--shell", "-i", "--login"):
            call.shell.run_text(" ".join(words), call.stdin)
        return output
    if options.has("-s", "--shell", "-i", "--login") and call.stdin is not None:
        return call.shell.run_text(call.stdin)
    return None


def command(call: Call) -> str | None:
    """command runs a program past functions; with -v it only names it."""
    options = scan(call.raw, (), permute=False)
    if options.has("-v", "-V"):
        return "".join(f"/usr/bin/{plain(word).rpartition('/')[2]}\n" for word in options.operands)
    return call.shell.call(options.operands, call.stdin) if options.operands else ""


def execute(call: Call) -> str | None:
    """exec replaces the shell by a command."""
    options = scan(call.raw, ("-a",), permute=False)
    return call.shell.call(options.operands, call.stdin) if options.operands else ""


def joined(call: Call) -> str | None:
    """watch, ssh and others hand their words to a shell."""
    valued = {
        "watch": "-n --interval -q --equexit",
        "ssh": "-i -p -l -o -F -J -L -R -D -b -c -E -e -I -m -O -Q -S -W -w -B",
        "entr": "",
    }.get(call.name, "")
    options = scan(call.raw, valued.split(), permute=False)
    words = options.operands[1:] if call.name == "ssh" else options.operands
    if words:
        return call.shell.run_text(" ".join(words), call.stdin)
    if call.name == "ssh" and options.operands and call.stdin is not None:
        return call.shell.run_text(call.stdin)
    return None


def texted(call: Call) -> str | None:
    """su -c, script -c, flock -c, tmux and at: an option or an argument is shell text."""
    options = scan(
        call.raw,
        ("-c", "--command", "-u", "-s", "--shell", "-g", "-G", "-E", "-w", "-t", "-L"),
        permute=call.name != "flock",
    )
    text = options.value("-c", "--command")
    if text is not None:
        call.flag(Category.INLINE_CODE, "runs inline shell code")
        return call.shell.run_text(text, call.stdin)
    if call.name == "flock" and len(options.operands) > 1:
        rest = options.operands[1:]
        if rest[0] in ("-c", "--command") and len(rest) > 1:
            return call.shell.run_text(rest[1], call.stdin)
        return call.shell.call(rest, call.stdin)
    if call.name == "runuser" and options.has("-u") and options.operands:
        return call.shell.call(options.operands, call.stdin)
    if call.name in ("su", "at", "batch") and call.stdin is not None:
        call.flag(Category.INLINE_CODE, "runs text from standard input as shell code")
        return call.shell.run_text(call.stdin)
    return None


def text_arguments(call: Call) -> str | None:
    """Programs that run any argument which looks like a command line: only hard blocks count."""
    with call.shell.muted(), call.shell.state.maybe():
        for argument in call.raw[:256]:
            if " " in argument:
                call.shell.run_text(argument)
        for position, argument in enumerate(call.raw[:64]):
            if re.fullmatch(r"[\w./-]+", argument) and not argument.startswith("-"):
                call.shell.call(call.raw[position:], HOLE)
    return None


def package_run(call: Call) -> str | None:
    """Judge the program that npx, npm exec, yarn dlx and similar ones run; their scripts are files of the project."""
    words = [word for word in call.raw if word != "--"]
    if call.name in ("npx", "bunx") or (words and words[0] in ("exec", "x", "dlx")):
        words = words if call.name not in ("npx", "bunx") else ["exec", *words]
        return call.shell.call([word for word in words[1:] if word not in ("-y", "--yes")], call.stdin)
    return None


def make(call: Call) -> str | None:
    """make runs the recipes it is given on the command line, on standard input, or in a file written just before."""
    options = scan(
        call.raw, ("-f", "--file", "--makefile", "-C", "--directory", "-j", "--eval", "-E", "-I", "-o", "-W")
    )
    texts = [*options.values.get("--eval", []), *options.values.get("-E", [])]
    named = options.value("-f", "--file", "--makefile")
    if named in ("-", "/dev/stdin"):
        texts.append(call.stdin or "")
    else:
        files = [named] if named else ["Makefile", "makefile", "GNUmakefile"]
        texts.extend(text for text in map(call.shell.file_text, files) if text is not None)
    for text in texts:
        for line in text.splitlines()[:1_024]:
            recipe = line if line.startswith("\t") else line.partition(";")[2]
            command = recipe.strip().lstrip("@-+").replace("$$", "$")
            if command:
                with call.shell.muted(), call.shell.state.maybe():
                    call.shell.run_text(command)
    return None


def builtin_run(call: Call) -> str:
    """trap and alias keep text to be run later."""
    if call.name == "trap":
        texts = [word for word in call.raw[:1] if word not in ("-", "", "-l", "-p", "--")]
        if call.raw[:1] == ["--"]:
            texts = call.raw[1:2]
        for text in texts:
            with call.shell.state.maybe():
                call.shell.run_text(text)
    return ""
