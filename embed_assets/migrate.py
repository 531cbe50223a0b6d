"""Migrations from `sql/migrations`: numbered, once, in order, each in a transaction, under one advisory lock.

An applied file that was edited afterwards is refused: the database would no longer be what the files say.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg

from embed_assets.errors import ConfigurationError
from embed_assets.queries import query, sql_folder
from embed_assets.resources.postgres import Row, connect

_FILE = re.compile(r"(\d{4})_(\w+)\.sql\Z")
OLDEST_SERVER = 150000
OLDEST_VECTOR = (0, 8)


@dataclass(frozen=True)
class Migration:
    number: int
    name: str
    text: str

    @property
    def checksum(self) -> str:
        return hashlib.sha256(self.text.encode()).hexdigest()


def migrations(folder: Path | None = None) -> list[Migration]:
    """The files in order. Raises ConfigurationError when a number is missing or stands twice."""
    found = []
    for path in sorted((folder or sql_folder() / "migrations").glob("*.sql")):
        if not (match := _FILE.match(path.name)):
            raise ConfigurationError(f"{path.name} is no migration: name it NNNN_words.sql.")
        found.append(Migration(int(match[1]), match[2], path.read_text(encoding="utf-8")))
    if [m.number for m in found] != list(range(1, len(found) + 1)):
        raise ConfigurationError("The migrations must be numbered 0001, 0002, … without a gap.")
    return found


def migrate(url: str, *, folder: Path | None = None) -> list[str]:
    """Bring the database to the newest migration; returns the names of those applied now.

    Raises ConfigurationError for a server or pgvector that is too old, missing rights, or an edited file.
    """
    with connect(url, "embed_assets migrate", autocommit=True) as connection:
        check_server(connection)
        files = migrations(folder)
        try:
            if not _fresh(connection, files):
                return []
            with _locked(connection):
                return _apply(connection, files)
        except psycopg.errors.InsufficientPrivilege as error:
            raise ConfigurationError(
                f"The database role may not migrate: {error.diag.message_primary}. Run 'embed-assets migrate' once "
                "with a role that may create schemas and extensions, or grant CREATE on the database."
            ) from None


@contextmanager
def _locked(connection: psycopg.Connection[Row]) -> Iterator[None]:
    """A session's lock, which a transaction pooler would leave behind: only who has something to apply takes it."""
    connection.execute(query("migrate.lock"))
    try:
        yield
    finally:
        connection.execute(query("migrate.unlock"))


def check_server(connection: psycopg.Connection[Row]) -> None:
    """PostgreSQL 15 or newer with pgvector 0.8 or newer; raises ConfigurationError that says how to get it."""
    version = _value(connection, "session.server_version")
    if version < OLDEST_SERVER:
        raise ConfigurationError(
            f"PostgreSQL {version // 10000} is too old: 15 or newer is needed. Upgrade the server."
        )
    installed = _value(connection, "session.vector_version")
    available = installed or _value(connection, "session.vector_available")
    if available is None:
        raise ConfigurationError(
            "This Postgres has no pgvector. Install the package pgvector (0.8 or newer) for its version on the "
            "server's machine, then run 'embed-assets migrate' again."
        )
    if tuple(int(part) for part in available.split(".")[:2]) < OLDEST_VECTOR:
        raise ConfigurationError(
            f"pgvector {available} is too old: 0.8 or newer is needed. Install it on the server's machine and run "
            "ALTER EXTENSION vector UPDATE."
        )


def _value(connection: psycopg.Connection[Row], name: str) -> Any:
    row = connection.execute(query(name)).fetchone()
    return next(iter(row.values())) if row else None


def _fresh(connection: psycopg.Connection[Row], files: list[Migration]) -> list[Migration]:
    """Those that are not applied yet. Raises ConfigurationError for what cannot be continued."""
    done = _applied(connection)
    for migration in files:
        if (checksum := done.get(migration.number)) and checksum != migration.checksum:
            raise ConfigurationError(
                f"Migration {migration.number:04} ({migration.name}) was edited after it had been applied: "
                "this database was made by another version. Restore the file and put the change into a new migration; "
                "or, where nothing in schema embed_assets is to be kept, drop it, and it is made and filled anew."
            )
    if done and max(done) > len(files):
        raise ConfigurationError(
            f"The database is at migration {max(done):04}, newer than this version of embed_assets knows. Upgrade it."
        )
    return [migration for migration in files if migration.number not in done]


def _apply(connection: psycopg.Connection[Row], files: list[Migration]) -> list[str]:
    fresh = _fresh(connection, files)
    for migration in fresh:
        with connection.transaction():
            connection.execute(query("migrate.create_schema"))
            connection.execute(query("migrate.create_table"))
            connection.execute(migration.text.encode())
            connection.execute(
                query("migrate.record"),
                {
                    "number": migration.number,
                    "name": migration.name,
                    "checksum": migration.checksum,
                },
            )
    return [f"{migration.number:04}_{migration.name}" for migration in fresh]


def _applied(connection: psycopg.Connection[Row]) -> dict[int, str]:
    if not _value(connection, "migrate.schema_exists"):
        return {}
    return {row["number"]: row["checksum"] for row in connection.execute(query("migrate.applied"))}
