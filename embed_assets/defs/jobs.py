"""The drain of each kind as a job: its five assets, in one process. And the job of its similar items.

In one process, since the waves' leases live as long as it does, and a step of its own costs 2–4 s instead of 0.3.
No retry policy: what failed waits in the outbox, where it is counted. What does not belong here: when a drain runs
(`sensors`, `schedules`).
"""

from __future__ import annotations

from dagster import AssetSelection, define_asset_job, in_process_executor
from dagster._core.definitions.unresolved_asset_job_definition import UnresolvedAssetJobDefinition

from embed_assets.defs.naming import KIND_TAG, STAGES, drain_job, key, similar_job


def drain(kind: str) -> UnresolvedAssetJobDefinition:
    return define_asset_job(
        drain_job(kind),
        selection=AssetSelection.assets(*(key(kind, stage) for stage in STAGES)).without_checks(),
        executor_def=in_process_executor,
        tags={KIND_TAG: kind},
        description=f"Bring the vectors of {kind} up to date: enqueue, claim, embed, write. One bounded helping; the "
        "sensor asks for the next while something is due.",
    )


def similar(kind: str) -> UnresolvedAssetJobDefinition:
    return define_asset_job(
        similar_job(kind),
        selection=AssetSelection.assets(key(kind, "similar")).without_checks(),
        executor_def=in_process_executor,
        tags={KIND_TAG: kind},
        description=f"Compute the neighbours of the rows of {kind} that changed, and of those that list them. One "
        "bounded helping; its sensor asks for the next while any is stale.",
    )
