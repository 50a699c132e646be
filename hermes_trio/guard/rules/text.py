"""Programs that only print or transform text: what they print is computed where that is cheap and certain.

This resolves obfuscation: `echo cm0gLXJmIC8= | base64 -d | sh` is read as `rm -rf /`.
"""

from __future__ import annotations

import base64
import binascii
import codecs
import re
from typing import TYPE_CHECKING

from hermes_trio.guard.marks import DECODED, HOLE, TEMPORARY, is_dynamic, plain
from hermes_trio.guard.options import scan
from hermes_trio.guard.quoting import unescape

if TYPE_CHECKING:
    from hermes_trio.guard.call import Call

_MAX_DECODED = 128_000
_CONVERSION = re.compile(r"%(?:%|[-+ #0]*(\*|\d{0,4})(?:\.(?:\*|\d{0,4}))?([bcdiouxXsqfeEgG])|\([^)]*\)T)")


def echo(call: Call) -> str:
    """echo, with -e and -n."""
    words = list(call.raw)
    escapes = newline = False
    newline = True
    while words and re.match(r"-[neE]+\Z", words[0]):
        flags = words.pop(0)
        newline = newline and "n" not in flags
        escapes = "e" in flags or (escapes and "E" not in flags)
    text = " ".join(words)
    return (unescape(text) if escapes else text) + ("\n" if newline else "")


def printf(call: Call) -> str:
    """printf, with its conversions; `-v` assigns."""
    words = list(call.raw)
    variable = ""
    if len(words) > 1 and words[0] == "-v":
        variable = words[1]
        del words[:2]
    if words and words[0] == "--":
        words.pop(0)
    text = _format(words[0], words[1:]) if words else ""
    if variable:
        call.shell.state.assign(variable, [text])
        return ""
    return text


def _format(template: str, arguments: list[str]) -> str:
    pieces: list[str] = []
    remaining = list(arguments)
    template = unescape(template)
    for _ in range(256):
        consumed = len(remaining)

        def convert(match: re.Match[str]) -> str:
            if match.group() == "%%":
                return "%"
            if match.group(1) == "*" and remaining:
                remaining.pop(0)
            value = remaining.pop(0) if remaining else ""
            return _convert(match.group(2) or "s", value)

        pieces.append(_CONVERSION.sub(convert, template))
        if not remaining or len(remaining) == consumed:
            break
    return "".join(pieces)[:_MAX_DECODED]


def _convert(kind: str, value: str) -> str:
    if kind == "b":
        return unescape(value)
    if kind == "c":
        return value[:1]
    if kind in "sq" or is_dynamic(value):
        return value
    try:
        number = ord(value[1]) if value[:1] in "'\"" and len(value) > 1 else int(value or "0", 0)
    except ValueError:
        return HOLE
    if kind in "xXo":
        return format(number, kind)
    return str(number)


def cat(call: Call) -> str:
    """cat and other programs that pass text through."""
    operands = scan(call.arguments, ("-n", "-c", "--lines", "--bytes")).operands
    if not operands or operands == ["-"]:
        return HOLE if call.stdin is None else call.stdin
    texts = [call.stdin if operand == "-" else call.shell.file_text(operand) for operand in operands]
    return "".join(HOLE if text is None else text for text in texts)[:_MAX_DECODED]


def transform(call: Call) -> str:
    """Return unknown text and the unchanged input for filters whose output is not computed."""
    if call.stdin is None:
        return HOLE
    return (HOLE + "\n" + call.stdin)[:_MAX_DECODED]


def scramble(call: Call) -> str:
    """Return unknown text for rev, tr and similar programs, whose output is not computed."""
    return DECODED + HOLE


def decode(call: Call) -> str:
    """base64, base32, xxd and openssl: decoding is followed, encoding is not."""
    words = call.arguments
    if call.name == "xxd":
        if not any(re.match(r"-[a-z]*r|-revert", word) for word in words):
            return transform(call)
    elif call.name == "openssl":
        decodes = any(word in ("-d", "-D") for word in words)
        if not decodes or not any(word in ("enc", "base64") or word.startswith("-a") for word in words):
            return DECODED + HOLE if decodes else HOLE
    elif call.name != "uudecode" and not any(re.match(r"-[a-zA-Z]*[dD]|--d", word) for word in words):
        return transform(call)
    source = call.stdin
    operands = [
        word
        for word in scan(words, ("-w", "--wrap", "-in", "-c", "-s", "-l")).operands
        if word not in ("enc", "base64")
    ]
    if operands:
        source = call.shell.file_text(operands[0])
    if source is None or is_dynamic(source):
        return DECODED + HOLE
    decoded = decode_text(plain(source), "hex" if call.name == "xxd" else call.name)
    return DECODED + (HOLE if decoded is None else decoded)


def decode_text(text: str, kind: str) -> str | None:
    """Return the decoded text, or None if it is not encoded."""
    compact = re.sub(r"\s+", "", text)
    if len(compact) > _MAX_DECODED:
        return None
    try:
        if kind == "hex":
            digits = re.sub(r"(?m)^[ \t]*[0-9a-fA-F]{8}:|  .*$", "", text)
            data = bytes.fromhex(re.sub(r"[^0-9a-fA-F]", "", digits))
        elif kind == "base32":
            data = base64.b32decode(compact + "=" * (-len(compact) % 8), casefold=True)
        else:
            alphabet = compact.replace("-", "+").replace("_", "/").rstrip("=")
            data = base64.b64decode(alphabet + "=" * (-len(alphabet) % 4), validate=False)
    except (ValueError, binascii.Error):
        return None
    return codecs.decode(data, "utf-8", "replace").replace("\0", "")


def which(call: Call) -> str:
    """which and command -v print a path that ends in the name asked for."""
    names = [word for word in call.arguments if not word.startswith("-")]
    return "".join(f"/usr/bin/{name.rpartition('/')[2]}\n" for name in names)


def names_only(call: Call) -> str:
    """ls -d prints the paths it is given; a plain ls prints names below them."""
    operands = scan(call.arguments).operands
    if any(re.match(r"-[a-zA-Z]*d", word) for word in call.arguments):
        return "\n".join(operands) + "\n"
    return HOLE


def prints_operands(call: Call) -> str:
    """realpath and readlink print where a path leads; yes repeats its words."""
    if call.name == "yes":
        return " ".join(call.raw) + "\n"
    return "\n".join(scan(call.raw).operands) + "\n"


def basename(call: Call) -> str:
    """basename and dirname of known text."""
    operands = scan(call.arguments, ("-s", "--suffix")).operands
    if not operands:
        return HOLE
    head, _, tail = operands[0].rstrip("/").rpartition("/")
    return (tail if call.name == "basename" else head or ("/" if operands[0].startswith("/") else ".")) + "\n"


def working_directory(call: Call) -> str:
    """pwd prints where the command line is."""
    return (call.shell.state.cwds[-1] or HOLE) + "\n"


def temporary(call: Call) -> str:
    """mktemp prints the name of something new."""
    return TEMPORARY + "\n"


def silent(call: Call) -> str:
    """Programs that print nothing and start nothing."""
    return ""


def inert(call: Call) -> str | None:
    """Programs whose arguments are data, whatever they look like."""
    return None
