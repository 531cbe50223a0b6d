"""Text kinds in a table: several columns of several kinds, and the headings above each chunk."""

from __future__ import annotations

from typing import Any

import pytest
from fakes import HashEmbedder
from postgres.support import Db, chunks, drain, value

from embed_assets import EscapedHtml, Markdown, Plain, TableCorpus
from embed_assets.resources.assembly import Kind
from embed_assets.search import search

POLICY = "# {}\n\n" + "word " * 60 + "\n\n## Parents\n\n" + "tail " * 60


@pytest.fixture
def policies(db: Db, make_kind: Any) -> Kind:
    """The corpus `policies`: a name, Markdown, and escaped HTML below a heading."""
    db.execute("CREATE TABLE policies (id bigint PRIMARY KEY, name text, body text, notes text)")
    text = [Plain("name"), Markdown("body"), EscapedHtml("notes", heading="Notes")]
    return make_kind(TableCorpus(kind="policies", table="policies", key="id", text=text, max_chars=400))


def add(db: Db, number: int, *columns: str | None) -> None:
    db.execute("INSERT INTO policies VALUES (%s, %s, %s, %s)", (number, *columns))


def paths(db: Db, number: int) -> list[Any]:
    return chunks(db, number, "heading_path", "policies_semantic_chunks")


def test_the_headings_above_each_chunk_stand_beside_it(policies: Kind, db: Db) -> None:
    add(db, 1, "Leave policy " * 12, POLICY.format("Leave"), "&lt;p&gt;" + "more " * 60)
    add(db, 2, "Short", None, None)
    drain(policies)
    assert paths(db, 1) == [None, '["Leave"]', '["Leave", "Parents"]', '["Notes"]']
    assert paths(db, 2) == [None]
    assert chunks(db, 2, "body", "policies_semantic_chunks") == ["Short"]


def test_a_heading_that_changes_alone_is_written_below_it_and_buys_only_its_own_text(
    policies: Kind, db: Db, embedder: HashEmbedder
) -> None:
    add(db, 1, None, POLICY.format("Leave"), None)
    drain(policies)
    bought = len(embedder.texts)
    db.execute("UPDATE policies SET body = %s", (POLICY.format("Time off"),))
    drain(policies)
    assert paths(db, 1) == ['["Time off"]', '["Time off", "Parents"]']
    assert len(embedder.texts) == bought + 1


@pytest.mark.ids("B-31")
def test_the_chunk_that_search_shows_has_the_same_id_after_it_was_built_again(
    policies: Kind, db: Db, embedder: HashEmbedder
) -> None:
    def shown() -> list[str]:
        embedders = {policies.identity: embedder}
        return [hit.chunk_id for hit in search(policies.postgres, policies.bound, embedders, "tail").hits]

    for number in (1, 2):
        add(db, number, None, POLICY.format("Leave"), None)
    drain(policies)
    before = shown()
    assert len(set(before)) == 2
    db.execute("SELECT embed_assets.enqueue('policies', '{1,2}'::text[], forced => TRUE)")
    db.execute("DELETE FROM embed_assets.policies_semantic_chunks")
    drain(policies)
    assert shown() == before
    db.execute("UPDATE policies SET body = replace(body, 'tail', 'tale')")
    drain(policies)
    assert not set(shown()) & set(before)


@pytest.mark.ids("T18")
def test_a_row_whose_columns_are_all_empty_is_done_without_a_chunk_and_a_broken_one_spoils_no_other(
    policies: Kind, db: Db
) -> None:
    add(db, 1, " ", "<!-- x -->", "&lt;p&gt;&amp;nbsp;&lt;/p&gt;")
    add(db, 2, "seen", "Ge&#0;ing &#xD800;", "&amp;#0;")
    drain(policies)
    assert chunks(db, 1, "body", "policies_semantic_chunks") == []
    assert chunks(db, 2, "body", "policies_semantic_chunks") == ["seen\n\nGe\ufffding \ufffd\n\nNotes\n\ufffd"]
    assert value(db, "SELECT count(*) FROM embed_assets.semantic_stamps") == 2
