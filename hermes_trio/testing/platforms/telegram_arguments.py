"""How the Bot API reads the arguments of a call, and how it refuses them.

Arguments arrive in the query, as JSON or as a form; objects inside a form are JSON text. Every refusal is a `TelegramRefusal`
with the status and the description that the Bot API answers with.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, final

import msgspec

from .markdown_v2 import MarkupError, parse_markdown_v2, utf16_length
from .server import FakeReply, FakeRequest

TEXT_LIMIT = 4096
CALLBACK_DATA_BYTES = 64


@final
class TelegramRefusal(Exception):
    def __init__(self, status: int, description: str, **parameters: Any) -> None:
        super().__init__(description)
        self.status = status
        self.description = description
        self.parameters = parameters

    def reply(self) -> FakeReply:
        body: dict[str, Any] = {"ok": False, "error_code": self.status, "description": self.description}
        if self.parameters:
            body["parameters"] = self.parameters
        return FakeReply.of(body, status=self.status)


def bad_request(description: str) -> TelegramRefusal:
    return TelegramRefusal(400, f"Bad Request: {description}")


def arguments_of(request: FakeRequest) -> dict[str, Any]:
    params: dict[str, Any] = dict(request.query)
    if "json" in request.headers.get("content-type", ""):
        body = request.json()
        if isinstance(body, dict):
            params |= msgspec.convert(body, dict[str, Any])
    elif request.body:
        params |= request.form()
    return params


def integer(params: Mapping[str, Any], name: str) -> int | None:
    value = params.get(name)
    try:
        return None if value is None else int(value)
    except (TypeError, ValueError):
        return None


def boolean(params: Mapping[str, Any], name: str) -> bool:
    return str(params.get(name, "")).lower() in {"true", "1"}


def string(params: Mapping[str, Any], name: str) -> str | None:
    value = params.get(name)
    return None if value is None else str(value)


def structure(params: Mapping[str, Any], name: str) -> Any:
    """Return an object argument: JSON in a JSON body, JSON text in a form."""
    value = params.get(name)
    if not isinstance(value, str):
        return value
    try:
        return msgspec.json.decode(value)
    except msgspec.DecodeError:
        raise bad_request(f"can't parse {name.replace('_', ' ')} JSON object") from None


def formatted_text(params: Mapping[str, Any]) -> tuple[str, list[dict[str, Any]]]:
    text, entities = str(params.get("text", "")), list[dict[str, Any]]()
    mode = string(params, "parse_mode")
    if mode:
        if mode.lower() != "markdownv2":
            raise bad_request("unsupported parse_mode")
        try:
            text, entities = parse_markdown_v2(text)
        except MarkupError as error:
            raise bad_request(f"can't parse entities: {error}") from None
    elif "entities" in params:
        entities = msgspec.convert(structure(params, "entities"), list[dict[str, Any]])
    if not text.strip():
        raise bad_request("message text is empty")
    if utf16_length(text) > TEXT_LIMIT:
        raise bad_request("message is too long")
    return text, entities


def inline_keyboard(params: Mapping[str, Any]) -> list[list[dict[str, Any]]]:
    markup: Any = structure(params, "reply_markup")
    if not markup:
        return []
    if not isinstance(markup, dict) or "inline_keyboard" not in markup:
        raise bad_request("can't parse reply keyboard markup JSON object")
    rows = msgspec.convert(markup, dict[str, Any])["inline_keyboard"]
    keyboard = msgspec.convert(rows, list[list[dict[str, Any]]])
    for row in keyboard:
        for button in row:
            if not button.get("text"):
                raise bad_request('can\'t parse inline keyboard button: Field "text" must be of type String')
            data = button.get("callback_data")
            if data is None and "url" not in button:
                raise bad_request(
                    "can't parse inline keyboard button: Text buttons are unallowed in the inline keyboard"
                )
            if data is not None and not 1 <= len(str(data).encode()) <= CALLBACK_DATA_BYTES:
                raise bad_request("BUTTON_DATA_INVALID")
    return keyboard


def command_entities(text: str, field: str) -> dict[str, Any]:
    match = re.match(r"/[A-Za-z0-9_]+(@\w+)?", text)
    return {} if match is None else {field: [{"type": "bot_command", "offset": 0, "length": match.end()}]}


def without_reply(message: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in message.items() if key != "reply_to_message"}
