"""What every embedder offers and what it hands back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from embed_assets.errors import ClassifiedError, InputRejected
from embed_assets.stop import Stop

Vectors = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Embedded:
    """One finished request: `vectors[i]` belongs to the text at `positions[i]`."""

    positions: list[int]
    vectors: Vectors  # (len(positions), dimensions)
    tokens: int  # as counted by the endpoint; 0 where it does not say


@dataclass(frozen=True)
class Rejected:
    """Texts that failed alone: InputRejected, InputTooLong or AnswerContract."""

    positions: list[int]
    error: ClassifiedError


class Embedder(Protocol):
    """Turns texts into vectors of one space, which `identity` names."""

    @property
    def identity(self) -> str: ...

    @property
    def dimensions(self) -> int: ...

    @property
    def texts_sent(self) -> int:
        """How many texts were sent by now, each as often as it was: what a drain costs beyond what it needs."""
        ...

    def embed(self, texts: Sequence[str], *, stop: Stop) -> Iterator[Embedded | Rejected]:
        """Yields each request as it completes; every position once, in no promised order.

        Raises TypeError for a bare string, EndpointTrouble when the endpoint rather than a text is at fault,
        and what `stop` raises. Whatever was yielded before stays good.
        """
        ...

    def embed_query(self, text: str, *, timeout: float) -> Vectors:
        """The (dimensions,) vector of a search text, with the model's query prefix; ClassifiedError if none."""
        ...

    def close(self) -> None: ...


def texts_given(texts: Sequence[str]) -> list[str]:
    """The texts as a list. Raises TypeError for a bare string, which would be embedded letter by letter."""
    if isinstance(texts, str):
        raise TypeError("embed takes a sequence of texts, not one string")
    return list(texts)


def unsendable(texts: Sequence[str]) -> list[Rejected]:
    """Texts that no endpoint may see: one that is blank, or without a UTF-8 form, fails a whole request."""
    blank = [at for at, text in enumerate(texts) if not text.strip()]
    broken = [at for at, text in enumerate(texts) if not _has_utf8(text)]
    found = [(blank, "empty_text", "a text is empty"), (broken, "not_unicode", "a text has lone surrogates")]
    return [Rejected(at, InputRejected(message, code=code)) for at, code, message in found if at]


def _has_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
