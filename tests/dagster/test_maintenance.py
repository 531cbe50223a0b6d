"""The nightly care of all kinds, and dead letters that come back without it."""

from __future__ import annotations

from embed_assets.errors import AnswerContract
from tests.dagster.project import QUIET, Project
from tests.dagster.test_sensor import Ticks, ticks

__all__ = ["ticks"]


def care(project: Project) -> None:
    job = project.definitions().resolve_job_def("maintenance")
    assert job.execute_in_process(instance=project.instance, run_config=QUIET).success


def kill_one(project: Project) -> None:
    """A transient dead letter: one attempt that failed."""
    project.put("bad")
    project.embedder.reject = lambda text: AnswerContract("not a number")
    project.drain(max_attempts=1)
    project.embedder.reject = lambda text: None
    assert project.entries("dead") == 1


def reconcile_due(project: Project) -> None:
    project.db.execute("UPDATE embed_assets.corpus_scans SET last_reconcile_at = NULL")


def test_care_finds_pruned_chunks_and_revives_and_forgets(project: Project):
    project.put("good")
    project.drain()
    project.db.execute("DELETE FROM embed_assets.posts_semantic_chunks")
    kill_one(project)
    project.db.execute("UPDATE embed_assets.semantic_outbox_log SET finished_at = finished_at - interval '15 days'")
    reconcile_due(project)
    care(project)
    assert (project.entries("pending"), project.entries("dead")) == (2, 0)
    assert project.value("SELECT count(*) FROM embed_assets.semantic_outbox_log") == 0


def test_a_dead_letter_whose_park_is_over_asks_for_a_run_once_a_reconcile_is_due(project: Project, ticks: Ticks):
    kill_one(project)
    ticks.probe_again()
    assert "revivable 0" in ticks.text()
    reconcile_due(project)
    assert ticks.asks()
    project.drain()
    assert (project.fresh, project.entries("dead")) == (1, 0)
