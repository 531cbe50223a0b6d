"""The chunk tables of one kind: load, plan, ledger, and the one write transaction of a wave.

What does not belong here: claiming and failing (`outbox`), cleaning and chunking (`corpus`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from pgvector import Vector
from psycopg import Cursor, sql

from embed_assets.corpus import MAX_ROW_BYTES, Hooks
from embed_assets.errors import DatabaseTrouble, EmbedAssetsError, LeaseLost
from embed_assets.models import Counts, Plan, SourceRow, Wave
from embed_assets.queries import query
from embed_assets.resources.declaration import BoundCorpus
from embed_assets.resources.outbox import fence, parameters
from embed_assets.resources.postgres import Postgres, Row
from embed_assets.stop import Stop

logger = logging.getLogger(__name__)

SLICE_BYTES = 8_000_000
SLICE_ROWS = 500
PLAN_TYPES = ["int8", "text", "int4", "bytea", "text", "text", "text", "int4", "text"]
LEDGER_TYPES = ["int4", "bytea", "vector", "int4"]
# In this order; each is one statement whatever the number of rows (sql/queries/chunks.sql).
WRITE = ("requeue_unplanned", "upsert_chunks", "delete_chunks")
AFTER_CHECK = ("stamp", "tell_search", "unstamp", "invalidate_similar")


class ShortRow(EmbedAssetsError):
    """Planned chunks and present chunks differ within the write: a defect of ours, the transaction is abandoned."""


class ChunkStore:
    """Chunks and their vectors for one kind, one model at a time (the wave's)."""

    def __init__(self, postgres: Postgres, bound: BoundCorpus) -> None:
        self._postgres = postgres
        self._bound = bound

    def slices(self, wave: Wave) -> Iterator[list[str]]:
        """The wave's source ids in slices of at most 8 MB of text, so that no process grows with a wave."""
        rows = self._postgres.retrying(lambda c: c.execute(self._sql("sizes", wave), parameters(wave)).fetchall())
        part: list[str] = []
        held = 0
        for row in rows:
            size = min(row["bytes"], MAX_ROW_BYTES)
            if part and (held + size > SLICE_BYTES or len(part) >= SLICE_ROWS):
                yield part
                part, held = [], 0
            part.append(row["source_id"])
            held += size
        if part:
            yield part

    def load(self, wave: Wave, ids: Sequence[str]) -> list[SourceRow]:
        """Rows with text, revision and indexable of one snapshot. Raises RowRejected or CorruptRow if one is guilty."""
        values = parameters(wave) | {"ids": list(ids), "max_bytes": MAX_ROW_BYTES}
        statement = self._sql("load", wave)

        def work(cursor: Cursor[Row]) -> list[Row]:
            rows = cursor.execute(statement, values).fetchall()
            if rows and len(wave.entries) == 1:
                cursor.execute(query("chunks.note_revision"), values | {"revision": rows[0]["revision"]})
            return rows

        return [SourceRow(**row) for row in self._postgres.retrying(work)]

    def plan(self, wave: Wave, plans: Sequence[Plan]) -> set[bytes]:
        """Keep what is to be done until the write; returns the hashes for which a vector must be bought."""
        values = parameters(wave) | {"ids": [plan.source_id for plan in plans]}

        def work(cursor: Cursor[Row]) -> set[bytes]:
            fence(cursor, wave)
            cursor.execute(query("chunks.unplan"), values)
            with cursor.copy(query("chunks.copy_plan")) as copy:
                copy.set_types(PLAN_TYPES)
                for row in _plan_rows(wave, plans):
                    copy.write_row(row)
            return {row["text_hash"] for row in cursor.execute(self._sql("missing", wave), values)}

        return self._postgres.retrying(work)

    def keep(self, wave: Wave, hashes: Sequence[bytes], vectors: np.ndarray[Any, Any], *, tokens: int) -> None:
        """Put one finished request into the ledger: `vectors` (n, dims) float32 for n hashes. Paid once, kept 48 h."""
        each = tokens // max(1, len(hashes))

        def work(cursor: Cursor[Row]) -> None:
            with cursor.copy(query("chunks.copy_ledger")) as copy:
                copy.set_types(LEDGER_TYPES)
                for text_hash, vector in sorted(zip(hashes, vectors, strict=True), key=lambda pair: pair[0]):
                    copy.write_row((wave.model_id, text_hash, Vector(vector), each))
            cursor.execute(query("chunks.count_kept"), parameters(wave) | {"texts": len(hashes), "tokens": tokens})

        self._postgres.retrying(work)

    def write(
        self, wave: Wave, *, ids: Sequence[str] | None = None, close: bool = True, stop: Stop | None = None
    ) -> Counts:
        """The one write transaction: chunks, stamps, invalidations, log, entries, and the wave closed.

        `ids` writes a part in a transaction of its own, `close=False` leaves the wave open for the other parts.
        Raises LeaseLost when fenced out, RowRejected or CorruptRow when a row is guilty, DatabaseTrouble.
        """
        started = time.monotonic()
        values = parameters(wave) | {
            "ids": None if ids is None else list(ids),
            "outcome": "written",
            "dead": 0,
        }
        try:
            counts = self._postgres.retrying(lambda c: self._write(c, wave, values, close, started), stop=stop)
        except (LeaseLost, DatabaseTrouble):
            if not close or (written := self._written(wave)) is None:
                raise
            # The commit had happened, only its answer was lost. What parts wrote was counted with them.
            counts = written if ids is None else Counts()
        if close and self._hooks.on_succeeded:
            self._succeeded(wave, self._hooks.on_succeeded)
        return counts

    def _write(self, cursor: Cursor[Row], wave: Wave, values: dict[str, Any], close: bool, started: float) -> Counts:
        cursor.execute(query("chunks.lock_kind_shared"), values)
        values["claimed_at"] = fence(cursor, wave)
        cursor.execute(query("outbox.lock_entries"), values)
        for name in WRITE:
            cursor.execute(self._sql(name, wave), values)
        if short := cursor.execute(self._sql("short_sources", wave), values).fetchone():
            raise ShortRow(f"{short['planned']} chunks were planned and {short['present']} are present")
        for name in AFTER_CHECK:
            cursor.execute(self._sql(name, wave), values)
        if self._bound.legacy_embedding:
            cursor.execute(self._sql("forget_legacy", wave, legacy=self._bound.legacy_embedding), values)
        if self._hooks.after_write or self._hooks.after_clear:
            self._after(cursor, wave, values)
        row = cursor.execute(self._sql("settle", wave), values).fetchone()
        counts = Counts(**row) if row else Counts()
        seconds = {"seconds": time.monotonic() - started}
        cursor.execute(query("outbox.count_written"), values | counts.as_dict() | seconds)
        if close:
            if values["ids"] is not None:
                cursor.execute(query("outbox.give_back"), values)
            cursor.execute(query("outbox.close_wave"), values)
            cursor.execute(query("outbox.drop_plans"), {"wave_ids": [wave.wave_id]})
        return counts

    @property
    def _hooks(self) -> Hooks:
        return self._bound.corpus.hooks

    def _after(self, cursor: Cursor[Row], wave: Wave, values: dict[str, Any]) -> None:
        """Hooks within the transaction, each called only if there are rows for it."""
        rows = cursor.execute(self._sql("actions", wave), values).fetchall()
        written = [row["source_id"] for row in rows if row["action"] == "embed"]
        cleared = [row["source_id"] for row in rows if row["action"] in ("clear", "gone")]
        for hook, ids in ((self._hooks.after_write, written), (self._hooks.after_clear, cleared)):
            if hook and ids:
                hook(cursor, ids)

    def _succeeded(self, wave: Wave, hook: Callable[[Sequence[str]], None]) -> None:
        """The hook after the commit: the wave is written whatever it raises."""
        try:
            with self._postgres.transaction() as cursor:
                values = parameters(wave) | {"ids": wave.source_ids}
                ids = [row["source_id"] for row in cursor.execute(query("chunks.succeeded"), values)]
            if ids:
                hook(ids)
        except Exception:
            logger.exception("%s: on_succeeded failed for wave %s", wave.kind, wave.wave_id)

    def _written(self, wave: Wave) -> Counts | None:
        """Unknown commit outcome: closed as written under my token means done."""
        row = self._postgres.retrying(lambda c: c.execute(query("outbox.wave_counts"), parameters(wave)).fetchone())
        if row is None or row.pop("outcome") != "written":
            return None
        return Counts(**{name: row[name] for name in ("indexed", "removed", "gone", "superseded")})

    def _sql(self, name: str, wave: Wave, **more: sql.Composable) -> sql.Composed:
        fragments = self._bound.fragments(wave.model_id, **more)
        planned = sql.SQL("({})").format(query("chunks.planned", **fragments))
        return query(f"chunks.{name}", **fragments, planned=planned)


def _plan_rows(wave: Wave, plans: Sequence[Plan]) -> Iterator[tuple[Any, ...]]:
    """A header (index -1) and its chunks for each source, by key."""
    for plan in sorted(plans, key=lambda plan: plan.source_id):
        key = (wave.wave_id, plan.source_id)
        yield (*key, -1, None, None, None, plan.action, len(plan.chunks), plan.revision)
        for index, chunk in enumerate(plan.chunks):
            yield (*key, index, chunk.text_hash, chunk.body, chunk.heading_path, None, None, None)
