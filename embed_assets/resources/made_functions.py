"""SQL functions that are made from a declaration, since they join the user's table.

Made anew only when the declaration says something else than the function that is there.
"""

from __future__ import annotations

from psycopg import Cursor, sql

from embed_assets.queries import query
from embed_assets.resources.postgres import Row


def make_function(
    cursor: Cursor[Row],
    create: str,
    body: sql.Composable,
    *,
    name: sql.Identifier,
    arguments: str,
    **parts: sql.Composable,
) -> None:
    """Create or replace a function by the block `create`, whose {body} is `body`, in the caller's transaction."""
    text = body.as_string(cursor).replace("%%", "%")  # fragments are written for statements that take parameters
    signature = f"{name.as_string(cursor)}({arguments})"
    row = cursor.execute(query("search_outbox.function_source"), {"name": signature}).fetchone()
    if row is None or row["body"] != text:
        cursor.execute(query(create, body=sql.Literal(text), **parts))
