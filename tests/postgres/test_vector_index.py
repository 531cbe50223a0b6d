"""The vector index of a model: built while people read and write, by one at a time, for every width."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import psycopg
import pytest
from fakes import HashEmbedder
from postgres.conftest import KindMaker
from postgres.support import (
    Db,
    add_jobs,
    connect,
    drain,
    found,
    until_true,
    value,
)

from embed_assets.errors import Cancelled
from embed_assets.resources import vector_index
from embed_assets.resources.assembly import Kind
from embed_assets.stop import Stop


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
