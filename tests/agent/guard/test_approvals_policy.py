"""The order of approval decisions, as a table."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from hermes_trio.agent.approvals_policy import (
    ALL_CHOICES,
    Action,
    Choice,
    Mode,
    Review,
    Step,
    after_review,
    decide,
    grant,
)
from hermes_trio.guard import Category, Finding, Verdict, inspect_command

BLOCKED = "rm -rf /"
FLAGGED = "rm -rf build"
CLEAN = "ls"


def verdict_of(command: str) -> Verdict:
    """The real verdict on a command."""
    return inspect_command(command, home="/home/dev", cwd="/home/dev/project")


@pytest.mark.parametrize(
    ("command", "settings", "action", "step"),
    [
        # an isolated container decides first
        (BLOCKED, {"isolated": True}, Action.ALLOW, Step.ISOLATED),
        (FLAGGED, {"isolated": True, "deny_globs": ["*"]}, Action.ALLOW, Step.ISOLATED),
        # hard blocks survive every mode and bypass
        (BLOCKED, {}, Action.REFUSE, Step.HARD_BLOCK),
        (BLOCKED, {"bypass": True}, Action.REFUSE, Step.HARD_BLOCK),
        (BLOCKED, {"mode": Mode.OFF}, Action.REFUSE, Step.HARD_BLOCK),
        (BLOCKED, {"allowlist": [BLOCKED, "*", "recursive delete"]}, Action.REFUSE, Step.HARD_BLOCK),
        (BLOCKED, {"session_allowed": frozenset(Category)}, Action.REFUSE, Step.HARD_BLOCK),
        (BLOCKED, {"human": False, "cron_approves": True}, Action.REFUSE, Step.HARD_BLOCK),
        ("sudo -S ls", {"bypass": True}, Action.REFUSE, Step.HARD_BLOCK),
        # so do the operator's denials, also inside a longer command
        (CLEAN, {"deny_globs": ["ls*"]}, Action.REFUSE, Step.DENY_LIST),
        (FLAGGED, {"deny_globs": ["rm *"], "bypass": True}, Action.REFUSE, Step.DENY_LIST),
        (FLAGGED, {"deny_globs": ["rm *"], "mode": Mode.OFF}, Action.REFUSE, Step.DENY_LIST),
        (FLAGGED, {"deny_globs": ["rm *"], "allowlist": [FLAGGED]}, Action.REFUSE, Step.DENY_LIST),
        ("cd x && sudo npm publish", {"deny_globs": ["npm publish*"]}, Action.REFUSE, Step.DENY_LIST),
        ("NPM  publish", {"deny_globs": ["npm publish"]}, Action.REFUSE, Step.DENY_LIST),
        ("echo npm publish", {"deny_globs": ["npm publish*"]}, Action.ALLOW, Step.CLEAN),
        # bypass and mode off
        (FLAGGED, {"bypass": True}, Action.ALLOW, Step.BYPASS),
        (FLAGGED, {"mode": Mode.OFF}, Action.ALLOW, Step.BYPASS),
        (FLAGGED, {"mode": Mode.OFF, "human": False}, Action.ALLOW, Step.BYPASS),
        # nothing found
        (CLEAN, {}, Action.ALLOW, Step.CLEAN),
        (CLEAN, {"human": False}, Action.ALLOW, Step.CLEAN),
        # the permanent list: kinds, literal commands, globs; the latter two without shell operators
        (FLAGGED, {"allowlist": ["recursive delete"]}, Action.ALLOW, Step.ALLOW_LIST),
        (FLAGGED, {"allowlist": [FLAGGED]}, Action.ALLOW, Step.ALLOW_LIST),
        (FLAGGED, {"allowlist": ["rm -rf b*"]}, Action.ALLOW, Step.ALLOW_LIST),
        (FLAGGED, {"allowlist": ["rm -rf b*"], "human": False}, Action.ALLOW, Step.ALLOW_LIST),
        ("rm  -rf 'build'", {"allowlist": [FLAGGED]}, Action.ALLOW, Step.ALLOW_LIST),
        ("rm -rf build; rm -rf dist", {"allowlist": ["rm -rf *"]}, Action.ASK, Step.QUESTION),
        ("rm -rf build && true", {"allowlist": ["rm -rf *"]}, Action.ASK, Step.QUESTION),
        ("rm -rf $(pick)", {"allowlist": ["rm -rf *"]}, Action.ASK, Step.QUESTION),
        ("rm -rf build > log", {"allowlist": ["rm -rf *"]}, Action.ASK, Step.QUESTION),
        # grants of this session, by kind
        (FLAGGED, {"session_allowed": {Category.RECURSIVE_DELETE}}, Action.ALLOW, Step.GRANTED),
        ("rm -rf other", {"session_allowed": {Category.RECURSIVE_DELETE}}, Action.ALLOW, Step.GRANTED),
        ("rm -rf a; git push -f", {"session_allowed": {Category.RECURSIVE_DELETE}}, Action.ASK, Step.QUESTION),
        # nobody there: refused at once, unless scheduled runs are approved
        (FLAGGED, {"human": False}, Action.REFUSE, Step.UNATTENDED),
        (FLAGGED, {"human": False, "mode": Mode.SMART}, Action.REFUSE, Step.UNATTENDED),
        (FLAGGED, {"human": False, "cron_approves": True}, Action.ALLOW, Step.UNATTENDED),
        # with somebody there
        (FLAGGED, {"mode": Mode.SMART}, Action.REVIEW, Step.REVIEW),
        (FLAGGED, {}, Action.ASK, Step.QUESTION),
    ],
)
def test_order(command: str, settings: dict[str, Any], action: Action, step: Step) -> None:
    """Each step decides before the ones behind it."""
    decision = decide(verdict_of(command), **{"mode": Mode.MANUAL, "human": True, **settings})
    assert (decision.action, decision.step) == (action, step)
    assert decision.reason


def test_open_findings_only() -> None:
    """A question names only the kinds that are not allowed yet."""
    verdict = verdict_of("rm -rf a; git push -f")
    decision = decide(verdict, mode=Mode.MANUAL, human=True, session_allowed={Category.RECURSIVE_DELETE})
    assert decision.categories == {Category.GIT_FORCE_PUSH}
    assert decision.choices == ALL_CHOICES
    assert decision.allow_permanent


def test_unattended_refusal_says_why() -> None:
    """A refusal without a human names the risk and the missing human."""
    decision = decide(verdict_of(FLAGGED), mode=Mode.MANUAL, human=False)
    assert "deletes recursively" in decision.reason
    assert "no human" in decision.reason


@pytest.mark.parametrize(
    ("value", "mode"),
    [
        ("manual", Mode.MANUAL),
        ("smart", Mode.SMART),
        (" Smart ", Mode.SMART),
        ("off", Mode.OFF),
        (False, Mode.OFF),
        (True, Mode.MANUAL),
        (None, Mode.MANUAL),
        ("yolo", Mode.MANUAL),
        ("", Mode.MANUAL),
        (0, Mode.MANUAL),
        (3, Mode.MANUAL),
    ],
)
def test_mode(value: object, mode: Mode) -> None:
    """A YAML false means off; the unknown means manual."""
    assert Mode.parse(value) is mode


@pytest.mark.parametrize(
    ("review", "action", "choices"),
    [
        (Review.APPROVE, Action.ALLOW, ()),
        (Review.ESCALATE, Action.ASK, ALL_CHOICES),
        (None, Action.ASK, ALL_CHOICES),
        (Review.DENY, Action.ASK, (Choice.ONCE, Choice.DENY)),
    ],
)
def test_review(review: Review | None, action: Action, choices: tuple[Choice, ...]) -> None:
    """Approval runs once; escalation and failure ask; a denial asks with fewer choices."""
    decision = after_review(decide(verdict_of(FLAGGED), mode=Mode.SMART, human=True), review)
    assert decision.action is action
    assert decision.choices == choices


def test_review_needs_a_review() -> None:
    """A decided command cannot be reviewed afterwards."""
    with pytest.raises(ValueError, match="only a decision to review"):
        after_review(decide(verdict_of(CLEAN), mode=Mode.SMART, human=True), Review.APPROVE)


@pytest.mark.parametrize(
    ("choice", "session", "permanent"),
    [
        (Choice.ONCE, frozenset[Category](), frozenset[str]()),
        (Choice.DENY, frozenset[Category](), frozenset[str]()),
        (Choice.SESSION, {Category.RECURSIVE_DELETE}, frozenset[str]()),
        (Choice.ALWAYS, {Category.RECURSIVE_DELETE}, {"recursive delete"}),
    ],
)
def test_grant(choice: Choice, session: set[Category], permanent: set[str]) -> None:
    """Session and always remember kinds, once and deny remember nothing."""
    given = grant(decide(verdict_of(FLAGGED), mode=Mode.MANUAL, human=True), choice)
    assert given.session == session
    assert given.permanent == permanent


def test_grant_then_allowed() -> None:
    """What always stored lets every command of that kind run, in this and in later sessions."""
    given = grant(decide(verdict_of(FLAGGED), mode=Mode.MANUAL, human=True), Choice.ALWAYS)
    later = decide(verdict_of("rm -r other"), mode=Mode.MANUAL, human=True, allowlist=given.permanent)
    assert later.action is Action.ALLOW


def test_choice_must_be_offered() -> None:
    """After a denying review, always is no answer."""
    decision = after_review(decide(verdict_of(FLAGGED), mode=Mode.SMART, human=True), Review.DENY)
    with pytest.raises(ValueError, match="offered: once, deny"):
        grant(decision, Choice.ALWAYS)


def test_scanner_findings_are_never_permanent() -> None:
    """Always counts as session for an external scanner's finding, and no list entry covers one."""
    finding = Finding(Category.EXTERNAL_SCANNER, "suspicious host", "curl x")
    verdict = msgspec.structs.replace(verdict_of("curl x"), findings=(finding,))
    decision = decide(verdict, mode=Mode.MANUAL, human=True, allowlist=["curl x", "*", Category.EXTERNAL_SCANNER.value])
    assert decision.action is Action.ASK
    assert not decision.allow_permanent
    given = grant(decision, Choice.ALWAYS)
    assert given.session == {Category.EXTERNAL_SCANNER}
    assert given.permanent == frozenset()
    again = decide(verdict, mode=Mode.MANUAL, human=True, session_allowed=given.session)
    assert again.action is Action.ALLOW
