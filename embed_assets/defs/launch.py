"""Drains launched from a script, on the instance that the UI shows, so that it shows them.

What does not belong here: which instance that is (`dev.py` sets its environment).
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime
from typing import Any

from dagster import DagsterInstance

from embed_assets.defs.build import build_definitions
from embed_assets.defs.naming import SCAN_TAG, drain_job
from embed_assets.resources.assembly import Kind, find_corpus, open_kind
from embed_assets.settings import Settings

logger = logging.getLogger(__name__)

Progress = Callable[[int, int], None]
QUIET = {"loggers": {"console": {"config": {"log_level": "CRITICAL"}}}}
MOST_RUNS = 10_000
MOST_FRUITLESS = 2
TOLD_EVERY = 0.5


def drain_until_empty(settings: Settings, kind: str, progress: Progress) -> bool:
    """Run the drain job again and again until nothing is due but what failed meanwhile; True if all runs were green.

    Ends with False also when two runs in a row come to nothing while rows are due: the endpoint rests, for example.
    """
    corpus = find_corpus(settings, kind)
    job = build_definitions([corpus], settings=settings).resolve_job_def(drain_job(kind))
    opened = open_kind(settings, corpus)
    try:
        with DagsterInstance.get() as instance, _told(opened, progress):
            return _drain(opened, lambda tags: _launch(job, instance, tags))
    finally:
        opened.close()


def _launch(job: Any, instance: DagsterInstance, tags: dict[str, str]) -> tuple[bool, str]:
    result = job.execute_in_process(instance=instance, tags=tags, run_config=QUIET, raise_on_error=False)
    return result.success, result.run_id


def _drain(opened: Kind, launch: Callable[[dict[str, str]], tuple[bool, str]]) -> bool:
    began, fruitless = opened.outbox.now(), 0
    tags = {SCAN_TAG: "now"}
    for _ in range(MOST_RUNS):
        green, run_id = launch(tags)
        if not green:
            return False
        if not opened.outbox.claimable(failed_before=began):
            return True
        # Once may be chance: another process entered the rows just after this run had looked for some.
        fruitless = 0 if _settled(opened, run_id, began) else fruitless + 1
        if fruitless == MOST_FRUITLESS:
            return False
        tags = {}
    return False


def _settled(opened: Kind, run_id: str, began: datetime) -> bool:
    """Whether the run did anything, so that the next one may do the rest."""
    values = {"kind": opened.outbox.kind, "run_id": run_id}
    row = opened.postgres.one("watch.invalidated_by", values)
    return bool(row and row["invalidated"]) or bool(
        opened.postgres.one("watch.failed_since", values | {"began": began})
    )


@contextmanager
def _told(opened: Kind, progress: Progress) -> Iterator[None]:
    """Tell how far it is, from a thread, until the block ends; and once more then."""
    ended = threading.Event()

    def tell() -> None:
        try:
            progress(*_far(opened))
        except Exception as error:  # a bar that stands still harms nobody
            logger.debug("no progress could be read: %s", error)

    def run() -> None:
        while not ended.wait(TOLD_EVERY):
            tell()

    thread = threading.Thread(target=run, name="progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(5)
        tell()


def _far(opened: Kind) -> tuple[int, int]:
    """(rows done, rows in all): what is excluded or dismissed is no work."""
    status = opened.outbox.status(opened.identity)
    done = sum(status.counts.get(state, 0) for state in ("fresh", "dead", "waiting"))
    left = sum(status.counts.get(state, 0) for state in ("due", "leased"))
    return done, done + left
