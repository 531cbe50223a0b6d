"""What becomes an outbox entry: the scan's judgement of rows, the feed and its fold, the reconciler's facts."""

from __future__ import annotations

import uuid

import pytest
from fakes import HashEmbedder
from postgres.conftest import KindMaker
from postgres.support import (
    Db,
    add_job,
    add_jobs,
    background,
    chunks,
    claim,
    connect,
    drain,
    enqueue,
    entries,
    entry,
    expire,
    fold,
    gate,
    rows,
    say,
    staged,
    stamps,
    status,
    until_true,
    value,
    wave_of,
)

from embed_assets.corpus import Plain, TableCorpus
from embed_assets.errors import AnswerContract, Cancelled, InputRejected, RowRejected
from embed_assets.models import Failure
from embed_assets.resources.assembly import Kind
from embed_assets.stop import Stop

CLOSE = "UPDATE jobs SET closed_at = now() WHERE id = %s"


def edit(db: Db, job: int) -> None:
    db.execute("UPDATE jobs SET description = description || ' edited' WHERE id = %s", (job,))


# The scan


@pytest.mark.ids("A-02")
def test_row_that_was_never_embedded_is_enqueued(kind: Kind, db: Db) -> None:
    job = add_job(db)
    assert enqueue(kind).created == 1
    assert entries(db, "source_id, status, lane, forced") == [(str(job), "pending", 0, False)]


@pytest.mark.ids("A-03")
def test_row_whose_revision_is_not_the_stamped_one_is_enqueued(kind: Kind, db: Db) -> None:
    kept, edited = add_jobs(db, 2)
    drain(kind)
    edit(db, edited)
    assert enqueue(kind).created == 1
    assert entries(db) == [str(edited)]
    assert entry(db, kept) is None


@pytest.mark.ids("A-04", "A-66")
def test_another_identity_enqueues_every_indexable_row_again(kind: Kind, make_kind: KindMaker, db: Db) -> None:
    jobs = add_jobs(db, 3)
    closed = add_job(db)
    drain(kind)
    db.execute(CLOSE, (closed,))
    drain(kind)
    renewed = make_kind(embedder=HashEmbedder(identity="another"))
    assert enqueue(renewed).created == 3
    assert entries(db, "source_id, model_id") == [(str(job), renewed.model_id) for job in jobs]


@pytest.mark.ids("A-05")
def test_row_with_equal_model_and_revision_is_not_enqueued(kind: Kind, embedder: HashEmbedder, db: Db) -> None:
    add_jobs(db, 3)
    drain(kind)
    sent = list(embedder.texts)
    assert enqueue(kind).created == 0
    drain(kind)
    assert entries(db) == []
    assert embedder.texts == sent


@pytest.mark.ids("A-06")
def test_null_revision_embeds_once_and_is_stamped_null(kind: Kind, db: Db) -> None:
    db.execute("ALTER TABLE jobs DROP COLUMN content_hash")
    db.execute("ALTER TABLE jobs ADD COLUMN content_hash text")
    job = add_job(db)
    drain(kind)
    assert stamps(db, "source_id, revision") == [(str(job), None)]
    assert enqueue(kind).created == 0
    db.execute("UPDATE jobs SET content_hash = 'known' WHERE id = %s", (job,))
    assert enqueue(kind).created == 1


@pytest.mark.ids("A-07")
def test_gate_that_is_false_or_null_keeps_a_row_out(kind: Kind, db: Db) -> None:
    add_job(db, is_tech=False)
    add_job(db, is_tech=None)
    job = add_job(db)
    enqueue(kind)
    assert entries(db) == [str(job)]
    drain(kind)
    assert status(kind) == {"fresh": 1, "excluded": 2}


@pytest.mark.ids("A-08")
@pytest.mark.parametrize("gate_value", [True, False, None])
@pytest.mark.parametrize("change", ["closed_at = now()", "duplicate_of = 1"])
def test_stamped_row_that_left_search_is_enqueued_whatever_its_gate(
    kind: Kind, db: Db, change: str, gate_value: bool | None
) -> None:
    job = add_job(db)
    drain(kind)
    db.execute(f"UPDATE jobs SET {change}, is_tech = %s WHERE id = %s".encode(), (gate_value, job))
    assert enqueue(kind).created == 1
    assert status(kind) == {"due": 1}
    drain(kind)
    assert chunks(db, job) == stamps(db) == entries(db) == []
    assert status(kind) == {"excluded": 1}


@pytest.mark.ids("A-09")
@pytest.mark.parametrize("columns", [{"closed_at": "2026-01-01"}, {"duplicate_of": 1}])
def test_unindexable_row_without_a_stamp_is_not_enqueued(kind: Kind, db: Db, columns: dict[str, object]) -> None:
    add_job(db, **columns)
    assert enqueue(kind).created == 0
    assert entries(db) == []


@pytest.mark.ids("A-10", "B-03", "C-03")
def test_enqueued_twice_is_one_entry_and_counted_once(kind: Kind, db: Db) -> None:
    job, _ = add_jobs(db, 2)
    assert enqueue(kind).created == 2
    before = entries(db, "id, source_id, xmin::text")
    assert enqueue(kind).created == 0
    assert entries(db, "id, source_id, xmin::text") == before
    say(db, job, job)
    again = enqueue(kind)
    assert (again.folded, again.created) == (2, 0)
    assert len(entries(db)) == 2


@pytest.mark.ids("A-11")
def test_entry_carries_the_freshness_by_which_it_is_claimed(kind: Kind, db: Db) -> None:
    posted = add_job(db, posted_at="2026-01-02 00:00Z", created_at="2020-01-01 00:00Z")
    undated = add_job(db, posted_at=None, created_at="2026-01-01 00:00Z")
    unknown = add_job(db, posted_at=None, created_at=None)
    say(db, posted, undated, unknown)
    fold(kind)
    folded = entries(db, "source_id, rank")
    db.execute("DELETE FROM embed_assets.semantic_outbox")
    enqueue(kind)
    assert sorted(folded) == sorted(entries(db, "source_id, rank"))
    assert dict(folded) == {str(posted): -1767312000, str(undated): -1767225600, str(unknown): float("inf")}


@pytest.mark.ids("Q21")
def test_unrelated_column_buys_nothing(kind: Kind, embedder: HashEmbedder, db: Db) -> None:
    db.execute("ALTER TABLE jobs ADD COLUMN views integer NOT NULL DEFAULT 0")
    job = add_job(db)
    drain(kind)
    db.execute("UPDATE jobs SET views = views + 1")
    assert enqueue(kind).created == 0
    say(db, job)
    assert drain(kind).superseded == 1
    assert len(embedder.texts) == 1
    assert status(kind) == {"fresh": 1}


@pytest.mark.ids("Q20", "A-45")
def test_deleted_row_is_cleared_and_costs_nothing(kind: Kind, embedder: HashEmbedder, db: Db) -> None:
    gone, kept = add_jobs(db, 2)
    drain(kind)
    db.execute("DELETE FROM jobs WHERE id = %s", (gone,))
    assert drain(kind).gone == 1
    assert chunks(db, gone) == entries(db) == []
    assert stamps(db) == [str(kept)]
    assert len(embedder.texts) == 2


@pytest.mark.ids("Q20")
def test_truncated_table_is_cleared(kind: Kind, db: Db) -> None:
    add_jobs(db, 5)
    drain(kind)
    db.execute("TRUNCATE jobs")
    assert drain(kind).gone == 5
    assert value(db, "SELECT count(*) FROM embed_assets.job_semantic_chunks") == 0
    assert status(kind) == {}


@pytest.mark.ids("Q20")
def test_changed_key_moves_the_chunks_without_buying_them_again(kind: Kind, embedder: HashEmbedder, db: Db) -> None:
    job = add_job(db)
    drain(kind)
    body = chunks(db, job)
    db.execute("ALTER TABLE jobs ALTER COLUMN id DROP IDENTITY")
    db.execute("UPDATE jobs SET id = 777 WHERE id = %s", (job,))
    counts = drain(kind)
    assert (counts.indexed, counts.gone, counts.texts) == (1, 1, 0)
    assert chunks(db, job) == []
    assert chunks(db, 777) == body
    assert len(embedder.texts) == 1


@pytest.mark.ids("Q20")
def test_key_that_is_inserted_again_gets_the_new_row_s_chunks(kind: Kind, db: Db) -> None:
    job = add_job(db, "the old text")
    drain(kind)
    db.execute("DELETE FROM jobs WHERE id = %s", (job,))
    db.execute(
        "INSERT INTO jobs (id, title, company, description, is_tech) OVERRIDING SYSTEM VALUE "
        "VALUES (%s, 't', 'c', 'the new text', true)",
        (job,),
    )
    drain(kind)
    assert chunks(db, job) == ["the new text"]
    assert status(kind) == {"fresh": 1}


@pytest.mark.ids("Q20")
def test_row_that_is_deleted_while_it_is_embedded_leaves_nothing(kind: Kind, embedder: HashEmbedder, db: Db) -> None:
    job = add_job(db)
    embedder.before = lambda texts: db.execute("DELETE FROM jobs") and None
    counts = drain(kind)
    assert (counts.indexed, counts.back, counts.gone) == (1, 1, 1)
    assert chunks(db, job) == entries(db) == stamps(db) == []


# The mass-clear guard


def test_scan_that_would_clear_most_of_over_a_thousand_stamps_stops_and_says_so(kind: Kind, db: Db) -> None:
    add_stamped(kind, db, 1_001)
    db.execute("DELETE FROM jobs WHERE id > 500")
    found = enqueue(kind)
    assert found.created == 0
    assert ["501 of 1001" in warning for warning in found.warnings] == [True]
    assert entries(db) == []
    assert enqueue(kind, allow_clear=True).created == 501


@pytest.mark.parametrize(("stamped", "deleted"), [(1_000, 900), (1_001, 500)])
def test_scan_clears_up_to_half_and_small_kinds_as_they_are(kind: Kind, db: Db, stamped: int, deleted: int) -> None:
    add_stamped(kind, db, stamped)
    db.execute("DELETE FROM jobs WHERE id > %s", (stamped - deleted,))
    found = enqueue(kind)
    assert (found.created, found.warnings) == (deleted, [])


def test_guard_does_not_stop_new_rows_from_being_enqueued(kind: Kind, db: Db) -> None:
    add_stamped(kind, db, 1_001)
    db.execute("DELETE FROM jobs")
    job = add_job(db)
    assert enqueue(kind).created == 1
    assert entries(db) == [str(job)]


def add_stamped(kind: Kind, db: Db, number: int) -> None:
    """Rows with stamps and no chunks, as empty texts leave them."""
    db.execute(
        "INSERT INTO jobs (title, is_tech) SELECT 'stamped ' || n, true FROM generate_series(1, %s) AS n", (number,)
    )
    db.execute(
        "INSERT INTO embed_assets.semantic_stamps (kind, model_id, source_id, revision, chunk_count) "
        "SELECT 'jobs', %s, id::text, content_hash, 0 FROM jobs",
        (kind.model_id,),
    )


# The feed


@pytest.mark.ids("C-39", "P18")
def test_request_of_a_lower_id_that_commits_later_is_not_lost(kind: Kind, db: Db, database_url: str) -> None:
    first, second = add_jobs(db, 2)
    with connect(database_url) as slow:
        say(slow, first)
        say(db, second)
        assert rows(db, "SELECT source_id FROM embed_assets.source_changes") == [str(second)]
        assert fold(kind).folded == 1
        slow.commit()
    assert fold(kind).folded == 1
    assert entries(db) == [str(second), str(first)]


@pytest.mark.ids("C-39")
def test_scan_judges_rows_without_asking_the_queue(kind: Kind, db: Db) -> None:
    job = add_job(db)
    enqueue(kind)
    db.execute("DELETE FROM embed_assets.semantic_outbox")
    db.execute("DELETE FROM embed_assets.semantic_outbox_log")
    assert enqueue(kind).created == 1
    assert entries(db) == [str(job)]


def test_request_that_is_rolled_back_leaves_nothing(kind: Kind, db: Db, database_url: str) -> None:
    job = add_job(db)
    with connect(database_url) as producer:
        assert say(producer, job) == 1
        producer.rollback()
    assert fold(kind).folded == 0
    assert entries(db) == []


@pytest.mark.parametrize(
    ("kind_name", "array"),
    [
        ("jobs", "ARRAY[1, 2]"),
        ("jobs", "ARRAY[1, 2]::bigint[]"),
        ("jobs", "ARRAY['1', '2']"),
        ("jobs", "'{1,2}'::text[]"),
    ],
)
def test_enqueue_takes_arrays_of_any_type_that_spells_keys(kind: Kind, db: Db, kind_name: str, array: str) -> None:
    assert value(db, f"SELECT embed_assets.enqueue(%s, {array})", kind_name) == 2
    assert fold(kind).created == 2
    assert entries(db) == ["1", "2"]


def test_keys_of_other_types_are_folded_under_their_one_spelling(notes_kind: Kind, db: Db) -> None:
    given = str(uuid.uuid4())
    db.execute("INSERT INTO notes VALUES (%s, 'text')", (given,))
    db.execute("SELECT embed_assets.enqueue('notes', array_agg(note_id)) FROM notes")
    if notes_kind.bound.key_type == "uuid":
        say(db, given.upper(), kind="notes")
    fold(notes_kind)
    assert entries(db) == [given]
    drain(notes_kind)
    assert chunks(db, given, table="notes_semantic_chunks", key="note_id") == ["text"]


@pytest.mark.usefixtures("jobs_table")
@pytest.mark.parametrize("key_type", ["bigint", "uuid"])
def test_ids_that_can_be_no_key_are_dropped_and_reported(make_kind: KindMaker, db: Db, key_type: str) -> None:
    good = "5" if key_type == "bigint" else str(uuid.uuid4())
    if key_type == "bigint":
        chosen = make_kind()
    else:
        db.execute("CREATE TABLE notes (note_id uuid PRIMARY KEY, body text)")
        chosen = make_kind(TableCorpus(kind="notes", table="notes", key="note_id", text=Plain("body")))
    garbage = ["", " 5", "05", "five", "1.0", "9" * 40, "9223372036854775808", "{}", "'; DROP TABLE jobs", "ü" * 2000]
    say(db, *garbage, good, kind=chosen.outbox.kind)
    found = fold(chosen)
    assert (found.folded, found.unknown, found.created) == (len(garbage) + 1, len(garbage), 1)
    assert [f"{len(garbage)} enqueued ids" in warning for warning in found.warnings] == [True]
    assert entries(db) == [good]
    assert value(db, "SELECT count(*) FROM embed_assets.source_changes") == 0


def test_request_after_a_claim_is_newer_than_the_claim_whenever_its_producer_began(
    kind: Kind, db: Db, database_url: str
) -> None:
    job = add_job(db)
    with connect(database_url) as early:
        say(early, job, forced=True)
        enqueue(kind)
        wave = staged(kind)
        early.commit()
    assert value(db, "SELECT at FROM embed_assets.source_changes") < wave.claimed_at
    fold(kind)
    assert entry(db, job, "requested_at") > wave.claimed_at
    kind.chunks.write(wave)
    assert entry(db, job, "status, forced") == ("pending", True)


@pytest.mark.ids("C-66")
def test_forced_request_is_kept_when_the_entry_is_under_way_and_buys_the_text_again(
    kind: Kind, embedder: HashEmbedder, db: Db
) -> None:
    job = add_job(db)
    enqueue(kind)
    wave = staged(kind)
    say(db, job, forced=True)
    say(db, job)
    fold(kind)
    assert entry(db, job, "status, forced") == ("leased", True)
    kind.chunks.write(wave)
    assert drain(kind).texts == 1
    assert len(embedder.texts) == 2
    assert status(kind) == {"fresh": 1}


def test_lane_of_changes_wins_over_the_lane_of_backfills(kind: Kind, db: Db) -> None:
    both, only_backfill = add_jobs(db, 2)
    say(db, both, only_backfill, lane=1, reason="backfill")
    say(db, both)
    fold(kind)
    assert sorted(entries(db, "source_id, lane, reason")) == [
        (str(both), 0, "write"),
        (str(only_backfill), 1, "backfill"),
    ]
    say(db, both, lane=1)
    say(db, only_backfill)
    fold(kind)
    assert entries(db, "lane") == [0, 0]


def dead(kind: Kind, db: Db, job: int) -> None:
    """The entry of this job fails for good."""
    enqueue(kind)
    wave = wave_of(kind)
    revision = value(db, "SELECT content_hash FROM jobs WHERE id = %s", job)
    kind.outbox.start(wave)
    kind.outbox.fail(wave, [Failure(str(job), InputRejected("no"), revision, revision_known=True)])
    kind.outbox.release(wave)
    assert entry(db, job) == "dead"


@pytest.mark.ids("C-04")
def test_dead_letter_is_revived_by_a_request(kind: Kind, db: Db) -> None:
    job = add_job(db)
    dead(kind, db, job)
    assert enqueue(kind).revived == 0
    say(db, job)
    fold(kind)
    columns = "status, attempts, crashes, timeouts, next_attempt_at, dismissed_at"
    assert entry(db, job, columns) == ("pending", 0, 0, 0, None, None)
    drain(kind)
    assert status(kind) == {"fresh": 1}


def test_dead_letter_whose_source_changed_comes_back_by_the_scan(kind: Kind, db: Db) -> None:
    job = add_job(db)
    dead(kind, db, job)
    edit(db, job)
    assert enqueue(kind).revived == 1
    drain(kind)
    assert status(kind) == {"fresh": 1}


@pytest.mark.parametrize("requested", [True, False])
def test_failure_is_not_charged_to_a_row_that_was_requested_again_meanwhile(
    kind: Kind, db: Db, requested: bool
) -> None:
    job = add_job(db)
    enqueue(kind)
    began = kind.outbox.now()
    wave = staged(kind)
    if requested:
        say(db, job)
        fold(kind)
    counts = kind.outbox.fail(wave, [Failure(str(job), RowRejected("no"))])
    kind.outbox.release(wave)
    assert (counts.back, counts.failed) == ((1, 0) if requested else (0, 1))
    columns = "status, attempts, failures"
    assert entry(db, job, columns) == (("pending", 0, 0) if requested else ("retry_wait", 1, 1))
    assert (claim(kind, failed_before=began) is not None) is requested


def test_dead_letter_that_failed_without_naming_its_revision_comes_back_when_its_source_changed(
    kind: Kind, db: Db
) -> None:
    job = add_job(db)
    enqueue(kind)
    wave = staged(kind)
    kind.outbox.max_attempts = 1
    kind.outbox.fail(wave, [Failure(str(job), RowRejected("no"))])
    kind.outbox.release(wave)
    assert entry(db, job) == "dead"
    assert enqueue(kind).revived == 0
    edit(db, job)
    assert enqueue(kind).revived == 1


@pytest.mark.ids("C-22")
def test_dead_letter_whose_source_is_gone_is_settled(kind: Kind, db: Db) -> None:
    job = add_job(db)
    dead(kind, db, job)
    db.execute("DELETE FROM jobs")
    drain(kind)
    assert entries(db) == []
    assert status(kind) == {}
    assert rows(db, "SELECT outcome FROM embed_assets.semantic_outbox_log ORDER BY id") == ["dead", "gone"]


def test_dead_letter_of_a_crash_comes_back_when_its_source_changed(kind: Kind, db: Db) -> None:
    job = add_job(db)
    enqueue(kind)
    for _ in range(3):
        wave = wave_of(kind)
        kind.outbox.start(wave)
        kind.chunks.load(wave, wave.source_ids)
        expire(db, wave)
    assert claim(kind) is None
    assert entry(db, job, "status, error_code") == ("dead", "LEASE_ATTEMPTS_EXHAUSTED")
    assert enqueue(kind).revived == 0
    edit(db, job)
    assert enqueue(kind).revived == 1


def test_waiting_retry_is_due_at_once_when_it_is_requested(kind: Kind, db: Db) -> None:
    job = add_job(db)
    enqueue(kind)
    wave = wave_of(kind)
    kind.outbox.start(wave)
    kind.outbox.fail(wave, [Failure(str(job), AnswerContract("once"))])
    kind.outbox.release(wave)
    assert claim(kind) is None
    say(db, job)
    fold(kind)
    assert wave_of(kind).source_ids == [str(job)]


# One enqueuer per kind


def test_second_enqueuer_skips_while_the_first_is_at_work(kind: Kind, other: Kind, db: Db, database_url: str) -> None:
    add_jobs(db, 2)
    with gate(database_url, "semantic_outbox") as held, background(lambda: enqueue(kind)) as first:
        held.wait()
        assert enqueue(other).skipped
        held.open()
        assert first.result().created == 2
    assert not enqueue(other).skipped


def test_enqueuer_whose_lease_lapsed_is_fenced_and_its_successor_goes_on(kind: Kind, other: Kind, db: Db) -> None:
    add_jobs(db, 2)
    db.execute(
        "UPDATE embed_assets.corpus_scans SET token = gen_random_uuid(), until = clock_timestamp() + interval '1 min'"
    )
    assert enqueue(kind).skipped
    db.execute("UPDATE embed_assets.corpus_scans SET until = clock_timestamp() - interval '1 second'")
    assert enqueue(other).created == 2


@pytest.mark.ids("Q19")
def test_enqueuer_that_never_comes_back_holds_nobody_up_for_longer_than_a_lease(
    kind: Kind, make_kind: KindMaker, db: Db, database_url: str
) -> None:
    add_jobs(db, 1)
    with (
        gate(database_url, "semantic_outbox") as held,
        background(lambda: enqueue(make_kind(lease_seconds=10))) as first,
    ):
        held.wait()
        left = value(db, "SELECT extract(EPOCH FROM until - clock_timestamp()) FROM embed_assets.corpus_scans")
        assert left <= 10
        held.open()
        assert first.result().created == 1


def test_step_that_outlasts_its_lease_is_not_taken_over_and_goes_on(
    kind: Kind, other: Kind, db: Db, database_url: str
) -> None:
    add_jobs(db, 2)
    kind.enqueuer._lease_seconds = 0.2
    over = "SELECT until < clock_timestamp() FROM embed_assets.corpus_scans"
    with gate(database_url, "semantic_outbox") as held, background(lambda: enqueue(kind)) as first:
        held.wait()
        until_true(lambda: value(db, over), "the lease does not run out")
        assert enqueue(other).skipped
        held.open()
        assert first.result().created == 2


def test_cancelled_scan_gives_its_lease_back(kind: Kind, db: Db) -> None:
    add_jobs(db, 2)
    stop = Stop()
    stop.cancel()
    with pytest.raises(Cancelled):
        enqueue(kind, stop=stop)
    assert rows(db, "SELECT token, until, last_scan_at FROM embed_assets.corpus_scans") == [(None, None, None)]
    assert enqueue(kind).created == 2


# Facts


def test_reconcile_repairs_pruned_chunks(kind: Kind, embedder: HashEmbedder, db: Db) -> None:
    pruned, kept = add_jobs(db, 2)
    drain(kind)
    db.execute("DELETE FROM embed_assets.job_semantic_chunks WHERE id = %s", (pruned,))
    assert enqueue(kind).unstamped == 0
    db.execute("UPDATE embed_assets.corpus_scans SET last_reconcile_at = last_reconcile_at - interval '1 hour'")
    found = kind.enqueuer.enqueue()
    assert (found.unstamped, found.created) == (1, 1)
    assert entries(db, "source_id, reason") == [(str(pruned), "reconcile")]
    drain(kind)
    assert len(chunks(db, pruned)) == len(chunks(db, kept)) == 1
    assert len(embedder.texts) == 2
    assert status(kind) == {"fresh": 2}


@pytest.mark.ids("A-19")
def test_row_that_became_unindexable_before_it_was_embedded_settles(kind: Kind, db: Db) -> None:
    job = add_job(db)
    enqueue(kind)
    db.execute(CLOSE, (job,))
    assert drain(kind).removed == 1
    assert entries(db) == stamps(db) == []
    assert status(kind) == {"excluded": 1}


# Rows that the database cannot read


@pytest.fixture
def fragile(jobs_table: None, make_kind: KindMaker, monkeypatch: pytest.MonkeyPatch) -> Kind:
    """A declaration whose revision, order and condition divide by what the row's company_slug says."""
    monkeypatch.setattr("embed_assets.resources.ranges.RANGE_KEYS", 16)
    per_row = "100 / coalesce(company_slug, '1')::integer"
    return make_kind(
        TableCorpus(
            kind="jobs",
            table="jobs",
            key="id",
            chunks="job_semantic_chunks",
            text=Plain("description"),
            revision=f"md5(description) || ({per_row})",
            fresh_at=f"posted_at + ({per_row}) * interval '1 s'",
            indexable=f"closed_at IS NULL AND ({per_row}) > 0",
        )
    )


def test_row_that_cannot_be_read_is_entered_and_the_scan_goes_on(fragile: Kind, db: Db) -> None:
    before, guilty, after = add_jobs(db, 20), add_job(db, company_slug="0"), add_jobs(db, 20)
    counts = drain(fragile)
    assert (counts.indexed, counts.failed) == (40, 1)
    assert sorted(map(int, stamps(db))) == sorted(before + after)
    assert entry(db, guilty, "status, attempts, error_class") == ("retry_wait", 1, "row_rejected")
    assert enqueue(fragile).created == 0
    assert not fragile.outbox.stale()
    assert status(fragile) == {"fresh": 40, "waiting": 1}
    db.execute("UPDATE jobs SET company_slug = '2' WHERE id = %s", (guilty,))
    say(db, guilty)
    assert drain(fragile).indexed == 1
    assert status(fragile) == {"fresh": 41}


def test_indexed_row_that_cannot_be_read_any_more_hinders_no_clearing(fragile: Kind, db: Db) -> None:
    gone, guilty, kept = add_jobs(db, 3)
    drain(fragile)
    db.execute("UPDATE jobs SET company_slug = '0' WHERE id = %s", (guilty,))
    db.execute("DELETE FROM jobs WHERE id = %s", (gone,))
    counts = drain(fragile)
    assert (counts.gone, counts.failed) == (1, 1)
    assert stamps(db) == [str(guilty), str(kept)]


def test_dead_row_that_cannot_be_read_hinders_no_other_s_revival(fragile: Kind, db: Db, embedder: HashEmbedder) -> None:
    guilty, changed = add_jobs(db, 2)
    embedder.reject = lambda text: InputRejected("never")
    drain(fragile)
    embedder.reject = lambda text: None
    db.execute("UPDATE jobs SET company_slug = '0' WHERE id = %s", (guilty,))
    edit(db, changed)
    assert drain(fragile).indexed == 1
    assert (entry(db, guilty), entry(db, changed)) == ("dead", None)


def test_requests_are_folded_although_the_rank_of_one_cannot_be_computed(fragile: Kind, db: Db) -> None:
    jobs = [*add_jobs(db, 2), add_job(db, company_slug="0")]
    say(db, *jobs)
    assert fold(fragile).created == 3
    assert drain(fragile).indexed == 2
