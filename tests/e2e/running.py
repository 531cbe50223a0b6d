"""The whole arrangement as users start it, for tests: embedded Postgres, the shipped dagster.yaml, UI, daemon, runs."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg

from embed_assets import server
from embed_assets.defs.naming import ASKED_TAG
from embed_assets.load import create_jobs_table

START = (
    "import sys; from embed_assets import dev, settings; sys.exit(dev.run_dev(settings.load_settings(), port={port}))"
)
RUNS = "{ runsOrError(limit: 20) { ... on Runs { results { runId jobName status tags { key value } } } } }"


@dataclass
class Dev:
    """A running `embed-assets dev` and its database."""

    process: subprocess.Popen[bytes]
    port: int
    db: psycopg.Connection
    log: Path

    def ask(self, query: str, **variables: str) -> dict[str, Any]:
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/graphql",
            json.dumps({"query": query, "variables": variables}).encode(),
            {"content-type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=30) as response:
            return json.load(response)["data"]  # type: ignore[no-any-return]

    def runs(self, *jobs: str) -> dict[str, str]:
        """Status by run, of these jobs or of all."""
        runs = self.ask(RUNS)["runsOrError"]["results"]
        return {run["runId"]: run["status"] for run in runs if not jobs or run["jobName"] in jobs}

    def askers(self, job: str) -> set[str]:
        """Who asked for the job's runs so far, by their tags."""
        runs = [run for run in self.ask(RUNS)["runsOrError"]["results"] if run["jobName"] == job]
        return {tag["value"] for run in runs for tag in run["tags"] if tag["key"] == ASKED_TAG}

    def value(self, statement: str) -> Any:
        row = self.db.execute(statement).fetchone()
        return row[0] if row else None

    @property
    def open_waves(self) -> int:
        return self.value("SELECT count(*) FROM embed_assets.claimed_waves WHERE closed_at IS NULL")

    def working_run(self) -> str | None:
        """The run that is embedding now."""
        return self.value(
            "SELECT run_id FROM embed_assets.claimed_waves WHERE closed_at IS NULL AND started_at IS NOT NULL LIMIT 1"
        )

    def insert(self, rows: int, text: str) -> None:
        """Postings that are no copies of each other, so that each must be embedded."""
        self.db.execute(
            "INSERT INTO jobs (external_id, title, company, description, is_tech) "
            "SELECT gen_random_uuid(), 'Engineer', 'Acme', gen_random_uuid() || %s, TRUE FROM generate_series(1, %s)",
            (text, rows),
        )


def eventually(ready: Callable[[], Any], seconds: float, what: str) -> Any:
    until = time.monotonic() + seconds
    while not (value := ready()):
        assert time.monotonic() < until, f"{what} did not happen within {seconds} s"
        time.sleep(0.1)
    return value


def reachable(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def running(home: Path, *, before: Callable[[Dev], Any], **environment: str) -> Iterator[Dev]:
    """`embed-assets dev` under `home` until the block ends; `before` fills the table of jobs before that."""
    port = free_port()
    with psycopg.connect(server.ensure(home), autocommit=True) as db:
        create_jobs_table(db)
        log = home / "dev.log"
        with log.open("wb") as out:
            process = subprocess.Popen(
                [sys.executable, "-c", START.format(port=port)],
                env={**os.environ, "EMBED_HOME": str(home), **environment},
                stdout=out,
                stderr=subprocess.STDOUT,
            )
        try:
            started = Dev(process, port, db, log)
            before(started)
            eventually(lambda: reachable(port) or process.poll() is not None, 120, "the UI")
            assert process.poll() is None, log.read_text()
            yield started
        finally:
            process.terminate()
            process.wait(60)
    server.remove(home)
