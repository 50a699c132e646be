"""What the commands share: options, `CommandFailed`, and the client of the server that runs in a home directory."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

from cyclopts import Parameter

if TYPE_CHECKING:
    import httpx2

    from hermes_trio.config import Config

HomeOption = Annotated[Path | None, Parameter(help="The home directory; default: HERMES_HOME, else ~/.hermes-trio.")]
ConfigOption = Annotated[
    Path | None, Parameter(help="The configuration file; default: config.toml in the home directory.")
]

ANSWER_SECONDS: Final = 30.0
"""How long a command waits for the server of its home: a server under load, or one that waits for its disk, answers late."""

_REACHED_AT: Final = {"0.0.0.0": "127.0.0.1", "::": "::1"}
"""Wildcard addresses, and the address by which a server that listens on one is reached."""


class CommandFailed(Exception):
    """Raised by a command that cannot do its work. The text is printed."""


def server_url(config: Config) -> str:
    """Return the address of the server of the home directory: the one that it has announced, else the configured one."""
    from urllib.parse import urlsplit

    from hermes_trio.store.ownership import announced_addresses

    said = [urlsplit(address) for address in announced_addresses(config.database)]
    for address in said:
        if address.hostname and address.port:
            return f"{address.scheme}://{_reached_at(address.hostname)}:{address.port}"
    return f"http://{_reached_at(config.server.host.strip('[]'))}:{config.server.port}"


def _reached_at(host: str) -> str:
    shown = _REACHED_AT.get(host, host)
    return f"[{shown}]" if ":" in shown else shown


def server_client(config: Config) -> httpx2.AsyncClient:
    """Return a client of the server of the home directory, with its admin key. The caller closes it."""
    import httpx2

    from hermes_trio.http.settings import KEY_FILE

    try:
        key = config.server.key or (config.home / KEY_FILE).read_text(encoding="ascii").strip()
    except OSError:
        raise CommandFailed(
            f"a server runs in {config.home}, and its admin key is not known here: set API_SERVER_KEY to it"
        ) from None
    headers = {"Authorization": f"Bearer {key}"}
    return httpx2.AsyncClient(base_url=server_url(config), headers=headers, trust_env=False, timeout=ANSWER_SECONDS)


def unanswered(client: httpx2.AsyncClient, error: Exception) -> CommandFailed:
    """Return the error for a store that is in use while no server answers at the expected address."""
    return CommandFailed(
        f"a server runs on this home, and does not answer at {client.base_url}: {type(error).__name__}. If another program"
        " serves it, set API_SERVER_HOST and API_SERVER_PORT to its address; if it is `chat` or `run`, end that first"
    )
