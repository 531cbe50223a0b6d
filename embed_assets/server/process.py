"""The server process: is it ours, start it, wait for it, end it, and end what a killed one left.

Three facts say who is alive. `postmaster.pid` names a process, whose command line must carry this
data directory's mark, for process numbers are used again. The postmaster's children carry the mark
in their titles. And all of them hold a lock on the data directory itself, which shows even a server
in another container. Command lines are read rather than /proc/*/exe or cwd, which root in a
container may not read of another user's process.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

from embed_assets.errors import ConfigurationError
from embed_assets.server.account import Account, give, options
from embed_assets.server.files import Home, lock_file

PROC = Path("/proc")
DYNAMIC_MEMORY_BYTES = 1 << 30
# What a server that has just ended may take to let go of its data.
HOLD_SECONDS = 5.0
# Told to stop at once, Postgres gives its children 5 s before it kills them.
AT_ONCE_SECONDS = 8.0

# Processes this one has started: polled, so that a dead one does not stay behind as a zombie.
_started: list[subprocess.Popen[bytes]] = []


def postmaster(data: Path) -> int | None:
    """The number of the server process that runs on the data directory, or None."""
    pid = _read_pid(data)
    return pid if pid and _setting(data) in _command(pid) else None


def ready(data: Path) -> bool:
    """Does the server accept connections? It says so itself in the last line of postmaster.pid."""
    lines = _pid_lines(data)
    return len(lines) > 7 and lines[7].strip() == "ready" and postmaster(data) is not None


def start(home: Home, port: int, account: Account | None, binaries: Path) -> subprocess.Popen[bytes]:
    """Start the server; it outlives us and hears no Ctrl-C. Returns at once (see `wait_until_ready`)."""
    data = home.data
    hold = os.open(data, os.O_RDONLY | os.O_DIRECTORY)
    log = home.open_log()
    try:
        _take(hold, home)
        _disown(data, account)
        child = subprocess.Popen(
            [str(binaries / "postgres"), *_arguments(data, port)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            pass_fds=[hold],
            start_new_session=True,
            **options(account),
        )
    finally:
        os.close(hold)
        os.close(log)
    _started.append(child)
    return child


def wait_until_ready(data: Path, child: subprocess.Popen[bytes] | None, seconds: float) -> bool:
    """True once the server accepts connections; False if it died or took longer.

    Without `child` it is a server that somebody else has started.
    """

    def died() -> bool:
        return child.poll() is not None if child else postmaster(data) is None

    _wait(lambda: ready(data) or died(), seconds)
    return ready(data)


def shut_down(data: Path, seconds: float) -> bool:
    """End the server and all that is left of it: politely, then at once, then by force."""
    pid = postmaster(data)
    steps = [(signal.SIGINT, seconds), (signal.SIGQUIT, AT_ONCE_SECONDS), (signal.SIGKILL, AT_ONCE_SECONDS)]
    for number, patience in steps:
        if pid is None or _end(data, [pid], number, patience):
            break
    end_leftovers(data)
    return pid is not None


def end_leftovers(data: Path) -> None:
    """End children that outlived a killed postmaster: they still write to its shared memory.

    They go by themselves when idle; one in a long statement would be in the way of the next start.
    """
    for number in (signal.SIGQUIT, signal.SIGKILL):
        pids = list(_marked(data))
        if not pids or _end(data, pids, number, AT_ONCE_SECONDS):
            return


def _arguments(data: Path, port: int) -> list[str]:
    """What must not be left to postgresql.conf; TCP only, since socket paths are limited to 107 bytes."""
    settings = ["listen_addresses=127.0.0.1", "unix_socket_directories=", _setting(data)]
    if sys.platform == "linux" and not _roomy(Path("/dev/shm")):
        settings.append("dynamic_shared_memory_type=mmap")
    pairs = [word for setting in settings for word in ("-c", setting)]
    return ["-D", str(data), "-p", str(port), *pairs]


def _roomy(folder: Path) -> bool:
    """Containers often have 64 MB here; building an index in parallel needs more."""
    try:
        status = os.statvfs(folder)
        return status.f_bavail * status.f_frsize >= DYNAMIC_MEMORY_BYTES and bool(folder.stat().st_mode & 0o002)
    except OSError:
        return False


def _take(descriptor: int, home: Home) -> None:
    """Lock the data directory for the server, which inherits the open file and thereby the lock."""
    if not lock_file(descriptor, HOLD_SECONDS):
        raise ConfigurationError(
            f"The data in {home.data} are in use by a server that cannot be seen from here, probably in "
            "another container that shares the folder. Stop it there, give each its own EMBED_HOME, or set "
            "DATABASE_URL to one Postgres for both."
        )


def _disown(data: Path, account: Account | None) -> None:
    """Put our own number into a stale postmaster.pid.

    Postgres takes a living process of that number for a server, unless it is its parent. The rest of
    the file stays: by it Postgres checks that nobody is attached to the old shared memory. A file cut
    short by a crash of the machine says nothing and would only be refused.
    """
    path, lines = data / "postmaster.pid", _pid_lines(data)
    if _read_pid(data) is None:
        path.unlink(missing_ok=True)
        return
    half = data / "postmaster.pid.new"
    half.unlink(missing_ok=True)
    half.write_text("\n".join([str(os.getpid()), *lines[1:], ""]))
    give(half, account)
    half.replace(path)


def _pid_lines(data: Path) -> list[str]:
    try:
        return (data / "postmaster.pid").read_text().splitlines()
    except FileNotFoundError:
        return []


def _read_pid(data: Path) -> int | None:
    lines = _pid_lines(data)
    return int(lines[0]) if lines and lines[0].strip().isdigit() else None


def _mark(data: Path) -> str:
    """Unlike the path, this differs between containers that use the same one."""
    status = data.stat()
    return f"embed_assets-{status.st_dev:x}-{status.st_ino:x}."


def _setting(data: Path) -> str:
    """In the postmaster's command line; makes Postgres put the mark into the titles of its children."""
    return f"cluster_name={_mark(data)}"


def _marked(data: Path) -> Iterator[int]:
    """Every live process of the server on this data directory."""
    title, setting = f"postgres: {_mark(data)}: ", _setting(data)
    for pid, command in _commands():
        if command.startswith(title) or ("postgres" in command.split(" ")[0] and setting in command):
            yield pid


def _command(pid: int) -> str:
    """The command line; empty for a process that is gone or dead but not collected."""
    if PROC.joinpath("self/cmdline").exists():
        try:
            return (PROC / str(pid) / "cmdline").read_text(errors="replace").replace("\0", " ")
        except OSError:
            return ""
    return subprocess.run(["ps", "-ww", "-o", "command=", "-p", str(pid)], capture_output=True, text=True).stdout


def _commands() -> Iterator[tuple[int, str]]:
    if PROC.joinpath("self/cmdline").exists():
        pids = [int(name) for name in os.listdir(PROC) if name.isdigit()]
        yield from ((pid, _command(pid)) for pid in pids)
        return
    listing = subprocess.run(["ps", "-axww", "-o", "pid=,command="], capture_output=True, text=True).stdout
    for line in listing.splitlines():
        pid, _, command = line.strip().partition(" ")
        yield int(pid), command.strip()


def _end(data: Path, pids: list[int], number: signal.Signals, seconds: float) -> bool:
    """Signal processes that carry our mark and wait for their end."""
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)
    return _wait(lambda: not any(_mark(data) in _command(pid) for pid in pids), seconds)


def _wait(condition: Callable[[], bool], seconds: float) -> bool:
    until = time.monotonic() + seconds
    while not condition():
        if time.monotonic() >= until:
            return False
        time.sleep(0.02)
        _started[:] = [child for child in _started if child.poll() is None]
    return True
