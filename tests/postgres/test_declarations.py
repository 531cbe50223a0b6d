"""Declarations on real tables: every key type from scan to search, odd names, and what is refused and why."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any
from uuid import uuid4

import psycopg
import pytest
from fakes import HashEmbedder
from postgres.support import (
    Db,
    asking,
    background,
    chunks,
    connect,
    drain,
    entries,
    rows,
    stamps,
    status,
    until_true,
    value,
    waits_for_advisory,
)
from psycopg import sql
from psycopg.conninfo import make_conninfo

from embed_assets.corpus import Html, Plain, TableCorpus
from embed_assets.errors import ConfigurationError, DeclarationError
from embed_assets.resources.assembly import Kind, open_kind
from embed_assets.resources.declaration import bind
from embed_assets.resources.postgres import Postgres
from embed_assets.resources.tables import make_tables
from embed_assets.resources.target import make_model
from embed_assets.search import search
from embed_assets.settings import Settings

KindMaker = Callable[..., Kind]

KEYS = {
    "smallint": ["-3", "1", "2"],
    "integer": ["-3", "10", "9"],
    "bigint": ["-9223372036854775808", "1", "9223372036854775807"],
    "uuid": ["00000000-0000-0000-0000-00000000000a", str(uuid4()), str(uuid4())],
    "text": ["ä", 'it\'s "%s" {x} \\', "a/b, c"],
    'text COLLATE "C"': ["Z", "a", "é"],
    "varchar(20)": ["x ", "x", "y"],
}


def notes(**fields: Any) -> TableCorpus:
    return TableCorpus(**{"kind": "notes", "table": "notes", "key": "note_id", "text": Plain("body"), **fields})


@pytest.fixture
def table(db: Db) -> None:
    db.execute("CREATE TABLE notes (note_id bigint PRIMARY KEY, body text, title text, at timestamptz, good boolean)")


@pytest.fixture
def postgres(database_url: str) -> Iterator[Postgres]:
    made = Postgres(database_url)
    yield made
    made.close()


def refused(postgres: Postgres, corpus: TableCorpus) -> str:
    """What a refused declaration is told. Nothing of the kind was made."""
    with pytest.raises(ConfigurationError) as caught:
        bind(postgres, corpus)
    assert postgres.one("corpus.corpus", {"kind": corpus.kind}) is None
    assert isinstance(caught.value, DeclarationError)
    assert f"Corpus '{corpus.kind}'" in str(caught.value)
    return str(caught.value)


def say(db: Db, *ids: object) -> None:
    db.execute("SELECT embed_assets.enqueue('notes', %s::text[])", ([str(source_id) for source_id in ids],))


def note_chunks(db: Db, source_id: str, columns: str = "body") -> list[Any]:
    return chunks(db, source_id, columns, table="notes_semantic_chunks", key="note_id")


@pytest.mark.ids("C-01", "A-02", "A-45")
@pytest.mark.parametrize("key_type", sorted(KEYS))
def test_rows_of_every_key_type_are_found_written_searched_cleared_and_settled(
    db: Db, make_kind: KindMaker, embedder: HashEmbedder, key_type: str
):
    db.execute(f"CREATE TABLE notes (note_id {key_type} PRIMARY KEY, body text, good boolean)".encode())
    kind = make_kind(notes(indexable="good"))
    first, second, third = KEYS[key_type]
    for number, key in enumerate((first, second, third)):
        db.execute("INSERT INTO notes VALUES (%s, %s, TRUE)", (key, f"text {number}"))

    assert drain(kind).indexed == 3  # the scan found them
    assert sorted(stamps(db)) == sorted(KEYS[key_type])
    assert note_chunks(db, second) == ["text 1"]
    assert status(kind) == {"fresh": 3}
    answer = search(kind.postgres, kind.bound, asking(kind, embedder), "text 2", k=1)
    assert (answer.semantic, [hit.source_id for hit in answer.hits]) == (True, [third])
    assert search(kind.postgres, kind.bound, {}, "text").semantic is False

    db.execute("UPDATE notes SET body = 'new' WHERE note_id = %s", (first,))
    say(db, first)
    assert status(kind) == {"fresh": 2, "due": 1}
    assert drain(kind, scan=False).indexed == 1  # the fold found it
    assert note_chunks(db, first) == ["new"]

    db.execute("UPDATE notes SET good = FALSE WHERE note_id = %s", (second,))
    db.execute("DELETE FROM notes WHERE note_id = %s", (third,))
    assert status(kind) == {"fresh": 1, "due": 2}
    counts = drain(kind)
    assert (counts.removed, counts.gone, counts.failed) == (1, 1, 0)
    assert stamps(db) == [first]
    assert value(db, "SELECT count(*) FROM embed_assets.notes_semantic_chunks") == 1
    assert status(kind) == {"fresh": 1, "excluded": 1}
    assert entries(db) == []


@pytest.mark.parametrize("key_type", ["bigint", "uuid", "text", 'text COLLATE "C"'])
def test_the_chunks_of_a_row_are_found_by_the_index_of_their_key(db: Db, make_kind: KindMaker, key_type: str):
    db.execute(f"CREATE TABLE notes (note_id {key_type} PRIMARY KEY, body text)".encode())
    kind = make_kind(notes())
    db.execute("SET enable_seqscan = off")
    s_key, source = kind.bound.key_of("s").as_string(db), kind.bound.source.as_string(db)
    for condition, other in ((s_key, "embed_assets.semantic_stamps AS s"), ("source.key", f"{source} AS source")):
        plan = "\n".join(
            rows(
                db,
                f"EXPLAIN SELECT 1 FROM {other} JOIN embed_assets.notes_semantic_chunks_m{kind.model_id} AS c "
                f"ON c.note_id = {condition} WHERE c.model_id = {kind.model_id}",
            )
        )
        assert "notes_semantic_chunks_m" in plan
        assert "Seq Scan on notes_semantic_chunks" not in plan, plan


@pytest.mark.parametrize(
    ("key_type", "given", "canonical"),
    [
        ("bigint", "9223372036854775807", "9223372036854775807"),
        ("bigint", "9223372036854775808", None),
        ("smallint", "32768", None),
        ("integer", "007", None),
        ("integer", "-0", None),
        ("integer", "1 OR TRUE", None),
        ("uuid", "00000000-0000-0000-0000-00000000000A", "00000000-0000-0000-0000-00000000000a"),
        ("uuid", "{00000000-0000-0000-0000-00000000000a}", None),
        ("text", "", None),
        ("text", "x" * 1024, "x" * 1024),
        ("text", "x" * 1025, None),
    ],
)
def test_an_enqueued_id_becomes_the_keys_own_spelling_or_is_dropped_and_counted(
    db: Db, make_kind: KindMaker, key_type: str, given: str, canonical: str | None
):
    db.execute(f"CREATE TABLE notes (note_id {key_type} PRIMARY KEY, body text)".encode())
    kind = make_kind(notes())
    say(db, given)
    report = kind.enqueuer.enqueue()
    assert entries(db) == ([canonical] if canonical else [])
    assert (report.folded, report.unknown) == (1, 0 if canonical else 1)
    assert bool(report.warnings) == (canonical is None)


def test_a_text_key_over_1024_bytes_is_no_row_of_the_corpus(db: Db, make_kind: KindMaker):
    db.execute("CREATE TABLE notes (note_id text PRIMARY KEY, body text)")
    kind = make_kind(notes())
    db.execute("INSERT INTO notes VALUES (repeat('x', 1024), 'a'), (repeat('y', 1025), 'b')")
    assert drain(kind).indexed == 1
    assert status(kind) == {"fresh": 1}


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"table": "nowhere"}, "table 'nowhere' does not exist"),
        ({"key": "nothing"}, "key names column 'nothing', which notes does not have"),
        ({"key": "ctid"}, "key names column 'ctid', which notes does not have"),
        ({"text": Plain("nothing")}, "text names column 'nothing'"),
        ({"text": [Plain("body"), Html("")]}, "text names column ''"),
        ({"prefix": "{nothing} "}, "prefix names column 'nothing'"),
        ({"revision": "no_such_column"}, 'is refused by Postgres: column "no_such_column" does not exist'),
        ({"revision": "1,"}, "is refused by Postgres: syntax error"),
        ({"revision": " "}, "is refused by Postgres: syntax error"),
        ({"indexable": "body"}, "is refused by Postgres: argument of IS TRUE must be type boolean"),
        ({"indexable": "no_such_function(body)"}, "is refused by Postgres: function no_such_function"),
        ({"indexable": "count(*) > 1"}, "is refused by Postgres: column .* must appear in the GROUP BY"),
        ({"indexable": "'x'::integer > 1"}, "is refused by Postgres: invalid input syntax"),
        ({"indexable": "other.good"}, "is refused by Postgres: missing FROM-clause entry"),
        ({"fresh_at": "body"}, "is refused by Postgres: function"),
        ({"chunks": "semantic_outbox"}, "chunks names embed_assets.semantic_outbox, which exists"),
        ({"chunks": "claimed_waves"}, "chunks names embed_assets.claimed_waves, which exists"),
    ],
)
@pytest.mark.usefixtures("table")
def test_a_declaration_that_does_not_fit_its_table_is_refused_naming_what_is_wrong(
    postgres: Postgres, fields: dict[str, Any], says: str
):
    assert re.search(says, refused(postgres, notes(**fields)))


@pytest.mark.parametrize(
    ("columns", "says"),
    [
        ("note_id bigint NOT NULL, body text", "must be NOT NULL with a unique index"),
        ("note_id bigint UNIQUE, body text", "must be NOT NULL with a unique index"),
        ("note_id bigint NOT NULL, body text, PRIMARY KEY (note_id, body)", "must be NOT NULL with a unique index"),
        ("body text, note_id bigint, PRIMARY KEY (body, note_id)", "must be NOT NULL with a unique index"),
        ("note_id numeric PRIMARY KEY, body text", "is of type numeric; allowed are"),
        ("note_id timestamptz PRIMARY KEY, body text", "is of type timestamptz; allowed are"),
        ("note_id char(3) PRIMARY KEY, body text", "is of type bpchar; allowed are"),
        ("note_id bytea PRIMARY KEY, body text", "is of type bytea; allowed are"),
        ("note_id real PRIMARY KEY, body text", "is of type float4; allowed are"),
        ('note_id text COLLATE "blind" PRIMARY KEY, body text', "nondeterministic collation"),
    ],
)
def test_a_column_that_can_be_no_key_is_refused(db: Db, postgres: Postgres, columns: str, says: str):
    db.execute("CREATE COLLATION blind (locale = 'C')")
    db.execute(f"CREATE TABLE notes ({columns})".encode())
    # Only a server built with ICU makes such a collation; what its catalogue would say is enough here.
    db.execute("UPDATE pg_collation SET collisdeterministic = FALSE WHERE collname = 'blind'")
    assert says in refused(postgres, notes())


def test_a_partial_or_expression_index_makes_no_key(db: Db, postgres: Postgres):
    db.execute("CREATE TABLE notes (note_id text NOT NULL, body text)")
    db.execute("CREATE UNIQUE INDEX ON notes (note_id) WHERE body IS NOT NULL")
    db.execute("CREATE UNIQUE INDEX ON notes (lower(note_id))")
    assert "unique index" in refused(postgres, notes())
    db.execute("CREATE UNIQUE INDEX ON notes (note_id) INCLUDE (body)")
    assert bind(postgres, notes()).key_type == "text"


@pytest.mark.usefixtures("table")
def test_a_view_serves_as_a_source(db: Db, make_kind: KindMaker):
    db.execute("CREATE TABLE authors (id bigint PRIMARY KEY, name text)")
    db.execute(
        "CREATE VIEW written AS SELECT n.note_id, n.body, a.name FROM notes n JOIN authors a ON a.id = n.note_id"
    )
    db.execute("INSERT INTO notes (note_id, body) VALUES (1, 'text'); INSERT INTO authors VALUES (1, 'Ann')")
    kind = make_kind(notes(table="written", prefix="{name}: "))
    assert drain(kind).indexed == 1
    db.execute("UPDATE authors SET name = 'Bea'")
    assert drain(kind).indexed == 1
    assert kind.embedder.texts == ["Ann: text", "Bea: text"]  # type: ignore[attr-defined]


def test_a_partitioned_table_serves_as_a_source(db: Db, make_kind: KindMaker):
    db.execute("CREATE TABLE notes (note_id bigint PRIMARY KEY, body text) PARTITION BY HASH (note_id)")
    for part in range(2):
        db.execute(f"CREATE TABLE n{part} PARTITION OF notes FOR VALUES WITH (MODULUS 2, REMAINDER {part})".encode())
    db.execute("INSERT INTO notes SELECT i, 'text ' || i FROM generate_series(1, 5) AS i")
    assert drain(make_kind(notes())).indexed == 5


@pytest.mark.usefixtures("table")
def test_two_kinds_of_two_projects_cannot_write_one_chunk_table_with_other_keys(
    db: Db, postgres: Postgres, make_kind: KindMaker
):
    make_kind(notes(chunks="shared"))
    db.execute("CREATE TABLE letters (letter_id bigint PRIMARY KEY, body text)")
    assert "chunks names embed_assets.shared, which exists" in refused(
        postgres, TableCorpus(kind="letters", table="letters", key="letter_id", text=Plain("body"), chunks="shared")
    )
    db.execute("DROP TABLE notes; CREATE TABLE notes (note_id uuid PRIMARY KEY, body text)")
    with pytest.raises(DeclarationError, match="no chunk table for the key 'note_id'"):
        bind(postgres, notes(chunks="shared"))


def test_quoted_names_and_percent_signs_and_braces_are_only_names(db: Db, make_kind: KindMaker, embedder: HashEmbedder):
    db.execute("""
        CREATE SCHEMA "Odd %s {x}";
        CREATE TABLE "Odd %s {x}"."weird Name" (
            "the ""Key"" {k}" text PRIMARY KEY, "50% {off}" text, "Ünïcode text" text, title text
        );
        INSERT INTO "Odd %s {x}"."weird Name" VALUES ('%s', 'half', '{0}', '100% {a}'), ('{}', 'x', 'y', 'no')
    """)
    kind = make_kind(
        notes(
            table='"Odd %s {x}"."weird Name"',
            key='the "Key" {k}',
            text=[Plain("50% {off}"), Plain("Ünïcode text")],
            prefix="{title}: ",
            revision="title || '%s {x} %% {{y}}' || (5 % 3)",
            indexable="title LIKE '%{a}%' AND title <> '{b}'",
        )
    )
    assert drain(kind).indexed == 1
    assert embedder.texts == ["100% {a}: half\n\n{0}"]
    assert rows(db, "SELECT source_id, revision FROM embed_assets.semantic_stamps") == [
        ("%s", "100% {a}%s {x} %% {{y}}2")
    ]
    (hit,) = search(kind.postgres, kind.bound, asking(kind, embedder), "anything %s {x}").hits
    assert (hit.source_id, hit.fields) == ("%s", {"title": "100% {a}"})
    assert [hit.source_id for hit in search(kind.postgres, kind.bound, {}, "half").hits] == ["%s"]
    db.execute("""DELETE FROM "Odd %s {x}"."weird Name" WHERE title LIKE '100%'""")
    assert drain(kind).gone == 1
    assert status(kind) == {"excluded": 1}


OURS = """
source_id kind status revision rank body text_hash chunk_index model_id embedding heading_path indexable bytes texts
fields given key self source distance score forced requested_at wave_id p o e s c old e_key
""".split()  # noqa: SIM905  # a line a name would hide the test


@pytest.mark.parametrize("key", ["source_id", "kind", "key", "distance", "score", "c"])
def test_columns_that_are_named_like_ours_confuse_nothing(
    db: Db, make_kind: KindMaker, embedder: HashEmbedder, key: str
):
    names = [name for name in OURS if name != key]
    columns = sql.SQL(", ").join(sql.SQL("{} text DEFAULT {}").format(sql.Identifier(n), n) for n in names)
    db.execute(sql.SQL("CREATE TABLE notes ({} bigint PRIMARY KEY, {})").format(sql.Identifier(key), columns))
    insert = sql.SQL("INSERT INTO notes ({}) VALUES (1), (2)").format(sql.Identifier(key))
    db.execute(insert)
    kind = make_kind(
        notes(
            key=key,
            text=[Plain("body"), Plain("embedding")],
            prefix="{rank}/{status}/{fields}: ",
            revision="revision || rank || given",
            indexable="indexable = 'indexable' AND forced = 'forced' AND self.wave_id = 'wave_id'",
        )
    )
    assert drain(kind).indexed == 2
    assert embedder.texts == ["rank/status/fields: body\n\nembedding"]
    assert stamps(db, "source_id, revision") == [("1", "revisionrankgiven"), ("2", "revisionrankgiven")]
    assert len(search(kind.postgres, kind.bound, asking(kind, embedder), "x").hits) == 2
    assert len(search(kind.postgres, kind.bound, {}, "body").hits) == 2
    db.execute("UPDATE notes SET indexable = 'no'")
    say(db, 1, 2)
    assert drain(kind).removed == 2
    assert status(kind) == {"excluded": 2}


@pytest.mark.ids("A-03", "A-05", "Q21")
@pytest.mark.usefixtures("table")
def test_without_a_revision_the_columns_that_are_read_decide_and_no_other(db: Db, make_kind: KindMaker):
    kind = make_kind(notes(prefix="{title}. "))
    db.execute("INSERT INTO notes (note_id, body, title) VALUES (1, 'a', 'b')")
    assert drain(kind).indexed == 1
    db.execute("UPDATE notes SET at = now(), good = TRUE")
    assert drain(kind).claimed == 0
    for change in ("title = 'c'", "body = NULL", "body = '', title = NULL", "body = NULL, title = ''"):
        db.execute(f"UPDATE notes SET {change}".encode())
        assert drain(kind).indexed == 1, change
        assert drain(kind).claimed == 0, change


def test_a_role_from_which_row_security_hides_rows_is_told_so(db: Db, database_url: str):
    with as_role(db, database_url, "GRANT SELECT ON notes TO {role}; GRANT USAGE ON SCHEMA embed_assets TO {role}") as (
        postgres,
        _,
    ):
        db.execute("ALTER TABLE notes ENABLE ROW LEVEL SECURITY; CREATE POLICY own ON notes USING (FALSE)")
        with pytest.raises(ConfigurationError, match="Row security on notes hides rows from this database role"):
            bind(postgres, notes())
        db.execute("ALTER TABLE notes DISABLE ROW LEVEL SECURITY")
        assert bind(postgres, notes()).kind == "notes"


def test_row_security_that_is_switched_on_later_raises_instead_of_clearing(
    db: Db, database_url: str, embedder: HashEmbedder
):
    grants = "GRANT SELECT ON notes TO {role}; GRANT pg_read_all_data, pg_write_all_data TO {role}"
    grants += "; ALTER SCHEMA embed_assets OWNER TO {role}"
    with as_role(db, database_url, grants) as (_, url):
        kind = open_kind(Settings(), notes(), url=url, embedder=embedder)
        db.execute("INSERT INTO notes VALUES (1, 'text')")
        assert drain(kind).indexed == 1
        db.execute("ALTER TABLE notes ENABLE ROW LEVEL SECURITY; CREATE POLICY own ON notes USING (FALSE)")
        with pytest.raises(psycopg.errors.InsufficientPrivilege, match="row-level security"):
            drain(kind)
        assert stamps(db) == ["1"]
        kind.close()


@pytest.mark.parametrize(
    ("grants", "says"),
    [
        ("REVOKE ALL ON notes FROM {role}", "may not read notes: permission denied for table notes"),
        ("REVOKE ALL ON SCHEMA hidden FROM {role}", "may not read hidden.notes: permission denied for schema hidden"),
    ],
)
def test_a_role_that_may_not_read_the_table_is_told_which_right_it_lacks(
    db: Db, database_url: str, grants: str, says: str
):
    with as_role(db, database_url, "CREATE SCHEMA hidden; " + grants) as (postgres, _):
        db.execute("CREATE TABLE hidden.notes (note_id bigint PRIMARY KEY, body text)")
        declared = notes(table="hidden.notes") if "hidden" in says else notes()
        with pytest.raises(ConfigurationError, match=says):
            bind(postgres, declared)


def test_a_role_that_may_not_make_tables_is_told_which_role_may(db: Db, database_url: str):
    with as_role(db, database_url, "GRANT SELECT ON notes TO {role}; GRANT USAGE ON SCHEMA embed_assets TO {role}") as (
        postgres,
        url,
    ):
        bound = bind(postgres, notes())
        for make in (lambda: make_tables(postgres, bound), lambda: make_model(postgres, bound, "m", 8)):
            with pytest.raises(ConfigurationError, match=r"may not make the tables of a .*embed-assets migrate"):
                make()
        with pytest.raises(ConfigurationError, match="The database role may not migrate: permission denied"):
            open_kind(Settings(), notes(), url=url, embedder=HashEmbedder())


@pytest.mark.usefixtures("table")
def test_the_first_model_is_active_at_once_and_a_later_one_is_only_the_target(db: Db, make_kind: KindMaker):
    first = make_kind(notes())
    models = "SELECT active_model_id, target_model_id, previous_model_id FROM embed_assets.corpora WHERE kind = 'notes'"
    assert value(db, models) == (first.model_id, first.model_id, None)
    second = make_kind(notes(), embedder=HashEmbedder(16))
    assert second.model_id != first.model_id
    assert value(db, models) == (first.model_id, second.model_id, None)


@pytest.mark.usefixtures("table")
def test_a_start_with_what_is_known_makes_nothing_new(db: Db, make_kind: KindMaker):
    first = make_kind(notes())
    before = rows(db, "SELECT relname FROM pg_class ORDER BY 1"), first.model_id
    assert (rows(db, "SELECT relname FROM pg_class ORDER BY 1"), make_kind(notes()).model_id) == before
    assert value(db, "SELECT last_value FROM embed_assets.embedding_models_id_seq") == 1


@pytest.mark.ids("E04")
@pytest.mark.usefixtures("table")
def test_a_known_identity_with_another_width_is_refused_before_anything_is_made(
    db: Db, postgres: Postgres, make_kind: KindMaker
):
    kind = make_kind(notes())
    before = rows(db, "SELECT relname FROM pg_class ORDER BY 1")
    with pytest.raises(ConfigurationError, match=r"was 8 wide and now answers with 9 dimensions\. Set EMBED_MODEL"):
        make_model(postgres, kind.bound, kind.identity, 9)
    assert rows(db, "SELECT relname FROM pg_class ORDER BY 1") == before
    assert value(db, "SELECT dimensions FROM embed_assets.embedding_models") == 8


class as_role:
    """A login role with the given rights and nothing more: (its Postgres, its URL). The table `notes` exists."""

    def __init__(self, db: Db, database_url: str, grants: str) -> None:
        self._db, self._role = db, f"role_{uuid4().hex[:12]}"
        self._url = make_conninfo(database_url, user=self._role, password="secret")
        db.execute("CREATE TABLE notes (note_id bigint PRIMARY KEY, body text)")
        db.execute(f"CREATE ROLE {self._role} LOGIN PASSWORD 'secret'".encode())
        db.execute(grants.replace("{role}", self._role).encode())
        self._postgres = Postgres(self._url)

    def __enter__(self) -> tuple[Postgres, str]:
        return self._postgres, self._url

    def __exit__(self, *_: object) -> None:
        self._postgres.close()
        self._db.execute(f"REASSIGN OWNED BY {self._role} TO CURRENT_USER; DROP OWNED BY {self._role}".encode())
        self._db.execute(f"DROP ROLE {self._role}".encode())


def test_who_makes_a_partition_waits_for_whoever_is_making_one(kind: Kind, db: Db, database_url: str) -> None:
    made = "SELECT count(*) FROM pg_class WHERE relname LIKE 'job_semantic_chunks_m%' AND relkind = 'r'"
    with connect(database_url) as other:
        other.execute("BEGIN")
        other.execute("SELECT pg_advisory_xact_lock(1701667428, 0)")
        with background(lambda: make_model(kind.postgres, kind.bound, "another", 8)) as making:
            until_true(lambda: waits_for_advisory(db, 0), "nobody waits")
            assert value(db, made) == 1
            other.execute("COMMIT")
            assert making.result(timeout=30) == 2
    assert value(db, made) == 2
