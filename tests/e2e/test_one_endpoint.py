"""Four drains, each a process of its own, on one endpoint that limits its rate."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import psycopg
import pytest

from embed_assets.fake_server import FakeServer

ROOT = Path(__file__).parents[2]
DRAINS = 4
ROWS = 64


@pytest.fixture
def jobs(db: psycopg.Connection) -> None:
    db.execute((ROOT / "sql/demo/jobs.sql").read_bytes())
    db.execute(
        "INSERT INTO jobs (title, company, description, is_tech) "
        f"SELECT 'Title ' || n, 'Acme', 'Posting ' || n, true FROM generate_series(1, {ROWS}) AS n"
    )


def start_drain(url: str, server: FakeServer, number: int) -> subprocess.Popen[str]:
    settings = {
        "DATABASE_URL": url,
        "EMBED_PROTOCOL": "tei",
        "EMBED_URL": server.url,
        "EMBED_MODEL": "stub/model",
        "EMBED_DIMENSIONS": "8",
        "EMBED_BATCH_SIZE": "4",
        "EMBED_REQUEST_ITEMS": "4",
        "EMBED_HEADERS": f'{{"X-Drain": "{number}"}}',
    }
    command = [sys.executable, "-W", "ignore", "-m", "embed_assets", "drain", "jobs"]
    return subprocess.Popen(
        command, env={**os.environ, **settings}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


@pytest.mark.ids("E12")
def test_four_drains_on_one_limited_endpoint_ask_nothing_of_it_while_it_rests(
    db: psycopg.Connection, database_url: str, jobs: None
) -> None:
    """The first is told to wait before the others begin: they know of it without asking. After that each may have been
    on its way when another was told, but none asks twice."""
    with FakeServer(requests_per_minute=6, minute=1.0, script=[(429, {"retry-after": "8"}, {})]) as server:
        drains = [start_drain(database_url, server, 0)]
        end = time.monotonic() + 60
        while not server.requests and time.monotonic() < end:
            time.sleep(0.02)
        told = server.requests[0].at
        drains += [start_drain(database_url, server, number) for number in range(1, DRAINS)]
        outputs = [drain.communicate(timeout=120)[0] for drain in drains]
        assert [drain.returncode for drain in drains] == [0] * DRAINS, outputs
    embedded = [request for request in server.requests if request.texts != ["probe"]]
    assert len({text for request in embedded for text in request.texts}) == ROWS
    assert not [request for request in embedded if told < request.at < told + 8]
    assert server.rests, "the endpoint was never asked for more than it gives"
    for began, ends in server.rests:
        asked = [request.headers["x-drain"] for request in embedded if began < request.at < ends]
        assert len(asked) == len(set(asked)), "one asked again while the endpoint rested"
    assert db.execute("SELECT count(*) FROM embed_assets.semantic_outbox").fetchone() == (0,)
    assert db.execute("SELECT count(*) FROM embed_assets.job_semantic_chunks").fetchone() == (ROWS,)
