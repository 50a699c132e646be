"""Session locks: one FIFO lock per session id, so that two turns never share a transcript. Lanes and the stateless entry use the same locks.

Also the admission of turns: a counted token that belongs to the turn and is released only when its work has ended.
"""

from __future__ import annotations

from collections import deque

import trio

from .errors import TooBusy
from .tree import Node, waiting


class SessionLocks:
    """The locks of sessions. A lock exists only while it is held."""

    def __init__(self) -> None:
        self._held: dict[str, tuple[str, deque[trio.Event] | None]] = {}

    def __len__(self) -> int:
        return len(self._held)

    async def acquire(self, session_id: str, holder: str, node: Node | None = None) -> None:
        """Acquire the lock of a session for `holder`, in FIFO order. Cancelling leaves the queue. A free lock is acquired without a checkpoint."""
        held = self._held.get(session_id)
        if held is None:
            # No queue yet: most locks are never waited for, and an empty deque is larger than the turn's own record.
            self._held[session_id] = (holder, None)
            return
        other, line = held
        if line is None:
            line = deque[trio.Event]()
            self._held[session_id] = (other, line)
        turn = trio.Event()
        line.append(turn)
        with waiting(f"lock session {session_id} held by {other}", node):
            try:
                await turn.wait()
            except trio.Cancelled:
                if turn.is_set():
                    self.release(session_id)
                else:
                    line.remove(turn)
                raise
        self._held[session_id] = (holder, line)

    def release(self, session_id: str) -> None:
        """Release the lock of a session: pass it to the first waiter, or remove it."""
        _, line = self._held[session_id]
        if line:
            self._held[session_id] = ("the next turn", line)
            line.popleft().set()
        else:
            del self._held[session_id]


class Admission:
    """Limits the number of concurrent turns to `limit`. HTTP does not wait and answers 429; lanes wait."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.active: int = 0
        self._line: deque[trio.Event] = deque()

    def check(self) -> None:
        """Raise `TooBusy` if no token is free."""
        if self.active >= self.limit:
            raise TooBusy(f"{self.active} turns are running, which is the limit; try again in a moment")

    def admit_nowait(self) -> None:
        """Take a token. Raises `TooBusy` if none is free."""
        self.check()
        self.active += 1

    def try_admit(self) -> bool:
        """Take a token if one is free and no other turn waits for it; return whether it is taken."""
        if self.active < self.limit and not self._line:
            self.active += 1
            return True
        return False

    async def admit(self) -> None:
        """Take a token, waiting in FIFO order. Cancelling leaves the queue."""
        if self.try_admit():
            return
        turn = trio.Event()
        self._line.append(turn)
        with waiting(f"a free turn slot ({self.limit} in use)"):
            try:
                await turn.wait()
            except trio.Cancelled:
                if turn.is_set():
                    self.release()
                else:
                    self._line.remove(turn)
                raise

    def exceed(self) -> None:
        """Take a token also if none is free, for a turn that ends at once."""
        self.active += 1

    def release(self) -> None:
        """Release a token; the first waiter gets it."""
        if self._line and self.active <= self.limit:
            self._line.popleft().set()
        else:
            self.active -= 1
