"""The commands of the pages, in their order, as a reader would type them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from postgres.support import Db, add_jobs, value

from embed_assets.fake_server import FakeServer
from embed_assets.load import create_jobs_table

DOCS = Path(__file__).resolve().parents[2] / "docs"


def commands(page: str) -> list[str]:
    blocks = re.findall(r"```sh\n(.*?)```", (DOCS / page).read_text(encoding="utf-8"), re.DOTALL)
    lines = [line.split("#")[0].strip() for block in blocks for line in block.splitlines()]
    return [line for line in lines if line]


def shell(line: str, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    if line.startswith("export "):
        environment |= dict(pair.split("=", 1) for pair in line.removeprefix("export ").split())
        line = "true"
    line = line.replace("embed-assets", f"{sys.executable} -m embed_assets")
    return subprocess.run(line, shell=True, env=environment, capture_output=True, text=True, check=False, timeout=120)


@pytest.mark.timeout(300)
def test_the_page_s_commands_change_the_model_and_take_it_back(db: Db, database_url: str) -> None:
    create_jobs_table(db)
    add_jobs(db, 6)
    environment = {**os.environ, "DATABASE_URL": database_url}
    said: dict[str, str] = {}
    active = "SELECT m.dimensions FROM embed_assets.corpora c JOIN embed_assets.embedding_models m ON m.id = {}"
    assert shell("embed-assets drain jobs", environment).returncode == 0
    with FakeServer(dimensions=12) as server:
        for line in commands("models.md"):
            done = shell(line.replace("http://127.0.0.1:8090/embed", server.url), environment)
            assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"
            said[line] = done.stdout
            if line == "embed-assets switch jobs":
                assert value(db, active.format("active_model_id")) == 12
    assert re.search(r"retired since.*active", said["embed-assets models jobs"], re.DOTALL)
    assert value(db, active.format("active_model_id")) == 512


@pytest.mark.timeout(300)
def test_the_page_s_commands_ask_for_rows_again_and_take_that_back(db: Db, database_url: str) -> None:
    create_jobs_table(db)
    add_jobs(db, 6)
    environment = {**os.environ, "DATABASE_URL": database_url}
    said: dict[str, str] = {}
    for line in commands("backfill.md"):
        done = shell(line, environment)
        assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"
        said[line] = done.stdout
    assert "rows 6, texts 6" in said["embed-assets estimate jobs"]
    assert "asked for 6 rows of 64 buckets" in said["embed-assets reembed jobs"]
    assert re.search(r"cancelled [6-9]", said["embed-assets cancel jobs --reason backfill"])
    assert value(db, "SELECT count(*) FROM embed_assets.semantic_stamps") == 6
