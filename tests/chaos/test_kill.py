"""`kill -9` of a real drain: nothing is lost, nothing is paid twice, and a row that kills is found."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fakes import HashEmbedder
from postgres.support import (
    Db,
    add_job,
    add_jobs,
    drain,
    entries,
    entry,
    gate,
    rows,
    status,
    until_true,
    value,
    waits_for_advisory,
)

from embed_assets.resources.assembly import Kind

DRIVER = Path(__file__).with_name("drain_process.py")
STAND = 4712
REQUEST = 2  # texts in each request of the driver

Start = Callable[..., "subprocess.Popen[bytes]"]


@pytest.fixture
def start(kind: Kind, db: Db, database_url: str) -> Iterator[Start]:  # the tables must be there
    """Start a drain in a process of its own; it stands still at `--stand-at` until the test lets it go."""
    db.execute("CREATE TABLE public.asked (id bigint GENERATED ALWAYS AS IDENTITY, text text)")
    db.execute("SELECT pg_advisory_lock(%s)", (STAND,))
    started: list[subprocess.Popen[bytes]] = []

    def run(*options: object) -> subprocess.Popen[bytes]:
        command = [sys.executable, str(DRIVER), database_url, *map(str, options)]
        started.append(subprocess.Popen(command))
        return started[-1]

    yield run
    for process in started:
        if process.poll() is None:
            process.kill()
        process.wait()


def stands(db: Db, process: subprocess.Popen[bytes]) -> None:
    """Until the process waits before the answer of its request."""

    def there() -> bool:
        assert process.poll() is None, "the process ended before it was asked to stand"
        return waits_for_advisory(db, STAND)

    until_true(there, "the process did not come to its request")


def kill(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    assert process.wait() == -signal.SIGKILL


def lapse(db: Db) -> None:
    """The leases of all open waves run out."""
    db.execute(
        "UPDATE embed_assets.claimed_waves SET lease_until = clock_timestamp() - interval '1 second' "
        "WHERE closed_at IS NULL"
    )


def indexed(db: Db) -> list[Any]:
    """What search would read."""
    statement = "SELECT id, chunk_index, body, text_hash, embedding::text FROM embed_assets.job_semantic_chunks"
    return rows(db, f"{statement} ORDER BY id, chunk_index")


def undisturbed(kind: Kind, db: Db) -> list[Any]:
    """What a drain makes of the same rows when nobody kills it."""
    for table in ("job_semantic_chunks", "semantic_stamps", "chunk_embeddings", "semantic_outbox"):
        db.execute(f"TRUNCATE embed_assets.{table}".encode())
    drain(kind)
    return indexed(db)


@pytest.mark.ids("A-69", "Q19", "C-27")
def test_drain_killed_while_it_embeds_is_finished_by_the_next_without_paying_twice(
    kind: Kind, embedder: HashEmbedder, db: Db, start: Start
) -> None:
    add_jobs(db, 6)
    process = start("--stand-at", 2)
    stands(db, process)
    kill(process)
    assert value(db, "SELECT count(*) FROM embed_assets.chunk_embeddings") == REQUEST
    assert status(kind) == {"leased": 6}
    lapse(db)
    counts = drain(kind)
    assert (counts.indexed, counts.texts, counts.reused) == (6, 6 - REQUEST, REQUEST)
    assert status(kind) == {"fresh": 6}
    asked = rows(db, "SELECT text FROM public.asked") + embedder.texts
    assert len(asked) - len(set(asked)) <= REQUEST
    assert indexed(db) == undisturbed(kind, db)


@pytest.mark.ids("A-37", "A-69")
def test_drain_killed_in_its_write_leaves_nothing_of_it_and_costs_nothing_more(
    kind: Kind, embedder: HashEmbedder, db: Db, database_url: str, start: Start
) -> None:
    add_jobs(db, 6)
    with gate(database_url, "semantic_outbox_log") as held:
        process = start()
        held.wait()
        kill(process)
        held.open()
    connected = "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'embed_assets' AND state <> 'idle'"
    until_true(lambda: value(db, connected) == 0, "the killed process's transaction does not end")
    assert indexed(db) == []
    assert status(kind) == {"leased": 6}
    lapse(db)
    counts = drain(kind)
    assert (counts.indexed, counts.texts) == (6, 0)
    assert embedder.texts == []
    assert indexed(db) == undisturbed(kind, db)


@pytest.mark.ids("Q14", "B-10")
def test_row_that_kills_its_process_dies_alone_after_three_and_the_others_are_embedded(
    kind: Kind, db: Db, start: Start
) -> None:
    add_jobs(db, 2)
    poison = add_job(db, "the poisonous posting")
    add_jobs(db, 3)
    killed = 0
    while start("--poison", "poisonous").wait() == -signal.SIGKILL:
        killed += 1
        assert killed <= 3
        lapse(db)
    assert killed == 3
    assert status(kind) == {"dead": 1, "fresh": 5}
    assert entries(db, "source_id, error_code") == [(str(poison), "LEASE_ATTEMPTS_EXHAUSTED")]
    assert value(db, "SELECT max(n) FROM (SELECT count(*) AS n FROM public.asked GROUP BY text) AS t") == killed
    db.execute("UPDATE jobs SET description = 'harmless now' WHERE id = %s", (poison,))
    assert start("--poison", "poisonous").wait() == 0
    assert entry(db, poison) is None
    assert status(kind) == {"fresh": 6}


def settled(db: Db) -> list[Any]:
    """Every version of chunks, stamps and waves: equal means that nothing was written."""
    tables = ("job_semantic_chunks", "semantic_stamps", "claimed_waves", "semantic_outbox_log")
    return [rows(db, f"SELECT t::text, t.xmin::text FROM embed_assets.{table} AS t ORDER BY 1") for table in tables]


@pytest.mark.ids("Q02", "D09")
def test_process_that_was_stopped_beyond_its_lease_writes_nothing_when_it_goes_on(
    kind: Kind, db: Db, start: Start
) -> None:
    job, *_ = add_jobs(db, 6)
    process = start("--stand-at", 2)
    stands(db, process)
    os.kill(process.pid, signal.SIGSTOP)
    lapse(db)
    db.execute("UPDATE jobs SET description = 'changed meanwhile' WHERE id = %s", (job,))
    assert drain(kind).indexed == 6
    before = settled(db)
    db.execute("SELECT pg_advisory_unlock(%s)", (STAND,))
    os.kill(process.pid, signal.SIGCONT)
    assert process.wait(timeout=20) == 0
    assert settled(db) == before
    assert entries(db) == []
    assert status(kind) == {"fresh": 6}
