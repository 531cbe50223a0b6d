"""The statements of search, composed once for the Python API and for the SQL function of each kind.

What does not belong here: the question's vector, and what is made of the rows (`embed_assets/search.py`).
"""

from __future__ import annotations

from psycopg import sql

from embed_assets.queries import query
from embed_assets.resources.declaration import BoundCorpus

NEAR, WIDE = 8, 200  # chunks asked for, per row that is wanted


def nearest(
    bound: BoundCorpus,
    *,
    model_id: sql.Composable,
    dimensions: sql.Composable,
    type_: sql.Composable,
    vector: sql.Composable,
    k: sql.Composable,
    source: sql.Composable | None = None,
) -> sql.Composed:
    """The `k` nearest rows by their best chunk. `source`: the rows that may show, where not all that are indexable."""
    parts = {
        **bound.fragments(),
        "model_id": model_id,
        "source": source or bound.source,
        "k": k,
        "embedding": sql.SQL("(c.embedding::{}({}))").format(type_, dimensions),
        "query": sql.SQL("{}::vector::{}({})").format(vector, type_, dimensions),
    }
    near_depth, wide_depth = (sql.SQL("{} * {}").format(sql.Literal(factor), k) for factor in (NEAR, WIDE))
    return query(
        "search.nearest",
        **parts,
        near=query("search.probe", **parts, depth=near_depth),
        wide=query("search.probe", **parts, depth=wide_depth),
        near_depth=near_depth,
    )
