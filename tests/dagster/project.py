"""What the tests of Dagster share: a kind `posts`, its Definitions with a fake embedder, and readings of a run."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import psycopg
from dagster import AssetKey, DagsterEvent, DagsterInstance, DagsterRun, Definitions, ExecuteInProcessResult
from dagster._core.definitions.job_base import InMemoryJob
from dagster._core.execution.api import create_execution_plan, execute_run

from embed_assets.corpus import Plain, TableCorpus
from embed_assets.defs.build import build_definitions
from embed_assets.defs.naming import SCAN_TAG
from embed_assets.settings import Settings
from tests.fakes import HashEmbedder

POSTS = TableCorpus(kind="posts", table="posts", key="id", text=Plain("body"), indexable="NOT hidden")
QUIET = {"loggers": {"console": {"config": {"log_level": "CRITICAL"}}}}
CHAIN = ["semantic_outbox", "claimed_waves", "chunk_embeddings", "semantic_chunks", "similar_invalidations"]


@dataclass
class Project:
    """What a test works with: rows are put with `put`, `drain` runs the job."""

    db: psycopg.Connection
    url: str
    instance: DagsterInstance
    embedder: HashEmbedder = field(default_factory=HashEmbedder)

    def settings(self, **more: Any) -> Settings:
        return Settings(DATABASE_URL=self.url, **{"batch_size": 4, "sensor_wait_seconds": 0, **more})

    def definitions(self, **more: Any) -> Definitions:
        return build_definitions([POSTS], settings=self.settings(**more), embedder=self.embedder)

    def drain(self, *stages: str, scan: bool = True, **settings: Any) -> ExecuteInProcessResult:
        """The job in this process: all of it, or some stages alone."""
        return (
            self.definitions(**settings)
            .resolve_job_def("posts_drain")
            .execute_in_process(
                raise_on_error=False,
                run_config=QUIET,
                instance=self.instance,
                tags={SCAN_TAG: "now"} if scan else {},
                asset_selection=[AssetKey(["posts", stage]) for stage in stages] or None,
            )
        )

    def repeat(self, run: DagsterRun, *stages: str) -> tuple[DagsterRun, list[DagsterEvent]]:
        """A re-execution of a run, of all its steps or of those from a stage on, as the UI makes it."""
        job = self.definitions().resolve_job_def("posts_drain")
        steps = [f"posts__{stage}" for stage in stages] or None
        again = self.instance.create_run_for_job(
            job,
            create_execution_plan(job, run_config=QUIET, step_keys_to_execute=steps),
            parent_run_id=run.run_id,
            root_run_id=run.root_run_id or run.run_id,
            run_config=QUIET,
        )
        result = execute_run(InMemoryJob(job), again, self.instance, raise_on_error=False)
        return again, result.all_events

    def put(self, *texts: str) -> None:
        for text in texts:
            self.db.execute("INSERT INTO posts (body) VALUES (%s)", (text,))

    def value(self, statement: str) -> Any:
        row = self.db.execute(statement).fetchone()
        return row[0] if row else None

    @property
    def fresh(self) -> int:
        return self.value("SELECT count(*) FROM embed_assets.semantic_stamps")

    @property
    def open_waves(self) -> int:
        return self.value("SELECT count(*) FROM embed_assets.claimed_waves WHERE closed_at IS NULL")

    @property
    def charged(self) -> int:
        return self.value("SELECT count(*) FROM embed_assets.semantic_outbox WHERE attempts + crashes + timeouts > 0")

    def entries(self, status: str) -> int:
        return self.value(f"SELECT count(*) FROM embed_assets.semantic_outbox WHERE status = '{status}'")

    def last_run(self) -> DagsterRun:
        return self.instance.get_runs(limit=1)[0]

    @contextmanager
    def signalled_after(self, stage: str, signum: int = signal.SIGINT) -> Iterator[None]:
        """Signal this process as soon as the step has succeeded, between it and the next; SIGINT is Terminate."""
        store = self.instance.handle_new_event

        def handle(event: Any, **options: Any) -> None:
            store(event, **options)
            found = event.dagster_event
            if found and found.is_step_success and found.step_key == f"posts__{stage}":
                run = self.instance.get_run_by_id(event.run_id)
                if signum == signal.SIGINT and run:
                    self.instance.report_run_canceling(run)
                os.kill(os.getpid(), signum)

        self.instance.handle_new_event = handle  # type: ignore[method-assign]
        try:
            yield
        finally:
            self.instance.handle_new_event = store  # type: ignore[method-assign]


def stages_of(events: list[DagsterEvent]) -> list[str]:
    """The stages that materialised, in order."""
    return [event.asset_key.path[-1] for event in events if event.is_step_materialization and event.asset_key]


def stages(result: ExecuteInProcessResult) -> list[str]:
    return stages_of(result.all_events)


def numbers(result: ExecuteInProcessResult, stage: str) -> dict[str, Any]:
    """The metadata of a stage's materialisation."""
    for event in result.all_events:
        if event.is_step_materialization and event.asset_key and event.asset_key.path[-1] == stage:
            return {
                name: value.value for name, value in event.step_materialization_data.materialization.metadata.items()
            }
    raise AssertionError(f"{stage} did not materialise")


def failure(result: ExecuteInProcessResult) -> str:
    """What the failed step says."""
    [event] = [event for event in result.all_events if event.is_step_failure]
    data = event.step_failure_data
    return data.user_failure_data.description if data.user_failure_data else str(data.error)
