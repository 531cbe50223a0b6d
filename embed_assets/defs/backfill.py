"""What goes with a backfill: the sensor that reports done buckets, and the job that estimates one.

What does not belong here: the assets that people launch (`assets/backfill.py`), and taking one back (`operator_jobs`).
"""

import json
from typing import Any

from dagster import (
    AssetMaterialization,
    Config,
    DefaultSensorStatus,
    JobDefinition,
    Nothing,
    OpExecutionContext,
    Out,
    SensorDefinition,
    SensorEvaluationContext,
    SensorResult,
    SkipReason,
    in_process_executor,
    job,
    op,
    sensor,
)
from pydantic import Field

from embed_assets.defs.assets.backfill import Only
from embed_assets.defs.naming import OPERATOR_TAG, key
from embed_assets.defs.operator_jobs import prefilled
from embed_assets.defs.sensors import redacted
from embed_assets.resources.backfill import Progress, bucket_key
from embed_assets.resources.dagster import BackfillResource
from embed_assets.resources.opened import OpenKinds


def reembedded(kind: str, opened: OpenKinds) -> SensorDefinition:
    """The cursor names the request that was last reported for each bucket, so that each is reported once."""

    @sensor(
        name=f"{kind}_reembedded",
        minimum_interval_seconds=30,
        default_status=DefaultSensorStatus.RUNNING,
        description=f"Reports a bucket of {kind}/reembedded once every row that was asked for is done.",
    )
    def look(context: SensorEvaluationContext) -> SensorResult | SkipReason:
        try:
            asked = opened.watch(kind).backfill()
        except Exception as error:
            opened.forget(kind)
            return SkipReason(f"{kind} could not be looked at: {redacted(error, opened.settings)}")
        reported = json.loads(context.cursor or "{}")
        done = [one for one in asked if one.done and reported.get(bucket_key(one.bucket)) != one.request]
        if not done:
            return SkipReason(_numbers(asked))
        reported |= {bucket_key(one.bucket): one.request for one in done}
        return SensorResult(asset_events=[_event(kind, one) for one in done], cursor=json.dumps(reported))

    return look


def _event(kind: str, one: Progress) -> AssetMaterialization:
    return AssetMaterialization(
        key(kind, "reembedded"),
        partition=bucket_key(one.bucket),
        metadata={"rows": one.rows, "only": one.selection, "reason": one.reason, "asked_by_run": one.run_id},
    )


def _numbers(asked: list[Progress]) -> str:
    open_ = [one for one in asked if not one.done and not one.cancelled_at]
    rows, dead = sum(one.open for one in open_), sum(one.dead for one in open_)
    return f"No bucket became done: {len(open_)} under way, {rows} rows open, {dead} dead"


class Estimated(Config):
    """What to estimate."""

    kind: str = Field(description="The kind it is about.")
    only: Only = Field(Only.ALL, description="all: as before a new model; stale: what a drain would do now.")


def estimate(kinds: list[str]) -> JobDefinition:
    config = prefilled("estimate", Estimated, kinds)

    @op(
        name="do_estimate",
        out=Out(Nothing),
        description="What it takes to embed the rows of a kind: texts, tokens, hours, disk.",
    )
    def measure(context: OpExecutionContext, backfill: BackfillResource, config: config) -> None:  # type: ignore[valid-type]
        wanted: Any = config
        found = backfill.estimate(wanted.kind, wanted.only.value)
        numbers = {
            "rows": found.rows,
            "texts": found.texts,
            "tokens": found.tokens,
            "megabytes": round(found.bytes / 1e6, 1),
            "measured": found.measured,
        }
        numbers |= {"hours": round(found.hours, 2)} if found.hours is not None else {}
        context.log.info("%s", ", ".join(f"{name} {value}" for name, value in numbers.items()))
        context.add_output_metadata(numbers)

    @job(
        name="estimate",
        executor_def=in_process_executor,
        tags={OPERATOR_TAG: "estimate"},
        description="Texts, tokens, hours and disk of embedding.",
    )
    def estimating() -> None:
        measure()

    return estimating
