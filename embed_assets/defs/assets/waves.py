"""The middle of a drain: claim, embed, write. Each asset is a table, and the wave's lease goes from one to the next.

An asset that did nothing yields nothing, so that what follows is skipped and the run stays green.
What does not belong here: the stages (`pipeline.py`), what a run holds (`resources/run.py`).
"""

import time
from collections.abc import Iterator

from dagster import AssetExecutionContext, AssetsDefinition, Failure, MaterializeResult, asset

from embed_assets.defs import metadata
from embed_assets.defs.naming import ancestors, group, key, runs_stage
from embed_assets.resources.dagster import ChunkStoreResource, EmbedderResource, OutboxResource
from embed_assets.resources.run import Report

Results = Iterator[MaterializeResult]  # type: ignore[type-arg]


def claimed_waves(kind: str) -> AssetsDefinition:
    @asset(
        key=key(kind, "claimed_waves"),
        deps=[key(kind, "semantic_outbox")],
        group_name=group(kind),
        kinds={"postgres"},
        output_required=False,
        description="Leases: due rows taken together for this run, with FOR UPDATE SKIP LOCKED, about a minute's work. "
        "Empty when nothing is due. Alone, it claims nothing, since nobody would work on it.",
    )
    def claim(context: AssetExecutionContext, outbox: OutboxResource) -> Results:
        if not runs_stage(context.run, kind, "semantic_chunks"):
            context.log.info("Nothing is claimed: this run does not write %s/semantic_chunks.", kind)
            return
        waves = outbox.claim(kind, ancestors(context))
        if waves:
            yield MaterializeResult(metadata=metadata.of_claim(waves))
        else:
            context.log.info("Nothing of %s is due.", kind)

    return claim


def chunk_embeddings(kind: str) -> AssetsDefinition:
    @asset(
        key=key(kind, "chunk_embeddings"),
        deps=[key(kind, "claimed_waves")],
        group_name=group(kind),
        kinds={"python", "postgres"},
        output_required=False,
        description="The ledger of vectors by the hash of the exact text sent: nothing found there is bought again. "
        "Loads, cleans, chunks and embeds this run's waves. Alone, only a re-execution has waves to work on.",
    )
    def embed(context: AssetExecutionContext, embedder: EmbedderResource) -> Results:
        started = time.monotonic()
        report = embedder.stage(kind, ancestors(context))
        _speak(context, kind, report)
        if report.waves:
            seconds = time.monotonic() - started
            numbers = metadata.of_staging(report.counts, waves=report.waves, released=report.released, seconds=seconds)
            yield MaterializeResult(metadata=numbers)

    return embed


def semantic_chunks(kind: str) -> AssetsDefinition:
    @asset(
        key=key(kind, "semantic_chunks"),
        deps=[key(kind, "chunk_embeddings")],
        group_name=group(kind),
        kinds={"postgres", "pgvector"},
        output_required=False,
        description="What search reads: the chunks and their vectors, written with their stamps in one fenced "
        "transaction per wave. Alone, only a re-execution has waves to write.",
    )
    def write(context: AssetExecutionContext, chunk_store: ChunkStoreResource) -> Results:
        started = time.monotonic()
        report = chunk_store.write(kind, ancestors(context))
        _speak(context, kind, report)
        if report.waves:
            seconds = time.monotonic() - started
            numbers = metadata.of_writing(report.counts, waves=report.waves, seconds=seconds)
            yield MaterializeResult(metadata={**numbers, **metadata.of_portrait(chunk_store.portrait(kind))})

    return write


def _speak(context: AssetExecutionContext, kind: str, report: Report) -> None:
    """Say what stood in the way. Raises Failure where nobody but an operator can help."""
    if report.trouble and report.refused:
        raise Failure(
            f"The endpoint refuses: {report.trouble}. No row was charged, the waves are released; it is asked again "
            "in 10 minutes, or when EMBED_URL or EMBED_API_KEY change.",
            allow_retries=False,
        )
    if report.trouble:
        context.log.warning(
            "%s; %s waves are released, no row was charged.", report.trouble.rstrip("."), report.released
        )
    elif not report.waves:
        context.log.info("This run holds no open wave of %s: nothing to do.", kind)
    if report.counts.failed or report.counts.dead:
        context.log.warning(
            "%s rows of %s failed and wait, %s are dead letters.", report.counts.failed, kind, report.counts.dead
        )
