"""One real Postgres for the whole run (shared by all workers), one migrated database for each test."""

from __future__ import annotations

import os
import shutil
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
from psycopg import sql
from psycopg.conninfo import make_conninfo

from embed_assets import server
from embed_assets.migrate import migrate

HOME = "EMBED_ASSETS_TEST_HOME"
TEMPLATE = "template_migrated"


def pytest_configure(config: pytest.Config) -> None:
    """The controller makes the home and hands it to its workers through the environment."""
    if HOME not in os.environ:
        os.environ[HOME] = tempfile.mkdtemp(prefix="embed_assets_tests_")
        config.stash[_owner] = True
    for name in list(os.environ):
        if name == "DATABASE_URL" or (name.startswith("EMBED_") and name != HOME):
            del os.environ[name]


_owner = pytest.StashKey[bool]()


def pytest_unconfigure(config: pytest.Config) -> None:
    if config.stash.get(_owner, False):
        home = Path(os.environ.pop(HOME))
        server.remove(home)
        shutil.rmtree(home, ignore_errors=True)


@pytest.fixture(scope="session")
def server_url() -> str:
    """The test server's URL, with a migrated template database made once."""
    home = Path(os.environ[HOME])
    url = server.ensure(home)
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("SELECT pg_advisory_lock(1)")
        known = connection.execute("SELECT 1 FROM pg_database WHERE datname = %s", (TEMPLATE,)).fetchone()
        if not known:
            connection.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(TEMPLATE)))
            migrate(make_conninfo(url, dbname=TEMPLATE))
        connection.execute("SELECT pg_advisory_unlock(1)")
    return url


@pytest.fixture
def database_url(server_url: str) -> Iterator[str]:
    """A migrated database of the test's own."""
    name = f"test_{uuid.uuid4().hex[:12]}"
    identifier = sql.Identifier(name)
    with psycopg.connect(server_url, autocommit=True) as connection:
        connection.execute("SELECT pg_advisory_lock(1)")
        connection.execute(sql.SQL("CREATE DATABASE {} TEMPLATE {}").format(identifier, sql.Identifier(TEMPLATE)))
        connection.execute("SELECT pg_advisory_unlock(1)")
    yield make_conninfo(server_url, dbname=name)
    with psycopg.connect(server_url, autocommit=True) as connection:
        connection.execute(sql.SQL("DROP DATABASE {} WITH (FORCE)").format(identifier))


@pytest.fixture
def db(database_url: str) -> Iterator[psycopg.Connection]:
    """A connection in autocommit to the test's database."""
    with psycopg.connect(database_url, autocommit=True) as connection:
        yield connection
