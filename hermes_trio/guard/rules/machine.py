"""The machine itself: disks, power, processes, services and containers, and the gateway that runs the agent."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from hermes_trio.guard.marks import HOLE, SOLID, is_dynamic
from hermes_trio.guard.options import listed, scan
from hermes_trio.guard.paths import is_raw_disk
from hermes_trio.guard.state import PROCESS_SELF
from hermes_trio.guard.verdict import BlockCategory, Blocked, Category

from .files import lead_to

if TYPE_CHECKING:
    from hermes_trio.guard.call import Call

FOUND_PROCESS = SOLID + "pgrep:"
"""What pgrep and pidof print: some numbers, found by the pattern that follows."""

_GATEWAY = re.compile(r"hermes")
_POWER_TARGETS = re.compile(
    r"(?:poweroff|reboot|halt|kexec|shutdown|runlevel[06]|rescue|emergency)(?:\.target|\.service)?\Z"
)
_POWER_VERBS = frozenset({"poweroff", "reboot", "halt", "kexec", "soft-reboot", "rescue", "emergency"})
_SERVICE_VERBS = frozenset(
    listed("stop restart disable mask kill try-restart condrestart force-reload reload-or-restart isolate")
)
_CONTAINER_VERBS = frozenset({"stop", "restart", "kill", "down", "rm", "rmi", "prune", "remove"})
_HELP = frozenset({"--help", "--version", "-h", "-V"})


def make_filesystem(call: Call) -> str:
    """Block mkfs and similar programs."""
    if call.arguments in (["--help"], ["--version"]):
        return ""
    raise Blocked(BlockCategory.FILESYSTEM_CREATION, f"{call.name} would erase a filesystem to create a new one")


def dd(call: Call) -> str:
    """dd to a disk is never allowed, dd from a disk or to an absolute path is asked about; a relative one is like `>`."""
    for argument in call.arguments:
        if argument.startswith("of="):
            call.shell.write(argument[3:], None, call.excerpt)
    if any(re.match(r"of=/|if=/dev/(?!zero|u?random|null)", argument) for argument in call.arguments):
        call.flag(Category.DISK_ACCESS, "copies raw data with dd")
    return HOLE


def partition(call: Call) -> str | None:
    """Partition and disk tools: asked about, blocked when they wipe a disk outright."""
    options = scan(call.arguments)
    disks = [operand for operand in options.operands if is_raw_disk(operand)]
    if call.name in ("zpool", "zfs", "btrfs", "nvme", "mdadm"):
        destroys = ("destroy", "delete", "format", "sanitize", "labelclear", "--zero-superblock")
        lists_only = not any(word in destroys for word in call.arguments)
        if not lists_only:
            call.flag(Category.DISK_ACCESS, "destroys volumes or disks")
        return None
    lists_only = options.has("-l", "--list", "--help", "--version", "-n", "--no-act") or not call.arguments
    if call.name in ("blkdiscard", "wipefs") and disks and not lists_only and (call.name != "wipefs" or options.flags):
        raise Blocked(BlockCategory.RAW_DISK_WRITE, f"{call.name} would wipe the raw disk {disks[0]}")
    if not lists_only:
        call.flag(Category.DISK_ACCESS, "changes disks or partitions")
    return None


def power(call: Call) -> str:
    """shutdown, reboot, halt and poweroff."""
    if call.name == "rtcwake" and not {"off", "disable"}.intersection(call.arguments):
        return ""
    if call.arguments in (["--help"], ["--version"]) or (call.name == "shutdown" and call.arguments[:1] == ["-c"]):
        return ""
    raise Blocked(BlockCategory.SHUTDOWN, f"{call.name} would stop the machine")


def init(call: Call) -> str | None:
    """init 0, init 6 and every telinit."""
    level = next((argument for argument in call.arguments if not argument.startswith("-")), "")
    if call.name == "telinit" or level in ("0", "6", "1", "s", "S") or is_dynamic(level):
        raise Blocked(BlockCategory.SHUTDOWN, f"{call.name} {level} would change the run level of the machine".strip())
    return None


def systemctl(call: Call) -> str | None:
    """Power verbs stop the machine; stopping verbs are asked about."""
    options = scan(
        call.arguments, ("-H", "--host", "-M", "--machine", "-t", "--type", "-s", "--signal", "-p", "-n", "-o")
    )
    if options.has("--help", "--version"):
        return None
    verb, units = (options.operands[0], options.operands[1:]) if options.operands else ("", [])
    powers = verb in _POWER_VERBS or (
        verb in ("start", "isolate", "restart", "default", "set-default", "enable")
        and any(_POWER_TARGETS.match(unit) for unit in units)
    )
    if powers and verb != "set-default":
        raise Blocked(BlockCategory.SHUTDOWN, f"systemctl {verb} would stop the machine")
    if is_dynamic(verb):
        call.flag(Category.SERVICE_CONTROL, "controls services with a verb known only at run time")
    elif verb in _SERVICE_VERBS:
        call.flag(Category.SERVICE_CONTROL, "stops, restarts or disables a service")
    return None


def login_manager(call: Call) -> str | None:
    """loginctl can stop the machine."""
    if (verb := next((word for word in call.arguments if word in _POWER_VERBS), None)) is not None:
        raise Blocked(BlockCategory.SHUTDOWN, f"loginctl {verb} would stop the machine")
    return None


def message_bus(call: Call) -> str | None:
    """Block a power request over the message bus, like any other."""
    text = " ".join(call.arguments)
    if re.search(r"PowerOff|Reboot|Halt\b|KExec", text):
        raise Blocked(BlockCategory.SHUTDOWN, f"{call.name} would stop the machine through the message bus")
    return None


def kill(call: Call) -> str:
    """Judge kill: process -1 means all processes; found processes and the agent itself need approval."""
    arguments = list(call.arguments)
    if arguments and arguments[0] in ("-l", "-L", "--list", "--table", "--help", "--version"):
        return ""
    signal = ""
    if arguments and arguments[0] in ("-s", "-n", "--signal") and len(arguments) > 1:
        signal = arguments[1]
        del arguments[:2]
    elif arguments and arguments[0].startswith("-") and arguments[0] != "--" and len(arguments) > 1:
        signal = arguments.pop(0).lstrip("-")
    targets = [target for target in arguments if target != "--"]
    if "-1" in targets or "-01" in targets:
        raise Blocked(BlockCategory.KILL_EVERYTHING, "kill -1 would signal every process on the machine")
    for target in targets:
        if target.startswith(PROCESS_SELF):
            call.flag(Category.GATEWAY_CONTROL, "signals the agent's own process")
        elif target.startswith(FOUND_PROCESS):
            call.flag(Category.PROCESS_KILL, "kills whatever processes a search finds")
            if _GATEWAY.search(target):
                call.flag(Category.GATEWAY_CONTROL, "stops this gateway")
        elif target in ("0", "1", SOLID) or target.startswith(("-" + HOLE, "-" + SOLID)):
            call.flag(
                Category.PROCESS_KILL, "kills a whole process group, the first process, or one whose number is computed"
            )
    if call.shell.bulk and signal.upper().removeprefix("SIG") in ("9", "KILL"):
        call.flag(Category.PROCESS_KILL, "kills whatever processes a search finds")
    return ""


def kill_by_name(call: Call) -> str:
    """pkill, killall, skill and fuser."""
    if call.name == "killall5":
        raise Blocked(BlockCategory.KILL_EVERYTHING, "killall5 would signal every process on the machine")
    options = scan(call.arguments, ("-u", "-U", "-G", "-P", "-t", "-s", "--signal", "-o", "-y"))
    words = " ".join(call.arguments)
    forced = re.search(r"(?:^|\s)-(?:9|KILL|SIGKILL)\b|(?:-s|--signal)[ =]?(?:9|KILL|SIGKILL)\b", words) is not None
    if _GATEWAY.search(words):
        call.flag(Category.GATEWAY_CONTROL, "stops this gateway")
    if forced or (call.name == "killall" and options.has("-r", "--regexp")):
        call.flag(Category.PROCESS_KILL, "kills processes by name or pattern without asking them")
    elif call.name == "fuser" and options.has("-k", "--kill"):
        call.flag(Category.PROCESS_KILL, "kills whatever uses a file or port")
    elif (options.operands and options.operands[-1] in (".", ".*", "", "^")) or (
        options.has("-u", "-U", "--user", "--euid") and not options.operands
    ):
        call.flag(Category.PROCESS_KILL, "kills every process that can be matched")
    return ""


def find_process(call: Call) -> str:
    """pgrep and pidof print numbers that a kill may use."""
    pattern = "_".join(argument for argument in call.arguments if not argument.startswith("-"))
    return FOUND_PROCESS + re.sub(r"\s", "_", pattern) + "\n"


def container(call: Call) -> str | None:
    """docker, podman and compose: ending and removing is asked about, commands inside are followed."""
    valued = listed("-f --file -H --host -c --context -p --project-name --profile -n --namespace")
    options = scan(call.raw, (*valued, "--env-file", "--project-directory", "--config", "-l"), permute=False)
    words = options.operands
    if words and words[0] == "compose":
        options = scan(words[1:], (*valued, "--env-file", "--project-directory"), permute=False)
        words = options.operands
    elif words and words[0] in ("container", "image", "volume", "network", "system", "builder", "pod"):
        words = words[1:]
    if not words:
        return None
    verb, rest = words[0], words[1:]
    if verb in _CONTAINER_VERBS and not _HELP.intersection(rest):
        call.flag(Category.CONTAINER_CONTROL, "stops, restarts or removes containers")
    elif verb in ("exec", "run"):
        _inside_container(call, rest)
    return None


def _inside_container(call: Call, words: list[str]) -> None:
    valued = "-e --env --env-file -u --user -w --workdir -v --volume --mount -p --publish --name --network --entrypoint"
    more = "-h --hostname -m --memory --cpus -l --label --platform --add-host --index --gpus --shm-size --ulimit --dns"
    options = scan(words, (*valued.split(), *more.split()), permute=False)
    for volume in (*options.values.get("-v", []), *options.values.get("--volume", [])):
        source, _, target = volume.partition(":")
        if source.startswith("/") and target:
            lead_to(call, target.partition(":")[0], source)
    entry = options.value("--entrypoint")
    command = options.operands[1:]
    if entry:
        command = [entry, *command]
    if command:
        call.shell.call(command, None)


def kubectl(call: Call) -> str | None:
    """kubectl: deleting and draining is asked about, exec is followed."""
    options = scan(call.raw, ("-n", "--namespace", "--context", "-f", "--filename", "-c", "--container"), permute=False)
    words = options.operands
    if not words:
        return None
    if words[0] in ("delete", "drain", "replace") and not any(word.startswith("--dry-run") for word in words):
        call.flag(Category.CONTAINER_CONTROL, "removes or stops workloads of a cluster")
    if words[0] == "exec" and "--" in words:
        call.shell.call(words[words.index("--") + 1 :], None)
    return None
