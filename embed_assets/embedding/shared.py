"""What all processes know of one endpoint: whether it rests, how fast it may be asked, what one request may hold.

The real one is a row in Postgres (`resources/embedder.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from embed_assets.embedding.batches import Limits
from embed_assets.errors import EndpointTrouble


@dataclass(frozen=True)
class Rest:
    """Why an endpoint is left alone, and for how many seconds more."""

    state: str
    reason: str
    seconds: float


class Shared(Protocol):
    """Its methods may block for as long as a database takes; they raise what the database raises."""

    def resting(self) -> Rest | None: ...

    def rest(self, trouble: EndpointTrouble, *, seconds: float | None = None) -> float:
        """Let everybody leave the endpoint alone; returns for how many seconds."""
        ...

    def pace(self, tokens: int) -> float:
        """Take the next place for a request of so many tokens; returns how many seconds to wait for it."""
        ...

    def known_limits(self) -> Limits | None: ...

    def learn(self, limits: Limits) -> None: ...

    def agree(self, reported: str) -> str:
        """The model that the endpoint first said it serves under the configured name; `reported` when it is new."""
        ...


class Unshared:
    """For questions, and where there is no database: nobody else's trouble is known."""

    _first: str | None = None

    def resting(self) -> Rest | None:
        return None

    def rest(self, trouble: EndpointTrouble, *, seconds: float | None = None) -> float:  # noqa: ARG002
        return seconds or 0.0

    def pace(self, tokens: int) -> float:  # noqa: ARG002
        return 0.0

    def known_limits(self) -> Limits | None:
        return None

    def learn(self, limits: Limits) -> None:
        pass

    def agree(self, reported: str) -> str:
        self._first = self._first or reported
        return self._first
