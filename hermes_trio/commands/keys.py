"""The `keys` commands: create, list and revoke API keys, through the running server if there is one, else in the store.

The store has one owner. While a server runs, a change goes through its admin route, so that a revoked key is refused from the next request on.
"""

from __future__ import annotations

import os
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Protocol, cast

import cyclopts
import httpx2
import msgspec
from cyclopts import Parameter

from hermes_trio.commands.options import CommandFailed, ConfigOption, HomeOption, server_client, unanswered
from hermes_trio.commands.output import say
from hermes_trio.config import Config, load_config
from hermes_trio.http.api.admin import check_scopes
from hermes_trio.http.errors import ApiError
from hermes_trio.store import ApiKey, StoreInUse
from hermes_trio.store.backend import open_backend
from hermes_trio.store.ports import KeyStore

keys: Final = cyclopts.App(name="keys", help="Create, list and revoke API keys. Only their hashes are stored.")

Scope = Literal["chat", "runs", "sessions", "admin"]


class KeyClient(Protocol):
    """Reads and changes API keys. A key is a plain object, as the admin route returns it."""

    async def add(self, name: str, scopes: tuple[str, ...], tenant: str, days: float | None) -> dict[str, Any]:
        """Create a key."""
        ...

    async def list(self) -> list[dict[str, Any]]:
        """Return all keys."""
        ...

    async def revoke(self, key_id: str) -> bool:
        """Revoke a key; return whether it was in force."""
        ...


@asynccontextmanager
async def open_keys(config: Config) -> AsyncIterator[KeyClient]:
    """Open the keys of a home directory for the body of the `async with`."""
    config.home.mkdir(mode=0o700, parents=True, exist_ok=True)
    try:
        async with open_backend(config.place) as store:
            yield _InStore(store)
            return
    except StoreInUse:
        pass
    async with server_client(config) as client:
        yield _OverHTTP(client)


def _record(key: ApiKey, secret: str | None = None) -> dict[str, Any]:
    return {
        "id": key.id,
        "name": key.name,
        "tenant": key.tenant,
        "scopes": list(key.scopes),
        "created_at": key.created_at,
        "last_used_at": key.last_used_at,
        "expires_at": key.expires_at,
        "revoked_at": key.revoked_at,
        "key": secret,
    }


class _InStore:
    """Changes keys in the store, while no server runs."""

    def __init__(self, store: KeyStore) -> None:
        self._store = store

    async def add(self, name: str, scopes: tuple[str, ...], tenant: str, days: float | None) -> dict[str, Any]:
        try:
            checked = check_scopes(list(scopes))
        except ApiError as error:
            raise CommandFailed(str(error)) from None
        expires = None if days is None else time.time() + days * 86_400
        return _record(*await self._store.create_api_key(name, scopes=checked, tenant=tenant, expires_at=expires))

    async def list(self) -> list[dict[str, Any]]:
        return [_record(key) for key in await self._store.list_api_keys(include_revoked=True)]

    async def revoke(self, key_id: str) -> bool:
        return await self._store.revoke_api_key(key_id)


class _OverHTTP:
    """Changes keys through the running server."""

    def __init__(self, client: httpx2.AsyncClient) -> None:
        self._client = client

    async def _ask(self, method: str, path: str, body: Any = None) -> tuple[int, dict[str, Any]]:
        try:
            answer = await self._client.request(
                method, path, content=None if body is None else msgspec.json.encode(body)
            )
        except httpx2.HTTPError as error:
            raise unanswered(self._client, error) from None
        try:
            return answer.status_code, cast("dict[str, Any]", msgspec.json.decode(answer.content))
        except msgspec.DecodeError:
            raise CommandFailed(f"{self._client.base_url} answered {answer.status_code}, not with JSON") from None

    @staticmethod
    def _problem(answer: dict[str, Any]) -> CommandFailed:
        return CommandFailed(f"the running server refused: {answer.get('error', {}).get('message', answer)}")

    async def add(self, name: str, scopes: tuple[str, ...], tenant: str, days: float | None) -> dict[str, Any]:
        body = {"name": name, "scopes": list(scopes), "tenant": tenant, "days": days}
        status, answer = await self._ask("POST", "/admin/keys", body)
        if status != 201:
            raise self._problem(answer)
        return answer

    async def list(self) -> list[dict[str, Any]]:
        status, answer = await self._ask("GET", "/admin/keys")
        if status != 200:
            raise self._problem(answer)
        return answer["data"]

    async def revoke(self, key_id: str) -> bool:
        status, answer = await self._ask("DELETE", f"/admin/keys/{key_id}")
        if status not in (200, 404):
            raise self._problem(answer)
        return status == 200


# -- the commands ----------------------------------------------------------------------------------------------------------------


def _config(home: Path | None, config: Path | None) -> Config:
    return load_config(os.environ, home=home, path=config)


@keys.command(name="add")
async def add_key(
    name: Annotated[str, Parameter(help="A name for the key.")],
    *,
    scope: Annotated[list[Scope] | None, Parameter(help="A scope; repeat for several. Default: chat and runs.")] = None,
    tenant: Annotated[str, Parameter(help="The tenant of another key, to share its sessions and runs.")] = "",
    days: Annotated[float | None, Parameter(help="Days until it expires; default: it does not expire.")] = None,
    home: HomeOption = None,
    config: ConfigOption = None,
) -> None:
    """Create a key and print it. It is not shown again."""
    async with open_keys(_config(home, config)) as client:
        made = await client.add(name, tuple(scope or ("chat", "runs")), tenant, days)
    say(f"{made['id']}  {made['name']}  scopes: {', '.join(made['scopes'])}  tenant: {made['tenant']}")
    say(f"\n  {made['key']}\n\nIt is not kept in readable form and cannot be shown again.")


@keys.command(name="list")
async def list_keys(*, home: HomeOption = None, config: ConfigOption = None) -> None:
    """List the keys, without their secrets."""
    async with open_keys(_config(home, config)) as client:
        known = await client.list()
    if not known:
        say("There are no keys besides the admin key; make one with `hermes-trio keys add NAME`.")
    for key in known:
        state = "revoked" if key["revoked_at"] else "in force"
        if not key["revoked_at"] and key["expires_at"] and key["expires_at"] <= time.time():
            state = "expired"
        used = time.strftime("%Y-%m-%d %H:%M", time.localtime(key["last_used_at"])) if key["last_used_at"] else "never"
        say(f"{key['id']}  {key['name']}  {','.join(key['scopes'])}  tenant {key['tenant']}  {state}  last used {used}")


@keys.command(name="revoke")
async def revoke_key(
    key_id: Annotated[str, Parameter(help="The id that `keys list` shows.")],
    *,
    home: HomeOption = None,
    config: ConfigOption = None,
) -> None:
    """Revoke a key at once."""
    async with open_keys(_config(home, config)) as client:
        if not await client.revoke(key_id):
            raise CommandFailed(
                f"there is no key {key_id} in force; `hermes-trio keys list` shows those that there are"
            )
    say(f"{key_id} is revoked.")
