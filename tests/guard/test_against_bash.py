"""Our reading of words agrees with what bash does; only harmless words made of quotes and expansions are run."""

from __future__ import annotations

import random
import shutil
import subprocess
from pathlib import Path

import pytest

from hermes_trio.guard.marks import HOLE, SOLID
from hermes_trio.guard.reader import Reader, Unreadable
from hermes_trio.guard.shell import Shell
from hermes_trio.guard.syntax import Simple

SETUP = 'set -f; v="foo bar"; w=(one "two three"); r=v; va=joined; set -- p1 "p 2"\n'
PIECES = (
    *(
        "a",
        "b-",
        "/x",
        '"x y"',
        "'q r'",
        "\\ ",
        "\\n",
        "$'\\x41\\t'",
        "$'it\\'s'",
        '""',
        "''",
        ",",
        "{",
        "}",
        "{}",
        "{x}",
        "=",
    ),
    *("${v}", "$v", '"$v"', "${!r}", "${#v}", "${w[1]}", '"${w[@]}"', "${w[*]}", '"$@"', "$2", "$*"),
    *("${v#f}", "${v##* }", "${v%r}", "${v:1:2}", "${v: -2}", "${v^^}", "${v,,}", "${v/o/0}", "${v//o/0}"),
    *("${u:-def}", '${u-"d e"}', "${v:+alt}", "\"${u:-in 'q' side}\"", '"a\\"b\\$c\\d"'),
    *(
        "{1,2}",
        "{a..c}",
        "{p,'q q',$v}",
        "$((1+2*3))",
        "$(echo hi)",
        "`echo yo`",
        "\"$(echo 'a  b')\"",
        "$(echo 'a  b')",
    ),
)


def expansions(word: str) -> list[list[str]]:
    """What our expander makes of the word."""
    shell = Shell(home="/home/dev", cwd="/tmp", sudo_password_configured=False)
    shell.script(Reader(SETUP).read(), None)
    node = Reader("x " + word).read()[0].node
    assert isinstance(node, Simple)
    results: list[list[str]] = [[]]
    for part in node.words[1:]:
        results = [left + right for left in results for right in shell.expander.fields(part)]
    return results


def readable(word: str) -> bool:
    """Whether our reader takes the word at all."""
    try:
        return len(Reader("x " + word).read()) == 1
    except Unreadable:
        return False


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("bash") is None, reason="bash is not installed")
@pytest.mark.parametrize("seed", range(4))
def test_words_expand_as_in_bash(seed: int, tmp_path: Path) -> None:
    """Random words of quotes, expansions and braces give the fields that bash gives."""
    chooser = random.Random(seed)
    words = ["".join(chooser.choices(PIECES, k=chooser.randint(1, 4))) for _ in range(800)]
    words = [word for word in words if readable(word)]
    script = tmp_path / "words.sh"
    script.write_text(SETUP + "".join(f"printf '%s\\037' A {word}; printf '\\036'\n" for word in words))
    run = subprocess.run(["bash", "--norc", str(script)], capture_output=True, text=True, timeout=60, check=False)
    answers = run.stdout.split("\x1e")
    assert len(answers) == len(words) + 1
    for word, answer in zip(words, answers, strict=False):
        ours = expansions(word)
        known = not any(mark in field for fields in ours for field in fields for mark in (HOLE, SOLID))
        assert not known or answer.split("\x1f")[1:-1] in ours, word
