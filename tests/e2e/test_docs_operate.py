"""docs/operate.md: its commands are run in their order, and it names whatever an operator may meet."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from dagster import Definitions
from postgres.support import Db, add_jobs
from typer.testing import CliRunner

from embed_assets.cli import app
from embed_assets.corpora.jobs import jobs
from embed_assets.defs.build import build_definitions
from embed_assets.errors import ErrorClass
from embed_assets.load import create_jobs_table
from embed_assets.settings import Settings

PAGE = (Path(__file__).resolve().parents[2] / "docs/operate.md").read_text(encoding="utf-8")


def commands() -> list[str]:
    blocks = re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL)
    return [line.split("#")[0].strip() for block in blocks for line in block.splitlines() if line.strip()]


def run(line: str) -> str:
    done = CliRunner().invoke(app, line.split()[1:])
    assert done.exit_code == 0, f"{line}\n{done.output}{done.exception}"
    return done.output


def test_the_page_s_commands_show_a_dead_letter_and_say_what_they_would_take(
    db: Db, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    create_jobs_table(db)
    add_jobs(db, 2)
    monkeypatch.setenv("DATABASE_URL", database_url)
    CliRunner().invoke(app, ["drain", "jobs"])
    db.execute(
        "INSERT INTO embed_assets.semantic_outbox (kind, source_id, model_id, reason, status, error_code, error_class, "
        "error_message, failures, first_failed_at, last_failed_at) SELECT 'jobs', '2', target_model_id, 'scan', 'dead' "
        ", 'contract', 'contract', 'no vector', 3, now(), now() FROM embed_assets.corpora"
    )
    said = {line: run(line) for line in commands()}
    assert said["embed-assets status jobs"].startswith("DEGRADED: 1 rows failed")
    assert 'embed_assets_rows{kind="jobs",state="dead"} 1' in said["embed-assets metrics --rows"]
    assert "would be retried: 1 with contract" in said["embed-assets retry jobs --code contract"]
    assert said["embed-assets resume jobs"].strip() == "resumed"


def named(word: str) -> bool:
    return f"`{word}`" in PAGE


@pytest.fixture(scope="module")
def project() -> Definitions:
    return build_definitions([jobs], settings=Settings(DATABASE_URL="postgresql://nobody@127.0.0.1:1/none"))


def test_the_page_names_every_check_class_and_operator_s_job(project: Definitions) -> None:
    checks = {
        key.name for key in project.resolve_asset_graph().asset_check_keys if key.asset_key.path[-1] != "reembedded"
    }
    assert [name for name in checks | {str(found) for found in ErrorClass} if not named(name)] == []
    of_kind = {f"jobs_{name}" for name in ("drain", "models", "similar")}
    names = {found.name for found in project.resolve_all_job_defs() if not found.name.startswith("__")}
    assert [name for name in names - of_kind - {"maintenance"} if not named(name)] == []
