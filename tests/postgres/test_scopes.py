"""Scopes (tenants): no scope takes a wave from others that wait, and a run of one scope touches only its entries."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from fakes import HashEmbedder
from postgres.conftest import KindMaker
from postgres.support import (
    Db,
    add_jobs,
    claim,
    due_now,
    enqueue,
    entries,
    entry,
    expire,
    fold,
    rows,
    say,
    value,
    wave_of,
    wave_row,
)

from embed_assets import pipeline
from embed_assets.corpora.jobs import jobs as jobs_corpus
from embed_assets.errors import AnswerContract
from embed_assets.models import Failure, Wave
from embed_assets.resources.assembly import Kind
from embed_assets.stop import Stop


@pytest.fixture
def kind(jobs_table: None, make_kind: KindMaker) -> Kind:
    """The jobs corpus, of which each company is a scope."""
    return make_kind(replace(jobs_corpus, scope="self.company_slug"))


def of(db: Db, scope: str, number: int) -> list[int]:
    return add_jobs(db, number, company_slug=scope)


def shares(db: Db, wave: Wave) -> dict[str | None, int]:
    return dict(Counter(entries(db, "scope", f"wave_id = {wave.wave_id} AND status = 'leased'")))


# Who gets how much of a wave


def test_a_scope_gets_half_of_a_wave_at_most_while_others_wait(kind: Kind, db: Db) -> None:
    of(db, "small", 3)
    of(db, "tiny", 1)
    of(db, "big", 30)
    enqueue(kind)
    first, second, third = (wave_of(kind, 8) for _ in range(3))
    assert shares(db, first) == {"big": 4, "small": 2, "tiny": 1}
    assert shares(db, second) == {"big": 7, "small": 1}
    assert shares(db, third) == {"big": 8}


def test_while_more_of_another_waits_a_wave_is_rather_smaller_than_one_scope_s(kind: Kind, db: Db) -> None:
    of(db, "endless", 20)
    of(db, "tiny", 1)
    of(db, "big", 30)
    enqueue(kind)
    assert shares(db, wave_of(kind, 8)) == {"big": 4, "endless": 2, "tiny": 1}
    assert shares(db, wave_of(kind, 8)) == {"big": 4, "endless": 4}


def test_retries_count_in_their_scope_s_half(kind: Kind, db: Db) -> None:
    failed = of(db, "big", 4)
    enqueue(kind)
    wave = wave_of(kind)
    kind.outbox.fail(wave, [Failure(str(job), AnswerContract("once")) for job in failed])
    kind.outbox.release(wave)
    due_now(db)
    of(db, "small", 20)
    of(db, "big", 20)
    enqueue(kind)
    wave = wave_of(kind, 8)
    assert shares(db, wave) == {"big": 4, "small": 4}
    assert len({str(job) for job in failed} & set(wave.source_ids)) == 2


def test_rows_of_no_scope_leave_a_half_to_those_of_one(kind: Kind, db: Db) -> None:
    of(db, "small", 10)
    add_jobs(db, 20)
    enqueue(kind)
    assert shares(db, wave_of(kind, 8)) == {None: 4, "small": 4}


def test_the_tenth_wave_serves_the_scope_that_comes_last(kind: Kind, db: Db) -> None:
    last = of(db, "last", 1)
    for scope in ("a", "b"):
        of(db, scope, 12)
    enqueue(kind)
    claimed = [wave_of(kind, 1).source_ids for _ in range(10)]
    assert claimed[9] == [str(last[0])]


def test_claims_of_scopes_are_disjoint(kind: Kind, db: Db) -> None:
    jobs = [*of(db, "small", 9), *of(db, "big", 30)]
    enqueue(kind)
    claimed = []
    while wave := claim(kind, 8):
        claimed += wave.source_ids
    assert sorted(map(int, claimed)) == jobs


# Where an entry's scope comes from


def test_an_entry_has_its_row_s_scope_whoever_finds_it(kind: Kind, db: Db) -> None:
    said, found = of(db, "acme", 1), of(db, "bolt", 1)
    say(db, *said, scope="said")
    fold(kind)
    assert entries(db, "scope") == ["acme"]
    enqueue(kind)
    assert entry(db, found[0], "scope") == "bolt"
    db.execute("UPDATE jobs SET company_slug = 'coil' WHERE id = %s", (found[0],))
    say(db, *found)
    fold(kind)
    assert entry(db, found[0], "scope") == "coil"


def test_a_row_that_is_gone_keeps_the_scope_that_was_said(kind: Kind, db: Db) -> None:
    job = of(db, "acme", 1)[0]
    pipeline.drain(kind.ports, "run", limits=kind.limits, stop=Stop())
    db.execute("DELETE FROM jobs")
    say(db, job, scope="acme")
    fold(kind)
    say(db, job)
    fold(kind)
    assert entry(db, job, "scope") == "acme"


# A run of one scope


@pytest.mark.ids("B-13")
def test_a_run_of_one_scope_claims_only_its_rows(kind: Kind, db: Db, embedder: HashEmbedder) -> None:
    mine, theirs = of(db, "mine", 5), of(db, "theirs", 5)
    _, counts = pipeline.drain(kind.ports, "run", limits=replace(kind.limits, scope="mine"), stop=Stop())
    assert (counts.indexed, len(embedder.texts)) == (5, 5)
    assert rows(db, "SELECT source_id::bigint FROM embed_assets.semantic_stamps ORDER BY 1") == mine
    assert sorted(map(int, entries(db, "source_id", "status = 'pending' AND claims = 0"))) == theirs
    assert kind.outbox.claimable()
    assert not kind.outbox.claimable(scope="mine")


@pytest.mark.ids("B-13")
def test_a_run_of_one_scope_takes_back_and_buries_only_its_rows(kind: Kind, db: Db) -> None:
    mine, theirs = of(db, "mine", 1)[0], of(db, "theirs", 1)[0]
    enqueue(kind)
    for _ in range(2):
        lost(kind, db, wave_of(kind))
    suspects = [wave_of(kind, scope="mine"), wave_of(kind, scope="theirs")]
    assert [wave.source_ids for wave in suspects] == [[str(mine)], [str(theirs)]]
    for wave in suspects:
        lost(kind, db, wave)
    assert claim(kind, scope="mine") is None
    assert entry(db, mine, "status, error_code") == ("dead", "LEASE_ATTEMPTS_EXHAUSTED")
    assert entry(db, theirs, "status, crashes") == ("leased", 2)
    assert [wave_row(db, wave, "outcome") for wave in suspects] == ["expired", None]
    assert claim(kind, scope="theirs") is None
    assert entry(db, theirs) == "dead"


@pytest.mark.ids("B-13")
def test_of_a_lost_wave_of_many_scopes_each_run_takes_back_its_own(kind: Kind, db: Db) -> None:
    mine, theirs = of(db, "mine", 1)[0], of(db, "theirs", 1)[0]
    enqueue(kind)
    lost(kind, db, wave_of(kind))
    assert wave_of(kind, scope="mine").source_ids == [str(mine)]
    assert entry(db, theirs, "status, crashes") == ("leased", 0)
    assert kind.outbox.backlog().expired == 1
    assert wave_of(kind, scope="theirs").source_ids == [str(theirs)]
    assert entries(db, "crashes") == [1, 1]
    claim(kind)
    assert kind.outbox.backlog().expired == 0
    assert value(db, "SELECT count(*) FROM embed_assets.claimed_waves WHERE healed_at IS NOT NULL") == 1


def lost(kind: Kind, db: Db, wave: Wave) -> None:
    """The process that began this wave does not come back, and its lease runs out."""
    kind.outbox.start(wave)
    expire(db, wave)
