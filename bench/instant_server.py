"""An embedding endpoint whose answers cost nothing: TEI's `/embed`, the same vectors over and over.

python -m bench.instant_server DIMENSIONS   prints its port, then serves until it is killed
"""

from __future__ import annotations

import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import orjson

MOST = 32


def answers(dimensions: int) -> list[bytes]:
    """The answer to a request of n texts, by n."""
    vectors = np.random.default_rng(0).standard_normal((MOST, dimensions)).astype(np.float32)
    return [orjson.dumps(vectors[:count], option=orjson.OPT_SERIALIZE_NUMPY) for count in range(MOST + 1)]


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    ready: list[bytes]

    def do_POST(self) -> None:
        given = orjson.loads(self.rfile.read(int(self.headers["Content-Length"])))["inputs"]
        self._answer(200, self.ready[len(given)])

    def do_GET(self) -> None:
        self._answer(404, b"{}")

    def _answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


def main() -> None:
    Handler.ready = answers(int(sys.argv[1]))
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    print(server.server_port, flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
