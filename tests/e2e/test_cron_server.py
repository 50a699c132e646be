"""Scheduled jobs through the real server: made over HTTP and on the command line, delivered to a chat platform."""

from __future__ import annotations

import sqlite3
import sys
from pathlib import Path

import trio

from hermes_trio.testing.platforms import FakeTelegram, open_fake_telegram

from .served_gateway import Served, open_served
from .server_process import KEY, clean_environment


def config(telegram: FakeTelegram) -> str:
    """A Telegram with a home channel."""
    return f"""
[server]
drain_seconds = 1

[agent]
demo_directives = ["cron"]

[telegram]
token = "{telegram.token}"
base_url = "{telegram.base_url}"
poll_seconds = 5
allow_all = true
home = {{ chat_id = "42" }}
"""


async def add(served: Served, prompt: str, schedule: str = "every 1h", **more: object) -> str:
    """Make a job over HTTP and return its id."""
    body = {"name": "job", "schedule": schedule, "prompt": prompt, "deliver": "telegram", **more}
    return (await served.ask("POST", "/api/jobs", body))["job"]["id"]


def slots(home: Path) -> list[tuple[str, str]]:
    """State and error of all slots, oldest first."""
    with sqlite3.connect(home / "state.db") as db:
        return db.execute("SELECT state, error FROM cron_executions ORDER BY slot").fetchall()


async def until_slots(home: Path, *states: str) -> None:
    """Wait until the slots are these."""
    with trio.fail_after(30):
        while [state for state, _ in slots(home)] != list(states):  # noqa: ASYNC110 - another process changes it
            await trio.sleep(0.05)


def ends(home: Path) -> set[str | None]:
    """The end reasons of all cron sessions."""
    with sqlite3.connect(home / "state.db") as db:
        return {reason for (reason,) in db.execute("SELECT end_reason FROM sessions WHERE source = 'cron'")}


async def test_a_job_runs_reports_and_ends(tmp_path: Path) -> None:
    """By its schedule and by hand; its process and its child report to the home channel; an approval is refused with the reason."""
    victim = tmp_path.with_name(f"{tmp_path.name}-victim")  # outside of the home, which commands cannot see
    victim.mkdir()
    async with open_fake_telegram() as telegram, open_served(tmp_path, config(telegram)) as served:
        telegram.add_private_chat(42)
        await add(served, "good evening", "1s")
        await telegram.wait_for_message(chat_id=42, containing="You said: good evening", timeout=30)
        job = await add(served, "!bg sleep 0.5; echo counted")
        await served.ask("POST", f"/api/jobs/{job}/run")
        await telegram.wait_for_message(chat_id=42, containing="counted", timeout=30)
        job = await add(served, "!delegate look around")
        await served.ask("POST", f"/api/jobs/{job}/run")
        await telegram.wait_for_message(chat_id=42, containing="ASYNC DELEGATION", timeout=30)
        job = await add(served, f"!run rm -rf {victim}")
        await served.ask("POST", f"/api/jobs/{job}/run")
        await telegram.wait_for_message(chat_id=42, containing="no user to ask", timeout=30)
        assert victim.exists()
        with trio.fail_after(30):
            while ends(tmp_path) != {"cron_complete"}:  # noqa: ASYNC110
                await trio.sleep(0.05)
        await until_slots(tmp_path, *["completed"] * 4)


async def test_the_command_line_talks_to_the_running_server(tmp_path: Path) -> None:
    """The store has one owner; a job that is added beside it runs at once."""
    async with open_fake_telegram() as telegram, open_served(tmp_path, config(telegram)):
        telegram.add_private_chat(42)
        environment = clean_environment(tmp_path, API_SERVER_KEY=KEY)

        async def command(*words: str) -> str:
            done = await trio.run_process(
                [sys.executable, "-m", "hermes_trio", "cron", *words],
                env=environment,
                capture_stdout=True,
                capture_stderr=True,
                check=False,
            )
            return (done.stdout + done.stderr).decode()

        job = (await command("add", "1s", "from the shell", "--deliver", "telegram")).split()[0]
        await telegram.wait_for_message(chat_id=42, containing="from the shell", timeout=30)
        assert job in await command("list")
        assert "is removed" in await command("remove", job)
        assert "hermes-trio:" in await command("show", job)


async def test_a_job_has_a_model_and_a_deadline_of_its_own(tmp_path: Path) -> None:
    """Both are kept, shown, changed and obeyed: the run is the named model's, and ends when its time is over."""
    settings = """
[server]
drain_seconds = 1

[agent]
demo_directives = ["cron"]

[models.routes.second]
provider = "demo"
"""
    async with open_served(tmp_path, settings) as served:
        job = await add(served, "!sleep 300", deliver="local", model="second", deadline=600)
        shown = (await served.ask("GET", f"/api/jobs/{job}"))["job"]
        assert (shown["model"], shown["deadline"]) == ("second", 600.0)
        await served.ask("PATCH", f"/api/jobs/{job}", {"deadline": 0.5})
        await served.ask("POST", f"/api/jobs/{job}/run")
        await until_slots(tmp_path, "failed")
        assert "deadline" in slots(tmp_path)[0][1]
        with sqlite3.connect(tmp_path / "state.db") as db:
            assert db.execute("SELECT model FROM sessions WHERE source = 'cron'").fetchall() == [("second",)]
        shown = (await served.ask("PATCH", f"/api/jobs/{job}", {"model": None, "deadline": None}))["job"]
        assert (shown["model"], shown["deadline"]) == (None, None)


async def test_a_run_that_was_cut_off_by_a_crash_is_told_once_and_not_repeated(tmp_path: Path) -> None:
    """Its slot is failed, its session has ended, its owner has heard of it; so has the owner of its lost background work."""
    async with open_fake_telegram() as telegram:
        telegram.add_private_chat(42)
        async with open_served(tmp_path, config(telegram)) as served:
            first = await add(served, "!bg echo half-way; sleep 300")
            await served.ask("POST", f"/api/jobs/{first}/run")
            await telegram.wait_for_message(chat_id=42, containing="Background process started", timeout=30)
            second = await add(served, "!sleep 300")
            await served.ask("POST", f"/api/jobs/{second}/run")
            await until_slots(tmp_path, "completed", "running")
            await trio.sleep(1)
            await served.kill()
        for start in range(2):
            async with open_served(tmp_path, config(telegram)) as served:
                if start == 0:
                    await telegram.wait_for_message(chat_id=42, containing="interrupted", timeout=30)
                    await telegram.wait_for_message(chat_id=42, containing="half-way", timeout=30)
                    with trio.fail_after(30):
                        while ends(tmp_path) != {"cron_complete"}:  # noqa: ASYNC110
                            await trio.sleep(0.05)
                assert await served.stop() == 0
        assert slots(tmp_path) == [("completed", ""), ("failed", "interrupted")]
        texts = [message.text for message in telegram.messages]
        assert sum("interrupted" in text for text in texts) == 1
        assert sum("not running any more" in text for text in texts) == 1


async def test_a_bad_token_disturbs_neither_cron_nor_http_nor_webhooks(tmp_path: Path) -> None:
    """The platform is off and says why; everything else works for the whole test."""
    bad = """
[agent]
demo_directives = ["cron"]

[telegram]
token = "1:not-the-token"
base_url = "{url}"

[webhook.routes.hello]
secret = "INSECURE_NO_AUTH"
prompt = "{{text}}"
"""
    async with open_fake_telegram() as telegram, open_served(tmp_path, bad.format(url=telegram.base_url)) as served:
        for number in range(3):
            job = await add(served, f"round {number}", deliver="local")
            await served.ask("POST", f"/api/jobs/{job}/run")
            answer = await served.deliver("hello", {"text": f"hook {number}"})
            assert answer.status_code == 202
            body = {"messages": [{"role": "user", "content": f"http {number}"}]}
            told = await served.ask("POST", "/v1/chat/completions", body)
            assert told["choices"][0]["message"]["content"] == f"You said: http {number}"
        await until_slots(tmp_path, *["completed"] * 3)
        line = (await served.ask("GET", "/health/detailed"))["platforms"]["telegram"]
        assert (line["state"], line["error_code"], line["attempts"]) == ("fatal", "unauthorized", 1)
        assert "not-the-token" not in served.output
