"""What a line of a JSON Lines file must be, and how its fields become the values of columns.

Pure: bytes in, values for COPY out, and for what cannot be loaded a ValueError that says why. What does
not belong here: the table (`load_target.py`) and whatever Postgres judges, such as ranges.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import BinaryIO

from embed_assets.text import well_formed

BATCH_ROWS = 500
BATCH_BYTES = 4_000_000
MAX_LINE_BYTES = 64_000_000
MAX_ID_BYTES = 1024

ABSENT = object()
"""A field that the line does not have, as opposed to one that is null."""

TEXT_TYPES = ("text", "character varying", "character", "citext")

_ISO = re.compile(r"\d{4}-\d\d-\d\d([T ]\d\d:\d\d(:\d\d(\.\d+)?)? ?(Z|[+-]\d\d(:?\d\d)?)?)?", re.A | re.I)

Line = tuple[int, bytes | None]
"""A line and its number, from 1; None for one longer than MAX_LINE_BYTES."""


@dataclass(frozen=True)
class Column:
    """A column that can be written, as query `load.columns` describes it."""

    name: str
    type: str
    is_required: bool
    has_default: bool
    is_locked: bool
    is_serial: bool
    is_key: bool

    @property
    def base(self) -> str:
        """The type without length and time zone."""
        return self.type.partition("(")[0].partition(" with")[0]


@dataclass(frozen=True)
class Fields:
    """The columns a file may write and where each comes from.

    `null_when_absent`: columns that a line without their field sets to NULL. `link`: the column whose
    value names another row and is resolved later.
    """

    columns: Sequence[Column]
    mapping: Mapping[str, str]
    constants: Mapping[str, object]
    null_when_absent: frozenset[str] = frozenset()
    link: str | None = None

    def values(self, raw: bytes) -> tuple[str, list[object]]:
        """A digit per column, 1 where the line gave it, and the values. Raises ValueError: the reason."""
        record = parse(raw)
        values = [self._value(record, column) for column in self.columns]
        given = "".join("0" if value is ABSENT else "1" for value in values)
        return given, [None if value is ABSENT else value for value in values]

    def _value(self, record: Mapping[str, object], column: Column) -> object:
        if column.name in self.constants:
            return self.constants[column.name]
        value = pick(record, self.mapping.get(column.name, column.name))
        if column.name == "external_id":
            return external_id(value)
        if value is ABSENT and column.name in self.null_when_absent:
            value = None
        if column.is_required and (value is None or value is ABSENT):
            if not column.has_default:
                raise ValueError(f"{column.name} is missing, and the table requires it")
            return ABSENT
        return value if value is ABSENT else encoded(column, value, is_link=column.name == self.link)


def batches(file: BinaryIO) -> Iterator[list[Line]]:
    """Lines, bounded by number and by bytes: memory does not grow with the file."""
    batch: list[Line] = []
    size = 0
    for number, raw in _lines(file):
        batch.append((number, raw))
        size += len(raw or b"")
        if len(batch) >= BATCH_ROWS or size >= BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _lines(file: BinaryIO) -> Iterator[Line]:
    number = 0
    while raw := file.readline(MAX_LINE_BYTES + 1):
        number += 1
        is_whole = len(raw) <= MAX_LINE_BYTES
        while len(raw) > MAX_LINE_BYTES and not raw.endswith(b"\n"):
            raw = file.readline(MAX_LINE_BYTES + 1)
        yield number, (raw.removeprefix(b"\xef\xbb\xbf") if number == 1 else raw) if is_whole else None


def parse(raw: bytes) -> dict[str, object]:
    """The object that a line holds."""
    try:
        record = json.loads(raw.decode(), parse_constant=_no_number)
    except UnicodeDecodeError:
        raise ValueError("not UTF-8") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not JSON: {getattr(error, 'msg', error)}") from None
    if not isinstance(record, dict):
        raise ValueError("not a JSON object")
    return record


def _no_number(name: str) -> None:
    raise ValueError(f"{name} is no number")


def pick(record: Mapping[str, object], path: str) -> object:
    """The field of that name or, where dots descend, of that path; ABSENT when there is none."""
    if path in record:
        return record[path]
    value: object = record
    for name in path.split("."):
        if not isinstance(value, dict) or name not in value:
            return ABSENT
        value = value[name]
    return value


def external_id(value: object) -> str:
    """Text or a whole number, as text."""
    if isinstance(value, bool) or not isinstance(value, (str, int)) or not str(value).strip():
        raise ValueError("no external_id")
    text = well_formed(str(value))
    if len(text.encode()) > MAX_ID_BYTES:
        raise ValueError(f"external_id is longer than {MAX_ID_BYTES} bytes")
    return text


def encoded(column: Column, value: object, *, is_link: bool = False) -> object:
    """The value as COPY takes it. "yesterday" is no timestamp: it would mean another one in each load."""
    if value is None:
        return None
    if column.base in ("json", "jsonb"):
        return json.dumps(_well_formed(value), ensure_ascii=False)
    if column.base in ("timestamp", "date") and not (isinstance(value, str) and _ISO.fullmatch(value.strip())):
        raise ValueError(f"{column.name} is no ISO 8601 timestamp")
    if isinstance(value, list) and column.type.endswith("[]"):
        return _well_formed(value)
    if isinstance(value, (dict, list)) or (isinstance(value, bool) and (is_link or column.base in TEXT_TYPES)):
        raise ValueError(f"{column.name} is a JSON {_json_name(value)}, not {column.type}")
    return well_formed(value if isinstance(value, str) else json.dumps(value))


def _json_name(value: object) -> str:
    return {dict: "object", list: "array", bool: "boolean"}[type(value)]


def _well_formed(value: object) -> object:
    if isinstance(value, str):
        return well_formed(value)
    if isinstance(value, dict):
        return {well_formed(name): _well_formed(part) for name, part in value.items()}
    return [_well_formed(part) for part in value] if isinstance(value, list) else value
