"""Inspection is total: any text gets an answer, within bounds, and the same one each time."""

from __future__ import annotations

from time import process_time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hermes_trio.guard import (
    Remembered,
    Verdict,
    detaches,
    exit_code_meaning,
    inspect_command,
    normalise,
    simple_command_words,
    strip_comments,
)
from hermes_trio.guard.reader import Reader

from .blocked_corpus import ROOT_DELETE
from .everyday_corpus import EVERYDAY
from .flagged_corpus import FLAGGED

CORPUS = [*ROOT_DELETE.values(), *EVERYDAY, *(command for commands in FLAGGED.values() for command in commands)]

# fmt: off
FRAGMENTS = (
    'rm', '-rf', '/', '~', '$HOME', '${x}', '${x:-/}', '$(echo', '`ls', '`', ')', '(', '{', '}', ';', '&', '&&',
    '||', '|', '|&', '<', '>', '>>', '<<EOF', '<<-E', '<<<x', 'EOF', '\n', '\\\n', "'", '"', "$'", '$"', '\\', '#',
    '!', '[[', ']]', '((', '))', '$((', 'if', 'then', 'else', 'fi', 'for', 'in', 'do', 'done', 'while', 'case',
    'esac', ';;', 'f()', 'function', 'x=rm', 'x+=(a', 'x[1]=', '{a,b}', '{1..9}', '*', '?', '[a]', '@(a|b)', 'eval',
    'sh', '-c', 'bash', 'source', '.', 'exec', 'sudo', 'env', 'xargs', 'find', '-exec', '{}', '+', '-delete', 'cat',
    'tee', 'base64', '-d', 'python3', '-c', 'perl', '-e', 'curl', '/dev/sda', '/etc', 'kill', '-1', 'git', 'cd',
    '..', 'time', 'coproc', 'read', '$@', '$1', '$_', '~+', '2>&1', '&>', '>(', '<(', '\t', '\x00', '\x1b[31m',
    '\xe9', '\uff52\uff4d', '\u200b',
)
# fmt: on
TOKENS = st.sampled_from(FRAGMENTS)


def inspect(text: str) -> Verdict:
    """Inspect as the tools do."""
    return inspect_command(text, home="/home/dev", cwd="/home/dev/project")


def check(text: str) -> None:
    """Every entry point answers, and twice the same."""
    verdict = inspect(text)
    assert verdict == inspect(text)
    assert verdict.clean == (verdict.blocked is None and not verdict.findings)
    assert isinstance(verdict.description, str)
    normalise(text)
    strip_comments(text)
    simple_command_words(text)
    detaches(text)
    exit_code_meaning(text, 1)


@settings(max_examples=150, deadline=None)
@given(st.text(max_size=200))
def test_any_text(text: str) -> None:
    """Random Unicode, surrogates excluded, never raises."""
    check(text)


@settings(max_examples=150, deadline=None)
@given(st.binary(max_size=200))
def test_any_bytes(data: bytes) -> None:
    """Random bytes, as they arrive from the operating system, never raise."""
    check(data.decode("utf-8", "surrogateescape"))


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(TOKENS, st.sampled_from(["", " "])), max_size=30))
def test_shell_like_text(pieces: list[tuple[str, str]]) -> None:
    """Text made of shell fragments never raises."""
    check("".join(piece + blank for piece, blank in pieces))


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(CORPUS), st.integers(0, 80), st.integers(0, 4), TOKENS)
def test_damaged_commands(command: str, position: int, removed: int, inserted: str) -> None:
    """A real command with a piece cut out and another put in never raises."""
    check(command[:position] + inserted + command[position + removed :])


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(sorted(ROOT_DELETE.values())), st.sampled_from(EVERYDAY))
def test_company_does_not_help(blocked: str, everyday: str) -> None:
    """A blocked command stays blocked behind an ordinary one."""
    assert inspect(f"{everyday}\n{blocked}").blocked is not None


WRAPPINGS = [
    "sudo {0}",
    "env A=1 {0}",
    "nohup {0}",
    "timeout 5 {0}",
    "({0})",
    "{{ {0}\n}}",
    "if true; then {0}\nfi",
    "while false; do {0}\ndone",
    "echo $({0}\n)",
    'echo "$({0}\n)"',
    "f() {{ {0}\n}}; f",
    "bash <<'ENDOFTEXT'\n{0}\nENDOFTEXT",
    "cat <<'ENDOFTEXT' | sh\n{0}\nENDOFTEXT",
    "true && {{ {0}\n}}",
    "case x in *) {0}\n;; esac",
    "diff <({0}\n) x",
]


@pytest.mark.parametrize("wrapping", WRAPPINGS)
@pytest.mark.parametrize(
    "command", ["rm -rf /", "x=rm; $x -rf ~", "mkfs.ext4 /dev/sda", "reboot", "kill -9 -1", "cat x > /dev/sda"]
)
def test_wrapping_does_not_help(wrapping: str, command: str) -> None:
    """A blocked command stays blocked inside every construct that would run it."""
    if wrapping.startswith(("sudo", "env", "nohup", "timeout")) and ";" in command:
        command = command.replace("x=rm; $x", "rm")
    assert inspect(wrapping.format(command)).blocked is not None


@pytest.mark.parametrize(
    "text",
    [
        "(" * 64_000,
        "$(" * 40_000,
        "{ " * 20_000,
        "`" * 100_000,
        '"$(' * 30_000,
        "((" * 40_000,
        "$((" * 30_000,
        "eval " * 20_000,
        "sudo " * 20_000,
        "cat <<E\n" * 12_000,
        "a|" * 40_000,
        "x=$x$x;" * 3_000,
        "{a,b}" * 600,
        "while :; do " * 30 + ":" + "; done" * 30,
        "".join(f"f{i}(){{ f{i - 1}; f{i - 1}; }};" for i in range(1, 500)) + "f499",
        "python3 -c '" + "q{ " * 20_000 + "'",
        "psql -c '" + "/* " * 20_000 + "'",
        "sed '" + "s/\\\\" * 900 + "'",
        "perl -e '" + "while " + " " * 40_000 + "'",
        "echo " + "a " * 12_000 + "| xxd -r -p | sh",
        "\n" * 100_000,
        "\udcff" * 4_000,
        "\0" * 4_000,
    ],
    ids=range(23),
)
def test_hostile_sizes(text: str) -> None:
    """Deep, wide and long texts are answered, not chewed on."""
    inspect(text)


@pytest.mark.slow
@settings(max_examples=4_000, deadline=None)
@given(st.lists(st.tuples(TOKENS, st.sampled_from(["", " "])), max_size=120))
def test_shell_like_text_at_length(pieces: list[tuple[str, str]]) -> None:
    """The same as the short fuzz, longer and more often."""
    check("".join(piece + blank for piece, blank in pieces))


@pytest.mark.slow
@settings(max_examples=30, deadline=None)
@given(st.binary(min_size=1_000, max_size=8_000), st.integers(1, 100))
def test_large_random_bytes(data: bytes, repeats: int) -> None:
    """Texts of up to 128,000 characters and beyond are answered."""
    inspect((data.decode("utf-8", "surrogateescape") * repeats)[:130_000])


@pytest.mark.parametrize(
    "text",
    [
        "for i in 1 2>&1; do rm -rf /; done",
        "for i in <x; do rm -rf /; done",
        "for i in a >b",
        "[[ a <",
        "x=(a >b)",
        "echo > ; rm -rf /",
        "case > in *) rm -rf /;; esac",
    ],
)
def test_an_operator_where_a_word_belongs_ends_the_reading(text: str) -> None:
    """A redirection where the shell takes words only is a syntax error; reading it must end, whatever follows."""
    check(text)
    assert not inspect(text).clean


@pytest.mark.parametrize(
    "text",
    [
        "x[$(" * 16 + "a" + ")]" * 16,
        "x[$(" * 22 + "a" + ")]" * 22,
        "x[$(cat <<-E\n" * 14 + "a" + "\nE\n)]" * 14,
        "y " + "x[$(" * 14 + "`x[$(a)]`" + ")]" * 14,
    ],
    ids=range(4),
)
def test_what_is_read_again_and_again_is_refused(text: str) -> None:
    """An assignment that turns out to be a word is read twice, and so is each one inside it: the reading ends after a bounded number of steps."""
    used = process_time()
    verdict = inspect(text)
    assert verdict.blocked is not None
    assert process_time() - used < 2


@pytest.mark.parametrize(
    "text", ["a;" * 12_000, "x[$(a)]=b;" * 4_000, "if a;then b;fi;" * 2_000, "[ a ]&&b||c\n" * 3_000]
)
def test_reading_once_is_within_the_bound(text: str) -> None:
    """Texts of the shortest commands need the most steps a character, and are read."""
    Reader(text).read()


HOSTILE_MEMORIES = {
    "headers of functions": Remembered(definitions="a () \n{ \n" * 25_000),
    "a function of wrappers": Remembered(definitions="f () \n{ \n" + "xargs " * 10_000 + "\n}\n"),
    "a variable of wrappers": Remembered(variables={"x": "xargs " * 8_000}),
    "a nested function": Remembered(definitions="f () \n{ \n" + "x[$(" * 20 + "a" + ")]" * 20 + "\n}\n"),
    "aliases": Remembered(definitions="alias a='b c d'\n" * 16_000),
}


@pytest.mark.parametrize("memory", HOSTILE_MEMORIES.values(), ids=HOSTILE_MEMORIES)
def test_a_short_command_with_a_hostile_memory_is_answered(memory: Remembered) -> None:
    """What a session's shell remembers is written by its commands: it costs no more than a long command."""
    used = process_time()
    inspect_command("f; $x", home="/home/dev", cwd="/home/dev/project", remembered=memory)
    assert process_time() - used < 4


@pytest.mark.parametrize("wrapper", ["xargs ", "find / -exec ", "env -S 'a' ", "nohup "])
def test_wrappers_around_wrappers_cost_no_more_than_their_words(wrapper: str) -> None:
    """Each wrapper is judged with everything behind it; the words of all of them are counted."""
    used = process_time()
    assert not inspect(wrapper * 1_500).clean
    assert process_time() - used < 4
