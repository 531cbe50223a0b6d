"""How a search is planned: by the index, through dead tuples and filtered rows, exactly where the index falls short.

`PLAN_CHUNKS=200000` (make plans) repeats it with more."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest
from fakes import HashEmbedder, vector_of
from pgvector import Vector
from postgres.conftest import KindMaker
from postgres.generated import build_index, generate
from postgres.support import Db, rows, value

from embed_assets.queries import query
from embed_assets.resources.assembly import Kind
from embed_assets.resources.similar_store import SimilarStore
from embed_assets.search import active_model, nearest_statement

CHUNKS = int(os.environ.get("PLAN_CHUNKS", "20000"))


def vector(kind: Kind, word: str = "anything") -> np.ndarray[Any, Any]:
    return vector_of(word, kind.embedder.dimensions)


class Searched:
    """A search under EXPLAIN ANALYZE: the rows found, and which parts of the plan ran."""

    def __init__(self, kind: Kind, k: int, where: str = "TRUE", *, settings: str = "SELECT 1") -> None:
        statement = nearest_statement(kind.bound, active_model(kind.postgres, "jobs"), kind.bound.source_where(where))
        values = {"k": k, "query": Vector(vector(kind))}
        with kind.postgres.transaction() as cursor:
            cursor.execute(query("search.settings"))
            cursor.execute(settings.encode())
            self.rows = cursor.execute(statement, values).fetchall()
            cursor.execute(b"EXPLAIN (ANALYZE, FORMAT JSON) " + statement.as_bytes(cursor), values)
            row = cursor.fetchone()
        assert row is not None
        self.nodes = list(_walk(row["QUERY PLAN"][0]["Plan"], ""))

    @property
    def ids(self) -> list[int]:
        return [int(row["source_id"]) for row in self.rows]

    def ran(self, part: str) -> bool:
        """Whether anything below this part of the statement was executed."""
        return any(node["Actual Loops"] > 0 and "Relation Name" in node for name, node in self.nodes if name == part)

    def by_index(self, part: str) -> bool:
        return any("_hnsw" in node.get("Index Name", "") for name, node in self.nodes if name == part)


def _walk(node: Any, part: str) -> Any:
    name = node.get("Subplan Name", "")
    part = name.removeprefix("CTE ") if name.startswith("CTE ") else part
    yield part, node
    for below in node.get("Plans", []):
        yield from _walk(below, part)


def brute_force(db: Db, kind: Kind, k: int, where: str = "TRUE") -> list[int]:
    """Every chunk looked at, without any statement of ours."""
    return rows(
        db,
        f"SELECT id FROM (SELECT j.id, min(c.embedding <=> %s::vector) AS distance FROM jobs AS j "
        f"JOIN embed_assets.{kind.bound.partition_name(kind.model_id)} AS c USING (id) "
        f"WHERE j.closed_at IS NULL AND {where} GROUP BY j.id) AS d ORDER BY distance, id::text LIMIT {k}",
        vector(kind).tolist(),
    )


@pytest.fixture
def many(kind: Kind, db: Db) -> Kind:
    generate(db, kind, CHUNKS // 2, companies=5)
    build_index(kind)
    return kind


@pytest.mark.ids("P20")
def test_search_and_filtered_search_go_by_the_index(many: Kind, db: Db) -> None:
    for where in ("TRUE", "company_slug = 'company-3'", "NOT is_private AND title IS NOT NULL"):
        searched = Searched(many, 10, where)
        assert searched.by_index("near"), where
        assert (len(searched.ids), searched.ran("wide"), searched.ran("exact")) == (10, False, False)
        assert len(set(searched.ids) & set(brute_force(db, many, 10, where))) >= 9
    before = _scans(db)
    statement = "SELECT source_id FROM embed_assets.search_jobs(%s::vector, 10)"
    assert rows(db, statement, vector(many).tolist()) == [str(job) for job in Searched(many, 10).ids]
    assert _scans(db) > before


def _scans(db: Db) -> int:
    db.execute("SELECT pg_stat_force_next_flush()")
    db.execute("SELECT pg_stat_clear_snapshot()")
    return int(value(db, "SELECT sum(idx_scan) FROM pg_stat_user_indexes WHERE indexrelname LIKE '%%_hnsw'"))


@pytest.mark.ids("P03")
@pytest.mark.parametrize("way", ["replaced", "deleted", "closed"])
def test_the_nearest_being_dead_or_hidden_leaves_no_answer_short(kind: Kind, db: Db, way: str) -> None:
    generate(db, kind, 2000)
    partition = f"embed_assets.{kind.bound.partition_name(kind.model_id)}"
    db.execute(f"ALTER TABLE {partition} SET (autovacuum_enabled = off)")
    build_index(kind)
    nearest = brute_force(db, kind, 1000)
    db.execute(
        {
            "replaced": f"UPDATE {partition} SET embedding = (-1 * %s::vector) WHERE id = ANY(%s)",
            "deleted": f"DELETE FROM {partition} WHERE %s::vector IS NOT NULL AND id = ANY(%s)",
            "closed": "UPDATE jobs SET closed_at = now() WHERE %s::vector IS NOT NULL AND id = ANY(%s)",
        }[way]
        .encode()
        .replace(b"(-1 * %s::vector)", b"(SELECT array_agg(-x) FROM unnest(%s::real[]) AS x)::vector"),
        (vector(kind).tolist(), nearest),
    )
    searched = Searched(kind, 10)
    assert (searched.by_index("near"), searched.ran("exact")) == (True, False)
    assert len(set(searched.ids) & set(brute_force(db, kind, 10))) >= 9
    assert not set(searched.ids) & set(nearest)


@pytest.mark.ids("B-44", "P20")
def test_a_filter_that_the_index_finds_too_few_rows_for_is_answered_exactly(kind: Kind, db: Db) -> None:
    generate(db, kind, 3000)
    build_index(kind)
    where = "id %% 1000 = 3"
    searched = Searched(kind, 10, where, settings="SET LOCAL hnsw.max_scan_tuples = 200")
    assert searched.ran("exact")
    assert searched.ids == brute_force(db, kind, 10, where)
    assert len(searched.ids) == 3


def test_rows_of_many_chunks_take_no_place_of_others(kind: Kind, db: Db) -> None:
    generate(db, kind, 1000)
    partition = f"embed_assets.{kind.bound.partition_name(kind.model_id)}"
    long = brute_force(db, kind, 1)[0]
    db.execute(
        f"INSERT INTO {partition} (id, chunk_index, model_id, text_hash, body, embedding) "
        "SELECT %s, n, %s, '\\x00', 'again', %s::vector FROM generate_series(10, 309) AS n",
        (long, kind.model_id, vector(kind).tolist()),
    )
    build_index(kind)
    searched = Searched(kind, 5)
    assert searched.ids == brute_force(db, kind, 5)
    assert (searched.ran("wide"), searched.ran("exact")) == (True, False)


@pytest.mark.parametrize("width", [8, 2100, 4100])
def test_wide_vectors_are_searched_by_a_halfvec_index_and_the_widest_exactly(
    jobs_table: None, make_kind: KindMaker, db: Db, width: int
) -> None:
    kind = make_kind(embedder=HashEmbedder(width))
    generate(db, kind, 30)
    if width <= 4000:
        build_index(kind)
    searched = Searched(kind, 5, settings="SET LOCAL enable_seqscan = off; SET LOCAL enable_sort = off")
    assert searched.by_index("near") == (width <= 4000)
    assert len(set(searched.ids) & set(brute_force(db, kind, 5))) >= 4
    found = rows(db, "SELECT source_id FROM embed_assets.search_jobs(%s::vector, 5)", vector(kind).tolist())
    assert len(set(map(int, found)) & set(searched.ids)) >= 4


def test_the_function_steps_over_hidden_rows_within_the_index_whatever_its_caller_has_set(kind: Kind, db: Db) -> None:
    generate(db, kind, 2000)
    build_index(kind)
    db.execute("UPDATE jobs SET closed_at = now() WHERE id = ANY(%s)", (brute_force(db, kind, 1000),))
    db.execute("ANALYZE")
    db.execute("SET hnsw.iterative_scan = off")
    read_whole = "SELECT pg_stat_get_xact_numscans(%s::regclass)"
    partition = f"embed_assets.{kind.bound.partition_name(kind.model_id)}"
    with db.transaction():
        before = value(db, read_whole, partition)  # what this session read and has not told yet
        found = rows(db, "SELECT source_id FROM embed_assets.search_jobs(%s::vector, 10)", vector(kind).tolist())
        assert value(db, read_whole, partition) == before
    assert len(set(map(int, found)) & set(brute_force(db, kind, 10))) >= 9


def test_vectors_that_no_index_can_hold_are_compared_in_full(jobs_table: None, make_kind: KindMaker, db: Db) -> None:
    kind = make_kind(embedder=HashEmbedder(4001))
    generate(db, kind, 20)
    asked, partition = vector(kind).tolist(), kind.bound.partition_name(kind.model_id)
    nearest = f"SELECT min(embedding <=> %s::vector) FROM embed_assets.{partition} GROUP BY id ORDER BY 1 LIMIT 5"
    exact = rows(db, nearest, asked)
    assert rows(db, "SELECT distance FROM embed_assets.search_jobs(%s::vector, 5)", asked) == exact
    assert [row["distance"] for row in Searched(kind, 5).rows] == exact


def test_the_function_refuses_another_width_and_leaves_its_caller_s_settings(kind: Kind, db: Db) -> None:
    generate(db, kind, 30)
    with pytest.raises(Exception, match="has 3 dimensions, the active model 8"):
        db.execute("SELECT * FROM embed_assets.search_jobs('[1,2,3]')")
    db.execute("SET hnsw.iterative_scan = off")
    assert len(rows(db, "SELECT source_id FROM embed_assets.search_jobs(%s::vector)", vector(kind).tolist())) == 10
    assert value(db, "SHOW hnsw.iterative_scan") == "off"
    db.execute("UPDATE embed_assets.corpora SET active_model_id = NULL")
    assert rows(db, "SELECT source_id FROM embed_assets.search_jobs(%s::vector)", vector(kind).tolist()) == []


@pytest.mark.ids("P20")
def test_similar_probes_go_by_the_index_and_find_the_true_neighbours(many: Kind, db: Db) -> None:
    store = SimilarStore(many.postgres, many.bound)
    ids = [str(job) for job in rows(db, "SELECT id FROM jobs WHERE id % 500 = 1 ORDER BY id LIMIT 20")]
    found = store.compute(ids)
    share = [len(set(row.candidates[:20]) & set(true_neighbours(db, many, row.source_id))) / 20 for row in found]
    assert (len(found), sum(share) / len(share) >= 0.95) == (20, True)
    probes = [node for _, node in _walk(explained(many, store, ids), "") if "_hnsw" in node.get("Index Name", "")]
    assert [node["Actual Loops"] for node in probes] == [40], "one probe for each chunk"


def explained(kind: Kind, store: SimilarStore, ids: list[str]) -> Any:
    statement = store._sql("compute", active_model(kind.postgres, "jobs"))
    with kind.postgres.transaction() as cursor:
        cursor.execute(query("similar.settings"))
        values = {"kind": "jobs", "ids": ids, "depth": 80}
        cursor.execute(b"EXPLAIN (ANALYZE, FORMAT JSON) " + statement.as_bytes(cursor), values)
        row = cursor.fetchone()
    assert row is not None
    return row["QUERY PLAN"][0]["Plan"]


def true_neighbours(db: Db, kind: Kind, job: str, k: int = 20) -> list[str]:
    """Every pair of chunks compared."""
    partition = f"embed_assets.{kind.bound.partition_name(kind.model_id)}"
    return rows(
        db,
        f"SELECT b.id::text FROM jobs AS a JOIN {partition} AS x ON x.id = a.id "
        f"JOIN jobs AS b ON b.id <> a.id AND NOT b.is_private AND b.company_slug <> a.company_slug "
        f"JOIN {partition} AS y ON y.id = b.id WHERE a.id = %s "
        f"GROUP BY b.id ORDER BY min(x.embedding <=> y.embedding), b.id::text LIMIT {k}",
        int(job),
    )
