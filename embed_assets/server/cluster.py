"""Making the data directory: initdb in a workshop folder, then published in one step.

A crash at any line leaves either no data directory or a finished one. What does not belong here:
starting the server (`process`), its databases (`launcher`).
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from tempfile import mkdtemp

from embed_assets.errors import ConfigurationError
from embed_assets.server.account import Account, give, options, reaches
from embed_assets.server.files import SHARED, Home

# Written to postgresql.conf, where the user may change them; fsync stays on.
SETTINGS = {"shared_buffers": "128MB", "max_connections": "100", "timezone": "UTC", "log_timezone": "UTC"}


def create(home: Home, account: Account | None, binaries: Path, password: str) -> None:
    """Initialise the data directory under the home folder, or beside it where the account can reach.

    Call under the home's lock. Raises ConfigurationError with initdb's words, OSError.
    """
    inside = reaches(account, home.root)
    base = home.root if inside else SHARED
    base.mkdir(mode=0o755, parents=True, exist_ok=True)
    workshop = _workshop(base, home.key, account)
    try:
        _initdb(workshop, account, binaries, password)
        _publish(workshop / "data", home, base, inside=inside)
    finally:
        shutil.rmtree(workshop, ignore_errors=True)


def _workshop(base: Path, key: str, account: Account | None) -> Path:
    """A private folder of the account; what crashes of this home left behind is removed."""
    prefix = f"initdb-{key}-"
    for leftover in base.glob(f"{prefix}*"):
        shutil.rmtree(leftover, ignore_errors=True)
    workshop = Path(mkdtemp(prefix=prefix, dir=base))
    give(workshop, account)
    return workshop


def _initdb(workshop: Path, account: Account | None, binaries: Path, password: str) -> None:
    secret = workshop / "password"
    secret.write_text(password)
    give(secret, account)
    command = [str(binaries / "initdb"), f"--pgdata={workshop / 'data'}", f"--pwfile={secret}"]
    command += ["--username=postgres", "--auth=scram-sha-256", "--data-checksums", "--no-instructions"]
    command += ["--encoding=UTF8", "--locale=C", f"--lc-ctype={_character_type()}"]
    command += ["--locale-provider=builtin", "--builtin-locale=C.UTF-8"]
    for name, value in SETTINGS.items():
        command += ["--set", f"{name}={value}"]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", **options(account))
    if done.returncode != 0:
        raise ConfigurationError(
            f"The data directory of the embedded Postgres could not be made in {workshop.parent}. Make room or "
            "remove the cause, set EMBED_HOME to another folder, or set DATABASE_URL to a Postgres of your own. "
            f"The words of initdb:\n{done.stderr.strip()}"
        )


def _character_type() -> str:
    """C.UTF-8 if the system has it, else C.

    Full-text search asks it what a letter is: under C it glues typographic quotes and dashes to words.
    Tried in a process of its own, since setlocale changes the whole process.
    """
    code = "import locale; locale.setlocale(locale.LC_CTYPE, 'C.UTF-8')"
    known = subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0
    return "C.UTF-8" if known else "C"


def _publish(data: Path, home: Home, base: Path, *, inside: bool) -> None:
    """Give the finished directory its name; renaming and linking are the only visible steps."""
    if inside:
        data.rename(home.link)
    else:
        place = Path(mkdtemp(prefix=f"{home.key}-", dir=base))
        data.rename(place)
        home.link.symlink_to(place)
    for folder in (base, home.root):
        _sync(folder)


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):  # some file systems cannot sync a directory, and need not
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove(home: Home) -> None:
    """Delete the data, wherever they lie, and the files that describe them. The server must be stopped."""
    data, linked = home.data, home.link.is_symlink()
    if data.exists():
        shutil.rmtree(data)
    if linked:
        home.link.unlink()
    for file in home.root.glob("postgres.*"):
        if file.suffix != ".lock":
            file.unlink()
