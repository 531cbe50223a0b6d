"""SQL from `sql/`, by name. Each file holds named blocks; `query("claim.due")` is one of them.

Data never enters here: values are `%(name)s` parameters, and `{name}` stands for identifiers and
fragments that the project's own declarations compose with `psycopg.sql`.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

from psycopg import sql

_NAME = re.compile(r"^-- name: (\w+)\s*$", re.MULTILINE)


@cache
def sql_folder() -> Path:
    """`sql/` beside the package in a checkout, inside it when installed."""
    here = Path(__file__).resolve().parent
    return here / "sql" if (here / "sql").is_dir() else here.parent / "sql"


@cache
def _blocks(file: str) -> dict[str, str]:
    text = (sql_folder() / "queries" / f"{file}.sql").read_text(encoding="utf-8")
    parts = _NAME.split(text)
    return {name: _bare(body) for name, body in zip(parts[1::2], parts[2::2], strict=True)}


def _bare(body: str) -> str:
    """The statement without its comments: a comment may hold a percent sign or a brace."""
    lines = (line for line in body.splitlines() if not line.lstrip().startswith("--"))
    return "\n".join(lines).strip().rstrip(";")


@cache
def text(name: str) -> str:
    """The text of block `file.block`; raises KeyError for an unknown one."""
    file, block = name.split(".")
    return _blocks(file)[block]


def query(name: str, **fragments: sql.Composable) -> sql.Composed:
    """Block `file.block` with its `{placeholders}` filled by composed identifiers and fragments."""
    return sql.SQL(text(name)).format(**fragments)
