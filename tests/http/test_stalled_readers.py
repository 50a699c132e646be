"""What a reader that takes nothing costs: pages, events and lists are bounded in bytes, readers in number, uploads in time."""

from __future__ import annotations

import http.client

import openai
import pytest
import trio

from bench.readers import measure
from hermes_trio.http.settings import Limits
from hermes_trio.runtime.event_log import BATCH_BYTES, DEFAULT_BYTES, EventLog
from hermes_trio.runtime.run import DELTA_CHARACTERS, TOLD_OUTPUT
from hermes_trio.runtime.turn import Turn
from hermes_trio.store import LISTED_OUTPUT

from .gateway import KEY, open_gateway

LONG = "x" * 200_000


async def long_winded(turn: Turn) -> str:
    """Tells a long text in one piece, and answers with it."""
    turn.emit("message.delta", delta=LONG)
    return LONG


async def test_a_long_delta_is_told_in_pieces_and_a_long_output_in_part() -> None:
    """No event of a run is larger than a reader has to take at once; the run itself has all of its output, a list the beginning."""
    async with open_gateway(long_winded) as gateway:
        run_id = await gateway.start()
        body = await gateway.ended(run_id)
        assert (body["output"], "output_truncated" in body) == (LONG, False)
        async with gateway.events(f"/v1/runs/{run_id}/events") as stream:
            events = [event.data for event in await stream.all() if event.data is not None]
        deltas = [event["delta"] for event in events if event["event"] == "message.delta"]
        assert "".join(deltas) == LONG
        assert max(len(delta) for delta in deltas) == DELTA_CHARACTERS
        assert (len(events[-1]["output"]), events[-1]["output_truncated"]) == (TOLD_OUTPUT, True)
        (listed,) = (await gateway.http.get("/v1/runs")).json()["data"]
        assert (len(listed["output"]), listed["output_truncated"]) == (LISTED_OUTPUT, True)


async def test_a_log_and_its_batches_are_bounded_in_bytes() -> None:
    """However large its events are, a log holds so many bytes of them, and a reader is given a few."""
    log = EventLog()
    for _ in range(1000):
        log.append({"event": "message.delta", "delta": "x" * DELTA_CHARACTERS})
    assert log.oldest == 1000 - DEFAULT_BYTES // (DELTA_CHARACTERS + len("message.delta")) + 1
    batch = await log.cursor(log.oldest).read()
    assert 1 <= len(batch) <= BATCH_BYTES // DELTA_CHARACTERS


async def test_a_key_has_so_many_readers() -> None:
    """One more is 429, until another one leaves; other keys have their own."""
    async with open_gateway(long_winded, limits=Limits(event_readers=2)) as gateway:
        run_id = await gateway.start()
        await gateway.ended(run_id)
        path = f"/v1/runs/{run_id}/events"
        reading = gateway.core.readers.reading
        with reading("other"), reading("other"), reading("admin"):
            assert (await gateway.http.get(path)).status_code == 200
        with reading("admin"), reading("admin"):
            refused = await gateway.http.get(path)
            assert (refused.status_code, refused.json()["error"]["code"]) == (429, "too_many_readers")
        assert (await gateway.http.get(path)).status_code == 200


def upload(port: int) -> int:
    """A client that reads nothing before it has sent everything."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    try:
        connection.request("POST", "/v1/chat/completions", b"x" * 30_000_000, {"Authorization": f"Bearer {KEY}"})
        return connection.getresponse().status
    finally:
        connection.close()


async def test_a_body_that_is_too_long_is_read_out(fast_path: bool) -> None:
    """A client that sends all of its body first is answered with 413, not with a broken pipe."""
    async with open_gateway(fast_path=fast_path, limits=Limits(body_bytes=100_000)) as gateway:
        assert await trio.to_thread.run_sync(upload, int(gateway.url.rpartition(":")[2])) == 413


async def test_a_413_reaches_a_client_that_is_still_uploading(fast_path: bool) -> None:
    """The official client is told that its body is too large, at its first attempt, and not that the connection broke."""
    async with open_gateway(fast_path=fast_path, limits=Limits(body_bytes=100_000)) as gateway:
        client = openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key=KEY, max_retries=0)
        async with client:
            with pytest.raises(openai.APIStatusError) as refused:
                await client.chat.completions.create(
                    model="x", messages=[{"role": "user", "content": "x" * 30_000_000}]
                )
        assert refused.value.status_code == 413


@pytest.mark.slow
@pytest.mark.parametrize("live", [False, True], ids=["stored", "live"])
def test_two_hundred_stalled_readers_cost_little(live: bool) -> None:
    """200 readers that take nothing of a run of 50 MB: the server grows by at most 100 MB, and answers all the while."""
    found = measure(200, 50, live=live)
    assert found.growth <= 100
    assert found.health_calls > 10
