"""Going through keys in ranges with a commit each, and finding by halving the one row that the database cannot read.

What does not belong here: what is done with a range (`enqueuer`, `backfill`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from embed_assets.errors import CorruptRow, RowRejected

logger = logging.getLogger(__name__)

RANGE_KEYS = 50_000
GuiltyRow = (RowRejected, CorruptRow)


@dataclass(frozen=True)
class Range:
    """Keys in (after, upto], about `size` of them; None is an open end."""

    after: Any
    upto: Any
    size: int

    @property
    def ends(self) -> dict[str, Any]:
        """As query parameters."""
        return {"after": self.after, "upto": self.upto}


EndOf = Callable[[Range], Any]
Work = Callable[[Range], None]


def in_ranges(
    end_of: EndOf,
    work: Work,
    alone: Work = lambda part: None,
    *,
    after: Any = None,
    warn: Callable[[str], None] = logger.warning,
) -> None:
    """Do `work` in ranges of about 50,000 keys from `after` on; `alone` with a row that the database cannot read.

    `end_of` gives the last key of the first `size` ones of a range, None where there are fewer.
    """
    while True:
        upto = end_of(Range(after, None, RANGE_KEYS))
        _isolating(end_of, Range(after, upto, RANGE_KEYS), work, alone, warn)
        if upto is None:
            return
        after = upto


def _isolating(end_of: EndOf, part: Range, work: Work, alone: Work, warn: Callable[[str], None]) -> None:
    try:
        work(part)
    except GuiltyRow as error:
        if part.size <= 1:
            warn(f"a row cannot be read: {error}")
            return alone(part)
        half = part.size // 2
        middle = end_of(replace(part, size=half))
        halves = [replace(part, size=half)]
        if middle is not None:
            halves = [Range(part.after, middle, half), Range(middle, part.upto, part.size - half)]
        for one in halves:
            _isolating(end_of, one, work, alone, warn)
