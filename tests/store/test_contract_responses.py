"""The contract of stored responses, conversations and idempotent replies."""

from __future__ import annotations

import msgspec
import pytest

from hermes_trio.store import ConversationMoved, IdempotencyConflict, IdempotentReply, Retention, Store, StoredResponse

from .conftest import Backend, Clock
from .turns import finish, start


def response(name: str, **fields: str | None) -> StoredResponse:
    """A stored response."""
    return StoredResponse(id=name, tenant="t", session_id="s1", body=b'{"id":1}', transcript="[1]", **fields)  # type: ignore[arg-type]


async def test_a_response_is_kept_byte_for_byte_for_its_tenant(store: Store) -> None:
    """Another tenant sees nothing; deleting is final."""
    await store.put_response(response("r1"))

    found = await store.get_response("t", "r1")
    assert found is not None
    assert (found.body, found.transcript, found.session_id) == (b'{"id":1}', "[1]", "s1")
    assert await store.get_response("u", "r1") is None
    assert await store.delete_response("u", "r1") is False
    assert await store.delete_response("t", "r1") is True
    assert await store.get_response("t", "r1") is None


async def test_a_snapshot_is_replaced_by_the_final_response(store: Store) -> None:
    """Putting a response again replaces it, and its conversation still points to it."""
    await store.put_response(response("r1", conversation="c", expected_previous=""))
    final = msgspec.structs.replace(response("r1", conversation="c", expected_previous=""), body=b"final")
    await store.finish_turn(finish(start(), "q", "a", also=(final,)))

    found = await store.get_response("t", "r1")
    assert found is not None
    assert found.body == b"final"
    assert await store.latest_response("t", "c") == "r1"


async def test_two_parallel_turns_cannot_fork_a_conversation(store: Store) -> None:
    """The slower one of two turns that start from the same response fails as a whole."""
    await store.put_response(response("r1", conversation="c", expected_previous=""))
    await store.put_response(response("r2", conversation="c", expected_previous="r1"))

    with pytest.raises(ConversationMoved) as moved:
        await store.finish_turn(
            finish(start(), "q", "a", also=(response("r3", conversation="c", expected_previous="r1"),))
        )

    assert moved.value.latest == "r2"
    assert await store.latest_response("t", "c") == "r2"
    assert await store.get_response("t", "r3") is None
    assert await store.get_session("s1") is None


async def test_the_least_recently_used_response_goes_first(backend: Backend, clock: Clock) -> None:
    """A tenant keeps a bounded number; reading counts as use; names that pointed to an evicted response go with it."""
    async with backend.open(retention=Retention(response_count=2)) as store:
        await store.put_response(response("r1", conversation="one"))
        clock.advance(1)
        await store.put_response(response("r2", conversation="two"))
        clock.advance(1)
        assert await store.get_response("t", "r1") is not None
        clock.advance(1)
        await store.put_response(response("r3"))

        assert await store.get_response("t", "r2") is None
        assert await store.latest_response("t", "two") is None
        assert await store.latest_response("t", "one") == "r1"
        assert await store.get_response("t", "r1") is not None


async def test_an_idempotent_reply_is_repeated_exactly(store: Store, clock: Clock) -> None:
    """Status, headers and body come back as they were, within the key's life and its tenant and route."""
    reply = IdempotentReply(
        tenant="t", route="/v1/x", key="k", fingerprint="f", status=201,
        headers=(("content-type", "application/json"), ("x-a", "1"), ("x-a", "2")), body=b"\x00\xff", ttl=10.0,
    )  # fmt: skip
    await store.finish_turn(finish(start(), "q", "a", also=(reply,)))

    assert await store.get_reply("t", "/v1/x", "k", "f") == reply
    assert await store.get_reply("u", "/v1/x", "k", "f") is None
    assert await store.get_reply("t", "/v1/y", "k", "f") is None
    with pytest.raises(IdempotencyConflict):
        await store.get_reply("t", "/v1/x", "k", "other")
    clock.advance(11)
    assert await store.get_reply("t", "/v1/x", "k", "other") is None
    other = msgspec.structs.replace(reply, fingerprint="other")
    await store.finish_turn(finish(start("turn_2", "s2"), "q", "a", also=(other,)))
    assert await store.get_reply("t", "/v1/x", "k", "other") is not None
