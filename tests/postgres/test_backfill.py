"""Backfills by buckets: what is asked for, what is done when, what is taken back, and what it is said to cost."""

from __future__ import annotations

from typing import Any

import pytest
from fakes import HashEmbedder
from postgres.conftest import KindMaker
from postgres.support import (
    Db,
    add_job,
    add_jobs,
    background,
    claim,
    drain,
    entries,
    fold,
    gate,
    rows,
    say,
    until_blocked,
    value,
)

from embed_assets.errors import InputRejected
from embed_assets.resources.assembly import Kind
from embed_assets.resources.backfill import BUCKETS, bucket_key, bucket_of
from embed_assets.resources.operator import Operator

ALL = range(BUCKETS)


def ask(kind: Kind, *buckets: int, selection: str = "all") -> dict[int, int]:
    return kind.backfill.ask(buckets or ALL, selection=selection, reason="test", run_id="run")


def bucket(db: Db, job: int) -> int:
    return int(value(db, "SELECT embed_assets.bucket_of(%s)", str(job)))


@pytest.mark.ids("D12", "D13", "D15")
def test_the_buckets_are_sixty_four_names_that_never_change() -> None:
    names = [bucket_key(number) for number in ALL]
    assert names == [f"b{number:02d}" for number in range(64)]
    assert all(name.isalnum() and bucket_of(name) == number for number, name in enumerate(names))


def test_every_id_has_one_bucket_and_they_are_about_equally_full(db: Db) -> None:
    filled = rows(db, "SELECT count(*) FROM generate_series(1, 6400) AS g GROUP BY embed_assets.bucket_of(g::text)")
    assert len(filled) == 64
    assert 50 < min(filled) <= max(filled) < 160
    assert [value(db, "SELECT embed_assets.bucket_of(%s)", given) for given in ("1", "a", "ü")] == [4, 12, 0]


def test_all_rows_of_the_buckets_are_bought_anew_and_no_others(kind: Kind, db: Db, embedder: HashEmbedder) -> None:
    jobs = add_jobs(db, 12)
    add_job(db, closed_at="2026-01-01")
    drain(kind)
    mine = bucket(db, jobs[0])
    wanted = sorted(str(job) for job in jobs if bucket(db, job) == mine)
    assert ask(kind, mine) == {mine: len(wanted)}
    assert sorted(rows(db, "SELECT source_id FROM embed_assets.source_changes")) == wanted
    embedder.texts.clear()
    drain(kind)
    assert len(embedder.texts) == len(wanted)


def test_only_stale_rows_are_asked_for_where_that_is_wanted(kind: Kind, db: Db) -> None:
    jobs = add_jobs(db, 5)
    drain(kind)
    db.execute("UPDATE jobs SET description = 'changed' WHERE id = %s", (jobs[0],))
    db.execute("UPDATE jobs SET closed_at = now() WHERE id = %s", (jobs[1],))
    new = add_job(db)
    assert sum(ask(kind, selection="stale").values()) == 3
    found = rows(db, "SELECT source_id::bigint FROM embed_assets.source_changes ORDER BY 1")
    assert found == sorted([jobs[0], jobs[1], new])
    assert rows(db, "SELECT DISTINCT forced, lane FROM embed_assets.source_changes") == [(False, 1)]


def test_a_change_overtakes_the_backfill_and_still_answers_it(kind: Kind, db: Db) -> None:
    jobs = add_jobs(db, 8)
    drain(kind)
    ask(kind)
    fold(kind)
    db.execute("SELECT embed_assets.enqueue('jobs', %s::bigint[])", (jobs[:1],))
    fold(kind)
    wave = claim(kind, 1)
    assert wave is not None
    assert wave.source_ids == [str(jobs[0])]
    kind.outbox.release(wave)
    assert sum(one.open for one in kind.backfill.progress()) == 8
    drain(kind)
    assert all(one.done for one in kind.backfill.progress())


def test_a_bucket_is_done_with_its_last_row_and_not_while_one_is_dead(
    kind: Kind, db: Db, embedder: HashEmbedder
) -> None:
    jobs = add_jobs(db, 6)
    drain(kind)
    poison = jobs[0]
    db.execute("UPDATE jobs SET description = 'poison' WHERE id = %s", (poison,))
    embedder.reject = lambda text: InputRejected("no") if "poison" in text else None
    ask(kind)
    assert not any(one.done for one in kind.backfill.progress() if one.rows)
    drain(kind)
    by_bucket = {one.bucket: one for one in kind.backfill.progress()}
    assert (by_bucket[bucket(db, poison)].dead, by_bucket[bucket(db, poison)].done) == (1, False)
    others = {bucket(db, job) for job in jobs} - {bucket(db, poison)}
    assert all(by_bucket[one].done for one in others)
    embedder.reject = lambda text: None
    db.execute("UPDATE jobs SET description = 'mended' WHERE id = %s", (poison,))
    drain(kind)
    assert all(one.done for one in kind.backfill.progress())


def test_a_bucket_that_was_not_asked_for_to_its_end_is_not_done(
    kind: Kind, db: Db, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("embed_assets.resources.ranges.RANGE_KEYS", 2)
    add_jobs(db, 6)
    drain(kind)
    end_of, calls = type(kind.backfill)._end_of, 0

    def killed(self: Any, *arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise KeyboardInterrupt
        return end_of(self, *arguments)

    monkeypatch.setattr(type(kind.backfill), "_end_of", killed)
    with pytest.raises(KeyboardInterrupt):
        ask(kind)
    drain(kind)
    assert entries(db) == []
    assert not any(one.done for one in kind.backfill.progress())
    ask(kind)
    drain(kind)
    assert all(one.done for one in kind.backfill.progress())


def test_cancelling_takes_back_what_only_the_backfill_asked_for(kind: Kind, db: Db) -> None:
    jobs = add_jobs(db, 6)
    drain(kind)
    ask(kind)
    fold(kind)
    db.execute("UPDATE jobs SET description = 'changed' WHERE id = %s", (jobs[0],))
    db.execute("SELECT embed_assets.enqueue('jobs', %s::bigint[])", (jobs[:1],))
    fold(kind)
    wave = kind.outbox.claim("run", 2)
    assert wave is not None
    ask(kind, bucket(db, jobs[-1]))
    in_feed = value(db, "SELECT count(*) FROM embed_assets.source_changes")
    assert kind.backfill.cancel() == 4 + in_feed
    assert sorted(entries(db)) == sorted(wave.source_ids)
    assert not any(one.done for one in kind.backfill.progress() if one.rows)
    assert kind.backfill.cancel() == 0


def done(kind: Kind) -> set[bool]:
    """Whether the buckets that have rows are done."""
    return {one.done for one in kind.backfill.progress() if one.rows}


def test_a_request_that_is_folded_late_does_not_take_the_rows_of_a_newer_one(kind: Kind, db: Db) -> None:
    add_jobs(db, 6)
    drain(kind)
    ask(kind)
    db.execute("UPDATE embed_assets.source_changes SET kind = 'held back'")
    ask(kind)
    fold(kind)
    db.execute("UPDATE embed_assets.source_changes SET kind = 'jobs'")
    fold(kind)
    assert done(kind) == {False}
    drain(kind)
    assert done(kind) == {True}


def test_cancelling_during_a_fold_waits_for_it_and_takes_back_what_it_entered(
    kind: Kind, db: Db, database_url: str, make_kind: KindMaker, embedder: HashEmbedder
) -> None:
    add_jobs(db, 6)
    drain(kind)
    ask(kind)
    embedder.texts.clear()
    folding = make_kind()
    with gate(database_url, "semantic_outbox") as held, background(lambda: fold(folding)) as folded:
        held.wait()
        with background(kind.backfill.cancel) as cancelled:
            until_blocked(db, by="%SET cancelled_at%")
            held.open()
            assert cancelled.result(timeout=30) == 6
        folded.result(timeout=30)
    assert entries(db) == []
    drain(kind)
    assert (embedder.texts, done(kind)) == ([], {False})


def test_cancelling_while_rows_are_asked_for_ends_the_asking(
    kind: Kind, db: Db, make_kind: KindMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("embed_assets.resources.ranges.RANGE_KEYS", 2)
    add_jobs(db, 6)
    drain(kind)
    other, append = make_kind(), type(kind.backfill)._rows
    cancelled: list[int] = []

    def cancelling(self: Any, *arguments: Any) -> Any:
        appended = append(self, *arguments)
        cancelled.append(other.backfill.cancel())
        return appended

    monkeypatch.setattr(type(kind.backfill), "_rows", cancelling)
    ask(kind)
    assert cancelled == [2, 0, 0, 0]
    assert rows(db, "SELECT source_id FROM embed_assets.source_changes") == []
    assert done(kind) == {False}


def test_what_was_cancelled_and_came_back_all_the_same_is_taken_back_by_cancelling_again(kind: Kind, db: Db) -> None:
    add_jobs(db, 3)
    drain(kind)
    ask(kind)
    fold(kind)
    ask(kind)
    db.execute("UPDATE embed_assets.reembed_requests SET cancelled_at = clock_timestamp()")
    fold(kind)
    assert value(db, "SELECT count(*) FROM embed_assets.source_changes") == 0
    assert set(entries(db, "request <= 64")) == {True}, "what was cancelled is not entered"
    assert kind.backfill.cancel() == 3
    assert entries(db) == []


def test_cancelling_changes_leaves_the_backfill_of_the_same_rows(kind: Kind, db: Db, embedder: HashEmbedder) -> None:
    jobs = add_jobs(db, 3)
    drain(kind)
    ask(kind)
    say(db, *jobs)
    fold(kind)
    embedder.texts.clear()
    assert set(entries(db, "reason")) == {"write"}
    assert Operator(kind.postgres, "jobs").cancel("write") == 0
    assert set(entries(db, "reason, lane")) == {("backfill", 1)}
    assert Operator(kind.postgres, "jobs").cancel("backfill") == 0, "its own cancelling takes it back"
    assert done(kind) == {False}
    drain(kind)
    assert (len(embedder.texts), done(kind)) == (3, {True})


def test_a_bucket_is_not_done_because_its_dead_letters_were_dismissed(
    kind: Kind, db: Db, embedder: HashEmbedder
) -> None:
    add_jobs(db, 3)
    drain(kind)
    ask(kind)
    embedder.reject = lambda text: InputRejected("no")
    drain(kind)
    assert Operator(kind.postgres, "jobs").dismiss() == 3
    assert sum(one.dismissed for one in kind.backfill.progress()) == 3
    assert done(kind) == {False}


def test_a_row_that_cannot_be_read_is_asked_for_by_its_key_and_stops_no_other(kind: Kind, db: Db, make_kind) -> None:
    from dataclasses import replace

    from embed_assets.corpora.jobs import jobs as declared

    jobs = add_jobs(db, 4)
    db.execute("UPDATE jobs SET company = 'x' WHERE id = %s", (jobs[1],))
    broken = make_kind(replace(declared, indexable="CASE company WHEN 'x' THEN 1 / (id - id) = 0 ELSE TRUE END"))
    assert sum(ask(broken).values()) == 3
    assert value(db, "SELECT count(*) FROM embed_assets.source_changes") == 4


# Estimates


def test_an_estimate_cuts_a_sample_on_trial_while_nothing_is_embedded(kind: Kind, db: Db) -> None:
    for _ in range(4):
        add_job(db, "<p>" + "word " * 700 + "</p>")
    found = kind.estimate("all")
    assert (found.rows, found.texts, found.measured, found.hours) == (4, 8, False, None)
    assert 4 * 3500 / 4 < found.tokens < 4 * 4000 / 4


def test_an_estimate_measures_what_is_there(kind: Kind, db: Db, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("embed_assets.resources.backfill.SAMPLE_ROWS", 3)
    add_jobs(db, 6)
    drain(kind)
    add_jobs(db, 3)
    found = kind.estimate("stale")
    assert (found.rows, found.texts, found.measured) == (3, 3, True)
    assert found.hours is not None
    assert kind.estimate("all").rows == 9
    assert found.bytes > 0
