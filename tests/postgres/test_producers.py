"""The user's transactions: they never wait for ours and are never aborted by ours, whatever ours is doing.

A producer gives up after 200 ms of waiting for any lock, so that a wait is a failure.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import psycopg
import pytest
from postgres.support import (
    Db,
    Gate,
    add_jobs,
    background,
    chunks,
    connect,
    drain,
    enqueue,
    entries,
    fold,
    gate,
    say,
    staged,
    status,
    until_blocked,
    value,
)
from psycopg import IsolationLevel

from embed_assets.producer import announce
from embed_assets.resources.assembly import Kind

FEED = "SELECT count(*) FROM embed_assets.source_changes"
LEVELS = [IsolationLevel.READ_COMMITTED, IsolationLevel.REPEATABLE_READ, IsolationLevel.SERIALIZABLE]
ACTIONS = {
    "edit": "UPDATE jobs SET description = 'edited' WHERE id = %(job)s",
    "close": "UPDATE jobs SET closed_at = now() WHERE id = %(job)s",
    "delete": "DELETE FROM jobs WHERE id = %(job)s",
    "change of key": "UPDATE jobs SET id = id + 1000 WHERE id = %(job)s",
    "request": "SELECT embed_assets.enqueue('jobs', ARRAY[%(job)s::bigint])",
    "forced request": "SELECT embed_assets.enqueue('jobs', ARRAY[%(job)s::bigint], 'manual', true)",
    "lock": "SELECT FROM jobs WHERE id = %(job)s FOR UPDATE",
}
OURS = ["write", "scan", "fold"]


@pytest.fixture
def jobs(kind: Kind, db: Db) -> list[int]:
    """One row for each thing that a producer may do, and a last one for us; keys that can be changed."""
    made = add_jobs(db, len(ACTIONS) + 1)
    db.execute("ALTER TABLE jobs ALTER COLUMN id DROP IDENTITY")
    assert kind.limits.rows < len(made)
    return made


@contextmanager
def held_open(kind: Kind, db: Db, url: str, ours: str, jobs: list[int]) -> Iterator[Gate]:
    """A transaction of ours that has the rows in hand and does not end before its gate is opened, or the block ends."""
    if ours == "write":
        enqueue(kind)
        wave = staged(kind)
    if ours == "fold":
        say(db, *jobs)
    table = "semantic_outbox_log" if ours == "write" else "semantic_outbox"
    work = {"write": lambda: kind.chunks.write(wave), "scan": lambda: enqueue(kind), "fold": lambda: fold(kind)}
    with gate(url, table) as held, background(work[ours]) as done:
        held.wait()
        yield held
        assert not done.done() or held.opened
        held.open()
        done.result(timeout=20)


def act(url: str, level: IsolationLevel, statement: str, job: int) -> None:
    with connect(url, lock_timeout="200ms") as producer:
        producer.isolation_level = level
        producer.execute("SELECT count(*) FROM jobs")
        producer.execute(statement.encode(), {"job": job})


@pytest.mark.ids("A-16")
@pytest.mark.parametrize("level", LEVELS, ids=lambda level: level.name.lower())
@pytest.mark.parametrize("ours", OURS)
def test_producer_never_waits_for_an_open_transaction_of_ours(
    kind: Kind, db: Db, database_url: str, jobs: list[int], ours: str, level: IsolationLevel
) -> None:
    with held_open(kind, db, database_url, ours, jobs):
        for job, statement in zip(jobs, ACTIONS.values(), strict=False):
            act(database_url, level, statement, job)
    drain(kind)
    edited, closed, deleted, moved, *_ = jobs
    assert chunks(db, edited) == ["edited"]
    assert chunks(db, closed) == chunks(db, deleted) == chunks(db, moved) == []
    assert len(chunks(db, moved + 1000)) == 1
    assert entries(db) == []
    assert status(kind) == {"fresh": len(jobs) - 2, "excluded": 1}


@pytest.mark.parametrize("level", LEVELS, ids=lambda level: level.name.lower())
@pytest.mark.parametrize("ours", OURS)
def test_producer_is_not_aborted_by_ours_that_committed_after_it_began(
    kind: Kind, db: Db, database_url: str, jobs: list[int], ours: str, level: IsolationLevel
) -> None:
    with connect(database_url, lock_timeout="200ms") as producer:
        producer.isolation_level = level
        producer.execute("SELECT count(*) FROM jobs")
        with held_open(kind, db, database_url, ours, jobs):
            producer.execute(ACTIONS["edit"].encode(), {"job": jobs[0]})
            producer.execute(ACTIONS["request"].encode(), {"job": jobs[0]})
        for job, statement in zip(jobs[1:], list(ACTIONS.values())[1:], strict=False):
            producer.execute(statement.encode(), {"job": job})
    drain(kind)
    assert chunks(db, jobs[0]) == ["edited"]
    assert status(kind) == {"fresh": len(jobs) - 2, "excluded": 1}


@pytest.mark.parametrize("statement", ["TRUNCATE jobs", "ALTER TABLE jobs ADD COLUMN extra integer"])
@pytest.mark.parametrize("ours", OURS)
def test_what_needs_the_whole_table_waits_for_one_transaction_of_ours_and_no_longer(
    kind: Kind, db: Db, database_url: str, jobs: list[int], ours: str, statement: str
) -> None:
    with (
        held_open(kind, db, database_url, ours, jobs) as held,
        connect(database_url, lock_timeout="20s") as producer,
        background(lambda: producer.execute(statement.encode())) as done,
    ):
        until_blocked(db, by=f"{statement}%")
        held.open()
        done.result(timeout=10)
        say(producer, *jobs)
        producer.commit()
    drain(kind)
    assert entries(db) == []
    left = value(db, "SELECT count(*) FROM jobs")
    assert status(kind) == ({"fresh": left} if left else {})


@pytest.mark.ids("Q20")
def test_truncate_between_a_fold_and_the_write_it_waits_for_deadlocks_with_none(
    kind: Kind, other: Kind, db: Db, database_url: str, jobs: list[int]
) -> None:
    enqueue(kind)
    wave = staged(kind)
    say(db, *jobs)
    with (
        connect(database_url, lock_timeout="20s") as producer,
        gate(database_url, "semantic_stamps") as held,
        background(lambda: kind.chunks.write(wave)) as write,
    ):
        held.wait()
        with background(lambda: fold(other)) as folding:
            until_blocked(db, by="%DELETE FROM embed_assets.source_changes%")
            with background(lambda: producer.execute("TRUNCATE jobs")) as truncate:
                until_blocked(db, by="TRUNCATE%")
                held.open()
                assert write.result(timeout=10).indexed == len(jobs)
                assert folding.result(timeout=10).folded == len(jobs)
                truncate.result(timeout=10)
                producer.commit()
    assert drain(kind).gone == len(jobs)
    assert status(kind) == {}


# In a producer's own code


def edit_first(producer: Db) -> None:
    producer.execute("UPDATE jobs SET description = 'edited' WHERE id = (SELECT min(id) FROM jobs)")


@pytest.mark.ids("C-47")
def test_an_announcement_is_part_of_its_producer_s_transaction(kind: Kind, db: Db, database_url: str) -> None:
    job = add_jobs(db, 1)[0]
    with psycopg.connect(database_url) as producer:
        assert announce(producer, "jobs", [job], forced=True, scope="acme") == 1
        assert value(db, FEED) == 0
        edit_first(producer)
        producer.rollback()
        assert value(db, FEED) == 0
        assert announce(producer, "jobs", [job], forced=True, scope="acme") == 1
    assert value(db, "SELECT source_id, forced, scope, reason FROM embed_assets.source_changes") == (
        str(job),
        True,
        "acme",
        "write",
    )


@pytest.mark.ids("C-47")
@pytest.mark.parametrize("autocommit", [True, False])
def test_an_error_of_the_queue_is_logged_and_spares_the_producer_s_change(
    kind: Kind, db: Db, database_url: str, caplog: pytest.LogCaptureFixture, autocommit: bool
) -> None:
    job = add_jobs(db, 1)[0]
    db.execute("ALTER TABLE embed_assets.source_changes RENAME TO elsewhere")
    with psycopg.connect(database_url, autocommit=autocommit) as producer:
        edit_first(producer)
        assert announce(producer, "jobs", [job]) == 0
    assert value(db, "SELECT description FROM jobs") == "edited"
    assert "could not be announced (42P01)" in caplog.text


@pytest.mark.ids("C-47")
def test_without_a_connection_or_ids_nothing_is_announced(kind: Kind, db: Db) -> None:
    add_jobs(db, 1)
    assert [announce(None, "jobs", [1]), announce(db, "jobs", []), announce(db, "jobs", [None])] == [0, 0, 0]
    assert value(db, FEED) == 0
