"""Three nodes of the real server on one PostgreSQL, each behind a network of its own, and what may be done to them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import trio

from hermes_trio.testing.platforms import FakeTelegram
from hermes_trio.testing.platforms.telegram import open_fake_telegram
from tests.e2e.server_process import KEY, clean_environment
from tests.postgres_server import PostgresServer, free_port

from .proxy import ChaosProxy, chaos_proxy

LEASE = 2.0
START_SECONDS = 120.0
LOST = "this node ends, because it may own nothing any more"
"""What a node logs when it gives its lease up."""

HEADERS = {"Authorization": f"Bearer {KEY}"}

LATE_WRITES = """
CREATE TABLE hermes_trio.removed_nodes (incarnation text, tx xid8);
CREATE TABLE hermes_trio.late_writes (incarnation text, tx xid8, place text);
CREATE FUNCTION hermes_trio.note_removed() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO hermes_trio.removed_nodes VALUES (OLD.incarnation, pg_current_xact_id());
    RETURN OLD;
END $$;
CREATE TRIGGER chaos AFTER DELETE ON hermes_trio.nodes FOR EACH ROW EXECUTE FUNCTION hermes_trio.note_removed();
CREATE FUNCTION hermes_trio.note_late() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE
    node text := substr(current_setting('application_name'), 13);
BEGIN
    IF node <> '' AND EXISTS (SELECT 1 FROM hermes_trio.removed_nodes WHERE incarnation = node AND tx <> pg_current_xact_id()) THEN
        INSERT INTO hermes_trio.late_writes VALUES (node, pg_current_xact_id(), TG_TABLE_NAME);
    END IF;
    RETURN NULL;
END $$;
"""
"""Notes each write of a node that was taken over before: an independent witness of the fence."""

WATCHED_TABLES = ("sessions", "messages", "runs", "events", "jobs", "inbox", "outbox")


class ChaosNode:
    """One node: its home, its port, its network, and the process that it runs in at present."""

    def __init__(self, name: str, home: Path, url: str, proxy: ChaosProxy) -> None:
        self.name = name
        self.home = home
        self.proxy = proxy
        self.port = free_port()
        self.address = f"http://127.0.0.1:{self.port}"
        self.environment: dict[str, str] = {}
        self.paused = False
        self._url = url
        self._process: subprocess.Popen[bytes] | None = None
        self._log = home / "log"

    def start(self) -> None:
        """Start a process; `wait_ready` says when it serves."""
        command = [sys.executable, "-m", "tests.chaos.node", "serve", "--port", str(self.port)]
        more = {"API_SERVER_KEY": KEY, "HERMES_STORE_URL": self._url, **self.environment}
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=clean_environment(self.home, **more, PYTHONPATH=os.pathsep.join(filter(None, sys.path))),
                start_new_session=True,
            )

    @property
    def output(self) -> str:
        """Everything that it has written, in all its lives."""
        return self._log.read_text(errors="replace")

    @property
    def alive(self) -> bool:
        """Whether its process runs."""
        return self._process is not None and self._process.poll() is None

    async def wait_ready(self, starts: int = 1) -> None:
        """Wait until it has said `starts` times that it listens."""
        with trio.fail_after(START_SECONDS):
            while self.output.count("listens on") < starts:
                assert self.alive, self.output[-4000:]
                await trio.sleep(0.05)

    def signal(self, number: int) -> None:
        """Send a signal to the process."""
        assert self._process is not None
        self._process.send_signal(number)
        self.paused = number == signal.SIGSTOP

    async def kill(self) -> None:
        """End it as a crash would, and wait."""
        assert self._process is not None
        self._process.kill()
        await self.wait_ended()

    async def wait_ended(self) -> int:
        """Wait for the end of the process; return its code."""
        assert self._process is not None
        with trio.fail_after(START_SECONDS):
            while (code := self._process.poll()) is None:  # noqa: ASYNC110
                await trio.sleep(0.02)
        return code

    async def close(self) -> None:
        """End whatever runs."""
        self.proxy.heal()
        if not self.alive:
            return
        with suppress(ProcessLookupError):
            self.signal(signal.SIGCONT)
            self.signal(signal.SIGTERM)
        with trio.CancelScope(shield=True):
            with trio.move_on_after(20):
                await self.wait_ended()
            if self.alive:
                await self.kill()


class Cluster:
    """The nodes, their database and the bot that people write to."""

    def __init__(self, server: PostgresServer, database: str, nodes: list[ChaosNode], telegram: FakeTelegram) -> None:
        self.server = server
        self.database = database
        self.nodes = nodes
        self.telegram = telegram

    async def rows(self, sql: str) -> list[dict[str, Any]]:
        """What a query gives, beside every node and every network."""
        text = await trio.to_thread.run_sync(
            self.server.execute, f"SELECT coalesce(json_agg(q), '[]') FROM ({sql}) AS q", self.database
        )
        return json.loads(text)

    async def execute(self, sql: str) -> str:
        """Run SQL as the superuser."""
        return await trio.to_thread.run_sync(self.server.execute, sql, self.database)

    async def incarnations(self) -> dict[str, list[str]]:
        """The nodes that the database knows, by name."""
        found: dict[str, list[str]] = {}
        for row in await self.rows("SELECT name, incarnation FROM hermes_trio.nodes ORDER BY started_at"):
            found.setdefault(row["name"], []).append(row["incarnation"])
        return found

    async def until(self, what: str, holds: Callable[[], Any], seconds: float = START_SECONDS) -> float:
        """Wait until `holds()`, which may be async, is true; return how long that took."""
        began = trio.current_time()
        with trio.move_on_after(seconds):
            while True:
                found = holds()
                if hasattr(found, "__await__"):
                    found = await found
                if found:
                    return trio.current_time() - began
                await trio.sleep(0.02)
        raise AssertionError(f"{what}: not within {seconds:g} s\n{self.tails()}")

    async def until_gone(self, incarnation: str, since: float) -> float:
        """Wait until a node was taken over; return the seconds since then."""

        async def gone() -> bool:
            return not await self.rows(f"SELECT 1 FROM hermes_trio.nodes WHERE incarnation = '{incarnation}'")

        await self.until(f"{incarnation} is taken over", gone)
        return trio.current_time() - since

    def losses(self) -> int:
        """How often a node has given its lease up."""
        return sum(node.output.count(LOST) for node in self.nodes)

    def tails(self) -> str:
        """The last lines of all nodes."""
        return "\n".join(f"--- {node.name}\n{node.output[-1500:]}" for node in self.nodes)

    async def sabotage(self, old: str, new: str) -> None:
        """Change a text in the function that begins every unit."""
        found = await self.execute("SELECT pg_get_functiondef('hermes_trio.begin_unit'::regproc)")
        assert old in found, found
        await self.execute(found.replace(old, new))


def config_of(name: str, telegram: FakeTelegram) -> str:
    """The configuration of a node."""
    return "\n".join(
        [
            "[store]",
            f"lease_seconds = {LEASE}",
            f'node_name = "{name}"',
            "[server]",
            "drain_seconds = 5.0",
            "[agent]",
            'demo_directives = ["api_server", "telegram"]',
            "[telegram]",
            f'token = "{telegram.token}"',
            f'base_url = "{telegram.base_url}"',
            "poll_seconds = 2",
            "allow_all = true",
            "",
        ]
    )


@asynccontextmanager
async def open_cluster(
    server: PostgresServer,
    folder: Path,
    *,
    names: tuple[str, ...] = ("a", "b", "c"),
    environments: tuple[dict[str, str], ...] = (),
) -> AsyncIterator[Cluster]:
    """A fresh database and a node of each name, ready, for the body of the `async with`; nothing of it is left."""
    database = await trio.to_thread.run_sync(server.new_database, "prepared")
    async with AsyncExitStack() as stack:
        telegram = await stack.enter_async_context(open_fake_telegram())
        nodes: list[ChaosNode] = []
        for place, name in enumerate(names):
            proxy = await stack.enter_async_context(chaos_proxy(server.port))
            home = folder / f"node-{place}"
            home.mkdir(mode=0o700)
            (home / "config.toml").write_text(config_of(name, telegram))
            (home / "config.toml").chmod(0o600)
            node = ChaosNode(name, home, server.url(database, port=proxy.port), proxy)
            node.environment = environments[place] if environments else {}
            nodes.append(node)
        cluster = Cluster(server, database, nodes, telegram)
        triggers = "\n".join(
            f"CREATE TRIGGER chaos AFTER INSERT OR UPDATE ON hermes_trio.{table} FOR EACH STATEMENT EXECUTE FUNCTION hermes_trio.note_late();"
            for table in WATCHED_TABLES
        )
        grants = "GRANT ALL ON hermes_trio.removed_nodes TO keeper; GRANT ALL ON hermes_trio.late_writes TO keeper;"
        await cluster.execute(f"{LATE_WRITES} {triggers} {grants}")
        try:
            for node in nodes:
                node.start()
                await node.wait_ready()  # one after the other: a start takes a whole core
            yield cluster
        finally:
            with trio.CancelScope(shield=True):
                async with trio.open_nursery() as nursery:
                    for node in nodes:
                        nursery.start_soon(node.close)
