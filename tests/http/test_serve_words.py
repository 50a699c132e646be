"""The words of a plain `serve`: read without the parser of commands, and never otherwise than it would read them."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator

import pytest

from hermes_trio.cli import main, plain_serve
from hermes_trio.commands import serve as serve_command
from hermes_trio.commands.app import app
from hermes_trio.config import ConfigError


@pytest.fixture
def collector() -> Iterator[None]:
    """The collector runs again after a start that switched it off."""
    yield
    gc.enable()


@pytest.mark.parametrize(
    "words",
    [
        "serve",
        "serve --port 0",
        "serve --port 8_642",
        "serve --port 08642",
        "serve --port +80",
        "serve --home x --config y --host ::1 --port 1",
        "serve --home ~/x",
        "serve --home a=b",
        "serve --config x --home ./y/../z",
        "serve --host 0.0.0.0",
        "serve --host serve",
        "serve --port ٣",
    ],
)
def test_plain_words_mean_what_the_parser_makes_of_them(words: str) -> None:
    """The two ways to read them agree."""
    _, bound, _ = app.parse_args(words.split(), exit_on_error=False, print_error=False)
    assert plain_serve(words.split()) == bound.arguments


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["chat"],
        ["--help"],
        ["serve", "--help"],
        ["serve", "--port=1"],
        ["serve", "--port", "x"],
        ["serve", "--port", "0x10"],
        ["serve", "--port"],
        ["serve", "--port", "-1"],
        ["serve", "--home", "--port"],
        ["serve", "--home", ""],
        ["serve", "home", "x"],
        ["serve", "--", "x"],
        ["serve", "---home", "x"],
        ["serve", "--home", "a", "--home", "b"],
        ["serve", "--bogus", "x"],
        ["serve", "extra"],
        ["serve", "-h", "x"],
    ],
    ids=" ".join,
)
def test_everything_else_is_left_to_the_parser(words: list[str]) -> None:
    """Help, mistakes and other ways to write an option are not guessed at."""
    assert plain_serve(words) is None


@pytest.mark.usefixtures("collector")
@pytest.mark.parametrize("words", [["serve"], ["serve", "--port=0"]], ids=" ".join)
@pytest.mark.parametrize(
    ("problem", "code", "said"),
    [
        (ConfigError("the port is odd"), 1, "hermes-trio: the port is odd\n"),
        (ExceptionGroup("", [ConfigError("the port is odd")]), 1, "hermes-trio: the port is odd\n"),
        (KeyboardInterrupt(), 130, ""),
        (BaseExceptionGroup("", [KeyboardInterrupt()]), 130, ""),
    ],
    ids=["problem", "problem in a group", "interrupt", "interrupt in a group"],
)
def test_how_a_start_that_fails_ends(
    words: list[str],
    problem: BaseException,
    code: int,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """One line and code 1 for what people can mend, silence and code 130 for Ctrl-C; the same with both ways to read the words."""

    async def serve(**options: object) -> None:
        raise problem

    monkeypatch.setattr(serve_command, "serve", serve)
    monkeypatch.setattr(sys, "argv", ["hermes-trio", *words])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == code
    assert capsys.readouterr().err == said


def test_another_system_than_linux_is_told_what_is_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Elsewhere the command ends with one line that names what the kernel lacks, before anything is opened."""
    monkeypatch.setattr("sys.platform", "darwin")
    with pytest.raises(SystemExit) as ended:
        main()
    monkeypatch.undo()
    assert ended.value.code == 1
    said = capsys.readouterr().err
    assert "this is darwin, and the gateway runs on Linux only" in said
    assert "sub-reapers" in said
