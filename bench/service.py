"""Two drains beside the embedding service alone: `make bench-service`. Prints; fails on nothing.

The service is like a GPU: one request at a time, always as long. The drains are processes of their own, as Dagster's
runs are: one writes while the other embeds, so that the service has something to do nearly all the time.

python -m bench.service [--rows N]
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psycopg
from psycopg.conninfo import make_conninfo

from bench.bench import DIMENSIONS, fresh_kind, report
from bench.drain import fill, postings
from embed_assets import server
from embed_assets.corpora.jobs import jobs
from embed_assets.fake_server import FakeServer
from embed_assets.resources.assembly import open_kind
from embed_assets.resources.run import DrainRun
from embed_assets.settings import load_settings

SECONDS_PER_REQUEST = 0.15
DRAINS = 2


def drain() -> None:
    """What one run after the other does, until nothing is due."""
    kind = open_kind(load_settings(), jobs)
    try:
        for number in range(1000):
            run = DrainRun(kind, f"bench-{os.getpid()}-{number}")
            run.enqueue()
            if not run.claim():
                return
            run.stage()
            run.write()
    finally:
        kind.close()


def bench(database: str, number: int) -> None:
    with FakeServer(dimensions=DIMENSIONS, seconds_per_request=SECONDS_PER_REQUEST, one_at_a_time=True) as service:
        environment = {**os.environ, "DATABASE_URL": database, "EMBED_PROTOCOL": "tei", "EMBED_URL": service.url}
        environment |= {"EMBED_MODEL": "bench", "EMBED_DIMENSIONS": str(DIMENSIONS)}
        command = [sys.executable, "-m", "bench.service", "--drain"]
        drains = [subprocess.Popen(command, env=environment) for _ in range(DRAINS)]
        codes = [process.wait() for process in drains]
        ended = time.monotonic()
        asked = service.requests
    assert codes == [0] * DRAINS, codes
    with psycopg.connect(database) as db:
        done = db.execute("SELECT count(*) FROM embed_assets.semantic_stamps").fetchone()
    assert done == (number,), done
    seconds, alone = ended - asked[0].at, len(asked) * SECONDS_PER_REQUEST
    print(f"{number} rows, {len(asked)} requests: {seconds:.1f} s, the service alone {alone:.1f} s")
    report("service alone / drain", alone / seconds, "≥ 0.90")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, default=4000)
    parser.add_argument("--drain", action="store_true")
    arguments = parser.parse_args()
    if arguments.drain:
        return drain()
    home = Path(tempfile.mkdtemp(prefix="embed_assets_bench_"))
    try:
        url = server.ensure(home)
        with fresh_kind(url) as (_, db):
            fill(db, postings(arguments.rows))
            # The model of the bench is the first one here: nothing is built beside another.
            db.execute("UPDATE embed_assets.corpora SET active_model_id = NULL, target_model_id = NULL")
            bench(make_conninfo(url, dbname="bench"), arguments.rows)
    finally:
        server.remove(home)


if __name__ == "__main__":
    main()
