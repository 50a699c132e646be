"""Commands that outlive their call are refused in the foreground; benign exit codes are explained."""

from __future__ import annotations

import pytest

from hermes_trio.guard import Detachment, detaches, exit_code_meaning


@pytest.mark.parametrize(
    ("kind", "command"),
    [
        (Detachment.DETACHING_COMMAND, "nohup ./job"),
        (Detachment.DETACHING_COMMAND, "sudo nohup ./job"),
        (Detachment.DETACHING_COMMAND, "setsid ./job"),
        (Detachment.DETACHING_COMMAND, "./job; disown"),
        (Detachment.DETACHING_COMMAND, "/usr/bin/nohup x"),
        (Detachment.BACKGROUND_OPERATOR, "sleep 100 &"),
        (Detachment.BACKGROUND_OPERATOR, "sleep 100 & echo started"),
        (Detachment.BACKGROUND_OPERATOR, "cd x && ./server & sleep 1"),
        (Detachment.BACKGROUND_OPERATOR, "(sleep 100 &)"),
        (Detachment.BACKGROUND_OPERATOR, "if true; then sleep 9 & fi"),
        (Detachment.LONG_RUNNING, "npm start"),
        (Detachment.LONG_RUNNING, "npm run dev"),
        (Detachment.LONG_RUNNING, "npm run dev:web -- --port 3000"),
        (Detachment.LONG_RUNNING, "yarn serve"),
        (Detachment.LONG_RUNNING, "pnpm run watch"),
        (Detachment.LONG_RUNNING, "bun dev"),
        (Detachment.LONG_RUNNING, "docker compose up"),
        (Detachment.LONG_RUNNING, "docker-compose -f a.yml up --build"),
        (Detachment.LONG_RUNNING, "npx next dev"),
        (Detachment.LONG_RUNNING, "vite"),
        (Detachment.LONG_RUNNING, "npx vite --host"),
        (Detachment.LONG_RUNNING, "nodemon app.js"),
        (Detachment.LONG_RUNNING, "uvicorn app:app --reload"),
        (Detachment.LONG_RUNNING, "PORT=1 gunicorn app:app"),
        (Detachment.LONG_RUNNING, "python -m http.server 8000"),
        (Detachment.LONG_RUNNING, "python3 manage.py runserver"),
        (Detachment.LONG_RUNNING, "cd web && npm run dev"),
        (Detachment.LONG_RUNNING, "tail -f app.log"),
        (Detachment.LONG_RUNNING, "tsc --watch"),
    ],
)
def test_refused(kind: Detachment, command: str) -> None:
    """The command is refused for this reason, with advice."""
    reason = detaches(command)
    assert reason is not None
    assert reason.kind is kind
    assert "background=true" in reason.text


@pytest.mark.parametrize(
    "command",
    [
        "ls",
        "npm test",
        "npm run build",
        "npm run start-report --help",
        "npm run dev --help",
        "vite build",
        "vite --version",
        "uvicorn --help",
        "nohup --help",
        "docker compose up -d",
        "docker compose ps",
        "python -m pytest",
        "python -m http.server --help",
        "echo 'nohup x &'",
        'echo "a & b"',
        "git commit -m 'npm start & nohup'",
        "ls 2>&1",
        "make &> build.log",
        "a && b",
        "cat <<EOF\nnohup x &\nEOF",
        "grep nohup file",
        "tail -n 5 log",
        "next build",
        "f() { sleep 1 & }",
        "echo 'unfinished",
        "",
    ],
)
def test_allowed(command: str) -> None:
    """The command ends by itself, asks for help, or only mentions such words."""
    assert detaches(command) is None


@pytest.mark.parametrize(
    ("command", "code", "word"),
    [
        ("grep x file", 1, "matched"),
        ("cat f | grep x", 1, "matched"),
        ("cd a && rg x", 1, "matched"),
        ("/bin/grep x f", 1, "matched"),
        ("LC_ALL=C sudo grep x f", 1, "matched"),
        ("ag x", 1, "matched"),
        ("diff a b", 1, "differ"),
        ("find / -name x", 1, "read"),
        ("test -f x", 1, "false"),
        ("[ -f x ]", 1, "false"),
        ("[[ -f x ]]", 1, "false"),
        ("git diff --exit-code", 1, "git"),
        ("curl http://x", 6, "resolved"),
        ("curl http://x", 7, "connection"),
        ("curl -f http://x", 22, "HTTP"),
        ("curl http://x", 28, "timed out"),
        ("(grep x f)", 1, "matched"),
    ],
)
def test_benign_code(command: str, code: int, word: str) -> None:
    """The last command of the list or pipeline explains the code."""
    meaning = exit_code_meaning(command, code)
    assert meaning is not None
    assert word in meaning


@pytest.mark.parametrize(
    ("command", "code"),
    [("grep x f", 0), ("grep x f", 2), ("grep x f | sort", 1), ("make", 1), ("curl x", 1), ("echo 'x", 1), ("", 1)],
)
def test_ordinary_code(command: str, code: int) -> None:
    """Success, real failures and unknown commands get no note."""
    assert exit_code_meaning(command, code) is None
