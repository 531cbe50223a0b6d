"""The HNSW index of one model's partition: built after the load, while people read and write; and how well it finds.

What does not belong here: when it is built (`model_life`), how it is asked (`search`).
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
from psycopg import Connection, Cursor, sql

from embed_assets.queries import query
from embed_assets.resources.declaration import BoundCorpus
from embed_assets.resources.postgres import Postgres, Row
from embed_assets.stop import Stop

logger = logging.getLogger(__name__)

MEMORY_BYTES = 256 * 1024 * 1024
NEIGHBOURS = 10
PROGRESS_SECONDS = 1.0
FEWEST_QUERIES = 20
# Two vectors that differ by less are the same to a reader; floats summed in another order differ by about this much.
SAME_DISTANCE = 1e-5

Progress = Callable[[float], None]


@dataclass(frozen=True)
class IndexState:
    """`done`: 0 to 1, while somebody builds it. Present, not valid and not being built: what a dead process left."""

    present: bool
    valid: bool
    building: bool
    done: float


@dataclass(frozen=True)
class Recall:
    """Of the ten nearest by exact search, the share that the index found, over so many queries."""

    share: float
    queries: int


def vector_type(dimensions: int) -> tuple[sql.SQL, sql.SQL] | None:
    """The type and operator class that HNSW can index at this width; None over 4,000, where search stays exact.

    pgvector's limits: vector up to 2,000 dimensions, halfvec up to 4,000.
    """
    if dimensions <= 2000:
        return sql.SQL("vector"), sql.SQL("vector_cosine_ops")
    if dimensions <= 4000:
        return sql.SQL("halfvec"), sql.SQL("halfvec_cosine_ops")
    return None


def compared_as(dimensions: int) -> sql.SQL:
    """The type in which vectors of this width are compared, by the index or without one."""
    indexed = vector_type(dimensions)
    return indexed[0] if indexed else sql.SQL("vector")


class VectorIndex:
    """The index of one partition."""

    def __init__(self, postgres: Postgres, bound: BoundCorpus, model_id: int, dimensions: int) -> None:
        self._postgres = postgres
        self._name = f"{bound.partition_name(model_id)}_hnsw"
        self._partition = bound.partition(model_id)
        self._ids = {"kind": bound.kind, "model_id": model_id}
        self._names = {
            "partition": bound.partition_path(model_id),
            "index": f'embed_assets."{self._name}"',
        }
        kind = vector_type(dimensions)
        self.possible = kind is not None
        type_, operators = kind or (sql.SQL("vector"), sql.SQL("vector_cosine_ops"))
        self._fragments = {
            "partition": self._partition,
            "index": sql.Identifier(self._name),
            "index_path": sql.Identifier("embed_assets", self._name),
            "type": type_,
            "operators": operators,
            "dimensions": sql.Literal(dimensions),
        }

    def state(self) -> IndexState:
        row = self._postgres.one("models.index_state", self._names)
        assert row is not None
        return IndexState(**row)

    def build(self, progress: Progress = lambda done: None) -> bool:
        """Build it, after dropping what a dead process left half built. False: somebody else is building it now.

        Takes as long as it takes: no statement time-out; reads and writes go on. `progress` is told each second how
        far it is, 0 to 1. Raises Cancelled, and leaves an invalid index that the next build drops.
        """
        with self._postgres.session() as connection:
            row = connection.execute(query("models.try_to_build"), self._names).fetchone()
            state = self.state()
            if not (row and row["mine"]) or state.building:
                return False
            if not state.valid:
                self._build(connection, state, progress)
        valid = self.state().valid
        if valid:
            self._postgres.execute("models.index_is_ready", {**self._ids, "ready": True})
        return valid

    def _build(self, connection: Connection[Row], state: IndexState, progress: Progress) -> None:
        started = time.monotonic()
        with self._told(progress):
            connection.execute(query("models.index_memory"), {"bytes": MEMORY_BYTES})
            if state.present:
                logger.warning("%s was left half built: built anew", self._name)
                connection.execute(query("models.drop_index", **self._fragments))
            connection.execute(query("models.create_index", **self._fragments))
            connection.execute(query("models.analyze", **self._fragments))
        logger.info("%s is built, %.0f s", self._name, time.monotonic() - started)

    @contextmanager
    def _told(self, progress: Progress) -> Iterator[None]:
        ended = threading.Event()

        def tell() -> None:
            with suppress(Exception):  # whoever watches must not end what is watched
                while not ended.wait(PROGRESS_SECONDS):
                    if (state := self.state()).building:
                        progress(state.done)

        teller = threading.Thread(target=tell, daemon=True)
        teller.start()
        try:
            yield
        finally:
            ended.set()
            teller.join()

    def recall(self, *, queries: int, seconds: float, stop: Stop) -> Recall | None:
        """Recall@10 against exact search, asked with vectors of the partition itself; None when it holds none.

        Exact search reads the whole partition, so it ends after `seconds` with at least 20 `queries`.
        """
        until = time.monotonic() + seconds
        shares: list[float] = []
        for vector in self._sample(queries):
            if len(shares) >= FEWEST_QUERIES and time.monotonic() > until:
                break
            stop.check()
            shares.append(self._share(vector))
        return Recall(float(np.mean(shares)), len(shares)) if shares else None

    def _sample(self, queries: int) -> list[Any]:
        chunks = self._postgres.one("models.chunks_estimate", self._names)
        percent = min(100.0, 300.0 * queries / max(1, chunks["chunks"] if chunks else 1))
        statement = query("models.sample", **self._fragments)
        values = {"percent": percent, "size": queries}
        rows = self._postgres.retrying(lambda cursor: cursor.execute(statement, values).fetchall())
        return [row["embedding"] for row in rows]

    def _share(self, vector: Any) -> float:
        exact = self._postgres.retrying(lambda cursor: self._nearest(cursor, vector, exactly=True))
        found = self._postgres.retrying(lambda cursor: self._nearest(cursor, vector, exactly=False))
        # By distance, not by row: of equal texts any one is as good as the other.
        return sum(distance <= exact[-1] + SAME_DISTANCE for distance in found) / len(exact)

    def _nearest(self, cursor: Cursor[Row], vector: Any, *, exactly: bool) -> list[float]:
        cursor.execute(
            query("models.choose_scan"), {"index": "off" if exactly else "on", "table": "on" if exactly else "off"}
        )
        row = cursor.execute(
            query("models.distances", **self._fragments), {"query": vector, "k": NEIGHBOURS}
        ).fetchone()
        return list(row["distances"] or []) if row else []
