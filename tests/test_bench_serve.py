"""The parts of the server benchmarks that can be wrong without anybody noticing: the load generator, the probes and the proof of a soak."""

import sys
from pathlib import Path
from subprocess import PIPE, Popen

import apsw
import pytest
import trio

from bench import instructions, soak
from bench.http_isolation import Crossings, look_for_crossings
from bench.load import CHAT_BODY, generate, request_bytes
from bench.product_server import port_of, serving
from bench.profile_turn import part_of
from hermes_trio.store import open_store


async def test_the_generator_counts_good_answers_and_refusals(tmp_path: Path):
    """Clients of our own get as many answers as the server gives; without a key all of them are refusals."""
    async with serving(tmp_path, in_memory=True) as server:
        url = f"http://127.0.0.1:{port_of(server)}"
        ask = request_bytes(CHAT_BODY)
        good = await trio.to_thread.run_sync(generate, url, 4, 0.3, ask)
        bad = await trio.to_thread.run_sync(generate, url, 2, 0.2, ask.replace(b"Bearer ", b"Bearer not-"))
    assert good.answered > 0
    assert good.refused == good.errors == 0
    assert bad.answered == bad.refused > 0


async def test_sessions_over_http_do_not_cross(tmp_path: Path):
    """Fifty sessions at once, each sees itself and nobody else."""
    found = Crossings()
    async with serving(tmp_path, in_memory=True) as server:
        await look_for_crossings(port_of(server), 50, 2, found)
    assert found.answers == 100
    assert found.crossings == found.failures == 0


async def test_a_crossing_would_be_seen():
    """An answer with another's name in its text or in its headers counts."""
    from bench.http_isolation import _crossed

    body = b'{"choices": [{"message": {"content": "a/api::a a/api::a"}}]}'
    assert not _crossed("a", b"HTTP/1.1 200 OK\r\nx-hermes-session-id: a", body)
    assert _crossed("a", b"HTTP/1.1 200 OK\r\nx-hermes-session-id: b", body)
    assert _crossed("b", b"HTTP/1.1 200 OK\r\nx-hermes-session-id: b", body)


async def test_a_soak_sees_rows_that_have_not_ended_and_answers_that_are_lost(tmp_path: Path):
    """An open run and a question that is not in the store are both found."""
    path = tmp_path / "state.db"
    async with open_store(path):
        pass
    db = apsw.Connection(str(path))
    db.execute(
        "INSERT INTO runs (run_id, session_id, status, created_at, updated_at) VALUES ('r', 's', 'running', 0, 0)"
    )
    db.close()
    tally = soak.Tally(prompts={"soak 1"}, runs={"r"})
    assert soak.open_rows(path)["runs"] == 1
    assert soak.lost(path, tally) == (1, 1)


def test_every_function_of_a_profile_has_a_part():
    """Our own modules, Trio and the driver are told apart."""
    assert part_of("/x/hermes_trio/http/server/connection.py", "_serve").startswith("server")
    assert part_of("/x/hermes_trio/http/api/chat.py", "_read").startswith("front end")
    assert part_of("/x/site-packages/trio/_core/_run.py", "x").startswith("Trio")
    assert part_of("~", "<method 'execute' of 'apsw.Connection' objects>") == "SQLite"


def test_instructions_without_valgrind_say_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """The benchmark starts nothing and names the package."""
    monkeypatch.setenv("PATH", "")
    assert instructions.main() == 1
    assert "apt install valgrind" in capsys.readouterr().out


def test_a_program_that_fails_has_no_count():
    """A process that ends badly, or says nothing of its instructions, ends the benchmark with what it said."""
    program = "import sys; print('==1== Collected : 12', file=sys.stderr); sys.exit({code})"
    good, bad = (
        Popen([sys.executable, "-c", program.format(code=code)], stdout=PIPE, stderr=PIPE, text=True) for code in (0, 3)
    )
    assert instructions._counted(good) == 12
    with pytest.raises(SystemExit, match="ended with 3"):
        instructions._counted(bad)
