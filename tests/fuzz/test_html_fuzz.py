"""Whatever stands in a column: its visible words are in its chunks, in order, within limits of size, time and memory.

FUZZ sets how many texts are tried (150); `make fuzz` tries 10,000.
"""

from __future__ import annotations

import os
import re
import resource
import time
from contextlib import closing
from typing import Any

import pytest
from fuzz.hostile import Hostile, hostile
from postgres.support import Db, chunks, drain, entry, rows, stamps, status
from psycopg import sql

from embed_assets.corpus import EscapedHtml, Html, Markdown, Plain, TableCorpus
from embed_assets.embedding import HttpEmbedder
from embed_assets.fake_server import FakeServer
from embed_assets.models import SourceRow

NUMBER = int(os.environ.get("FUZZ", "150"))
SEED = int(os.environ.get("FUZZ_SEED", "0"))
MEGABYTES = 1024  # ru_maxrss counts kB
pytestmark = pytest.mark.timeout(max(400, NUMBER // 5))


def bodies(given: Hostile) -> list[str]:
    """The chunks of a row that holds it, as the drain would make them."""
    corpus = TableCorpus(kind="fuzz", table="fuzz", key="id", text=given.kind("body"))
    row = SourceRow("1", False, True, True, False, "r", texts=[given.value], fields={})
    return [chunk.body for chunk in corpus.plan(row).chunks]


def words(text: str) -> list[str]:
    return re.findall(r"w\d+x", text)


@pytest.mark.ids("T01", "T02", "T14")
def test_hostile_texts_keep_their_words_and_the_limits_of_size_time_and_memory():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    paces = []
    for seed in range(SEED, SEED + NUMBER):
        given = hostile(seed)
        began = time.process_time()
        found = bodies(given)
        paces.append(((time.process_time() - began) / (len(given.value) + 2000), seed))
        text = "\n".join(found)
        assert words(text) == given.words, f"seed {seed}"
        assert max(map(len, found)) <= 2000
        assert "\0" not in text
        text.encode()
    paces.sort()
    usual, (slowest, seed) = paces[len(paces) // 2][0], paces[-1]
    assert slowest < 100 * usual, f"seed {seed} takes {slowest / usual:.0f} times the usual time a character"
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 300 * MEGABYTES


@pytest.mark.ids("T01", "T04", "T14")
def test_hostile_rows_end_fresh_or_visibly_failed_and_their_neighbours_fresh(db: Db, make_kind: Any) -> None:
    db.execute("CREATE TABLE texts (id bigint PRIMARY KEY, plain text, html text, escaped text, markdown text)")
    columns = {Plain: "plain", Html: "html", EscapedHtml: "escaped", Markdown: "markdown"}
    number = max(10, NUMBER // 25)
    given = {seed: hostile(seed) for seed in range(SEED, SEED + number)}
    for seed, one in given.items():
        insert = sql.SQL("INSERT INTO texts (id, {}) VALUES (%s, %s)").format(sql.Identifier(columns[one.kind]))
        # Neither can be in a text of Postgres.
        db.execute(insert, (2 * seed, one.value.encode("utf-8", "replace").decode().replace("\0", "")))
        db.execute("INSERT INTO texts (id, plain) VALUES (%s, %s)", (2 * seed + 1, f"neighbour {seed}"))
    text = [kind(column) for kind, column in columns.items()]
    corpus = TableCorpus(kind="texts", table="texts", key="id", text=text)
    with FakeServer() as server, closing(_embedder(server)) as embedder:
        kind = make_kind(corpus, embedder=embedder, batch_size=16)
        drain(kind)
    states = status(kind)
    assert states.pop("fresh") + states.pop("dead", 0) == 2 * number
    assert states == {}
    stamped = set(stamps(db))
    assert max(rows(db, "SELECT length(body) FROM embed_assets.texts_semantic_chunks")) <= 2000
    for seed, one in given.items():
        assert chunks(db, 2 * seed + 1, table="texts_semantic_chunks") == [f"neighbour {seed}"]
        if str(2 * seed) in stamped:
            assert words("\n".join(chunks(db, 2 * seed, table="texts_semantic_chunks"))) == one.words
        else:
            assert entry(db, 2 * seed, "error_code")


def _embedder(server: FakeServer) -> HttpEmbedder:
    return HttpEmbedder("tei", server.url, identity="stub-v1", model="stub/model", dimensions=8, retry_base=0.01)
