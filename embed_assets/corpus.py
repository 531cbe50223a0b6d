"""Declarations: which table, which text, which rows belong in search. And the pure step from a row to its chunks.

What does not belong here: talking to the database (`resources/declaration.py` binds a declaration to it).
SQL fragments in a declaration are the project's own code, never data.
"""

from __future__ import annotations

import hashlib
import html
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from string import Formatter
from typing import Any

from embed_assets.errors import DeclarationError, TooLarge
from embed_assets.models import Chunk, Plan, SourceRow
from embed_assets.text import (
    HeadingPaths,
    Section,
    cut,
    html_to_sections,
    joined,
    markdown_to_sections,
    normalise,
    text_hash,
    under,
)

TEXT_VERSION = "chunked-v1"
MAX_ROW_BYTES = 8_000_000
FIELD_CHARACTERS = 200
SMALLEST_CHUNK = 100
RESERVED = {"chunk_index", "model_id", "text_hash", "body", "heading_path", "embedding"}
_WORD = re.compile(r"[a-z][a-z0-9_]{0,39}\Z")


@dataclass(frozen=True)
class Plain:
    """A column that holds plain text. `heading`: a line put above it, unless the column is empty."""

    column: str
    heading: str | None = None

    def sections(self, value: str | None) -> list[Section]:
        """The column's text by headings; no section without text. NULL is empty."""
        found = self._read(value) if value else []
        return under(self.heading, found) if self.heading else found

    def _read(self, value: str) -> list[Section]:
        text = normalise(value)
        return [Section((), text)] if text else []


@dataclass(frozen=True)
class Html(Plain):
    """A column that holds HTML."""

    def _read(self, value: str) -> list[Section]:
        return html_to_sections(value)


@dataclass(frozen=True)
class EscapedHtml(Plain):
    """A column that holds HTML whose tags are written as entities (`&lt;p&gt;`), as Greenhouse gives it."""

    def _read(self, value: str) -> list[Section]:
        return html_to_sections(html.unescape(value))


@dataclass(frozen=True)
class Markdown(Plain):
    """A column that holds GitHub-flavoured Markdown."""

    def _read(self, value: str) -> list[Section]:
        return markdown_to_sections(value)


@dataclass(frozen=True)
class Similar:
    """Precomputed neighbours: the `k` nearest rows for which `where` holds (SQL over `self` and `other`)."""

    k: int = 20
    where: str = "TRUE"


@dataclass(frozen=True)
class Hooks:
    """What of yours happens when rows are written or cleared; each gets their source ids, sorted.

    `after_write`, `after_clear` (cursor, ids): in the write transaction, before its commit. A statement that the
    database refuses counts as the row's failure, found by halving; any other error is a defect and nothing is written.
    `on_succeeded` (ids): after the commit, for rows that are done. What it raises is logged and changes nothing; it is
    not called when the process dies in between.
    """

    after_write: Callable[[Any, Sequence[str]], None] | None = None
    after_clear: Callable[[Any, Sequence[str]], None] | None = None
    on_succeeded: Callable[[Sequence[str]], None] | None = None


@dataclass(frozen=True)
class TableCorpus:
    """One table of yours and its rules. Nothing in it is ever altered.

    `text`: a column or several (`Plain`, `Html`, `EscapedHtml`, `Markdown`), each with a `heading` if you like; a view
    serves for joins. `prefix`: put before each chunk that is
    sent, with `{column}` fields. `revision`: an SQL expression that changes when the content does; without it, the
    md5 of the columns read here. `indexable`: an SQL condition, whether the row belongs in search now. `order`:
    `freshest` first by `fresh_at`, or `oldest` request first. `scope`: an SQL expression that says whose the row is (a
    tenant): no scope takes more than half of a wave while others wait. `legacy_embedding`: a column, where the table
    has one, in which a vector was kept before: set to NULL when a row is cleared, never written otherwise, and the
    only thing of yours that is ever touched. `hooks`: what of yours happens with rows that are done. Raises
    DeclarationError, naming the field at fault.
    """

    kind: str
    table: str
    key: str
    text: Plain | Sequence[Plain]
    chunks: str | None = None
    prefix: str = ""
    revision: str | None = None
    fresh_at: str | None = None
    order: str = "freshest"
    scope: str | None = None
    indexable: str = "TRUE"
    similar: Similar | None = None
    max_chars: int = 2000
    overlap: int = 0
    legacy_embedding: str | None = None
    hooks: Hooks = Hooks()

    def __post_init__(self) -> None:
        self._check_names()
        if self.order not in ("freshest", "oldest"):
            raise self._wrong("order", f"'{self.order}' is neither 'freshest' nor 'oldest'")
        if not self.columns:
            raise self._wrong("text", "names no column")
        if any(column.heading is not None and not column.heading.strip() for column in self.columns):
            raise self._wrong("text", "has a blank heading; leave it out where a column needs none")
        if not 100 <= self.max_chars <= 8000 or not 0 <= self.overlap < self.max_chars:
            raise self._wrong("max_chars", "must be 100 to 8000 code points, and overlap below it")
        if self.similar and not (1 <= self.similar.k <= 200 and self.similar.where.strip()):
            raise self._wrong("similar", "needs a k of 1 to 200 and a condition; write TRUE when it lists any row")
        if not self.indexable.strip():
            raise self._wrong("indexable", "is empty; write TRUE when every row belongs in search")

    def _check_names(self) -> None:
        if not _WORD.match(self.kind):
            raise self._wrong("kind", "must be a lower-case word of at most 40 letters, digits and _")
        if not _WORD.match(self.chunk_table):
            raise self._wrong("chunks", f"'{self.chunk_table}' is no lower-case table name")
        if self.chunk_table.startswith("similar_"):
            raise self._wrong("chunks", f"'{self.chunk_table}' is the name of a table of neighbours")
        if not self.table or not self.key:
            raise self._wrong("table and key", "must both be given")
        if self.key in RESERVED:
            raise self._wrong("key", f"'{self.key}' is a column of every chunk table; give a view another name")
        if "%" in self.key:
            raise self._wrong("key", f"'{self.key}' holds a percent sign; give a view another name")
        try:
            self.prefix_fields  # noqa: B018  # parsed here so that a broken template is refused at load
        except ValueError as error:
            raise self._wrong("prefix", str(error)) from None

    def _wrong(self, field: str, what: str) -> DeclarationError:
        return DeclarationError(f"Corpus '{self.kind}': {field} {what}. Correct the declaration.")

    @property
    def chunk_table(self) -> str:
        return self.chunks or f"{self.kind}_semantic_chunks"

    @property
    def columns(self) -> list[Plain]:
        return [self.text] if isinstance(self.text, Plain) else list(self.text)

    @property
    def prefix_fields(self) -> list[str]:
        """The columns the prefix names, each once, in order."""
        names = []
        for _, name, spec, conversion in Formatter().parse(self.prefix):
            if name is None:
                continue
            if not name.isidentifier() or spec or conversion:
                raise ValueError(f"holds '{{{name}}}', which is no plain {{column}}")
            names.append(name)
        return list(dict.fromkeys(names))

    def identity_of(self, embedder_identity: str) -> str:
        """The embedder identity: whatever changes a vector changes this string, hence re-embeds."""
        columns = [[type(c).__name__, c.column, c.heading] for c in self.columns]
        rules = json.dumps([columns, self.prefix, self.max_chars, self.overlap])
        return f"{embedder_identity}-{TEXT_VERSION}-{hashlib.sha256(rules.encode()).hexdigest()[:8]}"

    def plan(self, row: SourceRow, *, max_chars: int | None = None) -> Plan:
        """What is to be done with a loaded row. Raises TooLarge over 2 M characters or 32,768 chunks.

        `max_chars` makes the chunks smaller than declared, for an endpoint that found one too long.
        """
        if not row.present:
            return Plan(row.source_id, "gone", None)
        if not row.indexable:
            return Plan(row.source_id, "clear", row.revision)
        if row.stamped and not row.forced:
            return Plan(row.source_id, "superseded", row.revision)
        if row.oversize:
            raise TooLarge(f"the row's text is over {MAX_ROW_BYTES:,} bytes; split the row or exclude it")
        return Plan(row.source_id, "embed", row.revision, self._chunks(row, max_chars or self.max_chars))

    def _chunks(self, row: SourceRow, max_chars: int) -> tuple[Chunk, ...]:
        prefix = self.prefix.format_map(_Fields(row.fields or {}))
        texts = zip(self.columns, row.texts or (), strict=True)
        sections = [section for column, value in texts for section in column.sections(value)]
        paths = HeadingPaths(sections)
        room = max(SMALLEST_CHUNK, max_chars - len(prefix))  # the prefix is part of what is sent
        overlap = min(self.overlap, room // 2)
        return tuple(
            Chunk(part, prefix + part, text_hash(prefix + part), paths.at(start))
            for start, part in cut(joined(sections), max_chars=room, overlap=overlap)
        )


class _Fields(dict[str, "str | None"]):
    """Prefix values: one line each, at most 200 characters, so that a prefix never crowds out its chunk."""

    def __init__(self, values: Mapping[str, str | None]) -> None:
        super().__init__({k: " ".join(normalise(v or "").split())[:FIELD_CHARACTERS] for k, v in values.items()})


class Registry:
    """The kinds of one project, sorted. Refuses duplicate kinds and two corpora on one chunk table."""

    def __init__(self, corpora: Sequence[TableCorpus]) -> None:
        self._corpora: dict[str, TableCorpus] = {}
        tables: dict[str, str] = {}
        for corpus in corpora:
            if corpus.kind in self._corpora:
                raise DeclarationError(f"Corpus '{corpus.kind}' is declared twice. Give each kind one declaration.")
            if other := tables.get(corpus.chunk_table):
                raise DeclarationError(
                    f"Corpora '{other}' and '{corpus.kind}' both write {corpus.chunk_table}. "
                    "Give one of them another chunks table."
                )
            self._corpora[corpus.kind] = corpus
            tables[corpus.chunk_table] = corpus.kind

    @property
    def kinds(self) -> list[str]:
        return sorted(self._corpora)

    def __getitem__(self, kind: str) -> TableCorpus:
        if kind not in self._corpora:
            known = ", ".join(self.kinds) or "none"
            raise DeclarationError(f"Unknown kind '{kind}'. Declared are: {known}. Add it to EMBED_CORPORA.")
        return self._corpora[kind]
