"""Every parameter is honoured, a hint, or refused by name: in the code, in the docs, and for all parameters of the official clients."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest
from openai.types.chat.completion_create_params import CompletionCreateParamsBase
from openai.types.responses.response_create_params import ResponseCreateParamsBase

from hermes_trio.http.api.chat import ChatRequest
from hermes_trio.http.api.responses import ResponseRequest
from hermes_trio.http.parameters import (
    CHAT_PARAMETERS,
    MESSAGES_PARAMETERS,
    RESPONSES_PARAMETERS,
    ParameterClass,
    RequestParameter,
)

from .gateway import Gateway, open_gateway

PAGE = Path(__file__).parents[2] / "docs" / "parameters.md"
TABLES: dict[str, tuple[Mapping[str, RequestParameter], type[msgspec.Struct], set[str]]] = {
    "/v1/chat/completions": (CHAT_PARAMETERS, ChatRequest, {*CompletionCreateParamsBase.__annotations__, "stream"}),
    "/v1/responses": (RESPONSES_PARAMETERS, ResponseRequest, {*ResponseCreateParamsBase.__annotations__, "stream"}),
}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}]},
    "/v1/responses": {"input": "x"},
}
OURS = {"conversation_history"}


@pytest.mark.parametrize("path", TABLES)
def test_the_table_is_closed(path: str) -> None:
    """The table has exactly the fields of the request, and every parameter that the pinned client can send."""
    table, body, official = TABLES[path]
    assert set(table) == set(body.__struct_fields__)
    assert official <= set(table)
    assert set(table) - official <= OURS


@pytest.mark.parametrize(
    ("path", "table"),
    [
        ("/v1/chat/completions", CHAT_PARAMETERS),
        ("/v1/responses", RESPONSES_PARAMETERS),
        ("/v1/messages", MESSAGES_PARAMETERS),
    ],
)
def test_the_page_has_the_table(path: str, table: Mapping[str, RequestParameter]) -> None:
    """`docs/parameters.md` says of every parameter what the code says, and of no other."""
    section = PAGE.read_text(encoding="utf-8").split(f"## `POST {path}`\n")[1].split("\n## ")[0]
    rows = re.findall(r"^\| `(\w+)` \| (\w+) \| (.*) \|$", section, re.MULTILINE)
    assert [(name, kind, note) for name, kind, note in rows] == [
        (name, parameter.kind.value, parameter.note) for name, parameter in table.items()
    ]


async def ask(gateway: Gateway, path: str, **more: Any) -> tuple[int, Any]:
    """Status and error of a request with one parameter more."""
    answer = await gateway.http.post(path, json={**BODIES[path], **more})
    return answer.status_code, answer.json().get("error")


async def test_every_refused_parameter_is_named() -> None:
    """A refused parameter is a 400 that names it, its neutral values are not; hints are accepted; unknown ones are named, too."""
    async with open_gateway() as gateway:
        for path, (table, _, _) in TABLES.items():
            for name, parameter in table.items():
                if parameter.kind is ParameterClass.REFUSED:
                    status, error = await ask(gateway, path, **{name: {"any": "thing"}})
                    assert (status, error["param"], error["code"]) == (400, name, "unsupported_parameter"), name
                    for value in parameter.neutral:
                        assert (await ask(gateway, path, **{name: value}))[0] == 200, (name, value)
                elif parameter.kind is ParameterClass.HINT:
                    assert (await ask(gateway, path, **{name: "x"}))[0] == 200, name
            status, error = await ask(gateway, path, n_choices=2)
            assert (status, error["param"], error["code"]) == (400, "n_choices", "unknown_parameter")
        status, error = await ask(gateway, "/v1/chat/completions", n=2)
        assert (status, error["param"]) == (400, "n")


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": 3}, "temperature"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"stop": [1]}, "stop"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema"),
        ({"tools": [{"type": "custom"}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
        ({"tool_choice": "perhaps"}, "tool_choice"),
    ],
)
async def test_values_that_cannot_be_used(more: dict[str, Any], param: str) -> None:
    """A value that cannot be forwarded is a 400 that points at it."""
    async with open_gateway() as gateway:
        status, error = await ask(gateway, "/v1/chat/completions", **more)
        assert (status, error["param"]) == (400, param)


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("/v1/chat/completions", "max_tokens"),
        ("/v1/chat/completions", "max_completion_tokens"),
        ("/v1/chat/completions", "seed"),
        ("/v1/responses", "max_output_tokens"),
    ],
)
async def test_a_count_is_a_whole_number(path: str, name: str) -> None:
    """A fraction is refused by name, not cut off in silence; 5.0 is 5."""
    async with open_gateway() as gateway:
        refused = await gateway.http.post(path, json={**BODIES[path], name: 1.5})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, name)
        assert (await gateway.http.post(path, json={**BODIES[path], name: 5.0})).status_code == 200


@pytest.mark.parametrize("name", ["", "a b", "a\n", "a" * 129, "w/x", "ü", 5, None])
async def test_the_name_of_a_client_tool_is_one_that_models_take(name: object) -> None:
    """Any other is refused where it stands, before a model refuses the whole request."""
    async with open_gateway() as gateway:
        path = "/v1/chat/completions"
        tool = {"type": "function", "function": {"name": name}}
        refused = await gateway.http.post(path, json={**BODIES[path], "tools": [tool]})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "tools[0].function.name")
        assert "letters" in refused.json()["error"]["message"]
