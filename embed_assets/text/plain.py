"""Characters: what can be stored, and how white space of plain text collapses before it is hashed.

Does not belong here: anything that knows markup (`html.py`, `markdown.py`).
"""

from __future__ import annotations

import re

_SURROGATE = re.compile(r"[\ud800-\udfff]")


def normalise(text: str) -> str:
    """Plain text without NUL, lone surrogates, runs of spaces and more than one blank line together."""
    text = well_formed(text).replace("\r\n", "\n").replace("\r", "\n")
    text = re.sub(r"[^\S\n]+", " ", text)
    return re.sub(r" ?\n ?(?:\n ?)+", "\n\n", re.sub(r" ?\n ?", "\n", text)).strip()


def one_line(text: str, most: int) -> str:
    """The text on one line, of at most so many code points."""
    return " ".join(well_formed(text).split())[:most].rstrip()


def well_formed(text: str) -> str:
    """What has a UTF-8 form and can be stored: surrogate pairs joined, lone halves and NUL made U+FFFD."""
    if _SURROGATE.search(text):
        text = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text.replace("\0", "\ufffd")
