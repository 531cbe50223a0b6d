"""The models of a kind: a job that indexes, judges and switches, and the sensor that asks for it.

Not part of the drain: building an index takes long, and the drain goes on meanwhile. What does not belong here: the
gates and the switch (`resources/model_life.py`).
"""

from dagster import (
    DefaultSensorStatus,
    JobDefinition,
    Nothing,
    OpExecutionContext,
    Out,
    RunRequest,
    SensorDefinition,
    SensorEvaluationContext,
    SkipReason,
    in_process_executor,
    job,
    op,
    sensor,
)

from embed_assets.defs.in_flight import job_in_flight
from embed_assets.defs.naming import ASKED_TAG, KIND_TAG, models_job
from embed_assets.defs.sensors import redacted
from embed_assets.resources.dagster import PostgresResource
from embed_assets.resources.opened import OpenKinds

PROGRESS_STEP = 0.1


def advance(kind: str) -> JobDefinition:
    @op(
        name=f"{kind}_advance_models",
        out=Out(Nothing),
        description="Build the vector index of what is loaded, judge the model that is built beside the active one, "
        "and let search read it when its gates hold (EMBED_SWITCH). What is interrupted goes on in the next run.",
    )
    def advance_models(context: OpExecutionContext, postgres: PostgresResource) -> None:
        told = 0.0

        def progress(done: float) -> None:
            nonlocal told
            if done - told >= PROGRESS_STEP:
                told = done
                context.log.info("the index is built to %.0f %%", 100 * done)

        for line in postgres.advance_models(kind, progress):
            context.log.info(line)

    @job(
        name=models_job(kind), executor_def=in_process_executor, tags={KIND_TAG: kind}, description="Index and switch."
    )
    def models() -> None:
        advance_models()

    return models


def waiting(kind: str, job: JobDefinition, opened: OpenKinds) -> SensorDefinition:
    @sensor(
        name=models_job(kind),
        job=job,
        minimum_interval_seconds=30,
        default_status=DefaultSensorStatus.RUNNING,
        description=f"Asks for an index or a switch of {kind} once a model is loaded. It changes nothing.",
    )
    def look(context: SensorEvaluationContext) -> RunRequest | SkipReason:
        try:
            if not opened.watch(kind).models_wait():
                return SkipReason(f"No model of {kind} waits for its index or for a switch")
        except Exception as error:
            opened.forget(kind)
            return SkipReason(f"{kind} could not be looked at: {redacted(error, opened.settings)}")
        if job_in_flight(context.instance, models_job(kind)):
            return SkipReason(f"A run of {models_job(kind)} is in flight")
        return RunRequest(tags={KIND_TAG: kind, ASKED_TAG: "sensor"})

    return look
