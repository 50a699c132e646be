"""Make `v1.db.gz`, the database of version 1 that the tests of the migrations start from.

Run with the code of hermes-trio 0.1, which is the last that writes version 1: `python make_v1_database.py v1.db.gz`.
"""

import gzip
import sys
import tempfile
from pathlib import Path

import trio

from hermes_trio.runtime.context import SessionContext
from hermes_trio.runtime.outcome import JobState, TurnState, Usage
from hermes_trio.runtime.ports import (
    EventRow,
    JobFinish,
    JobStart,
    Message,
    NewMessage,
    NewNotice,
    NoticeKind,
    OutboxEntry,
    RunRecord,
    ToolCall,
    TurnFinish,
    TurnStart,
)
from hermes_trio.store import (
    ApprovalChoice,
    CronJob,
    CronState,
    IdempotentReply,
    NewApproval,
    NewSession,
    StoredResponse,
    open_store,
)

NOW = 1_800_000_000.0
KEY = "agent:main:telegram:dm:42"


def where(session: str, key: str = KEY) -> SessionContext:
    """The identity of a conversation."""
    return SessionContext(platform="telegram", chat_id="42", user_id="7", session_id=session, session_key=key)


def job(number: int, session: str, turn: str) -> JobStart:
    """A watched process."""
    return JobStart(
        job_id=f"proc_{number}",
        kind="process",
        title="make test",
        session_id=session,
        session_key=KEY,
        root_id=turn,
        turn_id=turn,
        routing=where(session),
        inbox="telegram",
        details={"pid": number},
    )


def notice(number: int, session: str, turn: str) -> NewNotice:
    """What a process's end says."""
    return NewNotice(
        inbox="telegram",
        session_key=KEY,
        session_id=session,
        routing=where(session),
        kind=NoticeKind.COMPLETION,
        text=f"process {number} exited with 0",
        job_id=f"proc_{number}",
        root_id=turn,
    )


async def fill(store) -> None:
    """Everything that a server leaves behind: what has ended, what waits, and what was under way when it was killed."""
    telegram = await store.resolve_session(where(""), source="telegram")
    for number in range(12):
        row = await store.accept_message(
            NewMessage(
                inbox="telegram",
                session_key=KEY,
                routing=where(telegram),
                text=f"question {number}",
                dedupe_key=f"m{number}",
            )
        )
        start = TurnStart(turn_id=f"turn_{number}", context=where(telegram), source="telegram", inbox_ids=(row,))
        await store.begin_turn(start)
        if number == 11:
            break  # killed in the middle of this turn
        call = ToolCall(id=f"call_{number}", name="terminal", arguments='{"command": "ls"}')
        await store.finish_turn(
            TurnFinish(
                start=start,
                state=TurnState.COMPLETED,
                messages=(
                    Message(role="user", content=f"question {number} about café and 東京"),
                    Message(role="assistant", tool_calls=(call,)),
                    Message(role="tool", content="README.md", tool_call_id=call.id, tool_name="terminal"),
                    Message(role="assistant", content=f"answer {number}", finish_reason="stop"),
                ),
                usage=Usage(input_tokens=100, output_tokens=20, api_calls=2, tool_calls=1),
                text=f"answer {number}",
                outbox=(OutboxEntry(platform="telegram", target={"chat_id": "42"}, text=f"answer {number}"),),
            )
        )
    for number in range(4):
        run = RunRecord(
            run_id=f"run_{number}", session_id=f"api_{number}", tenant="t1", idempotency_key=f"key-{number}"
        )
        context = SessionContext(platform="api", session_id=f"api_{number}", session_key=f"api_{number}")
        start = TurnStart(turn_id=f"api_turn_{number}", context=context, source="api", tenant="t1", run=run)
        await store.begin_turn(start)
        events = [EventRow(run_id=run.run_id, epoch="e1", number=n, event={"event": f"e{n}"}) for n in range(1, 6)]
        await store.append_events(events)
        if number < 3:
            body = f'{{"id": "resp_{number}"}}'.encode()
            response = StoredResponse(
                id=f"resp_{number}", tenant="t1", session_id=f"api_{number}", body=body, conversation=f"c{number}"
            )
            reply = IdempotentReply(
                tenant="t1", route="/v1/responses", key=f"k{number}", fingerprint="f", status=200, headers=(), body=body
            )
            await store.finish_turn(
                TurnFinish(
                    start=start,
                    state=(TurnState.COMPLETED, TurnState.FAILED, TurnState.CANCELLED)[number],
                    messages=(Message(role="user", content="hi"), Message(role="assistant", content="hello")),
                    text="hello",
                    also=(response, reply),
                )
            )
    for number in range(4):
        await store.start_job(job(number, telegram, f"turn_{number}"))
        if number < 2:
            ended = JobFinish(
                job_id=f"proc_{number}", state=JobState.EXITED, notice=notice(number, telegram, f"turn_{number}")
            )
            await store.finish_job(ended)
    await store.supersede("proc_0")
    await store.note_job_output("proc_3", "compiling …")
    sent, tried, dead = (await store.claim_outbox("telegram"))[0].id, 2, 3
    await store.outbox_sent(sent)
    await store.claim_outbox("telegram")
    await store.outbox_retry(tried, at=NOW + 60, error="the platform did not answer")
    await store.outbox_dead(dead, error="the chat is gone")
    for number, scope in enumerate(("run_3", KEY)):
        await store.create_approval(
            NewApproval(
                id=f"appr_{number}", scope=scope, command="rm -r build", expires_at=NOW + 600, categories=("delete",)
            )
        )
    await store.answer_approval("appr_1", ApprovalChoice.ONCE)
    await store.grant("network")
    await store.accept_delivery(
        "github", "d-1", NewMessage(inbox="webhook", session_key="w:1", routing=where("w1", "w:1"), text="push")
    )
    await store.put_cron_job(CronJob(id="daily", name="daily report", schedule="0 8 * * *", next_at=NOW + 3600))
    await store.claim_cron_slot("daily", NOW - 86_400)
    await store.start_cron_slot("daily", NOW - 86_400, session_id="cron_1")
    await store.finish_cron_slot("daily", NOW - 86_400, CronState.COMPLETED, output="all well")
    await store.claim_cron_slot("daily", NOW, next_at=NOW + 86_400)
    await store.create_api_key("laptop", tenant="t1")
    await store.allow_user("telegram", "7", user_name="Ann")
    await store.offer_pairing("telegram", "ABCD1234", user_id="8")
    await store.set_cursor("telegram", "12345")
    await store.set_meta("install", "fixture")
    await store.create_session(NewSession(id="old", source="cli", title="An old one"))
    await store.append_messages("old", [Message(role="user", content="remember this")])
    await store.fork_session("old", new_id="branch")
    await store.index_messages()


async def main(target: Path) -> None:
    """Fill a database and pack its file."""
    with tempfile.TemporaryDirectory() as place:
        path = Path(place) / "store.db"
        async with open_store(path, clock=lambda: NOW, token=lambda n: "ab" * n, maintenance=False) as store:
            await fill(store)
        target.write_bytes(gzip.compress(path.read_bytes(), mtime=0))  # noqa: ASYNC240


if __name__ == "__main__":
    trio.run(main, Path(sys.argv[1]))
