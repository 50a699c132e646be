"""The Discord REST client against the fake, over real sockets."""

from __future__ import annotations

import logging

import pytest
import trio
from trio.testing import MockClock

from hermes_trio.adapters.discord.client import DiscordClient, Interaction, InteractionResponse
from hermes_trio.adapters.discord.rate_limits import RateLimits
from hermes_trio.messaging.errors import Missing, PlatformError, PlatformErrorKind
from hermes_trio.testing.platforms import Drop, FakeDiscord, RateLimited, ServerError, open_fake_discord

CHANNEL = "500"
BUTTONS = [{"type": 1, "components": [{"type": 2, "style": 3, "label": "Yes", "custom_id": "approve:1"}]}]


async def refused(awaitable) -> PlatformError:
    with pytest.raises(PlatformError) as caught, trio.fail_after(5):
        await awaitable
    return caught.value


async def test_current_user(discord: FakeDiscord, discord_client: DiscordClient) -> None:
    """The bot's own user is read."""
    me = await discord_client.get_current_user()
    assert (me.id, me.bot) == ("8000", True)


async def test_wrong_token_is_permanent_and_never_shown(discord: FakeDiscord, caplog: pytest.LogCaptureFixture) -> None:
    """A wrong token is UNAUTHORIZED for good, and appears in no text and no log."""
    with caplog.at_level(logging.DEBUG):
        async with DiscordClient(discord.base_url, "wrong-token") as client:
            error = await refused(client.get_current_user())
    assert (error.kind, error.permanent) == (PlatformErrorKind.UNAUTHORIZED, True)
    assert "wrong-token" not in f"{error!r} {client!r} {caplog.text}"


async def test_message_with_reply_and_buttons(discord: FakeDiscord, discord_client: DiscordClient) -> None:
    """create_message carries content, reply anchor and components, and allows no mention."""
    asked = discord.say("question", channel_id=CHANNEL)
    sent = await discord_client.create_message(CHANNEL, "answer", reply_to=asked["id"], components=BUTTONS)
    seen = await discord.wait_for_message(channel_id=CHANNEL, containing="answer")
    assert (seen.id, seen.reply_to, seen.buttons[0]["label"]) == (sent.id, asked["id"], "Yes")
    assert discord.calls[-1].params["allowed_mentions"]["parse"] == []


async def test_reply_to_a_deleted_message_is_sent_anyway(discord: FakeDiscord, discord_client: DiscordClient) -> None:
    """A reply anchor that is gone costs the anchor, not the message."""
    discord.add_channel(CHANNEL)
    await discord_client.create_message(CHANNEL, "answer", reply_to="999")
    assert (await discord.wait_for_message(channel_id=CHANNEL)).reply_to is None


async def test_nonce_makes_sending_repeatable(discord: FakeDiscord, discord_client: DiscordClient) -> None:
    """After a lost answer, the same nonce gives the first message again instead of a second one."""
    discord.add_channel(CHANNEL)
    discord.fail("create_message", Drop(before=False))
    error = await refused(discord_client.create_message(CHANNEL, "once", nonce="n-1"))
    assert (error.kind, error.ambiguous) == (PlatformErrorKind.TRANSIENT, True)
    await discord_client.create_message(CHANNEL, "once", nonce="n-1")
    assert len(discord.messages) == 1


async def test_edit_delete_typing_and_channel(discord: FakeDiscord, discord_client: DiscordClient) -> None:
    """Messages are edited and deleted, typing is shown, and channels are described."""
    discord.add_channel(CHANNEL, "general")
    message = await discord_client.create_message(CHANNEL, "thinking", components=BUTTONS)
    await discord_client.trigger_typing(CHANNEL)
    await discord_client.edit_message(CHANNEL, message.id, "done", components=[])
    seen = await discord.wait_for_message(channel_id=CHANNEL, containing="done")
    assert (seen.versions, seen.components, list(discord.typing)) == (["thinking", "done"], [], [CHANNEL])
    await discord_client.delete_message(CHANNEL, message.id)
    assert seen.deleted
    error = await refused(discord_client.edit_message(CHANNEL, message.id, "late"))
    assert (error.kind, error.missing, error.code) == (PlatformErrorKind.NOT_FOUND, Missing.MESSAGE, 10008)
    channel = await discord_client.get_channel(CHANNEL)
    assert (channel.name, channel.is_thread) == ("general", False)


async def test_direct_message_and_threads(discord: FakeDiscord, discord_client: DiscordClient) -> None:
    """A direct-message channel can be opened; threads start from a message or alone, and are channels."""
    dm = await discord_client.create_dm("42")
    await discord_client.create_message(dm.id, "hello")
    asked = discord.say("question", channel_id=CHANNEL)
    thread = await discord_client.start_thread(CHANNEL, "topic", message_id=asked["id"])
    assert (thread.id, thread.parent_id, thread.is_thread) == (asked["id"], CHANNEL, True)
    await discord_client.create_message(thread.id, "in the thread")
    assert (await discord_client.start_thread(CHANNEL, "alone")).is_thread
    error = await refused(discord_client.start_thread(CHANNEL, "again", message_id=asked["id"]))
    assert error.code == 160004


@pytest.mark.parametrize(
    ("content", "components", "kind", "where"),
    [
        ("a" * 2001, None, PlatformErrorKind.TOO_LONG, "content"),
        ("  ", None, PlatformErrorKind.BAD_FORMAT, "empty"),
        ("a", [{"type": 2}], PlatformErrorKind.BAD_FORMAT, "components.0.type"),
        ("a", [{"type": 1, "components": [{"type": 2, "style": 1}]}], PlatformErrorKind.BAD_FORMAT, "custom_id"),
        (
            "a",
            [{"type": 1, "components": [{"type": 2, "style": 1, "custom_id": "x", "label": "y" * 81}]}],
            PlatformErrorKind.BAD_FORMAT,
            "components.0.components.0.label",
        ),
    ],
)
async def test_refused_messages(
    discord: FakeDiscord,
    discord_client: DiscordClient,
    content: str,
    components: list,
    kind: PlatformErrorKind,
    where: str,
) -> None:
    """What Discord refuses is refused here, with the path into the body, and nothing is sent."""
    discord.add_channel(CHANNEL)
    error = await refused(discord_client.create_message(CHANNEL, content, components=components))
    assert (error.kind, error.permanent) == (kind, True)
    assert where in error.message
    assert len(discord.messages) == 0


async def test_unknown_and_forbidden_channels(discord: FakeDiscord, discord_client: DiscordClient) -> None:
    """An unknown channel is NOT_FOUND, one without permission FORBIDDEN."""
    missing = await refused(discord_client.create_message("777", "hello"))
    discord.add_channel(CHANNEL)
    discord.forbid(CHANNEL)
    forbidden = await refused(discord_client.create_message(CHANNEL, "hello"))
    assert (missing.missing, missing.code) == (Missing.CHAT, 10003)
    assert (forbidden.kind, forbidden.code) == (PlatformErrorKind.FORBIDDEN, 50013)


async def test_server_error_is_transient(discord: FakeDiscord, discord_client: DiscordClient) -> None:
    """A 5xx with a page that is no JSON is transient, and may have been carried out."""
    discord.fail("get_current_user", ServerError(503))
    error = await refused(discord_client.get_current_user())
    assert (error.kind, error.ambiguous, error.code) == (PlatformErrorKind.TRANSIENT, True, 503)


async def test_exhausted_bucket_is_waited_for(discord: FakeDiscord, discord_client: DiscordClient) -> None:
    """The client waits for a bucket's reset instead of running into 429; another channel is not held up."""
    discord.add_channel(CHANNEL)
    discord.add_channel("501")
    discord.limit("create_message", calls=2, per=0.1)
    for number in range(5):
        await discord_client.create_message(CHANNEL, f"message {number}")
        await discord_client.create_message("501", f"message {number}")
    assert [call.status for call in discord.calls] == [200] * 10


async def test_scripted_limits_block_one_bucket_or_all(discord: FakeDiscord) -> None:
    """After a 429 the client itself refuses further calls of that bucket; after a global one, all calls."""
    discord.add_channel(CHANNEL)
    async with DiscordClient(discord.base_url, discord.token, max_wait=0) as client:
        discord.fail("create_message", RateLimited(30))
        first = await refused(client.create_message(CHANNEL, "hello"))
        second = await refused(client.create_message(CHANNEL, "hello"))
        await client.trigger_typing(CHANNEL)
        discord.fail("trigger_typing", RateLimited(30, everywhere=True))
        await refused(client.trigger_typing(CHANNEL))
        third = await refused(client.get_current_user())
    assert {first.kind, second.kind, third.kind} == {PlatformErrorKind.RATE_LIMITED}
    assert first.retry_after == 30
    assert 29 < (second.retry_after or 0) <= 30
    assert [call.method for call in discord.calls] == ["create_message", "trigger_typing", "trigger_typing"]


async def test_rate_limits_in_virtual_time(autojump_clock: MockClock) -> None:
    """Concurrent calls of a bucket are spread over its windows, never more than it allows in one."""
    limits = RateLimits(max_wait=60)
    limits.learn(
        "send",
        "c",
        {"x-ratelimit-bucket": "b", "x-ratelimit-remaining": "2", "x-ratelimit-reset-after": "5"},
    )
    admitted: list[float] = []
    async with trio.open_nursery() as nursery:

        async def call() -> None:
            await limits.admit("send", "c")
            admitted.append(trio.current_time())

        start = trio.current_time()
        for _ in range(3):
            nursery.start_soon(call)
    assert [round(moment - start) for moment in admitted] == [0, 0, 5]


async def _interaction(discord: FakeDiscord, client: DiscordClient, interaction_id: str) -> Interaction:
    entry = next(i for i in discord._interactions.values() if i.id == interaction_id)
    return Interaction(id=entry.id, application_id="8000", type=3, token=entry.token, channel_id=entry.channel_id)


async def test_interaction_is_answered_once(discord: FakeDiscord, discord_client: DiscordClient) -> None:
    """A pressed button updates its message; a second answer is refused; its token is never shown."""
    discord.add_channel(CHANNEL)
    await discord_client.create_message(CHANNEL, "ok?", components=BUTTONS)
    message = await discord.wait_for_message(containing="ok?")
    interaction = await _interaction(discord, discord_client, discord.click(message, "Yes"))
    await discord_client.respond(interaction, InteractionResponse.UPDATE, "approved", components=[])
    assert (message.content, message.components) == ("approved", [])
    error = await refused(discord_client.respond(interaction, InteractionResponse.REPLY, "again"))
    assert error.code == 40060
    unknown = Interaction(id="1", application_id="8000", type=3, token="secret-interaction-token")
    error = await refused(discord_client.respond(unknown, InteractionResponse.REPLY, "x"))
    assert (error.kind, error.code) == (PlatformErrorKind.NOT_FOUND, 10062)
    assert "secret-interaction-token" not in f"{error!r} {unknown!r}"


async def test_slash_command_is_deferred_edited_and_followed_up(
    discord: FakeDiscord, discord_client: DiscordClient
) -> None:
    """A deferred answer is written later, and further messages follow."""
    interaction = await _interaction(discord, discord_client, discord.use_command("status", channel_id=CHANNEL))
    await discord_client.respond(interaction, InteractionResponse.REPLY_LATER)
    await discord_client.edit_response(interaction, "first")
    await discord_client.edit_response(interaction, "second")
    await discord_client.follow_up(interaction, "third", ephemeral=True)
    assert [(m.content, m.ephemeral, m.interaction_id) for m in discord.messages] == [
        ("second", False, interaction.id),
        ("third", True, interaction.id),
    ]


async def test_late_interaction_is_gone() -> None:
    """An interaction that was not answered in time is unknown."""
    async with (
        open_fake_discord(interaction_deadline=-1) as discord,
        DiscordClient(discord.base_url, discord.token) as client,
    ):
        interaction = await _interaction(discord, client, discord.use_command("status"))
        error = await refused(client.respond(interaction, InteractionResponse.REPLY, "late"))
    assert error.code == 10062


async def test_commands_are_overwritten_and_validated(discord: FakeDiscord, discord_client: DiscordClient) -> None:
    """The list of slash commands is replaced as a whole; bad names are refused."""
    await discord_client.overwrite_commands("8000", [{"name": "status", "description": "What is running"}])
    assert [command["name"] for command in discord.commands] == ["status"]
    error = await refused(discord_client.overwrite_commands("8000", [{"name": "Not Good", "description": "x"}]))
    assert (error.kind, "0.name" in error.message) == (PlatformErrorKind.BAD_FORMAT, True)
