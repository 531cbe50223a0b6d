"""A declaration bound to a database: checked against the real table, with its SQL fragments.

Everything that a query needs to know about the user's table is composed here, once, from identifiers and
the project's own fragments. What does not belong here: the tables that are made for it (`tables`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import psycopg
from psycopg import errors, sql

from embed_assets.corpus import RESERVED, TableCorpus
from embed_assets.errors import ConfigurationError, DeclarationError
from embed_assets.queries import query
from embed_assets.resources.postgres import Postgres, Row

KEY_TYPES = {
    "int2": "smallint",
    "int4": "integer",
    "int8": "bigint",
    "uuid": "uuid",
    "text": "text",
    "varchar": "text",
}
KEY_COLUMNS = {"smallint": "int2", "integer": "int4", "bigint": "int8", "uuid": "uuid", "text": "text"}
INTEGER_LIMITS = {"int2": 2**15, "int4": 2**31, "int8": 2**63}
UUID_FORM = "^[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}$"
INTEGER_FORM = "^(0|-?[1-9][0-9]{0,18})$"
MAINTAINER = "Use the role that ran 'embed-assets migrate', or grant it what that role has on schema embed_assets."


@dataclass(frozen=True)
class BoundCorpus:
    """A TableCorpus and the fragments by which queries speak of its table.

    `source`: key, source_id, revision, indexable, rank, scope, bytes, texts and fields of each row.
    """

    corpus: TableCorpus
    key_type: str
    source: sql.Composable
    canonical: sql.Composable
    collation: sql.Composable
    table: sql.Composable
    legacy_embedding: sql.Identifier | None = None

    @property
    def kind(self) -> str:
        return self.corpus.kind

    @property
    def key(self) -> sql.Identifier:
        return sql.Identifier(self.corpus.key)

    @property
    def chunks(self) -> sql.Identifier:
        return sql.Identifier("embed_assets", self.corpus.chunk_table)

    @property
    def similar(self) -> sql.Identifier:
        return sql.Identifier("embed_assets", f"similar_{self.kind}")

    @property
    def similar_rule(self) -> sql.Composable:
        """Whether row `other` may stand in the list of row `self`, two aliases of the table."""
        return _fragment(self.corpus.similar.where if self.corpus.similar else "FALSE")

    def partition_name(self, model_id: int) -> str:
        return f"{self.corpus.chunk_table}_m{model_id}"

    def partition_path(self, model_id: int) -> str:
        """For to_regclass."""
        return f'embed_assets."{self.partition_name(model_id)}"'

    def partition(self, model_id: int) -> sql.Identifier:
        return sql.Identifier("embed_assets", self.partition_name(model_id))

    def source_where(self, condition: str) -> sql.Composable:
        """`source`, of those rows alone for which an SQL condition over the table's columns holds.

        The condition is the project's own code; values stand in it as %(name)s, and a percent sign of its own as %%.
        """
        return _source(self.corpus, self.table, self.key_type, where=sql.SQL(condition))

    def key_of(self, alias: str) -> sql.Composable:
        """The native key that `alias.source_id` spells."""
        cast = sql.SQL("({}.source_id)::{}").format(sql.Identifier(alias), sql.SQL(KEY_TYPES[self.key_type]))
        return sql.SQL("{}{}").format(cast, self.collation)

    def fragments(self, model_id: int | None = None, **more: sql.Composable) -> dict[str, sql.Composable]:
        """Every placeholder that the queries of a corpus may hold."""
        return {
            "source": self.source,
            "canonical": self.canonical,
            "table": self.table,
            "chunks": self.chunks,
            "key": self.key,
            "e_key": self.key_of("e"),
            "s_key": self.key_of("s"),
            "p_key": self.key_of("p"),
            "model_id": sql.Literal(model_id),
            **more,
        }


@contextmanager
def rights(what: str, advice: str) -> Iterator[None]:
    try:
        yield
    except errors.InsufficientPrivilege as error:
        raise ConfigurationError(f"The database role may not {what}: {error.diag.message_primary}. {advice}") from None


def bind(postgres: Postgres, corpus: TableCorpus) -> BoundCorpus:
    """Check a declaration against its table. Raises DeclarationError naming what is wrong, before anything is made."""
    with rights(f"read {corpus.table}", "Grant it USAGE on the schema and SELECT."), postgres.transaction() as cursor:
        table = cursor.execute(query("corpus.table_of"), {"table": corpus.table}).fetchone()
        if table is None:
            raise _wrong(corpus, "table", f"'{corpus.table}' does not exist in this database")
        columns = _columns(cursor, corpus, table["oid"])
        _check_key(cursor, corpus, table, columns)
        bound = _compose(corpus, table, columns)
        hidden = cursor.execute(query("corpus.hidden_by_row_security"), {"oid": table["oid"]}).fetchone()
        if hidden and hidden["hidden"]:
            raise ConfigurationError(
                f"Row security on {corpus.table} hides rows from this database role, so they would be taken for "
                "deleted. Use the table's owner, or a role with BYPASSRLS."
            )
        _try(cursor, bound, "corpus.try_source", "revision, fresh_at or indexable")
        _try(cursor, bound, "corpus.try_rule", "similar.where")
        _check_chunk_table(cursor, bound)
    return bound


def _wrong(corpus: TableCorpus, field: str, what: str) -> DeclarationError:
    return DeclarationError(f"Corpus '{corpus.kind}': {field} {what}. Correct the declaration or the table.")


def _columns(cursor: psycopg.Cursor[Row], corpus: TableCorpus, oid: int) -> dict[str, Row]:
    columns = {row["name"]: row for row in cursor.execute(query("corpus.columns_of"), {"oid": oid})}
    wanted = {
        "key": [corpus.key],
        "text": [column.column for column in corpus.columns],
        "prefix": corpus.prefix_fields,
    }
    for field, names in wanted.items():
        for name in names:
            if name not in columns:
                raise _wrong(corpus, field, f"names column '{name}', which {corpus.table} does not have")
    return columns


def _check_key(cursor: psycopg.Cursor[Row], corpus: TableCorpus, table: Row, columns: dict[str, Row]) -> None:
    key = columns[corpus.key]
    if key["type"] not in KEY_TYPES:
        raise _wrong(corpus, "key", f"'{corpus.key}' is of type {key['type']}; allowed are integers, uuid and text")
    if not key["deterministic"]:
        raise _wrong(corpus, "key", f"'{corpus.key}' has a nondeterministic collation: equal keys may be spelt twice")
    if table["kind"] not in "rp":
        return  # a view has no index to show; its key is the declaration's word
    unique = cursor.execute(query("corpus.key_is_unique"), {"oid": table["oid"], "key": corpus.key}).fetchone()
    if not key["not_null"] or not (unique and unique["is_unique"]):
        raise _wrong(corpus, "key", f"'{corpus.key}' must be NOT NULL with a unique index of its own")


@rights("use the schema embed_assets", MAINTAINER)
def _check_chunk_table(cursor: psycopg.Cursor[Row], bound: BoundCorpus) -> None:
    """Refuse a table of that name that is no chunk table of this key: another kind's, ours, an old declaration's."""
    corpus, name = bound.corpus, f"embed_assets.{bound.corpus.chunk_table}"
    table = cursor.execute(query("corpus.table_of"), {"table": name}).fetchone()
    if table is None:
        return
    types = {row["name"]: row["type"] for row in cursor.execute(query("corpus.columns_of"), {"oid": table["oid"]})}
    if set(types) != RESERVED | {corpus.key} or types[corpus.key] != KEY_COLUMNS[KEY_TYPES[bound.key_type]]:
        raise _wrong(corpus, "chunks", f"names {name}, which exists and is no chunk table for the key '{corpus.key}'")


def _try(cursor: psycopg.Cursor[Row], bound: BoundCorpus, statement: str, fields: str) -> None:
    try:
        cursor.execute(query(statement, **bound.fragments(), rule=bound.similar_rule), {})
    except (psycopg.ProgrammingError, psycopg.DataError, psycopg.NotSupportedError) as error:
        if isinstance(error, errors.InsufficientPrivilege):
            raise
        raise _wrong(bound.corpus, fields, f"is refused by Postgres: {error.diag.message_primary}") from None


def _compose(corpus: TableCorpus, table: Row, columns: dict[str, Row]) -> BoundCorpus:
    key = columns[corpus.key]
    name = _identifier(table["schema"], table["name"])
    collation: sql.Composable = sql.SQL("")
    if KEY_TYPES[key["type"]] == "text":
        collation = sql.SQL(" COLLATE {}").format(sql.Identifier(key["collation_schema"], key["collation"]))
    return BoundCorpus(
        corpus=corpus,
        key_type=key["type"],
        source=_source(corpus, name, key["type"]),
        canonical=_canonical(key["type"]),
        collation=collation,
        table=name,
        legacy_embedding=_identifier(corpus.legacy_embedding) if corpus.legacy_embedding in columns else None,
    )


def _source(
    corpus: TableCorpus, table: sql.Composable, key_type: str, where: sql.Composable = sql.SQL("TRUE")
) -> sql.Composable:
    """The subquery in whose scope the declaration's fragments stand alone: no column of ours can be mistaken."""
    texts = [_column(column.column) for column in corpus.columns]
    fields = [part for name in corpus.prefix_fields for part in (sql.Literal(name), _column(name))]
    fits = "octet_length(self.{}::text) <= 1024" if KEY_TYPES[key_type] == "text" else "TRUE"
    body = query(
        "source.row",
        key=sql.Identifier(corpus.key),
        key_type=sql.SQL(KEY_TYPES[key_type]),
        revision=_fragment(corpus.revision) if corpus.revision else _revision(corpus),
        indexable=_fragment(corpus.indexable),
        rank=_rank(corpus),
        scope=_fragment(corpus.scope or "NULL"),
        bytes=sql.SQL(" + ").join(sql.SQL("coalesce(octet_length({}), 0)").format(text) for text in texts),
        texts=sql.SQL(", ").join(texts),
        fields=sql.SQL(", ").join(fields),
        table=table,
        key_fits=sql.SQL(fits).format(sql.Identifier(corpus.key)),
        where=where,
    )
    return sql.SQL("({})").format(body)


def _column(name: str) -> sql.Composable:
    return sql.SQL("self.{}::text").format(_identifier(name))


def _identifier(*names: str) -> sql.Identifier:
    """A name of the user's for a statement that takes parameters: a % in it is none."""
    return sql.Identifier(*(name.replace("%", "%%") for name in names))


def _fragment(text: str) -> sql.Composable:
    """A fragment of the declaration: the project's own code, so it may stand in a statement; % is no parameter."""
    return sql.SQL(text.replace("%", "%%").replace("{", "{{").replace("}", "}}")).format()


def _revision(corpus: TableCorpus) -> sql.Composable:
    names = [*(column.column for column in corpus.columns), *corpus.prefix_fields]
    values = sql.SQL(", ").join(_column(name) for name in dict.fromkeys(names))
    return sql.SQL("md5(jsonb_build_array({})::text)").format(values)


def _rank(corpus: TableCorpus) -> sql.Composable:
    """Lower first: minus the freshness for `freshest`; equal for `oldest`, so that the entry's id decides."""
    if corpus.order == "oldest":
        return sql.SQL("0::float8")
    if corpus.fresh_at is None:
        return sql.SQL("'Infinity'::float8")
    return sql.SQL("coalesce(-extract(EPOCH FROM ({})), 'Infinity')::float8").format(_fragment(corpus.fresh_at))


def _canonical(key_type: str) -> sql.Composable:
    """The one spelling of a key that somebody enqueued as `given`, or NULL when it can be no key of this table."""
    if key_type == "uuid":
        return sql.SQL("CASE WHEN given ~ {} THEN lower(given) END").format(sql.Literal(UUID_FORM))
    if key_type in INTEGER_LIMITS:
        limit = INTEGER_LIMITS[key_type]
        return sql.SQL(
            "CASE WHEN given ~ {form} THEN CASE WHEN given::numeric BETWEEN {low} AND {high} THEN given END END"
        ).format(form=sql.Literal(INTEGER_FORM), low=sql.Literal(-limit), high=sql.Literal(limit - 1))
    return sql.SQL("CASE WHEN octet_length(given) BETWEEN 1 AND 1024 THEN given END")
