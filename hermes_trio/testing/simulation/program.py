"""Programs: lists of actions of users and operators, and of faults. A seed makes one; it can be printed and shortened."""

from __future__ import annotations

import random
from collections.abc import Collection, Mapping, Sequence
from typing import Final

import attrs

from hermes_trio.testing.faults import READ_VERBS, STORE_VERBS

from .disk import DISK_ERRORS, DISK_POINTS
from .habits import EPOCH, busy_of, has_upkeep, start_of, with_habits
from .targets import NODE_VERBS, prologue, steps_for, target_of

PART_MINUTES: Final = 3
"""The minutes of a part of a program. Longer programs have several parts, each with as many actions and faults."""

PART_NUMBERS: Final = 400
"""Added to the numbers of the steps of each further part."""

PEOPLE: Final = 3
TENANTS: Final = 2

PLATFORMS: Final = ("telegram", "discord", "slack")
"""The chat platforms, of which a world has one."""

FAULT_KINDS: Final = (
    "store",
    "disk",
    "crash",
    *PLATFORMS,
    "model",
    "clock",
    "signal",
    "receiver",
    "mcp",
    "pause",
    "partition",
)
"""The families of faults that `--faults` names."""

MCP_FAULTS: Final = ("stall", "garbage", "error", "exit", "vanish")
"""The faults of the next call of an MCP server."""

NODE_FAULTS: Final = ("pause", "partition")
"""The families that need several nodes."""

_WEIGHTS: Final = {
    "store": 8,
    "crash": 3,
    "telegram": 3,
    "discord": 3,
    "slack": 3,
    "model": 2,
    "clock": 1,
    "signal": 2,
    "receiver": 1,
    "mcp": 4,
    "pause": 4,
    "partition": 4,
}

STORE_FAULTS: Final = ("before", "after", "busy", "full", "slow")
CRASH_POINTS: Final = ("now", "before", "after")
PLATFORM_FAULTS: Final = ("drop", "accept", "accept", "limit", "garbage", "delay", "repeat", "block")

METHODS: Final[Mapping[str, Sequence[str]]] = {
    "telegram": ("sendMessage", "sendMessage", "sendMessage", "getUpdates", "answerCallbackQuery", "getMe"),
    "discord": (
        "create_message",
        "create_message",
        "create_message",
        "get_gateway_bot",
        "create_interaction_response",
        "create_followup",
    ),
    "slack": (
        "chat.postMessage",
        "chat.postMessage",
        "chat.postMessage",
        "apps.connections.open",
        "chat.update",
        "users.info",
        "auth.test",
    ),
}
"""The methods of each platform's API that fail; the first one sends messages."""

CONNECTIONS: Final[Mapping[str, tuple[str, Sequence[str]]]] = {
    "discord": ("gateway", ("drop", "reconnect", "invalid", "repeat", "mute", "refuse")),
    "slack": ("socket", ("drop", "disconnect", "close", "repeat", "repeat", "refuse")),
}
"""The connections over which messages arrive, with their faults. Telegram has none: its updates are polled by a method."""

MODEL_FAULTS: Final = ("hang_up", "reset", "end_early", "stall", "silent", "garbage", "error_event", "refuse", "limit")
OTHER_DEVICE: Final = 50
"""Added to the number of a step for the action of the same person or tenant on another device."""

DIRECT: Final = 2
"""The remainder by 16 of the seeds of worlds with a webhook that is passed on without an agent."""

HURRIED: Final = 10
"""The remainder by 16 of the seeds of worlds with small mailboxes."""

SIGNAL_FAULTS: Final = ("late", "twice", "reordered")
LOST_SIGNALS: Final = (*SIGNAL_FAULTS, "lost", "lost", "lost")
"""The faults of signals between nodes. Within one process signals are not lost."""

_SERVED: Final = (
    "abandon accept_delivery accept_message add_outbox answer_approval append_events backlog begin_turn"
    " inbox_dead claim_cron_slot claim_outbox create_approval delivery_known end_approval_scope end_session event_epoch"
    " events_after expire_approval find_api_key finish_cron_slot finish_job finish_turn get_approval get_cron_job get_meta"
    " get_run granted inbox_waiting list_approvals list_cron_jobs list_sessions load_history new_session next_outbox_due"
    " note_job_output outbox_dead outbox_retry outbox_sent probe put_cron_job recover release_inbox conclude_interrupted"
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
    platform: str = "telegram"
    """The chat platform of the people, one of `PLATFORMS`."""
    mcp: bool = False
    """Whether the gateway has an MCP server."""
    busy: str = "queue"
    """What a message does while a turn of its conversation runs, one of `BUSY`."""
    start: float = EPOCH
    """When the world begins, in seconds since 1970."""
    upkeep: bool = False
    """Whether the store removes ended rows after seconds."""

    def without(self, dropped: Collection[int]) -> Program:
        """Return the program without the steps of these indices."""
        kept = tuple(step for index, step in enumerate(self.steps) if index not in dropped)
        return attrs.evolve(self, steps=kept)


def _write(rng: random.Random) -> str:
    return rng.choice(
        (
            "say",
            "say",
            f"think {rng.choice((2, 10, 40))}",
            f"run {rng.choice((1, 5, 30))}",
            f"run {rng.choice((5, 30))} deaf=1",
            f"bg {rng.choice((1, 10, 60, 120))}",
            f"bg {rng.choice((1, 10, 60))}",
            f"bg {rng.choice((10, 60))} chatty=1",
            "bg 1 fails=1",
            f"bgs {rng.choice((1, 5, 20))}",
            f"ponder {rng.choice((1, 20, 60))}",
            "rm",
            f"del {rng.choice((1, 20))}",
            f"dels {rng.choice((5, 30))}{rng.choice(('', ' deaf=1', ' many=1', ' kept=1'))}",
            f"delbg {rng.choice((1, 20, 60))}{rng.choice(('', '', ' kept=1'))}",
        )
    )


def _action(rng: random.Random, at: float, number: int) -> Step:
    who = rng.randrange(PEOPLE)
    chance = rng.random()
    if chance < 0.38:
        return Step(at, "write", who, number, _write(rng))
    if chance < 0.48:
        return Step(at, "command", who, number, rng.choice(("/stop", "/stop", "/new", "/status", "/queue")))
    if chance < 0.56:
        # The messages and turns of the embedding program have one session key, so that they compete.
        words = rng.choice(("say", "think 10", "bg 10", "bgs 1", "bgs 1", "bgs 5"))
        return Step(at, "embedding", 0, number, f"{words} {rng.choice(('', 'inside=1'))}".strip())
    tenant = rng.randrange(TENANTS)
    if chance < 0.8:
        end = rng.choice(("", "", "stop=1", "stop=10", "leave=1", "reconnect=1", "approve=1", "poll=1"))
        return Step(at, "run", tenant, number, f"{_write(rng)} {end}".strip())
    if chance < 0.87:
        return Step(at, "chat", tenant, number, f"{_write(rng)} {rng.choice(('', 'leave=3', 'stream=1'))}".strip())
    if chance < 0.94:
        return Step(at, "webhook", who, number, f"{_write(rng)} {rng.choice(('', 'repeat=1', 'repeat=2'))}".strip())
    return Step(at, rng.choice(("press", "restart", "restart")), who, number)


def _fault(rng: random.Random, at: float, number: int, kinds: Sequence[str]) -> Step:
    kind = rng.choices(kinds, [_WEIGHTS[one] for one in kinds])[0]
    words = ""
    match kind:
        case "store":
            verb = rng.choice(FREQUENT) if rng.random() < 0.5 else rng.choice(FAULTY_VERBS)
            if rng.random() < 0.1:
                # A store with intermittent failures: some of the next calls fail, of any verb.
                how = rng.choice(("before", "after", "busy"))
                return Step(at, kind, 0, number, f"* {how} times={rng.choice((3, 8))} skip=0")
            how = rng.choice(STORE_FAULTS if verb not in READ_VERBS else ("before", "busy", "slow"))
            if how == "slow":
                return Step(at, kind, 0, number, f"{verb} slow seconds={rng.choice((2, 12, 45))} times=1")
            if how in ("before", "after") and rng.random() < 0.15:
                # A store that is unavailable for some time.
                every = rng.choice((verb, "*"))
                return Step(at, kind, 0, number, f"{every} {how} seconds={rng.choice((3, 20, 60))}")
            words = f"{verb} {how} times={rng.choice((1, 1, 1, 2, 5))} skip={rng.choice((0, 0, 0, 1, 3))}"
        case "crash":
            point = rng.choice(CRASH_POINTS)
            verb = "" if point == "now" else rng.choice((*FREQUENT, *CRASH_VERBS))
            words = f"{point} {verb} down={rng.choice((0.5, 5, 90))}".replace("  ", " ")
        case name if name in PLATFORMS:
            method = rng.choice(METHODS[name])
            words = f"{method} {rng.choice(PLATFORM_FAULTS)} times={rng.choice((1, 1, 2))}"
            if name in CONNECTIONS and rng.random() < 0.5:
                where, faults = CONNECTIONS[name]
                words = f"{where} {rng.choice(faults)}"
        case "model":
            words = f"{rng.choice(MODEL_FAULTS)} after={rng.choice((0, 1, 3))}"
        case "receiver":
            words = "fails"
        case "clock":
            words = f"step={rng.choice((-3600, -90, -5, 5, 90, 3600))}"
        case "mcp":
            words = rng.choice(MCP_FAULTS)
        case "pause":
            words = f"seconds={rng.choice((5, 25, 35, 60))}"
        case "partition":
            words = f"{rng.choice(PARTITIONS)} seconds={rng.choice((5, 20, 40, 60))}"
        case _:
            words = f"{rng.choice(SIGNAL_FAULTS)} times={rng.choice((1, 3))}"
    return Step(at, kind, 0, number, words)


def _nodes_of(seed: int) -> int:
    """Return the number of nodes of a seed: one (70 %), two (20 %) or three (10 %)."""
    return random.Random(f"{seed} nodes").choices((1, 2, 3), (14, 4, 2))[0]


def _platform_of(seed: int) -> str:
    """Return the chat platform of a seed: mostly Telegram."""
    return random.Random(f"{seed} platform").choices(PLATFORMS, (64, 18, 18))[0]


def _several(rng: random.Random, step: Step, nodes: int) -> Step:
    """Adapt a step to several nodes: most runs share a session, a fault hits a random node, and signals may be lost."""
    if step.kind == "run" and rng.random() < 0.7:
        return attrs.evolve(step, words=f"{step.words} session=1")
    if step.kind == "signal":
        return Step(step.at, "signal", rng.randrange(nodes), step.number, f"{rng.choice(LOST_SIGNALS)} times=3")
    return attrs.evolve(step, who=rng.randrange(nodes)) if step.is_fault else step


def _on_another_device(rng: random.Random, step: Step) -> Step:
    """Return a run in the shared session of the same tenant, at the time of `step` or a little later."""
    at = round(step.at + rng.choice((0.0, 0.5, 3.0)), 2)
    words = f"{rng.choice(('say', 'think 10', 'run 5', 'bg 10'))} session=1"
    return attrs.evolve(step, at=at, number=step.number + OTHER_DEVICE, words=words)


def _in_company(rng: random.Random, steps: Sequence[Step]) -> list[Step]:
    """Move some messages into the group, there partly without a mention, and some requests into the web chat; let some people write from a second device."""
    found: list[Step] = []
    for step in steps:
        if step.kind in ("write", "command") and rng.random() < 0.18:
            aside = " aside=1" if step.kind == "write" and rng.random() < 0.25 else ""
            words = "rm" if step.kind == "write" and not aside and rng.random() < 0.25 else step.words
            step = attrs.evolve(step, words=f"{words} group=1{aside}")
        if rng.random() < {"chat": 0.5, "run": 0.12}.get(step.kind, 0.0):
            step = attrs.evolve(step, kind="web", words=step.words if rng.random() < 0.85 else "/stop")
        found.append(step)
        if rng.random() < {"write": 0.12, "web": 0.4}.get(step.kind, 0.0):
            at = round(step.at + rng.choice((0.0, 0.5, 3.0)), 2)
            words = rng.choice(("say", "think 2", "run 5", "bg 10"))
            found.append(attrs.evolve(step, at=at, number=step.number + OTHER_DEVICE, words=words))
    return found


def _with_threads(rng: random.Random, steps: Sequence[Step]) -> list[Step]:
    """Let some of the runs that are stopped wait for a thread, which cannot be interrupted."""
    found: list[Step] = []
    for step in steps:
        if step.kind == "run" and "stop=" in step.words and rng.random() < 0.3:
            stop = next(word for word in step.words.split() if word.startswith("stop="))
            step = attrs.evolve(step, words=f"ponder {rng.choice((20, 60))} {stop}")
        found.append(step)
    return found


def _with_twins(rng: random.Random, steps: Sequence[Step]) -> list[Step]:
    """Let some senders of webhooks make two attempts in the same instant."""
    return [
        attrs.evolve(step, words=f"{step.words} twice=1") if step.kind == "webhook" and rng.random() < 0.4 else step
        for step in steps
    ]


def _with_mcp(rng: random.Random, steps: Sequence[Step]) -> list[Step]:
    """Let half of the requests use the tool of the MCP server."""
    found: list[Step] = []
    for step in steps:
        if step.kind in ("write", "run") and step.words[:1] != "/" and rng.random() < 0.5:
            options = " ".join(word for word in step.words.split() if "=" in word)
            step = attrs.evolve(step, words=f"ask {rng.choice((0, 5, 30))} {options}".strip())
        found.append(step)
    return found


def _disk_faults(seed: int, steps: Sequence[Step], seconds: float, *, rarely: bool) -> list[Step]:
    """Return failures of single statements near the actions of a program; `rarely` for one of six programs."""
    rng = random.Random(f"{seed} disk")
    if (rarely and rng.random() > 1 / 6) or not steps:
        return []
    found: list[Step] = []
    for number in range(rng.choice((1, 2, 4))):
        at = round(min(max(rng.choice(steps).at + rng.choice((-0.01, 0.0, 0.01, 1.0, 10.0)), 0.0), seconds), 2)
        point, error = rng.choice(DISK_POINTS), rng.choice(tuple(DISK_ERRORS))
        if point == "rollback":
            # Only a transaction that has failed is rolled back.
            found.append(Step(at, "disk", 0, number, f"statement {rng.choice(tuple(DISK_ERRORS))} skip=1"))
        undone = " undone=1" if point in ("statement", "commit") and error != "busy" and rng.random() < 0.5 else ""
        found.append(Step(at, "disk", 0, number, f"{point} {error} skip={rng.choice((0, 0, 1, 5))}{undone}"))
    return found


def _in_bad_manners(rng: random.Random, steps: Sequence[Step]) -> list[Step]:
    """Let some clients of runs half-close their connection, leave in the middle of a body, or reconnect with an old event id."""
    found: list[Step] = []
    for step in steps:
        if step.kind == "run" and rng.random() < 0.2:
            manner = "old=1" if "reconnect" in step.words else rng.choice(("half=1", "torn=1"))
            step = attrs.evolve(step, words=f"{step.words} {manner}")
        found.append(step)
    return found


def _resuming(rng: random.Random, steps: Sequence[Step], nodes: int, seconds: float) -> list[Step]:
    """In every third program, let half of the runs ask to be begun again when they are interrupted; crash a node at some of them, once or several times."""
    if rng.random() > 1 / 3:
        return list(steps)
    found: list[Step] = []
    for step in steps:
        if step.kind == "run" and rng.random() < 0.5:
            step = attrs.evolve(step, words=f"{step.words} resume=1")
            at = step.at + rng.choice((0.01, 1.0, 4.0))
            for _ in range(rng.choice((0, 0, 1, 1, 2, 4))):
                words = rng.choice(("now", "after begin_turn", "before finish_turn", "after claim_interrupted"))
                found.append(
                    Step(round(at, 2), "crash", rng.randrange(nodes), 0, f"{words} down={rng.choice((0.5, 5))}")
                )
                at += rng.choice((3.0, 12.0, 45.0))
            if rng.random() < 0.3:
                how = rng.choice(("before", "after"))
                words = f"{rng.choice(('claim_interrupted', 'stop_resuming'))} {how} times=1 skip=0"
                found.append(Step(step.at, "store", rng.randrange(nodes), 0, words))
        found.append(step)
    return [attrs.evolve(step, at=min(step.at, seconds - 1)) for step in found]


def _without_requests(steps: Sequence[Step]) -> list[Step]:
    return [step for step in steps if step.kind not in ("run", "chat", "web")]


def _part(
    key: str,
    seconds: float,
    faults: Sequence[str],
    *,
    chat: str,
    nodes: int,
    mcp: bool,
    flood: float,
    beside: Collection[str],
) -> list[Step]:
    """Return the actions and faults of a part of a program: some clusters of actions, and faults near them. One may be a flood of `flood` seconds."""
    rng = random.Random(f"{key} program")
    crowds = [rng.random() * seconds * 0.8 for _ in range(rng.randint(1, 3))]

    def moment() -> float:
        return round(min(rng.choice(crowds) + rng.expovariate(1 / 8), seconds - 1), 2)

    steps = [_action(rng, moment(), number) for number in range(1, rng.randint(5, 14))]
    steps = _in_company(random.Random(f"{key} company"), steps)
    steps = _with_threads(random.Random(f"{key} threads"), steps)
    if "hurried" in beside and steps:
        # A program that embeds the runtime hands over more messages in one instant than a small mailbox takes.
        first, at = len(steps) * 2 + 2 * OTHER_DEVICE, steps[0].at
        steps += [Step(at, "embedding", 0, first + number, "think 10") for number in range(6)]
    if "direct" in beside and steps:
        steps.append(Step(min(steps[0].at + 1, seconds - 1), "chore", 0, 3 * OTHER_DEVICE, "direct"))
    steps = _with_twins(random.Random(f"{key} twins"), steps)
    if mcp:
        steps = _with_mcp(random.Random(f"{key} calls"), steps)
    if faults:
        # Some programs have one fault, whose effect is easy to attribute; some have many at once.
        times = [step.at for step in steps]
        for number in range(rng.choice((0, 1, 2, 3, 4, 6, 8, 12))):
            at = rng.choice(times) + rng.choice((-0.01, -0.01, 0.0, 0.01, 1.0, 5.0, 15.0, 40.0))
            at = round(min(max(at, 0.0), seconds), 2)
            steps.append(_fault(rng, at, number, faults))
            if chat in faults and rng.random() < 0.2:
                # Delay messages before the fault, so that it occurs while one is being sent; otherwise sending takes no time.
                words = f"{METHODS[chat][0]} delay times=3"
                steps.append(Step(round(max(at - 10.0, 0.0), 2), chat, 0, number, words))
    company = random.Random(f"{key} arrival")
    arrivals = [step.at for step in steps if step.kind == "write"]
    if "crash" in faults and arrivals and company.random() < 0.15:
        # Crash between the arrival of a message and its commit.
        at = round(max(company.choice(arrivals) - 0.01, 0.0), 2)
        steps.append(Step(at, "crash", 0, 0, f"before accept_message down={company.choice((0.5, 5, 90))}"))
    if nodes > 1:
        steps = [_several(rng, step, nodes) for step in steps]
        steps += [_on_another_device(rng, step) for step in steps if step.kind == "run" and rng.random() < 0.3]
        if rng.random() < 0.08 and flood:
            # One key exceeds the limit of all nodes together. Other requests are left out, because the limit would delay them.
            steps = _without_requests(steps)
            steps.append(Step(2.0, "flood", 0, 0, f"seconds={flood:g}"))
        for number in range(rng.choice((0, 0, 1, 2))):
            words = f"down={rng.choice((0, 0, 30))}"
            steps.append(
                Step(moment(), rng.choice(("restart", "restart", "upgrade")), rng.randrange(nodes), number, words)
            )
    return steps


def make_program(
    seed: int,
    *,
    minutes: float = 3.0,
    faults: Sequence[str] = FAULT_KINDS,
    nodes: int | None = None,
    platform: str | None = None,
) -> Program:
    """Return the program of a seed. The same seed gives the same program; it also decides the number of nodes and the platform, unless they are given.

    Actions come in clusters, and faults occur near them: a fault in an idle world has no effect.
    """
    # A program with a few families of faults has only the faults that it was asked for.
    targeted = set(FAULT_KINDS) <= set(faults)
    target = target_of(seed) if targeted else None
    count = _nodes_of(seed) if nodes is None else nodes
    chat = _platform_of(seed) if platform is None else platform
    if target is not None and nodes is None and target[0] in NODE_VERBS:
        count = max(count, 2)
    mcp = random.Random(f"{seed} mcp").random() < 0.1
    on_disk = "disk" in faults
    absent = {"disk", *(() if count > 1 else NODE_FAULTS), *(() if mcp else ("mcp",)), *PLATFORMS} - {chat}
    faults = [kind for kind in faults if kind not in absent]
    seconds = minutes * 60
    parts = max(1, round(minutes / PART_MINUTES))
    beside = {name for name, rest in (("hurried", HURRIED), ("direct", DIRECT)) if seed % 16 == rest}
    beside -= set() if targeted else {"direct"}
    steps: list[Step] = []
    for part in range(parts):
        # The first part draws from the seed alone.
        key, length = f"{seed} {part}" if part else f"{seed}", seconds / parts
        flood = 0.0 if part or target is not None else seconds - 20
        found = _part(
            key,
            length,
            faults,
            chat=chat,
            nodes=count,
            mcp=mcp,
            flood=flood,
            beside=beside if part == 0 else beside - {"direct"},
        )
        steps += [
            attrs.evolve(step, at=round(step.at + part * length, 2), number=step.number + part * PART_NUMBERS)
            for step in found
        ]
    if any(step.kind == "flood" for step in steps):
        steps = _without_requests(steps)
    if on_disk:
        steps += _disk_faults(seed, steps, seconds, rarely=targeted)
    busy = busy_of(seed)
    steps = with_habits(seed, steps, busy, models="model" in faults)
    if targeted:
        steps = _in_bad_manners(random.Random(f"{seed} manners"), steps)
        steps = _resuming(random.Random(f"{seed} resuming"), steps, count, seconds)
    if targeted and all(step.kind != "flood" for step in steps):
        planned = prologue(seed, chat, METHODS[chat][0])
        if target is not None and (count > 1 or target[0] not in NODE_VERBS):
            planned = steps_for(*target, chat, METHODS[chat][0], random.Random(f"{seed} target"))
        steps += [Step(min(at, seconds - 1), kind, who, number, words) for at, kind, who, number, words in planned]
    ordered = tuple(sorted(steps, key=lambda step: (step.at, step.kind, step.number)))
    return Program(seed, seconds, ordered, count, chat, mcp, busy, start_of(seed), has_upkeep(seed))
