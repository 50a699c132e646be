"""A new user's ten minutes at a real pseudo-terminal, from a fresh clone on: install, serve, chat, background process, approval, stop, resume.

With `WRITE_SCREENS=1` (`make screens`) what the terminal showed is written into docs/first-ten-minutes.md.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest

from .pseudo_terminal import Terminal, at_terminal
from .server_process import clean_environment
from .terminal_picture import picture

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "first-ten-minutes.md"
INSTALL_SECONDS = 400.0
WIDTH = 10_000
"""Long lines stay whole in the documentation."""


def fresh_clone(target: Path) -> None:
    """What a clone would hold: the tracked files, as they are now."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout
    for name in listed.decode().split("\0"):
        if name and (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            (target / name).write_bytes((ROOT / name).read_bytes())
            (target / name).chmod((ROOT / name).stat().st_mode)


def shown(terminal: Terminal, *places: tuple[Path, str]) -> str:
    """The screen as a person saw it, with the paths of a person's machine, and without the link that signs in and what pip says about its settings."""
    text = "\n".join(line for line in picture(terminal.raw, WIDTH) if not line.startswith("WARNING: "))
    text = re.sub(r"#/sign-in/\S+", "#/sign-in/…", text)
    for path, name in places:
        text = text.replace(str(path), name)
    return re.sub(r"\n{3,}", "\n\n", text).strip("\n")


def say(terminal: Terminal, text: str) -> None:
    """Type a line as a person does: once the last answer is there."""
    terminal.settle()
    terminal.enter(text)


def converse(terminal: Terminal, victim: Path) -> None:
    """A first conversation: an answer, a tool, work in the background, a question that is refused, a stop."""
    terminal.expect(r"leaves\.(.|\n)*›")
    say(terminal, "hello")
    terminal.expect("You said: hello")
    say(terminal, "!run echo hello from a tool")
    terminal.expect("hello from a tool(.|\n)*hello from a tool")
    say(terminal, "!bg sleep 2; echo the build is done")
    terminal.expect("Background process started")
    terminal.expect("background work reports(.|\n)*the build is done")
    say(terminal, f"!run rm -rf {victim}")
    terminal.expect("Approval needed")
    say(terminal, "no")
    terminal.expect("Refused(.|\n)*go on without it")
    assert victim.exists()
    say(terminal, "!sleep 100")
    terminal.expect(r"working for \d+ s, waits on model demo")
    terminal.press("c")
    terminal.expect("nothing of it runs any more")
    say(terminal, "/quit")
    assert terminal.wait() == 0


@pytest.mark.slow
def test_the_first_ten_minutes(tmp_path: Path) -> None:
    """Each step does what the screen and the documentation say, with nothing prepared but Python, make and a clone."""
    clone, home = tmp_path / "hermes-trio", tmp_path / "home"
    fresh_clone(clone)
    victim = clone / "build"
    victim.mkdir()
    environment = {**clean_environment(home), "HERMES_HOME": str(home), "TERM": "xterm-256color"}
    places = ((home, "~/.hermes-trio"), (clone, "~/hermes-trio"), (Path.home(), "~"))
    screens: dict[str, str] = {}
    began = time.monotonic()
    with at_terminal([], home, environment, program=["make", "serve", "ARGS=--port 0"], cwd=clone) as server:
        server.expect(r"installing \d+ packages", seconds=60)
        server.expect("Ctrl-C stops the server", seconds=INSTALL_SECONDS)
        (line,) = re.findall(r"^\s*(curl .*(?:\n.*)??'\{.*\}')", "\n".join(picture(server.raw, WIDTH)), re.MULTILINE)
        answered = subprocess.run(
            line, shell=True, capture_output=True, text=True, timeout=60, check=True, env=environment
        )
        assert '"content":"You said: Hello"' in answered.stdout.replace('": "', '":"')
        with at_terminal([], home, environment, program=["make", "chat"], cwd=clone) as terminal:
            converse(terminal, victim)
            screens["chat"] = shown(terminal, *places)
            order = [
                "You said: hello",
                "Background process started",
                "the build is done",
                "Refused",
                "(stopped)",
                "Stopped in",
            ]
            found = [screens["chat"].rindex(words) for words in order]
            assert found == sorted(found), screens["chat"]
            assert "\n- turn" in screens["chat"]
        with at_terminal([], home, environment, program=["make", "chat", "ARGS=--resume last"], cwd=clone) as terminal:
            terminal.expect(r"sleep 100(.|\n)*leaves\.(.|\n)*›")
            terminal.enter("/quit")
            assert terminal.wait() == 0
            screens["resume"] = shown(terminal, *places)
        server.press("c")
        # make itself is ended by the signal, too.
        assert server.wait() in (0, 2, -signal.SIGINT), server.screen
        screens["serve"] = re.sub(r"127\.0\.0\.1:\d+", "127.0.0.1:8642", shown(server, *places))
        assert "0 turns, 0 jobs, 0 threads left" in screens["serve"]
    assert time.monotonic() - began < 600
    if os.environ.get("WRITE_SCREENS"):
        page = PAGE.read_text()
        for name, screen in screens.items():
            block = f"<!-- screen {name} -->\n````text\n{screen}\n````\n<!-- end -->"
            page = re.sub(
                rf"<!-- screen {name} -->.*?<!-- end -->", lambda _, block=block: block, page, flags=re.DOTALL
            )
        PAGE.write_text(page)
