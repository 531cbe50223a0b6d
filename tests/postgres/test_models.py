"""A model built beside another: what is entered, indexed, judged, switched, rolled back and dropped, and by whom."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from typing import Any

import psycopg
import pytest
from fakes import HashEmbedder
from postgres.conftest import KindMaker
from postgres.support import (
    Db,
    add_job,
    add_jobs,
    asking,
    claim,
    connect,
    drain,
    enqueue,
    fold,
    rows,
    say,
    staged,
    until_true,
    value,
    wave_of,
)

from embed_assets import pipeline
from embed_assets.console import standing_line
from embed_assets.corpora.jobs import jobs
from embed_assets.errors import Cancelled, ConfigurationError, InputRejected
from embed_assets.fake_server import FakeServer
from embed_assets.resources import vector_index
from embed_assets.resources.assembly import Kind, open_kind, query_embedders
from embed_assets.resources.enqueuer import _Enqueue
from embed_assets.resources.model_gates import Coverage, Gates
from embed_assets.resources.model_life import NotReady
from embed_assets.resources.target import RetiredModel
from embed_assets.resources.vector_index import VectorIndex
from embed_assets.search import search
from embed_assets.settings import Settings
from embed_assets.stop import Stop

SWITCHED = "SELECT active_model_id, previous_model_id, target_model_id FROM embed_assets.corpora"
ENTRIES = "SELECT model_id, count(*) FROM embed_assets.semantic_outbox GROUP BY model_id ORDER BY model_id"


@pytest.fixture
def wide() -> HashEmbedder:
    """The new model: twelve dimensions where the active one has eight."""
    return HashEmbedder(12, identity="wide")


@pytest.fixture
def beside(kind: Kind, db: Db, make_kind: KindMaker, wide: HashEmbedder, embedder: HashEmbedder) -> Kind:
    """Six rows fresh for the active model, and a worker that maintains both."""
    add_jobs(db, 6)
    drain(kind)
    return make_kind(embedder=wide, active=embedder)


def found(kind: Kind, text: str, *embedders: HashEmbedder, k: int = 10) -> list[int]:
    """What search finds, and that it found it by vectors."""
    known = {key: one for embedder in embedders for key, one in asking(kind, embedder).items()}
    answer = search(kind.postgres, kind.bound, known, text, k=k)
    assert answer.semantic, answer.reason
    return [int(hit.source_id) for hit in answer.hits]


def ids(*kinds: Kind) -> list[int]:
    return [kind.model_id for kind in kinds]


@pytest.mark.ids("P06")
def test_the_first_model_is_active_at_once_and_indexed_after_its_load(kind: Kind, db: Db) -> None:
    add_jobs(db, 6)
    enqueue(kind)
    assert not kind.life.waiting(automatic=True)
    assert "not embedded yet" in kind.life.advance(Stop())[0]
    assert not kind.life.index_of(kind.life.models()[0]).state().present
    drain(kind)
    assert not kind.life.waiting(automatic=True), "judged a moment ago"
    db.execute("UPDATE embed_assets.corpus_models SET judged_at = judged_at - interval '1 minute'")
    assert kind.life.waiting(automatic=True)
    assert kind.life.advance(Stop()) == [f"{kind.identity}: indexed"]
    (model,) = kind.life.models()
    assert (model.state, model.index_ready, model.stamped, model.unmet) == ("active", True, 6, None)
    assert kind.life.index_of(model).state().valid
    assert not kind.life.waiting(automatic=True)
    assert kind.life.advance(Stop()) == []


@pytest.mark.ids("Q29", "A-04", "A-66")
def test_a_new_model_is_built_beside_and_search_reads_it_only_once_it_is_complete(
    kind: Kind, beside: Kind, db: Db, wide: HashEmbedder, embedder: HashEmbedder
) -> None:
    old, new = ids(kind, beside)
    enqueue(beside)
    assert rows(db, "SELECT DISTINCT model_id, lane FROM embed_assets.semantic_outbox") == [(new, 1)]
    assert found(beside, "x", wide, embedder) == found(kind, "x", embedder)
    assert value(db, SWITCHED) == (old, None, new)
    drain(beside)
    assert value(db, SWITCHED) == (old, None, new)
    assert beside.life.advance(Stop()) == [f"{kind.identity}: indexed", f"{beside.identity}: search reads it now"]
    assert value(db, SWITCHED) == (new, old, new)
    assert sorted(found(beside, "x", wide, embedder)) == sorted(found(kind, "x", wide, embedder))
    assert [model.state for model in beside.life.models()] == ["retired", "active"]
    assert rows(
        db, "SELECT DISTINCT vector_dims(embedding), model_id FROM embed_assets.job_semantic_chunks ORDER BY 1"
    ) == [
        (8, old),
        (12, new),
    ]


def test_a_change_is_embedded_for_both_models_and_first_for_the_one_that_search_reads(
    kind: Kind, beside: Kind, db: Db, wide: HashEmbedder, embedder: HashEmbedder
) -> None:
    enqueue(beside)
    job = value(db, "SELECT min(id) FROM jobs")
    db.execute("UPDATE jobs SET description = 'changed' WHERE id = %s", (job,))
    enqueue(beside)
    wave = beside.outbox.claim("run", 100)
    assert wave is not None
    assert (wave.model_id, wave.source_ids) == (kind.model_id, [str(job)])
    beside.outbox.release(wave)
    before = len(embedder.texts)
    drain(beside)
    assert len(embedder.texts) == before + 1
    assert len(wide.texts) == 6
    assert rows(db, "SELECT model_id FROM embed_assets.semantic_stamps WHERE source_id = %s", str(job)) == [
        kind.model_id,
        beside.model_id,
    ]


def test_a_row_that_reopens_while_one_model_clears_it_is_looked_at_by_the_other_again(
    kind: Kind, beside: Kind, db: Db, wide: HashEmbedder, embedder: HashEmbedder
) -> None:
    drain(beside)
    job = value(db, "SELECT min(id) FROM jobs")
    db.execute("UPDATE jobs SET closed_at = now() WHERE id = %s", (job,))
    say(db, job)
    fold(beside)
    waves = {wave.model_id: wave for wave in (wave_of(beside), wave_of(beside))}
    old, new = (waves[model_id] for model_id in ids(kind, beside))
    pipeline.stage(beside.ports.of(new), new, Stop())
    db.execute("UPDATE jobs SET closed_at = NULL WHERE id = %s", (job,))
    pipeline.stage(beside.ports.of(old), old, Stop())
    assert beside.chunks.write(old).superseded == 1
    assert beside.chunks.write(new).back == 1
    assert rows(db, ENTRIES) == [(model_id, 1) for model_id in ids(kind, beside)]
    while wave := claim(beside):
        pipeline.work(beside.ports.of(wave), wave, beside.limits, Stop())
    assert job in found(kind, "x", wide, embedder)
    assert rows(db, "SELECT DISTINCT count(*) FROM embed_assets.semantic_stamps GROUP BY model_id") == [6]


def coverage_of(kind: Kind) -> Coverage:
    return Gates(kind.postgres, kind.bound, kind.settings).coverage(kind.model_id)


def followed(beside: Kind, kind: Kind) -> None:
    """A wave of the active model is written; the target does not get that far."""
    enqueue(beside)
    wave = wave_of(beside)
    assert wave.model_id == kind.model_id
    pipeline.work(beside.ports.of(wave), wave, beside.limits, Stop())


def test_a_target_whose_texts_are_older_than_what_search_finds_now_is_not_switched_to(
    kind: Kind, beside: Kind, db: Db
) -> None:
    drain(beside)
    db.execute("UPDATE jobs SET description = description || ' changed'")
    assert coverage_of(beside).missing == 0, "neither model has followed"
    followed(beside, kind)
    coverage = coverage_of(beside)
    assert (coverage.rows, coverage.missing, coverage.lost) == (6, 6, 0)
    assert "6 of 6 rows are not embedded yet" in " ".join(beside.life.advance(Stop()))
    assert value(db, SWITCHED)[0] == kind.model_id
    drain(beside)
    db.execute("UPDATE jobs SET description = description || ' again'")
    assert coverage_of(beside).missing == 0, "both are as far behind"
    assert "search reads it now" in beside.life.advance(Stop())[-1]


def test_no_switch_loses_a_row_that_was_empty_when_the_target_looked(kind: Kind, beside: Kind, db: Db) -> None:
    job = add_job(db, "", title="")
    drain(beside)
    assert value(db, "SELECT max(chunk_count) FROM embed_assets.semantic_stamps WHERE source_id = %s", str(job)) == 0
    db.execute("UPDATE jobs SET description = 'no more' WHERE id = %s", (job,))
    followed(beside, kind)
    db.execute("UPDATE jobs SET description = 'and changed since' WHERE id = %s", (job,))
    assert coverage_of(beside).lost == 1
    with pytest.raises(NotReady, match="1 rows that search finds now"):
        beside.life.switch()


def test_without_an_embedder_the_active_model_is_frozen_but_still_cleared(
    kind: Kind, db: Db, make_kind: KindMaker, wide: HashEmbedder, embedder: HashEmbedder
) -> None:
    jobs = add_jobs(db, 3)
    drain(kind)
    new = make_kind(embedder=wide)
    db.execute("UPDATE jobs SET description = 'changed' WHERE id = %s", (jobs[0],))
    db.execute("UPDATE jobs SET closed_at = now() WHERE id = %s", (jobs[1],))
    assert "not embedded yet" in " ".join(new.life.advance(Stop()))
    active, target = new.life.models()
    assert (active.state, target.state) == ("active", "building")
    standing = new.life.standing(new.outbox.models)
    assert standing.frozen_since == target.target_since is not None
    assert "is frozen since" in (standing_line(standing) or "")
    kept = make_kind(embedder=wide, active=embedder)
    assert kept.life.standing(kept.outbox.models).frozen_since is None
    assert standing_line(kind.life.standing(kept.outbox.models))
    drain(new)
    assert value(db, "SELECT count(*) FROM embed_assets.job_semantic_chunks WHERE id = %s", jobs[1]) == 1


def server_settings(server: FakeServer, **more: Any) -> dict[str, Any]:
    return {"protocol": "openai", "url": server.openai_url, "model": "old", "api_key": "old-key", **more}


def as_active(settings: dict[str, Any]) -> dict[str, Any]:
    return {f"active_{name}": given for name, given in settings.items()}


@pytest.fixture
def two_servers(jobs_table: None) -> Iterator[tuple[FakeServer, FakeServer]]:
    with FakeServer(dimensions=8) as old, FakeServer(dimensions=12) as new:
        yield old, new


def test_the_active_model_is_kept_fresh_by_the_embedder_of_its_own_settings(
    db: Db, database_url: str, two_servers: tuple[FakeServer, FakeServer]
) -> None:
    old, new = two_servers
    add_jobs(db, 2)
    before = server_settings(old, dimensions=8, prefix_by="server")
    with closing(open_kind(Settings(**before), jobs, url=database_url)) as kind:
        drain(kind)
    db.execute("UPDATE jobs SET description = 'changed' WHERE id = (SELECT min(id) FROM jobs)")
    after = server_settings(new, model="new", api_key="new-key", dimensions=12)
    old.requests.clear()
    with closing(open_kind(Settings(**after, **as_active(before)), jobs, url=database_url)) as kind:
        drain(kind)
        assert len(kind.models) == 2
    assert [len(server.texts) for server in (old, new)] == [1, 2]
    assert "passage" not in old.texts[0]
    assert {(one.body["model"], one.headers["authorization"]) for one in old.requests} == {("old", "Bearer old-key")}
    assert {(one.body["model"], one.headers["authorization"]) for one in new.requests} == {("new", "Bearer new-key")}


def test_variables_of_another_model_than_the_active_one_leave_it_frozen_and_say_so(
    db: Db, database_url: str, two_servers: tuple[FakeServer, FakeServer], caplog: pytest.LogCaptureFixture
) -> None:
    old, new = two_servers
    add_jobs(db, 1)
    with closing(open_kind(Settings(**server_settings(old)), jobs, url=database_url)) as kind:
        drain(kind)
    wrong = as_active(server_settings(old, model="another"))
    given = Settings(**server_settings(new, model="new"), **wrong)
    with closing(open_kind(given, jobs, url=database_url)) as kind:
        assert len(kind.models) == 1
    assert "EMBED_ACTIVE_* names another-chunked" in caplog.text


def test_questions_go_to_the_embedder_of_the_model_search_reads(
    db: Db, database_url: str, two_servers: tuple[FakeServer, FakeServer]
) -> None:
    old, new = two_servers
    add_jobs(db, 2)
    with closing(open_kind(Settings(**server_settings(old)), jobs, url=database_url)) as kind:
        drain(kind)
    with FakeServer(dimensions=8) as questions:
        active = server_settings(old, query_url=questions.openai_url)
        given = Settings(**server_settings(new, model="new"), **as_active(active))
        with closing(open_kind(given, jobs, url=database_url)) as kind:
            drain(kind)
            embedders = query_embedders(given, jobs)
            new.requests.clear()
            assert search(kind.postgres, kind.bound, embedders, "words").semantic
            assert (len(questions.requests), len(new.requests)) == (1, 0)
            kind.life.switch()
            assert search(kind.postgres, kind.bound, embedders, "words").semantic
            assert (len(questions.requests), len(new.requests)) == (1, 1)


# The gates


@pytest.mark.parametrize(
    ("given", "unmet"),
    [
        ({"switch_dead_percent": 10}, "1 of 7 rows are dead, more than 10 % (EMBED_SWITCH_DEAD_PERCENT)"),
        ({"switch_dead_percent": 20}, None),
    ],
)
def test_too_many_dead_rows_keep_search_where_it_is(
    kind: Kind, db: Db, make_kind: KindMaker, wide: HashEmbedder, given: dict[str, Any], unmet: str | None
) -> None:
    add_jobs(db, 6)
    drain(kind)
    add_job(db, "<p>poison</p>")
    wide.reject = lambda text: InputRejected("no") if "poison" in text else None
    new = make_kind(embedder=wide, **given)
    drain(new)
    new.life.advance(Stop())
    target = new.life.models()[-1]
    assert (target.unmet, target.active) == (unmet, unmet is None)


@pytest.mark.parametrize(("percent", "active"), [(40, False), (60, True)])
def test_rows_that_search_never_found_may_be_missing_to_a_share_those_it_finds_may_not(
    kind: Kind, db: Db, make_kind: KindMaker, wide: HashEmbedder, percent: float, active: bool
) -> None:
    jobs = add_jobs(db, 2)
    drain(kind)
    new = make_kind(embedder=wide, switch_missing_percent=percent)
    drain(new)
    add_jobs(db, 2)
    new.life.advance(Stop())
    assert new.life.models()[-1].active is active
    if not active:
        assert "2 of 4 rows are not embedded yet, more than 40 %" in (new.life.models()[-1].unmet or "")
        db.execute(
            "DELETE FROM embed_assets.semantic_stamps WHERE model_id = %s AND source_id = %s",
            (new.model_id, str(jobs[0])),
        )
        with pytest.raises(NotReady, match="1 rows that search finds now are not embedded yet"):
            new.life.switch()


def test_an_index_that_finds_too_little_keeps_search_where_it_is(
    beside: Kind, monkeypatch: pytest.MonkeyPatch, make_kind: KindMaker, wide: HashEmbedder
) -> None:
    drain(beside)
    nearest = VectorIndex._nearest

    def worse(index: VectorIndex, cursor: Any, vector: Any, *, exactly: bool) -> list[float]:
        return [distance + (0 if exactly else 3) for distance in nearest(index, cursor, vector, exactly=exactly)]

    with monkeypatch.context() as patch:
        patch.setattr(VectorIndex, "_nearest", worse)
        beside.life.advance(Stop())
        unmet = beside.life.models()[-1].unmet
        assert unmet == "recall@10 of its index is 0.0% over 6 queries, below 95 % (EMBED_SWITCH_RECALL_PERCENT)"
        make_kind(embedder=wide, switch_recall_percent=0).life.advance(Stop())
    assert beside.life.models()[-1].active


def test_recall_asks_as_many_questions_as_the_setting_says(beside: Kind, make_kind: KindMaker, db: Db) -> None:
    add_jobs(db, 60)
    drain(beside)
    index = beside.life.index_of(beside.life.models()[-1])
    index.build()
    few = index.recall(queries=20, seconds=60, stop=Stop())
    many = index.recall(queries=60, seconds=60, stop=Stop())
    assert few is not None
    assert many is not None
    assert few.queries <= 20 < many.queries
    assert few.share == many.share == 1.0


def test_an_operator_s_switch_waits_for_the_operator(
    beside: Kind, db: Db, make_kind: KindMaker, wide: HashEmbedder
) -> None:
    by_hand = make_kind(embedder=wide, switch="operator")
    with pytest.raises(NotReady, match="6 rows that search finds now are not embedded yet"):
        by_hand.life.switch()
    drain(beside)
    by_hand.life.advance(Stop())
    assert by_hand.life.models()[-1].state == "building"
    job = add_job(db, "<p>poison</p>")
    wide.reject = lambda text: InputRejected("no") if "poison" in text else None
    drain(by_hand)
    by_hand.life.advance(Stop())
    assert "are dead" in (by_hand.life.models()[-1].unmet or "")
    db.execute("UPDATE jobs SET description = 'mended' WHERE id = %s", (job,))
    drain(by_hand)
    db.execute("UPDATE embed_assets.corpus_models SET judged_at = judged_at - interval '1 minute'")
    assert by_hand.life.waiting(automatic=False), "what was unmet may be met by now"
    by_hand.life.advance(Stop())
    assert by_hand.life.models()[-1].unmet is None
    assert not by_hand.life.waiting(automatic=False)
    assert by_hand.life.switch().identity == by_hand.identity
    assert by_hand.life.models()[-1].active
    with pytest.raises(NotReady, match="is active already"):
        by_hand.life.switch()


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


def test_what_was_abandoned_while_it_was_judged_is_not_switched_to(
    kind: Kind, beside: Kind, db: Db, monkeypatch: pytest.MonkeyPatch
) -> None:
    drain(beside)
    judge = type(beside.life)._judge

    def abandoned(life: Any, model: Any, stop: Stop) -> str | None:
        unmet = judge(life, model, stop)
        kind.life.abandon()
        return unmet

    monkeypatch.setattr(type(beside.life), "_judge", abandoned)
    with pytest.raises(NotReady, match="is not what it was a moment ago"):
        beside.life.switch()
    assert value(db, SWITCHED) == (kind.model_id, None, kind.model_id)
    assert [model.state for model in kind.life.models()] == ["active", "retired"]


def test_what_was_edited_while_the_index_was_judged_is_counted_once_more(
    kind: Kind, beside: Kind, db: Db, monkeypatch: pytest.MonkeyPatch
) -> None:
    drain(beside)
    judge = type(beside.life)._judge

    def edited(life: Any, model: Any, stop: Stop) -> str | None:
        unmet = judge(life, model, stop)
        db.execute("UPDATE jobs SET description = description || ' edited'")
        drain(kind)
        return unmet

    monkeypatch.setattr(type(beside.life), "_judge", edited)
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


def test_a_worker_whose_models_were_retired_since_does_not_ask_for_scans_of_them(
    kind: Kind, beside: Kind, db: Db, make_kind: KindMaker, wide: HashEmbedder
) -> None:
    drain(beside)
    assert not beside.outbox.stale()
    beside.life.switch()
    db.execute("UPDATE jobs SET description = 'changed'")
    assert not kind.outbox.stale(), "its only model is retired"
    assert beside.outbox.stale()
    drain(make_kind(embedder=wide))
    assert not beside.outbox.stale()


# What was asked for, and for which models


def ask(kind: Kind) -> None:
    kind.backfill.ask(range(64), selection="all", reason="test", run_id="run")


def done(kind: Kind) -> set[bool]:
    """Whether the buckets that have rows are done."""
    return {one.done for one in kind.backfill.progress() if one.rows}


def test_a_backfill_is_entered_for_the_models_it_was_asked_for_whoever_folds_it(
    kind: Kind, beside: Kind, db: Db, wide: HashEmbedder, embedder: HashEmbedder
) -> None:
    drain(beside)
    for one in (wide, embedder):
        one.texts.clear()
    ask(beside)
    fold(kind)
    assert rows(db, ENTRIES) == [(kind.model_id, 6), (beside.model_id, 6)]
    drain(kind)
    assert done(beside) == {False}
    drain(beside)
    assert (len(embedder.texts), len(wide.texts), done(beside)) == (6, 6, {True})


def test_a_backfill_of_the_new_model_leaves_the_frozen_one_alone(
    kind: Kind, beside: Kind, db: Db, make_kind: KindMaker, wide: HashEmbedder
) -> None:
    drain(beside)
    new = make_kind(embedder=wide)
    ask(new)
    fold(kind)
    assert rows(db, ENTRIES) == [(beside.model_id, 6)]
    drain(new)
    assert done(new) == {True}


def test_what_is_forced_by_hand_is_entered_for_every_model_and_a_change_for_those_of_who_folds(
    kind: Kind, beside: Kind, db: Db, make_kind: KindMaker, wide: HashEmbedder
) -> None:
    drain(beside)
    forced, changed = rows(db, "SELECT id FROM jobs ORDER BY id LIMIT 2")
    db.execute("UPDATE jobs SET description = 'changed' WHERE id = %s", (changed,))
    say(db, forced, forced=True)
    say(db, changed)
    fold(kind)
    assert rows(db, "SELECT source_id::bigint, model_id, forced FROM embed_assets.semantic_outbox ORDER BY 1, 2") == [
        (forced, kind.model_id, True),
        (forced, beside.model_id, True),
        (changed, kind.model_id, False),
    ]
    assert make_kind(embedder=wide).outbox.stale(), "its scan finds what changed"


def test_nothing_is_entered_for_a_model_that_is_retired_while_rows_are_being_entered(
    kind: Kind, beside: Kind, db: Db, monkeypatch: pytest.MonkeyPatch, wide: HashEmbedder
) -> None:
    drain(beside)
    ask(beside)
    say(db, value(db, "SELECT max(id) FROM jobs"))
    db.execute("UPDATE jobs SET description = 'changed' WHERE id = (SELECT min(id) FROM jobs)")
    db.execute("UPDATE jobs SET closed_at = now() WHERE id = (SELECT min(id) + 1 FROM jobs)")
    db.execute("UPDATE embed_assets.corpus_scans SET last_reconcile_at = clock_timestamp()")
    begin = _Enqueue.fold

    def switching(self: Any) -> None:
        monkeypatch.setattr(_Enqueue, "fold", begin)
        assert set(self.models) == {kind.model_id, beside.model_id}
        beside.life.switch(force=True)
        begin(self)

    monkeypatch.setattr(_Enqueue, "fold", switching)
    enqueue(beside)
    assert rows(db, ENTRIES) == [(beside.model_id, 6)]
    drain(beside)
    assert done(beside) == {True}


def test_entries_of_a_retired_model_leave_with_a_reconcile(kind: Kind, beside: Kind, db: Db) -> None:
    drain(beside)
    beside.life.switch()
    db.execute(
        "INSERT INTO embed_assets.semantic_outbox (kind, source_id, model_id, reason) "
        "VALUES ('jobs', '1', %s, 'write')",
        (kind.model_id,),
    )
    db.execute("UPDATE embed_assets.corpus_scans SET last_reconcile_at = NULL")
    enqueue(beside)
    assert rows(db, ENTRIES) == []
    assert value(db, "SELECT outcome FROM embed_assets.semantic_outbox_log ORDER BY id DESC") == "superseded"


def test_a_backfill_of_a_model_that_is_given_up_is_never_done(
    kind: Kind, beside: Kind, db: Db, make_kind: KindMaker, wide: HashEmbedder
) -> None:
    drain(beside)
    new = make_kind(embedder=wide)
    ask(beside)
    drain(beside)
    ask(new)
    fold(new)
    new.life.abandon()
    assert rows(db, ENTRIES) == []
    assert done(kind) == {False}
    with pytest.raises(ConfigurationError, match="are retired"):
        ask(new)
    ask(kind)
    drain(kind)
    assert done(kind) == {True}


# The index


def test_what_a_dead_process_left_half_built_is_dropped_and_built_anew(kind: Kind, db: Db, database_url: str) -> None:
    add_jobs(db, 3)
    drain(kind)
    index = kind.life.index_of(kind.life.models()[0])
    with connect(database_url) as snapshot:
        snapshot.execute("BEGIN ISOLATION LEVEL REPEATABLE READ")
        snapshot.execute("SELECT count(*) FROM embed_assets.job_semantic_chunks")
        with ThreadPoolExecutor(1) as pool:
            building = pool.submit(index.build)
            until_true(lambda: index.state().building and index.state().present, "the index is not being built")
            assert index.build() is False
            db.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_progress_create_index WHERE datname = current_database()"
            )
            with pytest.raises(psycopg.OperationalError):
                building.result(timeout=30)
    until_true(lambda: not index.state().building, "the killed build goes on")
    assert (index.state().present, index.state().valid) == (True, False)
    assert kind.life.advance(Stop()) == [f"{kind.identity}: indexed"]
    assert index.state().valid


def test_two_never_build_one_index_at_once(kind: Kind, db: Db, database_url: str) -> None:
    add_jobs(db, 3)
    drain(kind)
    index = kind.life.index_of(kind.life.models()[0])
    with connect(database_url) as builder:
        builder.execute(
            "SELECT pg_advisory_lock(1701667431, (%s::regclass::oid::bigint - 2147483648)::integer)",
            (f"embed_assets.{kind.bound.partition_name(kind.model_id)}",),
        )
        assert index.build() is False
        assert not index.state().present
    assert index.build() is True


def test_a_cancelled_build_ends_at_once_and_the_next_one_finishes(kind: Kind, db: Db, database_url: str) -> None:
    add_jobs(db, 3)
    drain(kind)
    index = kind.life.index_of(kind.life.models()[0])
    with connect(database_url) as snapshot, ThreadPoolExecutor(1) as pool:
        snapshot.execute("BEGIN ISOLATION LEVEL REPEATABLE READ")
        snapshot.execute("SELECT count(*) FROM embed_assets.job_semantic_chunks")
        building = pool.submit(index.build)
        until_true(lambda: index.state().building, "the index is not being built")
        kind.postgres.cancel()
        with pytest.raises(Cancelled):
            building.result(timeout=30)
    until_true(index.build, "the next build never finishes")
    assert index.state().valid


def test_how_far_an_index_is_is_told_while_it_is_built(kind: Kind, db: Db, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vector_index, "PROGRESS_SECONDS", 0.02)
    add_jobs(db, 3)
    drain(kind)
    db.execute(
        "INSERT INTO embed_assets.job_semantic_chunks (id, chunk_index, model_id, text_hash, body, embedding) "
        "SELECT 1000 + g, 0, %s, 'x', 'x', ARRAY(SELECT random() FROM generate_series(1, 8) WHERE g > 0)::vector(8) "
        "FROM generate_series(1, 20000) AS g",
        (kind.model_id,),
    )
    told: list[float] = []
    assert kind.life.index_of(kind.life.models()[0]).build(told.append)
    assert told
    assert all(0 <= done <= 1 for done in told)
    assert told[-1] > 0


@pytest.mark.ids("P01", "P02")
@pytest.mark.parametrize(("dimensions", "operators"), [(2000, "vector"), (2001, "halfvec"), (4001, None)])
def test_every_width_is_indexed_as_pgvector_can_or_searched_exactly(
    jobs_table: None, db: Db, make_kind: KindMaker, dimensions: int, operators: str | None
) -> None:
    embedder = HashEmbedder(dimensions)
    kind = make_kind(embedder=embedder)
    jobs = add_jobs(db, 3)
    drain(kind)
    kind.life.advance(Stop())
    (model,) = kind.life.models()
    assert model.index_ready
    made = value(db, "SELECT indexdef FROM pg_indexes WHERE indexname LIKE %s", "%_hnsw")
    if operators is None:
        assert made is None
    else:
        assert f"{operators}({dimensions})) {operators}_cosine_ops" in made
    assert sorted(found(kind, "x", embedder)) == jobs
    assert not kind.life.waiting(automatic=True)
