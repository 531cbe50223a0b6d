"""A user of the table: edits, closes, reopens, deletes and inserts rows of its own in transactions of several
statements, half of which say so. Who loses a connection reconnects; every other error is kept."""

from __future__ import annotations

import random
import threading
import time
import uuid
from collections.abc import Callable
from typing import Any

import psycopg

Db = psycopg.Connection[Any]

PARAGRAPH_CHARS = 1_100  # two do not fit one chunk, so that an edit of one leaves the others' chunks alone
LIKELY = {"edit": 8, "retitle": 2, "close": 2, "reopen": 2, "delete": 1, "touch": 1}


class Producer:
    """Runs from `start` to `finish`. `rows`: about how many it keeps; `pause`: the longest one between transactions."""

    def __init__(
        self, name: str, url: Callable[[], str], seed: int, *, rows: int, pause: float, forced: float = 0.0
    ) -> None:
        self._thread = threading.Thread(target=self._run, name=f"producer-{name}", daemon=True)
        self._mine, self._url, self._rows, self._pause, self._forced = name, url, rows, pause, forced
        self._random = random.Random(f"{seed}-{name}")
        self._end = threading.Event()
        self.transactions = 0
        self.lost_connections = 0
        self.errors: list[str] = []

    def start(self) -> None:
        self._thread.start()

    def finish(self) -> None:
        self._end.set()
        self._thread.join(60)
        assert not self._thread.is_alive(), f"{self._thread.name} does not end"

    def _run(self) -> None:
        while not self._end.is_set():
            try:
                with psycopg.connect(self._url(), connect_timeout=5) as db:
                    self._work(db)
            except psycopg.Error as error:
                self._end.wait(0.2)
                if not is_lost_connection(error):
                    self.errors.append(f"{type(error).__name__} {error.sqlstate}: {error}")

    def _work(self, db: Db) -> None:
        while not self._end.is_set():
            try:
                self._transaction(db)
            except psycopg.Error as error:
                self.lost_connections += is_lost_connection(error)
                raise
            self._end.wait(self._random.uniform(0, self._pause))

    def _transaction(self, db: Db) -> None:
        """One transaction; one in twelve is rolled back, one in eight holds its locks for a while."""
        touched = [job for _ in range(self._random.randint(1, 4)) for job in self._act(db)]
        if touched and self._random.random() < 0.5:
            forced = self._random.random() < self._forced
            db.execute("SELECT embed_assets.enqueue('jobs', %s::bigint[], 'write', %s)", (touched, forced))
        if self._random.random() < 1 / 8:
            self._end.wait(self._random.uniform(0, 0.5))
        if self._random.random() < 1 / 12:
            db.rollback()
        else:
            db.commit()
        self.transactions += 1

    def _act(self, db: Db) -> list[int]:
        """One statement on rows of its own; the ids that it touched."""
        known = db.execute("SELECT count(*) FROM jobs WHERE external_id LIKE %s", (f"{self._mine}-%",)).fetchone()
        if known is None or known[0] < self._rows * self._random.uniform(0.9, 1.1):
            return [self._insert(db) for _ in range(self._random.randint(1, 6))]
        number = self._random.randint(1, 4)
        chosen = db.execute(
            "SELECT id, description FROM jobs WHERE external_id LIKE %s ORDER BY random() LIMIT %s",
            (f"{self._mine}-%", number),
        ).fetchall()
        action = self._random.choices(list(LIKELY), list(LIKELY.values()))[0]
        for job, description in chosen:
            getattr(self, f"_{action}")(db, job, description)
        return [job for job, _ in chosen]

    def _insert(self, db: Db) -> int:
        body = "".join(self._paragraph() for _ in range(self._random.randint(0, 3)))
        row = db.execute(
            "INSERT INTO jobs (external_id, title, company, description, is_tech) "
            "VALUES (%s, 'Engineer', 'Acme', %s, TRUE) RETURNING id",
            (f"{self._mine}-{uuid.uuid4()}", body),
        ).fetchone()
        assert row is not None
        return int(row[0])

    def _edit(self, db: Db, job: int, description: str) -> None:
        """One paragraph goes, or comes, or is another; the rest stays."""
        parts = [f"<p>{part}" for part in description.split("<p>")[1:]]
        at = self._random.randint(0, len(parts))
        parts[at : at + self._random.randint(0, 1)] = [self._paragraph() for _ in range(self._random.randint(0, 1))]
        db.execute("UPDATE jobs SET description = %s WHERE id = %s", ("".join(parts[:4]), job))

    def _retitle(self, db: Db, job: int, _: str) -> None:
        db.execute("UPDATE jobs SET title = %s WHERE id = %s", (f"Engineer {self._random.random()}", job))

    def _close(self, db: Db, job: int, _: str) -> None:
        db.execute("UPDATE jobs SET closed_at = now() WHERE id = %s", (job,))

    def _reopen(self, db: Db, job: int, _: str) -> None:
        db.execute("UPDATE jobs SET closed_at = NULL WHERE id = %s", (job,))

    def _delete(self, db: Db, job: int, _: str) -> None:
        db.execute("DELETE FROM jobs WHERE id = %s", (job,))

    def _touch(self, db: Db, job: int, _: str) -> None:
        db.execute("UPDATE jobs SET is_private = NOT is_private WHERE id = %s", (job,))

    def _paragraph(self) -> str:
        """A text that nobody else has, so that whoever pays for it twice is noticed."""
        words = f"{uuid.UUID(int=self._random.getrandbits(128))} does this and that. "
        return f"<p>{(words * 40)[:PARAGRAPH_CHARS]}</p>"


def is_lost_connection(error: psycopg.Error) -> bool:
    """The server went away, or is not back yet. A deadlock or a time-out is none, though psycopg calls it the same."""
    if not isinstance(error, (psycopg.OperationalError, psycopg.InterfaceError)):
        return False
    return error.sqlstate is None or error.sqlstate[:3] in ("57P", "080")


def settle(producers: list[Producer]) -> None:
    for producer in producers:
        producer.finish()


def started(names: str, url: Callable[[], str], seed: int, **options: Any) -> list[Producer]:
    """Producers at work, each on rows of its own, once each has made its rows."""
    producers = [Producer(name, url, seed, **options) for name in names]
    for producer in producers:
        producer.start()
    while any(producer.transactions < 5 and not producer.errors for producer in producers):
        time.sleep(0.05)
    return producers
