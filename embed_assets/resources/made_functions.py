"""SQL functions that are made from a declaration, since they join the user's table.

Made anew only when the declaration says something else than the function that is there. What does not belong here:
functions that are the same for every kind (`sql/migrations`).
"""

from __future__ import annotations

from psycopg import Cursor, sql

from embed_assets.queries import query
from embed_assets.resources.declaration import BoundCorpus
from embed_assets.resources.postgres import Row
from embed_assets.resources.search_statements import nearest

# A declaration's fragment may name a column as the function names a parameter.
COLUMNS_FIRST = "#variable_conflict use_column\n"


def made_name(bound: BoundCorpus, verb: str) -> sql.Identifier:
    return sql.Identifier("embed_assets", f"{verb}_{bound.kind}")


def make_functions(cursor: Cursor[Row], bound: BoundCorpus) -> None:
    """Where they differ: `tell_search_<kind>()` for the triggers; for any client `search_<kind>(query vector, k)`,
    `status_<kind>()` and, where neighbours are kept, `similar_to_<kind>(id text, k)`."""
    cursor.execute(query("search.load_vector"))
    kind = sql.Literal(bound.kind)
    tell = query("search_outbox.tell_body", kind=kind, **bound.fragments())
    _make(cursor, bound, "tell_search", "", _plain(cursor, tell), "search_outbox.create_tell")
    statement = nearest(
        bound,
        model_id=sql.SQL("%1$s"),  # filled in by the function's format(), for which %% is a percent sign too
        dimensions=sql.SQL("%2$s"),
        type_=sql.SQL("%3$s"),
        vector=sql.SQL("$1"),
        k=sql.SQL("$2"),
    )
    search = query("search.function_body", kind=kind, statement=sql.Literal(statement.as_string(cursor)))
    _make(cursor, bound, "search", "vector, integer", search.as_string(cursor), "search.create_function")
    _make(cursor, bound, "status", "", _status(cursor, bound), "metrics.create_status")
    if bound.corpus.similar:
        fragments = bound.fragments(kind=kind, similar=bound.similar, rule=bound.similar_rule, w_key=bound.key_of("w"))
        similar = query("similar.function_body", **fragments)
        body = COLUMNS_FIRST + _plain(cursor, similar)
        _make(cursor, bound, "similar_to", "text, integer", body, "similar.create_function")


def _status(cursor: Cursor[Row], bound: BoundCorpus) -> str:
    """The states of all rows, by the statement that `embed-assets status` asks, for the model that is kept fresh."""
    kind = sql.Literal(bound.kind)
    body = query("status.status", **bound.fragments()).as_string(cursor)
    target = query("metrics.target", kind=kind).as_string(cursor)
    return _plain_text(body.replace("%(kind)s", kind.as_string(cursor)).replace("%(model_id)s", target))


def _plain(cursor: Cursor[Row], body: sql.Composed) -> str:
    return _plain_text(body.as_string(cursor))


def _plain_text(body: str) -> str:
    """Fragments are written for statements that take parameters, in which a percent sign stands twice."""
    return body.replace("%%", "%")


def _make(cursor: Cursor[Row], bound: BoundCorpus, verb: str, arguments: str, body: str, create: str) -> None:
    name = made_name(bound, verb)
    signature = {"name": f"{name.as_string(cursor)}({arguments})"}
    row = cursor.execute(query("search_outbox.function_source"), signature).fetchone()
    if row is None or row["body"] != body:
        cursor.execute(query(create, function=name, body=sql.Literal(body)))
