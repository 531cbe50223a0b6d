"""One schedule per kind: finds changes of the source that nobody reported, where the sensor's probe is too slow.

The sensor may ask the scan's predicate for a second and a half; here it may take 15 s, every five minutes. A table on
which that is not enough is scanned each hour without asking. What the sensor sees too is left to it: it is given
some seconds, and its run is then in flight.
What does not belong here: the rule (`decision`).
"""

from __future__ import annotations

import time

from dagster import (
    DefaultScheduleStatus,
    RunRequest,
    ScheduleDefinition,
    ScheduleEvaluationContext,
    SkipReason,
    schedule,
)
from dagster._core.definitions.unresolved_asset_job_definition import UnresolvedAssetJobDefinition

from embed_assets.defs.decision import Decision, Look
from embed_assets.defs.sensors import answer, judge, redacted
from embed_assets.resources.opened import OpenKinds
from embed_assets.resources.watch import Watch

UNASKED_SECONDS = 3600.0
SENSOR_FIRST_SECONDS = 15.0


def scan(kind: str, job: UnresolvedAssetJobDefinition, opened: OpenKinds) -> ScheduleDefinition:
    @schedule(
        name=f"{kind}_scan",
        job=job,
        cron_schedule="*/5 * * * *",
        execution_timezone="UTC",
        default_status=DefaultScheduleStatus.RUNNING,
        description=f"Asks for a scan of {kind} when rows changed that nobody reported.",
    )
    def look(context: ScheduleEvaluationContext) -> RunRequest | SkipReason:
        try:
            decision = _look(opened.watch(kind), context)
            if decision.run:
                time.sleep(SENSOR_FIRST_SECONDS)
                decision = _look(opened.watch(kind), context)
        except Exception as error:
            opened.forget(kind)
            return SkipReason(f"{kind} could not be looked at: {redacted(error, opened.settings)}")
        return answer(decision, kind, "schedule")

    return look


def _look(watch: Watch, context: ScheduleEvaluationContext) -> Decision:
    backlog, resting, busy = watch.backlog(), watch.resting(), watch.busy()
    stale = not (busy or resting or backlog.paused) and _stale(watch)
    return judge(Look(backlog, resting, busy, stale), watch, lambda: context.instance)


def _stale(watch: Watch) -> bool:
    stale = watch.probe(patient=True).stale
    if stale is None:
        return (watch.scanned_seconds_ago() or UNASKED_SECONDS) >= UNASKED_SECONDS
    return stale
