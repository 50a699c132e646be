"""Programs: lists of actions of users and operators, and of faults. A seed makes one; it can be printed and shortened."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Sequence
from typing import Final

import attrs

from hermes_trio.testing.faults import READ_VERBS, STORE_VERBS

__all__ = ["FAULT_KINDS", "Program", "Step", "make_program"]

PEOPLE: Final = 3
TENANTS: Final = 2

FAULT_KINDS: Final = ("store", "crash", "telegram", "model", "clock", "signal", "receiver", "pause", "partition")
"""The families of faults that `--faults` names."""

NODE_FAULTS: Final = ("pause", "partition")
"""The families that need several nodes."""

_WEIGHTS: Final = {
    "store": 8,
    "crash": 3,
    "telegram": 3,
    "model": 2,
    "clock": 1,
    "signal": 2,
    "receiver": 1,
    "pause": 4,
    "partition": 4,
}

STORE_FAULTS: Final = ("before", "after", "busy", "full", "slow")
CRASH_POINTS: Final = ("now", "before", "after")
TELEGRAM_FAULTS: Final = ("drop", "accept", "accept", "limit", "garbage", "delay", "repeat", "block")
MODEL_FAULTS: Final = ("hang_up", "reset", "end_early", "stall", "silent", "garbage", "error_event", "refuse", "limit")
OTHER_DEVICE: Final = 50
"""Added to the number of a step for the same tenant's action on another device."""

SIGNAL_FAULTS: Final = ("late", "twice", "reordered")
LOST_SIGNALS: Final = (*SIGNAL_FAULTS, "lost", "lost", "lost")
"""The faults of signals between nodes. Within one process signals are not lost."""

_SERVED: Final = (
    "abandon accept_delivery accept_message add_outbox answer_approval answer_approvals append_events backlog begin_turn"
    " bury_inbox claim_cron_slot claim_outbox create_approval delivery_known end_approval_scope end_session event_epoch"
    " events_after expire_approval find_api_key finish_cron_slot finish_job finish_turn get_approval get_cron_job get_meta"
    " get_run granted inbox_waiting list_approvals list_cron_jobs list_sessions load_history new_session next_outbox_due"
    " note_job_output outbox_dead outbox_retry outbox_sent probe put_cron_job recover release_inbox reopen_session"
    " resolve_session root_open root_wakes session_of session_promised set_meta start_cron_slot start_job supersede take_inbox"
    " waiting_sessions"
)

FAULTY_VERBS: Final = tuple(verb for verb in _SERVED.split() if verb in STORE_VERBS)
"""The verbs that a served gateway calls in these worlds, all of which may fail."""

CRASH_VERBS: Final = tuple(verb for verb in FAULTY_VERBS if verb not in READ_VERBS)

_FREQUENT: Final = (
    "begin_turn",
    "finish_turn",
    "start_job",
    "finish_job",
    "accept_message",
    "take_inbox",
    "claim_outbox",
    "outbox_sent",
    "append_events",
    "resolve_session",
    "load_history",
    "accept_delivery",
    "create_approval",
    "answer_approval",
    "finish_cron_slot",
    "claim_cron_slot",
    "release_inbox",
    "root_open",
    "session_promised",
    "recover",
)

FREQUENT: Final = tuple(verb for verb in _FREQUENT if verb in STORE_VERBS)
"""The verbs that every conversation uses. Half of the store's faults are faults of these, so that faults coincide."""


PARTITIONS: Final = ("away", "deaf")
"""The direction of a partition: `away` loses the requests of a node to the store, `deaf` the answers."""


@attrs.frozen
class Step:
    """One action or fault: time, kind, who (a user, tenant or node), number, and the rest as words."""

    at: float
    kind: str
    who: int = 0
    number: int = 0
    words: str = ""

    @property
    def is_fault(self) -> bool:
        """Return whether this is a fault."""
        return self.kind in FAULT_KINDS

    def __str__(self) -> str:
        return f"{self.at:9.2f} s  {self.kind:<8} {self.who} #{self.number} {self.words}".rstrip()


@attrs.frozen
class Program:
    """The steps of one world. The faults end after `seconds`."""

    seed: int
    seconds: float
    steps: tuple[Step, ...]
    nodes: int = 1

    def without(self, dropped: Collection[int]) -> Program:
        """Return the program without the steps of these indices."""
        kept = tuple(step for index, step in enumerate(self.steps) if index not in dropped)
        return attrs.evolve(self, steps=kept)


def _write(dice: random.Random) -> str:
    return dice.choice(
        (
            "say",
            "say",
            f"think {dice.choice((2, 10, 40))}",
            f"run {dice.choice((1, 5, 30))}",
            f"run {dice.choice((5, 30))} deaf=1",
            f"bg {dice.choice((1, 10, 60, 120))}",
            f"bg {dice.choice((1, 10, 60))}",
            f"bg {dice.choice((10, 60))} chatty=1",
            "bg 1 fails=1",
            f"bgs {dice.choice((1, 5, 20))}",
            f"ponder {dice.choice((1, 20, 60))}",
            "rm",
        )
    )


def _action(dice: random.Random, at: float, number: int) -> Step:
    who = dice.randrange(PEOPLE)
    chance = dice.random()
    if chance < 0.38:
        return Step(at, "write", who, number, _write(dice))
    if chance < 0.48:
        return Step(at, "command", who, number, dice.choice(("/stop", "/stop", "/new", "/status", "/queue")))
    if chance < 0.56:
        # The messages and turns of the embedding program have one session key, so that they compete.
        words = dice.choice(("say", "think 10", "bg 10", "bgs 1", "bgs 1", "bgs 5"))
        return Step(at, "desk", 0, number, f"{words} {dice.choice(('', 'inside=1'))}".strip())
    tenant = dice.randrange(TENANTS)
    if chance < 0.8:
        end = dice.choice(("", "", "stop=1", "stop=10", "leave=1", "reconnect=1", "approve=1", "poll=1"))
        return Step(at, "run", tenant, number, f"{_write(dice)} {end}".strip())
    if chance < 0.87:
        return Step(at, "chat", tenant, number, f"{_write(dice)} {dice.choice(('', 'leave=3', 'stream=1'))}".strip())
    if chance < 0.94:
        return Step(at, "webhook", who, number, f"{_write(dice)} {dice.choice(('', 'repeat=1', 'repeat=2'))}".strip())
    return Step(at, dice.choice(("press", "restart", "restart")), who, number)


def _fault(dice: random.Random, at: float, number: int, kinds: Sequence[str]) -> Step:
    kind = dice.choices(kinds, [_WEIGHTS[one] for one in kinds])[0]
    words = ""
    match kind:
        case "store":
            verb = dice.choice(FREQUENT) if dice.random() < 0.5 else dice.choice(FAULTY_VERBS)
            if dice.random() < 0.1:
                # A store with intermittent failures: some of the next calls fail, of any verb.
                how = dice.choice(("before", "after", "busy"))
                return Step(at, kind, 0, number, f"* {how} times={dice.choice((3, 8))} skip=0")
            how = dice.choice(STORE_FAULTS if verb not in READ_VERBS else ("before", "busy", "slow"))
            if how == "slow":
                return Step(at, kind, 0, number, f"{verb} slow seconds={dice.choice((2, 12, 45))} times=1")
            if how in ("before", "after") and dice.random() < 0.15:
                # A store that is unavailable for some time.
                every = dice.choice((verb, "*"))
                return Step(at, kind, 0, number, f"{every} {how} seconds={dice.choice((3, 20, 60))}")
            words = f"{verb} {how} times={dice.choice((1, 1, 1, 2, 5))} skip={dice.choice((0, 0, 0, 1, 3))}"
        case "crash":
            point = dice.choice(CRASH_POINTS)
            verb = "" if point == "now" else dice.choice((*FREQUENT, *CRASH_VERBS))
            words = f"{point} {verb} down={dice.choice((0.5, 5, 90))}".replace("  ", " ")
        case "telegram":
            method = dice.choice(
                ("sendMessage", "sendMessage", "sendMessage", "getUpdates", "answerCallbackQuery", "getMe")
            )
            words = f"{method} {dice.choice(TELEGRAM_FAULTS)} times={dice.choice((1, 1, 2))}"
        case "model":
            words = f"{dice.choice(MODEL_FAULTS)} after={dice.choice((0, 1, 3))}"
        case "receiver":
            words = "fails"
        case "clock":
            words = f"step={dice.choice((-3600, -90, -5, 5, 90, 3600))}"
        case "pause":
            words = f"seconds={dice.choice((5, 25, 35, 60))}"
        case "partition":
            words = f"{dice.choice(PARTITIONS)} seconds={dice.choice((5, 20, 40, 60))}"
        case _:
            words = f"{dice.choice(SIGNAL_FAULTS)} times={dice.choice((1, 3))}"
    return Step(at, kind, 0, number, words)


def _nodes_of(seed: int) -> int:
    """Return the number of nodes of a seed: one (70 %), two (20 %) or three (10 %)."""
    return random.Random(f"{seed} nodes").choices((1, 2, 3), (14, 4, 2))[0]


def _several(dice: random.Random, step: Step, nodes: int) -> Step:
    """Adapt a step to several nodes: most runs share a session, a fault hits a random node, and signals may be lost."""
    if step.kind == "run" and dice.random() < 0.7:
        return attrs.evolve(step, words=f"{step.words} session=1")
    if step.kind == "signal":
        return Step(step.at, "signal", dice.randrange(nodes), step.number, f"{dice.choice(LOST_SIGNALS)} times=3")
    return attrs.evolve(step, who=dice.randrange(nodes)) if step.is_fault else step


def _on_another_device(dice: random.Random, step: Step) -> Step:
    """Return a run in the shared session of the same tenant, at the time of `step` or a little later."""
    at = round(step.at + dice.choice((0.0, 0.5, 3.0)), 2)
    words = f"{dice.choice(('say', 'think 10', 'run 5', 'bg 10'))} session=1"
    return attrs.evolve(step, at=at, number=step.number + OTHER_DEVICE, words=words)


def make_program(
    seed: int, *, minutes: float = 3.0, faults: Sequence[str] = FAULT_KINDS, nodes: int | None = None
) -> Program:
    """Return the program of a seed. The same seed gives the same program; it also decides the number of nodes, unless `nodes` is given.

    Actions come in clusters, and faults occur near them: a fault in an idle world has no effect.
    """
    count = _nodes_of(seed) if nodes is None else nodes
    faults = [kind for kind in faults if count > 1 or kind not in NODE_FAULTS]
    dice = random.Random(f"{seed} program")
    seconds = minutes * 60
    crowds = [dice.random() * seconds * 0.8 for _ in range(dice.randint(1, 3))]

    def moment() -> float:
        return round(min(dice.choice(crowds) + dice.expovariate(1 / 8), seconds - 1), 2)

    steps = [_action(dice, moment(), number) for number in range(1, dice.randint(5, 14))]
    if faults:
        # Some programs have one fault, whose effect is easy to attribute; some have many at once.
        times = [step.at for step in steps]
        for number in range(dice.choice((0, 1, 2, 3, 4, 6, 8, 12))):
            at = dice.choice(times) + dice.choice((-0.01, -0.01, 0.0, 0.01, 1.0, 5.0, 15.0, 40.0))
            at = round(min(max(at, 0.0), seconds), 2)
            steps.append(_fault(dice, at, number, faults))
            if "telegram" in faults and dice.random() < 0.2:
                # Delay messages before the fault, so that it occurs while one is being sent; otherwise sending takes no time.
                steps.append(Step(round(max(at - 10.0, 0.0), 2), "telegram", 0, number, "sendMessage delay times=3"))
    if count > 1:
        steps = [_several(dice, step, count) for step in steps]
        steps += [_on_another_device(dice, step) for step in steps if step.kind == "run" and dice.random() < 0.3]
        if dice.random() < 0.08:
            # One key exceeds the limit of all nodes together. Other requests are left out, because the limit would delay them.
            steps = [step for step in steps if step.kind not in ("run", "chat")]
            steps.append(Step(2.0, "flood", 0, 0, f"seconds={seconds - 20:g}"))
        for number in range(dice.choice((0, 0, 1, 2))):
            words = f"down={dice.choice((0, 0, 30))}"
            steps.append(
                Step(moment(), dice.choice(("restart", "restart", "upgrade")), dice.randrange(count), number, words)
            )
    return Program(seed, seconds, tuple(sorted(steps, key=lambda step: (step.at, step.kind, step.number))), count)


def shrink(program: Program, fails: Callable[[Program], bool], *, attempts: int = 60) -> Program:
    """Return a shorter program for which `fails` is still true: leaves out steps in halves, then in smaller parts, then one by one."""
    size = max(1, len(program.steps) // 2)
    while attempts > 0:
        found = False
        start = 0
        while start < len(program.steps) and attempts > 0:
            attempts -= 1
            shorter = program.without(range(start, start + size))
            if fails(shorter):
                program, found = shorter, True
            else:
                start += size
        if size == 1 and not found:
            break
        size = max(1, size // 2)
    return program
