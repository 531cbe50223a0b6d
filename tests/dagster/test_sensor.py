"""The sensor and the schedule on a real Postgres: when they ask for a drain, and that they never do for nothing."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

import psycopg
import pytest
from dagster import (
    DagsterInstance,
    DagsterRunStatus,
    RunRequest,
    SkipReason,
    build_schedule_context,
    build_sensor_context,
)

from embed_assets.defs.decision import InFlight
from embed_assets.defs.in_flight import in_flight
from embed_assets.defs.sensors import Probed
from embed_assets.errors import EndpointTrouble, ErrorClass, InputRejected
from embed_assets.resources.embedder import Endpoint
from embed_assets.resources.opened import OpenKinds
from embed_assets.resources.postgres import Postgres
from tests.dagster.project import POSTS, Project

TABLES = ("source_changes", "semantic_outbox", "claimed_waves", "corpus_scans", "corpora", "semantic_stamps")


class Ticks:
    """One sensor of one code server: its ticks share a cursor."""

    def __init__(self, project: Project, **settings: Any) -> None:
        self.defs = project.definitions(**settings)
        self.sensor = self.defs.resolve_sensor_def("posts_outbox")
        self.instance = project.instance
        self.cursor: str | None = None

    def tick(self) -> RunRequest | SkipReason:
        context = build_sensor_context(instance=self.instance, cursor=self.cursor, definitions=self.defs)
        result = self.sensor(context)
        self.cursor = context.cursor
        assert isinstance(result, (RunRequest, SkipReason))
        return result

    def asks(self) -> bool:
        return isinstance(self.tick(), RunRequest)

    def text(self) -> str:
        result = self.tick()
        assert isinstance(result, SkipReason)
        return result.skip_message or ""

    def probe_again(self) -> None:
        """As if the time until the next probe had passed."""
        self.cursor = json.dumps({**json.loads(self.cursor or "{}"), "at": 0})


@pytest.fixture
def ticks(project: Project) -> Ticks:
    return Ticks(project)


def test_a_changed_row_nobody_reported_asks_for_a_run_that_scans(project: Project, ticks: Ticks) -> None:
    assert not ticks.asks()
    project.put("one")
    ticks.probe_again()
    request = ticks.tick()
    assert isinstance(request, RunRequest)
    assert request.tags["embed_assets/scan"] == "now"
    assert request.run_key is None
    assert request.tags["embed_assets/kind"] == "posts"


def test_a_reported_row_asks_for_a_run_that_need_not_scan(project: Project, ticks: Ticks) -> None:
    project.drain()
    project.put("one")
    project.db.execute("SELECT embed_assets.enqueue('posts', ARRAY[1])")
    request = ticks.tick()
    assert isinstance(request, RunRequest)
    assert "embed_assets/scan" not in request.tags


@pytest.mark.ids("Q17", "D20")
def test_nothing_due_asks_for_nothing_and_says_so_with_numbers(project: Project, ticks: Ticks) -> None:
    project.put("one")
    project.drain()
    for _ in range(3):
        ticks.probe_again()
        assert ticks.text().startswith("Nothing due; pending 0, feed 0, leased 0, waiting 0, dead 0")


@pytest.mark.ids("Q17")
def test_a_dead_letter_alone_never_starts_a_run(project: Project, ticks: Ticks) -> None:
    project.put("bad")
    project.embedder.reject = lambda text: InputRejected("never")
    project.drain()
    assert project.entries("dead") == 1
    for _ in range(3):
        ticks.probe_again()
        assert "dead 1" in ticks.text()
    project.db.execute("UPDATE posts SET body = 'changed'")
    ticks.probe_again()
    assert ticks.asks()


@pytest.mark.ids("Q17")
def test_a_retry_that_is_not_due_is_waited_for(project: Project, ticks: Ticks) -> None:
    project.put("bad")
    project.embedder.reject = lambda text: EndpointAnswer()
    project.drain()
    assert "waiting 1 (next in" in ticks.text()
    project.db.execute("UPDATE embed_assets.semantic_outbox SET next_attempt_at = now()")
    assert ticks.asks()


class EndpointAnswer(InputRejected):
    """An answer that may be better next time."""

    error_class = ErrorClass.CONTRACT

    def __init__(self) -> None:
        super().__init__("no numbers")


def test_waves_of_a_run_that_died_ask_for_a_run_once_their_lease_is_over(project: Project, ticks: Ticks) -> None:
    project.put("one")
    project.drain("semantic_outbox")
    run = OpenKinds(project.settings(), [POSTS], project.embedder).run("dead", "posts")
    run.claim()
    assert "leased 1" in ticks.text()
    run.kind.close()
    project.db.execute("UPDATE embed_assets.claimed_waves SET lease_until = now()")
    assert ticks.asks()


def test_a_resting_endpoint_and_a_pause_hold_it(project: Project, ticks: Ticks) -> None:
    project.put("one")
    project.drain("semantic_outbox")
    assert ticks.asks()
    postgres = Postgres(project.url)
    endpoint = Endpoint(postgres, project.settings())
    endpoint.rest(EndpointTrouble("too many", error_class=ErrorClass.RATE_LIMITED, retry_after=77))
    assert "cooling for 7" in ticks.text()
    endpoint.works(seconds=0)
    postgres.close()
    assert ticks.asks()
    project.db.execute("UPDATE embed_assets.corpora SET paused_at = now()")
    assert "Paused; pending 1" in ticks.text()


def test_drains_in_flight_are_counted_by_their_job(project: Project, ticks: Ticks) -> None:
    project.put("one")
    project.drain("semantic_outbox")
    job = project.definitions().resolve_job_def("posts_drain")
    project.instance.create_run_for_job(job, status=DagsterRunStatus.STARTING)
    assert "drain is starting" in ticks.text()
    assert Ticks(project, batch_size=1, waves_per_run=1).asks() is False
    project.put("two", "three")
    project.drain("semantic_outbox")
    assert Ticks(project, batch_size=1, waves_per_run=1).asks()
    project.instance.create_run_for_job(job, status=DagsterRunStatus.STARTED)
    assert "2 drains are in flight" in Ticks(project, batch_size=1).text()


@pytest.mark.parametrize("reported", [True, False])
def test_what_a_drain_takes_while_the_runs_are_read_asks_for_no_second_one(
    project: Project, ticks: Ticks, monkeypatch: pytest.MonkeyPatch, reported: bool
) -> None:
    def drained_meanwhile(*arguments: Any) -> InFlight:
        project.drain()
        return in_flight(*arguments)

    project.put("one")
    if reported:
        project.db.execute("SELECT embed_assets.enqueue('posts', ARRAY[1])")
    monkeypatch.setattr("embed_assets.defs.sensors.in_flight", drained_meanwhile)
    assert "Nothing due" in ticks.text()


@pytest.mark.ids("D08")
def test_a_run_that_died_long_ago_does_not_count_as_in_flight(project: Project, ticks: Ticks) -> None:
    project.put("one")
    project.drain("semantic_outbox")
    job = project.definitions().resolve_job_def("posts_drain")
    for _ in range(2):
        project.instance.create_run_for_job(job, status=DagsterRunStatus.STARTED)
    assert not ticks.asks()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("embed_assets.defs.in_flight.time.time", lambda: time.monotonic() + 4e9)
        assert ticks.asks()


def test_while_another_enqueuer_holds_the_lease_its_feed_asks_for_nothing(project: Project, ticks: Ticks) -> None:
    project.put("one")
    project.db.execute("SELECT embed_assets.enqueue('posts', ARRAY[1])")
    assert ticks.asks()
    project.db.execute(
        "UPDATE embed_assets.corpus_scans SET token = gen_random_uuid(), until = now() + interval '1 minute'"
    )
    assert "another enqueuer" in ticks.text()


def test_a_scan_that_refuses_to_clear_cannot_start_run_after_run(project: Project, ticks: Ticks) -> None:
    project.put("one")
    project.drain()
    project.db.execute(
        "INSERT INTO embed_assets.semantic_stamps (kind, model_id, source_id, revision, chunk_count) "
        "SELECT 'posts', 1, n::text, '', 0 FROM generate_series(1000, 2500) AS n"
    )
    asked = 0
    for _ in range(6):
        ticks.probe_again()
        request = ticks.tick()
        if isinstance(request, RunRequest):
            asked += 1
            job = ticks.defs.resolve_job_def("posts_drain")
            job.execute_in_process(instance=project.instance, tags=dict(request.tags), raise_on_error=False)
    assert asked == 2
    ticks.probe_again()
    assert "The last 2 drains found nothing to do" in ticks.text()


@pytest.mark.ids("D02")
def test_a_tick_changes_nothing_in_our_tables(project: Project, ticks: Ticks) -> None:
    project.put("one", "two")
    project.drain("semantic_outbox")
    ticks.tick()

    def contents() -> list[Any]:
        return [project.db.execute(f"SELECT * FROM embed_assets.{table} ORDER BY 1").fetchall() for table in TABLES]

    project.db.execute("SELECT embed_assets.enqueue('posts', ARRAY[1])")
    before = contents()
    assert ticks.asks()
    assert contents() == before


def test_an_error_becomes_a_reason_without_secrets_and_the_next_tick_recovers(project: Project, ticks: Ticks) -> None:
    project.db.execute("ALTER TABLE posts RENAME TO gone")
    assert "'posts' does not exist" in ticks.text()
    broken = Ticks(project, api_key="hunter2hunter2")
    password = psycopg.conninfo.conninfo_to_dict(project.url)["password"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "embed_assets.resources.opened.OpenKinds.watch",
            lambda self, kind: (_ for _ in ()).throw(RuntimeError(f"at {project.url} with {password} hunter2hunter2")),
        )
        text = broken.text()
    assert "RuntimeError" in text
    assert str(password) not in text
    assert "hunter2" not in text
    project.db.execute("ALTER TABLE gone RENAME TO posts")
    assert "Nothing due" in ticks.text()


@pytest.mark.ids("D01")
def test_the_probe_takes_a_twentieth_of_the_time_and_gives_up_where_it_is_slow(project: Project) -> None:
    project.put(*"0123456789")
    project.db.execute("ALTER TABLE posts RENAME TO rows")
    project.db.execute("CREATE VIEW posts AS SELECT id, body, pg_sleep(0.4)::text IS NOT NULL AS hidden FROM rows")
    ticks = Ticks(project)
    started = time.monotonic()
    assert "Nothing due" in ticks.text()
    assert time.monotonic() - started < 3
    assert json.loads(ticks.cursor or "{}")["gave_up"]
    started = time.monotonic()
    ticks.text()
    assert time.monotonic() - started < 1
    assert not Probed(at=100, seconds=1).due(now=119)
    assert Probed(at=100, seconds=1).due(now=121)


def test_a_notify_ends_the_waiting_at_once(project: Project) -> None:
    ticks = Ticks(project, sensor_wait_seconds=20)
    Ticks(project).tick()
    project.db.execute("UPDATE embed_assets.corpus_scans SET last_scan_at = now()")

    def speak() -> None:
        with psycopg.connect(project.url, autocommit=True) as other:
            other.execute("INSERT INTO posts (body) VALUES ('late')")
            other.execute("SELECT embed_assets.enqueue('posts', ARRAY[1])")
            other.execute("NOTIFY semantic_outbox, 'posts'")

    timer = threading.Timer(2, speak)
    timer.start()
    started = time.monotonic()
    assert ticks.asks()
    assert time.monotonic() - started < 6


def test_the_schedule_follows_the_same_rule_after_the_sensor_had_its_chance(
    project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("embed_assets.defs.schedules.SENSOR_FIRST_SECONDS", 0.5)
    defs = project.definitions()
    schedule = defs.resolve_schedule_def("posts_scan")

    def tick() -> Any:
        with DagsterInstance.local_temp(str(tmp_path)) as instance, build_schedule_context(instance) as context:
            return schedule(context)

    assert isinstance(tick(), SkipReason)
    project.put("one")
    request = tick()
    assert isinstance(request, RunRequest)
    assert request.tags["embed_assets/scan"] == "now"
    project.drain()
    assert "Nothing due" in tick().skip_message
    project.put("two")
    timer = threading.Timer(0.2, project.drain)
    timer.start()
    assert isinstance(tick(), SkipReason)
    timer.join()
