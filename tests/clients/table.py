"""Play all scenarios of all clients and write what came of it into docs/clients.md: `make clients-table`."""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from .playground import CLIENTS, ROOT, Played, open_playground

PAGE = ROOT / "docs" / "clients.md"
BEGIN, END = "<!-- table: begin -->", "<!-- table: end -->"
KINDS = {
    "plain": "chat",
    "client": "client's tool",
    "server": "server's tool",
    "both": "both in one answer",
    "json": "object",
    "handoff": "handoff",
    "rounds": "20 rounds",
    "tokens": "token count",
    "fail": "failed turn",
}


def row(name: str, played: Sequence[Played]) -> str:
    """A client's line: for each kind the ways in which it was played; those that went wrong are marked."""
    cells = [f"{name} {played[0].version}"]
    for kind in KINDS:
        ways = [f"**fails: {one.way}**" if one.problem else one.way for one in played if one.kind == kind]
        cells.append(", ".join(way.replace("_", " ") for way in ways) or "–")
    return f"| {' | '.join(cells)} |"


def main() -> int:
    """Write the table; the exit code says whether everything went well."""
    began = time.monotonic()
    lines = [f"| client | {' | '.join(KINDS.values())} |", f"| --- |{' --- |' * len(KINDS)}"]
    wrong = total = 0
    with tempfile.TemporaryDirectory() as folder, open_playground(Path(folder)) as playground:
        for client in CLIENTS:
            if client.missing:
                print(f"{client.name}: {client.missing}")
                return 1
            played = playground.play(client)
            total += len(played)
            wrong += sum(bool(one.problem) for one in played)
            print(f"{client.name}: {len(played)} scenarios, {sum(bool(one.problem) for one in played)} went wrong")
            lines.append(row(client.name, played))
    before, _, rest = PAGE.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    told = f"{total} scenarios, {wrong} went wrong."
    PAGE.write_text("\n".join([f"{before}{BEGIN}", told, "", *lines, f"{END}{after}"]))
    print(f"{told} {time.monotonic() - began:.0f} s; {PAGE.relative_to(ROOT)} is written.")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
