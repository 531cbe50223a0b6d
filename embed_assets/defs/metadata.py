"""Metadata of the materialisations: numbers under stable keys, so that the UI charts them over time; and on the chunk
asset pictures and tables.

What does not belong here: texts of rows, ids of rows, anything that grows with the number of rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dagster import MetadataValue, TableMetadataValue, TableRecord

from embed_assets.defs import pictures
from embed_assets.models import Backlog, Counts, Enqueued, Wave
from embed_assets.resources.portrait import Portrait
from embed_assets.resources.similar_store import Refreshed, Waiting

Numbers = dict[str, int | float]


def of_enqueue(enqueued: Enqueued, backlog: Backlog) -> Numbers:
    """What was found, and how the queue stands now."""
    return {
        "feed_rows_folded": enqueued.folded,
        "entries_created": enqueued.created,
        "entries_revived": enqueued.revived,
        "stamps_repaired": enqueued.unstamped,
        "ids_unknown": enqueued.unknown,
        "scanned": int(enqueued.scanned),
        "skipped": int(enqueued.skipped),
        "rows_due": backlog.due,
        "rows_leased": backlog.leased,
        "rows_waiting": backlog.waiting,
        "rows_dead": backlog.dead,
    }


def of_claim(waves: list[Wave]) -> Numbers:
    return {"waves": len(waves), "rows_claimed": sum(len(wave.entries) for wave in waves)}


def of_staging(counts: Counts, *, waves: int, released: int, seconds: float) -> Numbers:
    """`chunks_reused` cost nothing: their vectors were in the chunk table or the ledger. `texts_sent` over
    `texts_embedded` is what repeats cost.
    """
    return {
        "waves": waves,
        "waves_released": released,
        "rows_claimed": counts.claimed,
        "chunks": counts.chunks,
        "chunks_reused": counts.reused,
        "texts_embedded": counts.texts,
        "texts_sent": counts.sent,
        "tokens": counts.tokens,
        "rows_failed": counts.failed,
        "rows_dead": counts.dead,
        "rows_back": counts.back + counts.lost,
        "seconds": round(seconds, 3),
        "texts_per_second": round(counts.texts / seconds, 1) if seconds > 0 else 0.0,
    }


def of_writing(counts: Counts, *, waves: int, seconds: float) -> Numbers:
    return {
        "waves": waves,
        "rows_indexed": counts.indexed,
        "rows_removed": counts.removed + counts.gone,
        "rows_superseded": counts.superseded,
        "rows_failed_in_write": counts.failed,
        "rows_dead_in_write": counts.dead,
        "rows_back": counts.back + counts.lost,
        "seconds": round(seconds, 3),
    }


def of_similar(done: Refreshed, waiting: Waiting, *, seconds: float) -> Numbers:
    """`rows_expanded`: rows that listed one that changed."""
    return {
        "rows_invalidated": done.invalidated,
        "rows_expanded": done.expanded,
        "lists_computed": done.computed,
        "lists_outdated": done.outdated,
        "rows_waiting": waiting.feed,
        "lists_stale": waiting.stale,
        "seconds": round(seconds, 3),
    }


def of_portrait(found: Portrait) -> dict[str, MetadataValue]:
    """Pictures as markdown, waves and failures as tables. What could not be counted in time is not shown."""
    shown: dict[str, MetadataValue] = {
        "picture_of_latency": MetadataValue.md(pictures.latency(found.seconds)),
        "picture_of_vectors": MetadataValue.md(pictures.vectors(found.points, found.groups)),
    }
    if found.status:
        shown["picture_of_coverage"] = MetadataValue.md(pictures.coverage(found.status.counts))
    if found.waves:
        shown["table_of_waves"] = _table(found.waves)
    if found.failures:
        shown["table_of_failures"] = _table(
            [{"code": f.error_code, "rows": f.rows, "what to do": f.next_step} for f in found.failures]
        )
    return shown


def _table(rows: Sequence[Mapping[str, int | float | str]]) -> TableMetadataValue:
    return MetadataValue.table([TableRecord(dict(row)) for row in rows])
