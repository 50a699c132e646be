"""Classifies paths: those that must never be deleted, raw disks, and those that need approval before they are read or written.

Paths are compared as text, after `.`/`..`/`//` are folded; globs count as everything they may match, and unknown
text counts as possibly empty, because an unset variable in `rm -rf "$DIR"/*` deletes the root.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable

from .marks import HOLE, SOLID, plain
from .options import listed
from .verdict import Category

_ROOTS = tuple(
    tuple(path.split("/"))
    for path in listed(
        "home root etc usr var bin sbin boot lib lib32 lib64 libx32 dev proc sys opt srv usr/bin usr/sbin usr/lib usr/lib64 usr/local usr/share "
        "var/lib System Users Library Applications Volumes private private/etc private/var"
    )
)
_UNKNOWN_DIRECTORY = (SOLID, SOLID, SOLID)
_GLOB = re.compile(r"[*?\[]")
_PROCESS_ROOT = re.compile(r"/+proc/+(?:self|thread-self|[0-9]+|\*|" + SOLID + r")/+root(?=/|\Z)")
_DISK_NAMES = listed(
    "sda sda1 sdb sdc hda hda1 vda vda1 xvda xvda1 nvme0 nvme0n1 nvme0n1p1 mmcblk0 mmcblk0p1 disk0 disk0s1 rdisk0 rdisk0s1 dm-0 md0 md127"
)
_DISK = re.compile(
    r"(?:[shv]d[a-z]+\d*|xvd[a-z]+\d*|nvme\d+(?:n\d+(?:p\d+)?)?|mmcblk\d+(?:p\d+)?|r?disk\d+(?:s\d+)*|dm-\d+|md\d+(?:p\d+)?)"
)

_STARTUP = frozenset(
    listed(
        ".bashrc .bash_profile .bash_login .bash_logout .bash_aliases .profile .zshrc .zshenv .zprofile .zlogin .zlogout .kshrc .cshrc .tcshrc .login "
        ".inputrc config.fish .xprofile .xinitrc .xsession"
    )
)
_CREDENTIALS = re.compile(
    r"/(?:\.netrc|_netrc|\.pgpass|\.npmrc|\.pypirc|\.git-credentials|\.my\.cnf|\.htpasswd|\.vault-token|(?:credentials|auth)\.json)\Z"
    r"|/id_(?:rsa|ed25519|ecdsa|dsa)\Z|/\.kube/config\Z|/\.docker/config\.json\Z|/\.(?:aws|gnupg|azure|password-store)(?:/|\Z)"
    r"|/\.config/(?:gcloud|gh|op)(?:/|\Z)"
)
_SECRETS = re.compile(
    r"/\.ssh(?:/(?!known_hosts|authorized_keys|config\Z|[^/]*\.pub\Z).*)?\Z|/\.mozilla(?:/|\Z)|/\.config/(?:google-chrome|chromium)(?:/|\Z)"
    r"|/\.\w+_history\Z|/etc/(?:g?shadow|sudoers)\b|/proc/[^/]+/(?:environ|mem)\Z|/run/secrets(?:/|\Z)"
)
_STARTED = re.compile(r"/\.config/(?:systemd/user|autostart)/|/\.git/hooks/|/Library/Launch(?:Agents|Daemons)/")
_SYSTEM = re.compile(
    r"/(?:private/)?etc(?:/|\Z)|/boot/|/s?bin/|/lib(?:64)?/|/usr/(?:local/)?(?:s?bin|lib(?:64)?)/|/usr/local/share/ca-|/var/spool/cron|/proc/sys/"
)
_ENV_FILE = re.compile(r"\.env(?:\..+)?\Z")
_ENV_TEMPLATE = re.compile(r"\.(?:example|sample|template|dist|defaults)\Z")
_CONFIG_NAMES = frozenset({"config.yaml", "config.yml"})
_OWN_FOLDER = re.compile(r"/\.?hermes(?:-trio|_trio)?/|/\.config/hermes[^/]*/")
_UNIVERSAL = re.compile(r"(?:\.{0,2}(?:[*?]|\[[^\]]*\])[*?.]*)\Z|\*[.*?]*\Z")


def fold(path: str, cwd: str) -> tuple[str, ...]:
    """Return the components of the absolute path, with `.`, `..` and empty ones resolved."""
    parts: list[str] = []
    if not path.startswith("/"):
        parts.extend(fold(cwd, "/") if cwd else _UNKNOWN_DIRECTORY)
    for part in path.split("/"):
        if part == "..":
            if parts:
                parts.pop()
        elif part not in ("", "."):
            parts.append(part)
    return tuple(parts)


def precious(path: str, cwds: Iterable[str], home: str) -> str | None:
    """Return the name of the protected root that deleting `path` would delete, or None."""
    path = plain(path)
    spellings = [path]
    if HOLE in path:
        spellings = [path.replace(HOLE, ""), path.replace(HOLE, SOLID)]
    for spelling in spellings:
        if not spelling:
            continue
        spelling = _PROCESS_ROOT.sub("/", spelling) if "proc" in spelling else spelling
        for cwd in ("/",) if spelling.startswith("/") else cwds:
            found = _precious(fold(spelling, cwd), home)
            if found is not None:
                return found
    return None


def _precious(parts: tuple[str, ...], home: str) -> str | None:
    while parts and _UNIVERSAL.match(parts[-1]):
        parts = parts[:-1]
    if not parts:
        return "/"
    for root in _ROOTS:
        if len(root) == len(parts) and _matches(parts, root):
            return "/" + "/".join(root)
    if home and home != "/":
        house = fold(home, "/")
        if len(parts) <= len(house) and _matches(parts, house[: len(parts)]):
            return home if len(parts) == len(house) else "/" + "/".join(parts) + " (holds the home directory)"
    return None


def _matches(patterns: tuple[str, ...], names: tuple[str, ...]) -> bool:
    return all(
        pattern == name or (_GLOB.search(pattern) is not None and fnmatch.fnmatchcase(name, pattern))
        for pattern, name in zip(patterns, names, strict=False)
    )


def is_raw_disk(path: str) -> bool:
    """Return whether the path names, or may name, a whole disk or a partition."""
    if "/" not in path and HOLE not in path:
        return False
    parts = fold(plain(path), "/")
    if len(parts) < 2 or parts[0] != "dev":
        return False
    if parts[1] in ("mapper", "disk") and len(parts) > 2:
        return True
    name = parts[1]
    if len(parts) > 2:
        return False
    if HOLE in name or SOLID in name or _GLOB.search(name):
        pattern = name.replace(HOLE, "*").replace(SOLID, "*")
        return any(fnmatch.fnmatchcase(disk, pattern) for disk in _DISK_NAMES)
    return _DISK.fullmatch(name) is not None


def write_category(path: str, cwd: str) -> tuple[Category, str] | None:
    """Return the category of approval that writing this file needs, with its description, or None."""
    path = plain(path)
    if not path:
        return None
    full = "/" + "/".join(fold(path, cwd)) + ("/" if path.endswith("/") else "")
    name = full.rstrip("/").rpartition("/")[2]
    if _SYSTEM.match(full):
        return Category.SYSTEM_FILE_WRITE, "writes to system files"
    if "/.ssh" in full and ("/.ssh/" in full or full.endswith("/.ssh")):
        return Category.SSH_WRITE, "writes to SSH files"
    if name in _STARTUP:
        return Category.STARTUP_WRITE, "writes to a shell startup file"
    if _CREDENTIALS.search(full):
        return Category.CREDENTIAL_WRITE, "writes to a credential file"
    if _STARTED.search(full):
        return Category.PERSISTENCE, "writes where programs are started from"
    if _is_env_file(name):
        return Category.CONFIG_WRITE, "writes to an .env file"
    if name in _CONFIG_NAMES or _OWN_FOLDER.search(full):
        return Category.CONFIG_WRITE, "writes to a configuration file"
    return None


def read_category(path: str, cwd: str, own: str) -> tuple[Category, str] | None:
    """Return the category of approval that reading this file needs, or None. `own` is the gateway's home, whose skills may be read."""
    full = "/" + "/".join(fold(plain(path), cwd))
    if is_own(full, own) and "/skills" not in full:
        return Category.GATEWAY_FILES, "uses the gateway's own files"
    if _SECRETS.search(full) or _CREDENTIALS.search(full) or _is_env_file(full.rpartition("/")[2]):
        return Category.CREDENTIAL_READ, "reads credentials"
    return None


def is_own(full: str, own: str) -> bool:
    """Return whether an absolute path is the gateway's home or below it."""
    return bool(own) and (full + "/").startswith(own.rstrip("/") + "/")


def _is_env_file(name: str) -> bool:
    return (
        (name.startswith(".env") or name.endswith(".env"))
        and bool(_ENV_FILE.search(name))
        and not _ENV_TEMPLATE.search(name)
    )
