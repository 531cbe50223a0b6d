"""What must be true when everything has come to rest: the facts equal the source, and the queue is empty.

Read in one snapshot and compared in Python, with nothing of the product but the step from a row to its chunks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import psycopg
from pgvector.psycopg import register_vector
from psycopg import IsolationLevel
from psycopg.rows import dict_row

from embed_assets.corpora.jobs import jobs
from embed_assets.models import Chunk, SourceRow

VectorOf = Callable[[str, int], "np.ndarray[Any, Any]"]

SOURCE = """
SELECT id, content_hash, title, company, description,
    closed_at IS NULL AND duplicate_of IS NULL AND is_tech IS TRUE AS indexable
FROM jobs"""
CHUNKS = """
SELECT id, chunk_index, model_id, text_hash, body, embedding FROM embed_assets.job_semantic_chunks
ORDER BY id, model_id, chunk_index"""
STAMPS = "SELECT source_id::bigint AS id, model_id, revision, chunk_count FROM embed_assets.semantic_stamps"
QUEUE = """
SELECT source_id, status, crashes, failures, error_code FROM embed_assets.semantic_outbox"""
REST = """
SELECT (SELECT count(*) FROM embed_assets.source_changes) AS feed,
    (SELECT count(*) FROM embed_assets.claimed_waves WHERE closed_at IS NULL) AS open_waves,
    (SELECT count(*) FROM embed_assets.wave_chunks) AS plans,
    (SELECT count(*) FROM embed_assets.embedding_models) AS models"""


@dataclass
class Facts:
    """`wrong`: row by row, what is not as the source says. The rest: what is still to do."""

    rows: int = 0
    chunks: int = 0
    wrong: Counter[str] = field(default_factory=Counter)
    examples: list[str] = field(default_factory=list)
    queue: Counter[str] = field(default_factory=Counter)
    dead: list[dict[str, Any]] = field(default_factory=list)
    feed: int = 0
    open_waves: int = 0
    plans: int = 0
    models: int = 0

    @property
    def at_rest(self) -> bool:
        return not (self.wrong or self.queue or self.feed or self.open_waves or self.plans)

    def note(self, what: str, row: object) -> None:
        self.wrong[what] += 1
        if len(self.examples) < 10:
            self.examples.append(f"{what}: row {row}")


def facts(url: str, vector_of: VectorOf) -> Facts:
    """One look at everything, in one snapshot."""
    with psycopg.connect(url, row_factory=dict_row) as db:
        db.isolation_level = IsolationLevel.REPEATABLE_READ
        register_vector(db)
        found = [db.execute(statement).fetchall() for statement in (SOURCE, CHUNKS, STAMPS, QUEUE, REST)]
    source, chunks, stamps, queue, [rest] = found
    answer = Facts(rows=len(source), chunks=len(chunks), **rest)
    answer.queue = Counter(entry["status"] for entry in queue)
    answer.dead = [entry for entry in queue if entry["status"] == "dead"]
    chunks_of: dict[int, list[dict[str, Any]]] = {}
    for chunk in chunks:
        chunks_of.setdefault(chunk["id"], []).append(chunk)
    stamps_of: dict[int, list[dict[str, Any]]] = {}
    for stamp in stamps:
        stamps_of.setdefault(stamp["id"], []).append(stamp)
    for row in source:
        _judge(answer, row, chunks_of.pop(row["id"], []), stamps_of.pop(row["id"], []), vector_of)
    for job in chunks_of.keys() | stamps_of.keys():
        answer.note("left over of a deleted row", job)
    return answer


def _judge(
    answer: Facts,
    row: dict[str, Any],
    chunks: list[dict[str, Any]],
    stamps: list[dict[str, Any]],
    vector_of: VectorOf,
) -> None:
    if not row["indexable"]:
        if chunks or stamps:
            answer.note("left over of a row that left search", row["id"])
        return
    expected = planned(row)
    if not stamps:
        answer.note("lost", row["id"])
    elif [stamp["revision"] for stamp in stamps] != [row["content_hash"]]:
        answer.note("stale stamp", row["id"])
    elif stamps[0]["chunk_count"] != len(chunks):
        answer.note("stamp counts other chunks", row["id"])
    right = [_is(chunk, wanted, at) for at, (chunk, wanted) in enumerate(zip(chunks, expected, strict=False))]
    if len(chunks) != len(expected) or not all(right):
        answer.note("mixed" if any(right) else "stale", row["id"])
    elif not all(_same(chunk["embedding"], wanted, vector_of) for chunk, wanted in zip(chunks, expected, strict=True)):
        answer.note("a vector of another text", row["id"])


def planned(row: dict[str, Any]) -> tuple[Chunk, ...]:
    """The chunks of the row's current text."""
    fields = {"title": row["title"], "company": row["company"]}
    loaded = SourceRow(
        str(row["id"]), False, True, True, False, row["content_hash"], texts=[row["description"]], fields=fields
    )
    return jobs.plan(loaded).chunks


def _is(chunk: dict[str, Any], wanted: Chunk, at: int) -> bool:
    return (chunk["chunk_index"], chunk["body"], chunk["text_hash"]) == (at, wanted.body, wanted.text_hash)


def _same(stored: Any, wanted: Chunk, vector_of: VectorOf) -> bool:
    vector = np.asarray(stored.to_numpy() if hasattr(stored, "to_numpy") else stored, dtype=np.float32)
    return np.allclose(vector, vector_of(wanted.sent, len(vector)), rtol=0, atol=1e-6)
