"""`embed-assets drain`: the loop over waves as a person at a terminal wants it, with a bar, a line a wave and patience.

What does not belong here: the loop itself (`pipeline.drain`).
"""

from __future__ import annotations

import uuid
from dataclasses import replace
from typing import Annotated

import typer

from embed_assets import console
from embed_assets.cli_shared import FAILED, KindName, opened_kind, until_signalled
from embed_assets.errors import EmbedAssetsError, EndpointTrouble, ErrorClass
from embed_assets.models import Counts, Enqueued, Wave
from embed_assets.resources.assembly import Kind
from embed_assets.stop import Stop

WATCH_SECONDS = 5.0
PATIENCE_SECONDS = 60.0
PASSING = (ErrorClass.RATE_LIMITED, ErrorClass.WARMING)


def drain(
    kind: KindName,
    watch: Annotated[bool, typer.Option("--watch", help="Go on when the queue is empty.")] = False,
    allow_clear: Annotated[bool, typer.Option(help="Believe a source that lost more than half of its rows.")] = False,
    scope: Annotated[str | None, typer.Option("--scope", help="Only rows of this scope (a tenant).")] = None,
) -> None:
    """Enqueue what is stale, then embed and write wave after wave until nothing is due."""
    if watch and scope is not None:
        raise EmbedAssetsError("--watch serves every scope: leave out --scope, or drain the scope without --watch.")
    with opened_kind(kind, embeds=True) as opened, until_signalled(opened.postgres) as stop:
        total = _until_empty(opened, stop, watch=watch, scan=True, allow_clear=allow_clear, scope=scope)
        _advance(opened, stop, watch=watch)
        while watch:
            try:
                if opened.outbox.backlog().work or opened.outbox.stale():
                    total += _until_empty(opened, stop, watch=watch, scan=False, allow_clear=allow_clear)
                    _advance(opened, stop, watch=watch)
            except EndpointTrouble as error:
                console.explain(str(error))
            stop.sleep(WATCH_SECONDS)
    if total.failed or total.dead:
        raise typer.Exit(FAILED)


def _await_endpoint(kind: Kind, stop: Stop, watch: bool) -> None:
    """Leave a resting endpoint alone. A refused one is asked all the same: an operator who drains has mended it."""
    while (rest := kind.resting()) and rest.state != "refused":
        if not watch and rest.state != "warming" and rest.seconds > PATIENCE_SECONDS:
            raise EmbedAssetsError(
                f"The embedding endpoint rests for {rest.seconds:.0f} s more ({rest.reason}). Nothing is lost; drain "
                "again then, or use --watch."
            )
        console.err.print(f"the endpoint rests for {rest.seconds:.0f} s: {rest.reason}", markup=False)
        stop.sleep(min(rest.seconds, PATIENCE_SECONDS) + 0.1)


def _until_empty(
    kind: Kind, stop: Stop, *, watch: bool, scan: bool, allow_clear: bool, scope: str | None = None
) -> Counts:
    """Drain, and go on after trouble that passes by itself. Raises EndpointTrouble for any other."""
    total = Counts()
    while True:
        _await_endpoint(kind, stop, watch)
        counts, trouble = _drain(kind, stop, scan=scan, allow_clear=allow_clear, scope=scope)
        total += counts
        if trouble is None:
            return total
        rest = kind.resting()
        if trouble.error_class not in PASSING or (rest and rest.state == "refused"):
            raise trouble


def _drain(
    kind: Kind, stop: Stop, *, scan: bool, allow_clear: bool, scope: str | None
) -> tuple[Counts, EndpointTrouble | None]:
    from embed_assets.pipeline import drain as run

    total, trouble = Counts(), None
    with console.progress(f"drain {kind.outbox.kind}") as (bar, task):

        def report(wave: Wave, counts: Counts, so_far: Counts) -> None:
            nonlocal total
            total, done = so_far, so_far.claimed
            bar.update(task, completed=done, total=done + kind.outbox.backlog().due)
            bar.console.print(console.wave_line(wave, counts, so_far), markup=False)

        def enqueued(found: Enqueued) -> None:
            bar.update(task, total=kind.outbox.backlog().due)
            bar.console.print(console.enqueued_line(found), markup=False)

        try:
            run(
                kind.ports,
                f"cli-{uuid.uuid4()}",
                limits=replace(kind.limits, scope=scope),
                stop=stop,
                scan=scan,
                allow_clear=allow_clear,
                report=report,
                on_enqueued=enqueued,
            )
        except EndpointTrouble as error:
            trouble = error
    console.out.print(console.final_line(total), markup=False)
    return total, trouble


def _advance(kind: Kind, stop: Stop, *, watch: bool) -> None:
    """What was loaded is indexed, and what was built beside is judged: there need be no Dagster for it."""
    if not watch or kind.life.waiting(automatic=kind.settings.switch == "automatic"):
        with console.progress(f"index {kind.outbox.kind}") as (bar, task):
            bar.update(task, total=100)
            for line in kind.life.advance(stop, lambda part: bar.update(task, completed=100 * part)):
                bar.console.print(line, markup=False)
