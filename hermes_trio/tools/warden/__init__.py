"""Starts processes with one owner, tracks them to the last descendant, and verifies that they have ended.

The server never forks a command. One small warden process does, with one keeper for each job; see `warden.py` for the
scope that owns them all, `process.py` for what an owner holds, and `daemon/` for what runs outside the server.
"""

from hermes_trio.tools.warden.errors import (
    NotTaken,
    SpawnFailed,
    StdinClosed,
    TooManyProcesses,
    UnsupportedPlatform,
    WardenClosed,
    WardenError,
)
from hermes_trio.tools.warden.process import KeptProcess, ProcessPhase
from hermes_trio.tools.warden.sandbox import (
    CommandLimits,
    JobGroups,
    Profile,
    Protections,
    Sandbox,
    SandboxPaths,
    Workspace,
    probe_protections,
)
from hermes_trio.tools.warden.spec import ExitStatus, KillHow, KillReport, ProcessSpec, Stdin
from hermes_trio.tools.warden.streams import OutputStream
from hermes_trio.tools.warden.warden import Warden, WardenReceipt, open_warden

__all__ = [
    "CommandLimits",
    "ExitStatus",
    "JobGroups",
    "KeptProcess",
    "KillHow",
    "KillReport",
    "NotTaken",
    "OutputStream",
    "ProcessPhase",
    "ProcessSpec",
    "Profile",
    "Protections",
    "Sandbox",
    "SandboxPaths",
    "SpawnFailed",
    "Stdin",
    "StdinClosed",
    "TooManyProcesses",
    "UnsupportedPlatform",
    "Warden",
    "WardenClosed",
    "WardenError",
    "WardenReceipt",
    "Workspace",
    "open_warden",
    "probe_protections",
]
