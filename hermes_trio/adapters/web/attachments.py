"""Converts attached files (pictures and text) to the content of a message, and finds them again in a transcript.

A picture becomes two parts of the content: a line with its name, and the image. A text file becomes one part: its name, then its text. So the model
reads the names, providers get no unknown field, and the files can be returned from the transcript alone.
"""

from __future__ import annotations

import binascii
import re
from base64 import b64decode
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, cast

import msgspec

from hermes_trio.base.mounts import MountFile, MountProblem
from hermes_trio.runtime.ports import Content

MOST_FILES: Final = 8
MOST_PICTURE_BYTES: Final = 5_000_000
MOST_TEXT_BYTES: Final = 256_000
NAME_LENGTH: Final = 120

PICTURES: Final[Mapping[str, tuple[bytes, ...]]] = {
    "image/png": (b"\x89PNG\r\n\x1a\n",),
    "image/jpeg": (b"\xff\xd8\xff",),
    "image/gif": (b"GIF87a", b"GIF89a"),
    "image/webp": (b"RIFF",),
}
"""The media types of pictures that vision models accept, with the first bytes of each."""

_HEAD: Final = re.compile(r"\[File: ([^\]\n]*)\](?:\n|$)")
_DATA: Final = re.compile(r"data:([a-z]+/[a-z0-9.+-]+);base64,", re.IGNORECASE)


class WebAttachment(msgspec.Struct, forbid_unknown_fields=True):
    """A file in a request: `media` is its type as the client gives it, `data` its bytes in base64."""

    name: str
    data: str
    media: str = ""


def compose_content(text: str, files: Sequence[WebAttachment]) -> Content:
    """Return the content of a message with files. Raises `MountProblem` for too many files, and for a file that is too large or of an unsupported type."""
    if not files:
        return text
    if len(files) > MOST_FILES:
        raise MountProblem(
            400, "too_many_attachments", f"A message can have at most {MOST_FILES} files; this one has {len(files)}."
        )
    parts: list[dict[str, Any]] = [{"type": "text", "text": text}] if text.strip() else []
    for file in files:
        parts += _parts(file)
    return parts


def _parts(file: WebAttachment) -> Iterator[dict[str, Any]]:
    name = " ".join("".join(one if one.isprintable() else " " for one in file.name).split()).replace("]", ")")
    name = name[:NAME_LENGTH] or "unnamed"
    try:
        body = b64decode(file.data, validate=True)
    except (binascii.Error, ValueError):
        raise _refused(name, "its data is not base64") from None
    media = next((media for media, heads in PICTURES.items() if body.startswith(heads)), "")
    if media == "image/webp" and body[8:12] != b"WEBP":
        media = ""
    if media:
        if len(body) > MOST_PICTURE_BYTES:
            raise _refused(name, f"a picture can have at most {MOST_PICTURE_BYTES:,} bytes; this one has {len(body):,}")
        yield {"type": "text", "text": f"[File: {name}]"}
        yield {"type": "image_url", "image_url": {"url": f"data:{media};base64,{file.data}"}}
        return
    if len(body) > MOST_TEXT_BYTES:
        raise _refused(name, f"a text file can have at most {MOST_TEXT_BYTES:,} bytes; this one has {len(body):,}")
    try:
        text = body.decode("utf-8")
    except UnicodeDecodeError:
        text = "\0"
    if "\0" in text:
        raise _refused(name, "the agent reads PNG, JPEG, GIF and WebP pictures, and text in UTF-8")
    yield {"type": "text", "text": f"[File: {name}]\n{text}"}


def _refused(name: str, why: str) -> MountProblem:
    return MountProblem(400, "unsupported_attachment", f"The file {name!r} cannot be attached: {why}.")


def _walk(content: Content) -> Iterator[tuple[int, str, str, Any]]:
    """Yield the parts of a message's content: the index, the file's name (empty for the message's own text), the media type, and the text or URL."""
    if isinstance(content, str):
        yield 0, "", "text/plain", content
        return
    name = ""
    for index, part in enumerate(content):
        if part.get("type") == "image_url":
            source: Any = part.get("image_url")
            url = str(cast("Mapping[str, Any]", source).get("url", "") if isinstance(source, Mapping) else source or "")
            found = _DATA.match(url)
            yield index, name or "picture", found.group(1).lower() if found else "", url
            name = ""
        elif part.get("type") == "text":
            text = str(part.get("text", ""))
            head = _HEAD.match(text)
            if head is None:
                yield index, "", "text/plain", text
            elif head.end() == len(text) and not text.endswith("\n"):
                name = head.group(1)
            else:
                yield index, head.group(1), "text/plain", text[head.end() :]


def said_text(content: Content) -> str:
    """Return the text of a message without its files."""
    return "\n".join(value for _, name, media, value in _walk(content) if not name and media == "text/plain")


def attached_files(content: Content) -> list[dict[str, Any]]:
    """Return the name, type and size of each file of a message, and the `part` by which it is fetched (None for a picture at an external URL)."""
    found: list[dict[str, Any]] = []
    for index, name, media, value in _walk(content):
        if name:
            data = value[value.find(",") + 1 :].rstrip("=")
            size = len(value.encode()) if media == "text/plain" else len(data) * 3 // 4
            own = media == "text/plain" or media in PICTURES
            found.append({"name": name, "media": media, "bytes": size if own else 0, "part": index if own else None})
    return found


def file_of(content: Content, part: int) -> MountFile | None:
    """Return the file in one part of a message's content; None if that part has no readable file."""
    for index, name, media, value in _walk(content):
        if index == part and name:
            if media == "text/plain":
                return MountFile(value.encode(), "text/plain; charset=utf-8", name)
            if media in PICTURES:
                try:
                    return MountFile(b64decode(value.partition(",")[2], validate=True), media, name)
                except (binascii.Error, ValueError):
                    return None
    return None
