"""A drain against an endpoint that fails every fifth request, in every way: it ends with each row fresh, and buys
hardly more than it needs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from postgres.conftest import KindMaker
from postgres.support import Db, add_job, drain, due_now, rows, status, value

from embed_assets.embedding import HttpEmbedder
from embed_assets.errors import EndpointTrouble
from embed_assets.fake_server import FakeServer, Fault, vector_for
from embed_assets.resources.assembly import Kind

FIFTH = [
    *("503=0.03", "500=0.02", "overloaded=0.02", "breakdown=0.02"),
    *("reset=0.03", "cut=0.02", "garbage=0.01", "hang=0.005"),
    *("zero=0.015", "nan=0.01", "short=0.01", "null=0.01"),
]
ROWS = 300


@pytest.fixture
def faulty() -> Iterator[FakeServer]:
    with FakeServer(faults=[Fault.parse(given) for given in FIFTH], seed=3) as server:
        yield server


@pytest.fixture
def faulty_kind(faulty: FakeServer, make_kind: KindMaker, jobs_table: None) -> Kind:
    embedder = HttpEmbedder(
        "tei", faulty.url, identity="fake", dimensions=8, request_items=4, attempt_timeout=2, retry_base=0.01
    )
    return make_kind(embedder=embedder, batch_size=75)


def drain_until_quiet(kind: Kind, db: Db) -> int:
    """Drain again after each trouble and each retry's waiting time; returns how often."""
    for drains in range(1, 60):
        try:
            drain(kind)
        except EndpointTrouble:
            db.execute("UPDATE embed_assets.embedding_endpoints SET until = clock_timestamp()")
        due_now(db)
        if set(status(kind)) == {"fresh"}:
            return drains
    raise AssertionError(f"it does not come to an end: {status(kind)}")


@pytest.mark.ids("E08", "E22")
def test_with_a_fifth_of_the_requests_failing_every_row_becomes_fresh_for_hardly_more_texts(
    faulty: FakeServer, faulty_kind: Kind, db: Db
) -> None:
    for number in range(ROWS):
        add_job(db, f"<p>Posting {number} of many.</p>")
    drain_until_quiet(faulty_kind, db)
    assert status(faulty_kind) == {"fresh": ROWS}
    needed = value(db, "SELECT count(DISTINCT text_hash) FROM embed_assets.job_semantic_chunks")
    sent = [text for text in faulty.texts if text != "probe"]
    assert needed == ROWS
    assert set(faulty.met) >= {503, 500, "overloaded", "breakdown", "hang", "reset", "cut", "zero", "null", "short"}
    assert 1.15 * needed <= len(sent) <= 1.3 * needed  # of a fifth, each failed request sent once more makes 1.25
    assert faulty_kind.embedder.texts_sent == len(faulty.texts)
    for body, vector in rows(db, "SELECT body, embedding::text FROM embed_assets.job_semantic_chunks"):
        assert vector  # right or absent: the vector is that of the text that was sent
        prefixed = next(text for text in sent if text.endswith(body))
        expected = ",".join(f"{number:.4f}" for number in vector_for(prefixed, 8))
        assert ",".join(f"{float(number):.4f}" for number in vector.strip("[]").split(",")) == expected
