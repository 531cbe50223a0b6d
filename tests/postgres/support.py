# SQL is put together here from columns and conditions that are the tests' own.
"""What the tests of the queue and of the write share: jobs, drains, looks at the tables, and gates that hold a
transaction of ours open at a known point. Fixtures are in `conftest.py`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from itertools import count
from typing import Any, TypeVar

import psycopg
from fakes import HashEmbedder
from psycopg import sql
from psycopg.conninfo import make_conninfo

from embed_assets import pipeline
from embed_assets.embedding import Embedder
from embed_assets.models import Counts, Enqueued, Wave
from embed_assets.resources.assembly import Kind
from embed_assets.search import search
from embed_assets.stop import Stop

Db = psycopg.Connection[Any]
T = TypeVar("T")

LOCKS = 4711
_numbers = count(1)


def rows(db: Db, statement: str, *values: object) -> list[Any]:
    """All rows; the bare values where the query has one column."""
    found = db.execute(statement.encode(), values or None).fetchall()
    return [row[0] for row in found] if found and len(found[0]) == 1 else found


def value(db: Db, statement: str, *values: object) -> Any:
    """The first row, bare where the query has one column; None without a row."""
    found = rows(db, statement, *values)
    return found[0] if found else None


def add_job(db: Db, description: str | None = None, **columns: object) -> int:
    """A posting that belongs in search, with a text of its own unless one is given."""
    number = next(_numbers)
    text = f"<p>Posting number {number}.</p>" if description is None else description
    given = {"title": f"Title {number}", "company": "Acme", "description": text, "is_tech": True, **columns}
    statement = sql.SQL("INSERT INTO jobs ({}) VALUES ({}) RETURNING id").format(
        sql.SQL(", ").join(map(sql.Identifier, given)), sql.SQL(", ").join(sql.Placeholder() * len(given))
    )
    row = db.execute(statement, list(given.values())).fetchone()
    assert row is not None
    return int(row[0])


def add_jobs(db: Db, number: int, **columns: object) -> list[int]:
    """Postings by ascending id; the later one is the fresher one."""
    return [add_job(db, **columns) for _ in range(number)]


def say(db: Db, *ids: object, kind: str = "jobs", **options: object) -> int:
    """`embed_assets.enqueue` in the transaction that `db` is in; returns how many feed rows were appended."""
    array = "%s" if all(isinstance(given, int) for given in ids) else "%s::text[]"
    extra = "".join(f", {name} => %s" for name in options)
    return int(value(db, f"SELECT embed_assets.enqueue(%s, {array}{extra})", kind, list(ids), *options.values()))


def enqueue(kind: Kind, *, scan: bool = True, **options: Any) -> Enqueued:
    """Fold and scan; the first one of a kind reconciles too."""
    return kind.enqueuer.enqueue(scan=scan, **options)


def fold(kind: Kind) -> Enqueued:
    """Enqueue when neither scan nor reconcile is due: the feed alone."""
    with kind.postgres.transaction() as cursor:
        cursor.execute(
            "UPDATE embed_assets.corpus_scans "
            "SET last_scan_at = clock_timestamp(), seconds = 1000, last_reconcile_at = clock_timestamp()"
        )
    found = kind.enqueuer.enqueue()
    assert not found.scanned
    return found


def claim(kind: Kind, limit: int = 100, *, run_id: str = "run", **options: Any) -> Wave | None:
    return kind.outbox.claim(run_id, limit, **options)


def wave_of(kind: Kind, limit: int = 100, *, run_id: str = "run", **options: Any) -> Wave:
    """A claim that must not be empty."""
    wave = claim(kind, limit, run_id=run_id, **options)
    assert wave is not None, "nothing was claimed"
    return wave


def staged(kind: Kind, limit: int = 100, *, run_id: str = "run") -> Wave:
    """A claimed and staged wave, ready to be written."""
    wave = wave_of(kind, limit, run_id=run_id)
    pipeline.stage(kind.ports, wave, Stop())
    return wave


def drain(
    kind: Kind, *, run_id: str = "run", stop: Stop | None = None, rows: int | None = None, **options: Any
) -> Counts:
    """Enqueue with a scan, then wave after wave until nothing is due. `rows`: of one wave."""
    limits = replace(kind.limits, rows=rows or kind.limits.rows)
    _, counts = pipeline.drain(kind.ports, run_id, limits=limits, stop=stop or Stop(), **options)
    return counts


def status(kind: Kind) -> dict[str, int]:
    """The states that have rows."""
    return {state: number for state, number in kind.outbox.status(kind.identity).counts.items() if number}


def asking(kind: Kind, embedder: Embedder | None) -> dict[str, Embedder]:
    """The embedder as search wants it: by the identity of the kind's model that it would have made."""
    return {kind.bound.corpus.identity_of(embedder.identity): embedder} if embedder else {}


def entry(db: Db, source_id: object, columns: str = "status") -> Any:
    """Columns of one outbox entry, or None."""
    return value(db, f"SELECT {columns} FROM embed_assets.semantic_outbox WHERE source_id = %s", str(source_id))


def entries(db: Db, columns: str = "source_id", where: str = "TRUE") -> list[Any]:
    """Columns of the outbox entries, by id."""
    return rows(db, f"SELECT {columns} FROM embed_assets.semantic_outbox WHERE {where} ORDER BY id")


def wave_row(db: Db, wave: Wave, columns: str) -> Any:
    return value(db, f"SELECT {columns} FROM embed_assets.claimed_waves WHERE wave_id = %s", wave.wave_id)


def chunks(
    db: Db, source_id: object, columns: str = "body", table: str = "job_semantic_chunks", key: str = "id"
) -> list[Any]:
    """Columns of a row's chunks, in order."""
    statement = f"SELECT {columns} FROM embed_assets.{table} WHERE {key}::text = %s ORDER BY model_id, chunk_index"
    return rows(db, statement, str(source_id))


def stamps(db: Db, columns: str = "source_id") -> list[Any]:
    return rows(db, f"SELECT {columns} FROM embed_assets.semantic_stamps ORDER BY source_id")


def expire(db: Db, wave: Wave) -> None:
    """The lease's time passes, by the database's clock."""
    db.execute(
        "UPDATE embed_assets.claimed_waves SET lease_until = clock_timestamp() - interval '1 second' "
        "WHERE wave_id = %s",
        (wave.wave_id,),
    )


def due_now(db: Db) -> None:
    """The waiting time of every retry passes."""
    db.execute(
        "UPDATE embed_assets.semantic_outbox SET next_attempt_at = clock_timestamp() - interval '1 second' "
        "WHERE status = 'retry_wait'"
    )


@contextmanager
def background(work: Callable[[], T]) -> Iterator[Future[T]]:
    """Run `work` in a thread; its result, or its error, is had from the future."""
    with ThreadPoolExecutor(1) as pool:
        yield pool.submit(work)


class Gate:
    """Stops rows on their way into one of our tables, hence holds the transaction that writes them open."""

    def __init__(self, url: str, table: str, when: str, only: str) -> None:
        self._keeper = psycopg.connect(url, autocommit=True)
        self.opened = False
        self._keeper.execute("SELECT pg_advisory_lock(%s)", (LOCKS,))
        self._keeper.execute(
            f"""
            CREATE OR REPLACE FUNCTION public.at_the_gate() RETURNS trigger LANGUAGE plpgsql AS $$
            BEGIN
                PERFORM pg_advisory_xact_lock_shared({LOCKS});
                RETURN coalesce(new, old);
            END $$;
            CREATE TRIGGER gate {when} ON embed_assets.{table}
            FOR EACH ROW WHEN ({only}) EXECUTE FUNCTION public.at_the_gate();
            """.encode()
        )

    def wait(self) -> None:
        """Until somebody stands at the gate."""
        until_true(lambda: self._waiting(), "nobody came to the gate")

    def _waiting(self) -> bool:
        return waits_for_advisory(self._keeper, LOCKS)

    def open(self) -> None:
        if not self.opened:
            self._keeper.execute("SELECT pg_advisory_unlock(%s)", (LOCKS,))
        self.opened = True

    def close(self) -> None:
        self._keeper.execute("SELECT pg_advisory_unlock_all()")
        self._keeper.close()


def waits_for_advisory(db: Db, number: int) -> bool:
    """Whether somebody in this database waits for an advisory lock of one bigint key."""
    statement = (
        "SELECT count(*) FROM pg_locks AS l JOIN pg_database AS d ON d.oid = l.database "
        "WHERE d.datname = current_database() AND l.locktype = 'advisory' AND l.objid = %s AND NOT l.granted"
    )
    return bool(value(db, statement, number))


@contextmanager
def gate(url: str, table: str, when: str = "BEFORE INSERT", *, only: str = "TRUE") -> Iterator[Gate]:
    """A closed gate on a table of ours for the rows that `only` names; `open` it to let everybody through."""
    made = Gate(url, table, when, only)
    try:
        yield made
    finally:
        made.close()


def until_true(ready: Callable[[], bool], otherwise: str, *, seconds: float = 20) -> None:
    """Look at the database until `ready`; fails with `otherwise`."""
    end = time.monotonic() + seconds
    while not ready():
        assert time.monotonic() < end, otherwise
        time.sleep(0.01)


def until_blocked(db: Db, *, by: str = "%", number: int = 1) -> None:
    """Until so many statements that are LIKE `by` wait for somebody's lock."""
    statement = (
        "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock' "
        "AND query ILIKE %s"
    )
    until_true(lambda: value(db, statement, by) >= number, f"no statement like {by} waits")


def connect(url: str, *, lock_timeout: str | None = None) -> Db:
    """A connection outside autocommit: its transaction begins with its first statement."""
    options = f"-c lock_timeout={lock_timeout}" if lock_timeout else ""
    return psycopg.connect(make_conninfo(url, options=options))


SWITCHED = "SELECT active_model_id, previous_model_id, target_model_id FROM embed_assets.corpora"
ENTRIES = "SELECT model_id, count(*) FROM embed_assets.semantic_outbox GROUP BY model_id ORDER BY model_id"


def found(kind: Kind, text: str, *embedders: HashEmbedder, k: int = 10) -> list[int]:
    """What search finds, and that it found it by vectors."""
    known = {key: one for embedder in embedders for key, one in asking(kind, embedder).items()}
    answer = search(kind.postgres, kind.bound, known, text, k=k)
    assert answer.semantic, answer.reason
    return [int(hit.source_id) for hit in answer.hits]


def ids(*kinds: Kind) -> list[int]:
    return [kind.model_id for kind in kinds]
