"""An embedding server over real HTTP that answers deterministically and fails on command.

Speaks `/embed` and `/info` of Text Embeddings Inference, OpenAI's `/v1/embeddings` and a Hugging Face
endpoint at `/`. `script` is worked off one entry per request: None (answer well), a status, a (status,
headers, body) or the name of a misbehaviour; `poison` maps a marker to what happens to every request with
a text that holds it. Run alone: `python -m tests.stub_server PORT [DIMENSIONS]`.
"""

from __future__ import annotations

import base64
import hashlib
import socket
import struct
import sys
import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np
import orjson

Reply = tuple[int, dict[str, str], Any]
Behaviour = None | int | str | Reply

INFO = {
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
    "served_model_name": "stub/model",
}


def vector_for(text: str, dimensions: int) -> np.ndarray:
    """The (dimensions,) float32 vector of a text, of length 1, made from its sha256."""
    seed = hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()
    words = np.frombuffer(hashlib.shake_128(seed).digest(4 * dimensions), dtype="<u4")
    values = words.astype(np.float64) / 2**31 - 1
    return (values / np.linalg.norm(values)).astype(np.float32)


@dataclass(frozen=True)
class Received:
    """One request as it arrived."""

    path: str
    texts: list[str]
    headers: dict[str, str]
    body: dict[str, Any]


@dataclass
class StubServer:
    """Use as a context manager. Limits and delays may be changed while it runs."""

    dimensions: int = 8
    script: Iterable[Behaviour] = ()
    always: Behaviour = None
    poison: Mapping[str, Behaviour] = field(default_factory=dict)
    max_items: int | None = None
    max_bytes: int | None = None
    max_chars_per_text: int | None = None
    limit_status: int = 422  # 413 before version 1.9
    says_info: bool = True
    api_key: str | None = None
    model: str = "stub/model"
    seconds_per_request: float = 0.0
    seconds_per_text: float = 0.0
    one_at_a_time: bool = False  # like a GPU
    port: int = 0

    def __post_init__(self) -> None:
        self.requests: list[Received] = []
        self.in_flight = self.most_in_flight = 0
        self.dropped = 0  # requests that hung until the client went away
        self._left = list(self.script)
        self._lock, self._gpu = threading.Lock(), threading.Lock()
        self.stopping = threading.Event()

    def __enter__(self) -> StubServer:
        stub = self

        class Handler(_Handler):
            server_state = stub

        self._server = _Server(("127.0.0.1", self.port), Handler)
        self.port = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *_exception: object) -> None:
        self.stopping.set()
        self._server.shutdown()
        self._server.server_close()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/embed"

    @property
    def openai_url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1/embeddings"

    @property
    def hf_url(self) -> str:
        return f"http://127.0.0.1:{self.port}/"

    @property
    def texts(self) -> list[str]:
        """Every text received, in the order of arrival."""
        return [text for request in self.requests for text in request.texts]

    @property
    def sizes(self) -> list[int]:
        return [len(request.texts) for request in self.requests]

    def then(self, *behaviours: Behaviour) -> None:
        """Append to the script."""
        self._left += behaviours

    def forget(self) -> None:
        self.requests.clear()

    def behaviour(self, received: Received) -> Behaviour:
        """What to do with this request; it is counted."""
        with self._lock:
            self.requests.append(received)
            scripted = self._left.pop(0) if self._left else self.always
        for marker, behaviour in self.poison.items():
            if scripted is None and any(marker in text for text in received.texts):
                return behaviour
        return scripted or self._over_limit(received)

    def _over_limit(self, received: Received) -> Behaviour:
        count = len(received.texts)
        if self.max_bytes and len(orjson.dumps(received.body)) > self.max_bytes:
            return 413, {"content-type": "text/plain"}, "Failed to buffer the request body: length limit exceeded"
        if self.max_items and count > self.max_items:
            return self._invalid(f"batch size {count} > maximum allowed batch size {self.max_items}")
        longest = max(map(len, received.texts), default=0)
        if self.max_chars_per_text and longest > self.max_chars_per_text:
            return self._invalid(f"`inputs` must have less than {self.max_chars_per_text} tokens. Given: {longest}")
        if not all(received.texts):
            return 400, {}, {"error": "`inputs` cannot be empty", "error_type": "Empty"}
        return None

    def _invalid(self, what: str) -> Reply:
        return self.limit_status, {}, {"error": f"Input validation error: {what}", "error_type": "Validation"}

    def work(self, count: int) -> None:
        """Take the time that embedding so many texts takes."""
        seconds = self.seconds_per_request + count * self.seconds_per_text
        if not seconds:
            return
        if self.one_at_a_time:
            with self._gpu:
                time.sleep(seconds)
        else:
            self.stopping.wait(seconds)


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64

    def handle_error(self, *_arguments: object) -> None:
        """A client that hung up is no news."""


class _Handler(BaseHTTPRequestHandler):
    server_state: StubServer
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def log_message(self, *_arguments: object) -> None:
        pass

    def do_GET(self) -> None:
        if self.path == "/info" and self.server_state.says_info:
            limit = self.server_state.max_items or INFO["max_client_batch_size"]
            self._send(200, {}, {**INFO, "max_client_batch_size": limit, "model_id": self.server_state.model})
        else:
            self._send(404, {}, {"error": "not found"})

    def do_POST(self) -> None:
        state = self.server_state
        body = orjson.loads(self.rfile.read(int(self.headers["content-length"])))
        given = body.get("inputs", body.get("input"))
        texts = [given] if isinstance(given, str) else given
        received = Received(self.path, texts, {name.lower(): value for name, value in self.headers.items()}, body)
        state.in_flight += 1
        state.most_in_flight = max(state.most_in_flight, state.in_flight)
        try:
            if state.api_key and received.headers.get("authorization") != f"Bearer {state.api_key}":
                state.requests.append(received)
                return self._send(401, {}, b"")
            self._behave(state.behaviour(received), received)
        except (BrokenPipeError, ConnectionResetError):
            pass
        finally:
            state.in_flight -= 1

    def _behave(self, behaviour: Behaviour, received: Received) -> None:
        if isinstance(behaviour, tuple):
            return self._send(*behaviour)
        if isinstance(behaviour, int):
            return self._send(behaviour, {}, {"error": f"scripted {behaviour}", "error_type": "Backend"})
        if behaviour == "hang":
            return self._hang()
        if behaviour == "reset":
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.close_connection = True
            return self.connection.close()
        self.server_state.work(len(received.texts))
        return self._answer(behaviour, received)

    def _answer(self, behaviour: str | None, received: Received) -> None:
        rows = self._rows(behaviour, received.texts)
        if received.path == "/v1/embeddings":
            content = self._openai(behaviour, rows, received.body)
        elif behaviour == "unknown_shape":
            content = {"vectors": rows}
        elif received.path == "/":
            content = {"embeddings": rows}
        else:
            content = rows
        encoded = orjson.dumps(content, option=orjson.OPT_SERIALIZE_NUMPY)
        if behaviour == "nan":  # as fp16 models on some servers: not even JSON
            encoded = encoded.replace(b"12345678.0", b"NaN")
        if behaviour in ("cut", "trickle"):
            return self._partly(encoded, byte_by_byte=behaviour == "trickle")
        if behaviour == "garbage":
            encoded = encoded[: len(encoded) * 6 // 10]
        return self._send(200, {"x-compute-tokens": str(sum(len(text.split()) for text in received.texts))}, encoded)

    def _rows(self, behaviour: str | None, texts: list[str]) -> list[Any]:
        width = self.server_state.dimensions + (behaviour == "wrong_width")
        rows: list[Any] = [vector_for(text, width) for text in texts]
        spoilt = {
            "null": [None] * width,
            "zero": [0.0] * width,
            "empty": [],
            "words": ["x"] * width,
            "nan": [12345678.0] * width,
            "infinite": [1e39] * width,
            "one_too_wide": [0.5] * (width + 1),
        }
        if behaviour in spoilt:
            rows[-1] = spoilt[behaviour]
        return {"short": rows[:-1], "long": [*rows, rows[0]]}.get(behaviour or "", rows)

    def _openai(self, behaviour: str | None, rows: list[Any], body: Mapping[str, Any]) -> dict[str, Any]:
        def encoded(row: Any) -> Any:
            if body.get("encoding_format") != "base64" or behaviour == "floats" or isinstance(row, list):
                return row
            return base64.b64encode(row.tobytes()).decode()

        data = [{"object": "embedding", "index": at, "embedding": encoded(row)} for at, row in enumerate(rows)]
        if behaviour == "permuted":
            data.reverse()
        spoilt = {"duplicate_index": 0, "index_out_of_range": len(rows), "bool_index": True, "no_index": None}
        if behaviour in spoilt:
            data[-1]["index"] = spoilt[behaviour]
        if behaviour == "bad_base64":
            data[-1]["embedding"] = "!!!"
        model = "another/model" if behaviour == "other_model" else self.server_state.model
        tokens = sum(len(text.split()) for text in body["input"])
        usage = {"prompt_tokens": tokens, "total_tokens": tokens}
        return {"object": "list", "data": data, "model": model, "usage": usage}

    def _hang(self) -> None:
        """Say nothing until the client gives up."""
        self.close_connection = True
        self.connection.settimeout(0.02)
        while not self.server_state.stopping.is_set():
            try:
                if not self.connection.recv(1, socket.MSG_PEEK):
                    break
            except TimeoutError:
                continue
        self.server_state.dropped += 1

    def _partly(self, encoded: bytes, *, byte_by_byte: bool) -> None:
        """Promise the whole; send 60 %, or ten bytes a second."""
        self.send_response(200)
        self.send_header("content-length", str(len(encoded)))
        self.end_headers()
        part = encoded[: len(encoded) * 6 // 10]
        for at in range(0, len(part), 1 if byte_by_byte else len(part)):
            self.wfile.write(part[at : at + (1 if byte_by_byte else len(part))])
            self.wfile.flush()
            if byte_by_byte and self.server_state.stopping.wait(0.1):
                break
        self.close_connection = True

    def _send(self, status: int, headers: Mapping[str, str], content: Any) -> None:
        if isinstance(content, str):
            content = content.encode()
        encoded = content if isinstance(content, bytes) else orjson.dumps(content)
        self.send_response(status)
        for name, value in {"content-type": "application/json", **headers}.items():
            self.send_header(name, value)
        self.send_header("content-length", str(len(encoded)))
        self.end_headers()
        self.wfile.write(encoded)
        self.wfile.flush()


def main() -> None:
    port, *rest = (int(argument) for argument in sys.argv[1:])
    with StubServer(port=port, dimensions=rest[0] if rest else 768) as server:
        print(f"tei {server.url}  openai {server.openai_url}  hf {server.hf_url}", flush=True)
        threading.Event().wait()


if __name__ == "__main__":
    main()
