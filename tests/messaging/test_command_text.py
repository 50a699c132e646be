"""Commands, bare answers and silence: what is taken out of a conversation, and what is left alone."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hermes_trio.messaging.command_text import (
    ApprovalAnswer,
    Command,
    CommandTextError,
    LiteralText,
    approval_answer,
    bare_answer,
    is_silence_narration,
    is_silent_job_reply,
    is_silent_reply,
    parse_command,
)
from hermes_trio.store.records import ApprovalChoice


@pytest.mark.parametrize(
    ("text", "command"),
    [
        ("/stop", Command("stop")),
        ("/Stop  now ", Command("stop", "now")),
        ("/new@hermes_bot a b", Command("new", "a b", "hermes_bot")),
        ("/model —fast –x", Command("model", "--fast -x")),
        ("/say two\nlines", Command("say", "two\nlines")),
        ("/help\nplease", Command("help", "please")),
        ("/plugin:skill go", Command("plugin:skill", "go")),
        ("/say a/b", Command("say", "a/b")),
        ("hello", None),
        (" /stop", None),
        ("/", None),
        ("/ stop", None),
        ("//stop", None),
        ("/etc/passwd", None),
        ("/usr", Command("usr")),
        ("/1st", None),
        ("/stop!", None),
        ("/stop@", None),
        ("", None),
    ],
)
def test_a_leading_slash_makes_a_command(text: str, command: Command | None) -> None:
    """The first word after the slash names the command; paths and punctuation do not."""
    assert command == parse_command(text)


def test_the_prefix_is_the_platforms() -> None:
    """Where "/" belongs to the platform, another prefix is used, and "/" is ordinary text."""
    assert Command("stop") == parse_command("!stop", prefix="!")
    assert parse_command("/stop", prefix="!") is None


@given(st.text())
def test_literal_text_is_never_a_command_or_an_answer(text: str) -> None:
    """SC-31: what a machine composed commands nothing and approves nothing."""
    assert parse_command(LiteralText("/" + text)) is None
    assert bare_answer(LiteralText("yes"), waiting=True) is None


@given(st.text())
def test_any_text_can_be_asked(text: str) -> None:
    """No text makes a parser fail, and a command's name is lower case without spaces."""
    command = parse_command(text)
    assert command is None or (command.name == command.name.lower() and not any(map(str.isspace, command.name)))
    bare_answer(text, waiting=True)
    is_silence_narration(text)
    is_silent_job_reply(text)
    is_silent_reply(text)


@pytest.mark.parametrize(
    ("text", "choice"),
    [
        ("yes", ApprovalChoice.ONCE),
        ("Y", ApprovalChoice.ONCE),
        ("OK!", ApprovalChoice.ONCE),
        (" approve. ", ApprovalChoice.ONCE),
        ("👍🏽", ApprovalChoice.ONCE),
        ("no", ApprovalChoice.DENY),
        ("N", ApprovalChoice.DENY),
        ("Deny", ApprovalChoice.DENY),
        ("always", ApprovalChoice.ALWAYS),
        ("'session'", ApprovalChoice.SESSION),
    ],
)
def test_a_bare_word_answers_while_one_waits(text: str, choice: ApprovalChoice) -> None:
    """A single word of consent or refusal answers the waiting approval."""
    assert ApprovalAnswer(choice) == bare_answer(text, waiting=True)
    assert bare_answer(text, waiting=False) is None


@pytest.mark.parametrize("text", ["yes please", "no, use rm instead", "why?", "", "...", "yesterday", "/approve"])
def test_more_than_a_word_is_conversation(text: str) -> None:
    """Anything but a bare word stays an ordinary message."""
    assert bare_answer(text, waiting=True) is None


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("/approve", ApprovalAnswer(ApprovalChoice.ONCE)),
        ("/approve all", ApprovalAnswer(ApprovalChoice.ONCE, everything=True)),
        ("/approve session", ApprovalAnswer(ApprovalChoice.SESSION)),
        ("/approve all always", ApprovalAnswer(ApprovalChoice.ALWAYS, everything=True)),
        ("/deny", ApprovalAnswer(ApprovalChoice.DENY)),
        ("/deny all", ApprovalAnswer(ApprovalChoice.DENY, everything=True)),
        ("/deny all too risky", ApprovalAnswer(ApprovalChoice.DENY, everything=True, reason="too risky")),
        ("/deny use the other disk", ApprovalAnswer(ApprovalChoice.DENY, reason="use the other disk")),
        ("/deny " + "x" * 400, ApprovalAnswer(ApprovalChoice.DENY, reason="x" * 280)),
    ],
)
def test_approval_commands(text: str, answer: ApprovalAnswer) -> None:
    """approve takes a scope and "all"; deny takes "all" and a bounded reason."""
    command = parse_command(text)
    assert command is not None
    assert answer == approval_answer(command)


def test_approval_commands_that_make_no_sense_say_what_would() -> None:
    """An unknown word after approve approves nothing."""
    with pytest.raises(CommandTextError, match=r"does not know 'forever'; write /approve \[all\]"):
        approval_answer(Command("approve", "forever"))
    with pytest.raises(CommandTextError, match="/stop does not answer an approval"):
        approval_answer(Command("stop"))


@pytest.mark.parametrize(
    "text", ["[SILENT]", "SILENT", "NO_REPLY", "NO REPLY", " [silent]. ", "*NO_REPLY*", "SILENT!\n"]
)
def test_a_silence_marker_is_silent(text: str) -> None:
    """A reply that is nothing but a marker is not sent."""
    assert is_silent_reply(text)
    assert is_silent_job_reply(text)
    assert is_silence_narration(text)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "Silent.",
        "SILENT NIGHT",
        "[SILENT] but here is more",
        "The marker is [SILENT]",
        "NO_REPLY" + " " * 3 + "x" * 70,
    ],
)
def test_a_reply_that_says_something_is_sent(text: str) -> None:
    """A marker within other words, or in ordinary spelling, is speech."""
    assert not is_silent_reply(text)


@pytest.mark.parametrize(
    ("text", "silent"),
    [
        ("[SILENT] nothing changed since yesterday", True),
        ("Nothing to report.\n[SILENT]", True),
        ("NO_REPLY\nall good", True),
        ("a\n[SILENT]\nb", False),
        ("All backups are fine.", False),
        ("", False),
    ],
)
def test_a_job_is_silent_by_its_first_or_last_line(text: str, silent: bool) -> None:
    """Scheduled jobs may explain their silence around the marker."""
    assert silent == is_silent_job_reply(text)


@pytest.mark.parametrize(
    "text", [".", "...", "…", "🔇", "🤫 🤐", "(silent)", "[silence]", "*stays silent*", "_No response._"]
)
def test_acted_silence_is_recognised(text: str) -> None:
    """A reply that only plays silence is filtered."""
    assert is_silence_narration(text)


@pytest.mark.parametrize("text", ["", "0", "?", "no", "Nothing.", "(see above)", "🔇 muted for an hour", "." * 65])
def test_short_speech_is_not_silence(text: str) -> None:
    """Short answers are answers."""
    assert not is_silence_narration(text)
