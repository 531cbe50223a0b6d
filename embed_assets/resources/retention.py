"""Forgetting: the log, closed waves, the ledger and unread feeds, in batches of bounded size with a commit each."""

from __future__ import annotations

from embed_assets.resources.postgres import Postgres
from embed_assets.stop import Stop

BATCH = 5_000
FEEDS = ("log", "waves", "ledger", "search_outbox", "similar_invalidations", "plans")


def purge(postgres: Postgres, *, days: float, stop: Stop | None = None) -> dict[str, int]:
    """Delete what is older than `days` (the ledger: 48 h); returns the rows deleted by table.

    `days` ≤ 0 keeps everything. Open entries, dead letters and open waves are never touched. Interrupted, it has
    kept what it committed and goes on next time.
    """
    if days <= 0:
        return {}
    stop = stop or Stop()
    return {feed: _purge(postgres, feed, days, stop) for feed in FEEDS}


def _purge(postgres: Postgres, feed: str, days: float, stop: Stop) -> int:
    total = 0
    while True:
        stop.check()
        deleted = postgres.execute(f"retention.{feed}", {"days": days, "limit": BATCH})
        total += deleted
        if deleted < BATCH:
            return total
