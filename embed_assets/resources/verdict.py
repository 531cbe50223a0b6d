"""One word about a kind, and why. Pure: from numbers that were read elsewhere.

What does not belong here: reading the numbers (`health`), and who is told (`defs/checks.py`, `defs/alerts.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from enum import Enum


class State(str, Enum):
    """HEALTHY: searchable as the source is now. INDEXING: work is under way. DEGRADED: somebody must look."""

    HEALTHY = "HEALTHY"
    INDEXING = "INDEXING"
    DEGRADED = "DEGRADED"


@dataclass(frozen=True)
class Facts:
    """`work`: rows to be done, or being done. `failed`: rows with a failure that stands, waiting or dead.
    `succeeded`: rows whose last outcome was good. `indexed`, `expected`: rows that search reads and rows that it
    should, None where nobody counted them. `frozen_since`: changes do not reach what search reads.
    """

    work: int
    failed: int
    succeeded: int
    indexed: int | None = None
    expected: int | None = None
    frozen_since: datetime | None = None

    @property
    def stalled(self) -> bool:
        """More fails than succeeds, and more than is searchable."""
        return self.failed > 0 and self.failed > self.succeeded and (self.indexed is None or self.failed > self.indexed)

    @property
    def missing(self) -> int:
        """Rows that search should read and does not; 0 where that is not known."""
        if self.indexed is None or self.expected is None:
            return 0
        return max(0, self.expected - self.indexed)


@dataclass(frozen=True)
class Verdict:
    """The word, and a sentence with numbers."""

    state: State
    reason: str


def verdict(facts: Facts) -> Verdict:
    """The first rule that applies."""
    if facts.frozen_since:
        since = f"{facts.frozen_since:%Y-%m-%d %H:%M}"
        return Verdict(State.DEGRADED, f"what search reads is frozen since {since} while another model is built")
    if facts.work and not facts.stalled:
        failed = f", {facts.failed} failed" if facts.failed else ""
        return Verdict(State.INDEXING, f"{facts.work} rows to do{failed}")
    if facts.failed:
        stalled = f"stalled: more failed than the {facts.succeeded} that succeeded; " if facts.stalled else ""
        return Verdict(State.DEGRADED, f"{stalled}{facts.failed} rows failed")
    if facts.missing:
        return Verdict(State.DEGRADED, f"{facts.missing} of {facts.expected} rows are not searchable")
    return Verdict(State.HEALTHY, "everything is searchable as it is now")


def facts_of(counts: Mapping[str, int], *, stamped: int, frozen_since: datetime | None = None) -> Facts:
    """From the states of all rows (`models.STATES`), and how many rows the model holds."""
    total = sum(counts.values())
    return Facts(
        work=counts.get("due", 0) + counts.get("leased", 0) + counts.get("waiting", 0),
        failed=counts.get("dead", 0) + counts.get("waiting", 0),
        succeeded=counts.get("fresh", 0),
        indexed=stamped,
        expected=total - counts.get("excluded", 0) - counts.get("dismissed", 0),
        frozen_since=frozen_since,
    )
