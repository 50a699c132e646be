"""Stops and their receipts: what was below a stopped node, how each part ended, and what remains."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from typing import Protocol

import msgspec
import trio

from .outcome import Cause
from .tree import Node


class ReceiptLine(msgspec.Struct, frozen=True, kw_only=True):
    """One node of a stopped scope: its kind and name, how it ended, and after how many milliseconds."""

    node: str
    key: int = 0
    kind: str
    name: str = ""
    how: str
    milliseconds: float
    waited_on: str = ""


class StopReceipt(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a stop. `ok` only if the scope is empty: nothing of it runs any more.

    `already_ended` says that there was nothing left to stop; the lines are empty then.
    """

    target: str
    cause: Cause
    ok: bool
    milliseconds: float
    lines: tuple[ReceiptLine, ...] = ()
    remaining: tuple[str, ...] = ()
    already_ended: bool = False

    def as_dict(self) -> dict[str, object]:
        """Return a JSON-ready form."""
        return {
            "target": self.target,
            "cause": self.cause.kind.value,
            "detail": self.cause.detail,
            "ok": self.ok,
            "milliseconds": round(self.milliseconds, 3),
            "already_ended": self.already_ended,
            "lines": [
                {**msgspec.structs.asdict(line), "milliseconds": round(line.milliseconds, 3)} for line in self.lines
            ],
            "remaining": list(self.remaining),
        }


def _line(node: Node, waited_on: str, began: float, now: float) -> ReceiptLine:
    return ReceiptLine(
        node=node.id,
        key=node.key,
        kind=node.kind,
        name=node.name,
        how=node.how if node.closed_at is not None else (node.note or "still running"),
        milliseconds=1000 * ((now if node.closed_at is None else node.closed_at) - began),
        waited_on=waited_on,
    )


async def _tell_lines(
    before: list[tuple[Node, str]], began: float, tell: Callable[[ReceiptLine], None], target: Node
) -> None:
    """Report each line as its node leaves the tree; return when `target` has left."""

    async def one(node: Node, waited_on: str) -> None:
        await node.wait_closed()
        tell(_line(node, waited_on, began, trio.current_time()))

    async with trio.open_nursery() as nursery:
        for node, waited_on in before:
            nursery.start_soon(one, node, waited_on)
        await target.wait_closed()
        # Nodes that left in the same step as the target are reported as well; nodes that never leave are not waited for.
        await trio.lowlevel.checkpoint()
        await trio.lowlevel.checkpoint()
        nursery.cancel_scope.cancel()


async def stop_node(
    node: Node,
    cancel: Callable[[], object],
    cause: Cause,
    timeout: float,
    tell: Callable[[ReceiptLine], None] | None = None,
) -> StopReceipt:
    """Call `cancel()`, wait until `node` has left the tree, and return a receipt with a line for every node that was below it.

    `ok` only if it left the tree within `timeout` seconds and no thread or process of it was abandoned. `tell` is called with each line at once.
    Cancelling abandons the wait for the receipt, never the stop.
    """
    if node.closed_at is not None:
        left = tuple(one.id for one in node.left or () if one.closed_at is None)
        return StopReceipt(
            target=node.id, cause=cause, ok=not left, milliseconds=0.0, remaining=left, already_ended=True
        )
    began = trio.current_time()
    before = [(this, this.waits_on) for this in node.walk()]
    cancel()
    with trio.move_on_after(timeout):
        if tell is None:
            await node.wait_closed()
        else:
            await _tell_lines(before, began, tell, node)
    now = trio.current_time()
    lines = tuple(_line(this, waited_on, began, now) for this, waited_on in before)
    if tell is not None:
        for (this, _), line in zip(before, lines, strict=True):
            if this.closed_at is None:
                tell(line)
    remaining = tuple(
        dict.fromkeys(one.id for this, _ in before for one in (this, *(this.left or ())) if one.closed_at is None)
    )
    return StopReceipt(
        target=node.id,
        cause=cause,
        ok=not remaining,
        milliseconds=1000 * (now - began),
        lines=lines,
        remaining=remaining,
    )


class _Stops(Protocol):
    """A turn, a run or a job."""

    def stop(self, cause: Cause | None = None, timeout: float = ...) -> Awaitable[StopReceipt]: ...


async def stop_each(targets: Iterable[_Stops], cause: Cause, timeout: float = 30.0) -> list[StopReceipt]:
    """Stop turns, runs or jobs concurrently; return one receipt each. Cancelling abandons the wait for the receipts, never the stop."""
    receipts: list[StopReceipt] = []

    async def stop(target: _Stops) -> None:
        receipts.append(await target.stop(cause, timeout))

    async with trio.open_nursery() as nursery:
        for target in targets:
            nursery.start_soon(stop, target)
    return receipts


async def stop_work(
    node: Node, cause: Cause, timeout: float, tell: Callable[[ReceiptLine], None] | None = None
) -> StopReceipt:
    """Stop the work of a node (`node.work`) and return the receipt of `stop_node`. Raises `ValueError` for a node without work."""
    work = node.work
    if work is None:
        raise ValueError(f"{node!r} cannot be stopped by itself")
    target = work.stopped_node()
    if target is None:
        return StopReceipt(target=node.id, cause=cause, ok=True, milliseconds=0.0, already_ended=True)
    return await stop_node(target, lambda: work.cancel(cause), cause, timeout, tell)
