"""The five assets of a drain, in order and alone, on a real Postgres."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
from dagster import AssetKey, Definitions

from embed_assets.errors import AnswerContract, EndpointTrouble, ErrorClass, InputRejected
from tests.dagster.project import CHAIN, Project, failure, numbers, stages


def test_a_project_shows_five_tables_a_job_a_sensor_and_a_schedule_for_a_kind(project: Project) -> None:
    defs = project.definitions()
    Definitions.validate_loadable(defs)
    # A code server refuses an op of a job's name, which validate_loadable lets pass.
    defs.get_repository_def().get_all_jobs()
    graph = defs.resolve_asset_graph()
    keys = [AssetKey(["posts", stage]) for stage in CHAIN]
    beside = {AssetKey(["posts", name]) for name in ("reembed_requests", "reembedded")}
    assert set(graph.get_all_asset_keys()) == {*keys, *beside}
    for before, after in pairwise(keys):
        assert graph.get(after).parent_keys == {before}
    assert all(graph.get(key).description and graph.get(key).group_name for key in keys)
    of_kind = ["posts_outbox", "posts_models", "posts_reembedded", "posts_alerts"]
    assert [sensor.name for sensor in defs.sensors or []] == [
        *of_kind,
        "release_failure_runs",
        "release_canceled_runs",
    ]


def test_no_secret_stands_in_what_the_ui_shows_of_the_resources(project: Project) -> None:
    repository = project.definitions(api_key="hunter2hunter2").get_repository_def()
    shown = str(
        {
            name: r.config_schema.default_value
            for name, r in repository.get_top_level_resources().items()
            if r.config_schema.default_provided
        }
    )
    assert "hunter2" not in shown
    assert project.url not in shown


@pytest.mark.ids("A-01")
def test_a_drain_materialises_the_five_tables_in_order(project: Project) -> None:
    project.put("one", "two", "three")
    result = project.drain()
    assert result.success
    assert stages(result) == CHAIN
    assert project.fresh == 3
    assert project.open_waves == 0
    assert numbers(result, "semantic_outbox")["entries_created"] == 3
    assert numbers(result, "claimed_waves") == {"waves": 1, "rows_claimed": 3}
    assert numbers(result, "chunk_embeddings")["texts_embedded"] == 3
    assert numbers(result, "semantic_chunks")["rows_indexed"] == 3
    assert numbers(result, "similar_invalidations") == {"rows_invalidated": 3, "rows_waiting": 3}


@pytest.mark.ids("Q17", "A-01")
def test_an_empty_claim_skips_the_rest_and_stays_green(project: Project) -> None:
    project.put("one")
    project.drain()
    sent = len(project.embedder.texts)
    result = project.drain()
    assert result.success
    assert stages(result) == ["semantic_outbox"]
    assert len([event for event in result.all_events if event.event_type_value == "STEP_SKIPPED"]) == 3
    assert len(project.embedder.texts) == sent


@pytest.mark.ids("D16")
def test_no_asset_hands_data_to_an_io_manager(project: Project) -> None:
    project.put("one")
    result = project.drain()
    assert not [event for event in result.all_events if event.event_type_value in ("HANDLED_OUTPUT", "LOADED_INPUT")]
    assert not [path for path in Path(project.instance.storage_directory()).rglob("*") if "posts" in str(path)]


def test_the_outbox_alone_enqueues_and_the_claim_alone_leaves_no_lease_behind(project: Project) -> None:
    project.put("one", "two")
    assert stages(project.drain("semantic_outbox")) == ["semantic_outbox"]
    assert project.entries("pending") == 2
    result = project.drain("claimed_waves")
    assert result.success
    assert stages(result) == []
    assert project.open_waves == 0
    assert project.drain("claimed_waves", "chunk_embeddings").success
    assert project.open_waves == 0
    assert project.embedder.texts == []


@pytest.mark.parametrize("stage", ["chunk_embeddings", "semantic_chunks"])
def test_a_stage_alone_has_no_waves_and_takes_nobody_elses(project: Project, stage: str) -> None:
    project.put("one")
    project.drain("semantic_outbox")
    result = project.drain(stage)
    assert result.success
    assert stages(result) == []
    assert project.entries("pending") == 1


def test_the_invalidations_alone_report(project: Project) -> None:
    project.put("one")
    project.drain()
    assert numbers(project.drain("similar_invalidations"), "similar_invalidations") == {
        "rows_invalidated": 0,
        "rows_waiting": 1,
    }


def test_a_run_takes_one_wave_while_the_rate_is_unknown_and_more_once_it_is(project: Project) -> None:
    project.put(*(f"text {number}" for number in range(24)))
    assert numbers(project.drain(waves_per_run=3), "claimed_waves") == {"waves": 1, "rows_claimed": 4}
    assert numbers(project.drain(waves_per_run=3), "claimed_waves") == {"waves": 3, "rows_claimed": 12}
    assert numbers(project.drain(waves_per_run=3, run_seconds=1e-6), "claimed_waves")["waves"] == 1
    assert project.fresh == 20


def test_a_tagged_run_scans_though_no_scan_is_due(project: Project) -> None:
    project.put("one")
    project.drain()
    project.db.execute("UPDATE embed_assets.corpus_scans SET seconds = 1000")
    project.put("two")
    unasked = project.drain("semantic_outbox", scan=False)
    assert numbers(unasked, "semantic_outbox")["entries_created"] == 0
    result = project.drain("semantic_outbox")
    assert numbers(result, "semantic_outbox")["entries_created"] == 1


def test_a_row_that_cannot_succeed_is_counted_and_the_run_stays_green(project: Project) -> None:
    project.put("good", "bad", "ugly")
    refusals = {"bad": InputRejected("never"), "ugly": AnswerContract("no numbers")}
    project.embedder.reject = lambda text: refusals.get(text)
    result = project.drain()
    assert result.success
    staged = numbers(result, "chunk_embeddings")
    assert (staged["rows_failed"], staged["rows_dead"]) == (1, 1)
    assert numbers(result, "semantic_chunks")["rows_indexed"] == 1


def trouble_at(project: Project, text: str, error_class: ErrorClass) -> None:
    def before(texts: object) -> None:
        if text in texts:  # type: ignore[operator]
            raise EndpointTrouble("it said 503", error_class=error_class, retry_after=40)

    project.embedder.before = before


def test_transient_trouble_of_the_endpoint_is_green_charges_nobody_and_rests_it(project: Project) -> None:
    project.put("one", "two")
    trouble_at(project, "one", ErrorClass.UNAVAILABLE)
    result = project.drain()
    assert result.success
    assert stages(result) == ["semantic_outbox", "claimed_waves"]
    assert (project.open_waves, project.charged, project.entries("pending")) == (0, 0, 2)
    project.embedder.before = lambda texts: None
    assert stages(project.drain()) == ["semantic_outbox", "claimed_waves"]
    assert project.embedder.requests == 1
    assert project.entries("pending") == 2


def test_what_was_staged_before_the_trouble_is_written(project: Project) -> None:
    project.put("first")
    project.drain()
    project.put(*"abcdefgh")
    trouble_at(project, "e", ErrorClass.RATE_LIMITED)
    result = project.drain()
    assert result.success
    assert numbers(result, "chunk_embeddings")["waves_released"] == 1
    assert numbers(result, "semantic_chunks")["rows_indexed"] == 4
    assert (project.open_waves, project.charged, project.entries("pending")) == (0, 0, 4)


def test_a_refusing_endpoint_is_red_with_a_message_for_the_operator(project: Project) -> None:
    project.put("one")
    trouble_at(project, "one", ErrorClass.REFUSED)
    result = project.drain()
    assert not result.success
    assert "EMBED_API_KEY" in failure(result)
    assert (project.open_waves, project.charged) == (0, 0)


def test_a_defect_is_red_and_its_wave_alone_lapses(project: Project) -> None:
    project.put("first")
    project.drain()
    project.put(*"abcdefgh")

    def before(_: object) -> None:
        raise ZeroDivisionError

    project.embedder.before = before
    result = project.drain()
    assert not result.success
    assert project.open_waves == 1
    assert (project.entries("leased"), project.entries("pending")) == (4, 4)
    project.db.execute("UPDATE embed_assets.claimed_waves SET lease_until = now() WHERE closed_at IS NULL")
    project.embedder.before = lambda texts: None
    project.drain()
    assert project.fresh == 9


def test_a_declaration_at_fault_is_red_without_a_stack(project: Project) -> None:
    project.db.execute("DROP TABLE posts")
    result = project.drain()
    assert "'posts' does not exist" in failure(result)
