"""A turn that asks, and a person who is told: for the tests of approvals."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any, cast

import msgspec
import trio

from hermes_trio import Runtime, SessionContext, Turn, TurnHooks
from hermes_trio.agent.approvals import ApprovalResult, Approvals, ApprovalStore, Question

QUESTION = Question(shown="rm -rf build", description="deletes recursively", categories=("recursive delete",))


class Asker:
    """Runs questions in turns of their own. `events` is what a person would see; `answers` what came of them."""

    def __init__(self, runtime: Runtime, approvals: Approvals, nursery: trio.Nursery) -> None:
        self.runtime = runtime
        self.approvals = approvals
        self.events: list[Mapping[str, Any]] = []
        self.answers: list[ApprovalResult] = []
        self.turns: list[Turn] = []
        self._nursery = nursery
        self._count = 0

    def ask(
        self,
        question: Question = QUESTION,
        *,
        key: str = "chat",
        session: str = "",
        asks: bool = True,
        tenant: str = "",
    ) -> None:
        """Ask in the background, in a session of its own."""
        self._count += 1
        self._nursery.start_soon(self._turn, question, key, session or f"session {self._count}", asks, tenant)

    async def _turn(self, question: Question, key: str, session: str, asks: bool, tenant: str) -> None:
        async def agent(turn: Turn) -> str:
            turn.spec = msgspec.structs.replace(turn.spec, tenant=tenant)
            self.turns.append(turn)
            self.answers.append(await self.approvals.ask(turn, question))
            return "ok"

        context = SessionContext(session_id=session, session_key=key)
        await self.runtime.run_turn(
            "go", context, agent=agent, hooks=TurnHooks(asks=self.events.append if asks else None)
        )

    @property
    def asked(self) -> list[str]:
        """The ids of the questions that were shown."""
        return [event["approval_id"] for event in self.events if event["event"] == "approval.request"]

    @property
    def told(self) -> list[str]:
        """The names of the events."""
        return [event["event"] for event in self.events]


@asynccontextmanager
async def asking(runtime: Runtime, seconds: float = 60.0) -> AsyncIterator[Asker]:
    """An `Asker` on this runtime's store."""
    async with trio.open_nursery() as nursery:
        yield Asker(runtime, Approvals(cast("ApprovalStore", runtime.store), seconds=seconds), nursery)
