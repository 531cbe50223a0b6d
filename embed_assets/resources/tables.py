"""The tables of a kind, made from its declaration: its row, chunk table and similar table, and a partition per model.

What does not belong here: the declaration itself (`declaration`), the life of a model (`models`).
"""

from __future__ import annotations

import time
from typing import Any

import psycopg
from psycopg import errors, sql

from embed_assets.errors import ConfigurationError
from embed_assets.queries import query
from embed_assets.resources.declaration import KEY_TYPES, MAINTAINER, BoundCorpus, rights
from embed_assets.resources.made_functions import make_functions
from embed_assets.resources.postgres import Postgres, Row
from embed_assets.resources.search_outbox import make_triggers

ATTACH_TRIES = 20
maintainer = rights("make the tables of a kind or a model", MAINTAINER)


@maintainer
def make_tables(postgres: Postgres, bound: BoundCorpus) -> None:
    """The kind's row, chunk table and similar table, where they are missing."""
    with postgres.transaction() as cursor:
        cursor.execute(query("migrate.lock_transaction"))
        cursor.execute(query("corpus.register_kind"), {"kind": bound.kind})
        cursor.execute(query("corpus.register_scan"), {"kind": bound.kind})
        # The source's own collation: comparing keys of two collations, Postgres can use no index.
        key_type = sql.SQL("{}{}").format(sql.SQL(KEY_TYPES[bound.key_type]), bound.collation)
        cursor.execute(query("chunks.create_chunk_table", key_type=key_type, chunks=bound.chunks, key=bound.key))
        if bound.corpus.similar:
            listed = sql.Identifier(f"similar_{bound.kind}_listed")
            cursor.execute(query("similar.create_table", similar=bound.similar, listed=listed))
        make_functions(cursor, bound)
        make_triggers(cursor, bound, bound.chunks)


def make_partition(postgres: Postgres, bound: BoundCorpus, model_id: int, dimensions: int) -> None:
    """Make, then attach under a short lock time-out, again and again: never queue in front of the user's searches."""
    for attempt in range(ATTACH_TRIES):
        try:
            with postgres.transaction(lock_timeout="300ms") as cursor:
                # Of processes that start at once, one makes it and the others then see it.
                cursor.execute(query("migrate.lock_transaction"))
                if not _attached(cursor, bound, model_id):
                    _create_and_attach(cursor, bound, model_id, dimensions)
                return
        except (errors.LockNotAvailable, errors.DuplicateTable, errors.UniqueViolation):
            time.sleep(0.1 * (attempt + 1))
    raise ConfigurationError(
        f"The partition of {bound.corpus.chunk_table} could not be attached: something holds a lock on the table. "
        "End the long transaction on it and start again."
    )


def _attached(cursor: psycopg.Cursor[Row], bound: BoundCorpus, model_id: int) -> bool:
    names = {
        "chunks": bound.chunks.as_string(cursor),
        "partition": bound.partition(model_id).as_string(cursor),
    }
    row = cursor.execute(query("chunks.partition_attached"), names).fetchone()
    return bool(row and row["attached"])


def _create_and_attach(cursor: psycopg.Cursor[Row], bound: BoundCorpus, model_id: int, dimensions: int) -> None:
    parts: dict[str, Any] = {
        "partition": bound.partition(model_id),
        "chunks": bound.chunks,
        "key": bound.key,
        "model_id": sql.Literal(model_id),
        "dimensions": sql.Literal(dimensions),
    }
    for step in (
        "create_partition",
        "create_partition_key",
        "create_partition_hash_index",
    ):
        cursor.execute(query(f"chunks.{step}", **parts))
    # What stamps say of a partition of before is true of it no more.
    cursor.execute(query("models.forget_all_stamps"), {"kind": bound.kind, "model_id": model_id})
    make_triggers(cursor, bound, bound.partition(model_id))
    cursor.execute(query("chunks.attach_partition", **parts))
