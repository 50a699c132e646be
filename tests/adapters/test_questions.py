"""Questions about commands in chats: whatever the command, each platform shows all of it, in messages that fit."""

from __future__ import annotations

import html
import random
import re

import pytest

from hermes_trio.adapters.discord import adapter as discord
from hermes_trio.adapters.slack.text import SECTION_CHARACTERS, button_blocks, posted
from hermes_trio.adapters.telegram import adapter as telegram
from hermes_trio.agent.approvals import visible
from hermes_trio.messaging.chunking import DISCORD, SLACK, TELEGRAM, split_text, utf16_length
from hermes_trio.messaging.contract import Button
from hermes_trio.messaging.feed import COMMAND_LONGEST, COMMAND_SHOWN, fenced_command, question_text
from hermes_trio.store.records import ApprovalChoice

PIECES = (
    "`", "``", "```", "\n", "\n```", "~~~", "\n~~~\n", "*", "_", "<", "&", ">", "|", "||", "[a](b)", "\\", "\n# x", "(1/3)", " ", "rm -rf x", "é", "😀",
    "<@123>", "@everyone", "http://x/", "$(a)", "\t", "    ", "- ", "\n> q", "\u202e", "\u200b",
)  # fmt: skip
BUTTONS = [Button("Once", "appr_1", ApprovalChoice.ONCE)]
MOST_BLOCKS = 50


def essence(text: str) -> str:
    """What is left of a text without blank space, and without what was put between backticks."""
    return re.sub(r"\s+", "", text.replace("\u200b", ""))


def shown_by_telegram(part: str) -> list[str]:
    forms = [*telegram._forms(part, plain=False), *telegram._forms(part, plain=True)]
    return [re.sub(r"\\(.)", r"\1", text, flags=re.DOTALL) if mode else text for text, mode in forms]


def shown_by_discord(part: str) -> list[str]:
    return [discord.to_discord(part), discord.to_plain(part)]


def shown_by_slack(part: str) -> list[str]:
    blocks = button_blocks(part, BUTTONS)
    sections = [block["text"]["text"] for block in blocks if block["type"] == "section"]
    assert max(map(len, sections)) <= SECTION_CHARACTERS
    assert len(blocks) <= MOST_BLOCKS
    assert blocks[-1]["type"] == "actions"
    return [html.unescape(posted(part, plain=False)), html.unescape(posted(part, plain=True))]


@pytest.mark.parametrize("seed", range(40))
def test_every_platform_shows_the_whole_command(seed: int) -> None:
    """Fences, mark-up, mentions and invisible characters of a command hide nothing of it and end no code block, however it is cut."""
    chance = random.Random(seed)
    made = "".join(chance.choice(PIECES) for _ in range(chance.choice((5, 50, 300, 900, 2500))))
    command = visible(made)[:COMMAND_LONGEST]
    event = {"command": command, "description": "d" * chance.choice((10, 400)), "timeout": 60}
    long = len(command) > COMMAND_SHOWN
    text = fenced_command(event) if long else question_text(event, "/")
    for limit, length, show in (
        (TELEGRAM, utf16_length, shown_by_telegram),
        (DISCORD, len, shown_by_discord),
        (SLACK, len, shown_by_slack),
    ):
        parts = split_text(text, limit)
        forms = [show(part) for part in parts]
        assert max(length(form) for shown in forms for form in shown) <= limit.size
        for number in range(min(map(len, forms))):
            shown = "".join(essence(one[number]) for one in forms)
            assert len(shown) >= len(essence(command))
            assert len(parts) > 1 or essence(command) in shown
