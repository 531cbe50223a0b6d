"""Enqueue: fold the feed, scan the source, reconcile facts. One enqueuer per kind, under the lease of `corpus_scans`.

Every step goes in ranges with a commit each, so that nothing grows with the table and nobody waits.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from psycopg import Cursor

from embed_assets.errors import LeaseLost
from embed_assets.models import Enqueued
from embed_assets.queries import query
from embed_assets.resources.postgres import Postgres, Row
from embed_assets.resources.tables import BoundCorpus
from embed_assets.stop import Stop

logger = logging.getLogger(__name__)

LEASE_SECONDS = 120
FOLD_ROWS = 5_000
RANGE_KEYS = 50_000
GUARD_STAMPS = 1_000


class Enqueuer:
    """Finds what is stale for the maintained models of one kind and enters it in the outbox."""

    def __init__(
        self, postgres: Postgres, bound: BoundCorpus, models: list[int], *, reconcile_seconds: float = 3600
    ) -> None:
        self._postgres = postgres
        self._bound = bound
        self._models = models
        self._reconcile_seconds = reconcile_seconds

    def enqueue(self, *, scan: bool = False, allow_clear: bool = False, stop: Stop | None = None) -> Enqueued:
        """Fold, then scan if it is due (or `scan`), then reconcile if that is due.

        A scan is due again after 20 times its own duration. `allow_clear` lets a scan clear more than half of
        over 1,000 stamps, which it otherwise refuses and says. While another enqueuer is at work: skipped.
        """
        stop = stop or Stop()
        with self._lease() as lease:
            if lease is None:
                return Enqueued(skipped=True)
            report = Enqueued()
            self._fold(lease, report, stop)
            if scan or lease["scan_due"] or lease["reconcile_due"]:
                self._scan(lease, report, allow_clear, stop)
            return report

    @contextmanager
    def _lease(self) -> Iterator[Row | None]:
        values = self._values() | {"reconcile_seconds": self._reconcile_seconds}
        lease = self._postgres.one("enqueue.acquire_lease", values)
        if lease is None:
            yield None
            return
        lease["outcome"] = {"scanned": False, "reconciled": False, "seconds": None}
        try:
            yield lease
        finally:
            self._postgres.execute("enqueue.release_lease", values | lease["outcome"] | {"token": lease["token"]})

    @contextmanager
    def _batch(self, lease: Row) -> Iterator[Cursor[Row]]:
        """One committed step, fenced by the enqueuer's lease and renewing it."""
        with self._postgres.transaction() as cursor:
            values = self._values() | {"token": lease["token"]}
            if cursor.execute(query("enqueue.hold_lease"), values).fetchone() is None:
                raise LeaseLost(f"another enqueuer of {self._bound.kind} has taken over")
            yield cursor

    def _fold(self, lease: Row, report: Enqueued, stop: Stop) -> None:
        statement = query("enqueue.fold", **self._bound.fragments())
        while True:
            stop.check()
            with self._batch(lease) as cursor:
                row = cursor.execute(statement, self._values(limit=FOLD_ROWS)).fetchone()
            assert row is not None
            report.folded += row["folded"]
            report.created += row["created"]
            report.unknown += row["unknown"]
            if row["folded"] < FOLD_ROWS:
                break
        if report.unknown:
            self._warn(report, f"{report.unknown} enqueued ids can be no key of {self._bound.corpus.table}: dropped")

    def _scan(self, lease: Row, report: Enqueued, allow_clear: bool, stop: Stop) -> None:
        started = time.monotonic()
        reason = "reconcile" if lease["reconcile_due"] else "scan"
        if lease["reconcile_due"]:
            self._reconcile(lease, report, stop)
        kept = 0
        for after, upto in self._ranges(lease, "enqueue.scan_bound", None, stop):
            row = self._run(lease, "enqueue.scan_range", after=after, upto=upto, reason=reason)
            report.created += row["created"]
            kept += row["kept"]
        self._clear(lease, report, kept, allow_clear, reason, stop)
        self._revive(lease, report, "enqueue.revive_changed")
        report.scanned = True
        lease["outcome"] = {
            "scanned": True,
            "reconciled": lease["reconcile_due"],
            "seconds": time.monotonic() - started,
        }

    def _clear(self, lease: Row, report: Enqueued, kept: int, allow: bool, reason: str, stop: Stop) -> None:
        """Rows that are gone or left search. Counted first: a source that lost most of its rows is not believed.

        The count is of a moment; a few stamps are looked through whatever it says, many only when some are left over.
        """
        stamps = self._run(lease, "enqueue.stamps")["stamps"]
        left_over = stamps - kept
        if stamps > RANGE_KEYS and left_over <= 0:
            return
        if not allow and stamps > GUARD_STAMPS and left_over > stamps / 2:
            self._warn(
                report,
                f"{left_over} of {stamps} indexed rows seem gone or not indexable: nothing is cleared. "
                "If that is meant, drain with --allow-clear",
            )
            return
        statement = query("enqueue.clear_range", **self._bound.fragments())
        for model_id in self._models:
            for after, upto in self._ranges(lease, "enqueue.stamp_bound", "", stop, model_id=model_id):
                with self._batch(lease) as cursor:
                    values = self._values(after=after, upto=upto, model_id=model_id, reason=reason)
                    report.created += cursor.execute(statement, values).rowcount

    def _revive(self, lease: Row, report: Enqueued, name: str) -> None:
        with self._batch(lease) as cursor:
            statement = query(name, **self._bound.fragments())
            report.revived += cursor.execute(statement, self._values(limit=RANGE_KEYS)).rowcount

    def _reconcile(self, lease: Row, report: Enqueued, stop: Stop) -> None:
        """Facts: stamps whose chunks are gone. And transient dead letters whose park is over get another round."""
        self._revive(lease, report, "enqueue.revive_parked")
        for model_id in self._models:
            statement = query("enqueue.unstamp_short", **self._bound.fragments(model_id))
            for after, upto in self._ranges(lease, "enqueue.stamp_bound", "", stop, model_id=model_id):
                with self._batch(lease) as cursor:
                    report.unstamped += cursor.execute(statement, self._values(after=after, upto=upto)).rowcount

    def _ranges(self, lease: Row, bound: str, after: Any, stop: Stop, **values: Any) -> Iterator[tuple[Any, Any]]:
        """(after, upto] ranges of about 50,000 keys, the last one open."""
        statement = query(bound, **self._bound.fragments())
        while True:
            stop.check()
            with self._batch(lease) as cursor:
                row = cursor.execute(statement, self._values(after=after, size=RANGE_KEYS, **values)).fetchone()
            upto = row["bound"] if row else None
            yield after, upto
            if upto is None:
                return
            after = upto

    def _run(self, lease: Row, name: str, **values: Any) -> Row:
        with self._batch(lease) as cursor:
            row = cursor.execute(query(name, **self._bound.fragments()), self._values(**values)).fetchone()
        assert row is not None, name
        return row

    def _warn(self, report: Enqueued, text: str) -> None:
        logger.warning("%s: %s", self._bound.kind, text)
        report.warnings.append(text)

    def _values(self, **more: Any) -> dict[str, Any]:
        return {"kind": self._bound.kind, "models": self._models, "lease": LEASE_SECONDS, **more}
