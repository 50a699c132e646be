"""Texts in Slack's form: its markup, its three length limits, and the blocks with buttons."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from hermes_trio.messaging.chunking import SLACK, Limit, split_text
from hermes_trio.messaging.contract import Button
from hermes_trio.messaging.errors import PlatformError, PlatformErrorKind
from hermes_trio.messaging.markup import to_mrkdwn, to_plain
from hermes_trio.store.records import ApprovalChoice

POST_CHARACTERS: Final = 40_000
"""Slack cuts longer texts without an error."""
UPDATE_CHARACTERS: Final = 4_000
"""Slack refuses to edit a message into a longer one."""
SECTION_CHARACTERS: Final = 3_000
SECTION_ROOM: Final = 2_000
"""The length of a section before markup is added."""

STYLES: Final[Mapping[ApprovalChoice, str]] = {ApprovalChoice.ONCE: "primary", ApprovalChoice.DENY: "danger"}


def escape(text: str) -> str:
    """Escape literal text."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def _escaped_length(text: str) -> int:
    return len(text) + 3 * (text.count("<") + text.count(">")) + 4 * text.count("&")


SLACK_LIMIT: Final = Limit(SLACK.size, _escaped_length)
"""How much fits into one message, counted as it is sent."""


def _forms(text: str, *, plain: bool = False) -> Iterator[str]:
    if not plain:
        yield to_mrkdwn(text)
    yield escape(to_plain(text))
    yield escape(text)


def posted(text: str, *, plain: bool = False) -> str:
    """Return a text for posting: with markup, or plainer if Slack would cut it."""
    for form in _forms(text, plain=plain):
        if form.strip() and len(form) <= POST_CHARACTERS:
            return form
    message = (
        f"the text has {_escaped_length(text)} characters as Slack counts them, at most {POST_CHARACTERS} are sent"
    )
    raise PlatformError(PlatformErrorKind.TOO_LONG, message)


def shortened(text: str) -> str:
    """Return the beginning of a text, for a message that is edited while the text is being written."""
    room = UPDATE_CHARACTERS
    form = to_mrkdwn(text)
    while len(form) > UPDATE_CHARACTERS:
        room = room * 4 // 5
        form = to_mrkdwn(f"{text[:room]} …")
    return form


def button_blocks(text: str, buttons: Sequence[Button]) -> list[dict[str, Any]]:
    """Return the text in sections, and the buttons below it."""
    sections: list[dict[str, Any]] = []
    for piece in split_text(text, Limit(SECTION_ROOM, _escaped_length)):
        form = next((one for one in _forms(piece) if one.strip() and len(one) <= SECTION_CHARACTERS), escape(piece))
        sections.append({"type": "section", "text": {"type": "mrkdwn", "text": form}})
    return [*sections, {"type": "actions", "elements": [_element(button) for button in buttons]}]


def _element(button: Button) -> dict[str, Any]:
    element: dict[str, Any] = {
        "type": "button",
        "text": {"type": "plain_text", "text": button.label},
        "action_id": button.value,
        "value": button.value,
    }
    if button.choice in STYLES:
        element["style"] = STYLES[button.choice]
    return element
