"""Renders the OpenAPI document as a page: for every route its fields, an example, a `curl` command, and a form to try it.

The page loads nothing from another host. Its one script is the server's own (`/docs.js`), and its policy allows that script, one style, and requests
to this origin. A key that a person types stays in the page.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Mapping
from hashlib import sha256
from html import escape
from typing import Any, Final, cast

import msgspec

from hermes_trio.http.parameters import (
    CHAT_PARAMETERS,
    MESSAGES_PARAMETERS,
    RESPONSES_PARAMETERS,
    RequestParameter,
)
from hermes_trio.http.requests import encode_json

_CHAT: Final[Mapping[str, Any]] = {"messages": [{"role": "user", "content": "Hello"}]}

EXAMPLES: Final[Mapping[str, Mapping[str, Any]]] = {
    "chat_completions": _CHAT,
    "responses": {"input": "My name is Ada."},
    "messages": {"max_tokens": 1000, **_CHAT},
    "count_tokens": _CHAT,
    "runs_start": {"input": "!run echo hello from a run"},
    "run_approval": {"choice": "once"},
    "approval_answer": {"choice": "once"},
    "session_create": {"title": "A trip"},
    "session_patch": {"title": "A longer trip"},
    "session_fork": {"title": "Another way"},
    "session_chat": {"message": "Hello"},
    "session_chat_stream": {"message": "Hello"},
    "job_create": {"name": "morning", "schedule": "0 8 * * *", "prompt": "What is new?"},
    "job_update": {"schedule": "30 8 * * *"},
    "drain_start": {"timeout": 30},
    "key_create": {"name": "ci", "scopes": ["runs"], "days": 30},
}
"""An example body for each route that takes one, by the route's name; other routes show their required fields."""

_NOTES: Final[Mapping[str, Mapping[str, RequestParameter]]] = {
    "chat_completions": CHAT_PARAMETERS,
    "responses": RESPONSES_PARAMETERS,
    "messages": MESSAGES_PARAMETERS,
}

_STYLE: Final = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;color:#222;background:#fff}"
    "code,pre,textarea{font:13px/1.4 ui-monospace,monospace}pre{background:#f5f5f5;padding:.6rem;overflow:auto;border-radius:4px}"
    "h2{margin-top:2.5rem;border-bottom:1px solid #ddd}details{margin:.4rem 0}summary{cursor:pointer}"
    "table{border-collapse:collapse;width:100%}td,th{text-align:left;vertical-align:top;padding:.2rem .8rem .2rem 0;border-top:1px solid #eee}"
    "textarea{width:100%;box-sizing:border-box}label{display:block;margin:.3rem 0}input{font:inherit}"
    ".m{display:inline-block;min-width:4.5rem;font-weight:600}.s{color:#555}form{margin:.6rem 0;padding-left:.8rem;border-left:3px solid #ddd}"
    "@media(prefers-color-scheme:dark){body{color:#ddd;background:#161616}pre{background:#222}.s{color:#aaa}h2,td,th,form{border-color:#333}"
    "a{color:#8ab4f8}input,textarea{color:#ddd;background:#222;border:1px solid #444}}"
)

SCRIPT: Final = """\
"use strict";
for (const form of document.querySelectorAll("form[data-path]")) {
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    const output = form.querySelector("output");
    const key = document.querySelector("#key").value.trim();
    const headers = key ? { Authorization: `Bearer ${key}` } : {};
    const query = new URLSearchParams();
    let path = form.dataset.path;
    for (const field of form.querySelectorAll("input[name]")) {
      const value = field.value.trim();
      if (field.dataset.where === "path") path = path.replace(`{${field.name}}`, encodeURIComponent(value));
      else if (value && field.dataset.where === "query") query.set(field.name, value);
      else if (value) headers[field.name] = value;
    }
    const body = form.querySelector("textarea")?.value;
    if (body) headers["Content-Type"] = "application/json";
    const search = query.size ? `?${query}` : "";
    output.textContent = "…";
    try {
      const answer = await fetch(path + search, { method: form.dataset.method, headers, body, credentials: "omit" });
      output.textContent = `${answer.status} ${answer.statusText}\\n`;
      const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
      for (let piece = await reader.read(); !piece.done; piece = await reader.read()) output.textContent += piece.value;
    } catch (error) {
      output.textContent = String(error);
    }
  });
}
"""


def page_policy() -> bytes:
    """Return the content security policy of the page: its own style and script, and requests to its own origin."""
    digest = b64encode(sha256(_STYLE.encode()).digest())
    return (
        b"default-src 'none'; style-src 'sha256-%b'; script-src 'self'; connect-src 'self'; base-uri 'none';"
        b" form-action 'none'; frame-ancestors 'none'" % digest
    )


def page(described: Mapping[str, Any]) -> bytes:
    """Return the page for an OpenAPI document."""
    parts = [
        "<!doctype html><html lang=en><meta charset=utf-8><title>hermes-trio API</title>",
        "<meta name=viewport content='width=device-width'>",
        f"<style>{_STYLE}</style><h1>hermes-trio API</h1>",
        "<p>Send your key as <code>Authorization: Bearer …</code>. The same as JSON: <a href='/openapi.json'>openapi.json</a>."
        " The examples use two variables: <code>URL</code>, this server's address, and <code>KEY</code>.</p>",
        "<p><label>Key for the forms below (it stays in this page): <input id=key type=password autocomplete=off></label></p>",
    ]
    for tag in described["tags"]:
        parts.append(f"<h2>{escape(tag['name'])}</h2>")
        for path, methods in described["paths"].items():
            parts += [
                _operation(method, path, operation, described)
                for method, operation in methods.items()
                if tag["name"] in operation["tags"]
            ]
    parts.append("<h2>types</h2>")
    for name, schema in described["components"]["schemas"].items():
        parts.append(
            f"<details id='{escape(name)}'><summary><code>{escape(name)}</code></summary>"
            f"<p>{escape(schema.get('description', ''))}</p>{_fields(schema, {})}</details>"
        )
    parts.append("<script src='/docs.js' defer></script>")
    return "\n".join(parts).encode()


def _operation(method: str, path: str, operation: Mapping[str, Any], described: Mapping[str, Any]) -> str:
    name = operation["operationId"]
    parameters: list[dict[str, Any]] = operation.get("parameters", [])
    parts = [
        f"<details id='{escape(name)}'><summary><span class=m>{method.upper()}</span> <code>{escape(path)}</code>"
        f" <span class=s>{escape(operation['summary'])}</span></summary>"
    ]
    if parameters:
        rows = [
            (parameter["name"], f"{parameter['in']}, {_type(parameter['schema'])}", parameter.get("description", ""))
            for parameter in parameters
        ]
        parts.append(_table("parameter", rows))
    body = operation.get("requestBody", {}).get("content", {}).get("application/json")
    example: Any = None
    if body is not None:
        schema = _resolved(body["schema"], described)
        example = body["example"]
        parts.append(f"<p>Body: {_type(body['schema'])}</p>{_fields(schema, _NOTES.get(name, {}))}")
    answers = " · ".join(
        f"{status} {_type(content['schema'])}" if (content := _json_of(answer)) else status
        for status, answer in operation["responses"].items()
    )
    parts.append(f"<p>Answers: {answers}</p><p>Example:</p>")
    parts.append(f"<pre>{escape(curl_line(method, path, example, secured=bool(operation['security'])))}</pre>")
    parts.append(_form(method, path, parameters, example))
    return "".join([*parts, "</details>"])


def curl_line(method: str, path: str, example: Any, *, secured: bool) -> str:
    """Return a `curl` command for this route; text in braces is to be replaced."""
    words = ["curl -s"]
    if method.upper() not in ("GET", "POST") or (method.upper() == "POST" and example is None):
        words.append(f"-X {method.upper()}")
    words.append(f'"$URL{path}"')
    if secured:
        words.append('-H "Authorization: Bearer $KEY"')
    if example is not None:
        words.append(f"-d '{encode_json(example).decode()}'")
    return " ".join(words)


def _json_of(answer: Mapping[str, Any]) -> Mapping[str, Any] | None:
    content: Mapping[str, Any] | None = answer.get("content", {}).get("application/json")
    return content if content and content.get("schema") else None


def _form(method: str, path: str, parameters: list[dict[str, Any]], example: Any) -> str:
    fields = [
        f"<label>{escape(parameter['name'])} <input name='{escape(parameter['name'])}' data-where={parameter['in']}"
        f"{' required' if parameter['required'] else ''}></label>"
        for parameter in parameters
    ]
    if example is not None:
        text = escape(msgspec.json.format(encode_json(example), indent=2).decode())
        fields.append(f"<textarea rows={text.count(chr(10)) + 2}>{text}</textarea>")
    return (
        f"<form data-method={method.upper()} data-path='{escape(path)}'>{''.join(fields)}"
        "<button>Try it</button><pre><output></output></pre></form>"
    )


def _resolved(schema: Mapping[str, Any], described: Mapping[str, Any]) -> Mapping[str, Any]:
    reference = schema.get("$ref", "")
    return described["components"]["schemas"][reference.rpartition("/")[2]] if reference else schema


def _fields(schema: Mapping[str, Any], notes: Mapping[str, RequestParameter]) -> str:
    required = schema.get("required", ())
    rows: list[tuple[str, str, str]] = []
    for name, field in schema.get("properties", {}).items():
        note = notes.get(name)
        words = field.get("description", "") if note is None else f"{note.kind.value}: {note.note}"
        if "default" in field and field["default"] not in (None, [], {}):
            words = f"{words} (default {encode_json(field['default']).decode()})".strip()
        rows.append((name, f"{_type(field)}{', required' if name in required else ''}", words))
    return _table("field", rows) if rows else ""


def _table(heading: str, rows: list[tuple[str, str, str]]) -> str:
    """Return a table; the second column is already HTML."""
    cells = "".join(
        f"<tr><td><code>{escape(name)}</code></td><td>{kind}</td><td>{escape(words)}</td></tr>"
        for name, kind, words in rows
    )
    return f"<table><tr><th>{heading}</th><th>type</th><th>meaning</th></tr>{cells}</table>"


def _type(schema: Mapping[str, Any]) -> str:
    """Return a schema in a few words, as HTML; a named type is a link."""
    reference: str = schema.get("$ref", "")
    if reference:
        name = escape(reference.rpartition("/")[2])
        return f"<a href='#{name}'>{name}</a>"
    if "anyOf" in schema:
        return " or ".join(_type(one) for one in schema["anyOf"])
    if "enum" in schema:
        return " or ".join(f"<code>{escape(str(one))}</code>" for one in schema["enum"])
    kind: Any = schema.get("type", "any")
    if kind == "array":
        return f"list of {_type(schema.get('items') or {})}"
    return escape(" or ".join(cast("list[str]", kind)) if isinstance(kind, list) else str(kind))
