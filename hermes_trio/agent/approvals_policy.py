"""What happens to an inspected command: run it, refuse it, review it, or ask a person.

A pure decision in a fixed order: isolation, hard block, operator's denials, bypass, permanent allow-list, grants, no
human, review, question. The first three cannot be overridden. Where no human can be reached, a question is a
refusal: silence is no consent. Waiting for an answer, and storing grants, belongs to others.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Collection, Iterable
from enum import Enum

import msgspec

from hermes_trio.guard import Category, Finding, Verdict


class Mode(Enum):
    """How findings are handled."""

    MANUAL = "manual"
    SMART = "smart"
    OFF = "off"

    @classmethod
    def parse(cls, value: object) -> Mode:
        """The mode a configuration means: false is off, anything unknown or missing is manual."""
        if value is False:
            return cls.OFF
        if isinstance(value, str):
            for mode in cls:
                if mode.value == value.strip().lower():
                    return mode
        return cls.MANUAL


class Action(Enum):
    """What the caller does next."""

    ALLOW = "allow"
    REFUSE = "refuse"
    REVIEW = "review"
    ASK = "ask"


class Step(Enum):
    """Which step of the order decided."""

    ISOLATED = "isolated backend"
    HARD_BLOCK = "hard block"
    DENY_LIST = "operator's deny list"
    BYPASS = "bypass"
    ALLOW_LIST = "permanent allow-list"
    CLEAN = "nothing found"
    GRANTED = "kinds already allowed"
    UNATTENDED = "no human reachable"
    REVIEW = "review by a model"
    QUESTION = "question to a person"


class Choice(Enum):
    """What a person may answer."""

    ONCE = "once"
    SESSION = "session"
    ALWAYS = "always"
    DENY = "deny"


class Review(Enum):
    """What a reviewing model may answer."""

    APPROVE = "approve"
    DENY = "deny"
    ESCALATE = "escalate"


ALL_CHOICES = (Choice.ONCE, Choice.SESSION, Choice.ALWAYS, Choice.DENY)
_NEVER_PERMANENT = frozenset({Category.EXTERNAL_SCANNER})


class Decision(msgspec.Struct, frozen=True):
    """The outcome for one command: the action, the step that decided, and what a prompt needs."""

    action: Action
    step: Step
    reason: str
    findings: tuple[Finding, ...] = ()
    choices: tuple[Choice, ...] = ()

    @property
    def categories(self) -> frozenset[Category]:
        """The kinds that are still open."""
        return frozenset(finding.category for finding in self.findings)

    @property
    def allow_permanent(self) -> bool:
        """Whether a permanent grant would be kept as such."""
        return Choice.ALWAYS in self.choices and not self.categories & _NEVER_PERMANENT


class Grant(msgspec.Struct, frozen=True):
    """What an answer allows from now on: kinds for the session, and keys for the permanent list."""

    session: frozenset[Category] = frozenset()
    permanent: frozenset[str] = frozenset()


def decide(
    verdict: Verdict,
    *,
    mode: Mode,
    human: bool,
    bypass: bool = False,
    allowlist: Collection[str] = (),
    session_allowed: Collection[Category] = (),
    deny_globs: Iterable[str] = (),
    cron_approves: bool = False,
    isolated: bool = False,
) -> Decision:
    """Decide about one command.

    `allowlist` holds pattern keys of kinds, and literal commands or globs for commands without shell operators.
    `deny_globs` are matched against the whole text and against every command found in it. `human` says whether a
    person can answer; `cron_approves` lets unattended scheduled runs pass what they would have to ask about.
    """
    if isolated:
        return Decision(Action.ALLOW, Step.ISOLATED, "the command runs in an isolated container")
    if verdict.blocked is not None:
        return Decision(Action.REFUSE, Step.HARD_BLOCK, verdict.blocked.reason)
    denied = _denied(verdict, deny_globs)
    if denied is not None:
        return Decision(Action.REFUSE, Step.DENY_LIST, f"the operator denies commands that match {denied!r}")
    if bypass or mode is Mode.OFF:
        return Decision(Action.ALLOW, Step.BYPASS, "approvals are switched off")
    if not verdict.findings:
        return Decision(Action.ALLOW, Step.CLEAN, "nothing to ask about")
    if _listed(verdict, allowlist):
        return Decision(Action.ALLOW, Step.ALLOW_LIST, "the command is on the permanent allow-list")
    permanent = frozenset(category for category in Category if category.value in allowlist) - _NEVER_PERMANENT
    allowed = permanent | frozenset(session_allowed)
    open_findings = tuple(finding for finding in verdict.findings if finding.category not in allowed)
    if not open_findings:
        step = Step.ALLOW_LIST if verdict.categories <= permanent else Step.GRANTED
        return Decision(Action.ALLOW, step, "every kind of risk in it is already allowed")
    described = "; ".join(dict.fromkeys(finding.description for finding in open_findings))
    if not human:
        if cron_approves:
            return Decision(Action.ALLOW, Step.UNATTENDED, "the configuration approves unattended commands")
        reason = f"it needs approval ({described}), and no human can be reached to give it"
        return Decision(Action.REFUSE, Step.UNATTENDED, reason, open_findings)
    if mode is Mode.SMART:
        return Decision(Action.REVIEW, Step.REVIEW, described, open_findings, ALL_CHOICES)
    return Decision(Action.ASK, Step.QUESTION, described, open_findings, ALL_CHOICES)


def after_review(decision: Decision, review: Review | None) -> Decision:
    """Go on after the model's review: only approval runs, once; a denial or a failed review asks a person."""
    if decision.action is not Action.REVIEW:
        raise ValueError(f"only a decision to review can be followed by a review, not {decision.action.value!r}")
    if review is Review.APPROVE:
        return Decision(Action.ALLOW, Step.REVIEW, "the reviewing model approved it for this once")
    choices = (Choice.ONCE, Choice.DENY) if review is Review.DENY else ALL_CHOICES
    return msgspec.structs.replace(decision, action=Action.ASK, step=Step.QUESTION, choices=choices)


def grant(decision: Decision, choice: Choice) -> Grant:
    """What a person's answer allows beyond this one command; kinds, never single commands."""
    if choice not in decision.choices:
        offered = ", ".join(option.value for option in decision.choices) or "none"
        raise ValueError(f"{choice.value!r} was not offered for this command (offered: {offered})")
    if choice in (Choice.ONCE, Choice.DENY):
        return Grant()
    kinds = decision.categories
    if choice is Choice.SESSION:
        return Grant(session=kinds)
    return Grant(session=kinds, permanent=frozenset(kind.value for kind in kinds - _NEVER_PERMANENT))


def _denied(verdict: Verdict, globs: Iterable[str]) -> str | None:
    texts = [" ".join(text.split()) for text in (verdict.command, *verdict.commands)]
    for glob in globs:
        if any(fnmatch.fnmatchcase(text.lower(), glob.lower()) for text in texts):
            return glob
    return None


def _listed(verdict: Verdict, allowlist: Collection[str]) -> bool:
    """Literal commands and globs count only for a single plain command; scanner findings are never covered."""
    if verdict.words is None or verdict.categories & _NEVER_PERMANENT:
        return False
    text = " ".join(verdict.words)
    return any(entry == text or fnmatch.fnmatchcase(text, entry) for entry in allowlist)
