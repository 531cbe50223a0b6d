"""A real database, two workers, a producer and an operator on it, and a way to look at everything at once.

Time passes by hand: leases and waiting times are moved in the tables. Nothing here knows what is right; that stands
in `laws.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import psycopg
from fakes import HashEmbedder
from psycopg import sql
from psycopg.rows import namedtuple_row

from embed_assets.corpora.jobs import jobs
from embed_assets.embedding import Embedded, Rejected
from embed_assets.load import create_jobs_table
from embed_assets.resources.assembly import Kind, assemble, maintained
from embed_assets.resources.declaration import bind
from embed_assets.resources.operator import Operator
from embed_assets.resources.postgres import Postgres, Row, _register, connect
from embed_assets.resources.tables import make_tables
from embed_assets.settings import Settings

SLOTS = ("1", "2", "3", "4", "5", "6")
INDEXABLE = "closed_at IS NULL AND duplicate_of IS NULL AND is_tech IS TRUE"
# Rows 3 and 6 are of one scope, the others of another.
CORPUS = replace(jobs, max_chars=100, scope="CASE WHEN self.id % 3 = 0 THEN 'far' ELSE 'near' END")
PREFIX = "passage: Title at Acme. "
STATE_TABLES = (
    "source_changes",
    "semantic_outbox",
    "claimed_waves",
    "wave_chunks",
    "chunk_embeddings",
    "semantic_stamps",
    "similar_invalidations",
    "search_outbox",
    "semantic_outbox_log",
    "job_semantic_chunks",
)

Words = tuple[str, ...]


def body_of(word: str) -> str:
    """One paragraph that makes one chunk."""
    return " ".join([word] * 40)


def html_of(words: Words) -> str:
    return "".join(f"<p>{body_of(word)}</p>" for word in words)


class CountingEmbedder(HashEmbedder):
    """A vector says which text it is of and which purchase made it: (number of the text, generation, 1)."""

    def __init__(self) -> None:
        super().__init__(3, identity="counting")
        self.generation = 0
        self.sent: list[str] = []
        self._numbers: dict[str, int] = {}

    def forget(self) -> None:
        self.generation, self.sent, self._numbers = 0, [], {}

    def _answer(self, start: int, part: list[str]) -> Iterator[Embedded | Rejected]:
        made = []
        for text in part:
            if text not in self._numbers:
                self._numbers[text] = len(self.sent)
                self.sent.append(text)
            self.generation += 1
            made.append((self._numbers[text], self.generation, 1))
        yield Embedded(list(range(start, start + len(part))), np.array(made, dtype=np.float32), len(part))


class Watched:
    """A cursor before each of whose statements something else may happen."""

    def __init__(self, cursor: psycopg.Cursor[Row], before: Callable[[], None]) -> None:
        self._cursor = cursor
        self._before = before

    def execute(self, *args: Any, **kwargs: Any) -> psycopg.Cursor[Row]:
        self._before()
        return self._cursor.execute(*args, **kwargs)

    def copy(self, *args: Any, **kwargs: Any) -> Any:
        self._before()
        return self._cursor.copy(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cursor, name)


class Interleaved(Postgres):
    """One connection of a worker. `arm` lets an action of somebody else happen before its n-th statement."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self._kept: psycopg.Connection[Row] | None = None
        self._armed: tuple[int, Callable[[], None]] | None = None
        self._count = 0
        self.fired_at: int | None = None

    @contextmanager
    def _connection(self) -> Iterator[psycopg.Connection[Row]]:
        if self._kept is None:
            self._kept = connect(self.url, "worker")
            _register(self._kept)
        yield self._kept

    @contextmanager
    def transaction(self, **options: Any) -> Iterator[Any]:
        with super().transaction(**options) as cursor:
            yield Watched(cursor, self._tick)

    @contextmanager
    def armed(self, at: int, action: Callable[[], None]) -> Iterator[None]:
        """`action` happens before the at-th statement, or at the end when there are fewer."""
        self._count, self._armed, self.fired_at = 0, (at, action), None
        try:
            yield
        finally:
            left, self._armed = self._armed, None
        if left:
            left[1]()

    def _tick(self) -> None:
        self._count += 1
        if self._armed and self._count == self._armed[0]:
            action, self._armed = self._armed[1], None
            self.fired_at = self._count
            action()

    def close(self) -> None:
        if self._kept:
            self._kept.close()


@dataclass(frozen=True)
class Snapshot:
    """All state at one moment. `log` holds what came since the snapshot before."""

    entries: Mapping[str, Any]
    waves: Mapping[int, Any]
    stamps: Mapping[str, Any]
    chunks: Mapping[str, Sequence[Any]]
    feed: Sequence[Any]
    plans: Mapping[tuple[int, str], Any]
    rows: Mapping[str, Any]
    log: Sequence[Any]
    paused: bool

    def stale(self, slot: str) -> bool:
        """Whether the stamp is not what the source says."""
        row, stamp = self.rows.get(slot), self.stamps.get(slot)
        if row is None or not row.indexable:
            return stamp is not None
        return stamp is None or stamp.revision != row.revision

    def leased(self, wave_id: int) -> set[str]:
        return {slot for slot, e in self.entries.items() if e.status == "leased" and e.wave_id == wave_id}


LOOK = f"""
SELECT source_id, status, wave_id, attempts, crashes, timeouts, deaths, failures, forced, requested_at, revision,
    revision_known, error_class, dismissed_at IS NOT NULL AS dismissed, next_attempt_at <= clock_timestamp() AS ripe,
    last_failed_at, enqueued_at, scope
FROM embed_assets.semantic_outbox;
SELECT wave_id, token, started_at IS NOT NULL AS started, lease_until <= clock_timestamp() AS lapsed, outcome,
    closed_at IS NOT NULL AS closed, claimed_at, claimed, indexed, removed, gone, superseded, failed, dead, lost, texts
FROM embed_assets.claimed_waves;
SELECT source_id, revision, chunk_count, embedded_at, wave_id FROM embed_assets.semantic_stamps;
SELECT id::text AS source_id, chunk_index, body, embedding::real[] AS vector
FROM embed_assets.job_semantic_chunks ORDER BY id, chunk_index;
SELECT id, source_id, forced FROM embed_assets.source_changes;
SELECT wave_id, source_id, action, chunk_count, revision FROM embed_assets.wave_chunks WHERE chunk_index = -1;
SELECT id::text AS source_id, content_hash AS revision, ({INDEXABLE}) IS TRUE AS indexable FROM jobs;
SELECT id, source_id, outcome, wave_id, error_class FROM embed_assets.semantic_outbox_log WHERE id > {{}} ORDER BY id;
SELECT paused_at IS NOT NULL AS paused FROM embed_assets.corpora
"""


class World:
    """The database and everybody who works on it. `reset` makes it empty again."""

    def __init__(self, url: str) -> None:
        self.db = psycopg.connect(url, autocommit=True, row_factory=namedtuple_row)
        self.producer = psycopg.connect(url)
        create_jobs_table(self.db)
        self.embedder = CountingEmbedder()
        self.postgres = [Interleaved(url), Interleaved(url)]
        self.workers = [self._worker(postgres) for postgres in self.postgres]
        self.operator = Operator(self.workers[0].postgres, "jobs")
        self._logged = 0

    def _worker(self, postgres: Postgres) -> Kind:
        bound = bind(postgres, CORPUS)
        make_tables(postgres, bound)
        # Nothing falls due by itself however slow the machine: leases last, and retries are put off (`postpone`).
        settings = Settings(lease_seconds=36_000, reconcile_seconds=360_000)
        return assemble(settings, postgres, bound, [maintained(settings, postgres, bound, CORPUS, self.embedder)])

    def close(self) -> None:
        for worker in self.workers:
            worker.close()
        self.producer.close()
        self.db.close()

    def reset(self) -> None:
        self.producer.rollback()
        tables = ", ".join(f"embed_assets.{table}" for table in STATE_TABLES)
        self.db.execute(
            f"""
            TRUNCATE jobs, {tables} RESTART IDENTITY;
            UPDATE embed_assets.corpora SET paused_at = NULL;
            UPDATE embed_assets.corpus_scans SET token = NULL, until = NULL;
            """
        )
        self.embedder.forget()
        self._logged = 0
        self.scan_late()

    def look(self) -> Snapshot:
        cursor = self.db.execute(sql.SQL(LOOK).format(sql.Literal(self._logged)))
        found = [cursor.fetchall()]
        while cursor.nextset():
            found.append(cursor.fetchall())
        entries, waves, stamps, chunks, feed, plans, rows, log, corpora = found
        by_source: dict[str, list[Any]] = {}
        for chunk in chunks:
            by_source.setdefault(chunk.source_id, []).append(chunk)
        self._logged = log[-1].id if log else self._logged
        return Snapshot(
            entries={e.source_id: e for e in entries},
            waves={w.wave_id: w for w in waves},
            stamps={s.source_id: s for s in stamps},
            chunks=by_source,
            feed=feed,
            plans={(p.wave_id, p.source_id): p for p in plans},
            rows={r.source_id: r for r in rows},
            log=log,
            paused=corpora[0].paused,
        )

    # Time

    def scan_late(self, *, reconcile: bool = False) -> None:
        """Neither scan nor reconcile is due by itself, or the reconcile is."""
        last = "NULL" if reconcile else "clock_timestamp()"
        self.db.execute(
            f"UPDATE embed_assets.corpus_scans SET last_scan_at = clock_timestamp(), seconds = 100000, "
            f"last_reconcile_at = {last}"
        )

    def postpone(self) -> None:
        """What waits goes on waiting until `ripen`."""
        self.db.execute(
            "UPDATE embed_assets.semantic_outbox SET next_attempt_at = clock_timestamp() + interval '1 day' "
            "WHERE status = 'retry_wait' AND next_attempt_at > clock_timestamp()"
        )

    def ripen(self) -> None:
        """Everything that waits is due, in an order that a repetition finds again."""
        self.db.execute(
            "UPDATE embed_assets.semantic_outbox "
            "SET next_attempt_at = clock_timestamp() - interval '1 minute' + source_id::integer * interval '1 second' "
            "WHERE status = 'retry_wait'"
        )

    def end_parks(self) -> None:
        self.db.execute(
            "UPDATE embed_assets.semantic_outbox SET last_failed_at = last_failed_at - interval '7 hours' "
            "WHERE status = 'dead'"
        )

    def expire(self, wave_id: int) -> bool:
        """The wave's lease runs out; False while somebody holds the wave's row."""
        return bool(
            self.db.execute(
                "UPDATE embed_assets.claimed_waves SET lease_until = clock_timestamp() - interval '1 second' "
                "WHERE wave_id = (SELECT wave_id FROM embed_assets.claimed_waves WHERE wave_id = %s AND "
                "closed_at IS NULL FOR UPDATE SKIP LOCKED)",
                (wave_id,),
            ).rowcount
        )

    # The source

    def change(self, connection: psycopg.Connection[Any], slot: str, what: str, words: Words, present: bool) -> str:
        """One change of one row by a connection; returns the revision it has then ('' when it is gone)."""
        if what == "delete":
            connection.execute("DELETE FROM jobs WHERE id = %s", (slot,))
            return ""
        if not present:
            statement = (
                "INSERT INTO jobs (id, title, company, description, is_tech, created_at) OVERRIDING SYSTEM VALUE "
                "VALUES (%(id)s, 'Title', 'Acme', %(text)s, TRUE, '2026-01-01'::timestamptz + %(id)s * interval '1h') "
                "RETURNING content_hash"
            )
        elif what == "close":
            statement = "UPDATE jobs SET closed_at = now() WHERE id = %(id)s RETURNING content_hash"
        elif what == "reopen":
            statement = "UPDATE jobs SET closed_at = NULL WHERE id = %(id)s RETURNING content_hash"
        else:
            statement = "UPDATE jobs SET description = %(text)s WHERE id = %(id)s RETURNING content_hash"
        row = connection.execute(statement.encode(), {"id": int(slot), "text": html_of(words)}).fetchone()
        assert row is not None
        return str(row[0])

    def announce(self, connection: psycopg.Connection[Any], slot: str, forced: bool) -> None:
        connection.execute("SELECT embed_assets.enqueue('jobs', ARRAY[%s], forced => %s)", (int(slot), forced))
