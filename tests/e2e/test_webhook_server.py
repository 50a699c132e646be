"""Webhooks through the real server and real sockets: signed requests in, answers out to a chat platform."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import trio

from hermes_trio.testing.platforms import FakeTelegram, open_fake_telegram
from tests.adapters.webhook_requests import SECRET
from tests.tools.bench_of_tools import running, until

from .pseudo_terminal import piped
from .served_gateway import KEY, Served, open_served


def config(telegram: FakeTelegram, linger: float = 30) -> str:
    """A route whose answers go to a Telegram chat."""
    return f"""
[server]
drain_seconds = 1

[agent]
demo_directives = ["webhook"]

[telegram]
token = "{telegram.token}"
base_url = "{telegram.base_url}"
poll_seconds = 5
allow_all = true

[webhook]
secret = "{SECRET}"
rate_limit = 100000

[webhook.routes.code]
prompt = "{{text}}"
deliver = "telegram"
deliver_extra = {{ chat_id = "42" }}
linger = {linger}

[webhook.routes.direct]
prompt = "{{text}}"
deliver = "telegram"
deliver_extra = {{ chat_id = "42" }}
deliver_only = true
"""


def ends(home: Path) -> list[str | None]:
    """The end reasons of all webhook sessions."""
    with sqlite3.connect(home / "state.db") as db:
        return [
            reason for (reason,) in db.execute("SELECT end_reason FROM sessions WHERE source = 'webhook' ORDER BY n")
        ]


async def until_ended(home: Path, count: int) -> None:
    """Wait until so many webhook sessions have ended, and no other is there."""
    with trio.fail_after(30):
        while ends(home) != ["webhook_complete"] * count:  # noqa: ASYNC110 - another process changes it
            await trio.sleep(0.05)


async def health(served: Served) -> dict[str, Any]:
    """The checks of the health report, whatever its status code."""
    headers = {"Authorization": f"Bearer {KEY}"}
    answer = await served.client.get(f"{served.url}/health/detailed", headers=headers)
    return answer.json()["readiness"]["checks"]


async def accepted(served: Served, text: str, **options: str) -> None:
    """Deliver a text, which must be accepted."""
    answer = await served.deliver("code", {"text": text}, **options)
    assert answer.status_code == 202, answer.text


async def test_a_delivery_is_answered_in_the_chat_and_its_background_work_and_child_too(tmp_path: Path) -> None:
    """Message in, reply out, a process and a delegated child that report later; every session ends as webhook_complete."""
    async with open_fake_telegram() as telegram, open_served(tmp_path, config(telegram)) as served:
        telegram.add_private_chat(42)
        await accepted(served, "hello", delivery="d1")
        await telegram.wait_for_message(chat_id=42, containing="You said: hello")
        again = await served.deliver("code", {"text": "hello"}, delivery="d1")
        assert (again.status_code, again.json()) == (200, {"status": "duplicate", "delivery_id": "d1"})
        assert (await served.deliver("code", {}, secret="wrong")).status_code == 401
        await accepted(served, "!bg sleep 0.5; echo built-it")
        await telegram.wait_for_message(chat_id=42, containing="built-it", timeout=30)
        await accepted(served, "!delegate find out what is new")
        await telegram.wait_for_message(chat_id=42, containing="ASYNC DELEGATION", timeout=30)
        direct = await served.deliver("direct", {"text": "ship it"}, delivery="d9")
        assert direct.json() == {"status": "delivered", "route": "direct", "target": "telegram", "delivery_id": "d9"}
        await telegram.wait_for_message(chat_id=42, containing="ship it")
        await until_ended(tmp_path, 3)
        health = await served.ask("GET", "/health/detailed")
        assert health["status"] == "ok", health


async def test_nobody_can_approve_so_it_is_refused_with_the_reason(tmp_path: Path) -> None:
    """And the file is still there."""
    victim = tmp_path.with_name(f"{tmp_path.name}-victim")  # outside of the home, which commands cannot see
    victim.mkdir()
    async with open_fake_telegram() as telegram, open_served(tmp_path, config(telegram)) as served:
        telegram.add_private_chat(42)
        await accepted(served, f"!run rm -rf {victim}")
        await telegram.wait_for_message(chat_id=42, containing="no user to ask", timeout=30)
        assert victim.exists()
        await until_ended(tmp_path, 1)


async def test_background_work_is_stopped_when_the_route_lingers_no_longer(tmp_path: Path) -> None:
    """The row ends, and the process is gone."""
    async with open_fake_telegram() as telegram, open_served(tmp_path, config(telegram, linger=1)) as served:
        telegram.add_private_chat(42)
        await accepted(served, "!bg exec sleep 1000.0627")
        await until(lambda: running("sleep 1000.0627"))
        await until_ended(tmp_path, 1)
        assert not running("sleep 1000.0627")


async def test_each_owner_is_told_once_after_the_server_was_killed_in_the_middle(tmp_path: Path) -> None:
    """A turn that had begun is not begun again, lost work is told with its last output; both sessions end."""
    async with open_fake_telegram() as telegram:
        telegram.add_private_chat(42)
        async with open_served(tmp_path, config(telegram)) as served:
            await accepted(served, "!bg echo half-way; sleep 300")
            await telegram.wait_for_message(chat_id=42, containing="Background process started", timeout=30)
            await accepted(served, "!sleep 300", delivery="slow")
            await trio.sleep(1.5)
            await served.kill()
        for start in range(2):
            async with open_served(tmp_path, config(telegram)) as served:
                if start == 0:
                    await telegram.wait_for_message(chat_id=42, containing="interrupted", timeout=30)
                    await telegram.wait_for_message(chat_id=42, containing="half-way", timeout=30)
                await until_ended(tmp_path, 2)
                assert (await served.deliver("code", {"text": "!sleep 300"}, delivery="slow")).json()[
                    "status"
                ] == "duplicate"
                assert await served.stop() == 0
        texts = [message.text for message in telegram.messages]
        assert sum("interrupted" in text for text in texts) == 1
        assert sum("not running any more" in text for text in texts) == 1


async def test_a_stopped_server_tells_what_it_interrupted_and_refuses_meanwhile(tmp_path: Path) -> None:
    """The word is sent on the way out; the session has ended."""
    async with open_fake_telegram() as telegram, open_served(tmp_path, config(telegram)) as served:
        telegram.add_private_chat(42)
        await accepted(served, "!sleep 300")
        await trio.sleep(1)
        assert await served.stop() == 0
        await telegram.wait_for_message(chat_id=42, containing="interrupted", timeout=30)
        assert ends(tmp_path) == ["webhook_complete"]


async def test_a_signal_ends_a_route_that_waits_for_its_process_and_the_chat_is_told_once(tmp_path: Path) -> None:
    """A route that lingers for `sleep 600` does not keep the server alive: it exits within the drain time and a little, says that it stopped a job, and
    after the next start the chat gets exactly one message about it."""
    async with open_fake_telegram() as telegram:
        telegram.add_private_chat(42)
        async with open_served(tmp_path, config(telegram, linger=3600)) as served:
            await accepted(served, "!bg sleep 600")
            await telegram.wait_for_message(chat_id=42, containing="process started")
            began = trio.current_time()
            with trio.fail_after(20):
                assert await served.stop() == 0
            assert trio.current_time() - began < 1 + 5
            await trio.sleep(0.1)  # until the last of its output is read
            assert "0 jobs, 0 threads left; 0 turns were cancelled, 1 jobs were stopped" in served.output
            assert "1 inbox" in served.output
        before = len(telegram.messages)
        async with open_served(tmp_path, config(telegram, linger=3600)):
            with trio.fail_after(20):
                while len(telegram.messages) == before:  # noqa: ASYNC110 - another process sends it
                    await trio.sleep(0.05)
            await trio.sleep(1)
        assert len(telegram.messages) == before + 1
        assert ends(tmp_path) == ["webhook_complete"]


@pytest.mark.slow
async def test_ends_that_find_the_database_locked_are_written_when_it_is_free(tmp_path: Path) -> None:
    """Another process keeps the database locked for longer than the server waits, while a turn, a job and a reply end: the health report names what
    waits, and as soon as the lock is gone everything is written and told, once, without a restart."""
    async with open_fake_telegram() as telegram, open_served(tmp_path, config(telegram)) as served:
        telegram.add_private_chat(42)
        await accepted(served, "!bg sleep 1; echo built-it")
        await accepted(served, "!sleep 1")
        await telegram.wait_for_message(chat_id=42, containing="process started")
        with closing(sqlite3.connect(tmp_path / "state.db", isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            with trio.fail_after(30):
                while not (waiting := await health(served)).get("ends"):  # noqa: ASYNC110 - another process reports it
                    await trio.sleep(0.2)
            assert waiting["ends"]["status"] == "degraded"
            other.execute("ROLLBACK")
        await telegram.wait_for_message(chat_id=42, containing="built-it", timeout=30)
        await until_ended(tmp_path, 2)
        texts = [message.text for message in telegram.messages if "built-it" in message.text]
        assert len(texts) == 1, texts
        with closing(sqlite3.connect(tmp_path / "state.db")) as db:
            assert db.execute("SELECT count(*) FROM jobs WHERE ended_at IS NULL").fetchone() == (0,)
            assert db.execute("SELECT count(*) FROM inbox WHERE settled_at IS NULL").fetchone() == (0,)
        assert "ends" not in await health(served)


@pytest.mark.slow
async def test_a_dead_letter_is_listed_and_let_in_again(tmp_path: Path) -> None:
    """`hermes-trio inbox list` shows what could not be handled and why; `inbox retry` lets it wait, and the next server answers it."""
    async with open_fake_telegram() as telegram:
        telegram.add_private_chat(42)
        async with open_served(tmp_path, config(telegram)) as served:
            await accepted(served, "hello again")
            await telegram.wait_for_message(chat_id=42, containing="hello again")
            await until_ended(tmp_path, 1)
            assert await served.stop() == 0
        with closing(sqlite3.connect(tmp_path / "state.db", isolation_level=None)) as db:
            db.execute("UPDATE inbox SET state = 'dead', reason = 'ValueError: no', attempts = 3")
            ((number,),) = db.execute("SELECT id FROM inbox").fetchall()
        listed = (await trio.to_thread.run_sync(piped, ["inbox", "list"], tmp_path)).stdout
        assert f"{number} " in listed
        assert "3 attempts  ValueError: no  hello again" in listed
        wrong = await trio.to_thread.run_sync(piped, ["inbox", "retry", str(number + 1)], tmp_path)
        assert (wrong.returncode, "is not a dead letter" in wrong.stderr) == (1, True)
        again = await trio.to_thread.run_sync(piped, ["inbox", "retry", str(number)], tmp_path)
        assert again.stdout == f"{number} waits again.\n", again.stderr
        before = len(telegram.messages)
        async with open_served(tmp_path, config(telegram)):
            with trio.fail_after(20):
                while len(telegram.messages) == before:  # noqa: ASYNC110 - another process sends it
                    await trio.sleep(0.05)
        assert "hello again" in telegram.messages[-1].text
