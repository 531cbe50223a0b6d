"""What a monitor reads: numbers of the queue, and no word of whose rows they are."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
from postgres.conftest import KindMaker
from postgres.support import Db, add_jobs, drain, enqueue, expire, rows, wave_of
from psycopg.rows import dict_row

from embed_assets.corpora.jobs import jobs as jobs_corpus
from embed_assets.errors import AnswerContract, InputRejected
from embed_assets.models import Failure
from embed_assets.resources.assembly import Kind
from embed_assets.resources.metrics import prometheus

LABELS = {"kind", "model", "error_code", "feed", "endpoint", "state"}


@pytest.fixture
def kind(jobs_table: None, make_kind: KindMaker) -> Kind:
    return make_kind(replace(jobs_corpus, scope="self.company_slug"))


def metrics(db: Db, view: str) -> list[dict[str, Any]]:
    with db.cursor(row_factory=dict_row) as cursor:
        return cursor.execute(f"SELECT * FROM embed_assets.{view}").fetchall()


@pytest.mark.ids("B-45")
def test_an_idle_kind_has_its_numbers_too(kind: Kind, db: Db) -> None:
    (queue,) = metrics(db, "queue_metrics")
    assert (queue["kind"], queue["model"], queue["due"], queue["oldest_due_seconds"]) == (
        "jobs",
        kind.identity,
        0,
        None,
    )
    (work,) = metrics(db, "work_metrics")
    assert (work["indexed"], work["waves"], work["searchable_p50_seconds"]) == (0, 0, None)


@pytest.mark.ids("B-45")
def test_the_queue_is_counted_by_state_and_the_oldest_that_is_due_has_its_age(kind: Kind, db: Db) -> None:
    jobs = add_jobs(db, 6)
    enqueue(kind)
    failed = wave_of(kind, 3)
    errors = [InputRejected("never"), AnswerContract("once"), AnswerContract("once")]
    kind.outbox.fail(failed, [Failure(i, e) for i, e in zip(failed.source_ids, errors, strict=True)])
    wave_of(kind, 1)
    db.execute(
        "UPDATE embed_assets.semantic_outbox SET next_attempt_at = now() WHERE source_id = %s", (failed.source_ids[2],)
    )
    age = "UPDATE embed_assets.semantic_outbox SET enqueued_at = now() - %s * interval '1 s' WHERE source_id = %s"
    db.execute(age, (100, str(jobs[0])))
    db.execute(age, (900, failed.source_ids[1]))
    (queue,) = metrics(db, "queue_metrics")
    assert [queue[name] for name in ("due", "waiting", "running", "dead", "dismissed")] == [3, 1, 1, 1, 0]
    assert 100 <= queue["oldest_due_seconds"] < 900
    assert [(f["error_code"], f["waiting"], f["dead"]) for f in metrics(db, "failure_metrics")] == [
        ("contract", 2, 0),
        ("input_rejected", 0, 1),
    ]


@pytest.mark.ids("B-45")
def test_leases_are_held_then_expiring_then_expired(kind: Kind, db: Db) -> None:
    def leases() -> list[int]:
        return [metrics(db, "lease_metrics")[0][name] for name in ("held", "expiring", "expired")]

    add_jobs(db, 1)
    enqueue(kind)
    wave = wave_of(kind)
    assert leases() == [1, 0, 0]
    db.execute("UPDATE embed_assets.claimed_waves SET lease_until = clock_timestamp() + interval '20 s'")
    assert leases() == [1, 1, 0]
    expire(db, wave)
    assert leases() == [0, 0, 1]
    kind.outbox.release(wave_of(kind))
    assert leases() == [0, 0, 0]


@pytest.mark.ids("B-45")
def test_the_work_of_the_last_hour_is_what_the_log_and_the_waves_say(kind: Kind, db: Db) -> None:
    add_jobs(db, 2)
    drain(kind)
    db.execute("UPDATE embed_assets.semantic_outbox_log SET enqueued_at = finished_at - interval '7 s'")
    db.execute("UPDATE embed_assets.claimed_waves SET stage_seconds = 2, write_seconds = 1")
    (work,) = metrics(db, "work_metrics")
    assert [work[name] for name in ("indexed", "removed", "dead", "chunks", "waves", "texts")] == [2, 0, 0, 2, 1, 2]
    assert (work["searchable_p50_seconds"], work["searchable_p95_seconds"]) == (7, 7)
    assert (work["stage_seconds"], work["write_seconds"], work["tokens"] > 0) == (2, 1, True)
    db.execute("UPDATE embed_assets.semantic_outbox_log SET finished_at = finished_at - interval '2 h'")
    assert metrics(db, "work_metrics")[0]["indexed"] == 0


@pytest.mark.ids("B-46")
def test_no_metric_says_whose_row_it_counts(kind: Kind, db: Db) -> None:
    labels = rows(
        db,
        "SELECT DISTINCT column_name::text FROM information_schema.columns WHERE table_schema = 'embed_assets' "
        r"AND table_name LIKE '%\_metrics' AND data_type NOT IN ('bigint', 'double precision', 'numeric')",
    )
    assert set(labels) == LABELS
    add_jobs(db, 3, company_slug="tenant-of-the-row")
    drain(kind)
    db.execute("ALTER TABLE jobs ALTER COLUMN id DROP IDENTITY")
    db.execute("UPDATE jobs SET id = id + 987654000")
    enqueue(kind)
    wave = wave_of(kind, 2)
    kind.outbox.fail(wave, [Failure(source_id, InputRejected("never")) for source_id in wave.source_ids])
    views = rows(db, r"SELECT table_name::text FROM information_schema.views WHERE table_name LIKE '%\_metrics'")
    assert len(views) == 6
    told = str([metrics(db, view) for view in views])
    assert "tenant-of-the-row" not in told
    assert "987654" not in told


@pytest.mark.ids("B-45", "B-46")
def test_a_monitor_reads_every_number_by_labels_that_name_no_row(kind: Kind, db: Db) -> None:
    add_jobs(db, 3, company_slug="tenant-of-the-row")
    add_jobs(db, 1, is_tech=False)
    drain(kind, rows=1)
    add_jobs(db, 2)
    enqueue(kind)
    wave = wave_of(kind, 1)
    kind.outbox.fail(wave, [Failure(wave.source_ids[0], InputRejected("never"))])
    db.execute(
        "INSERT INTO embed_assets.embedding_endpoints (endpoint, state, until, reason) "
        "VALUES ('0123456789abcdef', 'refused', clock_timestamp() + interval '9 minutes', 'REFUSED: key-of-mine')"
    )
    said = prometheus(kind.postgres, rows=True)
    of = f'{{kind="jobs",model="{kind.identity}"}}'
    for line in (
        f"embed_assets_queue_due{of} 1",
        f"embed_assets_queue_dead{of} 1",
        f"embed_assets_lease_held{of} 1",
        f"embed_assets_work_indexed{of} 3",
        f'embed_assets_failure_dead{{kind="jobs",model="{kind.identity}",error_code="input_rejected"}} 1',
        'embed_assets_feed_rows{kind="jobs",feed="search"} 3',
        'embed_assets_feed_rows{kind="jobs",feed="source"} 0',
        'embed_assets_rows{kind="jobs",state="fresh"} 3',
        'embed_assets_rows{kind="jobs",state="excluded"} 1',
    ):
        assert line in said.splitlines(), said
    assert re.search(r'embed_assets_endpoint_resting_seconds\{endpoint="01234567",state="refused"\} 5\d\d', said)
    assert not re.search(r"tenant-of-the-row|key-of-mine|89abcdef", said)
    for line in said.splitlines():
        assert re.fullmatch(r'# TYPE \w+ gauge|\w+\{\w+="[^"\n]*"(,\w+="[^"\n]*")*\} [-+.e\d]+', line), line
    assert "embed_assets_rows" not in prometheus(kind.postgres)


def test_the_rows_by_state_are_those_of_status(kind: Kind, db: Db) -> None:
    add_jobs(db, 3)
    add_jobs(db, 2, is_tech=False)
    drain(kind, rows=2)
    db.execute("UPDATE jobs SET description = 'new' WHERE id = (SELECT min(id) FROM jobs)")
    assert dict(rows(db, "SELECT state, rows FROM embed_assets.status_jobs()")) == {"due": 1, "fresh": 2, "excluded": 2}
