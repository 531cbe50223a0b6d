"""The end of a drain: whose neighbours must be computed again.

The rows are appended by the write transaction itself; here they are counted.
What does not belong here: computing neighbours, which is a job of its own.
"""

from collections.abc import Iterator

from dagster import AssetExecutionContext, AssetsDefinition, MaterializeResult, asset

from embed_assets.defs.naming import group, key
from embed_assets.resources.dagster import ChunkStoreResource


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
