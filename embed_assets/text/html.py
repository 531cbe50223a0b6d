"""HTML to plain text in sections, one for each heading.

Belongs here: which tags break a line, what is dropped, how whitespace collapses, which headings make a section.
Does not: characters (`plain.py`), cutting the text (`chunk.py`), prefixes (the corpus).

libxml2 parses and calls a sink as it goes, so that no tree is built. It has no depth limit that way, but
its time grows with depth × stray end tags; documents deeper than its own tree would allow, and those it
refuses, go to html.parser, 2.4 times slower, which drives the same sink. A tree of BeautifulSoup's would take 450 MB
for two million characters of tags; in the tests it is the reference for both.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from html.parser import HTMLParser

from lxml import etree

from embed_assets.text.plain import well_formed
from embed_assets.text.sections import Section, nested

MAX_DEPTH = 250
"""libxml2 trusts nothing nested deeper than 256; html and body are two of those."""

_FEED = 65_536  # characters a slice: a parser told to stop does so only between slices
_FATAL = 3  # libxml2's XML_ERR_FATAL: it gave up on the rest of the document

# What the sink writes between pieces of text. They count as whitespace to Python, like all that divides.
_CELL, _LINE, _BREAK, _PARAGRAPH = "\x1c", "\x1d", "\x1e", "\x1f"


def _tags(names: str) -> frozenset[str]:
    return frozenset(names.split())


_DROPPED = _tags("script style template noscript svg head title iframe noembed noframes")
_PARAGRAPHS = _tags(
    "p h1 h2 h3 h4 h5 h6 ul ol dl menu dir table blockquote pre xmp listing plaintext hr section article "
    "header footer nav main aside figure form fieldset address details center body hgroup search"
)
_LINES = _tags("div li tr dt dd caption figcaption legend summary option optgroup thead tbody tfoot")
_BOUNDARY = dict.fromkeys(_PARAGRAPHS, _PARAGRAPH) | dict.fromkeys(_LINES, _LINE) | dict.fromkeys(("td", "th"), _CELL)
_HEAD = _tags("base basefont bgsound link meta noframes noscript script style template title head")
_HEADINGS = _tags("h1 h2 h3 h4 h5 h6")
_VOID = _tags("area base br col embed hr img input link meta param source track wbr keygen basefont bgsound frame")
_PREFORMATTED = _tags("pre xmp listing plaintext textarea")

_SPACES = re.compile(r"[ \t\n\r\f\v\xa0]{2,}|[\t\n\r\f\v\xa0]")
_DIVIDED = re.compile(r"[\x1c-\x1f][ \x1c-\x1f]*")
_MARKS = re.compile(r"[\x1c-\x1f]")

# What html.parser reads in more than linear time, or refuses; dropped as a browser would drop it.
_UNTEXT = re.compile(
    r"<!--(?:.*?-->|.*\Z)|<(script|style)\b(?:.*?</\1[^>]*(?:>|\Z)|.*\Z)|<[!?][^>]*(?:>|\Z)", re.S | re.I
)
# html.parser's expression keeps a trail of every attribute: 400 MB for half a million of them.
_TAG = re.compile(r"<([a-zA-Z][^\s/>]*)([^>]*)")
_LONG_TAG = 10_000
_CUT_TAG = re.compile(r"<[a-zA-Z/]")


def html_to_sections(html: str, *, alternatives: bool = False) -> list[Section]:
    """Visible text: blank lines between paragraphs, a line per list item and table row, tabs between cells.

    Whitespace collapses as in a browser, entities are decoded once, nothing is raised for any input. A heading
    outside lists and tables begins a section. `alternatives`: an image stands for its `alt` text.
    """
    html = _MARKS.sub(" ", well_formed(html))
    try:
        return _with_libxml2(html, alternatives)
    except (_NotForLibxml2, etree.LxmlError):
        return _with_html_parser(html, alternatives)


class _NotForLibxml2(Exception):
    """libxml2 would drop text of this document, or take too long."""


class _Sink:
    """Takes start, end and data events of a parser; `close` returns the sections."""

    def __init__(self, alternatives: bool = False, max_depth: int | None = None) -> None:
        self._alternatives, self._max_depth = alternatives, max_depth
        self._out: list[str] = []
        self._parts: list[tuple[int, list[str], list[str]]] = [(0, [], self._out)]  # level, heading, text below it
        self._depth = 0
        self._dropped_at = 0  # depth of the outermost element that is dropped; 0: none
        self._heading_at = 0  # depth of the heading that is being read; 0: none
        self._in_head = False
        self._items = self._tables = self._preformatted = 0

    def start(self, tag: str, attributes: Mapping[str, str | None]) -> None:
        self._depth += 1
        if self._max_depth and self._depth > self._max_depth:
            raise _NotForLibxml2
        if self._dropped_at and not (tag not in _HEAD and self._leaves_head(self._depth - 1)):
            return
        if tag in _DROPPED:
            self._dropped_at, self._in_head = self._depth, tag == "head"
        elif tag == "br":
            self._out.append(_BREAK)
        elif tag == "img":
            self._out.append((self._alternatives and attributes.get("alt")) or "")
        else:
            self._bound(tag)
            self._count(tag, 1)
            self._begin_section(tag)

    def end(self, tag: str) -> None:
        if self._dropped_at == self._depth:
            self._dropped_at = 0
        elif not self._dropped_at:
            self._count(tag, -1)
            self._bound(tag)
        if self._heading_at == self._depth:
            self._heading_at, self._out = 0, self._parts[-1][2]
        self._depth -= 1

    def data(self, text: str) -> None:
        if not self._dropped_at or (text.strip() and self._leaves_head(self._depth)):
            self._out.append(text.replace("\n", _BREAK) if self._preformatted else text)

    def close(self) -> list[Section]:
        return list(nested((level, _collapsed(heading), _collapsed(text)) for level, heading, text in self._parts))

    def _leaves_head(self, depth: int) -> bool:
        """A head whose end tag was left out ends where something visible begins: right in it, not in its title."""
        leaves = self._in_head and depth == self._dropped_at
        if leaves:
            self._dropped_at = 0
        return leaves

    def _begin_section(self, tag: str) -> None:
        if tag in _HEADINGS and not (self._heading_at or self._items or self._tables):
            self._heading_at, self._out = self._depth, []
            self._parts.append((int(tag[1]), self._out, []))

    def _bound(self, tag: str) -> None:
        if boundary := _BOUNDARY.get(tag):
            self._out.append(_LINE if self._items and boundary == _PARAGRAPH else boundary)

    def _count(self, tag: str, step: int) -> None:
        if tag == "li":  # paragraphs inside list items are lines: the list stays together
            self._items += step
        elif tag == "table":
            self._tables += step
        elif tag in _PREFORMATTED:
            self._preformatted += step


def _collapsed(pieces: Iterable[str]) -> str:
    text = well_formed("".join(pieces))
    text = _DIVIDED.sub(_divider, _SPACES.sub(" ", text))
    return text.replace(" \n", "\n").replace(" \t", "\t").strip()


def _divider(run: re.Match[str]) -> str:
    marks = run[0]
    if _PARAGRAPH in marks or marks.count(_BREAK) > 1:
        return "\n\n"
    return "\n" if _LINE in marks or _BREAK in marks else "\t"


def _with_libxml2(html: str, alternatives: bool = False) -> list[Section]:
    parser = etree.HTMLParser(target=_Sink(alternatives, MAX_DEPTH), encoding="utf-8", huge_tree=True)
    for at in range(0, len(html), _FEED):
        parser.feed(html[at : at + _FEED].encode())
    sections: list[Section] = parser.close() if html else []
    if any(entry.level >= _FATAL for entry in parser.feed_error_log):
        raise _NotForLibxml2
    return sections


def _with_html_parser(html: str, alternatives: bool = False) -> list[Section]:
    html = _UNTEXT.sub("<!---->", html)  # something, or what stands on either side could form a tag
    html = _TAG.sub(lambda tag: tag[0] if len(tag[2]) < _LONG_TAG else f"<{tag[1]}", html)
    if cut := _CUT_TAG.search(html, html.rfind(">") + 1):
        html = html[: cut.start()]
    parser = _Balanced(alternatives)
    parser.feed(html)
    return parser.sections()


class _Balanced(HTMLParser):
    """Gives a sink as many ends as starts: an end closes what is open inside, one that was never opened is nothing."""

    def __init__(self, alternatives: bool) -> None:
        super().__init__()
        self._sink = _Sink(alternatives)
        self._open: list[str] = []
        self._counts: Counter[str] = Counter()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._open.append(tag)
        self._counts[tag] += 1
        self._sink.start(tag, dict(attrs) if tag == "img" else {})
        if tag in _VOID:
            self.handle_endtag(tag)

    def handle_endtag(self, tag: str) -> None:
        closed = "" if self._counts[tag] else tag
        while closed != tag:
            closed = self._open.pop()
            self._counts[closed] -= 1
            self._sink.end(closed)

    def handle_data(self, data: str) -> None:
        self._sink.data(data)

    def sections(self) -> list[Section]:
        self.close()
        return self._sink.close()
