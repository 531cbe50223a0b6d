"""Search: a question's vector against the active model's chunks, joined to the source. Importable without Dagster.

    with open_search(load_settings(), jobs) as client:
        answer = client.search("data engineer who speaks German", k=5)

What does not belong here: keeping the vectors fresh, and the statements (`resources/search_statements.py`).
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from pgvector import Vector
from psycopg import Cursor, errors, sql

from embed_assets.corpus import TableCorpus
from embed_assets.embedding import Embedder
from embed_assets.errors import ClassifiedError, ConfigurationError
from embed_assets.queries import query
from embed_assets.resources.assembly import as_sent, database_url, query_embedders
from embed_assets.resources.declaration import BoundCorpus, bind
from embed_assets.resources.postgres import Postgres, Row
from embed_assets.resources.search_statements import nearest
from embed_assets.resources.vector_index import compared_as
from embed_assets.settings import Settings
from embed_assets.text import chunk_id

logger = logging.getLogger(__name__)

QUERY_SECONDS = 10.0
OWN_VALUES = {"k", "text", "query"}
FUSED_FROM = 50
FUSION = 60  # the constant of reciprocal rank fusion, as in Cormack, Clarke and Büttcher (SIGIR 2009)


@dataclass(frozen=True)
class Hit:
    """One row, by its best chunk. `score`, higher is better: cosine similarity in [-1, 1] where the vectors decided,
    the lexical rank where words did, the sum of reciprocal ranks where both."""

    source_id: str
    score: float
    body: str
    chunk_index: int
    heading_path: str | None
    chunk_id: str
    fields: Mapping[str, str | None]


@dataclass(frozen=True)
class Answer:
    """`semantic` is False when no query vector could be had and the words decided; `reason` says why."""

    hits: list[Hit]
    semantic: bool
    reason: str | None = None


@dataclass(frozen=True)
class SearchClient:
    """One kind, ready to be searched. Searching changes nothing, and its role needs only to read."""

    postgres: Postgres
    bound: BoundCorpus
    embedders: Mapping[str, Embedder]

    def search(self, text: str, **options: Any) -> Answer:
        """See `search`."""
        return search(self.postgres, self.bound, self.embedders, text, **options)


@contextmanager
def open_search(settings: Settings, corpus: TableCorpus, *, url: str | None = None) -> Iterator[SearchClient]:
    """A client for one kind, closed at the end of the block. Raises ConfigurationError."""
    postgres = Postgres(url or database_url(settings), application_name="embed_assets search")
    embedders = query_embedders(settings, corpus)
    try:
        yield SearchClient(postgres, bind(postgres, as_sent(corpus, settings)), embedders)
    finally:
        for embedder in embedders.values():
            embedder.close()
        postgres.close()


def search(
    postgres: Postgres,
    bound: BoundCorpus,
    embedders: Mapping[str, Embedder],
    text: str,
    *,
    k: int = 10,
    where: str = "TRUE",
    values: Mapping[str, Any] | None = None,
    hybrid: bool = False,
) -> Answer:
    """The `k` best rows for a question; fewer only when fewer may show. Without a query vector: lexical.

    `embedders` by the identity of the model whose questions they embed (`query_embedders`): the active one is asked,
    so that a switch of models in the middle mixes no spaces; none, an error, an empty vector or 10 s without an
    answer leave the words to decide. `where`: an SQL condition over the table's columns, of your own code, whose data
    stand in `values` by name: `where="company = %(company)s", values={"company": "Acme"}`; it holds before the best
    are chosen. `hybrid`: fuse the ranks by vectors and by words.

    Raises ConfigurationError when the kind has no active model.
    """
    if clash := OWN_VALUES & set(values or {}):
        raise ValueError(f"Name the filter's values otherwise: {', '.join(sorted(clash))} are taken.")
    active = active_model(postgres, bound.kind)
    vector, reason = _query_vector(embedders, text, active)
    source = bound.source_where(where)
    known = {**(values or {}), "text": text.replace("\x00", " ")}

    def work(cursor: Cursor[Row]) -> list[Hit]:
        if vector is None:
            return _lexical(cursor, bound, active, source, {**known, "k": k})
        depth = max(FUSED_FROM, k) if hybrid else k
        found = {**known, "k": depth, "query": Vector(vector)}
        semantic = _nearest(cursor, bound, active, source, found)
        return fuse([semantic, _lexical(cursor, bound, active, source, found)])[:k] if hybrid else semantic

    return Answer(postgres.retrying(work), semantic=vector is not None, reason=reason)


def active_model(postgres: Postgres, kind: str) -> Row:
    """`id`, `identity` and `dimensions` of the model that search knows. Raises ConfigurationError without one."""
    try:
        active = postgres.one("corpus.identity_of_active", {"kind": kind})
    except errors.UndefinedTable:
        active = None
    if active is None:
        raise ConfigurationError(f"Nothing of '{kind}' is indexed yet. Run 'embed-assets drain {kind}'.")
    return active


def fuse(rankings: Sequence[Sequence[Hit]]) -> list[Hit]:
    """Reciprocal rank fusion: each ranking gives a row 1 / (60 + its rank). The first ranking's chunk is shown."""
    scores: dict[str, float] = {}
    hits: dict[str, Hit] = {}
    for ranking in rankings:
        for rank, hit in enumerate(ranking, 1):
            scores[hit.source_id] = scores.get(hit.source_id, 0.0) + 1 / (FUSION + rank)
            hits.setdefault(hit.source_id, hit)
    order = sorted(scores, key=lambda source_id: (-scores[source_id], source_id))
    return [replace(hits[source_id], score=scores[source_id]) for source_id in order]


def _nearest(
    cursor: Cursor[Row], bound: BoundCorpus, active: Row, source: sql.Composable, values: Mapping[str, Any]
) -> list[Hit]:
    cursor.execute(query("search.settings"))
    rows = cursor.execute(nearest_statement(bound, active, source), values).fetchall()
    return [_hit(bound, active, 1.0 - row.pop("distance"), row) for row in rows]


def nearest_statement(bound: BoundCorpus, active: Row, source: sql.Composable | None = None) -> sql.Composed:
    """With the parameters `query` and `k`, and those of the filter in `source`."""
    return nearest(
        bound,
        model_id=sql.Literal(active["id"]),
        dimensions=sql.Literal(active["dimensions"]),
        type_=compared_as(active["dimensions"]),
        vector=sql.Placeholder("query"),
        k=sql.Placeholder("k"),
        source=source,
    )


def _lexical(
    cursor: Cursor[Row], bound: BoundCorpus, active: Row, source: sql.Composable, values: Mapping[str, Any]
) -> list[Hit]:
    fragments = bound.fragments(active["id"], k=sql.Placeholder("k")) | {"source": source}
    rows = cursor.execute(query("search.lexical", **fragments), values).fetchall()
    return [_hit(bound, active, row.pop("score"), row) for row in rows]


def _hit(bound: BoundCorpus, active: Row, score: float, row: Row) -> Hit:
    place = (row["source_id"], active["identity"], row["chunk_index"], row["heading_path"], row["body"])
    return Hit(score=score, chunk_id=chunk_id(bound.kind, *place), **row)


def _query_vector(
    embedders: Mapping[str, Embedder], text: str, active: Row
) -> tuple[np.ndarray[Any, Any] | None, str | None]:
    """(dims,) float32, or None and why there is none."""
    if not text.strip():
        return None, "the question is empty"
    if active["identity"] not in embedders:
        return None, f"no embedder is configured for the active model {active['identity']}"
    try:
        vector = embedders[active["identity"]].embed_query(text, timeout=QUERY_SECONDS)
    except ClassifiedError as error:
        logger.warning("semantic search is unavailable: %s", error.code)
        return None, str(error)
    if vector.shape != (active["dimensions"],):
        return None, f"the question's vector has the shape {vector.shape}, the model {active['dimensions']} dimensions"
    if not np.isfinite(vector).all() or not vector.any():
        return None, "the question's vector is empty"
    return vector, None
