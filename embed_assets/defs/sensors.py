"""One sensor per kind: asks for a drain as soon as there is something that a drain can do.

A tick reads, and changes nothing of ours, so that a reload of the code location in its middle harms nobody. It waits
for a NOTIFY between its looks; nobody need send one, a look each second finds the same.
What does not belong here: the rule (`decision`), the reads (`resources/watch.py`, `in_flight`).
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace

from dagster import (
    DagsterInstance,
    DefaultSensorStatus,
    RunRequest,
    SensorDefinition,
    SensorEvaluationContext,
    SkipReason,
    sensor,
)
from dagster._core.definitions.unresolved_asset_job_definition import UnresolvedAssetJobDefinition

from embed_assets.defs.decision import Decision, Look, decide, idle
from embed_assets.defs.in_flight import in_flight
from embed_assets.defs.naming import ASKED_TAG, KIND_TAG, SCAN_TAG
from embed_assets.resources.opened import OpenKinds
from embed_assets.resources.watch import Watch
from embed_assets.settings import Settings
from embed_assets.urls import password_of

LOOK_EVERY = 1.0
PROBE_EVERY = 5.0
PROBE_SHARE = 20
GIVEN_UP = 3600.0


@dataclass
class Probed:
    """The cursor: when the scan's predicate was last asked (seconds since the epoch) and how long it took."""

    at: float = 0.0
    seconds: float = 0.0
    gave_up: bool = False

    @classmethod
    def read(cls, cursor: str | None) -> Probed:
        try:
            return cls(**json.loads(cursor or "{}"))
        except (TypeError, ValueError):
            return cls()

    def due(self, now: float) -> bool:
        """At most a twentieth of the time goes into asking; after it took too long, once an hour."""
        every = GIVEN_UP if self.gave_up else max(PROBE_EVERY, PROBE_SHARE * self.seconds)
        return not 0 <= now - self.at < every


def outbox(kind: str, job: UnresolvedAssetJobDefinition, opened: OpenKinds) -> SensorDefinition:
    @sensor(
        name=f"{kind}_outbox",
        job=job,
        minimum_interval_seconds=5,
        default_status=DefaultSensorStatus.RUNNING,
        description=f"Asks for a drain of {kind} when rows are due, were changed, or were left by a run that died.",
    )
    def look(context: SensorEvaluationContext) -> RunRequest | SkipReason:
        probed = Probed.read(context.cursor)
        try:
            decision = _wait_for_work(opened.watch(kind), context.instance, probed)
        except Exception as error:
            opened.forget(kind)
            return SkipReason(f"{kind} could not be looked at: {redacted(error, opened.settings)}")
        finally:
            context.update_cursor(json.dumps(asdict(probed)))
        return answer(decision, kind, "sensor")

    return look


def answer(decision: Decision, kind: str, asked_by: str) -> RunRequest | SkipReason:
    """No run key: the same request may come again, and leases make a second run harmless."""
    if not decision.run:
        return SkipReason(decision.text)
    tags = {KIND_TAG: kind, ASKED_TAG: asked_by}
    return RunRequest(tags=tags | ({SCAN_TAG: "now"} if decision.scan else {}))


def _wait_for_work(watch: Watch, instance: DagsterInstance, probed: Probed) -> Decision:
    """Look, and again after each NOTIFY or second, until there is work or EMBED_SENSOR_WAIT_SECONDS are over."""
    until = time.monotonic() + watch.settings.sensor_wait_seconds
    decision = _look(watch, instance, probed)
    if decision.run or time.monotonic() >= until:
        return decision
    with watch.listening() as wait:
        while not decision.run and (left := until - time.monotonic()) > 0:
            wait(min(LOOK_EVERY, left))
            decision = _look(watch, instance, probed)
    return decision


def _look(watch: Watch, instance: DagsterInstance, probed: Probed) -> Decision:
    return judge(_read(watch, probed), watch, lambda: instance)


def _read(watch: Watch, probed: Probed) -> Look:
    look = Look(watch.backlog(), watch.resting(), watch.busy())
    if look.work == 0 and not (look.busy or look.backlog.paused or look.resting):
        return replace(look, stale=_probe(watch, probed))
    return look


def judge(look: Look, watch: Watch, instance: Callable[[], DagsterInstance]) -> Decision:
    """Dagster's runs are read only when there is work, and the work once more after them.

    The other way round, what a drain takes between the two reads would be work and that drain no longer starting, so
    that a second one would be asked for, and find nothing.
    """
    if answer := idle(look):
        return answer
    flight = in_flight(instance(), watch)
    stale = look.stale and watch.probe().stale is not False
    again = Look(watch.backlog(), watch.resting(), watch.busy(), stale)
    drains, rows = watch.settings.drains_in_flight, watch.rows_per_run()
    return decide(again, flight, drains=drains, rows_per_run=rows)


def _probe(watch: Watch, probed: Probed) -> bool:
    now = time.time()
    if not probed.due(now):
        return False
    probe = watch.probe()
    probed.at, probed.seconds, probed.gave_up = now, probe.seconds, probe.stale is None
    return bool(probe.stale)


def redacted(error: Exception, settings: Settings) -> str:
    """The error's text without the secrets that it may quote."""
    text = " ".join(f"{type(error).__name__}: {error}".split())
    for secret in sorted(_secrets(settings), key=len, reverse=True):
        text = text.replace(secret, "…")
    return text


def _secrets(settings: Settings) -> set[str]:
    known = (settings.database_url, settings.api_key, settings.active_api_key, settings.proxy, settings.alert_webhook)
    found = {secret.get_secret_value() for secret in known if secret}
    if settings.database_url:
        found.add(password_of(settings.database_url.get_secret_value()) or "")
    return found - {""}
