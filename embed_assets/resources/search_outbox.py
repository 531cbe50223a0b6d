"""What an external index is told: the feed `search_outbox`, and the triggers that append to it whoever writes chunks.

What does not belong here: searching (`embed_assets/search.py`), and the clearing write that appends removals.
"""

from __future__ import annotations

from psycopg import Cursor, sql

from embed_assets.queries import query
from embed_assets.resources.declaration import BoundCorpus
from embed_assets.resources.made_functions import made_name
from embed_assets.resources.postgres import Row

EVENTS = ("insert", "update")


def make_triggers(cursor: Cursor[Row], bound: BoundCorpus, chunks: sql.Identifier) -> None:
    """The triggers on one table of the kind's chunks, the parent or a partition, where they are missing.

    Making one waits for writers of that table, never for readers.
    """
    for event in EVENTS:
        values = {"chunks": chunks.as_string(cursor), "trigger": f"tell_search_{event}"}
        row = cursor.execute(query("search_outbox.trigger_missing"), values).fetchone()
        if row and row["missing"]:
            tell = made_name(bound, "tell_search")
            cursor.execute(query(f"search_outbox.create_{event}_trigger", chunks=chunks, tell=tell))


def queue_all(cursor: Cursor[Row], kind: str) -> int:
    """Tell what every row is to an external index once its model was switched, in the caller's transaction, after it.

    Returns how many rows.
    """
    return cursor.execute(query("search_outbox.queue_all"), {"kind": kind}).rowcount
