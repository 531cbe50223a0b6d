"""Loading a file: what becomes of its lines, of the rows it does not hold, and of lines that are bad."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psycopg
import pytest

from embed_assets import load_lines
from embed_assets.errors import ConfigurationError
from embed_assets.load import LoadReport, create_jobs_table, load_file

Db = psycopg.Connection[Any]
Write = Callable[..., Path]

DEMO = Path(load_lines.__file__).parent / "demo" / "jobs.jsonl"
INDEXABLE = "closed_at IS NULL AND duplicate_of IS NULL AND is_tech IS TRUE"


@pytest.fixture
def jobs(db: Db) -> Db:
    create_jobs_table(db)
    return db


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Write a file of the given lines: objects as JSON, text and bytes as they are."""

    def write_lines(*lines: object) -> Path:
        path = tmp_path / "rows.jsonl"
        path.write_bytes(b"".join(_line(line) + b"\n" for line in lines))
        return path

    return write_lines


def _line(line: object) -> bytes:
    if isinstance(line, bytes):
        return line
    return (line if isinstance(line, str) else json.dumps(line)).encode()


def job(external_id: str, **fields: object) -> dict[str, object]:
    return {"external_id": external_id, "title": f"Title of {external_id}", "is_tech": True, **fields}


def value(db: Db, expression: str, external_id: str) -> Any:
    statement = f"SELECT {expression} FROM jobs WHERE external_id = %s"  # the tests' own
    row = db.execute(statement.encode(), (external_id,)).fetchone()
    return None if row is None else row[0]


def total(db: Db, condition: str = "TRUE") -> int:
    row = db.execute(f"SELECT count(*) FROM jobs WHERE {condition}".encode()).fetchone()
    assert row is not None
    return int(row[0])


def versions(db: Db) -> list[Any]:
    """Changes with every write of any row, even one that writes the same values."""
    return db.execute("SELECT ctid, xmin::text FROM jobs ORDER BY id").fetchall()


def counts(report: LoadReport) -> tuple[int, int, int, int]:
    return report.inserted, report.updated, report.unchanged, report.closed


# The demo


def test_demo_loads_without_a_bad_line(jobs: Db) -> None:
    report = load_file(jobs, "jobs", DEMO)
    assert (report.bad_count, report.repeated_count, report.unresolved_duplicates) == (0, 0, 0)
    assert report.inserted == total(jobs) == 84
    assert total(jobs, INDEXABLE) == 67
    assert total(jobs, "duplicate_of IS NOT NULL") == 4
    assert value(jobs, "duplicate_of", "cartosur-gis-regional") == value(jobs, "id", "cartosur-gis")


def test_demo_searches_expect_postings_that_are_in_search(jobs: Db) -> None:
    load_file(jobs, "jobs", DEMO)
    searches = json.loads(DEMO.with_name("searches.json").read_text(encoding="utf-8"))
    expected = {external_id for search in searches for external_id in search["expect"]}
    found = jobs.execute(
        f"SELECT external_id FROM jobs WHERE {INDEXABLE} AND external_id = ANY(%s)".encode(),
        (list(expected),),
    )
    assert {row[0] for row in found} == expected


def test_unchanged_file_touches_no_row(jobs: Db) -> None:
    load_file(jobs, "jobs", DEMO)
    before = versions(jobs)
    assert counts(load_file(jobs, "jobs", DEMO, close_missing=True)) == (0, 0, 84, 0)
    assert versions(jobs) == before


# Upserts


def test_changed_row_is_updated_and_its_revision_changes(jobs: Db, write: Write) -> None:
    load_file(jobs, "jobs", write(job("a"), job("b")))
    revision, key = value(jobs, "content_hash", "a"), value(jobs, "id", "a")
    report = load_file(jobs, "jobs", write(job("a", title="New"), job("b"), job("c")))
    assert counts(report) == (1, 1, 1, 0)
    assert value(jobs, "content_hash", "a") != revision
    assert value(jobs, "id", "a") == key


def test_field_that_is_absent_keeps_its_value_and_null_clears_it(jobs: Db, write: Write) -> None:
    load_file(jobs, "jobs", write(job("a", company="Ash", description="d", is_private=True)))
    load_file(jobs, "jobs", write({"external_id": "a", "description": None}))
    assert value(jobs, "company", "a") == "Ash"
    assert value(jobs, "is_private", "a") is True
    assert value(jobs, "description", "a") is None


def test_absent_and_null_fields_take_the_default_of_a_required_column(jobs: Db, write: Write) -> None:
    assert load_file(jobs, "jobs", write(job("a"), job("b", is_private=None))).bad_count == 0
    assert total(jobs, "is_private IS FALSE AND created_at IS NOT NULL") == 2


def test_last_of_repeated_lines_wins_and_the_others_are_reported(jobs: Db, write: Write) -> None:
    path = write(job("a", title="1"), job("b"), job("a", title="2"), job("a", title="3"))
    report = load_file(jobs, "jobs", path)
    assert value(jobs, "title", "a") == "3"
    assert report.repeated_count == 2
    assert [line.number for line in report.repeated] == [1, 3]
    before = versions(jobs)
    assert load_file(jobs, "jobs", path).unchanged == 2
    assert versions(jobs) == before


def test_rows_beyond_one_batch_are_all_loaded(jobs: Db, write: Write) -> None:
    seen: list[int] = []
    report = load_file(jobs, "jobs", write(*(job(f"{n:04}") for n in range(1234))), progress=seen.append)
    assert report.inserted == total(jobs) == 1234
    assert seen == [500, 500, 234]


def test_batches_are_bounded_by_bytes_too(jobs: Db, write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load_lines, "BATCH_BYTES", 1000)
    seen: list[int] = []
    load_file(jobs, "jobs", write(*(job(str(n), description="x" * 600) for n in range(6))), progress=seen.append)
    assert seen == [2, 2, 2]


def test_timestamp_without_zone_is_utc_whatever_the_session_says(jobs: Db, write: Write) -> None:
    jobs.execute("SET TimeZone = 'Asia/Tokyo'")
    load_file(jobs, "jobs", write(job("a", posted_at="2026-03-01 12:00:00"), job("b", posted_at="2026-03-01")))
    assert value(jobs, "posted_at = '2026-03-01 12:00:00+00'", "a")
    assert value(jobs, "posted_at = '2026-03-01 00:00:00Z'", "b")
    assert jobs.execute("SHOW TimeZone").fetchone() == ("Asia/Tokyo",)


def test_nul_and_lone_surrogate_become_replacement_characters(jobs: Db, write: Write) -> None:
    text = r'"title": "x\u0000y", "company": "\ud83d!", "description": "\ud83d\ude00"'
    line = r'{"external_id": "a\u0000", ' + text + "}"
    assert load_file(jobs, "jobs", write(line)).bad_count == 0
    row = jobs.execute("SELECT external_id, title, company, description FROM jobs").fetchone()
    assert row == ("a\ufffd", "x\ufffdy", "\ufffd!", "\U0001f600")


def test_byte_order_mark_crlf_and_blank_lines_are_no_fault(jobs: Db, write: Write) -> None:
    path = write(b"\xef\xbb\xbf" + _line(job("a")) + b"\r", "", " \t\r", job("b"))
    assert counts(load_file(jobs, "jobs", path)) == (2, 0, 0, 0)


def test_two_loads_of_one_table_take_turns(jobs: Db, write: Write) -> None:
    path = write(job("a"), job("b"))
    waiting = (
        "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted "
        "AND database = (SELECT oid FROM pg_database WHERE datname = current_database())"
    )
    second = threading.Thread(target=load_file, args=(jobs, "jobs", path))
    with psycopg.connect(jobs.info.dsn, password=jobs.info.password) as first, first.transaction():
        load_file(first, "jobs", path)
        second.start()
        while first.execute(waiting).fetchone() == (0,):
            assert second.is_alive()
    second.join(30)
    assert not second.is_alive()
    assert total(jobs) == 2


# Map and set


def test_map_renames_and_descends(jobs: Db, write: Write) -> None:
    line = {"id": 17, "job": {"name": "Welder", "at.by": "x"}, "job.by": "Ash"}
    mapping = {"external_id": "id", "title": "job.name", "company": "job.by", "description": "job.none"}
    report = load_file(jobs, "jobs", write(line), mapping=mapping)
    assert (report.inserted, report.bad_count) == (1, 0)
    row = jobs.execute("SELECT external_id, title, company, description FROM jobs").fetchone()
    assert row == ("17", "Welder", "Ash", None)


def test_set_gives_every_row_the_value(jobs: Db, write: Write) -> None:
    load_file(jobs, "jobs", write(job("a", company="x"), job("b")), constants={"company": "Ash", "is_tech": "no"})
    assert total(jobs, "company = 'Ash' AND is_tech IS FALSE") == 2


@pytest.mark.parametrize("column", ["nonsense", "content_hash", "id"])
def test_column_that_cannot_be_written_is_refused_naming_those_that_can(jobs: Db, write: Write, column: str) -> None:
    for options in ({"mapping": {column: "x"}}, {"constants": {column: "1"}}):
        with pytest.raises(ConfigurationError, match=rf"{column}.*external_id, title, company, .*is_private"):
            load_file(jobs, "jobs", write(job("a")), **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(("column", "given"), [("is_tech", "perhaps"), ("posted_at", "yesterday")])
def test_constant_of_the_wrong_type_is_refused(jobs: Db, write: Write, column: str, given: str) -> None:
    with pytest.raises(ConfigurationError, match=f"{column} cannot be set to '{given}'"):
        load_file(jobs, "jobs", write(job("a")), constants={column: given})


def test_one_value_for_external_id_or_for_a_mapped_column_is_refused(jobs: Db, write: Write) -> None:
    with pytest.raises(ConfigurationError, match="external_id"):
        load_file(jobs, "jobs", write(job("a")), constants={"external_id": "b"})
    with pytest.raises(ConfigurationError, match="title"):
        load_file(jobs, "jobs", write(job("a")), mapping={"title": "name"}, constants={"title": "b"})


# Bad lines

BAD = [
    ("{", "not JSON"),
    ("[]", "not a JSON object"),
    ("[" * 100_000, "not JSON"),
    ('{"external_id": "a", "score": NaN}', "NaN is no number"),
    (b'{"external_id": "\xff"}', "not UTF-8"),
    ("{}", "no external_id"),
    ('{"external_id": " "}', "no external_id"),
    ('{"external_id": true}', "no external_id"),
    ({"external_id": "x" * 2000}, "external_id is longer"),
    (job("a", posted_at="yesterday"), "posted_at is no ISO 8601 timestamp"),
    (job("a", posted_at=1772000000), "posted_at is no ISO 8601 timestamp"),
    (job("a", posted_at="2026-02-30T00:00:00Z"), "posted_at: date/time field value out of range"),
    (job("a", title={"en": "x"}), "title is a JSON object, not text"),
    (job("a", title=["x"]), "title is a JSON array, not text"),
    (job("a", title=True), "title is a JSON boolean, not text"),
    (job("a", is_tech="perhaps"), "is_tech: invalid input syntax for type boolean"),
]


@pytest.mark.parametrize(("line", "reason"), BAD, ids=[reason for _, reason in BAD])
def test_bad_line_is_skipped_and_reported_with_its_number(jobs: Db, write: Write, line: object, reason: str) -> None:
    report = load_file(jobs, "jobs", write(job("1"), "", line, job("2")))
    assert (report.inserted, report.bad_count) == (2, 1)
    assert report.bad_lines[0].number == 3
    assert reason in report.bad_lines[0].reason


def test_all_bad_lines_are_counted_and_the_first_twenty_listed_in_order(jobs: Db, write: Write) -> None:
    lines = [job(str(n), is_tech="perhaps") if n % 2 else "{" for n in range(1, 601)]
    report = load_file(jobs, "jobs", write(*lines))
    assert report.bad_count == 600
    assert [line.number for line in report.bad_lines] == list(range(1, 21))


def test_line_longer_than_memory_should_hold_is_bad(jobs: Db, write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load_lines, "MAX_LINE_BYTES", 100)
    report = load_file(jobs, "jobs", write(job("a"), job("b", description="x" * 350), job("c")))
    assert (report.inserted, report.bad_lines[0].number) == (2, 2)


def test_strict_refuses_the_whole_load(jobs: Db, write: Write) -> None:
    load_file(jobs, "jobs", write(job("a")))
    before = versions(jobs)
    with pytest.raises(ConfigurationError, match=r"2 in all \(line 2: not JSON.*line 4: no external_id"):
        load_file(jobs, "jobs", write(job("a", title="New"), "{", job("b"), "{}"), strict=True)
    assert versions(jobs) == before


def test_progress_that_raises_leaves_nothing_behind(jobs: Db, write: Write) -> None:
    def interrupt(_lines: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        load_file(jobs, "jobs", write(job("a")), progress=interrupt)
    assert total(jobs) == 0
    assert load_file(jobs, "jobs", write(job("a"))).inserted == 1


# Closing what is missing


def test_close_missing_closes_what_the_file_does_not_hold_and_reopens_what_it_does(jobs: Db, write: Write) -> None:
    jobs.execute("INSERT INTO jobs (title) VALUES ('not from a file')")
    load_file(jobs, "jobs", write(job("a"), job("b"), job("c", closed_at="2026-01-01T00:00:00Z")))
    assert counts(load_file(jobs, "jobs", write(job("a")), close_missing=True)) == (0, 0, 1, 1)
    assert value(jobs, "closed_at BETWEEN now() - interval '1 min' AND now()", "b")
    assert value(jobs, "closed_at = '2026-01-01T00:00:00Z'", "c")
    assert total(jobs, "closed_at IS NULL") == 2
    assert counts(load_file(jobs, "jobs", write(job("a"), job("b")), close_missing=True)) == (0, 1, 1, 0)
    assert value(jobs, "closed_at", "b") is None


@pytest.mark.parametrize(("lines", "reason"), [([], "holds no row"), ([job("b"), "{"], "1 lines of the file")])
def test_close_missing_closes_nothing_when_the_file_cannot_be_trusted(
    jobs: Db, write: Write, lines: list[object], reason: str
) -> None:
    load_file(jobs, "jobs", write(job("a")))
    report = load_file(jobs, "jobs", write(*lines), close_missing=True)
    assert report.closed == 0
    assert reason in (report.closing_refused or "")
    assert value(jobs, "closed_at", "a") is None


def test_close_missing_needs_a_column_for_it(db: Db, write: Write) -> None:
    db.execute("CREATE TABLE jobs (external_id text PRIMARY KEY)")
    with pytest.raises(ConfigurationError, match="no column closed_at"):
        load_file(db, "jobs", write(job("a")), close_missing=True)


# Duplicates


def test_duplicate_may_stand_before_its_original(jobs: Db, write: Write) -> None:
    path = write(job("a", duplicate_of="b"), job("b"))
    assert counts(load_file(jobs, "jobs", path)) == (2, 0, 0, 0)
    assert value(jobs, "duplicate_of", "a") == value(jobs, "id", "b")
    assert counts(load_file(jobs, "jobs", path)) == (0, 0, 2, 0)
    assert counts(load_file(jobs, "jobs", write(job("a", duplicate_of=None)))) == (0, 1, 0, 0)
    assert value(jobs, "duplicate_of", "a") is None


def test_digits_are_an_external_id_first_and_else_an_id(jobs: Db, write: Write) -> None:
    load_file(jobs, "jobs", write(job("first"), job("1")))
    key = value(jobs, "id", "first")
    load_file(jobs, "jobs", write(job("a", duplicate_of="1"), job("b", duplicate_of=key + 1000)))
    assert value(jobs, "duplicate_of", "a") == value(jobs, "id", "1")
    assert value(jobs, "duplicate_of", "b") == key + 1000


def test_duplicate_of_nothing_or_of_itself_is_counted_and_stays_in_search(jobs: Db, write: Write) -> None:
    lines = [job("a", duplicate_of="nobody"), job("b", duplicate_of="b"), job("c", duplicate_of="9" * 30)]
    assert load_file(jobs, "jobs", write(*lines)).unresolved_duplicates == 3
    assert total(jobs, INDEXABLE) == 3


def test_absent_duplicate_of_keeps_what_is_known(jobs: Db, write: Write) -> None:
    load_file(jobs, "jobs", write(job("a", duplicate_of="b"), job("b")))
    load_file(jobs, "jobs", write(job("a", title="New")))
    assert value(jobs, "duplicate_of", "a") == value(jobs, "id", "b")


# Tables of one's own


def test_table_without_the_optional_columns_takes_what_it_has(db: Db, write: Write) -> None:
    db.execute('CREATE SCHEMA "Mine"')
    db.execute(
        'CREATE TABLE "Mine".jobs (id serial PRIMARY KEY, external_id varchar(20) UNIQUE, title varchar(12), '
        "tags text[], extra jsonb, raw json, salary numeric(8, 2))"
    )
    good = job("a", title="x", id="not mine", tags=["p", "q\0"], extra={"k": ["\0"]}, raw={"n": 1}, salary=10.5)
    assert load_file(db, "Mine.jobs", write(good)).bad_count == 0
    row = db.execute('SELECT title, tags, extra, raw, salary::text FROM "Mine".jobs').fetchone()
    assert row == ("x", ["p", "q\ufffd"], {"k": ["\ufffd"]}, {"n": 1}, "10.50")
    assert load_file(db, "Mine.jobs", write(good)).unchanged == 1
    bad = [job("b", title="longer than twelve"), job("c", salary="a lot"), job("d", tags=[{"a": 1}])]
    assert load_file(db, "Mine.jobs", write(*bad)).bad_count == 3


def test_required_column_that_a_line_lacks_makes_it_bad(db: Db, write: Write) -> None:
    db.execute("CREATE TABLE jobs (external_id text PRIMARY KEY, title text NOT NULL)")
    report = load_file(db, "jobs", write(job("a"), {"external_id": "b"}))
    assert (report.inserted, report.bad_lines[0].number) == (1, 2)
    assert report.bad_lines[0].reason == "title is missing, and the table requires it"


def test_constraint_that_a_row_breaks_refuses_the_load_by_name(db: Db, write: Write) -> None:
    db.execute("CREATE TABLE jobs (external_id text PRIMARY KEY, title text CONSTRAINT short CHECK (title < 'm'))")
    with pytest.raises(ConfigurationError, match=r'"short".*Nothing was written'):
        load_file(db, "jobs", write(job("a", title="a"), job("b", title="z")))
    assert total(db) == 0


@pytest.mark.parametrize(
    "columns",
    ["id int", "external_id text", "external_id text, other int, UNIQUE (external_id, other)"],
)
def test_table_in_which_lines_cannot_find_their_rows_is_refused(db: Db, write: Write, columns: str) -> None:
    db.execute(f"CREATE TABLE jobs ({columns})".encode())
    with pytest.raises(ConfigurationError, match="no unique index on external_id"):
        load_file(db, "jobs", write(job("a")))


def test_missing_table_and_missing_file_are_named(db: Db, write: Write, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="Table nowhere does not exist"):
        load_file(db, "nowhere", write(job("a")))
    with pytest.raises(ConfigurationError, match=r"absent\.jsonl cannot be read"):
        load_file(db, "jobs", tmp_path / "absent.jsonl")


# The table itself


def test_making_the_jobs_table_again_leaves_it_alone(jobs: Db, write: Write) -> None:
    load_file(jobs, "jobs", write(job("a")))
    create_jobs_table(jobs)
    assert total(jobs) == 1


def test_content_hash_tells_every_two_contents_apart(jobs: Db) -> None:
    parts = [None, "", "-", "a", "ab", "b"]
    rows = [(a, b, c) for a in parts for b in parts for c in parts]
    with jobs.cursor() as cursor:
        cursor.executemany("INSERT INTO jobs (title, company, description) VALUES (%s, %s, %s)", rows)
    assert jobs.execute("SELECT count(DISTINCT content_hash) FROM jobs").fetchone() == (len(rows),)
