"""No text is paid for twice: what is had is looked for first, what was bought is counted, and whose fault a mass of
failures is."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from fakes import HashEmbedder
from postgres.conftest import KindMaker
from postgres.support import (
    Db,
    add_job,
    add_jobs,
    chunks,
    drain,
    enqueue,
    entries,
    expire,
    rows,
    status,
    value,
    wave_of,
)

from embed_assets import pipeline
from embed_assets.errors import AnswerContract, EndpointTrouble, InputRejected, LeaseLost
from embed_assets.resources.assembly import Kind
from embed_assets.stop import Stop

SAME = {"title": "Cook", "company": "Acme"}
LONG = "".join(f"<p>Paragraph {letter} {'x' * 1200}.</p>" for letter in "abc")


def log(db: Db, columns: str) -> list[object]:
    return rows(db, f"SELECT {columns} FROM embed_assets.semantic_outbox_log ORDER BY id")


@pytest.mark.ids("C-24")
def test_a_text_that_any_row_of_the_model_has_is_not_sent_again(kind: Kind, embedder: HashEmbedder, db: Db) -> None:
    first, second = (add_job(db, "<p>One text.</p>", **SAME) for _ in range(2))
    assert drain(kind).texts == 1
    third = add_job(db, "<p>One text.</p>", **SAME)
    db.execute("TRUNCATE embed_assets.chunk_embeddings")
    counts = drain(kind)
    assert (counts.indexed, counts.texts, counts.sent, counts.reused) == (1, 0, 0, 1)
    assert len(embedder.texts) == 1
    vectors = {chunks(db, one, "embedding::text")[0] for one in (first, second, third)}
    assert len(vectors) == 1


@pytest.mark.ids("C-25", "C-24")
def test_another_model_buys_every_text_again(kind: Kind, make_kind: KindMaker, db: Db) -> None:
    add_jobs(db, 3)
    drain(kind)
    other = HashEmbedder(identity="another")
    counts = drain(make_kind(embedder=other))
    assert (counts.texts, counts.reused, len(other.texts)) == (3, 0, 3)
    wider = HashEmbedder(dimensions=9)
    assert drain(make_kind(embedder=wider)).texts == 3


@pytest.mark.ids("C-30")
def test_what_a_row_no_longer_says_is_no_longer_there(kind: Kind, db: Db) -> None:
    job = add_job(db, LONG)
    drain(kind)
    assert [body[:11] for body in chunks(db, job)] == ["Paragraph a", "Paragraph b", "Paragraph c"]
    db.execute(
        "UPDATE jobs SET description = %s WHERE id = %s", (LONG[LONG.index("<p>Paragraph c") :] + "<p>New.</p>", job)
    )
    counts = drain(kind)
    assert (counts.texts, counts.reused) == (1, 0)
    assert [body[:11] for body in chunks(db, job)] == ["Paragraph c"]
    assert value(db, "SELECT chunk_count FROM embed_assets.semantic_stamps") == 1


@pytest.mark.ids("C-28")
def test_progress_begins_with_what_is_reused_and_grows_request_by_request(
    kind: Kind, db: Db, embedder: HashEmbedder
) -> None:
    add_job(db, "<p>Had already.</p>", **SAME)
    drain(kind)
    add_job(db, "<p>Had already.</p>", **SAME)
    for number in range(3):
        add_job(db, f"<p>New {number}.</p>", **SAME)
    embedder.request_items = 1
    seen: list[object] = []

    def look(_: Sequence[str]) -> None:
        seen.append(rows(db, "SELECT reused, texts FROM embed_assets.claimed_waves WHERE closed_at IS NULL")[0])

    embedder.before = look
    drain(kind)
    assert seen == [(1, 0), (1, 1), (1, 2)]


@pytest.mark.ids("C-29")
def test_progress_of_a_wave_that_was_taken_away_is_dropped_and_what_was_paid_for_is_kept(
    kind: Kind, other: Kind, db: Db, embedder: HashEmbedder
) -> None:
    add_jobs(db, 3)
    enqueue(kind)
    wave = wave_of(kind)
    embedder.request_items = 1

    def lose(texts: Sequence[str]) -> None:
        if len(embedder.texts) == 1:
            expire(db, wave)
            wave_of(other)

    embedder.before = lose
    pipeline.stage(kind.ports, wave, Stop())
    with pytest.raises(LeaseLost):
        pipeline.write(kind.ports, wave, Stop())
    closed = rows(db, "SELECT texts, outcome FROM embed_assets.claimed_waves ORDER BY wave_id")
    assert closed == [(1, "expired"), (0, None)]
    assert value(db, "SELECT count(*) FROM embed_assets.chunk_embeddings") == 3


def test_the_log_tells_what_each_row_cost(kind: Kind, db: Db) -> None:
    job = add_job(db, LONG, **SAME)
    drain(kind)
    db.execute("UPDATE jobs SET description = replace(description, 'graph b', 'graph B') WHERE id = %s", (job,))
    drain(kind)
    db.execute("UPDATE jobs SET closed_at = now()")
    drain(kind)
    costs = log(db, "outcome, chunks, reused, tokens > 0")
    assert costs == [("indexed", 3, 0, True), ("indexed", 3, 2, True), ("removed", 0, None, None)]


def test_how_many_texts_were_sent_is_kept_with_the_wave(kind: Kind, db: Db) -> None:
    add_jobs(db, 4)
    counts = drain(kind)
    assert (counts.texts, counts.sent) == (4, 4)
    assert value(db, "SELECT sum(sent) FROM embed_assets.claimed_waves") == 4


# --- a mass of failures


def failing(embedder: HashEmbedder, share: float, error: Exception) -> None:
    embedder.reject = lambda text: error if int(text.rpartition("number ")[2].strip(".")) % 100 < share * 100 else None


@pytest.fixture
def hundred(db: Db, jobs_table: None) -> None:
    for number in range(100):
        add_job(db, f"<p>Posting number {number}.</p>")


@pytest.mark.ids("E21")
@pytest.mark.parametrize("error", [AnswerContract("zeros", code="zero_vector"), InputRejected("no", code="http_400")])
def test_when_most_texts_fail_alike_no_row_is_charged_and_the_endpoint_rests(
    make_kind: KindMaker, hundred: None, embedder: HashEmbedder, db: Db, error: Exception
) -> None:
    kind = make_kind(batch_size=100)
    failing(embedder, 0.6, error)
    with pytest.raises(EndpointTrouble, match="60 of 100 texts fail alike"):
        drain(kind)
    assert entries(db, "attempts, failures, status") == [(0, 0, "pending")] * 100
    rest = kind.resting()
    assert rest is not None
    assert rest.state == "refused"
    embedder.reject = lambda text: None
    assert drain(kind).indexed == 100
    assert len(embedder.texts) == 100, "what was had before is not bought again"


@pytest.mark.ids("E21")
def test_when_they_fail_so_again_after_the_rest_each_is_charged_and_the_others_are_written(
    make_kind: KindMaker, hundred: None, embedder: HashEmbedder, db: Db
) -> None:
    kind = make_kind(batch_size=100)
    failing(embedder, 0.6, InputRejected("no", code="http_400"))
    with pytest.raises(EndpointTrouble):
        drain(kind)
    assert drain(kind).indexed == 40
    assert status(kind) == {"fresh": 40, "dead": 60}


@pytest.mark.ids("E21")
def test_a_few_that_fail_are_charged_and_no_other(
    make_kind: KindMaker, hundred: None, embedder: HashEmbedder, db: Db
) -> None:
    kind = make_kind(batch_size=100)
    failing(embedder, 0.05, AnswerContract("zeros", code="zero_vector"))
    counts = drain(kind)
    assert (counts.indexed, counts.failed) == (95, 5)
    assert entries(db, "attempts, error_code") == [(1, "zero_vector")] * 5
