"""Session variables: bound by a scope, inherited by what runs in it, restored afterwards."""

import os

import msgspec
import pytest
import trio

from hermes_trio import InvalidContext, SessionContext, async_delivery_supported, bind, current_context, get_session_env
from hermes_trio.runtime.context import ENVIRONMENT_NAMES


async def test_a_bound_value_wins_even_when_it_is_empty(monkeypatch: pytest.MonkeyPatch):
    """Bound to the empty string is bound: the environment is not consulted."""
    monkeypatch.setenv("HERMES_SESSION_CHAT_ID", "from the environment")
    assert get_session_env("HERMES_SESSION_CHAT_ID") == "from the environment"
    with bind(SessionContext(chat_id="")):
        assert get_session_env("HERMES_SESSION_CHAT_ID", "default") == ""


async def test_never_bound_falls_back_to_the_environment_and_then_to_the_default(monkeypatch: pytest.MonkeyPatch):
    """Outside any binding it is `os.getenv`, for unknown names everywhere."""
    monkeypatch.setenv("SOMETHING_ELSE", "here")
    monkeypatch.delenv("HERMES_SESSION_KEY", raising=False)
    assert get_session_env("HERMES_SESSION_KEY", "default") == "default"
    with bind(SessionContext(session_key="k")):
        assert get_session_env("SOMETHING_ELSE") == "here"
        assert get_session_env("NOT_THERE_AT_ALL", "d") == "d"


async def test_bindings_nest_and_restore():
    """Leaving the inner scope brings the outer one back, by an exception too."""
    with bind(SessionContext(session_id="outer")):
        with pytest.raises(ZeroDivisionError), bind(SessionContext(session_id="inner")):  # noqa: PT012 - two scopes are the point
            assert get_session_env("HERMES_SESSION_ID") == "inner"
            raise ZeroDivisionError
        assert get_session_env("HERMES_SESSION_ID") == "outer"
    assert current_context() is None


async def test_tasks_and_threads_inherit_and_do_not_leak_back():
    """A child task sees its parent's context; what it binds itself stays with it."""
    seen: list[str] = []

    async def child() -> None:
        seen.append(get_session_env("HERMES_SESSION_ID"))
        with bind(SessionContext(session_id="child")):
            await trio.lowlevel.checkpoint()
            seen.append(await trio.to_thread.run_sync(get_session_env, "HERMES_SESSION_ID"))

    with bind(SessionContext(session_id="parent")):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(child)
        assert get_session_env("HERMES_SESSION_ID") == "parent"
    assert seen == ["parent", "child"]


def test_every_field_has_a_variable_and_the_other_way_round():
    """A child process gets each field under one name, and none is forgotten."""
    fields = set(SessionContext.__struct_fields__)
    assert set(ENVIRONMENT_NAMES.values()) == fields - {"tenant", "key_id"}
    context = SessionContext(**{name: f"value of {name}" for name in fields})
    assert set(context.environ()) == set(ENVIRONMENT_NAMES)
    assert SessionContext.from_dict(msgspec.to_builtins(context)) == context


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"session_id": "x" * 513}, "SessionContext.session_id has 513 characters; at most 512"),
        ({"chat_id": "a\0b"}, "SessionContext.chat_id contains a NUL"),
        ({"user_name": "a\nb"}, "SessionContext.user_name contains a NUL or a line break"),
        ({"session_id": "a\ud800"}, "SessionContext.session_id contains half of a surrogate pair"),
        ({"thread_id": 7}, "SessionContext.thread_id must be a string, not int"),
        ({"cwd": "/" + "x" * 4096}, "SessionContext.cwd has 4097 characters; at most 4096"),
    ],
)
def test_ids_that_cannot_be_used_are_refused(fields: dict[str, str], words: str):
    """The message says which field, what is wrong and what would be right."""
    with pytest.raises(InvalidContext, match=words):
        SessionContext(**fields)


async def test_outside_any_turn_delivery_is_supported():
    """A program's own code can be told later: the runtime keeps that word with its in-process channel."""
    assert async_delivery_supported() is True


async def test_nothing_writes_the_environment():
    """Binding is not a disguised `os.environ`."""
    before = dict(os.environ)
    with bind(SessionContext(session_id="s", cwd="/tmp")):
        assert dict(os.environ) == before
