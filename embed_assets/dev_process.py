"""One child and all that it starts, ended together: on Ctrl-C, on SIGTERM, or when the child ends by itself.

The child leads a session of its own, so a terminal's Ctrl-C reaches only us, and whatever it leaves behind is found
by its group. It is asked to end before it is killed: a run then gives its leases back.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
ASKED_SECONDS = 20.0
TOLD_SECONDS = 8.0


def run(
    command: Sequence[str], environment: Mapping[str, str], folder: str, *, url: str, reachable: tuple[str, int]
) -> int:
    """Run the command in a folder until it ends or a signal comes; returns 0 when a signal did, else its code."""
    stop = threading.Event()
    with _signals(stop.set):
        # Our handlers are set, so exec gives the child the default ones, also where a shell ignored SIGINT for us.
        child = subprocess.Popen(command, cwd=folder, env=dict(environment), start_new_session=True)
        try:
            _announce(child, stop, url, reachable)
            while child.poll() is None and not stop.wait(0.2):
                pass
        finally:
            code = child.poll()
            if stop.is_set():
                print("stopping: runs give back what they hold, which takes some seconds", flush=True)
            end(child)
    if stop.is_set():
        print("stopped; an embedded Postgres stays up ('embed-assets down' stops it)", flush=True)
        return 0
    print(f"Dagster ended by itself with code {code}; its last lines say why.", flush=True)
    return code or 1


@contextmanager
def _signals(stop: Callable[[], None]) -> Iterator[None]:
    before = {number: signal.signal(number, lambda number, frame: stop()) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _announce(child: subprocess.Popen[bytes], stop: threading.Event, url: str, reachable: tuple[str, int]) -> None:
    """Print the URL once somebody answers there."""
    while child.poll() is None and not stop.wait(0.3):
        with suppress(OSError), socket.create_connection(reachable, timeout=1):
            print(f"Dagster's UI: {url}  (Ctrl-C stops it)", flush=True)
            return


def end(child: subprocess.Popen[bytes]) -> None:
    """Ask the child to end, and the runs it has started; then everything of its group; then kill what is left.

    The runs are asked at once, since the child's servers wait for them, and nobody else would tell them.
    """
    with suppress(ProcessLookupError):
        child.send_signal(signal.SIGINT)
    for run in _runs(child.pid):
        with suppress(ProcessLookupError):
            os.kill(run, signal.SIGTERM)
    _until(lambda: child.poll() is not None, ASKED_SECONDS)
    for number in (signal.SIGTERM, signal.SIGKILL):
        if _group(child.pid):
            with suppress(ProcessLookupError):
                os.killpg(child.pid, number)
            _until(lambda: child.poll() is not None and not _group(child.pid), TOLD_SECONDS)


def _runs(leader: int) -> list[int]:
    """Dagster's run processes: those that its code server spawned by multiprocessing."""
    with suppress(OSError):
        listing = subprocess.run(["ps", "-eo", "pgid=,pid=,args="], capture_output=True, text=True, check=False).stdout
        rows = [line.split(None, 2) for line in listing.splitlines()]
        return [int(row[1]) for row in rows if row[0] == str(leader) and "spawn_main" in row[-1]]
    return []


def _group(leader: int) -> bool:
    """Whether a process of the group is left."""
    try:
        os.killpg(leader, 0)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def _until(done: Callable[[], bool], seconds: float) -> None:
    until = time.monotonic() + seconds
    while not done() and time.monotonic() < until:
        time.sleep(0.1)
