"""Similar items: true neighbours, kept true, and nothing done when nothing is stale."""

from __future__ import annotations

from postgres.support import Db, add_jobs, drain, rows

from embed_assets.resources.assembly import Kind
from embed_assets.resources.similar_store import forget_model, invalidate_all


def waiting(db: Db) -> list[tuple[str, int]]:
    return rows(db, "SELECT source_id, model_id FROM embed_assets.similar_invalidations ORDER BY id")


def test_a_switch_has_every_row_of_the_model_computed_once(kind: Kind, db: Db) -> None:
    jobs = add_jobs(db, 3)
    drain(kind)
    db.execute("TRUNCATE embed_assets.similar_invalidations")
    with kind.postgres.transaction() as cursor:
        assert invalidate_all(cursor, kind.bound, kind.model_id) == 3
        assert forget_model(cursor, kind.bound, kind.model_id) == 0
    assert waiting(db) == [(str(job), kind.model_id) for job in jobs]
