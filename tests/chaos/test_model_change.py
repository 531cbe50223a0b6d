"""A model change while everybody works: rows are edited, inserted and closed, searches run, and two drains keep both
models fresh. And the same with the process that builds or switches killed by SIGKILL.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from fakes import HashEmbedder
from postgres.conftest import KindMaker
from postgres.support import Db, add_job, add_jobs, connect, drain, rows, status, until_true, value

from embed_assets import pipeline
from embed_assets.embedding import LocalEmbedder
from embed_assets.resources.assembly import Kind
from embed_assets.search import search
from embed_assets.stop import Stop

K = 10
WORDS = ["nurse", "welder", "engineer", "teacher", "driver", "cook", "lawyer", "pilot", "baker", "tailor"]


class Searcher:
    """Asks on and on; every answer must be whole and of one vector space."""

    def __init__(self, kind: Kind, least: int) -> None:
        self._kind, self._least = kind, least
        self._embedders = {model.identity: model.embedder for model in kind.models}
        self.answers = 0

    def run(self, end: threading.Event) -> None:
        while not end.is_set():
            word = WORDS[self.answers % len(WORDS)]
            answer = search(self._kind.postgres, self._kind.bound, self._embedders, f"work as a {word}", k=K)
            assert answer.semantic, answer.reason
            assert len({hit.source_id for hit in answer.hits}) == len(answer.hits) >= self._least
            assert all(-1.01 <= hit.score <= 1.01 for hit in answer.hits)
            self.answers += 1


def edit(url: str, end: threading.Event) -> None:
    dice = random.Random(7)
    with connect(url) as db:
        while not end.is_set():
            job = dice.choice(rows(db, "SELECT id FROM jobs WHERE closed_at IS NULL ORDER BY id"))
            what = dice.random()
            if what < 0.7:
                text = f"<p>We seek a {dice.choice(WORDS)}, number {dice.random()}.</p>"
                db.execute("UPDATE jobs SET description = %s WHERE id = %s", (text, job))
            elif what < 0.9:
                add_job(db, f"<p>A new {dice.choice(WORDS)}.</p>")
            else:
                db.execute("UPDATE jobs SET closed_at = now() WHERE id = %s", (job,))
                add_job(db, f"<p>In its place a {dice.choice(WORDS)}.</p>")
            time.sleep(0.05)


def drain_on(kind: Kind, end: threading.Event) -> None:
    while not end.is_set():
        pipeline.drain(kind.ports, "run", limits=kind.limits, stop=Stop())


def active(db: Db) -> int:
    return int(value(db, "SELECT active_model_id FROM embed_assets.corpora"))


@pytest.mark.ids("Q27", "Q29")
def test_search_is_whole_in_one_space_and_never_shorter_while_the_model_is_changed(
    jobs_table: None, db: Db, database_url: str, make_kind: KindMaker
) -> None:
    before, after = LocalEmbedder(), HashEmbedder(384, identity="wide")
    for at in range(40):
        add_job(db, f"<p>We seek a {WORDS[at % len(WORDS)]}, post {at}.</p>")
    old = make_kind(embedder=before, batch_size=50)
    drain(old)
    old.life.advance(Stop())
    new = make_kind(embedder=after, active=before, batch_size=20)
    searcher, end = Searcher(new, K), threading.Event()
    with ThreadPoolExecutor(4) as pool:
        working = [pool.submit(searcher.run, end), pool.submit(edit, database_url, end)]
        working += [pool.submit(drain_on, new, end)]
        try:
            until_true(lambda: _switched(new, db, working), "the model is never switched", seconds=90)
            answered = searcher.answers
            until_true(lambda: searcher.answers > answered + 10, "nobody searches after the switch")
        finally:
            end.set()
        for work in working:
            work.result(timeout=60)
    with pytest.raises(Exception, match="retired"):
        drain(old)
    newest = make_kind(embedder=after, batch_size=50)
    drain(newest)
    assert set(status(newest)) <= {"fresh", "excluded"}
    _rolls_back_at_once(newest, db, before, after)


def _switched(kind: Kind, db: Db, working: list) -> bool:  # type: ignore[type-arg]
    for work in working:
        if work.done():
            work.result()
    kind.life.advance(Stop())
    return active(db) == kind.model_id


def _rolls_back_at_once(kind: Kind, db: Db, before: LocalEmbedder, after: HashEmbedder) -> None:
    corpus = kind.bound.corpus
    embedders = {corpus.identity_of(one.identity): one for one in (before, after)}
    closed = value(db, "UPDATE jobs SET closed_at = now() WHERE id = (SELECT min(id) FROM jobs) RETURNING id")
    kind.life.rollback()
    answer = search(kind.postgres, kind.bound, embedders, "work as a nurse", k=K)
    assert answer.semantic
    assert len(answer.hits) == K
    assert str(closed) not in {hit.source_id for hit in answer.hits}
    assert "nurse" in answer.hits[0].body


# Killed


def command(url: str, *arguments: str) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "DATABASE_URL": url, "EMBED_SWITCH_RECALL_PERCENT": "0"}
    return subprocess.Popen(
        [sys.executable, "-m", "embed_assets", *arguments], env=environment, cwd=Path(__file__).parents[2]
    )


def killed_once(process: subprocess.Popen[bytes], ready: Callable[[], bool]) -> None:
    until_true(ready, "the process never got there", seconds=60)
    process.send_signal(signal.SIGKILL)
    process.wait(30)


@pytest.fixture
def built(kind: Kind, db: Db, make_kind: KindMaker) -> Kind:
    """Three rows, complete for two models of which the second is the target."""
    add_jobs(db, 3)
    drain(kind)
    kind.life.advance(Stop())
    new = make_kind(embedder=HashEmbedder(12, identity="wide"))
    drain(new)
    return new


def test_killed_while_it_builds_the_index_the_next_run_finishes(built: Kind, db: Db, database_url: str) -> None:
    index = built.life.index_of(built.life.models()[-1])
    with connect(database_url) as snapshot:
        snapshot.execute("BEGIN ISOLATION LEVEL REPEATABLE READ")
        snapshot.execute("SELECT count(*) FROM embed_assets.job_semantic_chunks")
        killed_once(command(database_url, "advance", "jobs"), lambda: index.state().building)
        assert active(db) != built.model_id
    until_true(lambda: not index.state().building, "the build of the dead process never ends", seconds=60)
    assert command(database_url, "advance", "jobs").wait(60) == 0
    assert (active(db), index.state().valid) == (built.model_id, True)


def test_killed_in_the_switch_search_reads_the_old_model_and_the_next_run_finishes(
    built: Kind, db: Db, database_url: str
) -> None:
    before = active(db)
    waiting = (
        "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND classid = 1701667428 AND NOT granted "
        "AND database = (SELECT oid FROM pg_database WHERE datname = current_database())"
    )
    with connect(database_url) as writer:
        writer.execute("BEGIN")
        writer.execute("SELECT pg_advisory_xact_lock_shared(1701667428, lock_id) FROM embed_assets.corpora")
        killed_once(command(database_url, "advance", "jobs"), lambda: bool(value(db, waiting)))
        writer.execute("COMMIT")
    busy = "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'embed_assets' AND state <> 'idle'"
    until_true(lambda: not value(db, waiting) and not value(db, busy), "the dead switch goes on")
    assert active(db) == before
    assert rows(db, "SELECT count(*) FROM embed_assets.corpus_models WHERE retired_at IS NOT NULL") == [0]
    assert command(database_url, "advance", "jobs").wait(60) == 0
    assert active(db) == built.model_id
