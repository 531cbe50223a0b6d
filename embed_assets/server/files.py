"""Where things lie: the home folder's files, who may read them, and the lock that serialises us.

What does not belong here: what is inside the data directory (`cluster`, `process`).
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from urllib.parse import quote

from embed_assets.errors import ConfigurationError

# For what root's unprivileged user cannot reach in the home folder.
SHARED = Path("/var/lib/embed_assets")
LOCK_SECONDS = 180.0
LOG_BYTES = 10_000_000


@dataclass(frozen=True)
class Access:
    """How to reach the server. The password is random, made once, before the data."""

    port: int
    password: str

    def url(self, database: str) -> str:
        """The form that psycopg, psycopg2 and SQLAlchemy all read."""
        return f"postgresql://postgres:{self.password}@127.0.0.1:{self.port}/{quote(database, safe='')}"


class Home:
    """The files of one embedded server. Making this object touches nothing."""

    def __init__(self, root: Path) -> None:
        self.root = Path(os.path.abspath(root.expanduser()))
        self.link = self.root / "postgres"
        self.log = self.root / "postgres.log"
        self._access = self.root / "postgres.json"
        self._lock = self.root / "postgres.lock"

    @property
    def data(self) -> Path:
        """The data directory's true path: what the server is told, so it need not cross the home folder."""
        return self.link.resolve()

    @property
    def initialised(self) -> bool:
        """Is there a finished data directory? Raises ConfigurationError if the link leads nowhere."""
        if self.link.is_symlink() and not self.link.exists():
            raise ConfigurationError(
                f"The data of the embedded Postgres are gone: {self.link} points to {self.data}, which does "
                "not exist (was the container replaced?). Bring that folder back, or delete the link to "
                "start with an empty database."
            )
        return (self.link / "PG_VERSION").exists()

    @property
    def key(self) -> str:
        """A readable name for this home among others in the shared folder."""
        words = re.sub(r"[^A-Za-z0-9]+", "-", str(self.root)).strip("-")[-60:]
        return f"{words}-{sha256(os.fsencode(self.root)).hexdigest()[:8]}"

    def access(self) -> Access | None:
        """Port and password, or None before the first start."""
        try:
            return Access(**json.loads(self._access.read_bytes()))
        except FileNotFoundError:
            return None
        except (ValueError, TypeError) as error:
            raise ConfigurationError(
                f"{self._access} is damaged ({error}). It holds the password of the embedded Postgres: "
                f"restore it, or delete it together with {self.link} to start with an empty database."
            ) from error

    def save(self, access: Access) -> None:
        """Replace the access file in one step: a reader sees the old or the new one, never half."""
        half = self._access.with_suffix(".json.new")
        half.unlink(missing_ok=True)
        with os.fdopen(self.open(half, os.O_WRONLY), "w") as file:
            json.dump(asdict(access), file)
            file.flush()
            os.fsync(file.fileno())
        half.replace(self._access)

    def open(self, path: Path, flags: int) -> int:
        """Open a file that only the home's owner may read, also when root works on their behalf."""
        descriptor = os.open(path, flags | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        if os.geteuid() == 0:
            owner = self.root.stat()
            os.fchown(descriptor, owner.st_uid, owner.st_gid)
        return descriptor

    def open_log(self) -> int:
        """Open the log for appending."""
        return self.open(self.log, os.O_WRONLY | os.O_APPEND)

    def log_size(self) -> int:
        """Bytes in the log before a start; a big one is put aside, since the server itself never does."""
        size = self.log.stat().st_size if self.log.exists() else 0
        if size <= LOG_BYTES:
            return size
        self.log.replace(self.log.with_suffix(".log.1"))
        return 0

    def last_words(self, since: int, lines: int = 12) -> str:
        """The log's last lines after so many bytes."""
        if not self.log.exists():
            return ""
        with self.log.open("rb") as file:
            file.seek(since)
            return "\n".join(file.read().decode(errors="replace").splitlines()[-lines:])

    @contextmanager
    def locked(self) -> Iterator[None]:
        """One starter or stopper at a time, across processes and threads; makes the home folder."""
        self.root.mkdir(parents=True, exist_ok=True)
        descriptor = self.open(self._lock, os.O_RDWR)
        try:
            if not lock_file(descriptor, LOCK_SECONDS):
                raise ConfigurationError(
                    f"Another process has been starting or stopping the embedded Postgres in {self.root} "
                    f"for {LOCK_SECONDS:.0f} s. See {self.log}, end the process that holds {self._lock}, and "
                    "try again."
                )
            yield
        finally:
            os.close(descriptor)


def new_access(port: int) -> Access:
    """A fresh password: 128 bits, of characters that need no quoting in a URL."""
    return Access(port, secrets.token_hex(16))


def lock_file(descriptor: int, seconds: float) -> bool:
    """Take the exclusive lock of an open file; False if others kept it for that long."""
    until = time.monotonic() + seconds
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() >= until:
                return False
            time.sleep(0.02)


@contextmanager
def explained(home: Home) -> Iterator[None]:
    """Turn what the system refuses (not writable, full, not ours) into one paragraph that helps."""
    try:
        yield
    except OSError as error:
        raise ConfigurationError(
            f"The embedded Postgres in {home.root} cannot be used: {error}. Make the folder writable for you "
            "and see that its disk is not full, set EMBED_HOME to another folder, or set DATABASE_URL to a "
            "Postgres of your own."
        ) from error
