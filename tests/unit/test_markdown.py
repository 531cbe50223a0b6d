"""Markdown to text: what stays of each construct, headings as paths, and hostile documents."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from linear import assert_linear

from embed_assets.text import joined, markdown_to_sections


def text_of(source: str) -> str:
    return joined(markdown_to_sections(source))


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("one\ntwo\n\nthree", "one two\n\nthree"),
        ("a **b** *c* ~~d~~ `e`", "a b c d e"),
        ("- a\n- b\n  - c\n\n1. d\n2. e", "a\nb\nc\n\nd\ne"),
        ("[text](https://example.org 'title') <https://example.org>", "text https://example.org"),
        ("[text][ref]\n\n[ref]: https://example.org", "text"),
        ("see ![a red bus](bus.png)", "see a red bus"),
        ("```python\nx = 1\ny = 2\n```", "x = 1\ny = 2"),
        ("| k | v |\n|---|---|\n| x | 1 |", "k\tv\nx\t1"),
        ("> quoted\n\nnot", "quoted\n\nnot"),
        ("a\n\n---\n\nb", "a\n\nb"),
        ("a\\*b\\* 1 < 2", "a*b* 1 < 2"),
        ("&amp;lt; &copy;", "&lt; ©"),
        ("`<b>` and <b>bold</b>", "<b> and bold"),
        ("<div>\n<p>raw</p>\n<script>x</script>\n</div>\n\nmore", "raw\n\nmore"),
        ("a<!-- no -->b", "ab"),
        ("- [ ] open\n- [x] done", "[ ] open\n[x] done"),
        ("Ge\0ing \ud800", "Ge\ufffding \ufffd"),
        ("a note[^1]\n\n[^1]: said below", "a note[^1]\n\n[^1]: said below"),
        ("", ""),
        ("<!-- x -->", ""),
    ],
)
def test_each_construct_leaves_its_visible_text(source, text):
    assert text_of(source) == text


def test_headings_of_both_forms_make_paths():
    source = "intro\n\n# Travel\n\nWho.\n\nBy *train*\n---\n\nHow.\n\n### Seats\n\n2nd.\n\n# Leave #\n\n- a"
    assert markdown_to_sections(source) == [
        ((), "intro"),
        (("Travel",), "Travel\nWho."),
        (("Travel", "By train"), "By train\nHow."),
        (("Travel", "By train", "Seats"), "Seats\n2nd."),
        (("Leave",), "Leave\na"),
    ]


@pytest.mark.parametrize("end", ["---", "..."])
def test_front_matter_is_text_and_no_heading(end):
    source = f"---\ntitle: Leave\nowner: hr\n{end}\n# Leave\n\ntext"
    assert markdown_to_sections(source) == [((), "title: Leave\nowner: hr"), (("Leave",), "Leave\ntext")]
    assert text_of("---\n\nno front matter") == "no front matter"


HOSTILE = {
    "quotes": lambda n: ">" * n + "END",
    "lists": lambda n: "- " * n + "END",
    "brackets": lambda n: "[" * n + " END",
    "links": lambda n: "[a](" * n + " END",
    "stars": lambda n: "*a **a " * n + "END",
    "images": lambda n: "![" * n + " END",
    "tags": lambda n: "<div>" * n + "END",
    "references": lambda n: "[a]: " + "x" * n + "\n" + "[a]" * n + " END",
    "ticks": lambda n: "".join("e" + "`" * ticks for ticks in range(int(n**0.5))) + " END",
    "columns": lambda n: "|a" * 3000 + "\n" + "|-" * 3000 + "\n" + "a\n" * (n // 100) + "END",
    "a long word": lambda n: "a" * n + " END",
    "rules": lambda n: "---\n" * n + "END",
    "headings": lambda n: "# h\n" * n + "END",
}


@pytest.mark.ids("T04", "T14")
@pytest.mark.parametrize("made", HOSTILE.values(), ids=HOSTILE)
def test_hostile_documents_take_linear_time_and_keep_their_end(made):
    assert text_of(made(50_000)).endswith("END")
    assert_linear(text_of, made, 24_000)


def test_tables_that_would_be_filled_up_to_very_many_cells_stay_as_they_are_written():
    source = "|a" * 300 + "\n" + "|-" * 300 + "\n" + "b\n" * 1000
    assert text_of(source).startswith("|a|a")
    assert text_of("|a" * 30 + "\n" + "|-" * 30 + "\n" + "b\n" * 1000).startswith("a\ta")


def test_threads_read_alike():
    source = "~~a~~ b\n\n| c |\n|---|\n| d |\n\n" * 200
    with ThreadPoolExecutor(4) as pool:
        assert len(set(pool.map(text_of, [source] * 40))) == 1


def resident() -> int:
    """Bytes of this process that are in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="told by Linux alone")
def test_a_document_leaves_no_memory_behind():
    text = "# Heading\n\n" + "A paragraph of *some* words.\n\n" * 3000
    for _ in range(40):
        markdown_to_sections(text)
    before = resident()
    for _ in range(40):
        markdown_to_sections(text)
    assert resident() - before < 40_000_000  # the trees alone would be 140 MB
