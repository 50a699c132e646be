"""The contract of approvals and grants."""

from __future__ import annotations

from typing import Any

from hermes_trio.store import ApprovalChoice, ApprovalState, NewApproval, NewSession, Store
from hermes_trio.testing.rows import grant_category

from .conftest import Clock


def request(name: str, scope: str = "run_1", **fields: Any) -> NewApproval:
    """A request for approval."""
    fields.setdefault("categories", ("recursive delete",))
    return NewApproval(id=name, scope=scope, command="rm -r build", expires_at=1.0, **fields)


async def test_a_request_is_answered_once(store: Store, clock: Clock) -> None:
    """The first answer stands, with its choice, reason and time; a late one changes nothing."""
    made = await store.create_approval(request("a1", tenant="t", description="delete"))
    clock.advance(3)
    answered = await store.answer_approval("a1", ApprovalChoice.DENY, reason="not that one")

    assert made.state is ApprovalState.PENDING
    assert answered is not None
    assert (answered.state, answered.choice, answered.reason) == (
        ApprovalState.DENIED,
        ApprovalChoice.DENY,
        "not that one",
    )
    assert answered.answered_at == clock.now
    assert await store.answer_approval("a1", ApprovalChoice.ONCE) is None
    assert await store.expire_approval("a1") is False
    assert await store.get_approval("a1") == answered
    assert await store.answer_approval("unknown", ApprovalChoice.ONCE) is None


async def test_session_and_always_grant_categories(store: Store) -> None:
    """`session` allows the category in the scope, `always` for its grantee; `once` and `deny` allow nothing beforehand."""
    await store.create_approval(request("a1", categories=("disk",)))
    await store.answer_approval("a1", ApprovalChoice.SESSION)
    await store.create_approval(request("a2", categories=("sql",), grantee="platform cli"))
    await store.answer_approval("a2", ApprovalChoice.ALWAYS)
    await store.create_approval(request("a3", categories=("network",)))
    await store.answer_approval("a3", ApprovalChoice.ONCE)

    assert await store.granted("run_1", grantee="platform cli") == {"disk", "sql"}
    assert await store.granted("run_2", grantee="platform cli") == {"sql"}
    assert await store.granted("run_2", grantee="platform telegram") == frozenset()
    assert await store.granted("run_2") == frozenset()
    assert [(one.scope, one.category) for one in await store.list_grants()] == [
        ("platform cli", "sql"),
        ("run_1", "disk"),
    ]


async def test_a_choice_that_was_not_offered_grants_nothing(store: Store) -> None:
    """`always` for a request that may not be allowed for ever counts for this once."""
    offered = (ApprovalChoice.ONCE, ApprovalChoice.DENY)
    await store.create_approval(request("a1", choices=offered))
    answered = await store.answer_approval("a1", ApprovalChoice.ALWAYS)

    assert answered is not None
    assert answered.state is ApprovalState.APPROVED
    assert await store.list_grants() == []


async def test_the_end_of_a_scope_expires_and_revokes(store: Store) -> None:
    """A run that ends leaves no open request and no grant of its own; those of others stay."""
    await store.create_approval(request("a1"))
    await grant_category(store, "disk", scope="run_1")
    await grant_category(store, "sql", scope="tenant red")

    assert await store.end_approval_scope("run_1", reason="run_ended") == 1
    expired = await store.get_approval("a1")
    assert expired is not None
    assert (expired.state, expired.reason) == (ApprovalState.EXPIRED, "run_ended")
    assert [(one.scope, one.category) for one in await store.list_grants()] == [("tenant red", "sql")]
    assert await store.revoke_grant("sql", scope="tenant red") is True
    assert await store.revoke_grant("sql", scope="tenant red") is False


async def test_lists_select_by_state_scope_and_tenant(store: Store) -> None:
    """Pending ones by default; all on request."""
    await store.create_approval(request("a1", tenant="t"))
    await store.create_approval(request("a2", "run_2", tenant="u"))
    await store.expire_approval("a2")

    assert [found.id for found in await store.list_approvals()] == ["a1"]
    assert [found.id for found in await store.list_approvals(state=None)] == ["a1", "a2"]
    assert [found.id for found in await store.list_approvals(state=None, scope="run_2")] == ["a2"]
    assert [found.id for found in await store.list_approvals(state=None, tenant="t")] == ["a1"]


async def test_always_is_remembered_for_the_tenant_that_said_it(store: Store) -> None:
    """What one tenant allows for good is not allowed to another; nor is what the operator allows, or a chat."""
    await store.create_approval(request("a1", "run_1", tenant="red", grantee="tenant red"))
    await store.answer_approval("a1", ApprovalChoice.ALWAYS)

    assert await store.granted("run_2", grantee="tenant red") == {"recursive delete"}
    assert await store.granted("run_3", grantee="tenant blue") == frozenset()

    for number, grantee in enumerate(("platform api_server", "platform telegram", "")):
        await store.create_approval(request(f"b{number}", "run_4", grantee=grantee))
        await store.answer_approval(f"b{number}", ApprovalChoice.ALWAYS)
    assert await store.granted("run_3", grantee="tenant blue") == frozenset()


async def test_what_was_granted_for_good_outlasts_restarts_and_retention(store: Store, clock: Clock) -> None:
    """`always` is kept for its tenant or platform until it is taken back; what was granted to a run goes with the run."""
    for scope in ("tenant red", "platform telegram", "run_gone"):
        await grant_category(store, "disk", scope=scope)
    kept = [("platform telegram", "disk"), ("tenant red", "disk")]
    await store.recover("epoch")
    assert [(one.scope, one.category) for one in await store.list_grants()] == kept
    await store.maintain(clock() + 40 * 86_400)  # type: ignore[attr-defined]
    assert [(one.scope, one.category) for one in await store.list_grants()] == kept


async def test_deleting_a_session_ends_what_was_allowed_in_its_conversation(store: Store) -> None:
    """The next session of the conversation is asked again; other conversations, the grantee's grants, and a conversation that has moved on are not affected."""
    for key in ("chat-1", "chat-2"):
        await store.create_session(NewSession(id=f"{key}-a", source="web", session_key=key))
        await grant_category(store, "recursive delete", scope=key)
    await grant_category(store, "recursive delete", scope="tenant t")
    await store.delete_session("chat-1-a")

    assert await store.granted("chat-1", grantee="") == frozenset()
    assert await store.granted("chat-2", grantee="") == {"recursive delete"}
    assert await store.granted("chat-1", grantee="tenant t") == {"recursive delete"}
    moved = await store.new_session("chat-2", source="web")
    await grant_category(store, "disk", scope="chat-2")
    await store.delete_session("chat-2-a")
    assert await store.granted("chat-2", grantee="") == {"disk"}
    await store.delete_session(moved)
    assert await store.granted("chat-2", grantee="") == frozenset()
