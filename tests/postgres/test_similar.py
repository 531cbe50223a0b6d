"""Similar items: true neighbours, kept true, and nothing done when nothing is stale."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from fakes import HashEmbedder
from postgres.conftest import KindMaker
from postgres.generated import build_index, generate
from postgres.support import Db, add_job, background, drain, gate, rows, say, until_blocked, until_true, value

from embed_assets.corpora.jobs import jobs as jobs_corpus
from embed_assets.corpus import Plain, Similar, TableCorpus
from embed_assets.errors import ConfigurationError, DeclarationError
from embed_assets.resources import similar_store
from embed_assets.resources.assembly import Kind
from embed_assets.resources.declaration import bind
from embed_assets.resources.similar_store import Neighbours, Refreshed, SimilarStore, forget_model, invalidate_all

SIMILAR = jobs_corpus.similar
TURNS = "FROM pg_locks WHERE locktype = 'advisory' AND classid = 1701667430"


@pytest.fixture
def store(kind: Kind) -> SimilarStore:
    return SimilarStore(kind.postgres, kind.bound)


def post(db: Db, number: int, **columns: Any) -> list[int]:
    """Postings of a company each."""
    return [add_job(db, **{"company_slug": f"company-{n}", **columns}) for n in range(number)]


def neighbours(db: Db, job: int, k: int = 20) -> list[int]:
    return [int(i) for i in rows(db, "SELECT source_id FROM embed_assets.similar_to('jobs', %s, %s)", str(job), k)]


def kept(db: Db) -> dict[int, list[int]]:
    """The lists as they stand, unfiltered."""
    found = rows(db, "SELECT source_id, neighbours FROM embed_assets.similar_jobs ORDER BY source_id")
    return {int(source_id): [int(other) for other in others] for source_id, others in found}


def brute_force(db: Db, kind: Kind, k: int = 20) -> dict[int, list[int]]:
    """Every pair of chunks compared, without a statement of ours."""
    found = rows(
        db,
        f"""SELECT id, array_agg(other ORDER BY distance, other::text) FROM (
            SELECT a.id, b.id AS other, min(x.embedding <=> y.embedding) AS distance,
                   row_number() OVER (PARTITION BY a.id ORDER BY min(x.embedding <=> y.embedding), b.id::text) AS rank
            FROM jobs AS a JOIN jobs AS b ON a.id <> b.id AND b.company_slug IS DISTINCT FROM a.company_slug
            JOIN embed_assets.{kind.bound.partition_name(kind.model_id)} AS x ON x.id = a.id
            JOIN embed_assets.{kind.bound.partition_name(kind.model_id)} AS y ON y.id = b.id
            WHERE a.closed_at IS NULL AND b.closed_at IS NULL AND NOT b.is_private AND a.is_tech AND b.is_tech
            GROUP BY a.id, b.id
        ) AS ranked WHERE rank <= {k} GROUP BY id""",
    )
    return dict(found)


def shared(db: Db, kind: Kind, k: int = 20) -> float:
    """Of all true neighbours, the share that the lists hold."""
    true, have = brute_force(db, kind, k), kept(db)
    return sum(len(set(true[job]) & set(have.get(job, []))) for job in true) / sum(map(len, true.values()))


def waiting(db: Db) -> list[tuple[str, int]]:
    return rows(db, "SELECT source_id, model_id FROM embed_assets.similar_invalidations ORDER BY id")


def test_lists_hold_the_nearest_rows_that_the_rule_lets_in(kind: Kind, store: SimilarStore, db: Db) -> None:
    post(db, 40)
    private, same = post(db, 1, is_private=True)[0], add_job(db, company_slug="company-3")
    add_job(db, is_tech=None)
    drain(kind)
    done = store.refresh()
    assert (done.invalidated, done.computed, done.outdated) == (42, 42, 0)
    assert kept(db) == brute_force(db, kind)
    assert not any(private in others for others in kept(db).values())
    of_company_3 = value(db, "SELECT min(id) FROM jobs WHERE company_slug = 'company-3'")
    assert same not in kept(db)[of_company_3]
    assert neighbours(db, same, 3) == brute_force(db, kind)[same][:3]


def test_two_rows_are_as_far_apart_as_their_nearest_chunks(kind: Kind, store: SimilarStore, db: Db) -> None:
    one = "<p>{} " + "filler " * 280 + "</p>"
    long = add_job(db, one.format("alpha") + one.format("beta"), title="T", company_slug="a")
    twin = add_job(db, one.format("gamma") + one.format("beta"), title="T", company_slug="b")
    post(db, 10)
    drain(kind)
    store.refresh()
    assert rows(db, "SELECT * FROM embed_assets.similar_to('jobs', %s, 1)", str(long)) == [(str(twin), 0.0)]


def test_nothing_stale_means_nothing_is_done(kind: Kind, store: SimilarStore, db: Db) -> None:
    post(db, 5)
    drain(kind)
    assert not store.refresh().idle
    assert not store.waiting()
    before = rows(db, "SELECT xmin::text, * FROM embed_assets.similar_jobs ORDER BY source_id")
    assert store.refresh().idle
    assert rows(db, "SELECT xmin::text, * FROM embed_assets.similar_jobs ORDER BY source_id") == before


def test_what_changes_reaches_every_list_that_it_belongs_in_or_must_leave(
    kind: Kind, store: SimilarStore, db: Db
) -> None:
    jobs = post(db, 60)
    drain(kind)
    store.refresh()
    db.execute("UPDATE jobs SET description = '<p>edited ' || id || '</p>' WHERE id = ANY(%s)", (jobs[:5],))
    db.execute("UPDATE jobs SET closed_at = now() WHERE id = ANY(%s)", (jobs[5:10],))
    db.execute("DELETE FROM jobs WHERE id = ANY(%s)", (jobs[10:15],))
    post(db, 5)
    drain(kind)
    store.refresh()
    assert not (set(jobs[5:15]) & {other for others in kept(db).values() for other in others})
    assert not set(jobs[5:15]) & set(kept(db))
    assert shared(db, kind) > 0.97
    db.execute("UPDATE jobs SET closed_at = NULL WHERE id = ANY(%s)", (jobs[5:10],))
    drain(kind)
    store.refresh()
    assert set(jobs[5:10]) <= set(kept(db))
    assert shared(db, kind) > 0.97
    assert store.refresh().idle


def test_a_row_that_is_unindexable_for_a_moment_leaves_the_lists_and_comes_back(
    kind: Kind, store: SimilarStore, db: Db
) -> None:
    jobs = post(db, 8)
    drain(kind)
    store.refresh()
    before = kept(db)
    db.execute("UPDATE jobs SET is_tech = NULL WHERE id = %s", (jobs[0],))
    assert store.refresh(everything=True).computed == 7
    assert not any(jobs[0] in others for others in kept(db).values())
    db.execute("UPDATE jobs SET is_tech = TRUE WHERE id = %s", (jobs[0],))
    assert store.refresh().computed == 1
    assert kept(db) == before


def test_a_new_row_is_put_in_its_place_in_lists_that_nobody_invalidated(
    kind: Kind, store: SimilarStore, db: Db
) -> None:
    jobs = post(db, 30)
    drain(kind)
    store.refresh()
    text = value(db, "SELECT description FROM jobs WHERE id = %s", jobs[0])
    title = value(db, "SELECT title FROM jobs WHERE id = %s", jobs[0])
    twin, hidden = (
        add_job(db, text, title=title, company_slug=slug, is_private=slug == "hidden") for slug in ("twin", "hidden")
    )
    drain(kind)
    done = store.refresh()
    assert (done.expanded, done.computed) == (0, 2)
    assert neighbours(db, jobs[0], 1) == [twin]
    assert not any(hidden in others for others in kept(db).values())
    assert shared(db, kind) > 0.97
    assert all(len(others) <= SIMILAR.k for others in kept(db).values())


@pytest.mark.parametrize("way", ["closed", "deleted", "hidden", "moved"])
def test_what_was_closed_hidden_or_deleted_since_is_left_out_when_read(
    kind: Kind, store: SimilarStore, db: Db, way: str
) -> None:
    job, first, *_ = post(db, 5)
    drain(kind)
    store.refresh()
    assert first in neighbours(db, job)
    db.execute(
        {
            "closed": "UPDATE jobs SET closed_at = now() WHERE id = %s",
            "deleted": "DELETE FROM jobs WHERE id = %s",
            "hidden": "UPDATE jobs SET is_private = TRUE WHERE id = %s",
            "moved": "UPDATE jobs SET company_slug = 'company-0' WHERE id = %s",
        }[way].encode(),
        (first,),
    )
    assert len(neighbours(db, job)) == 3
    assert first not in neighbours(db, job)


def meanwhile(monkeypatch: pytest.MonkeyPatch, store: SimilarStore, work: Callable[[], object]) -> None:
    """Have `work` done once, after the store has computed lists and before it writes them."""
    compute = store.compute

    def computed(*given: Any) -> list[Neighbours]:
        monkeypatch.setattr(store, "compute", compute)
        found = compute(*given)
        work()
        return found

    monkeypatch.setattr(store, "compute", computed)


@pytest.mark.ids("A-74")
def test_a_list_of_a_row_that_was_embedded_anew_meanwhile_is_not_written(
    kind: Kind, store: SimilarStore, db: Db, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, *_ = post(db, 4)
    drain(kind)
    store.refresh()
    before = kept(db)

    def embed_anew() -> None:
        say(db, job, forced=True)
        drain(kind)

    meanwhile(monkeypatch, store, embed_anew)
    db.execute("UPDATE embed_assets.similar_jobs SET computed_at = NULL")
    done = store.refresh(everything=True)
    assert (done.computed, done.outdated) == (3, 1)
    assert rows(db, "SELECT source_id FROM embed_assets.similar_jobs WHERE computed_at IS NULL") == [str(job)]
    store.refresh()
    assert kept(db) == before


@pytest.mark.ids("A-43")
def test_what_is_taken_from_the_feed_is_stale_in_the_same_transaction(
    kind: Kind, store: SimilarStore, db: Db, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = post(db, 6)
    drain(kind)
    store.refresh()
    say(db, jobs[0])
    drain(kind)
    monkeypatch.setattr(store, "compute", lambda *given: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        store.refresh()
    assert waiting(db) == []
    assert store.waiting().stale == 6
    assert value(db, "SELECT count(computed_at) FROM embed_assets.similar_jobs") == 0
    assert SimilarStore(kind.postgres, kind.bound).refresh().computed == 6


def test_what_one_refresh_may_not_do_is_left_to_the_next(
    kind: Kind, store: SimilarStore, db: Db, monkeypatch: pytest.MonkeyPatch
) -> None:
    post(db, 12)
    drain(kind)
    monkeypatch.setattr(similar_store, "FEED_BATCH", 2)
    monkeypatch.setattr(similar_store, "MOST_STALE", 4)
    assert store.refresh(seconds=0).computed == 0
    assert (store.waiting().feed, store.waiting().stale) == (8, 4 + 4)  # four of the feed, four that have no list yet
    monkeypatch.undo()
    store.refresh()
    assert (store.waiting().feed, kept(db)) == (0, brute_force(db, kind))


def test_one_refresh_of_a_kind_at_a_time(kind: Kind, store: SimilarStore, db: Db) -> None:
    post(db, 2)
    drain(kind)
    db.execute("SELECT pg_advisory_lock(1701667430, lock_id) FROM embed_assets.corpora")
    assert store.refresh() == Refreshed(postponed="another process is computing them")
    db.execute("SELECT pg_advisory_unlock_all()")
    assert store.refresh().computed == 2


def test_a_refresh_that_lost_its_turn_without_noticing_writes_no_list_any_more(
    kind: Kind, store: SimilarStore, other: Kind, db: Db, monkeypatch: pytest.MonkeyPatch
) -> None:
    *_, last = post(db, 8)
    drain(kind)

    def another_begins() -> None:
        db.execute(f"SELECT pg_terminate_backend(pid) {TURNS}".encode())
        until_true(lambda: not rows(db, f"SELECT pid {TURNS}"), "the turn is never lost")
        db.execute("UPDATE jobs SET description = 'another text' WHERE id = %s", (last,))
        drain(kind)
        assert SimilarStore(other.postgres, other.bound).refresh().computed == 8

    meanwhile(monkeypatch, store, another_begins)
    assert store.refresh() == Refreshed(invalidated=8, postponed="another process is computing them")
    assert kept(db) == brute_force(db, kind)


def test_a_switch_waits_for_what_is_being_taken_and_its_own_invalidations_are_taken_for_its_own_model(
    jobs_table: None, db: Db, database_url: str, make_kind: KindMaker, embedder: HashEmbedder
) -> None:
    corpus = replace(jobs_corpus, similar=replace(SIMILAR, k=3))
    jobs = post(db, 12)
    kind = make_kind(corpus)
    drain(kind)
    SimilarStore(kind.postgres, kind.bound).refresh()
    beside = make_kind(corpus, embedder=HashEmbedder(16), active=embedder)
    drain(beside)
    beside.life.switch()
    store = SimilarStore(beside.postgres, beside.bound)
    store.refresh()
    db.execute("UPDATE jobs SET closed_at = now() WHERE id = ANY(%s)", (jobs[:4],))
    drain(beside)
    with gate(database_url, "similar_invalidations", "BEFORE DELETE") as held, background(store.refresh):
        held.wait()
        with background(beside.life.rollback):
            until_blocked(db, by="%pg_advisory_xact_lock(%")
            held.open()
    again = make_kind(corpus)
    SimilarStore(again.postgres, again.bound).refresh()
    assert {job: neighbours(db, job, 3) for job in jobs[4:]} == brute_force(db, kind, 3)


def test_a_model_that_is_built_beside_costs_no_list_and_its_clearing_of_a_row_is_seen(
    kind: Kind, store: SimilarStore, db: Db, make_kind: KindMaker
) -> None:
    jobs = post(db, 4)
    drain(kind)
    store.refresh()
    later = make_kind(embedder=HashEmbedder(16))
    drain(later)
    assert waiting(db)
    assert store.refresh().idle
    db.execute("UPDATE jobs SET closed_at = now() WHERE id = %s", (jobs[0],))
    drain(later)
    assert store.refresh().computed == 3
    assert jobs[0] not in kept(db)


def test_after_a_switch_the_lists_of_before_serve_until_new_ones_are_there(
    kind: Kind, store: SimilarStore, db: Db, make_kind: KindMaker
) -> None:
    jobs = post(db, 6)
    drain(kind)
    store.refresh()
    before = neighbours(db, jobs[0])
    later = make_kind(embedder=HashEmbedder(16))
    drain(later)
    later.life.switch(force=True)
    assert neighbours(db, jobs[0]) == before
    store.refresh()
    assert sorted(neighbours(db, jobs[0])) == sorted(before)
    assert value(db, "SELECT count(*) FROM embed_assets.similar_jobs WHERE model_id = %s", later.model_id) == 6
    db.execute("DELETE FROM embed_assets.similar_jobs WHERE model_id = %s", (kind.model_id,))
    assert sorted(neighbours(db, jobs[0])) == sorted(before)


def test_a_switch_has_every_row_of_the_model_computed_once(kind: Kind, store: SimilarStore, db: Db) -> None:
    jobs = post(db, 3)
    drain(kind)
    store.refresh()
    with kind.postgres.transaction() as cursor:
        assert invalidate_all(cursor, kind.bound, kind.model_id) == 3
    assert waiting(db) == [(str(job), kind.model_id) for job in jobs]
    assert store.refresh().computed == 3
    with kind.postgres.transaction() as cursor:
        assert forget_model(cursor, kind.bound, kind.model_id) == 3
    assert store.refresh().computed == 3


def test_everything_can_be_computed_anew(kind: Kind, store: SimilarStore, db: Db) -> None:
    jobs = post(db, 4)
    drain(kind)
    store.refresh()
    db.execute("UPDATE jobs SET is_private = TRUE WHERE id = %s", (jobs[0],))
    assert store.refresh(everything=True).computed == 4
    assert not any(jobs[0] in others for others in kept(db).values())


def test_without_an_index_only_a_small_partition_is_compared(
    kind: Kind, store: SimilarStore, db: Db, monkeypatch: pytest.MonkeyPatch
) -> None:
    generate(db, kind, 20)
    monkeypatch.setattr(similar_store, "EXACT_CHUNKS", 30)
    assert re.search("index of more than 30 chunks", store.refresh().postponed or "")
    build_index(kind)
    assert store.refresh().computed == 20


def test_a_kind_without_similar_items_says_so(make_kind: KindMaker, db: Db) -> None:
    db.execute("CREATE TABLE notes (id bigint PRIMARY KEY, body text)")
    kind = make_kind(TableCorpus(kind="notes", table="notes", key="id", text=Plain("body")))
    with pytest.raises(ConfigurationError, match="'notes' keeps no similar items"):
        SimilarStore(kind.postgres, kind.bound)
    with pytest.raises(Exception, match='No similar items are kept of kind "notes"'):
        db.execute("SELECT * FROM embed_assets.similar_to('notes', '1')")


def test_a_rule_that_says_not_whose_column_it_means_is_refused(kind: Kind) -> None:
    corpus = TableCorpus(kind="j", table="jobs", key="id", text=Plain("title"), similar=Similar(where="NOT is_private"))
    with pytest.raises(DeclarationError, match=r"similar.where is refused.*ambiguous"):
        bind(kind.postgres, corpus)


def test_keys_of_text_and_rules_with_a_percent_sign(make_kind: KindMaker, db: Db) -> None:
    db.execute("CREATE TABLE notes (code text PRIMARY KEY, body text)")
    for n in range(6):
        db.execute("INSERT INTO notes VALUES (%s, %s)", (f"{n} % {{x}} '\"", f"note {n}"))
    rule = Similar(k=3, where="other.code NOT LIKE '5%'")
    corpus = TableCorpus(kind="notes", table="notes", key="code", text=Plain("body"), similar=rule)
    kind = make_kind(corpus)
    drain(kind)
    assert SimilarStore(kind.postgres, kind.bound).refresh().computed == 6
    found = rows(db, "SELECT source_id FROM embed_assets.similar_to('notes', %s)", "5 % {x} '\"")
    assert (len(found), [code for code in found if code.startswith("5")]) == (3, [])
