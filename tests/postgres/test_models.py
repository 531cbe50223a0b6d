"""A model built beside another: what is entered, by whom it is kept fresh, and the gates before search reads it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest
from fakes import HashEmbedder
from postgres.conftest import KindMaker
from postgres.support import (
    ENTRIES,
    SWITCHED,
    Db,
    add_job,
    add_jobs,
    claim,
    drain,
    enqueue,
    fold,
    found,
    ids,
    rows,
    say,
    value,
    wave_of,
)

from embed_assets import pipeline
from embed_assets.console import standing_line
from embed_assets.corpora.jobs import jobs
from embed_assets.errors import InputRejected
from embed_assets.fake_server import FakeServer
from embed_assets.resources.assembly import Kind, open_kind, query_embedders
from embed_assets.resources.model_gates import Coverage, Gates
from embed_assets.resources.model_life import NotReady
from embed_assets.resources.vector_index import VectorIndex
from embed_assets.search import search
from embed_assets.settings import Settings
from embed_assets.stop import Stop


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
