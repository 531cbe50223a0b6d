"""Migrations: once, in order, by one process at a time, and nothing of one that failed."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from uuid import uuid4

import psycopg
import pytest
from postgres.support import Db, rows, until_true, value, waits_for_advisory
from psycopg import sql
from psycopg.conninfo import make_conninfo

from embed_assets import migrate as module
from embed_assets.errors import ConfigurationError
from embed_assets.migrate import check_server, migrate, migrations
from embed_assets.queries import sql_folder
from embed_assets.resources.postgres import connect

REAL = sorted(path.stem for path in (sql_folder() / "migrations").glob("*.sql"))
APPLIED = "SELECT number, name FROM embed_assets.schema_migrations ORDER BY applied_at, number"


@pytest.fixture
def empty_url(server_url: str) -> Iterator[str]:
    """A database in which nothing was migrated yet."""
    name = sql.Identifier(f"empty_{uuid4().hex[:12]}")
    with psycopg.connect(server_url, autocommit=True) as connection:
        connection.execute(sql.SQL("CREATE DATABASE {}").format(name))
        yield make_conninfo(server_url, dbname=name.as_string(connection).strip('"'))
        connection.execute(sql.SQL("DROP DATABASE {} WITH (FORCE)").format(name))


@pytest.fixture
def empty(empty_url: str) -> Iterator[Db]:
    with psycopg.connect(empty_url, autocommit=True) as connection:
        yield connection


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two migrations of our own: a table, then a column of it."""
    write(tmp_path, "0001_table.sql", "CREATE TABLE public.things (id integer)")
    write(tmp_path, "0002_column.sql", "ALTER TABLE public.things ADD COLUMN name text")
    return tmp_path


def write(folder: Path, name: str, text: str) -> None:
    (folder / name).write_text(text, encoding="utf-8")


def columns(db: Db) -> list[str]:
    return rows(db, "SELECT attname FROM pg_attribute WHERE attrelid = to_regclass('public.things') AND attnum > 0")


def refused(url: str, folder: Path) -> str:
    with pytest.raises(ConfigurationError) as caught:
        migrate(url, folder=folder)
    return str(caught.value)


def test_the_real_migrations_are_applied_once_and_in_order(empty: Db, empty_url: str):
    assert migrate(empty_url) == REAL
    assert [f"{number:04}_{name}" for number, name in rows(empty, APPLIED)] == REAL
    before = rows(empty, "SELECT oid, relname FROM pg_class ORDER BY oid")
    assert migrate(empty_url) == []
    assert rows(empty, "SELECT oid, relname FROM pg_class ORDER BY oid") == before


def test_a_new_file_is_applied_to_a_database_that_has_the_others(empty: Db, empty_url: str, folder: Path):
    assert migrate(empty_url, folder=folder) == ["0001_table", "0002_column"]
    write(folder, "0003_more.sql", "ALTER TABLE public.things ADD COLUMN more text")
    assert migrate(empty_url, folder=folder) == ["0003_more"]
    assert columns(empty) == ["id", "name", "more"]


def test_two_at_once_wait_for_each_other_and_apply_each_file_once(empty: Db, empty_url: str, folder: Path):
    empty.execute("SELECT pg_advisory_lock(1701667428, 0)")
    waiting = (
        "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted "
        "AND database = (SELECT oid FROM pg_database WHERE datname = current_database())"
    )
    with ThreadPoolExecutor(2) as pool:
        both = [pool.submit(migrate, empty_url, folder=folder) for _ in range(2)]
        until_true(lambda: value(empty, waiting) == 2, "nobody waited for the lock")
        assert columns(empty) == []
        empty.execute("SELECT pg_advisory_unlock(1701667428, 0)")
        assert sorted(future.result(timeout=30) for future in both) == [[], ["0001_table", "0002_column"]]
    assert columns(empty) == ["id", "name"]


def test_where_nothing_is_to_be_applied_no_lock_is_taken(empty: Db, empty_url: str, folder: Path):
    migrate(empty_url, folder=folder)
    empty.execute("SELECT pg_advisory_lock(1701667428, 0)")
    try:
        with ThreadPoolExecutor(1) as pool:
            again = pool.submit(migrate, empty_url, folder=folder)
            until_true(lambda: again.done() or waits_for_advisory(empty, 0), "neither done nor waiting")
            done = again.done()
            empty.execute("SELECT pg_advisory_unlock(1701667428, 0)")
    finally:
        empty.execute("SELECT pg_advisory_unlock_all()")
    assert done
    assert again.result() == []


def test_a_failing_migration_leaves_nothing_of_itself_and_keeps_those_before_it(
    empty: Db, empty_url: str, folder: Path
):
    write(folder, "0002_column.sql", "ALTER TABLE public.things ADD COLUMN name text; SELECT 1 / 0")
    with pytest.raises(psycopg.errors.DivisionByZero):
        migrate(empty_url, folder=folder)
    assert columns(empty) == ["id"]
    assert rows(empty, APPLIED) == [(1, "table")]
    write(folder, "0002_column.sql", "ALTER TABLE public.things ADD COLUMN name text")
    assert migrate(empty_url, folder=folder) == ["0002_column"]


def test_a_first_migration_that_fails_leaves_an_empty_database(empty: Db, empty_url: str, folder: Path):
    write(folder, "0001_table.sql", "CREATE TABLE public.things (id integer); DROP TABLE nowhere")
    with pytest.raises(psycopg.errors.UndefinedTable):
        migrate(empty_url, folder=folder)
    assert columns(empty) == []
    assert value(empty, "SELECT count(*) FROM pg_namespace WHERE nspname = 'embed_assets'") == 0
    held = (
        "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' "
        "AND database = (SELECT oid FROM pg_database WHERE datname = current_database())"
    )
    until_true(lambda: value(empty, held) == 0, "the lock of the migrations stays")


def test_a_file_that_was_edited_after_it_had_been_applied_is_refused(empty: Db, empty_url: str, folder: Path):
    migrate(empty_url, folder=folder)
    write(folder, "0001_table.sql", "CREATE TABLE public.things (id bigint)")
    write(folder, "0003_more.sql", "ALTER TABLE public.things ADD COLUMN more text")
    assert "Migration 0001 (table) was edited after it had been applied" in refused(empty_url, folder)
    assert columns(empty) == ["id", "name"]


def test_a_database_that_is_newer_than_the_files_is_refused(empty_url: str, folder: Path):
    migrate(empty_url, folder=folder)
    (folder / "0002_column.sql").unlink()
    assert "The database is at migration 0002, newer than this version" in refused(empty_url, folder)


@pytest.mark.parametrize("name", ["0004_gap.sql", "0002_twice.sql", "0000_zero.sql"])
def test_a_number_that_is_missing_or_stands_twice_is_refused(empty: Db, empty_url: str, folder: Path, name: str):
    write(folder, name, "SELECT 1")
    assert "numbered 0001, 0002, … without a gap" in refused(empty_url, folder)
    assert columns(empty) == []


@pytest.mark.parametrize("name", ["1_short.sql", "0003-dash.sql", "0003.sql", "notes.sql"])
def test_a_file_that_is_no_migration_is_refused_by_name(empty_url: str, folder: Path, name: str):
    write(folder, name, "SELECT 1")
    assert f"{name} is no migration: name it NNNN_words.sql" in refused(empty_url, folder)


def test_percent_signs_and_braces_in_a_migration_are_only_text(empty: Db, empty_url: str, folder: Path):
    write(folder, "0003_odd.sql", "CREATE TABLE public.odd AS SELECT '100% {x} %s %(y)s' AS text -- 5% {of} it")
    migrate(empty_url, folder=folder)
    assert value(empty, "SELECT text FROM public.odd") == "100% {x} %s %(y)s"


def test_the_real_files_have_their_numbers_in_order():
    assert [migration.number for migration in migrations()] == list(range(1, len(REAL) + 1))


def test_a_copy_of_the_files_elsewhere_has_the_same_checksums(tmp_path: Path):
    shutil.copytree(sql_folder() / "migrations", tmp_path / "copy")
    assert [m.checksum for m in migrations(tmp_path / "copy")] == [m.checksum for m in migrations()]


def test_a_role_that_may_not_migrate_is_told_what_to_grant(empty: Db, empty_url: str):
    role = f"role_{uuid4().hex[:12]}"
    empty.execute(f"CREATE ROLE {role} LOGIN PASSWORD 'secret'".encode())
    try:
        with pytest.raises(ConfigurationError, match=r"may not migrate: permission denied .* grant CREATE"):
            migrate(make_conninfo(empty_url, user=role, password="secret"))
        assert value(empty, "SELECT count(*) FROM pg_namespace WHERE nspname = 'embed_assets'") == 0
    finally:
        empty.execute(f"DROP ROLE {role}".encode())


def test_a_database_that_cannot_be_reached_is_explained(empty_url: str):
    for wrong, says in (
        (make_conninfo(empty_url, dbname="nowhere_at_all"), "Create the database, or correct its name"),
        (make_conninfo(empty_url, port=1), "Check that Postgres runs"),
        (make_conninfo(empty_url, user="nobody_here", password="x"), "Correct user and password"),
    ):
        with pytest.raises(ConfigurationError, match=says):
            migrate(wrong)


@pytest.mark.ids("P05")
@pytest.mark.parametrize(
    ("found", "says"),
    [
        ({"session.server_version": 140012}, "PostgreSQL 14 is too old: 15 or newer is needed"),
        ({"session.vector_version": None, "session.vector_available": None}, "This Postgres has no pgvector"),
        ({"session.vector_version": "0.7.4"}, "pgvector 0.7.4 is too old: 0.8 or newer is needed"),
        ({"session.vector_version": None, "session.vector_available": "0.5.1"}, "pgvector 0.5.1 is too old"),
    ],
)
def test_a_server_or_pgvector_that_is_too_old_or_missing_is_said_before_anything_is_made(
    empty: Db, empty_url: str, monkeypatch: pytest.MonkeyPatch, found: dict[str, object], says: str
):
    real = module._value
    monkeypatch.setattr(module, "_value", lambda c, name: found[name] if name in found else real(c, name))
    with pytest.raises(ConfigurationError, match=says):
        migrate(empty_url)
    assert value(empty, "SELECT count(*) FROM pg_namespace WHERE nspname = 'embed_assets'") == 0


@pytest.mark.parametrize("version", ["0.8.0", "0.8.6", "0.10", "1.0.0"])
def test_every_newer_pgvector_is_accepted(empty_url: str, monkeypatch: pytest.MonkeyPatch, version: str):
    monkeypatch.setattr(module, "_value", lambda _, name: {"session.server_version": 150000}.get(name, version))
    with connect(empty_url, "test") as connection:
        check_server(connection)


def test_migrating_while_others_use_the_database_waits_for_none_of_them(database_url: str, db: Db):
    """A start of the program over a migrated database takes no lock that a running worker could hold."""
    with psycopg.connect(database_url) as worker:
        worker.execute("LOCK TABLE embed_assets.semantic_outbox IN ACCESS EXCLUSIVE MODE")
        done = threading.Event()
        thread = threading.Thread(target=lambda: (migrate(database_url), done.set()), daemon=True)
        thread.start()
        assert done.wait(20)
    assert value(db, "SELECT count(*) FROM embed_assets.schema_migrations") == len(REAL)
