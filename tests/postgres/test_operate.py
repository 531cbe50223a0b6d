"""Dead letters: parked, revived, retried, dismissed, settled; pause; and what is forgotten."""

from __future__ import annotations

import io
import json

import pytest
from postgres.support import (
    add_job,
    add_jobs,
    background,
    chunks,
    claim,
    connect,
    drain,
    due_now,
    entry,
    expire,
    fold,
    rows,
    say,
    status,
    value,
    wave_of,
)
from psycopg.errors import UndefinedFunction
from rich.console import Console
from typer.testing import CliRunner

from embed_assets import console
from embed_assets.cli import app
from embed_assets.errors import AnswerContract, InputRejected
from embed_assets.resources.operator import Operator
from embed_assets.resources.retention import purge


@pytest.fixture
def operator(kind):
    return Operator(kind.postgres, "jobs")


def kill(db, kind, embedder, job: int, error: Exception) -> None:
    """Drain until the row is dead; then let its text pass again."""
    embedder.reject = lambda text: error
    for _ in range(kind.outbox.max_attempts):
        drain(kind)
        due_now(db)
    embedder.reject = lambda text: None
    assert entry(db, job) == "dead"


def reconcile(db, kind) -> None:
    db.execute("UPDATE embed_assets.corpus_scans SET last_reconcile_at = NULL")
    kind.enqueuer.enqueue()


def died(db, job: int, *, deaths: int, hours_ago: float) -> None:
    """As if it had died so often, the last time so long ago."""
    db.execute(
        "UPDATE embed_assets.semantic_outbox SET deaths = %s, last_failed_at = clock_timestamp() - %s * interval '1 h' "
        "WHERE source_id = %s",
        (deaths, hours_ago, str(job)),
    )


@pytest.mark.ids("C-40")
def test_a_transient_dead_letter_comes_back_at_the_next_reconcile(db, kind, embedder):
    job = add_job(db)
    kill(db, kind, embedder, job, AnswerContract("not a number"))
    reconcile(db, kind)
    assert entry(db, job, "status, attempts, deaths") == ("pending", 0, 1)
    drain(kind)
    assert status(kind) == {"fresh": 1}


@pytest.mark.ids("C-41", "C-65")
@pytest.mark.parametrize(
    ("deaths", "hours_ago", "comes_back"),
    [
        (2, 0, True),
        (3, 0.45, False),
        (3, 0.55, True),
        (4, 0.9, False),
        (4, 1.1, True),
        (835, 5.9, False),
        (835, 6.1, True),
    ],
)
def test_from_the_third_death_on_it_is_parked_ever_longer_up_to_six_hours(
    db, kind, embedder, deaths, hours_ago, comes_back
):
    job = add_job(db)
    kill(db, kind, embedder, job, AnswerContract("not a number"))
    died(db, job, deaths=deaths, hours_ago=hours_ago)
    parked = value(db, "SELECT parked_until IS NOT NULL FROM embed_assets.dead_letters")
    assert parked is not comes_back
    reconcile(db, kind)
    assert entry(db, job) == ("pending" if comes_back else "dead")


@pytest.mark.ids("C-42")
def test_parking_delays_neither_a_write_nor_an_operator(db, kind, embedder, operator):
    written, retried = add_jobs(db, 2)
    embedder.reject = lambda text: AnswerContract("not a number")
    for _ in range(kind.outbox.max_attempts):
        drain(kind)
        due_now(db)
    for job in (written, retried):
        died(db, job, deaths=5, hours_ago=0)
    say(db, written)
    fold(kind)
    operator.retry(ids=[str(retried)])
    assert entry(db, written, "status, deaths") == entry(db, retried, "status, deaths") == ("pending", 0)


def test_a_deterministic_dead_letter_waits_for_its_source_to_change(db, kind, embedder):
    job = add_job(db)
    kill(db, kind, embedder, job, InputRejected("never"))
    died(db, job, deaths=1, hours_ago=100)
    reconcile(db, kind)
    assert entry(db, job) == "dead"
    assert value(db, "SELECT parked_until = 'infinity' FROM embed_assets.dead_letters") is True
    db.execute("UPDATE jobs SET description = 'another text' WHERE id = %s", (job,))
    drain(kind)
    assert status(kind) == {"fresh": 1}


def test_a_dead_letter_whose_row_is_gone_is_settled(db, kind, embedder):
    job = add_job(db)
    kill(db, kind, embedder, job, InputRejected("never"))
    db.execute("DELETE FROM jobs WHERE id = %s", (job,))
    drain(kind)
    assert entry(db, job) is None
    assert value(db, "SELECT outcome FROM embed_assets.semantic_outbox_log ORDER BY id DESC LIMIT 1") == "gone"


def test_a_dismissed_dead_letter_is_uncounted_and_stays_until_its_source_changes(db, kind, embedder, operator):
    job = add_job(db)
    kill(db, kind, embedder, job, AnswerContract("not a number"))
    assert operator.dismiss() == 1
    assert (status(kind), operator.dead_letters(), kind.outbox.backlog().dead) == ({"dismissed": 1}, [], 0)
    assert operator.retry() == 0
    reconcile(db, kind)
    assert entry(db, job) == "dead"
    db.execute("UPDATE jobs SET description = 'another text' WHERE id = %s", (job,))
    drain(kind)
    assert status(kind) == {"fresh": 1}


@pytest.mark.ids("C-54")
def test_dead_letters_tell_occurrences_first_and_last_failure_and_last_success(db, kind, embedder):
    job = add_job(db)
    drain(kind)
    db.execute("UPDATE jobs SET description = 'a text that fails' WHERE id = %s", (job,))
    kill(db, kind, embedder, job, AnswerContract("not a number"))
    occurrences, in_order, indexed_before = value(
        db,
        "SELECT occurrences, first_failed_at < last_failed_at, last_success_at < first_failed_at "
        "FROM embed_assets.dead_letters",
    )
    assert (occurrences, in_order, indexed_before) == (3, True, True)


@pytest.mark.ids("C-51")
def test_dead_letters_are_listed_newest_first_by_a_prefix_that_is_no_pattern(db, notes_kind):
    kind, ids = notes_kind, ["a%b", "a%c", "aXb", "b_1", "bX1"]
    if kind.bound.key_type != "text":
        pytest.skip("only text keys have such prefixes")
    db.execute(
        "INSERT INTO embed_assets.semantic_outbox (kind, source_id, model_id, reason, status, error_code, error_class, "
        "error_message, failures, first_failed_at, last_failed_at) SELECT 'notes', id, %s, 'scan', 'dead', "
        "'code_' || n, 'input_rejected', 'refused', 3, now() - interval '1 day', now() - n * interval '1 hour' "
        "FROM unnest(%s::text[]) WITH ORDINALITY AS given (id, n)",
        (kind.model_id, ids),
    )
    operator = Operator(kind.postgres, "notes")
    assert [letter.source_id for letter in operator.listed()] == ids
    assert [letter.source_id for letter in operator.listed(prefix="a%")] == ["a%b", "a%c"]
    assert [letter.source_id for letter in operator.listed(prefix="b_")] == ["b_1"]
    assert [letter.source_id for letter in operator.listed(code="code_3", limit=2)] == ["aXb"]
    assert [letter.source_id for letter in operator.listed(limit=2)] == ids[:2]
    first = operator.listed(limit=1)[0]
    assert (first.occurrences, first.error_message, first.parked_until, first.model) == (
        3,
        "refused",
        None,
        kind.identity,
    )


@pytest.mark.ids("C-51")
def test_fifty_dead_letters_are_listed_unless_told_and_five_hundred_at_most(db, kind, operator):
    db.execute(
        "INSERT INTO embed_assets.semantic_outbox (kind, source_id, model_id, reason, status, error_code, error_class, "
        "error_message, failures, first_failed_at, last_failed_at) SELECT 'jobs', n::text, %s, 'scan', 'dead', 'code', "
        "'input_rejected', 'refused', 1, now(), now() FROM generate_series(1, 501) AS n",
        (kind.model_id,),
    )
    assert [len(operator.listed(**limit)) for limit in ({}, {"limit": 100}, {"limit": 9_999})] == [50, 100, 500]


@pytest.mark.ids("C-53")
def test_the_last_activity_is_none_before_anything_was_done_and_then_that_of_the_newest(db, kind, operator):
    assert operator.last_activity() is None
    add_jobs(db, 2)
    kind.enqueuer.enqueue(scan=True)
    assert operator.last_activity() is None
    wave = wave_of(kind, 1)
    assert operator.last_activity() == wave.claimed_at
    drain(kind)
    finished = value(db, "SELECT max(finished_at) FROM embed_assets.semantic_outbox_log")
    assert operator.last_activity() == finished > wave.claimed_at


@pytest.mark.ids("C-44")
def test_a_sweep_of_the_parked_that_fails_keeps_nothing_back_and_is_repeated(db, kind, embedder):
    job = add_job(db)
    kill(db, kind, embedder, job, AnswerContract("not a number"))
    said = add_job(db)
    say(db, said)
    db.execute("ALTER FUNCTION embed_assets.parked_until RENAME TO elsewhere")
    with pytest.raises(UndefinedFunction):
        reconcile(db, kind)
    assert (entry(db, said), entry(db, job)) == ("pending", "dead")
    db.execute("ALTER FUNCTION embed_assets.elsewhere RENAME TO parked_until")
    kind.enqueuer.enqueue()
    assert entry(db, job) == "pending"


def test_failures_are_grouped_by_code_with_a_sample_and_the_next_step(db, kind, embedder, operator):
    bad, worse, also_bad = add_job(db, "<p>bad</p>"), add_job(db, "<p>worse</p>"), add_job(db, "<p>bad two</p>")
    embedder.reject = lambda text: InputRejected("never", code="refused_text" if "bad" in text else "other")
    drain(kind)
    groups = operator.dead_letters()
    assert [(group.error_code, group.rows) for group in groups] == [("refused_text", 2), ("other", 1)]
    assert groups[0].sample in {str(bad), str(also_bad)}
    assert "change the row" in groups[0].next_step
    assert operator.retry(code="other") == 1
    assert (entry(db, worse), entry(db, bad)) == ("pending", "dead")


def test_rows_that_wait_for_another_try_are_told_by_code_with_the_time_of_the_next_one(
    db, kind, embedder, operator, database_url, monkeypatch
):
    soon, later = add_job(db, "<p>odd one</p>"), add_job(db, "<p>odd two</p>")
    add_job(db)
    embedder.reject = lambda text: AnswerContract("no vector", code="odd") if "odd" in text else None
    drain(kind)
    db.execute(
        "UPDATE embed_assets.semantic_outbox SET next_attempt_at = '2300-01-01 12:30+00'::timestamptz "
        "+ CASE source_id WHEN %s THEN interval '0' ELSE interval '1 day' END",
        (str(soon),),
    )
    (group,) = operator.waiting()
    assert (group.error_code, group.rows, group.sample) == ("odd", 2, str(min(soon, later)))
    assert (f"{group.next_attempt_at:%Y-%m-%d %H:%M}", operator.waiting(code="other")) == ("2300-01-01 12:30", [])
    monkeypatch.setenv("DATABASE_URL", database_url)
    monkeypatch.setattr(console, "out", Console(width=120, file=(told := io.StringIO())))
    command = CliRunner().invoke
    assert command(app, ["failures", "jobs"]).exit_code == 0
    assert "no dead letters" in told.getvalue()
    assert "odd" in told.getvalue()
    assert "2300-01-01 12:30:00" in told.getvalue()
    (shown,) = json.loads(command(app, ["failures", "jobs", "--json"]).stdout)
    assert (shown["state"], shown["error_code"], shown["rows"]) == ("waiting", "odd", 2)


@pytest.mark.ids("B-26")
def test_a_message_holds_neither_the_row_s_text_nor_its_key(db, kind, embedder):
    add_job(db, "<p>a very private sentence</p>", external_id="private-key")
    db.execute(
        "CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN "
        "RAISE EXCEPTION 'no: %', new.body USING ERRCODE = '23514'; END $$"
    )
    db.execute(
        "CREATE TRIGGER refuse BEFORE INSERT ON embed_assets.job_semantic_chunks_m1 "
        "FOR EACH ROW EXECUTE FUNCTION refuse()"
    )
    drain(kind)
    text = json.dumps(rows(db, "SELECT to_jsonb(o)::text FROM embed_assets.semantic_outbox AS o"))
    assert "row_rejected" in text
    assert "private sentence" not in text
    assert "private-key" not in text


@pytest.mark.ids("C-48")
def test_cancel_takes_back_the_pending_of_one_reason_and_nothing_else(db, kind, operator):
    leased, pending, other = add_jobs(db, 3)
    say(db, leased, reason="backfill", lane=1)
    fold(kind)
    claim(kind)
    say(db, pending, reason="backfill", lane=1)
    say(db, other, reason="manual")
    fold(kind)
    assert (operator.cancel("backfill"), operator.cancel("backfill")) == (1, 0)
    assert (entry(db, leased), entry(db, pending), entry(db, other)) == ("leased", None, "pending")


def test_an_entry_that_was_locked_when_its_wave_was_reaped_asks_for_the_next_claim(db, kind, database_url):
    job = add_job(db)
    kind.enqueuer.enqueue(scan=True)
    expire(db, wave_of(kind))
    with connect(database_url) as holder:
        holder.execute("SELECT FROM embed_assets.semantic_outbox FOR UPDATE")
        assert claim(kind) is None
    assert (entry(db, job), kind.outbox.backlog().expired) == ("leased", 1)
    assert claim(kind) is not None
    assert kind.outbox.backlog().expired == 0


def test_latency_is_told_by_quantile_from_the_log(db, kind, operator):
    assert (operator.latency().indexed, operator.latency().p50) == (0, None)
    add_jobs(db, 3)
    drain(kind)
    db.execute(
        "UPDATE embed_assets.semantic_outbox_log SET enqueued_at = finished_at - source_id::integer * interval '1 s'"
    )
    low, middle, high = sorted(map(int, rows(db, "SELECT source_id FROM embed_assets.semantic_outbox_log")))
    found = operator.latency()
    assert (found.indexed, found.p50) == (3, middle)
    assert low < found.p50 < found.p95 < found.p99 < high


def test_a_paused_kind_claims_nothing_until_it_is_resumed(db, kind, operator):
    add_job(db)
    assert (operator.pause(), operator.pause()) == (True, False)
    assert drain(kind).indexed == 0
    assert claim(kind) is None
    assert (operator.resume(), operator.resume()) == (True, False)
    assert drain(kind).indexed == 1


def test_pause_returns_when_the_write_under_way_is_committed(db, kind, operator, database_url):
    from postgres.support import gate, staged

    job = add_job(db)
    kind.enqueuer.enqueue(scan=True)
    wave = staged(kind)
    with gate(database_url, "semantic_stamps") as held, background(lambda: kind.chunks.write(wave)) as writing:
        held.wait()
        with background(operator.pause) as pausing:
            assert not pausing.done()
            assert value(db, "SELECT paused_at IS NULL FROM embed_assets.corpora")
            held.open()
            assert pausing.result(timeout=10)
        assert writing.result(timeout=10).indexed == 1
    assert chunks(db, job)


@pytest.mark.ids("C-49")
def test_a_purge_forgets_what_is_old_and_keeps_open_entries_and_dead_letters(db, kind, embedder):
    good = add_job(db, "<p>good</p>")
    drain(kind)
    dead = add_job(db, "<p>bad</p>")
    embedder.reject = lambda text: InputRejected("never")
    drain(kind)
    db.execute("UPDATE embed_assets.semantic_outbox_log SET finished_at = finished_at - interval '15 days'")
    db.execute("UPDATE embed_assets.claimed_waves SET closed_at = closed_at - interval '15 days'")
    db.execute("UPDATE embed_assets.chunk_embeddings SET staged_at = staged_at - interval '49 hours'")
    db.execute("UPDATE embed_assets.similar_invalidations SET at = at - interval '15 days'")
    assert purge(kind.postgres, days=0) == {}
    deleted = purge(kind.postgres, days=14)
    assert (deleted["log"], deleted["ledger"], deleted["waves"]) == (2, 1, 1)  # the dead letter's wave is still named
    assert entry(db, dead) == "dead"
    assert chunks(db, good)
    assert purge(kind.postgres, days=14) == dict.fromkeys(deleted, 0)


def test_a_purge_leaves_what_is_young(db, kind):
    add_job(db)
    drain(kind)
    assert set(purge(kind.postgres, days=14).values()) == {0}
    assert value(db, "SELECT count(*) FROM embed_assets.semantic_outbox_log") == 1
