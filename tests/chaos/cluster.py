"""Three nodes of the real server on one PostgreSQL, each behind its own proxy, with the faults that can be injected."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
import trio

from hermes_trio.testing.platforms import FakeTelegram
from hermes_trio.testing.platforms.telegram import open_fake_telegram
from tests.database_proxy import DatabaseProxy, database_proxy
from tests.e2e.server_process import KEY, clean_environment
from tests.postgres_server import PostgresServer, free_port

BESIDE_OTHERS = "PYTEST_XDIST_WORKER" in os.environ
"""Whether other tests run on this machine: how long a takeover takes then says nothing, and nodes need a longer lease to get anything done."""
LEASE = 6.0 if BESIDE_OTHERS else 2.0
START_SECONDS = 120.0
TOLERATED = 0.2
"""Seconds up to which a delay of the loop or of a heartbeat does not count."""
LOST = "has lost its membership and ends"
"""The log line of a node that has lost its lease."""

WEBHOOK_SECRET = "chaos-webhook-secret-0123456789"

HEADERS = {"Authorization": f"Bearer {KEY}"}

LATE_WRITES = """
CREATE TABLE hermes_trio.removed_nodes (
    incarnation text, tx xid8, at double precision DEFAULT extract(epoch FROM clock_timestamp())
);
CREATE TABLE hermes_trio.late_writes (incarnation text, tx xid8, place text);
CREATE FUNCTION hermes_trio.note_removed() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO hermes_trio.removed_nodes VALUES (OLD.incarnation, pg_current_xact_id());
    RETURN NULL;
END $$;
CREATE CONSTRAINT TRIGGER chaos AFTER DELETE ON hermes_trio.nodes DEFERRABLE INITIALLY DEFERRED
    FOR EACH ROW EXECUTE FUNCTION hermes_trio.note_removed();
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
"""Triggers that record, independently of the program, when each node was removed and every later write of a removed node."""

WATCHED_TABLES = ("sessions", "messages", "runs", "events", "jobs", "inbox", "outbox")


class ChaosNode:
    """One node: its home directory, port, proxy and current process."""

    def __init__(self, name: str, home: Path, url: str, proxy: DatabaseProxy) -> None:
        self.name = name
        self.home = home
        self.proxy = proxy
        self.port = free_port()
        self.address = f"http://127.0.0.1:{self.port}"
        self.environment: dict[str, str] = {}
        self.paused = False
        self.silent_at = 0.0
        """When it was last killed, stopped or partitioned, by the monotonic clock."""
        self._url = url
        self._process: subprocess.Popen[bytes] | None = None
        self._log = home / "log"

    def start(self) -> None:
        """Start a process; `wait_ready` waits until it serves."""
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
        """Return the output of all its processes so far."""
        return self._log.read_text(errors="replace")

    def late(self, since: float, until: float) -> float:
        """Return how many seconds its loop or a heartbeat was late between two times of the monotonic clock."""
        noted = self.home / "late"
        lines = noted.read_text().split("\n")[:-1] if noted.exists() else []
        ends = [(float(at), float(seconds)) for at, seconds in (line.split() for line in lines)]
        spans = [(at - seconds, at) for at, seconds in ends if seconds > TOLERATED]
        if ends:
            spans.append(
                (max(at for at, _ in ends) + TOLERATED, until)
            )  # a delay that has not ended is not recorded yet
        late, covered = 0.0, since
        for began, ended in sorted(spans):
            late += max(0.0, min(ended, until) - max(began, covered))
            covered = max(covered, ended)
        return late

    def waited(self) -> float:
        """Return for how many seconds its current process has waited for a processor so far."""
        try:
            return int(Path(f"/proc/{self.pid}/schedstat").read_text().split()[1]) / 1e9
        except OSError:
            return 0.0

    def losses(self) -> int:
        """Return how often its processes have lost their leases."""
        return self.output.count(LOST)

    @property
    def pid(self) -> int:
        """Return the id of its current, or last, process."""
        assert self._process is not None
        return self._process.pid

    def stalls(self, since: float, until: float) -> list[float]:
        """Return the delays of its loop and its heartbeats, in seconds, that overlap a span of the monotonic clock."""
        noted = self.home / "late"
        lines = noted.read_text().split("\n")[:-1] if noted.exists() else []
        ends = [(float(at), float(seconds)) for at, seconds in (line.split() for line in lines)]
        return [seconds for at, seconds in ends if at >= since and at - seconds <= until]

    @property
    def alive(self) -> bool:
        """Return whether its process runs."""
        return self._process is not None and self._process.poll() is None

    async def wait_ready(self, starts: int = 1) -> None:
        """Wait until it has logged `starts` times that it listens."""
        with trio.fail_after(START_SECONDS):
            while self.output.count("listens on") < starts:
                assert self.alive, self.output[-4000:]
                await trio.sleep(0.05)

    def signal(self, number: int) -> None:
        """Send a signal to the process."""
        assert self._process is not None
        if number == signal.SIGSTOP:
            self.silent_at = time.monotonic()
        self._process.send_signal(number)
        self.paused = number == signal.SIGSTOP

    async def kill(self) -> None:
        """Kill it with SIGKILL, and wait for its end."""
        assert self._process is not None
        self.silent_at = time.monotonic()
        self._process.kill()
        await self.wait_ended()

    def cut_off(self, *directions: str) -> None:
        """Hold back its traffic to the database (`up`), from it (`down`), or both."""
        self.silent_at = time.monotonic()
        self.proxy.hold(*directions)

    async def wait_ended(self) -> int:
        """Wait for the end of the process; return its exit code."""
        assert self._process is not None
        with trio.fail_after(START_SECONDS):
            while (code := self._process.poll()) is None:  # noqa: ASYNC110
                await trio.sleep(0.02)
        return code

    async def close(self) -> None:
        """Kill the process, if it runs."""
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


class Takeover(msgspec.Struct, frozen=True):
    """The duration of a takeover, and the delay of the least delayed of the other nodes during it, in seconds."""

    seconds: float
    starved: float

    @property
    def late(self) -> bool:
        """Return whether it took longer than the lease and a second."""
        return self.seconds > LEASE + 1

    @property
    def unexplained(self) -> bool:
        """Return whether it was late even without the time for which the reaper was delayed."""
        return self.seconds - self.starved > LEASE + 1


class Cluster:
    """The nodes, their database and the bot of the fake chat platform."""

    def __init__(self, server: PostgresServer, database: str, nodes: list[ChaosNode], telegram: FakeTelegram) -> None:
        self.server = server
        self.database = database
        self.nodes = nodes
        self.telegram = telegram

    async def rows(self, sql: str) -> list[dict[str, Any]]:
        """Return the rows of a query on a direct connection to the database."""
        text = await trio.to_thread.run_sync(
            self.server.execute, f"SELECT coalesce(json_agg(q), '[]') FROM ({sql}) AS q", self.database
        )
        return json.loads(text)

    async def execute(self, sql: str) -> str:
        """Run SQL as the superuser."""
        return await trio.to_thread.run_sync(self.server.execute, sql, self.database)

    async def incarnations(self) -> dict[str, list[str]]:
        """Return the incarnations in the database, by the name of the node."""
        found: dict[str, list[str]] = {}
        for row in await self.rows("SELECT name, incarnation FROM hermes_trio.nodes ORDER BY started_at"):
            found.setdefault(row["name"], []).append(row["incarnation"])
        return found

    async def until(self, what: str, holds: Callable[[], Any], seconds: float = START_SECONDS) -> float:
        """Wait until `holds()`, which may be async, is true; return the seconds that took."""
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

    async def until_gone(self, incarnation: str, victim: ChaosNode) -> Takeover:
        """Wait until a node was taken over; return how long that took since it was killed, stopped or cut off, by the clock of the database.

        The nodes that could have taken it over are all others: the one that was least late counts.
        """
        found: list[dict[str, float]] = []

        async def gone() -> bool:
            found[:] = await self.rows(f"SELECT at FROM hermes_trio.removed_nodes WHERE incarnation = '{incarnation}'")
            return bool(found)

        await self.until(f"{incarnation} is taken over", gone)
        until = found[0]["at"] - time.time() + time.monotonic()
        since = victim.silent_at
        others = [node.late(since, until) for node in self.nodes if node is not victim and node.alive]
        return Takeover(until - since, min(others, default=0.0))

    async def trace(self, text: str, chat: int) -> str:
        """Return where an undelivered text is: at the platform, in an inbox, in a turn, or in the outbox."""
        parts = {
            "inbox": "SELECT id, state, reason, owner, attempts, turn_id, created_at, settled_at, session_key FROM hermes_trio.inbox"
            f" WHERE strpos(text, '{text}') > 0 OR strpos(session_key, ':{chat}') > 0 AND settled_at IS NULL ORDER BY id",
            "outbox": "SELECT id, state, owner, attempts, next_at, created_at, settled_at, text FROM hermes_trio.outbox"
            f" WHERE strpos(text, '{text}') > 0 OR strpos(target, '\"{chat}\"') > 0 AND settled_at IS NULL ORDER BY id",
            "sessions": f"SELECT id, owner, open_turn FROM hermes_trio.sessions WHERE strpos(session_key, ':{chat}') > 0",
            "nodes": "SELECT name, incarnation FROM hermes_trio.nodes",
        }
        found = {name: await self.rows(sql) for name, sql in parts.items()}
        return f"{found}; the platform has {len(self.telegram.pending_update_ids)} updates that nobody took"

    def losses(self) -> int:
        """Return how often nodes have lost their leases."""
        return sum(node.losses() for node in self.nodes)

    def tails(self) -> str:
        """Return the last log lines of all nodes."""
        return "\n".join(f"--- {node.name}\n{node.output[-1500:]}" for node in self.nodes)

    async def sabotage(self, old: str, new: str) -> None:
        """Replace a text in the SQL function that begins every unit."""
        found = await self.execute("SELECT pg_get_functiondef('hermes_trio.begin_unit'::regproc)")
        assert old in found, found
        await self.execute(found.replace(old, new))


def config_of(name: str, telegram: FakeTelegram) -> str:
    """Return the configuration of a node."""
    return "\n".join(
        [
            "[store]",
            f"lease_seconds = {LEASE}",
            f'node_name = "{name}"',
            "[server]",
            "drain_seconds = 5.0",
            "[retention]",
            "response_count = 10000",
            "[agent]",
            'demo_directives = ["api_server", "telegram"]',
            "[webhook]",
            "rate_limit = 100000",
            "[webhook.routes.events]",
            f'secret = "{WEBHOOK_SECRET}"',
            'prompt = "{text}"',
            'deliver = "telegram"',
            'deliver_extra = { chat_id = "{chat}" }',
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
    """Open a new database and a ready node for each name for the body of the `async with`; then remove all of it."""
    database = await trio.to_thread.run_sync(server.new_database, "prepared")
    async with AsyncExitStack() as stack:
        telegram = await stack.enter_async_context(open_fake_telegram())
        nodes: list[ChaosNode] = []
        for place, name in enumerate(names):
            proxy = await stack.enter_async_context(database_proxy(server.port))
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
                await node.wait_ready()  # one after the other: a start uses a whole core
            yield cluster
        finally:
            with trio.CancelScope(shield=True):
                async with trio.open_nursery() as nursery:
                    for node in nodes:
                        nursery.start_soon(node.close)
