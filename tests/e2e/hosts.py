"""Worker hosts on one machine: processes that share nothing but a database, each with a DAGSTER_HOME of its own.

As root, each has a network of its own too (`ip netns`), and reaches Postgres and its embedding server through the only
wire it has. `make two-hosts` prints how much faster two hosts are than one.

python -m tests.e2e.hosts [--rows N]
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import psycopg
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from embed_assets import server
from embed_assets.fake_server import FakeServer
from embed_assets.load import create_jobs_table
from embed_assets.migrate import migrate

ROOT = Path(__file__).parents[2]
DRAIN = """
import sys
from embed_assets.dev import launch_drain
from embed_assets.settings import load_settings
print("ready", flush=True)
sys.stdin.readline()
sys.exit(0 if launch_drain(load_settings(), "jobs") else 1)
"""
SECONDS_PER_TEXT = 0.05
RATE = """
SELECT count(*) / extract(epoch FROM max(finished_at) - min(claimed_at)) FROM embed_assets.semantic_outbox_log
WHERE id > %s
"""


@dataclass(frozen=True)
class Network:
    """What a host sees: how its processes are started, under which address it finds us."""

    command: list[str]
    address: str


def own_networks() -> bool:
    """Whether this machine lets us make networks."""
    tried = [["ip", "netns", "add", "embed_assets_try"], ["ip", "netns", "del", "embed_assets_try"]]
    return bool(os.geteuid() == 0 and shutil.which("ip")) and all(
        subprocess.run(command, capture_output=True).returncode == 0 for command in tried
    )


@contextmanager
def network(number: int) -> Iterator[Network]:
    """A namespace with one wire to us, where that can be had; else the machine's own network."""
    if not own_networks():
        yield Network([], "127.0.0.1")
        return
    name, wire = f"embed{os.getpid()}n{number}", f"e{os.getpid()}n{number}"
    subnet = f"10.{random.randint(64, 127)}.{random.randint(0, 255)}"
    inside = f"ip -n {name}"
    try:
        for command in (
            f"ip netns add {name}",
            f"ip link add {wire} type veth peer name wire netns {name}",
            f"ip addr add {subnet}.1/30 dev {wire}",
            f"ip link set {wire} up",
            f"{inside} addr add {subnet}.2/30 dev wire",
            f"{inside} link set wire up",
            f"{inside} link set lo up",
        ):
            subprocess.run(command.split(), check=True, capture_output=True)
        yield Network(["ip", "netns", "exec", name], f"{subnet}.1")
    finally:
        subprocess.run(["ip", "netns", "del", name], capture_output=True)


@contextmanager
def relayed(address: str, port: int) -> Iterator[int]:
    """A port of `address` whose connections end at our loopback's `port`: the embedded server listens there alone."""
    with socket.create_server((address, 0)) as listening:
        threading.Thread(target=_accept, args=(listening, port), daemon=True).start()
        yield int(listening.getsockname()[1])
        listening.shutdown(socket.SHUT_RDWR)


def _accept(listening: socket.socket, port: int) -> None:
    with contextlib.suppress(OSError):
        while True:
            near, _ = listening.accept()
            far = socket.create_connection(("127.0.0.1", port))
            for ends in ((near, far), (far, near)):
                threading.Thread(target=_copy, args=ends, daemon=True).start()


def _copy(source: socket.socket, target: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(65536):
            target.sendall(data)
        target.shutdown(socket.SHUT_WR)


@dataclass(frozen=True)
class Host:
    """Its drain, and the embedding server beside it."""

    process: subprocess.Popen[str]
    stub: FakeServer

    def await_ready(self) -> None:
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "ready\n"

    def go(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("go\n")
        self.process.stdin.flush()


@dataclass(frozen=True)
class Drained:
    """What came of it: rows/s from the first claim to the last write, and the texts that each host had embedded."""

    rate: float
    texts: list[list[str]]


@contextmanager
def host(number: int, url: str, folder: Path, seconds_per_text: float) -> Iterator[Host]:
    """A process that drains through Dagster once it is told to by a line, with an embedding server of its own."""
    home = folder / f"host{number}"
    home.mkdir(parents=True)
    (home / "dagster.yaml").write_text(f"storage: {{sqlite: {{base_dir: '{home}'}}}}\ntelemetry: {{enabled: false}}\n")
    with ExitStack() as stack:
        net = stack.enter_context(network(number))
        stub = stack.enter_context(FakeServer(host=net.address, seconds_per_text=seconds_per_text))
        port = stack.enter_context(relayed(net.address, int(conninfo_to_dict(url)["port"])))
        environment = {
            "DATABASE_URL": make_conninfo(url, host=net.address, port=port),
            "EMBED_HOME": str(home),
            "DAGSTER_HOME": str(home),
            "EMBED_DAGSTER_PG_URL": "postgresql://not.asked/for",
            "EMBED_PROTOCOL": "tei",
            "EMBED_URL": stub.url,
            "EMBED_MODEL": "stub/model",
            "EMBED_DIMENSIONS": "8",
            "EMBED_BATCH_SIZE": "20",
            "EMBED_WAVES_PER_RUN": "4",
            "EMBED_REQUEST_ITEMS": "5",
        }
        process = subprocess.Popen(
            [*net.command, sys.executable, "-W", "ignore", "-c", DRAIN],
            cwd=ROOT,
            env={**os.environ, **environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            yield Host(process, stub)
        finally:
            process.kill()
            process.wait()


def drained(url: str, folder: Path, count: int, seconds_per_text: float = SECONDS_PER_TEXT) -> Drained:
    """So many hosts drain at once until nothing is due."""
    with psycopg.connect(url, autocommit=True) as db, ExitStack() as stack:
        before = db.execute("SELECT coalesce(max(id), 0) FROM embed_assets.semantic_outbox_log").fetchone()
        hosts = [stack.enter_context(host(number, url, folder, seconds_per_text)) for number in range(count)]
        for one in hosts:
            one.await_ready()
        for one in hosts:
            one.go()
        assert [one.process.wait(300) for one in hosts] == [0] * count
        rate = db.execute(RATE, before).fetchone()
        assert rate is not None
        return Drained(float(rate[0]), [one.stub.texts for one in hosts])


def fill(url: str, rows: int) -> None:
    """Postings that are no copies of each other."""
    with psycopg.connect(url, autocommit=True) as db:
        create_jobs_table(db)
        db.execute(
            "INSERT INTO jobs (external_id, title, company, description, is_tech) "
            "SELECT gen_random_uuid(), 'Engineer', 'Acme', gen_random_uuid(), TRUE FROM generate_series(1, %s)",
            (rows,),
        )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, default=640)
    rows = parser.parse_args().rows
    home = Path(tempfile.mkdtemp(prefix="embed_assets_hosts_"))
    try:
        url = server.ensure(home)
        migrate(url)
        rates = []
        for hosts in (1, 2):
            fill(url, rows)
            rates.append(drained(url, home / str(hosts), hosts).rate)
        print("each host in a network of its own" if own_networks() else "hosts share this machine's network")
        print(f"{rows} rows: one host {rates[0]:.1f} rows/s, two {rates[1]:.1f}: {rates[1] / rates[0]:.2f}× (≥ 1.8)")
    finally:
        server.remove(home)


if __name__ == "__main__":
    main()
