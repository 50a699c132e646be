"""SIGKILL at random points, again and again: what was acknowledged is there, nothing is half there, nothing still runs."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import attrs
import pytest
import trio

from hermes_trio.store import open_store
from hermes_trio.store.sqlite.files import connect_reader
from hermes_trio.store.sqlite.rows import Database, many

from . import crash_runtime

KILLS = int(os.environ.get("KILLS", "100"))
ROOT = Path(__file__).parents[2]


@attrs.define
class Said:
    """What the killed processes had been told was durable, by word."""

    names: dict[str, set[str]] = attrs.Factory(dict)
    repeated: dict[str, set[str]] = attrs.Factory(lambda: defaultdict(set))

    def hear(self, lines: list[bytes]) -> None:
        """Take in whole lines."""
        for line in lines:
            word, name = line.decode().split()
            known = self.names.setdefault(word, set())
            if name in known:
                self.repeated[word].add(name)
            known.add(name)

    def __getitem__(self, word: str) -> set[str]:
        return self.names.get(word, set())


@attrs.define
class Forks:
    """The process that forks those that are killed."""

    parent: subprocess.Popen[bytes]

    def run_and_kill(self, kind: str, path: Path, generation: int, said: Said, seconds: float) -> None:
        """Let a process work for a while after it is ready, kill it, and keep what it had said."""
        stdin, stdout = self.parent.stdin, self.parent.stdout
        assert stdin is not None
        assert stdout is not None
        stdin.write(f"{kind} {path} {generation}\n".encode())
        stdin.flush()
        pid = int(stdout.readline().split()[1])
        lines: list[bytes] = []
        while (line := stdout.readline()).split() != [b"ready", str(generation).encode()]:
            assert line.split()[0] != b"dead", line
            lines.append(line)  # its senders work as soon as their stage is open
        time.sleep(seconds)
        os.kill(pid, signal.SIGKILL)
        while (line := stdout.readline()).split()[0] != b"dead":
            lines.append(line)
        said.hear(lines)


@contextmanager
def forks() -> Iterator[Forks]:
    """The forking process, for the body of the `with`."""
    with subprocess.Popen(
        [sys.executable, "-m", "tests.store.crash_writer"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT
    ) as parent:
        try:
            yield Forks(parent)
        finally:
            parent.kill()


def column(db: Database, sql: str) -> set[str]:
    """The first column of all rows."""
    return {row[0] for row in many(db, sql)}


def check(db: Database, said: Said) -> None:
    """All invariants, on a database that has been recovered."""
    assert many(db, "PRAGMA integrity_check") == [("ok",)]
    assert many(db, "PRAGMA foreign_key_check") == []

    finished = column(db, "SELECT platform_message_id FROM messages WHERE platform_message_id IS NOT NULL")
    assert said["finished"] <= finished, "an acknowledged turn is missing"
    halves = many(
        db,
        "SELECT platform_message_id FROM messages WHERE platform_message_id IS NOT NULL"
        " GROUP BY platform_message_id HAVING count(*) <> 2",
    )
    assert halves == [], "a turn has one of its two messages"
    assert finished == column(db, "SELECT turn_id FROM outbox"), "a turn's messages and its reply were parted"
    assert finished == column(db, "SELECT run_id FROM runs WHERE status = 'completed'"), (
        "a turn and its run were parted"
    )
    assert finished == column(db, "SELECT text FROM inbox WHERE kind = 'message' AND state = 'delivered'")
    assert finished == column(db, "SELECT run_id FROM events WHERE number = 2 AND event LIKE '%run.completed%'")
    counts = many(
        db, "SELECT s.id FROM sessions s WHERE message_count <> (SELECT count(*) FROM messages WHERE session = s.n)"
    )
    assert counts == [], "a session counts other messages than it has"

    accepted = column(db, "SELECT text FROM inbox WHERE kind = 'message'")
    assert said["accepted"] <= accepted, "an acknowledged message is missing"
    runs = column(db, "SELECT run_id FROM runs")
    assert said["begun"] <= runs, "a promised run is missing"
    assert column(db, "SELECT status FROM runs") <= {"completed", "failed"}, "a run is still running"
    interrupted = column(db, "SELECT run_id FROM runs WHERE error_code = 'interrupted'")
    assert runs == finished | interrupted
    last = many(
        db, "SELECT run_id, event FROM events e WHERE number = (SELECT max(number) FROM events WHERE run_id = e.run_id)"
    )
    assert {run_id for run_id, event in last if "run.failed" in event} == interrupted, "a dead run has no last event"
    assert said["sent"] <= column(db, "SELECT text FROM outbox WHERE state = 'sent'"), (
        "an acknowledged sending is missing"
    )
    assert column(db, "SELECT state FROM outbox") <= {"pending", "sent"}

    assert column(db, "SELECT state FROM inbox") <= {"pending", "delivered", "interrupted", "abandoned"}
    broken = column(db, "SELECT id FROM inbox WHERE state = 'interrupted'")
    told = many(db, "SELECT json_extract(payload, '$.interrupted_message') FROM inbox WHERE notice = 'information'")
    assert sorted(number for (number,) in told) == sorted(broken), "an interrupted message was not told exactly once"

    assert said["started"] <= column(db, "SELECT job_id FROM jobs"), "an acknowledged job is missing"
    assert said["ended"] <= column(db, "SELECT job_id FROM jobs WHERE state = 'exited'"), (
        "an acknowledged end is missing"
    )
    assert column(db, "SELECT state FROM jobs") <= {"exited", "lost"}, "a job still runs"
    notices = many(
        db,
        "SELECT j.job_id FROM jobs j WHERE (SELECT count(*) FROM inbox i WHERE i.job_id = j.job_id AND i.job_id <> '') <> 1",
    )
    assert notices == [], "a watched job has not exactly one notice"
    mismatched = many(
        db,
        "SELECT j.job_id FROM jobs j JOIN inbox i ON i.job_id = j.job_id AND i.job_id <> '' WHERE (j.state = 'lost') <> (i.notice = 'lost')",
    )
    assert mismatched == [], "a notice tells another end than the job's"

    assert column(db, "SELECT id FROM sessions WHERE one_shot = 1 AND ended_at IS NULL") == set(), "a ghost session"
    assert said["shot-begun"] <= column(db, "SELECT id FROM sessions WHERE one_shot = 1")
    assert said["shot-ended"] <= column(db, "SELECT id FROM sessions WHERE end_reason = 'webhook_complete'")
    assert column(db, "SELECT id FROM sessions WHERE open_turn IS NOT NULL") == set()


async def recover(path: Path, generation: int) -> None:
    """What the next start does first."""
    async with open_store(path, maintenance=False) as store:
        await store.recover(f"check-{generation}")


@pytest.mark.slow
def test_no_kill_loses_or_halves_anything(tmp_path: Path) -> None:
    """After each of at least 100 kills, the store is what its callers were told, no more and no less."""
    path = tmp_path / "store.db"
    said = Said()
    dice = random.Random(20_240_601)
    with forks() as writers:
        for generation in range(KILLS):
            writers.run_and_kill("verbs", path, generation, said, dice.uniform(0.0, 0.25))
            trio.run(recover, path, generation)
            with closing(connect_reader(str(path))) as db:
                check(db, said)
    assert len(said["finished"]) > KILLS
    assert len(said["ended"]) > KILLS


def check_runtime(db: Database, said: Said) -> None:
    """All invariants of a runtime whose store failed until it was killed, on a database that has been recovered."""
    assert many(db, "PRAGMA foreign_key_check") == []
    accepted = column(db, "SELECT text FROM inbox WHERE kind = 'message'")
    assert said["accepted"] <= accepted, "an acknowledged message is missing"
    assert said["begun"] <= column(db, "SELECT run_id FROM runs"), "a promised run is missing"
    assert said["started"] <= column(db, "SELECT job_id FROM jobs"), "an acknowledged job is missing"
    assert column(db, "SELECT status FROM runs") <= {"completed", "failed", "cancelled"}, "a run is still running"
    assert column(db, "SELECT job_id FROM jobs WHERE ended_at IS NULL") == set(), "a job still runs"
    assert column(db, "SELECT state FROM outbox") <= {"pending", "sent", "dead"}
    given_up = column(db, "SELECT error FROM outbox WHERE state = 'dead'")
    assert all("outcome unknown" in error for error in given_up), f"a reply was given up without need: {given_up}"
    assert column(db, "SELECT id FROM sessions WHERE open_turn IS NOT NULL") == set()
    states = column(db, "SELECT state FROM inbox")
    assert states <= {"pending", "delivered", "superseded", "interrupted", "abandoned", "dead"}
    broken = column(db, "SELECT id FROM inbox WHERE state = 'interrupted'")
    told = many(db, "SELECT json_extract(payload, '$.interrupted_message') FROM inbox WHERE notice = 'information'")
    assert sorted(number for (number,) in told) == sorted(broken), "an interrupted message was not told exactly once"
    notices = many(
        db,
        "SELECT job_id FROM jobs j WHERE inbox <> '' AND (SELECT count(*) FROM inbox i WHERE i.job_id = j.job_id) <> 1",
    )
    assert notices == [], "a watched job has not exactly one notice"
    counts = many(
        db, "SELECT s.id FROM sessions s WHERE message_count <> (SELECT count(*) FROM messages WHERE session = s.n)"
    )
    assert counts == [], "a session counts other messages than it has"
    twice = many(
        db,
        "SELECT content FROM messages WHERE role = 'user' AND (content LIKE 'message-%' OR content LIKE 'run%')"
        " GROUP BY content HAVING count(*) > 1",
    )
    assert twice == [], "a message is twice in a history"
    replies = many(
        db, "SELECT turn_id FROM outbox WHERE turn_id <> '' GROUP BY turn_id, text HAVING count(*) > 1 LIMIT 5"
    )
    assert replies == [], "a turn has replied twice"


@pytest.mark.slow
def test_no_kill_breaks_a_promise_while_the_store_fails(tmp_path: Path) -> None:
    """A runtime whose store fails at any verb, before and after commits, is killed 200 times: each message is given to an agent at most once, none is
    lost, each watched job is told, and no row is held by the dead. The last start finishes what is left."""
    path = tmp_path / "store.db"
    said = Said()
    dice = random.Random(20_261_118)
    with forks() as runtimes:
        for generation in range(2 * KILLS):
            runtimes.run_and_kill("runtime", path, generation, said, dice.uniform(0.0, 0.25))
            trio.run(recover, path, generation)
            with closing(connect_reader(str(path))) as db:
                check_runtime(db, said)
    trio.run(crash_runtime.finish, str(path))
    with closing(connect_reader(str(path))) as db:
        check_runtime(db, said)
        ends = dict(many(db, "SELECT text, state FROM inbox WHERE kind = 'message'"))
        assert set(ends.values()) <= {"delivered", "interrupted", "dead"}
        # A reply whose sender was killed in three attempts is given up, and says so.
        assert column(db, "SELECT state FROM outbox") <= {"sent", "dead"}
    assert len(said["accepted"]) > 2 * KILLS
    assert said.repeated["called"] == set(), "an agent was given a message twice"
    assert said["sent"] & said.repeated["sent"] == set(), "a reply was sent twice without a label"
