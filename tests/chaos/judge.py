"""Checks the guarantees when the load has ended: every acknowledged request is stored once, with one end, and every open row has a live owner."""

from __future__ import annotations

import json
from collections import Counter, defaultdict

from hermes_trio.messaging.senders import DUPLICATE_LABEL

from .cluster import Cluster
from .load import Ledger, endings_in

TOLD_SECONDS = 20.0
"""Seconds after which a client must have been told of an end on another node: many times the interval of a poll."""

REPLY = "You said: "
"""What the demo model puts before the text that it answers."""

OPEN_ROWS = {
    "runs": "ended_at IS NULL",
    "jobs": "ended_at IS NULL",
    "sessions": "open_turn IS NOT NULL",
    "inbox": "settled_at IS NULL",
    "outbox": "settled_at IS NULL",
    "approvals": "state = 'pending'",
}


async def open_rows(cluster: Cluster) -> dict[str, int]:
    """Return the number of unfinished rows by kind."""
    parts = " UNION ALL ".join(
        f"SELECT '{table}' AS name, count(*) AS n FROM hermes_trio.{table} WHERE {which}"
        for table, which in OPEN_ROWS.items()
    )
    return {row["name"]: row["n"] for row in await cluster.rows(parts) if row["n"]}


async def unowned_rows(cluster: Cluster) -> list[str]:
    """Return the open rows whose owner is not a live node."""
    held = {**OPEN_ROWS, "leases": "true"}
    parts = " UNION ALL ".join(
        f"SELECT '{table}' AS name, owner FROM hermes_trio.{table} WHERE {which} AND owner <> ''"
        " AND owner NOT IN (SELECT incarnation FROM hermes_trio.nodes)"
        for table, which in held.items()
    )
    return [f"{row['name']} of {row['owner'][:8]}" for row in await cluster.rows(parts)]


async def judge(cluster: Cluster, ledger: Ledger) -> list[str]:
    """Return a description of every broken guarantee."""
    found = list(ledger.wrong)
    found += await _judge_chats(cluster, ledger)
    found += await _judge_responses(cluster, ledger)
    found += await _judge_runs(cluster, ledger)
    found += await _judge_people(cluster, ledger)
    found += [f"open when all is calm: {count} {name}" for name, count in (await open_rows(cluster)).items()]
    found += [f"owned by nobody: {row}" for row in await unowned_rows(cluster)]
    late = await cluster.rows("SELECT incarnation, place, count(*) AS n FROM hermes_trio.late_writes GROUP BY 1, 2")
    found += [
        f"{row['incarnation'][:8]} wrote {row['n']} times to {row['place']} after it was taken over" for row in late
    ]
    return found


async def _judge_chats(cluster: Cluster, ledger: Ledger) -> list[str]:
    sql = (
        "SELECT s.id, m.content, count(*) AS n FROM hermes_trio.messages m JOIN hermes_trio.sessions s ON s.n = m.session"
        " WHERE m.role = '{}' AND s.id LIKE 'chat-%' GROUP BY 1, 2"
    )
    said = {row["content"]: (row["n"], row["id"]) for row in await cluster.rows(sql.format("user"))}
    replied = {row["content"]: (row["n"], row["id"]) for row in await cluster.rows(sql.format("assistant"))}
    wrong: list[str] = []
    for text in ledger.answered:
        place = ledger.said[text]
        if said.get(text, (0, ""))[1] != place:
            wrong.append(f"answered and not stored: {text}")
        if replied.get(REPLY + text, (0, ""))[1] != place:
            wrong.append(f"answered, and its reply is not stored: {text}")
    wrong += [f"stored {count} times: {text}" for text, (count, _) in said.items() if count > 1]
    return wrong + [
        f"replies stored {count} times: {text}"
        for text, (count, _) in replied.items()
        if text.startswith(REPLY) and count > 1
    ]


async def _judge_responses(cluster: Cluster, ledger: Ledger) -> list[str]:
    """Check that each answered response is stored, whole, and that each response of a conversation continues another one."""
    rows = {
        row["id"]: row
        for row in await cluster.rows("SELECT id, convert_from(body, 'UTF8') AS body FROM hermes_trio.responses")
    }
    wrong: list[str] = []
    continued: Counter[tuple[str, str]] = Counter()
    for text, response_id in ledger.responses.items():
        if response_id not in rows:
            wrong.append(f"answered and not stored: the response {response_id} to {text}")
            continue
        body = json.loads(rows[response_id]["body"])
        if REPLY + text not in json.dumps(body["output"]):
            wrong.append(f"stored with another answer: the response {response_id} to {text}")
        continued[body["conversation"]["id"], body["previous_response_id"] or ""] += 1
    return wrong + [
        f"{count} responses of {name} continue {before!r}" for (name, before), count in continued.items() if count > 1
    ]


async def _judge_runs(cluster: Cluster, ledger: Ledger) -> list[str]:
    rows = await cluster.rows(
        "SELECT run_id, status, idempotency_key AS key, ended_at FROM hermes_trio.runs WHERE idempotency_key <> ''"
    )
    stored = {row["run_id"]: row for row in rows}
    wrong = [f"promised and not stored: {key}" for key, run_id in ledger.runs.items() if run_id not in stored]
    keys = Counter(row["key"].rpartition(" ")[2] for row in rows)
    wrong += [f"{count} runs of one key: {key}" for key, count in keys.items() if count > 1]
    for run_id, status in ledger.ends.items():
        if run_id in stored and stored[run_id]["status"] != status:
            wrong.append(f"{run_id}: told {status}, stored {stored[run_id]['status']}")
    for run_id, (asked, told) in ledger.told.items():
        ended = stored[run_id]["ended_at"] if run_id in stored else None
        if ended and told - max(asked, ended) > TOLD_SECONDS:
            wrong.append(f"{run_id}: who waited for its end was told it {told - max(asked, ended):.0f} s late")
    numbers: dict[str, list[int]] = defaultdict(list)
    ends: Counter[str] = Counter()
    for row in await cluster.rows(
        "SELECT run_id, number, event::json ->> 'event' AS name FROM hermes_trio.events ORDER BY 1, 2"
    ):
        if ends[row["run_id"]] and row["name"] != "run.settled":
            wrong.append(f"{row['run_id']}: {row['name']} after its end")
        numbers[row["run_id"]].append(row["number"])
        ends[row["run_id"]] += row["name"] in ("run.completed", "run.failed", "run.cancelled")
    for run_id, seen in numbers.items():
        if seen != list(range(1, len(seen) + 1)):
            wrong.append(f"{run_id}: stored events {seen}")
    wrong += [
        f"{run_id}: {ends[run_id]} ends" for run_id, row in stored.items() if row["ended_at"] and ends[run_id] != 1
    ]
    return wrong


async def _judge_people(cluster: Cluster, ledger: Ledger) -> list[str]:
    """Check that each text was delivered once, except copies that are labelled as possible duplicates, and that each message of a user is stored once."""
    sent = [(message.chat_id, message.text) for message in cluster.telegram.messages]
    wrong: list[str] = []
    for text, chat in ledger.written.items():
        told = [said for where, said in sent if where == chat and text in said]
        if sum(DUPLICATE_LABEL not in said for said in told) > 1:
            wrong.append(f"told twice: {text}: {told}")
    for chat in set(ledger.written.values()):
        here = [said for where, said in sent if where == chat]
        texts = [text for text, where in ledger.written.items() if where == chat]
        silent = [text for text in texts if not any(text in said for said in here)]
        if len(silent) > endings_in(cluster.telegram.messages, chat):
            wrong.append(f"never told: {silent}: {here[-5:]}")
    stored = {
        row["text"]: row["n"]
        for row in await cluster.rows(
            "SELECT text, count(*) AS n FROM hermes_trio.inbox WHERE kind <> 'notice' GROUP BY 1"
        )
    }
    wrong += [
        f"written to the bot and stored {stored.get(text, 0)} times: {text}"
        for text in ledger.received
        if stored.get(text, 0) != 1
    ]
    lost = await cluster.rows(
        "SELECT job_id, count(*) AS n FROM hermes_trio.inbox WHERE kind = 'notice' AND job_id <> '' GROUP BY 1 HAVING count(*) > 1"
    )
    return wrong + [f"{row['n']} notices of job {row['job_id']}" for row in lost]
