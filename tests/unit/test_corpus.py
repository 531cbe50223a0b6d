"""From a row to its chunks, what the embedder identity says, and declarations that are refused when they are made."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import Any

import pytest

from embed_assets.corpora.jobs import jobs
from embed_assets.corpus import (
    MAX_ROW_BYTES,
    EscapedHtml,
    Html,
    Markdown,
    Plain,
    Registry,
    Similar,
    TableCorpus,
)
from embed_assets.errors import DeclarationError, TooLarge
from embed_assets.models import SourceRow


def corpus(**fields: Any) -> TableCorpus:
    return TableCorpus(**{"kind": "notes", "table": "notes", "key": "id", "text": Plain("body"), **fields})


def row(*texts: str | None, **fields: Any) -> SourceRow:
    """A row that is to be embedded, unless `fields` say otherwise."""
    given = {"source_id": "1", "forced": False, "present": True, "indexable": True, "stamped": False, "revision": "r1"}
    return SourceRow(**{**given, "texts": list(texts), "fields": {}, **fields})


def sent(declared: TableCorpus, loaded: SourceRow) -> list[str]:
    return [chunk.sent for chunk in declared.plan(loaded).chunks]


@pytest.mark.ids("A-50")
def test_every_chunk_is_sent_with_the_prefix_of_its_row():
    paragraphs = "\n\n".join(f"<p>{'word ' * 300} {number}</p>" for number in range(5))
    loaded = row(paragraphs, fields={"title": "Baker", "company": "Acme"})
    chunks = jobs.plan(loaded).chunks
    assert len(chunks) > 3
    assert all(chunk.sent == "passage: Baker at Acme. " + chunk.body for chunk in chunks)
    assert not any(chunk.body.startswith("passage") for chunk in chunks)


def test_the_hash_is_that_of_exactly_what_is_sent():
    for chunk in jobs.plan(row("<p>é</p>", fields={"title": "T", "company": "C"})).chunks:
        assert chunk.text_hash == hashlib.sha256(chunk.sent.encode()).digest()


def test_a_prefix_stays_on_one_line_and_leaves_room_for_its_chunk():
    loaded = row("text", fields={"title": "many\n\n  words\x00 " + "x" * 5000, "company": None})
    (text,) = sent(jobs, loaded)
    assert text.startswith("passage: many words")
    assert text.endswith(" at . text")
    assert "\n" not in text
    assert len(text) < 300


def test_what_is_sent_is_within_the_limit_together_with_its_prefix():
    declared = corpus(prefix="{title}. ", text=Plain("body"), max_chars=300)
    texts = sent(declared, row("word " * 500, fields={"title": "t" * 150}))
    assert len(texts) > 10
    assert max(map(len, texts)) <= 300


def test_braces_in_the_values_of_a_prefix_are_no_fields():
    assert sent(jobs, row("text", fields={"title": "{company}", "company": "{0}"})) == [
        "passage: {company} at {0}. text"
    ]


@pytest.mark.ids("A-51", "T18")
@pytest.mark.parametrize("text", [None, "", "  \n\t", "<p>&nbsp;</p>", "<script>alert(1)</script>", "&#8203;"])
def test_a_row_without_visible_text_has_no_chunk_and_no_vector_of_its_prefix_alone(text: str | None):
    plan = jobs.plan(row(text, fields={"title": "Baker", "company": "Acme"}))
    assert (plan.action, plan.revision, plan.chunks) == ("embed", "r1", ())


def test_several_columns_become_one_text_in_the_order_of_the_declaration():
    several = corpus(text=[Html("head"), Plain("body"), Plain("tail")])
    assert sent(several, row("<b>One</b>", None, "<b>")) == ["One\n\n<b>"]


@pytest.mark.ids("A-48", "T18")
def test_each_column_is_read_as_its_kind_and_stands_below_its_heading():
    several = corpus(
        text=[
            Plain("summary"),
            Html("duties", heading="Your duties"),
            Markdown("profile", heading="Your\n profile "),
            EscapedHtml("offer", heading="We offer"),
            Plain("notes", heading="Notes"),
        ]
    )
    columns = ["1 < 2", "<p>Bake &amp; sell</p>", "**Early** riser", "&lt;p&gt;Bread&lt;/p&gt;", "<none>"]
    assert sent(several, row(*columns)) == [
        "1 < 2\n\nYour duties\nBake & sell\n\nYour profile\nEarly riser\n\nWe offer\nBread\n\nNotes\n<none>"
    ]
    assert sent(several, row(None, "<p></p>", " ", "&lt;p&gt;&lt;/p&gt;", "seen")) == ["Notes\nseen"]
    assert sent(several, row(None, None, "", "&amp;nbsp;", "\n")) == []


@pytest.mark.ids("A-48")
@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("&lt;p&gt;Fish &amp;amp; chips&lt;/p&gt;&lt;p&gt;caf&amp;eacute;&lt;/p&gt;", "Fish & chips\n\ncafé"),
        ("&lt;p&gt;a&amp;nbsp;b&lt;/p&gt;", "a b"),
        ("&lt;p&gt;write &amp;amp;lt;b&amp;amp;gt;&lt;/p&gt;", "write &lt;b&gt;"),
        ("&#60;p&#62;x&#60;/p&#62;&#x3C;p&#x3E;y", "x\n\ny"),
        ("<p>as it is</p>", "as it is"),
    ],
)
def test_escaped_html_is_unescaped_exactly_once(value: str, text: str):
    assert sent(corpus(text=EscapedHtml("body")), row(value)) == [text]


def test_a_chunk_knows_the_headings_above_where_it_begins():
    words = "word " * 60
    several = corpus(text=[Plain("intro"), Markdown("body", heading="Policy")], max_chars=400)
    body = f'{words}\n\n# Leave\n\n{words}\n\n## Parents\n\n{words}\n\n{words}\n\n# "Travel"\n\n{words}'
    assert [(chunk.body.split("\n")[0][:8], chunk.heading_path) for chunk in several.plan(row(words, body)).chunks] == [
        ("word wor", None),
        ("Policy", '["Policy"]'),
        ("Leave", '["Policy", "Leave"]'),
        ("Parents", '["Policy", "Leave", "Parents"]'),
        ("word wor", '["Policy", "Leave", "Parents"]'),
        ('"Travel"', r'["Policy", "\"Travel\""]'),
    ]


def test_headings_above_a_chunk_are_no_part_of_what_is_sent():
    text = "# {}\n\n" + "word " * 60 + "\n\n" + "tail " * 60
    before, after = (corpus(text=Markdown("body"), max_chars=400).plan(row(text.format(name))).chunks for name in "AB")
    assert before[1].text_hash == after[1].text_hash
    assert (before[1].heading_path, after[1].heading_path) == ('["A"]', '["B"]')


def test_an_overlap_leaves_a_chunk_below_its_own_heading():
    text = "# A\n\n" + "word " * 60 + "\n\n# B\n\n" + "tail " * 60
    chunks = corpus(text=Markdown("body"), max_chars=500, overlap=100).plan(row(text)).chunks
    assert chunks[1].body.startswith("word")
    assert [chunk.heading_path for chunk in chunks] == ['["A"]', '["B"]']


def test_chunks_keep_to_the_declared_size_and_to_a_smaller_one_on_demand():
    words = "word " * 2000
    for asked, most in ((None, 500), (125, 125)):
        bodies = [chunk.body for chunk in corpus(max_chars=500).plan(row(words), max_chars=asked).chunks]
        assert max(map(len, bodies)) <= most
        assert sum(body.count("word") for body in bodies) == 2000


def test_an_overlap_never_outgrows_chunks_that_had_to_be_made_smaller():
    bodies = [
        chunk.body for chunk in corpus(max_chars=1000, overlap=900).plan(row("word " * 200), max_chars=125).chunks
    ]
    assert max(map(len, bodies)) <= 125


@pytest.mark.parametrize(
    ("state", "action"),
    [
        ({"present": False, "indexable": False}, "gone"),
        ({"indexable": False}, "clear"),
        ({"indexable": False, "forced": True, "stamped": True}, "clear"),
        ({"stamped": True}, "superseded"),
        ({"stamped": True, "oversize": True}, "superseded"),
        ({"stamped": True, "forced": True}, "embed"),
        ({}, "embed"),
    ],
)
def test_what_is_done_with_a_row_follows_from_what_was_loaded(state: dict[str, bool], action: str):
    plan = corpus().plan(row("text", **state))
    assert plan.action == action
    assert bool(plan.chunks) == (action == "embed")


def test_a_row_over_the_limit_of_bytes_or_characters_is_too_large_and_nothing_less_is():
    with pytest.raises(TooLarge, match=f"{MAX_ROW_BYTES:,} bytes"):
        corpus().plan(row(oversize=True))
    with pytest.raises(TooLarge):
        corpus().plan(row("a " * 1_000_001))
    assert corpus(max_chars=8000).plan(row("a " * 100_000)).action == "embed"


def test_a_row_of_more_chunks_than_may_be_is_too_large():
    with pytest.raises(TooLarge):
        corpus(max_chars=100, overlap=60).plan(row("a" * 1_900_000))


@pytest.mark.parametrize(
    "change",
    [
        {"prefix": "query: "},
        {"text": Html("body")},
        {"text": Markdown("body")},
        {"text": EscapedHtml("body")},
        {"text": Plain("body", heading="Body")},
        {"text": Plain("other")},
        {"text": [Plain("body"), Plain("other")]},
        {"max_chars": 1999},
        {"overlap": 1},
    ],
)
@pytest.mark.ids("Q27")
def test_whatever_changes_a_vector_changes_the_identity(change: dict[str, Any]):
    assert corpus(**change).identity_of("model") != corpus().identity_of("model")
    assert corpus().identity_of("other-model") != corpus().identity_of("model")


def test_what_changes_no_vector_leaves_the_identity_alone():
    same = corpus(
        indexable="x > 1", revision="version", order="oldest", table="elsewhere", similar=Similar(), chunks="c"
    )
    assert same.identity_of("model") == corpus().identity_of("model")
    assert corpus().identity_of("model") == corpus().identity_of("model")


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"kind": ""}, "kind must be a lower-case word"),
        ({"kind": "Jobs"}, "kind must be"),
        ({"kind": "jobs; drop"}, "kind must be"),
        ({"kind": "j" * 41}, "kind must be"),
        ({"chunks": "Notes"}, "chunks 'Notes' is no lower-case table name"),
        ({"similar": Similar(k=0)}, "similar needs a k of 1 to 200 and a condition"),
        ({"similar": Similar(where=" ")}, "similar needs a k of 1 to 200 and a condition"),
        ({"chunks": "similar_notes"}, "chunks 'similar_notes' is the name of a table of neighbours"),
        ({"table": ""}, "table and key must both be given"),
        ({"key": ""}, "table and key must both be given"),
        ({"key": "model_id"}, "key 'model_id' is a column of every chunk table"),
        ({"key": "per%cent"}, "key 'per%cent' holds a percent sign"),
        ({"order": "newest"}, "order 'newest' is neither"),
        ({"text": []}, "text names no column"),
        ({"text": Plain("body", heading=" ")}, "text has a blank heading"),
        ({"max_chars": 99}, "max_chars must be"),
        ({"max_chars": 8001}, "max_chars must be"),
        ({"overlap": -1}, "max_chars must be"),
        ({"max_chars": 200, "overlap": 200}, "max_chars must be"),
        ({"indexable": " "}, "indexable is empty"),
        ({"prefix": "{"}, "prefix "),
        ({"prefix": "{}"}, "prefix holds '{}'"),
        ({"prefix": "{a.b}"}, "prefix holds '{a.b}'"),
        ({"prefix": "{a!r}"}, "prefix holds '{a}'"),
        ({"prefix": "{a:>9}"}, "prefix holds '{a}'"),
        ({"prefix": "{0}"}, "prefix holds '{0}'"),
    ],
)
def test_a_declaration_that_cannot_be_maintained_is_refused_naming_the_field(fields: dict[str, Any], says: str):
    with pytest.raises(DeclarationError, match=says) as caught:
        corpus(**fields)
    assert "Correct the declaration" in str(caught.value)


def test_a_declaration_cannot_be_changed_once_it_is_made():
    with pytest.raises(AttributeError):
        jobs.kind = "other"  # type: ignore[misc]


@pytest.mark.ids("C-02")
def test_the_registry_lists_its_kinds_sorted_and_gives_each_its_declaration():
    declared = [corpus(kind=kind) for kind in ("tickets", "jobs", "notes")]
    registry = Registry(declared)
    assert registry.kinds == ["jobs", "notes", "tickets"]
    assert [registry[kind] for kind in ("tickets", "jobs", "notes")] == declared


@pytest.mark.ids("C-02")
def test_the_registry_refuses_a_kind_that_is_declared_twice():
    with pytest.raises(DeclarationError, match="'notes' is declared twice"):
        Registry([corpus(), corpus(table="elsewhere", chunks="elsewhere")])


@pytest.mark.ids("C-02")
def test_the_registry_refuses_two_kinds_on_one_chunk_table():
    first, second = corpus(kind="a", chunks="shared"), corpus(kind="b", chunks="shared")
    with pytest.raises(DeclarationError, match="'a' and 'b' both write shared"):
        Registry([first, second])
    with pytest.raises(DeclarationError, match="'notes' and 'b' both write notes_semantic_chunks"):
        Registry([corpus(), replace(second, chunks="notes_semantic_chunks")])


@pytest.mark.ids("C-02")
def test_an_unknown_kind_is_answered_with_the_known_ones():
    with pytest.raises(DeclarationError, match=r"Unknown kind 'x'\. Declared are: notes"):
        Registry([corpus()])["x"]
    with pytest.raises(DeclarationError, match="Declared are: none"):
        Registry([])["x"]
