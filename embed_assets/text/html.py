"""HTML to plain text, and the normalising that every text goes through before it is hashed.

Belongs here: which tags break a line, what is dropped, how whitespace collapses. Does not: cutting
the text (`chunk.py`), prefixes (the corpus).

libxml2 parses and calls a sink as it goes, so that no tree is built. It has no depth limit that way, but
its time grows with depth × stray end tags; documents deeper than its own tree would allow, and those it
refuses, go to BeautifulSoup. Both drive the same sink.
"""

from __future__ import annotations

import re
from typing import Literal

from bs4 import BeautifulSoup
from bs4.element import NavigableString, PreformattedString, Tag
from lxml import etree

from embed_assets.text.chunk import check_size

Kind = Literal["html", "text"]

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
_PREFORMATTED = _tags("pre xmp listing plaintext textarea")

_SPACES = re.compile(r"[ \t\n\r\f\v\xa0]{2,}|[\t\n\r\f\v\xa0]")
_DIVIDED = re.compile(r"[\x1c-\x1f][ \x1c-\x1f]*")
_MARKS = re.compile(r"[\x1c-\x1f]")
_SURROGATE = re.compile(r"[\ud800-\udfff]")

# What html.parser reads in more than linear time, or refuses; dropped as a browser would drop it.
_UNTEXT = re.compile(r"<!--(?:.*?-->|.*\Z)|<(script|style)\b(?:.*?</\1[^>]*>|.*\Z)|<[!?][^>]*(?:>|\Z)", re.S | re.I)
_CUT_TAG = re.compile(r"<[a-zA-Z/]")


def clean(text: str, kind: Kind) -> str:
    """Text of a column as it is chunked and sent. Raises TooLarge beyond 2,000,000 characters."""
    check_size(text)
    return html_to_text(text) if kind == "html" else normalise(text)


def html_to_text(html: str) -> str:
    """Visible text: blank lines between paragraphs, a line per list item and table row, tabs between cells.

    Whitespace collapses as in a browser, entities are decoded once, nothing is raised for any input.
    """
    html = _MARKS.sub(" ", well_formed(html))
    try:
        return _with_libxml2(html)
    except (_NotForLibxml2, etree.LxmlError):
        return _with_soup(html)


def normalise(text: str) -> str:
    """Plain text without NUL, lone surrogates, runs of spaces and more than one blank line together."""
    text = well_formed(text).replace("\r\n", "\n").replace("\r", "\n")
    text = re.sub(r"[^\S\n]+", " ", text)
    return re.sub(r" ?\n ?(?:\n ?)+", "\n\n", re.sub(r" ?\n ?", "\n", text)).strip()


def well_formed(text: str) -> str:
    """What has a UTF-8 form and can be stored: surrogate pairs joined, lone halves and NUL made U+FFFD."""
    if _SURROGATE.search(text):
        text = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text.replace("\0", "\ufffd")


class _NotForLibxml2(Exception):
    """libxml2 would drop text of this document, or take too long."""


class _Sink:
    """Takes start, end and data events of a parser; `close` returns the text."""

    def __init__(self, max_depth: int | None = None) -> None:
        self._out: list[str] = []
        self._max_depth = max_depth
        self._depth = 0
        self._dropped_at = 0  # depth of the outermost element that is dropped; 0: none
        self._in_head = False
        self._items = 0
        self._preformatted = 0

    def start(self, tag: str, _attributes: object = None) -> None:
        self._depth += 1
        if self._max_depth and self._depth > self._max_depth:
            raise _NotForLibxml2
        if self._dropped_at and not self._leaves_head(tag):
            return
        if tag in _DROPPED:
            self._dropped_at, self._in_head = self._depth, tag == "head"
        elif tag == "br":
            self._out.append(_BREAK)
        else:
            self._bound(tag)
            self._count(tag, 1)

    def end(self, tag: str) -> None:
        if self._dropped_at == self._depth:
            self._dropped_at = 0
        elif not self._dropped_at:
            self._count(tag, -1)
            self._bound(tag)
        self._depth -= 1

    def data(self, text: str) -> None:
        if not self._dropped_at:
            self._out.append(text.replace("\n", _BREAK) if self._preformatted else text)

    def close(self) -> str:
        text = well_formed("".join(self._out))
        text = _DIVIDED.sub(_divider, _SPACES.sub(" ", text))
        return text.replace(" \n", "\n").replace(" \t", "\t").strip()

    def _leaves_head(self, tag: str) -> bool:
        """A head whose end tag was left out ends where something visible begins."""
        leaves = self._in_head and self._depth == self._dropped_at + 1 and tag in _BOUNDARY
        if leaves:
            self._dropped_at = 0
        return leaves

    def _bound(self, tag: str) -> None:
        if boundary := _BOUNDARY.get(tag):
            self._out.append(_LINE if self._items and boundary == _PARAGRAPH else boundary)

    def _count(self, tag: str, step: int) -> None:
        if tag == "li":  # paragraphs inside list items are lines: the list stays together
            self._items += step
        elif tag in _PREFORMATTED:
            self._preformatted += step


def _divider(run: re.Match[str]) -> str:
    marks = run[0]
    if _PARAGRAPH in marks or marks.count(_BREAK) > 1:
        return "\n\n"
    return "\n" if _LINE in marks or _BREAK in marks else "\t"


def _with_libxml2(html: str) -> str:
    sink = _Sink(MAX_DEPTH)
    parser = etree.HTMLParser(target=sink, encoding="utf-8", huge_tree=True)
    for at in range(0, len(html), _FEED):
        parser.feed(html[at : at + _FEED].encode())
    if html:
        parser.close()
    if any(entry.level >= _FATAL for entry in parser.feed_error_log):
        raise _NotForLibxml2
    return sink.close()


def _with_soup(html: str) -> str:
    html = _UNTEXT.sub("<!---->", html)  # something, or what stands on either side could form a tag
    if cut := _CUT_TAG.search(html, html.rfind(">") + 1):
        html = html[: cut.start()]
    sink = _Sink()
    _walk(BeautifulSoup(html, "html.parser"), sink)
    return sink.close()


def _walk(soup: Tag, sink: _Sink) -> None:
    """Depth first through the tree along its own links: neither recursion nor a copy."""
    open_tags = [soup]
    for node in soup.descendants:
        while node.parent is not open_tags[-1]:
            sink.end(open_tags.pop().name)
        if isinstance(node, Tag):
            open_tags.append(node)
            sink.start(node.name)
        elif isinstance(node, NavigableString) and not isinstance(node, PreformattedString):
            sink.data(node)
