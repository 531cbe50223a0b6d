"""The story: find a running server, else make what is missing and start it.

The usual call finds one and costs a connection. Everything else happens under the home's lock, and
every step may be repeated: whoever was killed at any line, the next call goes on from there.
"""

from __future__ import annotations

import random
import socket
from pathlib import Path

import psycopg
from psycopg import sql

from embed_assets.errors import ConfigurationError
from embed_assets.server import account as accounts
from embed_assets.server import binaries, cluster, process
from embed_assets.server.account import Account
from embed_assets.server.files import Access, Home, explained, new_access

DATABASE = "embed_assets"
DATABASES = (DATABASE, "dagster")
EXTENSION = "vector"
THERE = "SELECT datname FROM pg_database UNION ALL SELECT extname FROM pg_extension"
START_SECONDS = 120.0
# Below the ports that systems lend to outgoing connections, so that ours is still free next time.
PORTS = range(20_000, 32_000)
PORT_TRIES = 5


def ensure(home: Path) -> str:
    """Make sure that a server runs on the data under `home`; returns the URL of database `embed_assets`.

    Safe to call at any time from any number of processes: one starts the server, all get the same URL.
    It has `vector` and a second database `dagster`. Raises ConfigurationError, with the server's last
    words if it has any.
    """
    files = Home(home)
    with explained(files):
        if _complete(files):
            return _url(files, DATABASE)
        with files.locked():
            if not _running(files):
                _start(files, accounts.for_home(files.root, files.data))
            _await(files)
            _make_databases(files)
    return _url(files, DATABASE)


def url(home: Path, database: str = DATABASE) -> str:
    """The URL of a database on the running server; starts nothing. Raises ConfigurationError if none runs."""
    files = Home(home)
    with explained(files):
        if not _running(files):
            raise ConfigurationError(
                f"No embedded Postgres is running in {files.root}. Start it (any command without "
                "DATABASE_URL does), or set EMBED_HOME to the folder where it runs."
            )
        return _url(files, database)


def is_running(home: Path) -> bool:
    """Is there a server process on the data under `home`? It may still be starting."""
    files = Home(home)
    with explained(files):
        return _running(files)


def stop(home: Path, timeout: float = 30.0) -> bool:
    """Shut the server down; True if one was running.

    Open transactions are rolled back. After `timeout` seconds it is made to stop at once; the next
    start then recovers from the write-ahead log, and nothing committed is lost.
    """
    files = Home(home)
    with explained(files):
        if not files.initialised:
            return False
        with files.locked():
            return process.shut_down(files.data, timeout)


def remove(home: Path) -> None:
    """Stop the server and delete its data, also those that lie outside `home`. There is no way back."""
    files = Home(home)
    with explained(files):
        if not files.root.exists():
            return
        with files.locked():
            if files.data.exists():
                process.shut_down(files.data, 5.0)
            cluster.remove(files)


def _running(files: Home) -> bool:
    return files.initialised and process.postmaster(files.data) is not None


def _url(files: Home, database: str) -> str:
    return _access(files).url(database)


def _access(files: Home) -> Access:
    access = files.access()
    if access is None:
        raise ConfigurationError(
            f"The password of the embedded Postgres is lost: {files.root} has data but no postgres.json. "
            f"Restore that file, or delete {files.data} (and {files.link}, if that is a link) to start "
            "with an empty database."
        )
    return access


def _complete(files: Home) -> bool:
    """Does the server run, with all that `ensure` promises? One connection, no process."""
    if not (files.initialised and process.ready(files.data)):
        return False
    try:
        with _connect(files, DATABASE) as connection:
            names = {name for (name,) in connection.execute(THERE)}
    except psycopg.OperationalError:  # among them: the database does not exist yet
        return False
    return names.issuperset({*DATABASES, EXTENSION})


def _connect(files: Home, database: str) -> psycopg.Connection:
    """`require_auth` makes the server prove that it knows the password too: no impostor on our port."""
    return psycopg.connect(_url(files, database), autocommit=True, connect_timeout=10, require_auth="scram-sha-256")


def _start(files: Home, account: Account | None) -> None:
    """Start the server and wait for it, making the data first if there are none."""
    programs = binaries.usable(account)
    if not files.initialised:
        _initialise(files, account, programs)
    process.end_leftovers(files.data)
    for _ in range(PORT_TRIES):
        access, before = _access_on_free_port(files), files.log_size()
        child = process.start(files, access.port, account, programs)
        if process.wait_until_ready(files.data, child, START_SECONDS):
            return
        if child.poll() is None or _is_free(access.port):
            break
    raise _no_start(files, before)


def _initialise(files: Home, account: Account | None, programs: Path) -> None:
    """The password is saved before the data exist, so that data without one cannot come about."""
    access = files.access() or new_access(_free_port())
    files.save(access)
    cluster.create(files, account, programs, access.password)


def _access_on_free_port(files: Home) -> Access:
    """The port of last time, unless somebody else has taken it meanwhile."""
    access = _access(files)
    if not _is_free(access.port):
        access = Access(_free_port(), access.password)
        files.save(access)
    return access


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def _free_port() -> int:
    return next(port for port in random.sample(PORTS, len(PORTS)) if _is_free(port))


def _await(files: Home) -> None:
    """Wait for a server that runs but may still be recovering, whoever started it."""
    if not process.wait_until_ready(files.data, None, START_SECONDS):
        raise _no_start(files, 0)


def _no_start(files: Home, since: int) -> ConfigurationError:
    words = files.last_words(since)
    return ConfigurationError(
        f"The embedded Postgres in {files.root} does not accept connections after a start. Remove the cause, "
        f"try again, or set DATABASE_URL to a Postgres of your own. The end of {files.log}:\n{words}"
    )


def _make_databases(files: Home) -> None:
    """Create what is missing. Under the lock, since CREATE DATABASE knows no IF NOT EXISTS."""
    try:
        with _connect(files, "postgres") as connection:
            for name in DATABASES:
                known = connection.execute("SELECT FROM pg_database WHERE datname = %s", [name])
                if known.fetchone() is None:
                    connection.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(name)))
        with _connect(files, DATABASE) as connection:
            connection.execute("CREATE EXTENSION IF NOT EXISTS vector")
    except psycopg.Error as error:
        raise ConfigurationError(
            f"The embedded Postgres in {files.root} runs but refuses what we ask of it: {error}. If its "
            f"password was changed, write it to postgres.json; else see {files.log}."
        ) from error
