"""Similar items of one kind: which rows must be computed again, and their neighbours.

What does not belong here: when it is done (`defs/assets/similar.py`, the command line), and the functions by which
they are read (`made_functions`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from typing import Any
from uuid import UUID

from psycopg import Cursor, sql

from embed_assets.errors import ConfigurationError, EmbedAssetsError
from embed_assets.queries import query
from embed_assets.resources.declaration import BoundCorpus
from embed_assets.resources.postgres import Postgres, Row
from embed_assets.resources.vector_index import VectorIndex, compared_as
from embed_assets.stop import Stop

logger = logging.getLogger(__name__)

FEED_BATCH = 200
MOST_STALE = 5_000  # no more is marked in one refresh; the feed keeps the rest
COMPUTE_BATCH = 50
DEPTH = 4  # chunks a probe asks for, per neighbour that is wanted
EXACT_CHUNKS = 20_000  # without an index a refresh costs chunks squared: beyond this it waits for the index
WAITING_LIMIT = 10_000
NO_MODEL: Row = {"id": None, "dimensions": 1}
ELSEWHERE = "another process is computing them"


@dataclass
class Refreshed:
    """What one refresh did. `outdated`: computed, and not written since the row was embedded anew meanwhile."""

    invalidated: int = 0
    expanded: int = 0
    computed: int = 0
    outdated: int = 0
    postponed: str | None = None

    @property
    def idle(self) -> bool:
        return self == Refreshed(postponed=self.postponed)


@dataclass(frozen=True)
class Waiting:
    """Feed rows and stale lists, each counted up to a limit."""

    feed: int
    stale: int

    def __bool__(self) -> bool:
        return bool(self.feed or self.stale)


@dataclass(frozen=True)
class Neighbours:
    """What was computed for one row, from vectors of this `revision`, written at `embedded_at`; nearest first."""

    source_id: str
    revision: str | None
    embedded_at: datetime
    candidates: list[str] = field(repr=False)
    distances: list[float] = field(repr=False)


class TurnLost(EmbedAssetsError):
    """Another refresh of the kind has begun since: its lists are the newer ones."""


class SimilarStore:
    """The lists of one kind. Raises ConfigurationError when its declaration has no `similar`."""

    def __init__(self, postgres: Postgres, bound: BoundCorpus) -> None:
        if bound.corpus.similar is None:
            raise ConfigurationError(f"Corpus '{bound.kind}' keeps no similar items. Declare similar=Similar(…).")
        self._postgres = postgres
        self._bound = bound
        self._k = bound.corpus.similar.k

    def waiting(self) -> Waiting:
        """Is there anything to do? Two bounded looks by index."""
        model = self._model()
        values = self._values(limit=WAITING_LIMIT)
        row = self._postgres.retrying(lambda c: c.execute(self._sql("waiting", model), values).fetchone())
        assert row is not None
        return Waiting(**row)

    def postponed(self) -> str | None:
        """Why nothing is computed now, whatever waits."""
        model = self._model()
        if model["id"] is None:
            return "nothing is indexed yet"
        index = VectorIndex(self._postgres, self._bound, model["id"], model["dimensions"])
        if not index.possible or index.state().valid:
            return None
        values = self._values(limit=EXACT_CHUNKS + 1)
        row = self._postgres.retrying(lambda c: c.execute(self._sql("chunks", model), values).fetchone())
        assert row is not None
        return f"the index of more than {EXACT_CHUNKS} chunks is not built yet" if row["many"] else None

    def refresh(self, *, seconds: float = 60, everything: bool = False, stop: Stop | None = None) -> Refreshed:
        """Take invalidations, find the lists they touch, compute these again; the rest is left to the next refresh.

        Ends after about `seconds`; `everything` has every list computed anew. One at a time per kind: while another
        process is at it, nothing is done. Every step is a short transaction that may be repeated.
        """
        stop, until = stop or Stop(), time.monotonic() + seconds
        done = Refreshed(postponed=self.postponed())
        if done.postponed:
            return done
        with self._turn() as turn:
            if not turn:
                return Refreshed(postponed=ELSEWHERE)
            model = self._fold(done, stop, everything=everything)
            try:
                self._compute_stale(model, turn, done, stop, until)
            except TurnLost:
                done.postponed = ELSEWHERE
        return done

    def _fold(self, done: Refreshed, stop: Stop, *, everything: bool) -> Row:
        """Feed rows become stale lists, a batch in a transaction: what is taken from the feed is never lost.

        Returns the model that they were taken for.
        """
        while True:
            stop.check()
            model, taken, marked, expanded = self._postgres.retrying(self._fold_batch)
            done.invalidated += marked
            done.expanded += expanded
            if not taken or done.invalidated + done.expanded >= MOST_STALE:
                break
        if everything:
            self._execute("mark_all", model, self._values())
        self._execute("adopt", model, self._values(limit=MOST_STALE))
        return model

    def _fold_batch(self, cursor: Cursor[Row]) -> tuple[Row, int, int, int]:
        """No switch happens between reading the model and committing: what it invalidates speaks of another."""
        cursor.execute(query("chunks.lock_kind_shared"), self._values())
        model = cursor.execute(query("corpus.identity_of_active"), self._values()).fetchone() or NO_MODEL
        feed = cursor.execute(self._sql("take", model), self._values(limit=FEED_BATCH)).fetchone()
        assert feed is not None
        values = self._values(ids=feed["ids"])
        marked = cursor.execute(self._sql("mark", model), values).rowcount
        cursor.execute(self._sql("forget", model), values)
        expanded = cursor.execute(self._sql("expand", model), values).rowcount
        cursor.execute(self._sql("null_computed", model), values)
        return model, feed["taken"], marked, expanded

    def _compute_stale(self, model: Row, turn: UUID, done: Refreshed, stop: Stop, until: float) -> None:
        after = ""
        while time.monotonic() < until:
            stop.check()
            ids = self._stale(model, after)
            if not ids:
                return
            found = self.compute(ids, model)
            written = self._postgres.retrying(partial(self._write, model=model, turn=turn, ids=ids, found=found))
            done.computed += written
            done.outdated += len(found) - written
            after = ids[-1]

    def _stale(self, model: Row, after: str) -> list[str]:
        values = self._values(after=after, limit=COMPUTE_BATCH)
        rows = self._postgres.retrying(lambda c: c.execute(self._sql("stale", model), values).fetchall())
        return [row["source_id"] for row in rows]

    def compute(self, ids: Sequence[str], model: Row | None = None) -> list[Neighbours]:
        """The candidates of each row that has vectors and may show, by one probe for each of its chunks.

        `model`: None for the one that search reads now.
        """
        model = model or self._model()
        values = self._values(ids=list(ids), depth=max(1, self._k) * DEPTH)

        def work(cursor: Cursor[Row]) -> list[Row]:
            cursor.execute(query("similar.settings"))
            return cursor.execute(self._sql("compute", model), values).fetchall()

        return [Neighbours(**row) for row in self._postgres.retrying(work)]

    def _write(
        self, cursor: Cursor[Row], *, model: Row, turn: UUID, ids: Sequence[str], found: Sequence[Neighbours]
    ) -> int:
        """Keep what was computed for `ids`, unless the row was embedded anew since; returns how many lists."""
        if not cursor.execute(query("similar.hold_turn"), self._values(turn=turn)).fetchone():
            raise TurnLost(f"another process computes the similar items of {self._bound.kind} by now")
        written = [row for row in found if cursor.execute(self._sql("write", model), self._row(row)).rowcount]
        pairs = [
            (row.source_id, owner, distance)
            for row in written
            for owner, distance in zip(row.candidates, row.distances, strict=True)
        ]
        columns = zip(*pairs, strict=True) if pairs else ([], [], [])
        offered = dict(zip(("sources", "owners", "distances"), map(list, columns), strict=True))
        cursor.execute(self._sql("offer", model), {"k": self._k, **offered})
        cursor.execute(self._sql("forget", model), self._values(ids=list(ids)))
        cursor.execute(self._sql("unmark", model), self._values(ids=[row.source_id for row in written]))
        return len(written)

    def _row(self, row: Neighbours) -> dict[str, Any]:
        return self._values(
            source_id=row.source_id,
            revision=row.revision,
            embedded_at=row.embedded_at,
            neighbours=row.candidates[: self._k],
            distances=row.distances[: self._k],
        )

    def shown(self, source_id: str, *, k: int | None = None) -> list[Row]:
        """`source_id`, `distance` and `fields` of the neighbours that may show now, nearest first."""
        values = self._values(id=source_id, k=self._k if k is None else k)
        statement = query("similar.shown", **self._bound.fragments())
        return self._postgres.retrying(lambda cursor: cursor.execute(statement, values).fetchall())

    @contextmanager
    def _turn(self) -> Iterator[UUID | None]:
        """The number of this turn, None while another process has its turn."""
        with self._postgres.session() as connection:
            row = connection.execute(query("similar.try_turn"), self._values()).fetchone()
            begun = self._postgres.one("similar.begin_turn", self._values()) if row and row["mine"] else None
            yield begun["turn"] if begun else None

    def _model(self) -> Row:
        return self._postgres.one("corpus.identity_of_active", self._values()) or NO_MODEL

    def _values(self, **more: Any) -> dict[str, Any]:
        return {"kind": self._bound.kind, **more}

    def _execute(self, name: str, model: Row, values: dict[str, Any]) -> int:
        return self._postgres.retrying(lambda cursor: cursor.execute(self._sql(name, model), values).rowcount)

    def _sql(self, name: str, model: Row) -> sql.Composed:
        cast = sql.SQL("({}.embedding::{}({}))")
        type_, width = compared_as(model["dimensions"]), sql.Literal(model["dimensions"])
        keys = {f"{alias}_key": self._bound.key_of(alias) for alias in ("t", "w", "g", "o")}
        return query(
            f"similar.{name}",
            **self._bound.fragments(model["id"]),
            **keys,
            similar=self._bound.similar,
            rule=self._bound.similar_rule,
            embedding=cast.format(sql.SQL("c"), type_, width),
            own=cast.format(sql.SQL("own"), type_, width),
        )


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
    values = {"kind": bound.kind, "model_id": model_id}
    return cursor.execute(query("similar.forget_model", similar=bound.similar), values).rowcount
