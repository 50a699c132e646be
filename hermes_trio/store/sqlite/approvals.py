"""Approvals: requests that wait for a person, and grants.

A request is pending until it is approved, denied or expired, once. An answer of `session` or `always` also grants the categories of the
request: to its scope, or for good to the grantee that the request names (a tenant, or a platform). Only the configuration grants to all.
A request without an answer expires; it is never approved.
"""

from __future__ import annotations

from typing import Any, Final, cast

from hermes_trio.runtime.ports import APPROVAL_TOPIC
from hermes_trio.store.records import FIRST_PAGE, ApprovalChoice, ApprovalRow, ApprovalState, Grant, NewApproval, Page

from .encoding import clean, dump, load
from .rows import Database, Row, changed, equalities, many, one, write, write_many
from .verbs import Verbs

_COLUMNS: Final = (
    "id, scope, session_key, session_id, run_id, tenant, command, description, categories, choices, state, choice,"
    " reason, created_at, expires_at, answered_at, grantee, asker, asked"
)


def _approval(row: Row) -> ApprovalRow:
    values: list[Any] = [
        *row[:8],
        tuple(cast("list[str]", load(row[8]))),
        tuple(ApprovalChoice(choice) for choice in cast("list[str]", load(row[9]))),
        ApprovalState(row[10]),
        ApprovalChoice(row[11]) if row[11] else None,
        *row[12:18],
        bool(row[18]),
    ]
    return ApprovalRow(*values)


def create(db: Database, now: float, owner: str, new: NewApproval) -> ApprovalRow:
    """Write a request."""
    found = one(
        db,
        f"INSERT INTO approvals ({_COLUMNS}, owner)"
        " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, 'pending', '', '', ?, ?, NULL, ?, ?, 1, ?)"
        f" RETURNING {_COLUMNS}",
        (
            new.id,
            new.scope,
            new.session_key,
            new.session_id,
            new.run_id,
            new.tenant,
            clean(new.command),
            clean(new.description),
            dump(new.categories),
            dump([choice.value for choice in new.choices]),
            now,
            new.expires_at,
            new.grantee,
            new.asker,
            owner,
        ),
    )
    assert found is not None
    return _approval(found)


def get(db: Database, approval_id: str) -> ApprovalRow | None:
    """Return a request by its id, or None."""
    found = one(db, f"SELECT {_COLUMNS} FROM approvals WHERE id = ?", (approval_id,))
    return _approval(found) if found else None


def answer(db: Database, now: float, approval_id: str, choice: ApprovalChoice, reason: str) -> ApprovalRow | None:
    """Answer a pending request, and grant what the answer grants."""
    state = ApprovalState.DENIED if choice is ApprovalChoice.DENY else ApprovalState.APPROVED
    found = one(
        db,
        "UPDATE approvals SET state = ?, choice = ?, reason = ?, answered_at = ? WHERE id = ? AND state = 'pending'"
        f" RETURNING {_COLUMNS}",
        (state.value, choice.value, clean(reason), now, approval_id),
    )
    if found is None:
        return None
    db.signals.append((APPROVAL_TOPIC, approval_id))
    answered = _approval(found)
    if choice in answered.choices:
        if choice is ApprovalChoice.SESSION:
            grant(db, now, answered.scope, answered.categories)
        elif choice is ApprovalChoice.ALWAYS and answered.grantee:
            grant(db, now, answered.grantee, answered.categories)
    return answered


def expire(db: Database, now: float, approval_id: str, reason: str, asked: bool) -> bool:
    """Expire a pending request; return whether it was pending."""
    sql = "UPDATE approvals SET state = 'expired', reason = ?, answered_at = ?, asked = ? WHERE id = ? AND state = 'pending'"
    expired = changed(db, sql, (clean(reason), now, asked, approval_id))
    if expired:
        db.signals.append((APPROVAL_TOPIC, approval_id))
    return bool(expired)


def listed(
    db: Database, state: str | None, scope: str | None, tenant: str | None, newest: bool, page: Page
) -> list[ApprovalRow]:
    """Return requests, oldest first, or newest first."""
    where, bindings = equalities({"state": state, "scope": scope, "tenant": tenant})
    order = "created_at DESC, rowid DESC" if newest else "created_at, rowid"
    sql = f"SELECT {_COLUMNS} FROM approvals WHERE {' AND '.join(where)} ORDER BY {order} LIMIT ? OFFSET ?"
    return [_approval(row) for row in many(db, sql, (*bindings, page.limit, page.offset))]


def grant(db: Database, now: float, scope: str, categories: tuple[str, ...]) -> None:
    """Grant categories to a scope."""
    write_many(
        db,
        "INSERT INTO grants (scope, category, granted_at) VALUES (?, ?, ?) ON CONFLICT DO NOTHING",
        [(scope, category, now) for category in categories],
    )


def revoke(db: Database, scope: str, category: str) -> bool:
    """Revoke one grant; return whether there was one."""
    return bool(changed(db, "DELETE FROM grants WHERE scope = ? AND category = ?", (scope, category)))


def forget_grants(db: Database, before: float) -> int:
    """Remove older grants of runs and conversations that no longer exist. Permanent grants, of a tenant or a platform, stay."""
    return changed(
        db,
        "DELETE FROM grants WHERE granted_at <= ? AND scope NOT LIKE 'tenant %' AND scope NOT LIKE 'platform %' AND scope"
        " NOT IN (SELECT session_key FROM routes UNION SELECT run_id FROM runs WHERE ended_at IS NULL)",
        (before,),
    )


def granted(db: Database, scope: str, grantee: str) -> frozenset[str]:
    """Return the categories that are allowed in a scope: its own grants and its grantee's."""
    found = many(db, "SELECT category FROM grants WHERE scope IN (?, ?) AND scope <> ''", (scope, grantee))
    return frozenset(category for (category,) in found)


def list_grants(db: Database, scope: str | None) -> list[Grant]:
    """Return the grants of a scope, or of all."""
    where, bindings = equalities({"scope": scope})
    sql = f"SELECT scope, category, granted_at FROM grants WHERE {' AND '.join(where)} ORDER BY scope, category"
    return [Grant(*row) for row in many(db, sql, bindings)]


def end_scope(db: Database, now: float, scope: str, reason: str) -> int:
    """Expire the pending requests of a run or session key and remove its grants; return how many requests expired."""
    sql = "UPDATE approvals SET state = 'expired', reason = ?, answered_at = ? WHERE scope = ? AND state = 'pending' RETURNING id"
    expired = many(db, sql, (reason, now, scope))
    db.signals.extend([(APPROVAL_TOPIC, approval_id) for (approval_id,) in expired])
    write(db, "DELETE FROM grants WHERE scope = ? AND scope <> ''", (scope,))
    return len(expired)


class SqliteApprovals(Verbs):
    """The approvals' part of the store."""

    async def create_approval(self, new: NewApproval) -> ApprovalRow:
        return await self._write(create, self._clock(), self.owner, new)

    async def get_approval(self, approval_id: str) -> ApprovalRow | None:
        return await self._read(get, approval_id)

    async def answer_approval(
        self, approval_id: str, choice: ApprovalChoice, *, reason: str = ""
    ) -> ApprovalRow | None:
        return await self._write(answer, self._clock(), approval_id, choice, reason)

    async def expire_approval(self, approval_id: str, *, reason: str = "timeout", asked: bool = True) -> bool:
        return await self._write(expire, self._clock(), approval_id, reason, asked)

    async def end_approval_scope(self, scope: str, *, reason: str) -> int:
        return await self._write(end_scope, self._clock(), scope, reason)

    async def list_approvals(
        self,
        *,
        state: ApprovalState | None = ApprovalState.PENDING,
        scope: str | None = None,
        tenant: str | None = None,
        newest: bool = False,
        page: Page = FIRST_PAGE,
    ) -> list[ApprovalRow]:
        return await self._read(listed, state.value if state else None, scope, tenant, newest, page)

    async def revoke_grant(self, category: str, *, scope: str) -> bool:
        return await self._write(revoke, scope, category)

    async def granted(self, scope: str, *, grantee: str = "") -> frozenset[str]:
        return await self._read(granted, scope, grantee)

    async def list_grants(self, *, scope: str | None = None) -> list[Grant]:
        return await self._read(list_grants, scope)
