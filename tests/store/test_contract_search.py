"""The contract of full-text search."""

from __future__ import annotations

import pytest
import trio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hermes_trio.runtime.ports import Message, ToolCall
from hermes_trio.store import NewSession, Page, Runner, SearchOrder, SearchQuery, Store, open_store

TEXTS = {
    "hyphen": "the re-entrant kill-switch tripped twice",
    "dotted": "upgraded libfoo to v1.2.3-rc4 on host db.example.org",
    "under": "set MAX_RETRY_COUNT before start_worker_pool() runs",
    "accent": "Le café est fermé, naïve façade",
    "cyrillic": "Привет, как прошла миграция базы данных?",
    "greek": "η βάση δεδομένων είναι έτοιμη",
    "hebrew": "מסד הנתונים מוכן",
    "hindi": "डेटाबेस तैयार है",
    "chinese": "数据库迁移已经完成，请检查日志",
    "japanese": "データベースの移行が完了しました",
    "korean": "데이터베이스 이전이 완료되었습니다",
    "thai": "การย้ายฐานข้อมูลเสร็จแล้ว",
    "emoji": "deploy finished 🎉 all green",
}


async def fill(store: Store) -> None:
    """One session for each text."""
    for name, text in TEXTS.items():
        await store.create_session(NewSession(id=name, source="cli" if name == "hyphen" else "api_server", tenant="t"))
        await store.append_messages(name, [Message(role="user", content=text)])


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ("kill-switch", "hyphen"),
        ("re-entrant kill", "hyphen"),
        ("v1.2.3-rc4", "dotted"),
        ("db.example.org", "dotted"),
        ("MAX_RETRY_COUNT", "under"),
        ("start_worker_pool()", "under"),
        ("start_work*", "under"),
        ("cafe", "accent"),
        ("FAÇADE", "accent"),
        ("миграция", "cyrillic"),
        ("δεδομένων", "greek"),
        ("הנתונים", "hebrew"),
        ("डेटाबेस", "hindi"),
        ("数据库迁移", "chinese"),
        ("日志", "chinese"),
        ("日", "chinese"),
        ("データベース", "japanese"),
        ("데이터베이스", "korean"),
        ("ฐานข้อมูล", "thai"),
        ('"all green"', "emoji"),
        ("finished AND green", "emoji"),
    ],
)
async def test_words_of_all_kinds_are_found(query: str, expected: str) -> None:
    """Hyphens, dots, underscores, accents, prefixes and scripts with and without spaces."""
    async with open_store(None, runner=Runner.INLINE) as store:
        await fill(store)
        hits = await store.search_messages(SearchQuery(text=query))

    assert [hit.session_id for hit in hits] == [expected]
    assert ">>>" in hits[0].snippet or expected == "accent"


async def test_all_terms_must_match_unless_or_is_said(store: Store) -> None:
    """Terms are combined with and; OR between words takes either."""
    await fill(store)

    assert await store.search_messages(SearchQuery(text="kill-switch nonsense")) == []
    hits = await store.search_messages(SearchQuery(text="kill-switch OR libfoo", order=SearchOrder.OLDEST))
    assert [hit.session_id for hit in hits] == ["hyphen", "dotted"]
    assert await store.search_messages(SearchQuery(text="数据库迁移 nonsense")) == []


async def test_hits_can_be_filtered_ordered_and_paged(store: Store) -> None:
    """Source, tenant, session and role select; newest or oldest first."""
    for number in range(3):
        await store.create_session(NewSession(id=f"s{number}", source=f"src{number}", tenant=f"t{number % 2}"))
        await store.append_messages(
            f"s{number}",
            [
                Message(role="user", content="before"),
                Message(role="assistant" if number else "user", content=f"the needle number {number}"),
                Message(role="user", content="after"),
            ],
        )

    newest = await store.search_messages(SearchQuery(text="needle", order=SearchOrder.NEWEST))
    assert [hit.session_id for hit in newest] == ["s2", "s1", "s0"]
    assert (newest[0].before, newest[0].after, newest[0].role) == ("before", "after", "assistant")
    assert newest[0].snippet == "the >>>needle<<< number 2"
    oldest = await store.search_messages(SearchQuery(text="needle", order=SearchOrder.OLDEST), Page(1, 1))
    assert [hit.session_id for hit in oldest] == ["s1"]
    assert [hit.session_id for hit in await store.search_messages(SearchQuery(text="needle", source="src1"))] == ["s1"]
    assert {hit.session_id for hit in await store.search_messages(SearchQuery(text="needle", tenant="t0"))} == {
        "s0",
        "s2",
    }
    assert [hit.session_id for hit in await store.search_messages(SearchQuery(text="needle", session_id="s2"))] == [
        "s2"
    ]
    assert [hit.session_id for hit in await store.search_messages(SearchQuery(text="needle", roles=("user",)))] == [
        "s0"
    ]


async def test_tool_calls_and_tool_names_are_searched(store: Store) -> None:
    """What a tool was asked to do can be found."""
    await store.create_session(NewSession(id="s", source="x"))
    call = ToolCall(id="c", name="terminal", arguments='{"command": "ffmpeg -i holiday.mkv"}')
    await store.append_messages("s", [Message(role="assistant", tool_calls=(call,))])

    (hit,) = await store.search_messages(SearchQuery(text="holiday.mkv"))
    assert ">>>holiday.mkv<<<" in hit.snippet


async def test_deleted_messages_are_not_found(store: Store) -> None:
    """Deleting a session takes its messages out of the index, indexed or not."""
    await fill(store)
    assert len(await store.search_messages(SearchQuery(text="数据库迁移"))) == 1
    await store.delete_session("chinese")
    await store.delete_session("hyphen")

    assert await store.search_messages(SearchQuery(text="数据库迁移")) == []
    assert await store.search_messages(SearchQuery(text="kill-switch")) == []
    assert len(await store.search_messages(SearchQuery(text="libfoo"))) == 1


async def test_a_message_is_found_as_soon_as_it_is_acknowledged(store: Store) -> None:
    """The index is brought up to date by the search itself, also when row ids were freed in between."""
    for name in ("a", "b", "c"):
        await store.create_session(NewSession(id=name, source="x"))
        await store.append_messages(name, [Message(role="user", content=f"word{name}")])
        assert [hit.session_id for hit in await store.search_messages(SearchQuery(text=f"word{name}"))] == [name]
        await store.delete_session(name)


QUERIES = st.one_of(
    st.text(max_size=60),
    st.text(alphabet="\"*()^:-+{}[]\\/.,;?!~`@#$%&=|<> '\n\x00ANDORNEARaé漢かแ", max_size=40),
    st.lists(
        st.sampled_from(['"', "NEAR(", "AND", "OR", "NOT", "a*", "日", "日本語", "^x", "col:x", "-", "\ud800"]),
        max_size=12,
    ).map(" ".join),
)


@given(QUERIES)
@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_no_query_raises(query: str) -> None:
    """Any string is a query; what means nothing finds nothing."""

    async def ask() -> None:
        async with open_store(None, runner=Runner.INLINE) as store:
            await store.create_session(NewSession(id="s", source="x"))
            await store.append_messages("s", [Message(role="user", content="a b c 漢字かな and or near x-y")])
            await store.search_messages(SearchQuery(text=query))
            await store.search_messages(SearchQuery(text=query, order=SearchOrder.NEWEST, roles=("user",), tenant=""))

    trio.run(ask)


@given(st.text(alphabet="abcdé漢字日本 -._", min_size=1, max_size=30))
@settings(max_examples=150, deadline=None)
def test_a_message_is_found_by_each_of_its_words(text: str) -> None:
    """Whatever a message says, a search for one of its words finds it."""

    async def ask() -> None:
        async with open_store(None, runner=Runner.INLINE) as store:
            await store.create_session(NewSession(id="s", source="x"))
            await store.append_messages("s", [Message(role="user", content=text)])
            for word in text.split():
                found = await store.search_messages(SearchQuery(text=word))
                assert bool(found) == any(character.isalnum() for character in word), word

    trio.run(ask)
