"""Similar items of one kind: which rows must be computed again, and their neighbours.

What does not belong here: when it is done (`defs/assets/similar.py`, the command line).
"""

from __future__ import annotations

from psycopg import Cursor, sql

from embed_assets.queries import query
from embed_assets.resources.declaration import BoundCorpus
from embed_assets.resources.postgres import Row


def similar_table(bound: BoundCorpus) -> sql.Identifier:
    return sql.Identifier("embed_assets", f"similar_{bound.kind}")


def invalidate_all(cursor: Cursor[Row], bound: BoundCorpus, model_id: int) -> int:
    """Have the neighbours of every row of a model computed once, in the caller's transaction. Returns how many rows."""
    if bound.corpus.similar is None:
        return 0
    values = {"kind": bound.kind, "model_id": model_id}
    return cursor.execute(query("similar.invalidate_all"), values).rowcount


def forget_model(cursor: Cursor[Row], bound: BoundCorpus, model_id: int) -> int:
    """Drop what was computed with a model that is dropped; returns how many rows."""
    if bound.corpus.similar is None:
        return 0
    return cursor.execute(query("similar.forget_model", similar=similar_table(bound)), {"model_id": model_id}).rowcount
