"""Postgres: connections, the worker transaction, cancellation. What is asked of it stands in `sql/queries`.

What does not belong here: the queue (`outbox`), the chunk tables (`chunk_store`), declarations (`declaration`).
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

import psycopg
from pgvector.psycopg import register_vector
from psycopg import Cursor, IsolationLevel, errors
from psycopg.rows import DictRow, dict_row
from psycopg_pool import ConnectionPool

from embed_assets.errors import Cancelled, ConfigurationError, CorruptRow, DatabaseTrouble, RowRejected
from embed_assets.queries import query
from embed_assets.stop import Stop

logger = logging.getLogger(__name__)

Row = DictRow
T = TypeVar("T")

STATEMENT_TIMEOUT = "60s"
LOCK_TIMEOUT = "10s"
IDLE_TIMEOUT = "60s"
CONNECTIONS = 4
CONNECTION: dict[str, Any] = {
    "connect_timeout": 10,
    # No server-side prepared statements: they break behind a transaction pooler.
    "prepare_threshold": None,
    # A peer that has vanished is noticed within the minute, not after the kernel's quarter of an hour.
    "keepalives_idle": 20,
    "keepalives_interval": 10,
    "keepalives_count": 3,
    "tcp_user_timeout": 30_000,
}
RETRIES = 4
CONFLICTS = (errors.DeadlockDetected, errors.SerializationFailure, errors.LockNotAvailable)
# SQLSTATE classes that speak of the row: data exception, integrity, limits exceeded, raised by a trigger.
ROW_REFUSED = {"22", "23", "54", "P0"}


class Postgres:
    """At most four connections of one process to one database; made when first needed.

    Raises ConfigurationError when the database cannot be reached or lacks pgvector.
    """

    def __init__(
        self,
        url: str,
        *,
        application_name: str = "embed_assets",
        statement_timeout: str = STATEMENT_TIMEOUT,
    ) -> None:
        self.url = url
        self._application_name = application_name
        self._statement_timeout = statement_timeout
        self._pool: ConnectionPool[psycopg.Connection[Row]] | None = None
        self._making = threading.Lock()
        self._busy: set[psycopg.Connection[Row]] = set()
        self._cancelled = False

    @contextmanager
    def transaction(self, *, lock_timeout: str = LOCK_TIMEOUT) -> Iterator[Cursor[Row]]:
        """One worker transaction, committed when the block ends without an error. No network call belongs inside."""
        with self._connection() as connection, connection.transaction(), connection.cursor() as cursor:
            cursor.execute(
                query("session.begin"),
                {
                    "statement_timeout": self._statement_timeout,
                    "lock_timeout": lock_timeout,
                    "idle_timeout": IDLE_TIMEOUT,
                },
            )
            yield cursor

    def retrying(self, work: Callable[[Cursor[Row]], T], *, stop: Stop | None = None) -> T:
        """Run `work` in a transaction; again after a deadlock, a serialization failure or a lost connection.

        Four times at most, then raises DatabaseTrouble. A row that the database refuses raises RowRejected or
        CorruptRow; whatever else `work` raises passes through.
        """
        for attempt in range(RETRIES):
            try:
                with self.transaction() as cursor:
                    return work(cursor)
            except psycopg.Error as error:
                if isinstance(error, errors.QueryCanceled):
                    (stop or Stop()).check()
                    if self._cancelled:
                        raise Cancelled("the statement was cancelled with its run") from None
                classified = classify(error)
                if not isinstance(classified, DatabaseTrouble) or attempt == RETRIES - 1:
                    raise classified from (None if classified is not error else error.__cause__)
                logger.warning("a transaction is tried again after %s", classified.code)
                (stop or Stop()).sleep(0.1 * 2**attempt)
        raise AssertionError("unreachable")

    def one(self, name: str, values: Mapping[str, Any] | None = None) -> Row | None:
        """The first row of a named query in a transaction of its own, `retrying`; the query must bear repetition."""
        return self.retrying(lambda cursor: cursor.execute(query(name), values or {}).fetchone())

    def execute(self, name: str, values: Mapping[str, Any]) -> int:
        """Run a named statement in a transaction of its own, `retrying`; returns how many rows it touched."""
        return self.retrying(lambda cursor: cursor.execute(query(name), values).rowcount)

    @contextmanager
    def session(self) -> Iterator[psycopg.Connection[Row]]:
        """A connection of one's own in autocommit, for session locks, LISTEN and statements outside transactions.

        Raises Cancelled when `cancel` ended what it ran.
        """
        connection = connect(self.url, self._application_name, autocommit=True)
        self._busy.add(connection)
        try:
            yield connection
        except errors.QueryCanceled:
            if self._cancelled:
                raise Cancelled("the statement was cancelled with its run") from None
            raise
        finally:
            self._busy.discard(connection)
            connection.close()

    def cancel(self) -> None:
        """Cancel what this process's connections are running now; their transactions roll back, none is tried again."""
        self._cancelled = True
        for connection in list(self._busy):
            with suppress(psycopg.Error):
                connection.cancel_safe(timeout=2)

    def close(self) -> None:
        if self._pool:
            self._pool.close(timeout=2)
            self._pool = None

    @contextmanager
    def _connection(self) -> Iterator[psycopg.Connection[Row]]:
        with self._ready_pool().connection() as connection:
            self._busy.add(connection)
            try:
                yield connection
            finally:
                self._busy.discard(connection)

    def _ready_pool(self) -> ConnectionPool[psycopg.Connection[Row]]:
        with self._making:
            if self._pool is None:
                connect(self.url, self._application_name).close()  # a clear error now instead of a pool's time-out
                self._pool = self._make_pool()
            return self._pool

    def _make_pool(self) -> ConnectionPool[psycopg.Connection[Row]]:
        return ConnectionPool(
            self.url,
            kwargs={"row_factory": dict_row, "application_name": self._application_name, **CONNECTION},
            configure=_register,
            check=ConnectionPool.check_connection,
            min_size=0,
            max_size=CONNECTIONS,
            max_idle=60,
            timeout=30,
            open=True,
        )


def connect(url: str, application_name: str, *, autocommit: bool = False) -> psycopg.Connection[Row]:
    """One connection. Raises ConfigurationError saying what to do when there is none to be had."""
    try:
        connection = psycopg.connect(
            url,
            autocommit=autocommit,
            row_factory=dict_row,
            application_name=application_name,
            **CONNECTION,
        )
    except psycopg.OperationalError as error:
        raise ConfigurationError(_explain(error)) from None
    return connection


def _explain(error: psycopg.OperationalError) -> str:
    text = " ".join(str(error).split())
    if "password" in text or "authentication" in text or "role" in text:
        advice = "Correct user and password in DATABASE_URL"
    elif "does not exist" in text:
        advice = "Create the database, or correct its name in DATABASE_URL"
    else:
        advice = "Check that Postgres runs and that DATABASE_URL names its host and port"
    return f"Postgres cannot be reached: {text}. {advice}; or unset it to use the embedded server."


def _register(connection: psycopg.Connection[Row]) -> None:
    """Vectors travel as binary. Before the extension is there (first migration), they do not travel at all."""
    connection.isolation_level = IsolationLevel.READ_COMMITTED
    with suppress(psycopg.ProgrammingError):
        register_vector(connection)
    connection.rollback()


def classify(error: psycopg.Error) -> Exception:
    """The class of a database error; the error itself where it is a defect of ours (SQL that cannot run).

    Messages name the SQLSTATE, never Postgres' detail, which quotes values.
    """
    code = error.sqlstate or "connection"
    if isinstance(error, (errors.DataCorrupted, errors.IndexCorrupted)):
        return CorruptRow(f"Postgres cannot read the row ({code}); restore it from a backup", code=code)
    if isinstance(error, CONFLICTS):
        return DatabaseTrouble(f"the transaction met a conflict ({code}) again and again", code=code)
    if code[:2] in ROW_REFUSED:
        return RowRejected(f"the database refuses the row ({code}): a trigger, constraint or cast", code=code)
    if isinstance(error, (psycopg.OperationalError, psycopg.InterfaceError)):
        return DatabaseTrouble(f"the database did not answer ({code})", code=code)
    return error


def wait_until(ready: Callable[[], bool], *, seconds: float, every: float = 0.2) -> bool:
    """Poll `ready` until it holds or `seconds` have passed."""
    until = time.monotonic() + seconds
    while not (done := ready()) and time.monotonic() < until:
        time.sleep(every)
    return done
