"""Cutting plain text into the pieces that are embedded, and the hashes that name what is sent and where it stands.

Belongs here: limits, where a cut may fall, overlap. Does not: cleaning (`html.py`), prefixes (the corpus,
which passes a `max_chars` that leaves room for its own).

One rule at every level, from paragraph to word: cut at the last boundary that fits, unless what follows is
too large to stay whole anyway; then it is filled up at the next finer level. Two neighbouring chunks are
therefore longer than one limit, which keeps their number and the work linear in the text.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from typing import NamedTuple

import regex

from embed_assets.errors import TooLarge

MAX_CHARACTERS = 2_000_000
MAX_CHUNKS = 32_768

# Boundaries have no width and are searched from the end of the window. Each level has those of the coarser
# ones. Space follows a boundary (and is skipped) or, in scripts that need none, anything but a mark.
_LINE = r"(?=\n)"
_SENTENCE = (
    _LINE
    + r"|(?=\s)(?<=[.!?…؟۔।॥][\"'”’»)\]]{0,3})"
    + r"|(?<=[。！？．｡؟۔।॥][」』”’）]{0,2})(?![」』”’）。！？\p{M}\u200d])"
)
_CLAUSE = _SENTENCE + r"|(?=\s)(?<=[,;:—–،؛])|(?<=[，；：、､،؛])(?![\p{M}\u200d])"
_WORD = r"(?=\s)(?<!\p{GCB=Prepend})"
_LEVELS = tuple(
    regex.compile(f"(?r)(?:{pattern})") for pattern in (r"(?=\n[^\S\n]*\n)", _LINE, _SENTENCE, _CLAUSE, _WORD)
)
_AHEAD = 8  # code points beyond the window that a boundary may look at

_SPACE = regex.compile(r"(?:[\s\x1c-\x1f](?![\p{M}\u200d]))*+")
_GRAPHEME = regex.compile(r"\X")
_VISIBLE = regex.compile(r"[^\s\p{Cc}\p{Cf}]")
_WORD_START = regex.compile(r"(?<=\s)[^\s\p{M}\u200d]|[\p{Han}\p{Hiragana}\p{Katakana}]")

CountTokens = Callable[[str], int]


def text_hash(sent: str) -> bytes:
    """The 32 bytes of sha256 over the UTF-8 form of exactly the text that is sent."""
    return hashlib.sha256(sent.encode()).digest()


def chunk_id(kind: str, source_id: str, policy: str, ordinal: int, heading_path: str | None, text: str) -> str:
    """The name of one chunk, 64 hexadecimal digits: the same again whenever the same text is cut the same way.

    `policy`: the embedder identity, which holds how it was cleaned and cut; `ordinal`: its place in the text, from 0.
    Hashed as a JSON array, so that no part can pretend to be the end of another.
    """
    parts = json.dumps([kind, source_id, policy, ordinal, heading_path, text])
    return hashlib.sha256(parts.encode()).hexdigest()


def check_size(text: str) -> None:
    """Raises TooLarge for a text of more than 2,000,000 code points."""
    if len(text) > MAX_CHARACTERS:
        raise TooLarge(
            f"the text has {len(text):,} characters, more than {MAX_CHARACTERS:,}; split the row",
            code="too_many_characters",
        )


class Piece(NamedTuple):
    """`start`: where the piece's own text, without what it repeats of the one before, begins in the whole."""

    start: int
    text: str


def cut(
    text: str,
    *,
    max_chars: int = 2000,
    overlap: int = 0,
    count_tokens: CountTokens | None = None,
    max_tokens: int | None = None,
) -> list[Piece]:
    """Pieces of at most `max_chars` code points and `max_tokens` tokens that hold every visible character.

    A piece ends inside a grapheme only where the grapheme alone is over a limit; one code point is the
    least. `overlap` repeats up to so many code points of what stands before, from the start of a word on.
    No visible character, no piece. Raises ValueError for limits that contradict each other, TooLarge for
    more than 2,000,000 code points or 32,768 pieces.
    """
    if max_chars < 1 or not 0 <= overlap < max_chars or (max_tokens is not None and max_tokens < 1):
        raise ValueError(
            f"chunks need max_chars ≥ 1, max_tokens ≥ 1 and 0 ≤ overlap < max_chars; "
            f"got max_chars={max_chars}, max_tokens={max_tokens}, overlap={overlap}"
        )
    check_size(text)
    count = count_tokens if max_tokens else None
    return _Cutter(text, max_chars, overlap, count, max_tokens or 0).pieces()


class _Cutter:
    """One text being cut; `_limit` is the window in code points that lately kept to the token limit."""

    def __init__(self, text: str, max_chars: int, overlap: int, count: CountTokens | None, max_tokens: int) -> None:
        self._text, self._overlap, self._count, self._max_tokens = text, overlap, count, max_tokens
        self._room = self._limit = max_chars - overlap

    def pieces(self) -> list[Piece]:
        pieces: list[Piece] = []
        for start, end in self._spans():
            if _VISIBLE.search(self._text, start, end):
                pieces.append(Piece(start, self._with_overlap(start, end)))
            if len(pieces) > MAX_CHUNKS:
                raise TooLarge(f"the text makes more than {MAX_CHUNKS:,} chunks; split the row", code="too_many_chunks")
        return pieces

    def _spans(self) -> Iterator[tuple[int, int]]:
        start = self._skip_space(0)
        while start < len(self._text):
            end = self._end(start)
            yield start, end
            start = self._skip_space(end)

    def _end(self, start: int) -> int:
        """Where the piece from `start` on ends, by tokens too: the window shrinks until it keeps to them."""
        limit = self._limit
        while True:
            end = self._cut(start, limit)
            tokens = self._count(self._piece(start, end)) if self._count else 0
            if tokens <= self._max_tokens or end - start == 1:
                self._limit = min(self._room, int(limit * 1.1) + 1)
                return end
            limit = max(1, int((end - start) * 0.95 * self._max_tokens / tokens))

    def _cut(self, start: int, limit: int) -> int:
        stop = start + limit
        if stop >= len(self._text):
            return len(self._text)
        for level in _LEVELS:
            if (end := self._last(level, start, stop)) and self._whole_after(level, end, limit):
                return end
        return self._grapheme(start, stop)

    def _last(self, level: regex.Pattern[str], start: int, stop: int) -> int | None:
        """The last boundary of a level in (start, stop]."""
        for match in level.finditer(self._text, start + 1, stop + _AHEAD):
            if match.end() <= stop:
                return match.end()
        return None

    def _whole_after(self, level: regex.Pattern[str], end: int, limit: int) -> bool:
        """Whether what follows up to the next boundary of this level fits into one window."""
        start = self._skip_space(end)
        return start + limit >= len(self._text) or self._last(level, start, start + limit) is not None

    def _grapheme(self, start: int, stop: int) -> int:
        """The last grapheme boundary in (start, stop]; `stop` where one grapheme fills the window."""
        end = 0
        # A slice: the search for flags looks back to the beginning of the string, every time.
        for match in _GRAPHEME.finditer(self._text[start : stop + 1]):
            if start + match.end() > stop:
                break
            end = match.end()
        return start + end if end else stop

    def _piece(self, start: int, end: int) -> str:
        return self._text[start:end].rstrip()

    def _skip_space(self, at: int) -> int:
        match = _SPACE.match(self._text, at)
        return match.end() if match else at

    def _with_overlap(self, start: int, end: int) -> str:
        """The piece with the tail of what stands before it, as far as that starts a word and tokens allow."""
        plain = self._piece(start, end)
        reach = self._overlap
        while reach > 0 and start > 0:
            word = _WORD_START.search(self._text, max(0, start - reach), start)
            if word is None:
                break
            piece = self._piece(word.start(), end)
            if self._count is None or self._count(piece) <= self._max_tokens:
                return piece
            reach //= 2
        return plain
