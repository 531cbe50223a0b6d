"""Similar items of 150 real postings, by vectors of their words: true neighbours, also after the rows have changed."""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fakes import HashEmbedder
from postgres.conftest import KindMaker
from postgres.generated import build_index
from postgres.support import Db, drain, rows, value
from postgres.test_similar import kept, shared

from embed_assets.embedding import Embedded
from embed_assets.load import load_file
from embed_assets.resources.assembly import Kind
from embed_assets.resources.similar_store import SimilarStore

ASHBY = Path(__file__).parents[3] / "shared/data/jobs/ashby-multilingual.jsonl"
MAPPING = {
    "external_id": "id",
    "description": "descriptionHtml",
    "posted_at": "publishedAt",
    "company_slug": "company",
}


class WordEmbedder(HashEmbedder):
    """Texts that share words are near: each word adds to one of 256 dimensions."""

    def __init__(self) -> None:
        super().__init__(256, identity="words")

    def embed(self, texts: Sequence[str], *, stop: Any) -> Iterator[Any]:
        yield Embedded(list(range(len(texts))), np.stack([self._vector(text) for text in texts]), 0)

    def _vector(self, text: str) -> np.ndarray[Any, Any]:
        vector = np.full(256, 1e-3, dtype=np.float32)
        for word in re.findall(r"\w+", text.lower()):
            vector[zlib.crc32(word.encode()) % 256] += 1
        return vector


@pytest.fixture
def real(jobs_table: None, make_kind: KindMaker, db: Db) -> Kind:
    kind = make_kind(embedder=WordEmbedder(), batch_size=100)
    load_file(db, "jobs", ASHBY, mapping=MAPPING, constants={"is_tech": "true"})
    db.execute("UPDATE jobs SET is_private = TRUE WHERE id % 10 = 0")
    drain(kind)
    build_index(kind)
    return kind


@pytest.mark.skipif(not ASHBY.exists(), reason="the folder of real data is absent")
def test_real_postings_have_their_true_neighbours_before_and_after_they_change(real: Kind, db: Db) -> None:
    store = SimilarStore(real.postgres, real.bound)
    assert store.refresh().computed == 150
    assert shared(db, real) >= 0.95
    edited, closed, deleted = (
        rows(db, "SELECT id FROM jobs WHERE NOT is_private ORDER BY md5(id::text) OFFSET %s LIMIT 10", start)
        for start in (0, 10, 20)
    )
    others = "(SELECT description FROM jobs AS o WHERE o.id = 150 - jobs.id %% 20)"
    db.execute(f"UPDATE jobs SET description = {others} WHERE id = ANY(%s)", (edited,))
    db.execute("UPDATE jobs SET closed_at = now() WHERE id = ANY(%s)", (closed,))
    db.execute("DELETE FROM jobs WHERE id = ANY(%s)", (deleted,))
    _in_step(real, store, db)
    db.execute("UPDATE jobs SET closed_at = NULL WHERE id = ANY(%s)", (closed[:5],))
    _in_step(real, store, db)
    assert set(closed[:5]) <= set(kept(db))
    assert store.refresh().idle


def _in_step(kind: Kind, store: SimilarStore, db: Db) -> None:
    drain(kind)
    store.refresh()
    assert not store.waiting()
    assert shared(db, kind) >= 0.95
    wrong = (
        "SELECT count(*) FROM embed_assets.similar_jobs AS s CROSS JOIN LATERAL unnest(s.neighbours) AS n (id) "
        "JOIN jobs AS a ON a.id::text = s.source_id LEFT JOIN jobs AS b ON b.id::text = n.id "
        "WHERE b.id IS NULL OR b.closed_at IS NOT NULL OR b.is_private OR b.company_slug = a.company_slug"
    )
    assert value(db, wrong) == 0
    assert value(db, "SELECT count(*) FROM embed_assets.similar_jobs") == value(
        db, "SELECT count(*) FROM jobs WHERE closed_at IS NULL"
    )
