"""Claims: who gets what, in which order, and what becomes of waves whose holder does not come back."""

from __future__ import annotations

import json
from typing import Any

import pytest
from postgres.support import (
    Db,
    add_job,
    add_jobs,
    background,
    claim,
    connect,
    due_now,
    enqueue,
    entries,
    entry,
    expire,
    fold,
    gate,
    rows,
    say,
    staged,
    status,
    until_true,
    value,
    wave_of,
    wave_row,
)
from psycopg import sql

from embed_assets.errors import AnswerContract, InputRejected
from embed_assets.models import Failure, Wave
from embed_assets.queries import query
from embed_assets.resources.assembly import Kind
from embed_assets.resources.outbox import EVER, RANKED, REVERSED


def ids(wave: Wave | None) -> list[int]:
    assert wave is not None
    return sorted(int(source_id) for source_id in wave.source_ids)


def crash(kind: Kind, db: Db, wave: Wave) -> None:
    """The process that began this wave does not come back, and its lease runs out."""
    kind.outbox.start(wave)
    expire(db, wave)


def fail(kind: Kind, wave: Wave, *jobs: int) -> None:
    """These rows fail once, transiently; the others of the wave are given back."""
    kind.outbox.fail(wave, [Failure(str(job), AnswerContract("once")) for job in jobs])
    kind.outbox.release(wave)


# What a claim takes


@pytest.mark.ids("A-12")
def test_claim_leases_at_most_the_batch_and_names_entries_and_rows(kind: Kind, db: Db) -> None:
    jobs = add_jobs(db, 5)
    say(db, jobs[4], forced=True)
    enqueue(kind)
    wave = wave_of(kind, 3)
    assert len(wave.entries) == 3
    assert {(e.entry_id, e.source_id, e.forced) for e in wave.entries} == set(
        entries(db, "id, source_id, forced", "status = 'leased'")
    )
    assert [e.forced for e in wave.entries if e.source_id == str(jobs[4])] == [True]
    assert rows(db, "SELECT wave_id, claimed, run_id FROM embed_assets.claimed_waves") == [(wave.wave_id, 3, "run")]
    assert status(kind) == {"leased": 3, "due": 2}


@pytest.mark.ids("A-13", "B-11", "C-06")
def test_claim_order_is_freshest_first_and_undated_rows_go_by_their_creation(kind: Kind, db: Db) -> None:
    never = add_job(db, posted_at=None, created_at=None)
    old = add_job(db, posted_at="2025-01-01Z")
    new = add_job(db, posted_at="2026-01-01Z")
    between = add_job(db, posted_at=None, created_at="2025-06-01Z")
    twin = add_job(db, posted_at="2025-01-01Z")
    backfill = add_job(db, posted_at="2026-06-01Z")
    say(db, backfill, lane=1)
    enqueue(kind)
    claimed = [ids(wave_of(kind, 1)) for _ in range(6)]
    assert claimed == [[new], [between], [old], [twin], [never], [backfill]]


@pytest.mark.ids("A-18")
def test_dead_letter_is_never_claimed(kind: Kind, db: Db) -> None:
    job = add_job(db)
    enqueue(kind)
    wave = wave_of(kind)
    kind.outbox.fail(wave, [Failure(str(job), InputRejected("never"))])
    kind.outbox.release(wave)
    assert entry(db, job) == "dead"
    assert claim(kind) is None
    assert not kind.outbox.claimable()
    assert claim(kind, ancestors=["run"]) is None


@pytest.mark.ids("B-12", "C-08")
def test_retry_is_not_claimed_before_its_time(kind: Kind, db: Db) -> None:
    job = add_job(db)
    enqueue(kind)
    fail(kind, wave_of(kind), job)
    assert entry(db, job) == "retry_wait"
    assert claim(kind) is None
    assert not kind.outbox.claimable()
    due_now(db)
    assert kind.outbox.claimable()
    assert ids(claim(kind)) == [job]


@pytest.mark.ids("Q12")
def test_retries_take_at_most_a_quarter_of_a_wave(kind: Kind, db: Db) -> None:
    failed = add_jobs(db, 6)
    enqueue(kind)
    fail(kind, wave_of(kind), *failed)
    due_now(db)
    add_jobs(db, 10)
    enqueue(kind)
    wave = wave_of(kind, 8)
    assert len(wave.entries) == 8
    assert len(set(ids(wave)) & set(failed)) == 2


@pytest.mark.ids("A-34")
def test_what_failed_since_a_drain_began_is_not_claimed_by_it_again(kind: Kind, db: Db) -> None:
    failed, kept = add_jobs(db, 2)
    enqueue(kind)
    began = kind.outbox.now()
    fail(kind, wave_of(kind), failed)
    due_now(db)
    assert ids(claim(kind, failed_before=began)) == [kept]
    assert claim(kind, failed_before=began) is None
    assert not kind.outbox.claimable(failed_before=began)
    assert ids(claim(kind)) == [failed]


def test_tenth_wave_goes_the_other_way_round(kind: Kind, db: Db) -> None:
    oldest = add_job(db, posted_at="2020-01-01Z")
    enqueue(kind)
    fresh = add_jobs(db, 12, posted_at="2026-01-01Z")
    enqueue(kind)
    claimed = [ids(wave_of(kind, 1)) for _ in range(10)]
    assert claimed[9] == [oldest]
    assert {job for wave in claimed[:9] for job in wave} < set(fresh)


def test_tenth_wave_serves_a_backfill_that_changes_overtake(kind: Kind, db: Db) -> None:
    backfill = add_job(db)
    say(db, backfill, lane=1)
    enqueue(kind)
    changed = add_jobs(db, 12)
    enqueue(kind)
    claimed = [ids(wave_of(kind, 1)) for _ in range(10)]
    assert claimed[9] == [backfill]
    assert {job for wave in claimed[:9] for job in wave} < set(changed)


def test_tenth_wave_serves_a_backfill_although_older_changes_wait(kind: Kind, db: Db) -> None:
    changed = add_jobs(db, 12)
    enqueue(kind)
    backfill = add_job(db)
    say(db, backfill, lane=1)
    fold(kind)
    claimed = [ids(wave_of(kind, 1)) for _ in range(10)]
    assert claimed[9] == [backfill]
    assert {job for wave in claimed[:9] for job in wave} < set(changed)


@pytest.mark.ids("Q08")
def test_entries_of_another_kind_are_left_alone(kind: Kind, db: Db) -> None:
    db.execute(
        "INSERT INTO embed_assets.semantic_outbox (kind, source_id, model_id, reason) "
        "VALUES ('unknown', '1', %s, 'scan')",
        (kind.model_id,),
    )
    say(db, 1, kind="unknown")
    before = entries(db, "xmin::text")
    assert enqueue(kind).folded == 0
    assert claim(kind) is None
    assert not kind.outbox.claimable()
    assert entries(db, "xmin::text") == before


def test_paused_kind_gives_nothing_and_is_not_waited_for(kind: Kind, db: Db) -> None:
    add_job(db)
    enqueue(kind)
    db.execute("UPDATE embed_assets.corpora SET paused_at = now()")
    assert claim(kind) is None
    assert not kind.outbox.claimable()
    db.execute("UPDATE embed_assets.corpora SET paused_at = NULL")
    assert kind.outbox.claimable()


# Beside others


@pytest.mark.ids("A-15", "B-08")
def test_concurrent_claims_are_disjoint_and_wait_for_nobody(kind: Kind, other: Kind, db: Db, database_url: str) -> None:
    jobs = add_jobs(db, 8)
    enqueue(kind)
    mine = "new.run_id = 'first'"
    with (
        gate(database_url, "claimed_waves", only=mine) as held,
        background(lambda: ids(claim(kind, 4, run_id="first"))) as first,
    ):
        held.wait()
        with background(lambda: ids(claim(other, 4, run_id="second"))) as second:
            taken = second.result(timeout=5)
        assert not first.done()
        held.open()
        assert sorted(first.result() + taken) == jobs
    assert claim(kind) is None


@pytest.mark.ids("A-16")
def test_claim_locks_no_row_of_the_source(kind: Kind, db: Db, database_url: str) -> None:
    job, _ = add_jobs(db, 2)
    enqueue(kind)
    with gate(database_url, "claimed_waves") as held, background(lambda: claim(kind)) as claimed:
        held.wait()
        with connect(database_url, lock_timeout="200ms") as producer:
            producer.execute("UPDATE jobs SET title = 'changed' WHERE id = %s", (job,))
            producer.execute("SELECT FROM jobs FOR UPDATE")
        held.open()
        assert len(ids(claimed.result())) == 2


def test_empty_claim_is_not_believed_while_a_due_entry_is_locked(kind: Kind, db: Db, database_url: str) -> None:
    job = add_job(db)
    enqueue(kind)
    with connect(database_url) as somebody:
        somebody.execute("SELECT FROM embed_assets.semantic_outbox FOR UPDATE")
        assert claim(kind) is None
        assert kind.outbox.claimable()
    assert ids(claim(kind)) == [job]
    assert not kind.outbox.claimable()


def plan_of_claim(kind: Kind, db: Db, order: Any, scope: str | None = None) -> list[dict[str, Any]]:
    """The nodes of a claim's plan."""
    values = {"kind": "jobs", "model_id": kind.model_id, "run_id": "r", "limit": 500, "lease": 120, "scope": scope}
    of_scope = query("claim.of_scope") if scope else sql.SQL("")
    statement = query("claim.due", order=order, lease=query("claim.lease"), of_scope=of_scope)
    text = b"EXPLAIN (FORMAT JSON) " + statement.as_bytes(db)
    with db.transaction():
        db.execute(query("claim.by_index"))
        plan = db.execute(text, values | {"failed_before": EVER}).fetchone()
    assert plan is not None
    return _nodes(plan[0][0]["Plan"])


def walk(nodes: list[dict[str, Any]], cte: str) -> tuple[list[str], str, str]:
    """How one part of a claim reads the backlog: its nodes, its index, its direction."""
    found = [node for node in nodes if node.get("Subplan Name") == f"CTE {cte}"]
    assert len(found) == 1, json.dumps(nodes)
    below = _nodes(found[0])
    last = next(node for node in reversed(below) if "Index Name" in node)
    return [node["Node Type"] for node in below], last["Index Name"], last["Scan Direction"]


def _nodes(node: dict[str, Any]) -> list[dict[str, Any]]:
    return [node, *(below for child in node.get("Plans", []) for below in _nodes(child))]


@pytest.mark.ids("A-14", "P20")
@pytest.mark.parametrize("analysed", [True, False])
def test_claim_walks_the_partial_index_without_sort_or_join(kind: Kind, db: Db, analysed: bool) -> None:
    db.execute(
        "INSERT INTO embed_assets.semantic_outbox (kind, source_id, model_id, reason, rank, status, wave_id) "
        "SELECT 'jobs', n::text, %s, 'scan', -n, CASE WHEN n %% 20 = 0 THEN 'dead' ELSE 'pending' END, NULL "
        "FROM generate_series(1, 25000) AS n",
        (kind.model_id,),
    )
    if analysed:
        db.execute("ANALYZE embed_assets.semantic_outbox")
    for order, direction in ((RANKED, "Forward"), (REVERSED, "Backward")):
        nodes = plan_of_claim(kind, db, order)
        walked = ["Limit", "LockRows", "Index Scan"]
        assert walk(nodes, "ordered") == (walked, "semantic_outbox_claim", direction)
        others, index, way = walk(nodes, "others")
        assert (others, index, way) == (
            ["Nested Loop", "CTE Scan", "Subquery Scan", *walked],
            "semantic_outbox_scope",
            direction,
        )
        assert walk(nodes, "hops")[:2] == (
            ["Recursive Union", "CTE Scan", "Limit", "Index Only Scan", "WorkTable Scan"],
            "semantic_outbox_scope",
        )
        assert walk(plan_of_claim(kind, db, order, "acme"), "ordered") == (walked, "semantic_outbox_scope", direction)


# Those who do not come back


@pytest.mark.ids("A-17", "B-09", "C-15")
def test_wave_is_taken_over_when_its_lease_ran_out_and_not_before(kind: Kind, other: Kind, db: Db) -> None:
    jobs = add_jobs(db, 2)
    enqueue(kind)
    wave = wave_of(kind)
    assert claim(other) is None
    expire(db, wave)
    taken = wave_of(other, run_id="successor")
    assert ids(taken) == jobs
    assert taken.token != wave.token
    assert wave_row(db, wave, "outcome, lost") == ("expired", 2)


def test_lost_lease_is_charged_only_to_a_wave_that_had_started(kind: Kind, db: Db) -> None:
    add_jobs(db, 2)
    enqueue(kind)
    expire(db, wave_of(kind))
    wave = wave_of(kind)
    assert entries(db, "crashes, failures") == [(0, 0), (0, 0)]
    crash(kind, db, wave)
    wave_of(kind)
    assert entries(db, "crashes, failures, attempts") == [(1, 1, 0), (1, 1, 0)]


def test_crash_is_dated_when_the_lease_ran_out_so_that_the_next_drain_takes_it_up(kind: Kind, db: Db) -> None:
    job = add_job(db)
    enqueue(kind)
    crash(kind, db, wave_of(kind))
    began = kind.outbox.now()
    wave = wave_of(kind, failed_before=began)
    assert ids(wave) == [job]
    assert entry(db, job, "last_failed_at") < began
    kind.outbox.start(wave)
    db.execute("UPDATE embed_assets.claimed_waves SET lease_until = clock_timestamp() WHERE closed_at IS NULL")
    assert claim(kind, failed_before=began) is None
    assert entry(db, job, "crashes") == 2


@pytest.mark.ids("B-10")
def test_third_crash_kills_the_entry_and_says_why(kind: Kind, db: Db) -> None:
    job = add_job(db)
    enqueue(kind)
    for _ in range(3):
        crash(kind, db, wave_of(kind))
    assert claim(kind) is None
    assert entry(db, job, "status, error_code, error_class, crashes") == (
        "dead",
        "LEASE_ATTEMPTS_EXHAUSTED",
        "LEASE_ATTEMPTS_EXHAUSTED",
        3,
    )
    logged = rows(db, "SELECT source_id, outcome, error_code FROM embed_assets.semantic_outbox_log")
    assert logged == [(str(job), "dead", "LEASE_ATTEMPTS_EXHAUSTED")]
    assert not kind.outbox.claimable()
    assert status(kind) == {"dead": 1}


@pytest.mark.ids("Q14")
def test_suspects_go_alone_and_after_everything_else(kind: Kind, db: Db) -> None:
    suspects = add_jobs(db, 3)
    enqueue(kind)
    for _ in range(2):
        crash(kind, db, wave_of(kind))
    normal = add_jobs(db, 2)
    enqueue(kind)
    claimed = [ids(wave_of(kind)) for _ in range(4)]
    assert claimed[0] == normal
    assert sorted(claimed[1:]) == [[job] for job in suspects]
    assert claim(kind) is None


def test_no_leased_entry_stays_with_a_closed_wave(kind: Kind, other: Kind, db: Db, database_url: str) -> None:
    locked, free = add_jobs(db, 2)
    enqueue(kind)
    wave = wave_of(kind)
    expire(db, wave)
    with connect(database_url) as somebody:
        somebody.execute("SELECT FROM embed_assets.semantic_outbox WHERE source_id = %s FOR UPDATE", (str(locked),))
        assert ids(claim(other)) == [free]
        assert entry(db, locked, "status, wave_id") == ("leased", wave.wave_id)
        assert wave_row(db, wave, "closed_at") is not None
    assert ids(claim(other)) == [locked]
    orphans = (
        "SELECT count(*) FROM embed_assets.semantic_outbox AS e JOIN embed_assets.claimed_waves AS w "
        "ON w.wave_id = e.wave_id WHERE e.status = 'leased' AND w.closed_at IS NOT NULL"
    )
    assert value(db, orphans) == 0


@pytest.mark.ids("Q01")
def test_wave_that_is_being_written_is_not_reaped(kind: Kind, other: Kind, db: Db, database_url: str) -> None:
    job = add_job(db)
    enqueue(kind)
    kind.outbox.lease_seconds = 1
    wave = staged(kind)
    with gate(database_url, "semantic_stamps") as held, background(lambda: kind.chunks.write(wave)) as written:
        held.wait()
        over = "SELECT lease_until < clock_timestamp() FROM embed_assets.claimed_waves"
        until_true(lambda: value(db, over), "the lease does not run out")
        assert claim(other) is None
        assert wave_row(db, wave, "closed_at") is None
        held.open()
        assert written.result().indexed == 1
    assert wave_row(db, wave, "outcome") == "written"
    assert claim(other) is None
    assert entry(db, job) is None
    assert status(kind) == {"fresh": 1}


def test_expired_wave_s_plan_is_emptied(kind: Kind, db: Db) -> None:
    add_job(db)
    enqueue(kind)
    wave = staged(kind)
    assert value(db, "SELECT count(*) FROM embed_assets.wave_chunks") == 2
    expire(db, wave)
    claim(kind)
    assert value(db, "SELECT count(*) FROM embed_assets.wave_chunks") == 0


def test_expired_wave_counts_as_lost_only_what_it_had_not_settled(kind: Kind, db: Db) -> None:
    written, failed, _ = add_jobs(db, 3)
    enqueue(kind)
    wave = staged(kind)
    kind.chunks.write(wave, ids=[str(written)], close=False)
    kind.outbox.fail(wave, [Failure(str(failed), AnswerContract("once"))])
    expire(db, wave)
    claim(kind)
    assert wave_row(db, wave, "claimed, indexed, failed, lost") == (3, 1, 1, 1)


# Re-execution


def test_re_execution_takes_what_its_ancestors_left_and_nothing_else(kind: Kind, db: Db) -> None:
    left = add_jobs(db, 2)
    enqueue(kind)
    kind.outbox.release(wave_of(kind, run_id="ancestor"))
    add_jobs(db, 2)
    enqueue(kind)
    again = wave_of(kind, run_id="child", ancestors=["ancestor", "another"])
    assert ids(again) == left
    assert again.run_id == "child"
    assert claim(kind, run_id="child", ancestors=["ancestor"]) is None


def test_re_execution_finds_nothing_when_another_drain_took_it_meanwhile(kind: Kind, other: Kind, db: Db) -> None:
    add_jobs(db, 2)
    enqueue(kind)
    wave = wave_of(kind, run_id="ancestor")
    assert claim(kind, run_id="child", ancestors=["ancestor"]) is None
    kind.outbox.release(wave)
    taken = wave_of(other, run_id="sensor")
    assert claim(kind, run_id="child", ancestors=["ancestor"]) is None
    other.outbox.release(taken)
    assert claim(kind, run_id="child", ancestors=["ancestor"]) is None


def test_waves_of_a_run_are_found_by_its_next_stage(kind: Kind, db: Db) -> None:
    add_jobs(db, 3)
    enqueue(kind)
    waves = [wave_of(kind, 2, run_id="mine"), wave_of(kind, 2, run_id="mine")]
    assert kind.outbox.waves_of("mine") == waves
    kind.outbox.release(waves[0])
    assert kind.outbox.waves_of("mine") == waves[1:]
    assert kind.outbox.waves_of("theirs") == []
