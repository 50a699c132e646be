"""The file in which a server says where it listens: believed while the server lives, and never after."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

from hermes_trio.store.ownership import address_path, announced, announced_addresses

ANNOUNCE_AND_DIE = """
import os, pathlib, sys
from hermes_trio.store.ownership import announced

with announced(pathlib.Path(sys.argv[1]), ["http://127.0.0.1:1"]):
    os._exit(9)
"""


def test_an_address_is_believed_while_its_server_lives(tmp_path: Path) -> None:
    """It is there for its owner's eyes while the server says so, and gone when it ends."""
    path = tmp_path / "store.db"
    assert announced_addresses(path) == ()
    with announced(path, ["http://127.0.0.1:9000", "http://[::1]:9000"]):
        assert announced_addresses(path) == ("http://127.0.0.1:9000", "http://[::1]:9000")
        assert announced_addresses(path) == ("http://127.0.0.1:9000", "http://[::1]:9000")
        assert stat.S_IMODE(address_path(path).stat().st_mode) == 0o600
    assert announced_addresses(path) == ()
    assert os.listdir(tmp_path) == []


def test_a_dead_servers_address_is_not_believed(tmp_path: Path) -> None:
    """Whatever a crash left, also halfway through, says nothing, and does not hinder the next server."""
    path = tmp_path / "store.db"
    left = subprocess.run([sys.executable, "-c", ANNOUNCE_AND_DIE, str(path)], timeout=60, check=False).returncode
    (tmp_path / "store.db.address.new").write_text("http://127.0.0.1:2\n")

    assert left == 9
    assert address_path(path).read_text() == "http://127.0.0.1:1\n"
    assert announced_addresses(path) == ()
    with announced(path, ["http://127.0.0.1:3"]):
        assert announced_addresses(path) == ("http://127.0.0.1:3",)
