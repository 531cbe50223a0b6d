"""Numbers for a monitor, in Prometheus' text format. By kind, model and code: never by row or tenant.

What does not belong here: what is counted (`sql/migrations/0006_metrics.sql`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from decimal import Decimal
from typing import Any

from psycopg import sql

from embed_assets.queries import query
from embed_assets.resources.postgres import Postgres, Row

VIEWS = ("queue", "lease", "failure", "work", "feed", "endpoint")
PREFIX = "embed_assets"


def prometheus(postgres: Postgres, *, rows: bool = False) -> str:
    """Every view of metrics; with `rows` also each kind's rows by state, for which its whole table is read."""
    found = {name: _read(postgres, name) for name in VIEWS}
    lines = [line for name, read in found.items() for line in _lines(f"{PREFIX}_{name}", read)]
    if rows:
        lines += _lines(PREFIX, _states(postgres))
    return "\n".join(lines) + "\n"


def _read(postgres: Postgres, name: str) -> list[Row]:
    statement = query("metrics.view", view=sql.Identifier(f"{name}_metrics"))
    return postgres.retrying(lambda cursor: cursor.execute(statement).fetchall())


def _states(postgres: Postgres) -> list[Row]:
    with postgres.transaction() as cursor:
        kinds = [row["kind"] for row in cursor.execute(query("metrics.made"), {}).fetchall()]
        found = []
        for kind in kinds:
            function = sql.Identifier("embed_assets", f"status_{kind}")
            found += cursor.execute(query("metrics.rows", function=function), {"kind": kind}).fetchall()
    return found


def _lines(prefix: str, rows: Sequence[Row]) -> Iterator[str]:
    """A gauge for each numeric column, one sample a row; the columns of text are its labels."""
    if not rows:
        return
    labels = [name for name in rows[0] if any(isinstance(row[name], str) for row in rows)]
    for column in (name for name in rows[0] if name not in labels):
        yield f"# TYPE {prefix}_{column} gauge"
        for row in rows:
            if row[column] is not None:
                yield f"{prefix}_{column}{{{_labels(row, labels)}}} {_number(row[column])}"


def _labels(row: Mapping[str, Any], names: Sequence[str]) -> str:
    return ",".join(f'{name}="{_escaped(str(row[name]))}"' for name in names)


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def _number(value: Decimal | float) -> str:
    return f"{float(value):g}" if isinstance(value, float) else str(value)
