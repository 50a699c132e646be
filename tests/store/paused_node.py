"""A node that writes without a pause until it is fenced: for a test that stops the process and lets it go on. Prints `ready`, and at the end why it ended."""

from __future__ import annotations

import sys

import trio

from hermes_trio.runtime.errors import Fenced
from hermes_trio.runtime.ports import NewReply
from hermes_trio.store.postgres.store import open_postgres

LEASE = 1.0


async def main(url: str) -> None:
    """Renew the lease and write, both until the store refuses."""
    async with open_postgres(url, node_name="paused", lease_seconds=LEASE, maintenance=False) as store:
        await store.recover("paused")
        sys.stdout.write(f"ready {store.owner}\n")
        sys.stdout.flush()
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(renew, store)
                for worker in range(8):
                    nursery.start_soon(write, store, worker)
        except* Fenced:
            sys.stdout.write("fenced\n")


async def renew(store) -> None:
    """The heartbeat."""
    while True:
        await trio.sleep(LEASE / 5)
        await store.renew_node({})


async def write(store, worker: int) -> None:
    """Write rows that say who wrote them."""
    while True:
        await store.add_outbox([NewReply(platform="paused", target={"chat": worker}, text=store.owner)])


if __name__ == "__main__":
    trio.run(main, sys.argv[1])
