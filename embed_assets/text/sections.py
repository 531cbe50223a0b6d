"""A text in sections: what stands below each heading, and the headings it stands below.

Does not belong here: finding headings (`html.py`), cutting (`chunk.py`).
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

from embed_assets.text.plain import one_line

HEADING_CHARACTERS = 200
_BETWEEN = "\n\n"


class Section(NamedTuple):
    """`text` begins with its heading's line; `path`: the headings above, outermost first, and its own."""

    path: tuple[str, ...]
    text: str


def nested(parts: Iterable[tuple[int, str, str]]) -> Iterator[Section]:
    """Sections of (level from 1, heading, text below it); a part without a heading goes on with the one before."""
    above: list[tuple[int, str]] = []
    for level, heading, text in parts:
        if heading:
            while above and above[-1][0] >= level:
                above.pop()
            above.append((level, one_line(heading, HEADING_CHARACTERS)))
        # On the next line, not in a paragraph of its own: so no cut parts a heading from what it heads.
        if whole := "\n".join(filter(None, (heading, text))):
            yield Section(tuple(name for _, name in above), whole)


def under(heading: str, sections: Sequence[Section]) -> list[Section]:
    """The sections below one more heading; none stay none."""
    if not sections:
        return []
    heading = one_line(heading, HEADING_CHARACTERS)
    first, *others = (Section((heading, *path), text) for path, text in sections)
    return [Section(first.path, f"{heading}\n{first.text}"), *others]


def joined(sections: Sequence[Section]) -> str:
    """The whole text, a blank line between sections."""
    return _BETWEEN.join(section.text for section in sections)


class HeadingPaths:
    """Which headings stand above a position of the joined text."""

    def __init__(self, sections: Sequence[Section]) -> None:
        lengths = (len(section.text) + len(_BETWEEN) for section in sections)
        self._starts = list(accumulate(lengths, initial=0))[: len(sections)]
        self._paths = [section.path for section in sections]

    def at(self, position: int) -> str | None:
        """As a JSON array, so that no heading can be taken for two; None below no heading."""
        path = self._paths[bisect_right(self._starts, position) - 1]
        return json.dumps(path, ensure_ascii=False) if path else None
