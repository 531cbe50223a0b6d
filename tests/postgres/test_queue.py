"""The queue as a whole: the states of an entry, what is counted and logged, what is found missing, who is told, and
how little of the database it takes."""

from __future__ import annotations

import ast
import re
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch
from uuid import uuid4

import psycopg
import pytest
from fakes import HashEmbedder
from postgres.conftest import KindMaker
from postgres.support import (
    Db,
    add_job,
    add_jobs,
    chunks,
    claim,
    connect,
    drain,
    due_now,
    enqueue,
    entries,
    entry,
    expire,
    fold,
    rows,
    say,
    stamps,
    status,
    until_true,
    value,
    wave_of,
    wave_row,
)
from psycopg.conninfo import make_conninfo

from embed_assets import pipeline
from embed_assets.corpus import Plain, TableCorpus
from embed_assets.defs import sensors
from embed_assets.defs.decision import InFlight, Look
from embed_assets.defs.maintenance import daily, maintenance
from embed_assets.errors import (
    AnswerContract,
    ConfigurationError,
    DatabaseTrouble,
    EndpointTrouble,
    ErrorClass,
    InputRejected,
    WaveTimeout,
)
from embed_assets.fake_server import FakeServer
from embed_assets.models import Backlog, Failure, Wave
from embed_assets.queries import query
from embed_assets.resources import ranges
from embed_assets.resources.assembly import Kind
from embed_assets.resources.embedder import make_embedder
from embed_assets.resources.operator import Operator
from embed_assets.resources.outbox import EVER
from embed_assets.resources.postgres import CONNECTIONS, Postgres
from embed_assets.resources.retention import purge
from embed_assets.resources.run import DrainRun, run_limits
from embed_assets.resources.watch import Watch
from embed_assets.settings import Settings
from embed_assets.stop import Stop

ROOT = Path(__file__).parents[2]
CLOSE = "UPDATE jobs SET closed_at = now() WHERE id = %s"
LOG = "SELECT {} FROM embed_assets.semantic_outbox_log ORDER BY id"


def log(db: Db, columns: str = "source_id, outcome") -> list[Any]:
    return rows(db, LOG.format(columns))


def fail(kind: Kind, wave: Wave, error: Exception | None = None) -> None:
    """Every row of the wave fails; the wave is closed."""
    failure = error or AnswerContract("no numbers")
    kind.outbox.fail(wave, [Failure(source_id, failure) for source_id in wave.source_ids])  # type: ignore[arg-type]
    kind.outbox.release(wave)


def notes(db: Db, name: str, *bodies: str) -> TableCorpus:
    """A table of its own with these rows, declared as the kind of its name."""
    db.execute(f"CREATE TABLE {name} (id text PRIMARY KEY, body text)".encode())
    for number, body in enumerate(bodies):
        db.execute(f"INSERT INTO {name} VALUES (%s, %s)".encode(), (f"{name}-{number}", body))
    return TableCorpus(kind=name, table=name, key="id", text=Plain("body"))


# The states


def protocol_moves() -> set[tuple[str, str]]:
    """(from, to) of the table in docs/protocol.md."""
    page = (ROOT / "docs/protocol.md").read_text(encoding="utf-8")
    table = page.split("| from | to | statement | when |")[1].split("\n\n")[0]
    cells = [line.split("|")[1:3] for line in table.splitlines() if line.startswith("| ")]
    words = [[re.findall(r"–|pending|retry_wait|leased|dead|gone", cell) for cell in pair] for pair in cells]
    return {(before, after) for befores, afters in words for before in befores for after in afters}


@pytest.fixture
def moves(kind: Kind, db: Db) -> Callable[[], set[tuple[str, str]]]:
    """Every change of an entry's status from now on, seen by the table itself."""
    db.execute(
        """
        CREATE TABLE public.moves (before text, after text);
        CREATE FUNCTION public.note_move() RETURNS trigger LANGUAGE plpgsql AS $$
        BEGIN
            INSERT INTO public.moves VALUES (coalesce(old.status, '–'), coalesce(new.status, 'gone'));
            RETURN NULL;
        END $$;
        CREATE TRIGGER note_move AFTER INSERT OR UPDATE OR DELETE ON embed_assets.semantic_outbox
        FOR EACH ROW EXECUTE FUNCTION public.note_move();
        """
    )
    return lambda: set(rows(db, "SELECT DISTINCT before, after FROM public.moves WHERE before <> after"))


@pytest.mark.ids("B-05", "B-06")
def test_an_entry_goes_the_ways_that_the_protocol_names_and_no_other(
    kind: Kind, embedder: HashEmbedder, db: Db, moves: Callable[[], set[tuple[str, str]]]
) -> None:
    good, bad, ugly, leaves = (add_job(db, f"<p>{word}</p>") for word in ("good", "bad", "ugly", "leaves"))
    embedder.reject = lambda text: InputRejected("no") if "ugly" in text else AnswerContract("no")
    drain(kind)  # all fail, ugly for good
    due_now(db)
    embedder.reject = lambda text: AnswerContract("no") if "bad" in text else None
    drain(kind)
    assert entry(db, good) is None
    say(db, bad, ugly)
    db.execute(CLOSE, (leaves,))
    fold(kind)  # a waiting and a dead one are requested
    for _ in range(3):
        wave = wave_of(kind)
        kind.outbox.start(wave)
        expire(db, wave)
        claim(kind, failed_before=EVER)
        kind.outbox.release_runs(["run"])
    drain(kind)
    say(db, good, reason="backfill", lane=1)
    fold(kind)
    Operator(kind.postgres, "jobs").cancel("backfill")
    assert moves() == protocol_moves()
    with pytest.raises(psycopg.errors.CheckViolation):
        db.execute(
            "INSERT INTO embed_assets.semantic_outbox (kind, source_id, model_id, reason, status) "
            "VALUES ('jobs', 'x', 1, 'write', 'running')"
        )


@pytest.mark.ids("B-04", "C-04")
def test_an_entry_has_a_number_of_its_own_and_what_is_finished_blocks_no_new_one(kind: Kind, db: Db) -> None:
    job, other = add_jobs(db, 2)
    enqueue(kind)
    first = {e.source_id: e.entry_id for e in wave_of(kind).entries}
    kind.outbox.release_runs(["run"])
    drain(kind)
    say(db, job)
    fold(kind)
    second = {e.source_id: e.entry_id for e in wave_of(kind).entries}
    assert set(second) == {str(job)}
    assert len({first[str(job)], first[str(other)], second[str(job)]}) == 3


@pytest.mark.ids("B-07", "C-07", "C-14")
def test_a_claim_is_one_transaction_that_counts_itself_and_charges_nothing(kind: Kind, db: Db) -> None:
    job = add_job(db)
    enqueue(kind)
    fail(kind, wave_of(kind))
    due_now(db)
    kind.outbox.release(wave_of(kind))
    wave = wave_of(kind, run_id="mine")
    state = "status, wave_id, attempts, claims, error_code IS NOT NULL"
    assert entry(db, job, state) == ("leased", wave.wave_id, 1, 3, True)
    held = "run_id, token, started_at, closed_at, indexed, extract(EPOCH FROM lease_until - claimed_at)::integer"
    assert wave_row(db, wave, held) == ("mine", wave.token, None, None, 0, 120)
    assert entry(db, job, "xmin::text") == wave_row(db, wave, "xmin::text")
    kind.outbox.release(wave)
    drain(kind)
    assert log(db, "outcome, claims, attempts") == [("indexed", 4, 1)]


@pytest.mark.ids("C-13")
def test_a_row_that_failed_for_good_keeps_its_error_and_the_time_of_its_death(kind: Kind, db: Db) -> None:
    job = add_job(db)
    enqueue(kind)
    fail(kind, wave_of(kind), InputRejected("too odd", code="422"))
    said = "status, error_code, error_class, error_message, last_failed_at IS NOT NULL"
    assert entry(db, job, said) == ("dead", "422", "input_rejected", "too odd", True)
    assert log(db, "outcome, claims, error_code, error_class, finished_at IS NOT NULL") == [
        ("dead", 1, "422", "input_rejected", True)
    ]
    assert claim(kind) is None


@pytest.mark.ids("C-09")
def test_a_success_leaves_no_failure_behind_and_says_so_in_its_own_transaction(kind: Kind, db: Db) -> None:
    job = add_job(db)
    enqueue(kind)
    fail(kind, wave_of(kind), InputRejected("no"))
    assert value(db, "SELECT count(*) FROM embed_assets.dead_letters") == 1
    say(db, job)
    drain(kind)
    assert value(db, "SELECT count(*) FROM embed_assets.dead_letters") == 0
    assert log(db, "outcome, error_code IS NOT NULL") == [("dead", True), ("indexed", False)]
    written = rows(
        db,
        "SELECT xmin::text FROM embed_assets.semantic_stamps UNION SELECT xmin::text FROM "
        "embed_assets.semantic_outbox_log WHERE outcome = 'indexed' UNION SELECT xmin::text FROM "
        "embed_assets.claimed_waves WHERE outcome = 'written'",
    )
    assert len(written) == 1


# How long a retry waits


@pytest.mark.ids("B-28", "C-11", "C-12")
@pytest.mark.parametrize(
    ("attempts", "seconds"), [(0, 5), (1, 10), (2, 20), (6, 320), (7, 600), (30, 600), (3000, 600)]
)
def test_a_retry_waits_twice_as_long_each_time_at_most_ten_minutes_and_as_long_as_was_asked(
    jobs_table: None, make_kind: KindMaker, db: Db, attempts: int, seconds: int
) -> None:
    kind = make_kind(max_attempts=10_000)
    job, patient = add_jobs(db, 2)
    enqueue(kind)
    db.execute("UPDATE embed_assets.semantic_outbox SET attempts = %s", (attempts,))
    asked = AnswerContract("later")
    asked.retry_after = 2000.0  # type: ignore[attr-defined]
    wave = wave_of(kind)
    kind.outbox.fail(wave, [Failure(str(job), AnswerContract("no")), Failure(str(patient), asked)])
    waits = "status, attempts, extract(EPOCH FROM next_attempt_at - last_failed_at)::float8"
    state, charged, waiting = entry(db, job, waits)
    assert (state, charged) == ("retry_wait", attempts + 1)
    assert 0.79 * seconds < waiting < 1.21 * seconds
    assert entry(db, patient, waits)[2] > 1999


@pytest.mark.ids("Q15")
def test_rows_that_fail_together_do_not_come_back_together(kind: Kind, db: Db) -> None:
    add_jobs(db, 60)
    enqueue(kind)
    fail(kind, wave_of(kind))
    waits = entries(db, "extract(EPOCH FROM next_attempt_at - last_failed_at)::float8")
    assert max(waits) - min(waits) > 1
    assert len({round(wait, 1) for wait in waits}) > 8


# What a drain says it did


@pytest.mark.ids("B-23")
def test_what_became_of_a_wave_is_told_by_its_counts(kind: Kind, other: Kind, embedder: HashEmbedder, db: Db) -> None:
    def wave_ends(meanwhile: Callable[[Sequence[str]], None] = lambda texts: None) -> tuple[int, ...]:
        embedder.before = meanwhile
        add_job(db)
        enqueue(kind)
        counts = pipeline.work(kind.ports, wave_of(kind, 1), kind.limits, Stop())
        return counts.indexed, counts.failed, counts.lost

    def taken_over(_: Sequence[str]) -> None:
        db.execute("UPDATE embed_assets.claimed_waves SET lease_until = clock_timestamp() WHERE closed_at IS NULL")
        wave_of(other)

    assert claim(kind) is None  # idle
    assert wave_ends() == (1, 0, 0)
    assert wave_ends(taken_over) == (0, 0, 1)
    embedder.reject = lambda text: AnswerContract("no")
    assert wave_ends() == (0, 1, 0)


@pytest.mark.ids("B-24", "B-41", "Q24")
def test_a_drain_with_nothing_to_do_asks_no_embedder_and_writes_nothing(jobs_table: None, make_kind: KindMaker, db: Db):
    embedder = HashEmbedder(request_items=100)
    kind = make_kind(embedder=embedder)
    assert drain(kind).as_dict() == drain(kind).as_dict() == dict.fromkeys(drain(kind).as_dict(), 0)
    assert embedder.requests == 0
    text = [f"<p>{'word ' * 350}{number}</p>" for number in range(205)]
    job = add_job(db, "".join(text))
    assert drain(kind).indexed == 1
    assert (embedder.requests, len(chunks(db, job))) == (3, 205)
    before = chunks(db, job, "xmin::text, ctid::text")
    assert drain(kind).claimed == 0
    assert embedder.requests == 3
    assert chunks(db, job, "xmin::text, ctid::text") == before
    text[150] = f"<p>{'new ' * 440}</p>"
    db.execute("UPDATE jobs SET description = %s", ("".join(text),))
    drain(kind)
    assert len(embedder.texts) == 206


@pytest.mark.ids("Q18")
def test_what_is_told_is_what_was_committed(kind: Kind, embedder: HashEmbedder, db: Db) -> None:
    add_job(db, "<p>bad</p>")
    gone, _ = add_jobs(db, 2)
    enqueue(kind)
    db.execute("DELETE FROM jobs WHERE id = %s", (gone,))
    embedder.reject = lambda text: InputRejected("no") if "bad" in text else None
    counts = drain(kind)
    told = {"indexed": counts.indexed, "gone": counts.gone, "dead": counts.dead}
    assert told == dict(rows(db, "SELECT outcome, count(*) FROM embed_assets.semantic_outbox_log GROUP BY outcome"))
    assert value(db, "SELECT (sum(indexed), sum(gone), sum(dead))::text FROM embed_assets.claimed_waves") == "(1,1,1)"
    add_jobs(db, 3)

    def too_slow(_: Sequence[str]) -> None:
        raise WaveTimeout("the server is slow")

    embedder.before = too_slow
    counts = drain(kind)
    assert (counts.indexed, counts.lost) == (0, 3)
    assert status(kind)["due"] == 3
    assert len(log(db)) == 3


@pytest.mark.ids("C-52")
def test_status_counts_each_row_once_in_the_state_it_is_in(kind: Kind, embedder: HashEmbedder, db: Db) -> None:
    requested, deleted, _ = add_jobs(db, 3)
    drain(kind)
    _, dismissed, _ = (add_job(db, f"<p>{word}</p>") for word in ("dead", "dismissed", "waiting"))
    add_job(db, closed_at="2026-01-01Z")
    embedder.reject = lambda text: AnswerContract("no") if "waiting" in text else InputRejected("no")
    drain(kind)
    db.execute("UPDATE embed_assets.semantic_outbox SET next_attempt_at = 'infinity' WHERE status = 'retry_wait'")
    assert Operator(kind.postgres, "jobs").dismiss(ids=[str(dismissed)]) == 1
    say(db, requested)
    add_job(db)
    enqueue(kind)
    claim(kind, 1)
    db.execute("DELETE FROM jobs WHERE id = %s", (deleted,))
    found = {"dead": 1, "dismissed": 1, "waiting": 1, "leased": 1, "due": 2, "fresh": 1, "excluded": 1}
    assert status(kind) == found
    assert sum(found.values()) == value(db, "SELECT count(*) FROM jobs") + 1  # and what is left of the deleted one


@pytest.mark.ids("C-61")
def test_drains_side_by_side_do_each_row_once_and_end_as_often_as_they_like(
    kind: Kind, other: Kind, embedder: HashEmbedder, db: Db
) -> None:
    add_jobs(db, 60)
    enqueue(kind)
    embedder.before = lambda texts: time.sleep(0.02)
    with ThreadPoolExecutor(2) as pool:
        done = list(pool.map(lambda worker: drain(worker, rows=5), (kind, other)))
    assert sum(counts.indexed for counts in done) == 60
    assert len(embedder.texts) == len(set(embedder.texts)) == 60
    assert sorted(log(db)) == sorted((source_id, "indexed") for source_id in stamps(db))
    run = DrainRun(other, "ended")
    assert (run.release(), run.release()) == (0, 0)
    other.close()
    other.close()


@pytest.mark.ids("B-14")
def test_no_transaction_is_open_while_texts_are_embedded(kind: Kind, embedder: HashEmbedder, db: Db) -> None:
    add_jobs(db, 2)
    open_ones = (
        "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid() "
        "AND xact_start IS NOT NULL AND backend_type = 'client backend'"
    )

    def look(_: Sequence[str]) -> None:
        until_true(lambda: value(db, open_ones) == 0, "a transaction stays open", seconds=3)

    embedder.before = look
    assert drain(kind).indexed == 2


# What nobody said, and what is no longer there


@pytest.mark.ids("C-45", "C-36", "C-46")
def test_a_scan_finds_what_was_added_edited_and_removed_and_is_quiet_about_the_rest(kind: Kind, db: Db) -> None:
    same, edited, removed = add_jobs(db, 3)
    drain(kind)
    added = add_job(db)
    db.execute("UPDATE jobs SET title = 'Another' WHERE id = %s", (edited,))
    db.execute("DELETE FROM jobs WHERE id = %s", (removed,))
    say(db, added, added, edited)
    enqueue(kind)
    assert sorted(entries(db)) == sorted(map(str, (edited, removed, added)))
    assert enqueue(kind).created == 0
    drain(kind)
    assert enqueue(kind).created == 0
    kept = {str(job): len(chunks(db, job)) for job in (same, edited, added)}
    assert dict(stamps(db, "source_id, chunk_count")) == kept
    hashes = "encode(text_hash, 'hex'), encode(sha256(convert_to('passage: Another at Acme. ' || body, 'UTF8')), 'hex')"
    [(stored, computed)] = chunks(db, edited, hashes)
    assert stored == computed


@pytest.mark.ids("C-38")
def test_facts_are_reconciled_at_once_and_when_that_is_due_and_one_kind_s_fault_stops_no_other(
    jobs_table: None, make_kind: KindMaker, db: Db
) -> None:
    kind = make_kind(reconcile_seconds=1800)
    add_jobs(db, 2)
    drain(kind)
    assert value(db, "SELECT last_reconcile_at FROM embed_assets.corpus_scans") is not None
    db.execute("DELETE FROM embed_assets.job_semantic_chunks")
    assert enqueue(kind).unstamped == 0
    db.execute("UPDATE embed_assets.corpus_scans SET last_reconcile_at = last_reconcile_at - interval '40 minutes'")
    broken = make_kind(notes(db, "notes", "one"))
    db.execute("DROP TABLE notes")
    with pytest.raises(psycopg.errors.UndefinedTable):
        broken.enqueuer.enqueue()
    found = kind.enqueuer.enqueue()
    assert (found.unstamped, found.created) == (2, 2)
    assert entries(db, "reason") == ["reconcile", "reconcile"]


@pytest.mark.ids("C-43")
def test_dead_letters_whose_park_is_over_come_back_in_parts_of_whatever_size(
    kind: Kind, db: Db, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_jobs(db, 7)
    enqueue(kind)
    fail(kind, wave_of(kind))
    db.execute(
        "UPDATE embed_assets.semantic_outbox SET status = 'dead', deaths = 3, "
        "last_failed_at = clock_timestamp() - interval '1 hour' * (id % 2)"
    )
    over = entries(db, where="id % 2 = 1")
    monkeypatch.setattr(ranges, "RANGE_KEYS", 2)
    db.execute("UPDATE embed_assets.corpus_scans SET last_reconcile_at = NULL")
    assert kind.enqueuer.enqueue().revived == len(over)
    assert entries(db, where="status = 'pending'") == over


@pytest.mark.ids("C-21")
def test_a_clearing_that_fails_is_done_as_soon_as_it_can_be(kind: Kind, db: Db) -> None:
    job = add_job(db)
    drain(kind)
    db.execute(
        "CREATE FUNCTION public.refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN "
        "RAISE EXCEPTION 'no' USING ERRCODE = '23514'; END $$;"
        "CREATE TRIGGER refuse BEFORE DELETE ON embed_assets.job_semantic_chunks_m1 "
        "FOR EACH ROW EXECUTE FUNCTION public.refuse()"
    )
    db.execute("DELETE FROM jobs")
    for _ in range(4):
        drain(kind)
        due_now(db)
    assert len(chunks(db, job)) == 1
    db.execute("DROP FUNCTION public.refuse() CASCADE")
    assert drain(kind).gone == 1
    assert chunks(db, job) == entries(db) == []


@pytest.mark.ids("Q04")
def test_what_a_wave_held_comes_back_although_nobody_knows_its_worker_or_even_the_wave(kind: Kind, db: Db) -> None:
    add_jobs(db, 2)
    enqueue(kind)
    wave = wave_of(kind, 1, run_id="a worker that nobody lists")
    lost = wave_of(kind, 1)
    expire(db, wave)
    db.execute("UPDATE embed_assets.claimed_waves SET claimed_at = claimed_at - interval '1 year'")
    assert purge(kind.postgres, days=1)["waves"] == 0
    again = wave_of(kind)
    assert again.source_ids == wave.source_ids
    db.execute("DELETE FROM embed_assets.claimed_waves WHERE wave_id = %s", (lost.wave_id,))
    db.execute("UPDATE embed_assets.corpus_scans SET last_reconcile_at = NULL")
    kind.enqueuer.enqueue()
    assert entries(db, where="status = 'leased'") == again.source_ids
    assert wave_of(kind).source_ids == lost.source_ids


@pytest.mark.ids("C-18")
def test_what_is_queued_for_a_kind_that_nobody_declares_makes_nobody_busy(kind: Kind, db: Db) -> None:
    say(db, 1, 2, kind="forgotten")
    db.execute(
        "INSERT INTO embed_assets.semantic_outbox (kind, source_id, model_id, reason) "
        "VALUES ('forgotten', 'x', 1, 'write')"
    )
    add_job(db)
    assert drain(kind).indexed == 1
    assert not kind.outbox.claimable()
    assert kind.outbox.backlog().work == 0
    assert entries(db, "kind, status, claims") == [("forgotten", "pending", 0)]


@pytest.mark.ids("Q30")
def test_a_row_that_an_operator_retries_is_worked_on_and_leaves_the_queue(
    kind: Kind, embedder: HashEmbedder, db: Db
) -> None:
    job = add_job(db)
    embedder.reject = lambda text: InputRejected("no")
    drain(kind)
    operator = Operator(kind.postgres, "jobs")
    assert operator.retry() == 1
    assert drain(kind).dead == 1  # in vain: dead again, not queued for ever
    embedder.reject = lambda text: None
    assert operator.retry(ids=[str(job)]) == 1
    assert drain(kind).indexed == 1
    assert entries(db) == []
    assert log(db, "outcome, reason") == [("dead", "scan"), ("dead", "manual"), ("indexed", "manual")]


# Who is told


@pytest.fixture
def watch(kind: Kind, make_kind: KindMaker) -> Iterator[Watch]:
    made = Watch(make_kind())
    yield made
    made.close()


def hints(url: str, change: Callable[[], object]) -> list[str]:
    """The payloads that a listener gets of a change."""
    with psycopg.connect(url, autocommit=True) as listener:
        listener.execute("LISTEN semantic_outbox")
        change()
        return [notice.payload for notice in listener.notifies(timeout=0.5)]


@pytest.mark.ids("C-05", "C-60")
def test_a_request_gives_one_hint_until_the_feed_is_folded_where_that_is_on_and_never_fails_by_it(
    kind: Kind, db: Db, database_url: str
) -> None:
    assert hints(database_url, lambda: say(db, 1)) == []
    fold(kind)
    db.execute("SET embed_assets.notify = on")
    assert hints(database_url, lambda: [say(db, number) for number in range(20)]) == ["jobs"]
    assert hints(database_url, lambda: [say(db, number, kind="forgotten") for number in range(3)]) == []
    fold(kind)
    assert hints(database_url, lambda: [say(db, number) for number in range(3)]) == ["jobs"]
    role = f"producer_{uuid4().hex}"
    db.execute(
        f"CREATE ROLE {role}; GRANT USAGE ON SCHEMA embed_assets TO {role}; "
        f"GRANT INSERT ON embed_assets.source_changes TO {role}; SET ROLE {role}".encode()
    )
    try:
        assert say(db, 4) == 1
    finally:
        db.execute(f"RESET ROLE; DROP OWNED BY {role}; DROP ROLE {role}".encode())
    assert value(db, "SELECT count(*) FROM embed_assets.source_changes WHERE kind = 'jobs'") == 4


@pytest.mark.ids("C-59", "P10")
def test_a_hint_wakes_a_watch_and_one_that_hears_nothing_sees_the_same(
    kind: Kind, db: Db, database_url: str, watch: Watch
) -> None:
    with watch.listening() as wait:
        with connect(database_url) as producer:
            producer.execute("SET embed_assets.notify = on")
            say(producer, 1)
            assert not wait(0.1)  # not before it is committed
        assert wait(10)
        listeners = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE query = 'LISTEN semantic_outbox'"
        db.execute(f"{listeners} AND datname = current_database()".encode())
        with pytest.raises(psycopg.OperationalError):
            wait(5)
    assert watch.backlog().feed == 1
    fold(kind)
    with watch.listening() as wait:
        say(db, 2)  # without a hint
        assert not wait(0.1)
        assert watch.backlog().feed == 1
        db.execute("NOTIFY semantic_outbox, 'jobs'")
        assert wait(10)


# What one kind or endpoint does to another


@pytest.mark.ids("Q13")
def test_trouble_of_one_kind_s_endpoint_holds_no_other_kind_and_no_wave_mixes_kinds(
    make_kind: KindMaker, db: Db
) -> None:
    troubled, fine = HashEmbedder(), HashEmbedder()

    def refuse(_: Sequence[str]) -> None:
        raise EndpointTrouble("wrong key", error_class=ErrorClass.REFUSED)

    troubled.before = refuse
    http = {"protocol": "tei", "model": "m"}
    one = make_kind(notes(db, "ones", "a", "b"), embedder=troubled, url="http://one", **http)
    two = make_kind(notes(db, "twos", "c", "d"), embedder=fine, url="http://two", **http)
    enqueue(two)
    with pytest.raises(EndpointTrouble):
        drain(one)
    assert one.resting() is not None
    assert two.resting() is None
    assert drain(two).indexed == 2
    assert entries(db, "kind, attempts, claims") == [("ones", 0, 1), ("ones", 0, 1)]
    assert fine.texts == ["c", "d"]


@pytest.mark.ids("P22")
def test_names_whose_hashes_collide_neither_wait_for_each_other_nor_hide_each_other(
    make_kind: KindMaker, db: Db, database_url: str
) -> None:
    one, two = value(
        db,
        "SELECT min(name), max(name) FROM (SELECT 'k' || n AS name FROM generate_series(1, 400000) AS n) AS names "
        "GROUP BY hashtext(name) HAVING count(*) = 2 LIMIT 1",
    )
    held, free = make_kind(notes(db, one, "a")), make_kind(notes(db, two, "b"))
    db.execute(f"INSERT INTO {two} VALUES (%s, 'c'), (%s, 'd')".encode(), (one, two))
    with connect(database_url) as pausing:
        pausing.execute(query("models.lock_kind"), {"kind": one})
        assert drain(free).indexed == 3
    assert stamps(db) == sorted([f"{two}-0", one, two])
    assert drain(held).indexed == 1


# What it takes of the database


@pytest.mark.ids("P19")
def test_a_process_never_holds_more_than_its_few_connections(kind: Kind, db: Db) -> None:
    held = (
        "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND application_name = 'embed_assets'"
    )

    def work(_: int) -> int:
        with kind.postgres.transaction() as cursor:
            cursor.execute("SELECT pg_sleep(0.05)")
            found = cursor.execute(held.encode()).fetchone()
        return int(found["count"]) if found else 0

    with ThreadPoolExecutor(16) as pool:
        assert max(pool.map(work, range(48))) <= CONNECTIONS
    kind.close()
    until_true(lambda: value(db, held) == 0, "connections stay open")


@pytest.mark.ids("P23")
def test_a_database_that_is_not_there_is_one_clear_error_and_is_not_hammered(
    kind: Kind, db: Db, server_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempts: list[str] = []
    real = psycopg.Connection.connect

    def counted(url: str, **options: Any) -> Any:
        attempts.append(url)
        return real(url, **options)

    monkeypatch.setattr(psycopg, "connect", counted)
    monkeypatch.setattr(psycopg.Connection, "connect", counted)
    with pytest.raises(ConfigurationError, match=r'"nowhere" does not exist.*Create the database, or correct'):
        Postgres(make_conninfo(server_url, dbname="nowhere")).one("status.clock")
    assert len(attempts) == 1
    add_job(db)
    enqueue(kind)
    wave, scope = wave_of(kind), Stop()
    kind.keeper.hold(wave, scope)
    with no_connections(db, server_url):
        attempts.clear()
        time.sleep(3)
        assert 1 <= len(attempts) < 20
        assert scope.reason() is None


@contextmanager
def no_connections(db: Db, server_url: str) -> Iterator[None]:
    """The test's database takes none, and those of others are ended."""
    allow = f"ALTER DATABASE {value(db, 'SELECT current_database()')} ALLOW_CONNECTIONS "
    with psycopg.Connection.connect(server_url, autocommit=True) as admin:
        admin.execute(f"{allow} false".encode())
        db.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
            "WHERE datname = current_database() AND pid <> pg_backend_pid()"
        )
        yield
        admin.execute(f"{allow} true".encode())


@pytest.mark.ids("P14")
def test_a_commit_that_is_ended_by_the_database_charges_nobody_and_spoils_no_connection(
    kind: Kind, db: Db, embedder: HashEmbedder
) -> None:
    job = add_job(db)
    db.execute(
        "CREATE FUNCTION public.slow() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN "
        "PERFORM pg_cancel_backend(pg_backend_pid()); PERFORM pg_sleep(1); RETURN NULL; END $$;"
        "CREATE CONSTRAINT TRIGGER slow AFTER INSERT ON embed_assets.semantic_stamps DEFERRABLE INITIALLY DEFERRED "
        "FOR EACH ROW EXECUTE FUNCTION public.slow()"
    )
    with pytest.raises(DatabaseTrouble):
        drain(kind)
    assert entry(db, job, "status, attempts, crashes") == ("pending", 0, 0)
    assert chunks(db, job) == stamps(db) == log(db) == []
    db.execute("DROP FUNCTION public.slow() CASCADE")
    assert drain(kind).indexed == 1
    assert embedder.requests == 1


@pytest.mark.ids("P12")
def test_under_an_old_snapshot_the_queue_grows_by_what_changes_and_by_nothing_else(
    kind: Kind, db: Db, database_url: str
) -> None:
    add_jobs(db, 20)
    with connect(database_url) as old:
        old.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        old.execute("SELECT 1")
        for _ in range(10):
            db.execute("UPDATE jobs SET title = title || '.'")
            drain(kind, rows=100)
        size = value(db, "SELECT pg_relation_size('embed_assets.semantic_outbox')")
        assert size / 200 < 2 * 300 / 0.7  # two versions of an entry for each change: entered, leased
        db.execute("UPDATE jobs SET title = title || '.'")
        enqueue(kind)
        held = wave_of(kind, 10)
        before = entries(db, "xmin::text, ctid::text, status")
        for _ in range(5):
            enqueue(kind)
            kind.outbox.renew({held.wave_id: held.token})
        assert entries(db, "xmin::text, ctid::text, status") == before


# Settings


@pytest.mark.ids("C-17")
@pytest.mark.parametrize(("asked", "seconds"), [(-5, 10), (0.5, 10), (11, 11)])
def test_a_lease_is_never_shorter_than_ten_seconds(
    jobs_table: None, make_kind: KindMaker, db: Db, asked: float, seconds: int
) -> None:
    kind = make_kind(lease_seconds=asked)
    add_job(db)
    enqueue(kind)
    held = wave_row(db, wave_of(kind), "extract(EPOCH FROM lease_until - claimed_at)::float8")
    assert held == pytest.approx(seconds, abs=0.5)


@pytest.mark.ids("C-50")
def test_the_log_is_kept_for_fourteen_days_unless_told_and_forgotten_each_night(kind: Kind, db: Db) -> None:
    add_jobs(db, 2)
    drain(kind)
    db.execute(
        "UPDATE embed_assets.semantic_outbox_log "
        "SET finished_at = clock_timestamp() - interval '1 day' * (13 + id % 2 * 2)"
    )
    assert purge(kind.postgres, days=Settings().retention_days)["log"] == 1
    nightly = daily(maintenance(["jobs"]))
    assert (nightly.cron_schedule, nightly.default_status.value) == ("17 3 * * *", "RUNNING")


@pytest.mark.ids("Q28")
def test_a_drain_with_options_of_its_own_changes_nothing_for_the_next(kind: Kind, db: Db) -> None:
    before = (kind.settings, kind.limits, kind.bound.corpus)
    add_jobs(db, 9)
    assert drain(kind, rows=2, allow_clear=True).indexed == 9
    add_jobs(db, 9)
    drain(kind)
    claimed = rows(db, "SELECT claimed FROM embed_assets.claimed_waves ORDER BY wave_id")
    assert claimed == [2, 2, 2, 2, 1, 4, 4, 1]
    assert (kind.settings, kind.limits, kind.bound.corpus) == before
    for frozen, name in ((kind.settings, "batch_size"), (kind.limits, "rows"), (kind.bound.corpus, "prefix")):
        with pytest.raises((AttributeError, ValueError)):
            setattr(frozen, name, getattr(frozen, name))


def http(server: FakeServer, **settings: Any) -> Settings:
    given = {"protocol": "tei", "url": server.url, "model": "intfloat/multilingual-e5-base", **settings}
    return Settings(**given | ({"url": server.openai_url} if given["protocol"] == "openai" else {}))


def asked(seconds: float = 0.0, **settings: Any) -> FakeServer:
    """A server that was sent four texts, for a second at most."""
    with FakeServer(seconds_per_request=seconds) as server:
        embedder = make_embedder(http(server, **settings))
        with suppress(WaveTimeout):
            list(embedder.embed([f"text {at}" for at in range(4)], stop=Stop(seconds=1)))
        embedder.close()
    return server


def questioned(**settings: Any) -> list[str]:
    """What the server of the drain got of a question."""
    with FakeServer() as server, FakeServer() as other:
        given = http(server, **settings | ({"query_url": other.url} if settings.get("query_url") else {}))
        embedder = make_embedder(given, for_queries=True)
        embedder.embed_query("words", timeout=5)
        embedder.close()
    return server.texts


def identity(**settings: Any) -> str:
    with FakeServer() as server:
        return make_embedder(http(server, **settings)).identity


EMBEDDER: dict[str, tuple[object, Callable[..., object]]] = {
    "protocol": ("openai", lambda **given: asked(**given).requests[0].path),
    "api_key": ("secret", lambda **given: "secret" in str(asked(**given).requests[0].headers)),
    "request_items": (3, lambda **given: asked(**given).sizes),
    "concurrency": (2, lambda **given: asked(0.2, **{"request_items": 1, **given}).most_in_flight),
    "attempt_timeout_seconds": (0.2, lambda **given: len(asked(2, **given).requests)),
    "query_url": ("another", questioned),
    "prefix_by": ("server", questioned),
    "model": ("another", identity),
    "dimensions": (4, identity),
    "headers": ({"X-Team": "search"}, lambda **given: asked(**given).requests[0].headers.get("x-team")),
}


@pytest.mark.ids("Q16")
@pytest.mark.parametrize("name", EMBEDDER)
def test_a_setting_of_the_embedder_changes_what_the_server_gets(name: str) -> None:
    other, observe = EMBEDDER[name]
    assert observe(**{name: other}) != observe()


RUN: dict[str, tuple[object, Callable[[Kind], object]]] = {
    "batch_size": (2, lambda kind: kind.limits.rows),
    "call_timeout_seconds": (1.0, lambda kind: kind.limits.wave_seconds),
    "waves_per_run": (2, lambda kind: run_limits(kind).waves),
    "run_seconds": (0.2, lambda kind: run_limits(kind).rows_in_all),
    "max_attempts": (1, lambda kind: kind.outbox.max_attempts),
    "drains_in_flight": (1, lambda kind: asks(kind)),
}


def asks(kind: Kind) -> bool:
    """Whether a sensor asks for a second drain."""
    watch = Watch(kind)
    look = Look(Backlog(9, 0, 0, 0, 0, 0, limit=10, paused=False), None, busy=False)
    flight = InFlight(running=1)
    with (
        patch.object(watch, "backlog", lambda: look.backlog),
        patch.object(sensors, "in_flight", lambda instance, watch: flight),
    ):
        return sensors.judge(look, watch, lambda: None).run  # type: ignore[arg-type,return-value]


@pytest.mark.ids("Q16")
@pytest.mark.parametrize("name", RUN)
def test_a_setting_of_the_run_changes_what_a_run_takes(
    jobs_table: None, make_kind: KindMaker, db: Db, name: str
) -> None:
    other, observe = RUN[name]
    kind = make_kind()
    db.execute(
        "INSERT INTO embed_assets.claimed_waves (kind, model_id, run_id, lease_until, closed_at, outcome, claimed, "
        "texts, stage_seconds) VALUES ('jobs', 1, 'a', now(), now(), 'written', 1000, 1, 100)"
    )
    assert observe(make_kind(**{name: other})) != observe(kind)


ELSEWHERE = {
    "database_url": "tests/e2e/test_cli.py::test_no_postgres_says_where_it_was_sought_and_what_to_do",
    "home": "tests/e2e/test_cli.py::test_an_unwritable_home_is_explained",
    "corpora": "tests/unit/test_settings.py::test_a_corpus_that_cannot_be_loaded_is_named",
    "url": "tests/e2e/test_cli.py::test_an_endpoint_that_is_down_loses_nothing",
    "lease_seconds": "tests/postgres/test_queue.py::test_a_lease_is_never_shorter_than_ten_seconds",
    "requests_per_minute": "tests/postgres/test_endpoint.py::test_requests_of_all_processes_together_keep_to_the_pace",
    "tokens_per_minute": "tests/postgres/test_endpoint.py::test_tokens_take_their_share_of_the_minute",
    "ca_bundle": "tests/postgres/test_endpoint.py::"
    "test_a_server_with_a_certificate_of_ones_own_is_trusted_by_its_bundle",
    "proxy": "tests/postgres/test_endpoint.py::test_requests_go_through_the_proxy",
    "reconcile_seconds": "tests/postgres/test_queue.py::"
    "test_facts_are_reconciled_at_once_and_when_that_is_due_and_one_kind_s_fault_stops_no_other",
    "retention_days": "tests/postgres/test_queue.py::"
    "test_the_log_is_kept_for_fourteen_days_unless_told_and_forgotten_each_night",
    **dict.fromkeys(
        ("active_protocol", "active_url", "active_api_key", "active_model", "active_dimensions", "active_prefix_by"),
        "tests/postgres/test_models.py::test_the_active_model_is_kept_fresh_by_the_embedder_of_its_own_settings",
    ),
    "active_query_url": "tests/postgres/test_models.py::test_questions_go_to_the_embedder_of_the_model_search_reads",
    "switch": "tests/postgres/test_models.py::test_an_operator_s_switch_waits_for_the_operator",
    "switch_missing_percent": "tests/postgres/test_models.py::"
    "test_rows_that_search_never_found_may_be_missing_to_a_share_those_it_finds_may_not",
    "switch_dead_percent": "tests/postgres/test_models.py::test_too_many_dead_rows_keep_search_where_it_is",
    "switch_recall_percent": "tests/postgres/test_models.py::"
    "test_an_index_that_finds_too_little_keeps_search_where_it_is",
    "switch_queries": "tests/postgres/test_models.py::test_recall_asks_as_many_questions_as_the_setting_says",
    "fresh_seconds": "tests/dagster/test_checks.py::"
    "test_a_change_that_waits_for_too_long_is_told_and_a_pause_is_named_as_the_cause",
    "search_feed_seconds": "tests/dagster/test_checks.py::"
    "test_the_feed_of_an_external_index_is_judged_only_where_there_is_one",
    "alert_webhook": "tests/dagster/test_alerts.py::test_each_check_is_told_by_its_newest_evaluation",
    "rollback_days": "tests/postgres/test_model_switch.py::test_purging_drops_what_was_retired_long_ago",
    "sensor_wait_seconds": "tests/dagster/test_sensor.py::test_a_notify_ends_the_waiting_at_once",
}


@pytest.mark.ids("Q16")
def test_every_setting_is_read_by_something_and_held_by_a_test() -> None:
    assert set(Settings.model_fields) == set(EMBEDDER) | set(RUN) | set(ELSEWHERE)
    for place in ELSEWHERE.values():
        file, name = place.split("::")
        assert f"def {name}(" in (ROOT / file).read_text(encoding="utf-8")
    files = [path for path in (ROOT / "embed_assets").rglob("*.py") if path.name != "settings.py"]
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in files]
    read = {node.attr for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    of_active = {name for name in Settings.model_fields if name.startswith("active_")} - read
    assert set(Settings.model_fields) - read == {"home"} | of_active  # as home_path, as of_active()
