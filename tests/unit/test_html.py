"""HTML to text: what stays, what goes, where lines end, and that no input is too odd."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from linear import assert_linear
from lxml import etree

from embed_assets.text import cut, html, html_to_sections, joined, normalise, well_formed

POSTINGS = Path(__file__).resolve().parents[3] / "shared/data/jobs/ashby-multilingual.jsonl"


def html_to_text(source: str) -> str:
    return joined(html_to_sections(source))


def with_libxml2(source: str) -> str:
    return joined(html._with_libxml2(source))


def with_html_parser(source: str) -> str:
    return joined(html._with_html_parser(source))


both_parsers = pytest.mark.parametrize("parse", [with_libxml2, with_html_parser], ids=["libxml2", "html.parser"])


def real_postings() -> list[str]:
    if not POSTINGS.exists():
        pytest.skip("the real postings are not here")
    with POSTINGS.open(encoding="utf-8") as lines:
        return [json.loads(line)["descriptionHtml"] for line in lines]


@both_parsers
@pytest.mark.ids("A-48")
@pytest.mark.parametrize(
    ("source", "text"),
    [
        (
            "<h1>Engineer</h1><p>Fish &amp; chips</p><p>caf&eacute; &#8364;5</p>",
            "Engineer\nFish & chips\n\ncafé €5",
        ),
        ("<div>one</div><div>two</div>", "one\ntwo"),
        ("<p>intro</p><ul><li>a</li><li>b</li></ul>outro", "intro\n\na\nb\n\noutro"),
        ("<ul><li><p>a</p></li><li><p>b</p><ul><li>c</li></ul></li></ul>", "a\nb\nc"),
        ("a<br>b<br/><br>c", "a\nb\n\nc"),
        ("<table><tr><th>k</th><th>v</th></tr><tr><td>x</td><td>1</td></tr></table>", "k\tv\nx\t1"),
        ("<p>a<p>b<ul><li>1<li>2</ul>", "a\n\nb\n\n1\n2"),
        ("<pre>one\n  two\n\nthree</pre>", "one\ntwo\n\nthree"),
        ("<dl><dt>term</dt><dd>meaning</dd></dl>", "term\nmeaning"),
        ("<div><div><div>x</div></div></div>y", "x\ny"),
    ],
)
def test_blocks_become_lines_and_entities_characters(parse, source, text):
    assert parse(source) == text


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("&amp;lt;b&amp;gt;", "&lt;b&gt;"),
        ("&amp;amp;", "&amp;"),
        ("&lt;script&gt;x&lt;/script&gt;", "<script>x</script>"),
        ("a &amp;nbsp; b", "a &nbsp; b"),
    ],
)
@both_parsers
def test_entities_are_decoded_exactly_once(parse, source, text):
    assert parse(source) == text


@pytest.mark.ids("T09")
@both_parsers
def test_script_style_and_the_like_are_dropped_and_neighbours_are_not_glued(parse):
    source = (
        "<head><title>t</title><style>p{}</style></head><nav>Home</nav><main><p>Text</p></main>"
        "<script>if (a<b) {}</script><style>.x{}</style><template><p>tpl</p></template>"
        "<noscript>nojs</noscript><svg><title>t</title><text>pic</text></svg><p>End</p>"
    )
    assert parse(source) == "Home\n\nText\n\nEnd"


@both_parsers
@pytest.mark.ids("T09")
@pytest.mark.parametrize(
    "source",
    [
        "<html><head><title>t</title><body><p>Text</p></body></html>",
        "<head><title>t</title><b>Text</b>",
        "<head><meta charset=utf-8> Text",
        "<style>p {}</style><o:p>Text</o:p>",
        "<style>p {}</style><nobr>Text",
    ],
)
def test_a_head_without_its_end_tag_does_not_swallow_the_body(parse, source):
    assert parse(source) == "Text"


@both_parsers
def test_what_a_head_holds_stays_out_even_if_it_could_be_seen(parse):
    assert parse("<head><noscript><p>Enable</p></noscript></head><body>Text") == "Text"


@pytest.mark.ids("T11")
@both_parsers
@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("aaa \n<a>bbb</a>", "aaa bbb"),
        ("foo<span>&nbsp;</span>bar", "foo bar"),
        ("foo<b> bar</b>", "foo bar"),
        ("foo\u00a0bar", "foo bar"),
        ("  <p>  a\t\n b  </p>  ", "a b"),
        ("un<b>brok</b>en", "unbroken"),
        ("<ul><li>a </li><li> b </li></ul>", "a\nb"),
        ("<table><tr><td>a </td><td> b</td></tr></table>", "a\tb"),
    ],
)
def test_whitespace_collapses_as_in_a_browser(parse, source, text):
    assert parse(source) == text


@pytest.mark.ids("T16")
@both_parsers
def test_text_round_inline_tags_keeps_its_order(parse):
    assert parse("a <strong>b <i>c</i> d</strong> e<sup>f</sup> g") == "a b c d ef g"


@both_parsers
def test_comments_declarations_and_instructions_are_dropped(parse):
    assert parse("<!DOCTYPE html><?php x ?>a<!-- b --><!-- <p>c</p> -->d") == "ad"


@pytest.mark.ids("T01", "T02")
@both_parsers
def test_nul_and_lone_surrogates_become_the_replacement_character(parse):
    source = well_formed("Ge\x00ing &#0; &#xD800; \ud800 \ud83d\ude00")
    assert parse(source) == "Ge\ufffding \ufffd \ufffd \ufffd 😀"


@pytest.mark.ids("T01", "T02")
def test_plain_text_is_normalised_before_it_is_hashed():
    assert normalise("Ge\x00ing \ud800 \udc00\ud83d\ude00\ud83d") == "Ge\ufffding \ufffd \ufffd😀\ufffd"
    assert normalise(" a\u00a0 b \r\n c\r\rd\n \n\n\ne ") == "a b\nc\n\nd\n\ne"


@pytest.mark.ids("T13")
@pytest.mark.parametrize("depth", [200, 247, 248, 249, 250, 255, 256, 260, 2100])
def test_text_below_any_depth_is_present(depth):
    source = "before" + "<div>" * depth + "MARKER" + "</div>" * depth + "after"
    assert html_to_text(source) == "before\nMARKER\nafter"


DEEP = "<div>" * 300
BROKEN = {
    "just deep": lambda n: "<div>" * 993 + "END",
    "unclosed": lambda n: "<div>" * n + "END",
    "unclosed and stray ends": lambda n: "<div>" * n + "</b>" * n + "END",
    "comments": lambda n: DEEP + "</div>" * 300 + "<!--x-->" * n + "END",
    "attributes without an end": lambda n: DEEP + "<a b=" * n + ">END",
    "one tag of many attributes": lambda n: DEEP + "<a " + "b=c " * n + ">END",
    "comments without an end": lambda n: DEEP + "END" + "<!--" * n,
    "tags without an end": lambda n: DEEP + "END" + "<a b=" * n,
    "CDATA without an end": lambda n: DEEP + "END" + "<![CDATA[" * n,
    "ends of scripts without an end": lambda n: DEEP + "END<script>" + "</script" * n,
    "crossed": lambda n: "<b><i>" * n + "</b></i>" * n + "END",
    "entities": lambda n: DEEP + "&amp &#x; &a" * n + "END",
    "shallow stray ends": lambda n: "<div>" * 240 + "</b>" * n + "END",
}


@pytest.mark.ids("T14")
@pytest.mark.parametrize("made", BROKEN.values(), ids=BROKEN)
def test_deep_and_broken_documents_take_linear_time(made):
    assert html_to_text(made(50_000)).endswith("END")
    assert_linear(html_to_text, made, 32_000)


def test_documents_that_libxml2_refuses_are_read_all_the_same(monkeypatch):
    def refuse(*_args, **_options):
        raise etree.ParserError("refused")

    monkeypatch.setattr(etree, "HTMLParser", refuse)
    assert html_to_text("<p>a</p><p>b") == "a\n\nb"


def test_a_document_that_libxml2_gave_up_on_is_read_by_the_other_parser(monkeypatch):
    class GivesUp:
        feed_error_log = [SimpleNamespace(level=3)]  # noqa: RUF012

        def __init__(self, **_options): ...
        def feed(self, _source): ...
        def close(self): ...

    monkeypatch.setattr(etree, "HTMLParser", GivesUp)
    assert html_to_text("<p>a</p><p>b") == "a\n\nb"


def test_characters_that_mark_boundaries_inside_are_only_spaces_outside():
    assert html_to_text("a\x1cb\x1dc\x1ed\x1fe") == normalise("a\x1cb\x1dc\x1ed\x1fe") == "a b c d e"


@pytest.mark.ids("T01", "T02")
def test_what_a_parser_hands_over_is_normalised_too():
    sink = html._Sink()
    sink.data("a\0\ud800")
    assert joined(sink.close()) == "a\ufffd\ufffd"


def test_a_slice_boundary_inside_the_source_changes_nothing(monkeypatch):
    source = "<p>caf&eacute; – <b>naïve</b> 🎉</p><!-- c --><script>a<b</script><ul><li>x</ul>"
    whole = html_to_text(source)
    for size in range(1, 12):
        monkeypatch.setattr(html, "_FEED", size)
        assert html_to_text(source) == whole


def test_headings_make_sections_below_one_another():
    source = "intro<h1>Travel</h1><p>a</p><h3>By <b>train</b></h3>b<h2>By air</h2>c<h1>Leave</h1>"
    for parse in (html._with_libxml2, html._with_html_parser):
        assert parse(source) == [
            ((), "intro"),
            (("Travel",), "Travel\na"),
            (("Travel", "By train"), "By train\nb"),
            (("Travel", "By air"), "By air\nc"),
            (("Leave",), "Leave"),
        ]


@pytest.mark.parametrize(
    ("source", "sections"),
    [
        ("<ul><li><h2>a</h2>b</li></ul>c", [((), "a\nb\n\nc")]),
        ("<table><tr><td><h2>a</h2></td><td>b</td></tr></table>", [((), "a\n\nb")]),
        ("<h2> </h2>a", [((), "a")]),
        ("<h1>a<h2>b</h2></h1>c", [(("a b",), "a\n\nb\nc")]),
        ("<h2>" + "x" * 300 + "</h2>a", [(("x" * 200,), "x" * 300 + "\na")]),
    ],
)
def test_headings_that_head_nothing_make_no_section(source, sections):
    assert html._with_html_parser(source) == sections


def test_no_heading_is_lost_however_many_there_are():
    sections = html_to_sections("".join(f"<h{n % 6 + 1}>heading{n}" for n in range(20_000)))
    assert joined(sections).split() == [f"heading{n}" for n in range(20_000)]
    assert max(len(section.path) for section in sections) <= 6


@pytest.mark.ids("A-51", "T18")
@pytest.mark.parametrize(
    "source", ["", "  ", "<p>&nbsp;</p>", "<p></p><br><ul><li></li></ul>", "<!-- x -->", "&#8203;"]
)
def test_markup_without_text_makes_no_chunk(source):
    assert cut(html_to_text(source)) == []


def test_both_parsers_give_the_same_text_of_real_postings():
    for source in real_postings():
        assert html._with_libxml2(source) == html._with_html_parser(source)


TAGS = "<p> </p> <div> </div> <li> </li> <pre> </pre> <br> <head> </head> <script> </script> <svg> </svg> <td>"
ODDITIES = "<!-- --> <![CDATA[ ]]> & &amp; &#0; &#xD800; &#29; < > </ <? <! text \" ' = 一 é 😀"
CONTROLS = ["\n", "\t", "\0", "\ud800", "\x1c", " "]
MARKUP = st.lists(st.sampled_from([*TAGS.split(), *ODDITIES.split(), *CONTROLS]) | st.text(max_size=5)).map("".join)


@settings(max_examples=200, deadline=None)
@given(MARKUP)
def test_any_markup_gives_text_that_can_be_stored(source):
    for text in (html_to_text(source), with_html_parser(well_formed(source)), normalise(source)):
        assert text == text.strip()
        assert "\0" not in text
        assert "\n\n\n" not in text
        assert "  " not in text
        text.encode()
