"""What stands in a request and how vectors are read from an answer, for each protocol.

Pure: bytes in, bytes or vectors out. An answer is taken whole or, with `BadAnswer`, not at all.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import orjson

from embed_assets.embedding.types import Vectors
from embed_assets.errors import ConfigurationError

MOST_TOKENS = 1_000_000_000
TEI_URL = "http://127.0.0.1:8090/embed"


class BadAnswer(Exception):
    """An answer that breaks the contract; `code` says how."""

    def __init__(self, code: str) -> None:
        super().__init__(code)
        self.code = code


@dataclass(frozen=True)
class Answer:
    """The vectors of one request in the order of its texts, (count, width) float32, finite and not zero."""

    vectors: Vectors
    tokens: int = 0
    model: str | None = None


class Wire(Protocol):
    """One protocol's request and answer."""

    @property
    def default_url(self) -> str | None: ...

    @property
    def scales_to_zero(self) -> bool:
        """Whether it may be stopped while nobody asks; then it answers 503 until it is up again."""
        ...

    def body(self, texts: Sequence[str], *, query: bool = False) -> bytes: ...

    def answer(self, content: bytes, count: int, headers: Mapping[str, str]) -> Answer:
        """Raises BadAnswer for anything but `count` vectors of one width."""
        ...


@dataclass(frozen=True)
class Tei:
    """Text Embeddings Inference's `/embed`: `[[…], …]`. Over-long texts are refused, never cut."""

    default_url: str | None = TEI_URL
    scales_to_zero: bool = False

    def body(self, texts: Sequence[str], *, query: bool = False) -> bytes:  # noqa: ARG002
        return orjson.dumps({"inputs": list(texts), "truncate": False})

    def answer(self, content: bytes, count: int, headers: Mapping[str, str]) -> Answer:
        tokens = headers.get("x-compute-tokens", "")[:20]
        return Answer(matrix(_rows(parsed(content)), count), _tokens(int(tokens) if tokens.isdecimal() else 0))


@dataclass(frozen=True)
class HuggingFace:
    """A Hugging Face endpoint: `{"embeddings": [[…], …]}`, or the bare list."""

    default_url: str | None = None
    scales_to_zero: bool = True

    def body(self, texts: Sequence[str], *, query: bool = False) -> bytes:  # noqa: ARG002
        return orjson.dumps({"inputs": list(texts)})

    def answer(self, content: bytes, count: int, headers: Mapping[str, str]) -> Answer:  # noqa: ARG002
        return Answer(matrix(_rows(parsed(content)), count))


@dataclass(frozen=True)
class OpenAI:
    """OpenAI's `/v1/embeddings`: placed by `index`, in base64 where the server offers it.

    `dimensions` is sent for models that can shorten their vectors. `says_type`: a server that adds the model's prefix
    itself is told by `input_type` which one.
    """

    model: str
    dimensions: int | None = None
    says_type: bool = False
    default_url: str | None = None
    scales_to_zero: bool = False

    def body(self, texts: Sequence[str], *, query: bool = False) -> bytes:
        request: dict[str, Any] = {"model": self.model, "input": list(texts), "encoding_format": "base64"}
        if self.says_type:
            request["input_type"] = "query" if query else "passage"
        if self.dimensions:
            request["dimensions"] = self.dimensions
        return orjson.dumps(request)

    def answer(self, content: bytes, count: int, headers: Mapping[str, str]) -> Answer:  # noqa: ARG002
        whole = parsed(content)
        if not isinstance(whole, dict):
            raise BadAnswer("unknown_shape")
        rows = [_decoded(row) for row in _by_index(whole.get("data"), count)]
        usage, model = whole.get("usage"), whole.get("model")
        tokens = usage.get("total_tokens") if isinstance(usage, dict) else 0
        return Answer(
            matrix(rows, count),
            _tokens(tokens),
            model if isinstance(model, str) else None,
        )


def wire(name: str, *, model: str | None = None, dimensions: int | None = None, says_type: bool = False) -> Wire:
    """The protocol of that name (`tei`, `hf`, `openai`). Raises ConfigurationError for an unknown one."""
    if name == "openai":
        if not model:
            raise ConfigurationError("the openai protocol needs the name of a model (EMBED_MODEL)")
        return OpenAI(model, dimensions, says_type)
    protocols: dict[str, Wire] = {"tei": Tei(), "hf": HuggingFace()}
    if name not in protocols:
        raise ConfigurationError(f"unknown embedding protocol {name!r}; known are tei, hf and openai")
    return protocols[name]


def parsed(content: bytes) -> Any:
    """The JSON of an answer. Raises BadAnswer for a cut one, and for NaN, which JSON does not have."""
    try:
        return orjson.loads(content)
    except orjson.JSONDecodeError:
        raise BadAnswer("not_finite" if b"NaN" in content else "invalid_json") from None


def matrix(rows: Sequence[Any], count: int) -> Vectors:
    """The rows as (count, width) float32. Raises BadAnswer unless there are `count` usable ones of one width."""
    if len(rows) != count:
        raise BadAnswer("count_mismatch")
    if any(len(row) == 0 for row in rows if isinstance(row, (list, np.ndarray))):
        raise BadAnswer("empty_vector")
    try:
        values = np.array(rows)
    except ValueError:
        raise BadAnswer("ragged_vectors") from None
    if values.ndim != 2 or values.dtype.kind not in "fiu" or any(map(_holds_truths, rows)):
        raise BadAnswer("not_numbers")
    return _usable(values)


def _holds_truths(row: Any) -> bool:
    """numpy takes true for 1 where there are numbers beside it. The first look is fast, and mostly the last."""
    return isinstance(row, list) and (1 in row or 0 in row) and any(type(value) is bool for value in row)


def _usable(values: np.ndarray[Any, Any]) -> Vectors:
    """float32, with a length that float32 can hold: the database computes cosines in it."""
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        vectors: Vectors = values.astype(np.float32)
        squares = np.einsum("ij,ij->i", vectors, vectors)
    if not np.isfinite(squares).all():
        raise BadAnswer("not_finite")
    if not squares.all():
        raise BadAnswer("zero_vector")
    return vectors


def _tokens(said: object) -> int:
    """What the endpoint says it counted; 0 for what no request can have."""
    return said if type(said) is int and 0 <= said <= MOST_TOKENS else 0


def _rows(whole: Any) -> list[Any]:
    rows = whole.get("embeddings") if isinstance(whole, dict) else whole
    if not isinstance(rows, list):
        raise BadAnswer("unknown_shape")
    return rows


def _by_index(data: Any, count: int) -> list[Any]:
    """Embeddings in the order of the texts; each index once, none missing."""
    if not isinstance(data, list) or not all(isinstance(item, dict) for item in data):
        raise BadAnswer("unknown_shape")
    if len(data) != count:
        raise BadAnswer("count_mismatch")
    placed = {item.get("index"): item.get("embedding") for item in data if type(item.get("index")) is int}
    if sorted(placed) != list(range(count)):
        raise BadAnswer("wrong_index")
    return [placed[at] for at in range(count)]


def _decoded(embedding: Any) -> Any:
    """A list as it is; base64 as little-endian float32."""
    if not isinstance(embedding, str):
        return embedding
    try:
        return np.frombuffer(base64.b64decode(embedding, validate=True), dtype="<f4")
    except (binascii.Error, ValueError):
        raise BadAnswer("invalid_base64") from None
