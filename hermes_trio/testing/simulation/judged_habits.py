"""Parts of the invariants about what only some people do: they interrupt, stop everything, send files, and have jobs at night.

Each function yields a sentence for each violation; `invariants.py` adds it to the invariant that it belongs to.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final

from .habits import EPOCH, NIGHTLY_JOB, ZONE
from .people import file_text
from .platform import FIRST_PERSON
from .program import PEOPLE
from .script import marks
from .wall_clock import times_of_day

if TYPE_CHECKING:
    from .program import Step
    from .trace import Moment
    from .world import World

INTERRUPT_SECONDS: Final = 10.0
"""Seconds within which a turn ends that a newer message interrupts: other nodes look for requests every two seconds, and a process gets a grace."""

NIGHTLY_TIME: Final = (2, 30)
"""The local time of `NIGHTLY`."""

_ENDS: Final = frozenset({"crash", "drain", "lease lost", "gone", "node fails"})
_STOPS: Final = ("Nothing was running", "Stopped in", "It had ended already")
"""The first words of the reply to `/stop` if no work is left of the turn."""

_PARTIAL: Final = "Not everything has stopped"
_SAYS: Final = re.compile(r"says=(m\d+(?:\.\d)?)")
_DISTURBING: Final = ("pause", "partition", "signal", "receiver", "clock", "disk", "store", "crash")
_EFFECTS: Final = ("model", "process starts", "process ends", "mcp starts")
_CHILDREN: Final = ("del", "deep")


def _began(world: World) -> dict[str, float]:
    """Return when the model was first asked about each mark."""
    found: dict[str, float] = {}
    for moment in world.trace.of("model"):
        for mark in marks(moment.text):
            found.setdefault(mark, moment.at)
    return found


def _direct(world: World, person: int) -> list[Step]:
    return [
        step
        for step in world.program.steps
        if step.kind == "write" and step.who == person and "group=" not in step.words
    ]


def everything_stopped_is_over(world: World) -> Iterator[str]:
    """Yield the processes of a conversation that run on after the reply to its only `/stop all`, unless a node ended meanwhile."""
    stops: dict[int, list[Step]] = defaultdict(list)
    for step in world.program.steps:
        if step.kind == "command" and step.words.startswith(("/stop", "/new")):
            stops[step.who].append(step)
    began = _began(world)
    ends = [one.at for one in world.trace if one.kind in _ENDS]
    for person, steps in stops.items():
        if len(steps) != 1 or steps[0].words != "/stop all":
            continue
        written, chat = steps[0].at, f"{FIRST_PERSON + person}: "
        told = next(
            (
                one
                for one in world.trace.of("chat")
                if one.at >= written - 1e-6
                and one.text.startswith(chat)
                and one.text.removeprefix(chat)[1:].startswith(_STOPS)
            ),
            None,
        )
        if told is None or _PARTIAL in told.text:
            continue
        old = {mark for step in _direct(world, person) if began.get(mark := f"m{step.number}", told.at) < written}
        for moment in (*world.trace.of("process starts"), *world.trace.of("process ends")):
            for mark in marks(moment.text) & old:
                if moment.at > told.at + 1e-6 and not any(began[mark] <= at <= moment.at for at in ends):
                    yield f"the person of {mark} was told at {told.at:.2f} s that everything has stopped, and then: {moment}"


def interrupted_turns_end(world: World) -> Iterator[str]:
    """Yield the effects of a turn `INTERRUPT_SECONDS` after a newer message of its conversation was accepted, where such a message interrupts.

    Left out are turns with children, whose work would be lost, threads, which cannot be interrupted, and turns during which something else went wrong: the
    request to another node is a hint.
    """
    if world.program.busy != "interrupt" or any(step.kind == "clock" for step in world.program.steps):
        return
    accepted = {
        text: at - world.started_at
        for text, at in world.rows(
            "SELECT text, created_at FROM inbox WHERE inbox = ? AND kind = 'message'", world.chat.name
        )
    }
    began = _began(world)
    wrong = [
        one.at
        for one in world.trace
        if one.kind in _ENDS or one.kind == "injected" or (one.kind == "fault" and one.text.startswith(_DISTURBING))
    ]
    for person in range(PEOPLE):
        mine = [step for step in _direct(world, person) if "file=" not in step.words]
        newer = [(at, step) for step in mine if (at := accepted.get(f"m{step.number} {step.words}")) is not None]
        for step in mine:
            mark = f"m{step.number}"
            if mark not in began or step.words.startswith((*_CHILDREN, "bg", "watch")):
                continue
            for at, later in newer:
                if later is not step and at > began[mark] + 1e-6:
                    for moment in _effects(world, mark, at + INTERRUPT_SECONDS):
                        if not any(began[mark] <= one <= moment.at for one in wrong):
                            yield f"m{later.number} was accepted at {at:.2f} s, while {mark} was worked on, and then: {moment}"


def _effects(world: World, mark: str, after: float) -> Iterator[Moment]:
    for moment in world.trace:
        if moment.at > after and moment.kind in _EFFECTS and mark in marks(moment.text):
            yield moment


def steered_messages_are_used_once(world: World) -> Iterator[str]:
    """Yield the handled messages that no transcript has, and those that transcripts have more than once: in a turn, and as a turn of their own."""
    if world.settings.agent is not None:
        return
    for text, turn_id, count in world.rows(
        "SELECT i.text, i.turn_id, (SELECT count(*) FROM messages m WHERE m.role = 'user' AND (m.content = i.text"
        # After the loss of a host, a preface stands before the message.
        " OR substr(m.content, -length(i.text) - 1) = char(10) || i.text)) FROM inbox i"
        " WHERE i.inbox = ? AND i.kind = 'message' AND i.state = 'delivered' AND i.text LIKE 'm%'"
        # The store has refused the transcript, and the person was told which message it does not contain.
        " AND NOT EXISTS (SELECT 1 FROM outbox o WHERE o.turn_id = i.turn_id AND instr(o.text, i.text) > 0"
        " AND instr(o.text, 'does not contain the message') > 0)",
        world.chat.name,
    ):
        if count != 1:
            yield f"the message {text!r} was handled in {turn_id}, and is in transcripts {count} times"


def calls_are_executed_once(world: World) -> Iterator[str]:
    """Yield the commands that were started more often than the model has asked for them."""
    asked: Counter[str] = Counter()
    started: Counter[str] = Counter()
    for moment in world.trace:
        if moment.kind == "model":
            asked.update(set(_SAYS.findall(moment.text)))
        elif moment.kind == "process starts":
            started.update(set(_SAYS.findall(moment.text)))
    for says, count in started.items():
        if says in asked and count > asked[says]:
            yield f"the command of {says} was started {count} times, and the model has asked for it {asked[says]} times"


def files_stay_where_they_are(world: World) -> Iterator[str]:
    """Yield the files of the web chat that their owner cannot fetch, or another tenant can."""
    for page in world.seen.pages:
        for name, (own, foreign) in page.files.items():
            number = int(name.removeprefix("m").removesuffix(".txt"))
            if own is not None and own != (200, file_text(number).encode()):
                yield f"t{page.tenant} asked for its file {name} and got {own}"
            if foreign is not None and foreign[0] != 404:
                yield f"another tenant asked for the file {name} of t{page.tenant} and got {foreign}"


def nightly_job_has_its_slots(world: World) -> Iterator[str]:
    """Yield the differences between the slots of the nightly job and the times at which the clock on the wall shows half past two."""
    if (
        world.program.start == EPOCH
        or not world.settings.cron
        or any(step.kind == "clock" for step in world.program.steps)
    ):
        return
    first = datetime.fromtimestamp(world.started_at, UTC)
    until = datetime.fromtimestamp(world.started_at + world.calm_until - 60, UTC)
    wanted = [
        at.timestamp() - world.started_at
        for at, shown in times_of_day(ZONE, first, until)
        if (shown.hour, shown.minute) == NIGHTLY_TIME
    ]
    found = [
        at - world.started_at
        for (at,) in world.rows("SELECT slot FROM cron_executions WHERE job_id = ? ORDER BY slot", NIGHTLY_JOB)
    ]
    if found != wanted:
        yield f"the job of 2:30 has the slots {found}, and the clock shows that time at {wanted} s"


def only_ended_work_is_removed(world: World) -> Iterator[str]:
    """Yield what retention has removed although its work had not ended."""
    if world.archive is not None:
        for text in world.archive.live:
            yield f"retention has removed what had not ended: {text}"
