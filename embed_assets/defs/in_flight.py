"""Which runs are in flight: drains of a kind and whether the last came to anything, or a job that runs alone.

Reads Dagster's runs, bounded.
Dagster's word is not the last one: a run whose process died stays STARTED for ever, so one that neither moved for ten
minutes nor holds a lease is not counted. What does not belong here: what follows from it (`decision`).
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from dagster import DagsterInstance, DagsterRunStatus, RunRecord, RunsFilter

from embed_assets.defs.decision import InFlight
from embed_assets.defs.naming import ASKED_TAG, drain_job
from embed_assets.resources.watch import Watch

STARTING = (DagsterRunStatus.NOT_STARTED, DagsterRunStatus.QUEUED, DagsterRunStatus.STARTING)
RUNNING = (*STARTING, DagsterRunStatus.STARTED, DagsterRunStatus.CANCELING)
ENDED = (DagsterRunStatus.SUCCESS, DagsterRunStatus.FAILURE)
FORGOTTEN_SECONDS = 600.0
FIRST_CLAIM_SECONDS = 60.0
RECENT = 8
MOST = 50


def in_flight(instance: DagsterInstance, watch: Watch) -> InFlight:
    """The state of the kind's drains now."""
    job = drain_job(watch.kind)
    running = instance.get_run_records(RunsFilter(job_name=job, statuses=list(RUNNING)), limit=MOST)
    ended = instance.get_run_records(RunsFilter(job_name=job, statuses=list(ENDED)), limit=RECENT)
    claimed = watch.waves_of([record.dagster_run.run_id for record in [*running, *ended]])
    now = time.time()
    alive = [record for record in running if not _forgotten(record, claimed, now)]
    fruitless = _fruitless(ended, claimed)
    return InFlight(
        running=len(alive),
        starting=sum(_starting(record, claimed, now) for record in alive),
        fruitless=len(fruitless),
        failed=bool(fruitless) and fruitless[0].dagster_run.status == DagsterRunStatus.FAILURE,
        ended_seconds_ago=now - _ended(fruitless[0]) if fruitless else 0.0,
    )


def job_in_flight(instance: DagsterInstance, job: str) -> bool:
    """Whether a run of a job that takes one at a time is alive, as far as Dagster knows and moves."""
    running = instance.get_run_records(RunsFilter(job_name=job, statuses=list(RUNNING)), limit=MOST)
    return any(not _forgotten(record, {}, time.time()) for record in running)


def _forgotten(record: RunRecord, claimed: dict[str, bool], now: float) -> bool:
    holding = claimed.get(record.dagster_run.run_id, False)
    return not holding and now - record.update_timestamp.timestamp() > FORGOTTEN_SECONDS


def _starting(record: RunRecord, claimed: dict[str, bool], now: float) -> bool:
    """Not yet at its claim, so that what it will take is still counted as due."""
    if record.dagster_run.status in STARTING:
        return True
    begun = now - (record.start_time or record.create_timestamp.timestamp())
    return record.dagster_run.run_id not in claimed and begun < FIRST_CLAIM_SECONDS


def _fruitless(ended: Sequence[RunRecord], claimed: dict[str, bool]) -> list[RunRecord]:
    """The newest ended drains, up to the first that did something: red ones, and asked-for ones without a wave."""
    found = []
    for record in ended:
        run = record.dagster_run
        if run.status == DagsterRunStatus.SUCCESS and (run.run_id in claimed or ASKED_TAG not in run.tags):
            break
        found.append(record)
    return found


def _ended(record: RunRecord) -> float:
    return record.end_time or record.update_timestamp.timestamp()
