"""The contract of webhook deliveries, cron, API keys, access lists, cursors and single values."""

from __future__ import annotations

from hermes_trio.store import CronJob, CronState, Store

from .conftest import Backend, Clock
from .turns import KEY, message


async def test_a_delivery_is_accepted_with_its_message_once_per_route(store: Store) -> None:
    """The id and the message are one transaction; another route may use the same id."""
    first = await store.accept_delivery("github", "d1", message("push"))
    again = await store.accept_delivery("github", "d1", message("push"))
    elsewhere = await store.accept_delivery("gitlab", "d1", message("push"))

    assert first is not None
    assert again is None
    assert elsewhere is not None
    assert await store.inbox_waiting(inbox="telegram", session_key=KEY) == 2
    assert await store.delivery_known("github", "d1") is True
    assert await store.delivery_known("github", "d2") is False


async def test_a_delivery_without_a_turn_is_recorded_after_it_succeeded(store: Store) -> None:
    """Until it is recorded, the sender may try again."""
    assert await store.delivery_known("r", "d") is False
    assert await store.record_delivery("r", "d") is True
    assert await store.record_delivery("r", "d") is False


async def test_a_slot_is_claimed_once(store: Store, clock: Clock) -> None:
    """The node that inserts the row of a slot runs it; the job advances in the same transaction."""
    await store.put_cron_job(CronJob(id="j", name="nightly", schedule="0 3 * * *", spec={"prompt": "x"}, next_at=10.0))

    assert await store.claim_cron_slot("j", 10.0, next_at=20.0) is True
    assert await store.claim_cron_slot("j", 10.0, next_at=20.0) is False
    assert await store.start_cron_slot("j", 10.0, session_id="cron_j") is True
    assert await store.start_cron_slot("j", 10.0, session_id="cron_j") is False
    clock.advance(5)
    assert await store.finish_cron_slot("j", 10.0, CronState.COMPLETED, output="ok") is True
    assert await store.finish_cron_slot("j", 10.0, CronState.FAILED, error="late") is False
    assert await store.claim_cron_slot("j", 15.0, state=CronState.MISSED, error="server was down") is True

    found = await store.get_cron_job("j")
    assert found is not None
    assert (found.next_at, found.spec) == (20.0, {"prompt": "x"})
    missed, done = await store.list_cron_executions("j")
    assert (done.state, done.output, done.session_id, done.ended_at) == (
        CronState.COMPLETED,
        "ok",
        "cron_j",
        clock.now,
    )
    assert (missed.state, missed.error, missed.ended_at is not None) == (CronState.MISSED, "server was down", True)


async def test_cron_jobs_are_changed_listed_and_deleted(store: Store) -> None:
    """Putting a job again changes it and keeps when it was made."""
    made = await store.put_cron_job(CronJob(id="j", name="b", schedule="x", tenant="t"))
    changed = await store.put_cron_job(CronJob(id="j", name="a", schedule="y", tenant="t", enabled=False))
    await store.put_cron_job(CronJob(id="k", name="c", schedule="x", tenant="u"))
    await store.set_cron_next("k", None)

    assert (changed.created_at, changed.enabled, changed.schedule) == (made.created_at, False, "y")
    assert [job.name for job in await store.list_cron_jobs()] == ["a", "c"]
    assert [job.id for job in await store.list_cron_jobs(tenant="u")] == ["k"]
    assert await store.delete_cron_job("j") is True
    assert await store.delete_cron_job("j") is False


async def test_a_key_is_known_by_its_hash_alone(backend: Backend, clock: Clock) -> None:
    """The key is shown once; it works until it is revoked or expires; its text is nowhere in the database."""
    async with backend.open() as store:
        key, secret = await store.create_api_key("laptop", scopes=("runs",), expires_at=clock.now + 100)
        found = await store.find_api_key(secret)

        assert found is not None
        assert (found.id, found.scopes, found.tenant) == (key.id, ("runs",), key.id)
        assert await store.find_api_key(secret + "x") is None
        await store.set_meta("written", "after the use was noted")
        used = (await store.list_api_keys())[0].last_used_at
        assert used == clock.now
        clock.advance(101)
        assert await store.find_api_key(secret) is None
    if backend.path is not None:
        assert secret.encode() not in backend.path.read_bytes()


async def test_a_revoked_key_is_out_of_force_at_once(store: Store) -> None:
    """Revoking is final; the record stays for those who ask."""
    key, secret = await store.create_api_key("old")

    assert await store.revoke_api_key(key.id) is True
    assert await store.revoke_api_key(key.id) is False
    assert await store.find_api_key(secret) is None
    assert await store.list_api_keys() == []
    assert [found.id for found in await store.list_api_keys(include_revoked=True)] == [key.id]


async def test_a_pairing_code_lets_one_user_in_once(store: Store, clock: Clock) -> None:
    """A code is offered once while it is open, is not case sensitive, is used up, and expires."""
    assert await store.offer_pairing("telegram", "ABCD-1234", user_id="7", user_name="Ann") is True
    assert await store.offer_pairing("telegram", "WXYZ-1234", user_id="7") is False
    assert [waiting.user_name for waiting in await store.list_pairings("telegram")] == ["Ann"]
    assert await store.redeem_pairing("discord", "abcd-1234") is None

    allowed = await store.redeem_pairing("telegram", " abcd-1234 ")
    assert allowed is not None
    assert (allowed.user_id, allowed.user_name) == ("7", "Ann")
    assert await store.redeem_pairing("telegram", "abcd-1234") is None
    assert await store.user_allowed("telegram", "7") is True

    await store.offer_pairing("telegram", "LATE", user_id="8", ttl=10)
    clock.advance(11)
    assert await store.redeem_pairing("telegram", "LATE") is None
    assert await store.list_pairings() == []


async def test_strangers_cannot_fill_the_pairing_table(store: Store) -> None:
    """A platform has a bounded number of open codes."""
    offered = [await store.offer_pairing("telegram", f"C{number}", user_id=str(number)) for number in range(60)]

    assert offered.count(True) == 50


async def test_allow_lists_are_per_platform(store: Store) -> None:
    """A user who is allowed on one platform is not allowed on another."""
    await store.allow_user("telegram", "1", user_name="Ann")
    await store.allow_user("telegram", "1", user_name="Anna")
    await store.allow_user("slack", "2")

    assert [(user.user_id, user.user_name) for user in await store.list_allowed("telegram")] == [("1", "Anna")]
    assert len(await store.list_allowed()) == 2
    assert await store.user_allowed("slack", "1") is False
    assert await store.disallow_user("telegram", "1") is True
    assert await store.disallow_user("telegram", "1") is False


async def test_cursors_and_values_are_kept_by_name(store: Store) -> None:
    """The last value counts; None forgets."""
    assert await store.get_cursor("telegram") is None
    await store.set_cursor("telegram", "1")
    await store.set_cursor("telegram", "2")
    await store.set_meta("a", "b")

    assert await store.get_cursor("telegram") == "2"
    assert await store.get_meta("a") == "b"
    await store.set_meta("a", None)
    assert await store.get_meta("a") is None
