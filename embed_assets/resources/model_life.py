"""The life of a model of one kind: target, indexed, judged, active, retired, dropped. What search reads is one row.

A new embedder identity is built beside the active model, in a partition, stamps and entries of its own. When all but
nothing is missing its index is built; when the gates hold, search is switched. Every step can be interrupted and
starts again where it was.
What does not belong here: filling the partition (the drain), the index itself (`vector_index`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from psycopg import Cursor, errors

from embed_assets.errors import ConfigurationError, EmbedAssetsError
from embed_assets.queries import query
from embed_assets.resources import search_outbox, similar_store
from embed_assets.resources.declaration import BoundCorpus
from embed_assets.resources.postgres import Postgres, Row
from embed_assets.resources.target import make_target
from embed_assets.resources.vector_index import Progress, VectorIndex
from embed_assets.settings import Settings
from embed_assets.stop import Stop

logger = logging.getLogger(__name__)

DROP_TRIES = 40
FORGET_ROWS = 10_000
RECALL_SECONDS = 120.0


class NotReady(EmbedAssetsError):
    """A model that search may not read yet; the message says what is unmet."""


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


class ModelLife:
    """The models of one kind. Raises ConfigurationError where an operator must decide."""

    def __init__(self, postgres: Postgres, bound: BoundCorpus, settings: Settings) -> None:
        self._postgres = postgres
        self._bound = bound
        self._settings = settings

    @property
    def kind(self) -> str:
        return self._bound.kind

    def models(self) -> list[Model]:
        """Every model the kind ever had, the newest last."""
        statement = query("models.models_of")
        rows = self._postgres.retrying(lambda c: c.execute(statement, {"kind": self.kind}).fetchall())
        return [Model(**row) for row in rows]

    def standing(self, maintained: Sequence[int]) -> Standing:
        """For a process that keeps the models `maintained` fresh."""
        models = self.models()
        active = next((model for model in models if model.active), None)
        target = next((model for model in models if model.target and not model.active), None)
        frozen = active is not None and active.model_id not in maintained
        return Standing(
            active.identity if active else None,
            target.identity if target else None,
            target.unmet if target else None,
            active.target_since if active and frozen else None,
        )

    def index_of(self, model: Model) -> VectorIndex:
        return VectorIndex(self._postgres, self._bound, model.model_id, model.dimensions)

    def waiting(self, *, automatic: bool) -> bool:
        """Whether `advance` could get a model further. Some milliseconds, by index."""
        values = {"kind": self.kind, "automatic": automatic}
        return self._postgres.one("models.waiting", values) is not None

    def advance(self, stop: Stop, progress: Progress = lambda done: None) -> list[str]:
        """Build what index can be built, judge the target, and switch to it if that is automatic. Says what it did.

        Again and again without harm; what another process is doing now is left to it. `progress` is told each second
        how far an index is, 0 to 1.
        """
        done = []
        for model in self.models():
            if model.retired_at or not (model.active or model.target):
                continue
            stop.check()
            unmet = self._build(model, progress) or (None if model.active else self._judge(model, stop))
            self._note(model, unmet)
            if unmet:
                done.append(f"{model.identity}: {unmet}")
            elif not model.active and self._settings.switch == "automatic":
                self.switch(model.model_id)
                done.append(f"{model.identity}: search reads it now")
            elif not model.active:
                done.append(f"{model.identity}: ready, search reads it when an operator says so")
            elif not model.index_ready:
                done.append(f"{model.identity}: indexed")
        return done

    def _build(self, model: Model, progress: Progress = lambda done: None) -> str | None:
        """None when the index stands, else what keeps it from being built."""
        index = self.index_of(model)
        if not index.possible:
            self._postgres.execute("models.index_is_ready", self._ids(model.model_id) | {"ready": True})
            return None
        if index.state().valid and model.index_ready:
            return None
        if unmet := self._uncovered(self.coverage(model.model_id)):
            return unmet
        return None if index.build(progress) else "its index is being built by another process"

    def _judge(self, model: Model, stop: Stop) -> str | None:
        """None when the gates hold, else the first that does not."""
        coverage = self.coverage(model.model_id)
        if unmet := self._uncovered(coverage) or self._too_many_dead(coverage):
            return unmet
        index = self.index_of(model)
        recall = index.recall(queries=self._settings.switch_queries, seconds=RECALL_SECONDS, stop=stop)
        if index.possible and recall and 100 * recall.share < self._settings.switch_recall_percent:
            return (
                f"recall@10 of its index is {recall.share:.1%} over {recall.queries} queries, below "
                f"{self._settings.switch_recall_percent:g} % (EMBED_SWITCH_RECALL_PERCENT)"
            )
        return None

    def coverage(self, model_id: int) -> Coverage:
        """One pass over the source, the stamps and the entries: about a second for a million rows."""
        return self._postgres.retrying(lambda cursor: self._coverage(cursor, model_id))

    def _coverage(self, cursor: Cursor[Row], model_id: int) -> Coverage:
        corpus = cursor.execute(query("corpus.corpus"), {"kind": self.kind}).fetchone()
        assert corpus is not None
        values = self._ids(model_id) | {"active_id": corpus["active_model_id"]}
        row = cursor.execute(query("models.coverage", **self._bound.fragments(model_id)), values).fetchone()
        assert row is not None
        return Coverage(**row)

    def _uncovered(self, coverage: Coverage) -> str | None:
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

    def _note(self, model: Model, unmet: str | None) -> None:
        self._postgres.execute("models.note_judgement", self._ids(model.model_id) | {"unmet": unmet})

    def switch(self, model_id: int | None = None, *, force: bool = False) -> Model:
        """Let search read the target. Raises NotReady when a gate does not hold (`force`: whatever the gates say).

        One transaction, under the kind's exclusive lock: it waits for the writes under way, and searches wait for
        nothing. Rows that search finds are counted once more in it, so that none can be lost by the switch.
        """
        target = self._the(lambda model: model.target and (model_id in (None, model.model_id)), "being built")
        if target.active:
            raise NotReady(f"{target.identity} is active already: nothing is being built")
        if not force and (unmet := self._build(target) or self._judge(target, Stop())):
            raise NotReady(f"{target.identity} is not ready: {unmet}. Drain on, or switch with --force")
        self._postgres.retrying(lambda cursor: self._switch(cursor, target.model_id, force=force))
        return target

    def rollback(self) -> Model:
        """Let search read the model of before again, as long as its partition is there. At once, whatever it lacks."""
        previous = self._the(lambda model: model.previous and not model.dropped_at, "kept for a rollback")
        self._postgres.retrying(lambda cursor: self._switch(cursor, previous.model_id, force=True))
        return previous

    def _switch(self, cursor: Cursor[Row], model_id: int, *, force: bool) -> None:
        corpus = cursor.execute(query("models.lock_kind"), {"kind": self.kind}).fetchone()
        assert corpus is not None
        before = corpus["active_model_id"]
        if before == model_id:
            return
        if not force and (lost := self._coverage(cursor, model_id).lost):
            raise NotReady(f"{lost} rows that search finds now are not embedded yet. Drain on, or switch with --force")
        cursor.execute(query("models.switch"), self._ids(model_id))
        cursor.execute(query("models.unretire"), self._ids(model_id))
        search_outbox.queue_all(cursor, self._bound)
        similar_store.invalidate_all(cursor, self._bound, model_id)
        for retired in {before, corpus["target_model_id"]} - {model_id}:
            cursor.execute(query("models.retire"), self._ids(retired))
            cursor.execute(query("models.supersede"), self._ids(retired))
        logger.info("%s: search reads model %s now, %s is retired", self.kind, model_id, before)

    def abandon(self) -> Model:
        """Give up the target that is being built; what search reads stays."""
        target = self._the(lambda model: model.target and not model.active, "being built")
        active = next(model for model in self.models() if model.active)
        self._postgres.retrying(lambda cursor: make_target(cursor, self._ids(active.model_id)))
        return target

    def admit(self, identity: str) -> None:
        """Allow a retired model again: the next process that is set to it builds it. Raises ConfigurationError."""
        if not self._postgres.execute("models.admit", {"kind": self.kind, "identity": identity}):
            raise ConfigurationError(f"'{self.kind}' has no retired model '{identity}'. See 'embed-assets models'.")

    def drop_retired(self, *, days: float, stop: Stop) -> list[int]:
        """Drop the partitions of models that were retired so long ago. Those that somebody holds come next time."""
        statement = query("models.to_drop")
        rows = self._postgres.retrying(lambda c: c.execute(statement, {"kind": self.kind, "days": days}).fetchall())
        return [row["model_id"] for row in rows if self._drop(row["model_id"], stop)]

    def _drop(self, model_id: int, stop: Stop) -> bool:
        """A short lock time-out, again and again: never queue in front of the user's searches."""
        drop = query("models.drop_partition", partition=self._bound.partition(model_id))
        for attempt in range(DROP_TRIES):
            try:
                with self._postgres.transaction(lock_timeout="300ms") as cursor:
                    cursor.execute(drop)
                    cursor.execute(query("models.note_dropped"), self._ids(model_id))
                    similar_store.forget_model(cursor, self._bound, model_id)
                break
            except (errors.LockNotAvailable, errors.DeadlockDetected):
                stop.sleep(min(2.0, 0.1 * (attempt + 1)))
        else:
            logger.warning("%s: the partition of model %s is held by a long transaction", self.kind, model_id)
            return False
        values = self._ids(model_id) | {"limit": FORGET_ROWS}
        while self._postgres.execute("models.forget_stamps", values) == FORGET_ROWS:
            stop.check()
        return True

    def _the(self, wanted: Callable[[Model], bool], what: str) -> Model:
        found = [model for model in self.models() if wanted(model)]
        if not found:
            raise ConfigurationError(f"No model of '{self.kind}' is {what}. See 'embed-assets models {self.kind}'.")
        return found[-1]

    def _ids(self, model_id: int) -> dict[str, Any]:
        return {"kind": self.kind, "model_id": model_id}
