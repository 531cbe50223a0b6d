"""The bench of a whole drain, a short round of it."""

from __future__ import annotations

import re

from bench import drain
from bench.bench import DIMENSIONS, fresh_kind
from embed_assets.embedding import HttpEmbedder


def test_the_bench_drains_each_posting_and_says_its_ratio(server_url, capsys):
    with drain.instant_server() as url:
        embedder = HttpEmbedder("tei", url, identity="instant", model="instant", dimensions=DIMENSIONS)
        with fresh_kind(server_url, embedder) as (kind, db):
            drain.bench(kind, db, url, 20)
            assert db.execute("SELECT count(*) FROM embed_assets.semantic_stamps").fetchone() == (20,)
    assert re.search(r"20 rows, \d+ chunks, \d+ texts sent.*\n.*bare COPY: \d+\.\d+ \(budget", capsys.readouterr().out)
