"""Programs that run code they are given: shells, eval, interpreters, and tools with an escape to the shell."""

from __future__ import annotations

import base64
import binascii
import re
from typing import TYPE_CHECKING

from hermes_trio.guard.marks import DECODED, HOLE, REMOTE, SOLID, is_dynamic, plain
from hermes_trio.guard.options import scan
from hermes_trio.guard.paths import is_raw_disk, precious
from hermes_trio.guard.quoting import unescape
from hermes_trio.guard.verdict import BlockCategory, Blocked, Category

from .git import destructive_sql

if TYPE_CHECKING:
    from hermes_trio.guard.call import Call
    from hermes_trio.guard.shell import Shell

_CODE_FLAGS: dict[str, tuple[str, ...]] = {
    "python": ("-c",),
    "pypy": ("-c",),
    "perl": ("-e", "-E"),
    "ruby": ("-e",),
    "node": ("-e", "--eval", "-p", "--print"),
    "bun": ("-e", "--eval", "-p"),
    "deno": ("eval",),
    "php": ("-r", "-B", "-R", "-E"),
    "lua": ("-e",),
    "luajit": ("-e",),
    "rscript": ("-e",),
    "r": ("-e",),
    "osascript": ("-e",),
    "julia": ("-e", "-E"),
    "elixir": ("-e",),
    "groovy": ("-e",),
    "tclsh": (),
    "expect": ("-c",),
    "powershell": ("-c", "-command", "-Command", "-EncodedCommand", "-enc"),
    "pwsh": ("-c", "-command", "-Command", "-EncodedCommand", "-enc"),
    "cmd": ("/c", "/k"),
}
_STRING = re.compile(
    r"'''(.*?)'''|\"\"\"(.*?)\"\"\"|'((?:[^'\\]|\\.)*)'|\"((?:[^\"\\]|\\.)*)\"|`((?:[^`\\]|\\.)*)`", re.DOTALL
)
_PERL_QUOTE = re.compile(
    r"(?:\bq[qwx]?|%[xwWqQ])\s*(?:\{(.{0,500}?)\}|\((.{0,500}?)\)|\[(.{0,500}?)\]|([/|!~#])(.{0,500}?)\4)", re.DOTALL
)
_BARE_RUN = re.compile(r"\b(?:spawn|exec|system)\s+([^\"'();\n]+)")
_WRITE_MODE = re.compile(r"[rb]*[wax+][wab+t]*\Z")
_JOINED = re.compile(r"\s*[+.]?\s*\Z")
_RUNS = re.compile(
    r"system|popen|subprocess|spawn|exec|fork|child_process|Process|shell|passthru|proc_open|qx|%x|`|getoutput|call|run|sh\.|doShell|Command|execute"
)
_DELETES = re.compile(
    r"rmtree|remove_tree|rm_rf|rm_r\b|remove_entry|rmSync|rmdirSync|\brm\(|rmdir|removedirs|removeSync|rimraf|remove_dir_all|deleteDirectory|"
    r"delete_folder|recursive"
)
_LOSES = re.compile(
    r"(?:os|shutil|fs|File|FileUtils|fsp|promises)\.(?:rm|remove|delete)|\bunlink|send2trash|Remove-Item|\bdel /"
)
_KILLS = re.compile(r"\b(?:os|process|Process)\.kill|killpg|\bkill\s*\(")
_TALKS = re.compile(
    r"urlopen|\brequests\.|httpx|aiohttp|\bfetch\(|http\.(?:client|request|get)|\.connect\(|LWP|open-uri|Net::HTTP|IO::Socket|https?://|axios"
)
_EVALUATES = re.compile(r"\beval\b|\bexec\b|dup2|pty\.spawn|/bin/(?:ba)?sh|instance_eval")
_SENDS = re.compile(
    r"\.(?:post|put|patch|send|sendall|upload)\(|\bdata\s*=|\bfiles\s*=|method['\"]?\s*[:=]\s*['\"]P|\bbody\s*:"
)
_ELSEWHERE = re.compile(r"https?://(?!localhost|127\.|\[::1\])|\.connect\(\(?['\"](?!localhost|127\.)[\w-]+\.")
_FORK_BOMB = re.compile(r"fork ?(?:\( ?\))? ?while fork|while ?\(? ?(?:1|True|true)? ?\)? ?[:{]? ?(?:os\.)?fork\b")
_BLANKS = re.compile(r"\s+")
_HOME_CALLS = re.compile(r"expanduser|Path\.home|homedir|Dir\.home|ENV\[|environ|getenv|process\.env\.HOME")
_ENCODED = re.compile(r"[A-Za-z0-9+/_=-]{8,}\Z")
_MAX_SED = 8_192
_SHELL_VALUED = ("-o", "-O", "--rcfile", "--init-file", "+o", "+O")


def shell(call: Call) -> str | None:
    """Judge sh and other shells: -c text, standard input, or a script whose text may be known."""
    for position, word in enumerate(call.arguments[:-1]):
        if word in ("--rcfile", "--init-file"):
            call.shell.run_file(call.arguments[position + 1], call.stdin, [])
    text, operands, reads_stdin = _shell_words(call.raw)
    if text is not None:
        _flag_inline(call, text, "runs inline shell code")
        call.shell.state.assign("0", operands[:1], certain=False)
        return call.shell.run_text(text, call.stdin, positional=operands[1:])
    if operands and not reads_stdin:
        output = call.shell.run_file(operands[0], call.stdin, operands[1:])
        if output is None and re.search(r"/dev/stdin\Z|/fd/0\Z|^-\Z", plain(operands[0])):
            return _run_stdin(call, operands[1:])
        return output
    return _run_stdin(call, operands)


def _run_stdin(call: Call, operands: list[str]) -> str | None:
    if call.stdin is None:
        return None
    _flag_inline(call, call.stdin, "runs text from standard input as shell code")
    return call.shell.run_text(call.stdin, HOLE, positional=operands)


def _flag_inline(call: Call, text: str, description: str) -> None:
    """Flag inline code, unless it was downloaded or decoded: that has a separate category, so that one grant is enough."""
    if REMOTE not in text and DECODED not in text:
        call.flag(Category.INLINE_CODE, description)


def _shell_words(words: list[str]) -> tuple[str | None, list[str], bool]:
    wants_text = reads_stdin = False
    position = 0
    while position < len(words):
        word = plain(words[position])
        if word in ("--", "-"):
            position += 1
            break
        if word in _SHELL_VALUED:
            position += 2
            continue
        if word.startswith("--"):
            wants_text = wants_text or word == "--command"
            position += 1
            continue
        if len(word) > 1 and word[0] in "-+":
            wants_text = wants_text or (word[0] == "-" and "c" in word)
            reads_stdin = reads_stdin or "s" in word
            position += 2 if word.endswith(("o", "O")) and len(word) > 2 and "c" not in word else 1
            continue
        break
    rest = words[position:]
    if wants_text:
        return (rest[0], rest[1:], False) if rest else (None, [], False)
    return None, rest, reads_stdin


def evaluate(call: Call) -> str:
    """eval joins its words and runs them."""
    words = call.raw[1:] if call.raw[:1] == ["--"] else call.raw
    text = " ".join(words)
    if is_dynamic(text):
        call.flag(Category.DYNAMIC_COMMAND, "evaluates text known only at run time")
    return call.shell.run_text(text, call.stdin)


def source(call: Call) -> str | None:
    """`.` and source run a file in this shell."""
    if not call.raw:
        return ""
    path = plain(call.raw[0])
    if path in ("/dev/stdin", "/proc/self/fd/0", "/dev/fd/0") and call.stdin is not None:
        return call.shell.run_text(call.stdin)
    return call.shell.run_file(path, call.stdin, call.raw[1:])


def interpreter(call: Call) -> str | None:
    """python, perl, ruby, node and others: inline code is asked about and looked into."""
    language = re.sub(r"[\d.]+\Z", "", call.name)
    flags = _CODE_FLAGS.get(language, ())
    code = _inline_code(call.raw, flags)
    if language == "perl" and any(re.match(r"-[a-zA-Z0]*i", word) for word in call.arguments):
        for operand in scan(call.arguments, ("-e", "-E")).operands:
            call.shell.write(operand, None, call.excerpt)
    if code is not None:
        call.flag(Category.INLINE_CODE, f"runs inline {language} code")
        if "pwsh" in language or "powershell" in language:
            call.shell.call(plain(code).split(), None)
            if any(word.lower().startswith("-e") for word in call.arguments):
                call.flag(Category.DECODED_CODE, "runs an encoded command")
        inspect_code(call.shell, code, call.excerpt)
        return _maybe_prints(code)
    operands = scan(call.raw, ("-m", "-W", "-X", "-I", "-r", "--require", "-S"), permute=False)
    if operands.has("-m") and language in ("python", "pypy"):
        return None
    files = [
        word for word in operands.operands if word not in ("-", "run", "/dev/stdin", "/dev/fd/0", "/proc/self/fd/0")
    ]
    if files:
        text = call.shell.file_text(files[0])
        if text is not None:
            _origin(call, text)
            inspect_code(call.shell, text, call.excerpt)
        return None
    if call.stdin is not None and not operands.has("--version", "-V", "-v", "--help", "-h"):
        _flag_inline(call, call.stdin, f"runs {language} code from standard input")
        if call.stdin.strip() in (HOLE, SOLID):
            call.flag(Category.DYNAMIC_COMMAND, "runs code known only at run time")
        _origin(call, call.stdin)
        inspect_code(call.shell, call.stdin, call.excerpt)
        return _maybe_prints(call.stdin)
    return None


def _maybe_prints(code: str) -> str:
    """Return what code may print: unknown text and its own strings, which are the most likely."""
    return "\n".join([HOLE, *_literals(plain(code))[:256]])[:64_000]


def _origin(call: Call, text: str) -> None:
    if REMOTE in text:
        call.flag(Category.REMOTE_CODE, "runs downloaded text")
    if DECODED in text:
        call.flag(Category.DECODED_CODE, "runs decoded text")


def _inline_code(words: list[str], flags: tuple[str, ...]) -> str | None:
    pieces: list[str] = []
    for position, word in enumerate(words):
        if word in flags:
            pieces.extend(words[position + 1 : position + 2])
        elif word[:1] == "-" and word[:2] != "--" and len(word) > 2:
            letters = {flag[1] for flag in flags if len(flag) == 2 and flag[0] == "-"}
            cluster = re.match(r"-([A-Za-z0-9]*)", word)
            used = next((letter for letter in (cluster.group(1) if cluster else "") if letter in letters), None)
            if used is not None:
                attached = word[word.index(used) + 1 :]
                pieces.extend([attached] if attached else words[position + 1 : position + 2])
        elif word.startswith("--") and "=" in word and word.partition("=")[0] in flags:
            pieces.append(word.partition("=")[2])
        elif not word.startswith("-") and not pieces and word not in flags:
            break
    return "\n".join(pieces) if pieces else None


def inspect_code(shell_walk: Shell, code: str, excerpt: str, depth: int = 0) -> None:
    """Find hard-blocked acts in code of another language: strings that it runs and folders that it deletes."""
    shell_walk.step()
    if REMOTE in code:
        shell_walk.flag(Category.REMOTE_CODE, "runs downloaded text", excerpt)
    code = plain(code)
    if "fork" in code and _FORK_BOMB.search(_BLANKS.sub(" ", code)):
        raise Blocked(BlockCategory.FORK_BOMB, "inline code starts copies of itself without end")
    literals = _literals(code)
    if any(map(is_raw_disk, literals)) and ("write" in code or any(map(_WRITE_MODE.match, literals))):
        raise Blocked(BlockCategory.RAW_DISK_WRITE, "inline code would write to a raw disk")
    _judge_code(shell_walk, code, literals, excerpt)
    if _DELETES.search(code):
        candidates = [*literals, *([shell_walk.state.home] if _HOME_CALLS.search(code) else [])]
        for literal in candidates:
            path = shell_walk.state.home + literal[1:] if literal.startswith("~") else literal
            if path.startswith("/") and precious(path, ("/",), shell_walk.state.home) is not None:
                raise Blocked(BlockCategory.ROOT_DELETE, f"inline code would delete {path} and all below it")
    if _RUNS.search(code):
        with shell_walk.tentative(), shell_walk.state.maybe():
            for literal in [*literals[:256], *_filled(literals), *_BARE_RUN.findall(code)[:64]]:
                if literal.strip(HOLE + SOLID + " "):
                    shell_walk.run_text(literal)
            if len(literals) > 1:
                for start in range(min(len(literals), 32)):
                    if re.fullmatch(r"[\w./-]{2,64}", literals[start]):
                        shell_walk.call(literals[start : start + 16], None)
    if depth < 3:
        for literal in literals[:256]:
            if literal.count("(") and len(literal) > 8:
                inspect_code(shell_walk, literal, excerpt, depth + 1)
            decoded = _decoded(literal)
            if decoded is not None:
                with shell_walk.muted(), shell_walk.state.maybe():
                    shell_walk.run_text(decoded)
                inspect_code(shell_walk, decoded, excerpt, depth + 1)


def _judge_code(shell_walk: Shell, code: str, literals: list[str], excerpt: str) -> None:
    """Flag what inline code would lose, read, send or end, as far as its words say so."""
    if _DELETES.search(code.replace("recursive", "")) or _LOSES.search(code):
        shell_walk.flag(Category.RECURSIVE_DELETE, "inline code deletes files", excerpt)
    if _KILLS.search(code):
        shell_walk.flag(Category.PROCESS_KILL, "inline code ends processes", excerpt)
    if _TALKS.search(code) and _ELSEWHERE.search(code):
        if _EVALUATES.search(code):
            shell_walk.flag(Category.REMOTE_CODE, "inline code runs what it downloads", excerpt)
        elif _SENDS.search(code):
            shell_walk.flag(Category.UPLOAD, "inline code sends data to another host", excerpt)
    for literal in literals[:256]:
        if "/" in literal or literal.startswith(".env"):
            shell_walk.reads(literal, excerpt)
        if (problem := destructive_sql(literal)) is not None:
            shell_walk.flag(Category.DESTRUCTIVE_SQL, problem, excerpt)


def _literals(code: str) -> list[str]:
    """Return the string literals in order, with adjacent or concatenated ones joined and escapes decoded."""
    literals: list[str] = []
    end = -1
    for match in _STRING.finditer(code):
        text = unescape(next(group for group in match.groups() if group is not None))
        if literals and end >= 0 and match.start() - end < 8 and _JOINED.match(code[end : match.start()]):
            literals[-1] += text
        else:
            literals.append(text)
        end = match.end()
    for match in _PERL_QUOTE.finditer(code):
        text = next((group for group in (match.group(1), match.group(2), match.group(3), match.group(5)) if group), "")
        literals.append(text)
    return literals


def _filled(literals: list[str]) -> list[str]:
    """Return the templates with each of the other strings in their placeholder."""
    templates = [text for text in literals[:32] if re.search(r"%s|\{\w*\}", text)]
    blanks = [re.split(r"%s|\{\w*\}", text) for text in templates[:8]]
    return [other.join(pieces) for pieces in blanks for other in literals[:16]]


def _decoded(literal: str) -> str | None:
    if not _ENCODED.match(literal):
        return None
    for decode in (_from_base64, bytes.fromhex):
        try:
            data = decode(literal)
        except (ValueError, binascii.Error):
            continue
        text = data.decode("utf-8", "replace")
        if text and sum(character.isprintable() or character in "\n\t" for character in text) == len(text):
            return text
    return None


def _from_base64(text: str) -> bytes:
    return base64.b64decode(text + "=" * (-len(text) % 4), validate=True)


def awk(call: Call) -> str | None:
    """awk can run programs with system() and pipes."""
    options = scan(call.raw, ("-F", "-v", "-f", "--field-separator", "--assign", "--file"), permute=False)
    if options.operands and not options.has("-f", "--file"):
        program = options.operands[0]
        if re.search(r"system\s*\(|\|\s*&?\s*\"|\|\s*&?\s*getline|\"\s*\|\s*getline", program):
            call.flag(Category.EXEC_OPTION, "awk is told to run another program")
            inspect_code(call.shell, program + " system", call.excerpt)
    printed = _maybe_prints(options.operands[0]) if options.operands else HOLE
    return printed if call.stdin is None else printed + "\n" + call.stdin


def sed(call: Call) -> str | None:
    """sed edits in place with -i and runs programs with its `e` command."""
    options = scan(call.arguments, ("-e", "--expression", "-f", "--file", "-l"), permute=True)
    scripts = [*options.values.get("-e", []), *options.values.get("--expression", [])]
    files = list(options.operands)
    if not scripts and not options.has("-f", "--file") and files:
        scripts.append(files.pop(0))
    if any(re.match(r"-[nEersuz]*i|--in-place", word) for word in call.arguments):
        for path in files:
            call.shell.write(path, None, call.excerpt)
    for script in scripts:
        if len(script) > _MAX_SED:
            call.flag(Category.EXEC_OPTION, "the sed script is too long to inspect")
            continue
        for text in _sed_commands(script):
            call.flag(Category.EXEC_OPTION, "sed is told to run another program")
            with call.shell.muted():
                call.shell.run_text(text)
        for written in re.findall(r"(?:^|[;}\n/])\s*w\s+(\S+)", script):
            call.shell.write(written, None, call.excerpt)
    if call.stdin is None:
        return None
    if len(scripts) == 1:
        literal = re.fullmatch(r"s([/|,#:])([\w -]+)\1([\w /.-]*)\1g?", scripts[0])
        if literal is not None:
            return DECODED + call.stdin.replace(literal.group(2), literal.group(3))
    return HOLE + "\n" + call.stdin


def _sed_commands(script: str) -> list[str]:
    """Return the texts that a sed script hands to a shell: after its `e` command, and substitutions with the `e` flag."""
    texts = re.findall(r"(?:^|[;{}\n]|\d|\$|/)[ \t]*e[ \t]+(\S.*)", script)
    for match in re.finditer(r"s([^\w\s\\])(?:(?!\1)[^\\]|\\.)*\1((?:(?!\1)[^\\]|\\.)*)\1[gpimI0-9]*e", script):
        texts.append(re.sub(r"\\(.)", r"\1", match.group(2)))
    return texts


def editor(call: Call) -> str | None:
    """vim, ex and ed with commands on the command line can reach the shell with `!`."""
    texts = [*call.arguments, *(call.stdin or "").splitlines()[:256]]
    for text in texts:
        match = re.search(r"(?:^|[:+|])\s*(?:r\s*|w\s*)?!\s*(.+)", text)
        if match is not None:
            call.flag(Category.EXEC_OPTION, "an editor is told to run a shell command")
            with call.shell.muted(), call.shell.state.maybe():
                call.shell.run_text(match.group(1))
    if call.stdin is not None:
        for operand in scan(call.arguments, ("-c", "--cmd", "-S")).operands:
            call.shell.write(operand, None, call.excerpt)
    return None
