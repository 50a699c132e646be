"""The Gateway connection against the fake Gateway: events, heartbeats, resuming, and fatal closes."""

from __future__ import annotations

import pytest
import trio

from hermes_trio.adapters.discord.client import DiscordClient
from hermes_trio.adapters.discord.gateway import (
    DEFAULT_INTENTS,
    DiscordGateway,
    Dispatch,
    GatewayStatus,
    Intents,
    open_discord_gateway,
)
from hermes_trio.adapters.wire.backoff import Backoff
from hermes_trio.messaging.errors import PlatformError, PlatformErrorKind
from hermes_trio.testing.platforms import FakeDiscord, ServerError, open_fake_discord

CHANNEL = "500"
QUICK = {"backoff": Backoff(first=0.01, cap=0.02, attempts=4), "identify_interval": 0, "invalid_session_delay": (0, 0)}


async def next_event(gateway: DiscordGateway, name: str) -> Dispatch:
    """The next event of this name, which has not been handled; those before it are read and dropped."""
    with trio.fail_after(5):
        async for event in gateway.events:
            if event.name == name:
                return event
            event.session.settle(event.sequence)
    raise AssertionError(f"the events ended before {name}")


async def next_text(gateway: DiscordGateway) -> str:
    event = await next_event(gateway, "MESSAGE_CREATE")
    message = event.message()
    assert message is not None
    event.session.settle(event.sequence)
    return message.content


async def test_events_arrive_in_order(discord: FakeDiscord, discord_client: DiscordClient) -> None:
    """READY comes first, then what people do: messages, threads, interactions."""
    async with open_discord_gateway(discord_client, **QUICK) as gateway:
        ready = await next_event(gateway, "READY")
        assert ready.data["user"]["id"] == "8000"
        assert gateway.status is GatewayStatus.READY
        discord.say("in private")
        discord.say("in the channel", channel_id=CHANNEL, mention=True)
        thread_id = discord.start_thread(CHANNEL, "topic")
        discord.use_command("status", options={"verbose": True}, user_id="7", channel_id=CHANNEL)
        assert await next_text(gateway) == "in private"
        mentioned = (await next_event(gateway, "MESSAGE_CREATE")).message()
        assert mentioned is not None
        assert (mentioned.mentions[0].id, mentioned.guild_id) == ("8000", discord.guild_id)
        thread = (await next_event(gateway, "THREAD_CREATE")).thread()
        assert thread is not None
        assert (thread.id, thread.parent_id) == (thread_id, CHANNEL)
        interaction = (await next_event(gateway, "INTERACTION_CREATE")).interaction()
        assert interaction is not None
        assert interaction.person is not None
        assert (interaction.data["name"], interaction.person.id) == ("status", "7")


async def test_content_needs_its_intent(discord: FakeDiscord, discord_client: DiscordClient) -> None:
    """Without MESSAGE_CONTENT a guild message is empty, except where the bot is mentioned."""
    intents = DEFAULT_INTENTS & ~Intents.MESSAGE_CONTENT
    async with open_discord_gateway(discord_client, intents=intents, **QUICK) as gateway:
        await next_event(gateway, "READY")
        discord.say("secret", channel_id=CHANNEL)
        discord.say("hello", channel_id=CHANNEL, mention=True)
        assert await next_text(gateway) == ""
        assert "hello" in await next_text(gateway)


@pytest.mark.parametrize("fault", ["drop", "reconnect", "close", "invalid"])
async def test_lost_connection_is_resumed_without_loss(
    discord: FakeDiscord, discord_client: DiscordClient, fault: str
) -> None:
    """After a lost connection the session is resumed, and what happened meanwhile arrives once, in order."""
    async with open_discord_gateway(discord_client, **QUICK) as gateway:
        await next_event(gateway, "READY")
        discord.say("before")
        assert await next_text(gateway) == "before"
        match fault:
            case "drop":
                await discord.gateway.drop_connections()
            case "reconnect":
                await discord.gateway.request_reconnect()
            case "close":
                await discord.gateway.close_connections(4000)
            case _:
                await discord.gateway.invalidate_sessions(resumable=True)
        discord.say("meanwhile")
        await discord.gateway.wait_for("resume")
        discord.say("after")
        assert [await next_text(gateway), await next_text(gateway)] == ["meanwhile", "after"]
        assert gateway.reconnects == 1
    kinds = [entry.kind for entry in discord.gateway.log]
    assert kinds.count("identify") == 1


async def test_invalid_session_begins_a_new_one(discord: FakeDiscord, discord_client: DiscordClient) -> None:
    """A session that cannot be resumed is replaced by a new one, which starts counting again."""
    async with open_discord_gateway(discord_client, **QUICK) as gateway:
        await next_event(gateway, "READY")
        await discord.gateway.invalidate_sessions(resumable=False)
        again = await next_event(gateway, "READY")
        assert again.data["session_id"] == "session-2"
        discord.say("hello again")
        assert await next_text(gateway) == "hello again"


async def test_forgotten_session_begins_a_new_one(discord: FakeDiscord, discord_client: DiscordClient) -> None:
    """Resuming a session that the Gateway has forgotten ends in a new session."""
    async with open_discord_gateway(discord_client, **QUICK) as gateway:
        await next_event(gateway, "READY")
        discord.gateway.forget_sessions()
        await discord.gateway.drop_connections()
        assert (await next_event(gateway, "READY")).data["session_id"] == "session-2"


@pytest.mark.parametrize("code", [4007, 4009])
async def test_close_codes_that_end_the_session(discord: FakeDiscord, discord_client: DiscordClient, code: int) -> None:
    """After 4007 and 4009 the client identifies anew instead of resuming."""
    async with open_discord_gateway(discord_client, **QUICK) as gateway:
        await next_event(gateway, "READY")
        await discord.gateway.close_connections(code)
        await next_event(gateway, "READY")
    assert "resume" not in [entry.kind for entry in discord.gateway.log]


async def test_missing_heartbeat_ack_reconnects() -> None:
    """A connection on which heartbeats are not acknowledged is dropped and the session resumed."""
    async with (
        open_fake_discord(heartbeat_interval=0.1) as discord,
        DiscordClient(discord.base_url, discord.token) as client,
        open_discord_gateway(client, **QUICK) as gateway,
    ):
        await next_event(gateway, "READY")
        await discord.gateway.wait_for("heartbeat", count=3)
        assert gateway.reconnects == 0
        discord.gateway.mute_heartbeats = True
        await discord.gateway.wait_for("resume")
        discord.gateway.mute_heartbeats = False
        discord.say("alive")
        assert await next_text(gateway) == "alive"


async def test_requested_heartbeat_is_sent_at_once(discord: FakeDiscord, discord_client: DiscordClient) -> None:
    """Opcode 1 from the Gateway is answered without waiting for the interval, with the number up to which all events have been handled."""
    async with open_discord_gateway(discord_client, **QUICK) as gateway:
        guild = await next_event(gateway, "GUILD_CREATE")
        await discord.gateway.request_heartbeat()
        assert (await discord.gateway.wait_for("heartbeat")).detail == 1
        with guild.handling():
            discord.say("not handled")
        await next_event(gateway, "MESSAGE_CREATE")
        await discord.gateway.request_heartbeat()
        assert (await discord.gateway.wait_for("heartbeat", count=2)).detail == 2


async def next_texts(gateway: DiscordGateway, count: int) -> list[Dispatch]:
    return [await next_event(gateway, "MESSAGE_CREATE") for _ in range(count)]


async def test_a_session_that_is_taken_over_brings_what_was_not_handled(
    discord: FakeDiscord, discord_client: DiscordClient
) -> None:
    """What failed, what was not read and what is new comes, in order; what was handled in between does not come again."""
    async with open_discord_gateway(discord_client, **QUICK) as gateway:
        await next_event(gateway, "READY")
        for number in range(5):
            discord.say(str(number))
        handled, failed, again, _ = await next_texts(gateway, 4)
        for event in (handled, again):
            with event.handling():
                pass
        with pytest.raises(KeyError), failed.handling():
            raise KeyError("mine")
        session = gateway.session
    assert session is not None
    discord.say("5")
    async with open_discord_gateway(discord_client, session, **QUICK) as gateway:
        assert [await next_text(gateway) for _ in range(4)] == ["1", "3", "4", "5"]
        # The connection is lost, and nothing is replayed that this user has read.
        await discord.gateway.drop_connections()
        discord.say("6")
        assert await next_text(gateway) == "6"
    resumed = [entry.detail for entry in discord.gateway.log if entry.kind == "resume"]
    assert resumed[0] == failed.sequence - 1


async def test_a_session_that_is_taken_over_and_was_forgotten_is_replaced(
    discord: FakeDiscord, discord_client: DiscordClient
) -> None:
    """Events of the old session that are handled late do not count for the new one."""
    async with open_discord_gateway(discord_client, **QUICK) as gateway:
        await next_event(gateway, "READY")
        discord.say("lost")
        lost = await next_event(gateway, "MESSAGE_CREATE")
        session = gateway.session
    discord.gateway.forget_sessions()
    async with open_discord_gateway(discord_client, session, **QUICK) as gateway:
        await next_event(gateway, "READY")
        discord.say("new")
        new = await next_event(gateway, "MESSAGE_CREATE")
        assert lost.sequence == new.sequence
        with lost.handling():
            pass
        assert gateway.session is not None
        assert gateway.session.handled == new.sequence - 1


async def test_what_the_gateway_does_not_replay_blocks_nothing(
    discord: FakeDiscord, discord_client: DiscordClient, caplog: pytest.LogCaptureFixture
) -> None:
    """An event that was not handled, and that Discord has no longer, is given up with a line in the log."""
    async with open_discord_gateway(discord_client, **QUICK) as gateway:
        await next_event(gateway, "READY")
        discord.say("lost")
        lost = await next_event(gateway, "MESSAGE_CREATE")
        session = gateway.session
    assert session is not None
    discord.gateway._sessions[session.id].events[lost.sequence - 1] = {"op": 11}
    async with open_discord_gateway(discord_client, session, **QUICK) as gateway:
        await next_event(gateway, "RESUMED")
        discord.say("new")
        assert await next_text(gateway) == "new"
        assert session.handled > lost.sequence
    assert "did not replay 1 events" in caplog.text


async def test_wrong_token_is_fatal(discord: FakeDiscord) -> None:
    """Close code 4004 ends the block with a permanent error that does not show the token."""
    async with DiscordClient(discord.base_url, discord.token) as client:
        client.token = "wrong-token"
        with pytest.raises(PlatformError) as caught, trio.fail_after(5):
            async with open_discord_gateway(client, **QUICK):
                await trio.sleep_forever()
    assert (caught.value.kind, caught.value.permanent, caught.value.code) == (
        PlatformErrorKind.UNAUTHORIZED,
        True,
        4004,
    )
    assert "wrong-token" not in str(caught.value)


async def test_disallowed_intents_are_fatal() -> None:
    """Close code 4014 is permanent and says what to do."""
    async with (
        open_fake_discord(disallowed_intents=Intents.MESSAGE_CONTENT) as discord,
        DiscordClient(discord.base_url, discord.token) as client,
    ):
        with pytest.raises(PlatformError, match="developer portal") as caught, trio.fail_after(5):
            async with open_discord_gateway(client, **QUICK):
                await trio.sleep_forever()
    assert (caught.value.kind, caught.value.code) == (PlatformErrorKind.FORBIDDEN, 4014)


async def test_short_outage_is_ridden_out(discord: FakeDiscord, discord_client: DiscordClient) -> None:
    """A few failed attempts in a row are retried, and the connection comes up."""
    discord.fail("get_gateway_bot", ServerError(), times=3)
    async with open_discord_gateway(discord_client, **QUICK) as gateway:
        await next_event(gateway, "READY")
    assert [call.status for call in discord.calls] == [502, 502, 502, 200]


async def test_long_outage_is_the_owners(discord: FakeDiscord, discord_client: DiscordClient) -> None:
    """When every attempt failed, the transient error leaves the block, for a supervisor to back off longer."""
    discord.gateway.refuse_connections = True
    with pytest.raises(PlatformError) as caught, trio.fail_after(5):
        async with open_discord_gateway(discord_client, **QUICK):
            await trio.sleep_forever()
    assert (caught.value.kind, caught.value.permanent) == (PlatformErrorKind.TRANSIENT, False)


async def test_no_session_start_left(discord: FakeDiscord, discord_client: DiscordClient) -> None:
    """With no session start left the client does not connect, and says how long to wait."""
    discord.gateway.session_starts_left = 0
    with pytest.raises(PlatformError) as caught, trio.fail_after(5):
        async with open_discord_gateway(discord_client, backoff=Backoff(attempts=1)):
            await trio.sleep_forever()
    assert (caught.value.kind, caught.value.retry_after) == (PlatformErrorKind.RATE_LIMITED, 60)
    assert len(discord.gateway.log) == 0


async def test_identify_is_spaced() -> None:
    """A second IDENTIFY waits for the interval that the Gateway asks for."""
    async with (
        open_fake_discord(identify_interval=0.05) as discord,
        DiscordClient(discord.base_url, discord.token) as client,
        open_discord_gateway(client, **(QUICK | {"identify_interval": 0.6})) as gateway,
    ):
        await next_event(gateway, "READY")
        await discord.gateway.invalidate_sessions(resumable=False)
        await next_event(gateway, "READY")
        assert [entry.kind for entry in discord.gateway.log].count("connected") == 2


async def test_slow_reader_does_not_lose_the_connection() -> None:
    """A reader that stops reading for many heartbeats gets every event afterwards, on the same connection."""
    async with (
        open_fake_discord(heartbeat_interval=0.1) as discord,
        DiscordClient(discord.base_url, discord.token) as client,
        open_discord_gateway(client, **QUICK) as gateway,
    ):
        await next_event(gateway, "READY")
        for number in range(200):
            discord.say(str(number))
        await discord.gateway.wait_for("heartbeat", count=6)
        assert [await next_text(gateway) for _ in range(200)] == [str(number) for number in range(200)]
        assert gateway.reconnects == 0


async def test_leaving_ends_the_session_and_the_connection(discord: FakeDiscord, discord_client: DiscordClient) -> None:
    """Leaving the block closes the connection at once, also while events are waiting."""
    async with open_discord_gateway(discord_client, **QUICK) as gateway:
        await next_event(gateway, "READY")
        discord.say("unread")
    await discord.gateway.wait_for("closed")
    assert not discord.gateway._connections


async def test_the_blocks_own_error_leaves_as_it_is(discord: FakeDiscord, discord_client: DiscordClient) -> None:
    """An exception of the user's code is not wrapped in a group."""
    with pytest.raises(KeyError):
        async with open_discord_gateway(discord_client, **QUICK):
            raise KeyError("mine")
