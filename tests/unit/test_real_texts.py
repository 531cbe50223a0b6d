"""Real postings and the answers of applicant-tracking systems: no visible word is lost, none is made up."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Iterator
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any

import pytest
from bs4 import BeautifulSoup
from markdown_it import MarkdownIt

from embed_assets import EscapedHtml, Html, Markdown, Plain
from embed_assets.text import cut, joined

DATA = Path(__file__).resolve().parents[3] / "shared/data"
ATS = ["ashby", "greenhouse", "lever", "recruitee", "smartrecruiters", "workable", "workday"]
pytestmark = pytest.mark.skipif(not DATA.exists(), reason="the real texts are not here")


def postings(name: str) -> list[dict[str, Any]]:
    with (DATA / "jobs" / name).open(encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def text_of(kind: type[Plain], value: str) -> str:
    return joined(kind("body").sections(value))


def visible(source: str) -> str:
    """The reference: every character of the text of BeautifulSoup's tree that is no white space."""
    return "".join(BeautifulSoup(source, "html.parser").get_text(" ").split())


def squeezed(text: str) -> str:
    return "".join(text.split())


def strings(value: Any) -> Iterator[str]:
    """Every string of a JSON document."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list | dict):
        for part in value.values() if isinstance(value, dict) else value:
            yield from strings(part)


def words(text: str) -> list[str]:
    """Scripts without spaces are compared by characters."""
    return re.findall(r"[\u3000-\u9fff]|[^\W\u3000-\u9fff]+", text.casefold())


def told_apart(ours: list[str], theirs: list[str]) -> tuple[float, list[str], list[str]]:
    """How alike two texts are, and the words that only one of them has."""
    matcher = SequenceMatcher(None, ours, theirs, autojunk=False)
    spans = [span for operation, *span in matcher.get_opcodes() if operation != "equal"]
    only_ours = [word for start, end, _, _ in spans for word in ours[start:end]]
    return matcher.ratio(), only_ours, [word for _, _, start, end in spans for word in theirs[start:end]]


def addresses(source: str) -> set[str]:
    tags = BeautifulSoup(source, "html.parser").find_all(["a", "img"])
    return set(words(" ".join(str(tag.get("href", "")) + " " + str(tag.get("src", "")) for tag in tags)))


@pytest.mark.ids("A-48")
def test_postings_are_their_plain_descriptions_but_for_addresses_and_the_numbers_of_lists():
    ratios = []
    for posting in postings("ashby-multilingual.jsonl"):
        source, plain = posting["descriptionHtml"], posting["descriptionPlain"]
        text = text_of(Html, source)
        ratio, only_ours, only_theirs = told_apart(words(text), words(plain))
        ratios.append(ratio)
        assert only_ours == []
        # Of the two, theirs writes the address of a link behind it, and 1. 2. 3. before the items of ordered lists.
        known = addresses(source)
        assert all(word in known or word.isdigit() for word in only_theirs)
    assert len(ratios) == 150
    assert sum(ratios) / len(ratios) >= 0.97
    assert min(ratios) >= 0.90


@pytest.mark.ids("A-48", "A-53")
def test_no_html_posting_loses_a_visible_character_in_cleaning_or_cutting():
    for posting in postings("ashby-multilingual.jsonl"):
        text = text_of(Html, posting["descriptionHtml"])
        assert squeezed(text) == visible(posting["descriptionHtml"])
        assert squeezed("".join(piece.text for piece in cut(text, max_chars=500))) == squeezed(text)


def test_no_markdown_posting_loses_a_visible_character():
    parser = MarkdownIt("commonmark").enable(["table", "strikethrough"])
    for posting in postings("uber-markdown.jsonl"):
        reference = BeautifulSoup(parser.render(posting["description"]), "html.parser")
        for image in reference("img"):
            image.replace_with(str(image.get("alt", "")))
        sections = Markdown("body").sections(posting["description"])
        assert squeezed(joined(sections)) == squeezed(reference.get_text())
        headings = {section.path[-1] for section in sections if section.path}
        assert headings == {" ".join(h.get_text().split())[:200].strip() for h in reference(re.compile("h[1-6]"))} - {
            ""
        }


@pytest.mark.ids("T16")
@pytest.mark.parametrize("system", ATS)
def test_no_text_of_an_applicant_tracking_system_loses_a_visible_character(system: str):
    answer = json.loads((DATA / "ats" / f"{system}.json").read_text(encoding="utf-8"))
    for value in strings(answer):
        if "&lt;" in value:
            assert squeezed(text_of(EscapedHtml, value)) == visible(html.unescape(value))
        elif "<" in value:
            assert squeezed(text_of(Html, value)) == visible(value)
        else:
            assert squeezed(text_of(Plain, value)) == squeezed(value)


@pytest.mark.ids("A-48")
def test_escaped_postings_leave_neither_tags_nor_entities():
    answer = json.loads((DATA / "ats/greenhouse.json").read_text(encoding="utf-8"))
    for job in answer["jobs"]:
        text = text_of(EscapedHtml, job["content"])
        assert not re.search(r"&(?:lt|gt|amp|nbsp|#\d+);|</?\w+[^>]*>", text)
        assert len(text) > 1000
