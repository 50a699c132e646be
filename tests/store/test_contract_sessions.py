"""The contract of sessions and transcripts."""

from __future__ import annotations

import pytest

from hermes_trio.runtime.ports import Message
from hermes_trio.store import (
    InvalidTitle,
    Lineage,
    NewSession,
    Page,
    SearchQuery,
    SessionExists,
    SessionFilter,
    Store,
    TitleTaken,
    UnknownSession,
)
from hermes_trio.testing.rows import grant_category, inbox_states

from .conftest import Backend, Clock
from .turns import KEY, context, finish, message, notice, start


async def test_resolving_a_key_twice_gives_one_session(store: Store) -> None:
    """A key leads to its open session; `fresh` puts a new one there and leaves the old one as it was."""
    first = await store.resolve_session(context(""), source="telegram")
    again = await store.resolve_session(context(""), source="telegram")
    fresh = await store.resolve_session(context(""), source="telegram", fresh=True)
    behind = await store.session_of(KEY)

    assert first == again
    assert fresh != first
    assert behind is not None
    assert behind.id == fresh


async def test_an_ended_session_is_not_reused_unless_it_was_idle(store: Store) -> None:
    """A session that ended as idle is reopened by the next message; any other end stands, and a new one is made."""
    first = await store.resolve_session(context(""), source="telegram")
    await store.end_session(first, "idle")
    reopened = await store.resolve_session(context(""), source="telegram")
    await store.end_session(first, "session_reset")
    second = await store.resolve_session(context(""), source="telegram")

    assert reopened == first
    assert second != first


async def test_the_first_end_reason_wins(store: Store) -> None:
    """Ending twice keeps the first reason; reopening is explicit and makes a new end possible."""
    await store.create_session(NewSession(id="s1", source="cli"))

    assert await store.end_session("s1", "cli_close") is True
    assert await store.end_session("s1", "idle") is False
    ended = await store.get_session("s1")
    assert await store.reopen_session("s1") is True
    assert await store.reopen_session("s1") is False
    assert await store.end_session("s1", "idle") is True
    assert await store.end_session("unknown", "idle") is False

    assert ended is not None
    assert ended.end_reason == "cli_close"


async def test_ending_a_session_abandons_what_waits_for_it(store: Store) -> None:
    """No notice waits for an ended session, neither an old one nor a late one."""
    await store.create_session(NewSession(id="s1", source="telegram", session_key=KEY))
    early = await store.add_notice(notice())
    await store.end_session("s1", "session_reset")
    late = await store.add_notice(notice())

    assert (early is None, late) == (False, None)
    assert await inbox_states(store, [early]) == {early: ("abandoned", "session_ended")}
    assert await store.take_inbox("telegram", KEY) == []


async def test_creating_an_existing_session_is_refused(store: Store) -> None:
    """A session id is made once."""
    await store.create_session(NewSession(id="s1", source="api_server", system_prompt="be kind", model_config={"a": 1}))

    with pytest.raises(SessionExists, match="s1"):
        await store.create_session(NewSession(id="s1", source="api_server"))

    session = await store.get_session("s1")
    assert session is not None
    assert (session.has_system_prompt, session.has_model_config) == (True, True)
    assert await store.session_prompt("s1") == ("be kind", '{"a":1}')


async def test_a_session_without_an_id_is_given_one(store: Store) -> None:
    """Ids are made where none is given."""
    made = await store.create_session(NewSession(source="api_server"))

    assert made.id
    assert await store.get_session(made.id) == made


async def test_titles_are_unique_per_tenant(store: Store) -> None:
    """Two sessions of one tenant cannot have one title; another tenant's can; clearing frees it."""
    await store.create_session(NewSession(id="a", source="x", tenant="t", title="  Plan  B "))
    await store.create_session(NewSession(id="b", source="x", tenant="t"))
    await store.create_session(NewSession(id="c", source="x", tenant="u", title="Plan B"))

    with pytest.raises(TitleTaken, match="Plan B"):
        await store.patch_session("b", title="Plan B", set_title=True)
    with pytest.raises(TitleTaken):
        await store.create_session(NewSession(id="d", source="x", tenant="t", title="Plan B"))
    cleared = await store.patch_session("a", title="", set_title=True)
    renamed = await store.patch_session("b", title="Plan B", set_title=True)

    assert cleared.title is None
    assert renamed.title == "Plan B"
    assert await store.get_session("d") is None


@pytest.mark.parametrize("title", ["x" * 101, "a\x07b"])
async def test_bad_titles_are_refused(store: Store, title: str) -> None:
    """A title that is too long or cannot be shown is refused, and an end in the same patch is not made either."""
    await store.create_session(NewSession(id="a", source="x"))

    with pytest.raises(InvalidTitle):
        await store.patch_session("a", title=title, set_title=True, end_reason="done")

    session = await store.get_session("a")
    assert session is not None
    assert (session.title, session.ended_at) == (None, None)


async def test_patching_an_unknown_session_says_so(store: Store) -> None:
    """Verbs that need a session raise `UnknownSession`."""
    with pytest.raises(UnknownSession):
        await store.patch_session("none", end_reason="x")
    with pytest.raises(UnknownSession):
        await store.append_messages("none", [Message(role="user", content="x")])
    with pytest.raises(UnknownSession):
        await store.replace_history("none", [])
    with pytest.raises(UnknownSession):
        await store.switch_session(KEY, "none")


async def test_lists_are_by_newest_activity_and_paged(store: Store, clock: Clock) -> None:
    """The session that was active last comes first; pages, sources and tenants select."""
    for name, tenant in (("a", "t"), ("b", "t"), ("c", "u")):
        clock.advance(1)
        await store.create_session(NewSession(id=name, source=f"src-{name}", tenant=tenant))
    clock.advance(1)
    await store.append_messages("a", [Message(role="user", content="x")])
    await store.end_session("b", "done")

    assert [entry.id for entry in await store.list_sessions()] == ["a", "c", "b"]
    assert [entry.id for entry in await store.list_sessions(page=Page(1, 1))] == ["c"]
    assert [entry.id for entry in await store.list_sessions(SessionFilter(tenant="t"))] == ["a", "b"]
    assert [entry.id for entry in await store.list_sessions(SessionFilter(source="src-c"))] == ["c"]
    assert [entry.id for entry in await store.list_sessions(SessionFilter(open_only=True))] == ["a", "c"]


async def test_deleting_takes_subagents_and_frees_branches(store: Store) -> None:
    """Sub-agents' sessions go with their parent, to any depth; branches stay, without a parent."""
    await store.finish_turn(finish(start(), "q", "a"))
    await store.finish_turn(finish(start("t2", "child", "", parent_session_id="s1"), "q", "a"))
    await store.finish_turn(finish(start("t3", "grandchild", "", parent_session_id="child"), "q", "a"))
    branch = await store.fork_session("s1", new_id="branch")
    removed = await store.delete_session("s1")

    assert branch.parent_session_id == "s1"
    assert removed == 3
    assert [entry.id for entry in await store.list_sessions(SessionFilter(include_children=True))] == ["branch"]
    left = await store.get_session("branch")
    assert left is not None
    assert left.parent_session_id is None
    assert await store.load_history("s1") == []
    assert await store.delete_session("s1") == 0


async def test_forking_copies_and_ends_the_source(store: Store) -> None:
    """A branch has a copy of the live messages and the next title of its line; the source ends as `branched`."""
    await store.finish_turn(finish(start(), "q", "a"))
    await store.patch_session("s1", title="Plan", set_title=True)
    second = await store.fork_session("s1", new_id="b2")
    third = await store.fork_session("b2", new_id="b3")

    source = await store.get_session("s1")
    assert source is not None
    assert source.end_reason == "branched"
    assert (second.title, third.title, second.lineage) == ("Plan #2", "Plan #3", Lineage.BRANCH)
    assert [entry.text for entry in await store.load_history("b3")] == ["q", "a"]
    assert third.message_count == 2
    with pytest.raises(SessionExists):
        await store.fork_session("b3", new_id="s1")
    still_open = await store.get_session("b3")
    assert still_open is not None
    assert still_open.ended_at is None


async def test_compaction_keeps_the_session_and_sets_the_old_messages_aside(store: Store) -> None:
    """After compaction the history is the summary; the old messages are still stored and found."""
    await store.finish_turn(finish(start(), "the zebra question", "the answer"))
    await store.replace_history("s1", [Message(role="user", content="summary of before")])

    assert [entry.text for entry in await store.load_history("s1")] == ["summary of before"]
    assert [entry.message.text for entry in await store.list_messages("s1")] == ["summary of before"]
    everything = await store.list_messages("s1", include_archived=True)
    assert [entry.active for entry in everything] == [False, False, True]
    assert [hit.session_id for hit in await store.search_messages(SearchQuery(text="zebra"))] == ["s1"]


async def test_long_histories_are_whole_and_in_order(store: Store) -> None:
    """A transcript longer than a point read comes back complete."""
    await store.create_session(NewSession(id="s1", source="x"))
    for part in range(4):
        await store.append_messages(
            "s1", [Message(role="user", content=f"{part * 100 + number}") for number in range(100)]
        )

    assert [entry.text for entry in await store.load_history("s1")] == [str(number) for number in range(400)]
    page = await store.list_messages("s1", page=Page(3, 250))
    assert [entry.message.text for entry in page] == ["250", "251", "252"]


async def test_a_new_session_replaces_the_old_one_behind_a_key(store: Store) -> None:
    """Starting over ends the old session, clears its grants and keeps the key."""
    old = await store.resolve_session(context("", user_id="u"), source="telegram")
    await grant_category(store, "recursive delete", scope=KEY)
    new = await store.new_session(KEY, source="telegram")

    ended = await store.get_session(old)
    made = await store.get_session(new)
    assert ended is not None
    assert ended.end_reason == "session_reset"
    assert made is not None
    assert made.user_id == "u"
    assert await store.resolve_session(context(""), source="telegram") == new
    assert await store.granted(KEY) == frozenset()


async def test_switching_ends_one_and_reopens_the_other(store: Store) -> None:
    """A key can be pointed to an earlier session, which is open again."""
    old = await store.resolve_session(context(""), source="telegram")
    await store.end_session(old, "session_reset")
    new = await store.resolve_session(context(""), source="telegram")
    switched = await store.switch_session(KEY, old)

    left = await store.get_session(new)
    assert switched.ended_at is None
    assert left is not None
    assert left.end_reason == "session_switch"
    assert await store.resolve_session(context(""), source="telegram") == old


async def test_what_was_acknowledged_is_there_after_a_restart(backend: Backend) -> None:
    """Closing and opening again loses nothing."""
    if not backend.durable:
        pytest.skip("a database in memory ends with its process")
    async with backend.open() as store:
        session = await store.resolve_session(context(""), source="telegram")
        await store.finish_turn(finish(start(session_id=session), "q", "a"))
        await store.accept_message(message("later"))

    async with backend.open() as store:
        assert await store.resolve_session(context(""), source="telegram") == session
        assert [entry.text for entry in await store.load_history(session)] == ["q", "a"]
        assert [row.text for row in await store.take_inbox("telegram", KEY)] == ["later"]
