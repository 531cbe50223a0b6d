"""What people look at on the chunk asset: rows by state, latencies, a sample of the vectors, waves and failures.

Reads only. A part that takes too long is left out: a picture must not hold a drain up.
What does not belong here: drawing (`defs/pictures.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from psycopg import errors

from embed_assets.models import Status
from embed_assets.queries import query
from embed_assets.resources.assembly import Kind
from embed_assets.resources.operator import DeadLetters, Operator
from embed_assets.resources.postgres import Row

PATIENCE_MILLISECONDS = 500
LATENCIES = 5_000
VECTORS = 300
WAVES = 50


@dataclass(frozen=True)
class Portrait:
    """`points`: (n, 2) float, the sampled vectors laid flat; `groups`: the value by which each is coloured."""

    status: Status | None = None
    seconds: Sequence[float] = ()
    points: NDArray[np.float64] = field(default_factory=lambda: np.empty((0, 2)))
    groups: Sequence[str] = ()
    waves: Sequence[Mapping[str, int | float]] = ()
    failures: Sequence[DeadLetters] = ()


def portrait(kind: Kind, run_id: str) -> Portrait:
    """As the kind stands now, and what this run's waves did."""
    vectors = _rows(kind, "vectors", **_sample(kind))
    waves = _rows(kind, "waves", run_id=run_id, size=WAVES)
    return Portrait(
        status=_status(kind),
        seconds=[row["seconds"] for row in _rows(kind, "latencies", size=LATENCIES)],
        points=flat([row["embedding"] for row in vectors]),
        groups=[_group(row["fields"]) for row in vectors],
        waves=[{name: value or 0 for name, value in row.items()} for row in waves],
        failures=Operator(kind.postgres, kind.outbox.kind).dead_letters(),
    )


def flat(vectors: Sequence[Any]) -> NDArray[np.float64]:
    """(n, 2) in 0 … 1: the two directions in which they differ most."""
    if len(vectors) < 3:
        return np.empty((0, 2))
    given = np.stack([np.asarray(v.to_numpy() if hasattr(v, "to_numpy") else v, dtype=np.float64) for v in vectors])
    centred = given - given.mean(axis=0)
    _, _, directions = np.linalg.svd(centred, full_matrices=False)
    found: NDArray[np.float64] = centred @ directions[:2].T
    spread = found.max(axis=0) - found.min(axis=0)
    laid: NDArray[np.float64] = (found - found.min(axis=0)) / np.where(spread > 0, spread, 1)
    return laid


def _sample(kind: Kind) -> dict[str, Any]:
    row = kind.postgres.one("models.chunks_estimate", {"partition": kind.bound.partition_path(kind.model_id)})
    return {"percent": min(100.0, 300.0 * VECTORS / max(1, row["chunks"] if row else 1)), "size": VECTORS}


def _group(fields: Mapping[str, str | None]) -> str:
    """The last field of the prefix: that of jobs is the company."""
    return (list(fields.values()) or [None])[-1] or "–"


def _status(kind: Kind) -> Status | None:
    try:
        return kind.outbox.status(kind.identity, kind.model_id, milliseconds=PATIENCE_MILLISECONDS)
    except errors.QueryCanceled:
        return None


def _rows(kind: Kind, name: str, **values: Any) -> list[Row]:
    partition = kind.bound.partition(kind.model_id)
    statement = query(f"portrait.{name}", **kind.bound.fragments(kind.model_id, partition=partition))
    try:
        with kind.postgres.transaction() as cursor:
            cursor.execute(query("portrait.patience"), {"milliseconds": str(PATIENCE_MILLISECONDS)})
            return cursor.execute(statement, {"kind": kind.outbox.kind, **values}).fetchall()
    except errors.QueryCanceled:
        return []
