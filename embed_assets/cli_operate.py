"""Commands for whoever operates a kind: look at dead letters, retry or dismiss them, pause, resume, forget.

What changes rows says first what it would take, and does it with --yes. What does not belong here: the doing
(`resources/operator.py`, `resources/retention.py`).
"""

from __future__ import annotations

import json
import uuid
from dataclasses import asdict
from typing import Annotated

import typer

from embed_assets import console
from embed_assets.cli_shared import AsJson, KindName, opened_kind
from embed_assets.migrate import migrate
from embed_assets.resources.assembly import database_url
from embed_assets.resources.backfill import BUCKETS, bucket_of
from embed_assets.resources.metrics import prometheus
from embed_assets.resources.operator import LISTED, MOST_LISTED, DeadLetters, Operator
from embed_assets.resources.postgres import Postgres
from embed_assets.resources.retention import purge as forget
from embed_assets.settings import load_settings
from embed_assets.stop import Stop

operate = typer.Typer()

Code = Annotated[str | None, typer.Option("--code", help="Only this error code, or class.")]
Ids = Annotated[list[str] | None, typer.Option("--id", help="Only this source id; may be given often.")]
Yes = Annotated[bool, typer.Option("--yes", help="Do it; without, only say what would be taken.")]


Prefix = Annotated[str | None, typer.Option("--prefix", help="With --list: source ids that begin so.")]
Limit = Annotated[int, typer.Option("--limit", min=1, max=MOST_LISTED, help="With --list: at most so many.")]


@operate.command()
def failures(
    kind: KindName,
    code: Code = None,
    one_by_one: Annotated[bool, typer.Option("--list", help="One by one, the newest first.")] = False,
    prefix: Prefix = None,
    limit: Limit = LISTED,
    as_json: AsJson = False,
) -> None:
    """Dead letters by error code, with one of them and what to do; and what waits for another try."""
    if one_by_one or prefix is not None:
        _list(kind, code, prefix, limit, as_json)
        return
    with opened_kind(kind) as opened:
        operator = Operator(opened.postgres, kind)
        groups, waiting = operator.dead_letters(code=code), operator.waiting(code=code)
    if as_json:
        rows = [{"state": "dead", **asdict(group), "next_step": group.next_step} for group in groups]
        rows += [{"state": "waiting", **asdict(group)} for group in waiting]
        typer.echo(json.dumps(rows, default=str, ensure_ascii=False))
        return
    console.out.print(console.failures_table(groups) if groups else "no dead letters")
    if waiting:
        console.out.print(console.waiting_table(waiting))


@operate.command()
def retry(kind: KindName, code: Code = None, ids: Ids = None, yes: Yes = False) -> None:
    """Give dead letters all their attempts again, whatever was parked."""
    with opened_kind(kind) as opened:
        operator = Operator(opened.postgres, kind)
        found = operator.dead_letters(code=code, ids=ids)
        _say("retried", found, operator.retry(code=code, ids=ids) if yes else None, operator)


@operate.command()
def dismiss(kind: KindName, code: Code = None, ids: Ids = None, yes: Yes = False) -> None:
    """Give dead letters up until their source changes."""
    with opened_kind(kind) as opened:
        operator = Operator(opened.postgres, kind)
        found = operator.dead_letters(code=code, ids=ids)
        _say("dismissed", found, operator.dismiss(code=code, ids=ids) if yes else None, operator)


@operate.command()
def cancel(
    kind: KindName,
    reason: Annotated[str, typer.Option("--reason", help="backfill, scan, write, reconcile or manual.")],
) -> None:
    """Take back the pending entries of one reason; what is leased, waiting or dead stays."""
    with opened_kind(kind) as opened:
        # A backfill is more than its pending entries: its buckets must not turn green.
        backfill = reason == "backfill"
        rows = opened.backfill.cancel() if backfill else Operator(opened.postgres, kind).cancel(reason)
    console.out.print(f"cancelled {rows}")


@operate.command()
def reembed(
    kind: KindName,
    buckets: Annotated[list[str] | None, typer.Option("--bucket", help="b00 to b63; may be given often.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="Also what is fresh: bought anew.")] = False,
    reason: Annotated[str, typer.Option(help="Kept with the request.")] = "asked for on the command line",
) -> None:
    """Ask for rows to be embedded again, behind every change: the stale ones, or all. A drain does it."""
    numbers = [bucket_of(name) for name in buckets] if buckets else list(range(BUCKETS))
    with opened_kind(kind) as opened:
        asked = opened.backfill.ask(
            numbers, selection="all" if everything else "stale", reason=reason, run_id=f"cli-{uuid.uuid4()}"
        )
    console.out.print(f"asked for {sum(asked.values())} rows of {len(asked)} buckets")


@operate.command()
def estimate(
    kind: KindName, stale: Annotated[bool, typer.Option("--stale", help="Only what is not up to date.")] = False
) -> None:
    """Rows, texts, tokens, hours and disk that embedding a kind takes, before a new model or a backfill."""
    with opened_kind(kind) as opened:
        found = opened.estimate("stale" if stale else "all")
    hours = "unknown (nothing was embedded yet)" if found.hours is None else f"{found.hours:.2f}"
    how = "measured" if found.measured else "from a sample"
    size = f"texts {found.texts}, tokens {found.tokens}, MB {found.bytes / 1e6:.1f}"
    console.out.print(f"rows {found.rows}, {size}, hours {hours} ({how})")


@operate.command()
def pause(kind: KindName) -> None:
    """No claim from now on; returns when the writes under way are committed."""
    with opened_kind(kind) as opened:
        console.out.print("paused" if Operator(opened.postgres, kind).pause() else "was paused already")


@operate.command()
def resume(kind: KindName) -> None:
    """Claim again."""
    with opened_kind(kind) as opened:
        console.out.print("resumed" if Operator(opened.postgres, kind).resume() else "was not paused")


@operate.command()
def purge(kind: KindName) -> None:
    """Forget what is older than EMBED_RETENTION_DAYS (the ledger: 48 h; retired models: EMBED_ROLLBACK_DAYS)."""
    with opened_kind(kind) as opened:
        deleted = forget(opened.postgres, days=opened.settings.retention_days)
        dropped = opened.life.drop_retired(days=opened.settings.rollback_days, stop=Stop())
        deleted |= {"retired models": len(dropped)} if dropped else {}
    console.out.print(", ".join(f"{table} {rows}" for table, rows in deleted.items()) or "everything is kept")


@operate.command()
def metrics(
    rows: Annotated[
        bool, typer.Option("--rows", help="Also each kind's rows by state; reads its whole table.")
    ] = False,
) -> None:
    """Numbers of every kind for a monitor, in Prometheus' text format; no label says whose row it counts."""
    url = database_url(load_settings())
    migrate(url)
    postgres = Postgres(url)
    try:
        typer.echo(prometheus(postgres, rows=rows), nl=False)
    finally:
        postgres.close()


def _list(kind: str, code: str | None, prefix: str | None, limit: int, as_json: bool) -> None:
    with opened_kind(kind) as opened:
        letters = Operator(opened.postgres, kind).listed(code=code, prefix=prefix, limit=limit)
    if as_json:
        typer.echo(json.dumps([asdict(letter) for letter in letters], default=str, ensure_ascii=False))
        return
    for one in letters:
        console.out.print(
            f"{one.source_id}  {one.error_code}  {one.occurrences}×  {one.last_failed_at:%Y-%m-%d %H:%M:%S}  "
            f"{one.error_message}",
            markup=False,
        )
    if not letters:
        console.out.print("no dead letters")


def _say(done: str, found: list[DeadLetters], rows: int | None, operator: Operator) -> None:
    if not found and not rows:
        console.out.print(operator.codes())
        return
    if rows is not None:
        console.out.print(f"{done} {rows}")
        return
    for group in found:
        console.out.print(f"would be {done}: {group.rows} with {group.error_code}, for example {group.sample}")
    console.out.print("nothing was changed; add --yes")
