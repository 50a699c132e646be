"""Every parameter of the model APIs, in one of three classes: honoured, a hint that changes nothing, or refused.

The tables are closed: a parameter that is not in them is a 400 that names it, and so is a refused one whose value would change the answer.
`docs/parameters.md` shows the same tables. Below them are the parsers of tools, of the choice among them and of the response format.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Any, Final, TypeVar, cast

import msgspec

from hermes_trio.http.server import InvalidJSON, decode_json

from .errors import ApiError
from .requests import Request

T = TypeVar("T", bound=msgspec.Struct)

MOST_STOPS: Final = 16


class ParameterClass(Enum):
    """How a parameter is treated."""

    HONOURED = "honoured"
    HINT = "hint"
    REFUSED = "refused"


class RequestParameter(msgspec.Struct, frozen=True):
    """One parameter. `note` says what it does here; `neutral` are the values of a refused one that change nothing."""

    kind: ParameterClass
    note: str = ""
    neutral: tuple[Any, ...] = (None,)


def _honoured(note: str) -> RequestParameter:
    return RequestParameter(ParameterClass.HONOURED, note)


def _hint(note: str = "accepted, changes nothing") -> RequestParameter:
    return RequestParameter(ParameterClass.HINT, note)


def _refused(note: str, *neutral: Any) -> RequestParameter:
    return RequestParameter(ParameterClass.REFUSED, note, (None, *neutral))


_SAMPLING: Final[Mapping[str, RequestParameter]] = {
    "temperature": _honoured("forwarded to every model call of the turn"),
    "top_p": _honoured("forwarded to every model call of the turn"),
}
_OPENAI_HINTS: Final[Mapping[str, RequestParameter]] = {
    "user": _hint(),
    "service_tier": _hint(),
    "prompt_cache_key": _hint(),
    "prompt_cache_options": _hint(),
    "prompt_cache_retention": _hint(),
    "safety_identifier": _hint(),
}

CHAT_PARAMETERS: Final[Mapping[str, RequestParameter]] = {
    "messages": _honoured("the conversation; messages of role `tool` bring the results of client tools"),
    "model": _honoured("a name of `/v1/models`; any other name gets the default model"),
    "stream": _honoured("chunks instead of one answer"),
    "stream_options": _honoured("`include_usage`, `include_tool_events`"),
    "tools": _honoured(
        "client tools of type `function`, beside the server's; `[]` with `tool_choice: none` switches those off"
    ),
    "tool_choice": _honoured("`auto`, `none`, `required` or a function; holds for the first model call of the turn"),
    "parallel_tool_calls": _honoured("forwarded to the model"),
    **_SAMPLING,
    "max_tokens": _honoured("the limit of each model call"),
    "max_completion_tokens": _honoured("the same; goes before `max_tokens`"),
    "stop": _honoured("forwarded; a string or up to 16"),
    "seed": _honoured("forwarded where the model takes it (not Anthropic's)"),
    "reasoning_effort": _honoured("forwarded; Anthropic's models get it as `output_config.effort`"),
    "verbosity": _honoured("forwarded where the model takes it (not Anthropic's)"),
    "response_format": _honoured("`text`, `json_object` or `json_schema`; Anthropic's models take a schema only"),
    **_OPENAI_HINTS,
    "metadata": _hint(),
    "store": _hint("accepted, changes nothing: every turn is kept in its session"),
    "n": _refused("only one choice: a turn with tools cannot be multiplied", 1),
    "logprobs": _refused("a turn has no log probabilities", False),
    "top_logprobs": _refused("a turn has no log probabilities", 0),
    "frequency_penalty": _refused("not forwarded", 0),
    "presence_penalty": _refused("not forwarded", 0),
    "logit_bias": _refused("not forwarded", {}),
    "modalities": _refused("text only", ["text"]),
    "audio": _refused("text only"),
    "prediction": _refused("not forwarded"),
    "web_search_options": _refused("there is no such tool"),
    "moderation": _refused("there is no moderation"),
    "functions": _refused("use `tools`", []),
    "function_call": _refused("use `tool_choice`", "auto", "none"),
}
"""`POST /v1/chat/completions`."""

RESPONSES_PARAMETERS: Final[Mapping[str, RequestParameter]] = {
    "input": _honoured("a string, or a list of messages and items, `function_call_output` among them"),
    "instructions": _honoured("the system prompt; inherited along `previous_response_id`"),
    "model": _honoured("a name of `/v1/models`; any other name gets the default model"),
    "previous_response_id": _honoured("continue that response"),
    "conversation": _honoured("a name, or an object with `id`"),
    "conversation_history": _honoured("messages to use instead of the stored ones; not OpenAI's"),
    "store": _honoured("`false` keeps nothing"),
    "stream": _honoured("events instead of one answer"),
    "background": _honoured("the response is made by a run; read it or stream it later"),
    "truncation": _honoured("`auto` keeps the last 100 messages of the history"),
    "metadata": _honoured("kept with the response, and shown"),
    "tools": _honoured(
        "client tools of type `function`, beside the server's; `[]` with `tool_choice: none` switches those off"
    ),
    "tool_choice": _honoured("`auto`, `none`, `required` or a function; holds for the first model call of the turn"),
    "parallel_tool_calls": _honoured("forwarded to the model"),
    **_SAMPLING,
    "max_output_tokens": _honoured("the limit of each model call"),
    "reasoning": _honoured("`effort` is forwarded; `summary` changes nothing: what the model shows is passed on"),
    "text": _honoured("`format` with `text`, `json_object` or `json_schema`; `verbosity` is forwarded"),
    **_OPENAI_HINTS,
    "include": _hint(),
    "stream_options": _hint(),
    "max_tool_calls": _refused("not enforced"),
    "top_logprobs": _refused("a turn has no log probabilities", 0),
    "prompt": _refused("there are no stored prompts"),
    "context_management": _refused("the server summarises long conversations by itself", []),
    "moderation": _refused("there is no moderation"),
    "access_programs": _refused("there are none", []),
    "image": _refused("text only"),
}
"""`POST /v1/responses`."""

MESSAGES_PARAMETERS: Final[Mapping[str, RequestParameter]] = {
    "messages": _honoured("the conversation; `tool_result` blocks bring the results of client tools"),
    "model": _honoured("a name of `/v1/models`; any other name gets the default model"),
    "max_tokens": _honoured("required; the limit of each model call"),
    "system": _honoured("a string or text blocks: the system prompt"),
    "stream": _honoured("events instead of one answer"),
    "tools": _honoured("client tools with an `input_schema`, beside the server's"),
    "tool_choice": _honoured(
        "`auto`, `any`, `tool` or `none`, and `disable_parallel_tool_use`; `none` without `tools` switches the server's off"
    ),
    "temperature": _honoured("forwarded to every model call of the turn"),
    "top_p": _honoured("forwarded to every model call of the turn"),
    "stop_sequences": _honoured("forwarded"),
    "output_config": _honoured("`effort` and `format` with a JSON schema are forwarded"),
    "metadata": _hint(),
    "cache_control": _hint(),
    "service_tier": _hint(),
    "inference_geo": _hint(),
    "speed": _hint(),
    "diagnostics": _hint(),
    "user_profile_id": _hint(),
    "workspace_id": _hint(),
    "thinking": _hint("accepted, changes nothing: what the model shows of its thinking is passed on"),
    "top_k": _refused("not forwarded"),
    "container": _refused("there are no containers"),
    "context_management": _refused("the server summarises long conversations by itself"),
    "mcp_servers": _refused("configure them in `[mcp]`", []),
}
"""`POST /v1/messages`."""


def check_parameters(table: Mapping[str, RequestParameter], body: msgspec.Struct) -> None:
    """Raise 400 for a refused parameter whose value would change the answer."""
    for name, parameter in table.items():
        if parameter.kind is ParameterClass.REFUSED and (value := getattr(body, name)) not in parameter.neutral:
            if isinstance(value, bool) and any(value is neutral for neutral in parameter.neutral):
                continue
            raise ApiError(
                400,
                f"{name} is not supported here: {parameter.note}. Leave it out.",
                code="unsupported_parameter",
                param=name,
            )


async def read_plain_or_full(
    request: Request,
    plain: msgspec.json.Decoder[T],
    full: msgspec.json.Decoder[T],
    table: Mapping[str, RequestParameter],
) -> T:
    """Decode the body: with the decoder of a plain request, which most are, else with the full one, whose refused parameters are checked."""
    body = await request.body()
    try:
        return decode_json(body, plain, max_depth=request.core.limits.json_depth)
    except (msgspec.ValidationError, InvalidJSON):
        pass
    found = await request.json(full)
    check_parameters(table, found)
    return found


# -- values ----------------------------------------------------------------------------------------------------------------------


def number_option(value: Any, param: str, least: float, most: float) -> float | None:
    """Return a number in its range, or None. Raises 400."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
        raise ApiError(400, f"{param} must be a number from {least:g} to {most:g}.", code="invalid_value", param=param)
    return value


def whole_option(value: Any, param: str, least: int, most: int) -> int | None:
    """Return a whole number in its range, or None. Raises 400."""
    number = number_option(value, param, least, most)
    if number is None or isinstance(number, int) or number.is_integer():
        return None if number is None else int(number)
    raise ApiError(400, f"{param} must be a whole number.", code="invalid_value", param=param)


def word_option(value: Any, param: str) -> str:
    """Return a short text, or an empty one. Raises 400."""
    if value is None:
        return ""
    if not isinstance(value, str) or len(value) > 64:
        raise ApiError(400, f"{param} must be a word.", code="invalid_value", param=param)
    return value


def stop_option(value: Any, param: str) -> tuple[str, ...]:
    """Return the texts at which the answer stops. Raises 400."""
    if value is None:
        return ()
    found = [value] if isinstance(value, str) else value
    if not isinstance(found, list):
        raise ApiError(400, f"{param} must be a string or a list of strings.", code="invalid_value", param=param)
    texts = cast("list[Any]", found)
    if len(texts) > MOST_STOPS or any(not isinstance(text, str) or not text for text in texts):
        raise ApiError(
            400, f"{param} must hold at most {MOST_STOPS} texts that are not empty.", code="invalid_value", param=param
        )
    return tuple(cast("list[str]", texts))


def format_option(value: Any, param: str, *, flat: bool) -> Mapping[str, Any] | None:
    """Return the response format, in the form of the chat completions API. `flat` is the spelling of the responses API."""
    if value is None:
        return None
    table = cast("dict[str, Any]", value) if isinstance(value, dict) else {}
    kind = table.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return {"type": "json_object"}
    if kind != "json_schema":
        raise ApiError(
            400,
            f"{param}.type must be text, json_object or json_schema.",
            code="invalid_value",
            param=f"{param}.type",
        )
    inner: Any = {key: table[key] for key in table if key != "type"} if flat else table.get("json_schema")
    where = param if flat else f"{param}.json_schema"
    if not isinstance(inner, dict) or not isinstance(cast("dict[str, Any]", inner).get("schema"), dict):
        raise ApiError(400, f"{where}.schema must be a JSON schema.", code="invalid_value", param=f"{where}.schema")
    described = cast("dict[str, Any]", inner)
    if not isinstance(described.get("name"), str):
        described = {**described, "name": "answer"}
    return {"type": "json_schema", "json_schema": described}
