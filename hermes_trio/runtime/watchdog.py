"""The watchdog of the loop: a thread samples a heartbeat, and logs a step that lasts too long with its session, its node and its stack.

The runtime owns the thread and joins it. It is off on a virtual clock, which is independent of real time.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
import traceback
from types import FrameType
from typing import Final

import trio

from .tree import Tree

logger: Final = logging.getLogger("hermes_trio.runtime.watchdog")

SAMPLES: Final = 4
"""Heartbeats per limit: the resolution with which a step is measured."""

SHOWN_SECONDS: Final = 60.0
"""How long the tree shows that the loop was blocked."""


class Watchdog:
    """`with Watchdog(tree, seconds):` — watches the loop of the current thread. `blocked` counts what it found."""

    def __init__(self, tree: Tree, seconds: float) -> None:
        self._tree = tree
        self._seconds = seconds
        self._stop = threading.Event()
        self._beat = time.monotonic()
        self._pending = False
        self._token: trio.lowlevel.TrioToken | None = None
        self._thread: threading.Thread | None = None
        self.blocked: int = 0
        self.last: str = ""

    def __enter__(self) -> Watchdog:
        token = self._token = trio.lowlevel.current_trio_token()
        loop = threading.get_ident()
        self._thread = threading.Thread(
            target=self._watch, args=(token, loop), name="hermes-trio watchdog", daemon=True
        )
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        assert self._thread is not None
        self._thread.join()

    def _beat_now(self) -> None:
        self._beat = time.monotonic()
        self._pending = False

    def _watch(self, token: trio.lowlevel.TrioToken, loop: int) -> None:
        told = False
        shown_until = 0.0
        while not self._stop.wait(self._seconds / SAMPLES):
            if not self._pending:
                told = False
                if shown_until and time.monotonic() > shown_until:
                    shown_until = 0.0
                    self._show("")
                self._pending = True
                self._beat = time.monotonic()
                try:
                    token.run_sync_soon(self._beat_now)
                except trio.RunFinishedError:
                    return
                continue
            late = time.monotonic() - self._beat
            if late < self._seconds or told:
                continue
            told = True
            shown_until = time.monotonic() + SHOWN_SECONDS
            frame = sys._current_frames().get(loop)
            self._tell(late, frame)

    def _tell(self, late: float, frame: FrameType | None) -> None:
        owner = _owner(frame)
        stack = "" if frame is None else "".join(traceback.format_stack(frame)[-12:])
        self.last = f"the loop was blocked for {1000 * late:.0f} ms and counting by {owner}"
        self._show(self.last)
        logger.warning("%s\n%s", self.last, stack)
        # Last: a reader that sees the count finds the other fields set.
        self.blocked += 1

    def _show(self, words: str) -> None:
        """Write the root's note from the loop's own thread, the only one that may change the tree."""
        assert self._token is not None
        try:
            self._token.run_sync_soon(setattr, self._tree.root, "note", words)
        except trio.RunFinishedError:
            return


def _owner(frame: FrameType | None) -> str:
    """Return the owner of the code: the nearest turn or node among the locals of the stack."""
    from .context import Binding
    from .turn import Turn

    while frame is not None:
        for value in frame.f_locals.values():
            try:
                if isinstance(value, Turn):
                    return f"turn {value.id} of session {value.context.session_id or value.context.session_key}"
                if isinstance(value, Binding) and value.node is not None:
                    return f"{value.node.kind} {value.node.id}"
            except AttributeError:
                # The object is not fully constructed yet: the next one in the stack names the same work.
                continue
        frame = frame.f_back
    return "code outside any turn"
