"""The write of a wave: all of it or nothing, exactly what changed and no more, and who pays when it cannot be done."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import psycopg
import pytest
from fakes import HashEmbedder, vector_of
from postgres.support import (
    Db,
    add_job,
    add_jobs,
    asking,
    chunks,
    claim,
    connect,
    drain,
    due_now,
    enqueue,
    entries,
    entry,
    expire,
    rows,
    say,
    staged,
    stamps,
    status,
    value,
    wave_of,
    wave_row,
)

from embed_assets import pipeline
from embed_assets.corpora.jobs import jobs as jobs_corpus
from embed_assets.corpus import Plain, TableCorpus
from embed_assets.errors import (
    AnswerContract,
    Cancelled,
    DatabaseTrouble,
    EndpointTrouble,
    ErrorClass,
    InputRejected,
    InputTooLong,
    LeaseLost,
    RowRejected,
)
from embed_assets.models import Failure, Wave
from embed_assets.pipeline import Limits
from embed_assets.resources.assembly import Kind
from embed_assets.search import search
from embed_assets.stop import Stop

KindMaker = Callable[..., Kind]

TABLES = (
    "semantic_outbox",
    "claimed_waves",
    "wave_chunks",
    "chunk_embeddings",
    "semantic_stamps",
    "similar_invalidations",
    "search_outbox",
    "semantic_outbox_log",
    "job_semantic_chunks",
)


def paragraphs(*words: str) -> str:
    """HTML of which each word makes a chunk of its own."""
    return "".join(f"<p>{' '.join([word] * (1800 // (len(word) + 1)))}</p>" for word in words)


def words(db: Db, job: int) -> list[str]:
    """A row's chunks, each by the word that it repeats."""
    return [body.split()[0] for body in chunks(db, job)]


def change(db: Db, job: int, **columns: object) -> None:
    for column, new in columns.items():
        db.execute(f"UPDATE jobs SET {column} = %s WHERE id = %s".encode(), (new, job))


def everything(db: Db) -> dict[str, list[str]]:
    """All rows of all tables that a write may touch, as text."""
    return {table: rows(db, f"SELECT t::text FROM embed_assets.{table} AS t ORDER BY 1") for table in TABLES}


def write(kind: Kind, wave: Wave) -> Any:
    return pipeline.write(kind.ports, wave, Stop())


def transactions_of(db: Db, wave: Wave) -> set[str]:
    """The transactions that wrote what a wave left behind."""
    found = rows(
        db,
        "SELECT s.xmin::text FROM embed_assets.semantic_stamps s WHERE s.wave_id = %(w)s "
        "UNION SELECT l.xmin::text FROM embed_assets.semantic_outbox_log l WHERE l.wave_id = %(w)s "
        "UNION SELECT c.xmin::text FROM embed_assets.claimed_waves c WHERE c.wave_id = %(w)s "
        "UNION SELECT x.xmin::text FROM embed_assets.search_outbox x "
        "UNION SELECT i.xmin::text FROM embed_assets.similar_invalidations i ".replace("%(w)s", str(wave.wave_id)),
    )
    return set(found)


class Boom(Exception):
    """No error of ours and none of the database's."""


@contextmanager
def intercepted(kind: Kind, wrap: Callable[[Any], Any], after: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Wrap the cursor of each transaction that begins in the block; `after` runs once its commit has happened."""
    real = kind.postgres.transaction

    @contextmanager
    def transaction(**options: Any) -> Iterator[Any]:
        with real(**options) as cursor:
            yield wrap(cursor)
        after()

    kind.postgres.transaction = transaction  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        del kind.postgres.transaction  # type: ignore[method-assign]


class FailingAt:
    """A cursor that raises ahead of the statement with this number; counts what it was asked."""

    def __init__(self, number: int, error: Exception) -> None:
        self.number, self.error, self.asked = number, error, 0
        self._cursor: Any = None

    def __call__(self, cursor: Any) -> FailingAt:
        self._cursor = cursor
        return self

    def execute(self, *arguments: Any) -> Any:
        self.asked += 1
        if self.asked == self.number:
            raise self.error
        return self._cursor.execute(*arguments)


@pytest.fixture
def mixed(db: Db, kind: Kind) -> Wave:
    """A staged wave of four: new, re-embedded with fewer chunks, closed, deleted."""
    again, closed, deleted = (add_job(db, paragraphs(word, "two", "three")) for word in ("a", "b", "c"))
    drain(kind)
    change(db, again, description=paragraphs("changed", "two"))
    change(db, closed, closed_at="2024-01-01")
    db.execute("DELETE FROM jobs WHERE id = %s", (deleted,))
    add_job(db, paragraphs("new"))
    enqueue(kind)
    return staged(kind)


def refuse(db: Db, table: str, event: str, condition: str = "TRUE", code: str = "P0001") -> None:
    """From now on the database refuses `event` for the rows of a table of ours that meet the condition."""
    db.execute(
        f"""
        CREATE OR REPLACE FUNCTION public.refuse() RETURNS trigger LANGUAGE plpgsql AS $$
        DECLARE this record := coalesce(new, old);
        BEGIN
            IF {condition} THEN RAISE 'refused' USING ERRCODE = '{code}'; END IF;
            RETURN coalesce(new, old);
        END $$;
        CREATE OR REPLACE TRIGGER refused BEFORE {event} ON embed_assets.{table}
        FOR EACH ROW EXECUTE FUNCTION public.refuse();
        """.encode()
    )


def accept(db: Db, table: str) -> None:
    db.execute(f"DROP TRIGGER refused ON embed_assets.{table}".encode())


# --- all or nothing


@pytest.mark.ids("A-37")
def test_a_fault_ahead_of_any_statement_of_the_write_or_of_its_commit_changes_nothing(db: Db, kind: Kind, mixed: Wave):
    before = everything(db)
    for number in range(1, 100):
        cursor = FailingAt(number, Boom())
        with intercepted(kind, cursor):
            try:
                counts = write(kind, mixed)
            except Boom:
                assert everything(db) == before, f"statement {number}"
                continue
        break
    assert number > 14  # each of fourteen statements was tried, then none was left
    assert (counts.indexed, counts.removed, counts.gone) == (2, 1, 1)
    assert entries(db) == []


@pytest.mark.ids("A-37")
def test_a_commit_that_fails_changes_nothing(db: Db, kind: Kind, mixed: Wave):
    before = everything(db)
    db.execute("""
        CREATE FUNCTION public.refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE 'refused'; END $$;
        CREATE CONSTRAINT TRIGGER late AFTER INSERT ON embed_assets.semantic_outbox_log
        DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION public.refuse();
    """)
    with pytest.raises(RowRejected):
        kind.chunks.write(mixed)
    assert everything(db) == before


@pytest.mark.ids("A-37")
def test_a_refusal_in_the_middle_of_any_statement_of_the_write_changes_nothing(db: Db, kind: Kind, mixed: Wave):
    before = everything(db)
    for table, event in [
        ("job_semantic_chunks", "INSERT"),
        ("job_semantic_chunks", "UPDATE"),
        ("job_semantic_chunks", "DELETE"),
        ("semantic_stamps", "INSERT"),
        ("semantic_stamps", "UPDATE"),
        ("semantic_stamps", "DELETE"),
        ("search_outbox", "INSERT"),
        ("similar_invalidations", "INSERT"),
        ("semantic_outbox_log", "INSERT"),
        ("semantic_outbox", "DELETE"),
        ("claimed_waves", "UPDATE"),
        ("wave_chunks", "DELETE"),
    ]:
        refuse(db, table, event)
        with pytest.raises(RowRejected):
            kind.chunks.write(mixed)
        assert everything(db) == before, f"{event} on {table}"
        accept(db, table)
    assert kind.chunks.write(mixed).indexed == 2


@pytest.mark.ids("A-20", "A-21", "A-44")
def test_rows_to_embed_and_rows_to_clear_are_one_load_one_purchase_and_one_transaction(
    db: Db, kind: Kind, embedder: HashEmbedder, monkeypatch: pytest.MonkeyPatch
):
    stay, closed = add_job(db, paragraphs("old")), add_job(db, paragraphs("shut"))
    drain(kind)
    change(db, stay, description=paragraphs("new", "newer"))
    change(db, closed, is_tech=False)
    add_job(db)
    enqueue(kind)
    calls = {"load": 0, "embed": 0, "write": 0}
    for target, name in ((kind.chunks, "load"), (embedder, "embed"), (kind.chunks, "write")):
        monkeypatch.setattr(target, name, counted(getattr(target, name), name, calls))
    db.execute("TRUNCATE embed_assets.similar_invalidations, embed_assets.search_outbox")
    wave = wave_of(kind)
    counts = pipeline.work(kind.ports, wave, Limits(), Stop())
    assert (counts.indexed, counts.removed) == (2, 1)
    assert calls == {"load": 1, "embed": 1, "write": 1}
    assert len(transactions_of(db, wave)) == 1
    assert stamps(db) == [str(stay), str(stay + 2)]
    assert chunks(db, closed) == []


def counted(work: Callable[..., Any], name: str, calls: dict[str, int]) -> Callable[..., Any]:
    def call(*arguments: Any, **options: Any) -> Any:
        calls[name] += 1
        return work(*arguments, **options)

    return call


@pytest.mark.ids("A-22")
def test_a_wave_of_rows_to_clear_is_one_transaction_and_asks_no_embedder(db: Db, kind: Kind, embedder: HashEmbedder):
    for job in add_jobs(db, 3):
        drain(kind)
        change(db, job, duplicate_of=7)
    enqueue(kind)
    requests = embedder.requests
    db.execute("TRUNCATE embed_assets.similar_invalidations, embed_assets.search_outbox")
    wave = wave_of(kind)
    assert pipeline.work(kind.ports, wave, Limits(), Stop()).removed == len(wave.entries)
    assert embedder.requests == requests
    assert len(transactions_of(db, wave)) == 1


# --- exactly what changed


@pytest.mark.ids("A-38", "Q25")
def test_a_row_that_became_shorter_keeps_no_chunk_of_its_past(db: Db, kind: Kind):
    job = add_job(db, paragraphs("one", "two", "three"))
    drain(kind)
    change(db, job, description=paragraphs("one", "two"))
    drain(kind)
    assert words(db, job) == ["one", "two"]
    assert stamps(db, "chunk_count") == [2]


@pytest.mark.ids("A-39", "T18", "C-23")
@pytest.mark.parametrize("text", [None, "", "  ", "<p>&nbsp;</p>"])
def test_a_row_that_lost_its_text_loses_its_chunks_and_counts_as_done(
    db: Db, kind: Kind, embedder: HashEmbedder, text: str | None
):
    job = add_job(db, paragraphs("one", "two"))
    drain(kind)
    paid = len(embedder.texts)
    change(db, job, description=text)
    assert drain(kind).indexed == 1
    assert chunks(db, job) == []
    assert stamps(db, "source_id, chunk_count") == [(str(job), 0)]
    assert len(embedder.texts) == paid
    assert status(kind) == {"fresh": 1}
    assert drain(kind).claimed == 0


@pytest.mark.ids("A-40", "A-42")
def test_chunks_are_inserted_by_one_statement_and_deleted_by_one_whatever_the_number_of_rows(db: Db, kind: Kind):
    jobs = [add_job(db, paragraphs(f"a{number}", f"b{number}")) for number in range(7)]
    db.execute("""
        CREATE TABLE statements (event text);
        CREATE FUNCTION public.count_it() RETURNS trigger LANGUAGE plpgsql AS $$
        BEGIN INSERT INTO public.statements VALUES (tg_op); RETURN NULL; END $$;
        CREATE TRIGGER counted AFTER INSERT OR DELETE ON embed_assets.job_semantic_chunks
        FOR EACH STATEMENT EXECUTE FUNCTION public.count_it();
    """)
    drain(kind, rows=100)
    for job in jobs:
        change(db, job, description=paragraphs(f"c{job}"))
    asked = FailingAt(0, Boom())
    enqueue(kind)
    wave = staged(kind)
    with intercepted(kind, asked):
        write(kind, wave)
    assert value(db, "SELECT count(*) FROM embed_assets.job_semantic_chunks") == 7
    assert rows(db, "SELECT event FROM statements") == ["INSERT", "DELETE"] * 2
    assert asked.asked == 15


@pytest.mark.ids("A-41")
def test_rows_of_different_lengths_in_one_wave_do_not_mix(db: Db, kind: Kind, embedder: HashEmbedder):
    lengths = {}
    for number, length in enumerate((3, 1, 4, 2, 1)):
        lengths[add_job(db, paragraphs(*(f"r{number}c{index}" for index in range(length))))] = (number, length)
    drain(kind, rows=100)
    for job, (number, length) in lengths.items():
        assert words(db, job) == [f"r{number}c{index}" for index in range(length)]
        assert chunks(db, job, "chunk_index") == list(range(length))
    assert_vectors_belong_to_their_texts(db, embedder)


def assert_vectors_belong_to_their_texts(db: Db, embedder: HashEmbedder) -> None:
    sent = {text.split(". ", 1)[1]: vector_of(text, 8) for text in embedder.texts}
    for body, vector in rows(db, "SELECT body, embedding::real[] FROM embed_assets.job_semantic_chunks"):
        assert np.allclose(vector, sent[body], atol=1e-6), body


def test_chunks_that_did_not_change_are_not_touched(db: Db, kind: Kind, embedder: HashEmbedder):
    job = add_job(db, paragraphs("one", "two", "three", "four"))
    drain(kind)
    before = chunks(db, job, "ctid::text, xmin::text")
    change(db, job, description=paragraphs("one", "CHANGED", "three", "four", "five"))
    drain(kind)
    after = chunks(db, job, "ctid::text, xmin::text")
    assert words(db, job) == ["one", "CHANGED", "three", "four", "five"]
    assert [after[0], after[2], after[3]] == [before[0], before[2], before[3]]
    assert after[1] != before[1]
    assert len(embedder.texts) == 6


def test_a_new_revision_of_the_same_text_touches_no_chunk_and_buys_nothing(
    db: Db, make_kind: KindMaker, embedder: HashEmbedder
):
    db.execute("CREATE TABLE notes (note_id int PRIMARY KEY, body text, version int)")
    db.execute("INSERT INTO notes VALUES (1, 'text', 1)")
    kind = make_kind(TableCorpus(kind="notes", table="notes", key="note_id", text=Plain("body"), revision="version"))
    drain(kind)
    before = rows(db, "SELECT c.xmin::text, c.ctid::text FROM embed_assets.notes_semantic_chunks c")
    db.execute("UPDATE notes SET version = 2")
    assert drain(kind).indexed == 1
    assert rows(db, "SELECT c.xmin::text, c.ctid::text FROM embed_assets.notes_semantic_chunks c") == before
    assert stamps(db, "revision") == ["2"]
    assert len(embedder.texts) == 1


def test_chunks_that_moved_take_their_vectors_with_them(db: Db, kind: Kind, embedder: HashEmbedder):
    job = add_job(db, paragraphs("one", "two", "three"))
    drain(kind)
    db.execute("TRUNCATE embed_assets.chunk_embeddings")
    paid = len(embedder.texts)
    change(db, job, description=paragraphs("three", "one", "two"))
    assert drain(kind).reused == 3
    change(db, job, description=paragraphs("two", "three"))
    drain(kind)
    assert words(db, job) == ["two", "three"]
    assert len(embedder.texts) == paid
    assert_vectors_belong_to_their_texts(db, embedder)


def test_a_repost_uses_the_vectors_of_any_row_and_buys_nothing(db: Db, kind: Kind, embedder: HashEmbedder):
    same = {"title": "Baker", "company": "Acme"}
    add_job(db, paragraphs("one", "two"), **same)
    drain(kind)
    db.execute("TRUNCATE embed_assets.chunk_embeddings")
    paid = len(embedder.texts)
    repost = add_job(db, paragraphs("two", "one"), **same)
    counts = drain(kind)
    assert (counts.texts, counts.reused) == (0, 2)
    assert words(db, repost) == ["two", "one"]
    assert len(embedder.texts) == paid
    assert_vectors_belong_to_their_texts(db, embedder)


def test_a_text_that_many_rows_of_a_wave_share_is_bought_once(db: Db, kind: Kind, embedder: HashEmbedder):
    for _ in range(5):
        add_job(db, paragraphs("same"), title="Baker")
    assert drain(kind, rows=100).indexed == 5
    assert len(embedder.texts) == 1
    assert value(db, "SELECT count(*) FROM embed_assets.job_semantic_chunks") == 5


@pytest.mark.ids("A-43")
def test_every_row_of_a_wave_is_told_to_the_neighbours_whatever_became_of_it(db: Db, kind: Kind, mixed: Wave):
    db.execute("TRUNCATE embed_assets.similar_invalidations")
    write(kind, mixed)
    told = rows(db, "SELECT source_id FROM embed_assets.similar_invalidations ORDER BY source_id")
    assert told == sorted(mixed.source_ids)
    job = add_job(db)
    drain(kind)
    db.execute("TRUNCATE embed_assets.similar_invalidations")
    say(db, job)
    assert drain(kind).superseded == 1
    assert rows(db, "SELECT source_id FROM embed_assets.similar_invalidations") == [str(job)]


@pytest.mark.ids("A-44")
def test_a_cleared_row_loses_its_chunks_and_stamps_of_every_model_and_its_removal_is_told_once(
    db: Db, kind: Kind, make_kind: KindMaker
):
    job, stays = add_jobs(db, 2)
    drain(kind)
    later = make_kind(jobs_corpus, embedder=HashEmbedder(16))
    drain(later)
    assert len(chunks(db, job)) == 2
    change(db, job, closed_at="2024-01-01")
    db.execute("TRUNCATE embed_assets.search_outbox")
    assert drain(later).removed == 1
    assert chunks(db, job) == []
    assert stamps(db, "source_id") == [str(stays)] * 2
    assert rows(db, "SELECT source_id, op FROM embed_assets.search_outbox") == [(str(job), "remove")]
    assert rows(
        db, "SELECT outcome FROM embed_assets.semantic_outbox_log WHERE source_id = %s ORDER BY id", str(job)
    ) == [
        "indexed",
        "indexed",
        "removed",
    ]
    assert drain(kind).claimed == 0


@pytest.mark.ids("A-47")
def test_deleting_chunks_tells_the_search_queue_nothing(db: Db, kind: Kind):
    job = add_job(db, paragraphs("one", "two"))
    drain(kind)
    db.execute("TRUNCATE embed_assets.search_outbox")
    change(db, job, description="")
    drain(kind)
    db.execute("DELETE FROM embed_assets.job_semantic_chunks")
    assert rows(db, "SELECT op FROM embed_assets.search_outbox WHERE op = 'remove'") == []


@pytest.mark.ids("A-27", "A-45")
def test_a_deleted_row_is_out_of_search_at_once_and_settled_as_gone_without_a_failure(
    db: Db, kind: Kind, embedder: HashEmbedder
):
    job, stays = add_job(db, paragraphs("needle")), add_job(db)
    drain(kind)
    db.execute("DELETE FROM jobs WHERE id = %s", (job,))
    found = search(kind.postgres, kind.bound, asking(kind, embedder), "needle", k=10).hits
    assert [hit.source_id for hit in found] == [str(stays)]
    counts = drain(kind)
    assert (counts.gone, counts.failed, counts.dead) == (1, 0, 0)
    assert chunks(db, job) == []
    assert stamps(db) == [str(stays)]
    assert entries(db) == []
    log = rows(db, "SELECT outcome, attempts FROM embed_assets.semantic_outbox_log WHERE source_id = %s", str(job))
    assert log == [("indexed", 0), ("gone", 0)]


@pytest.mark.ids("A-59")
def test_a_vector_of_another_width_is_refused_by_the_partition_and_nothing_of_its_row_is_written(
    db: Db, kind: Kind, embedder: HashEmbedder
):
    add_job(db)
    embedder.dimensions = 9
    counts = drain(kind)
    assert (counts.indexed, counts.failed) == (0, 1)
    assert entries(db, "status, error_class, error_code") == [("retry_wait", "row_rejected", "23514")]
    assert value(db, "SELECT count(*) FROM embed_assets.job_semantic_chunks") == 0
    assert stamps(db) == []


# --- changes that come meanwhile


@pytest.mark.ids("A-70", "Q09")
def test_a_change_during_embedding_is_not_lost_the_stamp_says_what_was_loaded_and_the_entry_is_back(db: Db, kind: Kind):
    job = add_job(db, paragraphs("old"))
    enqueue(kind)
    wave = staged(kind)
    loaded = value(db, "SELECT content_hash FROM jobs")
    change(db, job, description=paragraphs("new"))
    counts = write(kind, wave)
    assert (counts.indexed, counts.back) == (1, 1)
    assert words(db, job) == ["old"]
    assert stamps(db, "revision") == [loaded]
    assert entry(db, job, "status, attempts, crashes") == ("pending", 0, 0)
    assert status(kind) == {"due": 1}
    assert drain(kind, scan=False).indexed == 1
    assert words(db, job) == ["new"]
    assert stamps(db, "revision") == [value(db, "SELECT content_hash FROM jobs")]


@pytest.mark.ids("A-70")
@pytest.mark.parametrize(
    ("meanwhile", "then"),
    [
        ("UPDATE jobs SET closed_at = now()", {"excluded": 1}),
        ("DELETE FROM jobs", {}),
        ("UPDATE jobs SET posted_at = now()", {"fresh": 1}),
    ],
)
def test_a_row_that_left_search_during_embedding_is_cleared_next(
    db: Db, kind: Kind, meanwhile: str, then: dict[str, int]
):
    job = add_job(db)
    enqueue(kind)
    wave = staged(kind)
    db.execute(meanwhile.encode())
    back = write(kind, wave).back
    assert back == (0 if then == {"fresh": 1} else 1)
    drain(kind, scan=False)
    assert status(kind) == then
    assert len(chunks(db, job)) == (1 if then == {"fresh": 1} else 0)


@pytest.mark.ids("A-70")
def test_a_row_that_came_back_while_it_was_being_cleared_is_embedded_next(db: Db, kind: Kind):
    job = add_job(db, paragraphs("one"))
    drain(kind)
    change(db, job, closed_at="2024-01-01")
    enqueue(kind)
    wave = staged(kind)
    change(db, job, closed_at=None)
    counts = write(kind, wave)
    assert (counts.removed, counts.back) == (1, 1)
    assert drain(kind, scan=False).indexed == 1
    assert words(db, job) == ["one"]
    assert status(kind) == {"fresh": 1}


@pytest.mark.ids("Q09")
def test_a_request_that_came_during_the_wave_is_served_by_another_wave(db: Db, kind: Kind):
    job = add_job(db)
    enqueue(kind)
    wave = staged(kind)
    say(db, job, reason="manual")
    enqueue(kind, scan=False)
    counts = write(kind, wave)
    assert (counts.indexed, counts.back) == (1, 1)
    assert entry(db, job, "status, reason") == ("pending", "manual")
    assert drain(kind, scan=False).superseded == 1


@pytest.mark.ids("Q09", "C-66")
def test_a_forced_request_that_came_during_the_wave_stands_and_stays_forced(db: Db, kind: Kind, embedder: HashEmbedder):
    job = add_job(db)
    enqueue(kind)
    wave = staged(kind)
    say(db, job, reason="manual", forced=True)
    enqueue(kind, scan=False)
    write(kind, wave)
    assert entry(db, job, "status, forced, attempts") == ("pending", True, 0)
    assert drain(kind, scan=False).indexed == 1
    assert len(embedder.texts) == 2
    assert entries(db) == []


@pytest.mark.ids("C-26")
def test_a_forced_row_that_changes_during_its_wave_stays_forced(db: Db, kind: Kind, embedder: HashEmbedder):
    job = add_job(db, paragraphs("one"))
    drain(kind)
    change(db, job, description=paragraphs("two"))
    drain(kind)
    embedder.texts.clear()
    say(db, job, reason="manual", forced=True)
    enqueue(kind, scan=False)
    wave = staged(kind)
    change(db, job, description=paragraphs("one"))
    write(kind, wave)
    assert entry(db, job, "status, forced") == ("pending", True)
    drain(kind, scan=False)
    assert len(embedder.texts) == 2, "the vector of before was taken for the text that came back"
    assert words(db, job) == ["one"]
    assert entries(db) == []


# --- lost plans, purged ledgers, forced requests


def test_a_lost_plan_is_not_taken_for_a_row_without_text(db: Db, kind: Kind):
    job = add_job(db, paragraphs("one"))
    drain(kind)
    change(db, job, description=paragraphs("two"))
    enqueue(kind)
    wave = staged(kind)
    db.execute("TRUNCATE embed_assets.wave_chunks")  # as an unlogged table is after a crash
    counts = write(kind, wave)
    assert (counts.indexed, counts.removed, counts.failed) == (0, 0, 0)
    assert words(db, job) == ["one"]
    assert entry(db, job, "status, attempts") == ("pending", 0)
    assert wave_row(db, wave, "outcome, lost") == ("written", 1)
    drain(kind, scan=False)
    assert words(db, job) == ["two"]


def test_only_the_rows_whose_plan_was_lost_go_back(db: Db, kind: Kind):
    lost, kept = add_jobs(db, 2)
    enqueue(kind)
    wave = staged(kind)
    db.execute("DELETE FROM embed_assets.wave_chunks WHERE source_id = %s", (str(lost),))
    assert write(kind, wave).indexed == 1
    assert stamps(db) == [str(kept)]
    assert entries(db, "source_id, status") == [(str(lost), "pending")]


def test_a_row_whose_paid_vector_was_purged_is_left_out_whole_and_never_written_short(db: Db, kind: Kind):
    old = add_job(db, paragraphs("one", "two"))
    drain(kind)
    change(db, old, description=paragraphs("one", "three", "four"))
    new = add_job(db)
    enqueue(kind)
    wave = staged(kind)
    db.execute(
        "DELETE FROM embed_assets.chunk_embeddings WHERE text_hash = "
        "(SELECT text_hash FROM embed_assets.wave_chunks WHERE source_id = %s AND chunk_index = 2)",
        (str(old),),
    )
    assert write(kind, wave).indexed == 1
    assert words(db, old) == ["one", "two"]
    assert stamps(db, "source_id, chunk_count") == [(str(old), 2), (str(new), 1)]
    assert entries(db, "source_id, status, attempts") == [(str(old), "pending", 0)]
    assert wave_row(db, wave, "outcome, indexed, lost") == ("written", 1, 1)
    assert drain(kind, scan=False).texts == 1
    assert words(db, old) == ["one", "three", "four"]


class Salted(HashEmbedder):
    """The same model after its weights were mended: other vectors for the same texts."""

    salt = ""

    def _answer(self, start: int, part: list[str]) -> Iterator[Any]:
        for result in super()._answer(start, part):
            if self.salt:
                result.vectors[:] = np.stack([vector_of(self.salt + text, self.dimensions) for text in part])
            yield result


@pytest.mark.ids("C-26")
@pytest.mark.usefixtures("jobs_table")
def test_a_forced_row_is_bought_anew_and_every_chunk_of_it_replaced(db: Db, make_kind: KindMaker):
    embedder = Salted()
    kind = make_kind(embedder=embedder)
    forced = add_job(db, paragraphs("one", "two"), title="T")
    other = add_job(db, paragraphs("one", "three"), title="T")
    drain(kind)
    before = chunks(db, other, "xmin::text, embedding::text")
    embedder.salt, embedder.texts = "mended", []
    say(db, forced, reason="manual", forced=True)
    assert drain(kind, scan=False).texts == 2
    assert [text[:20] for text in embedder.texts] == ["passage: T at Acme. "] * 2
    expected = [vector_of("mended" + text, 8) for text in embedder.texts]
    assert np.allclose(chunks(db, forced, "embedding::real[]"), expected, atol=1e-6)
    assert chunks(db, other, "xmin::text, embedding::text") == before


def test_a_forced_row_accepts_no_vector_that_was_staged_before_the_request(db: Db, kind: Kind, embedder: HashEmbedder):
    job = add_job(db)
    drain(kind)
    say(db, job, reason="manual", forced=True)
    enqueue(kind, scan=False)
    wave = staged(kind)
    assert len(embedder.texts) == 2
    db.execute("DELETE FROM embed_assets.chunk_embeddings WHERE staged_at > (SELECT requested_at FROM semantic_outbox)"
               .replace("FROM semantic", "FROM embed_assets.semantic").encode())  # fmt: skip
    before = chunks(db, job, "xmin::text")
    assert write(kind, wave).indexed == 0
    assert chunks(db, job, "xmin::text") == before
    assert entry(db, job, "status, forced, attempts") == ("pending", True, 0)


@pytest.mark.ids("A-69")
def test_a_forced_row_that_crashed_after_its_purchase_is_not_bought_a_third_time(
    db: Db, kind: Kind, embedder: HashEmbedder
):
    job = add_job(db)
    drain(kind)
    say(db, job, reason="manual", forced=True)
    enqueue(kind, scan=False)
    expire(db, staged(kind))
    assert drain(kind, scan=False).indexed == 1
    assert len(embedder.texts) == 2


# --- a wave that cannot be done whole


@pytest.fixture
def notes(db: Db, make_kind: KindMaker) -> Kind:
    """Notes behind a view that cannot read the body `bad`; the number of each note is its id."""
    db.execute("""
        CREATE TABLE notes (note_id int PRIMARY KEY, body text NOT NULL, version int NOT NULL DEFAULT 1);
        CREATE TABLE trouble (code text);
        INSERT INTO trouble VALUES ('22012');
        CREATE FUNCTION read(body text) RETURNS text STABLE LANGUAGE plpgsql AS $$
        BEGIN
            IF body = 'bad' THEN RAISE 'cannot be read' USING ERRCODE = (SELECT code FROM trouble); END IF;
            RETURN body;
        END $$;
        CREATE VIEW readable AS SELECT note_id, read(body) AS body, version FROM notes;
        INSERT INTO notes SELECT i, CASE i WHEN 4 THEN 'bad' ELSE 'text ' || i END FROM generate_series(1, 7) AS i;
    """)
    return make_kind(TableCorpus(kind="notes", table="readable", key="note_id", text=Plain("body"), revision="version"))


@pytest.mark.ids("A-23", "A-33", "C-19")
def test_a_row_that_cannot_be_loaded_is_found_and_charged_alone_and_the_others_are_written(db: Db, notes: Kind):
    counts = drain(notes, rows=100)
    assert (counts.indexed, counts.failed, counts.dead) == (6, 1, 0)
    assert stamps(db) == ["1", "2", "3", "5", "6", "7"]
    state = "status, attempts, error_class, error_code, revision_known"
    assert entry(db, 4, state) == ("retry_wait", 1, "row_rejected", "22012", False)
    assert "cannot be read" not in entry(db, 4, "error_message")
    assert value(db, "SELECT count(*) FROM embed_assets.claimed_waves WHERE outcome = 'written'") == 1


@pytest.mark.ids("A-26", "C-19")
def test_a_row_that_postgres_cannot_read_is_dead_at_once(db: Db, notes: Kind):
    db.execute("UPDATE trouble SET code = 'XX001'")
    counts = drain(notes, rows=100)
    assert (counts.indexed, counts.failed, counts.dead) == (6, 0, 1)
    assert entry(db, 4, "status, attempts, error_class, error_code") == ("dead", 1, "corrupt_row", "XX001")
    assert rows(db, "SELECT source_id FROM embed_assets.semantic_outbox_log WHERE outcome = 'dead'") == ["4"]


@pytest.mark.ids("A-24", "E08")
def test_a_text_that_fails_alone_costs_its_row_an_attempt_and_no_other(db: Db, kind: Kind, embedder: HashEmbedder):
    jobs = [add_job(db, paragraphs(word, "tail")) for word in ("one", "poison", "three")]
    embedder.reject = lambda text: AnswerContract("a vector of zeros", code="zero") if "poison" in text else None
    counts = drain(kind)
    assert (counts.indexed, counts.failed, counts.dead) == (2, 1, 0)
    assert entry(db, jobs[1], "status, attempts, error_class, error_code, error_message") == (
        ("retry_wait", 1, "contract", "zero", "a vector of zeros")
    )
    assert entry(db, jobs[1], "revision") == value(db, "SELECT content_hash FROM jobs WHERE id = %s", jobs[1])
    assert chunks(db, jobs[1]) == []
    assert stamps(db) == [str(jobs[0]), str(jobs[2])]
    embedder.reject = lambda text: None
    due_now(db)
    assert drain(kind).texts == 1  # the tail had been paid for
    assert words(db, jobs[1]) == ["poison", "tail"]


@pytest.mark.ids("A-25", "Q11")
def test_a_row_that_cannot_be_written_is_found_by_halves_and_charged_outside_the_aborted_transaction(
    db: Db, kind: Kind, embedder: HashEmbedder
):
    jobs = add_jobs(db, 7)
    drain(kind)
    before = chunks(db, jobs[2], "body, xmin::text")
    for job in jobs:
        change(db, job, title="changed")
    refuse(db, "job_semantic_chunks", "INSERT", f"this.id = {jobs[2]}")
    paid = len(embedder.texts)
    counts = drain(kind, rows=100)
    assert (counts.indexed, counts.failed, counts.dead) == (6, 1, 0)
    assert len(embedder.texts) == paid + 7
    assert entries(db, "source_id, status, attempts, failures, error_class, error_code") == [
        (str(jobs[2]), "retry_wait", 1, 1, "row_rejected", "P0001")
    ]
    assert chunks(db, jobs[2], "body, xmin::text") == before
    last = "SELECT claimed, indexed, failed, lost, outcome FROM embed_assets.claimed_waves ORDER BY wave_id DESC"
    assert value(db, last) == (7, 6, 1, 0, "written")
    accept(db, "job_semantic_chunks")
    due_now(db)
    assert drain(kind).texts == 0
    assert status(kind) == {"fresh": 7}


@pytest.mark.ids("A-33", "B-27")
def test_a_row_that_fails_waits_longer_each_time_and_is_dead_at_the_third(db: Db, kind: Kind, embedder: HashEmbedder):
    job = add_job(db)
    embedder.reject = lambda text: AnswerContract("no vector", code="none")
    for attempt, seconds in ((1, 5), (2, 10)):
        assert drain(kind).failed == 1
        assert entry(db, job, "status, attempts, failures, error_code") == ("retry_wait", attempt, attempt, "none")
        waits = entry(db, job, "extract(EPOCH FROM next_attempt_at - last_failed_at)::float8")
        assert 0.79 * seconds < waits < 1.21 * seconds
        assert drain(kind).claimed == 0
        due_now(db)
    assert drain(kind).dead == 1
    assert entry(db, job, "status, attempts, error_class") == ("dead", 3, "contract")
    assert value(db, "SELECT attempts, error_code FROM embed_assets.semantic_outbox_log") == (3, "none")
    assert drain(kind).claimed == 0
    assert status(kind) == {"dead": 1}


@pytest.mark.ids("A-34")
def test_what_failed_is_not_tried_again_in_the_same_drain_even_when_it_is_due(
    db: Db, kind: Kind, embedder: HashEmbedder
):
    poison = add_job(db, paragraphs("poison"))
    add_jobs(db, 5)
    tried: list[str] = []

    def reject(text: str) -> Exception | None:
        tried.append(text)
        return AnswerContract("no vector") if "poison" in text else None

    embedder.reject = reject
    counts = drain(kind, rows=1, report=lambda *_: due_now(db))
    assert (counts.indexed, counts.failed) == (5, 1)
    assert len([text for text in tried if "poison" in text]) == 1
    assert entry(db, poison, "attempts") == 1


@pytest.mark.ids("A-36", "B-29")
def test_a_row_is_counted_failed_or_dead_and_never_both(db: Db, kind: Kind, embedder: HashEmbedder):
    add_job(db)
    retried, dead = add_job(db, paragraphs("later")), add_job(db, paragraphs("never"))
    errors = {"later": AnswerContract("no vector"), "never": InputRejected("no such language")}
    embedder.reject = lambda text: next((error for word, error in errors.items() if word in text), None)
    enqueue(kind)
    wave = wave_of(kind)
    counts = pipeline.work(kind.ports, wave, Limits(), Stop())
    assert (counts.indexed, counts.failed, counts.dead) == (1, 1, 1)
    assert entries(db, "source_id, status, attempts") == [(str(retried), "retry_wait", 1), (str(dead), "dead", 1)]
    assert wave_row(db, wave, "claimed, indexed, failed, dead, lost") == (3, 1, 1, 1, 0)


def test_a_text_that_is_too_long_for_the_endpoint_is_chunked_smaller_and_no_other_row_is(
    db: Db, kind: Kind, embedder: HashEmbedder
):
    long, short = add_job(db, "<p>" + "word " * 390 + "</p>"), add_job(db, "<p>short</p>")
    embedder.reject = lambda text: InputTooLong("over 600") if len(text) > 600 else None
    assert drain(kind).indexed == 2
    bodies = chunks(db, long)
    assert max(map(len, bodies)) <= 600
    assert sum(body.count("word") for body in bodies) == 390
    assert chunks(db, short) == ["short"]
    assert stamps(db, "chunk_count") == [len(bodies), 1]


def test_a_text_that_stays_too_long_however_small_is_dead_at_once(db: Db, kind: Kind, embedder: HashEmbedder):
    job, good = add_job(db, paragraphs("long")), add_job(db, "<p>x</p>")
    embedder.reject = lambda text: InputTooLong("too long") if "long" in text else None
    counts = drain(kind)
    assert (counts.indexed, counts.dead) == (1, 1)
    assert entry(db, job, "status, error_class") == ("dead", "input_rejected")
    assert stamps(db) == [str(good)]


# --- work that ends early


@pytest.mark.ids("Q22")
def test_the_old_chunks_serve_until_the_new_ones_are_written(db: Db, kind: Kind, embedder: HashEmbedder):
    job = add_job(db, paragraphs("old", "older"))
    drain(kind)
    before = chunks(db, job, "xmin::text, body")
    change(db, job, description=paragraphs("new"))

    def fails(_: Sequence[str]) -> None:
        assert chunks(db, job, "xmin::text, body") == before
        raise AssertionError("the embedder broke")

    embedder.before = fails
    with pytest.raises(AssertionError, match="the embedder broke"):
        drain(kind)
    assert chunks(db, job, "xmin::text, body") == before
    found = search(kind.postgres, kind.bound, asking(kind, embedder), "old").hits
    assert [hit.source_id for hit in found] == [str(job)]
    expire(db, kind.outbox.waves_of("run")[0])
    embedder.before = lambda texts: None
    drain(kind)
    assert words(db, job) == ["new"]


@pytest.mark.ids("A-28", "A-31", "A-32")
@pytest.mark.usefixtures("jobs_table")
def test_a_wave_that_used_up_its_time_is_released_charging_nobody_and_marks_its_rows(
    db: Db,
    make_kind: KindMaker,
    embedder: HashEmbedder,
):
    kind = make_kind(call_timeout_seconds=0.3)
    add_jobs(db, 3)

    def slow(_: Sequence[str]) -> None:
        time.sleep(0.4)
        raise ConnectionError("the text of an error decides nothing")

    embedder.before = slow
    counts = drain(kind)
    assert embedder.requests == 1
    assert (counts.indexed, counts.failed, counts.dead, counts.texts) == (0, 0, 0, 0)
    assert entries(db, "status, attempts, crashes, timeouts") == [("pending", 0, 0, 1)] * 3
    assert value(db, "SELECT outcome, lost FROM embed_assets.claimed_waves") == ("released", 3)


@pytest.mark.ids("A-28")
@pytest.mark.usefixtures("jobs_table")
def test_a_wave_that_used_up_its_time_after_staging_something_marks_nobody_and_keeps_what_was_paid(
    db: Db,
    make_kind: KindMaker,
):
    embedder = HashEmbedder(request_items=1)
    kind = make_kind(embedder=embedder, call_timeout_seconds=0.5)
    add_jobs(db, 3)
    embedder.before = lambda texts: time.sleep(0.6) if embedder.requests == 2 else None
    assert drain(kind).indexed == 3
    assert len(embedder.texts) == len(set(embedder.texts)) == 3
    assert value(db, "SELECT sum(attempts) FROM embed_assets.semantic_outbox_log") == 0
    assert rows(db, "SELECT outcome, texts FROM embed_assets.claimed_waves ORDER BY wave_id") == [
        ("released", 1),
        ("written", 2),
    ]


@pytest.mark.ids("A-29", "A-31")
def test_a_cancelled_run_charges_nobody_and_gives_its_waves_back_whatever_the_backend_says(
    db: Db, kind: Kind, embedder: HashEmbedder
):
    add_jobs(db, 3)
    stop = Stop()

    def cancelled(_: Sequence[str]) -> None:
        stop.cancel()
        raise RuntimeError("socket closed")

    embedder.before = cancelled
    with pytest.raises(Cancelled):
        drain(kind, stop=stop)
    assert embedder.requests == 1
    assert entries(db, "status, attempts, crashes, timeouts") == [("pending", 0, 0, 0)] * 3
    assert value(db, "SELECT outcome FROM embed_assets.claimed_waves") == "released"
    embedder.before = lambda texts: None
    assert drain(kind).indexed == 3


@pytest.mark.ids("A-30")
def test_a_run_cancelled_while_a_guilty_row_is_looked_for_charges_nobody_and_keeps_what_was_written(
    db: Db, kind: Kind, monkeypatch: pytest.MonkeyPatch
):
    jobs = add_jobs(db, 4)
    refuse(db, "job_semantic_chunks", "INSERT", f"this.id = {jobs[3]}")
    stop, real = Stop(), kind.chunks.write

    def write_half(wave: Wave, **options: Any) -> Any:
        counts = real(wave, **options)
        stop.cancel()
        return counts

    monkeypatch.setattr(kind.chunks, "write", write_half)
    with pytest.raises(Cancelled):
        drain(kind, stop=stop)
    assert stamps(db) == [str(jobs[0]), str(jobs[1])]
    assert entries(db, "source_id, status, attempts") == [(str(job), "pending", 0) for job in jobs[2:]]
    assert value(db, "SELECT outcome, indexed, lost FROM embed_assets.claimed_waves") == ("released", 2, 2)


def test_an_interrupt_gives_the_wave_back(db: Db, kind: Kind, embedder: HashEmbedder):
    add_job(db)

    def interrupted(_: Sequence[str]) -> None:
        raise KeyboardInterrupt

    embedder.before = interrupted
    with pytest.raises(KeyboardInterrupt):
        drain(kind)
    assert entries(db, "status, attempts, crashes") == [("pending", 0, 0)]


@pytest.mark.ids("E14")
@pytest.mark.parametrize(
    ("error_class", "state", "seconds"),
    [
        (ErrorClass.RATE_LIMITED, "cooling", 77),
        (ErrorClass.UNAVAILABLE, "cooling", 77),
        (ErrorClass.WARMING, "warming", 77),
        (ErrorClass.REFUSED, "refused", 600),
        (ErrorClass.CONTRACT, "refused", 600),
    ],
)
def test_trouble_of_the_endpoint_rests_the_endpoint_and_charges_no_row(
    db: Db, kind: Kind, embedder: HashEmbedder, error_class: ErrorClass, state: str, seconds: int
):
    add_jobs(db, 2)

    def troubled(_: Sequence[str]) -> None:
        raise EndpointTrouble("not now", error_class=error_class, code="http_429", retry_after=77)

    embedder.before = troubled
    with pytest.raises(EndpointTrouble):
        drain(kind)
    assert entries(db, "status, attempts, crashes, timeouts") == [("pending", 0, 0, 0)] * 2
    assert value(db, "SELECT outcome FROM embed_assets.claimed_waves") == "released"
    rest = value(
        db,
        "SELECT state, reason, extract(EPOCH FROM until - clock_timestamp())::float8 "
        "FROM embed_assets.embedding_endpoints WHERE endpoint = %s",
        kind.models[0].endpoint.key,
    )
    assert rest[:2] == (state, "http_429: not now")
    assert seconds - 20 < rest[2] <= seconds
    embedder.before = lambda texts: None
    assert drain(kind).indexed == 2
    assert kind.resting() is None


@pytest.mark.usefixtures("jobs_table")
def test_what_was_paid_before_the_endpoint_failed_is_not_paid_again(
    db: Db,
    make_kind: KindMaker,
):
    embedder = HashEmbedder(request_items=1)
    kind = make_kind(embedder=embedder)
    add_jobs(db, 3)

    def troubled(_: Sequence[str]) -> None:
        if embedder.requests == 3:
            raise EndpointTrouble("gone", error_class=ErrorClass.UNAVAILABLE)

    embedder.before = troubled
    with pytest.raises(EndpointTrouble):
        drain(kind)
    assert drain(kind).indexed == 3
    assert len(embedder.texts) == len(set(embedder.texts)) == 3


@pytest.mark.ids("B-30", "Q14")
def test_a_defect_is_filed_as_no_failure_its_wave_lapses_and_the_third_crash_is_the_last(
    db: Db, kind: Kind, embedder: HashEmbedder
):
    job = add_job(db)

    def broken(_: Sequence[str]) -> None:
        raise KeyError("a bug")

    embedder.before = broken
    for crashes in (0, 1, 2):
        with pytest.raises(KeyError):
            drain(kind)
        assert entry(db, job, "status, attempts, crashes, failures") == ("leased", 0, crashes, crashes)
        kind.keeper.beat()  # nobody renews it any more
        expire(db, kind.outbox.waves_of("run")[0])
    assert claim(kind) is None
    assert entry(db, job, "status, attempts, crashes") == ("dead", 0, 3)
    assert entry(db, job, "error_class") == "LEASE_ATTEMPTS_EXHAUSTED"


# --- the database's own trouble


def test_a_commit_whose_answer_was_lost_counts_as_done_and_is_not_done_twice(
    db: Db, kind: Kind, mixed: Wave, embedder: HashEmbedder
):
    paid, losses = len(embedder.texts), iter([True])

    def lose() -> None:
        if next(losses, False):
            raise psycopg.OperationalError("server closed the connection unexpectedly")

    with intercepted(kind, lambda cursor: cursor, after=lose):
        counts = write(kind, mixed)
    assert (counts.indexed, counts.removed, counts.gone) == (2, 1, 1)
    assert entries(db) == []
    assert wave_row(db, mixed, "outcome, indexed, removed, gone, lost") == ("written", 2, 1, 1, 0)
    per_row = "SELECT count(*) FROM embed_assets.semantic_outbox_log WHERE wave_id = %s GROUP BY source_id"
    assert rows(db, per_row, mixed.wave_id) == [1, 1, 1, 1]
    assert len(embedder.texts) == paid


def test_the_lost_answer_of_the_last_commit_of_a_halved_wave_counts_nothing_twice(db: Db, kind: Kind):
    jobs = add_jobs(db, 4)
    refuse(db, "job_semantic_chunks", "INSERT", f"this.id = {jobs[0]}")
    enqueue(kind)
    wave = staged(kind)
    commits = iter([False] * 3 + [True])  # the failure, its neighbour, the other half, and the closing one

    def lose() -> None:
        if next(commits, False):
            assert wave_row(db, wave, "outcome") == "written"
            raise psycopg.OperationalError("server closed the connection unexpectedly")

    with intercepted(kind, lambda cursor: cursor, after=lose):
        counts = write(kind, wave)
    assert next(commits, None) is None
    assert (counts.indexed, counts.failed) == (3, 1)
    assert wave_row(db, wave, "outcome, indexed, failed, lost") == ("written", 3, 1, 0)


def test_a_failure_whose_answer_was_lost_is_charged_and_counted_once(db: Db, kind: Kind):
    for_good, once, _ = add_jobs(db, 3)
    enqueue(kind)
    wave, losses = staged(kind), iter([True])

    def lose() -> None:
        if next(losses, False):
            raise psycopg.OperationalError("server closed the connection unexpectedly")

    failures = [Failure(str(for_good), InputRejected("never")), Failure(str(once), AnswerContract("once"))]
    with intercepted(kind, lambda cursor: cursor, after=lose):
        counts = kind.outbox.fail(wave, failures)
    assert (counts.dead, counts.failed) == (1, 1)
    assert wave_row(db, wave, "dead, failed") == (1, 1)
    assert entries(db, "attempts, status", "attempts > 0") == [(1, "dead"), (1, "retry_wait")]


def test_a_commit_of_somebody_else_under_my_number_is_not_mine(db: Db, kind: Kind):
    add_job(db)
    enqueue(kind)
    wave = staged(kind)
    db.execute(
        "UPDATE embed_assets.claimed_waves SET token = gen_random_uuid(), closed_at = now(), outcome = 'written'"
    )
    with pytest.raises(LeaseLost):
        kind.chunks.write(wave)
    assert stamps(db) == []


def test_a_deadlock_is_tried_again_and_written_once(db: Db, kind: Kind, mixed: Wave):
    with intercepted(kind, FailingAt(9, psycopg.errors.DeadlockDetected("deadlock detected"))):
        counts = write(kind, mixed)
    assert (counts.indexed, counts.removed, counts.gone) == (2, 1, 1)
    assert entries(db) == []


def test_a_database_that_refuses_again_and_again_charges_nobody_and_the_wave_is_given_back(
    db: Db, kind: Kind, monkeypatch: pytest.MonkeyPatch
):
    add_jobs(db, 2)
    enqueue(kind)

    def troubled(*_: Any, **__: Any) -> Any:
        raise DatabaseTrouble("a conflict again and again")

    monkeypatch.setattr(kind.chunks, "write", troubled)
    wave = wave_of(kind)
    with pytest.raises(DatabaseTrouble):
        pipeline.work(kind.ports, wave, Limits(), Stop())
    assert entries(db, "status, attempts, crashes") == [("pending", 0, 0)] * 2
    assert wave_row(db, wave, "outcome") == "released"


@pytest.mark.parametrize("lost", [1, 2, 3, 4, 5, 6])
def test_a_connection_that_is_lost_between_two_steps_is_made_again_and_nobody_pays(db: Db, kind: Kind, lost: int):
    add_job(db)
    enqueue(kind)
    wave = wave_of(kind)
    steps = iter(range(1, 100))

    def wrap(cursor: Any) -> Any:
        if next(steps) == lost:
            db.execute("SELECT pg_terminate_backend(%s)", (cursor.connection.info.backend_pid,))
        return cursor

    with intercepted(kind, wrap):
        counts = pipeline.work(kind.ports, wave, Limits(), Stop())
    assert next(steps) > lost
    assert (counts.indexed, counts.lost) == (1, 0)
    assert status(kind) == {"fresh": 1}
    assert value(db, "SELECT crashes FROM embed_assets.semantic_outbox") is None


@pytest.mark.ids("C-10")
def test_a_wave_that_is_no_longer_mine_writes_nothing(db: Db, kind: Kind):
    add_job(db)
    enqueue(kind)
    wave = staged(kind)
    expire(db, wave)
    before = everything(db)
    with pytest.raises(LeaseLost):
        write(kind, wave)
    assert everything(db) == before


@pytest.mark.ids("A-44")
def test_a_legacy_vector_column_is_nulled_on_clearing_and_else_left_alone(
    db: Db, jobs_table: None, make_kind: KindMaker
) -> None:
    db.execute("ALTER TABLE jobs ADD COLUMN semantic_embedding text")
    kind = make_kind()
    open_row, closed, held = add_jobs(db, 3, semantic_embedding="[1,2]")
    drain(kind)
    db.execute("UPDATE jobs SET closed_at = now() WHERE id = ANY(%s)", ([closed, held],))
    with connect(kind.postgres.url) as holder:
        holder.execute("SELECT FROM jobs WHERE id = %s FOR UPDATE", (held,))
        assert drain(kind).removed == 2
    kept = rows(db, "SELECT id FROM jobs WHERE semantic_embedding IS NOT NULL ORDER BY id")
    assert kept == [open_row, held]
