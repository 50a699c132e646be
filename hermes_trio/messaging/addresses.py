"""Delivery targets: the words that a person may write, and the addresses that they mean at delivery time.

`origin`, `local`, `all`, a platform, or `platform:chat[:thread]`, one or several. They are parsed when a job is created and resolved when it fires,
with the home channels of that moment. Nothing is dropped silently: a target that cannot be resolved is reported as a problem.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from enum import Enum
from typing import Final, TypeAlias

import msgspec


class TargetError(ValueError):
    """Raised for a delivery value that cannot be parsed. The message says which part and what is accepted."""


class Keyword(Enum):
    """Targets that are not an address by themselves."""

    ORIGIN = "origin"
    LOCAL = "local"
    ALL = "all"


class Address(msgspec.Struct, frozen=True):
    """A place on a platform. Without a chat it means the platform: the origin's chat there, or the home channel."""

    platform: str
    chat_id: str | None = None
    thread_id: str | None = None


Target: TypeAlias = Keyword | Address


class Resolution(msgspec.Struct, frozen=True):
    """The addresses, each once and in order; `local` asks for the local copy; `problems` are for the owner."""

    addresses: tuple[Address, ...] = ()
    local: bool = False
    problems: tuple[str, ...] = ()


_FORMS: Final = "'origin', 'local', 'all', a platform, or 'platform:chat' or 'platform:chat:thread'"


def parse_targets(value: str | Sequence[str], platforms: Collection[str]) -> tuple[Target, ...]:
    """Parse a comma-separated list or a sequence into targets, each once, in order. Raises `TargetError`.

    Platform names and keywords are case-insensitive, ids are not. An unknown platform is an error: a typing mistake must not make answers disappear.
    """
    words = [word.strip() for part in ([value] if isinstance(value, str) else value) for word in part.split(",")]
    found = dict.fromkeys(_parse(word, platforms) for word in words if word)
    if not found:
        raise TargetError(f"the delivery value is empty; write {_FORMS}")
    return tuple(found)


def _parse(word: str, platforms: Collection[str]) -> Target:
    name, colon, rest = word.partition(":")
    platform = name.strip().lower()
    if not colon and platform in (keyword.value for keyword in Keyword):
        return Keyword(platform)
    if platform not in platforms:
        known = ", ".join(sorted(platforms)) or "none"
        raise TargetError(
            f"delivery target {word!r}: unknown platform {name!r}; configured are: {known}; write {_FORMS}"
        )
    if not colon:
        return Address(platform)
    chat, second, thread = (part.strip() for part in rest.partition(":"))
    if not chat or (second and not thread):
        missing = "thread" if chat else "chat"
        raise TargetError(f"delivery target {word!r}: the {missing} after ':' is empty; write {_FORMS}")
    return Address(platform, chat, thread or None)


def target_text(target: Target) -> str:
    """Return the target as it is written."""
    if isinstance(target, Keyword):
        return target.value
    return ":".join(part for part in (target.platform, target.chat_id, target.thread_id) if part)


def _no_directory(platform: str, name: str) -> str | None:
    return None


def resolve_targets(
    targets: Sequence[Target],
    *,
    origin: Address | None,
    homes: Mapping[str, Address],
    find_chat: Callable[[str, str], str | None] = _no_directory,
) -> Resolution:
    """Resolve `targets` to addresses.

    `homes` are the home channels by platform, in order of preference. `find_chat(platform, name)` returns the id of a channel by its name, or None
    for an id.
    """
    addresses: dict[Address, None] = {}
    problems: list[str] = []
    local = False
    for target in targets:
        match target:
            case Keyword.LOCAL:
                local = True
            case Keyword.ORIGIN:
                place = origin or next(iter(homes.values()), None)
                if place is None:
                    local = True
                else:
                    addresses[place] = None
            case Keyword.ALL:
                if not homes:
                    problems.append("delivery target 'all': no platform has a home channel")
                addresses.update(dict.fromkeys(homes.values()))
            case Address(platform, None):
                place = origin if origin is not None and origin.platform == platform else homes.get(platform)
                if place is None:
                    problems.append(
                        f"delivery target {platform!r}: the platform has no home channel; set one or write '{platform}:chat'"
                    )
                else:
                    addresses[place] = None
            case Address(platform, str(chat), thread):
                addresses[Address(platform, find_chat(platform, chat) or chat, thread)] = None
            case _:
                raise AssertionError(f"not a target: {target!r}")
    return Resolution(tuple(addresses), local, tuple(problems))


GITHUB_COMMENT: Final = "github_comment"
"""The platform of comments on issues and pull requests."""

_REPOSITORY: Final = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9-]{0,38})/[A-Za-z0-9._-]{1,100}")


def comment_address(repository: object, number: object) -> Address:
    """Return the address of an issue's or a pull request's discussion. Raises `ValueError`."""
    if not isinstance(repository, str) or not _REPOSITORY.fullmatch(repository) or ".." in repository:
        raise ValueError(f"repo is {repository!r}; it must be 'owner/name'")
    digits = str(number)
    if isinstance(number, bool) or not re.fullmatch(r"[1-9][0-9]{0,9}", digits):
        raise ValueError(f"pr_number is {number!r}; it must be a positive whole number")
    return Address(GITHUB_COMMENT, repository, digits)
