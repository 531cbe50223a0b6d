"""Similar items in Dagster: the asset, its job, and the sensor that asks for it when a list is stale."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from dagster import AssetKey, DagsterRunStatus, Definitions, RunRequest, SkipReason, build_sensor_context

from embed_assets.corpus import Similar
from embed_assets.defs.build import build_definitions
from embed_assets.resources import similar_store
from tests.dagster.project import POSTS, QUIET, Project, numbers, stages

LISTED = replace(POSTS, similar=Similar(k=3))


class Listed(Project):
    """The kind `posts` with similar items."""

    def definitions(self, **more: Any) -> Definitions:
        return build_definitions([LISTED], settings=self.settings(**more), embedder=self.embedder)

    def refresh(self) -> Any:
        job = self.definitions().resolve_job_def("posts_similar")
        return job.execute_in_process(instance=self.instance, run_config=QUIET)

    def look(self) -> RunRequest | SkipReason:
        defs = self.definitions()
        context = build_sensor_context(instance=self.instance, definitions=defs)
        result = defs.resolve_sensor_def("posts_similar")(context)
        assert isinstance(result, (RunRequest, SkipReason))
        return result

    def says(self) -> str:
        result = self.look()
        assert isinstance(result, SkipReason)
        return result.skip_message or ""


@pytest.fixture
def listed(project: Project) -> Listed:
    return Listed(project.db, project.url, project.instance)


def test_a_drain_is_followed_by_one_run_that_computes_and_then_by_none(listed: Listed) -> None:
    listed.put("one", "two", "three")
    drained = listed.drain()
    assert "similar" not in stages(drained)
    assert isinstance(listed.look(), RunRequest)
    result = listed.refresh()
    assert stages(result) == ["similar"]
    found = numbers(result, "similar")
    assert (found["rows_invalidated"], found["lists_computed"], found["rows_waiting"]) == (3, 3, 0)
    assert listed.value("SELECT count(*) FROM embed_assets.similar_to('posts', '1')") == 2
    assert "nothing is stale; rows invalidated 0, lists stale 0" in listed.says()
    assert stages(listed.refresh()) == []


def test_the_asset_hangs_on_the_invalidations_and_a_kind_without_lists_has_none(listed: Listed, project: Project):
    graph = listed.definitions().resolve_asset_graph()
    assert graph.get(AssetKey(["posts", "similar"])).parent_keys == {AssetKey(["posts", "similar_invalidations"])}
    assert AssetKey(["posts", "similar"]) not in project.definitions().resolve_asset_graph().get_all_asset_keys()


def test_one_run_at_a_time_none_while_paused_or_before_the_index_and_an_error_is_a_reason(
    listed: Listed, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed.put("one", "two")
    listed.drain()
    job = listed.definitions().resolve_job_def("posts_similar")
    run = listed.instance.create_run_for_job(job, status=DagsterRunStatus.STARTED)
    assert "in flight" in listed.says()
    listed.instance.report_run_canceled(run)
    assert isinstance(listed.look(), RunRequest)
    listed.db.execute("UPDATE embed_assets.corpora SET paused_at = now()")
    assert "paused" in listed.says()
    listed.db.execute("UPDATE embed_assets.corpora SET paused_at = NULL")
    monkeypatch.setattr(similar_store, "EXACT_CHUNKS", -1)
    assert "is not built yet" in listed.says()
    listed.db.execute("ALTER TABLE embed_assets.similar_stale RENAME TO elsewhere")
    assert "could not be looked at" in listed.says()
