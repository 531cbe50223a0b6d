"""Backfills of one kind: rows asked for again by buckets, followed until they are done, cancelled, estimated.

A bucket is a share of the source ids (`embed_assets.bucket_of`), always the same 64, so that Dagster's partitions never
change. What does not belong here: the assets that people launch (`defs/assets/backfill.py`).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from psycopg import Cursor

from embed_assets.corpus import MAX_ROW_BYTES
from embed_assets.errors import ConfigurationError, TooLarge
from embed_assets.models import SourceRow
from embed_assets.queries import query
from embed_assets.resources.declaration import BoundCorpus
from embed_assets.resources.postgres import Postgres, Row
from embed_assets.resources.ranges import Range, in_ranges
from embed_assets.resources.target import RetiredModel
from embed_assets.stop import Stop

logger = logging.getLogger(__name__)

BUCKETS = 64
BATCH = 5_000
SAMPLE_ROWS = 200
CHARACTERS_PER_TOKEN = 4
# Vector, text and row in the table, once more the vector and its neighbours in the index.
BYTES_PER_DIMENSION, BYTES_PER_CHUNK = 8, 1_500


@dataclass(frozen=True)
class Progress:
    """The newest request of one bucket. `open` rows are still to be done; `dead` ones failed for good, `dismissed` ones
    were given up by an operator."""

    request: int
    bucket: int
    selection: str
    reason: str
    run_id: str
    asked_at: datetime
    complete_at: datetime | None
    cancelled_at: datetime | None
    rows: int
    open: int
    dead: int
    dismissed: int

    @property
    def done(self) -> bool:
        """Each row that was asked for has been embedded or cleared since."""
        left = self.open + self.dead + self.dismissed
        return self.complete_at is not None and self.cancelled_at is None and not left


@dataclass(frozen=True)
class Estimate:
    """What embedding so many rows takes. `hours` is None while no rate is known; `measured`: from vectors that are
    there, not from a sample that was cut on trial."""

    rows: int
    texts: int
    tokens: int
    bytes: int
    hours: float | None
    measured: bool


class Backfill:
    """The backfills of one kind, for the models that a process maintains (the newest is the last)."""

    def __init__(self, postgres: Postgres, bound: BoundCorpus, models: Sequence[int]) -> None:
        self._postgres = postgres
        self._bound = bound
        self._models = list(models)

    def ask(
        self, buckets: Sequence[int], *, selection: str, reason: str, run_id: str, stop: Stop | None = None
    ) -> dict[int, int]:
        """Append the rows of these buckets to the feed, in lane 1; returns how many, by bucket.

        `selection`: `stale` rows only, or `all` that belong in search, whose vectors are then bought anew. In ranges
        with a commit each. Interrupted, the buckets stay asked for and incomplete; asking again is harmless. Cancelled
        meanwhile, no more rows are appended. Raises ConfigurationError when our models were retired.
        """
        stop = stop or Stop()
        values: dict[str, Any] = {"kind": self._bound.kind, "selection": selection, "reason": reason, "run_id": run_id}
        asked = self._all("backfill.ask", values | {"buckets": sorted(set(buckets)), "models": self._models})
        if buckets and not asked:
            raise RetiredModel(f"The models of '{self._bound.kind}' that this process was started with are retired.")
        values |= {"buckets": [row["bucket"] for row in asked], "requests": [row["id"] for row in asked]}

        def append(part: Range) -> None:
            self._rows("backfill.append_range", values | part.ends)

        def alone(part: Range) -> None:
            self._rows("backfill.append_unreadable", values | part.ends)

        in_ranges(lambda part: self._end_of(part, stop), append, alone)
        return {row["bucket"]: row["rows"] for row in self._all("backfill.complete", values)}

    def progress(self) -> list[Progress]:
        """The newest request of each bucket that was ever asked for."""
        return [Progress(**row) for row in self._all("backfill.progress", {"kind": self._bound.kind})]

    def cancel(self) -> int:
        """Take back what backfills asked for and is not under way; returns how many rows leave the queue.

        What was changed meanwhile stays, as an ordinary change; what is stale all the same comes back with a scan.
        """
        values: dict[str, Any] = {"limit": BATCH}
        values["requests"] = [row["id"] for row in self._all("backfill.open_requests", {"kind": self._bound.kind})]
        self._postgres.execute("backfill.cancel", values)
        total = 0
        while rows := self._postgres.execute("backfill.cancel_feed", values):
            total += rows
        while (row := self._postgres.one("backfill.cancel_entries", values)) and row["seen"]:
            total += row["taken"]
        return total

    def estimate(self, *, dimensions: int, rows_per_second: float | None, selection: str) -> Estimate:
        """What it takes to embed the rows of `selection` for the newest of our models. Reads the source once."""
        ids = {"kind": self._bound.kind, "model_id": self._models[-1]}
        counted = self._all("backfill.indexable_rows", ids)[0]
        rows = counted["indexable"] if selection == "all" else counted["stale"]
        per_row, per_text, measured = self._cost(ids)
        texts = round(rows * per_row)
        each = self._bytes_per_chunk() or dimensions * BYTES_PER_DIMENSION + BYTES_PER_CHUNK
        hours = rows / rows_per_second / 3600 if rows_per_second else None
        return Estimate(rows, texts, round(texts * per_text), round(texts * each), hours, measured)

    def _cost(self, ids: dict[str, Any]) -> tuple[float, float, bool]:
        """Chunks per row and tokens per chunk: measured where rows are stamped, else from a sample cut on trial."""
        measured = self._all("backfill.measured", ids)[0]
        sample = [] if measured["rows"] >= SAMPLE_ROWS else self._sample()
        tokens = self._all("backfill.tokens_per_text", ids)[0]["tokens"]
        if not sample:
            rows = max(1, measured["rows"])
            return float(measured["chunks"]) / rows, tokens or self._bound.corpus.max_chars / CHARACTERS_PER_TOKEN, True
        chunks = [chunk for row in sample for chunk in row]
        characters = sum(len(chunk) for chunk in chunks) / max(1, len(chunks))
        return len(chunks) / len(sample), tokens or characters / CHARACTERS_PER_TOKEN, False

    def _sample(self) -> list[list[str]]:
        """The chunks of some rows, as they would be sent."""
        found = []
        for row in self._all("backfill.sample_texts", {"max_bytes": MAX_ROW_BYTES, "limit": SAMPLE_ROWS}):
            try:
                found.append([chunk.sent for chunk in self._bound.corpus.plan(SourceRow(**row)).chunks])
            except TooLarge:
                found.append([])
        return found

    def _bytes_per_chunk(self) -> float | None:
        partition = self._bound.partition_path(self._models[-1])
        row = self._postgres.one("backfill.bytes_per_chunk", {"partition": partition})
        return float(row["bytes"]) if row and row["bytes"] else None

    def _end_of(self, part: Range, stop: Stop) -> Any:
        stop.check()
        row = self._all("enqueue.scan_bound", part.ends | {"size": part.size})
        return row[0]["bound"] if row else None

    def _all(self, name: str, values: dict[str, Any]) -> list[Row]:
        statement = query(name, **self._bound.fragments())
        return self._postgres.retrying(lambda cursor: cursor.execute(statement, values).fetchall())

    def _rows(self, name: str, values: dict[str, Any]) -> int:
        statement = query(name, **self._bound.fragments())

        def work(cursor: Cursor[Row]) -> int:
            return cursor.execute(statement, values).rowcount

        return self._postgres.retrying(work)


def bucket_key(bucket: int) -> str:
    """The name of a bucket: `b00` to `b63`."""
    return f"b{bucket:02d}"


def bucket_of(key: str) -> int:
    """The number of a bucket. Raises ConfigurationError for what is no name of one."""
    number = int(key[1:]) if key[:1] == "b" and key[1:].isdecimal() else -1
    if number not in range(BUCKETS):
        raise ConfigurationError(f"'{key}' is no bucket. They are b00 to b{BUCKETS - 1}.")
    return number
