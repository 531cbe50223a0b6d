"""The embedder that the settings name, and the state of its endpoint that all processes share."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict

from embed_assets.embedding import Embedder, HttpEmbedder, LocalEmbedder
from embed_assets.embedding.batches import Limits
from embed_assets.embedding.faults import RESTS
from embed_assets.embedding.shared import Rest, Shared
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
WARMING_SECONDS = 900.0
TOO_LONG = (
    f"it has been starting for more than {WARMING_SECONDS / 60:.0f} minutes: look at the endpoint's own page or log, "
    "then drain again"
)


class Endpoint:
    """The shared state of one endpoint: whoever meets its trouble lets everybody rest."""

    def __init__(self, postgres: Postgres, settings: Settings) -> None:
        self._postgres = postgres
        self.key = endpoint_key(settings)
        self._model = settings.model or ""
        requests, tokens = settings.requests_per_minute, settings.tokens_per_minute
        self._per_request = 60 / requests if requests else 0.0
        self._per_token = 60 / tokens if tokens else 0.0

    def resting(self) -> Rest | None:
        """None when it may be asked now."""
        row = self._postgres.one("endpoint.resting", {"endpoint": self.key})
        return Rest(**row) if row else None

    def rest(self, trouble: EndpointTrouble, *, seconds: float | None = None) -> float:
        """Leave it alone: for `seconds`, or as long as it asked for, at most an hour, or as its class says.

        Returns the seconds. What was refused because it rests already makes the rest no longer.
        """
        if trouble.code == RESTS:
            return trouble.retry_after or 0.0
        if seconds is None:
            least = REST_SECONDS[trouble.error_class]
            starts = trouble.error_class is ErrorClass.WARMING  # who starts knows best how long that takes
            seconds = (trouble.retry_after or least) if starts else max(trouble.retry_after or 0, least)
        seconds = min(seconds, LONGEST_REST)
        self._postgres.execute(
            "endpoint.rest",
            {
                "endpoint": self.key,
                "state": STATES[trouble.error_class],
                "seconds": seconds,
                "reason": f"{trouble.code}: {trouble}",
                "warming": WARMING_SECONDS,
                "refused": REST_SECONDS[ErrorClass.REFUSED],
                "too_long": TOO_LONG,
            },
        )
        return seconds

    def trip(self, code: str) -> bool:
        """Whether texts that fail alike may be laid at the endpoint's door: once an hour for each kind of failure.

        When it still fails so after its rest, the texts are charged one by one, or the queue would never end.
        """
        return self._postgres.execute("endpoint.trip", {"endpoint": self.key, "code": code}) > 0

    def works(self, *, seconds: float) -> None:
        """It answered what it was asked `seconds` ago: nobody need wait any longer for trouble from before that."""
        self._postgres.execute("endpoint.works", {"endpoint": self.key, "seconds": seconds})

    def pace(self, tokens: int) -> float:
        """Seconds to wait before a request of so many tokens, in line with those of all other processes."""
        seconds = max(self._per_request, tokens * self._per_token)
        if not seconds:
            return 0.0
        row = self._postgres.one("endpoint.pace", {"endpoint": self.key, "seconds": seconds})
        return float(row["wait"]) if row else 0.0

    def known_limits(self) -> Limits | None:
        """What processes learned within the last day."""
        row = self._postgres.one("endpoint.known_limits", {"endpoint": self.key})
        return Limits(**row) if row else None

    def learn(self, limits: Limits) -> None:
        """For the next process."""
        self._postgres.execute("endpoint.learn", {"endpoint": self.key, **asdict(limits)})

    def agree(self, reported: str) -> str:
        """What it first said it serves under EMBED_MODEL; kept from then on, until an operator resets the endpoint."""
        row = self._postgres.one("endpoint.agree", {"endpoint": self.key, "model": self._model, "reported": reported})
        return str(row["reported"]) if row else reported

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


def make_embedder(settings: Settings, *, shared: Shared | None = None, for_queries: bool = False) -> Embedder:
    """The embedder of the settings, or the one for questions. Raises ConfigurationError when something is not set.

    Questions are few and cannot wait: they keep to no pace and to nobody's rest.
    """
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
        prefix_by_server=settings.prefix_by == "server",
        headers={name: value.get_secret_value() for name, value in settings.headers.items()},
        ca_bundle=str(settings.ca_bundle) if settings.ca_bundle else None,
        proxy=settings.proxy.get_secret_value() if settings.proxy else None,
        shared=shared,
    )
