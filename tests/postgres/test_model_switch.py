"""What search reads: switched, rolled back, given up, admitted, dropped; and who may start with which model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager

import pytest
from fakes import HashEmbedder
from postgres.conftest import KindMaker
from postgres.support import (
    ENTRIES,
    SWITCHED,
    Db,
    add_jobs,
    connect,
    drain,
    enqueue,
    found,
    ids,
    rows,
    staged,
    until_true,
    value,
)

from embed_assets.corpora.jobs import jobs
from embed_assets.errors import ConfigurationError
from embed_assets.resources.assembly import Kind, open_kind
from embed_assets.resources.model_gates import Model
from embed_assets.resources.model_life import ModelLife, NotReady
from embed_assets.resources.target import RetiredModel
from embed_assets.settings import Settings
from embed_assets.stop import Stop

# The switch itself


def test_a_switch_waits_for_the_write_under_way_and_a_later_write_for_the_switch(
    beside: Kind, db: Db, database_url: str, wide: HashEmbedder
) -> None:
    drain(beside)
    beside.life.index_of(beside.life.models()[-1]).build()
    job = value(db, "SELECT min(id) FROM jobs")
    db.execute("UPDATE jobs SET closed_at = now() WHERE id = %s", (job,))
    enqueue(beside)
    wave = staged(beside)
    with connect(database_url) as writer, ThreadPoolExecutor(1) as pool:
        writer.execute("BEGIN")
        writer.execute(
            "SELECT pg_advisory_xact_lock_shared(1701667428, lock_id) FROM embed_assets.corpora WHERE kind = 'jobs'"
        )
        switched = pool.submit(beside.life.switch)
        until_true(lambda: _waiting_for_the_kind(db) > 0, "the switch did not wait for the write")
        assert found(beside, "x", wide, HashEmbedder())
        writer.execute("COMMIT")
        switched.result(timeout=30)
    assert beside.chunks.write(wave).removed == (1 if wave.model_id == beside.model_id else 0)


def _waiting_for_the_kind(db: Db) -> int:
    return int(
        value(
            db,
            "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND classid = 1701667428 AND NOT granted "
            "AND database = (SELECT oid FROM pg_database WHERE datname = current_database())",
        )
    )


def test_the_retired_model_s_entries_leave_and_are_logged(kind: Kind, beside: Kind, db: Db) -> None:
    drain(beside)
    db.execute("UPDATE jobs SET description = description || ' again'")
    enqueue(beside)
    old, new = ids(kind, beside)
    assert rows(db, ENTRIES) == [(old, 6), (new, 6)]
    beside.life.switch()
    assert rows(db, ENTRIES) == [(new, 6)]
    logged = "SELECT model_id, count(*) FROM embed_assets.semantic_outbox_log WHERE outcome = 'superseded' GROUP BY 1"
    assert rows(db, logged) == [(old, 6)]


def test_the_switch_tells_search_and_similar_items_about_every_row_once(kind: Kind, beside: Kind, db: Db) -> None:
    drain(beside)
    db.execute("DELETE FROM embed_assets.search_outbox")
    db.execute("DELETE FROM embed_assets.similar_invalidations")
    beside.life.switch()
    jobs = rows(db, "SELECT id::text FROM jobs ORDER BY 1")
    assert rows(db, "SELECT source_id FROM embed_assets.search_outbox WHERE op = 'upsert' ORDER BY 1") == jobs
    told = "SELECT source_id FROM embed_assets.similar_invalidations WHERE model_id = %s ORDER BY 1"
    assert rows(db, told, beside.model_id) == jobs


def test_a_rollback_gives_the_old_answers_at_once_without_the_rows_that_were_closed_meanwhile(
    kind: Kind, beside: Kind, db: Db, wide: HashEmbedder, embedder: HashEmbedder
) -> None:
    before = found(kind, "x", wide, embedder)
    drain(beside)
    beside.life.switch()
    db.execute("UPDATE jobs SET closed_at = now() WHERE id = %s", (before[0],))
    drain(beside)
    beside.life.rollback()
    assert found(kind, "x", wide, embedder) == before[1:]
    assert value(db, SWITCHED) == (kind.model_id, beside.model_id, kind.model_id)
    assert [model.state for model in kind.life.models()] == ["active", "retired"]
    beside.life.rollback()
    assert value(db, SWITCHED) == (beside.model_id, kind.model_id, beside.model_id)


@contextmanager
def writing(url: str) -> Iterator[None]:
    """Somebody's write is under way for as long as the block lasts."""
    with connect(url) as writer:
        writer.execute("BEGIN")
        writer.execute("SELECT pg_advisory_xact_lock_shared(1701667428, lock_id) FROM embed_assets.corpora")
        yield
        writer.execute("COMMIT")


def test_of_two_switches_at_once_one_is_made_and_the_other_says_so(
    kind: Kind, beside: Kind, db: Db, database_url: str
) -> None:
    drain(beside)
    beside.life.index_of(beside.life.models()[-1]).build()
    with ThreadPoolExecutor(2) as pool:
        with writing(database_url):
            both = [pool.submit(beside.life.switch) for _ in range(2)]
            until_true(lambda: _waiting_for_the_kind(db) == 2, "a switch did not wait for the write")
        failed = [error for one in both if (error := one.exception(timeout=30))]
    assert [type(error) for error in failed] == [NotReady]
    assert value(db, SWITCHED) == (beside.model_id, kind.model_id, beside.model_id)
    beside.life.rollback()
    assert value(db, SWITCHED) == (kind.model_id, beside.model_id, kind.model_id)


def while_it_is_judged(monkeypatch: pytest.MonkeyPatch, life: ModelLife, action: Callable[[], object]) -> None:
    """Have something happen between the judgement and the switch."""
    judge = ModelLife._judge

    def judged(self: ModelLife, model: Model, stop: Stop) -> str | None:
        unmet = judge(self, model, stop)
        action()
        return unmet

    monkeypatch.setattr(type(life), "_judge", judged)


def test_what_was_abandoned_while_it_was_judged_is_not_switched_to(
    kind: Kind, beside: Kind, db: Db, monkeypatch: pytest.MonkeyPatch
) -> None:
    drain(beside)
    while_it_is_judged(monkeypatch, beside.life, kind.life.abandon)
    with pytest.raises(NotReady, match="is not what it was a moment ago"):
        beside.life.switch()
    assert value(db, SWITCHED) == (kind.model_id, None, kind.model_id)
    assert [model.state for model in kind.life.models()] == ["active", "retired"]


def test_by_itself_too_nothing_is_switched_to_that_was_abandoned_while_it_was_judged(
    kind: Kind, beside: Kind, db: Db, monkeypatch: pytest.MonkeyPatch
) -> None:
    drain(beside)
    while_it_is_judged(monkeypatch, beside.life, kind.life.abandon)
    assert "is not what it was a moment ago" in beside.life.advance(Stop())[-1]
    assert value(db, SWITCHED) == (kind.model_id, None, kind.model_id)


def test_what_was_edited_while_the_index_was_judged_is_counted_once_more(
    kind: Kind, beside: Kind, db: Db, monkeypatch: pytest.MonkeyPatch
) -> None:
    def edit() -> None:
        db.execute("UPDATE jobs SET description = description || ' edited'")
        drain(kind)

    drain(beside)
    while_it_is_judged(monkeypatch, beside.life, edit)
    with pytest.raises(NotReady, match="6 of 6 rows are not embedded yet"):
        beside.life.switch()
    assert value(db, SWITCHED) == (kind.model_id, None, beside.model_id)


def test_two_new_models_that_start_at_once_leave_a_target_that_is_not_retired(
    kind: Kind, db: Db, database_url: str, make_kind: KindMaker
) -> None:
    names = ("one", "two", "three")
    with ThreadPoolExecutor(3) as pool:
        with writing(database_url):
            starts = [pool.submit(make_kind, embedder=HashEmbedder(8, identity=name)) for name in names]
            until_true(lambda: _waiting_for_the_kind(db) == 3, "a start did not wait for the write")
        made = [one.result(timeout=30) for one in starts]
    target = value(db, "SELECT target_model_id FROM embed_assets.corpora")
    (winner,) = (one for one in made if one.model_id == target)
    assert [model.state for model in winner.life.models() if model.model_id == target] == ["building"]
    add_jobs(db, 2)
    assert drain(winner).indexed == 2


# Who may start with which model


def test_a_process_with_the_active_model_does_not_give_up_the_one_that_is_built(
    kind: Kind, beside: Kind, db: Db, make_kind: KindMaker
) -> None:
    make_kind()
    assert value(db, SWITCHED) == (kind.model_id, None, beside.model_id)


def test_a_third_model_retires_the_one_that_was_never_finished(kind: Kind, beside: Kind, db: Db, make_kind) -> None:
    enqueue(beside)
    third = make_kind(embedder=HashEmbedder(8, identity="third"))
    assert value(db, SWITCHED) == (kind.model_id, None, third.model_id)
    assert [model.state for model in third.life.models()] == ["active", "retired", "building"]
    assert rows(db, ENTRIES) == []
    with pytest.raises(ConfigurationError, match="was started with is retired"):
        make_kind_of_retired(beside)


def make_kind_of_retired(beside: Kind) -> None:
    beside.enqueuer._models = [beside.model_id]
    enqueue(beside)


def test_a_process_whose_model_was_retired_neither_starts_nor_enqueues(
    kind: Kind, beside: Kind, db: Db, make_kind: KindMaker
) -> None:
    drain(beside)
    beside.life.switch()
    db.execute("UPDATE jobs SET description = 'changed'")
    with pytest.raises(ConfigurationError, match="that this process was started with is retired"):
        enqueue(kind)
    assert rows(db, ENTRIES) == []
    with pytest.raises(
        RetiredModel, match=r"was retired on .* UTC. Set EMBED_PROTOCOL and EMBED_MODEL back to those of the active one"
    ):
        make_kind()
    assert value(db, SWITCHED) == (beside.model_id, kind.model_id, beside.model_id)
    drain(beside)
    assert {model for model, _ in rows(db, ENTRIES)} == set()


def test_who_only_looks_names_no_target_and_gives_up_none(kind: Kind, beside: Kind, db: Db, database_url: str) -> None:
    enqueue(beside)
    before = value(db, SWITCHED), rows(db, ENTRIES)
    slip = Settings(protocol="tei", url="http://127.0.0.1:9/embed", model="a slip", dimensions=9)
    with closing(open_kind(slip, jobs, url=database_url, embeds=False)) as looking:
        assert looking.identity == beside.identity
        assert looking.outbox.status(looking.identity).total == 6
    assert (value(db, SWITCHED), rows(db, ENTRIES)) == before


def test_an_operator_may_abandon_what_is_built_and_admit_it_again(
    kind: Kind, beside: Kind, db: Db, make_kind: KindMaker, wide: HashEmbedder
) -> None:
    enqueue(beside)
    assert beside.life.abandon().model_id == beside.model_id
    assert value(db, SWITCHED) == (kind.model_id, None, kind.model_id)
    assert rows(db, ENTRIES) == []
    with pytest.raises(ConfigurationError, match="No model of 'jobs' is being built"):
        beside.life.abandon()
    with pytest.raises(RetiredModel):
        make_kind(embedder=wide)
    with pytest.raises(ConfigurationError, match="has no retired model 'nobody'"):
        beside.life.admit("nobody")
    beside.life.admit(beside.identity)
    again = make_kind(embedder=wide)
    assert value(db, SWITCHED) == (kind.model_id, None, again.model_id)


# Dropping


@pytest.mark.ids("P04")
def test_a_retired_partition_is_dropped_after_its_days_and_holds_up_no_search_and_no_write(
    kind: Kind, beside: Kind, db: Db, database_url: str, wide: HashEmbedder
) -> None:
    drain(beside)
    beside.life.switch()
    assert beside.life.drop_retired(days=7, stop=Stop()) == []
    partition = kind.bound.partition_name(kind.model_id)
    with connect(database_url) as searcher, connect(database_url) as writer, ThreadPoolExecutor(1) as pool:
        for one in (searcher, writer):
            one.execute("BEGIN")
        searcher.execute("SELECT count(*) FROM embed_assets.job_semantic_chunks")
        writer.execute("UPDATE jobs SET company = 'held open' WHERE id = (SELECT min(id) FROM jobs)")
        dropping = pool.submit(lambda: beside.life.drop_retired(days=0, stop=Stop()))
        for _ in range(5):
            with connect(database_url) as other:
                other.execute("SET lock_timeout = '1s'")
                other.execute("SELECT count(*) FROM embed_assets.job_semantic_chunks")
                other.execute("UPDATE jobs SET company = 'meanwhile' WHERE id = (SELECT max(id) FROM jobs)")
        assert not dropping.done()
        assert value(db, "SELECT to_regclass(%s) IS NOT NULL", f"embed_assets.{partition}")
        for one in (searcher, writer):
            one.execute("ROLLBACK")
        assert dropping.result(timeout=30) == [kind.model_id]
    assert value(db, "SELECT to_regclass(%s) IS NULL", f"embed_assets.{partition}")
    assert rows(db, "SELECT DISTINCT model_id FROM embed_assets.semantic_stamps") == [beside.model_id]
    assert value(db, SWITCHED) == (beside.model_id, None, beside.model_id)
    with pytest.raises(ConfigurationError, match="No model of 'jobs' is kept for a rollback"):
        beside.life.rollback()
    beside.life.admit(kind.identity)


def test_what_was_rolled_back_to_meanwhile_is_not_dropped(
    kind: Kind, beside: Kind, db: Db, database_url: str, embedder: HashEmbedder
) -> None:
    drain(beside)
    beside.life.switch()
    with connect(database_url) as searcher, ThreadPoolExecutor(1) as pool:
        searcher.execute("BEGIN")
        searcher.execute("SELECT count(*) FROM embed_assets.job_semantic_chunks")
        dropping = pool.submit(lambda: beside.life.drop_retired(days=0, stop=Stop()))
        until_true(lambda: _waits_for_a_table(db), "nobody tries to drop the partition")
        kind.life.rollback()
        searcher.execute("ROLLBACK")
        assert dropping.result(timeout=60) == []
    assert len(found(kind, "x", embedder)) == 6


def _waits_for_a_table(db: Db) -> bool:
    return bool(value(db, "SELECT count(*) FROM pg_locks WHERE locktype = 'relation' AND NOT granted"))


def test_killed_after_the_drop_what_it_had_not_forgotten_is_not_believed(
    kind: Kind, beside: Kind, db: Db, make_kind: KindMaker
) -> None:
    drain(beside)
    beside.life.switch()
    assert beside.life._drop(kind.model_id, 0, Stop())
    assert value(db, "SELECT count(*) FROM embed_assets.semantic_stamps WHERE model_id = %s", kind.model_id) == 6
    beside.life.admit(kind.identity)
    again = make_kind()
    assert "6 rows that search finds now are not embedded yet" in " ".join(again.life.advance(Stop()))
    assert drain(again).indexed == 6
    again.life.switch()
    again.life.drop_retired(days=0, stop=Stop())
    db.execute("UPDATE embed_assets.semantic_stamps SET model_id = %s", (beside.model_id,))
    again.life.drop_retired(days=0, stop=Stop())
    assert value(db, "SELECT count(*) FROM embed_assets.semantic_stamps") == 0


def test_stamps_without_a_chunk_open_no_gate(kind: Kind, beside: Kind, db: Db) -> None:
    drain(beside)
    db.execute("DELETE FROM embed_assets.job_semantic_chunks WHERE model_id = %s", (beside.model_id,))
    with pytest.raises(NotReady, match="its partition holds no chunk"):
        beside.life.switch()


def test_purging_drops_what_was_retired_long_ago(kind: Kind, beside: Kind, db: Db) -> None:
    drain(beside)
    beside.life.switch()
    days = Settings().rollback_days
    assert days == 7
    assert beside.life.drop_retired(days=days, stop=Stop()) == []
    db.execute("UPDATE embed_assets.corpus_models SET retired_at = retired_at - interval '169 hours'")
    assert beside.life.drop_retired(days=days, stop=Stop()) == [kind.model_id]
