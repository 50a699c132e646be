"""The Slack Web API client, signatures and the Events API against the fake, over real sockets."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from urllib.parse import parse_qs

import msgspec
import pytest
import trio

from hermes_trio.adapters.slack.client import SlackClient
from hermes_trio.adapters.slack.signing import is_signed_by_slack
from hermes_trio.adapters.slack.types import BlockActions, EventCallback
from hermes_trio.messaging.errors import Missing, PlatformError, PlatformErrorKind
from hermes_trio.testing.platforms import ANY, Drop, FakeSlack, RateLimited, ServerError
from hermes_trio.testing.platforms.server import FakeReply, FakeRequest, open_loopback_server

CHANNEL = "C1"
BUTTONS = [
    {"type": "section", "text": {"type": "mrkdwn", "text": "Run it?"}},
    {
        "type": "actions",
        "elements": [
            {"type": "button", "text": {"type": "plain_text", "text": "Yes"}, "action_id": "approve", "value": "1"}
        ],
    },
]


async def refused(awaitable: Awaitable[object]) -> PlatformError:
    with pytest.raises(PlatformError) as caught, trio.fail_after(5):
        await awaitable
    return caught.value


async def test_identity(slack: FakeSlack, slack_client: SlackClient) -> None:
    """auth.test says who the bot is."""
    me = await slack_client.auth_test()
    assert (me.user_id, me.bot_id, me.team_id) == ("UBOT", "B1", "T1")


async def test_wrong_token_is_permanent_and_never_shown(slack: FakeSlack, caplog: pytest.LogCaptureFixture) -> None:
    """A wrong token is UNAUTHORIZED for good, and appears in no text and no log."""
    with caplog.at_level(logging.DEBUG):
        async with SlackClient(slack.base_url, "xoxb-wrong") as client:
            error = await refused(client.auth_test())
    assert (error.kind, error.permanent) == (PlatformErrorKind.UNAUTHORIZED, True)
    assert "xoxb" not in f"{error!r} {client!r} {caplog.text}"


async def test_bot_token_does_not_open_a_socket(slack: FakeSlack) -> None:
    """Socket Mode needs the app-level token; the bot token is refused."""
    async with SlackClient(slack.base_url, slack.token, app_token=slack.token) as client:
        error = await refused(client.open_connection())
    assert (error.kind, error.code) == (PlatformErrorKind.UNAUTHORIZED, "not_allowed_token_type")


async def test_message_in_a_thread_with_blocks(slack: FakeSlack, slack_client: SlackClient) -> None:
    """chat.postMessage carries thread and blocks and returns the ts."""
    asked = slack.say("question", channel=CHANNEL)
    ts = await slack_client.post_message(CHANNEL, "Run it?", thread_ts=asked, blocks=BUTTONS)
    seen = await slack.wait_for_message(channel=CHANNEL, thread_ts=asked, containing="Run it?")
    assert (seen.ts, seen.buttons[0]["action_id"]) == (ts, "approve")


async def test_edit_delete_react_and_names(slack: FakeSlack, slack_client: SlackClient) -> None:
    """Messages are edited, deleted and reacted to; channels and people have names."""
    slack.add_channel(CHANNEL, "general")
    ts = await slack_client.post_message(CHANNEL, "thinking")
    await slack_client.update(CHANNEL, ts, "done")
    seen = await slack.wait_for_message(channel=CHANNEL, containing="done")
    assert seen.versions == ["thinking", "done"]
    assert await slack_client.add_reaction(CHANNEL, ts, "eyes")
    assert not await slack_client.add_reaction(CHANNEL, ts, "eyes")
    await slack_client.delete(CHANNEL, ts)
    assert seen.deleted
    error = await refused(slack_client.update(CHANNEL, ts, "late"))
    assert (error.kind, error.missing) == (PlatformErrorKind.NOT_FOUND, Missing.MESSAGE)
    assert await slack_client.channel_name(CHANNEL) == "general"
    assert await slack_client.user_name("U7") == "Person U7"


async def test_direct_and_ephemeral_messages(slack: FakeSlack, slack_client: SlackClient) -> None:
    """A direct-message channel can be opened; an ephemeral message is for one person."""
    dm = await slack_client.open_conversation("U42")
    await slack_client.post_message(dm, "hello")
    slack.add_channel(CHANNEL)
    await slack_client.post_ephemeral(CHANNEL, "U42", "only you")
    assert [(m.channel, m.ephemeral_for) for m in slack.messages] == [("D42", None), (CHANNEL, "U42")]


async def test_long_text_is_cut_when_posted_and_refused_when_edited(
    slack: FakeSlack, slack_client: SlackClient
) -> None:
    """Slack cuts a post after 40,000 characters without a word, and refuses an edit of more than 4,000."""
    slack.add_channel(CHANNEL)
    ts = await slack_client.post_message(CHANNEL, "a" * 40_001)
    assert (len(slack.messages[0].text), slack.messages[0].truncated) == (40_000, True)
    assert (await refused(slack_client.update(CHANNEL, ts, "a" * 4_001))).kind is PlatformErrorKind.TOO_LONG


@pytest.mark.parametrize(
    ("text", "blocks", "detail"),
    [
        ("", None, "no_text"),
        ("x", [{"type": "nonsense"}], "/blocks/0/type"),
        ("x", [{"type": "divider"}] * 51, "no more than 50"),
        ("x", [{"type": "section", "text": {"type": "mrkdwn", "text": "a" * 3001}}], "/blocks/0/text/text"),
        ("x", [{"type": "actions", "elements": []}], "/blocks/0/elements"),
        (
            "x",
            [{"type": "actions", "elements": [{"type": "button", "text": {"type": "plain_text", "text": "a" * 76}}]}],
            "/blocks/0/elements/0/text/text",
        ),
    ],
)
async def test_refused_messages(
    slack: FakeSlack, slack_client: SlackClient, text: str, blocks: list, detail: str
) -> None:
    """What Slack refuses is refused here with the place in the blocks, and nothing is sent."""
    slack.add_channel(CHANNEL)
    error = await refused(slack_client.post_message(CHANNEL, text, blocks=blocks))
    assert (error.kind, error.permanent) == (PlatformErrorKind.BAD_FORMAT, True)
    assert detail in error.message
    assert len(slack.messages) == 0


async def test_missing_and_forbidden_places(slack: FakeSlack, slack_client: SlackClient) -> None:
    """Unknown channels, unknown threads, archived channels and foreign channels are told apart."""
    missing = await refused(slack_client.post_message("C404", "hello"))
    slack.say("hello", channel=CHANNEL)
    thread = await refused(slack_client.post_message(CHANNEL, "hello", thread_ts="1.0"))
    slack.archive(CHANNEL)
    archived = await refused(slack_client.post_message(CHANNEL, "hello"))
    slack.add_channel("C2", member=False)
    foreign = await refused(slack_client.post_message("C2", "hello"))
    assert (missing.missing, thread.missing) == (Missing.CHAT, Missing.THREAD)
    assert (archived.code, foreign.code) == ("is_archived", "not_in_channel")
    assert {archived.kind, foreign.kind} == {PlatformErrorKind.FORBIDDEN}


async def test_faults(slack: FakeSlack, slack_client: SlackClient) -> None:
    """429 carries Retry-After; a 5xx and a lost answer are transient and ambiguous."""
    slack.add_channel(CHANNEL)
    slack.fail("chat.postMessage", RateLimited(12))
    limited = await refused(slack_client.post_message(CHANNEL, "hello"))
    slack.fail(ANY, ServerError(503))
    broken = await refused(slack_client.post_message(CHANNEL, "hello"))
    slack.fail("chat.postMessage", Drop(before=False))
    lost = await refused(slack_client.post_message(CHANNEL, "hello"))
    assert (limited.kind, limited.retry_after) == (PlatformErrorKind.RATE_LIMITED, 12)
    assert (broken.kind, broken.ambiguous, broken.code) == (PlatformErrorKind.TRANSIENT, True, 503)
    assert (lost.kind, lost.ambiguous) == (PlatformErrorKind.TRANSIENT, True)
    assert [call.status for call in slack.calls] == [429, 503, 0]
    assert len(slack.messages) == 1


async def test_response_url_replaces_and_wears_out(slack: FakeSlack, slack_client: SlackClient) -> None:
    """A click's response URL replaces its message; after five uses it is gone; it is never shown."""
    slack.add_channel(CHANNEL)
    await slack_client.post_message(CHANNEL, "Run it?", blocks=BUTTONS)
    message = await slack.wait_for_message(containing="Run it?")
    url = slack.click(message, "Yes")
    await slack_client.respond(url, "approved", replace_original=True)
    assert (message.text, message.blocks) == ("approved", [])
    for _ in range(4):
        await slack_client.respond(url, "note", in_channel=True)
    error = await refused(slack_client.respond(url, "too late"))
    assert error.kind is PlatformErrorKind.NOT_FOUND
    error = await refused(slack_client.respond("http://127.0.0.1:1/actions/secret", "x"))
    assert "secret" not in str(error)


Endpoint = Callable[[FakeRequest], Awaitable[FakeReply]]


def signed(slack: FakeSlack, request: FakeRequest) -> bool:
    """Whether the request proves that it comes from this Slack, judged at the time that it names."""
    timestamp = request.headers["x-slack-request-timestamp"]
    return is_signed_by_slack(
        slack.signing_secret,
        timestamp=timestamp,
        signature=request.headers["x-slack-signature"],
        body=request.body,
        now=float(timestamp),
    )


async def test_events_api_requests_are_signed_and_repeated(slack: FakeSlack) -> None:
    """Events are posted with a valid signature, and again with a retry number until they are accepted."""
    seen: list[tuple[str, str | None]] = []

    async def endpoint(request: FakeRequest) -> FakeReply:
        assert signed(slack, request)
        callback = msgspec.json.decode(request.body, type=EventCallback)
        if callback.type == "url_verification":
            return FakeReply.of({"challenge": callback.challenge})
        seen.append((callback.event_id, request.headers.get("x-slack-retry-num")))
        return FakeReply(500 if len(seen) == 1 else 200)

    async with open_loopback_server(endpoint) as server:
        slack.use_request_url(f"{server.url}/slack/events")
        assert await slack.verify_request_url("c-1")
        slack.say("hello")
        await slack.deliveries.callbacks.first(
            lambda callback: b"Ev0" in callback.body and callback.status == 200, wanted=""
        )
    assert seen == [("Ev00000001", None), ("Ev00000001", "1")]


async def test_clicks_and_commands_are_posted_as_forms(slack: FakeSlack, slack_client: SlackClient) -> None:
    """Interactions arrive as a form with JSON in `payload`, commands as a plain form, both signed."""
    seen: list[dict[str, list[str]]] = []

    async def endpoint(request: FakeRequest) -> FakeReply:
        assert signed(slack, request)
        if request.headers["content-type"] == "application/x-www-form-urlencoded":
            seen.append(parse_qs(request.body.decode()))
        return FakeReply(200)

    async with open_loopback_server(endpoint) as server:
        slack.use_request_url(server.url)
        slack.add_channel(CHANNEL)
        await slack_client.post_message(CHANNEL, "Run it?", blocks=BUTTONS)
        slack.click(await slack.wait_for_message(containing="Run it?"), "approve", user="U7")
        slack.use_command("/status", "now", user="U8")
        await slack.deliveries.callbacks.first(lambda _: len(slack.deliveries.callbacks) == 3, wanted="number 3")
    pressed = msgspec.json.decode(seen[0]["payload"][0], type=BlockActions)
    assert (pressed.user.id, pressed.actions[0].value) == ("U7", "1")
    assert (seen[1]["command"], seen[1]["text"], seen[1]["user_id"]) == (["/status"], ["now"], ["U8"])


def test_signature_rejects_what_is_not_slacks() -> None:
    """Another secret, another body, an old or malformed timestamp and an empty secret do not pass."""
    good = {
        "timestamp": "1531420618",
        "signature": "v0=a2114d57b48eac39b9ad189dd8316235a7b4a8d21a10bd27519666489c69b503",
        "body": (
            b"token=xyzz0WbapA4vBCDEFasx0q6G&team_id=T1DC2JH3J&team_domain=testteamnow&channel_id=G8PSS9T3V"
            b"&channel_name=foobar&user_id=U2CERLKJA&user_name=roadrunner&command=%2Fwebhook-collect&text="
            b"&response_url=https%3A%2F%2Fhooks.slack.com%2Fcommands%2FT1DC2JH3J%2F397700885554%2F96rGlfmibIGlgcZRskXaIFfN"
            b"&trigger_id=398738663015.47445629121.803a0bc887a14d10d2c447fce8b6703c"
        ),
        "now": 1531420618.0,
    }
    secret = "8f742231b10e8888abcd99yyyzzz85a5"
    assert is_signed_by_slack(secret, **good)
    assert not is_signed_by_slack("other", **good)
    assert not is_signed_by_slack("", **good)
    assert not is_signed_by_slack(secret, **(good | {"body": b"x"}))
    assert not is_signed_by_slack(secret, **(good | {"now": 1531420618.0 + 301}))
    assert not is_signed_by_slack(secret, **(good | {"timestamp": "yesterday"}))
    assert not is_signed_by_slack(secret, **(good | {"signature": "v0=é"}))
