"""Recognises commands that must not run in the foreground, and explains benign exit codes.

A foreground command belongs to the turn that waits for it. A command that detaches itself or does not end by itself is
refused with advice; `detaches` recognises it from the parsed command, so quoted text is never mistaken for one.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from enum import Enum

import msgspec

from .reader import Reader, Unreadable
from .structure import inner_scripts, static_text
from .syntax import Function, Item, Node, Pipeline, Simple
from .views import literal, over_limits


class Detachment(Enum):
    """How a command would outlive the call that started it."""

    DETACHING_COMMAND = "detaching command"
    BACKGROUND_OPERATOR = "background operator"
    LONG_RUNNING = "long-running server or watcher"


class Reason(msgspec.Struct, frozen=True):
    """Why a command is refused in the foreground, with what to do instead."""

    kind: Detachment
    text: str


_ADVICE = "start it with background=true, then use process to poll, read or stop it"
_DETACHERS = frozenset({"nohup", "disown", "setsid", "daemonize", "start-stop-daemon"})
_PREFIXES = frozenset({"sudo", "doas", "env", "time", "nice", "command", "exec", "npx", "bunx", "stdbuf", "ionice"})
_EXEMPT = frozenset({"--help", "-h", "--version", "-V", "help", "version"})
_RUNNERS = frozenset({"npm", "yarn", "pnpm", "bun"})
_SCRIPTS = re.compile(r"(?:dev|start|serve|watch|preview|storybook)(?:[:\-].*)?\Z")
_ALWAYS = frozenset(
    {
        "nodemon",
        "uvicorn",
        "gunicorn",
        "hypercorn",
        "daphne",
        "waitress-serve",
        "http-server",
        "live-server",
        "json-server",
        "browser-sync",
        "watchexec",
        "entr",
        "ngrok",
        "caddy",
    }
)
_VERBS: dict[str, frozenset[str]] = {
    "next": frozenset({"dev", "start"}),
    "nuxt": frozenset({"dev", "start"}),
    "astro": frozenset({"dev", "preview"}),
    "ng": frozenset({"serve"}),
    "vue-cli-service": frozenset({"serve"}),
    "webpack": frozenset({"serve", "--watch", "-w", "watch"}),
    "tsc": frozenset({"--watch", "-w"}),
    "jest": frozenset({"--watch", "--watchAll"}),
    "vitest": frozenset({"watch", "--watch", "dev"}),
    "flask": frozenset({"run"}),
    "rails": frozenset({"s", "server"}),
    "hugo": frozenset({"server", "serve"}),
    "jekyll": frozenset({"serve", "s"}),
    "mkdocs": frozenset({"serve"}),
    "php": frozenset({"-S"}),
    "cargo": frozenset({"watch"}),
    "streamlit": frozenset({"run"}),
    "jupyter": frozenset({"lab", "notebook", "server"}),
    "tail": frozenset({"-f", "-F", "--follow"}),
    "celery": frozenset({"worker", "beat"}),
    "ollama": frozenset({"serve"}),
}
_PYTHON = re.compile(r"(?:python|pypy)[\d.]*\Z")
_PYTHON_SERVERS = frozenset(
    {"http.server", "uvicorn", "gunicorn", "hypercorn", "flask", "aiohttp.web", "SimpleHTTPServer"}
)


def detaches(command: str) -> Reason | None:
    """Return why the command must not run in the foreground, or None. Unreadable text is left to inspection."""
    if over_limits(command) is not None:
        return None
    try:
        items = Reader(literal(command)).read()
    except (Unreadable, RecursionError):
        return None
    return _script(items)


def _script(items: list[Item]) -> Reason | None:
    for item in items:
        if item.operator == "&":
            text = f"the command puts work in the background with '&'; {_ADVICE}"
            return Reason(Detachment.BACKGROUND_OPERATOR, text)
        reason = _node(item.node)
        if reason is not None:
            return reason
    return None


def _node(node: Node) -> Reason | None:
    if isinstance(node, Simple):
        return _simple([text for text in map(static_text, node.words) if text is not None])
    if isinstance(node, Function):
        return None
    for script in inner_scripts(node):
        reason = _script(script)
        if reason is not None:
            return reason
    return None


def _simple(words: list[str]) -> Reason | None:
    while words and (words[0] in _PREFIXES or re.match(r"[A-Za-z_]\w*=|-", words[0])):
        words = words[1:]
    if not words:
        return None
    name, arguments = words[0].rpartition("/")[2], words[1:]
    if name in _DETACHERS and not _EXEMPT.intersection(arguments[:1]):
        return Reason(Detachment.DETACHING_COMMAND, f"{name} detaches the command from its caller; {_ADVICE}")
    if _EXEMPT.intersection(arguments) or not _serves(name, arguments):
        return None
    shown = " ".join(words)[:80]
    return Reason(Detachment.LONG_RUNNING, f"'{shown}' is a server or watcher that does not end by itself; {_ADVICE}")


def _serves(name: str, arguments: list[str]) -> bool:
    verbs = [argument for argument in arguments if not argument.startswith("-")]
    if name in _RUNNERS:
        script = verbs[1] if verbs[:1] == ["run"] and len(verbs) > 1 else verbs[0] if verbs else ""
        return _SCRIPTS.match(script) is not None
    if name in ("docker-compose", "podman-compose") or (name in ("docker", "podman") and verbs[:1] == ["compose"]):
        return "up" in verbs and not {"-d", "--detach", "--wait"}.intersection(arguments)
    if name == "vite":
        return not verbs or verbs[0] in ("dev", "serve", "preview")
    if _PYTHON.match(name):
        if "-m" in arguments[:-1]:
            return arguments[arguments.index("-m") + 1] in _PYTHON_SERVERS
        return bool(verbs) and verbs[0].endswith("manage.py") and "runserver" in verbs
    return name in _ALWAYS or bool(_VERBS.get(name, frozenset[str]()).intersection(arguments))


_MEANINGS: dict[tuple[str, int], str] = {
    ("diff", 1): "the files differ",
    ("colordiff", 1): "the files differ",
    ("cmp", 1): "the files differ",
    ("find", 1): "some directories could not be read",
    ("test", 1): "the condition is false",
    ("[", 1): "the condition is false",
    ("[[", 1): "the condition is false",
    ("git", 1): "git often ends with 1 without an error (for example when there is a difference)",
    ("curl", 6): "the host name could not be resolved",
    ("curl", 7): "the connection was refused or failed",
    ("curl", 22): "the server answered with an HTTP error",
    ("curl", 28): "the request timed out",
}
_MEANINGS.update(
    {(name, 1): "nothing matched" for name in ("grep", "egrep", "fgrep", "zgrep", "rgrep", "rg", "ag", "ack", "pgrep")}
)


def exit_code_meaning(command: str, code: int) -> str | None:
    """Return the meaning of a benign exit code of the last command; None for an ordinary failure or success."""
    if code == 0 or over_limits(command) is not None:
        return None
    try:
        items = Reader(literal(command)).read()
    except (Unreadable, RecursionError):
        return None
    name = next(_last_names(items), "")
    return _MEANINGS.get((name, code))


def _last_names(items: list[Item]) -> Iterator[str]:
    if not items:
        return
    node = items[-1].node
    while isinstance(node, Pipeline):
        node = node.commands[-1]
    if isinstance(node, Simple):
        words = [static_text(word) or "" for word in node.words]
        while words and (words[0] in _PREFIXES or re.match(r"[A-Za-z_]\w*=|-", words[0])):
            words = words[1:]
        if words:
            yield words[0].rpartition("/")[2] or words[0]
        return
    scripts = inner_scripts(node)
    if scripts:
        yield from _last_names(scripts[-1])
    elif not isinstance(node, Function):
        yield "[["
