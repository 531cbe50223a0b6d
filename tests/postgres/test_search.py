"""Search: what never shows, what a row is found by, filters, what happens without a query vector, and what people are
told of depth and coverage. How it is planned: `test_search_plans.py`."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from fakes import HashEmbedder, vector_of
from postgres.support import Db, add_job, add_jobs, asking, connect, drain, enqueue, status, value
from psycopg.conninfo import make_conninfo

from embed_assets import search as search_module
from embed_assets.console import answer_json
from embed_assets.corpora.jobs import jobs as jobs_corpus
from embed_assets.embedding import Embedder, HttpEmbedder
from embed_assets.errors import AnswerContract, ConfigurationError, EndpointTrouble, ErrorClass
from embed_assets.fake_server import FakeServer
from embed_assets.queries import query
from embed_assets.resources.assembly import Kind
from embed_assets.resources.postgres import Postgres
from embed_assets.search import Answer, active_model, open_search, search
from embed_assets.settings import Settings


def found(kind: Kind, text: str, embedder: Embedder | None, **options: Any) -> Answer:
    return search(kind.postgres, kind.bound, asking(kind, embedder), text, **options)


def ids(answer: Answer) -> list[int]:
    return [int(hit.source_id) for hit in answer.hits]


class Failing(HashEmbedder):
    """Cannot be asked questions."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error

    def embed_query(self, text: str, *, timeout: float) -> np.ndarray[Any, Any]:
        raise self.error


class Answering(HashEmbedder):
    """Gives every question the same vector."""

    def __init__(self, vector: Any) -> None:
        super().__init__()
        self.vector = np.asarray(vector, dtype=np.float32)

    def embed_query(self, text: str, *, timeout: float) -> np.ndarray[Any, Any]:
        return self.vector


WITHOUT_A_VECTOR: dict[str, Callable[[], Embedder | None]] = {
    "no embedder": lambda: None,
    "refused": lambda: Failing(EndpointTrouble("wrong key", error_class=ErrorClass.REFUSED)),
    "zero vector": lambda: Failing(AnswerContract("only zeros", code="zero_vector")),
    "only zeros": lambda: Answering([0] * 8),
    "not a number": lambda: Answering([float("nan")] * 8),
    "another width": lambda: Answering([1] * 9),
    "another model": lambda: HashEmbedder(identity="another"),
    "nobody listens": lambda: HttpEmbedder("tei", "http://127.0.0.1:9/embed", identity="hash-8", model="m"),
}


@pytest.mark.ids("A-71", "C-64")
@pytest.mark.parametrize("way", WITHOUT_A_VECTOR)
def test_without_a_query_vector_words_decide_and_that_is_said(
    kind: Kind, db: Db, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(search_module, "QUERY_SECONDS", 0.5)
    wanted, both = add_job(db, "<p>marine biology</p>"), add_job(db, "<p>marine biology, marine harbour</p>")
    add_job(db, "<p>something else</p>")
    drain(kind)
    answer = found(kind, "harbour marine", WITHOUT_A_VECTOR[way]())
    assert ids(answer) == [both, wanted]
    assert (answer.semantic, bool(answer.reason)) == (False, True)
    assert '"semantic": "unavailable"' in answer_json(answer)


@pytest.mark.ids("A-71")
def test_a_provider_that_is_slow_is_waited_for_no_longer_than_it_may_take(
    kind: Kind, db: Db, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = add_job(db, "<p>marine biology</p>")
    drain(kind)
    monkeypatch.setattr(search_module, "QUERY_SECONDS", 0.3)
    with FakeServer(seconds_per_request=20) as server:
        embedder = HttpEmbedder("tei", server.url, identity="hash-8", model="m")
        started = time.monotonic()
        answer = found(kind, "marine", embedder)
        embedder.close()
    assert time.monotonic() - started < 5
    assert (ids(answer), answer.semantic) == ([job], False)


LEAVES = {
    "deleted": "DELETE FROM jobs WHERE id = %s",
    "closed": "UPDATE jobs SET closed_at = now() WHERE id = %s",
    "gated": "UPDATE jobs SET is_tech = NULL WHERE id = %s",
}


@pytest.mark.parametrize("way", LEAVES)
@pytest.mark.parametrize("semantic", [True, False])
def test_a_row_that_left_search_shows_in_no_result_though_its_chunks_are_there(
    kind: Kind, embedder: HashEmbedder, db: Db, way: str, semantic: bool
) -> None:
    leaves, stays = add_job(db, "<p>needle</p>"), add_job(db, "<p>needle too</p>")
    drain(kind)
    db.execute(LEAVES[way].encode(), (leaves,))
    assert value(db, "SELECT count(*) FROM embed_assets.job_semantic_chunks") == 2
    assert ids(found(kind, "needle", embedder if semantic else None)) == [stays]


def test_each_row_is_found_once_by_its_best_chunk(kind: Kind, embedder: HashEmbedder, db: Db) -> None:
    long = [f"<p>{word} {'filler ' * 260}</p>" for word in ("apples", "pears", "plums")]
    job, other = add_job(db, "".join(long), title="T"), add_job(db, "<p>grapes</p>", title="T")
    drain(kind)
    pears = value(db, "SELECT body FROM embed_assets.job_semantic_chunks WHERE body LIKE 'pears%%'")
    exact = HashEmbedder()
    exact.embed_query = lambda text, timeout: vector_of(f"passage: T at Acme. {pears}", 8)  # type: ignore[method-assign]
    answer = found(kind, "anything", exact)
    assert (answer.semantic, sorted(ids(answer))) == (True, sorted([job, other]))
    best = answer.hits[0]
    assert (best.source_id, best.body) == (str(job), pears)
    assert best.score == pytest.approx(1, abs=1e-5)
    assert best.fields["title"] == "T"
    assert found(kind, "plums", None).hits[0].body.startswith("plums")
    assert len(found(kind, "anything", exact, k=1).hits) == 1


@pytest.mark.ids("B-44")
@pytest.mark.parametrize("semantic", [True, False])
def test_a_filter_holds_before_the_best_are_chosen_and_its_values_are_data(
    kind: Kind, embedder: HashEmbedder, db: Db, semantic: bool
) -> None:
    add_jobs(db, 30, description="<p>needle</p>")
    company = "O'Brien; DROP TABLE jobs --"
    mine = add_job(db, "<p>needle in a long stack of hay</p>", company=company, company_slug="50%")
    drain(kind)
    asked = embedder if semantic else None
    options = {"where": "company = %(company)s AND id > 0 AND company_slug LIKE '50%%'", "k": 3}
    answer = found(kind, "needle", asked, values={"company": company}, **options)
    assert ids(answer) == [mine]
    assert ids(found(kind, "needle", asked, values={"company": "nobody"}, **options)) == []
    assert len(found(kind, "needle", asked, k=3).hits) == 3


def test_a_filter_s_value_may_not_take_the_name_of_one_of_ours(kind: Kind, embedder: HashEmbedder) -> None:
    with pytest.raises(ValueError, match="k are taken"):
        found(kind, "needle", embedder, where="id = %(k)s", values={"k": 1})


def test_hybrid_fuses_the_ranks_of_vectors_and_words(kind: Kind, db: Db) -> None:
    texts = ["alpha", "needle needle", "needle"]
    nearest, both, worded = (add_job(db, f"<p>{text}</p>", title="T") for text in texts)
    drain(kind)
    of_nearest, of_both, of_worded = (vector_of(f"passage: T at Acme. {text}", 8) for text in texts)
    asked = Answering(0.6 * of_nearest + 0.5 * of_both - 0.3 * of_worded)
    assert ids(found(kind, "needle", asked)) == [nearest, both, worded]
    assert ids(found(kind, "needle", None)) == [both, worded]
    answer = found(kind, "needle", asked, hybrid=True, k=2)
    assert (ids(answer)[0], len(answer.hits), answer.semantic) == (both, 2, True)
    assert answer.hits[0].score == pytest.approx(1 / 62 + 1 / 61)
    lexical = found(kind, "needle", None, hybrid=True)
    assert (ids(lexical), lexical.semantic) == ([both, worded], False)


def test_hits_carry_the_chunk_that_matched_and_the_fields_of_its_row(
    kind: Kind, embedder: HashEmbedder, db: Db
) -> None:
    add_job(db, "<p>needle</p>", title="T")
    drain(kind)
    for answer in (found(kind, "needle", embedder), found(kind, "needle", None)):
        [hit] = answer.hits
        assert (hit.body, hit.chunk_index, dict(hit.fields)) == ("needle", 0, {"title": "T", "company": "Acme"})


@pytest.mark.ids("Q29")
def test_search_is_never_short_while_everything_is_embedded_anew(kind: Kind, embedder: HashEmbedder, db: Db) -> None:
    jobs = add_jobs(db, 12)
    drain(kind)
    seen: list[int] = []
    embedder.before = lambda texts: seen.append(len(found(kind, "anything", embedder, k=20).hits))
    db.execute("UPDATE jobs SET description = '<p>all new ' || id || '</p>'")
    db.execute("SELECT embed_assets.enqueue('jobs', array_agg(id), forced => TRUE) FROM jobs")
    assert drain(kind).indexed == len(jobs)
    assert seen == [12, 12, 12]


def test_a_client_of_another_model_leaves_everything_as_it_is(
    kind: Kind, db: Db, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = add_job(db, "<p>marine</p>")
    drain(kind)
    settings = Settings(protocol="tei", url="http://127.0.0.1:9/embed", model="another")
    db.execute("CREATE ROLE only_reads LOGIN PASSWORD 'reads'")
    db.execute("GRANT USAGE ON SCHEMA embed_assets TO only_reads")
    db.execute("GRANT SELECT ON ALL TABLES IN SCHEMA embed_assets, public TO only_reads")
    url = make_conninfo(database_url, user="only_reads", password="reads")
    try:
        with open_search(settings, jobs_corpus, url=url) as client:
            assert ids(client.search("marine")) == [job]
    finally:
        db.execute("DROP OWNED BY only_reads")
        db.execute("DROP ROLE only_reads")
    assert value(db, "SELECT target_model_id = active_model_id FROM embed_assets.corpora") is True
    assert value(db, "SELECT count(*) FROM embed_assets.embedding_models") == 1


def test_a_database_without_our_schema_is_a_clear_error(server_url: str) -> None:
    postgres = Postgres(make_conninfo(server_url, dbname="template1"))
    with pytest.raises(ConfigurationError, match="Nothing of 'jobs' is indexed yet"):
        active_model(postgres, "jobs")
    postgres.close()


def test_a_kind_of_which_nothing_is_indexed_is_a_clear_error(kind: Kind, embedder: HashEmbedder, db: Db) -> None:
    db.execute("UPDATE embed_assets.corpora SET active_model_id = NULL")
    with pytest.raises(ConfigurationError, match="Nothing of 'jobs' is indexed yet"):
        found(kind, "words", embedder)


def nodes(plan: Any) -> list[Any]:
    return [plan, *(node for part in plan.get("Plans", []) for node in nodes(part))]


@pytest.mark.ids("A-67")
def test_depth_is_counted_from_partial_indexes_alone(kind: Kind, db: Db) -> None:
    db.execute(
        "INSERT INTO embed_assets.semantic_outbox "
        "(kind, source_id, model_id, reason, status, next_attempt_at, wave_id) "
        "SELECT 'jobs', n::text, %s, 'scan', (ARRAY['pending', 'leased', 'retry_wait', 'dead'])[n %% 4 + 1], "
        "now() + interval '1 hour' * (n %% 8 - 3), n FROM generate_series(1, 800) AS n",
        (kind.model_id,),
    )
    db.execute("ANALYZE embed_assets.semantic_outbox")
    depth = kind.outbox.backlog()
    assert (depth.due, depth.leased, depth.waiting, depth.dead) == (300, 200, 100, 200)
    values = {"kind": "jobs", "models": [kind.model_id], "limit": 10, "reconcile_seconds": 3600}
    with kind.postgres.transaction() as cursor:
        cursor.execute("SET LOCAL enable_seqscan = off")
        cursor.execute(b"EXPLAIN (FORMAT JSON) " + query("status.backlog").as_bytes(cursor), values)
        row = cursor.fetchone()
    assert row is not None
    plan = nodes(row["QUERY PLAN"][0]["Plan"])
    used = {node["Index Name"] for node in plan if node.get("Index Name", "").startswith("semantic_outbox")}
    assert used == {f"semantic_outbox_{state}" for state in ("claim", "retry", "leased", "dead")}
    outbox = [node for node in plan if node.get("Relation Name") == "semantic_outbox"]
    assert not [node for node in outbox if node["Node Type"] == "Seq Scan"]


@pytest.mark.ids("A-68")
def test_coverage_is_fresh_rows_of_those_that_belong_in_search_and_no_question_waits_for_it(
    kind: Kind, embedder: HashEmbedder, db: Db, database_url: str
) -> None:
    add_jobs(db, 3)
    add_job(db, is_tech=None)
    drain(kind)
    add_job(db)
    enqueue(kind)
    assert status(kind) == {"fresh": 3, "due": 1, "excluded": 1}
    with connect(database_url) as holder:
        holder.execute("LOCK embed_assets.semantic_outbox, embed_assets.semantic_stamps IN ACCESS EXCLUSIVE MODE")
        assert len(found(kind, "anything", embedder).hits) == 3
