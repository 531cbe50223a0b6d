"""What a claim costs while somebody holds a snapshot open, so that no finished entry can be cleaned away, and behind
a heap of retries that are not due. Prints ratios of one run on one machine; nothing here fails on a time.

python -m bench.held_snapshot [--entries 50000] [--retries 200000]
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg

from bench.bench import fresh_kind, report
from embed_assets import pipeline, server
from embed_assets.resources.assembly import Kind
from embed_assets.stop import Stop

Db = psycopg.Connection[Any]

TAIL = 20  # claims of which the median is taken


@dataclass
class Claims:
    """Seconds of each claim, in order, and the dead tuples of the queue at the end."""

    seconds: list[float]
    dead_tuples: int

    @property
    def last(self) -> float:
        """Median of the last claims: when most is finished and nothing of it could be cleaned away."""
        return statistics.median(self.seconds[-TAIL:])


@contextmanager
def held_snapshot(url: str) -> Iterator[None]:
    """A REPEATABLE READ transaction that has read something and stays open."""
    with psycopg.connect(url) as holder:
        holder.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        holder.execute("SELECT count(*) FROM pg_class").fetchone()
        yield


def backlog(kind: Kind, db: Db, entries: int) -> None:
    """So many rows without any text: they are claimed, planned and written like all others, at no cost but ours."""
    db.execute(
        "INSERT INTO jobs (title, is_tech, posted_at) "
        "SELECT 'Title ' || n, TRUE, now() - n * interval '1 second' FROM generate_series(1, %s) AS n",
        (entries,),
    )
    kind.enqueuer.enqueue(scan=True)


def work_off(kind: Kind, db: Db, waves: int, rows: int) -> Claims:
    """Claim and finish so many waves; only the claims are timed."""
    seconds = []
    for _ in range(waves):
        begun = time.perf_counter()
        wave = kind.outbox.claim("bench", rows)
        seconds.append(time.perf_counter() - begun)
        assert wave is not None, "the backlog is too small"
        pipeline.work(kind.ports, wave, kind.limits, Stop())
    return Claims(seconds, dead_tuples(db))


def dead_tuples(db: Db) -> int:
    """Entries' row versions that are of no use to anybody but the snapshot."""
    time.sleep(1.1)  # a backend tells its numbers at most once a second
    row = db.execute(
        "SELECT n_dead_tup FROM pg_stat_user_tables WHERE relid = 'embed_assets.semantic_outbox'::regclass"
    ).fetchone()
    return int(row[0]) if row else 0


def compare(url: str, entries: int, rows: int) -> tuple[Claims, Claims]:
    """The same work without and with a snapshot held."""
    found = []
    for held in (False, True):
        with fresh_kind(url) as (kind, db):
            backlog(kind, db, entries + entries // 5)
            with held_snapshot(kind.postgres.url) if held else nullcontext():
                found.append(work_off(kind, db, entries // rows, rows))
    free, holding = found
    return free, holding


def behind_retries(url: str, retries: int, rows: int) -> tuple[float, float]:
    """Median seconds of a claim, alone and with so many retries in front that are not due."""
    with fresh_kind(url) as (kind, db):
        backlog(kind, db, rows * TAIL * 2)
        alone = [_claim(kind, rows) for _ in range(TAIL)]
        not_due(kind, db, retries)
        behind = [_claim(kind, rows) for _ in range(TAIL)]
    return statistics.median(alone), statistics.median(behind)


def not_due(kind: Kind, db: Db, number: int) -> None:
    """Retries that wait for an hour, each with a better rank than any pending entry."""
    db.execute(
        "INSERT INTO embed_assets.semantic_outbox "
        "(kind, source_id, model_id, reason, rank, status, attempts, next_attempt_at, last_failed_at) "
        "SELECT 'jobs', 'retry' || n, %s, 'scan', '-Infinity', 'retry_wait', 1, "
        "clock_timestamp() + interval '1 hour', clock_timestamp() FROM generate_series(1, %s) AS n",
        (kind.model_id, number),
    )


def _claim(kind: Kind, rows: int) -> float:
    begun = time.perf_counter()
    assert kind.outbox.claim("bench", rows) is not None
    return time.perf_counter() - begun


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--entries", type=int, default=50_000)
    parser.add_argument("--retries", type=int, default=200_000)
    parser.add_argument("--rows", type=int, default=500)
    options = parser.parse_args()
    home = Path(tempfile.mkdtemp(prefix="embed_assets_bench_"))
    try:
        url = server.ensure(home)
        free, held = compare(url, options.entries, options.rows)
        for name, claims in (("without", free), ("with", held)):
            print(
                f"{name} a held snapshot: first claims {statistics.median(claims.seconds[:TAIL]) * 1000:.1f} ms, "
                f"all {statistics.median(claims.seconds) * 1000:.1f} ms, last {claims.last * 1000:.1f} ms median, "
                f"{claims.dead_tuples:,} dead tuples"
            )
        report(f"claim after {options.entries:,} finished entries, snapshot held / not", held.last / free.last, "≤ 2")
        alone, behind = behind_retries(url, options.retries, options.rows)
        report(
            f"claim behind {options.retries:,} retries not due ({behind * 1000:.1f} ms) / alone", behind / alone, "≤ 2"
        )
    finally:
        server.remove(home)


if __name__ == "__main__":
    main()
