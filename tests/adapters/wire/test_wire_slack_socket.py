"""Socket Mode against the fake: envelopes, acknowledgements, refreshes, lost connections, and fatal ends."""

from __future__ import annotations

import pytest
import trio

from hermes_trio.adapters.slack.client import SlackClient
from hermes_trio.adapters.slack.socket import Envelope, SlackSocket, SocketStatus, open_slack_socket
from hermes_trio.adapters.wire.backoff import Backoff
from hermes_trio.messaging.errors import PlatformError, PlatformErrorKind
from hermes_trio.testing.platforms import FakeSlack, ServerError, open_fake_slack

CHANNEL = "C1"
QUICK = {"backoff": Backoff(first=0.01, cap=0.02, attempts=4)}


async def next_envelope(socket: SlackSocket) -> Envelope:
    with trio.fail_after(5):
        return await socket.envelopes.receive()


async def text_of(envelope: Envelope) -> str:
    callback = envelope.event()
    assert callback is not None
    assert callback.event is not None
    return callback.event.text


async def test_events_arrive_in_order_and_are_acknowledged(slack: FakeSlack, slack_client: SlackClient) -> None:
    """Messages arrive typed and in order; an acknowledgement reaches Slack."""
    async with open_slack_socket(slack_client, **QUICK) as socket:
        ts = slack.say("in private")
        slack.say("hello", channel=CHANNEL, thread_ts=None, mention=True)
        envelopes = [await next_envelope(socket) for _ in range(3)]
        events = [envelope.event() for envelope in envelopes]
        assert [event.event.type for event in events if event and event.event] == ["message", "message", "app_mention"]
        first = events[0]
        assert first is not None
        assert first.event is not None
        assert (first.event.ts, first.event.channel_type, first.event.user) == (ts, "im", "U42")
        for envelope in envelopes:
            assert await envelope.acknowledge()
        await slack.socket.acknowledgements.first(lambda ack: ack.envelope_id == envelopes[2].id, wanted="of the last")
        assert socket.status is SocketStatus.READY
    assert [ack.retry_attempt for ack in slack.socket.acknowledgements] == [0, 0, 0]


async def test_clicks_and_commands_are_typed_and_answered(slack: FakeSlack, slack_client: SlackClient) -> None:
    """A pressed button and a command arrive typed; an acknowledgement can carry an answer."""
    button = {"type": "button", "text": {"type": "plain_text", "text": "Yes"}, "action_id": "approve", "value": "1"}
    async with open_slack_socket(slack_client, **QUICK) as socket:
        slack.add_channel(CHANNEL)
        await slack_client.post_message(CHANNEL, "ok?", blocks=[{"type": "actions", "elements": [button]}])
        slack.click(await slack.wait_for_message(containing="ok?"), "Yes", user="U7")
        slack.use_command("/status", "now")
        own, click, command = [await next_envelope(socket) for _ in range(3)]
        assert await text_of(own) == "ok?"
        pressed, used = click.block_actions(), command.command()
        assert pressed is not None
        assert used is not None
        assert (pressed.user.id, pressed.actions[0].action_id, pressed.container.channel_id) == (
            "U7",
            "approve",
            CHANNEL,
        )
        assert (used.command, used.text) == ("/status", "now")
        assert used.response_url not in repr(used)
        await command.acknowledge({"text": "all is well"})
        ack = await slack.socket.acknowledgements.first(lambda ack: ack.kind == "slash_commands", wanted="of it")
        assert ack.payload == {"text": "all is well"}


async def test_unacknowledged_event_comes_again() -> None:
    """An event that is not acknowledged in time is delivered again, with the same event id and a retry number."""
    async with (
        open_fake_slack(ack_timeout=0.05) as slack,
        SlackClient(slack.base_url, slack.token, app_token=slack.app_token) as client,
        open_slack_socket(client, **QUICK) as socket,
    ):
        slack.say("hello")
        first = await next_envelope(socket)
        second = await next_envelope(socket)
        assert (first.retry_attempt, second.retry_attempt) == (0, 1)
        assert first.payload["event_id"] == second.payload["event_id"]
        await second.acknowledge()


async def test_lost_connection_loses_no_event(slack: FakeSlack, slack_client: SlackClient) -> None:
    """After a lost connection the unacknowledged event comes again on the new one; the old acknowledgement says no."""
    async with open_slack_socket(slack_client, **QUICK) as socket:
        slack.say("hello")
        first = await next_envelope(socket)
        await slack.socket.drop_connections()
        again = await next_envelope(socket)
        assert not await first.acknowledge()
        assert await again.acknowledge()
        assert (await text_of(again), socket.reconnects) == ("hello", 1)


@pytest.mark.parametrize("reason", ["warning", "refresh_requested"])
async def test_refresh_opens_the_next_connection_first(
    slack: FakeSlack, slack_client: SlackClient, reason: str
) -> None:
    """When Slack announces the end of a connection, two are open for a while, and neither loses anything."""
    async with open_slack_socket(slack_client, drain=5, **QUICK) as socket:
        await slack.socket.wait_for_connections(1)
        old = slack.socket.connections[0]
        await slack.socket.request_disconnect(reason)
        await slack.socket.wait_for_connections(2)
        for number in range(4):
            slack.say(str(number))
        envelopes = [await next_envelope(socket) for _ in range(4)]
        assert {await text_of(envelope) for envelope in envelopes} == {"0", "1", "2", "3"}
        for envelope in envelopes:
            assert await envelope.acknowledge()
        await slack.socket.acknowledgements.first(lambda _: len(slack.socket.acknowledgements) == 4, wanted="number 4")
        await old.close()
        await slack.socket.wait_for_connections(1)
        slack.say("after")
        assert await text_of(await next_envelope(socket)) == "after"


async def test_announced_connection_is_closed_in_the_end(slack: FakeSlack, slack_client: SlackClient) -> None:
    """A connection whose end was announced does not stay open for ever if Slack forgets to close it."""
    async with open_slack_socket(slack_client, drain=0.2, **QUICK):
        await slack.socket.wait_for_connections(1)
        await slack.socket.request_disconnect("warning")
        await slack.socket.wait_for_connections(2)
        await slack.socket.wait_for_connections(1)
        assert slack.socket.opened == 2


async def test_link_disabled_is_fatal(slack: FakeSlack, slack_client: SlackClient) -> None:
    """Switched-off Socket Mode is a permanent error that says what to do."""

    async def stay_connected() -> None:
        async with open_slack_socket(slack_client, **QUICK):
            await slack.socket.wait_for_connections(1)
            await slack.socket.request_disconnect("link_disabled", close=True)
            await trio.sleep_forever()

    with pytest.raises(PlatformError, match="settings") as caught, trio.fail_after(5):
        await stay_connected()
    assert (caught.value.kind, caught.value.permanent) == (PlatformErrorKind.FORBIDDEN, True)


async def test_wrong_app_token_is_fatal(slack: FakeSlack) -> None:
    """A wrong app-level token is permanent and is not shown."""
    async with SlackClient(slack.base_url, slack.token, app_token="xapp-wrong") as client:
        with pytest.raises(PlatformError) as caught, trio.fail_after(5):
            async with open_slack_socket(client, **QUICK):
                await trio.sleep_forever()
    assert (caught.value.kind, caught.value.permanent) == (PlatformErrorKind.UNAUTHORIZED, True)
    assert "xapp-wrong" not in str(caught.value)


async def test_short_outage_is_ridden_out(slack: FakeSlack, slack_client: SlackClient) -> None:
    """A few failed attempts in a row are retried, and the connection comes up."""
    slack.fail("apps.connections.open", ServerError(), times=3)
    async with open_slack_socket(slack_client, **QUICK):
        await slack.socket.wait_for_connections(1)


async def test_long_outage_is_the_owners(slack: FakeSlack, slack_client: SlackClient) -> None:
    """When every attempt failed, the transient error leaves the block; the ticket of the address is not in it."""
    slack.socket.refuse_connections = True
    with pytest.raises(PlatformError) as caught, trio.fail_after(5):
        async with open_slack_socket(slack_client, **QUICK):
            await trio.sleep_forever()
    assert (caught.value.kind, caught.value.permanent) == (PlatformErrorKind.TRANSIENT, False)
    assert "ticket" not in str(caught.value)


async def test_leaving_closes_the_connection(slack: FakeSlack, slack_client: SlackClient) -> None:
    """Leaving the block closes the connection, also while envelopes are waiting."""
    async with open_slack_socket(slack_client, **QUICK):
        slack.say("unread")
        await slack.socket.wait_for_connections(1)
    await slack.socket.wait_for_connections(0)


async def test_the_blocks_own_error_leaves_as_it_is(slack: FakeSlack, slack_client: SlackClient) -> None:
    """An exception of the user's code is not wrapped in a group."""
    with pytest.raises(KeyError):
        async with open_slack_socket(slack_client, **QUICK):
            raise KeyError("mine")
