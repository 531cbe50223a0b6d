"""What the fake server says: vectors, their three wrappings, TEI's `/info`, and errors as each kind of server words
them. Pure: values in, values out.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson

Reply = tuple[int, dict[str, str], Any]

NAN = 12345678.0  # stands in a vector until the JSON is made, which has no word for NaN
_TOKEN = re.compile(r"[a-zA-Z0-9]{1,12}|[^\sa-zA-Z0-9]")

INFO: dict[str, Any] = {
    "model_id": "stub/model",
    "model_sha": None,
    "model_dtype": "float32",
    "model_type": {"embedding": {"pooling": "mean"}},
    "max_concurrent_requests": 512,
    "max_input_length": 512,
    "max_batch_tokens": 16384,
    "max_batch_requests": None,
    "max_client_batch_size": 32,
    "auto_truncate": False,
    "tokenization_workers": 2,
    "version": "1.9.3",
    "sha": None,
    "docker_label": None,
}
# By generation: what a validation error's status is. OpenAI's own server answers 400.
VALIDATION = {"tei-1.8": 413, "tei-1.9": 422, "openai": 400}


def vector_for(text: str, dimensions: int) -> npt.NDArray[np.float32]:
    """The (dimensions,) float32 vector of a text, of length 1, made from its sha256."""
    seed = hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()
    words = np.frombuffer(hashlib.shake_128(seed).digest(4 * dimensions), dtype="<u4")
    values = words.astype(np.float64) / 2**31 - 1
    vector: npt.NDArray[np.float32] = (values / np.linalg.norm(values)).astype(np.float32)
    return vector


def tokens_in(text: str) -> int:
    """About as many as a model's tokenizer makes: words of up to twelve letters, and every other sign."""
    return len(_TOKEN.findall(text))


def rows_for(behaviour: str | None, texts: Sequence[str], dimensions: int) -> list[Any]:
    """A vector a text, the last one or the number of them spoilt as the behaviour has it."""
    width = dimensions + (behaviour == "wrong_width")
    rows: list[Any] = [vector_for(text, width) for text in texts]
    spoilt: dict[str, list[Any]] = {
        "null": [None] * width,
        "zero": [0.0] * width,
        "empty": [],
        "words": ["x"] * width,
        "nan": [NAN] * width,
        "infinite": [1e39] * width,
        "one_too_wide": [0.5] * (width + 1),
    }
    if behaviour in spoilt:
        rows[-1] = spoilt[behaviour]
    return {"short": rows[:-1], "long": [*rows, rows[0]]}.get(behaviour or "", rows)


def as_openai(behaviour: str | None, rows: list[Any], body: Mapping[str, Any], model: str) -> dict[str, Any]:
    """`/v1/embeddings`: placed by index, base64 where the client asks for it."""

    def encoded(row: Any) -> Any:
        if body.get("encoding_format") != "base64" or behaviour == "floats" or isinstance(row, list):
            return row
        return base64.b64encode(row.tobytes()).decode()

    data: list[dict[str, Any]] = [
        {"object": "embedding", "index": at, "embedding": encoded(row)} for at, row in enumerate(rows)
    ]
    if behaviour == "permuted":
        data.reverse()
    spoilt = {"duplicate_index": 0, "index_out_of_range": len(rows), "bool_index": True, "no_index": None}
    if behaviour in spoilt:
        data[-1]["index"] = spoilt[behaviour]
    if behaviour == "bad_base64":
        data[-1]["embedding"] = "!!!"
    given = body["input"]
    tokens = sum(map(tokens_in, [given] if isinstance(given, str) else given))
    return {
        "object": "list",
        "data": data,
        "model": "another/model" if behaviour == "other_model" else model,
        "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
    }


def as_json(content: Any, behaviour: str | None = None) -> bytes:
    encoded = orjson.dumps(content, option=orjson.OPT_SERIALIZE_NUMPY)
    if behaviour == "nan":  # as fp16 models on some servers: not even JSON
        return encoded.replace(b"12345678.0", b"NaN")
    return encoded[: len(encoded) * 6 // 10] if behaviour == "garbage" else encoded


def error(speaks: str, path: str, kind: str, message: str, status: int) -> Reply:
    """An error as a server of that generation words it on that route; `kind` is TEI's error_type."""
    if path != "/v1/embeddings":
        return status, {}, {"error": message, "error_type": kind}
    if speaks != "openai":
        return status, {}, {"message": message, "code": status, "type": kind}
    code = {401: "invalid_api_key", 429: "rate_limit_exceeded"}.get(status)
    body = {"message": message, "type": "invalid_request_error", "param": "input", "code": code}
    return status, {}, {"error": body}


def invalid(speaks: str, path: str, message: str) -> Reply:
    """A validation error: 413 up to TEI 1.8, 422 from 1.9, 400 at OpenAI."""
    return error(speaks, path, "Validation", message, VALIDATION[speaks])


def unauthorized(speaks: str, path: str, key: str) -> Reply:
    """TEI answers an empty body; OpenAI quotes the key."""
    if speaks != "openai" or path != "/v1/embeddings":
        return 401, {}, b""
    return error(speaks, path, "Unauthorized", f"Incorrect API key provided: {key}.", 401)
