"""How many texts go into one request, and how many requests into a minute.

The limits are learned: the endpoint says, or shows, what it takes, and that is kept for the client's life.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")
ENVELOPE = 16  # bytes of JSON around a text


@dataclass
class Limits:
    """The most that one request may hold; a text that is over a limit by itself goes alone."""

    items: int = 32
    bytes: int = 1_500_000  # Text Embeddings Inference refuses bodies over 2,000,000
    chars: int = 1_000_000

    def lower(self, *, items: int | None = None, bytes: int | None = None, chars: int | None = None) -> None:
        """Take what was learned; limits only ever fall, and never below 1."""
        self.items = max(1, min(self.items, items or self.items))
        self.bytes = max(1, min(self.bytes, bytes or self.bytes))
        self.chars = max(1, min(self.chars, chars or self.chars))


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


def halves(whole: list[T]) -> list[list[T]]:
    """Two lists, the first as long as the second or one longer."""
    middle = (len(whole) + 1) // 2
    return [whole[:middle], whole[middle:]]


class Pace:
    """Spreads requests and tokens over the minute; None is no limit."""

    def __init__(self, requests_per_minute: float | None = None, tokens_per_minute: float | None = None) -> None:
        self._per_request = 60 / requests_per_minute if requests_per_minute else 0.0
        self._per_token = 60 / tokens_per_minute if tokens_per_minute else 0.0
        self._free_at = 0.0

    def reserve(self, tokens: float, now: float) -> float:
        """Seconds to wait before a request of so many tokens may be sent; the place is taken."""
        begin = max(now, self._free_at)
        self._free_at = begin + max(self._per_request, tokens * self._per_token)
        return begin - now
