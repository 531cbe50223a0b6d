"""A project on the test's own database, with a Dagster instance of its own."""

from __future__ import annotations

from collections.abc import Iterator

import psycopg
import pytest
from dagster import DagsterInstance

from tests.dagster.project import Project


@pytest.fixture
def project(db: psycopg.Connection, database_url: str) -> Iterator[Project]:
    db.execute(
        "CREATE TABLE posts (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, body text, "
        "hidden boolean NOT NULL DEFAULT FALSE)"
    )
    with DagsterInstance.ephemeral() as instance:
        yield Project(db, database_url, instance)
