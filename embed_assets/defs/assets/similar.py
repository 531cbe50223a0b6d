"""The end of a drain: whose neighbours must be computed again. And the neighbours, which a job of their own computes.

What does not belong here: how they are computed (`resources/similar_store.py`).
"""

import time
from collections.abc import Iterator

from dagster import AssetExecutionContext, AssetsDefinition, MaterializeResult, asset

from embed_assets.defs import metadata
from embed_assets.defs.naming import group, key
from embed_assets.resources.dagster import ChunkStoreResource, SimilarStoreResource


def similar_invalidations(kind: str) -> AssetsDefinition:
    @asset(
        key=key(kind, "similar_invalidations"),
        deps=[key(kind, "semantic_chunks")],
        group_name=group(kind),
        kinds={"postgres"},
        output_required=False,
        description="Rows that were written, whose precomputed neighbours are no longer true. Appended in the write "
        "transaction; this counts what this run appended and what waits. Alone, it only reports.",
    )
    def report(
        context: AssetExecutionContext,  # noqa: ARG001
        chunk_store: ChunkStoreResource,
    ) -> Iterator[MaterializeResult]:  # type: ignore[type-arg]
        yield MaterializeResult(
            metadata={
                "rows_invalidated": chunk_store.invalidated(kind),
                "rows_waiting": chunk_store.invalidations(kind),
            }
        )

    return report


def similar(kind: str) -> AssetsDefinition:
    @asset(
        key=key(kind, "similar"),
        deps=[key(kind, "similar_invalidations")],
        group_name=group(kind),
        kinds={"postgres", "pgvector"},
        output_required=False,
        description="Precomputed neighbours of each row, which embed_assets.similar_to reads. Computed again here for "
        "rows that changed and for those that list them, about a minute's worth; nothing stale, nothing done.",
    )
    def refresh(context: AssetExecutionContext, similar_store: SimilarStoreResource) -> Iterator[MaterializeResult]:  # type: ignore[type-arg]
        started = time.monotonic()
        done, waiting = similar_store.refresh(kind)
        if done.postponed:
            context.log.warning("Nothing was computed: %s.", done.postponed)
        elif done.idle:
            context.log.info("No list of %s is stale.", kind)
        else:
            yield MaterializeResult(metadata=metadata.of_similar(done, waiting, seconds=time.monotonic() - started))

    return refresh
