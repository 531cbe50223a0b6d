"""What dagster.yaml must say for the drains' rules to hold, where the instance is somebody else's.

What does not belong here: the file that is shipped (`dagster.yaml`), which fulfils all of this.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from dagster import DagsterInstance

from embed_assets.resources.health import Finding

FEWEST_RUNS = 3
SHORTEST_RUNTIME = 600
OURS = "embed_assets/"


def dagster_instance(instance: DagsterInstance, executor: str | None = None) -> Finding:
    """Whether dagster.yaml fits: run monitoring, retries, queue, launcher, executor.

    `executor`: the name of the one that assets materialised by hand run in.
    """
    faults = [*_runs(instance), *_queue(instance), *_sensors(instance), *_executor(executor)]
    text = "; ".join(faults) or "dagster.yaml fits"
    advice = "Correct dagster.yaml and restart the daemon: docs/operate.md says what each line is for."
    return Finding(not faults, text, advice, False, {"faults": len(faults)})


def _runs(instance: DagsterInstance) -> Iterator[str]:
    monitoring: Any = instance.run_monitoring_settings or {}
    if not instance.run_monitoring_enabled:
        yield "run_monitoring is off, so a run that was killed stays STARTED and keeps its place in the queue"
    elif not monitoring.get("free_slots_after_run_end_seconds"):
        yield "free_slots_after_run_end_seconds is unset, so a cancelled run may keep its pool slot for ever"
    if 0 < (monitoring.get("max_runtime_seconds") or 0) < SHORTEST_RUNTIME:
        yield f"max_runtime_seconds is below {SHORTEST_RUNTIME}, so long drains and index builds are ended"
    if instance.run_retries_enabled and instance.run_retries_retry_on_asset_or_op_failure:
        yield (
            "run_retries repeats failed drains, which the outbox does by rules of its own: set "
            "retry_on_asset_or_op_failure to false"
        )
    if type(instance.run_launcher).__name__ == "SyncInMemoryRunLauncher":
        yield "the run launcher works inside whoever launches, so that sensors wait for their runs"


def _queue(instance: DagsterInstance) -> Iterator[str]:
    queue = instance.get_concurrency_config().run_queue_config
    if queue is None:
        return
    if 0 <= queue.max_concurrent_runs < FEWEST_RUNS:
        yield f"max_concurrent_runs is {queue.max_concurrent_runs}: two drains overlap, and checks run beside them"
    for limit in queue.tag_concurrency_limits or []:
        if str(limit.get("key", "")).startswith(OURS) and int(limit.get("limit", FEWEST_RUNS)) < FEWEST_RUNS:
            yield f"tag_concurrency_limits hold {limit['key']} to {limit['limit']}: the sensors themselves say how many"


def _sensors(instance: DagsterInstance) -> Iterator[str]:
    if not (instance.get_settings("sensors") or {}).get("use_threads"):
        yield "sensors.use_threads is off, so sensors that wait for news hold each other up"


def _executor(name: str | None) -> Iterator[str]:
    if name not in (None, "in_process"):
        yield (
            f"assets that are materialised by hand run in the executor '{name}': give your Definitions "
            "executor=in_process_executor, since a drain's leases live as long as its process"
        )
