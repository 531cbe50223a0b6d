"""The processes of a chaos run: an embedded Postgres of its own, the embedding stub, drains, and Dagster's daemon.

Each fault is a method of the process it befalls. What does not belong here: which fault comes when (`chaos`).
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import psycopg

from embed_assets import server
from embed_assets.errors import ConfigurationError
from embed_assets.server import process as server_process
from embed_assets.server.files import Home

ROOT = Path(__file__).parents[2]
DIMENSIONS = 16
MODEL = "stub/model"
INTERRUPTED = 130
REQUEST_ITEMS = 8


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Program:
    """One program of ours, started again whenever it is asked for; what it says is kept in `log`."""

    def __init__(self, name: str, arguments: Sequence[str], environment: dict[str, str], log: Path) -> None:
        self.name, self._arguments, self._environment, self.log = name, arguments, environment, log
        self.frozen = False
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def alive(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def start(self) -> None:
        assert not self.alive, self.name
        with self.log.open("ab") as out:
            self.process = subprocess.Popen(
                [sys.executable, "-W", "ignore", "-m", *self._arguments],
                cwd=ROOT,
                env=self._environment,
                stdout=out,
                stderr=subprocess.STDOUT,
            )

    def signal(self, number: int) -> None:
        assert self.process is not None
        with suppress(ProcessLookupError):
            self.process.send_signal(number)

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        self.wait(10)

    def terminate(self, seconds: float = 30) -> int:
        """Ask it to end; returns the exit code. Raises TimeoutExpired when it is deaf."""
        self.signal(signal.SIGTERM)
        return self.wait(seconds)

    def wait(self, seconds: float) -> int:
        assert self.process is not None
        return self.process.wait(seconds)


class Database:
    """The embedded server under `home`. Each fault ends it; `up` brings it back."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self._url = server.ensure(home)

    def url(self) -> str:
        """Where it was last; nothing is started."""
        with suppress(ConfigurationError):
            self._url = server.url(self.home)
        return self._url

    def up(self) -> None:
        self._url = server.ensure(self.home)

    def stop(self) -> None:
        server.stop(self.home)

    def stop_at_once(self) -> None:
        self._end(signal.SIGQUIT)

    def kill(self) -> None:
        self._end(signal.SIGKILL)

    def _end(self, number: int) -> None:
        data = Home(self.home).data
        pid = server_process.postmaster(data)
        if pid is not None:
            os.kill(pid, number)
            until = time.monotonic() + 15
            while server_process.postmaster(data) == pid and time.monotonic() < until:
                time.sleep(0.02)

    def ask(self, statement: str, *values: object) -> list[tuple[object, ...]] | None:
        """Rows, or None while the server is away."""
        try:
            with psycopg.connect(self.url(), autocommit=True, connect_timeout=5) as db:
                return db.execute(statement.encode(), values or None).fetchall()
        except psycopg.OperationalError:
            return None


class Surroundings:
    """Everything that runs. `close` ends it all, whatever happened."""

    def __init__(self, folder: Path, *, drains: int, batch: int, lease: float, seconds_per_text: float) -> None:
        self.folder = folder
        self.lease = lease
        self.database = Database(folder / "home")
        self.record = folder / "sent.log"
        self.record.touch()
        port = free_port()
        clean = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("EMBED_", "DAGSTER_")) and name != "DATABASE_URL"
        }
        self.environment = clean | {
            "PYTHONPATH": str(ROOT),
            "EMBED_HOME": str(folder / "home"),
            "EMBED_PROTOCOL": "tei",
            "EMBED_URL": f"http://127.0.0.1:{port}/embed",
            "EMBED_MODEL": MODEL,
            "EMBED_DIMENSIONS": str(DIMENSIONS),
            "EMBED_LEASE_SECONDS": str(lease),
            "EMBED_BATCH_SIZE": str(batch),
            "EMBED_REQUEST_ITEMS": str(REQUEST_ITEMS),
            "EMBED_RECONCILE_SECONDS": "60",
        }
        arguments = ["tests.chaos.embedding_process", str(port), str(DIMENSIONS), str(seconds_per_text)]
        self.embedding = self._program("embedding", [*arguments, str(self.record)])
        self.drains = [
            self._program(f"drain{n}", ["embed_assets", "drain", "jobs", "--watch"]) for n in range(1, drains + 1)
        ]
        self._ui_port = free_port()
        self.dev = self._program("dev", ["embed_assets", "dev", "--port", str(self._ui_port)])
        self._kept: list[Program] = []
        self.ended: list[str] = []  # who ended though nobody had told it to
        self._closing = threading.Event()
        self._keeper = threading.Thread(target=self._keep, daemon=True)

    def _program(self, name: str, arguments: Sequence[str]) -> Program:
        return Program(name, arguments, self.environment, self.folder / f"{name}.log")

    def start(self, *, dagster: bool) -> None:
        self.embedding.start()
        for drain in self.drains:
            drain.start()
        self._kept = [*self.drains, self.dev] if dagster else self.drains
        if dagster:
            self.dev.start()
            self._await_ui()
        self._keeper.start()

    def _await_ui(self, seconds: float = 120) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until and self.dev.alive:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", self._ui_port)) == 0:
                    return
            time.sleep(0.2)
        raise AssertionError(f"Dagster does not start: {self.dev.log.read_text()[-2000:]}")

    def _keep(self) -> None:
        """As a supervisor does: what ended is started again."""
        while not self._closing.wait(0.2):
            for program in self._kept:
                if not program.alive:
                    code = program.process.returncode if program.process else None
                    if code not in (-signal.SIGKILL, INTERRUPTED):
                        self.ended.append(f"{program.name} ended with {code}")
                    program.start()

    def rest(self) -> None:
        """Everything back up, nothing frozen."""
        for drain in self.drains:
            drain.signal(signal.SIGCONT)
        self.database.up()
        if not self.embedding.alive:
            self.embedding.start()

    def end_drains(self) -> list[int]:
        """Tell the drains to end; their exit codes."""
        self._closing.set()
        self._keeper.join(5)
        return [drain.terminate() for drain in self.drains if drain.alive]

    def runs(self) -> list[int]:
        """Dagster's run processes: those that its code server spawned."""
        if not self.dev.alive or self.dev.process is None:
            return []
        listing = subprocess.run(["ps", "-eo", "pid=,ppid=,pgid=,args="], capture_output=True, text=True, check=True)
        rows = [line.split(None, 3) for line in listing.stdout.splitlines()]
        leaders = {row[0] for row in rows if row[1] == str(self.dev.process.pid)}
        return [int(row[0]) for row in rows if row[2] in leaders and "spawn_main" in row[-1]]

    def close(self) -> None:
        self._closing.set()
        if self._keeper.is_alive():
            self._keeper.join(5)
        if self.dev.alive:
            with suppress(subprocess.TimeoutExpired):
                self.dev.terminate(60)
        for program in (*self.drains, self.embedding, self.dev):
            if program.alive:
                program.signal(signal.SIGCONT)
                program.kill()
        server.remove(self.database.home)
