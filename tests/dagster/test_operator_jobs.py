"""What an operator starts from the Launchpad: dry first, then done, and told with numbers."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone
from typing import Any

import pytest
from dagster import DagsterRun, DagsterRunStatus, ExecuteInProcessResult

from embed_assets.defs.naming import KIND_TAG, OPERATOR_TAG
from embed_assets.errors import AnswerContract, InputRejected
from tests.dagster.project import QUIET, Project, failure
from tests.fakes import HashEmbedder


def start(project: Project, job: str, **config: Any) -> ExecuteInProcessResult:
    """As the Launchpad does: what is not given keeps its default."""
    return (
        project.definitions()
        .resolve_job_def(job)
        .execute_in_process(
            instance=project.instance,
            run_config={**QUIET, "ops": {f"do_{job}": {"config": config}}},
            raise_on_error=False,
        )
    )


def told(result: ExecuteInProcessResult) -> dict[str, Any]:
    """The metadata that the job leaves."""
    assert result.success, failure(result)
    [event] = [event for event in result.all_events if event.event_type_value == "STEP_OUTPUT"]
    return {name: value.value for name, value in event.step_output_data.metadata.items()}


def do(project: Project, job: str, **config: Any) -> dict[str, Any]:
    return told(start(project, job, dry_run=False, **config))


def groups(said: dict[str, Any]) -> list[dict[str, Any]]:
    return [record.data for record in said["groups"].records] if hasattr(said["groups"], "records") else said["groups"]


def kill(project: Project, *texts: str, error: type[Exception] = AnswerContract) -> None:
    """Each becomes a dead letter."""
    project.put(*texts)
    project.embedder.reject = lambda text: error("no vector") if text in texts else None
    project.drain(max_attempts=1)
    project.embedder.reject = lambda text: None


@pytest.mark.ids("Q30")
def test_a_dead_letter_is_revived_from_the_launchpad_and_the_next_drain_finishes_it(project: Project) -> None:
    kill(project, "bad")
    none = told(start(project, "retry_dead_letters", code="wrong"))
    assert (none["taken"], none["said"]) == (0, "none of these; there are: contract (1).")
    said = told(start(project, "retry_dead_letters"))
    assert (said["kind"], said["dry_run"], said["taken"], project.entries("dead")) == ("posts", True, 1, 1)
    assert "nothing was changed" in said["said"]
    assert do(project, "retry_dead_letters")["taken"] == 1
    assert (project.entries("dead"), project.entries("pending")) == (0, 1)
    assert project.drain(scan=False).success
    assert (project.fresh, project.value("SELECT count(*) FROM embed_assets.semantic_outbox")) == (1, 0)
    assert do(project, "retry_dead_letters")["said"] == "no dead letters."


def test_dead_letters_are_told_by_code_and_taken_by_code_or_id(project: Project) -> None:
    kill(project, "one", "two")
    kill(project, "three", error=InputRejected)
    table = groups(told(start(project, "retry_dead_letters")))
    assert [(group["rows"], bool(group["what to do"])) for group in table] == [(2, True), (1, True)]
    rejected = project.value("SELECT error_code FROM embed_assets.semantic_outbox WHERE error_class = 'input_rejected'")
    assert told(start(project, "dismiss_dead_letters", code=rejected))["taken"] == 1
    assert do(project, "dismiss_dead_letters", code=rejected)["taken"] == 1
    one = project.value("SELECT min(source_id) FROM embed_assets.semantic_outbox WHERE dismissed_at IS NULL")
    assert do(project, "retry_dead_letters", ids=[one])["taken"] == 1
    assert (project.entries("dead"), project.entries("pending")) == (2, 1)


@pytest.mark.ids("C-55")
def test_dead_letters_of_a_kind_that_is_no_longer_declared_are_dismissed_and_counted(project: Project) -> None:
    kill(project, "bad", "worse")
    for table in ("corpora", "semantic_outbox"):
        project.db.execute(f"UPDATE embed_assets.{table} SET kind = 'gone'".encode())
    assert told(start(project, "dismiss_dead_letters", kind="gone"))["taken"] == 2
    assert do(project, "dismiss_dead_letters", kind="gone")["taken"] == 2
    assert project.value("SELECT count(*) FROM embed_assets.semantic_outbox WHERE dismissed_at IS NOT NULL") == 2
    assert "not declared in this project any more" in failure(start(project, "reindex", kind="gone"))


@pytest.mark.ids("C-56")
def test_reindex_takes_what_is_out_of_sync_or_one_row_and_nothing_of_a_synced_kind(project: Project) -> None:
    project.put("one", "two", "three")
    assert project.drain().success
    assert do(project, "reindex")["taken"] == 0
    assert project.value("SELECT count(*) FROM embed_assets.source_changes") == 0
    project.db.execute("UPDATE posts SET body = 'changed' WHERE id = 1")
    project.db.execute("UPDATE posts SET hidden = TRUE WHERE id = 2")
    project.db.execute("DELETE FROM posts WHERE id = 3")
    assert told(start(project, "reindex"))["taken"] == 3
    assert do(project, "reindex", ids=["1"])["taken"] == 1
    assert project.value("SELECT string_agg(source_id, ',') FROM embed_assets.source_changes") == "1"
    assert do(project, "reindex")["taken"] == 3
    assert project.drain(scan=False).success
    assert (project.fresh, do(project, "reindex")["taken"]) == (1, 0)
    refused = start(project, "reindex", kind="nobody")
    assert not refused.success
    assert "Unknown kind 'nobody'" in failure(refused)


def test_reindex_brings_a_dead_letter_back_but_none_that_was_dismissed_and_nothing_that_waits(project: Project) -> None:
    kill(project, "bad")
    assert told(start(project, "reindex"))["taken"] == 1
    do(project, "dismiss_dead_letters")
    assert told(start(project, "reindex"))["taken"] == 0
    project.put("new")
    project.drain("semantic_outbox")
    assert (project.entries("pending"), told(start(project, "reindex"))["taken"]) == (1, 0)


def test_forced_buys_a_row_again_that_is_in_sync_and_only_by_its_id(project: Project) -> None:
    project.put("one", "two")
    project.drain()
    sent = project.embedder.texts_sent
    assert do(project, "reindex", ids=["1"])["taken"] == 0
    assert do(project, "reindex", ids=["1", "9"], forced=True)["taken"] == 1
    project.drain(scan=False)
    assert project.embedder.texts_sent == sent + 1
    assert "forced needs ids" in failure(start(project, "reindex", forced=True))


def claimed(project: Project) -> None:
    """A wave that a run left open, as when its process died between two steps."""
    project.put("one", "two")
    project.drain("semantic_outbox")
    project.db.execute(
        "WITH w AS (INSERT INTO embed_assets.claimed_waves (kind, model_id, run_id, lease_until, started_at, claimed) "
        "SELECT 'posts', 1, 'lost', clock_timestamp() + interval '1 hour', clock_timestamp(), 2 RETURNING wave_id) "
        "UPDATE embed_assets.semantic_outbox SET status = 'leased', wave_id = w.wave_id FROM w"
    )


def test_waves_are_released_by_run_or_once_their_lease_ran_out(project: Project) -> None:
    claimed(project)
    assert do(project, "release_waves")["taken"] == 0
    assert do(project, "release_waves", which="run", run_id="another")["taken"] == 0
    said = told(start(project, "release_waves", which="run", run_id="lost"))
    assert (said["taken"], project.open_waves) == (1, 1)
    assert do(project, "release_waves", which="run", run_id="lost")["taken"] == 1
    assert (project.open_waves, project.entries("pending"), project.charged) == (0, 2, 0)
    assert "Name the run" in failure(start(project, "release_waves", which="run"))


def test_a_lease_that_ran_out_counts_as_a_crash_whoever_finds_it(project: Project) -> None:
    claimed(project)
    project.db.execute("UPDATE embed_assets.claimed_waves SET lease_until = clock_timestamp() - interval '1 second'")
    assert do(project, "release_waves")["taken"] == 1
    assert (project.open_waves, project.entries("pending"), project.charged) == (0, 2, 2)


def test_pause_and_resume_say_what_was(project: Project) -> None:
    paused = "SELECT paused_at IS NOT NULL FROM embed_assets.corpora"
    assert "would be paused" in told(start(project, "pause"))["said"]
    assert project.value(paused) is False
    assert do(project, "pause")["said"] == "Paused."
    assert project.value(paused) is True
    assert do(project, "pause")["said"] == "It was paused already."
    assert do(project, "resume")["said"] == "Resumed."
    assert project.value(paused) is False


def test_models_are_switched_and_rolled_back(project: Project) -> None:
    active = "SELECT identity FROM embed_assets.corpora JOIN embed_assets.embedding_models m ON m.id = active_model_id"
    project.put("one")
    project.drain()
    before = project.value(active)
    assert told(start(project, "switch_model"))["taken"] == 0
    assert "being built" in failure(start(project, "switch_model", dry_run=False))
    project.embedder = HashEmbedder(12, identity="wide")
    project.drain("semantic_outbox")
    assert "wide" in told(start(project, "switch_model"))["said"]
    assert "not ready" in failure(start(project, "switch_model", dry_run=False))
    project.drain()
    assert "wide" in do(project, "switch_model")["said"]
    assert "wide" in project.value(active)
    assert before in told(start(project, "rollback_model"))["said"]
    do(project, "rollback_model")
    assert project.value(active) == before


def test_the_endpoint_is_forgiven_and_asked_again_at_once(project: Project) -> None:
    from embed_assets.resources.embedder import endpoint_key

    project.db.execute(
        "INSERT INTO embed_assets.embedding_endpoints (endpoint, state, until, reason, max_items) "
        "VALUES (%s, 'refused', clock_timestamp() + interval '10 minutes', 'REFUSED: 401', 7)",
        (endpoint_key(project.settings()),),
    )
    said = told(start(project, "reset_endpoint"))
    assert (said["taken"], groups(said)[0]["reason"]) == (1, "REFUSED: 401")
    look = "SELECT state || coalesce(max_items::text, '-') FROM embed_assets.embedding_endpoints"
    assert project.value(look) == "refused7"
    do(project, "reset_endpoint")
    assert project.value(look) == "ok7"
    do(project, "reset_endpoint", limits=True)
    assert project.value(look) == "ok-"


def ended(project: Project, status: DagsterRunStatus, days: float, **tags: str) -> DagsterRun:
    """A run of somebody's that ended so long ago."""
    at = datetime.now(timezone.utc) - timedelta(days=days)
    run = project.instance.create_run_for_job(project.definitions().resolve_job_def("posts_drain"), tags=tags)
    storage: Any = project.instance.run_storage
    with storage.connect() as connection:
        connection.exec_driver_sql(
            f"UPDATE runs SET status = '{status.value}', create_timestamp = '{at:%Y-%m-%d %H:%M:%S}', "
            f"update_timestamp = '{at:%Y-%m-%d %H:%M:%S}' WHERE run_id = '{run.run_id}'"
        )
    return run


def test_old_runs_of_ours_go_and_those_of_others_and_failures_stay(project: Project) -> None:
    ours = {KIND_TAG: "posts"}
    old = ended(project, DagsterRunStatus.SUCCESS, 8, **ours)
    operators = ended(project, DagsterRunStatus.SUCCESS, 8, **{OPERATOR_TAG: "pause"})
    failed = ended(project, DagsterRunStatus.FAILURE, 8, **ours)
    long_failed = ended(project, DagsterRunStatus.FAILURE, 61, **ours)
    new = ended(project, DagsterRunStatus.SUCCESS, 6, **ours)
    theirs = ended(project, DagsterRunStatus.SUCCESS, 80, **{OPERATOR_TAG: "somebody"})
    running = ended(project, DagsterRunStatus.STARTED, 80, **ours)
    assert told(start(project, "prune_runs"))["taken"] == 3
    assert do(project, "prune_runs", most=1)["taken"] == 1
    assert do(project, "prune_runs")["taken"] == 2
    left = {run.run_id for run in project.instance.get_runs()}
    assert {failed.run_id, new.run_id, theirs.run_id, running.run_id} <= left
    assert not {old.run_id, operators.run_id, long_failed.run_id} & left
