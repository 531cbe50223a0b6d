"""The benches that need a database, a short round of each."""

from __future__ import annotations

import re

from psycopg.conninfo import make_conninfo

from bench import drain, index_load, service
from bench.bench import DIMENSIONS, fresh_kind
from embed_assets.embedding import HttpEmbedder


def test_the_bench_drains_each_posting_and_says_its_ratio(server_url, capsys):
    with drain.instant_server() as url:
        embedder = HttpEmbedder("tei", url, identity="instant", model="instant", dimensions=DIMENSIONS)
        with fresh_kind(server_url, embedder) as (kind, db):
            drain.bench(kind, db, url, 20)
            assert db.execute("SELECT count(*) FROM embed_assets.semantic_stamps").fetchone() == (20,)
    assert re.search(r"20 rows, \d+ chunks, \d+ texts sent.*\n.*bare COPY: \d+\.\d+ \(budget", capsys.readouterr().out)


def test_the_bench_of_the_index_loads_the_same_chunks_both_ways(server_url, capsys):
    with fresh_kind(server_url) as (kind, db):
        index_load.bench(kind, db, 300)
        loaded = "SELECT count(*), count(DISTINCT model_id) FROM embed_assets.job_semantic_chunks"
        assert db.execute(loaded).fetchone() == (600, 2)
    assert re.search(r"live / bulk: \d+\.\d+ \(budget", capsys.readouterr().out)


def test_the_bench_of_the_service_drains_each_row_by_two_processes(server_url, capsys, monkeypatch):
    monkeypatch.setattr(service, "SECONDS_PER_REQUEST", 0.01)
    with fresh_kind(server_url) as (_, db):
        drain.fill(db, drain.postings(10))
        db.execute("UPDATE embed_assets.corpora SET active_model_id = NULL, target_model_id = NULL")
        service.bench(make_conninfo(server_url, dbname="bench"), 10)
    assert re.search(r"service alone / drain: \d+\.\d+ \(budget", capsys.readouterr().out)
