"""Drains launched from a script: when they go on, and when they give up."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from embed_assets.defs.launch import _drain
from embed_assets.resources.assembly import Kind, open_kind
from tests.dagster.project import POSTS, Project


@pytest.fixture
def opened(project: Project) -> Iterator[Kind]:
    kind = open_kind(project.settings(), POSTS, embedder=project.embedder)
    yield kind
    kind.close()


def test_rows_that_another_process_enters_just_after_a_run_looked_are_left_to_the_next(
    project: Project, opened: Kind
) -> None:
    project.put("one", "two")
    runs: list[str] = []

    def launch(tags: dict[str, str]) -> tuple[bool, str]:
        if not runs:
            opened.enqueuer.enqueue(scan=True)
            runs.append("of another enqueuer's time")
        else:
            runs.append(project.drain(scan=False).run_id)
        return True, runs[-1]

    assert _drain(opened, launch)
    assert len(runs) == 2
    assert project.fresh == 2


def test_two_runs_that_come_to_nothing_while_rows_are_due_are_enough(project: Project, opened: Kind) -> None:
    project.put("one")
    opened.enqueuer.enqueue(scan=True)
    runs: list[str] = []

    def launch(tags: dict[str, str]) -> tuple[bool, str]:
        runs.append(f"run {len(runs)}")
        return True, runs[-1]

    assert not _drain(opened, launch)
    assert len(runs) == 2
