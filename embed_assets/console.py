"""What people see of the command line: tables, progress, log lines. No work is done here."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from embed_assets.load import LoadReport
from embed_assets.models import STATES, Backlog, Counts, Enqueued, Status, Wave
from embed_assets.resources.model_gates import Model, Standing
from embed_assets.resources.operator import DeadLetters, Latency, Waiting
from embed_assets.resources.similar_store import Refreshed
from embed_assets.resources.vector_index import IndexState
from embed_assets.resources.verdict import Verdict
from embed_assets.search import Answer

out = Console(highlight=False, soft_wrap=True)
err = Console(stderr=True, highlight=False, soft_wrap=True)

MEANINGS = {
    "dead": "failed for good: retry or dismiss",
    "leased": "being worked on now",
    "waiting": "failed, tried again later",
    "due": "to be embedded or cleared",
    "fresh": "indexed as it is now",
    "dismissed": "given up by an operator",
    "excluded": "not for search",
}
SNIPPET = 160


@contextmanager
def progress(description: str, total: int | None = None) -> Iterator[tuple[Progress, Any]]:
    """A bar on stderr, so that stdout stays for results."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=err, transient=False) as bar:
        yield bar, bar.add_task(description, total=total)


def explain(text: str) -> None:
    """One paragraph about an error, to stderr."""
    err.print(text, style="red", markup=False)


def enqueued_line(report: Enqueued) -> str:
    if report.skipped:
        return "enqueued: another enqueuer is at work, skipped"
    parts = f"enqueued {report.created}, folded {report.folded}, revived {report.revived}"
    return parts + (f", unstamped {report.unstamped}" if report.unstamped else "")


def wave_line(wave: Wave, counts: Counts, total: Counts) -> str:
    """One heartbeat line per wave: its own counts, then the running totals."""
    return (
        f"wave {wave.wave_id}: {counts.claimed} claimed, {counts.indexed} indexed, "
        f"{counts.removed + counts.gone} removed, {counts.texts} texts embedded ({counts.sent} sent), "
        f"{counts.reused} reused, {counts.tokens} tokens"
        f" | so far: {total.indexed} indexed, {total.removed + total.gone} removed, {total.failed} failed, "
        f"{total.dead} dead"
    )


def final_line(total: Counts) -> str:
    """The four counters."""
    return (
        f"indexed={total.indexed} removed={total.removed + total.gone} failed={total.failed} dead_lettered={total.dead}"
    )


def latency_line(latency: Latency) -> str:
    if latency.p50 is None or latency.p95 is None:
        return "nothing was indexed in the last 24 h"
    quantiles = f"{latency.p50:.1f} s median, {latency.p95:.1f} s p95"
    return f"{latency.indexed} indexed in the last 24 h, from enqueued to visible: {quantiles}"


def standing_line(standing: Standing) -> str | None:
    """None while search reads the model that is kept fresh."""
    if standing.building is None:
        return None
    fresh = "it is kept fresh"
    if standing.frozen_since:
        fresh = f"it is frozen since {standing.frozen_since:%Y-%m-%d %H:%M} (set EMBED_ACTIVE_* to keep it fresh)"
    waits = f"; {standing.unmet}" if standing.unmet else ""
    return f"search reads {standing.active}, {fresh}; {standing.building} is being built{waits}"


def verdict_line(verdict: Verdict) -> str:
    return f"{verdict.state.value}: {verdict.reason}"


def status_json(status: Status, backlog: Backlog, latency: Latency, standing: Standing, verdict: Verdict) -> str:
    counts = {state: status.counts.get(state, 0) for state in STATES}
    return json.dumps(
        {
            "kind": status.kind,
            "model": status.identity,
            "verdict": verdict.state.value,
            "reason": verdict.reason,
            "active_model": standing.active,
            "frozen_since": standing.frozen_since,
            "total": status.total,
            **counts,
            "feed": backlog.feed,
            "expired_waves": backlog.expired,
            "paused": backlog.paused,
            "latency_seconds": {"p50": latency.p50, "p95": latency.p95, "p99": latency.p99},
        },
        default=str,
    )


def status_table(status: Status, backlog: Backlog) -> Table:
    table = Table(title=f"{status.kind} · {status.identity}", title_justify="left")
    for heading in ("state", "rows", "what it means"):
        table.add_column(heading, justify="right" if heading == "rows" else "left")
    for state in STATES:
        table.add_row(state, str(status.counts.get(state, 0)), MEANINGS[state])
    table.add_section()
    table.add_row("total", str(status.total), "paused" if backlog.paused else "")
    return table


def models_table(models: Sequence[tuple[Model, IndexState]]) -> Table:
    table = Table(title="models", title_justify="left")
    for heading in ("model", "width", "state", "rows", "index", "what it waits for"):
        table.add_column(heading, justify="right" if heading in ("width", "rows") else "left", overflow="fold")
    for model, index in models:
        since = model.retired_at if model.state == "retired" else model.target_since if model.target else None
        state = f"{model.state} since {since:%Y-%m-%d %H:%M}" if since else model.state
        built = "ready" if index.valid else f"building, {index.done:.0%}" if index.building else "none"
        table.add_row(
            *(model.identity, str(model.dimensions), state, str(model.stamped), built),
            model.unmet if model.state == "building" else "",
        )
    return table


def failures_table(groups: Sequence[DeadLetters]) -> Table:
    table = Table(title="dead letters", title_justify="left")
    for heading in ("code", "rows", "for example", "last failure", "what to do"):
        table.add_column(heading, justify="right" if heading == "rows" else "left")
    for group in groups:
        last = group.last_failed_at.strftime("%Y-%m-%d %H:%M")
        table.add_row(group.error_code, str(group.rows), group.sample, last, group.next_step)
    return table


def waiting_table(groups: Sequence[Waiting]) -> Table:
    table = Table(title="waiting for another try", title_justify="left")
    for heading in ("code", "rows", "for example", "next try"):
        table.add_column(heading, justify="right" if heading == "rows" else "left")
    for group in groups:
        table.add_row(group.error_code, str(group.rows), group.sample, f"{group.next_attempt_at:%Y-%m-%d %H:%M:%S}")
    return table


def answer_json(answer: Answer) -> str:
    hits = [{"source_id": h.source_id, "score": round(h.score, 4), **h.fields, "chunk": h.body} for h in answer.hits]
    semantic = "available" if answer.semantic else "unavailable"
    return json.dumps({"semantic": semantic, "reason": answer.reason, "hits": hits}, ensure_ascii=False)


def print_answer(answer: Answer) -> None:
    if not answer.semantic:
        err.print(f"semantic: unavailable ({answer.reason}); ranked by words", style="yellow", markup=False)
    for rank, hit in enumerate(answer.hits, 1):
        heading = " · ".join(value for value in hit.fields.values() if value) or hit.source_id
        body = " ".join(hit.body.split())
        out.print(f"{rank}. {hit.score:.3f}  {heading}  [{hit.source_id}]", markup=False)
        out.print(f"   {body[:SNIPPET]}{'…' if len(body) > SNIPPET else ''}", style="dim", markup=False)
    if not answer.hits:
        out.print("nothing found")


def similar_json(rows: Sequence[Mapping[str, Any]]) -> str:
    found = [{"source_id": row["source_id"], "distance": round(row["distance"], 4), **row["fields"]} for row in rows]
    return json.dumps(found, ensure_ascii=False)


def print_similar(rows: Sequence[Mapping[str, Any]]) -> None:
    for rank, row in enumerate(rows, 1):
        heading = " · ".join(value for value in row["fields"].values() if value) or row["source_id"]
        out.print(f"{rank}. {1 - row['distance']:.3f}  {heading}  [{row['source_id']}]", markup=False)
    if not rows:
        out.print("no neighbours are kept of this row")


def refreshed_line(done: Refreshed) -> str:
    if done.postponed:
        return f"nothing was computed: {done.postponed}"
    return (
        f"{done.invalidated} rows invalidated, {done.expanded} rows that list them, {done.computed} lists computed, "
        f"{done.outdated} outdated"
    )


def print_load(report: LoadReport) -> None:
    out.print(
        f"inserted {report.inserted}, updated {report.updated}, unchanged {report.unchanged}, closed {report.closed}"
    )
    for bad in report.bad_lines:
        err.print(f"line {bad.number} skipped: {bad.reason}", style="yellow", markup=False)
    if report.bad_count > len(report.bad_lines):
        err.print(f"… and {report.bad_count - len(report.bad_lines)} more bad lines", style="yellow")
    for repeated in report.repeated:
        err.print(f"line {repeated.number}: {repeated.reason}", style="yellow", markup=False)
    if report.closing_refused:
        err.print(f"nothing was closed: {report.closing_refused}", style="yellow", markup=False)
    if report.unresolved_duplicates:
        err.print(f"{report.unresolved_duplicates} rows are duplicates of nothing known", style="yellow")
