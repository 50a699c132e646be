"""Keep keys out of logs, errors and events.

A `Secret` is not shown by accident: its value is read by one explicit call, and `scrub` takes it out of
text that came back from outside. `redact` takes out what looks like a credential, for text in which the exact key
is not known. A `Redactor` takes both out of the entries of a log.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, MutableMapping
from typing import Any, Final, final

HIDDEN: Final = "[hidden]"

_SECRET_KEYS: Final = frozenset({"key", "api_key", "token", "password", "secret", "authorization"})
_SHORTEST: Final = 8
"""Shorter secrets are not redacted: they would match everywhere."""

# Providers quote keys in their errors, whole or with the middle starred out ("sk-abcd****wxyz"): the stars belong
# to the match.
_CREDENTIALS: Final = re.compile(
    r"""
    (?P<scheme>\b(?:bearer|basic)\s+)[\w\-.*…=/+]{6,}
    | (?P<header>\b(?:x-api-key|api[-_]?key|authorization|access[-_]?token|secret)["']?\s*[:=]\s*["']?)[^\s"',;&}]{4,}
    | (?P<userinfo>://)[^/\s:@]+:[^/\s@]+@
    | \b(?:sk|pk|rk|gsk|xai|pplx|hf|or|key)[-_][\w\-.*…]{8,}
    | \bAIza[\w\-]{16,}
    | \beyJ[\w\-]{10,}\.[\w\-]{4,}(?:\.[\w\-]*)?
    """,
    re.IGNORECASE | re.VERBOSE,
)

_MAXIMUM_TEXT: Final = 4096
"""Longer texts are cut before they are searched.

An error message is for people, and the search must stay cheap on hostile input.
"""


def _hide(match: re.Match[str]) -> str:
    if match["scheme"] or match["header"]:
        return f"{match['scheme'] or match['header']}{HIDDEN}"
    if match["userinfo"]:
        return f"://{HIDDEN}@"
    return HIDDEN


def redact(text: str) -> str:
    """Remove everything that looks like a key, a token or a password from `text`, and shorten it to the length of an error message."""
    if len(text) > _MAXIMUM_TEXT:
        # Cut inside the kept part of a key, the rest would be too short to be recognised: cut at white space if
        # there is any.
        head = text[:_MAXIMUM_TEXT]
        text = (head.rsplit(None, 1)[0] if " " in head else head[:256]) + " …"
    return hide_credentials(text)


def hide_credentials(text: str) -> str:
    """Remove everything that looks like a key, a token or a password from `text`, in its full length."""
    return _CREDENTIALS.sub(_hide, text)


@final
class Secret:
    """A key. It has no readable `repr` or `str`, and does not survive pickling."""

    __slots__ = ("_value",)

    def __init__(self, value: str) -> None:
        self._value = value

    def reveal(self) -> str:
        """Return the key itself, for the code that sends it."""
        return self._value

    def scrub(self, text: str) -> str:
        """Remove this key, and the halves of it that a provider may quote, from `text`."""
        value = self._value
        if len(value) >= 4:
            text = text.replace(value, HIDDEN)
        if len(value) >= 16:
            text = re.sub(rf"{re.escape(value[:4])}\S*?{re.escape(value[-4:])}", HIDDEN, text)
        return redact(text)

    def __bool__(self) -> bool:
        return bool(self._value)

    def __repr__(self) -> str:
        return "Secret(…)" if self._value else "Secret('')"

    __str__ = __repr__

    def __reduce__(self) -> str:
        raise TypeError("a Secret cannot be pickled: pass the name of the variable that holds it instead")


class Redactor:
    """Redacts known secrets, and text that looks like one, in every text of a log entry."""

    def __init__(self, secrets: Iterable[str] = ()) -> None:
        self._secrets = sorted({secret for secret in secrets if len(secret) >= _SHORTEST}, key=len, reverse=True)

    def clean(self, text: str) -> str:
        """Return `text` with its secrets redacted."""
        for secret in self._secrets:
            text = text.replace(secret, HIDDEN)
        return redact(text)

    def clean_entry(self, entry: MutableMapping[str, Any]) -> None:
        """Redact the secrets in every field of an entry."""
        for key, value in entry.items():
            if key.lower() in _SECRET_KEYS and value:
                entry[key] = HIDDEN
            elif value is None or type(value) in (bool, int, float):
                continue
            else:
                text = shown(value)
                # A stack trace is longer than redacted text may be, so each of its lines is redacted.
                entry[key] = (
                    "\n".join(self.clean(line) for line in text.split("\n")) if "\n" in text else self.clean(text)
                )


def shown(value: object) -> str:
    """Return `value` as text that can be written. Never raises: a value that cannot be shown or encoded must not lose the entry."""
    try:
        text = str(value)
    except Exception as error:
        return f"<a {type(value).__name__} that cannot be shown: {type(error).__name__}>"
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode()
