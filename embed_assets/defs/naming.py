"""Names that assets, jobs and sensors share: keys, tags, groups. And what a run's context says about the run.

What does not belong here: anything that talks to a database.
"""

from __future__ import annotations

from collections.abc import Sequence

from dagster import AssetExecutionContext, AssetKey, DagsterRun

KIND_TAG = "embed_assets/kind"
ASKED_TAG = "embed_assets/asked_by"
OPERATOR_TAG = "embed_assets/operator"
SCAN_TAG = "embed_assets/scan"
STAGES = ("semantic_outbox", "claimed_waves", "chunk_embeddings", "semantic_chunks", "similar_invalidations")
LONGEST_LINEAGE = 50


def key(kind: str, stage: str) -> AssetKey:
    return AssetKey([kind, stage])


def group(kind: str) -> str:
    return f"{kind}_embeddings"


def backfill_group(kind: str) -> str:
    return f"{kind}_backfill"


def drain_job(kind: str) -> str:
    return f"{kind}_drain"


def similar_job(kind: str) -> str:
    return f"{kind}_similar"


def checks_job(kind: str) -> str:
    return f"{kind}_checks"


def models_job(kind: str) -> str:
    return f"{kind}_models"


def runs_stage(run: DagsterRun, kind: str, stage: str) -> bool:
    """Whether this run is going to run that stage: no selection means all, a re-execution may name steps."""
    if run.asset_selection and key(kind, stage) not in run.asset_selection:
        return False
    return not run.step_keys_to_execute or f"{kind}__{stage}" in run.step_keys_to_execute


def ancestors(context: AssetExecutionContext) -> Sequence[str]:
    """The runs that this one repeats, nearest first; empty unless it is a re-execution."""
    found: list[str] = []
    parent = context.run.parent_run_id
    while parent and parent not in found and len(found) < LONGEST_LINEAGE:
        found.append(parent)
        run = context.instance.get_run_by_id(parent)
        parent = run.parent_run_id if run else None
    return found
