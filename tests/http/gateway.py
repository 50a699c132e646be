"""A whole gateway in this process, on a free loopback port: the real runtime, store, application and server, with an agent of the test's choice."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

import attrs
import h11
import httpx2
import trio

from hermes_trio.http.app import ApiApp, make_app
from hermes_trio.http.core import ApiCore, ApiServices, ApiSettings, CronPort
from hermes_trio.http.routing import Route
from hermes_trio.http.server import ServerConfig, hypercorn_config, serve
from hermes_trio.http.settings import Limits, ServerSettings
from hermes_trio.runtime.core import RuntimeSettings
from hermes_trio.runtime.ports import Reply
from hermes_trio.runtime.runtime import Runtime
from hermes_trio.runtime.turn import Turn
from hermes_trio.store import open_store
from hermes_trio.testing.gateway import eventually
from tests import node_mode

KEY = "test-admin-key-0123456789"

TEST_SECONDS = 30.0

Agent = Callable[[Turn], Awaitable[Reply | str]]


async def echo(turn: Turn) -> str:
    """Streams the input word by word, then returns it."""
    text = f"You said: {turn.input.text}"
    for word in text.split(" "):
        turn.emit("message.delta", delta=word if word == "You" else f" {word}")
        await trio.lowlevel.checkpoint()
    return text


@attrs.define
class Gateway:
    """What a test talks to. `http` is a client with the admin key."""

    runtime: Runtime
    core: ApiCore
    app: ApiApp
    url: str
    http: httpx2.AsyncClient
    runtimes: Sequence[Runtime] = ()
    """All of them, if there are several."""
    urls: Sequence[str] = ()
    """The address of each."""

    def rotate(self) -> dict[str, list[Callable[[Any], Awaitable[None]]]]:
        """The event hooks with which the client of another library sends each request to the next of the servers."""
        urls = cycle(httpx2.URL(url) for url in self.urls)

        async def send_elsewhere(request: Any) -> None:
            await trio.lowlevel.checkpoint()
            url = next(urls)
            request.url = request.url.copy_with(host=url.host, port=url.port)
            request.headers["Host"] = f"{url.host}:{url.port}"

        return {"request": [send_elsewhere]}

    @property
    def jobs(self) -> int:
        """How many jobs run, on all nodes."""
        return sum(len(runtime.supervisor) for runtime in self.runtimes or (self.runtime,))

    async def key(self, *scopes: str, name: str = "tenant", tenant: str = "") -> dict[str, str]:
        """The headers of a new key with these scopes."""
        _, secret = await self.core.store.create_api_key(name, scopes=scopes, tenant=tenant)
        return {"Authorization": f"Bearer {secret}"}

    async def chat(self, text: str = "hello", **more: Any) -> httpx2.Response:
        """One plain chat completion."""
        headers = more.pop("headers", None)
        body = {"messages": [{"role": "user", "content": text}], **more}
        return await self.http.post("/v1/chat/completions", json=body, headers=headers)

    async def start(self, text: str = "hello", **more: Any) -> str:
        """Start a run and return its id."""
        answer = await self.http.post("/v1/runs", json={"input": text, **more})
        assert answer.status_code == 202, answer.text
        return answer.json()["run_id"]

    async def ended(self, run_id: str, wait: str = "settled") -> dict[str, Any]:
        """The run as it is when it has settled."""
        answer = await self.http.get(f"/v1/runs/{run_id}", params={"wait": wait, "timeout": "20"})
        assert answer.status_code == 200, answer.text
        return answer.json()

    async def idle(self) -> None:
        """Wait until no turn is alive."""

        async def check() -> bool:
            return not any(runtime.stateless.active for runtime in self.runtimes or (self.runtime,))

        await eventually(check)

    @asynccontextmanager
    async def events(
        self,
        path: str,
        *,
        method: str = "GET",
        json: Any = None,
        headers: dict[str, str] | None = None,
        params: dict[str, str] | None = None,
    ) -> AsyncIterator[Events]:
        """An open event stream, on a connection of its own. Leaving the block is leaving the server."""
        request = self.http.build_request(method, path, json=json, headers=headers, params=params)
        stream = await trio.open_tcp_stream("127.0.0.1", request.url.port or 80)
        async with stream:
            connection = h11.Connection(h11.CLIENT)
            head = h11.Request(method=method, target=request.url.raw_path, headers=request.headers.raw)
            body = await request.aread()
            await stream.send_all(
                (connection.send(head) or b"")
                + (connection.send(h11.Data(data=body)) or b"" if body else b"")
                + (connection.send(h11.EndOfMessage()) or b"")
            )
            events = Events(stream, connection)
            await events.open()
            yield events


@attrs.frozen
class Event:
    """One server-sent event; `comment` for a comment line."""

    data: Any = None
    id: str = ""
    name: str = ""
    comment: str = ""


class RotatingClient(httpx2.AsyncClient):
    """Sends each request to the next of several servers."""

    def __init__(self, urls: Sequence[str], **settings: Any) -> None:
        super().__init__(base_url=urls[0], **settings)
        self._urls = cycle(urls)

    def build_request(self, *args: Any, **named: Any) -> httpx2.Request:
        """As the client does, for the server whose turn it is."""
        self.base_url = next(self._urls)
        return super().build_request(*args, **named)


class StreamHead:
    """Status and headers of a stream."""

    def __init__(self, response: h11.Response) -> None:
        self.status_code = response.status_code
        self.headers = httpx2.Headers(list(response.headers))


class Events:
    """Reads a stream event by event."""

    def __init__(self, stream: trio.SocketStream, connection: h11.Connection) -> None:
        self._stream = stream
        self._connection = connection
        self._text = ""
        self._over = False
        self.response: StreamHead

    async def _pull(self) -> Any:
        while (event := self._connection.next_event()) is h11.NEED_DATA:
            self._connection.receive_data(await self._stream.receive_some())
        return event

    async def open(self) -> None:
        """Read the head."""
        self.response = StreamHead(await self._pull())

    async def _line(self) -> str | None:
        while "\n" not in self._text and not self._over:
            event = await self._pull()
            if isinstance(event, h11.Data):
                self._text += bytes(event.data).decode()
            else:
                self._over = True
        line, newline, self._text = self._text.partition("\n")
        return line if newline or line else None

    async def next(self) -> Event | None:
        """The next event or comment, or None at the end."""
        data: list[str] = []
        id = name = ""
        while (line := await self._line()) is not None:
            if line.startswith(":"):
                return Event(comment=line[1:].strip())
            if not line:
                if data:
                    text = "\n".join(data)
                    return Event(text if text == "[DONE]" else json.loads(text), id, name)
                continue
            field, _, value = line.partition(": ")
            if field == "data":
                data.append(value)
            elif field == "id":
                id = value
            elif field == "event":
                name = value
        return None

    async def all(self) -> list[Event]:
        """Everything up to the end."""
        found: list[Event] = []
        while (event := await self.next()) is not None:
            found.append(event)
        return found


@asynccontextmanager
async def open_gateway(
    agent: Agent = echo,
    *,
    fast_path: bool = True,
    server: ServerSettings | None = None,
    limits: Limits | None = None,
    path: str | None = None,
    approvals: Any = None,
    cron: CronPort | None = None,
    seconds: float = TEST_SECONDS,
    server_config: Callable[[ServerConfig], ServerConfig] = lambda config: config,
    routes: Sequence[Route] = (),
    home: Path | None = None,
) -> AsyncIterator[Gateway]:
    """A gateway for the body of the `async with`; everything that it started has ended afterwards.

    While `node_mode.NODES` is more than one it is so many runtimes with a server each, on one store, and each request of `Gateway.http` goes to another
    one.
    """
    limits = Limits() if limits is None else limits
    settings = RuntimeSettings(max_turns=limits.concurrent_turns, watchdog_seconds=0)
    with trio.fail_after(seconds):
        async with AsyncExitStack() as stack:
            opened = await stack.enter_async_context(node_mode.open_stores(open_store(path)))
            runtimes = [
                await stack.enter_async_context(Runtime(agent=agent, store=one, settings=settings)) for one in opened
            ]
            nursery = await stack.enter_async_context(trio.open_nursery())
            shutdown = trio.Event()
            cores: list[ApiCore] = []
            apps: list[ApiApp] = []
            urls: list[str] = []
            for runtime in runtimes:
                core = ApiCore(
                    runtime,
                    runtime.store,  # type: ignore[arg-type]
                    ApiSettings(
                        admin_key=KEY, server=server or ServerSettings(), limits=limits, version="test", home=home
                    ),
                    ApiServices(approvals=approvals, cron=cron),
                )
                app = make_app(core, routes)
                config = hypercorn_config("127.0.0.1:0")
                config.errorlog = None
                config.graceful_timeout = 2.0
                serving = server_config(ServerConfig(hypercorn=config, fast_path=fast_path))
                urls += await nursery.start(partial(serve, app, serving, shutdown=shutdown))
                cores.append(core)
                apps.append(app)
            async with RotatingClient(
                urls, headers={"Authorization": f"Bearer {KEY}"}, timeout=20, trust_env=False
            ) as http:
                yield Gateway(runtimes[0], cores[0], apps[0], urls[0], http, runtimes, urls)
            shutdown.set()
