"""What the tests of Dagster share: a kind `posts`, its Definitions with a fake embedder, and readings of a run."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import psycopg
from dagster import DagsterInstance, Definitions, ExecuteInProcessResult

from embed_assets.corpus import Plain, TableCorpus
from embed_assets.defs.build import build_definitions
from embed_assets.settings import Settings
from tests.fakes import HashEmbedder

POSTS = TableCorpus(kind="posts", table="posts", key="id", text=Plain("body"), indexable="NOT hidden")
QUIET = {"loggers": {"console": {"config": {"log_level": "CRITICAL"}}}}


@dataclass
class Project:
    """What a test works with. `drain` runs the job; rows are put with `put`."""

    db: psycopg.Connection
    url: str
    instance: DagsterInstance
    embedder: HashEmbedder = field(default_factory=HashEmbedder)
    settings_given: dict[str, Any] = field(default_factory=dict)

    def settings(self, **more: Any) -> Settings:
        given = {"batch_size": 4, "sensor_wait_seconds": 0, **self.settings_given, **more}
        return Settings(DATABASE_URL=self.url, **given)

    def definitions(self, **more: Any) -> Definitions:
        return build_definitions([POSTS], settings=self.settings(**more), embedder=self.embedder)

    def drain(self, defs: Definitions | None = None, **options: Any) -> ExecuteInProcessResult:
        job = (defs or self.definitions()).resolve_job_def("posts_drain")
        options = {"raise_on_error": False, "run_config": QUIET, "instance": self.instance} | options
        return job.execute_in_process(**options)

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
    def leased(self) -> int:
        return self.value("SELECT count(*) FROM embed_assets.semantic_outbox WHERE status = 'leased'")


def stages(result: ExecuteInProcessResult) -> list[str]:
    """The stages that materialised, in order."""
    return [
        event.asset_key.path[-1] for event in result.all_events if event.is_step_materialization and event.asset_key
    ]


def numbers(result: ExecuteInProcessResult, stage: str) -> dict[str, Any]:
    for event in result.all_events:
        if event.is_step_materialization and event.asset_key and event.asset_key.path[-1] == stage:
            return {name: value.value for name, value in event.materialization.metadata.items()}
    raise AssertionError(f"{stage} did not materialise")
