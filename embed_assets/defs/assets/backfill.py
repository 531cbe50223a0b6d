"""Backfills that people launch in the UI: ask for buckets of rows again, and see when each is really done.

`reembed_requests` only appends requests, in lane 1; drains do the work. `reembedded` has the same buckets and is
nobody's run: a sensor reports a bucket materialised once its last row is. Green means embedded at that time; what is
outstanding or failed is named by a check, since a partition cannot be unreported.
What does not belong here: how buckets are asked for and followed (`resources/backfill.py`).
"""

from enum import Enum

from dagster import (
    AssetCheckExecutionContext,
    AssetCheckResult,
    AssetChecksDefinition,
    AssetCheckSeverity,
    AssetExecutionContext,
    AssetsDefinition,
    AssetSpec,
    BackfillPolicy,
    Config,
    MaterializeResult,
    StaticPartitionsDefinition,
    asset,
    asset_check,
)
from pydantic import Field

from embed_assets.defs.naming import backfill_group, key
from embed_assets.resources.backfill import BUCKETS, bucket_key, bucket_of
from embed_assets.resources.dagster import BackfillResource

BUCKET_KEYS = StaticPartitionsDefinition([bucket_key(bucket) for bucket in range(BUCKETS)])


class Only(Enum):
    """`stale`: rows that are not what their vectors say. `all`: every row that belongs in search, bought anew."""

    STALE = "stale"
    ALL = "all"


class ReembedConfig(Config):
    """What to ask for. The reason is kept with the request, for whoever wonders later."""

    only: Only = Field(Only.STALE, description="stale: what is not up to date; all: everything, bought anew.")
    reason: str = Field("asked for in the UI", description="Kept with the request.")


def reembed_requests(kind: str) -> AssetsDefinition:
    @asset(
        key=key(kind, "reembed_requests"),
        partitions_def=BUCKET_KEYS,
        backfill_policy=BackfillPolicy.single_run(),
        group_name=backfill_group(kind),
        kinds={"postgres"},
        description=f"Ask for rows of {kind} to be embedded again, by buckets of their ids. Only asks, behind every "
        "change (lane 1): drains do the work, and reembedded shows each bucket once it is done.",
    )
    def ask(context: AssetExecutionContext, backfill: BackfillResource, config: ReembedConfig) -> MaterializeResult:  # type: ignore[type-arg]
        buckets = [bucket_of(name) for name in context.partition_keys]
        asked, ahead, hours = backfill.ask(kind, buckets, selection=config.only.value, reason=config.reason)
        rows = sum(asked.values())
        context.log.info("%s rows of %s buckets are asked for", rows, len(asked))
        eta = {"hours_until_done": round(hours, 2)} if hours is not None else {}
        return MaterializeResult(
            metadata={
                "rows_requested": rows,
                "buckets": len(asked),
                "rows_ahead": ahead,
                "reason": config.reason,
                **eta,
            }
        )

    return ask


def reembedded(kind: str) -> AssetSpec:
    return AssetSpec(
        key(kind, "reembedded"),
        deps=[key(kind, "reembed_requests")],
        partitions_def=BUCKET_KEYS,
        group_name=backfill_group(kind),
        kinds={"postgres", "pgvector"},
        description="Buckets of which every row that was asked for has been embedded or cleared since. Reported by the "
        f"sensor {kind}_reembedded; nobody materialises it. The check names what is outstanding or failed.",
    )


def buckets_done(kind: str) -> AssetChecksDefinition:
    @asset_check(
        asset=key(kind, "reembedded"),
        name="buckets_done",
        description="Red while a bucket that was asked for has rows outstanding, or rows that failed for good.",
    )
    def check(context: AssetCheckExecutionContext, backfill: BackfillResource) -> AssetCheckResult:  # noqa: ARG001
        asked = [one for one in backfill.progress(kind) if not one.cancelled_at]
        outstanding = [one for one in asked if one.open or one.complete_at is None]
        failed = [one for one in asked if one.dead]
        given_up = [one for one in asked if one.dismissed]
        return AssetCheckResult(
            passed=not outstanding and not failed,
            severity=AssetCheckSeverity.WARN,
            description=_what_to_do(len(outstanding), len(failed), len(given_up)),
            metadata={
                "buckets_asked_for": len(asked),
                "buckets_outstanding": " ".join(bucket_key(one.bucket) for one in outstanding) or "none",
                "buckets_failed": " ".join(bucket_key(one.bucket) for one in failed) or "none",
                "rows_outstanding": sum(one.open for one in outstanding),
                "rows_failed": sum(one.dead for one in failed),
            },
        )

    return check


def _what_to_do(outstanding: int, failed: int, given_up: int) -> str:
    if failed:
        return f"{failed} buckets hold rows that failed for good: see the dead letters, retry or dismiss them."
    if outstanding:
        return f"{outstanding} buckets are under way: drains go on with them."
    if given_up:
        return f"{given_up} buckets hold rows that were dismissed, the others are done."
    return "Every bucket is done."
