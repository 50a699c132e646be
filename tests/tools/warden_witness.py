"""What the warden's tests see with their own eyes: processes by a mark in their environment, descriptors, children."""

import gc
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from uuid import uuid4

import trio

from hermes_trio.tools.warden import KeptProcess, ProcessSpec, Stdin

MARK = "HERMES_TEST_MARK"

NASTY = r"""
import os, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
signal.signal(signal.SIGHUP, signal.SIG_IGN)
if os.fork():
    os._exit(0)
os.setsid()
if os.fork():
    os._exit(0)
for descriptor in (0, 1, 2):
    os.close(descriptor)
open(sys.argv[1], "w").write(str(os.getpid()))
while True:
    time.sleep(60)
"""
"""Forks twice, leaves its session, ignores SIGTERM, closes its streams, and then says where it is in a file."""


def new_mark() -> str:
    """A value that no other process carries."""
    return uuid4().hex


def spec(command: str, mark: str = "", *, stdin: Stdin = Stdin.NULL, merge_stderr: bool = True) -> ProcessSpec:
    """A shell command with a small environment and a mark."""
    env = {"PATH": os.environ["PATH"], "LANG": "C.UTF-8", MARK: mark}
    return ProcessSpec(command=command, cwd="/", env=env, stdin=stdin, merge_stderr=merge_stderr)


def marked(mark: str) -> list[int]:
    """The live processes (zombies have no environment any more) that carry this mark."""
    wanted = f"{MARK}={mark}".encode()
    found: list[int] = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                environment = (entry / "environ").read_bytes()
            except OSError:
                continue
            if wanted in environment.split(b"\0"):
                found.append(int(entry.name))
    return found


def is_alive(pid: int) -> bool:
    """Whether this number runs code (a zombie does not)."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] not in ("Z", "X")


def own_children() -> set[int]:
    """The children of this process, zombies included."""
    children: set[int] = set()
    for task in Path("/proc/self/task").iterdir():
        children.update(map(int, (task / "children").read_text().split()))
    return children


def own_descriptors() -> dict[str, str]:
    """The open descriptors of this process and what they are, without the one that lists them."""
    found: dict[str, str] = {}
    for entry in os.listdir("/proc/self/fd"):
        try:
            found[entry] = os.readlink(f"/proc/self/fd/{entry}")
        except OSError:
            continue
    return found


@contextmanager
def nothing_left() -> Iterator[None]:
    """Fails if the block leaves a descriptor or a child, dead or alive, that was not there before."""
    gc.collect()
    descriptors, children = own_descriptors(), own_children()
    yield
    gc.collect()
    assert own_descriptors() == descriptors
    assert own_children() == children


def shown_of(pid: int) -> bytes:
    """What the process list tells of a process: its arguments, and its first environment."""
    return Path(f"/proc/{pid}/cmdline").read_bytes() + Path(f"/proc/{pid}/environ").read_bytes()


def _text_of(path: Path) -> str:
    return path.read_text() if path.exists() else ""


async def appears(path: Path) -> str:
    """The text that a process is going to write into a file."""
    with trio.fail_after(10):
        while not (text := _text_of(path)):  # noqa: ASYNC110 - another process writes the file
            await trio.sleep(0.005)
    return text


async def gone(mark: str, seconds: float = 5) -> None:
    """Return when nothing alive carries the mark; fail if that takes too long."""
    with trio.move_on_after(seconds):
        while marked(mark):  # noqa: ASYNC110 - the kernel has no event for it
            await trio.sleep(0.01)
    assert marked(mark) == []


def gone_blocking(mark: str, seconds: float = 5) -> list[int]:
    """What is still alive after at most so many seconds, for tests without a loop of their own."""
    deadline = time.monotonic() + seconds
    while (left := marked(mark)) and time.monotonic() < deadline:
        time.sleep(0.01)
    return left


async def read_all(process: KeptProcess) -> bytes:
    """Everything that a process writes."""
    received = bytearray()
    while chunk := await process.output.receive_some():
        received += chunk
    return bytes(received)


async def read_until(process: KeptProcess, wanted: bytes) -> bytes:
    """What a process writes, until it has written this."""
    received = bytearray()
    with trio.fail_after(10):
        while wanted not in received:
            chunk = await process.output.receive_some()
            assert chunk, f"ended before {wanted!r}: {bytes(received)!r}"
            received += chunk
    return bytes(received)
