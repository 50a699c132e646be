"""Unmodified clients against the real server: what each returns, and what ran where, once."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from .playground import CLIENTS, Client, Playground, open_playground

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def playground(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Playground]:
    """One server for all clients."""
    with open_playground(tmp_path_factory.mktemp("clients")) as opened:
        yield opened


@pytest.mark.parametrize("client", CLIENTS, ids=lambda client: client.script)
def test_a_client_works_unmodified(playground: Playground, client: Client) -> None:
    """Each scenario gives what it should; the tools of either side ran exactly as often as the model asked, also when the turn failed."""
    if client.missing:
        pytest.skip(client.missing)
    played = playground.play(client)
    assert played
    wrong = [f"{one.scenario}: {one.problem}\n{one.trace[-1500:]}" for one in played if one.problem]
    assert not wrong, "\n\n".join([f"{len(wrong)} of {len(played)} scenarios of {client.name} went wrong", *wrong])
