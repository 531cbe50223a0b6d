"""Two worker hosts on one database. How much faster they are than one: `make two-hosts`."""

from __future__ import annotations

from pathlib import Path

import psycopg
import pytest

from tests.e2e.hosts import drained, fill

ROWS = 160
FINISHED = "SELECT source_id, outcome FROM embed_assets.semantic_outbox_log"


@pytest.mark.ids("B-50")
def test_two_hosts_share_the_work_and_do_no_row_twice(database_url: str, tmp_path: Path) -> None:
    fill(database_url, ROWS)
    done = drained(database_url, tmp_path, 2, seconds_per_text=0.02)
    with psycopg.connect(database_url) as db:
        rows = [row[0] for row in db.execute("SELECT id::text FROM jobs")]
        assert len(rows) == ROWS
        assert sorted(db.execute(FINISHED)) == sorted((row, "indexed") for row in rows)
    assert all(done.texts), "a host stood by"
    sent = [text for texts in done.texts for text in texts]
    assert len(sent) == len(set(sent)) == ROWS
