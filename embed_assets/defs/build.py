"""One project's Definitions from its declarations. Works inside anybody's Dagster project, and fresh for each test.

    defs = Definitions.merge(build_definitions(corpora=[jobs, tickets]), my_own_definitions)

What does not belong here: reading a project's own modules (`definitions.py` does that for the shipped project).
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence

from dagster import BetaWarning, Definitions, in_process_executor

from embed_assets.corpus import TableCorpus
from embed_assets.defs import (
    alerts,
    backfill,
    checks,
    dead_runs,
    jobs,
    models,
    operator_jobs,
    prune,
    schedules,
    sensors,
    similar,
)
from embed_assets.defs.assets.backfill import buckets_done, reembed_requests, reembedded
from embed_assets.defs.assets.outbox import semantic_outbox
from embed_assets.defs.assets.similar import similar as similar_lists
from embed_assets.defs.assets.similar import similar_invalidations
from embed_assets.defs.assets.waves import chunk_embeddings, claimed_waves, semantic_chunks
from embed_assets.defs.maintenance import daily, maintenance
from embed_assets.embedding import Embedder
from embed_assets.resources.dagster import (
    BackfillResource,
    ChunkStoreResource,
    EmbedderResource,
    OperatorResource,
    OutboxResource,
    PostgresResource,
    SimilarStoreResource,
)
from embed_assets.resources.opened import OpenKinds
from embed_assets.settings import Settings, load_settings

BACKFILL = (reembed_requests, reembedded)
CHAIN = (semantic_outbox, claimed_waves, chunk_embeddings, semantic_chunks, similar_invalidations)


def build_definitions(
    corpora: Sequence[TableCorpus], *, settings: Settings | None = None, embedder: Embedder | None = None
) -> Definitions:
    """Assets, job, sensor and schedule of each kind. Nothing is connected to until something runs.

    `settings` default to the environment's; `embedder` stands in for the one they name. Raises ConfigurationError.
    """
    with warnings.catch_warnings():
        # What Dagster calls beta it uses itself for every sensor; nobody who runs us can do anything about it.
        warnings.simplefilter("ignore", BetaWarning)
        return _definitions(OpenKinds(settings or load_settings(), corpora, embedder))


def _definitions(opened: OpenKinds) -> Definitions:
    kinds = opened.registry.kinds
    drains = {kind: jobs.drain(kind) for kind in kinds}
    advances = {kind: models.advance(kind) for kind in kinds}
    listed = {kind: jobs.similar(kind) for kind in kinds if opened.registry[kind].similar}
    looks = {kind: checks.job(kind) for kind in kinds}
    care = maintenance(kinds)
    operators = operator_jobs.operator_jobs(kinds)
    estimate = backfill.estimate(kinds)
    pruning = prune.prune_runs(kinds, [job.name for job in (*operators, estimate, care)])
    return Definitions(
        assets=[*(make(kind) for kind in kinds for make in (*CHAIN, *BACKFILL)), *map(similar_lists, listed)],
        asset_checks=[make(kind) for kind in kinds for make in (checks.checks, buckets_done)],
        jobs=[
            *drains.values(),
            *advances.values(),
            *listed.values(),
            care,
            estimate,
            *operators,
            pruning,
            *looks.values(),
        ],
        sensors=[
            *(sensors.outbox(kind, job, opened) for kind, job in drains.items()),
            *(models.waiting(kind, job, opened) for kind, job in advances.items()),
            *(similar.waiting(kind, job, opened) for kind, job in listed.items()),
            *(backfill.reembedded(kind, opened) for kind in kinds),
            *(alerts.alerts(kind, opened) for kind in kinds),
            *dead_runs.dead_runs(kinds, opened),
        ],
        schedules=[
            *(schedules.scan(kind, job, opened) for kind, job in drains.items()),
            *(checks.schedule(kind, job) for kind, job in looks.items()),
            daily(care),
        ],
        resources=resources(opened),
        executor=in_process_executor,
    )


def resources(opened: OpenKinds) -> dict[str, object]:
    """By the names under which the UI shows them and the assets take them."""
    postgres = PostgresResource(opened=opened)
    return {
        "postgres": postgres,
        "outbox": OutboxResource(postgres=postgres),
        "embedder": EmbedderResource(postgres=postgres),
        "chunk_store": ChunkStoreResource(postgres=postgres),
        "operator": OperatorResource(opened=opened),
        "similar_store": SimilarStoreResource(postgres=postgres),
        "backfill": BackfillResource(postgres=postgres),
    }
