"""Assembled kinds on the test's own database, with an embedder whose vectors are a hash of the text."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest
from fakes import HashEmbedder
from postgres.support import Db, add_jobs, drain

from embed_assets.corpora.jobs import jobs as jobs_corpus
from embed_assets.corpus import Plain, TableCorpus
from embed_assets.load import create_jobs_table
from embed_assets.resources.assembly import Kind, assemble, maintained
from embed_assets.resources.declaration import bind
from embed_assets.resources.postgres import Postgres
from embed_assets.resources.tables import make_tables
from embed_assets.settings import Settings

KindMaker = Callable[..., Kind]


@pytest.fixture
def embedder() -> HashEmbedder:
    """Eight dimensions; counts what it is given."""
    return HashEmbedder()


@pytest.fixture
def make_kind(database_url: str, embedder: HashEmbedder) -> Iterator[KindMaker]:
    """Assemble a kind as a process of its own would: `make_kind(corpus, embedder=…, batch_size=…)`. `active` keeps
    the active model fresh while that of `embedder` is built.

    Called twice for one corpus it gives two workers, each with connections and a heartbeat of its own.
    """
    made: list[Kind] = []

    def make(
        corpus: TableCorpus = jobs_corpus,
        *,
        embedder: HashEmbedder = embedder,
        active: HashEmbedder | None = None,
        **settings: Any,
    ) -> Kind:
        postgres = Postgres(database_url)
        bound = bind(postgres, corpus)
        make_tables(postgres, bound)
        known = Settings(**{"batch_size": 4, "call_timeout_seconds": 60, **settings})
        models = [maintained(known, postgres, bound, corpus, one) for one in (embedder, active) if one]
        made.append(assemble(known, postgres, bound, models))
        return made[-1]

    yield make
    for kind in made:
        kind.close()


@pytest.fixture
def jobs_table(db: psycopg.Connection[Any]) -> None:
    """The built-in jobs table, empty."""
    create_jobs_table(db)


@pytest.fixture
def kind(jobs_table: None, make_kind: KindMaker) -> Kind:
    """The built-in jobs corpus: waves of four rows, vectors of eight dimensions."""
    return make_kind()


@pytest.fixture
def other(kind: Kind, make_kind: KindMaker) -> Kind:
    """A second worker on the jobs corpus."""
    return make_kind()


@pytest.fixture(params=["uuid", "text"])
def notes_kind(request: pytest.FixtureRequest, db: psycopg.Connection[Any], make_kind: KindMaker) -> Kind:
    """The corpus `notes` (note_id, body), once with uuid keys and once with text keys."""
    db.execute(f"CREATE TABLE notes (note_id {request.param} PRIMARY KEY, body text)".encode())
    return make_kind(TableCorpus(kind="notes", table="notes", key="note_id", text=Plain("body")))


@pytest.fixture
def wide() -> HashEmbedder:
    """The new model: twelve dimensions where the active one has eight."""
    return HashEmbedder(12, identity="wide")


@pytest.fixture
def beside(kind: Kind, db: Db, make_kind: KindMaker, wide: HashEmbedder, embedder: HashEmbedder) -> Kind:
    """Six rows fresh for the active model, and a worker that maintains both."""
    add_jobs(db, 6)
    drain(kind)
    return make_kind(embedder=wide, active=embedder)
