"""The command line as people use it: a process of its own, real Postgres, the local model."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psycopg
import pytest
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from embed_assets.fake_server import FakeServer

ROOT = Path(__file__).parents[2]
ASHBY = ROOT.parent / "shared/data/jobs/ashby-multilingual.jsonl"
MAPPED = ["external_id=id", "description=descriptionHtml", "posted_at=publishedAt"]


@pytest.fixture
def cli(database_url, tmp_path):
    """Run `embed-assets …` against the test's database; returns the finished process."""

    def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        inherited = {k: v for k, v in os.environ.items() if not k.startswith("EMBED_")}
        defaults = {"DATABASE_URL": database_url, "EMBED_HOME": str(tmp_path / "home")}
        return subprocess.run(
            [sys.executable, "-m", "embed_assets", *arguments],
            env={**inherited, **defaults, **environment},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=200,
        )

    return run


def write_lines(path: Path, *rows: dict) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def posting(number: int, **more) -> dict:
    return {
        "external_id": f"p{number}",
        "title": f"Engineer {number}",
        "company": "Northwind",
        "description": f"<p>Posting number {number} about databases.</p>",
        "is_tech": True,
        **more,
    }


def status_of(cli) -> dict:
    return json.loads(cli("status", "jobs", "--json").stdout)


def texts_sent(db: psycopg.Connection) -> int:
    return db.execute("SELECT coalesce(sum(texts), 0) FROM embed_assets.claimed_waves").fetchone()[0]


def test_load_drain_status_search(cli, tmp_path):
    file = write_lines(tmp_path / "jobs.jsonl", *(posting(n) for n in range(3)), posting(3, is_tech=False))
    assert cli("load", "jobs", str(file)).returncode == 0
    drained = cli("drain", "jobs")
    assert drained.returncode == 0
    assert drained.stdout.strip() == "indexed=3 removed=0 failed=0 dead_lettered=0"
    status = status_of(cli)
    assert (status["total"], status["fresh"], status["excluded"]) == (4, 3, 1)
    assert (status["verdict"], status["reason"]) == ("HEALTHY", "everything is searchable as it is now")
    found = json.loads(cli("search", "jobs", "databases", "-k", "2", "--json").stdout)
    assert found["semantic"] == "available"
    assert len(found["hits"]) == 2
    assert "Posting number" in found["hits"][0]["chunk"]


def test_search_takes_columns_and_words_into_account(cli, tmp_path):
    cli("load", "jobs", str(write_lines(tmp_path / "jobs.jsonl", *(posting(n) for n in range(5)))))
    cli("drain", "jobs")
    named = cli("search", "jobs", "databases", "--hybrid", "--where", "title=Engineer 4", "--json")
    assert [hit["title"] for hit in json.loads(named.stdout)["hits"]] == ["Engineer 4"]
    unknown = cli("search", "jobs", "databases", "--where", "colour=red")
    assert (unknown.returncode, "colour does not exist" in unknown.stderr) == (2, True)
    wrong = cli("search", "jobs", "databases", "--where", "id=red")
    assert (wrong.returncode, "--where: a value is none of its column's type" in wrong.stderr) == (2, True)


def test_similar_rows_are_computed_and_shown(cli, db, tmp_path):
    file = write_lines(tmp_path / "jobs.jsonl", *(posting(n, company_slug=f"c{n}") for n in range(3)))
    cli("load", "jobs", str(file))
    cli("drain", "jobs")
    first, *others = (row[0] for row in db.execute("SELECT id FROM jobs ORDER BY id"))
    assert "no neighbours are kept" in cli("similar", "jobs", str(first)).stdout
    computed = cli("recompute", "jobs").stdout
    assert computed.splitlines() == [
        "3 rows invalidated, 0 rows that list them, 3 lists computed, 0 outdated",
        "nothing is stale",
    ]
    assert cli("recompute", "jobs").stdout.strip() == "nothing is stale"
    found = json.loads(cli("similar", "jobs", str(first), "--json").stdout)
    assert {int(row["source_id"]) for row in found} == set(others)


def test_a_second_drain_sends_no_text(cli, db, tmp_path):
    cli("load", "jobs", str(write_lines(tmp_path / "jobs.jsonl", posting(1))))
    cli("drain", "jobs")
    before = texts_sent(db)
    assert cli("drain", "jobs").stdout.strip() == "indexed=0 removed=0 failed=0 dead_lettered=0"
    assert texts_sent(db) == before == 1


@pytest.mark.skipif(not ASHBY.exists(), reason="the folder of real data is absent")
def test_real_postings_are_kept_in_step_at_the_price_of_what_changed(cli, db):
    maps = [part for pair in MAPPED for part in ("--map", pair)]
    assert cli("load", "jobs", str(ASHBY), *maps, "--set", "is_tech=true").returncode == 0
    assert cli("drain", "jobs").returncode == 0
    status = status_of(cli)
    assert (status["total"], status["fresh"]) == (150, 150)

    changed, closed, deleted, untouched = (row[0] for row in db.execute("SELECT id FROM jobs ORDER BY id LIMIT 4"))
    chunks = "SELECT count(*) FROM embed_assets.job_semantic_chunks WHERE id = %s"
    many = db.execute(chunks, (changed,)).fetchone()[0]
    before = texts_sent(db)
    db.execute("UPDATE jobs SET description = description || '<p>One more sentence.</p>' WHERE id = %s", (changed,))
    db.execute("UPDATE jobs SET closed_at = now() WHERE id = %s", (closed,))
    db.execute("DELETE FROM jobs WHERE id = %s", (deleted,))
    db.execute("UPDATE jobs SET company_slug = 'elsewhere' WHERE id = %s", (untouched,))
    drained = cli("drain", "jobs")

    assert drained.stdout.strip() == "indexed=1 removed=2 failed=0 dead_lettered=0"
    assert many > 1
    assert texts_sent(db) - before == 1
    assert db.execute(chunks, (changed,)).fetchone()[0] in (many, many + 1)
    assert db.execute(chunks, (closed,)).fetchone()[0] == db.execute(chunks, (deleted,)).fetchone()[0] == 0
    status = status_of(cli)
    assert (status["total"], status["fresh"], status["excluded"], status["due"]) == (149, 148, 1, 0)


@pytest.mark.ids("A-63", "A-64")
def test_a_drain_tells_each_wave_and_ends_with_four_counters(cli, tmp_path):
    cli("load", "jobs", str(write_lines(tmp_path / "jobs.jsonl", *(posting(n) for n in range(4)))))
    drained = cli("drain", "jobs", EMBED_BATCH_SIZE="2")
    lines = [line for line in drained.stderr.splitlines() if line.startswith("wave ")]
    assert len(lines) == 2
    assert "2 indexed, 0 removed" in lines[0]
    assert "so far: 4 indexed, 0 removed" in lines[1]
    assert "enqueued 4" in drained.stderr
    assert drained.stdout.splitlines()[-1] == "indexed=4 removed=0 failed=0 dead_lettered=0"


@pytest.mark.ids("A-65", "B-48")
def test_a_failed_row_makes_the_exit_code_one(cli, db, tmp_path):
    cli("load", "jobs", str(write_lines(tmp_path / "jobs.jsonl", posting(1), posting(2))))
    db.execute("UPDATE jobs SET description = repeat('word ', 500000) WHERE external_id = 'p2'")
    drained = cli("drain", "jobs")
    assert drained.returncode == 1
    assert drained.stdout.strip() == "indexed=1 removed=0 failed=0 dead_lettered=1"
    status = status_of(cli)
    assert (status["dead"], status["verdict"], status["reason"]) == (1, "DEGRADED", "1 rows failed")
    assert cli("status", "jobs").stdout.startswith("DEGRADED: ")


def test_a_malformed_line_is_reported_with_its_number_and_skipped(cli, tmp_path):
    file = write_lines(tmp_path / "jobs.jsonl", posting(1))
    file.write_text(file.read_text() + "{not json\n" + json.dumps(posting(2)) + "\n")
    loaded = cli("load", "jobs", str(file))
    assert loaded.returncode == 0
    assert "line 2 skipped" in loaded.stderr
    assert "inserted 2" in loaded.stdout


@pytest.mark.ids("A-29", "E18")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signalled_drain_ends_within_seconds_charges_nobody_and_gives_its_lease_back(
    cli, db, database_url, tmp_path, number
):
    cli("load", "jobs", str(write_lines(tmp_path / "jobs.jsonl", *(posting(n) for n in range(3)))))
    with FakeServer(dimensions=8, seconds_per_request=60) as stub:
        endpoint = {"EMBED_PROTOCOL": "tei", "EMBED_URL": stub.url, "EMBED_MODEL": "m", "EMBED_DIMENSIONS": "8"}
        drain = subprocess.Popen(
            [sys.executable, "-m", "embed_assets", "drain", "jobs"],
            env={**os.environ, "DATABASE_URL": database_url, **endpoint},
            stderr=subprocess.PIPE,
        )
        until(lambda: stub.requests and leased(db) == 3)
        drain.send_signal(number)
        _, errors = drain.communicate(timeout=10)
    assert drain.returncode == 130, errors
    assert leased(db) == 0
    assert db.execute("SELECT sum(attempts + crashes + timeouts) FROM embed_assets.semantic_outbox").fetchone() == (0,)


def leased(db: psycopg.Connection) -> int:
    statement = "SELECT count(*) FROM embed_assets.semantic_outbox WHERE status = 'leased'"
    return db.execute(statement).fetchone()[0]


def until(ready, seconds: float = 30) -> None:
    end = time.monotonic() + seconds
    while not ready():
        assert time.monotonic() < end, "it does not come to that"
        time.sleep(0.05)


def explained(process: subprocess.CompletedProcess[str]) -> str:
    """The one paragraph on stderr; no traceback, no second line."""
    assert process.returncode in (1, 2), process.stderr
    lines = process.stderr.strip().splitlines()
    assert len(lines) == 1, process.stderr
    assert process.stdout == ""
    return lines[0]


def test_an_unknown_kind_names_those_that_exist(cli):
    assert "Declared are: jobs" in explained(cli("drain", "tickets"))


@pytest.mark.ids("C-63")
def test_no_postgres_says_where_it_was_sought_and_what_to_do(cli):
    text = explained(cli("drain", "jobs", DATABASE_URL="postgresql://nobody@127.0.0.1:1/none"))
    assert "cannot be reached" in text
    assert "DATABASE_URL" in text


def test_a_wrong_password_is_named_as_such_and_never_printed(cli, database_url):
    url = make_conninfo(database_url, password="wrong-secret")
    text = explained(cli("drain", "jobs", DATABASE_URL=url))
    assert "user and password" in text
    assert "wrong-secret" not in text


def test_a_table_that_is_not_there_is_named(cli):
    text = explained(cli("drain", "jobs"))
    assert "'jobs' does not exist" in text


def test_row_security_that_hides_rows_is_refused(cli, db, database_url):
    db.execute((ROOT / "sql/demo/jobs.sql").read_bytes())
    db.execute("ALTER TABLE jobs ENABLE ROW LEVEL SECURITY")
    role = f"limited_{conninfo_to_dict(database_url)['dbname']}"
    db.execute(sql.SQL("CREATE ROLE {} LOGIN PASSWORD 'secret'").format(sql.Identifier(role)))
    try:
        for grant in ("USAGE ON SCHEMA public, embed_assets", "ALL ON ALL TABLES IN SCHEMA public, embed_assets"):
            db.execute(sql.SQL(f"GRANT {grant} TO {{}}").format(sql.Identifier(role)))
        url = make_conninfo(database_url, user=role, password="secret")
        assert "Row security on jobs hides rows" in explained(cli("drain", "jobs", DATABASE_URL=url))
    finally:
        db.execute(sql.SQL("DROP OWNED BY {0}").format(sql.Identifier(role)))
        db.execute(sql.SQL("DROP ROLE {0}").format(sql.Identifier(role)))


def test_an_endpoint_without_a_model_name_is_refused(cli, db):
    db.execute((ROOT / "sql/demo/jobs.sql").read_bytes())
    assert "EMBED_MODEL is not set" in explained(cli("drain", "jobs", EMBED_PROTOCOL="tei"))


def test_an_endpoint_that_is_down_loses_nothing(cli, db, tmp_path):
    cli("load", "jobs", str(write_lines(tmp_path / "jobs.jsonl", posting(1))))
    drained = cli(
        "drain",
        "jobs",
        EMBED_PROTOCOL="tei",
        EMBED_URL="http://127.0.0.1:1/embed",
        EMBED_MODEL="m",
        EMBED_DIMENSIONS="8",
    )
    assert drained.returncode == 1
    assert "embedding endpoint" in drained.stderr
    entries = db.execute("SELECT status, attempts FROM embed_assets.semantic_outbox").fetchall()
    assert entries == [("pending", 0)]


def test_a_drain_waits_for_an_endpoint_that_was_scaled_to_zero(cli, db, tmp_path):
    cli("load", "jobs", str(write_lines(tmp_path / "jobs.jsonl", posting(1))))
    starting = (503, {"retry-after": "1"}, {"error": "the model is loading"})
    with FakeServer(script=[starting, starting]) as server:
        drained = cli(
            "drain",
            "jobs",
            EMBED_PROTOCOL="tei",
            EMBED_URL=server.url,
            EMBED_MODEL="m",
            EMBED_DIMENSIONS="8",
        )
        assert server.sizes == [1, 1, 1]
    assert drained.returncode == 0, drained.stderr
    assert "the endpoint rests for 1 s" in drained.stderr
    assert "indexed=1" in drained.stdout


def test_an_unwritable_home_is_explained(cli, tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("")
    text = explained(cli("url", DATABASE_URL="", EMBED_HOME=str(blocked / "home")))
    assert str(blocked) in text


def test_a_setting_that_is_no_number_names_its_variable(cli):
    assert "EMBED_BATCH_SIZE" in explained(cli("drain", "jobs", EMBED_BATCH_SIZE="many"))
