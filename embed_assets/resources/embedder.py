"""The embedder that the settings name, and the state of its endpoint that all processes share."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from embed_assets.embedding import Embedder, HttpEmbedder, LocalEmbedder
from embed_assets.errors import ConfigurationError, EndpointTrouble, ErrorClass
from embed_assets.queries import query
from embed_assets.resources.postgres import Postgres
from embed_assets.settings import Settings
from embed_assets.stop import Stop

logger = logging.getLogger(__name__)

REST_SECONDS = {
    ErrorClass.RATE_LIMITED: 30.0,
    ErrorClass.UNAVAILABLE: 30.0,
    ErrorClass.WARMING: 30.0,
    ErrorClass.REFUSED: 600.0,
    ErrorClass.CONTRACT: 600.0,
}
STATES = {
    ErrorClass.RATE_LIMITED: "cooling",
    ErrorClass.UNAVAILABLE: "cooling",
    ErrorClass.WARMING: "warming",
    ErrorClass.REFUSED: "refused",
    ErrorClass.CONTRACT: "refused",
}
LONGEST_REST = 3600.0


@dataclass(frozen=True)
class Rest:
    """Why an endpoint is left alone, and for how many seconds more."""

    state: str
    reason: str
    seconds: float


class Endpoint:
    """The shared state of one endpoint: whoever meets its trouble lets everybody rest."""

    def __init__(self, postgres: Postgres, settings: Settings) -> None:
        self._postgres = postgres
        self.key = endpoint_key(settings)

    def resting(self) -> Rest | None:
        """None when it may be asked now."""
        row = self._postgres.one("endpoint.resting", {"endpoint": self.key})
        return Rest(**row) if row else None

    def rest(self, trouble: EndpointTrouble) -> float:
        """Leave it alone: as long as it asked for, at most an hour, or as its class says. Returns the seconds."""
        seconds = min(max(trouble.retry_after or 0, REST_SECONDS[trouble.error_class]), LONGEST_REST)
        self._postgres.execute(
            "endpoint.rest",
            {
                "endpoint": self.key,
                "state": STATES[trouble.error_class],
                "seconds": seconds,
                "reason": f"{trouble.code}: {trouble}",
            },
        )
        return seconds

    def works(self) -> None:
        """It answered: nobody need wait any longer."""
        self._postgres.execute("endpoint.works", {"endpoint": self.key})

    @contextmanager
    def turn(self, stop: Stop) -> Iterator[None]:
        """One embedding run at a time per endpoint, so that another can write meanwhile."""
        turn = int(self.key[:7], 16)
        with self._postgres.session() as connection:
            while not connection.execute(query("endpoint.try_turn"), {"turn": turn}).fetchone()["mine"]:  # type: ignore[index]
                stop.sleep(0.1)
            yield


def resting(endpoints: Sequence[Endpoint]) -> Rest | None:
    """Why none of these may be asked now: the one to be asked first; None as soon as one may be."""
    rests = [rest for endpoint in endpoints if (rest := endpoint.resting())]
    return min(rests, key=lambda rest: rest.seconds) if len(rests) == len(endpoints) else None


def endpoint_key(settings: Settings) -> str:
    """Hash of URL and key: another key is another endpoint, and neither can be read from it."""
    key = settings.api_key.get_secret_value() if settings.api_key else ""
    return hashlib.sha256(f"{settings.protocol}\x1f{settings.url or ''}\x1f{key}".encode()).hexdigest()[:32]


def make_embedder(settings: Settings, *, for_queries: bool = False) -> Embedder:
    """The embedder of the settings, or the one for questions. Raises ConfigurationError when something is not set."""
    if settings.protocol == "local":
        if settings.url:
            raise ConfigurationError(
                "EMBED_URL is set but EMBED_PROTOCOL is 'local'. Set EMBED_PROTOCOL to tei, hf or openai."
            )
        return LocalEmbedder()
    if not settings.model:
        raise ConfigurationError(
            "EMBED_MODEL is not set. Name the model that the endpoint serves (for example "
            "intfloat/multilingual-e5-base): it becomes part of the identity of every vector."
        )
    return HttpEmbedder(
        settings.protocol,
        (for_queries and settings.query_url) or settings.url,
        identity=f"{settings.model}-{settings.dimensions}" if settings.dimensions else settings.model,
        model=settings.model,
        dimensions=settings.dimensions,
        api_key=settings.api_key.get_secret_value() if settings.api_key else None,
        request_items=settings.request_items,
        concurrency=settings.concurrency,
        attempt_timeout=settings.attempt_timeout_seconds,
        query_prefix="" if settings.prefix_by == "server" else None,
    )
