"""Somebody holds a snapshot open for long, or thousands of retries wait: neither may make a claim read the heap.

Judged by the pages that Postgres says it touched, which are the same on every machine; times are the bench's
(`make held-snapshot`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
from fakes import HashEmbedder
from postgres.conftest import KindMaker
from postgres.support import Db, value
from psycopg import sql

from bench.held_snapshot import Db as Connection
from bench.held_snapshot import backlog, held_snapshot, not_due, work_off
from embed_assets.queries import query
from embed_assets.resources.assembly import Kind
from embed_assets.resources.outbox import EVER, MAX_CRASHES, RANKED

ROWS = 100  # of one wave
FINISHED = 3_000


@dataclass
class Touched:
    """Pages that one step of a claim read, and the entries that its ordered walk came by."""

    pages: int
    nodes: list[dict[str, Any]]


@pytest.fixture
def claimer(jobs_table: None, make_kind: KindMaker) -> Kind:
    return make_kind(batch_size=ROWS)


def touched(kind: Kind, db: Connection, name: str, **fragments: sql.Composable) -> Touched:
    """Run a step of the claim as the claim runs it, and take it back."""
    values = {"kind": "jobs", "model_id": kind.model_id, "run_id": "r", "limit": ROWS, "lease": 120}
    values |= {"failed_before": EVER, "max_crashes": MAX_CRASHES}
    statement = query(name, of_scope=sql.SQL(""), **fragments)
    text = b"EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) " + statement.as_bytes(db)
    with db.transaction(force_rollback=True):
        if "lease" in fragments:
            db.execute(query("claim.by_index"))
        row = db.execute(text, values | {"scope": None}).fetchone()
    assert row is not None
    plan = row[0][0]["Plan"]
    return Touched(plan["Shared Hit Blocks"] + plan["Shared Read Blocks"], list(_nodes(plan)))


def _nodes(node: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield node
    for child in node.get("Plans", []):
        yield from _nodes(child)


def claim(kind: Kind, db: Connection) -> Touched:
    return touched(kind, db, "claim.due", order=RANKED, lease=query("claim.lease"))


@pytest.mark.ids("P12")
@pytest.mark.parametrize("held", [False, True])
def test_finished_entries_cost_a_claim_a_page_for_four_of_them_at_most_while_a_snapshot_is_held(
    claimer: Kind, embedder: HashEmbedder, db: Db, database_url: str, held: bool
) -> None:
    backlog(claimer, db, FINISHED + 2 * ROWS)
    db.execute("ALTER TABLE embed_assets.semantic_outbox SET (autovacuum_enabled = off)")
    with held_snapshot(database_url) if held else nullcontext():
        before = claim(claimer, db).pages + touched(claimer, db, "claim.heal").pages
        work_off(claimer, db, FINISHED // ROWS, ROWS)
        if held:
            assert dead(db) <= 2 * FINISHED + ROWS  # the claim that was taken back
        after = claim(claimer, db).pages + touched(claimer, db, "claim.heal").pages
        print(f"held {held}: {before} pages before, {after} after {FINISHED} finished entries")
        assert (after - before) * 4 <= FINISHED
        assert touched(claimer, db, "claim.heal").pages < 20
    assert embedder.texts == []


def dead(db: Db) -> int:
    """Versions of entries that only the snapshot keeps: one when it was claimed, one when it was finished."""
    db.execute("CREATE EXTENSION IF NOT EXISTS pgstattuple")
    return int(value(db, "SELECT dead_tuple_count FROM pgstattuple('embed_assets.semantic_outbox')"))


@pytest.mark.ids("B-12", "P20")
@pytest.mark.parametrize("analysed", [True, False])
def test_twenty_thousand_retries_that_are_not_due_do_not_stand_before_the_pending(
    claimer: Kind, db: Db, analysed: bool
) -> None:
    backlog(claimer, db, 10 * ROWS)
    alone = claim(claimer, db).pages
    not_due(claimer, db, 20_000)
    if analysed:
        db.execute("ANALYZE embed_assets.semantic_outbox")
    behind = claim(claimer, db)
    walked = [node for node in behind.nodes if node.get("Index Name") == "semantic_outbox_claim"]
    assert [(node["Node Type"], node["Actual Rows"], node.get("Rows Removed by Filter", 0)) for node in walked] == [
        ("Index Scan", ROWS, 0)
    ]
    retries = [node for node in behind.nodes if node.get("Index Name") == "semantic_outbox_retry"]
    assert [(node["Actual Rows"], node.get("Rows Removed by Filter", 0)) for node in retries] == [(0, 0)]
    assert behind.pages < 1.5 * alone
