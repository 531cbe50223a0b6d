"""The whole arrangement as users start it: embedded Postgres, the shipped dagster.yaml, UI, daemon, runs."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

from embed_assets.dev import dev_environment, launch_drain
from embed_assets.load import create_jobs_table
from embed_assets.settings import Settings
from tests.browser.ui import CHROMIUM, MISSING, opened
from tests.e2e.running import Dev, eventually, running

TERMINATE = """mutation ($run: String!) { terminateRun(runId: $run, terminatePolicy: SAFE_TERMINATE) { __typename } }"""


def group_of(leader: int) -> list[str]:
    """The processes that are left of the session that Dagster leads."""
    listing = subprocess.run(["ps", "-eo", "sid=,pid=,args="], capture_output=True, text=True, check=True).stdout
    return [line for line in listing.splitlines() if line.split(None, 1)[0] == str(leader)]


@pytest.fixture(scope="module")
def dev(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Dev]:
    with running(tmp_path_factory.mktemp("dev"), before=lambda dev: dev.insert(3, "a posting")) as started:
        yield started


@pytest.mark.skipif(not CHROMIUM, reason=MISSING)
def test_a_browser_shows_the_assets_in_order(dev: Dev) -> None:
    with opened(dev.port) as ui:
        names = ui.assets_from_left_to_right("jobs_embeddings")
    assert names[:4] == ["semantic_outbox", "claimed_waves", "chunk_embeddings", "semantic_chunks"]
    assert len(names) == 6


@pytest.mark.ids("A-01")
def test_a_row_changed_in_sql_is_embedded_by_a_run_that_the_sensor_started(dev: Dev) -> None:
    stamped = "SELECT count(*) FROM embed_assets.semantic_stamps AS s JOIN jobs AS j ON j.content_hash = s.revision"
    tables = "SELECT to_regclass('embed_assets.semantic_stamps') IS NOT NULL"
    eventually(lambda: dev.value(tables) and dev.value(stamped) == 3, 120, "the first drain")
    dev.db.execute("UPDATE jobs SET title = 'Another' WHERE id = 1")
    assert dev.value(stamped) == 2
    eventually(lambda: dev.value(stamped) == 3, 90, "the drain of the changed row")
    drains = "jobs_drain"
    eventually(lambda: set(dev.runs(drains).values()) == {"SUCCESS"}, 30, "the end of the runs")
    # Two drains may be in flight, so a change that was seen twice may have asked twice; then nothing is due.
    asked = len(dev.runs(drains))
    assert asked in (2, 3)
    time.sleep(12)
    assert len(dev.runs(drains)) == asked
    assert dev.askers(drains) == {"sensor"}


@pytest.mark.ids("A-29")
def test_terminate_ends_a_long_run_within_seconds_and_leaves_no_lease(dev: Dev) -> None:
    dev.insert(400, " word" * 1_500)
    run = eventually(dev.working_run, 90, "a run that embeds")
    dev.db.execute("UPDATE embed_assets.corpora SET paused_at = now()")
    started = time.monotonic()
    dev.ask(TERMINATE, run=run)
    eventually(lambda: dev.runs()[run] == "CANCELED", 20, "the end of the run")
    assert time.monotonic() - started < 15
    assert dev.open_waves == 0
    charged = "SELECT count(*) FROM embed_assets.semantic_outbox WHERE attempts + crashes + timeouts > 0"
    assert dev.value(charged) == 0


def test_sigterm_stops_everything_and_a_run_under_way_gives_its_leases_back(dev: Dev) -> None:
    dev.db.execute("UPDATE embed_assets.corpora SET paused_at = NULL")
    eventually(dev.working_run, 90, "a run that embeds")
    [leader] = subprocess.run(
        ["pgrep", "-P", str(dev.process.pid)], capture_output=True, text=True, check=True
    ).stdout.split()
    assert len(group_of(int(leader))) > 3
    started = time.monotonic()
    dev.process.send_signal(signal.SIGTERM)
    assert dev.process.wait(60) == 0, dev.log.read_text()
    assert time.monotonic() - started < 30
    assert group_of(int(leader)) == []
    assert dev.open_waves == 0


def test_the_environment_names_what_a_plain_dagster_dev_needs(tmp_path: Path, server_url: str) -> None:
    settings = Settings(DATABASE_URL=server_url, home=tmp_path)
    values = dev_environment(settings)
    assert set(values) == {"DATABASE_URL", "EMBED_HOME", "DAGSTER_HOME", "EMBED_DAGSTER_PG_URL"}
    assert values["EMBED_DAGSTER_PG_URL"].endswith("_dagster")
    assert "EMBED_DAGSTER_PG_URL" in (Path(values["DAGSTER_HOME"]) / "dagster.yaml").read_text()
    psycopg.connect(values["EMBED_DAGSTER_PG_URL"]).close()
    assert dev_environment(settings) == values


def test_a_drain_from_a_script_runs_until_nothing_is_due_and_tells_how_far_it_is(
    database_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with psycopg.connect(database_url, autocommit=True) as db:
        create_jobs_table(db)
        db.execute(
            "INSERT INTO jobs (title, description, is_tech) SELECT 'Engineer', 'posting ' || n, TRUE "
            "FROM generate_series(1, 9) AS n"
        )
        storage = tmp_path / "storage"
        (tmp_path / "dagster.yaml").write_text(f"storage: {{sqlite: {{base_dir: '{storage}'}}}}")
        monkeypatch.setenv("DAGSTER_HOME", str(tmp_path))
        monkeypatch.setenv("EMBED_DAGSTER_PG_URL", "postgresql://not.asked/for")
        settings = Settings(DATABASE_URL=database_url, home=tmp_path, batch_size=4, waves_per_run=1)
        told: list[tuple[int, int]] = []
        assert launch_drain(settings, "jobs", progress=lambda done, total: told.append((done, total)))
        assert told[-1] == (9, 9)
        assert db.execute("SELECT count(DISTINCT run_id) FROM embed_assets.claimed_waves").fetchone() == (3,)
        db.execute("UPDATE jobs SET title = 'Other'")
        db.execute("UPDATE embed_assets.corpora SET paused_at = now()")
        assert launch_drain(settings, "jobs")
        assert db.execute("SELECT count(*) FROM embed_assets.semantic_outbox").fetchone() == (9,)
