"""Stand-ins that tests share: an embedder without a model, whose vectors are a hash of the text."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from embed_assets.embedding import Embedded, Rejected
from embed_assets.stop import Stop


def vector_of(text: str, dimensions: int) -> np.ndarray[Any, Any]:
    """(dims,) float32 of length 1: equal texts, equal vectors."""
    seed = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")
    vector = np.random.default_rng(seed).standard_normal(dimensions).astype(np.float32)
    return vector / np.linalg.norm(vector)


class HashEmbedder:
    """Counts every text it is given. `before(texts)` runs ahead of each request and may raise or block."""

    def __init__(self, dimensions: int = 8, identity: str = "hash", request_items: int = 32) -> None:
        self.dimensions = dimensions
        self.identity = f"{identity}-{dimensions}"
        self.request_items = request_items
        self.texts: list[str] = []
        self.requests = 0
        self.before: Callable[[Sequence[str]], None] = lambda texts: None
        self.reject: Callable[[str], Exception | None] = lambda text: None

    @property
    def texts_sent(self) -> int:
        return len(self.texts)

    def embed(self, texts: Sequence[str], *, stop: Stop) -> Iterator[Embedded | Rejected]:
        for start in range(0, len(texts), self.request_items):
            stop.check()
            part = list(texts[start : start + self.request_items])
            self.requests += 1
            self.before(part)
            stop.check()
            yield from self._answer(start, part)

    def _answer(self, start: int, part: list[str]) -> Iterator[Embedded | Rejected]:
        good = []
        for position, text in enumerate(part, start):
            if error := self.reject(text):
                yield Rejected([position], error)  # type: ignore[arg-type]
            else:
                good.append((position, text))
        self.texts += [text for _, text in good]
        if good:
            vectors = np.stack([vector_of(text, self.dimensions) for _, text in good])
            yield Embedded([position for position, _ in good], vectors, sum(len(text) for _, text in good) // 4)

    def embed_query(self, text: str, *, timeout: float) -> np.ndarray[Any, Any]:
        return vector_of(text, self.dimensions)

    def close(self) -> None:
        pass
