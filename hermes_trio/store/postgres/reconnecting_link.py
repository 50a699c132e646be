"""Reconnecting connections: a line keeps one link open for as long as the store is, and reports when there is none."""

from __future__ import annotations

import logging
import random
from collections.abc import Mapping
from typing import Final

import trio

from hermes_trio.store.errors import StoreError, StoreUnavailable

from .errors import LinkBroken, SqlError, translate_sql
from .link import PostgresLink, open_link, unreachable

FIRST_PAUSE: Final = 0.05
LONGEST_PAUSE: Final = 2.0
LOOK_SECONDS: Final = 5.0
"""Seconds between two checks whether an answer is overdue."""

logger: Final = logging.getLogger(__name__)


class ReconnectingLink:
    """One connection, opened again with growing pauses whenever it breaks. `settings` are set in every session of it.

    A server that owes an answer for longer than `answer_seconds` ends the connection: a proxy may keep one open whose other side is closed.
    """

    def __init__(
        self, name: str, url: str, where: str, settings: Mapping[str, str], answer_seconds: float = float("inf")
    ) -> None:
        self.name: str = name
        self._url: str = url
        self._where: str = where
        self._settings: dict[str, str] = dict(settings)
        self.answer_seconds: float = answer_seconds
        self._link: PostgresLink | None = None
        self._change: trio.Event = trio.Event()
        self._problem: str = "it has not been opened"
        self._closed: bool = False
        self._scope: trio.CancelScope = trio.CancelScope()

    @property
    def up(self) -> PostgresLink | None:
        """Return the link, or None."""
        link = self._link
        return link if link is not None and link.broken is None else None

    async def link(self, seconds: float) -> PostgresLink:
        """Return the link; wait up to `seconds` for one, then raise `StoreUnavailable`."""
        if (link := self.up) is not None:
            return link
        with trio.move_on_after(seconds):
            while not self._closed:
                await self._change.wait()
                if (link := self.up) is not None:
                    return link
        raise StoreUnavailable(unreachable(self._where) + self._problem)

    def replace(self, since: float) -> None:
        """Break the link, unless something was received on it since that moment (of the loop's clock). It is opened again."""
        link = self._link
        if link is not None and link.heard_at < since:
            link.fail(LinkBroken("another connection to this server was not answered"))

    def close(self) -> None:
        """End `keep`. Nothing else ends it once it has started, so that the last writes still have a connection."""
        self._scope.cancel()

    async def keep(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:  # noqa: ASYNC128
        """Keep the link open until `close`. Started once the first link is there; an error of the first one is raised."""
        with self._scope:
            await self._keep(task_status)

    async def _keep(self, task_status: trio.TaskStatus[None]) -> None:
        started = False
        pause = FIRST_PAUSE
        try:
            while True:
                try:
                    async with open_link(self._url, self._where) as link:
                        await self._set_up(link)
                        self._put(link)
                        if not started:
                            started = self._scope.shield = True
                            task_status.started()
                        elif pause > FIRST_PAUSE:
                            logger.info("reconnected to the database %s (%s)", self._where, self.name)
                        pause = FIRST_PAUSE
                        while not link.gone.is_set():
                            with trio.move_on_after(min(LOOK_SECONDS, self.answer_seconds)):
                                await link.gone.wait()
                            if link.silent_seconds > self.answer_seconds:
                                link.fail(LinkBroken(f"the server has not answered for {link.silent_seconds:.0f} s"))
                        self._problem = str(link.broken)
                except (StoreError, LinkBroken, SqlError) as error:
                    self._problem = str(error).removeprefix(unreachable(self._where))
                    if not started:
                        raise translate_sql(error, self._where) from None
                if pause == FIRST_PAUSE:
                    logger.warning(
                        "the connection to the database %s broke (%s): %s; reconnecting",
                        self._where,
                        self.name,
                        self._problem,
                    )
                self._put(None)
                await trio.sleep(pause * random.uniform(0.5, 1.0))
                pause = min(2 * pause, LONGEST_PAUSE)
        finally:
            self._closed = True
            self._put(None)

    def _put(self, link: PostgresLink | None) -> None:
        self._link = link
        change, self._change = self._change, trio.Event()
        change.set()

    async def _set_up(self, link: PostgresLink) -> None:
        settings = dict(self._settings)
        if link.version < 170_000:
            settings.pop("transaction_timeout", None)
        calls = ", ".join(f"set_config(${2 * place + 1}, ${2 * place + 2}, false)" for place in range(len(settings)))
        given = [word.encode() for pair in settings.items() for word in pair]
        await link.run(f"SELECT {calls}", given)
