"""Care of all kinds, once a day: facts are reconciled, parked dead letters come back, old rows are forgotten.

What does not belong here: the drain's stages (`assets`), and any rule of what is old or parked (`resources`).
"""

from dagster import (
    DefaultScheduleStatus,
    In,
    JobDefinition,
    Nothing,
    OpExecutionContext,
    Out,
    ScheduleDefinition,
    in_process_executor,
    job,
    op,
)

from embed_assets.defs.naming import OPERATOR_TAG
from embed_assets.resources.dagster import OutboxResource, PostgresResource

NAME = "maintenance"


def maintenance(kinds: list[str]) -> JobDefinition:
    @op(
        out=Out(Nothing),
        description="Forget log, closed waves and unread feeds after EMBED_RETENTION_DAYS, the ledger after 48 h, and "
        "the vectors of models that were retired EMBED_ROLLBACK_DAYS ago.",
    )
    def purge(context: OpExecutionContext, postgres: PostgresResource) -> None:
        for kind in kinds[:1]:  # the fixed tables are shared by all kinds
            deleted = postgres.purge(kind)
            counts = ", ".join(f"{table} {rows}" for table, rows in deleted.items())
            context.log.info("deleted: %s", counts or "nothing")
        for kind in kinds:
            for model_id in postgres.drop_retired(kind):
                context.log.info("%s: the partition of model %s is dropped", kind, model_id)

    @op(ins={"purged": In(Nothing)}, out=Out(Nothing), description="Scan every kind; reconcile its facts where due.")
    def reconcile(context: OpExecutionContext, outbox: OutboxResource) -> None:
        failed: list[Exception] = []
        for kind in kinds:
            try:
                report = outbox.enqueue(kind, scan=True)
            except Exception as error:  # the care of the others must not wait for this kind; told below
                context.log.exception("%s could not be reconciled", kind)
                failed.append(error)
                continue
            numbers = (report.created, report.revived, report.unstamped)
            context.log.info("%s: %s enqueued, %s revived, %s stamps without chunks", kind, *numbers)
        if failed:
            raise failed[0]

    @job(
        name=NAME,
        executor_def=in_process_executor,
        tags={OPERATOR_TAG: NAME},
        description="Forget what is old, and reconcile every kind.",
    )
    def care() -> None:
        reconcile(purged=purge())

    return care


def daily(care: JobDefinition) -> ScheduleDefinition:
    return ScheduleDefinition(
        name=f"{NAME}_daily",
        job=care,
        cron_schedule="17 3 * * *",
        execution_timezone="UTC",
        default_status=DefaultScheduleStatus.RUNNING,
        description="Runs maintenance each night.",
    )
