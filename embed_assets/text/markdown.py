"""Markdown to sections: GitHub's own parser makes HTML of it, and `html.py` does the rest.

cmark takes linear time for hostile input and has no depth below which it drops text; parsers in Python that were
tried are 25 times slower and have one or the other.
"""

from __future__ import annotations

import re

from cmarkgfm import cmark

from embed_assets.text.cmark import to_html
from embed_assets.text.html import html_to_sections
from embed_assets.text.plain import normalise, well_formed
from embed_assets.text.sections import Section

# A row is filled up to its table's width: 14,000 characters can make half a million cells and take 350 MB.
_MOST_CELLS = 100_000
_RAW_HTML = cmark.Options.CMARK_OPT_UNSAFE  # only its text is used
_FRONT_MATTER = re.compile(r"\A\ufeff?---[ \t]*\r?\n(.*?)^(?:---|\.\.\.)[ \t]*(?:\r?\n|\Z)", re.S | re.M)


def markdown_to_sections(markdown: str) -> list[Section]:
    """Visible text of GitHub-flavoured Markdown, raw HTML's and images' alternative text included.

    Front matter stays as plain text: a parser would take its last line for a heading.
    """
    markdown = well_formed(markdown)
    front = _FRONT_MATTER.match(markdown)
    text = normalise(front[1]) if front else ""
    body = markdown[front.end() :] if front else markdown
    widest = max((line.count("|") for line in body.splitlines()), default=0)
    extensions = ["strikethrough", *(["table"] if widest * body.count("\n") <= _MOST_CELLS else [])]
    html = to_html(body, options=_RAW_HTML, extensions=extensions)
    return [*([Section((), text)] if text else []), *html_to_sections(html, alternatives=True)]
