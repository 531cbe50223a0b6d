"""What an operator's jobs do to one kind, each with a dry run that says what it would take.

Opened without an embedder, so that they work whatever the settings name and whether or not the endpoint answers.
What does not belong here: Dagster, and the transitions themselves (`operator`, `outbox`, `model_life`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

from psycopg import sql

from embed_assets.corpus import Registry
from embed_assets.errors import ConfigurationError
from embed_assets.migrate import migrate
from embed_assets.queries import query
from embed_assets.resources.assembly import as_sent, database_url
from embed_assets.resources.backfill import Backfill
from embed_assets.resources.declaration import BoundCorpus, bind
from embed_assets.resources.embedder import endpoint_key
from embed_assets.resources.model_gates import Model
from embed_assets.resources.model_life import ModelLife
from embed_assets.resources.operator import DeadLetters, Operator
from embed_assets.resources.outbox import Outbox
from embed_assets.resources.postgres import STATEMENT_TIMEOUT, Postgres
from embed_assets.resources.tables import make_tables
from embed_assets.settings import Settings

Which = Literal["run", "expired", "all"]
Group = Mapping[str, str | int | float]
Ids = Sequence[str] | None


@dataclass(frozen=True)
class Taken:
    """What a job took, or in a dry run would take: how many, in words, and in groups for a table."""

    rows: int
    text: str
    groups: Sequence[Group] = ()


class Operating:
    """One kind. Everything raises ConfigurationError where the operator must ask for something else."""

    def __init__(self, postgres: Postgres, settings: Settings, kind: str, bound: BoundCorpus | None) -> None:
        self.postgres = postgres
        self.settings = settings
        self.kind = kind
        self._bound = bound
        self._operator = Operator(postgres, kind)

    @property
    def bound(self) -> BoundCorpus:
        if self._bound is None:
            raise ConfigurationError(
                f"'{self.kind}' is not declared in this project any more: its dead letters can be retried or "
                "dismissed, and it can be paused. For anything else add it to EMBED_CORPORA."
            )
        return self._bound

    @property
    def life(self) -> ModelLife:
        return ModelLife(self.postgres, self.bound, self.settings)

    @property
    def outbox(self) -> Outbox:
        return Outbox(self.postgres, self.bound, [])

    def retry(self, *, code: str | None, ids: Ids, dry_run: bool) -> Taken:
        """Dead letters back to pending, with all their attempts."""
        groups = self._operator.dead_letters(code=code, ids=ids)
        done = None if dry_run else self._operator.retry(code=code, ids=ids)
        return self._of_groups("retried", groups, done)

    def dismiss(self, *, code: str | None, ids: Ids, dry_run: bool) -> Taken:
        """Dead letters given up until their source changes."""
        groups = self._operator.dead_letters(code=code, ids=ids)
        done = None if dry_run else self._operator.dismiss(code=code, ids=ids)
        return self._of_groups("dismissed", groups, done)

    def _of_groups(self, done: str, groups: Sequence[DeadLetters], rows: int | None) -> Taken:
        taken = sum(group.rows for group in groups) if rows is None else rows
        text = f"{taken} dead letters: {_done(done, rows is None)}." if groups else f"{self._operator.codes()}."
        return Taken(taken, text, [group.shown for group in groups])

    def reindex(self, *, ids: Ids, forced: bool, dry_run: bool) -> Taken:
        """Enter rows that are out of sync, or these; `forced` buys texts again that are in sync."""
        if forced and ids is None:
            raise ConfigurationError("To buy every text again is a backfill: forced needs ids. Name them.")
        row = self.postgres.one("corpus.corpus", {"kind": self.kind})
        model_id = row and row["target_model_id"]
        values = {"kind": self.kind, "ids": ids and list(ids), "model_id": model_id, "forced": forced}
        chosen = query("operator_jobs.present" if forced else "operator_jobs.out_of_sync", **self.bound.fragments())
        rows = self._count("count" if dry_run else "request", chosen, values)
        what = "asked for" if forced else "out of sync"
        if not rows:
            return Taken(0, f"No row {'of these ' if ids else ''}is {what}: nothing to enqueue.")
        return Taken(rows, f"{rows} rows are {what}: {_done('enqueued', dry_run)}.")

    def _count(self, name: str, chosen: sql.Composable, values: Mapping[str, object]) -> int:
        statement = query(f"operator_jobs.{name}", chosen=chosen)
        row = self.postgres.retrying(lambda cursor: cursor.execute(statement, values).fetchone())
        return int(row["rows"]) if row else 0

    def release_waves(self, *, which: Which, run_id: str | None, dry_run: bool) -> Taken:
        """Open waves of a run, or of all, given back charging nobody; or those whose lease ran out, as a claim does."""
        if which == "run" and not run_id:
            raise ConfigurationError("Name the run whose waves are to be released (run_id), or take which: expired.")
        values = {"kind": self.kind, "run_id": run_id if which == "run" else None, "expired": which == "expired"}
        statement = query("operator_jobs.open_waves")
        found = self.postgres.retrying(lambda cursor: cursor.execute(statement, values).fetchall())
        if not dry_run and which == "expired":
            self.outbox.recover()
        elif not dry_run:
            self.outbox.release_runs([row["run_id"] for row in found])
        waves = sum(row["waves"] for row in found)
        rows = sum(row["rows"] for row in found)
        text = f"{waves} waves with {rows} rows: {_done('released', dry_run)}." if waves else "No such wave is open."
        return Taken(waves, text, [{**row, "expired": "yes" if row["expired"] else "no"} for row in found])

    def lapse(self, runs: Sequence[str]) -> int:
        """End the leases of dead runs now: what had begun counts as a crash. Returns how many waves."""
        return self.postgres.execute("operator_jobs.lapse", {"kind": self.kind, "runs": list(runs)})

    def switch(self, *, force: bool, dry_run: bool) -> Taken:
        """Let search read the model that was built."""
        models = self.life.models()
        target = next((model for model in models if model.target and not model.active), None)
        if not dry_run:
            return Taken(1, f"Search reads {self.life.switch(force=force).identity} now.", _models(self.life.models()))
        if target is None:
            return Taken(0, "No model is being built: there is nothing to switch to.", _models(models))
        unmet = f", but {target.unmet}" if target.unmet else ""
        return Taken(1, f"Search would read {target.identity}{unmet}.", _models(models))

    def rollback(self, *, dry_run: bool) -> Taken:
        """Let search read the model of before again."""
        models = self.life.models()
        previous = next((model for model in models if model.previous and not model.dropped_at), None)
        if not dry_run:
            identity = self.life.rollback().identity
            text = f"Search reads {identity} now. Set EMBED_MODEL to it, or what search reads is frozen."
            return Taken(1, text, _models(self.life.models()))
        if previous is None:
            return Taken(0, "No model is kept for a rollback.", _models(models))
        return Taken(1, f"Search would read {previous.identity} again.", _models(models))

    def cancel_backfill(self, *, dry_run: bool) -> Taken:
        """Backfills that are under way, taken back."""
        backfill = Backfill(self.postgres, self.bound, [])
        asked = [one for one in backfill.progress() if one.open and not one.cancelled_at]
        rows = sum(one.open for one in asked) if dry_run else backfill.cancel()
        if not asked and not rows:
            return Taken(0, "No backfill is under way.")
        return Taken(rows, f"{rows} rows of {len(asked)} buckets: {_done('cancelled', dry_run)}.")

    def pause(self, *, dry_run: bool) -> Taken:
        """No claim from now on."""
        if dry_run:
            return Taken(0, f"{self.kind} would be paused: no wave is claimed until it is resumed.")
        return Taken(1, "Paused.") if self._operator.pause() else Taken(0, "It was paused already.")

    def resume(self, *, dry_run: bool) -> Taken:
        """Claim again."""
        if dry_run:
            return Taken(0, f"{self.kind} would be resumed.")
        return Taken(1, "Resumed.") if self._operator.resume() else Taken(0, "It was not paused.")

    def reset_endpoint(self, *, limits: bool, dry_run: bool) -> Taken:
        """Forget why the endpoints of the settings rest or are refused; `limits` also what was learned of them."""
        known = [settings for settings in (self.settings, self.settings.of_active()) if settings]
        values = {"endpoints": [endpoint_key(settings) for settings in known], "limits": limits}
        statement = query("operator_jobs.endpoints")
        found = self.postgres.retrying(lambda cursor: cursor.execute(statement, values).fetchall())
        if not dry_run:
            self.postgres.execute("operator_jobs.reset_endpoints", values)
        groups = [{**row, "reason": row["reason"] or "", "seconds": row["seconds"] or 0.0} for row in found]
        states = ", ".join(row["state"] for row in found) or "not known"
        return Taken(len(found), f"Endpoints of the settings ({states}): {_done('reset', dry_run)}.", groups)


@contextmanager
def operating(
    settings: Settings, registry: Registry, kind: str, *, statement_timeout: str = STATEMENT_TIMEOUT
) -> Iterator[Operating]:
    """A kind, migrated and with its tables. Raises ConfigurationError for one that nobody ever declared."""
    url = database_url(settings)
    migrate(url)
    postgres = Postgres(url, application_name="embed_assets operator", statement_timeout=statement_timeout)
    try:
        yield Operating(postgres, settings, kind, _bound(postgres, settings, registry, kind))
    finally:
        postgres.close()


def _bound(postgres: Postgres, settings: Settings, registry: Registry, kind: str) -> BoundCorpus | None:
    if kind not in registry.kinds and postgres.one("operator_jobs.known_kind", {"kind": kind}):
        return None
    bound = bind(postgres, as_sent(registry[kind], settings))
    make_tables(postgres, bound)
    return bound


def _done(done: str, dry_run: bool) -> str:
    return f"would be {done}; nothing was changed" if dry_run else done


def _models(models: Sequence[Model]) -> list[Group]:
    return [
        {"model": m.identity, "state": m.state, "rows": m.stamped, "what it waits for": m.unmet or ""} for m in models
    ]
