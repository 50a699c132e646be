"""Full-text search on PostgreSQL. A message is indexed after it is committed, by whichever node comes first; a search indexes what is missing first."""

from __future__ import annotations

from typing import Final

from hermes_trio.store.records import FIRST_HITS, Page, SearchHit, SearchOrder, SearchQuery
from hermes_trio.store.sqlite.rows import Database, equalities, exists, many, marks, write_many
from hermes_trio.store.sqlite.search import SqliteSearch, hit_from_row

from .lexemes import text_query, text_words

INDEX_BATCH: Final = 200


def unindexed(db: Database) -> bool:
    """Return whether there is a message that is not indexed yet."""
    return exists(db, "SELECT 1 FROM messages WHERE words IS NULL LIMIT 1")


def index_next(db: Database, limit: int) -> int:
    """Index some unindexed messages. Waits for messages that another node is indexing, so that a search finds everything that was written."""
    found = many(
        db,
        "SELECT id, content, tool_name, tool_calls FROM messages WHERE words IS NULL ORDER BY id LIMIT ?"
        " FOR NO KEY UPDATE",
        (limit,),
    )
    write_many(
        db,
        "UPDATE messages SET words = ?::text::tsvector WHERE id = ?",
        [(text_words(" ".join(part for part in parts if part)), number) for number, *parts in found],
    )
    return len(found)


def search(db: Database, wanted: SearchQuery, page: Page) -> list[SearchHit]:
    """Return the messages that a query finds."""
    query, terms = text_query(wanted.text)
    if not query:
        return []
    where, bindings = equalities({"s.source": wanted.source, "s.tenant": wanted.tenant, "s.id": wanted.session_id})
    if wanted.roles:
        where.append(f"m.role IN ({marks(len(wanted.roles))})")
        bindings.extend(wanted.roles)
    ordering = {
        SearchOrder.OLDEST: "m.id",
        SearchOrder.NEWEST: "m.id DESC",
        SearchOrder.RELEVANCE: "ts_rank_cd(m.words, q, 1) DESC, m.id DESC",
    }[wanted.order]
    sql = (
        "SELECT s.id, m.id, m.role, m.content, m.timestamp, s.source, s.title, m.session, m.tool_calls"
        " FROM CAST(CAST(? AS text) AS tsquery) AS q, messages m JOIN sessions s ON s.n = m.session"
        f" WHERE m.words @@ q AND {' AND '.join(where)} ORDER BY {ordering} LIMIT ? OFFSET ?"
    )
    return [hit_from_row(db, row, terms) for row in many(db, sql, (query, *bindings, page.limit, page.offset))]


class PostgresSearch(SqliteSearch):
    """Search's part of the store, with the index in a column of the messages."""

    async def search_messages(self, query: SearchQuery, page: Page = FIRST_HITS) -> list[SearchHit]:
        """Find messages, after indexing what is committed. No query is malformed: one without a usable term finds nothing."""
        await self.index_messages()
        return await self._scan(search, query, page)

    async def index_some(self) -> int:
        """Index one small batch of what is committed and not indexed yet; return how many messages that was."""
        return await self._write_heavily(index_next, INDEX_BATCH) if await self._read(unindexed) else 0
