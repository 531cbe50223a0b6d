"""The fake server without its HTTP: what becomes of a request, by faults, limits, latency and rates.

What does not belong here: what is said (`answers`), which faults there are (`faults`), the wire (`server`).
"""

from __future__ import annotations

import math
import threading
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson

from embed_assets.fake_server import answers
from embed_assets.fake_server.answers import tokens_in
from embed_assets.fake_server.faults import Behaviour, Draw, Fault


@dataclass(frozen=True)
class Received:
    """One request as it arrived; `at` is by time.monotonic."""

    path: str
    texts: list[str]
    headers: dict[str, str]
    body: dict[str, Any]
    at: float = 0.0


@dataclass
class FakeEndpoint:
    """Limits and delays may be changed while it runs.

    A request meets what comes first: a wrong key, an entry of `script` (one a request), `always`, a behaviour of
    `poison` (by a marker in a text), one of `faults`, the server's limits and rates, a good answer. `speaks` says
    whose errors it gives: `tei-1.8`, `tei-1.9`, `openai`.
    """

    dimensions: int = 8
    script: Iterable[Behaviour] = ()
    always: Behaviour = None
    poison: Mapping[str, Behaviour] = field(default_factory=dict)
    faults: Sequence[Fault] = ()
    seed: int = 0
    speaks: str = "tei-1.9"
    says_info: bool = True
    model: str = "stub/model"
    api_key: str | None = None
    max_items: int | None = None
    max_bytes: int | None = None
    max_tokens: int | None = None  # of one text
    max_batch_tokens: int | None = None  # only said, as by TEI, which divides what is larger
    seconds_per_request: float = 0.0
    seconds_per_text: float = 0.0
    one_at_a_time: bool = False  # like a GPU
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    minute: float = 60.0  # seconds; shorter in a rehearsal
    warming_seconds: float = 0.0  # from the first request on, as an endpoint that was scaled to zero

    def __post_init__(self) -> None:
        self.requests: list[Received] = []
        self.in_flight = self.most_in_flight = 0
        self.met: Counter[object] = Counter()  # how often each of `faults` befell a request
        self.dropped = 0  # requests that hung until the client went away
        self.rests: list[tuple[float, float]] = []  # from when to when it asked to be left alone
        self.stopping = threading.Event()
        self._left = list(self.script)
        self._draw = Draw(self.faults, self.seed)
        self._lock, self._gpu = threading.Lock(), threading.Lock()
        self._began: float | None = None
        self._minute_ends = self._asked = self._tokens = 0.0

    @property
    def texts(self) -> list[str]:
        """Every text received, in the order of arrival."""
        return [text for request in self.requests for text in request.texts]

    @property
    def sizes(self) -> list[int]:
        return [len(request.texts) for request in self.requests]

    def then(self, *behaviours: Behaviour) -> None:
        """Append to the script."""
        self._left += behaviours

    def forget(self) -> None:
        self.requests.clear()

    def info(self) -> dict[str, Any]:
        """TEI's `/info`."""
        given = {
            "max_client_batch_size": self.max_items or answers.INFO["max_client_batch_size"],
            "max_batch_tokens": self.max_batch_tokens or answers.INFO["max_batch_tokens"],
            "max_input_length": self.max_tokens or answers.INFO["max_input_length"],
            "version": "1.8.3" if self.speaks == "tei-1.8" else "1.9.3",
            "model_id": self.model,
        }
        if self.speaks != "tei-1.8":
            given["served_model_name"] = self.model
        return answers.INFO | given

    def behaviour(self, received: Received) -> Behaviour:
        """What to do with this request; it is counted."""
        with self._lock:
            self.requests.append(received)
            if self.api_key and received.headers.get("authorization") != f"Bearer {self.api_key}":
                key = received.headers.get("authorization", "").removeprefix("Bearer ")
                return answers.unauthorized(self.speaks, received.path, key)
            scripted = self._left.pop(0) if self._left else self.always
            if scripted is not None:
                return scripted
            return self._poisoned(received) or self._drawn(received) or self._refusal(received)

    def _poisoned(self, received: Received) -> Behaviour:
        found = (b for marker, b in self.poison.items() if any(marker in text for text in received.texts))
        return next(found, None)

    def _drawn(self, received: Received) -> Behaviour:
        if (behaviour := self._draw(received.texts)) is not None:
            self.met[behaviour] += 1
        return behaviour

    def _refusal(self, received: Received) -> Behaviour:
        return self._over_limit(received) or self._warming(received) or self._over_rate(received)

    def _over_limit(self, received: Received) -> Behaviour:
        count, speaks, path = len(received.texts), self.speaks, received.path
        if self.max_bytes and len(orjson.dumps(received.body)) > self.max_bytes:
            text = "Failed to buffer the request body: length limit exceeded"
            return 413, {"content-type": "text/plain; charset=utf-8"}, text
        if self.max_items and count > self.max_items:
            return answers.invalid(speaks, path, f"batch size {count} > maximum allowed batch size {self.max_items}")
        longest = max(map(tokens_in, received.texts), default=0) if self.max_tokens else 0
        if self.max_tokens and longest > self.max_tokens:
            words = f"`inputs` must have less than {self.max_tokens} tokens. Given: {longest}"
            return answers.invalid(speaks, path, f"Input validation error: {words}")
        if not all(received.texts):
            return answers.error(speaks, path, "Empty", "`inputs` cannot be empty", 400)
        return None

    def _warming(self, received: Received) -> Behaviour:
        self._began = received.at if self._began is None else self._began
        return "loading" if received.at - self._began < self.warming_seconds else None

    def _over_rate(self, received: Received) -> Behaviour:
        """429 until the minute is over, counted from its first request, with Retry-After in whole seconds."""
        if not (self.requests_per_minute or self.tokens_per_minute):
            return None
        if received.at >= self._minute_ends:
            self._minute_ends, self._asked, self._tokens = received.at + self.minute, 0, 0
        self._asked += 1
        self._tokens += sum(map(tokens_in, received.texts))
        fits = self._asked <= (self.requests_per_minute or math.inf)
        if fits and self._tokens <= (self.tokens_per_minute or math.inf):
            return None
        seconds = max(1, math.ceil(self._minute_ends - received.at))
        self.rests.append((received.at, received.at + seconds))
        status, headers, body = answers.error(self.speaks, received.path, "Overloaded", "Rate limit reached", 429)
        return status, headers | {"retry-after": str(seconds)}, body

    def work(self, count: int) -> None:
        """Take the time that embedding so many texts takes."""
        seconds = self.seconds_per_request + count * self.seconds_per_text
        if not seconds:
            return
        if self.one_at_a_time:
            with self._gpu:
                time.sleep(seconds)
        else:
            self.stopping.wait(seconds)
