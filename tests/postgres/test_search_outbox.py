"""The feed for an external index: who is told what, handed out once, and no change lost."""

from __future__ import annotations

from postgres.support import Db, add_job, add_jobs, drain, rows

from embed_assets.resources.assembly import Kind
from embed_assets.resources.search_outbox import queue_all


def told(db: Db) -> list[tuple[str, str]]:
    return rows(db, "SELECT source_id, op FROM embed_assets.search_outbox ORDER BY id")


def test_a_switch_tells_every_row_that_belongs_in_search_once_more(kind: Kind, db: Db) -> None:
    jobs = add_jobs(db, 2)
    add_job(db, is_tech=None)
    drain(kind)
    db.execute("TRUNCATE embed_assets.search_outbox")
    with kind.postgres.transaction() as cursor:
        assert queue_all(cursor, kind.bound) == 2
    assert told(db) == [(str(job), "upsert") for job in jobs]
