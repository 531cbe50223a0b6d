"""Search: a question's vector against the active model's chunks, joined to the source. Importable without Dagster.

What does not belong here: keeping the vectors fresh.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from pgvector import Vector
from psycopg import sql

from embed_assets.embedding import Embedder
from embed_assets.errors import ClassifiedError, ConfigurationError
from embed_assets.queries import query
from embed_assets.resources.declaration import BoundCorpus
from embed_assets.resources.postgres import Postgres

logger = logging.getLogger(__name__)

QUERY_SECONDS = 10.0


@dataclass(frozen=True)
class Hit:
    """One row, by its best chunk. `score`: cosine similarity in [-1, 1], or the lexical rank; higher is better."""

    source_id: str
    score: float
    body: str
    fields: Mapping[str, str | None]


@dataclass(frozen=True)
class Answer:
    """`semantic` is False when no query vector could be had and the words decided; `reason` says why."""

    hits: list[Hit]
    semantic: bool
    reason: str | None = None


def search(
    postgres: Postgres, bound: BoundCorpus, embedders: Mapping[str, Embedder], text: str, *, k: int = 10
) -> Answer:
    """The `k` best rows for a question. Without an embedder, on its error or after 10 s: lexical.

    `embedders` by the identity of the model whose questions they embed (`query_embedders`): the active one is asked,
    so that a switch of models in the middle mixes no spaces. Raises ConfigurationError when nothing is indexed yet.
    """
    active = postgres.one("corpus.identity_of_active", {"kind": bound.kind})
    if active is None:
        raise ConfigurationError(f"Nothing of '{bound.kind}' is indexed yet. Run 'embed-assets drain {bound.kind}'.")
    vector, reason = _query_vector(embedders, text, active["identity"])
    fragments = bound.fragments(active["id"], dimensions=sql.Literal(active["dimensions"]))
    name = "search.lexical" if vector is None else "search.nearest"
    values = {"k": k, "text": text.replace("\x00", " "), "query": None if vector is None else Vector(vector)}
    with postgres.transaction() as cursor:
        rows = cursor.execute(query(name, **fragments), values).fetchall()
        titles = cursor.execute(query("search.titles", **fragments), {"ids": [r["source_id"] for r in rows]})
        fields = {row["source_id"]: row["fields"] for row in titles}
    hits = [
        Hit(
            row["source_id"],
            row["score"] if vector is None else 1.0 - row["distance"],
            row["body"],
            fields.get(row["source_id"], {}),
        )
        for row in rows
    ]
    return Answer(hits, semantic=vector is not None, reason=reason)


def _query_vector(
    embedders: Mapping[str, Embedder], text: str, active: str
) -> tuple[np.ndarray[tuple[int], np.dtype[np.float32]] | None, str | None]:
    if not text.strip():
        return None, "the question is empty"
    if active not in embedders:
        return None, f"no embedder is configured for the active model {active}"
    try:
        return embedders[active].embed_query(text, timeout=QUERY_SECONDS), None
    except ClassifiedError as error:
        logger.warning("semantic search is unavailable: %s", error.code)
        return None, str(error)
