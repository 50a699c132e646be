"""Targets: each odd seed lets one chosen verb of the store fail in one chosen way, and has steps that call it.

The seeds go through all pairs of `TARGETS` in order, so that as many odd seeds as there are pairs have tried each of them. Some even seeds begin with a
prologue instead: a reply that cannot be delivered, a run that fails, one that is stopped, and a job that is lost. Later faults then find rows in these
states.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Final

from hermes_trio.testing.faults import READ_VERBS, STORE_VERBS

Sketch = tuple[float, str, int, int, str]
"""A step: its time, kind, who, number and words."""

UNCALLED: Final[Mapping[str, str]] = {}
"""The verbs that no world calls, with the reason."""

NODE_VERBS: Final = frozenset(
    [
        "answer_request",
        "ask_node",
        "claim_host",
        "claim_lease",
        "get_answer",
        "get_job",
        "lane_owner",
        "leave_node",
        "list_jobs",
        "list_nodes",
        "reap",
        "release_host",
        "release_lease",
        "renew_node",
        "session_host",
        "session_owners",
        "set_run_status",
        "take_requests",
    ]
)
"""The verbs that only one of several nodes calls."""

COMMAND_VERBS: Final = frozenset(
    [
        "allow_user",
        "append_messages",
        "disallow_user",
        "list_allowed",
        "list_pairings",
        "offer_pairing",
        "outbox_unsent",
        "prune_sessions",
        "redeem_pairing",
        "reopen_session",
        "switch_session",
        "user_allowed",
    ]
)
"""The verbs that in these worlds only commands beside the server call, so that no node crashes at them."""


def _hows(verb: str) -> Sequence[str]:
    if verb in READ_VERBS:
        return ("before", "slow")
    return ("before", "after", "full", "slow", *(() if verb in COMMAND_VERBS else ("crash before", "crash after")))


TARGETS: Final = tuple((verb, how) for verb in sorted(STORE_VERBS - set(UNCALLED)) for how in _hows(verb))
"""The pairs of verb and fault, in the order of the seeds."""

_BLOCK: Final = "BLOCK"

_REACHES: Final[Mapping[str, tuple[str, ...]]] = {
    "create_session fork_session list_messages list_runs patch_session search_messages session_prompt": (
        "chore sessions",
    ),
    "delete_session get_session list_sessions": ("chore sessions",),
    "delete_response get_reply get_response latest_response put_response": ("chore responses",),
    "list_approvals list_grants revoke_grant": (
        "run rm approve=always",
        "+10 run rm approve=always",
        "+30 chore lists",
        "+85 chore lists",
    ),
    "stop_resuming": ("run think 40 resume=1 stop=5",),
    "create_api_key list_api_keys revoke_api_key": ("chore keys",),
    "list_outbox outbox_dead revive_outbox": (_BLOCK, "+1 write say", "+45 chore letters"),
    "inbox_dead list_inbox revive_inbox": ("store begin_turn before seconds=110", "+1 write say", "+115 chore letters"),
    "delete_cron_job get_cron_job list_cron_executions list_cron_jobs put_cron_job set_cron_next": ("chore schedule",),
    "allow_user disallow_user list_allowed list_pairings offer_pairing redeem_pairing user_allowed": ("chore pairing",),
    "outbox_unsent prune_sessions": ("chore upkeep",),
    "append_messages reopen_session replace_history switch_session": ("chore terminal",),
    "record_delivery": ("chore direct",),
    "add_notice": ("write watch 10",),
    "get_job session_owners": ("write bg 20", "+2 write ps"),
    "abandon end_session": ("write bg 60", "+5 command /new", "webhook say"),
    "new_session session_of": ("write say", "+3 command /new"),
    "list_jobs": ("write say", "+3 command /status"),
    "add_outbox": ("command /stop", "command /status"),
    "release_inbox": ("store begin_turn before times=8 skip=0", "+0.1 write say"),
    "end_approval_scope": ("write rm", "+1 command /new"),
    "answer_approval create_approval expire_approval get_approval granted": (
        "run rm approve=1",
        "write rm",
        "+20 run rm approve=1",
        "+70 write rm",
    ),
    "set_run_status": ("run rm approve=1",),
    "acknowledge": ("embedding bg 1 inside=1",),
    "root_wakes": ("embedding bgs 1",),
    "event_epoch events_after": ("run think 10 reconnect=1",),
    "claim_session": ("run say session=1",),
    "conclude_interrupted get_meta": ("webhook think 40", "webhook run 30", "+5 crash now down=0.5"),
    "supersede": ("write bg 2", "+5 write ps", "+30 write bg 2", "+36 write ps"),
    "accept_delivery delivery_known set_meta": ("webhook bg 5 repeat=1",),
    "answer_request ask_node get_answer": (
        "run think 40 stop=5 session=1",
        "run think 40 stop=5",
        "run think 40 stop=5",
    ),
    "lane_owner": ("write think 20", "+3 command /stop"),
    "claim_host session_host": ("run bg 5 session=1", "run run 5"),
    "release_host": ("run run 5 session=1", "+8 crash now down=90", "+60 run say session=1"),
    "reap": ("pause seconds=60", "+70 pause seconds=60"),
    "claim_lease leave_node list_nodes recover release_lease waiting_sessions": ("+20 restart",),
    "probe": ("store finish_turn before times=6", "+1 write say"),
    "outbox_retry": ("SEND drop times=2", "+1 write say"),
    "note_job_output": ("write bg 10 chatty=1",),
    "get_cursor replies_to set_cursor": ("web say", "+20 chore page"),
}

STEPS: Final = {verb: steps for verbs, steps in _REACHES.items() for verb in verbs.split()}
"""The steps that make a world call a verb. Verbs that are not named are called in most worlds."""

FIRST_NUMBER: Final = 31
"""The number of the first step of a target or a prologue; the numbers of other steps are lower, or higher than `OTHER_DEVICE`."""

ARMING: Final = 90
"""The number of the step that makes the verb fail."""


def target_of(seed: int) -> tuple[str, str] | None:
    """Return the verb that fails in the world of this seed, and how; None for even seeds."""
    return TARGETS[(seed // 2) % len(TARGETS)] if seed % 2 else None


def steps_for(verb: str, how: str, chat: str, method: str, rng: random.Random) -> list[Sketch]:
    """Return the fault of a target and the steps that call its verb. `chat` is the platform, `method` the one that sends messages."""
    began = round(2.0 + rng.random() * 30, 2)
    kind, _, when = how.partition(" ")
    fault = f"{when} {verb} down=5" if kind == "crash" else f"{verb} {how} times=1 skip=0"
    if how == "slow":
        fault = f"{verb} slow seconds=12 times=1"
    found: list[Sketch] = [(0.0, "crash" if kind == "crash" else "store", 0, ARMING, fault)]
    who = rng.randrange(2)
    for number, text in enumerate(STEPS.get(verb, ())):
        later, _, rest = text.partition(" ") if text.startswith("+") else ("+0", "", text)
        name, _, words = rest.partition(" ")
        if name == _BLOCK:
            name, words = chat, f"{method} block"
        elif name == "SEND":
            name, words = chat, f"{method} {words}"
        # The platform blocks the person of the step's number: the one who then writes.
        given = 3 * ARMING + who if words.endswith(" block") else FIRST_NUMBER + number
        found.append((round(began + float(later), 2), name, who, given, words))
    return found


def prologue(seed: int, chat: str, method: str) -> list[Sketch]:
    """Return the steps that leave rows in every terminal state; empty for most seeds."""
    if seed % 8 != 4:
        return []
    first = FIRST_NUMBER + 10
    refusals: list[Sketch] = [(2.5, "model", 0, number, "refuse after=0") for number in range(8)]
    return [
        (0.5, chat, 0, 3 * ARMING, f"{method} block"),
        (1.0, "write", 0, first, "say"),
        *refusals,
        (2.6, "run", 0, first + 1, "say"),
        (22.0, "run", 1, first + 2, "think 40 stop=1"),
        (23.0, "write", 1, first + 3, "bg 120"),
        (26.0, "crash", 0, ARMING, "now down=0.5"),
    ]
