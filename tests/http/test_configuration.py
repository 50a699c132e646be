"""The configuration file, the environment and the command line; and the logs."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from hermes_trio.adapters.assembly import CHAT_PLATFORMS, build_assembly
from hermes_trio.base.redaction import Redactor
from hermes_trio.config import Config, ConfigError, load_config
from hermes_trio.gateway.api import model_entries
from hermes_trio.gateway.serving import address_of
from hermes_trio.logs import configure_logging
from hermes_trio.providers.routes import build_routes
from hermes_trio.runtime.turn import Turn

from .gateway import open_gateway


def load(home: Path, text: str = "", **environment: str) -> Config:
    """The configuration of a home directory with this file."""
    (home / "config.toml").write_text(text)
    return load_config({"HERMES_HOME": str(home), **environment})


def test_defaults(tmp_path: Path) -> None:
    """Without a file everything has a default: loopback, port 8642, and a database in the home directory."""
    config = load_config({"HERMES_HOME": str(tmp_path)})
    assert address_of(config) == "127.0.0.1:8642"
    assert config.database == tmp_path / "state.db"
    assert config.limits.body_bytes == 10_000_000
    assert config.limits.concurrent_turns == 1000
    assert config.retention.runs == 7


def test_the_file_beats_the_environment_and_the_command_line_beats_both(tmp_path: Path) -> None:
    """Who decides last."""
    environment = {
        "API_SERVER_HOST": "127.0.0.2",
        "API_SERVER_PORT": "1000",
        "API_SERVER_KEY": "from-the-environment",
        "API_SERVER_CORS_ORIGINS": "https://a.example, https://b.example",
        "API_SERVER_MODEL_NAME": "mine",
    }
    config = load(tmp_path, "[server]\nport = 2000\n", **environment)
    assert (config.server.host, config.server.port) == ("127.0.0.2", 2000)
    assert config.server.cors_origins == ["https://a.example", "https://b.example"]
    assert (config.server.model_name, config.server.key) == ("mine", "from-the-environment")
    told = load_config(environment, home=tmp_path, server={"port": 3000, "host": None})
    assert (told.server.host, told.server.port) == ("127.0.0.2", 3000)
    assert "from-the-environment" not in repr(config)


def test_the_address_of_another_database_is_answered_with_an_example(tmp_path: Path) -> None:
    """What the address of a store looks like is shown, and nothing of the given one, which may hold a password."""
    expected = "not of this form; accepted is an address such as postgresql://user@host:5432/name"
    for url in ("mysql://keeper:secret-word@db/store", "db.example/secret-word"):
        with pytest.raises(ConfigError) as caught:
            load(tmp_path, HERMES_STORE_URL=url)
        assert str(caught.value) == f"HERMES_STORE_URL: {expected}"
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, '[store]\nurl = "mysql://keeper:secret-word@db/store"\n')
    assert str(caught.value) == f"{tmp_path / 'config.toml'}: store.url: {expected}"


def test_ipv6_addresses_are_bracketed(tmp_path: Path) -> None:
    """The address is one that can be bound."""
    assert address_of(load(tmp_path, "[server]\nhost = '::1'\n")) == "[::1]:8642"


def test_sections_of_others_are_kept_as_tables(tmp_path: Path) -> None:
    """Their owners check them."""
    config = load(tmp_path, "[telegram]\ntoken = 'x'\n[models.routes.fast]\nprovider = 'demo'\n[mcp.servers.a]\n")
    assert config.telegram == {"token": "x"}
    assert config.models == {"routes": {"fast": {"provider": "demo"}}}


@pytest.mark.parametrize(
    ("text", "environment", "expected"),
    [
        ("[server]\nport = 'x'\n", {}, ["server.port", "'x'", "whole number from 0 up to 65535"]),
        ("[server]\nport = 70000\n", {}, ["server.port", "70000", "65535"]),
        ("[server]\nprot = 1\n", {}, ["server.prot", "did you mean port?", "host, port, key"]),
        ("[sever]\n", {}, ["[sever]", "did you mean server?"]),
        ("[log]\nlevel = 'loud'\n", {}, ["log.level", "'loud'", "debug, info, warning, error"]),
        ("[limits]\nconcurrent_turns = 0\n", {}, ["limits.concurrent_turns", "from 1"]),
        ("[retention]\nruns = -1\n", {}, ["retention.runs", "from 0"]),
        ("server = 5\n", {}, ["server must be a table"]),
        ("limits = 5\n", {}, ["limits"]),
        ("[server\n", {}, ["not valid TOML", "line 1"]),
        ("", {"API_SERVER_PORT": "many"}, ["API_SERVER_PORT", "'many'", "0 to 65535"]),
        ("", {"API_SERVER_PORT": "99999"}, ["API_SERVER_PORT", "65535"]),
    ],
)
def test_mistakes_name_the_key_and_what_is_accepted(
    tmp_path: Path, text: str, environment: dict[str, str], expected: list[str]
) -> None:
    """An error is for the person who reads it."""
    with pytest.raises(ConfigError) as error:
        load(tmp_path, text, **environment)
    for words in expected:
        assert words in str(error.value)


def test_a_key_is_not_shown_by_an_error(tmp_path: Path) -> None:
    """A wrong key is named, not shown."""
    with pytest.raises(ConfigError) as error:
        load(tmp_path, "[server]\nkey = [1234567890]\n")
    assert "server.key" in str(error.value)
    assert "1234567890" not in str(error.value)


def test_a_file_that_was_named_must_exist(tmp_path: Path) -> None:
    """The default file may be missing, one that was asked for may not."""
    with pytest.raises(ConfigError, match=r"nope\.toml does not exist"):
        load_config({}, home=tmp_path, path=tmp_path / "nope.toml")


# -- logs --------------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def log() -> Iterator[io.StringIO]:
    """What is logged, as JSON lines."""
    stream = io.StringIO()
    root = logging.getLogger()
    before = (list(root.handlers), root.level, logging.getLogger("hermes_trio").level)
    configure_logging(format="json", secrets=["my-own-secret-value"], stream=stream)
    yield stream
    root.handlers[:] = before[0]
    root.setLevel(before[1])
    logging.getLogger("hermes_trio").setLevel(before[2])


def entries(log: io.StringIO) -> list[dict[str, str]]:
    """The lines that were logged."""
    return [json.loads(line) for line in log.getvalue().splitlines()]


def test_secrets_are_taken_out_of_logs(log: io.StringIO) -> None:
    """Known secrets, what looks like one, and secrets in stack traces do not get into a log."""
    logger = logging.getLogger("hermes_trio.test")
    logger.warning("the key is %s and Bearer abcdefghijklmnop", "my-own-secret-value")
    try:
        raise ValueError("failed with my-own-secret-value and sk-abcdefghijklmnopqrstuv")
    except ValueError:
        logger.exception("it failed")
    text = log.getvalue()
    assert "my-own-secret-value" not in text
    assert "abcdefghijklmnop" not in text
    assert "ValueError" in text
    assert [entry["level"] for entry in entries(log)] == ["warning", "error"]


def test_fields_with_secret_names_are_hidden() -> None:
    """A field that is called like a secret is one."""
    entry = {"event": "x", "Token": "abc", "api_key": "d", "count": 3, "error": OSError("Bearer abcdefghijkl")}
    Redactor().clean_entry(entry)
    assert entry == {
        "event": "x",
        "Token": "[hidden]",
        "api_key": "[hidden]",
        "count": 3,
        "error": "Bearer [hidden]",
    }


def test_fields_that_the_caller_gave(log: io.StringIO) -> None:
    """Extra fields of a record are fields of the entry, and what is no text becomes one."""
    logging.getLogger("hermes_trio.test").warning("full", extra={"left": 0, "path": Path("/x"), "token": "t"})
    (entry,) = entries(log)
    assert entry.pop("timestamp")
    assert entry == {
        "event": "full",
        "level": "warning",
        "logger": "hermes_trio.test",
        "left": 0,
        "path": "/x",
        "token": "[hidden]",
    }


async def test_entries_say_whose_they_are(log: io.StringIO) -> None:
    """What is logged inside a turn carries session, turn and run."""

    async def agent(turn: Turn) -> str:
        logging.getLogger("hermes_trio.test").info("working")
        return "ok"

    async with open_gateway(agent) as gateway:
        run_id = await gateway.start(session_id="s1")
        await gateway.ended(run_id)
        await gateway.chat(headers={"X-Hermes-Session-Id": "s2"})
    first, second = [entry for entry in entries(log) if entry["event"] == "working"]
    assert (first["session"], first["run"]) == ("s1", run_id)
    assert first["turn"].startswith("turn_")
    assert second["session"] == "s2"
    assert "run" not in second


def test_readable_lines_for_people() -> None:
    """The text format has no JSON, and colours only on a terminal."""
    stream = io.StringIO()
    root = logging.getLogger()
    before = (list(root.handlers), root.level)
    configure_logging(format="text", stream=stream)
    logging.getLogger("hermes_trio.test").info("hello %s", "you")
    root.handlers[:] = before[0]
    root.setLevel(before[1])
    assert "hello you" in stream.getvalue()
    assert "\x1b[" not in stream.getvalue()


@pytest.mark.parametrize("name", CHAT_PLATFORMS)
def test_the_section_of_each_chat_platform_is_read_and_built(name: str, tmp_path: Path) -> None:
    """A table enables its platform, and so does the variable of its token alone."""
    tokens = 'token = "1:token"\n' + ('app_token = "xapp-1"\n' if name == "slack" else "")
    variables = {CHAT_PLATFORMS[name]: "1:token", "SLACK_APP_TOKEN": "xapp-1"}
    for config in (load(tmp_path, f"[{name}]\n{tokens}"), load(tmp_path, **variables)):
        assembly = build_assembly(config.tables, environment=config.environment, host=None)
        assert assembly.platforms.names == (name,)


def test_the_tables_of_a_configuration_are_those_that_their_owners_validate(tmp_path: Path) -> None:
    """Sections that the configuration validates itself are left out; plugins are there by their own names."""
    tables = load(tmp_path, "[telegram]\ntyping = false\n[plugins.adapters.mail]\nbox = 1\n").tables
    assert tables["telegram"] == {"typing": False}
    assert tables["plugins"] == {"mail": {"box": 1}}
    assert "server" not in tables


def test_a_route_tells_the_model_behind_it(tmp_path: Path) -> None:
    """The list of models has the advertised name first, then each route with the provider's own name as its root."""
    config = load(
        tmp_path,
        '[server]\nmodel_name = "mine"\n[models]\ndefault = "fast"\n'
        '[models.routes.fast]\nprovider = "openai"\nmodel = "vendor/small"\nbase_url = "http://127.0.0.1:9"\n',
    )
    entries = model_entries(config, build_routes(config.models, config.environment))
    assert [(entry.id, entry.root, entry.parent) for entry in entries] == [
        ("mine", "mine", None),
        ("fast", "vendor/small", "mine"),
        ("demo", "demo", "mine"),
    ]
