"""The table a file is loaded into: which of its columns a file may write, and by what key rows refer.

What does not belong here: the lines (`load_lines.py`) and writing (`load.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import psycopg
from psycopg import sql
from psycopg.rows import DictRow

from embed_assets.errors import ConfigurationError
from embed_assets.load_lines import TEXT_TYPES, Column, Fields, encoded
from embed_assets.queries import query

_INTEGERS = ("smallint", "integer", "bigint")

Cursor = psycopg.Cursor[DictRow]


@dataclass(frozen=True)
class Target:
    """The table, the columns the file writes, and the key that duplicate_of refers to."""

    table: sql.Identifier
    fields: Fields
    key: str | None


def find_target(
    cursor: Cursor, table: str, mapping: Mapping[str, str], constants: Mapping[str, str], close_missing: bool
) -> Target:
    """Raises ConfigurationError when the table, or a column that map or set names, cannot be written."""
    name = sql.Identifier(*table.split("."))
    known = _known_columns(cursor, table, name)
    _check_options(table, known, mapping, constants)
    if close_missing and "closed_at" not in known:
        raise ConfigurationError(f"Table {table} has no column closed_at, so close_missing cannot close rows.")
    named = {"external_id", *mapping, *constants}
    key = _duplicate_key(known)
    link = "duplicate_of" if key else None
    fields = Fields(
        columns=[c for c in known.values() if not c.is_serial or c.name in named],
        mapping=mapping,
        constants={column: _constant(cursor, known[column], value, link) for column, value in constants.items()},
        null_when_absent=frozenset({"closed_at"} if close_missing else ()),
        link=link,
    )
    return Target(name, fields, key)


def _known_columns(cursor: Cursor, table: str, name: sql.Identifier) -> dict[str, Column]:
    oid = one(cursor.execute(query("load.relation"), {"table": name.as_string(cursor)}))["oid"]
    if oid is None:
        raise ConfigurationError(f"Table {table} does not exist in this database. Create it, or name another.")
    cursor.execute(query("load.lock"), {"oid": oid})
    if not one(cursor.execute(query("load.is_unique"), {"oid": oid}))["is_unique"]:
        raise ConfigurationError(
            f"Table {table} has no unique index on external_id alone, by which lines find their rows. Add "
            f"the column if it is missing, then CREATE UNIQUE INDEX ON {table} (external_id)."
        )
    rows = cursor.execute(query("load.columns"), {"oid": oid}).fetchall()
    return {row["name"]: Column(**row) for row in rows}


def one(cursor: Cursor) -> DictRow:
    """The only row of a query that always has one."""
    return cursor.fetchall()[0]


def _check_options(
    table: str, known: Mapping[str, Column], mapping: Mapping[str, str], constants: Mapping[str, str]
) -> None:
    usable = [column.name for column in known.values() if not column.is_locked]
    if unknown := sorted({*mapping, *constants}.difference(usable)):
        raise ConfigurationError(
            f"Table {table} has no column to write named {', '.join(unknown)} (map or set). It has: "
            f"{', '.join(usable)}. The table's column stands before the equals sign."
        )
    if both := sorted({*mapping, "external_id"} & constants.keys()):
        raise ConfigurationError(
            f"Columns of table {table} that differ from line to line cannot be set to one value: "
            f"{', '.join(both)}. Keep map or set for a column, and only map for external_id."
        )


def _constant(cursor: Cursor, column: Column, value: str, link: str | None) -> object:
    """Judged before any line is read: else every line would be bad."""
    try:
        constant = encoded(column, value, is_link=column.name == link)
        if column.name != link:
            cursor.execute(query("load.check_constant", type=sql.SQL(column.type)), {"value": constant})
    except (ValueError, psycopg.DataError) as error:
        raise ConfigurationError(
            f"Column {column.name} cannot be set to '{value}': its type is {column.type}. Set another value."
        ) from error
    return constant


def _duplicate_key(known: Mapping[str, Column]) -> str | None:
    """The integer key that duplicate_of holds, if files can name the original by its external_id."""
    link = known.get("duplicate_of")
    if link is None or link.type not in _INTEGERS or known["external_id"].base not in TEXT_TYPES:
        return None
    return next((c.name for c in known.values() if c.is_key and c.type in _INTEGERS), None)
