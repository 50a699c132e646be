"""The Slack adapter against the fake: Socket Mode and the Events API, threads, mentions, buttons, commands, and Slack's two lengths."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
import trio

from hermes_trio import Turn
from hermes_trio.adapters.slack.adapter import SlackAdapter, slack_platform
from hermes_trio.adapters.slack.events import plain_text
from hermes_trio.base.settings import SettingsError
from hermes_trio.messaging.contract import Outgoing
from hermes_trio.messaging.platforms import Platform
from hermes_trio.testing.platforms import FakeSlack, RateLimited, open_fake_slack
from hermes_trio.testing.platforms.callback import post
from tests.messaging.harness import World, asks, scripted, works

from .platform_bench import Gate, open_bench, open_mount, tables_of

CHANNEL = "C700"


@pytest.fixture
async def fake() -> AsyncIterator[FakeSlack]:
    """A Slack of its own."""
    async with open_fake_slack() as opened:
        yield opened


def member(fake: FakeSlack, **more: Any) -> Platform:
    """The adapter for it."""
    table = {"token": fake.token, "app_token": fake.app_token, "base_url": fake.base_url, "allow_all": True, **more}
    made = slack_platform(table, {})
    assert made is not None
    return made


def adapter_of(made: Platform) -> SlackAdapter:
    assert isinstance(made.adapter, SlackAdapter)
    return made.adapter


@pytest.mark.one_node
@pytest.mark.parametrize(
    ("table", "words"),
    [
        ({"allow_all": True}, ["[slack]", "token is missing", "SLACK_BOT_TOKEN", "xoxb"]),
        ({"token": "xoxb-1"}, ["app_token is missing", "SLACK_APP_TOKEN", "xapp"]),
        ({"token": "xoxb-1", "mode": "events"}, ["signing_secret is missing", "SLACK_SIGNING_SECRET"]),
        ({"token": "xoxb-1", "mode": "rtm"}, ["mode is 'rtm'", "'socket', 'events'"]),
        ({"token": "xoxb-1", "mode": "events", "signing_secret": "s", "endpoint": "slack"}, ["endpoint is 'slack'"]),
    ],
)
def test_a_mistake_in_the_table_names_the_key_and_what_is_accepted(table: dict[str, Any], words: list[str]) -> None:
    """The error says what to change, and quotes no token."""
    with pytest.raises(SettingsError) as raised:
        slack_platform(table, {})
    assert all(word in str(raised.value) for word in words), raised.value
    assert "xoxb-1" not in str(raised.value)


@pytest.mark.one_node
def test_the_environment_is_enough() -> None:
    """Two tokens in the environment make an adapter; without them there is none."""
    made = slack_platform({}, {"SLACK_BOT_TOKEN": "xoxb-e", "SLACK_APP_TOKEN": "xapp-e"})
    assert made is not None
    assert (adapter_of(made).settings.token, adapter_of(made).settings.app_token) == ("xoxb-e", "xapp-e")
    assert slack_platform({}, {}) is None


@pytest.mark.one_node
def test_every_table_on_the_page_is_accepted() -> None:
    """The example in the documentation makes an adapter."""
    tables = tables_of("slack.md")
    assert len(tables) >= 3
    for table in tables:
        assert slack_platform(table["slack"], {}) is not None


@pytest.mark.one_node
@pytest.mark.parametrize(
    ("written", "read"),
    [
        ("1 &lt; 2 &amp;&amp; 3 &gt; 2", "1 < 2 && 3 > 2"),
        ("&amp;lt;", "&lt;"),
        (
            "see <https://example.org/a|the page> and <https://example.org>",
            "see the page (https://example.org/a) and https://example.org",
        ),
        ("<#C1|general> <@U7> <@U8|ann> <!here>", "#general @U7 @ann @here"),
    ],
)
def test_texts_are_read_as_people_wrote_them(written: str, read: str) -> None:
    """Slack escapes three characters and wraps links and mentions."""
    assert plain_text(written) == read


async def test_a_mention_opens_a_thread_in_which_nobody_must_mention_it_again(fake: FakeSlack) -> None:
    """The two events of a mention are one message; talk elsewhere is ignored; people in a shared thread are told apart."""
    async with open_bench(member(fake)) as world:
        fake.say("just talking", channel=CHANNEL)
        root = fake.say("what is up?", channel=CHANNEL, mention=True)
        first = await fake.wait_for_message(channel=CHANNEL)
        fake.say("and now?", user="U8", channel=CHANNEL, thread_ts=root)
        second = await fake.wait_for_message(channel=CHANNEL)
        fake.say("talking again", channel=CHANNEL)
        await world.idle()
        sessions = [one.session_key for one in await world.store.list_sessions()]
    assert (first.text, first.thread_ts) == ("echo: [Person U42] what is up?", root)
    assert (second.text, second.thread_ts) == ("echo: [Person U8] and now?", root)
    assert len(sessions) == 1
    assert len(fake.messages) == 2


async def test_files_without_words_are_named_to_the_agent(fake: FakeSlack) -> None:
    """Whoever sends only a file gets an answer, also for one that the app may not look into; words beside a file are what was said."""
    async with open_bench(member(fake)) as world:
        fake.share({"id": "F1", "name": "notes.txt"}, {"id": "F2", "title": "A plan"})
        assert (await fake.wait_for_message()).text == "echo: [attached: notes.txt, A plan]"
        fake.share()
        assert (await fake.wait_for_message()).text == "echo: [attached: a file]"
        fake.share({"id": "F3", "name": "notes.txt"}, text="look at this")
        assert (await fake.wait_for_message()).text == "echo: look at this"
        root = fake.share({"id": "F4", "mode": "file_access"}, channel=CHANNEL, mention=True)
        reply = await fake.wait_for_message(channel=CHANNEL)
        fake.share({"id": "F5", "name": "aside.txt"}, channel=CHANNEL)
        await world.idle()
    assert (reply.text, reply.thread_ts) == ("echo: [Person U42] [attached: a file]", root)
    assert len(fake.messages) == 4


async def test_without_threads_the_reply_stands_in_the_channel(fake: FakeSlack) -> None:
    """`reply_in_thread = false` answers where the mention stood."""
    async with open_bench(member(fake, reply_in_thread=False)):
        fake.say("hello", channel=CHANNEL, mention=True)
        reply = await fake.wait_for_message(channel=CHANNEL)
    assert (reply.text, reply.thread_ts) == ("echo: hello", None)


async def test_commands_have_an_exclamation_mark_and_only_known_ones_are_commands(fake: FakeSlack) -> None:
    """Slack keeps slashes for itself; a sentence that begins with the mark is a sentence."""
    async with open_bench(member(fake)):
        fake.say("!status")
        assert "idle" in (await fake.wait_for_message()).text
        fake.say("!important: read this")
        assert (await fake.wait_for_message()).text == "echo: !important: read this"


async def test_slash_commands_are_commands_or_text_and_are_acknowledged(fake: FakeSlack) -> None:
    """`/hermes status` and `/status` are the command, `/hermes` something else is for the agent."""
    async with open_bench(member(fake)) as world:
        fake.use_command("/hermes", "status")
        await fake.wait_for_message(containing="idle")
        fake.use_command("/hermes-status")
        await fake.wait_for_message(containing="idle")
        fake.use_command("/hermes", "good morning")
        await fake.wait_for_message(containing="echo: good morning")
        await world.idle()
        acknowledged = [one.payload["text"] for one in fake.socket.acknowledgements if one.kind == "slash_commands"]
    assert acknowledged == [
        "`!status` is answered here.",
        "`!status` is answered here.",
        "`good morning` is answered here.",
    ]


async def test_a_button_resolves_the_approval_and_goes_away(fake: FakeSlack) -> None:
    """The question is in blocks; pressing a button tells the person, and leaves the question without buttons."""
    worlds: list[World] = []
    async with open_bench(member(fake), scripted(asks(lambda: worlds[0], "echo '<&>'"))) as world:
        worlds.append(world)
        root = fake.say("do it", channel=CHANNEL, mention=True)
        question = await fake.wait_for_message(channel=CHANNEL, containing="Approval needed")
        assert question.thread_ts == root
        assert [block["type"] for block in question.blocks] == ["section", "actions"]
        fake.click(question, "Allow once")
        await fake.wait_for_message(channel=CHANNEL, containing="allowed")
        told = await fake.wait_for_message(channel=CHANNEL, containing="Approved (once): ")
        await world.idle()
    assert told.ephemeral_for is not None
    assert question.buttons == []
    assert question.text.endswith("Approved (once).")


@pytest.mark.one_node
async def test_an_envelope_is_acknowledged_only_when_the_gateway_has_it(fake: FakeSlack) -> None:
    """Cancelled before that, Slack delivers it again to the next connection."""
    adapter, gate = adapter_of(member(fake)), Gate()
    adapter.gateway = gate
    async with adapter.open():
        for held in (True, False):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(adapter.run, lambda: None)
                if held:
                    fake.say("keep me")
                else:
                    gate.opened.set()
                with trio.fail_after(10):
                    await gate.arrived.wait()
                gate.arrived = trio.Event()
                if not held:
                    await fake.socket.acknowledgements.first(lambda one: True, wanted="of it")
                assert len(fake.socket.acknowledgements) == (0 if held else 1)
                nursery.cancel_scope.cancel()
    assert [one.text for one in gate.received] == ["keep me", "keep me"]
    assert len({one.event_id for one in gate.received}) == 1


async def test_an_event_that_slack_repeats_is_one_message() -> None:
    """A turn that is accepted too slowly for Slack is delivered twice, and begun once."""
    async with open_fake_slack(ack_timeout=0.02, retry_delay=0.01) as fake, open_bench(member(fake)) as world:
        for number in range(5):
            fake.say(f"message {number}")
            await fake.wait_for_message(containing=f"message {number}")
        await world.idle()
        assert len(fake.messages) == 5


@pytest.mark.one_node
async def test_long_texts_know_both_of_slacks_limits(fake: FakeSlack) -> None:
    """Nothing is cut silently; an edit that is too long becomes a new message, and the old one goes away."""
    adapter = adapter_of(member(fake))
    fake.add_channel(CHANNEL)
    async with adapter.open():
        heavy = "&" * 9_000
        pieces = adapter.split(heavy)
        for piece in pieces:
            assert (await adapter.send(Outgoing(chat_id=CHANNEL, text=piece))).success
        first = await adapter.send(Outgoing(chat_id=CHANNEL, text="a preview"))
        shown = await adapter.edit(CHANNEL, "", first.message_id, "long " * 2_000)
        assert shown.success
        last = await adapter.send(Outgoing(chat_id=CHANNEL, text="long " * 2_000, edits=first.message_id))
    assert len(pieces) == 2
    assert not any(one.truncated for one in fake.messages)
    preview = next(one for one in fake.messages if one.ts == first.message_id)
    assert preview.deleted
    assert last.message_id != first.message_id
    assert len(preview.versions[1]) <= 4_000


@pytest.mark.one_node
async def test_a_reply_to_a_thread_that_is_gone_stands_in_the_channel(fake: FakeSlack) -> None:
    """It is not lost."""
    adapter = adapter_of(member(fake))
    fake.add_channel(CHANNEL)
    async with adapter.open():
        assert (await adapter.send(Outgoing(chat_id=CHANNEL, thread_id="1.0", text="hello"))).success
    assert [(one.text, one.thread_ts) for one in fake.messages] == [("hello", None)]


async def test_a_rate_limit_is_waited_for(fake: FakeSlack) -> None:
    """The reply is sent after the time that Slack names, once."""
    fake.fail("chat.postMessage", RateLimited(1))
    async with open_bench(member(fake)) as world:
        fake.say("hello")
        await fake.wait_for_message(containing="hello")
        await world.idle()
    assert len(fake.messages) == 1


async def test_an_answer_is_shown_while_it_is_written(fake: FakeSlack) -> None:
    """With `stream`, one message grows into the answer."""

    async def writes(turn: Turn) -> str:
        for word in ("The first part of a long answer, ", "then the **second** part."):
            turn.emit("message.delta", delta=word)
            await trio.sleep(1.0)
        return "The first part of a long answer, then the **second** part."

    async with open_bench(member(fake, stream=True), scripted(writes)) as world:
        fake.say("tell me")
        await fake.wait_for_message(containing="The first part")
        await world.idle()
    (shown,) = fake.messages
    assert shown.versions[0] == "The first part of a long answer, …"
    assert shown.text == "The first part of a long answer, then the *second* part."


async def test_a_lost_connection_is_replaced_and_nothing_is_lost(fake: FakeSlack) -> None:
    """What was said meanwhile is delivered over the next connection, and answered once."""
    async with open_bench(member(fake)) as world:
        fake.say("one")
        await fake.wait_for_message(containing="one")
        await fake.socket.drop_connections()
        fake.say("two")
        await fake.wait_for_message(containing="two")
        await world.idle()
    assert [one.text for one in fake.messages] == ["echo: one", "echo: two"]


async def test_a_slow_turn_does_not_hold_up_what_comes_in(fake: FakeSlack) -> None:
    """Messages are acknowledged when they are stored, not when they are answered."""
    async with open_bench(member(fake), scripted(works(0.5, "slow"))):
        fake.say("first", user="U1")
        fake.say("second", user="U2")
        await fake.wait_for_message(containing="second")
        assert len(fake.messages) == 1
        await fake.wait_for_message(containing="slow")


# -- the Events API ---------------------------------------------------------------------------------------------------------------


async def test_the_events_api_carries_everything_with_a_signature(fake: FakeSlack) -> None:
    """Verification, messages, clicks and commands arrive at the request URL; what is not signed is refused."""
    worlds: list[World] = []
    made = member(fake, mode="events", signing_secret=fake.signing_secret, app_token="")
    async with open_mount(adapter_of(made)) as server:
        fake.use_request_url(f"{server.url}/slack/events")
        async with open_bench(made, scripted(asks(lambda: worlds[0]))) as world:
            worlds.append(world)
            assert await fake.verify_request_url()
            fake.say("delete it", channel=CHANNEL, mention=True)
            question = await fake.wait_for_message(channel=CHANNEL, containing="Approval needed")
            fake.click(question, "Allow once")
            await fake.wait_for_message(channel=CHANNEL, containing="allowed")
            fake.use_command("/hermes", "status")
            await fake.wait_for_message(containing="idle")
            await world.idle()
            assert {callback.status for callback in fake.deliveries.callbacks} == {200}
            signed = fake.deliveries.callbacks[0]
            forged = {**signed.headers, "X-Slack-Signature": "v0=" + "0" * 64}
            assert (await post(signed.url, forged, signed.body, timeout=5)).status == 401
            assert (await post(signed.url, {}, signed.body, timeout=5)).status == 401
            assert (await post(signed.url, signed.headers, signed.body + b" ", timeout=5)).status == 401
