"""What an operator does in Dagster's UI, in a real browser: `make browser`. A short smoke is in tests/e2e/test_dev.py.

The embedding stub, the project and the browser are real processes; what must come of a click is read from the
database. BROWSER names the folder for screenshots, and lets this run at all.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from embed_assets.fake_server import FakeServer
from tests.browser.ui import CHROMIUM, MISSING, Ui, opened
from tests.e2e.running import Dev, eventually, running

IMAGES = os.environ.get("BROWSER")
REQUESTS, REEMBEDDED = "jobs/reembed_requests", "jobs/reembedded"
ONLY_ALL = "ops:\n  jobs__reembed_requests:\n    config:\n      only: ALL\n      reason: the server was mended\n"
POISON = "quicksand"
GREEN = """{ assetNodeOrError(assetKey: {path: ["jobs", "reembedded"]}) { ... on AssetNode {
  assetPartitionStatuses { ... on DefaultPartitionStatuses { materializedPartitions } } } } }"""

# Each row that belongs in search has vectors that were written after its bucket was asked for.
REALLY_DONE = """
SELECT r.bucket FROM embed_assets.reembed_requests AS r
JOIN jobs AS j ON embed_assets.bucket_of(j.id::text) = r.bucket
LEFT JOIN embed_assets.semantic_stamps AS s ON s.source_id = j.id::text
GROUP BY r.bucket HAVING bool_and(s.embedded_at IS NOT NULL AND s.embedded_at > r.asked_at)
"""
FULLEST = """
SELECT embed_assets.bucket_of(id::text) AS bucket FROM jobs GROUP BY bucket ORDER BY count(*) DESC, bucket LIMIT 3
"""

pytestmark = [
    pytest.mark.skipif(not IMAGES, reason="make browser"),
    pytest.mark.skipif(not CHROMIUM, reason=MISSING),
    pytest.mark.timeout(900),
]


@pytest.fixture(scope="module")
def stub() -> Iterator[FakeServer]:
    with FakeServer(dimensions=16, poison={POISON: 400}) as server:
        yield server


@pytest.fixture(scope="module")
def dev(stub: FakeServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Dev]:
    endpoint = {"EMBED_PROTOCOL": "tei", "EMBED_URL": stub.url, "EMBED_MODEL": stub.model, "EMBED_DIMENSIONS": "16"}
    waves = {"EMBED_BATCH_SIZE": "8", "EMBED_REQUEST_ITEMS": "2"}
    home = tmp_path_factory.mktemp("browser")
    with running(home, before=lambda dev: dev.insert(64, "a posting"), **endpoint, **waves) as started:
        yield started


@pytest.fixture(scope="module")
def ui(dev: Dev) -> Iterator[Ui]:
    with opened(dev.port, Path(IMAGES or ".").resolve()) as page:
        yield page


def buckets(dev: Dev, statement: str) -> list[str]:
    return [f"b{row[0]:02d}" for row in dev.db.execute(statement.encode())]


def green(dev: Dev) -> set[str]:
    """The buckets that Dagster shows as materialised."""
    answer: Any = dev.ask(GREEN)
    return set(answer["assetNodeOrError"]["assetPartitionStatuses"]["materializedPartitions"])


def dead(dev: Dev) -> int:
    return int(dev.value("SELECT count(*) FROM embed_assets.semantic_outbox WHERE status = 'dead'"))


def test_assets_stand_in_order_and_a_drain_is_materialised_and_opened(ui: Ui, dev: Dev) -> None:
    stamps = "SELECT to_regclass('embed_assets.semantic_stamps') IS NOT NULL"
    eventually(lambda: dev.value(stamps), 120, "the first look")
    eventually(lambda: dev.value("SELECT count(*) FROM embed_assets.semantic_stamps") == 64, 180, "the first drain")
    names = ui.assets_from_left_to_right("jobs_embeddings")
    assert names[:4] == ["semantic_outbox", "claimed_waves", "chunk_embeddings", "semantic_chunks"]
    run = ui.materialize("jobs_drain")
    ui.expect_status("Success", 120)
    assert dev.runs()[run] == "SUCCESS"
    ui.go(f"/runs/{dev.value('SELECT run_id FROM embed_assets.claimed_waves ORDER BY wave_id LIMIT 1')}")
    ui.expect_status("Success")
    ui.assets_from_left_to_right("jobs_embeddings")
    ui.picture("assets")


@pytest.mark.ids("Q18")
def test_a_bucket_is_green_after_its_last_commit_and_a_failed_one_never(ui: Ui, dev: Dev, stub: FakeServer) -> None:
    [one, other, failing] = buckets(dev, FULLEST)
    chosen = f"embed_assets.bucket_of(id::text) = {int(failing[1:])}"
    dev.db.execute("UPDATE embed_assets.corpora SET paused_at = now()")
    dev.db.execute(f"UPDATE jobs SET title = '{POISON}' WHERE id = (SELECT min(id) FROM jobs WHERE {chosen})".encode())
    stub.seconds_per_text = 2.0
    ui.backfill(REQUESTS, [one, other, failing], ONLY_ALL)
    asked = "SELECT count(*) FROM embed_assets.reembed_requests WHERE complete_at IS NOT NULL"
    eventually(lambda: dev.value(asked) == 3, 120, "the requests")
    ui.expect_partitions(REEMBEDDED, "Missing", 64)
    dev.db.execute("UPDATE embed_assets.corpora SET paused_at = NULL")

    def two_are_green() -> bool:
        shown = green(dev)
        assert shown <= set(buckets(dev, REALLY_DONE)), "green before its last commit"
        return shown == {one, other} and dead(dev) == 1

    eventually(two_are_green, 300, "two green buckets")
    assert failing not in buckets(dev, REALLY_DONE)
    ui.page.wait_for_timeout(40_000)  # another look of the sensor that reports
    ui.expect_partitions(REEMBEDDED, "Materialized", 2)
    ui.page.get_by_text("Missing (62)").click()
    ui.picture("buckets")
    assert green(dev) == {one, other}


@pytest.mark.ids("Q30")
def test_a_dead_letter_is_revived_from_the_launchpad_and_its_bucket_turns_green(
    ui: Ui, dev: Dev, stub: FakeServer
) -> None:
    assert dead(dev) == 1
    stub.poison = {}
    stub.seconds_per_text = 0.0
    ui.launch("retry_dead_letters")
    ui.expect_status("Success", 120)
    assert dead(dev) == 1, "dry, as it stands in the Launchpad"
    ui.launch("retry_dead_letters", dry_run="false")
    ui.expect_status("Success", 120)
    assert dead(dev) == 0
    eventually(lambda: len(green(dev)) == 3, 180, "the third green bucket")
    assert green(dev) == set(buckets(dev, REALLY_DONE))


def test_a_long_run_that_is_terminated_leaves_no_lease(ui: Ui, dev: Dev, stub: FakeServer) -> None:
    stub.seconds_per_text = 3.0
    dev.insert(60, "a long run")
    run = eventually(dev.working_run, 120, "a run that embeds")
    dev.db.execute("UPDATE embed_assets.corpora SET paused_at = now()")
    ui.terminate(run)
    eventually(lambda: dev.runs()[run] == "CANCELED", 60, "the end of the run")
    assert dev.open_waves == 0
    assert dev.value("SELECT count(*) FROM embed_assets.semantic_outbox WHERE status = 'leased'") == 0
    assert dev.value("SELECT count(*) FROM embed_assets.semantic_outbox WHERE attempts + crashes > 0") == 0
    ui.go(f"/runs/{run}")
    ui.expect_status("Canceled")
