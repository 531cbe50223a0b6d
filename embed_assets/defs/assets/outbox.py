"""The first asset of a drain: what is stale. Folds what writers said and scans the source when that is due.

What does not belong here: claiming (`waves`), and how stale rows are found (`resources/enqueuer.py`).
"""

from dagster import AssetExecutionContext, AssetsDefinition, MaterializeResult, asset

from embed_assets.defs import metadata
from embed_assets.defs.naming import SCAN_TAG, group, key
from embed_assets.resources.dagster import OutboxResource


def semantic_outbox(kind: str) -> AssetsDefinition:
    @asset(
        key=key(kind, "semantic_outbox"),
        group_name=group(kind),
        kinds={"postgres", "python"},
        description=f"Rows of {kind} that are not what their vectors say. Folds the feed of changes, and scans the "
        "source for missed ones when that is due. Alone, it only enqueues.",
    )
    def enqueue(context: AssetExecutionContext, outbox: OutboxResource) -> MaterializeResult:  # type: ignore[type-arg]
        enqueued = outbox.enqueue(kind, scan=SCAN_TAG in context.run.tags)
        if enqueued.skipped:
            context.log.info("Another enqueuer is at work on %s: nothing was folded or scanned here.", kind)
        for warning in enqueued.warnings:
            context.log.warning("%s", warning)
        numbers = metadata.of_enqueue(enqueued, outbox.backlog(kind))
        return MaterializeResult(metadata={**numbers, "warnings": "\n".join(enqueued.warnings) or "none"})

    return enqueue
