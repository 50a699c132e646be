"""The commands and the server of their home directory: they find it at whatever address it has got, and only if it lives."""

from __future__ import annotations

import socket
import stat
import sys
from pathlib import Path

import pytest
import trio

from hermes_trio.commands.options import server_url
from hermes_trio.config import load_config
from hermes_trio.store.ownership import address_path, announced

from .served_gateway import Served, open_served
from .server_process import KEY, clean_environment


async def command(home: Path, *words: str) -> str:
    """What a command prints that is told nothing but the home directory and the key."""
    done = await trio.run_process(
        [sys.executable, "-m", "hermes_trio", *words],
        env=clean_environment(home, API_SERVER_KEY=KEY),
        capture_stdout=True,
        capture_stderr=True,
        check=False,
    )
    return (done.stdout + done.stderr).decode()


async def names(served: Served) -> list[str]:
    """The keys that the server knows."""
    return [key["name"] for key in (await served.ask("GET", "/admin/keys"))["data"]]


def has_ipv6() -> bool:
    """Whether this machine has an IPv6 loopback."""
    try:
        with socket.socket(socket.AF_INET6) as sock:
            sock.bind(("::1", 0))
    except OSError:
        return False
    return True


IPV6 = pytest.param("::1", marks=pytest.mark.skipif(not has_ipv6(), reason="there is no IPv6 loopback here"))


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", IPV6])
async def test_commands_find_a_server_on_any_port(tmp_path: Path, host: str) -> None:
    """A server on a free port is found by `keys` and `cron`; its address is for its owner alone, and is gone when it has ended."""
    file = address_path(tmp_path / "state.db")
    async with open_served(tmp_path, f'[server]\nhost = "{host}"\n') as served:
        assert file.read_text() == f"{served.url}\n"
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        assert "scopes: chat, runs" in await command(tmp_path, "keys", "add", "laptop")
        assert await names(served) == ["laptop"]
        job = (await command(tmp_path, "cron", "add", "every 1h", "look around")).split()[0]
        assert [job] == [one["id"] for one in (await served.ask("GET", "/api/jobs"))["jobs"]]
        assert await served.stop() == 0
        assert not file.exists()


async def test_a_dead_servers_address_is_not_used(tmp_path: Path) -> None:
    """After a crash the file is still there; the commands work on the store, and then with the next server at its own address."""
    async with open_served(tmp_path) as served:
        await served.kill()
    assert address_path(tmp_path / "state.db").exists()
    assert "scopes" in await command(tmp_path, "keys", "add", "without-a-server")
    async with open_served(tmp_path) as served:
        assert "scopes" in await command(tmp_path, "keys", "add", "with-the-next")
        assert sorted(await names(served)) == ["with-the-next", "without-a-server"]


@pytest.mark.parametrize(
    ("listens", "reached"),
    [
        ("http://127.0.0.1:9000", "http://127.0.0.1:9000"),
        ("http://0.0.0.0:9000", "http://127.0.0.1:9000"),
        ("http://[::]:9000", "http://[::1]:9000"),
        ("http://[::1]:9000", "http://[::1]:9000"),
        ("https://192.0.2.1:9000", "https://192.0.2.1:9000"),
    ],
)
def test_an_address_for_everybody_leads_to_loopback(tmp_path: Path, listens: str, reached: str) -> None:
    """One cannot connect to the address that stands for all of them; what the server says beats the configuration."""
    config = load_config({}, home=tmp_path, server={"port": 1})
    with announced(config.database, [listens]):
        assert server_url(config) == reached


@pytest.mark.parametrize(
    ("host", "reached"),
    [("127.0.0.1", "127.0.0.1"), ("0.0.0.0", "127.0.0.1"), ("::", "[::1]"), ("[::1]", "[::1]"), ("box", "box")],
)
def test_a_server_that_says_nothing_is_where_the_configuration_puts_it(tmp_path: Path, host: str, reached: str) -> None:
    """Another program may serve the gateway, and a dead server's file says nothing."""
    config = load_config({}, home=tmp_path, server={"host": host, "port": 8642})
    address_path(config.database).write_text("http://127.0.0.1:9\n")
    assert server_url(config) == f"http://{reached}:8642"


async def test_a_conversation_is_not_a_server(tmp_path: Path) -> None:
    """A store that is in use by something without an address is a short error that says what to do."""
    from hermes_trio.store import open_store

    (tmp_path / "config.toml").write_text("[server]\nport = 1\n")
    async with open_store(tmp_path / "state.db"):
        said = await command(tmp_path, "keys", "list")
    assert "does not answer at http://127.0.0.1:1" in said
    assert "API_SERVER_PORT" in said
    assert KEY not in said
