"""Runs that end early: Terminate, a kill, a re-execution. Nothing is lost, left leased or paid twice."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import psycopg
import pytest
from dagster import DagsterRunStatus

from embed_assets.errors import ConfigurationError
from embed_assets.resources.opened import OpenKinds
from embed_assets.resources.waiting import interruptible
from embed_assets.stop import Stop
from tests.dagster.project import CHAIN, POSTS, Project, stages_of


@contextmanager
def interrupted(seconds: float) -> Iterator[list[float]]:
    """SIGINT to this process's main thread after some seconds, as Terminate sends it; gives when the block ended."""
    timer = threading.Timer(seconds, lambda: os.kill(os.getpid(), signal.SIGINT))
    took: list[float] = []
    started = time.monotonic()
    timer.start()
    try:
        yield took
    finally:
        timer.cancel()
        took.append(time.monotonic() - started - seconds)


@pytest.mark.parametrize("stage", CHAIN[:-1])
@pytest.mark.ids("A-29")
def test_a_run_that_is_ended_between_two_steps_gives_its_waves_back(project: Project, stage: str) -> None:
    project.put("one", "two")
    with project.signalled_after(stage):
        project.drain()
    assert project.last_run().status == DagsterRunStatus.CANCELED
    assert (project.open_waves, project.entries("leased"), project.charged) == (0, 0, 0)
    assert project.drain().success
    assert project.fresh == 2
    assert len(project.embedder.texts) == 2


@pytest.mark.parametrize("stage", CHAIN[:-1])
@pytest.mark.ids("Q19", "D08")
def test_a_process_that_is_killed_between_two_steps_loses_nothing(project: Project, stage: str) -> None:
    project.put("one", "two")
    if (child := os.fork()) == 0:
        with project.signalled_after(stage, signal.SIGKILL):
            project.drain()
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    project.db.execute("UPDATE embed_assets.claimed_waves SET lease_until = now() WHERE closed_at IS NULL")
    assert project.drain().success
    assert project.fresh == 2
    paid = {"chunk_embeddings", "semantic_chunks"}
    assert len(project.embedder.texts) == (0 if stage in paid else 2)


@pytest.mark.ids("A-29")
def test_terminate_ends_a_deaf_embedder_within_seconds_and_charges_nobody(project: Project) -> None:
    project.put("one", "two")
    project.embedder.before = lambda texts: time.sleep(8)
    with interrupted(1.5) as took:
        project.drain()
    assert 2 < took[0] < 5
    assert (project.open_waves, project.entries("leased"), project.charged) == (0, 0, 0)


def test_work_is_ended_before_the_interrupt_goes_on_so_that_nothing_is_claimed_behind_its_back() -> None:
    stop, ended = Stop(), threading.Event()

    def work() -> None:
        while stop.reason() is None:
            time.sleep(0.05)
        time.sleep(0.5)
        ended.set()

    with interrupted(0.5), pytest.raises(KeyboardInterrupt):
        interruptible(work, stop, lambda: None)
    assert ended.is_set()


def test_terminate_ends_a_write_that_waits_for_a_lock(project: Project, database_url: str) -> None:
    project.put("one")
    project.drain()
    project.put("two")
    with psycopg.connect(database_url) as other:
        other.execute("LOCK TABLE embed_assets.posts_semantic_chunks_m1 IN ACCESS EXCLUSIVE MODE")
        project.embedder.before = lambda texts: None
        with interrupted(2) as took:
            project.drain()
    assert took[0] < 5
    assert (project.open_waves, project.charged, project.fresh) == (0, 0, 1)
    project.drain()
    assert project.fresh == 2


@pytest.mark.parametrize("first", [CHAIN[0], CHAIN[1], CHAIN[2], CHAIN[3]])
@pytest.mark.ids("D06")
def test_a_re_execution_takes_up_what_its_ancestor_left_for_nothing(project: Project, first: str) -> None:
    project.put("one", "two")
    with project.signalled_after("chunk_embeddings"):
        project.drain()
    ended = project.last_run()
    project.put("unrelated")
    project.drain("semantic_outbox")
    run, events = project.repeat(ended, *CHAIN[CHAIN.index(first) :])
    assert stages_of(events) == CHAIN[CHAIN.index(first) :]
    claims_itself = first in CHAIN[:2]
    assert project.fresh == (3 if claims_itself else 2)
    assert len(project.embedder.texts) == project.fresh
    again, events = project.repeat(run, "semantic_chunks")
    assert stages_of(events) == []
    assert project.instance.get_run_by_id(again.run_id).status == DagsterRunStatus.SUCCESS  # type: ignore[union-attr]


def test_a_re_execution_closes_the_open_waves_of_a_run_that_still_holds_them(project: Project) -> None:
    project.put("one")
    if (child := os.fork()) == 0:
        with project.signalled_after("claimed_waves", signal.SIGKILL):
            project.drain()
        os._exit(1)
    os.waitpid(child, 0)
    run_id = project.value("SELECT run_id FROM embed_assets.claimed_waves")
    assert project.open_waves == 1
    job = project.definitions().resolve_job_def("posts_drain")
    ended = project.instance.create_run_for_job(job, run_id=run_id)
    _, events = project.repeat(ended, *CHAIN[1:])
    assert stages_of(events) == CHAIN[1:]
    assert project.fresh == 1


def test_steps_in_processes_of_their_own_are_told_why_nothing_is_left_for_them(project: Project) -> None:
    project.put("one")
    opened = OpenKinds(project.settings(), [POSTS], project.embedder)
    first = opened.run("a run", "posts")
    first.enqueue()
    assert len(first.claim()) == 1
    opened.end("a run")
    with pytest.raises(ConfigurationError, match="in_process_executor"):
        opened.run("a run", "posts").resume(staged=False)
    opened.end("a run")


def test_a_process_that_resumes_a_run_takes_up_its_open_waves(project: Project) -> None:
    project.put("one")
    opened = OpenKinds(project.settings(), [POSTS], project.embedder)
    first = opened.run("a run", "posts")
    first.enqueue()
    first.claim()
    second = OpenKinds(project.settings(), [POSTS], project.embedder).run("a run", "posts")
    assert second.resume(staged=False) == 1
    assert second.stage().waves == 1
    assert second.write().counts.indexed == 1
    second.kind.close()
    opened.end("a run")
