"""Parts of the invariants that read conversations: what was answered, remembered, allowed and scheduled, and what ended without a cause.

Each function yields a sentence for each violation; `invariants.py` adds it to the invariant that it belongs to.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

import msgspec

from .platform import FIRST_PERSON, GROUP_CHAT
from .program import METHODS
from .script import marks, options_of

if TYPE_CHECKING:
    from .trace import Moment
    from .world import World

SLOT_SECONDS: Final = 180.0
"""The seconds between two slots of the schedule of `WorldSettings.cron`."""

RETRY_SECONDS: Final = 1.9
"""The least seconds between two attempts to send a reply; the pause of the default settings is two."""

_FOR_GOOD: Final = ("forbidden", "outcome unknown")
"""The beginnings of the errors with which a reply may be given up: the platform refuses it for good, or probably has it."""

_ENDS_OF_NODES: Final = frozenset({"crash", "drain", "lease lost", "gone", "node fails"})
"""The kinds of trace entries that tell of the end of a node."""

_REVIVED: Final = re.compile(r"POST /admin/inbox/(\d+)/retry")

_SUDDEN_ENDS: Final = _ENDS_OF_NODES - {"drain"}

_CAUSES: Final = _ENDS_OF_NODES | {"operator", "fault"}
"""The kinds of trace entries after which work may end otherwise than by itself."""


def _stoppers(world: World) -> set[int]:
    """Return who has used `/stop` or `/new`."""
    return {
        step.who for step in world.program.steps if step.kind == "command" and step.words.startswith(("/stop", "/new"))
    }


def interrupted_turns(world: World) -> set[str]:
    """Return the turns during which a newer message of their conversation came in, where such a message interrupts: they need no reply."""
    if world.program.busy != "interrupt":
        return set()
    # The clock may have been stepped back meanwhile.
    steps = sum(abs(float(options_of(step.words)["step"])) for step in world.program.steps if step.kind == "clock")
    written = {f"m{step.number}": world.started_at + step.at for step in world.program.steps if step.kind == "write"}
    revived = {int(found[1]) for one in world.trace.of("chore") if (found := _REVIVED.match(one.text))}
    interrupted: set[str] = set()
    for turn, settled, number, created, text in world.rows(
        "SELECT i.turn_id, i.settled_at, later.id, later.created_at, later.text FROM inbox i"
        " JOIN inbox later ON later.session_key = i.session_key AND later.id > i.id"
        " WHERE i.turn_id <> '' AND i.settled_at IS NOT NULL AND later.kind = 'message'"
    ):
        # A dead letter that is queued again is as new as that; when it came in, its text says.
        came = min([written[mark] for mark in marks(text) if mark in written], default=created)
        if (came if number in revived else created) <= settled + steps:
            interrupted.add(turn)
    return interrupted


def handled_work_is_answered(world: World) -> Iterator[str]:
    """Yield the messages and notices that a turn has handled without a reply on the platform.

    The conversations of those who used `/stop` or `/new` are left out: what is stopped needs no reply.
    """
    stoppers, interrupted = _stoppers(world), interrupted_turns(world)
    for kind, inbox, text, routing, turn_id in world.rows(
        "SELECT kind, inbox, text, routing, turn_id FROM inbox WHERE state = 'delivered' AND inbox IN (?, 'webhook', 'cron')"
        " AND NOT EXISTS (SELECT 1 FROM outbox WHERE outbox.turn_id = inbox.turn_id)",
        world.chat.name,
    ):
        where: Any = msgspec.json.decode(routing)
        if turn_id in interrupted:
            continue
        if inbox != world.chat.name:
            if not where.get("cron_deliver_platform"):
                continue  # a job whose answers are only logged
        else:
            place = world.chat.chat_of(str(where.get("chat_id", "")))
            if place - FIRST_PERSON in stoppers or (place == GROUP_CHAT and stoppers):
                continue
        yield f"the {kind} {text[:80]!r} of {inbox} was handled in {turn_id}, and nothing was answered"
    answered = {
        world.chat.chat_of(str(msgspec.json.decode(target).get("chat_id")))
        for (target,) in world.rows(
            "SELECT DISTINCT target FROM outbox WHERE platform = ? AND turn_id = '' AND instr(payload, 'approval_id') = 0",
            world.chat.name,
        )
    }
    if any(one.kind in _SUDDEN_ENDS and one.at <= world.program.seconds for one in world.trace):
        return  # a node that ends suddenly while it executes a command may have confirmed it, and sends no answer
    commands = [step for step in world.program.steps if step.kind == "command"]
    for step in commands:
        # Only what is typed is confirmed, and by its text: what two people have typed is not judged.
        typed = step.number % 2 and [one.words for one in commands].count(step.words) == 1
        if typed and step.words in world.seen.confirmed and FIRST_PERSON + step.who not in answered:
            yield f"nothing was ever answered to {step.words} of person {step.who}"


def notices_are_about_their_jobs(world: World) -> Iterator[str]:
    """Yield the notices that do not mention what their job was about, and those that were dropped without a cause.

    A notice that the agent was promised is superseded only if the agent has asked for its processes.
    """
    for job_id, title, text, state, reason, job, ended, promised in world.rows(
        "SELECT j.job_id, j.title, i.text, i.state, i.reason, j.state, s.ended_at,"
        " EXISTS (SELECT 1 FROM messages m WHERE m.session = s.n AND m.role = 'tool' AND instr(m.content, j.job_id) > 0"
        " AND instr(m.content, '\"notify_on_complete\":true') > 0)"
        " AND NOT EXISTS (SELECT 1 FROM messages m WHERE m.session = s.n AND m.tool_name = 'process')"
        " FROM inbox i JOIN jobs j ON j.job_id = i.job_id LEFT JOIN sessions s ON s.id = j.session_id"
        " WHERE i.kind = 'notice' AND i.notice IN ('completion', 'lost', 'async_delegation')"
    ):
        missing = marks(title) - marks(text)
        if missing:
            yield f"the notice of the job {job_id} ({title!r}) does not mention {sorted(missing)}: {text[:120]!r}"
        if state == "superseded" and promised:
            yield f"the notice of the job {job_id} ({title!r}, {job}) is superseded, and nobody has seen its end"
        if state == "abandoned" and not (reason == "session_ended" and ended is not None) and "budget" not in reason:
            yield f"the notice of the job {job_id} ({title!r}) is abandoned without a cause: {reason!r}"


def endings_have_causes(world: World) -> Iterator[str]:
    """Yield the replies that were given up, and the runs and messages that did not complete, although nothing was the cause."""
    blocked = any(one.text.endswith("block") or " block " in one.text for one in world.trace.of("fault"))
    for text, error in world.rows("SELECT text, error FROM outbox WHERE state = 'dead'"):
        if not error.startswith(_FOR_GOOD) or (error.startswith("forbidden") and not blocked):
            yield f"the reply {text[:80]!r} was given up: {error!r}"
    calm = world.program.seconds
    if any(one.kind in _CAUSES and one.at <= calm for one in world.trace):
        return
    stopped = {step.number for step in world.program.steps if step.kind == "run" and "stop=" in step.words}
    for run in world.seen.runs:
        if run.last is not None and run.last.get("status") != "completed" and run.number not in stopped:
            yield f"the run of m{run.number} is {run.last.get('status')} in a world without faults: {run.last.get('error')}"
    if not _stoppers(world):
        for inbox, text, state in world.rows(
            "SELECT inbox, text, state FROM inbox WHERE kind = 'message' AND state <> 'delivered' AND inbox <> 'web'"
        ):
            yield f"the message {text[:80]!r} of {inbox} is {state} in a world without faults"


def answers_are_whole(world: World) -> Iterator[str]:
    """Yield the results of runs and chat completions that are not the model's."""
    if world.settings.agent is not None:
        return
    for run in world.seen.runs:
        if run.last is not None and run.last.get("status") == "completed":
            output = str(run.last.get("output"))
            if f"m{run.number}" not in marks(output):
                yield f"the run of m{run.number} is completed with the output {output[:80]!r}"
    streamed = {step.number for step in world.program.steps if step.kind == "chat" and "stream=" in step.words}
    for chat in world.seen.chats:
        if chat.status == 200 and chat.number not in streamed and f"m{chat.number}" not in marks(chat.answer):
            yield f"the completion of m{chat.number} is {chat.answer[:80]!r}"


def conversations_are_remembered(world: World) -> Iterator[str]:
    """Yield the replies that their transcript does not contain, the messages that were handled out of order, and the turns that began without what was
    said before."""
    if world.settings.agent is not None:
        return
    for text, session in world.rows(
        "SELECT o.text, o.session_id FROM outbox o JOIN sessions s ON s.id = o.session_id WHERE o.turn_id <> ''"
        " AND (o.text LIKE 'done %' OR o.text LIKE 'told %') AND o.text NOT LIKE '%(%' AND NOT EXISTS"
        " (SELECT 1 FROM messages m WHERE m.session = s.n AND m.role = 'assistant' AND trim(m.content) = trim(o.text))"
    ):
        yield f"the reply {text!r} is not in the transcript of {session}"
    accepted = dict(
        world.rows(
            "SELECT text, id FROM inbox WHERE kind = 'message' AND text LIKE 'm%' AND inbox IN (?, 'embedding')",
            world.chat.name,
        )
    )
    revived = any(step.kind == "chore" and step.words == "letters" for step in world.program.steps)
    sessions: dict[str, list[str]] = defaultdict(list)
    for session, content in world.rows(
        "SELECT s.id, m.content FROM messages m JOIN sessions s ON s.n = m.session WHERE m.role = 'user' AND m.active = 1"
        " AND s.parent_session_id IS NULL ORDER BY m.id"
    ):
        sessions[session].append(content)
    first: dict[str, frozenset[str]] = {}
    lives: dict[str, str] = {}
    for call in world.seen.calls:
        # Without a mark, several conversations may have the same text. What was begun again is in the transcript as its last attempt.
        if not call.child and marks(call.asked) and lives.get(call.asked) != call.life:
            lives[call.asked], first[call.asked] = call.life, call.knows
    for session, said in sessions.items():
        numbers = [accepted[one] for one in said if one in accepted]
        if numbers != sorted(numbers) and not revived:
            yield f"session {session} has handled its messages out of order: {[one for one in said if one in accepted]}"
        before: set[str] = set()
        for content in said:
            if content in first and (forgotten := before - first[content]):
                yield f"the turn of {content!r} in session {session} began without {sorted(forgotten)}"
            before |= marks(content)


def _renewed(world: World) -> Iterator[tuple[Moment, set[str], set[str], Mapping[str, float]]]:
    """Yield the conversations of direct chats that a single `/new` ended: the reply, the marks of the turns that had begun before the command, those
    of the messages that came after the reply, and when each turn began."""
    written: dict[int, list[float]] = defaultdict(list)
    for step in world.program.steps:
        if step.kind == "command" and step.words == "/new":
            written[step.who].append(step.at)
    began = {one: moment.at for moment in reversed(world.trace.of("model")) for one in marks(moment.text)}
    for person, times in written.items():
        chat = f"{FIRST_PERSON + person}: "
        told = [
            one
            for one in world.trace.of("chat")
            if one.text.startswith(chat) and "A new conversation begins." in one.text
        ]
        if len(times) != 1 or len(told) != 1:
            continue
        mine = [
            step
            for step in world.program.steps
            if step.kind == "write" and step.who == person and "group=" not in step.words
        ]
        old = {f"m{step.number}" for step in mine if began.get(f"m{step.number}", told[0].at) < times[0]}
        new = {f"m{step.number}" for step in mine if step.at > told[0].at}
        yield told[0], old, new, began


def new_conversations_are_new(world: World) -> Iterator[str]:
    """Yield the conversations that go on after a person was told that a new one begins."""
    sessions: dict[str, set[str]] = defaultdict(set)
    for session, content in world.rows(
        "SELECT s.id, m.content FROM messages m JOIN sessions s ON s.n = m.session WHERE m.role = 'user'"
    ):
        sessions[session] |= marks(content.partition(" ")[0])
    for _, old, new, _ in _renewed(world):
        for session, said in sessions.items():
            if said & old and said & new:
                yield f"session {session} goes on with {sorted(said & new)} after the person of {sorted(said & old)} began a new one"


def old_work_is_over(world: World) -> Iterator[str]:
    """Yield the processes of a conversation that run on after its person was told that a new one begins, unless a node ended meanwhile."""
    ends = [one.at for one in world.trace if one.kind in _ENDS_OF_NODES]
    for told, old, _, began in _renewed(world):
        if "Not everything has stopped" in told.text:
            continue
        for moment in (*world.trace.of("process starts"), *world.trace.of("process ends")):
            for mark in marks(moment.text) & old:
                if moment.at > told.at + 1e-6 and not any(began[mark] <= at <= moment.at for at in ends):
                    yield f"the person of {mark} was told at {told.at:.2f} s that a new conversation begins, and then: {moment}"


def notices_are_told_once(world: World) -> Iterator[str]:
    """Yield the notices that are in one message to the agent twice, or in more messages than there were ends of nodes."""
    again = sum(one.kind in _ENDS_OF_NODES for one in world.trace)
    for job_id, text, contents in world.rows(
        "SELECT i.job_id, i.text, json_group_array(m.content) FROM inbox i JOIN sessions s ON s.session_key = i.session_key"
        " JOIN messages m ON m.session = s.n AND m.role = 'user' AND instr(m.content, i.text) > 0"
        " WHERE i.kind = 'notice' AND i.job_id <> '' GROUP BY i.id"
    ):
        told = [content.count(text) for content in msgspec.json.decode(contents)]
        if max(told) > 1 or len(told) > 1 + again:
            yield f"the notice of the job {job_id} was given to the agent {told} times"


def failed_sends_pause(world: World) -> Iterator[str]:
    """Yield the messages that were sent again sooner than `RETRY_SECONDS` after the platform had refused them, although no node ended meanwhile and
    no clock was set.

    A message with a nonce may be repeated once at once: the platform recognises it.
    """
    ends = [
        one.at
        for one in world.trace
        if one.kind in _ENDS_OF_NODES or one.kind == "start" or (one.kind == "fault" and one.text.startswith("clock"))
    ]
    method = METHODS[world.chat.name][0]
    refused: dict[str, float] = {}
    repeated: set[str] = set()
    for call in world.chat.fake.calls:
        if call.method != method:
            continue
        what, at = repr(sorted(call.params.items())), call.at - world.started_at
        last = refused.pop(what, None)
        if last is not None and at - last < RETRY_SECONDS and not any(last <= one <= at for one in ends):
            if "nonce" not in call.params or what in repeated:
                yield f"{method} was refused at {last:.2f} s, and repeated after {at - last:.2f} s: {what[:120]}"
            repeated.add(what)
        if call.status in (0, 429) or call.status >= 500:
            refused[what] = at


def commands_were_allowed(world: World, owners: Mapping[str, str]) -> Iterator[str]:
    """Yield the commands that were run although nobody with the right to has allowed them, or before that."""
    trusted, allowed = world.seen.trusted, world.seen.allowed
    for moment in world.trace.of("process starts"):
        if "rm -rf" not in moment.text:
            continue
        for mark in marks(moment.text):
            owner = owners.get(mark, "")
            # What was allowed for good is not asked about again.
            if ("chat" if owner.startswith("chat ") else owner.removeprefix("web ")) in trusted:
                continue
            if moment.at < allowed.get(mark, moment.at + 1) - 1e-6:
                yield f"no user with the right to has allowed it, and still: {moment}"


def slots_are_accounted_for(world: World) -> Iterator[str]:
    """Yield the slots of the schedule that have no row. With a clock that is stepped, and with another schedule, there is no such sequence."""
    if world.settings.cron != "*/3 * * * *" or any(step.kind == "clock" for step in world.program.steps):
        return
    slots = [
        at - world.started_at
        for (at,) in world.rows("SELECT slot FROM cron_executions WHERE job_id = 'c10c10c10c10' ORDER BY slot")
    ]
    until = world.calm_until - SLOT_SECONDS
    expected = [
        SLOT_SECONDS * number - world.started_at % SLOT_SECONDS
        for number in range(1, 1 + int(world.calm_until / SLOT_SECONDS))
    ]
    missing = [at for at in expected if at < until and not any(abs(at - slot) < 1e-3 for slot in slots)]
    if missing:
        yield f"the job of every three minutes has no row for the slots at {missing} s: {slots}"
