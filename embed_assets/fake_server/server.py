"""The fake server's HTTP: one thread a connection, and misbehaviour on the wire.

What does not belong here: which fault a request meets (`endpoint`, `faults`) and what is said (`answers`).
"""

from __future__ import annotations

import socket
import ssl
import struct
import threading
import time
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import orjson

from embed_assets.fake_server import answers
from embed_assets.fake_server.answers import Reply, tokens_in
from embed_assets.fake_server.endpoint import FakeEndpoint, Received
from embed_assets.fake_server.faults import ERRORS, Behaviour


@dataclass
class FakeServer(FakeEndpoint):
    """The endpoint on a port of `host`; `port` 0 takes a free one. Use as a context manager."""

    host: str = "127.0.0.1"
    port: int = 0
    tls: ssl.SSLContext | None = None

    def __enter__(self) -> FakeServer:
        stub = self

        class Handler(_Handler):
            server_state = stub

        self._server = _Server((self.host, self.port), Handler)
        if self.tls:
            self._server.socket = self.tls.wrap_socket(self._server.socket, server_side=True)
        self.port = int(self._server.server_address[1])
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *_exception: object) -> None:
        self.stopping.set()
        self._server.shutdown()
        self._server.server_close()

    @property
    def _base(self) -> str:
        return f"{'https' if self.tls else 'http'}://{self.host}:{self.port}"

    @property
    def url(self) -> str:
        return f"{self._base}/embed"

    @property
    def openai_url(self) -> str:
        return f"{self._base}/v1/embeddings"

    @property
    def hf_url(self) -> str:
        return f"{self._base}/"


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64

    def handle_error(self, *_arguments: object) -> None:
        """A client that hung up is no news."""


class _Handler(BaseHTTPRequestHandler):
    server_state: FakeEndpoint
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def log_message(self, *_arguments: object) -> None:
        pass

    def do_GET(self) -> None:
        state = self.server_state
        if self.path == "/health":
            self._send((200, {}, b""))
        elif self.path == "/info" and state.says_info:
            self._send((200, {}, state.info()))
        else:
            self._send((404, {}, {"error": "not found"}))

    def do_POST(self) -> None:
        state = self.server_state
        body = orjson.loads(self.rfile.read(int(self.headers["content-length"])))
        given = body.get("inputs", body.get("input"))
        headers = {name.lower(): value for name, value in self.headers.items()}
        texts = [given] if isinstance(given, str) else given
        received = Received(self.path.partition("?")[0], texts, headers, body, time.monotonic())
        state.in_flight += 1
        state.most_in_flight = max(state.most_in_flight, state.in_flight)
        try:
            self._behave(state.behaviour(received), received)
        except (BrokenPipeError, ConnectionResetError):
            pass
        finally:
            state.in_flight -= 1

    def _behave(self, behaviour: Behaviour, received: Received) -> None:
        if isinstance(behaviour, tuple):
            return self._send(behaviour)
        if isinstance(behaviour, int):
            return self._fail(received, behaviour, "Backend", f"scripted {behaviour}")
        if behaviour in ERRORS:
            return self._fail(received, *ERRORS[behaviour])
        if behaviour == "hang":
            return self._hang()
        if behaviour == "reset":
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.close_connection = True
            self.connection.close()
            return None
        self.server_state.work(len(received.texts))
        return self._answer(behaviour, received)

    def _answer(self, behaviour: str | None, received: Received) -> None:
        state = self.server_state
        content: Any = answers.rows_for(behaviour, received.texts, state.dimensions)
        if received.path == "/v1/embeddings":
            content = answers.as_openai(behaviour, content, received.body, state.model)
        elif behaviour == "unknown_shape":
            content = {"vectors": content}
        elif received.path == "/":
            content = {"embeddings": content}
        encoded = answers.as_json(content, behaviour)
        if behaviour in ("cut", "trickle"):
            return self._partly(encoded, byte_by_byte=behaviour == "trickle")
        return self._send((200, {"x-compute-tokens": str(sum(map(tokens_in, received.texts)))}, encoded))

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

    def _fail(self, received: Received, status: int, kind: str, message: str) -> None:
        self._send(answers.error(self.server_state.speaks, received.path, kind, message, status))

    def _send(self, reply: Reply) -> None:
        status, headers, content = reply
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
