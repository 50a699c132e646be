"""The result of an inspection: the categories that a person can allow, the blocks that cannot be overridden, and the limits.

Values only. A `Verdict` is made by `inspect_command` and read by the approval policy; its text is for people, its
enum members are for code. `Category.value` is the human-readable pattern key under which a grant is remembered.
"""

from __future__ import annotations

from enum import Enum

import msgspec

MAX_CHARACTERS = 128_000
MAX_UNBROKEN = 4_096
MAX_SEPARATORS = 25_000


class Category(Enum):
    """One kind of risk; a grant covers the kind, not the command."""

    RECURSIVE_DELETE = "recursive delete"
    ABSOLUTE_DELETE = "delete of an absolute path"
    BULK_DELETE = "delete of what a search finds"
    UNKNOWN_DELETE = "delete of what cannot be known"
    DATA_LOSS = "loss of stored or remote data"
    OPEN_PERMISSIONS = "world-writable permissions"
    ROOT_OWNERSHIP = "recursive change of owner"
    DISK_ACCESS = "raw disk or partition access"
    DESTRUCTIVE_SQL = "destructive SQL"
    SERVICE_CONTROL = "stop or restart of a service"
    CONTAINER_CONTROL = "stop or removal of containers"
    PROCESS_KILL = "forced kill of processes"
    GATEWAY_CONTROL = "stop or change of this gateway"
    REMOTE_CODE = "run of downloaded code"
    DECODED_CODE = "run of decoded text"
    INLINE_CODE = "run of inline code"
    DYNAMIC_COMMAND = "command name known only at run time"
    EXEC_OPTION = "option that runs another program"
    SYSTEM_FILE_WRITE = "write to system files"
    SSH_WRITE = "write to SSH files"
    STARTUP_WRITE = "write to shell startup files"
    CREDENTIAL_WRITE = "write to credential files"
    CONFIG_WRITE = "write to .env or configuration files"
    GIT_DISCARD = "git command that discards work"
    GIT_FORCE_PUSH = "git push that rewrites history"
    PRIVILEGE = "run with other rights"
    CREDENTIAL_READ = "read of credentials"
    UPLOAD = "send of data to another host"
    PERSISTENCE = "change that outlives the session"
    GATEWAY_FILES = "access to the gateway's own files"
    EXTERNAL_SCANNER = "finding of an external scanner"

    @property
    def pattern_key(self) -> str:
        """Return the name under which a grant for this kind is stored and shown."""
        return self.value


class BlockCategory(Enum):
    """Why a command can never run, in any mode and with any bypass."""

    ROOT_DELETE = "recursive delete of a system root or the home directory"
    FILESYSTEM_CREATION = "creation of a filesystem"
    RAW_DISK_WRITE = "write to a raw disk"
    FORK_BOMB = "fork bomb"
    KILL_EVERYTHING = "kill of every process"
    SHUTDOWN = "shutdown or reboot of the machine"
    PASSWORD_GUESS = "sudo password from standard input"
    UNPARSEABLE = "unparseable command"
    OVER_LIMIT = "command over the limits of inspection"


class Block(msgspec.Struct, frozen=True):
    """A refusal that nothing overrides: its kind and a sentence that says what and what would be right."""

    category: BlockCategory
    reason: str


class Finding(msgspec.Struct, frozen=True):
    """One reason to ask: its kind, what was seen, and the part of the command that shows it."""

    category: Category
    description: str
    excerpt: str

    @property
    def pattern_key(self) -> str:
        """Return the key under which a grant for this finding is stored."""
        return self.category.value


class Verdict(msgspec.Struct, frozen=True):
    """The result of the inspection of one command."""

    command: str
    blocked: Block | None = None
    findings: tuple[Finding, ...] = ()
    commands: tuple[str, ...] = ()
    """Every simple command found, resolved and with wrappers peeled, in reading order (for deny globs)."""
    words: tuple[str, ...] | None = None
    """The words when the whole text is one plain command without shell operators, else None."""

    @property
    def clean(self) -> bool:
        """Return whether there is no block and no finding."""
        return self.blocked is None and not self.findings

    @property
    def categories(self) -> frozenset[Category]:
        """Return the kinds of all findings."""
        return frozenset(finding.category for finding in self.findings)

    @property
    def stops_gateway(self) -> bool:
        """Return whether the command would stop, restart or replace the gateway it runs in."""
        return Category.GATEWAY_CONTROL in self.categories

    @property
    def description(self) -> str:
        """Return one line for a person: the block's reason, or all findings joined."""
        if self.blocked is not None:
            return self.blocked.reason
        return "; ".join(dict.fromkeys(finding.description for finding in self.findings))


class Blocked(Exception):
    """Raised inside an inspection to end it at the first hard block; never leaves the package."""

    def __init__(self, category: BlockCategory, reason: str) -> None:
        super().__init__(reason)
        self.block = Block(category, reason)
