"""Parts of the invariants that count: how often a notice, a reply, a delivery or an answer exists, and how often it may.

Each function yields a sentence for each violation; `invariants.py` adds it to the invariant that it belongs to.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

import msgspec
import trio

from hermes_trio.messaging.senders import DUPLICATE_LABEL
from hermes_trio.runtime.core import RuntimeSettings
from hermes_trio.runtime.interface import IN_PROCESS
from hermes_trio.store.sqlite.nodes import ANSWER_SECONDS, HOSTED

from .embedding_program import EMBEDDING, JOBS, MAILBOX
from .platform import CRON_CHAT, FIRST_PERSON, GROUP_CHAT, WEBHOOK_CHAT
from .program import METHODS
from .script import marks, options_of

if TYPE_CHECKING:
    from .world import World

FLUSH_SECONDS: Final = 10.1
"""Seconds for which a drained node may send the replies that its last turns left: the grace of its server (5), then the time for the flush (5)."""

CLOSE_SECONDS: Final = RuntimeSettings().finish_seconds
"""Seconds by which a store that does not answer delays the flush: the last attempts of the close, which come before it, share them."""

STORE_FAULTS: Final = ("store", "disk", "pause", "partition")
"""The faults that keep a node from its store."""

MORE_TASKS: Final = 3
"""How many more tasks of one name than at the start of the world a node may have in its calm."""

REQUEST_SECONDS: Final = 60.0
"""Seconds after which a request to another node has been answered."""

TURN_SECONDS: Final = 15.0
"""The `limits.turn_seconds` of worlds with that limit."""

SPARE: Final = {6: "jobs", 14: "tokens", 10: "mailbox", 12: "seconds"}
"""What is scarce in the worlds of some seeds, by their remainder by 16."""

_ASIDES: Final = ("I am ", "That was too much", "Refused:", "Withdrawn:", "A command was refused", "(", "[")
"""The beginnings of replies outside of turns that answer no command."""


_REVIVED: Final = re.compile(r"POST /admin/outbox/(\d+)/retry")

_LABEL: Final = "".join(character for character in DUPLICATE_LABEL if character.isalnum())


def plain(text: str) -> str:
    """Return a text without markup, punctuation and label, so that two forms of one message compare equal."""
    return "".join(character for character in text if character.isalnum()).replace(_LABEL, "")


def ends_of_lives(world: World, after: float, until: float) -> int:
    """Return how many processes of nodes may have ended between two times: crashed, drained, failed, or taken over."""
    lives: set[str] = set()
    failed = 0
    for one in world.trace:
        if after - 1e-3 <= one.at <= until + 1e-3:
            if one.kind in ("crash", "drain", "drained", "gone", "lease lost"):
                lives.add(one.text.partition(" ")[0])
            failed += one.kind == "node fails"
    return len(lives) + failed


def _has(world: World, *beginnings: str) -> bool:
    """Return whether the store has failed in a verb or statement with one of these names."""
    return any(one.text.startswith(beginnings) for one in world.trace.of("injected"))


# -- notices -----------------------------------------------------------------------------------------------------------------------


def notices_reach_the_agent(world: World) -> Iterator[str]:
    """Yield the delivered notices that no message of their conversation contains. The turn's end may have been reduced, after the store refused it."""
    if _has(world, "finish_turn", "disk"):
        return
    for job_id, text in world.rows(
        "SELECT i.job_id, i.text FROM inbox i WHERE i.kind = 'notice' AND i.state = 'delivered' AND i.turn_id <> '' AND NOT EXISTS"
        " (SELECT 1 FROM messages m JOIN sessions s ON s.n = m.session WHERE s.session_key = i.session_key AND m.role = 'user'"
        " AND instr(m.content, i.text) > 0)"
    ):
        yield f"the notice of the job {job_id} counts as delivered, and no message to the agent has its text: {text[:120]!r}"


def notices_reach_the_program_once(world: World) -> Iterator[str]:
    """Yield the notices of the runtime's own inbox that the reader of completions did not get exactly once. A process that ends may have read
    a notice without acknowledging it, and have acknowledged one without reading it.
    """
    told = Counter(world.seen.embedding.told)
    spare = ends_of_lives(world, 0.0, world.calm_until - 1.0)  # without the drain at the end of the world
    for key, text, count in world.rows(
        "SELECT session_key, text, count(*) FROM inbox WHERE inbox = ? AND kind = 'notice' AND state = 'delivered' GROUP BY session_key, text",
        IN_PROCESS,
    ):
        if not count - spare <= told[key, text] <= count + spare:
            yield f"the reader of completions was told {told[key, text]} times, not {count} times, of {text[:120]!r}"


# -- replies -----------------------------------------------------------------------------------------------------------------------


def _sends(world: World) -> Iterator[tuple[float, int, int, str]]:
    """Yield the calls that send a message: time, status, chat and plain text."""
    method = METHODS[world.chat.name][0]
    for call in world.chat.fake.calls:
        if call.method == method:
            address = call.params.get("chat_id") or call.params.get("channel") or call.params.get("channel_id") or ""
            text = str(call.params.get("text") or call.params.get("content") or "")
            yield call.at - world.started_at, call.status, world.chat.chat_of(str(address)), plain(text)


def replies_are_sent_once(world: World) -> Iterator[str]:
    """Yield the texts of which a chat got more unlabelled messages than replies were queued, or more labelled ones than attempts ended without an answer."""
    queued: Counter[tuple[int, str]] = Counter()
    since: dict[tuple[int, str], float] = {}
    stepped = any(one.text.startswith("clock") for one in world.trace.of("fault"))
    # A dead letter that is queued again is as new as that, and keeps its label: its attempts began after the message that its turn answers.
    revived = {int(found[1]) for one in world.trace.of("chore") if (found := _REVIVED.match(one.text))}
    for id, target, text, created, asked in world.rows(
        "SELECT o.id, o.target, o.text, o.created_at, (SELECT min(i.created_at) FROM inbox i WHERE i.turn_id = o.turn_id AND o.turn_id <> '')"
        " FROM outbox o WHERE o.platform = ?",
        world.chat.name,
    ):
        if id in revived:
            created = world.started_at if asked is None else min(created, asked)
        where = (world.chat.chat_of(str(msgspec.json.decode(target).get("chat_id"))), plain(text))
        queued[where] += 1
        since[where] = min(since.get(where, created), 0.0 if stepped else created - world.started_at)
    got: Counter[tuple[int, str]] = Counter()
    copies: Counter[tuple[int, str]] = Counter()
    for message in world.chat.messages():
        labelled = any(DUPLICATE_LABEL[1:-1] in text for text in (message.text, *message.versions))
        (copies if labelled else got)[message.chat, plain(message.text)] += 1
    for (chat, text), count in got.items():
        if 0 < queued[chat, text] < count:
            yield f"chat {chat} got {count} unlabelled messages {text[:80]!r}, and {queued[chat, text]} were queued"
    if not copies:
        return
    unanswered: defaultdict[tuple[int, str], list[float]] = defaultdict(list)
    last: dict[tuple[int, str], float] = {}
    for at, status, chat, text in _sends(world):
        last[chat, text] = at
        if status == 0 or status >= 500:
            unanswered[chat, text].append(at)
    # The answer to a delayed call arrives after the client has given up.
    late = sum(
        int(options_of(one.text).get("times", "1"))
        for one in world.trace.of("fault")
        if one.text.startswith(world.chat.name) and " delay" in one.text
    )
    for where, count in copies.items():
        until = last.get(where, world.calm_until)
        after = since.get(where, 0.0)
        moments = sum(after <= at <= until for at in unanswered[where]) + late + ends_of_lives(world, after, until)
        if count > moments:
            yield f"chat {where[0]} got {count} labelled copies of {where[1][:80]!r} after {moments} attempts without an answer"


def replies_are_queued_once(world: World) -> Iterator[str]:
    """Yield the replies that a turn, a command or a slot of cron has queued twice. A command is handled again if its node ends before the platform
    knows that it was received.
    """
    for turn_id, text, count in world.rows(
        "SELECT turn_id, text, count(*) FROM outbox WHERE turn_id <> '' AND instr(payload, 'approval_id') = 0"
        " GROUP BY turn_id, platform, target, text HAVING count(*) > 1"
    ):
        yield f"the turn {turn_id} has queued {text[:80]!r} {count} times"
    # Equal commands that waited for a node are handled in one instant; `/stop` and `/stop all` can have the same answer.
    typed = Counter((step.who, step.words.split()[0]) for step in world.program.steps if step.kind == "command")
    for text, count in world.rows(
        "SELECT text, count(*) FROM outbox WHERE platform = ? AND turn_id = '' AND instr(payload, 'approval_id') = 0"
        " GROUP BY target, text, created_at HAVING count(*) > ?",
        world.chat.name,
        max(typed.values(), default=1),
    ):
        if not text.startswith(_ASIDES):
            yield f"{text[:80]!r} was queued {count} times in one instant"
    answers: Counter[int] = Counter()
    for target, text in world.rows(
        "SELECT target, text FROM outbox WHERE platform = ? AND turn_id = '' AND instr(payload, 'approval_id') = 0",
        world.chat.name,
    ):
        if not text.startswith(_ASIDES):
            answers[world.chat.chat_of(str(msgspec.json.decode(target).get("chat_id")))] += 1
    asked: Counter[int] = Counter()
    for step in world.program.steps:
        if step.kind == "command":
            asked[GROUP_CHAT if "group=" in step.words else FIRST_PERSON + step.who] += 1
    again = sum(one.kind in ("crash", "drain", "gone", "lease lost", "node fails", "fault") for one in world.trace)
    for chat, count in answers.items():
        if count > asked[chat] + again:
            yield f"chat {chat} was queued {count} answers to {asked[chat]} commands"
    ((slots,),) = world.rows("SELECT count(*) FROM cron_executions WHERE session_id <> ''")
    ((done,),) = world.rows("SELECT count(*) FROM outbox WHERE text IN ('done m9001', 'done m9002')")
    if done > slots:
        yield f"chat {CRON_CHAT} was queued {done} answers of {slots} slots that ran"


def replies_are_in_their_threads(world: World) -> Iterator[str]:
    """Yield what is said in the group outside of the thread of the message that it is about."""
    threads = world.chat.threads()
    for message in world.chat.messages():
        about = marks(message.text)
        if message.chat != GROUP_CHAT or len(about) != 1:
            continue
        wanted = threads.get(next(iter(about)))
        if wanted is not None and message.raw.thread_ts != wanted:
            yield f"{message.text!r} is in the thread {message.raw.thread_ts}, and answers one in {wanted}"


# -- what was acknowledged ---------------------------------------------------------------------------------------------------------


def answers_to_approvals_are_written(world: World) -> Iterator[str]:
    """Yield the answers to requests for approval that were acknowledged and are not in the row of their request."""
    for id, choice, how in world.seen.decided:
        rows = world.rows("SELECT state, choice FROM approvals WHERE id = ?", id)
        if rows != [("denied" if choice == "deny" else "approved", choice)]:
            yield f"{how} answered the request {id} with {choice}, which was acknowledged, and the rows are {rows}"


def deliveries_without_an_agent_are_shown_once(world: World) -> Iterator[str]:
    """Yield the direct deliveries that were acknowledged and that their chat does not show, or shows more often than they were attempted."""
    shown = Counter(message.text for message in world.chat.messages() if message.chat == WEBHOOK_CHAT)
    for text, answers in world.seen.direct:
        # Each attempt that was not acknowledged may have been sent.
        if 200 in answers and not 0 < shown[text] <= 1 + sum(status != 200 for status in answers):
            yield f"the direct delivery of {text!r} was answered {answers}, and is shown {shown[text]} times"


def pages_miss_nothing(world: World) -> Iterator[str]:
    """Yield the events that a page of the web chat got twice, and the answers that were sent while a page was connected and that it did not get.

    A page that is told to read everything again (`resync`) shows the transcript.
    """
    for page in world.seen.pages:
        before = ("", 0)
        for event in page.events:
            epoch, _, number = event.id.rpartition("-")
            if event.data.get("event") != "resync" and epoch == before[0] and int(number) <= before[1]:
                yield f"a page of t{page.tenant} got the event {event.id} after {before[0]}-{before[1]}"
            before = (epoch, int(number))
    stepped = any(one.text.startswith("clock") for one in world.trace.of("fault"))
    if stepped or (len(world.nodes) > 1 and (world.trace.of("fault") or world.trace.of("operator"))):
        return
    for said in world.seen.web:
        for turn_id, created, sent in world.rows(
            "SELECT o.turn_id, i.created_at, o.settled_at FROM inbox i JOIN outbox o ON o.turn_id = i.turn_id AND o.platform = 'web'"
            " WHERE i.inbox = 'web' AND i.text = ? AND o.state = 'sent' AND instr(o.payload, 'approval_id') = 0",
            said.text,
        ):
            for page in world.seen.pages:
                if page.tenant != said.tenant or page.resyncs:
                    continue
                live = any(
                    since < created - world.started_at and until > sent - world.started_at + 3
                    for since, until in page.connections
                )
                if live and not any(
                    one.data.get("event") == "message" and one.data.get("turn") == turn_id for one in page.events
                ):
                    yield f"a page of t{said.tenant} was connected when {said.text!r} was answered, and was not told the answer of {turn_id}"


def streams_are_whole(world: World) -> Iterator[str]:
    """Yield the streamed completions that ended as they should and are not the model's answer."""
    if world.settings.agent is not None or world.trace.of("model fault"):
        return
    for chat in world.seen.chats:
        if chat.finished != "stop":
            continue
        wanted = f"done m{chat.number}"
        if f"m{chat.number} think" in chat.text:
            wanted += " and so on" * 4
        if chat.answer.strip() != wanted:
            yield f"the stream for {chat.text!r} ended with {chat.answer!r}, and the model said {wanted!r}"


# -- what is left ------------------------------------------------------------------------------------------------------------------


def drained_nodes_are_silent(world: World) -> Iterator[str]:
    """Yield what a node sends after its drain, when the time for the last replies is over, and after it has ended or was taken over."""
    drained: dict[str, float] = {}
    allowed = FLUSH_SECONDS
    for moment in world.trace:
        life = moment.text.partition(" ")[0]
        if moment.kind == "fault" and moment.text.startswith(STORE_FAULTS):
            allowed = FLUSH_SECONDS + CLOSE_SECONDS
        elif moment.kind == "drained":
            drained.setdefault(life, moment.at)
        elif moment.kind == "sends" and moment.at > drained.get(life, moment.at) + allowed:
            yield f"the node drained at {drained[life]:.2f} s, and then: {moment}"


def count_tasks() -> Counter[str]:
    """Return how many tasks with each name there are now."""
    found: Counter[str] = Counter()
    waiting = [trio.lowlevel.current_root_task()]
    while waiting:
        task = waiting.pop()
        if task is not None:
            found[task.name] += 1
            waiting += [child for nursery in task.child_nurseries for child in nursery.child_tasks]
    return found


def left_over(world: World, before: Counter[str]) -> list[str]:
    """Describe what grows with the work: tasks that were not there when the world began, and rows of nodes that have ended."""
    nodes = len(world.nodes)
    found = [
        f"{count} tasks are called {name}, and {before[name]} were when the world began"
        for name, count in count_tasks().items()
        if count > before[name] + MORE_TASKS * nodes
        and not name.startswith("hermes_trio.testing.")  # which serve connections
    ]
    if nodes == 1:
        return found
    running = sorted(node.name for node in world.nodes if node.alive)
    members = [name for (name,) in world.rows("SELECT name FROM nodes ORDER BY name")]
    if members != running:
        found.append(f"the nodes {members} have a row, and {running} run")
    found += [
        f"the lease {name} is of a node that has ended"
        for (name,) in world.rows(
            "SELECT name FROM leases WHERE owner NOT IN (SELECT incarnation FROM nodes) AND substr(name, 1, 5) <> ?",
            HOSTED,
        )
    ]
    # An answer that cannot be written is given up, and its request is removed after an hour.
    apart = any(one.text.startswith(STORE_FAULTS) for one in world.trace.of("fault"))
    found += [
        f"the request {id} to another node is {state}"
        for id, state in world.rows(
            "SELECT id, state FROM node_requests WHERE created_at < ? AND state IN ('open', 'taken')"
            " OR created_at < (SELECT max(created_at) FROM node_requests) - ?",
            world.boundary.store_wall() - REQUEST_SECONDS,
            ANSWER_SECONDS + REQUEST_SECONDS,
        )
        if not apart
    ]
    return found


def budgets_are_kept(world: World) -> Iterator[str]:
    """Yield the turns that spent more than their budget of background jobs, tokens or seconds, and the conversations with too many waiting messages."""
    spare = world.spare
    if spare == "jobs":
        for turn_id, count in world.rows(
            "SELECT turn_id, count(*) FROM jobs WHERE inbox = ? GROUP BY turn_id HAVING count(*) > ?", EMBEDDING, JOBS
        ):
            yield f"the turn {turn_id} has started {count} background jobs; {JOBS} are allowed"
    elif spare == "tokens":
        given = {
            f"m{step.number}"
            for step in world.program.steps
            if step.kind == "embedding" and "inside=" not in step.words
        }
        for moment in world.trace.of("process starts"):
            if given & marks(moment.text):
                yield f"the first model call has spent all tokens of its turn, and then: {moment}"
    elif spare == "seconds":
        runs = {f"m{step.number}" for step in world.program.steps if step.kind == "run"}
        began: dict[tuple[str, str], float] = {}
        for call in world.seen.calls:
            for mark in marks(call.asked) & runs:
                # A run that is begun again, in another life, has its time again.
                first = began.setdefault((call.life, mark), call.at)
                if call.at > first + TURN_SECONDS + 1.0 and not world.trace.of("pause"):
                    yield f"the run of {mark} called the model {call.at - first:.1f} s after its first call; {TURN_SECONDS:g} s are allowed"
    elif spare == "mailbox":
        for key, created, count in world.rows(
            "SELECT session_key, created_at, count(*) FROM inbox WHERE inbox = ? AND kind = 'message' GROUP BY session_key, created_at"
            " HAVING count(*) > ?",
            EMBEDDING,
            MAILBOX + 1,
        ):
            yield f"{count} messages of {key} were accepted in one instant ({created}); one and {MAILBOX} that wait are allowed"
