"""Normalising, comment stripping, plain words, limits, and the second reader."""

from __future__ import annotations

import threading

import pytest

from hermes_trio.guard import (
    BlockCategory,
    Verdict,
    inspect_command,
    normalise,
    simple_command_words,
    strip_comments,
)

HOME = "/home/dev"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("ls -la", "ls -la"),
        ("\x1b[31mrm\x1b[0m x", "rm x"),
        ("\x1b]0;title\x07ls", "ls"),
        ("l\0s", "ls"),
        ("ｌｓ", "ls"),
        ("l\u200bs\u2060", "ls"),
        ("l\u00ads", "ls"),
        ("ls\u00a0-l", "ls -l"),
        ("rm \u2013rf", "rm -rf"),
        ("a\r\nb\rc", "a\nb\nc"),
        ("\udcff", "\ufffd"),
    ],
)
def test_normalise(text: str, expected: str) -> None:
    """What a person would see is what is compared."""
    assert normalise(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("ls # list", "ls"),
        ("# only", ""),
        ("ls # a\npwd # b\n", "ls\npwd\n"),
        ("echo '# not' \"# not\"", "echo '# not' \"# not\""),
        ("echo a#b $# ${#x}", "echo a#b $# ${#x}"),
        ("cat <<EOF\n# text\nEOF", "cat <<EOF\n# text\nEOF"),
        ("echo $(ls # in\n)", "echo $(ls\n)"),
        ("echo 'open # x", "echo 'open # x"),
    ],
)
def test_strip_comments(text: str, expected: str) -> None:
    """Only real comments go; unreadable text stays as it is."""
    assert strip_comments(text) == expected


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("git status", ["git", "status"]),
        ("git commit -m 'a b'", ["git", "commit", "-m", "a b"]),
        ("echo \"a\"'b'\\ c", ["echo", "ab c"]),
        ("ls # comment", ["ls"]),
        ("ls\n", ["ls"]),
        ("ls | wc", None),
        ("ls; pwd", None),
        ("ls && pwd", None),
        ("ls &", None),
        ("ls > x", None),
        ("A=1 ls", None),
        ("echo $HOME", None),
        ("echo $(ls)", None),
        ("echo `ls`", None),
        ("(ls)", None),
        ("ls\npwd", None),
        ("cat <<E\nE\n", None),
        ("if a; then b; fi", None),
        ("echo 'x", None),
        ("", None),
        ("a" * 5_000, None),
    ],
)
def test_simple_command_words(text: str, words: list[str] | None) -> None:
    """Words are given only for one command without operators, expansions or redirections."""
    assert simple_command_words(text) == words


@pytest.mark.parametrize(
    ("text", "blocked"),
    [
        ("echo " + "ab " * 20_000, False),
        ("cat <<E\n" + "some words in a line\n" * 4_000 + "E\n", False),
        ("echo " + "a" * 4_000, False),
        ("echo " + "a" * 4_097, True),
        ("x " * 64_001, True),
        ("a;" * 25_001, True),
    ],
    ids=["many-words", "long-heredoc", "long-word", "unbroken", "too-long", "separators"],
)
def test_limits(text: str, blocked: bool) -> None:
    """Size alone blocks only beyond the limits."""
    verdict = inspect_command(text, home=HOME)
    over = verdict.blocked is not None and verdict.blocked.category is BlockCategory.OVER_LIMIT
    assert over is blocked


def test_threads_do_not_share_a_parser() -> None:
    """Inspections in several threads give the same verdicts."""
    command = 'for f in a b; do echo "$f" | grep \'x\' && rm -rf "$f"; done'
    expected = inspect_command(command, home=HOME)
    results: list[Verdict] = []
    threads = [
        threading.Thread(target=lambda: results.extend(inspect_command(command, home=HOME) for _ in range(20)))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [expected] * 80


@pytest.mark.parametrize(
    ("command", "cwd", "blocked"),
    [
        ("rm -rf .", "/", True),
        ("rm -rf .", "/home/dev", True),
        ("rm -rf *", "/etc", True),
        ("rm -rf ..", "/usr/share", True),
        ("rm -rf .", "/home/dev/project", False),
        ("rm -rf *", "", False),
        ("rm -rf ..", "/home/dev/project/src", False),
        ("cd /tmp/x && rm -rf *", "/home/dev", False),
        ("cd /tmp/x; rm -rf *", "/home/dev", True),
        ("cd /tmp/x || exit 1; rm -rf *", "/home/dev", False),
        ("set -e; cd /tmp/x; rm -rf *", "/home/dev", False),
        ("(cd /; ls); rm -rf *", "/home/dev/project", False),
        ("find . -delete", "/home/dev", True),
    ],
)
def test_working_directory_counts(command: str, cwd: str, blocked: bool) -> None:
    """Relative paths are judged where the command runs, also when a `cd` may fail."""
    assert (inspect_command(command, home=HOME, cwd=cwd).blocked is not None) is blocked


@pytest.mark.parametrize(
    "command",
    [
        "rm -rf /tmp/x",
        "rm -rf /home/dev/project/build",
        "rm -rf ~/project",
        "rm -rf /var/tmp/cache",
        "rm -rf ./etc",
        "rm -rf etc usr",
        'rm -rf "$BUILD/out"',
        'rm -rf "${BUILD:?}"/*',
        "find /tmp -delete",
        "find /var/log -name '*.gz' -delete",
        "find ~ -name '.DS_Store' -delete",
        "dd if=/dev/sda of=disk.img",
        "cat x > /dev/null",
        "cat x > /dev/stderr",
        "cat /dev/sda | head -c 10",
        "systemctl status reboot.target",
        "kill -9 -1234",
        "shutdown --help",
        "f() { f; }; f",
        "python3 -c \"print('rm -rf /')\"",
        "python3 -c \"import shutil; shutil.rmtree('/tmp/x')\"",
        "docker run --rm alpine rm -rf /tmp/x",
    ],
)
def test_asked_but_not_blocked(command: str) -> None:
    """What looks alike but is ordinary is never blocked outright."""
    assert inspect_command(command, home=HOME, cwd="/home/dev/project").blocked is None
