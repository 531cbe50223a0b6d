"""What the stages work with, as they see it. The real ones live in `resources`; the tests have in-memory ones, and one
conformance suite holds both to the same behaviour.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Protocol

from embed_assets.embedding import Embedder, Vectors
from embed_assets.errors import EndpointTrouble
from embed_assets.models import Counts, Enqueued, Failure, Plan, SourceRow, Wave
from embed_assets.stop import Stop


class EnqueuerPort(Protocol):
    def enqueue(self, *, scan: bool = False, allow_clear: bool = False, stop: Stop | None = None) -> Enqueued: ...


class OutboxPort(Protocol):
    def now(self) -> datetime: ...
    def claim(
        self,
        run_id: str,
        limit: int,
        *,
        failed_before: datetime = ...,
        ancestors: Sequence[str] = (),
        scope: str | None = None,
    ) -> Wave | None: ...
    def claimable(self, *, failed_before: datetime = ..., scope: str | None = None) -> bool: ...
    def start(self, wave: Wave) -> None: ...
    def progress(self, wave: Wave, counts: Counts) -> None: ...
    def staged(self, wave: Wave, counts: Counts, *, seconds: float) -> None: ...
    def fail(self, wave: Wave, failures: Sequence[Failure]) -> Counts: ...
    def release(self, wave: Wave, *, timed_out: bool = False) -> Counts: ...


class ChunkStorePort(Protocol):
    def slices(self, wave: Wave) -> Iterator[list[str]]: ...
    def load(self, wave: Wave, ids: Sequence[str]) -> list[SourceRow]: ...
    def plan(self, wave: Wave, plans: Sequence[Plan]) -> set[bytes]: ...
    def keep(self, wave: Wave, hashes: Sequence[bytes], vectors: Vectors, *, tokens: int) -> None: ...
    def write(
        self, wave: Wave, *, ids: Sequence[str] | None = None, close: bool = True, stop: Stop | None = None
    ) -> Counts: ...


class CorpusPort(Protocol):
    @property
    def max_chars(self) -> int: ...
    def plan(self, row: SourceRow, *, max_chars: int | None = None) -> Plan: ...


class EndpointPort(Protocol):
    def rest(self, trouble: EndpointTrouble) -> float: ...
    def trip(self, code: str) -> bool: ...
    def works(self, *, seconds: float) -> None: ...


class KeeperPort(Protocol):
    def hold(self, wave: Wave, scope: Stop) -> None: ...
    def drop(self, wave: Wave) -> None: ...


@dataclass(frozen=True)
class Ports:
    """Everything the stages of one kind work with. Real ones in `resources`, in-memory ones in the tests.

    `others`: the ports of the other models that are maintained, by their id; a wave is of one model.
    """

    corpus: CorpusPort
    enqueuer: EnqueuerPort
    outbox: OutboxPort
    chunks: ChunkStorePort
    embedder: Embedder
    endpoint: EndpointPort
    keeper: KeeperPort
    others: Mapping[int, Ports] = field(default_factory=dict)

    def of(self, wave: Wave) -> Ports:
        """The ports of the wave's own model."""
        return self.others.get(wave.model_id, self)
