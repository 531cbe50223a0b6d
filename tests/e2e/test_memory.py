"""What a drain over HTTP takes of memory: its most, as the kernel saw it, with documents as long as they may be."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psycopg

from embed_assets.fake_server import FakeServer

ROOT = Path(__file__).parents[2]
LONG = int(os.environ.get("MEMORY_DOCUMENTS", "2"))
MOST = 400_000_000
DRAIN = """
import re
from embed_assets.cli import app
try:
    app(["drain", "jobs"], standalone_mode=False)
finally:
    # Not getrusage: its peak is that of the process which started this one, where that was larger.
    print("peak", int(re.search(r"VmHWM:\\s+(\\d+) kB", open("/proc/self/status").read())[1]) * 1024)
"""


def test_documents_of_two_million_characters_fit_in_400_mb(db: psycopg.Connection, database_url: str) -> None:
    db.execute((ROOT / "sql/demo/jobs.sql").read_bytes())
    db.execute(
        "INSERT INTO jobs (title, company, description, is_tech) SELECT 'Long ' || n, 'Acme', "
        "(SELECT string_agg('<p>Sentence ' || n || ' number ' || k || ' tells of hammers.</p>', '') "
        f"FROM generate_series(1, 42000) AS k), true FROM generate_series(1, {LONG}) AS n"
    )
    db.execute(
        "INSERT INTO jobs (title, company, description, is_tech) SELECT 'Short ' || n, 'Acme', '<p>Text ' || n, true "
        "FROM generate_series(1, 200) AS n"
    )
    longest = db.execute("SELECT max(length(description)) FROM jobs").fetchone()[0]
    assert 1_900_000 < longest < 2_100_000
    with FakeServer(dimensions=768) as server:
        settings = {
            "DATABASE_URL": database_url,
            "EMBED_PROTOCOL": "tei",
            "EMBED_URL": server.url,
            "EMBED_MODEL": "stub/model",
            "EMBED_DIMENSIONS": "768",
        }
        done = subprocess.run(
            [sys.executable, "-c", DRAIN], env={**os.environ, **settings}, capture_output=True, text=True, timeout=350
        )
    assert done.returncode == 0, done.stderr
    assert f"indexed={200 + LONG} " in done.stdout
    peak = int(done.stdout.rpartition("peak ")[2])
    print(f"{LONG} documents of {longest:,} characters: {peak / 1e6:.0f} MB")
    assert peak < MOST
