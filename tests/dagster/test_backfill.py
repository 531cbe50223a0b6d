"""Backfills in Dagster: launched by partition, reported when done, named by a check while not, estimated, cancelled."""

from __future__ import annotations

from typing import Any

from dagster import (
    AssetCheckEvaluation,
    AssetCheckKey,
    AssetKey,
    DagsterInstance,
    SensorResult,
    SkipReason,
    build_sensor_context,
)

from embed_assets.defs.naming import key
from embed_assets.errors import InputRejected
from tests.dagster.project import QUIET, Project

BUCKET = "'b' || to_char(embed_assets.bucket_of({}), 'FM00')"


def launch(project: Project, first: str, last: str, **config: Any) -> Any:
    """One run for a range of buckets, as the UI's dialog launches it."""
    job = project.definitions().resolve_implicit_global_asset_job_def()
    return job.execute_in_process(
        instance=project.instance,
        asset_selection=[key("posts", "reembed_requests")],
        tags={"dagster/asset_partition_range_start": first, "dagster/asset_partition_range_end": last},
        run_config={**QUIET, "ops": {"posts__reembed_requests": {"config": config}}},
    )


class Reporter:
    """The sensor; its ticks share a cursor, and what they report is stored as the daemon would."""

    def __init__(self, project: Project) -> None:
        self.project, self.cursor = project, None
        self.defs = project.definitions()

    def tick(self) -> list[str]:
        sensor = self.defs.resolve_sensor_def("posts_reembedded")
        context = build_sensor_context(instance=self.project.instance, cursor=self.cursor, definitions=self.defs)
        result = sensor(context)
        if isinstance(result, SkipReason):
            return []
        assert isinstance(result, SensorResult)
        self.cursor = result.cursor
        for event in result.asset_events:
            self.project.instance.report_runless_asset_event(event)
        return sorted(event.partition for event in result.asset_events)


def green(instance: DagsterInstance) -> set[str]:
    return set(instance.get_materialized_partitions(AssetKey(["posts", "reembedded"])))


def check(project: Project) -> AssetCheckEvaluation:
    """The check, run alone."""
    checks = {AssetCheckKey(key("posts", "reembedded"), "buckets_done")}
    job = project.definitions().resolve_implicit_global_asset_job_def()
    alone = job.get_subset(asset_selection=set(), asset_check_selection=checks)
    run = alone.execute_in_process(instance=project.instance, run_config=QUIET)
    return run.get_asset_check_evaluations()[0]


def test_a_bucket_turns_green_with_its_last_commit_and_not_before(project: Project) -> None:
    project.put(*(f"text {at}" for at in range(200)))
    project.drain(batch_size=500)
    reporter = Reporter(project)
    assert reporter.tick() == []
    run = launch(project, "b00", "b02", only="ALL", reason="trial")
    assert run.success
    (done,) = {
        m.metadata["rows_requested"].value for m in run.asset_materializations_for_node("posts__reembed_requests")
    }
    buckets = ["b00", "b01", "b02"]
    assert 0 < done < 30
    assert reporter.tick() == []
    assert check(project).metadata["buckets_outstanding"].value == "b00 b01 b02"
    sent = len(project.embedder.texts)
    project.drain(batch_size=1, waves_per_run=1)
    assert green(project.instance) == set()
    assert set(reporter.tick()) < set(buckets)
    project.drain(batch_size=500)
    reporter.tick()
    assert green(project.instance) == set(buckets)
    assert len(project.embedder.texts) == sent + done
    assert reporter.tick() == []
    assert check(project).passed


def test_a_bucket_with_a_row_that_failed_for_good_never_turns_green(project: Project) -> None:
    project.put("poison")
    project.drain()
    project.embedder.reject = lambda text: InputRejected("no")
    bucket = project.value(f"SELECT {BUCKET.format(chr(39) + '1' + chr(39))}")
    launch(project, bucket, bucket, only="ALL")
    project.drain()
    reporter = Reporter(project)
    assert reporter.tick() == []
    found = check(project)
    assert (found.passed, found.metadata["buckets_failed"].value) == (False, bucket)
    assert "retry or dismiss" in found.description
    project.embedder.reject = lambda text: None
    project.db.execute("UPDATE posts SET body = 'mended'")
    project.drain()
    assert reporter.tick() == [bucket]


def test_cancelling_says_first_what_it_would_take_and_a_cancelled_bucket_is_never_green(project: Project) -> None:
    project.put(*(f"text {at}" for at in range(30)))
    project.drain(batch_size=500)
    launch(project, "b00", "b63", only="ALL")
    job = project.definitions().resolve_job_def("cancel_backfill")
    feed = "SELECT count(*) FROM embed_assets.source_changes"

    def cancel(**config: Any) -> None:
        config = {"ops": {"do_cancel_backfill": {"config": {"kind": "posts", **config}}}}
        assert job.execute_in_process(instance=project.instance, run_config={**QUIET, **config}).success

    cancel()
    assert project.value(feed) == 30
    cancel(dry_run=False)
    assert project.value(feed) == 0
    project.drain()
    filled = {row[0] for row in project.db.execute(f"SELECT DISTINCT {BUCKET.format('id::text')} FROM posts")}
    assert not filled & set(Reporter(project).tick())
    assert check(project).passed


def test_an_estimate_says_texts_tokens_and_disk(project: Project) -> None:
    project.put("some text", "more text")
    job = project.definitions().resolve_job_def("estimate")
    config = {"ops": {"do_estimate": {"config": {}}}}
    run = job.execute_in_process(instance=project.instance, run_config={**QUIET, **config})
    said = str([event.event_specific_data for event in run.all_node_events])
    assert run.success
    assert all(name in said for name in ("rows", "texts", "tokens", "megabytes"))
    wrong = {"ops": {"do_estimate": {"config": {"kind": "nobody"}}}}
    failed = job.execute_in_process(instance=project.instance, run_config={**QUIET, **wrong}, raise_on_error=False)
    assert "Unknown kind 'nobody'" in str(failed.all_events)
