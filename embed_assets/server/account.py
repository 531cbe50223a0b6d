"""As whom the server runs. Postgres refuses root, so root borrows an unprivileged user.

What does not belong here: where the files are (`files`), what is run (`binaries`, `process`).
"""

from __future__ import annotations

import os
import pwd
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from embed_assets.errors import ConfigurationError

# The first is what packages of Postgres make; the second exists everywhere.
CANDIDATES = ("postgres", "nobody")


@dataclass(frozen=True)
class Account:
    """An unprivileged user, by numbers: data restored from elsewhere may belong to one without a name."""

    uid: int
    gid: int

    def __str__(self) -> str:
        try:
            return pwd.getpwuid(self.uid).pw_name
        except KeyError:
            return str(self.uid)


def for_home(home: Path, data: Path) -> Account | None:
    """Who runs the server; None means ourselves.

    Data that exist decide by their owner. For new ones the home's owner is preferred, so that root
    and that user can take turns. Raises ConfigurationError if the system has no user to borrow.
    """
    if os.geteuid() != 0:
        return None
    return _owner(data) or _named_owner(home) or _candidate()


def _owner(path: Path) -> Account | None:
    try:
        stat = path.stat()
    except OSError:
        return None
    return Account(stat.st_uid, stat.st_gid) if stat.st_uid != 0 else None


def _named_owner(path: Path) -> Account | None:
    """Only an owner with a name serves: initdb refuses a user the system does not know."""
    owner = _owner(path)
    try:
        return owner and Account(owner.uid, pwd.getpwuid(owner.uid).pw_gid)
    except KeyError:
        return None


def _candidate() -> Account:
    for name in CANDIDATES:
        try:
            entry = pwd.getpwnam(name)
        except KeyError:
            continue
        if entry.pw_uid != 0:
            return Account(entry.pw_uid, entry.pw_gid)
    raise ConfigurationError(
        "The embedded Postgres cannot be started: you are root, Postgres refuses to run as root, and this "
        f"system has no user named {' or '.join(CANDIDATES)} to run it as. Create one (useradd --system "
        "postgres), work as another user, or set DATABASE_URL to a Postgres of your own."
    )


def options(account: Account | None) -> dict[str, Any]:
    """Arguments for subprocess: the user, and surroundings that hold no surprises.

    The caller's directory may be closed to the user, and its locale unknown to the system.
    """
    plain: dict[str, Any] = {
        "cwd": "/",
        "umask": 0o077,
        "env": {"PATH": os.environ.get("PATH", os.defpath), "LC_ALL": "C"},
    }
    if account is None:
        return plain
    return {**plain, "user": account.uid, "group": account.gid, "extra_groups": []}


def reaches(account: Account | None, folder: Path) -> bool:
    """May the account enter the folder? Tried rather than computed: mode bits do not tell of ACLs."""
    if account is None:
        return True
    command = ["/bin/sh", "-c", 'cd "$1"', "sh", str(folder)]
    return subprocess.run(command, capture_output=True, **options(account)).returncode == 0


def give(path: Path, account: Account | None) -> None:
    """Make the account the owner of one file or folder."""
    if account is not None:
        os.chown(path, account.uid, account.gid, follow_symlinks=False)
