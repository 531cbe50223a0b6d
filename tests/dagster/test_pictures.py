"""What the page of the chunk asset shows: pictures that browsers can open, legends in words, tables."""

from __future__ import annotations

import base64
import re
import struct
import zlib
from typing import Any

import numpy as np
from dagster import ExecuteInProcessResult

from embed_assets.corpus import Plain, TableCorpus
from embed_assets.defs import pictures
from embed_assets.defs.build import build_definitions
from embed_assets.errors import InputRejected
from embed_assets.resources import portrait
from embed_assets.resources.portrait import flat
from tests.dagster.project import QUIET, Project, numbers


def decoded(markdown: str) -> np.ndarray[Any, Any]:
    """The pixels of the picture in a markdown text, read as PNG's specification says."""
    match = re.match(r"!\[[a-z ]+\]\(data:image/png;base64,([A-Za-z0-9+/=]+)\)\n\n\S", markdown)
    assert match, markdown[:80]
    data = base64.b64decode(match[1])
    assert data.startswith(b"\x89PNG\r\n\x1a\n")
    width, height = struct.unpack(">II", data[16:24])
    place, body = 8, b""
    while place < len(data):
        (size,) = struct.unpack(">I", data[place : place + 4])
        name, part = data[place + 4 : place + 8], data[place + 8 : place + 8 + size]
        assert struct.unpack(">I", data[place + 8 + size : place + 12 + size])[0] == zlib.crc32(name + part)
        body += part if name == b"IDAT" else b""
        place += 12 + size
    rows = np.frombuffer(zlib.decompress(body), dtype=np.uint8).reshape(height, 1 + 3 * width)
    return rows[:, 1:].reshape(height, width, 3)


def test_the_bar_is_divided_as_the_rows_are() -> None:
    shown = pictures.coverage({"fresh": 3, "dead": 1, "due": 0})
    bar = decoded(shown)[0]
    assert [tuple(bar[place]) for place in (0, 359, 361, 479)] == [(76, 175, 80)] * 2 + [(229, 57, 53)] * 2
    assert shown.endswith("🟩 fresh 3 · 🟥 dead 1")
    assert pictures.coverage({"fresh": 0}) == "no row"


def test_latencies_are_counted_by_steps_and_their_quantiles_told() -> None:
    shown = pictures.latency([2.0] * 19 + [50_000.0, 0.001, 10**7])
    assert decoded(shown).shape == (96, 480, 3)
    assert "median 2.0 s" in shown
    assert "22 rows" in shown


def test_alike_vectors_stand_near_each_other_and_groups_are_coloured() -> None:
    base = np.eye(8)
    near = [base[0] + 0.01 * base[n] for n in range(2, 6)]
    far = [base[1] + 0.01 * base[n] for n in range(2, 6)]
    points = flat([*near, *far])
    gap = np.linalg.norm(points[:4].mean(axis=0) - points[4:].mean(axis=0))
    assert gap > 0.5
    assert points.min() == 0
    assert points.max() == 1
    shown = pictures.vectors(points, ["Acme](javascript:x)"] * 4 + ["Byte"] * 4)
    colours = {tuple(pixel) for pixel in decoded(shown).reshape(-1, 3)}
    assert colours == {(250, 250, 250), (229, 57, 53), (33, 150, 243)}
    assert "🟥 Acmejavascriptx · 🟦 Byte" in shown
    assert len(flat([base[0]])) == 0


def test_each_value_equal_is_laid_flat_too() -> None:
    assert flat([np.ones(4)] * 5).tolist() == [[0.0, 0.0]] * 5


def with_titles(project: Project) -> ExecuteInProcessResult:
    project.db.execute("ALTER TABLE posts ADD title text DEFAULT 'One'")
    corpus = TableCorpus(
        kind="posts", table="posts", key="id", text=Plain("body"), indexable="NOT hidden", prefix="passage: {title}. "
    )
    job = build_definitions([corpus], settings=project.settings(batch_size=10), embedder=project.embedder)
    return job.resolve_job_def("posts_drain").execute_in_process(
        instance=project.instance, tags={"embed_assets/scan": "now"}, run_config=QUIET
    )


def test_a_drain_shows_coverage_latency_vectors_waves_and_failures(project: Project, monkeypatch: Any) -> None:
    monkeypatch.setattr(portrait, "PATIENCE_MILLISECONDS", 60_000)
    project.put("one", "two", "three", "four", "bad")
    project.embedder.reject = lambda text: InputRejected("no") if "bad" in text else None
    shown = numbers(with_titles(project), "semantic_chunks")
    assert "🟩 fresh 4 · 🟥 dead 1" in shown["picture_of_coverage"]
    assert "4 rows" in shown["picture_of_latency"]
    assert shown["picture_of_vectors"].endswith("🟥 One · ⬛ others")
    waves = [record.data for record in shown["table_of_waves"].records]
    assert sum(wave["indexed"] for wave in waves) == 4
    [failed] = [record.data for record in shown["table_of_failures"].records]
    assert (failed["rows"], "change the row" in failed["what to do"]) == (1, True)
    assert not re.search(r"\bone\b|\bbad\b", str(shown))


def test_what_takes_too_long_is_not_shown_and_holds_no_drain_up(project: Project, monkeypatch: Any) -> None:
    monkeypatch.setattr(portrait, "PATIENCE_MILLISECONDS", 1)
    project.db.execute(
        "CREATE FUNCTION slow() RETURNS boolean LANGUAGE sql AS 'SELECT pg_sleep(0.05) IS NOT NULL'; "
        "ALTER TABLE posts RENAME TO posts_; "
        "CREATE VIEW posts AS SELECT id, body, hidden OR NOT slow() AS hidden FROM posts_"
    )
    project.put("one")
    result = project.drain()
    assert result.success
    assert "picture_of_coverage" not in numbers(result, "semantic_chunks")
    assert project.fresh == 1
