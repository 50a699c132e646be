"""What Slack checks in a message: text, Block Kit blocks and their limits. Errors are Slack's own words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, final

import msgspec

POST_TEXT_LIMIT = 40_000
UPDATE_TEXT_LIMIT = 4_000
MAX_BLOCKS = 50
SECTION_TEXT_LIMIT = 3_000
BLOCK_TYPES = frozenset(
    {"actions", "context", "divider", "file", "header", "image", "input", "markdown", "rich_text", "section", "video"}
)


@final
class SlackRefusal(Exception):
    """An answer `ok: false` with this error; `messages` are its details."""

    def __init__(self, error: str, *messages: str, **more: Any) -> None:
        super().__init__(error)
        self.error = error
        self.body: dict[str, Any] = {"ok": False, "error": error, **more}
        if messages:
            self.body["response_metadata"] = {"messages": [f"[ERROR] {message}" for message in messages]}


def _invalid(problem: str, pointer: str) -> SlackRefusal:
    return SlackRefusal("invalid_blocks", f"{problem} [json-pointer:{pointer}]")


def structure(params: Mapping[str, Any], name: str) -> Any:
    """Return an object argument: JSON in a JSON body, JSON text in a form."""
    value = params.get(name)
    if not isinstance(value, str):
        return value
    try:
        return msgspec.json.decode(value)
    except msgspec.DecodeError:
        raise SlackRefusal(f"invalid_{name}_format") from None


def check_content(params: Mapping[str, Any], *, limit: int | None) -> tuple[str, list[dict[str, Any]]]:
    """Check the text and blocks of a message. `limit` is where a text is refused; posting truncates instead."""
    text = str(params.get("text") or "")
    raw: Any = structure(params, "blocks")
    if raw is not None and not isinstance(raw, list):
        raise SlackRefusal("invalid_blocks_format")
    blocks = msgspec.convert(raw or [], list[dict[str, Any]])
    if not text and not blocks and not params.get("attachments"):
        raise SlackRefusal("no_text")
    if limit is not None and len(text) > limit:
        raise SlackRefusal("msg_too_long")
    if len(blocks) > MAX_BLOCKS:
        raise _invalid(f"no more than {MAX_BLOCKS} items allowed", "/blocks")
    for index, block in enumerate(blocks):
        _check_block(block, f"/blocks/{index}")
    return text, blocks


def _check_block(block: Mapping[str, Any], at: str) -> None:
    kind = block.get("type")
    if kind not in BLOCK_TYPES:
        raise _invalid(f"unsupported type: {kind}", f"{at}/type")
    if kind == "section":
        if "text" not in block and "fields" not in block:
            raise _invalid("missing required field: text", at)
        if "text" in block:
            _check_text(block["text"], f"{at}/text", SECTION_TEXT_LIMIT)
    elif kind == "header":
        _check_text(block.get("text"), f"{at}/text", 150)
    elif kind == "actions":
        elements = msgspec.convert(block.get("elements") or [], list[dict[str, Any]])
        if not 1 <= len(elements) <= 25:
            raise _invalid("must have between 1 and 25 items", f"{at}/elements")
        seen: set[str] = set()
        for index, element in enumerate(elements):
            _check_element(element, f"{at}/elements/{index}", seen)


def _check_element(element: Mapping[str, Any], at: str, seen: set[str]) -> None:
    if element.get("type") != "button":
        return
    _check_text(element.get("text"), f"{at}/text", 75)
    action_id = str(element.get("action_id") or "")
    if len(action_id) > 255:
        raise _invalid("must be less than 256 characters", f"{at}/action_id")
    if action_id and action_id in seen:
        raise _invalid(f"`action_id` {action_id} already exists", f"{at}/action_id")
    seen.add(action_id)
    if len(str(element.get("value") or "")) > 2000:
        raise _invalid("must be less than 2001 characters", f"{at}/value")


def _check_text(text: Any, at: str, limit: int) -> None:
    fields = msgspec.convert(text, dict[str, Any]) if isinstance(text, dict) else {}
    if "text" not in fields or fields.get("type") not in ("plain_text", "mrkdwn"):
        raise _invalid("missing required field: text", at)
    content = str(fields["text"])
    if not content:
        raise _invalid("must be more than 0 characters", f"{at}/text")
    if len(content) > limit:
        raise _invalid(f"must be less than {limit + 1} characters", f"{at}/text")
