"""Validates and normalises `content`: text, or parts of text and images, in the spellings that clients use.

Text becomes one string; with images it stays a list of canonical `text` and `image_url` parts. Every mistake is a 400 whose `param` points at it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, cast

from .errors import ApiError

Content = str | list[dict[str, Any]]

TEXT_LENGTH: Final = 65_536
PARTS: Final = 1_000
DEPTH: Final = 10

_TEXT_TYPES: Final = frozenset({"text", "input_text", "output_text"})
_IMAGE_TYPES: Final = frozenset({"image_url", "input_image"})


def normalise(content: Any, param: str) -> Content:
    """Return the canonical form of a message's content; `param` is its place in the body."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content[:TEXT_LENGTH]
    if not isinstance(content, Sequence):
        raise ApiError(
            400,
            f"{param} must be a string or a list of parts, not {_kind(content)}.",
            code="invalid_content_part",
            param=param,
        )
    parts: list[dict[str, Any]] = []
    texts: list[str] = []
    images = False
    for part in cast("Sequence[Any]", content)[:PARTS]:
        if isinstance(part, str):
            text: Any = part
        elif isinstance(part, Mapping):
            table = cast("Mapping[str, Any]", part)
            kind = _part_type(table, param)
            if kind in _IMAGE_TYPES:
                parts.append(_image(table, param))
                images = True
                continue
            if kind not in _TEXT_TYPES:
                raise ApiError(
                    400,
                    f"{param} has a part of type {kind!r}; accepted are text and image_url.",
                    code="unsupported_content_type",
                    param=param,
                )
            text = table.get("text")
        else:
            continue
        if text is None:
            continue
        if not isinstance(text, str):
            raise ApiError(
                400, f"{param} has a text part whose text is {_kind(text)}.", code="invalid_content_part", param=param
            )
        text = text[:TEXT_LENGTH]
        texts.append(text)
        parts.append({"type": "text", "text": text})
    return parts if images else "\n".join(texts)


def _part_type(part: Mapping[str, Any], param: str) -> str:
    kind = part.get("type", "text" if "text" in part else None)
    if not isinstance(kind, str):
        raise ApiError(400, f"{param} has a part without a type.", code="unsupported_content_type", param=param)
    return kind.strip().lower()


def _image(part: Mapping[str, Any], param: str) -> dict[str, Any]:
    source: Any = part.get("image_url")
    detail: Any = part.get("detail")
    if isinstance(source, Mapping):
        table = cast("Mapping[str, Any]", source)
        detail = table.get("detail", detail)
        source = table.get("url")
    if not isinstance(source, str) or not source.strip():
        raise ApiError(400, f"{param} has an image without a URL.", code="invalid_image_url", param=param)
    url = source.strip()
    scheme = url[:11].lower()
    if scheme.startswith("data:"):
        if not scheme.startswith("data:image/"):
            raise ApiError(
                400, f"{param} has a data URL that is not an image.", code="unsupported_content_type", param=param
            )
        if "," not in url:
            raise ApiError(400, f"{param} has a data URL without data.", code="invalid_image_url", param=param)
    elif not scheme.startswith(("http://", "https://")):
        raise ApiError(
            400,
            f"{param} has an image URL that is not http://, https:// or data:image/….",
            code="invalid_image_url",
            param=param,
        )
    image: dict[str, Any] = {"url": url}
    if detail is not None:
        if not isinstance(detail, str) or not detail.strip():
            raise ApiError(
                400, f"{param} has an image whose detail is not a word.", code="invalid_content_part", param=param
            )
        image["detail"] = detail.strip()
    return {"type": "image_url", "image_url": image}


def text_of(content: Content) -> str:
    """Return the text of normalised content."""
    if isinstance(content, str):
        return content
    return "\n".join(part["text"] for part in content if part["type"] == "text")


def has_content(content: Content) -> bool:
    """Return whether content is enough for a turn: text that is not blank, or an image."""
    if isinstance(content, str):
        return bool(content.strip())
    return any(part["type"] == "image_url" or part["text"].strip() for part in content)


def flat_text(content: Any) -> str:
    """Return the text of a system message, however nested; images and other parts are left out."""
    if isinstance(content, str):
        return content[:TEXT_LENGTH]
    texts: list[str] = []
    pending: list[tuple[Any, int]] = [(content, 0)]
    while pending:
        this, depth = pending.pop()
        if isinstance(this, str):
            texts.append(this)
        elif depth < DEPTH and isinstance(this, Mapping):
            table = cast("Mapping[str, Any]", this)
            pending.append((table.get("text", table.get("content")), depth + 1))
        elif depth < DEPTH and isinstance(this, list):
            pending.extend((item, depth + 1) for item in reversed(cast("list[Any]", this)[:PARTS]))
    return "\n".join(texts)[:TEXT_LENGTH]


def _kind(value: Any) -> str:
    names = {"bool": "a boolean", "int": "a number", "float": "a number", "dict": "an object", "NoneType": "null"}
    name: str = type(value).__name__
    return names.get(name, name)
