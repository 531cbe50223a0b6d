"""Who is told when a kind turns, and what becomes of the leases of runs that are dead."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest
from dagster import DagsterRunStatus, SkipReason, build_run_status_sensor_context, build_sensor_context

from embed_assets.defs.turns import MOST_WAITING, Memory, Seen
from tests.dagster.project import Project
from tests.dagster.test_checks import HOUR_AGO, evaluated
from tests.dagster.test_operator_jobs import claimed, do, kill


@dataclass
class Webhook:
    """Takes what is posted; answers with `status`."""

    server: HTTPServer
    status: int = 204
    posted: list[dict[str, Any]] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.server_port}/hook/secret-path"

    @property
    def names(self) -> list[tuple[str, str]]:
        return [(turn["name"], turn["state"]) for turn in self.posted]


@pytest.fixture
def webhook() -> Iterator[Webhook]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if hook.status < 300:
                hook.posted.append(body)
            self.send_response(hook.status)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    hook = Webhook(HTTPServer(("127.0.0.1", 0), Handler))
    threading.Thread(target=hook.server.serve_forever, daemon=True).start()
    yield hook
    hook.server.shutdown()
    hook.server.server_close()


class Alerts:
    """The sensor, tick by tick, with its cursor."""

    def __init__(self, project: Project, **settings: Any) -> None:
        self.project = project
        self.definitions = project.definitions(**settings)
        self.cursor: str | None = None

    def tick(self) -> str:
        with build_sensor_context(
            instance=self.project.instance, cursor=self.cursor, definitions=self.definitions
        ) as context:
            result = self.definitions.resolve_sensor_def("posts_alerts")(context)
            self.cursor = context.cursor
        assert isinstance(result, SkipReason)
        return result.skip_message or ""


@pytest.mark.ids("B-47")
def test_a_turn_is_told_once_and_so_is_the_turn_back(project: Project, webhook: Webhook) -> None:
    alerts = Alerts(project, alert_webhook=webhook.url)
    project.put("good")
    project.drain()
    assert alerts.tick() == "0 turns told"
    kill(project, "secret text")
    assert alerts.tick() == "1 turns told"
    assert alerts.tick() == "0 turns told"
    [turn] = webhook.posted
    assert (turn["kind"], turn["name"], turn["state"], turn["was"]) == ("posts", "verdict", "DEGRADED", "green")
    assert turn["text"] == "posts verdict: DEGRADED, 1 rows failed"
    do(project, "dismiss_dead_letters")
    assert alerts.tick() == "1 turns told"
    assert (webhook.names[-1], webhook.posted[-1]["number"]) == (("verdict", "green"), 2)


def test_each_check_is_told_by_its_newest_evaluation(project: Project, webhook: Webhook) -> None:
    alerts = Alerts(project, alert_webhook=webhook.url)
    project.put("one")
    project.drain("semantic_outbox")
    project.db.execute(f"UPDATE embed_assets.semantic_outbox SET enqueued_at = {HOUR_AGO}".encode())
    evaluated(project)
    alerts.tick()
    assert sorted(webhook.names) == [("dagster_instance", "red"), ("oldest_due", "red")]
    late = next(turn for turn in webhook.posted if turn["name"] == "oldest_due")
    assert late["severity"] == "ERROR"
    assert "waits for 36" in late["text"]
    assert "sensor's last tick" in late["text"]
    project.drain()
    alerts.tick()
    assert len(webhook.posted) == 2
    evaluated(project)
    alerts.tick()
    assert webhook.names[2:] == [("oldest_due", "green")]


@pytest.mark.ids("B-46")
def test_no_id_of_a_row_and_no_text_is_told_to_anybody(project: Project, webhook: Webhook) -> None:
    project.db.execute("ALTER TABLE posts ALTER id RESTART 4711")
    kill(project, "a secret text")
    evaluated(project)
    Alerts(project, alert_webhook=webhook.url).tick()
    assert ("dead_letters", "red") in webhook.names
    assert "4711" not in json.dumps(webhook.posted)
    assert "secret text" not in json.dumps(webhook.posted)


def test_a_webhook_that_is_down_loses_no_turn_and_its_address_is_not_shown(project: Project, webhook: Webhook) -> None:
    alerts = Alerts(project, alert_webhook=webhook.url)
    webhook.status = 503
    kill(project, "bad")
    assert alerts.tick() == "0 turns told, 1 wait: the webhook answered 503"
    do(project, "dismiss_dead_letters")
    assert alerts.tick() == "0 turns told, 2 wait: the webhook answered 503"
    webhook.status = 200
    assert alerts.tick() == "2 turns told"
    assert webhook.names == [("verdict", "DEGRADED"), ("verdict", "green")]
    webhook.server.shutdown()
    webhook.server.server_close()
    kill(project, "worse")
    said = alerts.tick()
    assert "did not answer" in said
    assert "secret-path" not in said + (alerts.cursor or "")


def test_without_an_address_nobody_is_told_and_a_database_that_is_away_stops_no_post(
    project: Project, webhook: Webhook
) -> None:
    assert "is not set" in Alerts(project).tick()
    alerts = Alerts(project, alert_webhook=webhook.url)
    webhook.status = 500
    kill(project, "bad")
    alerts.tick()
    webhook.status = 200
    project.db.execute("ALTER TABLE embed_assets.semantic_outbox RENAME TO away")
    said = alerts.tick()
    assert said.startswith("1 turns told; posts could not be looked at")
    assert len(webhook.posted) == 1


def test_work_under_way_is_no_turn() -> None:
    memory = Memory()
    memory.note("posts", {}, "now")
    memory.note("posts", {"verdict": Seen("green", "INFO", "fine")}, "now")
    assert not memory.waiting


def test_while_nobody_listens_a_bounded_number_waits_and_the_last_state_is_told_in_the_end() -> None:
    memory = Memory()
    for number in range(MOST_WAITING + 51):
        memory.note("posts", {"verdict": Seen("red" if number % 2 == 0 else "green", "ERROR", "x")}, "now")
    assert len(memory.waiting) == MOST_WAITING
    assert Memory.read(memory.written()) == memory
    told: list[dict[str, Any]] = []
    assert memory.tell(lambda turn: told.append(turn)) == (MOST_WAITING, None)
    memory.note("posts", {"verdict": Seen("red", "ERROR", "x")}, "now")
    assert [turn["number"] for turn in (*told, *memory.waiting)] == list(range(1, MOST_WAITING + 2))
    assert Memory.read("no json") == Memory()


def ended(project: Project, status: DagsterRunStatus, run_id: str) -> str:
    """The sensor's tick for a run of that id that ended so."""
    definitions = project.definitions()
    run = project.instance.create_run_for_job(definitions.resolve_job_def("posts_drain"), run_id=run_id)
    if status is DagsterRunStatus.FAILURE:
        project.instance.report_run_failed(run)
    else:
        project.instance.report_run_canceled(run)
    [record] = project.instance.get_run_records(limit=1)
    events = project.instance.all_logs(run_id)
    context = build_run_status_sensor_context(
        sensor_name=f"release_{status.value.lower()}_runs",
        dagster_instance=project.instance,
        dagster_run=record.dagster_run,
        dagster_event=next(entry.dagster_event for entry in reversed(events) if entry.dagster_event),
    )
    sensor: Any = definitions.resolve_sensor_def(f"release_{status.value.lower()}_runs")
    result = sensor(context)
    assert isinstance(result, SkipReason)
    return result.skip_message or ""


def renamed(project: Project, run_id: str) -> str:
    project.db.execute("UPDATE embed_assets.claimed_waves SET run_id = %s", (run_id,))
    return run_id


FAILED = "11111111-1111-4111-8111-111111111111"
OTHER = "22222222-2222-4222-8222-222222222222"


def test_a_dead_run_s_rows_wait_for_no_lease_and_its_crash_is_counted(project: Project) -> None:
    claimed(project)
    renamed(project, FAILED)
    assert "left 0 waves open" in ended(project, DagsterRunStatus.FAILURE, OTHER)
    assert project.value("SELECT lease_until > clock_timestamp() FROM embed_assets.claimed_waves") is True
    assert "left 1 waves open" in ended(project, DagsterRunStatus.FAILURE, FAILED)
    assert project.drain(scan=False).success
    assert (project.fresh, project.open_waves) == (2, 0)
    renamed_to = "SELECT string_agg(outcome, ' ' ORDER BY wave_id) FROM embed_assets.claimed_waves"
    assert project.value(renamed_to) == "expired written"


@pytest.mark.ids("D10", "Q18")
def test_a_run_that_dagster_calls_failed_although_it_wrote_changes_nothing_of_what_is_known(project: Project) -> None:
    project.put("one", "two")
    project.drain()
    renamed(project, FAILED)
    before = project.value("SELECT array_agg(w::text) FROM embed_assets.claimed_waves AS w")
    assert "left 0 waves open" in ended(project, DagsterRunStatus.FAILURE, FAILED)
    assert project.value("SELECT array_agg(w::text) FROM embed_assets.claimed_waves AS w") == before
    assert (project.fresh, project.charged) == (2, 0)
    found = evaluated(project)["verdict"]
    assert (found.passed, found.description) == (True, "everything is searchable as it is now")


def test_what_kills_its_run_again_and_again_is_not_forgiven_because_dagster_noticed(project: Project) -> None:
    claimed(project)
    renamed(project, FAILED)
    ended(project, DagsterRunStatus.FAILURE, FAILED)
    do(project, "release_waves")
    assert (project.entries("pending"), project.charged) == (2, 2)


def test_a_cancelled_run_s_rows_come_back_charging_nobody(project: Project) -> None:
    claimed(project)
    renamed(project, FAILED)
    assert "left 1 waves open" in ended(project, DagsterRunStatus.CANCELED, FAILED)
    assert (project.entries("pending"), project.charged, project.open_waves) == (2, 0, 0)
