"""A tool that rolls dice. Switch it on with `tools = ["dice"]` below `[plugins]`."""

from __future__ import annotations

import random
from typing import Annotated

from msgspec import Meta

from hermes_trio import Turn, tool


@tool()
async def roll(
    turn: Turn, count: Annotated[int, Meta(ge=1, le=100)] = 1, sides: Annotated[int, Meta(ge=2, le=1000)] = 6
) -> dict[str, object]:
    """Roll dice and add up what they show."""
    shown = [random.randint(1, sides) for _ in range(count)]
    return {"dice": shown, "sum": sum(shown)}
