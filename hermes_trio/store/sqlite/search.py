"""Full-text search over the messages of all sessions.

Two indexes: words, for scripts with spaces between them, and trigrams, for those without (Chinese, Japanese, Korean, Thai and the like);
terms too short for a trigram are searched in those messages directly. Words with hyphens, dots or underscores are found as phrases. Any
string is a valid query: one without a usable term finds nothing.

Messages are indexed after they are committed, in batches, so that a turn does not pay for it. A search first indexes what is missing, so it
always finds everything that was acknowledged before it began.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

import msgspec

from hermes_trio.store.records import FIRST_HITS, Page, SearchHit, SearchOrder, SearchQuery

from .cursors import get_meta, set_meta
from .rows import Database, Row, equalities, many, marks, one, write
from .verbs import Verbs

QUERY_LENGTH: Final = 2_048
TERM_LIMIT: Final = 32
INDEX_BATCH: Final = 200
SNIPPET_LENGTH: Final = 160
NEIGHBOUR_LENGTH: Final = 200
INDEXED_UPTO: Final = "search.indexed_upto"

SPACELESS: Final = (
    "\u0e00-\u0eff"  # Thai, Lao
    "\u1000-\u109f"  # Myanmar
    "\u1780-\u17ff"  # Khmer
    "\u2e80-\u2fdf"  # radicals
    "\u3040-\u30ff"  # Hiragana, Katakana
    "\u3100-\u31ff"  # Bopomofo, Hangul compatibility
    "\u3400-\u4dbf\u4e00-\u9fff"  # Han
    "\uac00-\ud7af"  # Hangul
    "\uf900-\ufaff"  # Han compatibility
    "\U00020000-\U0003ffff"  # Han, other planes
)
_HAS_SPACELESS: Final = re.compile(f"[{SPACELESS}]")
QUERY_TERM: Final = re.compile(r'"([^"]*)"|(\S+)')


class _Query(msgspec.Struct, frozen=True):
    """A parsed query: an expression for each index, and the terms that only a scan of the text can find."""

    words: str
    grams: str
    literals: tuple[str, ...]
    terms: tuple[str, ...]

    @property
    def empty(self) -> bool:
        return not (self.words or self.grams or self.literals)


def _parse(text: str) -> _Query:
    words: list[str] = []
    grams: list[str] = []
    literals: list[str] = []
    terms: list[str] = []
    either = False
    for match in QUERY_TERM.finditer(_plain(text[:QUERY_LENGTH])):
        if len(terms) >= TERM_LIMIT:
            break
        quoted, bare = match.group(1), match.group(2)
        term = (quoted if quoted is not None else bare).replace('"', " ").strip()
        if bare in ("AND", "NOT"):
            continue
        if bare == "OR":
            either = bool(words)
            continue
        prefix = quoted is None and term.endswith("*")
        term = term.rstrip("*")
        if not any(character.isalnum() for character in term):
            continue
        terms.append(term)
        if _HAS_SPACELESS.search(term):
            if len(term) >= 3:
                grams.append(f'"{term}"')
            else:
                literals.append(term)
        else:
            piece = f'"{term}"{" *" if prefix else ""}'
            if either:
                words[-1] = f"({words[-1]} OR {piece})"
            else:
                words.append(piece)
        either = False
    return _Query(" AND ".join(words), " AND ".join(grams), tuple(literals), tuple(terms))


def _plain(text: str) -> str:
    return "".join(
        " " if ord(character) < 32 or 0xD800 <= ord(character) <= 0xDFFF else character for character in text
    )


def index_backlog(db: Database) -> int:
    """Return how many messages may not be indexed yet."""
    newest = one(db, "SELECT max(id) FROM messages")
    return max(0, (newest[0] or 0 if newest else 0) - int(get_meta(db, INDEXED_UPTO) or 0))


def index_next(db: Database, limit: int = INDEX_BATCH) -> int:
    """Index the next messages; return how many there were. One statement per index: no row passes through Python."""
    start = int(get_meta(db, INDEXED_UPTO) or 0)
    found = one(
        db,
        "SELECT count(*), max(id) FROM (SELECT id FROM messages WHERE id > ? ORDER BY id LIMIT ?)",
        (start, limit),
    )
    count, end = found if found is not None else (0, None)
    if not count:
        return 0
    write(
        db,
        "INSERT INTO message_words (rowid, content, tool_name, tool_calls)"
        " SELECT id, content, tool_name, tool_calls FROM messages WHERE id > ? AND id <= ?",
        (start, end),
    )
    write(
        db,
        "INSERT INTO message_grams (rowid, content) SELECT id, content FROM messages"
        " WHERE id > ? AND id <= ? AND octet_length(content) <> length(content) AND content GLOB ?",
        (start, end, f"*[{SPACELESS}]*"),
    )
    set_meta(db, INDEXED_UPTO, str(end))
    return count


def search(db: Database, wanted: SearchQuery, page: Page) -> list[SearchHit]:
    """Return the messages that a query finds."""
    query = _parse(wanted.text)
    if query.empty:
        return []
    where: list[str] = []
    bindings: list[object] = []
    tables = "messages m JOIN sessions s ON s.n = m.session"
    ranked = bool(query.words)
    if ranked:
        tables = f"message_words w JOIN {tables}"
        where.append("w.message_words MATCH ? AND m.id = w.rowid")
        bindings.append(query.words)
    if query.grams:
        where.append("m.id IN (SELECT rowid FROM message_grams WHERE message_grams MATCH ?)")
        bindings.append(query.grams)
    for literal in query.literals:
        where.append("m.id IN (SELECT id FROM message_grams_docsize) AND instr(m.content, ?) > 0")
        bindings.append(literal)
    more, values = equalities({"s.source": wanted.source, "s.tenant": wanted.tenant, "s.id": wanted.session_id})
    where.extend(more)
    bindings.extend(values)
    if wanted.roles:
        where.append(f"m.role IN ({marks(len(wanted.roles))})")
        bindings.extend(wanted.roles)
    if wanted.order is SearchOrder.OLDEST:
        ordering = "m.id"
    elif wanted.order is SearchOrder.RELEVANCE and ranked:
        ordering = "w.rank, m.id DESC"
    else:
        ordering = "m.id DESC"
    sql = (
        f"SELECT s.id, m.id, m.role, m.content, m.timestamp, s.source, s.title, m.session, m.tool_calls FROM {tables}"
        f" WHERE {' AND '.join(where)} ORDER BY {ordering} LIMIT ? OFFSET ?"
    )
    return [hit_from_row(db, row, query.terms) for row in many(db, sql, (*bindings, page.limit, page.offset))]


def hit_from_row(db: Database, row: Row, terms: Sequence[str]) -> SearchHit:
    """Return a row as a hit, with the messages before and after it."""
    session_id, number, role, content, timestamp, source, title, session, calls = row
    before = "SELECT substr(content, 1, ?) FROM messages WHERE session = ? AND id < ? ORDER BY id DESC LIMIT 1"
    after = "SELECT substr(content, 1, ?) FROM messages WHERE session = ? AND id > ? ORDER BY id LIMIT 1"
    previous = one(db, before, (NEIGHBOUR_LENGTH, session, number))
    following = one(db, after, (NEIGHBOUR_LENGTH, session, number))
    return SearchHit(
        session_id=session_id,
        message_id=number,
        role=role,
        snippet=snippet(content or calls or "", terms),
        timestamp=timestamp,
        source=source,
        title=title,
        before=previous[0] if previous else "",
        after=following[0] if following else "",
    )


def snippet(text: str, terms: Sequence[str]) -> str:
    """Return the text around the first match, with the match between `>>>` and `<<<`."""
    pattern = "|".join(_loose(term) for term in terms)
    match = re.search(pattern, text, re.IGNORECASE) if pattern else None
    if match is None:
        return text[:SNIPPET_LENGTH] + ("…" if len(text) > SNIPPET_LENGTH else "")
    start, end = match.span()
    end = min(end, start + SNIPPET_LENGTH)
    left = max(0, start - SNIPPET_LENGTH // 2)
    right = min(len(text), end + SNIPPET_LENGTH // 2)
    return (
        ("…" if left else "")
        + text[left:start]
        + ">>>"
        + text[start:end]
        + "<<<"
        + text[end:right]
        + ("…" if right < len(text) else "")
    )


def _loose(term: str) -> str:
    """Return a term as the index splits it: every character that is no letter or digit separates."""
    return r"[\W_]+".join(re.escape(part) for part in re.split(r"[\W_]+", term) if part) or re.escape(term)


class SqliteSearch(Verbs):
    """Search's part of the store."""

    async def search_messages(self, query: SearchQuery, page: Page = FIRST_HITS) -> list[SearchHit]:
        await self.index_messages()
        return await self._scan(search, query, page)

    async def index_messages(self) -> int:
        """Index what is committed and not indexed yet, in small batches; return how many messages that was."""
        total = 0
        while indexed := await self.index_some():
            total += indexed
        return total

    async def index_some(self) -> int:
        """Index one small batch of what is committed and not indexed yet; return how many messages that was."""
        return await self._write_heavily(index_next, INDEX_BATCH) if await self._read(index_backlog) else 0
