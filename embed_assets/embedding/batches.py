"""How many texts go into one request. The limits are learned: the endpoint says, or shows, what it takes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")
ENVELOPE = 16  # bytes of JSON around a text
TOKEN_BYTES = 3  # of UTF-8, at least, in most languages: four letters of Latin script, one sign of Chinese


@dataclass
class Limits:
    """The most that one request may hold; a text that is over a limit by itself goes alone."""

    items: int = 32
    bytes: int = 1_500_000  # Text Embeddings Inference refuses bodies over 2,000,000
    chars: int = 1_000_000

    def widen(self, most: Limits) -> None:
        """Twice the characters, at most as many as `most` has: what a slow hour taught need not hold for ever."""
        self.chars = min(most.chars, self.chars * 2)

    def lower(self, *, items: int | None = None, bytes: int | None = None, chars: int | None = None) -> bool:
        """Take what was learned; limits only ever fall, and never below 1. Returns whether one fell."""
        before = (self.items, self.bytes, self.chars)
        self.items = max(1, min(self.items, items or self.items))
        self.bytes = max(1, min(self.bytes, bytes or self.bytes))
        self.chars = max(1, min(self.chars, chars or self.chars))
        return before != (self.items, self.bytes, self.chars)


def batches(texts: Sequence[str], limits: Limits, positions: Iterable[int]) -> Iterator[list[int]]:
    """Positions in order, cut into requests. The limits are read anew for each, so that lessons apply at once."""
    batch: list[int] = []
    size = chars = 0
    for at in positions:
        more = size_in_bytes(texts[at])
        full = len(batch) >= limits.items or size + more > limits.bytes or chars + len(texts[at]) > limits.chars
        if batch and full:
            yield batch
            batch, size, chars = [], 0, 0
        batch.append(at)
        size, chars = size + more, chars + len(texts[at])
    if batch:
        yield batch


def size_in_bytes(text: str) -> int:
    """About what the text takes in a request's body."""
    return len(text.encode()) + ENVELOPE


def tokens_of(texts: Iterable[str]) -> int:
    """About how many tokens the texts are, rather too many than too few."""
    return sum(len(text.encode()) // TOKEN_BYTES + 1 for text in texts)


def halves(whole: list[T]) -> list[list[T]]:
    """Two lists, the first as long as the second or one longer."""
    middle = (len(whole) + 1) // 2
    return [whole[:middle], whole[middle:]]
