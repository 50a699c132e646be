"""Counts the injected faults: by verb of the store, and by the states of turns, runs, jobs and deliveries in which they occurred."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from html import escape
from typing import Final

import attrs

from hermes_trio.testing.faults import READ_VERBS, STORE_VERBS

from .disk import DISK_ERRORS, DISK_POINTS
from .targets import COMMAND_VERBS, UNCALLED

KINDS: Final = ("before", "after", "slow", "full", "crash before", "crash after")

UNCRASHED: Final[Mapping[str, str]] = {
    "replace_history": "a server calls it when it compacts a history, and the histories of the worlds are short"
}
"""The verbs that a server calls, but not in a world, with the reason."""

STATES: Final[Mapping[str, Sequence[str]]] = {
    "turn": ("waiting", "taken", "open"),
    "run": ("queued", "running", "completed", "failed", "cancelled"),
    "job": ("starting", "running", "exited", "failed", "killed", "lost"),
    "delivery": ("pending", "attempting", "sent", "dead"),
    "approval": ("pending", "approved", "denied", "expired"),
    "slot": ("claimed", "running", "completed", "failed", "missed"),
}
"""The states in which a fault may occur, by kind of row."""

STATES_SQL: Final = (
    "SELECT 'run ' || status FROM runs UNION SELECT 'job ' || state FROM jobs UNION SELECT 'delivery ' || state FROM outbox"
    " UNION SELECT 'approval ' || state FROM approvals UNION SELECT 'slot ' || state FROM cron_executions"
    " UNION SELECT CASE state WHEN 'pending' THEN 'turn waiting' ELSE 'turn taken' END FROM inbox WHERE settled_at IS NULL"
    " UNION SELECT 'turn open' FROM sessions WHERE open_turn IS NOT NULL AND open_turn <> ''"
)
"""The queries that return the present states of the rows."""


FAULTS: Final = (
    "store before",
    "store after",
    "store slow",
    "store full",
    "disk",
    "crash",
    "platform",
    "model",
    "clock",
    "signal",
    "receiver",
    "pause",
    "partition",
)
"""The faults by family. Each must have occurred in each state of a turn, run, job and delivery, unless `UNREACHABLE` has the reason."""

WANTED: Final = ("turn", "run", "job", "delivery")

UNREACHABLE: Final[Mapping[tuple[str, str], str]] = {
    ("*", "job starting"): "no row has this state: a job is stored as running, before its work begins",
}
"""Pairs of fault and state that no world can reach, with the reason; `*` matches every fault."""


def _family(fault: str) -> str:
    return fault if fault in FAULTS else fault.partition(" ")[0]


@attrs.define
class Coverage:
    """The counts of any number of worlds. `calls` counts the calls of each verb."""

    verbs: Counter[tuple[str, str]] = attrs.Factory(Counter[tuple[str, str]])
    states: Counter[tuple[str, str]] = attrs.Factory(Counter[tuple[str, str]])
    calls: Counter[str] = attrs.Factory(Counter[str])
    disk: Counter[tuple[str, str]] = attrs.Factory(Counter[tuple[str, str]])
    """The failed statements, by point of a transaction and error."""

    def add(self, other: Coverage) -> None:
        """Add the counts of another world."""
        self.verbs.update(other.verbs)
        self.states.update(other.states)
        self.calls.update(other.calls)
        self.disk.update(other.disk)

    def table(self) -> str:
        """Return the tables of verbs by fault, points of a transaction by error and faults by state, and the unreachable pairs, as text."""
        return f"{self._verb_table()}\n\n{self._disk_table()}\n\n{self._state_table()}\n\n{self._reasons()}"

    def _disk_table(self) -> str:
        rows = [[point, *(str(self.disk[point, error] or ".") for error in DISK_ERRORS)] for point in DISK_POINTS]
        return _table(["disk fails at", *DISK_ERRORS], rows)

    def gaps(self) -> list[str]:
        """Return the pairs of a fault and a state of a turn, run, job or delivery that did not occur and that `UNREACHABLE` does not explain."""
        met = {(_family(fault), state) for (fault, state), count in self.states.items() if count}
        return [
            f"{fault} while there was {what} {state}"
            for what in WANTED
            for state in STATES[what]
            for fault in FAULTS
            if (fault, f"{what} {state}") not in met and not _reason(fault, f"{what} {state}")
        ]

    def _reasons(self) -> str:
        rows = [
            [state, "every fault" if fault == "*" else fault, reason] for (fault, state), reason in UNREACHABLE.items()
        ]
        widths = [max(len(row[index]) for row in rows) for index in range(2)]
        lines = [f"  {state.ljust(widths[0])}  {fault.ljust(widths[1])}  {reason}" for state, fault, reason in rows]
        verbs = [f"  no world calls {verb}: {reason}" for verb, reason in UNCALLED.items()]
        others = [
            "  a read fails before it returns, or is slow: it commits nothing",
            f"  no node crashes at the verbs that only commands beside the server call: {', '.join(sorted(COMMAND_VERBS))}",
            *(f"  no node crashes at {verb}: {reason}" for verb, reason in UNCRASHED.items()),
        ]
        return "\n".join(["out of reach (shown as -):", *lines, *verbs, *others])

    def missing(self) -> list[str]:
        """Return the verbs that were called and never failed, by kind of fault, and the verbs that were never called."""
        found: list[str] = []
        called = [verb for verb in sorted(STORE_VERBS) if self.calls[verb]]
        for kind in KINDS:
            wanted = [verb for verb in called if _can_fail(verb, kind)]
            never = [verb for verb in wanted if not self.verbs[verb, kind]]
            if never:
                found.append(f"never {kind}: {', '.join(never)}")
        idle = [verb for verb in sorted(STORE_VERBS) if not self.calls[verb] and verb not in UNCALLED]
        if idle:
            found.append(f"never called by these worlds: {', '.join(idle)}")
        return found

    def summary(self) -> str:
        """Return what is missing, as text: verbs that did not fail, pairs that were neither reached nor explained, and explanations that are wrong."""
        gaps, wrong = self.gaps(), self.contradictions()
        lines = self.missing()
        lines.append(
            f"{len(gaps)} pairs of fault and state were neither reached nor explained:"
            if gaps
            else "every pair of fault and state was reached or is explained"
        )
        lines += [f"  {gap}" for gap in gaps]
        if wrong:
            lines.append(f"{len(wrong)} declared out of reach, and reached:")
        return "\n".join([*lines, *(f"  {text}" for text in wrong)])

    def unfailed(self) -> list[str]:
        """Return the verbs that never failed before their commit or, if they write, after it, without those that no world calls."""
        return [
            f"{verb} {kind}"
            for verb in sorted(STORE_VERBS - set(UNCALLED))
            for kind in ("before", "after")
            if not self.verbs[verb, kind] and (kind == "before" or verb not in READ_VERBS)
        ]

    def contradictions(self) -> list[str]:
        """Return what occurred although `UNREACHABLE` or `UNCALLED` says that it cannot."""
        called = [f"{verb} was called, although {why}" for verb, why in UNCALLED.items() if self.calls[verb]]
        return called + [
            f"{fault} occurred while there was {state}, although {why}"
            for fault, state in sorted(
                {(_family(fault), state) for (fault, state), count in self.states.items() if count}
            )
            if (why := _reason(fault, state))
        ]

    def _verb_table(self) -> str:
        rows = [
            [verb, str(self.calls[verb]), *(self._cell(verb, kind) for kind in KINDS)]
            for verb in sorted(STORE_VERBS)
            if self.calls[verb]
        ]
        return _table(["verb of the store", "calls", *KINDS], rows)

    def _cell(self, verb: str, kind: str) -> str:
        return str(self.verbs[verb, kind] or ("." if _can_fail(verb, kind) else "-"))

    def _state_table(self) -> str:
        met: Counter[tuple[str, str]] = Counter()
        for (fault, state), count in self.states.items():
            met[_family(fault), state] += count
        columns = [f"{what} {state}" for what, states in STATES.items() for state in states]
        rows = [
            [state, *(str(met[fault, state] or ("-" if _reason(fault, state) else ".")) for fault in FAULTS)]
            for state in columns
        ]
        return _table(["while there was", *FAULTS], rows)

    def picture(self) -> str:
        """Return the tables as an SVG: one cell for each pair, darker for a higher count."""
        verbs = [verb for verb in sorted(STORE_VERBS) if self.calls[verb]]
        faults = sorted({fault for fault, _ in self.states})
        columns = [f"{what} {state}" for what, states in STATES.items() for state in states]
        first = [(verb, [self.verbs[verb, kind] for kind in KINDS]) for verb in verbs]
        second = [(column, [self.states[fault, column] for fault in faults]) for column in columns]
        left = _grid("store verb x fault", KINDS, first, 0)
        right = _grid("state x fault", faults, second, 190 + 26 * len(KINDS))
        width = 400 + 26 * (len(KINDS) + len(faults))
        height = 150 + 13 * max(len(first), len(second))
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="sans-serif" font-size="10">'
            f'<rect width="100%" height="100%" fill="white"/>{left}{right}</svg>\n'
        )


def _can_fail(verb: str, kind: str) -> bool:
    """Return whether a verb can fail in this way. A read commits nothing, and no node crashes at a verb that its server does not call."""
    if verb in READ_VERBS:
        return kind in ("before", "slow")
    return not kind.startswith("crash") or not (verb in COMMAND_VERBS or verb in UNCRASHED)


def _reason(fault: str, state: str) -> str:
    return UNREACHABLE.get((fault, state)) or UNREACHABLE.get(("*", state), "")


def _grid(title: str, heads: Sequence[str], rows: Sequence[tuple[str, Sequence[int]]], x: int) -> str:
    parts = [f'<text x="{x + 10}" y="16" font-size="13">{escape(title)}</text>']
    for index, head in enumerate(heads):
        at = x + 178 + 26 * index
        parts.append(f'<text transform="translate({at},118) rotate(-60)">{escape(head)}</text>')
    for number, (name, counts) in enumerate(rows):
        y = 128 + 13 * number
        parts.append(f'<text x="{x + 160}" y="{y + 9}" text-anchor="end">{escape(name)}</text>')
        for index, count in enumerate(counts):
            shade = "#f4f4f4" if not count else f"hsl(210,70%,{max(25, 85 - 8 * count.bit_length())}%)"
            parts.append(
                f'<rect x="{x + 168 + 26 * index}" y="{y}" width="24" height="11" fill="{shade}"><title>{count}</title></rect>'
            )
    return "".join(parts)


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(row[index]) for row in (heads, *rows)) for index in range(len(heads))]
    lines = [
        "  ".join(
            cell.ljust(width) if index == 0 else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in (heads, *rows)
    ]
    return "\n".join(line.rstrip() for line in lines)
