"""The asset checks of a kind: they stand on its chunk asset, and a job and a schedule of their own run them.

None is part of the drain, and none blocks anything: a red check tells, and work goes on.
What does not belong here: what is looked at (`resources/health.py`), what dagster.yaml should say (`instance`).
"""

from collections.abc import Iterator
from typing import Any

from dagster import (
    AssetCheckExecutionContext,
    AssetCheckResult,
    AssetChecksDefinition,
    AssetCheckSeverity,
    AssetCheckSpec,
    AssetSelection,
    DagsterInvariantViolationError,
    DefaultScheduleStatus,
    MetadataValue,
    ScheduleDefinition,
    TableRecord,
    define_asset_job,
    in_process_executor,
    multi_asset_check,
)
from dagster._check import CheckError
from dagster._core.definitions.unresolved_asset_job_definition import UnresolvedAssetJobDefinition

from embed_assets.defs.instance import dagster_instance
from embed_assets.defs.naming import KIND_TAG, checks_job, key
from embed_assets.resources.dagster import OperatorResource
from embed_assets.resources.health import LOOK_SECONDS, LOOKS, Finding, Health, look

INSTANCE = "dagster_instance"
EVERY = "*/15 * * * *"


def checks(kind: str) -> AssetChecksDefinition:
    """Every check of the kind, in one op; a part of them where only that is selected."""
    chunks = key(kind, "semantic_chunks")
    described = {name: (found.__doc__ or "").strip() for name, found in LOOKS.items()}
    described[INSTANCE] = (dagster_instance.__doc__ or "").strip().splitlines()[0]

    @multi_asset_check(
        name=f"{kind}_looks",
        can_subset=True,
        specs=[AssetCheckSpec(name, asset=chunks, description=text) for name, text in described.items()],
    )
    def looks(context: AssetCheckExecutionContext, operator: OperatorResource) -> Iterator[AssetCheckResult]:
        wanted = {found.name for found in context.selected_asset_check_keys}
        found = operator.act(
            kind,
            lambda operating: {name: look(Health(operating), name) for name in LOOKS if name in wanted},
            statement_timeout=f"{LOOK_SECONDS}s",
        )
        if INSTANCE in wanted:
            found[INSTANCE] = dagster_instance(context.instance, _executor(context))
        for name, finding in found.items():
            yield _result(name, finding, asset=chunks)

    return looks


def _executor(context: AssetCheckExecutionContext) -> str | None:
    """The one that assets run in which are materialised by hand; None where no code location is at hand."""
    try:
        project = context.op_execution_context.repository_def
    except (CheckError, DagsterInvariantViolationError):
        return None
    return project.get_implicit_global_asset_job_def().executor_def.name


def _result(name: str, finding: Finding, **where: Any) -> AssetCheckResult:
    metadata: dict[str, Any] = dict(finding.numbers)
    if not finding.passed:
        metadata["what_to_do"] = finding.advice
    if finding.table:
        metadata["groups"] = MetadataValue.table([TableRecord(dict(row)) for row in finding.table])
    return AssetCheckResult(
        check_name=name,
        asset_key=where["asset"],
        passed=finding.passed,
        severity=AssetCheckSeverity.ERROR if finding.error else AssetCheckSeverity.WARN,
        description=finding.text if finding.passed else f"{finding.text}. {finding.advice}",
        metadata=metadata,
    )


def job(kind: str) -> UnresolvedAssetJobDefinition:
    """The checks of the kind's chunks and backfills."""
    return define_asset_job(
        checks_job(kind),
        selection=AssetSelection.checks_for_assets(*(key(kind, name) for name in ("semantic_chunks", "reembedded"))),
        executor_def=in_process_executor,
        tags={KIND_TAG: kind},
        description=f"Look at {kind}: what is late, broken or failed, and what to do. Changes nothing, blocks nothing.",
    )


def schedule(kind: str, of: UnresolvedAssetJobDefinition) -> ScheduleDefinition:
    return ScheduleDefinition(
        name=checks_job(kind),
        job=of,
        cron_schedule=EVERY,
        execution_timezone="UTC",
        default_status=DefaultScheduleStatus.RUNNING,
        description=f"Looks at {kind} every quarter of an hour.",
    )
