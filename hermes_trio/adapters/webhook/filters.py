"""Parses a webhook request (payload, event name, delivery id), and matches it against a route's filters.

Filters are parsed once, when the route is read: every mistake is listed with its place, and a filter with a mistake matches nothing, so that a typing
error never lets more through. Files named by `in_file` are read by a function that the caller passes.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final, TypeAlias, cast
from urllib.parse import parse_qsl

import msgspec

from .signatures import Scheme

OPERATORS: Final = ("exists", "missing", "equals", "not_equals", "contains", "in", "in_file", "regex")
MAX_DEPTH: Final = 20
MAX_REGEX_TEXT: Final = 10_000
"""The maximum of characters of a value that a regular expression is applied to: the pattern is the operator's, the value is untrusted."""

MAX_DELIVERY_ID: Final = 128
_SAFE_ID: Final = re.compile(r"[A-Za-z0-9_~-]+(?:\.[A-Za-z0-9_~-]+)*")
_MISSING: Final = object()


class PayloadError(ValueError):
    """Raised for a body that is not an object. The message is for the sender."""


# The request


class WebhookEvent(msgspec.Struct, frozen=True):
    """An authentic request, as filters and templates see it. Header names are lower case."""

    route: str
    name: str
    payload: Mapping[str, object]
    headers: Mapping[str, str]


class DeliveryId(msgspec.Struct, frozen=True):
    """The id of a request, and the identity under which it is handled at most once, within its route.

    `id` is the sender's id of the delivery; `generated` says that the sender gave none, so that it is unique to the request. `once` is what the
    signature covers: an unsigned id protects from nothing.
    """

    route: str
    id: str
    generated: bool = False
    once: str = ""


def parse_payload(body: bytes, content_type: str = "") -> dict[str, object]:
    """Return the object in a body: JSON, or form fields; a form's `payload` field that holds a JSON object is that object. Raises `PayloadError`."""
    try:
        text = body.decode()
    except UnicodeDecodeError as error:
        raise PayloadError(f"the body is not UTF-8 (byte {error.start})") from None
    if not content_type.lower().startswith("application/x-www-form-urlencoded"):
        try:
            return _json_object(body)
        except msgspec.DecodeError as error:
            # Some senders post a form under no or a wrong type, but not one that says it is JSON.
            if "json" in content_type.lower() or text.lstrip()[:1] in ("", "{", "["):
                raise PayloadError(f"the body is not valid JSON: {error}") from None
    try:
        fields: dict[str, object] = dict(
            parse_qsl(text, keep_blank_values=True, strict_parsing=True, max_num_fields=1000)
        )
    except ValueError:
        raise PayloadError("the body is neither a JSON object nor form fields") from None
    wrapped = fields.get("payload")
    if isinstance(wrapped, str) and wrapped.lstrip().startswith("{"):
        try:
            return _json_object(wrapped.encode())
        except msgspec.DecodeError as error:
            raise PayloadError(f"the form field 'payload' is not valid JSON: {error}") from None
    return fields


def _json_object(data: bytes) -> dict[str, object]:
    try:
        value: object = msgspec.json.decode(data)
    except RecursionError:
        raise PayloadError("the body is nested too deeply") from None
    if not isinstance(value, dict):
        raise PayloadError(f"the body must be a JSON object, not {_kind(value)}")
    return cast("dict[str, object]", value)


def _kind(value: object) -> str:
    names: Mapping[type, str] = {list: "an array", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")


def event_name(headers: Mapping[str, str], payload: Mapping[str, object]) -> str:
    """Return the event's name: from the sender's header, else the payload's `event_type` or `type`, else `unknown`."""
    candidates = (
        headers.get("x-github-event"),
        headers.get("x-gitlab-event"),
        payload.get("event_type"),
        payload.get("type"),
    )
    return next((name for name in candidates if isinstance(name, str) and name), "unknown")


def delivery_of(
    route: str, headers: Mapping[str, str], payload: Mapping[str, object], generate: Callable[[], str]
) -> DeliveryId:
    """Return the request's delivery id; `generate` makes one if the sender gave none.

    An id that is not valid in a session key (odd characters, too long) is replaced by its hash, which is as stable.
    """
    given: list[object] = [headers.get("x-github-delivery"), headers.get("svix-id"), headers.get("webhook-id")]
    if "stripe-signature" in headers:
        given.append(payload.get("id"))
    given += [headers.get("idempotency-key"), headers.get("x-request-id")]
    for value in given:
        if isinstance(value, str) and value.strip():
            return DeliveryId(route, _safe(value.strip()))
    return DeliveryId(route, generate(), generated=True)


def signed_delivery(delivery: DeliveryId, scheme: Scheme | None, event: WebhookEvent, body: bytes) -> DeliveryId:
    """Return the delivery with the identity that its signature covers: the signed id, else the hash of what was signed.

    A token signs nothing: there, and without authentication, the sender's id is used.
    """
    named: object = None
    signed: bytes | None = None
    match scheme:
        case Scheme.SVIX:
            named = event.headers.get("svix-id")
        case Scheme.STANDARD:
            named = event.headers.get("webhook-id")
        case Scheme.STRIPE:
            named, signed = event.payload.get("id"), body
        case Scheme.GENERIC_V2:
            signed = event.headers.get("x-webhook-timestamp", "").encode() + b"." + body
        case Scheme.GITHUB | Scheme.GENERIC_V1:
            signed = body
        case Scheme.GITLAB | None:
            pass
    if isinstance(named, str) and named.strip():
        name = _safe(named.strip())
        return DeliveryId(delivery.route, name, once=name)
    once = delivery.id if signed is None else f"body-{hashlib.sha256(signed).hexdigest()}"
    return msgspec.structs.replace(delivery, once=once)


def _safe(value: str) -> str:
    if len(value) <= MAX_DELIVERY_ID and _SAFE_ID.fullmatch(value):
        return value
    return "sha256-" + hashlib.sha256(value.encode("utf-8", "surrogatepass")).hexdigest()[:40]


# Paths into it


def walk(value: object, path: Iterable[str], *, indexes: bool) -> tuple[bool, object]:
    """Return whether there is a value at `path` below `value`, and which; `indexes` allows numbers to step into lists."""
    for step in path:
        if isinstance(value, Mapping):
            members = cast("Mapping[str, object]", value)
            if step not in members:
                return False, None
            value = members[step]
        elif indexes and isinstance(value, list) and step.isascii() and step.isdigit() and len(step) < 10:
            items = cast("list[object]", value)
            if int(step) >= len(items):
                return False, None
            value = items[int(step)]
        else:
            return False, None
    return True, value


def _look_up(event: WebhookEvent, path: tuple[str, ...]) -> tuple[bool, object]:
    root, rest = path[0], path[1:]
    if root in ("event", "event_type") and not rest:
        return True, event.name
    if root == "headers":
        name = ".".join(rest).lower()
        return name in event.headers, event.headers.get(name)
    if root == "payload":
        nested = event.payload.get("payload")
        start = cast("Mapping[str, object]", nested) if isinstance(nested, Mapping) else event.payload
        return walk(start, rest, indexes=True)
    return walk(event.payload, path, indexes=True)


# Filters

ReadFile: TypeAlias = Callable[[str], str | None]
_Test: TypeAlias = Callable[[WebhookEvent, ReadFile], bool]


class Filters(msgspec.Struct, frozen=True):
    """A route's filters, parsed, and the mistakes in them ("filters[1].regex: …")."""

    test: _Test
    problems: tuple[str, ...] = ()


def matches(filters: Filters, event: WebhookEvent, read_file: ReadFile) -> bool:
    """Return whether the route wants this event. `read_file` returns a file's text, or None if it cannot be read."""
    return not filters.problems and filters.test(event, read_file)


def parse_filters(spec: object, where: str = "filters") -> Filters:
    """Parse a filter specification: nothing, one object, or a list of which all must match."""
    if spec is None:
        return Filters(lambda event, read_file: True)
    problems: list[str] = []
    if not isinstance(spec, list):
        return Filters(_parse(spec, where, problems, 0), tuple(problems))
    tests = _tests(cast("list[object]", spec), where, problems, 0)
    return Filters(_every(tests), tuple(problems))


def _never(event: WebhookEvent, read_file: ReadFile) -> bool:
    return False


def _every(tests: Sequence[_Test]) -> _Test:
    return lambda event, read_file: all(test(event, read_file) for test in tests)


def _tests(specs: list[object], where: str, problems: list[str], depth: int) -> list[_Test]:
    return [_parse(spec, f"{where}[{number}]", problems, depth) for number, spec in enumerate(specs)]


def _parse(spec: object, where: str, problems: list[str], depth: int) -> _Test:
    if depth > MAX_DEPTH:
        problems.append(f"{where}: nested deeper than {MAX_DEPTH}")
        return _never
    if not isinstance(spec, Mapping):
        problems.append(f"{where}: must be an object with 'field' and an operator, or 'all', 'any' or 'not'")
        return _never
    members = cast("Mapping[str, object]", spec)
    combinators = [name for name in ("all", "any", "not") if name in members]
    if not combinators:
        return _parse_leaf(members, where, problems)
    if len(members) > 1:
        problems.append(
            f"{where}: {combinators[0]!r} must stand alone, but there is also {_others(members, combinators[0])}"
        )
        return _never
    name, value = combinators[0], members[combinators[0]]
    if name == "not":
        inner = _parse(value, f"{where}.not", problems, depth + 1)
        return lambda event, read_file: not inner(event, read_file)
    if not isinstance(value, list) or not value:
        problems.append(f"{where}.{name}: must be a list of at least one filter")
        return _never
    tests = _tests(cast("list[object]", value), f"{where}.{name}", problems, depth + 1)
    if name == "all":
        return _every(tests)
    return lambda event, read_file: any(test(event, read_file) for test in tests)


def _others(members: Mapping[str, object], known: str) -> str:
    return ", ".join(repr(name) for name in members if name != known)


def _parse_leaf(members: Mapping[str, object], where: str, problems: list[str]) -> _Test:
    field = members.get("field")
    if not isinstance(field, str) or not all(field.split(".")):
        problems.append(f"{where}.field: must be a path like 'pull_request.state', not {field!r}")
        return _never
    operators = [name for name in members if name != "field"]
    if len(operators) != 1 or operators[0] not in OPERATORS:
        problems.append(f"{where}: needs exactly one of {', '.join(OPERATORS)}, but has {operators or 'none'}")
        return _never
    operator = operators[0]
    compare = _comparison(operator, members[operator], f"{where}.{operator}", problems)
    path = tuple(field.split("."))

    def test(event: WebhookEvent, read_file: ReadFile) -> bool:
        found, value = _look_up(event, path)
        return compare(found, value, read_file)

    return test


_Comparison: TypeAlias = Callable[[bool, object, ReadFile], bool]


def _comparison(operator: str, operand: object, where: str, problems: list[str]) -> _Comparison:
    match operator, operand:
        case "exists" | "missing", bool():
            wanted = operand is (operator == "exists")
            return lambda found, value, read_file: found is wanted
        case "exists" | "missing", _:
            problems.append(f"{where}: must be true or false, not {operand!r}")
        case "equals", _:
            return lambda found, value, read_file: found and _equal(value, operand)
        case "not_equals", _:
            return lambda found, value, read_file: not (found and _equal(value, operand))
        case "contains", _:
            return lambda found, value, read_file: found and _contains(value, operand)
        case "in", list():
            wanted_values = cast("list[object]", operand)
            return lambda found, value, read_file: found and any(_equal(value, one) for one in wanted_values)
        case "in", _:
            problems.append(f"{where}: must be a list, not {operand!r}")
        case "in_file", str() if operand and not operand.startswith(("/", "\\", "~")) and ".." not in operand:
            return lambda found, value, read_file: found and _listed(value, read_file(operand))
        case "in_file", _:
            problems.append(f"{where}: must name a file below the home directory, not {operand!r}")
        case "regex", str():
            try:
                pattern = re.compile(operand)
            except (re.error, RecursionError, OverflowError) as error:
                problems.append(f"{where}: not a regular expression: {error}")
            else:
                return lambda found, value, read_file: found and _searches(pattern, value)
        case _:
            problems.append(f"{where}: must be a string, not {operand!r}")
    return lambda found, value, read_file: False


def _equal(value: object, wanted: object) -> bool:
    # In JSON, true is not 1.
    if isinstance(value, bool) or isinstance(wanted, bool):
        return value is wanted
    return value == wanted


def _contains(value: object, wanted: object) -> bool:
    if isinstance(value, str):
        return isinstance(wanted, str) and wanted in value
    if isinstance(value, list):
        return any(_equal(item, wanted) for item in cast("list[object]", value))
    return isinstance(value, Mapping) and isinstance(wanted, str) and wanted in value


def _listed(value: object, text: str | None) -> bool:
    if text is None or isinstance(value, list | Mapping) or value is None:
        return False
    wanted = value if isinstance(value, str) else msgspec.json.encode(value).decode()
    return wanted in _entries(text)


def _entries(text: str) -> set[str]:
    """Return the entries of a list file: a JSON list, the keys of a JSON object, or one a line."""
    if text.lstrip()[:1] in ("[", "{"):
        try:
            parsed: object = msgspec.json.decode(text.encode("utf-8", "replace"))
        except (msgspec.DecodeError, RecursionError):
            return set()
        items = cast("Iterable[object]", parsed)
        return {item if isinstance(item, str) else msgspec.json.encode(item).decode() for item in items}
    return {line.strip() for line in text.splitlines() if line.strip()}


def _searches(pattern: re.Pattern[str], value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        return False
    return pattern.search(str(value)[:MAX_REGEX_TEXT]) is not None
