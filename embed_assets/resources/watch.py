"""What asks for a run: quick looks at one kind, for sensors and schedules. It changes nothing.

Has connections of its own whose statements end after a second and a half, so that a tick never hangs on the
database. What does not belong here: the decision (`defs/decision.py`) and anything of Dagster.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import psycopg

from embed_assets.embedding.shared import Rest
from embed_assets.errors import CorruptRow, DatabaseTrouble, RowRejected
from embed_assets.models import Backlog
from embed_assets.queries import query
from embed_assets.resources.assembly import Kind
from embed_assets.resources.backfill import Backfill, Progress
from embed_assets.resources.embedder import Endpoint, resting
from embed_assets.resources.health import Health
from embed_assets.resources.model_life import ModelLife
from embed_assets.resources.operating import Operating
from embed_assets.resources.outbox import Outbox
from embed_assets.resources.postgres import Postgres
from embed_assets.resources.run import run_limits
from embed_assets.resources.similar_store import SimilarStore, Waiting
from embed_assets.resources.verdict import Verdict, verdict

SENSOR_STATEMENT = "1500ms"
SCHEDULE_STATEMENT = "15s"
SCAN_BLINDLY_SECONDS = 300.0


@dataclass(frozen=True)
class Probe:
    """The scan's predicate: `stale` is None when it took longer than it may; `seconds` is what it took."""

    stale: bool | None
    seconds: float


class Watch:
    """Looks at one kind. Every method is one short read; raises what the database raises."""

    def __init__(self, kind: Kind) -> None:
        self.settings = kind.settings
        self.kind = kind.outbox.kind
        self._bound = kind.bound
        self._models = kind.outbox.models
        self._kind = kind
        self._postgres = Postgres(
            kind.postgres.url, application_name="embed_assets sensor", statement_timeout=SENSOR_STATEMENT
        )
        self._outbox = Outbox(
            self._postgres, self._bound, self._models, reconcile_seconds=kind.settings.reconcile_seconds
        )
        self._endpoints = [Endpoint(self._postgres, model.settings) for model in kind.models]

    def backlog(self) -> Backlog:
        return self._outbox.backlog()

    def resting(self) -> Rest | None:
        return resting(self._endpoints)

    def busy(self) -> bool:
        """Whether an enqueuer is at work: a second one would skip."""
        row = self._postgres.one("watch.scan_state", {"kind": self.kind})
        return bool(row and row["busy"])

    def scanned_seconds_ago(self) -> float | None:
        row = self._postgres.one("watch.scan_state", {"kind": self.kind})
        return row["scanned_seconds_ago"] if row else None

    def similar(self) -> tuple[Waiting, str | None]:
        """Stale lists and what would make more of them; and why none is computed now."""
        store = SimilarStore(self._postgres, self._bound)
        return store.waiting(), store.postponed()

    def rows_per_run(self) -> int:
        """What one run is going to take."""
        return run_limits(self._kind, self._outbox).rows_in_all

    def probe(self, *, patient: bool = False) -> Probe:
        """Whether a scan would find anything; `patient` allows 15 s instead of 1.5."""
        started = time.monotonic()
        stale: bool | None
        try:
            stale = self._patiently() if patient else self._outbox.stale()
        except psycopg.errors.QueryCanceled:
            stale = None
        except (RowRejected, CorruptRow):
            # Past a row that cannot be read nothing is known; a scan, which goes in ranges, finds it and the others.
            stale = (self.scanned_seconds_ago() or SCAN_BLINDLY_SECONDS) >= SCAN_BLINDLY_SECONDS
        except DatabaseTrouble as trouble:
            if trouble.code != psycopg.errors.QueryCanceled.sqlstate:
                raise
            stale = None
        return Probe(stale, time.monotonic() - started)

    def _patiently(self) -> bool:
        postgres = Postgres(
            self._postgres.url, application_name="embed_assets schedule", statement_timeout=SCHEDULE_STATEMENT
        )
        try:
            return Outbox(postgres, self._bound, self._models).stale()
        finally:
            postgres.close()

    def waves_of(self, runs: Sequence[str]) -> dict[str, bool]:
        """Of these runs, those that have claimed a wave, and whether they hold a lease now."""
        with self._postgres.transaction() as cursor:
            rows = cursor.execute(query("watch.waves_of_runs"), {"kind": self.kind, "runs": list(runs)})
            return {row["run_id"]: row["holding"] for row in rows}

    @contextmanager
    def listening(self) -> Iterator[Callable[[float], bool]]:
        """LISTEN; gives a function that waits at most so many seconds and says whether somebody spoke of this kind."""
        with self._postgres.session() as connection:
            connection.execute(query("watch.listen"))

            def wait(seconds: float) -> bool:
                notices = connection.notifies(timeout=seconds, stop_after=1)
                return any(notice.payload in ("", self.kind) for notice in notices)

            yield wait

    def backfill(self) -> list[Progress]:
        """The newest request of each bucket."""
        return Backfill(self._postgres, self._bound, self._models).progress()

    def models_wait(self) -> bool:
        """Whether a model could be indexed or switched to."""
        life = ModelLife(self._postgres, self._bound, self.settings)
        return life.waiting(automatic=self.settings.switch == "automatic")

    def verdict(self) -> Verdict:
        """From what is known at once, by index."""
        operating = Operating(self._postgres, self.settings, self.kind, self._bound)
        return verdict(Health(operating).facts_at_once())

    def close(self) -> None:
        self._postgres.close()
        self._kind.close()
