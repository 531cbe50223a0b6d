"""Similar items: their recall through the index over 50,000 generated chunks, and what a wave of 500 costs in the
write transaction at 100,000 rows with lists: `make bench-similar`. Prints; nothing here fails on a time.

python -m bench.similar [--chunks 50000] [--rows 100000]
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import psycopg

from bench.bench import WAVE, fresh_kind, timed
from embed_assets import pipeline, server
from embed_assets.resources.assembly import Kind
from embed_assets.resources.similar_store import SimilarStore
from embed_assets.resources.vector_index import VectorIndex
from embed_assets.stop import Stop
from tests.fakes import HashEmbedder
from tests.postgres.generated import generate

WIDTH, PER_ROW, SAMPLE = 64, 3, 500
# Rows gather around a hundred centres, the id modulo 100. Where a company's postings are all of one centre, every near
# row is one that the rule refuses, and the probe must find its way to the other centres.
COMPANIES = {49: "companies mixed", 50: "each near row of the same company"}


def recall(kind: Kind, db: psycopg.Connection, chunks: int, companies: int, what: str) -> None:
    """The lists of sampled rows beside every pair of chunks compared in memory."""
    rows = chunks // PER_ROW
    generate(db, kind, rows, per_row=PER_ROW, companies=companies)
    build = timed(lambda: VectorIndex(kind.postgres, kind.bound, kind.model_id, WIDTH).build())
    vectors = _vectors(db, kind)
    sample = np.random.default_rng(1).choice(np.arange(1, rows + 1), SAMPLE, replace=False)
    store = SimilarStore(kind.postgres, kind.bound)
    found: dict[int, list[str]] = {}

    def compute() -> None:
        for part in np.array_split(sample, SAMPLE // 50):
            found.update({int(row.source_id): row.candidates[:20] for row in store.compute([str(job) for job in part])})

    seconds = timed(compute)
    shares = [len(set(_true(vectors, job, companies)) & set(map(int, found[job]))) / 20 for job in found]
    print(f"index of {chunks:,} chunks of {WIDTH} dimensions: {build:.0f} s")
    print(
        f"similar items, {what}: {statistics.mean(shares):.1%} of the true neighbours of {len(found)} rows "
        f"(promised ≥ 95 %), {1000 * seconds / SAMPLE:.1f} ms a row"
    )


def _vectors(db: psycopg.Connection, kind: Kind) -> np.ndarray[Any, Any]:
    """(rows, chunks of a row, dims), each of length 1; row n at n − 1."""
    found = db.execute(
        f"SELECT embedding FROM embed_assets.{kind.bound.partition_name(kind.model_id)} ORDER BY id, chunk_index"
    ).fetchall()
    vectors = np.array([row[0].to_numpy() if hasattr(row[0], "to_numpy") else row[0] for row in found], np.float32)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    return vectors.reshape(-1, PER_ROW, WIDTH)


def _true(vectors: np.ndarray[Any, Any], job: int, companies: int, k: int = 20) -> list[int]:
    """As the rule of `jobs` has it: no private rows (every twentieth), none of the same company."""
    near = np.einsum("cd,rnd->rcn", vectors[job - 1], vectors).max(axis=(1, 2))
    ids = np.arange(1, len(vectors) + 1)
    near[(ids % 20 == 0) | (ids % companies == job % companies)] = -2
    return [int(n) + 1 for n in np.argsort(-near)[:k]]


def invalidation(kind: Kind, db: psycopg.Connection, rows: int) -> None:
    """The one statement of similar items that stands in the write transaction, rolled back each time."""
    generate(db, kind, rows, per_row=1)
    VectorIndex(kind.postgres, kind.bound, kind.model_id, kind.embedder.dimensions).build()
    db.execute(
        "INSERT INTO embed_assets.similar_jobs (source_id, model_id, neighbours, distances, computed_at) "
        "SELECT id::text, %s, (SELECT array_agg(((id * n * 7919) %% %s + 1)::text) FROM generate_series(1, 20) AS n), "
        "array_fill(0.5::real, ARRAY[20]), now() FROM jobs",
        (kind.model_id, rows),
    )
    db.execute("ANALYZE")
    db.execute("SELECT embed_assets.enqueue('jobs', array_agg(id), forced => TRUE) FROM jobs WHERE id <= %s", (WAVE,))
    kind.enqueuer.enqueue()
    wave = kind.outbox.claim("bench", WAVE)
    assert wave is not None
    pipeline.stage(kind.ports, wave, Stop())
    statement = kind.chunks._sql("invalidate_similar", wave)
    values = {"kind": "jobs", "wave_id": wave.wave_id, "ids": None}
    times = []
    for _ in range(9):
        with kind.postgres.transaction() as cursor:
            times.append(timed(lambda: cursor.execute(statement, values)))
            assert cursor.rowcount == WAVE
            raise psycopg.Rollback
    print(
        f"a wave of {WAVE} at {rows:,} rows with lists: {1000 * statistics.median(times):.1f} ms of invalidation in "
        "its write transaction (promised ≤ 50 ms)"
    )
    kind.chunks.write(wave)
    store = SimilarStore(kind.postgres, kind.bound)
    marked = timed(lambda: store.refresh(seconds=0))
    print(f"taken from the feed by the similar job in {marked:.1f} s, {store.waiting().stale} lists stale")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--chunks", type=int, default=50_000)
    parser.add_argument("--rows", type=int, default=100_000)
    arguments = parser.parse_args()
    home = Path(tempfile.mkdtemp(prefix="embed_assets_bench_"))
    try:
        url = server.ensure(home)
        for companies, what in COMPANIES.items():
            with fresh_kind(url, HashEmbedder(WIDTH)) as (kind, db):
                recall(kind, db, arguments.chunks, companies, what)
        with fresh_kind(url, HashEmbedder(8)) as (kind, db):
            invalidation(kind, db, arguments.rows)
    finally:
        server.remove(home)


if __name__ == "__main__":
    main()
