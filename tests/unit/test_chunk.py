"""Cutting: the limits hold, nothing is lost, cuts fall where a reader would make them."""

from __future__ import annotations

import hashlib
import itertools
from typing import Any

import pytest
import regex
from hypothesis import given, settings
from hypothesis import strategies as st
from linear import assert_linear

from embed_assets.errors import TooLarge
from embed_assets.text import MAX_CHARACTERS, MAX_CHUNKS, check_size, chunk_id, cut, text_hash

FAMILY = "👨\u200d👩\u200d👧"


def chunk(text: str, **limits: Any) -> list[str]:
    return [piece.text for piece in cut(text, **limits)]


def visible(text: str) -> str:
    return regex.sub(r"\s+", "", text)


def grapheme_starts(text: str) -> set[int]:
    return {match.start() for match in regex.finditer(r"\X", text)} | {len(text)}


def cuts(text: str, chunks: list[str]) -> list[tuple[int, int]]:
    """Where each piece lies in the text, for pieces without overlap."""
    spans, at = [], 0
    for piece in chunks:
        start = text.index(piece, at)
        at = start + len(piece)
        spans.append((start, at))
    return spans


@pytest.mark.ids("A-49")
def test_paragraphs_are_packed_and_kept_whole():
    paragraphs = [letter * 900 for letter in "abcde"]
    assert chunk("\n\n".join(paragraphs)) == [
        "\n\n".join(paragraphs[0:2]),
        "\n\n".join(paragraphs[2:4]),
        paragraphs[4],
    ]


@pytest.mark.ids("A-49")
def test_a_paragraph_that_fits_is_not_split_to_fill_the_one_before():
    assert chunk("a b. " * 180 + "\n\n" + "c d. " * 300)[0] == ("a b. " * 180).strip()


@pytest.mark.ids("A-49")
def test_a_heading_stays_with_an_oversize_paragraph():
    first, *_ = chunk("Heading\n\n" + "A sentence of some length. " * 200)
    assert first.startswith("Heading\n\nA sentence")
    assert 1900 < len(first) <= 2000


@pytest.mark.ids("A-49")
@pytest.mark.parametrize(
    ("text", "limit", "pieces"),
    [
        ("one two. three four. five", 18, ["one two.", "three four. five"]),
        ("one two three four", 9, ["one two", "three", "four"]),
        ("one, two three", 11, ["one,", "two three"]),
        ("line one\nline two\nline three", 20, ["line one\nline two", "line three"]),
        ("abcdefghij", 4, ["abcd", "efgh", "ij"]),
        ("abcd efgh", 4, ["abcd", "efgh"]),
        ("3.14 is pi. Yes", 12, ["3.14 is pi.", "Yes"]),
        ("He said “no.” She left then.", 20, ["He said “no.”", "She left then."]),
    ],
)
def test_sentences_then_words_then_characters(text, limit, pieces):
    assert chunk(text, max_chars=limit) == pieces


@pytest.mark.ids("T03")
@pytest.mark.parametrize(
    ("text", "limit", "pieces"),
    [
        ("今天天气很好。我们去公园吧！你来吗？", 12, ["今天天气很好。", "我们去公园吧！你来吗？"]),
        ("他说：「你好。」然后走了。", 10, ["他说：「你好。」", "然后走了。"]),
        ("他说：「你好。」然后走了。", 7, ["他说：", "「你好。」", "然后走了。"]),
        ("苹果很好吃，香蕉也不错", 8, ["苹果很好吃，", "香蕉也不错"]),
        ("هل أنت هنا؟ نعم أنا هنا", 14, ["هل أنت هنا؟", "نعم أنا هنا"]),
    ],
)
def test_sentences_of_other_scripts_end_with_their_own_marks(text, limit, pieces):
    assert chunk(text, max_chars=limit) == pieces


@pytest.mark.ids("T03")
def test_five_thousand_characters_without_a_space_keep_to_the_token_limit():
    text = "汉" * 5000
    pieces = chunk(text, max_tokens=512, count_tokens=lambda piece: 2 * len(piece) + 2)
    assert all(2 * len(piece) + 2 <= 512 for piece in pieces)
    assert len(pieces) < 1.15 * 5000 / 255
    assert "".join(pieces) == text


LONG = {
    "letters": lambda n: "a" * n,
    "families": lambda n: FAMILY * (n // 5),
    "accents": lambda n: "e\u0301" * (n // 2),
    "flags": lambda n: "🇩🇪" * (n // 8),
    "rare Han": lambda n: "𠀀" * n,
    "points": lambda n: "." * n,
    "one endless grapheme": lambda n: "z" + "\u0301" * n,
    "sentences": lambda n: "lorem ipsum dolor sit. " * (n // 23),
    "paragraphs": lambda n: "a\n\n" * (n // 3),
    "one endless space": lambda n: "x" + " " * n + "y",
    "Chinese": lambda n: "好。" * (n // 2),
    "long words": lambda n: ("w" * 50_000 + " ") * (n // 50_000),
    "zero width": lambda n: "a\u200b\u202e" * (n // 3),
}


@pytest.mark.ids("T04", "T07")
@pytest.mark.parametrize("made", LONG.values(), ids=LONG)
def test_any_length_of_anything_takes_linear_time_and_loses_nothing(made):
    text = made(200_000)
    pieces = chunk(text)
    assert max(map(len, pieces)) <= 2000
    assert visible("".join(pieces)) == visible(text)
    assert len(pieces) <= 2 * len(text) / 2000 + 2
    assert_linear(chunk, made, 240_000)


@pytest.mark.ids("T06", "T07")
@pytest.mark.parametrize("text", [FAMILY * 50, "🇩🇪" * 50, "e\u0301" * 50, "ก็" * 50, "각" * 50, "a \u0301b " * 50])
@pytest.mark.parametrize("limit", [5, 7, 12, 31])
def test_no_cut_falls_inside_a_grapheme(text, limit):
    starts, pieces = grapheme_starts(text), chunk(text, max_chars=limit)
    assert max(map(len, pieces)) <= limit
    assert all({start, end} <= starts for start, end in cuts(text, pieces))


@pytest.mark.ids("T06")
def test_a_grapheme_over_the_limit_is_cut_between_code_points():
    text = "z" + "\u0301" * 30 + "end"
    pieces = chunk(text, max_chars=10)
    assert max(map(len, pieces)) <= 10
    assert "".join(pieces) == text


@pytest.mark.ids("A-53")
def test_the_last_sentence_is_in_the_last_chunk():
    text = "A sentence that says little. " * 500 + "Salary: 70,000 a year."
    assert chunk(text)[-1].endswith("Salary: 70,000 a year.")


@pytest.mark.ids("A-51")
@pytest.mark.parametrize("text", ["", "   ", "\n\n\t", "\u00a0", "\u200b", "\ufeff \u200d"])
def test_text_without_a_visible_character_makes_no_chunk(text):
    assert chunk(text) == []


@pytest.mark.ids("A-52")
def test_more_chunks_than_the_limit_are_refused():
    assert len(chunk("a" * MAX_CHUNKS, max_chars=1)) == MAX_CHUNKS
    with pytest.raises(TooLarge) as raised:
        chunk("a" * (MAX_CHUNKS + 1), max_chars=1)
    assert raised.value.code == "too_many_chunks"


@pytest.mark.ids("A-52")
def test_more_characters_than_the_limit_are_refused():
    check_size("a" * MAX_CHARACTERS)
    with pytest.raises(TooLarge, match="2,000,001 characters"):
        chunk("a" * (MAX_CHARACTERS + 1))


@pytest.mark.ids("T08")
def test_overlap_starts_with_a_word_and_keeps_the_limit():
    words = [f"word{n}" for n in range(400)]
    pieces = chunk(" ".join(words), max_chars=200, overlap=50)
    for before, piece in itertools.pairwise(pieces):
        assert piece.split()[0] in before.split()
        assert len(piece) <= 200
    assert {word for piece in pieces for word in piece.split()} == set(words)


@pytest.mark.ids("T08")
def test_words_longer_than_the_overlap_are_not_repeated_in_part():
    text = " ".join(letter * 80 for letter in "abcdefgh")
    assert [word for piece in chunk(text, max_chars=200, overlap=50) for word in piece.split()] == text.split()


@pytest.mark.ids("T08")
@pytest.mark.parametrize("limits", [{"overlap": 2000}, {"overlap": -1}, {"max_chars": 0}, {"max_tokens": 0}])
def test_limits_that_contradict_each_other_are_refused(limits):
    with pytest.raises(ValueError, match="overlap < max_chars"):
        chunk("text", **limits)


def test_a_code_point_over_the_token_limit_stands_alone():
    assert chunk("abc", max_tokens=1, count_tokens=lambda _: 9) == ["a", "b", "c"]


@pytest.mark.ids("T19")
def test_texts_that_differ_only_at_the_end_have_different_hashes():
    assert text_hash("x" * 200 + "a") != text_hash("x" * 200 + "b")
    assert text_hash("é") == hashlib.sha256(b"\xc3\xa9").digest()


PLACE: tuple[Any, ...] = ("policies", "v1", "model-chunked-v1", 2, '["Leave", "Parents"]', "text")


@pytest.mark.ids("B-31")
def test_a_chunk_id_is_the_same_again_and_another_for_every_other_part():
    others = [("jobs", "v2", "model-chunked-v2", 3, '["Leave"]', "text.")]
    changed = [(*PLACE[:at], part, *PLACE[at + 1 :]) for other in others for at, part in enumerate(other)]
    ids = [chunk_id(*place) for place in [PLACE, *changed, (*PLACE[:4], None, "text"), (*PLACE[:4], "null", "text")]]
    assert len(set(ids)) == len(ids) == 9
    assert chunk_id(*PLACE) == "78d17bccf0db8223d55fa735f4c8e4678461fb2cb41a7bf87564ca04b259334b"


@pytest.mark.ids("B-32")
@pytest.mark.parametrize("between", ["", "|", ":", "/", " ", "\n", "\x1f", "\0", '","', '", "', "\\"])
@pytest.mark.parametrize("at", [0, 1, 4])
def test_no_part_of_a_chunk_id_can_pretend_to_be_the_end_of_another(at: int, between: str):
    one, other = list(PLACE), list(PLACE)
    one[at : at + 2] = [f"a{between}b", "c"]
    other[at : at + 2] = ["a", f"b{between}c"]
    assert chunk_id(*one) != chunk_id(*other)


TEXTS = st.lists(
    st.sampled_from(
        [
            "word",
            " ",
            "\n",
            "\n\n",
            ". ",
            "。",
            "，",
            "」",
            "?",
            FAMILY,
            "🇩🇪",
            "e\u0301",
            "\u0301",
            "汉",
            "\u200d",
            "\r\n",
        ]
    )
    | st.text(max_size=8),
    max_size=60,
).map("".join)


@settings(max_examples=250, deadline=None)
@given(TEXTS, st.integers(1, 40), st.integers(1, 30))
def test_limits_hold_and_no_visible_character_is_lost(text, max_chars, max_tokens):
    pieces = chunk(text, max_chars=max_chars, max_tokens=max_tokens, count_tokens=lambda piece: len(piece.encode()))
    assert all(len(piece) <= max_chars for piece in pieces)
    assert all(len(piece.encode()) <= max_tokens or len(piece) == 1 for piece in pieces)
    blank = regex.compile(r"[\s\p{Cc}\p{Cf}]")
    assert blank.sub("", "".join(pieces)) == blank.sub("", text)
    assert all(piece == piece.rstrip() for piece in pieces)
    assert not any(regex.match(r"\s(?![\p{M}\u200d])", piece) for piece in pieces)


@settings(max_examples=120, deadline=None)
@given(TEXTS, st.integers(2, 40), st.data())
def test_overlap_only_adds(text, max_chars, data):
    overlap = data.draw(st.integers(1, max_chars - 1))
    plain = chunk(text, max_chars=max_chars - overlap)
    whole = cut(text, max_chars=max_chars, overlap=overlap)
    pieces = [piece.text for piece in whole]
    assert [piece.start for piece in whole] == [piece.start for piece in cut(text, max_chars=max_chars - overlap)]
    assert all(text.startswith(part, piece.start) for part, piece in zip(plain, whole, strict=True))
    assert len(pieces) == len(plain)
    assert all(len(piece) <= max_chars for piece in pieces)
    assert all(piece.endswith(part) for piece, part in zip(pieces, plain, strict=True))
