"""What an operator does with the queue of a kind: look at dead letters, retry or dismiss them, pause, resume.

Everything that changes rows can be asked first what it would take (`dead_letters`). What does not belong here: what
the protocol does by itself (`outbox`, `enqueuer`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from embed_assets.queries import query
from embed_assets.resources.postgres import Postgres

BATCH = 5_000
LISTED, MOST_LISTED = 50, 500

NEXT_STEPS = {
    "input_rejected": "the endpoint will never take this text: change the row, exclude it, or change the model",
    "too_large": "split the row or exclude it: over 2 M characters or 32,768 chunks",
    "corrupt_row": "restore the row from a backup",
    "LEASE_ATTEMPTS_EXHAUSTED": "the row kills the process that works on it: look at that process's end, then retry",
    "contract": "the endpoint answers this text with something that is no vector: see its log, then retry",
    "row_rejected": "the database refuses the row: see the trigger, constraint or cast named by the code, then retry",
    "timeout": "the row alone uses up EMBED_CALL_TIMEOUT_SECONDS: raise it or shorten the row, then retry",
}


@dataclass(frozen=True)
class DeadLetters:
    """Dead letters of one code: how many, one of them, and what to do."""

    error_code: str
    error_class: str
    rows: int
    sample: str
    first_failed_at: datetime
    last_failed_at: datetime

    @property
    def next_step(self) -> str:
        return NEXT_STEPS.get(self.error_class, "retry it, and see the log of the run that fails")

    @property
    def shown(self) -> dict[str, str | int]:
        """As a row of a table for people."""
        return {"code": self.error_code, "rows": self.rows, "for example": self.sample, "what to do": self.next_step}


@dataclass(frozen=True)
class Waiting:
    """Rows of one code that failed and are tried again by themselves, the first of them at `next_attempt_at`."""

    error_code: str
    error_class: str
    rows: int
    sample: str
    next_attempt_at: datetime


@dataclass(frozen=True)
class DeadLetter:
    """One of them. `parked_until`: when a reconcile brings it back; None when it does at once, or never by itself."""

    source_id: str
    model: str
    error_code: str
    error_class: str
    error_message: str
    occurrences: int
    first_failed_at: datetime
    last_failed_at: datetime
    last_success_at: datetime | None
    parked_until: datetime | None


@dataclass(frozen=True)
class Latency:
    """Seconds from enqueued to finished, by quantile; None where nothing was indexed."""

    indexed: int
    p50: float | None
    p95: float | None
    p99: float | None


class Operator:
    """Acts on one kind. `code` and `ids` narrow what is taken; both None take every dead letter not dismissed."""

    def __init__(self, postgres: Postgres, kind: str) -> None:
        self._postgres = postgres
        self._kind = kind

    def dead_letters(self, *, code: str | None = None, ids: Sequence[str] | None = None) -> list[DeadLetters]:
        """Grouped by code, the largest group first: what `retry` or `dismiss` with these filters would take."""
        with self._postgres.transaction() as cursor:
            rows = cursor.execute(query("operate.count_dead"), self._filters(code, ids)).fetchall()
        return [DeadLetters(**row) for row in rows]

    def waiting(self, *, code: str | None = None) -> list[Waiting]:
        """Failed rows that no operator need touch, grouped by code, the largest group first."""
        with self._postgres.transaction() as cursor:
            rows = cursor.execute(query("operate.count_waiting"), self._filters(code, None)).fetchall()
        return [Waiting(**row) for row in rows]

    def listed(
        self,
        *,
        code: str | None = None,
        ids: Sequence[str] | None = None,
        prefix: str | None = None,
        limit: int = LISTED,
    ) -> list[DeadLetter]:
        """One by one, the newest failure first; at most 500. `prefix`: what their source ids begin with, literally."""
        values = self._filters(code, ids) | {"prefix": prefix, "limit": max(0, min(limit, MOST_LISTED))}
        with self._postgres.transaction() as cursor:
            rows = cursor.execute(query("operate.list_dead"), values).fetchall()
        return [DeadLetter(**row) for row in rows]

    def last_activity(self) -> datetime | None:
        """When anything was claimed, finished or failed last; None when nothing ever was."""
        row = self._postgres.one("operate.last_activity", {"kind": self._kind})
        return row["at"] if row else None

    def codes(self) -> str:
        """Which codes dead letters have, for whoever asked for another; `no dead letters` when there is none."""
        groups = self.dead_letters()
        if not groups:
            return "no dead letters"
        return "none of these; there are: " + ", ".join(f"{group.error_code} ({group.rows})" for group in groups)

    def retry(self, *, code: str | None = None, ids: Sequence[str] | None = None) -> int:
        """Back to pending with all attempts, whatever was parked; returns how many."""
        return self._in_batches("operate.retry_dead", code, ids)

    def dismiss(self, *, code: str | None = None, ids: Sequence[str] | None = None) -> int:
        """Given up until the source changes; returns how many."""
        return self._in_batches("operate.dismiss_dead", code, ids)

    def cancel(self, reason: str) -> int:
        """Take back the pending entries of one reason (`backfill`, …); returns how many, 0 is no error.

        What is leased, waiting or dead stays, and a row that is stale all the same comes back with the next scan.
        What a backfill asked for stays too, as the backfill's.
        """
        values = {"kind": self._kind, "reason": reason, "limit": BATCH}
        total = 0
        while (row := self._postgres.one("operate.cancel_pending", values)) and row["seen"]:
            total += row["taken"]
        return total

    def latency(self, *, hours: float = 24) -> Latency:
        """How long rows indexed in the last hours took from enqueued to finished, from the log."""
        with self._postgres.transaction() as cursor:
            row = cursor.execute(query("operate.latency"), {"kind": self._kind, "hours": hours}).fetchone()
        assert row is not None
        return Latency(**row)

    def pause(self) -> bool:
        """No claim from now on; returns when the writes under way are committed. False when it was paused already."""
        return self._exclusively("operate.pause")

    def resume(self) -> bool:
        """False when it was not paused."""
        return self._exclusively("operate.resume")

    def _exclusively(self, name: str) -> bool:
        with self._postgres.transaction() as cursor:
            cursor.execute(query("models.lock_kind"), {"kind": self._kind})
            return cursor.execute(query(name), {"kind": self._kind}).rowcount > 0

    def _in_batches(self, name: str, code: str | None, ids: Sequence[str] | None) -> int:
        total = 0
        while True:
            done = self._postgres.execute(name, self._filters(code, ids))
            total += done
            if done < BATCH:
                return total

    def _filters(self, code: str | None, ids: Sequence[str] | None) -> dict[str, object]:
        return {"kind": self._kind, "code": code, "ids": None if ids is None else list(ids), "limit": BATCH}
