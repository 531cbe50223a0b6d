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

from embed_assets.resources.dagster import OutboxResource, PostgresResource

NAME = "maintenance"


def maintenance(kinds: list[str]) -> JobDefinition:
    @op(out=Out(Nothing), description="Scan every kind, and reconcile its facts where that is due.")
    def reconcile(context: OpExecutionContext, outbox: OutboxResource) -> None:
        for kind in kinds:
            report = outbox.enqueue(kind, scan=True)
            context.log.info(
                "%s: %s enqueued, %s revived, %s stamps without chunks",
                kind,
                report.created,
                report.revived,
                report.unstamped,
            )

    @op(
        ins={"reconciled": In(Nothing)},
        out=Out(Nothing),
        description="Forget log, closed waves and unread feeds after EMBED_RETENTION_DAYS, the ledger after 48 h.",
    )
    def purge(context: OpExecutionContext, postgres: PostgresResource) -> None:
        for kind in kinds[:1]:  # the fixed tables are shared by all kinds
            deleted = postgres.purge(kind)
            context.log.info(
                "deleted: %s", ", ".join(f"{table} {rows}" for table, rows in deleted.items()) or "nothing"
            )

    @job(name=NAME, executor_def=in_process_executor, description="Reconcile every kind, and forget what is old.")
    def care() -> None:
        purge(reconciled=reconcile())

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
