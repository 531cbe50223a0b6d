"""Behind a pooler in transaction mode: a whole drain, with connections handed to others between transactions."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
from fakes import HashEmbedder
from postgres.support import Db, add_jobs, drain, expire, staged, status, until_true, wave_of
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from embed_assets.corpora.jobs import jobs
from embed_assets.errors import LeaseLost
from embed_assets.resources.assembly import Kind, assemble, maintained
from embed_assets.resources.declaration import bind
from embed_assets.resources.postgres import Postgres
from embed_assets.resources.tables import make_tables
from embed_assets.settings import Settings

PGBOUNCER = shutil.which("pgbouncer") or "/usr/sbin/pgbouncer"

pytestmark = pytest.mark.skipif(not os.path.exists(PGBOUNCER), reason="pgbouncer is not installed")


@pytest.fixture
def pooled_url(database_url: str) -> Iterator[str]:
    """PgBouncer in transaction mode with two server connections in front of the test's database."""
    folder = Path(tempfile.mkdtemp(prefix="embed_assets_pooler_"))
    given = conninfo_to_dict(database_url)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    (folder / "users.txt").write_text(f'"{given["user"]}" "{given["password"]}"\n')
    (folder / "pgbouncer.ini").write_text(
        f"[databases]\n{given['dbname']} = host=127.0.0.1 port={given['port']} password={given['password']}\n"
        f"[pgbouncer]\nlisten_addr = 127.0.0.1\nlisten_port = {port}\nauth_type = plain\n"
        f"auth_file = {folder}/users.txt\npool_mode = transaction\ndefault_pool_size = 2\n\n"
        "ignore_startup_parameters = extra_float_digits\n"
    )
    running = start(folder)
    try:
        url = make_conninfo(database_url, port=port)
        until_true(lambda: answers(url), "the pooler does not answer")
        yield url
    finally:
        running.terminate()
        running.wait(timeout=10)
        shutil.rmtree(folder)


def start(folder: Path) -> subprocess.Popen[bytes]:
    """PgBouncer refuses to run as root."""
    root = os.geteuid() == 0
    for path in (folder, *folder.iterdir()) if root else ():
        shutil.chown(path, "nobody")
    return subprocess.Popen([PGBOUNCER, "-q", str(folder / "pgbouncer.ini")], user="nobody" if root else None)


def answers(url: str) -> bool:
    try:
        psycopg.connect(url, connect_timeout=1).close()
    except psycopg.OperationalError:
        return False
    return True


@pytest.fixture
def pooled(pooled_url: str, jobs_table: None) -> Iterator[Kind]:
    postgres, embedder = Postgres(pooled_url), HashEmbedder()
    bound = bind(postgres, jobs)
    make_tables(postgres, bound)
    settings = Settings(batch_size=4)
    made = assemble(settings, postgres, bound, [maintained(settings, postgres, bound, jobs, embedder)])
    yield made
    made.close()


@pytest.mark.ids("P08", "P09")
def test_a_drain_through_a_transaction_pooler_writes_everything(pooled: Kind, db: Db) -> None:
    add_jobs(db, 30)
    assert drain(pooled).indexed == 30
    db.execute("UPDATE jobs SET description = description || ' edited' WHERE id % 2 = 0")
    db.execute("DELETE FROM jobs WHERE id % 3 = 0")
    drain(pooled)
    assert status(pooled) == {"fresh": 20}


@pytest.mark.ids("P08")
def test_settings_of_a_transaction_stay_in_it_and_fences_hold_through_the_pooler(pooled: Kind, db: Db) -> None:
    add_jobs(db, 2)
    pooled.enqueuer.enqueue(scan=True)
    wave = staged(pooled)
    expire(db, wave)
    taken = wave_of(pooled, run_id="other")
    with pytest.raises(LeaseLost):
        pooled.chunks.write(wave)
    assert taken.source_ids == wave.source_ids
    with psycopg.connect(pooled.postgres.url) as other:
        assert other.execute("SHOW lock_timeout").fetchone() == ("0",)
        assert other.execute("SHOW enable_sort").fetchone() == ("on",)
