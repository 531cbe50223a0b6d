"""What deploy/ holds: the scripts are run as they are, with role names of the test's own; the YAML is loaded."""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
import yaml
from dagster import DagsterInstance
from fakes import HashEmbedder
from postgres.conftest import KindMaker
from postgres.support import Db, add_jobs, drain, enqueue, rows, say, status, value
from psycopg import errors, sql
from psycopg.conninfo import make_conninfo

from embed_assets.corpora.jobs import jobs
from embed_assets.corpus import Plain, TableCorpus
from embed_assets.defs.instance import dagster_instance
from embed_assets.load import create_jobs_table
from embed_assets.migrate import migrate
from embed_assets.resources.assembly import Kind, assemble, maintained
from embed_assets.resources.declaration import bind
from embed_assets.resources.postgres import Postgres
from embed_assets.resources.tables import make_tables
from embed_assets.search import search
from embed_assets.settings import Settings
from embed_assets.urls import as_url

DEPLOY = Path(__file__).parents[2] / "deploy"
ROLES = ("embed_worker", "embed_producer", "embed_reader", "embed_monitor")
PASSWORD = "a password of the test"
MAY_BE_EMPTIED = (
    "semantic_outbox, claimed_waves, wave_chunks, chunk_embeddings, semantic_outbox_log, similar_invalidations"
)


def script(name: str, suffix: str = "") -> bytes:
    text = (DEPLOY / name).read_text(encoding="utf-8")
    for role in ROLES if suffix else ():
        text = re.sub(rf"\b{role}\b", f"{role}_{suffix}", text)
    return text.encode()


@pytest.fixture
def suffix(server_url: str) -> Iterator[str]:
    """Roles belong to the whole server: these are the test's own, and leave with it."""
    made = uuid.uuid4().hex[:8]
    yield made
    with psycopg.connect(server_url, autocommit=True) as db:
        for role in ROLES:
            db.execute(sql.SQL("DROP ROLE IF EXISTS {}").format(sql.Identifier(f"{role}_{made}")))


@pytest.fixture
def bare(server_url: str, suffix: str) -> Iterator[str]:
    """A database without our schema, with a table of jobs and another one that is nobody's business."""
    name = f"deploy_{suffix}"
    with psycopg.connect(server_url, autocommit=True) as db:
        db.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(name)))
    url = make_conninfo(server_url, dbname=name)
    with psycopg.connect(url, autocommit=True) as db:
        create_jobs_table(db)
        db.execute("CREATE TABLE salaries (id bigint PRIMARY KEY)")
        db.execute(script("roles.sql", suffix))
        for role in ("embed_worker", "embed_monitor", "embed_reader", "embed_producer"):
            words = sql.SQL("ALTER ROLE {} LOGIN PASSWORD {}")
            db.execute(words.format(sql.Identifier(f"{role}_{suffix}"), sql.Literal(PASSWORD)))
    yield url
    with psycopg.connect(server_url, autocommit=True) as db:
        db.execute(sql.SQL("DROP DATABASE {} WITH (FORCE)").format(sql.Identifier(name)))


def connected(url: str, role: str) -> Db:
    return psycopg.connect(make_conninfo(url, user=role, password=PASSWORD), autocommit=True)


def worker(url: str, embedder: HashEmbedder) -> Kind:
    """As the first run of a deployment does: migrate, make the tables, assemble."""
    migrate(url)
    postgres = Postgres(url)
    bound = bind(postgres, jobs)
    make_tables(postgres, bound)
    settings = Settings(batch_size=4)
    return assemble(settings, postgres, bound, [maintained(settings, postgres, bound, jobs, embedder)])


def test_each_role_can_do_its_work_and_nothing_else(bare: str, suffix: str, embedder: HashEmbedder) -> None:
    with psycopg.connect(bare, autocommit=True) as db:
        add_jobs(db, 5)
        db.execute(sql.SQL("GRANT SELECT ON jobs TO {}").format(sql.Identifier(f"embed_reader_{suffix}")))
    kind = worker(make_conninfo(bare, user=f"embed_worker_{suffix}", password=PASSWORD), embedder)
    try:
        assert drain(kind).indexed == 5
    finally:
        kind.close()
    with connected(bare, f"embed_worker_{suffix}") as db:
        db.execute(script("grants.sql", suffix))
        for forbidden in ("SELECT FROM salaries", "UPDATE jobs SET title = ''", "CREATE TABLE public.mine ()"):
            with pytest.raises(errors.InsufficientPrivilege):
                db.execute(forbidden.encode())
    with connected(bare, f"embed_producer_{suffix}") as db:
        assert say(db, 1, 2) == 2
        with pytest.raises(errors.InsufficientPrivilege):
            db.execute("SELECT FROM embed_assets.semantic_outbox")
    reader = Postgres(make_conninfo(bare, user=f"embed_reader_{suffix}", password=PASSWORD))
    try:
        bound = bind(reader, jobs)
        found = search(reader, bound, {jobs.identity_of(embedder.identity): embedder}, "Posting", k=5)
        assert found.semantic
        assert len(found.hits) == 5
    finally:
        reader.close()
    with connected(bare, f"embed_reader_{suffix}") as db:
        for closed in ("salaries", "embed_assets.semantic_outbox", "embed_assets.chunk_embeddings"):
            with pytest.raises(errors.InsufficientPrivilege):
                db.execute(f"SELECT FROM {closed}".encode())
    with connected(bare, f"embed_monitor_{suffix}") as db:
        assert value(db, "SELECT due + running FROM embed_assets.queue_metrics") == 0
        with pytest.raises(errors.InsufficientPrivilege):
            db.execute("SELECT FROM embed_assets.dead_letters")


def test_after_a_restore_without_the_tables_that_may_be_left_out_reconcile_repairs(kind: Kind, db: Db) -> None:
    add_jobs(db, 6)
    drain(kind)
    db.execute(f"TRUNCATE embed_assets.{MAY_BE_EMPTIED.replace(', ', ', embed_assets.')}".encode())
    db.execute("DELETE FROM embed_assets.job_semantic_chunks WHERE id <= 2")
    db.execute("DELETE FROM embed_assets.semantic_stamps WHERE source_id = '6'")
    db.execute("UPDATE embed_assets.corpus_scans SET last_reconcile_at = NULL, last_scan_at = NULL")
    enqueue(kind)
    assert status(kind) == {"due": 3, "fresh": 3}
    drain(kind)
    assert status(kind) == {"fresh": 6}
    assert value(db, "SELECT count(DISTINCT id) FROM embed_assets.job_semantic_chunks") == 6


def test_a_removed_kind_leaves_nothing_and_the_others_stay(kind: Kind, make_kind: KindMaker, db: Db) -> None:
    db.execute("CREATE TABLE notes (id bigint PRIMARY KEY, body text)")
    db.execute("INSERT INTO notes VALUES (1, 'a note')")
    notes = make_kind(TableCorpus(kind="notes", table="notes", key="id", text=Plain("body")))
    add_jobs(db, 3)
    drain(kind)
    drain(notes)
    with kind.postgres.transaction() as cursor:
        cursor.execute(
            "INSERT INTO embed_assets.claimed_waves (kind, model_id, run_id, lease_until) "
            "VALUES ('jobs', 1, 'alive', clock_timestamp() + interval '1 minute')"
        )
    with pytest.raises(errors.RaiseException, match="still works on jobs"):
        db.execute(script("remove_kind.sql"))
    db.execute("ROLLBACK")
    db.execute("DELETE FROM embed_assets.claimed_waves WHERE run_id = 'alive'")
    db.execute(script("remove_kind.sql"))
    named = (
        "SELECT relname FROM pg_class WHERE relnamespace = 'embed_assets'::regnamespace AND relname LIKE '%job%' "
        "UNION ALL SELECT proname FROM pg_proc WHERE pronamespace = 'embed_assets'::regnamespace "
        "AND proname LIKE '%\\_jobs'"
    )
    assert rows(db, named) == []
    assert rows(db, "SELECT kind FROM embed_assets.corpora") == ["notes"]
    assert rows(db, "SELECT DISTINCT kind FROM embed_assets.semantic_stamps") == ["notes"]
    assert value(db, "SELECT count(*) FROM jobs") == 3
    assert status(notes) == {"fresh": 1}


def test_uninstalling_leaves_the_user_s_tables_and_nothing_of_ours(kind: Kind, db: Db) -> None:
    add_jobs(db, 2)
    drain(kind)
    db.execute(
        "CREATE FUNCTION public.say_so() RETURNS trigger LANGUAGE plpgsql AS "
        "$$ BEGIN PERFORM embed_assets.enqueue('jobs', ARRAY[new.id]); RETURN NULL; END $$"
    )
    db.execute("CREATE TRIGGER say_so AFTER UPDATE ON jobs FOR EACH ROW EXECUTE FUNCTION public.say_so()")
    with pytest.raises(errors.RaiseException, match="say_so on jobs"):
        db.execute(script("uninstall.sql"))
    db.execute("ROLLBACK")
    db.execute("DROP TRIGGER say_so ON jobs")
    db.execute(script("uninstall.sql"))
    assert value(db, "SELECT to_regnamespace('embed_assets')::text") is None
    assert value(db, "SELECT count(*) FROM jobs") == 2
    db.execute("UPDATE jobs SET title = 'still writable'")


@pytest.mark.ids("D08")
def test_the_production_instance_loads_with_monitoring_and_without_retries(
    database_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "dagster.yaml").write_bytes(script("dagster.yaml"))
    monkeypatch.setenv("EMBED_DAGSTER_PG_URL", as_url(database_url))
    with DagsterInstance.from_config(str(tmp_path)) as instance:
        assert type(instance.run_storage).__name__ == "PostgresRunStorage"
        assert instance.run_monitoring_enabled
        assert instance.run_monitoring_max_resume_run_attempts == 0
        assert not instance.run_retries_enabled
        assert dagster_instance(instance).passed, dagster_instance(instance)


@pytest.mark.parametrize("path", sorted(DEPLOY.rglob("*.yaml")), ids=lambda path: str(path.relative_to(DEPLOY)))
def test_every_yaml_can_be_read(path: Path) -> None:
    found: list[Any] = [part for part in yaml.safe_load_all(path.read_text(encoding="utf-8")) if part]
    assert found
    assert all(isinstance(part, dict) for part in found)
