"""`embed-assets dev`: Postgres, Dagster's storage, its UI and its daemon, started together and stopped together.

Works in a checkout and installed: what Dagster needs is generated into EMBED_HOME/dagster_home.
What does not belong here: what Dagster shows (`defs`, `definitions.py`), the embedded server (`server`).
"""

from __future__ import annotations

import os
import shutil
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg
from psycopg import sql

from embed_assets import dev_process, server
from embed_assets.errors import ConfigurationError
from embed_assets.queries import sql_folder
from embed_assets.resources.assembly import database_url
from embed_assets.resources.postgres import connect
from embed_assets.settings import Settings
from embed_assets.urls import as_url, database_of

STORAGE = "EMBED_DAGSTER_PG_URL"


def run_dev(settings: Settings, host: str = "127.0.0.1", port: int = 3000) -> int:
    """Run Dagster's UI and daemon until Ctrl-C or SIGTERM; returns the exit code. Postgres stays up.

    Loopback by default: Dagster's UI has no authentication. Raises ConfigurationError.
    """
    _check_free(host, port)
    environment = {**os.environ, **dev_environment(settings)}
    command = [sys.executable, "-W", "ignore", "-m", "dagster", "dev", "-m", "embed_assets.definitions"]
    command += ["--working-directory", os.getcwd()]
    command += ["--host", host, "--port", str(port), "--log-level", "warning"]
    # From Dagster's own folder: a dagster.yaml in another current one makes it warn that it is not the one in force.
    folder = environment["DAGSTER_HOME"]
    return dev_process.run(command, environment, folder, url=f"http://{host}:{port}", reachable=(host, port))


def dev_environment(settings: Settings) -> dict[str, str]:
    """The variables with which a plain `dagster dev` works in this folder; makes what they name.

    DAGSTER_HOME and EMBED_DAGSTER_PG_URL are kept where they are set. Raises ConfigurationError.
    """
    url = as_url(database_url(settings))
    return {
        "DATABASE_URL": url,
        "EMBED_HOME": str(settings.home_path),
        "DAGSTER_HOME": os.environ.get("DAGSTER_HOME") or str(_dagster_home(settings.home_path)),
        STORAGE: os.environ.get(STORAGE) or _storage_url(settings, url),
    }


def launch_drain(
    settings: Settings, kind: str, *, progress: Callable[[int, int], None] = lambda done, total: None
) -> bool:
    """Run the kind's drain job on the instance that the UI shows, until nothing is due; True if every run was green.

    `progress` is told (rows done, rows in all) twice a second, from a thread of its own.
    """
    with _environment(dev_environment(settings)):
        from embed_assets.defs.launch import drain_until_empty

        return drain_until_empty(settings, kind, progress)


def _check_free(host: str, port: int) -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise ConfigurationError(
                f"Port {port} of {host} cannot be used ({error.strerror}). Choose another with --port."
            ) from None


def _dagster_home(home: Path) -> Path:
    """A folder with the shipped dagster.yaml, written anew each time: whoever changes it sets a DAGSTER_HOME."""
    folder = home / "dagster_home"
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(sql_folder().parent / "dagster.yaml", folder / "dagster.yaml")
    return folder


def _storage_url(settings: Settings, url: str) -> str:
    """Dagster's storage: a database of its own beside ours, made if missing."""
    if settings.database_url is None:
        return server.url(settings.home_path, "dagster")
    name = f"{database_of(url)}_dagster"
    with connect(url, "embed_assets dev", autocommit=True) as connection:
        if not connection.execute("SELECT FROM pg_database WHERE datname = %s", (name,)).fetchone():
            try:
                connection.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(name)))
            except psycopg.errors.DuplicateDatabase:
                pass
            except psycopg.errors.InsufficientPrivilege:
                raise ConfigurationError(
                    f"The database role may not create the database {name} for Dagster's own storage. Create it, "
                    f"or set {STORAGE} to the URL of an empty one."
                ) from None
    return as_url(url, database=name)


@contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
