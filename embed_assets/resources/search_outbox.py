"""What an external index is told: the feed `search_outbox`, its triggers and the functions that hand it out.

What does not belong here: searching (`embed_assets/search.py`), and the clearing write that appends removals.
"""

from __future__ import annotations

from psycopg import Cursor

from embed_assets.queries import query
from embed_assets.resources.declaration import BoundCorpus
from embed_assets.resources.postgres import Row


def queue_all(cursor: Cursor[Row], bound: BoundCorpus) -> int:
    """Tell every indexable row anew, in the caller's transaction: its model was switched. Returns how many."""
    return cursor.execute(query("search_outbox.queue_all", **bound.fragments()), {"kind": bound.kind}).rowcount
