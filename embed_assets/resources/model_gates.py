"""The gates before a switch: is anything that search finds missing, did too much fail, does the index find enough.

What does not belong here: what follows from them (`model_life`).
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from psycopg import Cursor

from embed_assets.queries import query
from embed_assets.resources.declaration import BoundCorpus
from embed_assets.resources.postgres import Postgres, Row
from embed_assets.resources.vector_index import VectorIndex
from embed_assets.settings import Settings
from embed_assets.stop import Stop

RECALL_SECONDS = 120.0


@dataclass(frozen=True)
class Model:
    """The facts of one model of a kind. `stamped`: rows whose vectors it holds."""

    model_id: int
    identity: str
    dimensions: int
    index_ready: bool
    added_at: datetime
    judged_at: datetime | None
    unmet: str | None
    retired_at: datetime | None
    dropped_at: datetime | None
    active: bool
    target: bool
    previous: bool
    target_since: datetime | None
    stamped: int

    @property
    def state(self) -> str:
        if self.active:
            return "active"
        if self.dropped_at:
            return "dropped"
        if self.retired_at:
            return "retired"
        return "building" if self.target else "left"


@dataclass(frozen=True)
class Standing:
    """What search reads, and what is built beside it. `frozen_since`: changes do not reach what search reads."""

    active: str | None
    building: str | None
    unmet: str | None
    frozen_since: datetime | None


@dataclass(frozen=True)
class Coverage:
    """Rows that belong in search. `missing`: neither stamped nor dead; `lost`: of these, what search finds now."""

    rows: int
    dead: int
    missing: int
    lost: int


class Gates:
    """The gates of one kind; their numbers are settings."""

    def __init__(self, postgres: Postgres, bound: BoundCorpus, settings: Settings) -> None:
        self._postgres = postgres
        self._bound = bound
        self._settings = settings

    def judge(self, model: Model, index: VectorIndex, stop: Stop) -> str | None:
        """None when the gates hold, else the first that does not."""
        coverage = self.coverage(model.model_id)
        if unmet := self.uncovered(coverage) or self._too_many_dead(coverage):
            return unmet
        if not index.possible:
            return None
        recall = index.recall(queries=self._settings.switch_queries, seconds=RECALL_SECONDS, stop=stop)
        if recall is None and self._holds_chunks(model):
            return "its partition holds no chunk, though rows are stamped: the next reconcile finds them"
        if recall and 100 * recall.share < self._settings.switch_recall_percent:
            return (
                f"recall@10 of its index is {recall.share:.1%} over {recall.queries} queries, below "
                f"{self._settings.switch_recall_percent:g} % (EMBED_SWITCH_RECALL_PERCENT)"
            )
        return None

    def _holds_chunks(self, model: Model) -> bool:
        row = self._postgres.one("models.holds_chunks", {"kind": self._bound.kind, "model_id": model.model_id})
        return bool(row and row["stamped"])

    def coverage(self, model_id: int) -> Coverage:
        """One pass over the source, the stamps and the entries: about a second for a million rows."""
        return self._postgres.retrying(lambda cursor: self.counted(cursor, model_id))

    def counted(self, cursor: Cursor[Row], model_id: int) -> Coverage:
        corpus = cursor.execute(query("corpus.corpus"), {"kind": self._bound.kind}).fetchone()
        assert corpus is not None
        values = {"kind": self._bound.kind, "model_id": model_id} | {"active_id": corpus["active_model_id"]}
        row = cursor.execute(query("models.coverage", **self._bound.fragments(model_id)), values).fetchone()
        assert row is not None
        return Coverage(**row)

    def uncovered(self, coverage: Coverage) -> str | None:
        """Rows that came a moment ago are never all there; those that search finds now must be."""
        if coverage.lost:
            return f"{coverage.lost} rows that search finds now are not embedded yet"
        if 100 * coverage.missing > coverage.rows * self._settings.switch_missing_percent:
            return (
                f"{coverage.missing} of {coverage.rows} rows are not embedded yet, more than "
                f"{self._settings.switch_missing_percent:g} % (EMBED_SWITCH_MISSING_PERCENT)"
            )
        return None

    def _too_many_dead(self, coverage: Coverage) -> str | None:
        if 100 * coverage.dead > coverage.rows * self._settings.switch_dead_percent:
            return (
                f"{coverage.dead} of {coverage.rows} rows are dead, more than "
                f"{self._settings.switch_dead_percent:g} % (EMBED_SWITCH_DEAD_PERCENT)"
            )
        return None
