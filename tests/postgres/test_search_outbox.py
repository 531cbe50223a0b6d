"""The feed for an external index: who is told what, handed out once, and no change lost."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from fakes import HashEmbedder
from postgres.support import Db, add_job, add_jobs, connect, drain, enqueue, rows, staged, value

from embed_assets import pipeline
from embed_assets.corpora.jobs import jobs as jobs_corpus
from embed_assets.resources.assembly import Kind
from embed_assets.stop import Stop

COLUMNS = "id, chunk_index, model_id, text_hash, body, heading_path, embedding"
PARAGRAPH = "<p>{} " + "filler " * 280 + "</p>"


def told(db: Db) -> list[tuple[str, str]]:
    return rows(db, "SELECT source_id, op FROM embed_assets.search_outbox ORDER BY id")


def forget(db: Db) -> None:
    db.execute("TRUNCATE embed_assets.search_outbox")


def changes(db: Db, most: int = 100, kind: str = "jobs") -> list[Any]:
    return rows(db, "SELECT source_id, op, ids FROM embed_assets.search_changes(%s, %s)", kind, most)


def acknowledge(db: Db, found: list[Any]) -> int:
    ids = [number for _, _, numbers in found for number in numbers]
    return int(value(db, "SELECT embed_assets.acknowledge_search_changes(%s)", ids))


def say(db: Db, source_id: str, op: str = "upsert", kind: str = "jobs") -> None:
    db.execute(
        "INSERT INTO embed_assets.search_outbox (kind, source_id, op) VALUES (%s, %s, %s)", (kind, source_id, op)
    )


def put(db: Db, table: str, jobs: list[int], model: int, *, start: int = 100) -> None:
    """Two more chunks for each job, in one statement of some other writer."""
    db.execute(
        f"INSERT INTO embed_assets.{table} ({COLUMNS}) SELECT j, %s + n, %s, '\\x00', 'body', NULL, "
        "'[1,0,0,0,0,0,0,0]' FROM unnest(%s::bigint[]) AS j, generate_series(1, 2) AS n",
        (start, model, jobs),
    )


WRITERS = ("job_semantic_chunks", "job_semantic_chunks_m{}")


@pytest.mark.ids("A-46")
@pytest.mark.parametrize("table", WRITERS, ids=["parent", "partition"])
def test_each_row_is_told_once_per_statement_whichever_table_the_writer_names(kind: Kind, db: Db, table: str) -> None:
    first, second = add_jobs(db, 2)
    gated = add_job(db, is_tech=None)
    name = table.format(kind.model_id)
    put(db, name, [first, second, gated], kind.model_id)
    assert told(db) == [(str(first), "upsert"), (str(second), "upsert")]
    forget(db)
    db.execute(f"UPDATE embed_assets.{name} SET body = 'other' WHERE id <> %s", (second,))
    assert told(db) == [(str(first), "upsert")]
    forget(db)
    with db.cursor().copy(f"COPY embed_assets.{name} ({COLUMNS}) FROM STDIN") as copy:
        for index in (7, 8):
            copy.write_row((second, index, kind.model_id, "\\x00", "body", None, "[1,0,0,0,0,0,0,0]"))
    assert told(db) == [(str(second), "upsert")]


@pytest.mark.ids("A-46")
def test_a_wave_tells_each_row_that_it_wrote_once(kind: Kind, db: Db) -> None:
    long, short = add_job(db, PARAGRAPH.format("a") + PARAGRAPH.format("b")), add_job(db)
    drain(kind)
    assert told(db) == [(str(long), "upsert"), (str(short), "upsert")]
    forget(db)
    db.execute("UPDATE jobs SET description = '<p>edited</p>' WHERE id = %s", (short,))
    drain(kind)
    assert told(db) == [(str(short), "upsert")]


def test_a_model_that_is_not_active_tells_nothing(kind: Kind, make_kind: Any, db: Db) -> None:
    add_jobs(db, 2)
    drain(kind)
    forget(db)
    drain(make_kind(jobs_corpus, embedder=HashEmbedder(16)))
    assert told(db) == []


@pytest.mark.ids("A-47")
def test_deleted_chunks_tell_nothing_and_a_row_that_only_became_shorter_is_told_by_its_write(
    kind: Kind, db: Db
) -> None:
    job = add_job(db, PARAGRAPH.format("a") + PARAGRAPH.format("b"))
    drain(kind)
    forget(db)
    db.execute("DELETE FROM embed_assets.job_semantic_chunks WHERE chunk_index > 0")
    assert told(db) == []
    db.execute("UPDATE jobs SET description = %s WHERE id = %s", (PARAGRAPH.format("a"), job))
    drain(kind)
    assert told(db) == [(str(job), "upsert")]


def test_a_row_that_was_closed_while_it_was_written_and_opened_again_is_told_all_the_same(kind: Kind, db: Db) -> None:
    job = add_job(db)
    enqueue(kind)
    wave = staged(kind)
    db.execute("UPDATE jobs SET closed_at = now() WHERE id = %s", (job,))
    pipeline.write(kind.ports, wave, Stop())
    db.execute("UPDATE jobs SET closed_at = NULL WHERE id = %s", (job,))
    assert drain(kind).superseded == 1
    assert told(db) == [(str(job), "upsert")]


def test_a_cleared_row_s_newest_change_is_its_removal(kind: Kind, db: Db) -> None:
    job, stays = add_jobs(db, 2)
    drain(kind)
    db.execute("DELETE FROM jobs WHERE id = %s", (job,))
    drain(kind)
    assert [(source_id, op) for source_id, op, _ in changes(db)] == [(str(job), "remove"), (str(stays), "upsert")]


def test_the_newest_change_of_each_row_is_handed_out_once_and_until_it_is_acknowledged(kind: Kind, db: Db) -> None:
    for source_id, op in [("1", "upsert"), ("2", "remove"), ("1", "remove"), ("3", "upsert"), ("2", "upsert")]:
        say(db, source_id, op)
    say(db, "9", kind="notes")
    found = changes(db)
    assert [(source_id, op, len(ids)) for source_id, op, ids in found] == [
        ("1", "remove", 2),
        ("2", "upsert", 2),
        ("3", "upsert", 1),
    ]
    assert changes(db) == found
    assert changes(db, 2) == found[:2]
    assert acknowledge(db, found) == 5
    assert changes(db) == []
    assert acknowledge(db, found) == 0
    assert len(changes(db, kind="notes")) == 1


@pytest.mark.ids("P18")
def test_a_change_of_a_lower_id_that_commits_later_is_handed_out(kind: Kind, db: Db, database_url: str) -> None:
    with connect(database_url) as late:
        say(late, "1")
        say(db, "2")
        found = changes(db)
        assert [source_id for source_id, _, _ in found] == ["2"]
        late.commit()
    assert acknowledge(db, found) == 1
    assert [source_id for source_id, _, _ in changes(db)] == ["1"]


def test_a_change_that_comes_while_the_consumer_works_is_handed_out_next(
    kind: Kind, other: Kind, db: Db, database_url: str
) -> None:
    job = add_job(db, "<p>first</p>")
    drain(kind)
    with connect(database_url) as consumer:
        found = changes(consumer)
        consumer.commit()
        db.execute("UPDATE jobs SET description = '<p>second</p>' WHERE id = %s", (job,))
        drain(other)
        assert acknowledge(consumer, found) == 1
        consumer.commit()
        assert [(source_id, op) for source_id, op, _ in changes(consumer)] == [(str(job), "upsert")]


def test_a_switch_tells_every_row_that_the_new_model_holds_once_more(kind: Kind, make_kind: Any, db: Db) -> None:
    jobs = add_jobs(db, 2)
    add_job(db, is_tech=None)
    drain(kind)
    beside = make_kind(embedder=HashEmbedder(12, identity="wide"), active=kind.models[0].embedder)
    drain(beside)
    forget(db)
    db.execute("UPDATE jobs SET closed_at = now() WHERE id = %s", (jobs[0],))
    beside.life.switch()
    assert told(db) == [(str(job), "upsert") for job in jobs], "who is closed for a moment is told like the others"


def test_a_row_that_only_the_model_of_before_has_leaves_an_external_index_with_the_switch(
    kind: Kind, make_kind: Any, db: Db
) -> None:
    stays = add_job(db)
    drain(kind)
    beside = make_kind(embedder=HashEmbedder(12, identity="wide"), active=kind.models[0].embedder)
    drain(beside)
    closed = add_job(db)
    drain(kind)
    db.execute("UPDATE jobs SET closed_at = now() WHERE id = %s", (closed,))
    beside.life.switch()
    assert [(source_id, op) for source_id, op, _ in changes(db)] == [(str(stays), "upsert"), (str(closed), "remove")]
    forget(db)
    beside.life.rollback()
    drain(make_kind())
    assert [(source_id, op) for source_id, op, _ in changes(db)] == [(str(stays), "upsert"), (str(closed), "remove")]


def test_the_triggers_follow_the_declaration_and_are_made_once(kind: Kind, make_kind: Any, db: Db) -> None:
    before = value(db, "SELECT xmin::text FROM pg_proc WHERE proname = 'tell_search_jobs'")
    make_kind()
    assert value(db, "SELECT xmin::text FROM pg_proc WHERE proname = 'tell_search_jobs'") == before
    make_kind(replace(jobs_corpus, indexable="title NOT LIKE '%secret%'"))
    hidden, shown = add_job(db, title="a secret one"), add_job(db, is_tech=None)
    put(db, "job_semantic_chunks", [hidden, shown], kind.model_id)
    assert told(db) == [(str(shown), "upsert")]
