"""The catalogue of what an embedding server may do wrong, and how often.

Belongs here: names and their meaning, the reading of `--fault`, the draw. Does not: how each is done (`answers`,
`server`).
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from embed_assets.errors import ConfigurationError
from embed_assets.fake_server.answers import Reply

# What to do with a request: answer well, with a status, with a whole reply, or misbehave as named in FAULTS.
Behaviour = None | int | str | Reply

FAULTS = {
    "null": "the last vector is all null, with status 200",
    "nan": "the last vector is all NaN, which is no JSON",
    "zero": "the last vector is all zeros",
    "empty": "the last vector is []",
    "words": "the last vector holds words",
    "infinite": "the last vector is beyond float32",
    "short": "one vector too few",
    "long": "one vector too many",
    "one_too_wide": "the last vector is wider than the others",
    "wrong_width": "every vector has one dimension more",
    "other_model": "the answer names another model (openai)",
    "permuted": "vectors come in another order, with their index (openai)",
    "floats": "lists of numbers though base64 was asked for (openai)",
    "duplicate_index": "two vectors for one index (openai)",
    "index_out_of_range": "an index that no text has (openai)",
    "bool_index": "true for an index (openai)",
    "no_index": "an index is missing (openai)",
    "bad_base64": "a vector that is not base64 (openai)",
    "unknown_shape": "JSON of another shape",
    "garbage": "JSON cut at 60 %, its length announced truly",
    "cut": "the connection ends after 60 % of the body",
    "trickle": "the body comes at ten bytes a second, and ends early",
    "reset": "the connection is reset instead of an answer",
    "hang": "no answer until the client goes away",
    "breakdown": "424 and 'unsupported value: NaN', as when a model computes nonsense",
    "overloaded": "429 without Retry-After, as Text Embeddings Inference",
    "loading": "503 and 'is currently loading', as an endpoint that was scaled to zero",
}
ERRORS: dict[str, tuple[int, str, str]] = {
    "breakdown": (424, "Backend", "Backend error: unsupported value: NaN"),
    "overloaded": (429, "Overloaded", "Model is overloaded"),
    "loading": (503, "Unhealthy", "Model stub/model is currently loading"),
}


@dataclass(frozen=True)
class Fault:
    """One behaviour: for a share of the requests, or for every request with a text that holds `marker`."""

    behaviour: int | str
    share: float = 1.0
    marker: str | None = None

    @classmethod
    def parse(cls, given: str) -> Fault:
        """`zero`, `503=0.1` (a tenth of the requests), `400@salary` (every text with that word).

        Raises ConfigurationError naming the known ones.
        """
        name, found, marker = given.partition("@")
        name, _, share = name.partition("=")
        status = name.isdecimal() and 300 <= int(name) <= 599
        if not status and name not in FAULTS:
            known = ", ".join(FAULTS)
            raise ConfigurationError(f"--fault {given}: known are a status from 300 to 599 and {known}")
        try:
            part = float(share or 1)
        except ValueError:
            part = -1
        if not 0 <= part <= 1 or (found and (share or not marker)):
            raise ConfigurationError(f"--fault {given}: write it as name, name=0.1 or name@word")
        return cls(int(name) if status else name, part, marker or None)


class Draw:
    """Which fault a request meets: a marked text first, then by chance, the same for the same seed."""

    def __init__(self, faults: Sequence[Fault], seed: int) -> None:
        self._marked = [fault for fault in faults if fault.marker]
        self._shared = [fault for fault in faults if not fault.marker]
        self._random = random.Random(seed)

    def __call__(self, texts: Sequence[str]) -> Behaviour:
        for fault in self._marked:
            if any(fault.marker in text for text in texts if fault.marker):
                return fault.behaviour
        left = self._random.random()
        for fault in self._shared:
            if left < fault.share:
                return fault.behaviour
            left -= fault.share
        return None
