"""The ports of `pipeline.py` in memory: a queue, a chunk store and a clock without a database.

They keep to the same protocol as the real ones, which the suite in `tests/postgres/test_conformance.py` asks of both.
What does not belong here: SQL, threads, time that passes by itself.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from typing import Any
from uuid import UUID

import numpy as np
from fakes import HashEmbedder

from embed_assets.corpus import Plain, TableCorpus
from embed_assets.errors import RULES, EndpointTrouble, LeaseLost, RowRejected
from embed_assets.models import Counts, Enqueued, Entry, Failure, Plan, SourceRow, Wave
from embed_assets.ports import Ports
from embed_assets.stop import Stop

EVER = datetime.max.replace(tzinfo=timezone.utc)
MAX_CRASHES, MAX_ATTEMPTS, LEASE_SECONDS = 3, 3, 120.0
SEEN = ("status", "forced", "attempts", "crashes", "timeouts", "error_class")
NOTES = TableCorpus(kind="notes", table="notes", key="note_id", text=Plain("body"), indexable="good")


@dataclass
class Queued:
    """One outbox entry."""

    entry_id: int
    source_id: str
    requested_at: datetime
    status: str = "pending"
    wave_id: int | None = None
    forced: bool = False
    attempts: int = 0
    crashes: int = 0
    timeouts: int = 0
    due_at: datetime | None = None
    failed_at: datetime | None = None
    error_class: str | None = None
    revision: str | None = None
    revision_known: bool = False

    @property
    def suspect(self) -> bool:
        return self.crashes >= 2 or self.timeouts >= 2

    def start_over(self) -> None:
        self.attempts = self.crashes = self.timeouts = 0
        self.due_at = None


@dataclass
class Lease:
    """One wave's row."""

    token: UUID
    run_id: str
    claimed: int
    claimed_at: datetime
    until: datetime
    started: bool = False
    outcome: str | None = None
    texts: int = 0
    counts: Counts = field(default_factory=Counts)


@dataclass(frozen=True)
class Stored:
    """One chunk of the chunk table."""

    text_hash: bytes
    body: str
    vector: Any


@dataclass
class Memory:
    """All tables, and the clock that stands until somebody moves it on."""

    clock: datetime = datetime(2025, 1, 1, tzinfo=timezone.utc)
    source: dict[str, tuple[str | None, bool]] = field(default_factory=dict)
    feed: list[tuple[str, bool]] = field(default_factory=list)
    entries: dict[str, Queued] = field(default_factory=dict)
    waves: dict[int, Lease] = field(default_factory=dict)
    plans: dict[int, dict[str, Plan]] = field(default_factory=dict)
    ledger: list[tuple[bytes, Any, datetime]] = field(default_factory=list)
    chunks: dict[str, list[Stored]] = field(default_factory=dict)
    stamps: dict[str, str | None] = field(default_factory=dict)
    invalidations: list[str] = field(default_factory=list)
    log: list[tuple[str, str]] = field(default_factory=list)
    tripped: set[str] = field(default_factory=set)
    endpoint: str = "ok"
    locked: set[str] = field(default_factory=set)
    refused: set[str] = field(default_factory=set)
    numbers: int = 0

    def tick(self) -> datetime:
        """The clock; no two readings are the same."""
        self.clock += timedelta(microseconds=1)
        return self.clock

    def number(self) -> int:
        self.numbers += 1
        return self.numbers

    def revision(self, source_id: str) -> str | None:
        return repr(self.source[source_id][0]) if source_id in self.source else None

    def indexable(self, source_id: str) -> bool:
        return source_id in self.source and self.source[source_id][1]

    def stale(self, source_id: str) -> bool:
        if not self.indexable(source_id):
            return source_id in self.stamps
        return source_id not in self.stamps or self.stamps[source_id] != self.revision(source_id)

    def fence(self, wave: Wave) -> Lease:
        lease = self.waves[wave.wave_id]
        if lease.token != wave.token or lease.outcome or lease.until <= self.clock:
            raise LeaseLost(f"wave {wave.wave_id} is no longer ours")
        return lease

    def leased(self, wave: Wave, ids: Sequence[str] | None = None) -> list[Queued]:
        mine = (e for e in self.entries.values() if e.wave_id == wave.wave_id and e.status == "leased")
        return sorted((e for e in mine if ids is None or e.source_id in ids), key=lambda e: e.source_id)

    def close(self, wave: Wave, outcome: str) -> None:
        self.waves[wave.wave_id].outcome = outcome
        self.plans.pop(wave.wave_id, None)


@dataclass
class MemoryEnqueuer:
    memory: Memory

    def enqueue(self, *, scan: bool = False, allow_clear: bool = False, stop: Stop | None = None) -> Enqueued:
        report = Enqueued(folded=len(self.memory.feed), scanned=scan)
        for source_id in sorted({source_id for source_id, _ in self.memory.feed}):
            report.created += self._fold(source_id, (source_id, True) in self.memory.feed)
        self.memory.feed.clear()
        if scan:
            for source_id in sorted({*self.memory.source, *self.memory.stamps}):
                if self.memory.stale(source_id) and source_id not in self.memory.entries:
                    self._add(source_id)
                    report.created += 1
            report.revived = sum(self._revive(entry) for entry in self.memory.entries.values())
        return report

    def _add(self, source_id: str) -> Queued:
        entry = Queued(self.memory.number(), source_id, self.memory.tick())
        self.memory.entries[source_id] = entry
        return entry

    def _fold(self, source_id: str, forced: bool) -> bool:
        created = source_id not in self.memory.entries
        entry = self._add(source_id) if created else self.memory.entries[source_id]
        entry.requested_at = self.memory.tick()
        entry.forced = entry.forced or forced
        entry.start_over()
        if entry.status != "leased":
            entry.status = "pending"
        return created

    def _revive(self, entry: Queued) -> bool:
        changed = entry.revision_known and entry.revision != self.memory.revision(entry.source_id)
        if entry.status != "dead" or not (changed or not self.memory.indexable(entry.source_id)):
            return False
        entry.start_over()
        entry.status, entry.requested_at = "pending", self.memory.tick()
        return True


@dataclass
class MemoryOutbox:
    memory: Memory

    def now(self) -> datetime:
        return self.memory.tick()

    def claim(
        self,
        run_id: str,
        limit: int,
        *,
        failed_before: datetime = EVER,
        ancestors: Sequence[str] = (),
        scope: str | None = None,
    ) -> Wave | None:
        assert scope is None, "these rows have no scopes"
        self._recover()
        free = [e for e in self._due(failed_before) if e.source_id not in self.memory.locked]
        if ancestors:
            free = [e for e in free if e.status == "pending" and self._left_by(e, ancestors)]
        normal = [e for e in free if not e.suspect]
        retries = [e for e in normal if e.status == "retry_wait"][: max(1, limit // 4)]
        pending = [e for e in normal if e.status == "pending"][: max(0, limit - len(retries))]
        suspects = [] if ancestors else [e for e in free if e.suspect][:1]
        return self._lease(run_id, retries + pending or suspects)

    def claimable(self, *, failed_before: datetime = EVER, scope: str | None = None) -> bool:
        return bool(self._due(failed_before))

    def start(self, wave: Wave) -> None:
        self.memory.fence(wave).started = True

    def progress(self, wave: Wave, counts: Counts) -> None:
        pass

    def staged(self, wave: Wave, counts: Counts, *, seconds: float) -> None:
        self.memory.waves[wave.wave_id].texts = counts.texts

    def fail(self, wave: Wave, failures: Sequence[Failure]) -> Counts:
        lease, counts = self.memory.fence(wave), Counts()
        by_id = {entry.source_id: entry for entry in self.memory.leased(wave)}
        for failure in failures:
            if entry := by_id.get(failure.source_id):
                self._charge(entry, failure, lease, counts)
        lease.counts += counts
        return counts

    def release(self, wave: Wave, *, timed_out: bool = False) -> Counts:
        lease, counts = self.memory.waves[wave.wave_id], Counts()
        if lease.token != wave.token or lease.outcome:
            return counts
        timed_out = timed_out and lease.texts == 0
        for entry in self.memory.leased(wave):
            dies = timed_out and lease.claimed == 1 and entry.timeouts >= 2
            entry.status = "dead" if dies else "pending"
            if timed_out:
                entry.timeouts += 1
                entry.error_class, entry.failed_at = "timeout", self.memory.tick()
            counts += Counts(dead=1) if dies else Counts(lost=1)
            if dies:
                self.memory.log.append((entry.source_id, "dead"))
        self.memory.close(wave, "released")
        return counts

    def _charge(self, entry: Queued, failure: Failure, lease: Lease, counts: Counts) -> None:
        if entry.requested_at > lease.claimed_at:
            entry.status, counts.back = "pending", counts.back + 1
            return
        plan = self.memory.plans.get(entry.wave_id or 0, {}).get(entry.source_id)
        known = failure.revision_known
        entry.revision = failure.revision if known or plan is None else plan.revision
        entry.revision_known = known or plan is not None
        entry.failed_at, entry.error_class = self.memory.tick(), str(failure.error.error_class)
        entry.attempts += 1
        if RULES[failure.error.error_class].deterministic or entry.attempts >= MAX_ATTEMPTS:
            entry.status, counts.dead = "dead", counts.dead + 1
            self.memory.log.append((entry.source_id, "dead"))
            return
        entry.status, counts.failed = "retry_wait", counts.failed + 1
        entry.due_at = self.memory.clock + timedelta(seconds=5 * 2 ** (entry.attempts - 1))

    def _recover(self) -> None:
        for wave_id, lease in self.memory.waves.items():
            if lease.outcome is None and lease.until <= self.memory.clock:
                lease.outcome = "expired"
                self.memory.plans.pop(wave_id, None)
        for entry in self.memory.entries.values():
            lease = self.memory.waves.get(entry.wave_id or 0)
            if entry.status != "leased" or lease is None or lease.outcome is None:
                continue
            entry.status = "pending"
            if lease.outcome == "expired" and lease.started:
                entry.crashes += 1
                entry.error_class, entry.failed_at = "LEASE_ATTEMPTS_EXHAUSTED", lease.until
                if entry.crashes >= MAX_CRASHES:
                    entry.status = "dead"
                    self.memory.log.append((entry.source_id, "dead"))

    def _due(self, failed_before: datetime) -> list[Queued]:
        waited = [e for e in self.memory.entries.values() if e.failed_at is None or e.failed_at < failed_before]
        late = [e for e in waited if e.status == "retry_wait" and e.due_at and e.due_at <= self.memory.clock]
        return late + sorted((e for e in waited if e.status == "pending"), key=lambda e: e.entry_id)

    def _left_by(self, entry: Queued, runs: Sequence[str]) -> bool:
        return entry.wave_id is not None and self.memory.waves[entry.wave_id].run_id in runs

    def _lease(self, run_id: str, taken: list[Queued]) -> Wave | None:
        if not taken:
            return None
        at, wave_id = self.memory.tick(), self.memory.number()
        lease = Lease(uuid.uuid4(), run_id, len(taken), at, at + timedelta(seconds=LEASE_SECONDS))
        self.memory.waves[wave_id] = lease
        for entry in taken:
            entry.status, entry.wave_id = "leased", wave_id
        taken = sorted(taken, key=lambda entry: entry.source_id)
        entries = tuple(Entry(entry.entry_id, entry.source_id, entry.forced) for entry in taken)
        return Wave(wave_id, lease.token, NOTES.kind, 1, run_id, at, entries)


@dataclass
class MemoryChunkStore:
    memory: Memory
    slice_rows: int = 2

    def slices(self, wave: Wave) -> Iterator[list[str]]:
        ids = [entry.source_id for entry in self.memory.leased(wave)]
        yield from (ids[start : start + self.slice_rows] for start in range(0, len(ids), self.slice_rows))

    def load(self, wave: Wave, ids: Sequence[str]) -> list[SourceRow]:
        return [self._load(entry) for entry in self.memory.leased(wave, ids)]

    def plan(self, wave: Wave, plans: Sequence[Plan]) -> set[bytes]:
        self.memory.fence(wave)
        kept = self.memory.plans.setdefault(wave.wave_id, {})
        kept.update({plan.source_id: plan for plan in plans})
        return {
            chunk.text_hash
            for plan in plans
            for chunk in plan.chunks
            if self._vector(self.memory.entries[plan.source_id], chunk.text_hash) is None
        }

    def keep(self, wave: Wave, hashes: Sequence[bytes], vectors: np.ndarray[Any, Any], *, tokens: int) -> None:
        at = self.memory.tick()
        self.memory.ledger += [(text_hash, vector, at) for text_hash, vector in zip(hashes, vectors, strict=True)]

    def write(
        self, wave: Wave, *, ids: Sequence[str] | None = None, close: bool = True, stop: Stop | None = None
    ) -> Counts:
        lease, counts = self.memory.waves[wave.wave_id], Counts()
        if close and lease.token == wave.token and lease.outcome == "written":
            return self._written(lease) if ids is None else counts
        self.memory.fence(wave)
        mine = self.memory.leased(wave, ids)
        plans = self.memory.plans.get(wave.wave_id, {})
        if self.memory.refused & {entry.source_id for entry in mine if entry.source_id in plans}:
            raise RowRejected("the database refuses the row", code="P0001")
        ready = {entry.source_id: self._ready(entry, plans.get(entry.source_id)) for entry in mine}
        for entry in mine:
            if (new := ready[entry.source_id]) is None:
                entry.status = "pending"
            else:
                counts += self._settle(entry, plans[entry.source_id], new, lease)
        lease.counts += counts
        if close:
            self.memory.close(wave, "written")
        return counts

    def _written(self, lease: Lease) -> Counts:
        """What a second write of a wave that was written is told."""
        done = lease.counts
        return Counts(indexed=done.indexed, removed=done.removed, gone=done.gone, superseded=done.superseded)

    def _load(self, entry: Queued) -> SourceRow:
        text, good = self.memory.source.get(entry.source_id, (None, False))
        revision = self.memory.revision(entry.source_id)
        stamped = entry.source_id in self.memory.stamps and self.memory.stamps[entry.source_id] == revision
        present = entry.source_id in self.memory.source
        return SourceRow(
            entry.source_id, entry.forced, present, good, stamped, revision, texts=[text] if good else None, fields={}
        )

    def _vector(self, entry: Queued, text_hash: bytes) -> Any:
        """The newest paid for; of a forced entry only what was paid since it was requested."""
        found = [
            v for h, v, at in self.memory.ledger if h == text_hash and (not entry.forced or at > entry.requested_at)
        ]
        if found or entry.forced:
            return found[-1] if found else None
        stored = (chunk for chunks in self.memory.chunks.values() for chunk in chunks)
        return next((chunk.vector for chunk in stored if chunk.text_hash == text_hash), None)

    def _ready(self, entry: Queued, plan: Plan | None) -> list[Stored] | None:
        """The row's chunks as they will be; None when its plan or one of its vectors is not there."""
        if plan is None:
            return None
        old = self.memory.chunks.get(entry.source_id, [])
        new = []
        for position, chunk in enumerate(plan.chunks):
            same = position < len(old) and old[position].text_hash == chunk.text_hash and not entry.forced
            vector = old[position].vector if same else self._vector(entry, chunk.text_hash)
            if vector is None:
                return None
            new.append(Stored(chunk.text_hash, chunk.body, vector))
        return new

    def _settle(self, entry: Queued, plan: Plan, new: list[Stored], lease: Lease) -> Counts:
        source_id = entry.source_id
        if plan.action == "embed":
            self.memory.chunks[source_id], self.memory.stamps[source_id] = new, plan.revision
        elif plan.action in ("clear", "gone"):
            self.memory.chunks.pop(source_id, None)
            self.memory.stamps.pop(source_id, None)
        self.memory.invalidations.append(source_id)
        outcome = {"embed": "indexed", "clear": "removed"}.get(plan.action, plan.action)
        self.memory.log.append((source_id, outcome))
        return Counts(**{outcome: 1}, back=self._leave(entry, plan, lease))

    def _leave(self, entry: Queued, plan: Plan, lease: Lease) -> int:
        indexable = self.memory.indexable(entry.source_id)
        changed = not indexable or self.memory.revision(entry.source_id) != plan.revision
        if plan.action in ("clear", "gone"):
            changed = indexable
        again = entry.requested_at > lease.claimed_at
        if not (changed or again):
            del self.memory.entries[entry.source_id]
            return 0
        entry.start_over()
        entry.status = "pending"
        return 1


@dataclass
class MemoryEndpoint:
    memory: Memory

    def rest(self, trouble: EndpointTrouble) -> float:
        self.memory.endpoint = str(trouble.error_class)
        return 30.0

    def trip(self, code: str) -> bool:
        first = code not in self.memory.tripped
        self.memory.tripped.add(code)
        return first

    def works(self, *, seconds: float) -> None:
        self.memory.endpoint = "ok"


@dataclass
class MemoryKeeper:
    """Holds waves and never renews: time passes only when somebody moves it on."""

    held: dict[int, Stop] = field(default_factory=dict)

    def hold(self, wave: Wave, scope: Stop) -> None:
        self.held[wave.wave_id] = scope

    def drop(self, wave: Wave) -> None:
        self.held.pop(wave.wave_id, None)


def memory_ports(memory: Memory, embedder: HashEmbedder) -> Ports:
    """All ports of the corpus `notes` on one memory."""
    return Ports(
        corpus=NOTES,
        enqueuer=MemoryEnqueuer(memory),
        outbox=MemoryOutbox(memory),
        chunks=MemoryChunkStore(memory),
        embedder=embedder,
        endpoint=MemoryEndpoint(memory),
        keeper=MemoryKeeper(),
    )


class MemorySystem:
    """The memory as the conformance suite sees it. The other system is Postgres."""

    def __init__(self) -> None:
        self.memory = Memory()
        self.embedder = HashEmbedder()
        self.ports = memory_ports(self.memory, self.embedder)

    def put(self, source_id: str, text: str | None, *, good: bool = True) -> None:
        self.memory.source[source_id] = (text, good)

    def remove(self, source_id: str) -> None:
        self.memory.source.pop(source_id, None)

    def say(self, *ids: str, forced: bool = False) -> None:
        self.memory.feed += [(source_id, forced) for source_id in ids]

    def entry(self, source_id: str) -> dict[str, Any] | None:
        found = self.memory.entries.get(source_id)
        return found and {name: getattr(found, name) for name in SEEN}

    def bodies(self, source_id: str) -> list[str]:
        return [chunk.body for chunk in self.memory.chunks.get(source_id, [])]

    def vectors(self, source_id: str) -> list[list[float]]:
        return [[float(number) for number in chunk.vector] for chunk in self.memory.chunks.get(source_id, [])]

    def fresh(self, source_id: str) -> bool:
        return self.memory.indexable(source_id) and not self.memory.stale(source_id)

    def stamped(self) -> list[str]:
        return sorted(self.memory.stamps)

    def outcomes(self, source_id: str) -> list[str]:
        return [outcome for logged, outcome in self.memory.log if logged == source_id]

    def wave(self, wave: Wave) -> tuple[str | None, int, int, int]:
        lease = self.memory.waves[wave.wave_id]
        return lease.outcome, lease.counts.indexed, lease.counts.failed, lease.counts.dead

    def invalidated(self) -> list[str]:
        return sorted(self.memory.invalidations)

    def pass_time(self, seconds: float) -> None:
        self.memory.clock += timedelta(seconds=seconds)

    def lose_plans(self) -> None:
        self.memory.plans.clear()

    def purge_ledger(self) -> None:
        self.memory.ledger.clear()

    def refuse(self, *ids: str) -> None:
        self.memory.refused = set(ids)

    @property
    def endpoint_state(self) -> str:
        return {"rate_limited": "cooling", "unavailable": "cooling"}.get(self.memory.endpoint, self.memory.endpoint)
