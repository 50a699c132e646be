"""The time from the start of a server to its first answer, and its memory when idle: `python -m bench.start [--quick]`.

`hermes-trio serve` as a user starts it (SQLite, the demo model), the reference's API server, and bare uvicorn + Starlette, in turns. The time to the
first answer runs from the start of the process to the end of the first chat completion; the memory is that of the process one second later. The
package is compiled beforehand, as pip leaves every package that it installs.
The CPU time that it took is shown beside it, since others use this machine too. Import times are those of an interpreter that imports and ends.
"""

from __future__ import annotations

import compileall
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path

import attrs

from bench.load import CHAT_BODY, free_port, request_bytes
from bench.pinned_server import REFERENCE_KEY, ROOT, SERVER_CORE, baseline, cpu_seconds, reference, rss_bytes
from bench.report import Report, arguments_for, progress, spread

__all__ = ["Start", "measure_start", "start_bounds"]

SETTLED_SECONDS = 1.0
TIMEOUT = 60.0
BOUND = 0.6


@attrs.frozen
class Start:
    """One start of a server: seconds to the first answer, CPU seconds until then, bytes when idle."""

    seconds: float
    cpu: float
    rss: int


def _first_answer(port: int, request: bytes, deadline: float) -> bool:
    try:
        with socket.create_connection(("127.0.0.1", port), 5) as sock:
            sock.settimeout(max(0.1, deadline - time.monotonic()))
            sock.sendall(request)
            return sock.recv(65536).startswith(b"HTTP/1.1 200")
    except OSError:
        return False


def start_once(command: Sequence[str], port: int, environment: dict[str, str]) -> Start:
    """Start a server on its core, wait for its first answer, measure its memory, and end it."""
    request = request_bytes(CHAT_BODY)
    began = time.monotonic()
    process = subprocess.Popen(
        ["taskset", "-c", str(SERVER_CORE), *command],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=environment,
        cwd=ROOT,
        start_new_session=True,
    )
    try:
        while not _first_answer(port, request, began + TIMEOUT):
            if time.monotonic() - began > TIMEOUT or process.poll() is not None:
                raise RuntimeError(f"no answer from {' '.join(command)}")
            time.sleep(0.005)
        seconds, cpu = time.monotonic() - began, cpu_seconds(process.pid)
        time.sleep(SETTLED_SECONDS)
        return Start(seconds, cpu, rss_bytes(process.pid))
    finally:
        with suppress(ProcessLookupError):
            process.send_signal(signal.SIGTERM)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@cache
def compile_package() -> None:
    """Write the byte code that an installed package has: what runs from a clone may have none, or that of older sources."""
    compileall.compile_dir(ROOT / "hermes_trio", quiet=1)


def measure_start(name: str) -> Start | None:
    """One start of `product`, `reference` or `uvicorn`; None if it is not installed."""
    compile_package()
    port = free_port()
    environment = dict(os.environ)
    if name == "product":
        with tempfile.TemporaryDirectory(prefix="hermes-trio-bench-") as home:
            environment |= {"API_SERVER_KEY": REFERENCE_KEY, "HERMES_HOME": home}
            command = [str(Path(sys.executable).with_name("hermes-trio")), "serve", "--port", str(port)]
            return start_once(command, port, environment)
    command_of_other = reference(port) if name == "reference" else baseline(name, port)
    return None if command_of_other is None else start_once(command_of_other, port, environment)


def start_bounds(report: Report, starts: dict[str, list[Start]]) -> None:
    """Check the bounds of the start, if the reference is installed."""
    if not starts.get("reference"):
        return
    ours, theirs = starts["product"], starts["reference"]
    for what, figure in (("time to first answer", "seconds"), ("idle RSS", "rss")):
        ratio = statistics.median(
            [getattr(one, figure) / getattr(other, figure) for one, other in zip(ours, theirs, strict=True)]
        )
        report.bound(f"{what} {ratio:.2f} x the reference's (at most {BOUND})", ratio <= BOUND)


def import_seconds(module: str) -> float:
    """CPU seconds of an interpreter that imports a module and ends."""
    before = os.times()
    subprocess.run([sys.executable, "-c", f"import {module}"], check=True, cwd=ROOT)
    after = os.times()
    return (after.children_user + after.children_system) - (before.children_user + before.children_system)


def main() -> int:
    """Run the benchmark."""
    parser = arguments_for(__doc__)
    parser.add_argument("--rounds", type=int, default=0)
    args = parser.parse_args()
    rounds = args.rounds or (2 if args.quick else 7)
    report = Report("start", args.results, args.plot)
    starts: dict[str, list[Start]] = defaultdict(list)
    imports: dict[str, list[float]] = defaultdict(list)
    modules = ("sys", "trio", "quart_trio", "hermes_trio", "hermes_trio.gateway.serving")
    with progress() as bar:
        task = bar.add_task("starting servers", total=rounds)
        for _ in range(rounds):
            for name in ("product", "reference", "uvicorn"):
                start = measure_start(name)
                if start is not None:
                    starts[name].append(start)
            for module in modules:
                imports[module].append(import_seconds(module))
            bar.advance(task)
    titles = {"product": "hermes-trio serve", "reference": "reference", "uvicorn": "uvicorn + Starlette, bare"}
    rows = [
        [
            titles[name],
            spread([start.seconds for start in found], 2),
            spread([start.cpu for start in found], 2),
            spread([start.rss / 1e6 for start in found]),
        ]
        for name, found in starts.items()
    ]
    report.table("From nothing to the first answer", ["", "seconds", "CPU seconds", "idle MB"], rows)
    report.table(
        "Imports",
        ["module", "CPU ms"],
        [[name, spread([1000 * s for s in found], 0)] for name, found in imports.items()],
    )
    if not starts["reference"]:
        print("The reference is not installed, so nothing is compared with it; run: make bench-reference")
    report.figures["starts"] = {name: [attrs.asdict(start) for start in found] for name, found in starts.items()}
    report.figures["import_cpu_seconds"] = dict(imports)
    start_bounds(report, starts)

    def draw(axes: object) -> None:
        from typing import Any, cast

        left, right = cast("tuple[Any, Any]", axes)
        names = list(starts)
        left.bar(names, [statistics.median([start.seconds for start in starts[name]]) for name in names])
        left.set_title("seconds to the first answer")
        right.bar(names, [statistics.median([start.rss / 1e6 for start in starts[name]]) for name in names])
        right.set_title("idle memory, MB")

    report.plot(draw, panels=2)
    ours = starts["product"]
    return report.finish(
        f"first answer after {statistics.median([s.seconds for s in ours]):.2f} s, idle at {statistics.median([s.rss for s in ours]) / 1e6:.0f} MB",
        strict=args.strict,
    )


if __name__ == "__main__":
    sys.exit(main())
