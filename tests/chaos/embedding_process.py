"""The embedding stub as a process of its own that takes its time and keeps a record of what it was sent.

    python -m tests.chaos.embedding_process PORT DIMENSIONS SECONDS_PER_TEXT RECORD

RECORD gets one line a request, as it arrives: seconds since the epoch, then the hash of each text. A line is one
write, so that whoever is killed leaves whole lines.
"""

from __future__ import annotations

import hashlib
import os
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from embed_assets.fake_server import Behaviour, FakeServer, Received


@dataclass
class RecordingServer(FakeServer):
    record: str = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._sink = os.open(self.record, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def behaviour(self, received: Received) -> Behaviour:
        hashes = [hashlib.sha256(text.encode()).hexdigest() for text in received.texts]
        os.write(self._sink, (" ".join([f"{time.time():.3f}", *hashes]) + "\n").encode())
        self.requests.clear()
        return super().behaviour(received)


def sendings(record: Path) -> dict[str, list[float]]:
    """When each text arrived, by its hash."""
    found: dict[str, list[float]] = {}
    for line in record.read_text().splitlines():
        at, *hashes = line.split()
        for one in hashes:
            found.setdefault(one, []).append(float(at))
    return found


def main() -> None:
    port, dimensions, seconds, record = sys.argv[1:]
    with RecordingServer(
        port=int(port), dimensions=int(dimensions), seconds_per_text=float(seconds), record=record
    ) as server:
        print(server.url, flush=True)
        threading.Event().wait()


if __name__ == "__main__":
    main()
