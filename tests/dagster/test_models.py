"""The models of a kind in Dagster: what asks for an index and a switch, what does them, and who drops what is old."""

from __future__ import annotations

import time
from typing import Any

import pytest
from dagster import DagsterRunStatus, RunRequest, SkipReason, build_sensor_context

from tests.dagster.project import QUIET, Project
from tests.dagster.test_maintenance import care
from tests.fakes import HashEmbedder

ACTIVE = (
    "SELECT m.dimensions FROM embed_assets.corpora c JOIN embed_assets.embedding_models m ON m.id = active_model_id"
)
INDEXES = "SELECT count(*) FROM pg_indexes WHERE indexname LIKE '%_hnsw'"


def look(project: Project, **settings: Any) -> RunRequest | SkipReason:
    defs = project.definitions(**settings)
    result = defs.resolve_sensor_def("posts_models")(build_sensor_context(instance=project.instance, definitions=defs))
    assert isinstance(result, (RunRequest, SkipReason))
    return result


def asks(project: Project, **settings: Any) -> bool:
    return isinstance(look(project, **settings), RunRequest)


def advance(project: Project, **settings: Any) -> None:
    job = project.definitions(**settings).resolve_job_def("posts_models")
    assert job.execute_in_process(instance=project.instance, run_config=QUIET).success


def test_a_load_is_indexed_once_and_nothing_is_asked_for_before_or_after(project: Project) -> None:
    assert not asks(project)
    project.put("one", "two")
    project.drain()
    assert project.value(INDEXES) == 0
    assert asks(project)
    advance(project)
    assert project.value(INDEXES) == 1
    project.put("three")
    project.drain()
    assert not asks(project)


def test_another_model_is_drained_beside_and_switched_to_when_it_is_complete(project: Project) -> None:
    project.put("one", "two")
    project.drain()
    advance(project)
    project.embedder = HashEmbedder(12, identity="wide")
    assert not asks(project)
    project.drain(batch_size=1, waves_per_run=1)
    assert asks(project)
    advance(project)
    assert project.value(ACTIVE) == 8
    assert not asks(project), "nothing of it was written since it was judged"
    project.drain()
    project.db.execute("UPDATE embed_assets.corpus_models SET judged_at = judged_at - interval '1 minute'")
    assert asks(project)
    advance(project)
    assert (project.value(ACTIVE), project.value(INDEXES)) == (12, 2)
    assert not asks(project)


def test_one_run_at_a_time_and_an_error_becomes_a_reason(project: Project) -> None:
    project.put("one")
    project.drain()
    job = project.definitions().resolve_job_def("posts_models")
    run = project.instance.create_run_for_job(job, status=DagsterRunStatus.STARTED)
    result = look(project)
    assert isinstance(result, SkipReason)
    assert "in flight" in (result.skip_message or "")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("embed_assets.defs.in_flight.time.time", lambda: time.monotonic() + 4e9)
        assert asks(project), "a run that died long ago holds nobody up"
    project.instance.report_run_canceled(run)
    assert asks(project)
    project.db.execute("ALTER TABLE embed_assets.corpus_models RENAME COLUMN judged_at TO elsewhere")
    result = look(project)
    assert isinstance(result, SkipReason)
    assert "could not be looked at" in (result.skip_message or "")


def test_the_nightly_care_drops_what_was_retired_long_ago(project: Project) -> None:
    project.put("one")
    project.drain()
    advance(project)
    project.embedder = HashEmbedder(12, identity="wide")
    project.drain()
    advance(project)
    partitions = "SELECT count(*) FROM pg_inherits WHERE inhparent = 'embed_assets.posts_semantic_chunks'::regclass"
    care(project)
    assert project.value(partitions) == 2
    project.db.execute("UPDATE embed_assets.corpus_models SET retired_at = retired_at - interval '8 days'")
    care(project)
    assert (project.value(partitions), project.value(ACTIVE)) == (1, 12)
