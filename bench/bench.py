"""The budgets as ratios of one run on one machine: `make bench`. Nothing here fails on a time; it prints.

python bench/bench.py [--rows 1000000]
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import psycopg
from pgvector import Vector
from pgvector.psycopg import register_vector

from embed_assets import pipeline, server
from embed_assets.corpora.jobs import jobs
from embed_assets.embedding import Embedded, Embedder
from embed_assets.load import create_jobs_table
from embed_assets.migrate import migrate
from embed_assets.resources.assembly import Kind, assemble, maintained
from embed_assets.resources.declaration import bind
from embed_assets.resources.postgres import Postgres
from embed_assets.resources.tables import make_tables
from embed_assets.settings import load_settings
from embed_assets.stop import Stop

DIMENSIONS = 768
WAVE = 500
COLUMNS = "id, chunk_index, model_id, text_hash, body, embedding"


class InstantEmbedder:
    """Vectors at once: what is timed is everything but the embedding service."""

    identity = f"instant-{DIMENSIONS}"
    dimensions = DIMENSIONS

    def __init__(self) -> None:
        self.texts_sent = 0
        self.vectors = np.random.default_rng(0).standard_normal((4096, DIMENSIONS)).astype(np.float32)

    def embed(self, texts: Sequence[str], *, stop: Stop) -> Iterator[Embedded]:
        for start in range(0, len(texts), 32):
            count = min(32, len(texts) - start)
            self.texts_sent += count
            yield Embedded(list(range(start, start + count)), self.vectors[:count], count)

    def embed_query(self, text: str, *, timeout: float) -> np.ndarray[Any, Any]:
        return self.vectors[0]

    def close(self) -> None:
        pass


@contextmanager
def fresh_kind(url: str, embedder: Embedder | None = None) -> Iterator[tuple[Kind, psycopg.Connection]]:
    """The kind jobs on a new database, with an embedder that answers at once unless one is given."""
    with psycopg.connect(url, autocommit=True) as admin:
        admin.execute("DROP DATABASE IF EXISTS bench WITH (FORCE)")
        admin.execute("CREATE DATABASE bench")
    url = psycopg.conninfo.make_conninfo(url, dbname="bench")
    migrate(url)
    with psycopg.connect(url, autocommit=True) as db:
        register_vector(db)
        create_jobs_table(db)
        postgres, embedder = Postgres(url), embedder or InstantEmbedder()
        bound = bind(postgres, jobs)
        make_tables(postgres, bound)
        settings = load_settings()
        kind = assemble(settings, postgres, bound, [maintained(settings, postgres, bound, jobs, embedder)])
        yield kind, db
        kind.close()


def timed(action: Callable[[], object]) -> float:
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


def add_jobs(db: psycopg.Connection, rows: int, paragraphs: int) -> None:
    """Rows of about 2.5 chunks each when `paragraphs` is 5; a word each when it is 0."""
    db.execute(
        """
        INSERT INTO jobs (external_id, title, company, description, is_tech, posted_at)
        SELECT 'e' || g, 'Title ' || g, 'Co', 'row ' || g || coalesce((
            SELECT string_agg('<p>' || repeat('word' || g || 'x' || p || ' ', 75) || '</p>', '')
            FROM generate_series(1, %(paragraphs)s) AS p), ''), TRUE, now() - g * interval '1 second'
        FROM generate_series(1, %(rows)s) AS g
        """,
        {"rows": rows, "paragraphs": paragraphs},
    )


def bench_write(kind: Kind, db: psycopg.Connection) -> None:
    """Write a wave, staging to ledger and plan included, beside a bare binary COPY of the same rows.

    Each wave is followed by its COPY, so that whatever else the machine does meets both.
    """
    add_jobs(db, 6 * WAVE, 5)
    kind.enqueuer.enqueue(scan=True)
    db.execute(f"CREATE TABLE bare AS SELECT {COLUMNS} FROM embed_assets.job_semantic_chunks LIMIT 0")
    db.execute("ALTER TABLE bare ADD PRIMARY KEY (id, chunk_index, model_id)")
    stages, ratios = [], []
    for _ in range(5):
        stages.append(stage_and_write(kind))
        chunks, bare = bare_copy(db)
        ratios.append(sum(stages[-1]) / bare)
    report("write a wave, staging included / bare binary COPY", statistics.median(ratios), "≤ 2", chunks)
    parts = [statistics.median(part) * 1000 for part in zip(*stages, strict=True)]
    print("of it: plan {:.0f} ms, keep {:.0f} ms (a transaction for each 32 texts), write {:.0f} ms".format(*parts))
    bench_rewrite(kind, db, statistics.median(sum(stage) for stage in stages))


def stage_and_write(kind: Kind) -> tuple[float, float, float]:
    """Seconds that a wave takes to be planned, its vectors to be kept, and to be written."""
    wave = kind.outbox.claim("bench", WAVE)
    plans = [kind.bound.corpus.plan(row) for row in kind.chunks.load(wave, wave.source_ids)]
    hashes = [chunk.text_hash for plan in plans for chunk in plan.chunks]
    vectors = np.resize(kind.embedder.vectors, (len(hashes), DIMENSIONS))

    def keep() -> None:
        for start in range(0, len(hashes), 32):
            kind.chunks.keep(wave, hashes[start : start + 32], vectors[start : start + 32], tokens=1)

    kind.outbox.start(wave)
    return (
        timed(lambda: kind.chunks.plan(wave, plans)),
        timed(keep),
        timed(lambda: kind.chunks.write(wave)),
    )


def bare_copy(db: psycopg.Connection) -> tuple[int, float]:
    """How many chunks the latest wave wrote, and the seconds in which they are copied into a bare table."""
    rows = db.execute(
        f"SELECT {COLUMNS} FROM embed_assets.job_semantic_chunks WHERE id::text IN (SELECT source_id "
        "FROM embed_assets.semantic_stamps WHERE wave_id = (SELECT max(wave_id) FROM embed_assets.semantic_stamps)) "
        "ORDER BY id, chunk_index"
    ).fetchall()
    rows = [(*row[:5], row[5] if isinstance(row[5], Vector) else Vector(row[5])) for row in rows]

    def copy() -> None:
        with db.transaction(), db.cursor() as cursor, cursor.copy("COPY bare FROM STDIN (FORMAT BINARY)") as sink:
            sink.set_types(["int8", "int4", "int4", "bytea", "text", "vector"])
            for row in rows:
                sink.write_row(row)

    db.execute("TRUNCATE bare")
    return len(rows), timed(copy)


def bench_rewrite(kind: Kind, db: psycopg.Connection, first: float) -> None:
    """Write again a wave in which 4 % of the chunks changed."""
    ids = [row[0] for row in db.execute("SELECT id FROM jobs ORDER BY posted_at DESC LIMIT %s", (WAVE,))]
    db.execute("UPDATE jobs SET description = description || ' tail' WHERE id = ANY(%s)", (ids[:50],))
    db.execute("UPDATE jobs SET title = title WHERE id = ANY(%s)", (ids,))
    db.execute("DELETE FROM embed_assets.semantic_outbox")
    db.execute(
        "UPDATE embed_assets.semantic_stamps SET revision = 'older' WHERE source_id = ANY(%s)", ([str(i) for i in ids],)
    )
    db.execute("SELECT embed_assets.enqueue('jobs', %s::bigint[])", (ids,))
    kind.enqueuer.enqueue()
    wave = kind.outbox.claim("bench", WAVE)
    pipeline.stage(kind.ports, wave, Stop())
    report(
        "write again, 4 % of the chunks changed / first write", timed(lambda: kind.chunks.write(wave)) / first, "≤ 0.15"
    )


def bench_scale(kind: Kind, db: psycopg.Connection, rows: int) -> None:
    """Scan and claim with many rows: nothing due, and everything due."""
    add_jobs(db, rows, 0)
    kind.enqueuer.enqueue(scan=True)
    repeat = timed(lambda: kind.enqueuer.enqueue(scan=True))
    claims = [timed(lambda: kind.outbox.claim("bench", WAVE)) for _ in range(9)]
    db.execute("DELETE FROM embed_assets.semantic_outbox")
    db.execute(
        "INSERT INTO embed_assets.semantic_stamps (kind, model_id, source_id, revision, chunk_count) "
        "SELECT 'jobs', %s, id::text, content_hash, 0 FROM jobs ON CONFLICT DO NOTHING",
        (kind.model_id,),
    )
    db.execute("ANALYZE")
    kind.enqueuer.enqueue(scan=True)
    nothing = min(timed(lambda: kind.enqueuer.enqueue(scan=True)) for _ in range(3))
    print(
        f"at {rows:,} rows: scan with nothing due {nothing:.2f} s, with everything due {repeat:.2f} s, "
        f"claim of {WAVE} {statistics.median(claims) * 1000:.0f} ms median"
    )


def report(what: str, ratio: float, budget: str, chunks: int | None = None) -> None:
    print(f"{what}: {ratio:.2f} (budget {budget}){f', {chunks} chunks' if chunks else ''}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, default=200_000)
    arguments = parser.parse_args()
    home = Path(tempfile.mkdtemp(prefix="embed_assets_bench_"))
    try:
        url = server.ensure(home)
        with fresh_kind(url) as (kind, db):
            bench_write(kind, db)
        with fresh_kind(url) as (kind, db):
            bench_scale(kind, db, arguments.rows)
    finally:
        server.remove(home)


if __name__ == "__main__":
    main()
