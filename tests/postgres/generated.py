"""Postings, chunks and stamps made on the server, many in little time, for plans and for recall."""

from __future__ import annotations

from postgres.support import Db

from embed_assets.resources.assembly import Kind
from embed_assets.resources.vector_index import VectorIndex


def generate(db: Db, kind: Kind, rows: int, *, per_row: int = 2, companies: int = 50, spread: float = 1.0) -> None:
    """Open postings with chunks of random directions; smaller `spread`, and rows gather around a hundred centres."""
    db.execute("SELECT setseed(0.5)")
    db.execute(
        "INSERT INTO jobs (title, company, company_slug, description, is_tech, is_private) "
        "SELECT 'Title ' || n, 'Company', 'company-' || n %% %s, '<p>' || n || '</p>', TRUE, n %% 20 = 0 "
        "FROM generate_series(1, %s) AS n",
        (companies, rows),
    )
    partition = kind.bound.partition_name(kind.model_id)
    db.execute(f"ALTER TABLE embed_assets.{partition} DISABLE TRIGGER USER")
    db.execute(
        f"INSERT INTO embed_assets.{partition} (id, chunk_index, model_id, text_hash, body, embedding) "
        "SELECT j.id, c, %(model)s, decode(md5(j.id || '-' || c), 'hex'), 'chunk ' || c || ' of ' || j.id, "
        "       (SELECT array_agg(sin((j.id %% 100 + 1) * d * 12.9898) + %(spread)s * (random() - 0.5) + 0 * c * j.id) "
        "        FROM generate_series(1, %(width)s) AS d)::vector "
        "FROM jobs AS j CROSS JOIN generate_series(0, %(last)s) AS c",
        {"model": kind.model_id, "spread": spread, "width": kind.embedder.dimensions, "last": per_row - 1},
    )
    db.execute(f"ALTER TABLE embed_assets.{partition} ENABLE TRIGGER USER")
    db.execute(
        "INSERT INTO embed_assets.semantic_stamps (kind, model_id, source_id, revision, chunk_count) "
        "SELECT 'jobs', %s, id::text, content_hash, %s FROM jobs",
        (kind.model_id, per_row),
    )
    db.execute("ANALYZE jobs")
    db.execute(f"ANALYZE embed_assets.{partition}")


def build_index(kind: Kind) -> None:
    assert VectorIndex(kind.postgres, kind.bound, kind.model_id, kind.embedder.dimensions).build()
