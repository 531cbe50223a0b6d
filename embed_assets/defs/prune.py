"""`prune_runs`: forgets old runs of our own jobs in Dagster's storage, which would grow for ever.

Only runs that carry our tags: an instance may be shared with other projects. What does not belong here: what is old
in our own tables (`resources/retention.py`).
"""

from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime, timedelta, timezone

from dagster import (
    Config,
    DagsterInstance,
    DagsterRunStatus,
    JobDefinition,
    Nothing,
    OpExecutionContext,
    Out,
    RunsFilter,
    in_process_executor,
    job,
    op,
)
from pydantic import Field

from embed_assets.defs.naming import KIND_TAG, OPERATOR_TAG

NAME = "prune_runs"
GREEN = [DagsterRunStatus.SUCCESS]
RED = [DagsterRunStatus.FAILURE, DagsterRunStatus.CANCELED]
BATCH = 100


class Prune(Config):
    dry_run: bool = Field(default=True, description="Only count what would go; set it to false to do it.")
    days: float = Field(default=7, ge=0, description="Green runs that ended so long ago go.")
    failed_days: float = Field(default=60, ge=0, description="Failed and cancelled ones are kept for so long.")
    most: int = Field(default=5_000, ge=1, description="At most so many in one run, the oldest first.")


def prune_runs(kinds: Sequence[str], operators: Sequence[str]) -> JobDefinition:
    """Forget what ended long ago, of the jobs of these kinds and of the jobs `operators`."""

    @op(name=f"do_{NAME}", out=Out(Nothing), description="Delete runs of these jobs that ended long ago.")
    def prune(context: OpExecutionContext, config: Prune) -> None:
        found = _old(context.instance, _ours(kinds, operators), config)
        for done, run_id in enumerate(found, 1):
            if not config.dry_run:
                context.instance.delete_run(run_id)
            if done % BATCH == 0:
                context.log.info("%s of %s", done, len(found))
        text = f"{len(found)} runs {'would be deleted; nothing was changed' if config.dry_run else 'deleted'}"
        context.log.info("%s", text)
        context.add_output_metadata({"dry_run": config.dry_run, "taken": len(found), "said": text})

    @job(
        name=NAME,
        executor_def=in_process_executor,
        tags={OPERATOR_TAG: NAME},
        description="Forget old runs of these jobs: Dagster keeps every run for ever. Failures are kept for longer.",
    )
    def pruning() -> None:
        prune()

    return pruning


def _ours(kinds: Sequence[str], operators: Sequence[str]) -> list[Mapping[str, str | Sequence[str]]]:
    return [{KIND_TAG: list(kinds)}, {OPERATOR_TAG: [*operators, NAME]}]


def _old(instance: DagsterInstance, ours: Sequence[Mapping[str, str | Sequence[str]]], config: Prune) -> list[str]:
    """Ids of runs that may go, at most `config.most`."""
    now = datetime.now(timezone.utc)
    found: list[str] = []
    for statuses, days in ((GREEN, config.days), (RED, config.failed_days)):
        for tags in ours:
            filters = RunsFilter(statuses=statuses, tags=dict(tags), updated_before=now - timedelta(days=days))
            found += _ids(instance, filters, config.most - len(found))
    return found


def _ids(instance: DagsterInstance, filters: RunsFilter, most: int) -> Iterator[str]:
    if most > 0:
        for record in instance.get_run_records(filters, limit=most, ascending=True):
            yield record.dagster_run.run_id
