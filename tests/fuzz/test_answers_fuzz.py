"""Answers as bad as they come, from an endpoint that means no good: FUZZ of them through whole drains.

Nothing wrong is written, no row is lost or stuck, nothing unexpected is raised, and memory stays bounded. What cannot
be told from a right answer (another number in a vector) is not among them.
"""

from __future__ import annotations

import gzip
import json
import os
import random
import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import orjson
import pytest

from embed_assets import pipeline
from embed_assets.embedding import HttpEmbedder, transport
from embed_assets.errors import EndpointTrouble
from embed_assets.fake_server import Behaviour, FakeServer, Received, vector_for
from embed_assets.fake_server.answers import as_json, as_openai, rows_for
from embed_assets.pipeline import Limits
from embed_assets.stop import Stop
from tests.unit.ports import Memory, memory_ports

ANSWERS = int(os.environ.get("FUZZ", "150"))
WIDTH = 4
HEADERS: list[dict[str, str]] = [
    {},
    {"x-compute-tokens": "9" * 30},
    {"x-compute-tokens": "-1"},
    {"retry-after": "-3"},
    {"retry-after": "soon"},
    {"content-type": "text/html"},
    {"content-encoding": "gzip"},
    {"content-encoding": "snappy"},
    {"content-length": "7"},
    {"location": "http://127.0.0.1:9/"},
]
Chance = random.Random


def junk(chance: Chance, depth: int = 0) -> Any:
    """Any JSON value."""
    kind = chance.randrange(10 if depth < 4 else 7)
    if kind >= 7:
        several = range(chance.randrange(6))
        if kind == 7:
            return {chance.choice(["data", "embeddings", "index", "embedding", "x"]): junk(chance, depth + 1)}
        return [junk(chance, depth + 1) for _ in several]
    return [None, True, "", "NaN", chance.randrange(-9, 9), 1e308, "ü\ud83d\udc69" * chance.randrange(9)][kind]


def spoilt(chance: Chance, received: Received) -> Any:
    """A right answer with one thing that is wrong in a way that shows."""
    count = len(received.texts)
    rows: list[Any] = [row.tolist() for row in rows_for(None, received.texts, WIDTH)]
    at = chance.randrange(count)
    wrong: list[Any] = [None, [], [0.0] * WIDTH, [None] * WIDTH, [1e39] * WIDTH, ["1"] * WIDTH, [[1.0]] * WIDTH]
    wrong += [[1.0] * (WIDTH + 1), [1.0] * (WIDTH - 1), {}, "AAAA", True, [True] * WIDTH, [10**30] * WIDTH]
    how = chance.randrange(4)
    if how == 0:
        rows[at] = chance.choice(wrong)
    elif how == 1:
        del rows[at]
    elif how == 2:
        rows.insert(at, rows[at])
    else:
        rows = [[1.0] * (WIDTH + 1) for _ in rows]
    if received.path != "/v1/embeddings":
        return rows
    whole = as_openai(None, rows, received.body, "stub/model")
    if how == 1 or chance.random() < 0.5:
        whole["data"][0]["index"] = chance.choice([True, None, -1, 99, "0", 0.0, [], {}, 10**30])
    return whole


def hostile(chance: Chance, received: Received) -> tuple[int, dict[str, str], Any]:
    """Status, headers and body."""
    status = 200 if chance.random() < 0.8 else chance.choice([204, 206, 301, 304, 400, 413, 418, 422, 429, 500, 503])
    good = as_json(rows_for(None, received.texts, WIDTH))
    makers: list[Callable[[], bytes]] = [
        lambda: chance.randbytes(chance.randrange(400)),
        lambda: good[: chance.randrange(len(good) - 1)],
        lambda: good + chance.randbytes(3),
        lambda: b"[" * chance.randrange(1, 100_000),
        lambda: b'{"data":' * 1000 + b"1" + b"}" * 1000,
        lambda: b"[[" + b"9" * chance.randrange(20, 5000) + b"]]",
        lambda: orjson.dumps(junk(chance)),
        *[lambda: _json(spoilt(chance, received))] * 8,
        lambda: gzip.compress(b"0" * 3_000_000),
        lambda: b"\xff\xfe" + good,
        lambda: b"data: [DONE]\n\n",
    ]
    return status, chance.choice(HEADERS), chance.choice(makers)()


def _json(value: Any) -> bytes:
    return json.dumps(value).encode()


@dataclass
class HostileServer(FakeServer):
    """Every other answer is hostile until so many were given; then it behaves."""

    most: int = 0
    chance: Chance = field(default_factory=lambda: Chance(0))
    given: int = 0

    def behaviour(self, received: Received) -> Behaviour:
        with self._lock:
            self.requests.clear()
            if self.given >= self.most or self.chance.random() < 0.4:
                return None
            self.given += 1
            return hostile(self.chance, received)


def drain_round(memory: Memory, embedder: HttpEmbedder, texts: dict[str, str]) -> None:
    """A drain of these rows, again after every trouble, until each is fresh or visibly dead."""
    ports = memory_ports(memory, embedder)  # type: ignore[arg-type]
    for source_id, text in texts.items():
        memory.source[source_id] = (text, True)
    for _ in range(60):
        memory.clock = memory.clock.replace(year=memory.clock.year + 1)
        try:
            pipeline.drain(ports, "run", limits=Limits(rows=8), stop=Stop(seconds=60))
        except EndpointTrouble:
            continue
        if all(not memory.stale(one) or memory.entries[one].status == "dead" for one in texts):
            return
    raise AssertionError("it does not come to an end")


@pytest.mark.ids("E15", "B-34")
@pytest.mark.parametrize("protocol", ["tei", "openai", "hf"])
def test_nothing_wrong_is_written_and_no_row_is_lost_or_stuck(protocol: str) -> None:
    """Rounds of new rows until every hostile answer was given; then the dead are asked for again and become fresh."""
    memory, rounds = Memory(), 0
    with HostileServer(dimensions=WIDTH, most=ANSWERS // 3, chance=Chance(ANSWERS)) as server:
        url = {"tei": server.url, "openai": server.openai_url, "hf": server.hf_url}[protocol]
        embedder = HttpEmbedder(
            protocol, url, identity="x", model="stub/model", dimensions=WIDTH, request_items=8, retry_base=0.0001
        )
        tracemalloc.start()
        while server.given < server.most:
            rounds += 1
            drain_round(memory, embedder, {f"r{rounds}n{number}": f"text {rounds}.{number}" for number in range(24)})
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        dead = [one for one, entry in memory.entries.items() if entry.status == "dead"]
        memory.feed += [(one, False) for one in dead]
        drain_round(memory, embedder, {one: memory.source[one][0] or "" for one in dead})
        embedder.close()
    assert sorted(memory.stamps) == sorted(memory.source)
    assert len(memory.stamps) == rounds * 24
    for source_id, stored in memory.chunks.items():
        [chunk] = stored
        np.testing.assert_allclose(chunk.vector, vector_for(memory.source[source_id][0] or "", WIDTH), atol=1e-6)
    assert peak < 100_000_000


def test_an_answer_without_end_is_not_read_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "LONGEST_ANSWER", 1_000_000)
    with FakeServer(always=(200, {"content-encoding": "gzip"}, gzip.compress(b"0" * 300_000_000))) as server:
        embedder = HttpEmbedder("tei", server.url, identity="x", retry_base=0.001)
        tracemalloc.start()
        with pytest.raises(EndpointTrouble, match="answer_too_long"):
            list(embedder.embed(["text"], stop=Stop()))
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        embedder.close()
    assert peak < 30_000_000
