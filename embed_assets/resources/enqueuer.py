"""Enqueue: fold the feed, scan the source, reconcile facts. One enqueuer per kind, under the lease of `corpus_scans`.

Every step goes in ranges with a commit each, so that nothing grows with the table and nobody waits. A row that the
database cannot read is found by halving its range, and entered, so that its wave records why.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from psycopg import Cursor, sql

from embed_assets.errors import ConfigurationError, LeaseLost
from embed_assets.models import Enqueued
from embed_assets.queries import query
from embed_assets.resources import ranges
from embed_assets.resources.declaration import BoundCorpus
from embed_assets.resources.postgres import Postgres, Row
from embed_assets.resources.ranges import GuiltyRow, Range, Work, in_ranges
from embed_assets.resources.target import supersede
from embed_assets.stop import Stop

logger = logging.getLogger(__name__)

T = TypeVar("T")

FOLD_ROWS = 5_000
GUARD_STAMPS = 1_000
# In place of the source when one row's rank cannot be computed: the others must not wait for it.
UNRANKED = sql.SQL("(SELECT NULL::float8 AS rank, NULL::text AS scope, NULL::bigint AS key WHERE FALSE)")


class Enqueuer:
    """Finds what is stale for the maintained models of one kind and enters it in the outbox."""

    def __init__(
        self,
        postgres: Postgres,
        bound: BoundCorpus,
        models: list[int],
        *,
        lease_seconds: float = 120,
        reconcile_seconds: float = 3600,
    ) -> None:
        self._postgres = postgres
        self._bound = bound
        self._models = models
        self._lease_seconds = lease_seconds
        self._reconcile_seconds = reconcile_seconds

    def enqueue(self, *, scan: bool = False, allow_clear: bool = False, stop: Stop | None = None) -> Enqueued:
        """Fold, then scan if it is due (or `scan`), then reconcile if that is due.

        A scan is due again after 20 times its own duration. `allow_clear` lets a scan clear more than half of
        over 1,000 stamps, which it otherwise refuses and says. While another enqueuer is at work: skipped.
        Raises what `stop` raises, LeaseLost when another enqueuer took over, DatabaseTrouble.
        """
        with self._lease(stop or Stop()) as work:
            if work is None:
                return Enqueued(skipped=True)
            work.fold()
            if scan or work.lease["scan_due"] or work.lease["reconcile_due"]:
                work.scan(allow_clear=allow_clear)
            return work.report

    @contextmanager
    def _lease(self, stop: Stop) -> Iterator[_Enqueue | None]:
        values = {"kind": self._bound.kind, "lease": self._lease_seconds}
        values |= {"reconcile_seconds": self._reconcile_seconds}
        lease = self._postgres.retrying(lambda c: c.execute(query("enqueue.acquire_lease"), values).fetchone())
        if lease is None:
            yield None
            return
        work = _Enqueue(self._postgres, self._bound, self._models, lease | values, stop)
        try:
            work.models = work.maintained()
            yield work
        finally:
            self._postgres.execute("enqueue.release_lease", values | work.outcome | {"token": lease["token"]})


class _Enqueue:
    """One enqueue under its lease: what it does, and what it will report."""

    def __init__(self, postgres: Postgres, bound: BoundCorpus, models: list[int], lease: Row, stop: Stop) -> None:
        self.lease = lease
        self.report = Enqueued()
        self.outcome: dict[str, Any] = {"scanned": False, "reconciled": False, "seconds": None}
        self._postgres = postgres
        self._bound = bound
        self._given = models
        self.models: dict[int, int] = {}
        self._stop = stop

    def maintained(self) -> dict[int, int]:
        """The lane in which a scan enters rows, by model. Raises ConfigurationError when every one was retired."""
        statement = query("models.maintained")
        values = {"kind": self._bound.kind, "models": self._given}
        found = self._postgres.retrying(lambda cursor: cursor.execute(statement, values).fetchall())
        if not found:
            raise ConfigurationError(
                f"The model of '{self._bound.kind}' that this process was started with is retired. Set EMBED_MODEL to "
                "the active one and start it again."
            )
        return {row["model_id"]: row["lane"] for row in found}

    def fold(self) -> None:
        """The feed becomes entries; ids that no row can have are dropped and counted."""
        while True:
            row = self._fold()
            self.report.folded += row["folded"]
            self.report.created += row["created"]
            self.report.unknown += row["unknown"]
            if row["folded"] < FOLD_ROWS:
                break
        if self.report.unknown:
            table = self._bound.corpus.table
            self._warn(f"{self.report.unknown} enqueued ids can be no key of {table}: dropped")

    def _fold(self) -> Row:
        try:
            return self._one("enqueue.fold", limit=FOLD_ROWS)
        except GuiltyRow:
            unranked = query("enqueue.fold", **self._bound.fragments() | {"source": UNRANKED, "e_key": sql.SQL("0")})
            return self._step(lambda cursor: _first(cursor, unranked, self._values(limit=FOLD_ROWS)))

    def scan(self, *, allow_clear: bool) -> None:
        """Every row against its stamps; then what is left over of the stamps; then the dead whose source changed."""
        started = time.monotonic()
        if self.lease["reconcile_due"]:
            self._reconcile()
        reason = "reconcile" if self.report.unstamped else "scan"
        kept = self._scan_source(reason)
        self._clear(kept, allow_clear, reason)
        if self.lease["reconcile_due"]:
            self._enter_unstamped()
        self._revive("enqueue.revive_changed")
        self.report.scanned = True
        seconds = time.monotonic() - started
        self.outcome = {"scanned": True, "reconciled": self.lease["reconcile_due"], "seconds": seconds}

    def _scan_source(self, reason: str) -> int:
        kept = 0

        def scan(part: Range) -> None:
            nonlocal kept
            row = self._one("enqueue.scan_range", part, reason=reason)
            self.report.created += row["created"]
            kept += row["kept"]

        def enter(part: Range) -> None:
            self.report.created += self._rows("enqueue.enter_unreadable", part, reason=reason)

        self._in_ranges("enqueue.scan_bound", None, scan, enter)
        return kept

    def _clear(self, kept: int, allow: bool, reason: str) -> None:
        """Rows that are gone or left search. Counted first: a source that lost most of its rows is not believed.

        The count is of a moment; a few stamps are looked through whatever it says, many only when some are left over.
        """
        stamps = self._one("enqueue.stamps")["stamps"]
        left_over = stamps - kept
        if stamps > ranges.RANGE_KEYS and left_over <= 0:
            return
        if not allow and stamps > GUARD_STAMPS and left_over > stamps / 2:
            self._warn(
                f"{left_over} of {stamps} indexed rows seem gone or not indexable: nothing is cleared. "
                "If that is meant, drain with --allow-clear"
            )
            return
        for model_id in self.models:

            def clear(part: Range, model_id: int = model_id) -> None:
                self.report.created += self._rows("enqueue.clear_range", part, reason=reason, model_id=model_id)

            self._in_ranges("enqueue.stamp_bound", "", clear, model_id=model_id)

    def _revive(self, name: str) -> None:
        def revive(part: Range) -> None:
            self.report.revived += self._rows(name, part)

        self._in_ranges("enqueue.dead_bound", "", revive)

    def _reconcile(self) -> None:
        """Facts: waves and chunks that are gone. And transient dead letters whose park is over get another round."""
        if healed := self._step(lambda cursor: cursor.execute(query("enqueue.heal_lost"), self._values()).rowcount):
            self._warn(f"{healed} leased entries had lost their wave: back to pending")
        self._revive("enqueue.revive_parked")
        self._supersede_retired()
        for model_id in self.models:

            def unstamp(part: Range, model_id: int = model_id) -> None:
                self.report.unstamped += self._rows("enqueue.unstamp_short", part, model=model_id)

            self._in_ranges("enqueue.stamp_bound", "", unstamp, model_id=model_id)

    def _supersede_retired(self) -> None:
        def work(cursor: Cursor[Row]) -> None:
            for row in cursor.execute(query("enqueue.retired_with_entries"), self._values()).fetchall():
                supersede(cursor, self._values() | row)

        self._step(work)

    def _enter_unstamped(self) -> None:
        """Facts: chunks without a stamp. After the scan, which has entered those that belong in search, by rank."""
        for model_id in self.models:

            def enter(part: Range, model_id: int = model_id) -> None:
                self.report.created += self._rows("enqueue.enter_unstamped", part, model=model_id, reason="reconcile")

            self._in_ranges("enqueue.chunk_bound", None, enter, model_id=model_id)

    def _in_ranges(self, bound: str, after: Any, work: Work, alone: Work = lambda part: None, **values: Any) -> None:
        in_ranges(lambda part: self._end_of(bound, part, **values), work, alone, after=after, warn=self._warn)

    def _end_of(self, bound: str, part: Range, **values: Any) -> Any:
        """The last key of the first `size` ones of a range; None where there are fewer."""
        self._stop.check()
        statement = query(bound, **self._bound.fragments())
        values = self._values(part, size=part.size, **values)
        row = self._step(lambda cursor: cursor.execute(statement, values).fetchone())
        return row["bound"] if row else None

    def _one(self, name: str, part: Range | None = None, **values: Any) -> Row:
        statement = query(name, **self._bound.fragments())
        return self._step(lambda cursor: _first(cursor, statement, self._values(part, **values)))

    def _rows(self, name: str, part: Range, *, model: int | None = None, **values: Any) -> int:
        statement = query(name, **self._bound.fragments(model))
        return self._step(lambda cursor: cursor.execute(statement, self._values(part, **values)).rowcount)

    def _step(self, work: Callable[[Cursor[Row]], T]) -> T:
        """One committed step, fenced by the enqueuer's lease and renewing it, however long it takes."""

        def held(cursor: Cursor[Row]) -> T:
            values = self._values() | {name: self.lease[name] for name in ("token", "lease")}
            if cursor.execute(query("enqueue.hold_lease"), values).fetchone() is None:
                raise LeaseLost(f"another enqueuer of {self._bound.kind} has taken over")
            done = work(cursor)
            cursor.execute(query("enqueue.hold_lease"), values)
            return done

        self._stop.check()
        return self._postgres.retrying(held, stop=self._stop)

    def _warn(self, text: str) -> None:
        logger.warning("%s: %s", self._bound.kind, text)
        self.report.warnings.append(text)

    def _values(self, part: Range | None = None, **more: Any) -> dict[str, Any]:
        ends = part.ends if part else {}
        models = {"models": list(self.models), "lanes": list(self.models.values())}
        return {"kind": self._bound.kind, **models, **ends, **more}


def _first(cursor: Cursor[Row], statement: sql.Composed, values: dict[str, Any]) -> Row:
    row = cursor.execute(statement, values).fetchone()
    assert row is not None
    return row
