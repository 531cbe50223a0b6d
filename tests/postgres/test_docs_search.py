"""The examples of docs/search.md, executed in their order."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from postgres.support import Db, add_job, drain, rows

from embed_assets.corpora.jobs import jobs as jobs_corpus
from embed_assets.embedding import LocalEmbedder
from embed_assets.resources.assembly import assemble, maintained
from embed_assets.resources.declaration import bind
from embed_assets.resources.postgres import Postgres
from embed_assets.resources.similar_store import SimilarStore
from embed_assets.resources.tables import make_tables
from embed_assets.settings import Settings

PAGE = Path(__file__).parents[2] / "docs/search.md"
BLOCK = re.compile(r"^```(python|sql)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


class Index:
    def __init__(self) -> None:
        self.bodies: dict[str, list[str]] = {}

    def put(self, source_id: str, chunks: list[Any]) -> None:
        self.bodies[source_id] = [body for _, body, _ in chunks]

    def delete(self, source_id: str) -> None:
        self.bodies.pop(source_id, None)


def test_the_examples_run_and_do_what_the_page_says(
    jobs_table: None, db: Db, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DATABASE_URL", database_url)
    first = add_job(db, "<p>You repair databases.</p>", company="Northwind", company_slug="n", posted_at="now")
    second = add_job(db, "<p>Ticket system PG-1234, for cooks.</p>", company_slug="c")
    postgres, embedder = Postgres(database_url), LocalEmbedder()
    settings, bound = Settings(), bind(postgres, jobs_corpus)
    make_tables(postgres, bound)
    kind = assemble(settings, postgres, bound, [maintained(settings, postgres, bound, jobs_corpus, embedder)])
    drain(kind)
    SimilarStore(postgres, bound).refresh()
    known: dict[str, Any] = {}
    found = [_run(language, code, db, known) for language, code in BLOCK.findall(PAGE.read_text(encoding="utf-8"))]
    assert [len(part) for part in found if part is not None] == [2, 1]
    assert known["answer"].semantic
    assert "repair databases" in known["answer"].hits[0].body
    _consume(known["apply_changes"], db, first, second)
    kind.close()


def _run(language: str, code: str, db: Db, known: dict[str, Any]) -> list[Any] | None:
    if language == "sql":
        return rows(db, code.replace("%", "%%"))
    exec(compile(code, str(PAGE), "exec"), known)
    return None


def _consume(apply_changes: Any, db: Db, first: int, second: int) -> None:
    index = Index()
    assert apply_changes(db, index) == 2
    assert sorted(index.bodies) == [str(first), str(second)]
    removal = "INSERT INTO embed_assets.search_outbox (kind, source_id, op) VALUES ('jobs', %s, 'remove')"
    db.execute(removal, (str(first),))
    assert apply_changes(db, index) == 1
    assert (list(index.bodies), apply_changes(db, index)) == ([str(second)], 0)
