"""A whole drain beside the least that could be done: `make bench-drain`. Prints; fails on nothing.

4,000 postings, an embedding server that answers at once, no HNSW, one process. The least: the same texts posted by a
bare loop, their vectors copied into a bare table by one binary COPY.

python -m bench.drain [--rows N]
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import orjson
import psycopg
from pgvector import Vector

from bench.bench import DIMENSIONS, fresh_kind, report, timed
from bench.text import DEMO, REAL
from embed_assets import pipeline, server
from embed_assets.embedding import HttpEmbedder
from embed_assets.resources.assembly import Kind
from embed_assets.stop import Stop

REQUEST = 32


@contextmanager
def instant_server() -> Iterator[str]:
    """The URL of one in a process of its own."""
    command = [sys.executable, "-m", "bench.instant_server", str(DIMENSIONS)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield f"http://127.0.0.1:{int(process.stdout.readline())}/embed"
        finally:
            process.terminate()


def postings(number: int) -> list[tuple[str, str]]:
    """Titles and descriptions, real ones where they are at hand, each told apart by its number."""
    real = REAL / "ashby-multilingual.jsonl"
    path, column = (real, "descriptionHtml") if real.exists() else (DEMO, "description")
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    rows = [row for row in rows if row[column]]
    # At the front of each paragraph, so that no chunk of one is a chunk of another.
    return [
        (str(row["title"]), row[column].replace("<p", f"<p>{n} </p><p").replace("<li>", f"<li>{n} "))
        for n, row in ((n, rows[n % len(rows)]) for n in range(number))
    ]


def fill(db: psycopg.Connection[Any], rows: list[tuple[str, str]]) -> None:
    with db.cursor() as cursor, cursor.copy("COPY jobs (title, description, company, is_tech) FROM STDIN") as copy:
        for title, description in rows:
            copy.write_row((title, description, "Co", True))


def drained(kind: Kind) -> int:
    """How many texts a drain sent."""
    _, counts = pipeline.drain(kind.ports, "bench", limits=kind.limits, stop=Stop())
    return counts.texts


def least(db: psycopg.Connection[Any], url: str, rows: list[tuple[Any, ...]], texts: list[str]) -> None:
    """Post the texts, keep the vectors, copy them with what stands in the chunk table."""
    vectors: list[np.ndarray[Any, Any]] = []
    with httpx.Client() as client:
        for start in range(0, len(texts), REQUEST):
            answer = client.post(url, content=orjson.dumps({"inputs": texts[start : start + REQUEST]}))
            vectors.extend(np.array(orjson.loads(answer.content), dtype=np.float32))
    with db.transaction(), db.cursor() as cursor, cursor.copy("COPY bare FROM STDIN (FORMAT BINARY)") as copy:
        copy.set_types(["int8", "int4", "int4", "bytea", "text", "vector"])
        for row, vector in zip(rows, vectors, strict=True):
            copy.write_row((*row, Vector(vector)))


def bench(kind: Kind, db: psycopg.Connection[Any], url: str, number: int) -> None:
    fill(db, postings(number))
    sent = 0

    def drain() -> None:
        nonlocal sent
        sent = drained(kind)

    seconds = timed(drain)
    columns = "id, chunk_index, model_id, text_hash, body"
    rows = db.execute(f"SELECT {columns} FROM embed_assets.job_semantic_chunks ORDER BY id, chunk_index").fetchall()
    db.execute(f"CREATE TABLE bare AS SELECT {columns}, embedding FROM embed_assets.job_semantic_chunks LIMIT 0")
    db.execute("ALTER TABLE bare ADD PRIMARY KEY (id, chunk_index, model_id)")
    texts, times = [row[4] for row in rows], []
    for _ in range(3):
        db.execute("TRUNCATE bare")
        times.append(timed(lambda: least(db, url, rows, texts)))
    print(
        f"{number} rows, {len(rows)} chunks, {sent} texts sent, drain {seconds:.1f} s ({number / seconds:.0f} rows/s)"
    )
    report("drain / bare loop to the server and bare COPY", seconds / statistics.median(times), "≤ 4.5")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, default=4000)
    arguments = parser.parse_args()
    home = Path(tempfile.mkdtemp(prefix="embed_assets_bench_"))
    try:
        with instant_server() as url:
            embedder = HttpEmbedder("tei", url, identity="instant", model="instant", dimensions=DIMENSIONS)
            with fresh_kind(server.ensure(home), embedder) as (kind, db):
                bench(kind, db, url, arguments.rows)
    finally:
        server.remove(home)


if __name__ == "__main__":
    main()
