"""A JSON Lines file into a table shaped like the built-in `jobs`: staged line by line, merged at once.

Everything happens in one transaction, so a load that is refused or interrupted leaves nothing. What
does not belong here: what a line must be (`load_lines.py`), which columns can be written
(`load_target.py`), the merge itself (`sql/queries/load.sql`), options and messages of the command line.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import psycopg
from psycopg import sql
from psycopg.rows import dict_row

from embed_assets.errors import ConfigurationError
from embed_assets.load_lines import MAX_LINE_BYTES, Fields, Line, batches
from embed_assets.load_target import Cursor, Target, find_target, one
from embed_assets.queries import query, sql_folder

LISTED = 20  # the report counts all but shows the first only: it must not grow with the file

_WITHOUT_EQUALITY = ("json", "xml", "point", "polygon")


@dataclass(frozen=True)
class BadLine:
    """`number` counts from 1."""

    number: int
    reason: str


@dataclass
class LoadReport:
    """Rows by what became of them. Lists hold the first twenty, counts count all.

    `repeated`: lines that a later line of the same external_id replaced. `unresolved_duplicates`: rows whose
    duplicate_of names nothing. `closing_refused`: why `close_missing` closed nothing, or None.
    """

    inserted: int = 0
    updated: int = 0
    unchanged: int = 0
    closed: int = 0
    bad_count: int = 0
    bad_lines: list[BadLine] = field(default_factory=list)
    repeated_count: int = 0
    repeated: list[BadLine] = field(default_factory=list)
    unresolved_duplicates: int = 0
    closing_refused: str | None = None

    def add_bad(self, found: Sequence[BadLine]) -> None:
        self.bad_count += len(found)
        room = LISTED - len(self.bad_lines)
        self.bad_lines += sorted(found, key=lambda line: line.number)[:room]


def create_jobs_table(connection: psycopg.Connection[Any]) -> None:
    """Make the built-in `jobs` table in the first schema of the search path, unless it is there."""
    connection.execute((sql_folder() / "demo" / "jobs.sql").read_bytes())


def load_file(
    connection: psycopg.Connection[Any],
    table: str,
    path: Path,
    *,
    mapping: Mapping[str, str] | None = None,
    constants: Mapping[str, str] | None = None,
    close_missing: bool = False,
    strict: bool = False,
    progress: Callable[[int], None] = lambda lines: None,
) -> LoadReport:
    """Upsert the file's lines by external_id; `progress` gets the number of lines read since its last call.

    `mapping`: column to field, dots descend (`{"title": "job.name"}`); `constants`: column to value. Other
    columns take the field of their own name; a field that a line lacks leaves the column as it is. Bad
    lines are skipped and reported; with `strict` they refuse the whole load. `close_missing` closes the rows
    the file does not hold, reopens those it holds again, and closes none if a line was bad or none good.
    Raises ConfigurationError, having written nothing.
    """
    report = LoadReport()
    with _open(path) as file, connection.transaction(), connection.cursor(row_factory=dict_row) as cursor:
        cursor.execute(query("load.session"))
        target = find_target(cursor, table, mapping or {}, constants or {}, close_missing)
        cursor.execute(query("load.stage", columns=_stage_columns(target.fields), table=target.table))
        for batch in batches(file):
            report.add_bad(_stage(cursor, target.fields, batch))
            progress(len(batch))
        if strict and report.bad_count:
            raise ConfigurationError(_refusal(path, report))
        try:
            _merge(cursor, target, report, close_missing)
        except (psycopg.DataError, psycopg.IntegrityError) as error:
            raise ConfigurationError(
                f"Table {table} does not take the rows of {path}: {error.diag.message_primary}. Nothing was "
                f"written. Correct the file, or the table's constraint."
            ) from error
    return report


def _open(path: Path) -> BinaryIO:
    try:
        return path.open("rb")
    except OSError as error:
        raise ConfigurationError(
            f"{path} cannot be read: {error.strerror}. Name an existing file with one JSON object a line."
        ) from error


def _refusal(path: Path, report: LoadReport) -> str:
    lines = "; ".join(f"line {bad.number}: {bad.reason}" for bad in report.bad_lines)
    more = f"; and {report.bad_count - LISTED} more" if report.bad_count > LISTED else ""
    return (
        f"{path} has bad lines, {report.bad_count} in all ({lines}{more}). Nothing was written. Correct "
        f"them, or load without strict, which skips them."
    )


def _commas(parts: Sequence[sql.Composable]) -> sql.Composed:
    return sql.SQL(", ").join(parts)


def _stage_columns(fields: Fields) -> sql.Composed:
    """Typed as in the table, but a duplicate_of that may be a name stays text until the end."""
    text = sql.SQL("NULL::text AS duplicate_of")
    return _commas([text if c.name == fields.link else sql.Identifier(c.name) for c in fields.columns])


def _stage(cursor: Cursor, fields: Fields, batch: Sequence[Line]) -> list[BadLine]:
    bad, rows = [], []
    for number, raw in batch:
        try:
            if raw is None:
                raise ValueError(f"longer than {MAX_LINE_BYTES} bytes")
            if raw.strip():
                given, values = fields.values(raw)
                rows.append((number, given, *values))
        except (ValueError, RecursionError) as error:
            bad.append(BadLine(number, str(error)))
    copy = query("load.copy", columns=_commas([sql.Identifier(column.name) for column in fields.columns]))
    return bad + _copy(cursor, copy, rows)


def _copy(cursor: Cursor, statement: sql.Composed, rows: Sequence[tuple[Any, ...]]) -> list[BadLine]:
    """COPY the rows; when Postgres refuses, halve until the guilty lines stand alone."""
    if not rows:
        return []
    try:
        with cursor.connection.transaction(), cursor.copy(statement) as copy:
            for row in rows:
                copy.write_row(row)
    except (psycopg.DataError, psycopg.IntegrityError, psycopg.ProgrammingError) as error:
        if isinstance(error, psycopg.ProgrammingError) and error.sqlstate:
            raise  # the server's: not a matter of lines; without a state psycopg found no form for a value
        if len(rows) == 1:
            return [BadLine(rows[0][0], _reason(error))]
        half = len(rows) // 2
        return _copy(cursor, statement, rows[:half]) + _copy(cursor, statement, rows[half:])
    return []


def _reason(error: psycopg.Error) -> str:
    column = re.search(r", column (\w+)", error.diag.context or "")
    return (f"{column[1]}: " if column else "") + (error.diag.message_primary or str(error))[:200]


def _merge(cursor: Cursor, target: Target, report: LoadReport, close_missing: bool) -> None:
    cursor.execute(query("load.index_stage"))
    cursor.execute(query("load.analyze_stage"))
    for row in cursor.execute(query("load.drop_repeats")).fetchall():
        report.repeated_count = row["total"]
        report.repeated.append(BadLine(row["load_line"], f"external_id '{row['external_id']}' stands again below"))
    for row in cursor.execute(query("load.field_sets")).fetchall():
        _upsert(cursor, target, row["load_fields"])
    _link_duplicates(cursor, target, report)
    counts = one(cursor.execute(query("load.counts")))
    report.inserted, report.updated, report.unchanged = (
        counts["inserted"],
        counts["updated"],
        counts["unchanged"],
    )
    if close_missing:
        _close_missing(cursor, target, report)
    cursor.execute(query("load.drop_stage"))


def _upsert(cursor: Cursor, target: Target, given: str) -> None:
    columns = [c for c, mark in zip(target.fields.columns, given, strict=True) if mark == "1"]
    columns = [column for column in columns if column.name != target.fields.link]
    names = [sql.Identifier(column.name) for column in columns]
    casts = [sql.SQL("::text" if column.base in _WITHOUT_EQUALITY else "") for column in columns]
    pairs = list(zip(names, casts, strict=True))
    statement = query(
        "load.upsert",
        table=target.table,
        columns=_commas(names),
        assignments=_commas([sql.SQL("{0} = excluded.{0}").format(name) for name in names]),
        old_values=_commas([sql.SQL("existing.{}{}").format(*pair) for pair in pairs]),
        new_values=_commas([sql.SQL("excluded.{}{}").format(*pair) for pair in pairs]),
    )
    cursor.execute(statement, {"fields": given})


def _link_duplicates(cursor: Cursor, target: Target, report: LoadReport) -> None:
    if target.key is None:
        return
    position = [column.name for column in target.fields.columns].index("duplicate_of") + 1
    statement = query("load.link_duplicates", table=target.table, key=sql.Identifier(target.key))
    report.unresolved_duplicates = one(cursor.execute(statement, {"position": position}))["unresolved"]


def _close_missing(cursor: Cursor, target: Target, report: LoadReport) -> None:
    if report.bad_count:
        report.closing_refused = (
            f"No row was closed: {report.bad_count} lines of the file were bad, and a row that only seems "
            f"to be missing must not vanish from search. Correct them and load again."
        )
    elif not report.inserted + report.updated + report.unchanged:
        report.closing_refused = "No row was closed: the file holds no row, so every row would have been."
    else:
        report.closed = one(cursor.execute(query("load.close_missing", table=target.table)))["closed"]
