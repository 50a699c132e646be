"""The invariants of every world, whatever its faults.

An invariant reads what users and clients received (`world.seen`, the chats of the platform, the trace) and the rows (`world.rows`), never the runtime's
memory. It yields a sentence for each violation. `INVARIANTS` are those of the gateway; pass others to `run_program`.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import msgspec

from hermes_trio.adapters.web.adapter import SHOWN

from . import accounts, conversations, judged_habits
from .cluster import LEASE_SECONDS
from .embedding_program import EMBEDDING, WAKES
from .platform import CRON_CHAT, FIRST_PERSON, GROUP_CHAT, WEBHOOK_CHAT
from .script import DEEPER, marks, options_of

if TYPE_CHECKING:
    from .people import RunSeen
    from .program import Step
    from .trace import Moment
    from .world import World

Invariant = Callable[["World"], Iterable[str]]

LIMITED_RUNS: Final = 3
REQUESTS_PER_MINUTE: Final = 12
BURST: Final = 4

ATTEMPTS: Final = 3
"""How often a run is begun at most."""

CHILDREN: Final = 3
"""The default of `max_concurrent_children`."""

HELD: Final[Mapping[str, str]] = {
    "an open turn": "SELECT id FROM sessions WHERE open_turn IS NOT NULL AND open_turn <> ''",
    "a run that has not ended": "SELECT run_id || ' ' || status FROM runs WHERE ended_at IS NULL",
    "what begins a run again": "SELECT run_id FROM resumptions",
    "a live job": "SELECT job_id || ' ' || state FROM jobs WHERE ended_at IS NULL",
    "a waiting row of an inbox": "SELECT id || ' ' || kind || ' ' || state || ' ' || substr(text, 1, 60) FROM inbox WHERE settled_at IS NULL",
    "an unsent reply": "SELECT id || ' ' || state || ' ' || error FROM outbox WHERE settled_at IS NULL",
    "a pending approval": "SELECT id FROM approvals WHERE state = 'pending'",
    "a slot that has not ended": "SELECT job_id || ' ' || slot || ' ' || state FROM cron_executions WHERE state IN ('claimed', 'running')",
}
"""The kinds of open rows that a settled world must not have, with the queries that find them."""


def held_rows(world: World) -> list[str]:
    """Describe every row that is still open."""
    return [f"{what}: {row[0]}" for what, sql in HELD.items() for row in world.rows(sql)]


def _owner_of_marks(world: World) -> dict[str, str]:
    """Return the owner of each mark, such as `chat 500`, `chat 700/501` for a person in the group, or `t0`."""
    owners: dict[str, str] = {}
    for step in world.program.steps:
        mark = f"m{step.number}"
        match step.kind:
            case "write":
                owners[mark] = _session_of_write(world, step)
            case "run" | "chat":
                owners[mark] = f"t{step.who}"
            case "web":
                owners[mark] = f"web t{step.who}"
            case "chore":
                owners[mark] = f"chat {WEBHOOK_CHAT}" if step.words == "direct" else f"t{step.who}"
            case "webhook":
                owners[mark] = f"chat {WEBHOOK_CHAT}"
            case "embedding":
                inside = "inside=" in step.words
                owners[mark] = f"{EMBEDDING}:{step.who}{' in process' if inside else ''}"
            case _:
                pass
    owners["m9001"] = owners["m9002"] = owners["m9003"] = f"chat {CRON_CHAT}"
    return owners


def _session_of_write(world: World, step: Step) -> str:
    """Return the conversation of a person's message. People in a group have conversations of their own; what does not mention the bot has none.

    On Slack each message that mentions the bot begins a thread, which is a conversation.
    """
    if "group=" not in step.words:
        return f"chat {FIRST_PERSON + step.who}"
    thread = f"/m{step.number}" if world.chat.name == "slack" else ""
    return "nobody" if "aside=" in step.words else f"chat {GROUP_CHAT}/{FIRST_PERSON + step.who}{thread}"


def _said(world: World) -> Iterator[tuple[int, str, bool]]:
    """Yield the bot's messages on the platform: chat, text without the label, and whether it has the label of a possible duplicate."""
    for message in world.chat.messages():
        text = message.text
        labelled = "This may be a duplicate" in text
        if labelled:
            text = text.partition(")")[2] if text.lstrip("_*").startswith("(") else text
        yield message.chat, text.strip("_* \n"), labelled


_ANSWERS: Final = ("done", "told", "lost", "interrupted", "Approval needed")
"""The beginnings of texts that may be sent only once. Status reports and the like are sent on every request."""


def watched_work_is_told_once(world: World) -> Iterator[str]:
    """Check 1: every ended watched job is reported once, or abandoned with a reason; no unlabelled duplicate, no label without a cause."""
    for job_id, state in world.rows("SELECT job_id, state FROM jobs WHERE inbox <> '' AND ended_at IS NOT NULL"):
        ends = world.rows(
            "SELECT state, reason FROM inbox WHERE job_id = ? AND notice IN ('completion', 'lost', 'async_delegation')",
            job_id,
        )
        if len(ends) != 1:
            yield f"the watched job {job_id} ({state}) has {len(ends)} notices: {ends}"
            continue
        told, reason = ends[0]
        if told not in ("delivered", "superseded", "abandoned", "dead") or (told == "abandoned" and not reason):
            yield f"the notice of the watched job {job_id} is {told} ({reason!r})"
    yield from conversations.notices_are_about_their_jobs(world)
    yield from conversations.notices_are_told_once(world)
    yield from accounts.notices_reach_the_agent(world)
    yield from accounts.notices_reach_the_program_once(world)
    yield from accounts.replies_are_sent_once(world)
    yield from accounts.replies_are_queued_once(world)
    yield from conversations.endings_have_causes(world)
    yield from world.left_behind
    plain: Counter[tuple[int, str]] = Counter()
    for chat, text, label in _said(world):
        if not label and chat != CRON_CHAT and marks(text) and text.startswith(_ANSWERS):
            plain[chat, text] += 1
    for (chat, text), count in plain.items():
        if count > 1:
            yield f"chat {chat} got {count} unlabelled copies of {text!r}"


def what_was_acknowledged_is_there(world: World) -> Iterator[str]:
    """Check 2: everything that was acknowledged (a confirmed message, a 202, a webhook's 2xx) exists exactly once."""
    resets = {person for person, text in world.seen.said if text.startswith(("/stop", "/new"))}
    interrupted = conversations.interrupted_turns(world)
    chat = world.chat
    refused = {one.chat - FIRST_PERSON for one in chat.messages() if "That was too much at once" in one.text}
    for person, text in world.seen.said:
        if not text.startswith("m"):
            continue
        rows = world.rows(
            "SELECT state, reason, turn_id FROM inbox WHERE inbox = ? AND kind = 'message' AND (text = ? OR text LIKE '[%] ' || ?)",
            chat.name,
            text,
            text,
        )
        if len(rows) > 1:
            yield f"the message {text!r} has {len(rows)} rows"
        if text not in world.seen.confirmed:
            continue
        if len(rows) != 1:
            if rows or person not in refused:
                yield f"the confirmed message {text!r} has {len(rows)} rows"
            continue
        state, reason, turn_id = rows[0]
        if state == "delivered" and person not in resets and turn_id not in interrupted:
            if not world.rows("SELECT 1 FROM outbox WHERE turn_id = ?", turn_id):
                yield f"the message {text!r} was handled in {turn_id}, and nothing was answered"
        elif state not in ("delivered", "interrupted", "abandoned", "dead", "superseded") or (
            state in ("abandoned", "dead") and not reason
        ):
            yield f"the message {text!r} is {state} ({reason!r})"
    shown = Counter(
        (message.chat, accounts.plain(version))
        for message in chat.messages()
        for version in (message.text, *message.versions)
    )
    for target, text, state in world.rows("SELECT target, text, state FROM outbox WHERE platform = ?", chat.name):
        place = chat.chat_of(str(msgspec.json.decode(target).get("chat_id")))
        if state == "sent" and not shown[place, accounts.plain(text)]:
            yield f"the reply {text!r} to chat {place} counts as sent, and was not delivered"
    for text in world.seen.embedding.accepted:
        rows = world.rows(
            "SELECT state, reason FROM inbox WHERE inbox = ? AND kind = 'message' AND text = ?", EMBEDDING, text
        )
        if len(rows) != 1 or rows[0][0] not in ("delivered", "interrupted", "abandoned", "dead"):
            yield f"the program gave {text!r} to its interface, and the rows are {rows}"
    for promise in world.seen.promises:
        ((count,),) = world.rows(promise.sql, *promise.values)
        if count != promise.count:
            yield f"{promise.text} was acknowledged, and has {count} rows"
    yield from _acknowledged_requests(world)
    yield from conversations.handled_work_is_answered(world)
    yield from conversations.answers_are_whole(world)
    yield from conversations.slots_are_accounted_for(world)
    yield from accounts.answers_to_approvals_are_written(world)
    yield from accounts.deliveries_without_an_agent_are_shown_once(world)
    yield from accounts.replies_are_in_their_threads(world)
    yield from judged_habits.nightly_job_has_its_slots(world)
    yield from judged_habits.steered_messages_are_used_once(world)
    yield from judged_habits.only_ended_work_is_removed(world)


def _acknowledged_requests(world: World) -> Iterator[str]:
    for run in world.seen.runs:
        rows = world.rows(
            "SELECT run_id, status FROM runs WHERE tenant = ? AND idempotency_key = ?",
            f"t{run.tenant}",
            f"k{run.number}",
        )
        # A client that repeats its request after the run was removed gets another one.
        rows = [row for row in rows if row[0] == run.run_id or not world.was_removed(row[0])]
        if len(rows) > 1:
            yield f"the key k{run.number} of t{run.tenant} has {len(rows)} runs"
        if not run.run_id:
            continue
        if [row[0] for row in rows] != [run.run_id]:
            yield f"the run {run.run_id} was promised with 202, and the rows are {rows}"
        if run.last is None and world.was_removed(run.run_id):
            pass
        elif run.last is None or run.last.get("run_id") != run.run_id:
            yield f"the run {run.run_id} was promised with 202, and cannot be read: {run.last}"
        elif run.last["status"] not in ("completed", "failed", "cancelled") or not run.last["settled"]:
            yield f"the run {run.run_id} is {run.last['status']}, settled {run.last['settled']}, in a calm world"
        for status in run.approved:
            if status not in (200, 404, 409):
                yield f"an answer to an approval of m{run.number} got {status}"
    yield from _acknowledged_on_pages(world)
    for hook in world.seen.webhooks:
        rows = world.rows(
            "SELECT state FROM inbox WHERE inbox = 'webhook' AND kind = 'message' AND text = ?", hook.text
        )
        accepted = any(200 <= status < 300 for status in hook.answers)
        if len(rows) > 1 or (accepted and not rows):
            yield f"the delivery of {hook.text!r} was answered {hook.answers}, and has {len(rows)} rows"
        for (state,) in rows:
            if state not in ("delivered", "interrupted", "abandoned", "dead"):
                yield f"the delivery of {hook.text!r} is {state}"


def _acknowledged_on_pages(world: World) -> Iterator[str]:
    shown = {page.tenant: str(page.history) for page in world.seen.pages}
    # A page begins with the newest messages of a long conversation.
    long = {page.tenant for page in world.seen.pages if page.history and len(page.history["data"]) >= SHOWN}
    for said in world.seen.web:
        if said.text.startswith("/"):
            continue
        rows = world.rows(
            # The person was told if the store has refused the transcript of the turn.
            "SELECT CASE WHEN EXISTS (SELECT 1 FROM outbox o WHERE o.turn_id = i.turn_id AND instr(o.text, 'does not contain the message') > 0)"
            " THEN 'interrupted' ELSE state END FROM inbox i WHERE inbox = 'web' AND kind = 'message' AND text = ?",
            said.text,
        )
        if len(rows) > 1 or (202 in said.answers and not rows):
            yield f"the message {said.text!r} in the web chat was answered {said.answers}, and has {len(rows)} rows"
        for (state,) in rows:
            if state not in ("delivered", "interrupted", "abandoned", "dead"):
                yield f"the message {said.text!r} in the web chat is {state}"
            if state == "delivered" and said.text not in shown[said.tenant] and said.tenant not in long:
                yield f"the message {said.text!r} was handled, and no page shows it"


def nothing_crosses(world: World) -> Iterator[str]:
    """Check 3: no message, event or transcript contains data of another session, user or tenant."""
    owners = _owner_of_marks(world)
    yield from world.seen.crossings
    for message in world.chat.messages():
        for mark in marks(message.text):
            if owners.get(mark, f"chat {message.chat}").partition("/")[0] != f"chat {message.chat}":
                yield f"chat {message.chat} got something about {mark}, which is of {owners[mark]}: {message.text!r}"
    yield from conversations.commands_were_allowed(world, owners)
    sessions = _session_of_marks(world)
    for run in world.seen.runs:
        here = sessions.get(f"m{run.number}")
        for event in (*run.live, *run.late):
            foreign = {mark for mark in marks(str(event.data)) if sessions.get(mark) != here}
            if foreign:
                yield f"an event of m{run.number} mentions {sorted(foreign)}"
        for status in run.foreign:
            if status not in (404, 0):
                yield f"another tenant asked for the run of m{run.number} and got {status}"
    for key, text in world.seen.embedding.told:
        for mark in marks(text):
            if owners.get(mark) != f"{key} in process":
                yield f"the reader of completions was told of {mark}, which is of {owners.get(mark)}: {text[:80]!r}"
    yield from judged_habits.files_stay_where_they_are(world)
    for page in world.seen.pages:
        for text in (*(str(event.data) for event in page.events), str(page.history)):
            foreign = {mark for mark in marks(text) if owners.get(mark) != f"web t{page.tenant}"}
            if foreign:
                yield f"a page of t{page.tenant} shows {sorted(foreign)}: {text[:200]!r}"
    for tenant, asked, body in world.seen.answers:
        found = marks(body.decode(errors="replace"))
        foreign = {mark for mark in found if owners.get(mark) not in (f"t{tenant}", f"web t{tenant}")}
        if foreign:
            yield f"t{tenant} asked for {asked} and was shown {sorted(foreign)}"
        if f"tenant t{1 - tenant}".encode() in body:
            yield f"t{tenant} asked for {asked} and was shown what another tenant has allowed"
    for chat in world.seen.chats:
        if marks(chat.answer) - {f"m{chat.number}"}:
            yield f"the completion of m{chat.number} mentions something else: {chat.answer!r}"
    for key, tenant, contents in world.rows(
        "SELECT s.session_key, s.tenant, group_concat(m.content, ' ') FROM sessions s JOIN messages m ON m.session = s.n GROUP BY s.n"
    ):
        found = {owners.get(mark, "nobody") for mark in marks(contents or "")}
        if len(found) > 1:
            yield f"the transcript of {key or tenant} mixes {sorted(found)}"


def transcripts_are_legal(world: World) -> Iterator[str]:
    """Check 4: turns are not interleaved: the results of tool calls precede any other message, and no user message is repeated."""
    sessions: dict[str, list[tuple[Any, ...]]] = defaultdict(list)
    for row in world.rows(
        "SELECT s.id, m.role, m.content, m.tool_calls, m.tool_call_id FROM messages m JOIN sessions s ON s.n = m.session"
        " WHERE m.active = 1 ORDER BY m.id"
    ):
        sessions[row[0]].append(row[1:])
    for session, messages in sessions.items():
        waiting: list[str] = []
        asked: Counter[str] = Counter()
        for role, content, calls, call_id in messages:
            if role == "tool":
                if call_id not in waiting:
                    yield f"session {session}: a result of {call_id}, which no call waits for"
                else:
                    waiting.remove(call_id)
                continue
            if waiting:
                yield f"session {session}: {role} {content!r} comes before the results of {waiting}"
                waiting = []
            if role == "assistant" and calls:
                waiting = [call["id"] if isinstance(call, dict) else call[0] for call in msgspec.json.decode(calls)]
            said = content.partition("] ")[2] if content.startswith("[") else content
            if role == "user" and said.startswith("m"):
                asked[said] += 1
        if waiting:
            yield f"session {session} ends with calls without results: {waiting}"
        for content, count in asked.items():
            if count > 1:
                yield f"session {session} has {content!r} {count} times"
    yield from conversations.conversations_are_remembered(world)
    yield from conversations.new_conversations_are_new(world)


_RANK: Final = {
    "queued": 0,
    "running": 1,
    "waiting_for_approval": 1,
    "stopping": 2,
    "completed": 3,
    "failed": 3,
    "cancelled": 3,
}


def runs_tell_everybody_the_same(world: World) -> Iterator[str]:
    """Check 5: the events of a run are the same for every reader, numbered without a gap, and end; its status only moves forward."""
    refused = any(one.text.startswith("append_events") for one in world.trace.of("injected"))
    ended = bool(
        world.trace.of("crash")
        or len(world.trace.of("drain")) > 1
        or world.trace.of("lease lost")
        or (refused and world.trace.of("node fails"))
    )
    for run in world.seen.runs:
        if not run.run_id:
            continue
        name = f"the run of m{run.number}"
        stored = world.rows("SELECT epoch, number, event FROM events WHERE run_id = ? ORDER BY number", run.run_id)
        numbers = [row[1] for row in stored]
        if numbers != list(range(1, len(numbers) + 1)):
            yield f"{name} has events {numbers}"
        known = {f"{epoch}-{number}": msgspec.json.decode(event)["event"] for epoch, number, event in stored}
        names = list(known.values())
        ends = [event for event in names if event in ("run.completed", "run.failed", "run.cancelled")]
        if len(ends) != 1:
            yield f"{name} has the ends {ends}: {names}"
        for who, events in (("a reader that followed", run.live), ("a reader that came late", run.late)):
            ids = [event.id for event in events if event.id]
            got = [int(id.rpartition("-")[2]) for id in ids]
            # A `resync` is followed by all events that there are: the logs of these runs are too short to have lost any.
            if got != list(range(1, len(got) + 1)):
                yield f"{who} of {name} got the numbers {got}"
            for event in events:
                if event.id not in known and ended:
                    continue  # sent just before the server ended, and refused by the store
                if event.id and known.get(event.id) != event.data.get("event"):
                    yield f"{who} of {name} got {event.id} as {event.data.get('event')}, the store has {known.get(event.id)}"
        yield from _attempts_are_told(world, run, [msgspec.json.decode(event) for _, _, event in stored])
        if run.late and run.late[-1].data.get("event") != "run.settled":
            yield f"{name} is over, and a late reader's stream ends with {run.late[-1].data.get('event')}"
        if not run.late and not world.was_removed(run.run_id):
            yield f"{name} is over, and a late reader got nothing"
        ranks = [_RANK[status] for status in run.statuses]
        if ranks != sorted(ranks) or len(set(run.statuses[ranks.index(3) :] if 3 in ranks else [])) > 1:
            yield f"{name} went through {run.statuses}"
    yield from accounts.streams_are_whole(world)
    yield from accounts.pages_miss_nothing(world)


def _attempts_are_told(world: World, run: RunSeen, events: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Check that a run that asks for it is begun again after each interruption, up to its last attempt, and that its events and its row agree."""
    name = f"the run of m{run.number}"
    told = [event["attempt"] for event in events if event["event"] == "run.resumed"]
    last: Mapping[str, Any] = run.last or {}
    if told and not run.resumes:
        yield f"{name} was begun again, and nobody has asked for it"
    if told != list(range(2, len(told) + 2)) or len(told) >= ATTEMPTS:
        yield f"{name} was begun again as attempts {told} of {ATTEMPTS}"
    if not world.was_removed(run.run_id) and last.get("attempt", 0) != (1 + len(told) if run.resumes else 0):
        yield f"{name} was begun again as attempts {told}, and is shown as attempt {last.get('attempt')}"
    if run.resumes and last.get("error_code") == "interrupted" and len(told) + 1 < ATTEMPTS:
        reason = str(last.get("error")).partition("because ")[2]
        if not reason:
            yield f"{name} was not begun again after attempt {len(told) + 1}: {last.get('error')}"
    for at, _ in run.stops:
        when = at - world.started_at
        calls = [call for call in world.seen.calls if f"m{run.number}" in marks(call.asked) and not call.child]
        before = {call.life for call in calls if call.at <= when}
        for call in calls:
            if call.at > when and call.life not in before:
                yield f"the stop of m{run.number} was answered at {when:.2f} s, and {call.life} began it at {call.at:.2f} s"


def what_was_stopped_is_over(world: World) -> Iterator[str]:
    """Check 7: a run has no effect after a receipt with `ok` or the event that it has settled, a turn none after `/stop` says so, a node none after a drain.

    A drain that abandons a thread says so in its report, and ends the thread's job: the run settles then, and the thread may still end.
    """
    began = {moment.text: moment.at for moment in world.trace.of("drain")}
    abandoning = {
        life: began.get(life, moment.at)
        for moment in world.trace.of("drained")
        for life, _, ok in [moment.text.partition(" ")]
        if ok == "False"
    }
    for run in world.seen.runs:
        over = [(at, "stopped with ok") for at, receipt in run.stops if receipt and receipt.get("ok")]
        if run.settled_at is not None:
            over.append((run.settled_at, "called settled"))
        for when, how in over:
            at = when - world.started_at
            for moment in _acts(world, f"m{run.number}", at):
                drain = abandoning.get(moment.text.partition(" ")[0])
                if (
                    moment.kind == "thread ends"
                    and how == "called settled"
                    and drain is not None
                    and at >= drain - 1e-6
                ):
                    continue
                yield f"m{run.number} was {how} at {at:.2f} s, and then: {moment}"
    drained: set[str] = set()
    for moment in world.trace:
        life = moment.text.partition(" ")[0]
        if moment.kind == "drained" and moment.text.endswith("True"):
            drained.add(life)
        elif life in drained and moment.kind in _ACTS:
            yield f"after the drain had said ok: {moment}"
    yield from accounts.drained_nodes_are_silent(world)
    yield from _stopped_in_chats(world)
    yield from conversations.old_work_is_over(world)
    yield from judged_habits.everything_stopped_is_over(world)
    yield from judged_habits.interrupted_turns_end(world)


_STOPPED: Final = "nothing of it runs any more"
"""What the first line of the reply to `/stop` says after a receipt with `ok`. The lines after it are about other work, as are those of the reply to `/new`."""

_LASTING: Final = ("bg", "bgs", "watch", "delbg")
"""The requests whose work outlives their turn, and its stop."""


def _stopped_in_chats(world: World) -> Iterator[str]:
    """Yield the effects and answers of a turn after its person was told that nothing of it runs any more. Replies to a chat are sent in their order.

    Judged are direct chats with a single `/stop`, and messages whose turn had begun before it. The receipts in the reply to `/new` are of the old
    conversation's turn and jobs, and say nothing of a message that waits for the new one. A turn that a crash, a drain or a takeover interrupts is left out,
    because the next turn tells of it.
    """
    steps = world.program.steps
    stops: dict[int, list[float]] = defaultdict(list)
    for step in steps:
        if step.kind == "command" and step.words in ("/stop", "/stop all"):
            stops[step.who].append(step.at)
    breaks = [one.at for one in world.trace if one.kind in ("crash", "drain", "gone", "node fails")]
    for person, written in stops.items():
        chat = f"{FIRST_PERSON + person}: "
        if len(written) != 1:
            continue
        told = [
            one.at
            for one in world.trace.of("chat")
            if one.at >= written[0] - 1e-6 and one.text.startswith(chat) and _STOPPED in one.text.partition(r"\n")[0]
        ]
        if not told:
            continue
        for step in steps:
            if step.kind != "write" or step.who != person or "group=" in step.words or step.words.startswith(_LASTING):
                continue
            mark = f"m{step.number}"
            began = next((one.at for one in _acts(world, mark, 0.0)), None)
            if began is None or began >= written[0]:
                continue
            answers = (
                one
                for one in world.trace.of("chat")
                if one.at > told[0] + 1e-6
                and one.text.startswith(chat)
                and "done" in one.text
                and mark in marks(one.text)
            )
            for moment in (*_acts(world, mark, told[0]), *answers):
                if not any(began <= at <= moment.at for at in breaks):
                    yield f"the person of {mark} was told at {told[0]:.2f} s that nothing of it runs any more, and then: {moment}"


LATE_SECONDS: Final = 0.5
"""Seconds for which a resumed process may continue before it notices that it was taken over."""


def one_node_works_on_a_session(world: World) -> Iterator[str]:
    """Check 6: at most one node works on a session at any time; a node that was taken over changes and begins nothing."""
    gone: dict[str, float] = {}
    resumed: dict[str, float] = {}
    causes = 0
    for moment in world.trace:
        life = moment.text.partition(" ")[0]
        match moment.kind:
            case "gone":
                gone.setdefault(life, moment.at)
            case "joined again":
                gone.pop(life, None)
            case "resume":
                resumed[life] = moment.at
            case "fault":
                causes += moment.text.startswith(("store", "disk", "pause", "partition"))
            case "fenced write":
                yield f"a node that was taken over changed something: {moment}"
            case "lease lost" if not causes:
                yield f"a node lost its lease, and nothing had gone wrong: {moment}"
            case "model" | "process starts" if moment.at > max(
                gone.get(life, moment.at), resumed.get(life, 0.0) + LATE_SECONDS
            ):
                yield f"{life} was taken over at {gone[life]:.2f} s, and then: {moment}"
            case _:
                pass
    yield from _overlapping_turns(world, gone)


def _overlapping_turns(world: World, gone: Mapping[str, float]) -> Iterator[str]:
    """Yield the turns of one session that two nodes ran at the same time, by the calls that the model received."""
    sessions = _session_of_marks(world)
    turns: dict[tuple[str, str, str], tuple[float, float]] = {}
    for call in world.seen.calls:
        session = next((sessions[mark] for mark in sorted(marks(call.asked)) if mark in sessions), "")
        if not session or call.child:
            continue
        end = min(world.calm_until if call.ended_at is None else call.ended_at, gone.get(call.life, world.calm_until))
        began, until = turns.get((session, call.life, call.asked), (call.at, end))
        turns[session, call.life, call.asked] = (min(began, call.at), max(until, end))
    known = list(turns.items())
    for index, ((session, life, asked), (began, until)) in enumerate(known):
        for (other_session, other, text), (later, end) in known[index + 1 :]:
            if session == other_session and life != other and began < end - 1e-6 and later < until - 1e-6:
                yield (
                    f"{life} worked on {asked!r} of {session} from {began:.2f} to {until:.2f} s,"
                    f" and {other} on {text!r} from {later:.2f} to {end:.2f} s"
                )


def _session_of_marks(world: World) -> dict[str, str]:
    """Return the session of each mark of a message, run, chat completion or webhook."""
    found: dict[str, str] = {}
    for step in world.program.steps:
        mark = f"m{step.number}"
        if step.kind == "write":
            found[mark] = _session_of_write(world, step)
        elif step.kind == "web":
            found[mark] = f"web t{step.who}"
        elif step.kind in ("run", "webhook", "chat"):
            found[mark] = f"shared{step.who}" if "session=1" in step.words else mark
    return found


_ACTS: Final = ("model", "process starts", "process ends", "thread starts", "thread ends", "mcp starts")
"""The kinds of trace entries that are effects of the gateway's work."""


def _acts(world: World, mark: str, after: float) -> Iterator[Moment]:
    """Yield the effects for a mark after a time, except those of nodes after they have left or were taken over: invariant 6 covers these."""
    gone: dict[str, float] = {}
    for moment in world.trace.of("gone"):
        gone.setdefault(moment.text.partition(" ")[0], moment.at)
    for moment in world.trace:
        if moment.at <= after + 1e-6 or moment.kind not in _ACTS:
            continue
        if moment.at >= gone.get(moment.text.partition(" ")[0], moment.at + 1):
            continue
        if mark in marks(moment.text):
            yield moment


def a_calm_world_settles(world: World) -> Iterator[str]:
    """Check 8: after the faults no row is open, no process and no crashed life runs, `/health/detailed` says ok, and every drain succeeds."""
    yield from world.leftovers
    for text in world.held:
        yield f"after {world.settings.calm_seconds:g} s of calm there is {text}"
    yield from world.late
    for text in world.zombies:
        yield f"after {world.settings.calm_seconds:g} s of calm {text}"
    health = world.seen.health
    if health is not None and health.get("status") != "ok":
        parts: list[tuple[str, Any]] = list(health.items())
        wrong = [name for name, part in parts if hasattr(part, "get") and part.get("status") not in (None, "ok")]
        yield f"the health report of a calm world says {health.get('status')}: {wrong}"
    for node in world.nodes:
        if node.report is None:
            yield f"{node.name} was asked to drain and reported nothing"
        elif not node.report.get("ok"):
            yield f"the drain of {node.name} left something: {node.report}"


def limits_hold(world: World) -> Iterator[str]:
    """Check 9: the limits of turns, processes, wakes, model calls for a message, retries, and those that all nodes share are never exceeded."""
    yield from world.hot
    yield from accounts.budgets_are_kept(world)
    yield from conversations.failed_sends_pause(world)
    yield from judged_habits.calls_are_executed_once(world)
    for node in world.nodes:
        for kernel in node.kernels:
            if kernel.most > world.settings.processes:
                yield f"{node.name} had {kernel.most} processes at once; {world.settings.processes} are allowed"
    yield from _shared_limits_hold(world)
    if world.seen.most_calls > world.turns:
        yield f"{world.seen.most_calls} model calls at once; {world.turns} turns are allowed"
    if world.seen.most_children > CHILDREN:
        yield f"{world.seen.most_children} children of one message at once; {CHILDREN} are allowed"
    for call in world.seen.calls:
        if DEEPER in call.asked:
            yield f"a child has delegated {call.asked!r}, and children may not"
    for root, count in world.rows(
        "SELECT root_id, count(DISTINCT turn_id) FROM inbox WHERE inbox = ? AND kind = 'notice' AND turn_id <> ''"
        " GROUP BY root_id HAVING count(DISTINCT turn_id) > ?",
        EMBEDDING,
        WAKES,
    ):
        yield f"notices of {root} started {count} turns; {WAKES} are allowed"
    given: Counter[str] = Counter()
    for moment in world.trace.of("model"):
        given.update(marks(moment.text) - {"m9001", "m9002", "m9003"})
    for mark, count in given.items():
        if count > 24:
            yield f"the model was called {count} times about {mark}"


_OWN_FAULTS: Final = ("StoreError", "StoreBusy", "StoreFull", "StoreClosed", "CommitUncertain", "PowerLost")
"""The errors with which a tool may fail because of a fault."""


def nothing_is_defective(world: World) -> Iterator[str]:
    """Check that no tool fails with an unexpected exception: a world whose tools are defective would satisfy the other invariants vacuously."""
    said = "the tool failed: "
    for (content,) in world.rows(
        "SELECT DISTINCT content FROM messages WHERE role = 'tool' AND instr(content, ?) > 0", said
    ):
        if not content.partition(said)[2].startswith(_OWN_FAULTS):
            yield f"a tool answered {content}"


def _shared_limits_hold(world: World) -> Iterator[str]:
    """Check the limits that all nodes share: the runs of a limited job, the requests of a key, and the one reader of a bot."""
    begun = world.rows("SELECT slot FROM cron_executions WHERE job_id = 'c20c20c20c20' AND session_id <> ''")
    if len(begun) > LIMITED_RUNS:
        yield f"a job that runs {LIMITED_RUNS} times was run {len(begun)} times"
    starts, others = len(world.trace.of("start")), len(world.nodes) - 1
    rate, beat = REQUESTS_PER_MINUTE / 60, LEASE_SECONDS / 3
    apart = sum(float(options_of(one.text).get("seconds", beat)) + beat for one in world.trace.of("fault"))
    most = starts * BURST + rate * world.seen.flood_seconds + others * rate * (2 * beat + apart)
    if world.seen.let_through > most:
        yield f"{world.seen.let_through} requests of a key were let through in {world.seen.flood_seconds:g} s; at most {most:.0f} may"
    over: set[str] = set()
    for moment in world.trace:
        if moment.kind in ("gone", "crash", "lease lost", "drained"):
            over.add(moment.text.partition(" ")[0])
        elif moment.kind == "second reader" and over.isdisjoint(moment.text.split()):
            yield f"two nodes read the updates of one bot: {moment}"


INVARIANTS: Final[Mapping[str, Invariant]] = {
    "1 watched": watched_work_is_told_once,
    "2 acknowledged": what_was_acknowledged_is_there,
    "3 isolation": nothing_crosses,
    "4 transcripts": transcripts_are_legal,
    "5 events": runs_tell_everybody_the_same,
    "6 nodes": one_node_works_on_a_session,
    "7 stops": what_was_stopped_is_over,
    "8 calm": a_calm_world_settles,
    "9 limits": limits_hold,
    "no defect": nothing_is_defective,
}
"""The invariants of the gateway, by number and name."""


def check_invariants(world: World, invariants: Mapping[str, Invariant] = INVARIANTS) -> list[str]:
    """Return every violation in a finished world, each with the name of its invariant."""
    return [f"{name}: {text}" for name, invariant in invariants.items() for text in invariant(world)]
