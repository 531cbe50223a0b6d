"""What asks for similar items: a sensor that looks whether any list is stale. It changes nothing.

What does not belong here: what a run does (`assets/similar.py`), which lists are stale (`resources/similar_store.py`).
"""

from __future__ import annotations

from dagster import (
    DefaultSensorStatus,
    RunRequest,
    SensorDefinition,
    SensorEvaluationContext,
    SkipReason,
    sensor,
)
from dagster._core.definitions.unresolved_asset_job_definition import UnresolvedAssetJobDefinition

from embed_assets.defs.in_flight import job_in_flight
from embed_assets.defs.naming import ASKED_TAG, KIND_TAG, similar_job
from embed_assets.defs.sensors import redacted
from embed_assets.resources.opened import OpenKinds
from embed_assets.resources.watch import Watch


def waiting(kind: str, job: UnresolvedAssetJobDefinition, opened: OpenKinds) -> SensorDefinition:
    @sensor(
        name=similar_job(kind),
        job=job,
        minimum_interval_seconds=30,
        default_status=DefaultSensorStatus.RUNNING,
        description=f"Asks for {kind}/similar when rows changed whose neighbours are precomputed; one run at a time.",
    )
    def look(context: SensorEvaluationContext) -> RunRequest | SkipReason:
        try:
            reason = _nothing_to_do(opened.watch(kind))
        except Exception as error:
            opened.forget(kind)
            return SkipReason(f"{kind} could not be looked at: {redacted(error, opened.settings)}")
        if reason or job_in_flight(context.instance, similar_job(kind)):
            return SkipReason(reason or f"A run of {similar_job(kind)} is in flight")
        return RunRequest(tags={KIND_TAG: kind, ASKED_TAG: "sensor"})

    return look


def _nothing_to_do(watch: Watch) -> str | None:
    waiting, postponed = watch.similar()
    numbers = f"rows invalidated {waiting.feed}, lists stale {waiting.stale}"
    if watch.backlog().paused:
        return f"paused; {numbers}"
    if not waiting:
        return f"nothing is stale; {numbers}"
    return f"{postponed}; {numbers}" if postponed else None
