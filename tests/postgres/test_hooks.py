"""What of the user's own happens with rows that are written, cleared or done."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import psycopg
import pytest
from postgres.conftest import KindMaker
from postgres.support import (
    Db,
    add_job,
    add_jobs,
    chunks,
    drain,
    enqueue,
    entries,
    entry,
    fold,
    rows,
    say,
    staged,
    stamps,
    value,
    wave_row,
)

from embed_assets.corpora.jobs import jobs as jobs_corpus
from embed_assets.corpus import Hooks
from embed_assets.resources.assembly import Kind

Hooked = Callable[..., Kind]


@pytest.fixture
def hooked(jobs_table: None, make_kind: KindMaker) -> Hooked:
    """The jobs corpus with hooks."""
    return lambda **hooks: make_kind(replace(jobs_corpus, hooks=Hooks(**hooks)))


def note(cursor: psycopg.Cursor[Any], ids: list[str]) -> None:
    for source_id in ids:
        cursor.execute("INSERT INTO notes VALUES (%s)", (source_id,))


def texts(jobs: list[int]) -> list[str]:
    return sorted(map(str, jobs))


@pytest.mark.ids("C-37")
def test_success_is_told_after_the_commit_and_only_of_rows_that_are_done(hooked: Hooked, db: Db) -> None:
    told: list[list[str]] = []
    kind = hooked(on_succeeded=lambda ids: told.append([ids, stamps(db), entries(db, "source_id")]))
    done, again, cleared = add_jobs(db, 3)
    drain(kind)
    assert [ids for ids, _, _ in told] == [texts([done, again, cleared])]
    told.clear()
    db.execute("UPDATE jobs SET description = 'another text'")
    db.execute("DELETE FROM jobs WHERE id = %s", (cleared,))
    enqueue(kind)
    wave = staged(kind)
    say(db, again)
    fold(kind)
    assert kind.chunks.write(wave).indexed == 2
    assert told == [[[str(done)], texts([done, again]), [str(again)]]]


@pytest.mark.ids("C-37")
def test_success_is_not_told_of_a_write_that_failed_and_once_of_one_in_parts(hooked: Hooked, db: Db) -> None:
    told: list[list[str]] = []
    kind = hooked(on_succeeded=told.append)
    jobs = add_jobs(db, 3)
    enqueue(kind)
    wave = staged(kind)
    db.execute("ALTER TABLE embed_assets.semantic_stamps ADD CONSTRAINT refused CHECK (FALSE) NOT VALID")
    with pytest.raises(Exception, match="refuses"):
        kind.chunks.write(wave)
    assert told == []
    db.execute("ALTER TABLE embed_assets.semantic_stamps DROP CONSTRAINT refused")
    kind.chunks.write(wave, ids=[str(jobs[0])], close=False)
    assert told == []
    kind.chunks.write(wave, ids=texts(jobs[1:]), close=False)
    kind.chunks.write(wave, ids=[])
    assert told == [texts(jobs)]


@pytest.mark.ids("C-37")
def test_what_the_hook_after_success_raises_changes_nothing(
    hooked: Hooked, db: Db, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(ids: Any) -> None:
        raise RuntimeError("the webhook is away")

    add_jobs(db, 2)
    counts = drain(hooked(on_succeeded=fails))
    assert (counts.indexed, entries(db)) == (2, [])
    assert "on_succeeded failed" in caplog.text


def test_hooks_of_the_write_are_part_of_its_transaction(hooked: Hooked, db: Db) -> None:
    db.execute("CREATE TABLE notes (id text PRIMARY KEY)")
    cleared: list[list[str]] = []
    kind = hooked(after_write=note, after_clear=lambda cursor, ids: cleared.append(list(ids)))
    jobs = add_jobs(db, 2)
    drain(kind)
    assert rows(db, "SELECT id FROM notes ORDER BY 1") == texts(jobs)
    assert value(db, "SELECT count(DISTINCT xmin::text) FROM notes") == 1
    db.execute("UPDATE jobs SET closed_at = now() WHERE id = %s", (jobs[0],))
    db.execute("DELETE FROM jobs WHERE id = %s", (jobs[1],))
    drain(kind)
    assert cleared == [texts(jobs)]


def test_a_row_that_a_hook_s_statement_refuses_fails_alone(hooked: Hooked, db: Db) -> None:
    guilty, *innocent = add_jobs(db, 4)
    db.execute(f"CREATE TABLE notes (id text PRIMARY KEY CHECK (id <> '{guilty}'))")
    counts = drain(hooked(after_write=note))
    assert (counts.indexed, counts.failed) == (3, 1)
    assert entry(db, guilty, "status, error_class") == ("retry_wait", "row_rejected")
    assert rows(db, "SELECT id FROM notes ORDER BY 1") == texts(innocent) == stamps(db)


def test_any_other_error_of_a_hook_is_a_defect_and_nothing_is_written(hooked: Hooked, db: Db) -> None:
    def broken(cursor: Any, ids: Any) -> None:
        raise KeyError("a defect")

    job = add_job(db)
    kind = hooked(after_write=broken)
    with pytest.raises(KeyError):
        drain(kind)
    assert (entry(db, job, "status, attempts"), stamps(db), chunks(db, job)) == (("leased", 0), [], [])
    wave = kind.outbox.waves_of("run")[0]
    assert wave_row(db, wave, "closed_at") is None
