"""Sensors that end the leases of runs that Dagster knows to be dead, so that nobody waits for them to run out.

A failed run's waves count as lost leases do: what kills its process must not be forgiven because Dagster noticed. A
cancelled run's are given back charging nobody. A process that lives all the same is refused whatever it writes.
What does not belong here: who takes the rows then (`sensors`).
"""

from __future__ import annotations

from collections.abc import Sequence

from dagster import (
    DagsterRunStatus,
    DefaultSensorStatus,
    RunStatusSensorContext,
    SensorDefinition,
    SkipReason,
    run_status_sensor,
)

from embed_assets.resources.opened import OpenKinds
from embed_assets.resources.operating import operating


def dead_runs(kinds: Sequence[str], opened: OpenKinds) -> list[SensorDefinition]:
    """One for failed runs, one for cancelled ones, of every job on the instance."""
    return [_released(kinds, opened, DagsterRunStatus.FAILURE), _released(kinds, opened, DagsterRunStatus.CANCELED)]


def _released(kinds: Sequence[str], opened: OpenKinds, status: DagsterRunStatus) -> SensorDefinition:
    @run_status_sensor(
        name=f"release_{status.value.lower()}_runs",
        run_status=status,
        monitor_all_code_locations=True,  # else runs that a script started on this instance are not seen
        minimum_interval_seconds=30,
        default_status=DefaultSensorStatus.RUNNING,
        description=f"Ends the leases that a {status.value.lower()} run left open.",
    )
    def release(context: RunStatusSensorContext) -> SkipReason:
        run = context.dagster_run.run_id
        waves = sum(_end(kind, run, opened, charge=status is DagsterRunStatus.FAILURE) for kind in kinds)
        return SkipReason(f"run {run} left {waves} waves open: their leases are over")

    return release


def _end(kind: str, run: str, opened: OpenKinds, *, charge: bool) -> int:
    if run not in opened.watch(kind).waves_of([run]):
        return 0
    with operating(opened.settings, opened.registry, kind) as found:
        return found.lapse([run]) if charge else found.outbox.release_runs([run])
