"""The values that pass between the stages. Plain data: no SQL, no Dagster, no HTTP."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from datetime import datetime
from uuid import UUID

from embed_assets.errors import ClassifiedError


@dataclass(frozen=True)
class Entry:
    """One claimed outbox entry. What the source row is now is judged at load, and again at write."""

    entry_id: int
    source_id: str
    forced: bool


@dataclass(frozen=True)
class Wave:
    """Entries claimed together. The wave is the lease; `token` fences whatever is done under it."""

    wave_id: int
    token: UUID
    kind: str
    model_id: int
    run_id: str
    claimed_at: datetime
    entries: tuple[Entry, ...] = ()

    @property
    def source_ids(self) -> list[str]:
        return [entry.source_id for entry in self.entries]


@dataclass(frozen=True)
class SourceRow:
    """A row of the source as it was loaded, or the absence of one.

    `texts` and `fields` are None for a row that is not to be embedded. `stamped`: its vectors
    already say `revision`. `oversize`: more bytes than any row may have, so the text was not fetched.
    """

    source_id: str
    forced: bool
    present: bool
    indexable: bool
    stamped: bool
    revision: str | None
    oversize: bool = False
    texts: Sequence[str | None] | None = None
    fields: Mapping[str, str | None] | None = None


@dataclass(frozen=True)
class Chunk:
    """`sent` is the exact text the embedder gets (prefix and body); `text_hash` is its sha256 (32 bytes)."""

    body: str
    sent: str
    text_hash: bytes
    heading_path: str | None = None


@dataclass(frozen=True)
class Plan:
    """What is to be done with one row of a wave: `embed`, `clear`, `gone` or `superseded`."""

    source_id: str
    action: str
    revision: str | None
    chunks: tuple[Chunk, ...] = ()


@dataclass(frozen=True)
class Failure:
    """Why one row of a wave failed, and the revision that failed (`revision_known` when it was loaded)."""

    source_id: str
    error: ClassifiedError
    revision: str | None = None
    revision_known: bool = False


@dataclass
class Counts:
    """Counters of a wave, or the sum over many. Each entry is in one of indexed … dead, or in `lost`.

    `texts` were bought, each once; `sent` counts them as often as they were sent.
    """

    claimed: int = 0
    indexed: int = 0
    removed: int = 0
    gone: int = 0
    superseded: int = 0
    failed: int = 0
    dead: int = 0
    lost: int = 0
    back: int = 0
    chunks: int = 0
    reused: int = 0
    texts: int = 0
    sent: int = 0
    tokens: int = 0

    @property
    def settled(self) -> int:
        """Entries that left the queue or were charged; the others came back as they were."""
        finished = self.indexed + self.removed + self.gone + self.superseded
        return finished - self.back + self.failed + self.dead

    def __add__(self, other: Counts) -> Counts:
        return Counts(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    def as_dict(self) -> dict[str, int]:
        return {f.name: getattr(self, f.name) for f in fields(self)}


@dataclass
class Enqueued:
    """What one enqueue did. `created` is what fold and scan inserted; `folded` counts feed rows."""

    folded: int = 0
    created: int = 0
    unknown: int = 0
    revived: int = 0
    unstamped: int = 0
    scanned: bool = False
    skipped: bool = False
    warnings: list[str] = field(default_factory=list)


STATES = ("dead", "leased", "waiting", "due", "fresh", "dismissed", "excluded")


@dataclass(frozen=True)
class Status:
    """Every source row and every leftover stamp, counted once; the parts sum to `total`, always."""

    kind: str
    identity: str
    counts: Mapping[str, int]

    @property
    def total(self) -> int:
        return sum(self.counts.values())


@dataclass(frozen=True)
class Backlog:
    """Bounded counts of what asks for a drain: cheap enough for every sensor tick.

    A count equal to `limit` means "at least". `next_due_seconds`: until the first waiting retry.
    """

    due: int
    feed: int
    expired: int
    leased: int
    dead: int
    waiting: int
    limit: int
    paused: bool
    next_due_seconds: float | None = None
    revivable: int = 0

    @property
    def work(self) -> int:
        return self.due + self.feed + self.expired + self.revivable
