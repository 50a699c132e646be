"""Reads a person's lines: a prompt with history on a terminal, or plain lines of a pipe.

Both are read in a worker thread. Leaving the scope of a prompt ends it at once and restores the terminal.
"""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final, Protocol

import trio
from prompt_toolkit import PromptSession
from prompt_toolkit.formatted_text import StyleAndTextTuples
from prompt_toolkit.history import FileHistory, InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings
from prompt_toolkit.key_binding.key_processor import KeyPressEvent
from prompt_toolkit.patch_stdout import patch_stdout

from hermes_trio.runtime.tree import waiting

PROMPT: Final = "› "
MULTILINE: Final = "· "

LIVE_LINES: Final = 12
"""The maximum number of lines of an unfinished answer above the prompt."""
REDRAW_SECONDS: Final = 0.05


class Lines(Protocol):
    """A source of inputs."""

    async def next(self) -> str | None:
        """Return the next input, or None at the end. Cancelling it loses no complete input."""
        ...


class PipedLines:
    """Reads standard input that is not a terminal: each line is an input."""

    async def next(self) -> str | None:
        """Return the next line, or None at the end. Cancelling abandons the reading thread, which does not delay the end of the program."""
        with waiting("a line"):
            line = await trio.to_thread.run_sync(sys.stdin.readline, abandon_on_cancel=True)
        return line.rstrip("\n") if line else None


class PromptLines:
    """A prompt with history. Enter sends, Alt-Enter inserts a new line, Ctrl-C calls `interrupt`, Ctrl-D on an empty line ends."""

    def __init__(self, history: Path | None, interrupt: Callable[[], None]) -> None:
        self._interrupt = interrupt
        self._unfinished = ""
        self._status = ""
        self._token: trio.lowlevel.TrioToken
        self._session: PromptSession[str] = PromptSession(
            history=InMemoryHistory() if history is None else FileHistory(str(history)),
            key_bindings=self._bindings(),
            prompt_continuation=MULTILINE,
            enable_suspend=True,
            multiline=False,
        )
        self._session.app.min_redraw_interval = REDRAW_SECONDS

    def show_unfinished(self, text: str) -> None:
        """Show the last lines of an unfinished answer above the prompt; an empty text removes them."""
        self._change(text, self._status)

    def show_status(self, text: str) -> None:
        """Show the agent's current activity above the prompt; an empty text removes it."""
        self._change(self._unfinished, text)

    def _change(self, unfinished: str, status: str) -> None:
        if (unfinished, status) != (self._unfinished, self._status):
            self._unfinished, self._status = unfinished, status
            self._session.app.invalidate()

    def _message(self) -> StyleAndTextTuples:
        """Return the text before the cursor. Called by the prompt's thread whenever it draws."""
        shown: StyleAndTextTuples = []
        if self._unfinished.strip():
            shown.append(("", "\n".join(self._unfinished.splitlines()[-LIVE_LINES:]) + "\n"))
        if self._status:
            shown.append(("ansibrightblack", self._status + "\n"))
        return [*shown, ("", PROMPT)]

    @asynccontextmanager
    async def open(self) -> AsyncIterator[PromptLines]:
        """Redirect standard output to above the prompt for the body of the `async with`, so that the line that is being typed stays intact."""
        self._token = trio.lowlevel.current_trio_token()
        with patch_stdout(raw=True):
            yield self

    async def next(self) -> str | None:
        """Show the prompt and return the input, or None at the end. Cancelling ends the prompt and restores the terminal."""
        text: str | None = None
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._end_on_cancel)
            with waiting("the person"):
                text = await trio.to_thread.run_sync(self._prompt)
            nursery.cancel_scope.cancel()
        await trio.lowlevel.checkpoint_if_cancelled()
        return text

    def _prompt(self) -> str | None:
        # Only Trio's thread handles signals; in this thread Ctrl-C is an ordinary key.
        try:
            return self._session.prompt(self._message, handle_sigint=False)
        except EOFError:
            return None

    async def _end_on_cancel(self) -> None:
        try:
            await trio.sleep_forever()
        finally:
            app = self._session.app
            if app.is_running and app.loop is not None:
                app.loop.call_soon_threadsafe(self._leave)

    def _leave(self) -> None:
        app = self._session.app
        if app.is_running and app.future is not None and not app.future.done():
            app.exit(exception=EOFError())

    def _bindings(self) -> KeyBindings:
        bindings = KeyBindings()

        def stop(event: KeyPressEvent) -> None:
            buffer: Any = event.current_buffer
            if buffer.text:
                buffer.reset()
            else:
                self._token.run_sync_soon(self._interrupt)

        def new_line(event: KeyPressEvent) -> None:
            event.current_buffer.insert_text("\n")

        def end(event: KeyPressEvent) -> None:
            if not event.current_buffer.text:
                event.app.exit(exception=EOFError())

        bindings.add("c-c")(stop)
        # Printing above the prompt leaves raw mode for a moment. Linux delivers a Ctrl-D that is pressed in that moment as NUL.
        bindings.add("c-@")(end)
        bindings.add("escape", "enter")(new_line)
        return bindings
