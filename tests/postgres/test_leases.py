"""The wave is the lease: what its token fences, and how the heartbeat keeps it or loses it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime, timedelta
from types import SimpleNamespace
from uuid import uuid4

import pytest
from fakes import HashEmbedder
from postgres.conftest import KindMaker
from postgres.support import (
    Db,
    add_job,
    add_jobs,
    background,
    chunks,
    claim,
    connect,
    drain,
    enqueue,
    entry,
    expire,
    rows,
    staged,
    status,
    until_true,
    wave_of,
    wave_row,
)

from embed_assets import pipeline
from embed_assets.errors import AnswerContract, InputRejected, LeaseLost
from embed_assets.models import Failure, Plan, Wave
from embed_assets.resources import lease as lease_module
from embed_assets.resources import outbox as outbox_module
from embed_assets.resources.assembly import Kind
from embed_assets.stop import Stop

TABLES = (
    "semantic_outbox",
    "claimed_waves",
    "semantic_stamps",
    "job_semantic_chunks",
    "wave_chunks",
    "semantic_outbox_log",
    "similar_invalidations",
    "search_outbox",
)


def everything(db: Db) -> dict[str, list[object]]:
    """Every row version of every table that a wave may touch: equal means that nothing was written."""
    return {
        table: rows(db, f"SELECT t.xmin::text, t.ctid::text, t::text FROM embed_assets.{table} AS t ORDER BY 3")
        for table in TABLES
    }


# The fence


def renew(kind: Kind, wave: Wave) -> None:
    if kind.outbox.renew({wave.wave_id: wave.token}) == {wave.wave_id}:
        raise LeaseLost("refused")


def fail(kind: Kind, wave: Wave) -> None:
    kind.outbox.fail(wave, [Failure(source_id, InputRejected("no")) for source_id in wave.source_ids])


def plan(kind: Kind, wave: Wave) -> None:
    kind.chunks.plan(wave, [Plan(source_id, "gone", None) for source_id in wave.source_ids])


def release(kind: Kind, wave: Wave) -> None:
    if kind.outbox.release(wave).lost == 0:
        raise LeaseLost("refused")


OPERATIONS = {
    "renew": renew,
    "start": lambda kind, wave: kind.outbox.start(wave),
    "plan": plan,
    "write": lambda kind, wave: kind.chunks.write(wave),
    "fail": fail,
    "release": release,
}
TAKE_AWAY = {
    "another token": "UPDATE embed_assets.claimed_waves SET token = gen_random_uuid()",
    "closed": "UPDATE embed_assets.claimed_waves SET closed_at = clock_timestamp(), outcome = 'expired'",
    "expired": "UPDATE embed_assets.claimed_waves SET lease_until = clock_timestamp() - interval '1 ms'",
    "purged": "DELETE FROM embed_assets.claimed_waves",
}


@pytest.mark.ids("B-15", "B-16", "B-17")
@pytest.mark.parametrize("way", TAKE_AWAY)
@pytest.mark.parametrize("operation", OPERATIONS)
def test_without_its_lease_a_wave_is_refused_and_nothing_changes(kind: Kind, db: Db, operation: str, way: str) -> None:
    if (operation, way) == ("release", "expired"):
        pytest.skip("giving back what nobody has taken yet harms nobody")
    add_jobs(db, 2)
    enqueue(kind)
    wave = staged(kind)
    db.execute(TAKE_AWAY[way].encode())
    before = everything(db)
    with pytest.raises(LeaseLost):
        OPERATIONS[operation](kind, wave)
    assert everything(db) == before


@pytest.mark.parametrize("operation", OPERATIONS)
def test_with_its_lease_a_wave_is_accepted(kind: Kind, db: Db, operation: str) -> None:
    add_jobs(db, 2)
    enqueue(kind)
    OPERATIONS[operation](kind, staged(kind))


@pytest.mark.ids("B-18", "Q05")
def test_same_run_after_a_restart_is_refused_with_its_old_wave(kind: Kind, make_kind: KindMaker, db: Db) -> None:
    job = add_job(db)
    enqueue(kind)
    old = staged(kind, run_id="the same run")
    expire(db, old)
    restarted = make_kind()
    new = staged(restarted, run_id="the same run")
    before = everything(db)
    with pytest.raises(LeaseLost):
        kind.chunks.write(old)
    assert everything(db) == before
    assert restarted.chunks.write(new).indexed == 1
    assert entry(db, job) is None


@pytest.mark.ids("B-19", "D09", "Q02")
def test_zombie_whose_wave_was_taken_over_writes_nothing(kind: Kind, other: Kind, db: Db) -> None:
    job = add_job(db, "the old text")
    enqueue(kind)
    zombie = staged(kind)
    expire(db, zombie)
    db.execute("UPDATE jobs SET description = 'the new text'")
    successor = staged(other)
    for moment in ("before its successor wrote", "afterwards"):
        before = everything(db)
        with pytest.raises(LeaseLost):
            kind.chunks.write(zombie)
        with pytest.raises(LeaseLost):
            kind.outbox.fail(zombie, [Failure(str(job), AnswerContract("late"))])
        assert kind.outbox.release(zombie).lost == 0
        assert everything(db) == before, moment
        if moment != "afterwards":
            other.chunks.write(successor)
    assert chunks(db, job) == ["the new text"]
    assert status(kind) == {"fresh": 1}


def test_wave_taken_over_while_it_is_embedded_ends_as_lost_and_the_successor_s_rows_stand(
    kind: Kind, other: Kind, embedder: HashEmbedder, db: Db
) -> None:
    job = add_job(db)

    def take_over(texts: Sequence[str]) -> None:
        embedder.before = lambda texts: None
        db.execute("UPDATE embed_assets.claimed_waves SET lease_until = clock_timestamp() - interval '1 ms'")
        assert drain(other, run_id="successor").indexed == 1

    embedder.before = take_over
    counts = drain(kind, run_id="slow")
    assert (counts.indexed, counts.lost, counts.failed) == (0, 1, 0)
    assert rows(db, "SELECT run_id, outcome FROM embed_assets.claimed_waves ORDER BY wave_id") == [
        ("slow", "expired"),
        ("successor", "written"),
    ]
    assert len(chunks(db, job)) == 1
    assert status(kind) == {"fresh": 1}


@pytest.mark.ids("P17")
@pytest.mark.parametrize("minutes", [10, -10])
def test_worker_s_clock_plays_no_part(
    kind: Kind, other: Kind, db: Db, monkeypatch: pytest.MonkeyPatch, minutes: int
) -> None:
    real = time.time

    class Shifted(datetime):
        @classmethod
        def now(cls, tz=None):  # type: ignore[no-untyped-def]
            return super().now(tz) + timedelta(minutes=minutes)

    monkeypatch.setattr(time, "time", lambda: real() + minutes * 60)
    for module in (outbox_module, lease_module):
        monkeypatch.setattr(module, "datetime", Shifted, raising=False)
    add_job(db)
    enqueue(kind)
    wave = wave_of(kind)
    assert wave_row(db, wave, "round(extract(epoch FROM lease_until - claimed_at))") == kind.outbox.lease_seconds
    assert claim(other) is None
    assert kind.outbox.renew({wave.wave_id: wave.token}) == set()
    pipeline.stage(kind.ports, wave, Stop())
    assert kind.chunks.write(wave).indexed == 1
    assert wave_row(db, wave, "closed_at - claimed_at < interval '1 min' AND claimed_at <= started_at")


# The heartbeat


@pytest.fixture
def held(kind: Kind, db: Db) -> Iterator[tuple[Wave, Stop]]:
    """A wave that the keeper knows, with a lease too long for a beat of its own."""
    add_jobs(db, 2)
    enqueue(kind)
    wave, scope = wave_of(kind), Stop()
    kind.keeper.hold(wave, scope)
    yield wave, scope
    kind.keeper.drop(wave)


def left(db: Db, wave: Wave) -> float:
    """Seconds until the lease runs out, by the database's clock."""
    return float(wave_row(db, wave, "extract(epoch FROM lease_until - clock_timestamp())"))


def shorten(db: Db, wave: Wave, seconds: float) -> None:
    db.execute(
        "UPDATE embed_assets.claimed_waves SET lease_until = clock_timestamp() + %s * interval '1 second' "
        "WHERE wave_id = %s",
        (seconds, wave.wave_id),
    )


@pytest.mark.ids("B-20", "C-16")
def test_lease_is_renewed_at_a_third_of_it_by_a_thread(kind: Kind, db: Db) -> None:
    add_job(db)
    enqueue(kind)
    kind.outbox.lease_seconds = 1.5
    wave = wave_of(kind)
    first = wave_row(db, wave, "lease_until")
    with kind.keeper.holding(wave, Stop()) as scope:
        until_true(lambda: wave_row(db, wave, "lease_until") > first, "the lease is not renewed")
        gained = (wave_row(db, wave, "lease_until") - first).total_seconds()
        assert 0.4 <= gained < 1.0
        assert scope.reason() is None


@pytest.mark.ids("P13")
def test_heartbeat_touches_only_the_wave_s_row(kind: Kind, db: Db, held: tuple[Wave, Stop]) -> None:
    wave, scope = held
    shorten(db, wave, 30)
    before = everything(db)
    kind.keeper.beat()
    after = everything(db)
    assert [table for table in TABLES if after[table] != before[table]] == ["claimed_waves"]
    assert left(db, wave) > 100
    assert scope.reason() is None


@pytest.mark.ids("B-21")
@pytest.mark.parametrize("way", TAKE_AWAY)
def test_refused_renewal_ends_the_wave_s_scope(kind: Kind, db: Db, held: tuple[Wave, Stop], way: str) -> None:
    _, scope = held
    db.execute(TAKE_AWAY[way].encode())
    kind.keeper.beat()
    assert isinstance(scope.reason(), LeaseLost)


class Patient(HashEmbedder):
    """Waits for an answer that does not come, as every wait of the package does: through the scope."""

    def __init__(self, waits: Callable[[], None]) -> None:
        super().__init__()
        self.waits = waits

    def embed(self, texts: Sequence[str], *, stop: Stop) -> Iterator[object]:  # type: ignore[override]
        self.waits()
        stop.sleep(60)
        return super().embed(texts, stop=stop)


@pytest.mark.ids("B-21")
@pytest.mark.usefixtures("jobs_table")
def test_refusal_stops_the_work_within_a_second(make_kind: KindMaker, db: Db) -> None:
    waiting: list[bool] = []
    kind = make_kind(embedder=Patient(lambda: waiting.append(True)))
    add_jobs(db, 2)
    enqueue(kind)
    wave = wave_of(kind)
    with background(lambda: pipeline.work(kind.ports, wave, kind.limits, Stop())) as work:
        until_true(lambda: bool(waiting), "the embedder is not asked")
        expire(db, wave)
        kind.keeper.beat()
        refused = time.monotonic()
        assert work.result(timeout=5).lost == 2
        assert time.monotonic() - refused < 1
    assert rows(db, "SELECT status, attempts FROM embed_assets.semantic_outbox") == [("leased", 0)] * 2


@pytest.mark.usefixtures("jobs_table")
def test_wave_that_is_taken_away_ends_its_work_within_seconds_although_no_beat_is_due(
    make_kind: KindMaker, db: Db
) -> None:
    waiting: list[bool] = []
    kind, other = make_kind(embedder=Patient(lambda: waiting.append(True))), make_kind()
    add_jobs(db, 2)
    enqueue(kind)
    wave = wave_of(kind)
    with background(lambda: pipeline.work(kind.ports, wave, kind.limits, Stop())) as work:
        until_true(lambda: bool(waiting), "the embedder is not asked")
        other.outbox.release(wave)
        assert work.result(timeout=5).lost == 2
    assert kind.outbox.lease_seconds == 120


def test_lock_on_the_wave_is_no_refusal(kind: Kind, db: Db, database_url: str, held: tuple[Wave, Stop]) -> None:
    wave, scope = held
    shorten(db, wave, 30)
    with connect(database_url) as somebody:
        somebody.execute("SELECT FROM embed_assets.claimed_waves FOR UPDATE")
        kind.keeper.beat()
        assert scope.reason() is None
        assert left(db, wave) < 31
    kind.keeper.beat()
    assert left(db, wave) > 100


@pytest.mark.ids("B-22", "Q06")
def test_trouble_of_the_database_is_no_refusal_until_a_whole_lease_has_passed(
    kind: Kind, monkeypatch: pytest.MonkeyPatch, held: tuple[Wave, Stop]
) -> None:
    _, scope = held
    began = time.monotonic()

    def unreachable(leases: object) -> set[int]:
        raise OSError("no answer")

    monkeypatch.setattr(kind.outbox, "renew", unreachable)
    for passed, reason in ((1, type(None)), (119, type(None)), (121, LeaseLost)):
        clock = SimpleNamespace(monotonic=lambda passed=passed: began + passed)
        monkeypatch.setattr(lease_module, "time", clock)
        kind.keeper.beat()
        assert type(scope.reason()) is reason, passed


def test_failed_beat_is_repeated_at_once_and_not_a_third_later(
    kind: Kind, db: Db, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_job(db)
    enqueue(kind)
    wave, renew_really, asked = wave_of(kind), kind.outbox.renew, []

    def fails_once(leases: dict[int, object]) -> set[int]:
        asked.append(time.monotonic())
        if len(asked) == 1:
            raise OSError("no answer")
        return renew_really(leases)  # type: ignore[arg-type]

    monkeypatch.setattr(kind.outbox, "renew", fails_once)
    monkeypatch.setattr(lease_module, "TICK_SECONDS", 0.1)
    kind.outbox.lease_seconds = 3
    with kind.keeper.holding(wave, Stop()):
        until_true(lambda: len(asked) >= 2, "the beat is not repeated")
    assert asked[1] - asked[0] < 0.9


@pytest.mark.ids("C-62")
def test_wave_is_held_for_an_hour_at_most(kind: Kind, other: Kind, db: Db, held: tuple[Wave, Stop]) -> None:
    wave, scope = held
    db.execute("UPDATE embed_assets.claimed_waves SET claimed_at = claimed_at - interval '61 min'")
    shorten(db, wave, 30)
    kind.keeper.beat()
    assert scope.reason() is None
    assert left(db, wave) < 31
    expire(db, wave)
    kind.keeper.beat()
    assert isinstance(scope.reason(), LeaseLost)
    assert claim(other) is not None


def test_one_heartbeat_renews_every_wave_and_loses_only_the_refused(kind: Kind, db: Db) -> None:
    add_jobs(db, 3)
    enqueue(kind)
    waves = [wave_of(kind, 1) for _ in range(3)]
    scopes = [Stop() for _ in waves]
    for wave, scope in zip(waves, scopes, strict=True):
        kind.keeper.hold(wave, scope)
        shorten(db, wave, 30)
    expire(db, waves[1])
    kind.keeper.drop(waves[2])
    kind.keeper.beat()
    assert [scope.reason() is None for scope in scopes] == [True, False, True]
    assert [left(db, wave) > 100 for wave in waves] == [True, False, False]


def test_unknown_wave_is_refused(kind: Kind) -> None:
    assert kind.outbox.renew({12345: uuid4()}) == {12345}


def test_heartbeat_that_meets_a_wave_its_own_write_has_just_closed_says_nothing(
    kind: Kind, db: Db, caplog: pytest.LogCaptureFixture
) -> None:
    add_jobs(db, 1)
    enqueue(kind)
    wave, scope = staged(kind), Stop()
    kind.keeper.hold(wave, scope)
    assert kind.chunks.write(wave).indexed == 1
    kind.keeper.look()
    kind.keeper.beat()
    assert scope.reason() is None
    assert not [record for record in caplog.records if "is lost" in record.message]
    db.execute("UPDATE embed_assets.claimed_waves SET token = gen_random_uuid()")
    kind.keeper.look()
    assert isinstance(scope.reason(), LeaseLost)
