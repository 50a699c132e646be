"""Webhook requests: what they say, under which id, and which of them a route wants."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hermes_trio.adapters.webhook.filters import (
    DeliveryId,
    PayloadError,
    WebhookEvent,
    delivery_of,
    event_name,
    matches,
    parse_filters,
    parse_payload,
    signed_delivery,
)
from hermes_trio.adapters.webhook.signatures import Scheme

EVENT = WebhookEvent(
    route="gh",
    name="pull_request",
    payload={
        "action": "opened",
        "number": 7,
        "draft": False,
        "nothing": None,
        "labels": [{"name": "bug"}, {"name": "urgent"}],
        "tags": ["a", 1],
        "repo": {"full_name": "o/r"},
        "event": {"kind": "inner"},
    },
    headers={"x-github-event": "pull_request", "user-agent": "GitHub-Hookshot/1"},
)


def no_files(name: str) -> str | None:
    return None


def wanted(spec: object, event: WebhookEvent = EVENT, read_file: Callable[[str], str | None] = no_files) -> bool:
    filters = parse_filters(spec)
    assert filters.problems == ()
    return matches(filters, event, read_file)


@pytest.mark.parametrize(
    ("leaf", "expected"),
    [
        ({"field": "action", "equals": "opened"}, True),
        ({"field": "action", "equals": "closed"}, False),
        ({"field": "payload.action", "equals": "opened"}, True),
        ({"field": "number", "equals": 7.0}, True),
        ({"field": "number", "equals": "7"}, False),
        ({"field": "draft", "equals": False}, True),
        ({"field": "draft", "equals": 0}, False),
        ({"field": "nothing", "equals": None}, True),
        ({"field": "absent", "equals": None}, False),
        ({"field": "action", "not_equals": "closed"}, True),
        ({"field": "absent", "not_equals": "closed"}, True),
        ({"field": "nothing", "exists": True}, True),
        ({"field": "absent", "exists": True}, False),
        ({"field": "absent", "exists": False}, True),
        ({"field": "absent", "missing": True}, True),
        ({"field": "action", "missing": True}, False),
        ({"field": "labels.1.name", "equals": "urgent"}, True),
        ({"field": "labels.2.name", "exists": True}, False),
        ({"field": "labels.-1.name", "exists": True}, False),
        ({"field": "labels.²", "exists": True}, False),
        ({"field": "action.0", "exists": True}, False),
        ({"field": "action", "contains": "pen"}, True),
        ({"field": "tags", "contains": 1}, True),
        ({"field": "tags", "contains": True}, False),
        ({"field": "repo", "contains": "full_name"}, True),
        ({"field": "number", "contains": "7"}, False),
        ({"field": "action", "in": ["closed", "opened"]}, True),
        ({"field": "action", "in": []}, False),
        ({"field": "repo.full_name", "regex": "^o/"}, True),
        ({"field": "number", "regex": "^7$"}, True),
        ({"field": "draft", "regex": ".*"}, False),
        ({"field": "event", "equals": "pull_request"}, True),
        ({"field": "event_type", "equals": "pull_request"}, True),
        ({"field": "event.kind", "equals": "inner"}, True),
        ({"field": "headers.X-GitHub-Event", "equals": "pull_request"}, True),
        ({"field": "headers.user-agent", "regex": "Hookshot"}, True),
        ({"field": "headers.x-absent", "exists": True}, False),
    ],
)
def test_a_leaf_looks_at_one_field(leaf: dict[str, object], expected: bool) -> None:
    """Each operator compares JSON values at a dotted path; a missing field equals nothing."""
    assert expected == wanted(leaf)


def test_the_payload_root_steps_into_a_nested_payload() -> None:
    """Where the payload has a member `payload`, the root of that name means it."""
    event = WebhookEvent("r", "e", {"payload": {"a": 1}, "a": 2}, {})
    assert wanted({"field": "payload.a", "equals": 1}, event)
    assert wanted({"field": "a", "equals": 2}, event)


def test_combinators() -> None:
    """A list means all of it; all, any and not nest."""
    yes, no = {"field": "action", "exists": True}, {"field": "action", "missing": True}
    assert wanted(None)
    assert wanted([])
    assert wanted([yes, {"not": no}])
    assert not wanted([yes, no])
    assert wanted({"any": [no, yes]})
    assert not wanted({"any": [no, no]})
    assert not wanted({"all": [yes, {"any": [{"not": yes}, no]}]})


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ('["o/r", "x"]', True),
        ('{"o/r": 1}', True),
        ("x\n o/r \n", True),
        ("o/r2", False),
        ("[broken", False),
        ("", False),
        (None, False),
    ],
)
def test_a_list_may_be_in_a_file(content: str | None, expected: bool) -> None:
    """`in_file` takes a JSON list, an object's keys or lines; a file that cannot be read lists nothing."""
    asked: list[str] = []

    def read(name: str) -> str | None:
        asked.append(name)
        return content

    assert expected == wanted({"field": "repo.full_name", "in_file": "lists/repos.txt"}, read_file=read)
    assert asked == ["lists/repos.txt"]


def test_numbers_are_found_in_a_list_file() -> None:
    """A number in the payload is looked up as it is written."""
    assert wanted({"field": "number", "in_file": "n"}, read_file=lambda name: "6\n7\n")
    assert wanted({"field": "number", "in_file": "n"}, read_file=lambda name: "[6, 7]")


@pytest.mark.parametrize(
    ("spec", "problem"),
    [
        ("action", "filters: must be an object"),
        ([1], r"filters[0]: must be an object"),
        ({"equals": 1}, "filters.field: must be a path like 'pull_request.state', not None"),
        ({"field": "a..b", "equals": 1}, "filters.field: must be a path"),
        ({"field": "a"}, "filters: needs exactly one of exists, missing, equals"),
        ({"field": "a", "equals": 1, "in": []}, "filters: needs exactly one of"),
        ({"field": "a", "like": 1}, "but has ['like']"),
        ({"field": "a", "in": "abc"}, "filters.in: must be a list, not 'abc'"),
        ({"field": "a", "exists": "yes"}, "filters.exists: must be true or false"),
        ({"field": "a", "regex": "("}, "filters.regex: not a regular expression"),
        ({"field": "a", "regex": 5}, "filters.regex: must be a string"),
        ({"field": "a", "in_file": "../x"}, "filters.in_file: must name a file below the home directory"),
        ({"field": "a", "in_file": "/etc/passwd"}, "filters.in_file: must name"),
        ({"any": []}, "filters.any: must be a list of at least one filter"),
        ({"any": [{"not": {"field": ""}}]}, "filters.any[0].not.field: must be a path"),
        ({"not": {}, "field": "a"}, "filters: 'not' must stand alone, but there is also 'field'"),
    ],
)
def test_a_malformed_filter_is_named_and_matches_nothing(spec: object, problem: str) -> None:
    """A mistake is reported with its place, and even below a `not` it lets nothing through."""
    for tried in (spec, {"not": spec} if isinstance(spec, dict) else spec):
        filters = parse_filters(tried)
        assert filters.problems
        assert not matches(filters, EVENT, no_files)
    assert problem in parse_filters(spec).problems[0]


def test_depth_is_bounded() -> None:
    """A filter nested beyond reason is a problem, not a crash."""
    spec: object = {"field": "action", "exists": True}
    for _ in range(5000):
        spec = {"not": spec}
    assert "nested deeper than 20" in parse_filters(spec).problems[0]


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
operators = st.sampled_from(
    ["exists", "missing", "equals", "not_equals", "contains", "in", "in_file", "regex", "any", "all", "not", "field"]
)


@given(
    spec=st.dictionaries(operators, json_values, max_size=3), payload=st.dictionaries(st.text(max_size=3), json_values)
)
def test_no_filter_and_no_payload_is_an_error(spec: dict[str, object], payload: dict[str, object]) -> None:
    """Whatever is configured and whatever arrives, the answer is yes or no."""
    event = WebhookEvent("r", "e", payload, {})
    assert matches(parse_filters(spec), event, no_files) in (True, False)
    assert matches(parse_filters({"field": "a", **spec}), event, lambda name: "[1]") in (True, False)


# The request


@pytest.mark.parametrize(
    ("headers", "payload", "name"),
    [
        ({"x-github-event": "push", "x-gitlab-event": "x"}, {"event_type": "y"}, "push"),
        ({"x-gitlab-event": "Push Hook"}, {"type": "y"}, "Push Hook"),
        ({}, {"event_type": "a", "type": "b"}, "a"),
        ({}, {"event_type": "", "type": "b"}, "b"),
        ({}, {"type": {"odd": 1}}, "unknown"),
        ({}, {}, "unknown"),
    ],
)
def test_the_event_name(headers: dict[str, str], payload: dict[str, object], name: str) -> None:
    """The sender's header names the event, then the payload."""
    assert name == event_name(headers, payload)


def never() -> str:
    raise AssertionError("an id was given")


@pytest.mark.parametrize(
    ("headers", "delivery"),
    [
        ({"x-github-delivery": "d-1", "svix-id": "s", "x-request-id": "r"}, "d-1"),
        ({"svix-id": "msg_1", "x-request-id": "r"}, "msg_1"),
        ({"webhook-id": "wh.1", "x-request-id": "r"}, "wh.1"),
        ({"idempotency-key": "k", "x-request-id": "r"}, "k"),
        ({"x-request-id": " r "}, "r"),
        ({"stripe-signature": "…", "x-request-id": "r"}, "evt_1"),
    ],
)
def test_the_delivery_id_is_the_senders(headers: dict[str, str], delivery: str) -> None:
    """The id that a sender repeats when it retries identifies the delivery, within its route."""
    assert DeliveryId("gh", delivery) == delivery_of("gh", headers, {"id": "evt_1"}, never)


def test_requests_without_an_id_never_collide() -> None:
    """SC-5: each request without an id gets one of its own, and routes have separate ids."""
    fresh = iter(["a", "b"])
    first, second = (delivery_of("gh", {}, {"id": "x"}, lambda: next(fresh)) for _ in range(2))
    assert first == DeliveryId("gh", "a", generated=True)
    assert first != second
    given_id = {"x-request-id": "1"}
    assert delivery_of("one", given_id, {}, never) != delivery_of("two", given_id, {}, never)


@given(st.text(min_size=1))
def test_any_id_is_safe_in_a_session_key_and_stable(value: str) -> None:
    """Odd ids are replaced by their hash: same in, same out, nothing that a key must not contain."""
    headers = {"x-request-id": value}
    first = delivery_of("r", headers, {}, lambda: "fresh")
    assert first == delivery_of("r", headers, {}, lambda: "fresh")
    assert 0 < len(first.id) <= 128
    assert not set(first.id) & set(":/\\ \n\0")
    assert ".." not in first.id


@pytest.mark.parametrize(
    ("body", "content_type", "payload"),
    [
        (b'{"a": 1}', "application/json", {"a": 1}),
        (b' {"a": 1}', "", {"a": 1}),
        (b"{}", "text/plain", {}),
        (b"a=1&b=%C3%A9&c=", "application/x-www-form-urlencoded", {"a": "1", "b": "é", "c": ""}),
        (b"a=1", "", {"a": "1"}),
        (b"payload=%7B%22a%22%3A1%7D", "application/x-www-form-urlencoded; charset=utf-8", {"a": 1}),
        (b"payload=hello", "application/x-www-form-urlencoded", {"payload": "hello"}),
    ],
)
def test_a_body_is_an_object(body: bytes, content_type: str, payload: dict[str, object]) -> None:
    """JSON objects and form fields are payloads, also GitHub's JSON within a form."""
    assert payload == parse_payload(body, content_type)


@pytest.mark.parametrize(
    ("body", "content_type", "message"),
    [
        (b"\xff{}", "application/json", "the body is not UTF-8 .byte 0"),
        (b"[1]", "application/json", "must be a JSON object, not an array"),
        (b"null", "", "must be a JSON object, not null"),
        (b"5", "", "must be a JSON object, not a number"),
        (b'{"a":', "application/json", "not valid JSON"),
        (b"", "application/json", "not valid JSON"),
        (b"", "", "not valid JSON"),
        (b"a=1", "application/json", "not valid JSON"),
        (b"hello there", "text/plain", "neither a JSON object nor form fields"),
        (b"payload={broken", "application/x-www-form-urlencoded", "form field 'payload' is not valid JSON"),
        (b"[" * 100_000, "application/json", "nested too deeply"),
        (b"&".join(b"a=1" for _ in range(2000)), "application/x-www-form-urlencoded", "neither"),
    ],
)
def test_a_body_that_is_no_object_is_refused(body: bytes, content_type: str, message: str) -> None:
    """What is not an object is refused with a reason that the sender may read."""
    with pytest.raises(PayloadError, match=message):
        parse_payload(body, content_type)


@given(st.binary(max_size=200), st.sampled_from(["", "application/json", "application/x-www-form-urlencoded"]))
def test_any_body_is_a_payload_or_refused(body: bytes, content_type: str) -> None:
    """No bytes make the parser fail in another way."""
    try:
        assert isinstance(parse_payload(body, content_type), dict)
    except PayloadError:
        pass


SIGNED_EVENT = WebhookEvent(
    "r", "push", {"id": "evt_1"}, {"svix-id": "msg_1", "webhook-id": "wh_1", "x-webhook-timestamp": "17"}
)


@pytest.mark.parametrize(
    ("scheme", "once"),
    [
        (Scheme.SVIX, "msg_1"),
        (Scheme.STANDARD, "wh_1"),
        (Scheme.STRIPE, "evt_1"),
        (Scheme.GITHUB, f"body-{hashlib.sha256(b'{}').hexdigest()}"),
        (Scheme.GENERIC_V1, f"body-{hashlib.sha256(b'{}').hexdigest()}"),
        (Scheme.GENERIC_V2, f"body-{hashlib.sha256(b'17.{}').hexdigest()}"),
        (Scheme.GITLAB, "given"),
        (None, "given"),
    ],
)
def test_the_identity_of_a_delivery_is_what_was_signed(scheme: Scheme | None, once: str) -> None:
    """An unsigned header never decides whether a signed request is new."""
    delivery = delivery_of("r", {"x-github-delivery": "given"}, {}, never)
    found = signed_delivery(delivery, scheme, SIGNED_EVENT, b"{}")
    assert found.once == once
    assert found.id == (once if scheme in (Scheme.SVIX, Scheme.STANDARD, Scheme.STRIPE) else "given")
