"""The asset checks: each turns red for the fault that it is for, says what to do, and holds nothing up."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import psycopg
import pytest
from dagster import AssetCheckEvaluation, AssetCheckSeverity, DagsterInstance, Definitions, multiprocess_executor

from embed_assets.corpus import Registry
from embed_assets.defs.instance import dagster_instance
from embed_assets.resources import health
from embed_assets.resources.health import Health, look
from embed_assets.resources.operating import operating
from tests.dagster.project import POSTS, QUIET, Project
from tests.dagster.test_models import advance
from tests.dagster.test_operator_jobs import kill
from tests.fakes import HashEmbedder

ROOT = Path(__file__).parents[2]
HOUR_AGO = "clock_timestamp() - interval '1 hour'"


def evaluated(project: Project, **settings: Any) -> dict[str, AssetCheckEvaluation]:
    """The checks job, as its schedule runs it."""
    job = project.definitions(**settings).resolve_job_def("posts_checks")
    result = job.execute_in_process(instance=project.instance, run_config=QUIET)
    return {found.check_name: found for found in result.get_asset_check_evaluations()}


def red(project: Project, name: str, **settings: Any) -> str:
    """What one check says, which must be red."""
    found = finding(project, name, **settings)
    assert not found.passed, found.text
    assert found.advice
    return found.text


def finding(project: Project, name: str, **settings: Any) -> Any:
    with operating(project.settings(**settings), Registry([POSTS]), "posts") as kind:
        return look(Health(kind), name)


def numbers(found: AssetCheckEvaluation) -> dict[str, Any]:
    return {name: value.value for name, value in found.metadata.items()}


def loaded(project: Project) -> None:
    project.put("one", "two", "three")
    assert project.drain().success


def test_a_fresh_kind_passes_every_check_but_that_of_the_instance(project: Project) -> None:
    loaded(project)
    advance(project)
    found = evaluated(project)
    assert {name for name, one in found.items() if not one.passed} == {"dagster_instance"}
    assert len(found) == 14
    assert numbers(found["recall"])["recall_percent"] == 100
    assert not any(one.blocking for one in found.values())


def test_a_dead_letter_is_shown_by_code_with_one_of_them_and_the_next_step(project: Project) -> None:
    loaded(project)
    kill(project, "bad", "worse")
    found = evaluated(project)
    dead = found["dead_letters"]
    assert (dead.passed, dead.severity, numbers(dead)["rows_dead"]) == (False, AssetCheckSeverity.ERROR, 2)
    [group] = dead.metadata["groups"].records  # type: ignore[attr-defined]
    assert (group.data["rows"], group.data["for example"]) == (2, "4")
    assert "retry" in group.data["what to do"]
    assert "retry_dead_letters" in numbers(dead)["what_to_do"]
    assert not found["verdict"].passed
    assert "2 rows failed" in (found["verdict"].description or "")


def test_a_red_check_holds_no_drain_up(project: Project) -> None:
    kill(project, "bad")
    evaluated(project)
    project.put("more")
    result = project.drain()
    assert result.success
    assert project.fresh == 1
    assert not result.get_asset_check_evaluations()


@pytest.mark.ids("B-47")
def test_a_change_that_waits_for_too_long_is_told_and_a_pause_is_named_as_the_cause(project: Project) -> None:
    project.put("one")
    project.drain("semantic_outbox")
    assert finding(project, "oldest_due").passed
    project.db.execute(f"UPDATE embed_assets.semantic_outbox SET enqueued_at = {HOUR_AGO}".encode())
    assert "waits for 36" in red(project, "oldest_due")
    assert not finding(project, "oldest_due", fresh_seconds=1000).error
    assert finding(project, "oldest_due", fresh_seconds=800).error
    assert finding(project, "oldest_due", fresh_seconds=4000).passed
    project.db.execute("UPDATE embed_assets.corpora SET paused_at = clock_timestamp()")
    assert "resume" in finding(project, "oldest_due").advice
    project.db.execute("UPDATE embed_assets.semantic_outbox SET lane = 1")
    assert finding(project, "oldest_due").passed
    project.db.execute("SELECT embed_assets.enqueue('posts', ARRAY[1])")
    project.db.execute(f"UPDATE embed_assets.source_changes SET at = {HOUR_AGO}".encode())
    assert "waits for 36" in red(project, "oldest_due")


def test_a_lease_that_ran_out_long_ago_is_told(project: Project) -> None:
    loaded(project)
    project.db.execute(
        "INSERT INTO embed_assets.claimed_waves (kind, model_id, run_id, lease_until) "
        "VALUES ('posts', 1, 'lost', clock_timestamp() - interval '1 second')"
    )
    assert finding(project, "expired_leases").passed
    project.db.execute(f"UPDATE embed_assets.claimed_waves SET lease_until = {HOUR_AGO} WHERE run_id = 'lost'".encode())
    assert "1 ran out" in red(project, "expired_leases")


def test_chunks_that_are_not_there_are_found_by_a_sample(project: Project) -> None:
    loaded(project)
    project.db.execute("DELETE FROM embed_assets.posts_semantic_chunks WHERE id = 2")
    found = finding(project, "stamps_match_chunks")
    assert (found.passed, found.numbers) == (False, {"rows_sampled": 3, "rows_wrong": 1})


def test_a_vector_of_another_model_is_found_and_so_is_a_partition_that_would_let_one_in(project: Project) -> None:
    loaded(project)
    partition = "embed_assets.posts_semantic_chunks_m1"
    project.db.execute(f"ALTER TABLE {partition} DROP CONSTRAINT own_width".encode())
    assert "lost its CHECK" in red(project, "one_vector_space")
    project.db.execute(f"UPDATE {partition} SET embedding = '[1,2]' WHERE id = 1".encode())
    assert "vectors of another model" in red(project, "one_vector_space")


@pytest.mark.ids("P05")
def test_a_pgvector_that_damages_its_indexes_is_named_with_its_fault(project: Project) -> None:
    loaded(project)
    assert finding(project, "pgvector_version").passed
    for version, passed in (("0.8.0", False), ("0.8.3", False), ("0.8.4", True), ("0.10.0", True), ("1.0", True)):
        project.db.execute("UPDATE pg_extension SET extversion = %s WHERE extname = 'vector'", (version,))
        found = finding(project, "pgvector_version")
        assert (found.passed, found.error) == (passed, False), version
        assert "hnsw graph not repaired" in found.advice


def test_an_index_that_was_left_half_built_or_dropped_is_told(project: Project) -> None:
    loaded(project)
    advance(project)
    index = "posts_semantic_chunks_m1_hnsw"
    project.db.execute(
        "UPDATE pg_index SET indisvalid = FALSE WHERE indexrelid = %s::regclass", (f"embed_assets.{index}",)
    )
    assert "left half built" in red(project, "vector_index")
    assert finding(project, "recall").passed
    project.db.execute(f"DROP INDEX embed_assets.{index}".encode())
    assert "is gone" in red(project, "vector_index")


def test_recall_is_held_against_its_setting(project: Project) -> None:
    project.put(*map(str, range(50)))
    project.drain(batch_size=50)
    advance(project)
    name = project.value("SELECT current_database()")
    project.db.execute(f"ALTER DATABASE {name} SET hnsw.ef_search = 1".encode())
    assert "95 % are wanted" in red(project, "recall")
    assert finding(project, "recall", switch_recall_percent=0).passed


@pytest.mark.ids("P12")
def test_whoever_holds_an_old_snapshot_is_named(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded(project)
    with psycopg.connect(project.url, application_name="forgotten report") as holder:
        holder.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        holder.execute("SELECT count(*) FROM posts")
        found = finding(project, "xmin_age")
        assert found.passed
        assert "forgotten report" in found.text
        monkeypatch.setattr(health, "SNAPSHOT_SECONDS", 0.0)
        assert "forgotten report, idle in transaction" in red(project, "xmin_age")


def test_the_feed_of_an_external_index_is_judged_only_where_there_is_one(project: Project) -> None:
    loaded(project)
    project.db.execute(f"UPDATE embed_assets.search_outbox SET at = {HOUR_AGO}".encode())
    assert finding(project, "search_feed").numbers["changes_waiting"] == 3
    assert "the oldest for 36" in red(project, "search_feed", search_feed_seconds=60)


def test_a_model_that_search_reads_and_nobody_keeps_fresh_degrades(project: Project) -> None:
    loaded(project)
    project.embedder = HashEmbedder(12, identity="wide")
    project.drain("semantic_outbox")
    assert "frozen since" in red(project, "verdict")
    assert "EMBED_ACTIVE_" in finding(project, "verdict").advice


@pytest.mark.ids("C-58")
def test_the_verdict_needs_no_coverage_where_counting_takes_too_long(project: Project) -> None:
    loaded(project)
    with psycopg.connect(project.url, autocommit=True) as slow:
        slow.execute(
            "CREATE FUNCTION slow() RETURNS boolean LANGUAGE sql AS 'SELECT pg_sleep(5) IS NOT NULL'; "
            "ALTER TABLE posts RENAME TO posts_; "
            "CREATE VIEW posts AS SELECT id, body, hidden OR NOT slow() AS hidden FROM posts_"
        )
    with operating(project.settings(), Registry([POSTS]), "posts", statement_timeout="2s") as kind:
        found, facts = Health(kind).judged()
    assert (found.state.value, facts.indexed, facts.succeeded) == ("HEALTHY", None, 3)


def test_a_look_that_takes_too_long_is_red_and_says_so(project: Project) -> None:
    loaded(project)
    with (
        operating(project.settings(), Registry([POSTS]), "posts", statement_timeout="2s") as kind,
        psycopg.connect(project.url) as holder,
    ):
        holder.execute("LOCK TABLE embed_assets.source_changes")
        found = look(Health(kind), "oldest_due")
    assert not found.passed
    assert "could not be looked at" in found.text


YAML = """
run_monitoring: {{enabled: true, free_slots_after_run_end_seconds: 300}}
concurrency: {{runs: {{max_concurrent_runs: 25}}}}
sensors: {{use_threads: true, num_workers: 4}}
{more}
"""


def told(folder: Path, yaml: str, executor: str | None = None) -> str:
    (folder / "dagster.yaml").write_text(yaml)
    with DagsterInstance.from_config(str(folder)) as instance:
        return dagster_instance(instance, executor).text


def test_the_dagster_yaml_that_is_shipped_fits(tmp_path: Path) -> None:
    lines = (ROOT / "dagster.yaml").read_text().split("storage:")[0] + (ROOT / "dagster.yaml").read_text().split(
        "env: EMBED_DAGSTER_PG_URL\n"
    )[1]
    assert told(tmp_path, lines) == "dagster.yaml fits"


@pytest.mark.parametrize(
    ("changed", "by", "what"),
    [
        ("enabled: true, free", "enabled: false, free", "run_monitoring is off"),
        ("300}", "300, max_runtime_seconds: 60}", "max_runtime_seconds is below"),
        ("runs: 25", "runs: 1", "max_concurrent_runs is 1"),
        (
            "runs: 25",
            "runs: 25, tag_concurrency_limits: [{key: embed_assets/kind, limit: 1}]",
            "tag_concurrency_limits",
        ),
        ("use_threads: true", "use_threads: false", "sensors.use_threads is off"),
        ("\n\n", "\nrun_retries: {enabled: true, max_retries: 2}\n", "run_retries repeats"),
    ],
)
def test_each_unfit_line_of_a_foreign_dagster_yaml_is_told(tmp_path: Path, changed: str, by: str, what: str) -> None:
    fit = YAML.format(more="\n")
    assert told(tmp_path, fit) == "dagster.yaml fits"
    assert changed in fit
    assert told(tmp_path, fit.replace(changed, by)).startswith(what)


@pytest.mark.ids("D11")
def test_pool_slots_of_ended_runs_are_freed_and_no_asset_of_ours_waits_in_a_pool(
    tmp_path: Path, project: Project
) -> None:
    unset = YAML.format(more="").replace(", free_slots_after_run_end_seconds: 300", "")
    assert "free_slots_after_run_end_seconds is unset" in told(tmp_path, unset)
    assert "free_slots_after_run_end_seconds: 300" in (ROOT / "dagster.yaml").read_text()
    job = project.definitions().resolve_job_def("posts_drain")
    assert not [node.name for node in job.all_node_defs if getattr(node, "pool", None)]


def test_an_executor_that_gives_each_step_a_process_is_told(tmp_path: Path, project: Project) -> None:
    assert "run in the executor 'multiprocess'" in told(tmp_path, YAML.format(more=""), "multiprocess")
    merged = Definitions.merge(Definitions(), project.definitions())
    assert merged.resolve_implicit_global_asset_job_def().executor_def.name == "in_process"
    assert multiprocess_executor.name == "multiprocess"
