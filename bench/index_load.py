"""Load chunks and then build the index, beside inserting them into a live index: `python -m bench.index_load`.

Both through partitions and the index as the product makes them, in one run on one machine. [--chunks 20000]
"""

from __future__ import annotations

import argparse

import psycopg
from psycopg import sql

from bench.bench import fresh_kind, timed
from embed_assets import server
from embed_assets.resources.assembly import Kind
from embed_assets.resources.target import make_model
from embed_assets.resources.vector_index import VectorIndex
from embed_assets.settings import load_settings

DIMENSIONS = 768
WAVE = 1250


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--chunks", type=int, default=20_000)
    chunks = parser.parse_args().chunks
    with fresh_kind(server.ensure(load_settings().home_path)) as (kind, db):
        bench(kind, db, chunks)


def bench(kind: Kind, db: psycopg.Connection, chunks: int) -> None:
    make_vectors(db, chunks)
    models = [make_model(kind.postgres, kind.bound, name, DIMENSIONS) for name in ("bulk", "live")]
    bulk, live = (VectorIndex(kind.postgres, kind.bound, model, DIMENSIONS) for model in models)
    live.build()
    after = timed(lambda: insert(db, models[0], chunks)) + timed(bulk.build)
    alive = timed(lambda: insert(db, models[1], chunks))
    print(f"{chunks} chunks × {DIMENSIONS}: load, then index {after:.1f} s; into a live index {alive:.1f} s")
    print(f"live / bulk: {alive / after:.2f} (budget ≥ 3)")


def make_vectors(db: psycopg.Connection, chunks: int) -> None:
    """Vectors in two hundred heaps, as texts lie, not spread evenly, which no index can find its way in."""
    db.execute(
        """
        CREATE UNLOGGED TABLE bench_vectors AS
        WITH heaps AS MATERIALIZED (
            SELECT h, array_agg(random() - 0.5) AS middle
            FROM generate_series(0, 199) AS h CROSS JOIN generate_series(1, %(dims)s) GROUP BY h
        )
        SELECT g AS id, (
            SELECT array_agg(m + (random() - 0.5) * 0.6)::vector
            FROM unnest((SELECT middle FROM heaps WHERE h = g %% 200)) AS m
        ) AS embedding
        FROM generate_series(1, %(chunks)s) AS g
        """,
        {"dims": DIMENSIONS, "chunks": chunks},
    )


def insert(db: psycopg.Connection, model_id: int, chunks: int) -> None:
    statement = sql.SQL(
        "INSERT INTO embed_assets.job_semantic_chunks (id, chunk_index, model_id, text_hash, body, embedding) "
        "SELECT id, 0, {model_id}, sha256(id::text::bytea), 'a chunk', embedding FROM bench_vectors "
        "WHERE id > %(after)s AND id <= %(upto)s ORDER BY id"
    ).format(model_id=sql.Literal(model_id))
    for after in range(0, chunks, WAVE):
        db.execute(statement, {"after": after, "upto": after + WAVE})


if __name__ == "__main__":
    main()
