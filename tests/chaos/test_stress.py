"""Everybody at once for a while: users in transactions of several statements, scanners, and drains of which some are
lost and some come back too late. Nobody may fail or deadlock, and the facts must equal the source afterwards.

Eight seconds in the main run, 25 by `make stress` (STRESS_SECONDS).
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import cycle

import psycopg
import pytest
from fakes import vector_of
from postgres.conftest import KindMaker
from postgres.support import Db, drain

from embed_assets import pipeline
from embed_assets.errors import LeaseLost
from embed_assets.models import Wave
from embed_assets.resources import ranges
from embed_assets.resources.assembly import Kind
from embed_assets.resources.operator import Operator
from embed_assets.stop import Stop
from tests.chaos.producer import Producer, settle, started
from tests.chaos.truth import Facts, facts

SECONDS = float(os.environ.get("STRESS_SECONDS", "8"))
LONGEST = SECONDS + 60  # on a machine that is busy with other things, until everything has happened once
LEASE = 1.0
ROWS = 6  # of one wave
FATES = [
    *("work", "lost", "work", "too late", "work"),
    *("lost at work", "release", "work", "lost when staged", "work"),
]

Tally = Counter[str]


class Drainer:
    """Claims waves and lets each meet the next of `FATES`."""

    def __init__(self, kind: Kind, number: int) -> None:
        kind.outbox.lease_seconds = LEASE
        self._kind, self._fates = kind, cycle(FATES[3 * number :] + FATES[: 3 * number])
        self.tally: Tally = Counter()

    def run(self, end: threading.Event) -> None:
        while not end.is_set():
            if wave := self._kind.outbox.claim("stress", ROWS):
                fate = next(self._fates)
                getattr(self, f"_{fate.replace(' ', '_')}")(wave)
                self.tally[fate] += 1
            else:
                end.wait(0.02)

    def _work(self, wave: Wave) -> None:
        counts = pipeline.work(self._kind.ports, wave, self._kind.limits, Stop())
        self.tally["rows written"] += counts.indexed + counts.removed + counts.gone

    def _release(self, wave: Wave) -> None:
        self._kind.outbox.release(wave)

    def _lost(self, wave: Wave) -> None:
        """Killed before it began: nobody is charged."""

    def _lost_at_work(self, wave: Wave) -> None:
        self._kind.outbox.start(wave)

    def _lost_when_staged(self, wave: Wave) -> None:
        self._stage(wave)

    def _too_late(self, wave: Wave) -> None:
        """Stopped beyond its lease: what it then writes must be refused."""
        if self._stage(wave):
            time.sleep(LEASE + 0.2)
            with pytest.raises(LeaseLost):
                pipeline.write(self._kind.ports, wave, Stop())

    def _stage(self, wave: Wave) -> bool:
        """False when the machine was so slow that the lease ran out meanwhile."""
        try:
            pipeline.stage(self._kind.ports, wave, Stop())
        except LeaseLost:
            self.tally["too slow"] += 1
            return False
        return True


def scan(kind: Kind, end: threading.Event, tally: Tally) -> None:
    while not end.is_set():
        found = kind.enqueuer.enqueue(scan=True)
        tally["scans that another held off" if found.skipped else "scans"] += 1
        tally["entries"] += found.created


@pytest.fixture
def at_work(
    jobs_table: None, make_kind: KindMaker, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> tuple[list[Producer], list[Future[None]], Tally]:
    """Two producers, two scanners and three drains, after `SECONDS` of work side by side."""
    monkeypatch.setattr(ranges, "RANGE_KEYS", 40)  # many ranges, hence many commits, in each scan
    kinds = [make_kind() for _ in range(5)]
    drainers = [Drainer(kind, number) for number, kind in enumerate(kinds[:3])]
    end, tally = threading.Event(), Counter[str]()
    producers = started("ab", lambda: database_url, 1, rows=100, pause=0.02, forced=0.1)
    work: list[Callable[[], None]] = [lambda one=one: one.run(end) for one in drainers]  # type: ignore[misc]
    work += [lambda kind=kind: scan(kind, end, tally) for kind in kinds[3:]]  # type: ignore[misc]
    with ThreadPoolExecutor(len(work)) as pool:
        futures = [pool.submit(one) for one in work]
        begun = time.monotonic()
        while not any(future.done() for future in futures) and (spent := time.monotonic() - begun) < LONGEST:
            if spent >= SECONDS and {*FATES, "scans"} <= _met(tally, drainers):
                break
            time.sleep(0.1)
        end.set()
    settle(producers)
    for kind in kinds:
        kind.close()  # a backend tells its deadlocks when it ends at the latest
    tally.update(sum((one.tally for one in drainers), Counter()))
    tally["transactions of producers"] = sum(producer.transactions for producer in producers)
    return producers, futures, tally


def _met(tally: Tally, drainers: list[Drainer]) -> set[str]:
    return {what for one in (tally, *(drainer.tally for drainer in drainers)) for what in list(one)}


@pytest.mark.ids("A-70", "Q02")
def test_producers_scanners_and_drains_side_by_side_neither_fail_nor_deadlock_and_end_right(
    at_work: tuple[list[Producer], list[Future[None]], Tally],
    make_kind: KindMaker,
    db: Db,
    database_url: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    producers, futures, tally = at_work
    print(f"{SECONDS:.0f} s: {dict(tally)}")
    assert [error for producer in producers for error in producer.errors] == []
    assert [future.exception() for future in futures] == [None] * len(futures)
    assert deadlocks(database_url) == 0
    assert [record.message for record in caplog.get_records("setup") if "tried again" in record.message] == []
    assert tally.keys() >= {*FATES, "rows written", "scans", "scans that another held off", "entries"}
    found = at_rest(make_kind(), db, database_url)
    assert found.at_rest, (found.wrong, found.examples, found.queue)
    assert (found.models, found.chunks > 0) == (1, True)


def at_rest(kind: Kind, db: Db, url: str) -> Facts:
    """After undisturbed drains: leases have run out, and an operator has given the dead another round."""
    time.sleep(LEASE + 0.2)
    for _ in range(2):
        drain(kind)
        Operator(kind.postgres, "jobs").retry(code="LEASE_ATTEMPTS_EXHAUSTED")
    return facts(url, vector_of)


def deadlocks(url: str) -> int:
    """Counted by Postgres itself, for this database alone."""
    with psycopg.connect(url) as db:
        row = db.execute("SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()").fetchone()
    assert row is not None
    return int(row[0])


@pytest.fixture(autouse=True)
def _hears_retries(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "embed_assets")
