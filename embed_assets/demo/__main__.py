"""`make demo`: start, migrate, load the demo's postings, drain them through the Dagster job, show the result.

Runs on the embedded default, or on whatever the environment's settings name. `--no-ui` stops before the UI and
shuts the embedded server down.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import psycopg

from embed_assets import console, server
from embed_assets.dev import launch_drain, run_dev
from embed_assets.errors import EmbedAssetsError
from embed_assets.load import create_jobs_table, load_file
from embed_assets.resources.assembly import Kind, database_url, find_corpus, open_kind
from embed_assets.search import search
from embed_assets.settings import Settings, load_settings

HERE = Path(__file__).parent
SHOWN = 2


def main() -> int:
    settings = load_settings(corpora="embed_assets.corpora.jobs:jobs")
    os.environ["EMBED_CORPORA"] = settings.corpora  # what the processes of the UI load too
    started = time.monotonic()
    try:
        _load(settings)
        drained = _drain(settings)
        opened = open_kind(settings, find_corpus(settings, "jobs"))
        try:
            fresh = _show(opened)
        finally:
            opened.close()
    except EmbedAssetsError as error:
        console.explain(str(error))
        return 2
    console.out.print(f"done in {time.monotonic() - started:.0f} s")
    if "--no-ui" not in sys.argv:
        return run_dev(settings)
    if settings.database_url is None:
        server.stop(settings.home_path)
    return 0 if drained and fresh else 1


def _load(settings: Settings) -> None:
    with psycopg.connect(database_url(settings)) as connection, console.progress("load jobs") as (bar, task):
        create_jobs_table(connection)
        report = load_file(connection, "jobs", HERE / "jobs.jsonl", progress=lambda lines: bar.advance(task, lines))
    console.print_load(report)


def _drain(settings: Settings) -> bool:
    """Through Dagster, so that the UI shows the materialised chain afterwards."""
    with console.progress("drain jobs (Dagster job jobs_drain)") as (bar, task):
        return launch_drain(
            settings, "jobs", progress=lambda done, total: bar.update(task, completed=done, total=total)
        )


def _show(opened: Kind) -> bool:
    status = opened.outbox.status(opened.identity)
    console.out.print(console.status_table(status, opened.outbox.backlog()))
    embedders = {opened.identity: opened.embedder}
    for example in json.loads((HERE / "searches.json").read_text(encoding="utf-8"))[:SHOWN]:
        console.out.print(f"\nsearch: {example['query']}", style="bold", markup=False)
        console.print_answer(search(opened.postgres, opened.bound, embedders, example["query"], k=3))
    return not status.counts.get("dead") and not status.counts.get("waiting")


if __name__ == "__main__":
    sys.exit(main())
