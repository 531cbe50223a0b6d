"""The life of a model of one kind: target, indexed, judged, active, retired, dropped. What search reads is one row.

A new embedder identity is built beside the active model, in a partition, stamps and entries of its own. When all but
nothing is missing its index is built; when the gates hold, search is switched. Every step can be interrupted and
starts again where it was.
What does not belong here: filling the partition (the drain), the index itself (`vector_index`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

from psycopg import Cursor, errors

from embed_assets.errors import ConfigurationError, EmbedAssetsError
from embed_assets.queries import query
from embed_assets.resources import search_outbox, similar_store
from embed_assets.resources.declaration import BoundCorpus
from embed_assets.resources.model_gates import Gates, Model, Standing
from embed_assets.resources.postgres import Postgres, Row
from embed_assets.resources.target import locked, make_target, supersede
from embed_assets.resources.vector_index import Progress, VectorIndex
from embed_assets.settings import Settings
from embed_assets.stop import Stop

logger = logging.getLogger(__name__)

DROP_TRIES = 40
FORGET_ROWS = 10_000


class NotReady(EmbedAssetsError):
    """A model that search may not read yet; the message says what is unmet."""


class ModelLife:
    """The models of one kind. Raises ConfigurationError where an operator must decide."""

    def __init__(self, postgres: Postgres, bound: BoundCorpus, settings: Settings) -> None:
        self._postgres = postgres
        self._bound = bound
        self._settings = settings
        self._gates = Gates(postgres, bound, settings)

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
        done, models = [], self.models()
        for model in models:
            if model.retired_at or not (model.active or model.target):
                continue
            stop.check()
            unmet = self._build(model, progress) or (None if model.active else self._judge(model, stop))
            self._note(model, unmet)
            if unmet:
                done.append(f"{model.identity}: {unmet}")
            elif not model.active and self._settings.switch == "automatic":
                done.append(f"{model.identity}: {self._switched(model, models)}")
            elif not model.active:
                done.append(f"{model.identity}: ready, search reads it when an operator says so")
            elif not model.index_ready:
                done.append(f"{model.identity}: indexed")
        return done

    def _switched(self, model: Model, models: Sequence[Model]) -> str:
        """Switch, unless another process or an operator decided otherwise while the model was judged."""
        try:
            self._move(model, "target_model_id", models, force=False)
        except NotReady as decided:
            return str(decided)
        return "search reads it now"

    def _build(self, model: Model, progress: Progress = lambda done: None) -> str | None:
        """None when the index stands, else what keeps it from being built."""
        index = self.index_of(model)
        if not index.possible:
            self._postgres.execute("models.index_is_ready", self._ids(model.model_id) | {"ready": True})
            return None
        if index.state().valid and model.index_ready:
            return None
        if unmet := self._gates.uncovered(self._gates.coverage(model.model_id)):
            return unmet
        return None if index.build(progress) else "its index is being built by another process"

    def _judge(self, model: Model, stop: Stop) -> str | None:
        return self._gates.judge(model, self.index_of(model), stop)

    def _note(self, model: Model, unmet: str | None) -> None:
        self._postgres.execute("models.note_judgement", self._ids(model.model_id) | {"unmet": unmet})

    def switch(self, *, force: bool = False) -> Model:
        """Let search read the target. Raises NotReady when a gate does not hold (`force`: whatever the gates say).

        One transaction, under the kind's exclusive lock: it waits for the writes under way, and searches wait for
        nothing. Rows that search finds are counted once more in it, so that none can be lost by the switch; and it
        is looked at again whether the target is still the one that was judged.
        """
        models = self.models()
        target = self._the(models, lambda model: model.target, "being built")
        if target.active:
            raise NotReady(f"{target.identity} is active already: nothing is being built")
        if not force and (unmet := self._build(target) or self._judge(target, Stop())):
            raise NotReady(f"{target.identity} is not ready: {unmet}. Drain on, or switch with --force")
        self._move(target, "target_model_id", models, force=force)
        return target

    def rollback(self) -> Model:
        """Let search read the model of before again, as long as its partition is there. At once, whatever it lacks."""
        models = self.models()
        previous = self._the(models, lambda model: model.previous and not model.dropped_at, "kept for a rollback")
        self._move(previous, "previous_model_id", models, force=True)
        return previous

    def _move(self, to: Model, role: str, models: Sequence[Model], *, force: bool) -> None:
        active = next((model.model_id for model in models if model.active), None)
        self._postgres.retrying(lambda cursor: self._switch(cursor, to, role, active, force))

    def _switch(self, cursor: Cursor[Row], to: Model, role: str, active: int | None, force: bool) -> None:
        """`role` and `active`: what was seen before the lock was had, and must still be so."""
        corpus, model_id = locked(cursor, self.kind), to.model_id
        standing = cursor.execute(query("models.standing"), self._ids(model_id)).fetchone()
        if corpus[role] != model_id or corpus["active_model_id"] != active or not standing or standing["dropped"]:
            raise NotReady(f"{to.identity} is not what it was a moment ago. See 'embed-assets models {self.kind}'")
        if not force and (unmet := self._gates.uncovered(self._gates.counted(cursor, model_id))):
            raise NotReady(f"{unmet}. Drain on, or switch with --force")
        cursor.execute(query("models.switch"), self._ids(model_id))
        cursor.execute(query("models.unretire"), self._ids(model_id))
        search_outbox.queue_all(cursor, self.kind)
        similar_store.invalidate_all(cursor, self._bound, model_id)
        for retired in {active, corpus["target_model_id"]} - {model_id, None}:
            cursor.execute(query("models.retire"), self._ids(retired))
            supersede(cursor, self._ids(retired))
        logger.info("%s: search reads model %s now, %s is retired", self.kind, model_id, active)

    def abandon(self) -> Model:
        """Give up the target that is being built; what search reads stays."""
        target = self._the(self.models(), lambda model: model.target and not model.active, "being built")
        self._postgres.retrying(lambda cursor: self._abandon(cursor, target))
        return target

    def _abandon(self, cursor: Cursor[Row], target: Model) -> None:
        corpus = locked(cursor, self.kind)
        if corpus["target_model_id"] != target.model_id or corpus["active_model_id"] == target.model_id:
            raise NotReady(f"{target.identity} is not what it was a moment ago. See 'embed-assets models {self.kind}'")
        make_target(cursor, self._ids(corpus["active_model_id"]))

    def admit(self, identity: str) -> None:
        """Allow a retired model again: the next process that is set to it builds it. Raises ConfigurationError."""
        if not self._postgres.execute("models.admit", {"kind": self.kind, "identity": identity}):
            raise ConfigurationError(f"'{self.kind}' has no retired model '{identity}'. See 'embed-assets models'.")

    def drop_retired(self, *, days: float, stop: Stop) -> list[int]:
        """Drop the partitions of models that were retired so long ago. Those that somebody holds come next time."""
        dropped = [model_id for model_id in self._all("models.to_drop", days=days) if self._drop(model_id, days, stop)]
        for model_id in self._all("models.dropped_with_stamps"):
            values = self._ids(model_id) | {"limit": FORGET_ROWS}
            while self._postgres.execute("models.forget_stamps", values) == FORGET_ROWS:
                stop.check()
        return dropped

    def _all(self, name: str, **values: Any) -> list[int]:
        values = {"kind": self.kind, "model_id": None, **values}
        rows = self._postgres.retrying(lambda cursor: cursor.execute(query(name), values).fetchall())
        return [row["model_id"] for row in rows]

    def _drop(self, model_id: int, days: float, stop: Stop) -> bool:
        """A short lock time-out, again and again: never queue in front of the user's searches."""
        for attempt in range(DROP_TRIES):
            try:
                with self._postgres.transaction(lock_timeout="300ms") as cursor:
                    return self._drop_held(cursor, model_id, days)
            except (errors.LockNotAvailable, errors.DeadlockDetected):
                stop.sleep(min(2.0, 0.1 * (attempt + 1)))
        logger.warning("%s: the partition of model %s is held by a long transaction", self.kind, model_id)
        return False

    def _drop_held(self, cursor: Cursor[Row], model_id: int, days: float) -> bool:
        """Under the kind's lock, and only if it is still to go: somebody may have rolled back to it meanwhile."""
        locked(cursor, self.kind)
        values = self._ids(model_id) | {"days": days}
        if cursor.execute(query("models.to_drop"), values).fetchone() is None:
            return False
        cursor.execute(query("models.drop_partition", partition=self._bound.partition(model_id)))
        cursor.execute(query("models.note_dropped"), values)
        similar_store.forget_model(cursor, self._bound, model_id)
        return True

    def _the(self, models: Sequence[Model], wanted: Callable[[Model], bool], what: str) -> Model:
        found = [model for model in models if wanted(model)]
        if not found:
            raise ConfigurationError(f"No model of '{self.kind}' is {what}. See 'embed-assets models {self.kind}'.")
        return found[-1]

    def _ids(self, model_id: int) -> dict[str, Any]:
        return {"kind": self.kind, "model_id": model_id}
