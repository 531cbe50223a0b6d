"""For code that changes rows of an indexed table: say so, in the transaction that changes them.

What does not belong here: what becomes of it (`resources/enqueuer.py`). Whoever forgets to say so is found by the scan.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import psycopg
from psycopg.rows import tuple_row

from embed_assets.queries import query

logger = logging.getLogger(__name__)


def announce(
    connection: psycopg.Connection[Any] | None,
    kind: str,
    ids: Sequence[object],
    *,
    reason: str = "write",
    forced: bool = False,
    lane: int = 0,
    scope: str | None = None,
) -> int:
    """Append rows to the feed within the transaction that `connection` is in; returns how many.

    It counts once that is committed, and not at all if it is rolled back. Without a connection or ids nothing is done.
    An error of the queue never harms the change itself: it is logged, only this announcement is undone, and 0 comes
    back. Raises nothing of the database's.
    """
    if connection is None or not ids:
        return 0
    texts = [None if one is None else str(one) for one in ids]
    values = {"kind": kind, "ids": texts, "reason": reason, "forced": forced, "lane": lane, "scope": scope}
    try:
        if not connection.autocommit:
            connection.execute(query("producer.begin"))  # else the block below would begin, and commit, its own
        with connection.transaction(), connection.cursor(row_factory=tuple_row) as cursor:
            row = cursor.execute(query("producer.announce"), values).fetchone()
    except psycopg.Error as error:
        logger.warning("%s: %s rows could not be announced (%s); a scan will find them", kind, len(ids), error.sqlstate)
        return 0
    return int(row[0]) if row else 0
