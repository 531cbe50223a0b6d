"""What an operator starts from the Launchpad: one job of one op each, every setting prefilled, and dry first.

With `dry_run: true`, as it stands in the Launchpad, a job says what it would take and changes nothing.
What does not belong here: the doing (`resources/operating.py`), and what runs by itself (`maintenance`, `models`).
"""

from collections.abc import Callable
from typing import Any

from dagster import (
    Config,
    JobDefinition,
    MetadataValue,
    Nothing,
    OpExecutionContext,
    Out,
    TableRecord,
    in_process_executor,
    job,
    op,
)
from pydantic import Field, create_model

from embed_assets.defs.naming import OPERATOR_TAG
from embed_assets.resources.dagster import OperatorResource
from embed_assets.resources.operating import Operating, Taken, Which


class Wanted(Config):
    """What every operator's job is asked."""

    kind: str = Field(description="The kind it is about.")
    dry_run: bool = Field(default=True, description="Only say what would be taken; set it to false to do it.")


class DeadLettersWanted(Wanted):
    code: str = Field(default="", description="Only dead letters of this error code; empty: of every code.")
    ids: list[str] = Field(default=[], description="Only these source ids; empty: all.")


class Reindex(Wanted):
    ids: list[str] = Field(default=[], description="Only these source ids; empty: every row that is out of sync.")
    forced: bool = Field(default=False, description="Buy the texts of `ids` again, also of those that are in sync.")


class Release(Wanted):
    which: Which = Field(
        default="expired", description="expired: whose lease ran out; run: of `run_id`; all: of the kind."
    )
    run_id: str = Field(default="", description="With which: run.")


class Switch(Wanted):
    force: bool = Field(default=False, description="Whatever the gates say.")


class Reset(Wanted):
    limits: bool = Field(default=False, description="Also forget how much a request may hold, as it was learned.")


def operator_jobs(kinds: list[str]) -> list[JobDefinition]:
    """The jobs of a project; each takes the kind as config, the first one unless another is named."""

    def made(name: str, config: type[Config], do: Callable[[Operating, Any], Taken], description: str) -> JobDefinition:
        return _job(name, prefilled(name, config, kinds), do, description)

    return [
        made(
            "retry_dead_letters",
            DeadLettersWanted,
            lambda kind, c: kind.retry(code=c.code or None, ids=c.ids or None, dry_run=c.dry_run),
            "Give dead letters all their attempts again, whatever was parked: all, or those of one code, or some ids.",
        ),
        made(
            "dismiss_dead_letters",
            DeadLettersWanted,
            lambda kind, c: kind.dismiss(code=c.code or None, ids=c.ids or None, dry_run=c.dry_run),
            "Give dead letters up until their source changes: all, or those of one code, or some ids.",
        ),
        made(
            "reindex",
            Reindex,
            lambda kind, c: kind.reindex(ids=c.ids or None, forced=c.forced, dry_run=c.dry_run),
            "Enqueue every row that is out of sync, or some ids. In sync already: nothing is enqueued.",
        ),
        made(
            "release_waves",
            Release,
            lambda kind, c: kind.release_waves(which=c.which, run_id=c.run_id or None, dry_run=c.dry_run),
            "Give back waves whose lease ran out, or those of one run, or all; a run that still works on one stops.",
        ),
        made(
            "switch_model",
            Switch,
            lambda kind, c: kind.switch(force=c.force, dry_run=c.dry_run),
            "Let search read the model that was built; rollback_model takes it back for EMBED_ROLLBACK_DAYS.",
        ),
        made(
            "rollback_model",
            Wanted,
            lambda kind, c: kind.rollback(dry_run=c.dry_run),
            "Let search read the model of before again, at once.",
        ),
        made(
            "pause",
            Wanted,
            lambda kind, c: kind.pause(dry_run=c.dry_run),
            "No wave is claimed from now on. It ends when the writes under way are committed.",
        ),
        made(
            "cancel_backfill",
            Wanted,
            lambda kind, c: kind.cancel_backfill(dry_run=c.dry_run),
            "Take back what backfills asked for and is not under way; what changed meanwhile stays.",
        ),
        made("resume", Wanted, lambda kind, c: kind.resume(dry_run=c.dry_run), "Claim again."),
        made(
            "reset_endpoint",
            Reset,
            lambda kind, c: kind.reset_endpoint(limits=c.limits, dry_run=c.dry_run),
            "Forget that the embedding endpoint rests or refuses: it is asked again at once.",
        ),
    ]


def prefilled(name: str, config: type[Config], kinds: list[str]) -> type[Config]:
    """The config with the project's first kind as the default, so that the Launchpad is ready to run."""
    if not kinds:
        return config
    described = Field(default=kinds[0], description=f"The kind it is about: {', '.join(kinds)}.")
    return create_model(f"{name}_config", __base__=config, kind=(str, described))


def _job(name: str, config: type[Config], do: Callable[[Operating, Any], Taken], description: str) -> JobDefinition:
    # Not the job's own name: Dagster refuses a project in which an op and a job share one.
    @op(name=f"do_{name}", out=Out(Nothing), description=description)
    def act(context: OpExecutionContext, config: config, operator: OperatorResource) -> None:  # type: ignore[valid-type]
        wanted: Any = config
        taken = operator.act(wanted.kind, lambda kind: do(kind, wanted))
        context.log.info("%s: %s", wanted.kind, taken.text)
        context.add_output_metadata(_metadata(wanted, taken))

    @job(name=name, executor_def=in_process_executor, tags={OPERATOR_TAG: name}, description=description)
    def operate() -> None:
        act()

    return operate


def _metadata(wanted: Any, taken: Taken) -> dict[str, Any]:
    found: dict[str, Any] = {"kind": wanted.kind, "dry_run": wanted.dry_run, "taken": taken.rows, "said": taken.text}
    if taken.groups:
        found["groups"] = MetadataValue.table([TableRecord(dict(group)) for group in taken.groups])
    return found
