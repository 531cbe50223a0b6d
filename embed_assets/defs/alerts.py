"""One sensor per kind: posts to EMBED_ALERT_WEBHOOK when the verdict or a check turns, and when it turns back.

A webhook that is down loses no turn and holds nothing up: what was not taken waits in the cursor.
What does not belong here: what a turn is (`turns`), what is looked at (`checks`, `resources/health.py`).
"""

from __future__ import annotations

from datetime import datetime, timezone

import httpx
from dagster import (
    AssetCheckEvaluation,
    AssetCheckKey,
    DagsterInstance,
    DefaultSensorStatus,
    SensorDefinition,
    SensorEvaluationContext,
    SkipReason,
    sensor,
)

from embed_assets.defs.checks import INSTANCE
from embed_assets.defs.naming import key
from embed_assets.defs.sensors import redacted
from embed_assets.defs.turns import GREEN, Memory, Seen, Turn
from embed_assets.resources.health import LOOKS
from embed_assets.resources.opened import OpenKinds
from embed_assets.resources.verdict import State, Verdict

VERDICT = "verdict"
TIMEOUT_SECONDS = 5.0


def alerts(kind: str, opened: OpenKinds) -> SensorDefinition:
    @sensor(
        name=f"{kind}_alerts",
        minimum_interval_seconds=30,
        default_status=DefaultSensorStatus.RUNNING,
        description=f"Posts to EMBED_ALERT_WEBHOOK when the verdict or a check of {kind} turns, and turns back.",
    )
    def look(context: SensorEvaluationContext) -> SkipReason:
        webhook = opened.settings.alert_webhook
        if webhook is None:
            return SkipReason("EMBED_ALERT_WEBHOOK is not set: nobody is told")
        memory = Memory.read(context.cursor)
        try:
            seen = _verdict(opened.watch(kind).verdict()) | _checks(context.instance, kind)
            memory.note(kind, seen, datetime.now(timezone.utc).isoformat(timespec="seconds"))
            unseen = ""
        except Exception as error:
            opened.forget(kind)
            unseen = f"; {kind} could not be looked at: {redacted(error, opened.settings)}"
        told, trouble = memory.tell(lambda turn: _post(webhook.get_secret_value(), turn))
        context.update_cursor(memory.written())
        waits = f", {len(memory.waiting)} wait: {trouble}" if trouble else ""
        return SkipReason(f"{told} turns told{waits}{unseen}")

    return look


def _verdict(found: Verdict) -> dict[str, Seen]:
    """INDEXING is neither: with every drain it comes and goes."""
    if found.state is State.INDEXING:
        return {}
    red = found.state is State.DEGRADED
    state = found.state.value if red else GREEN
    return {VERDICT: Seen(state, "ERROR" if red else "INFO", f"{found.state.value}, {found.reason}")}


def _checks(instance: DagsterInstance, kind: str) -> dict[str, Seen]:
    """The newest evaluation of each check; one that is under way, or never was, is not known."""
    chunks = key(kind, "semantic_chunks")
    keys = [AssetCheckKey(chunks, name) for name in (*LOOKS, INSTANCE) if name != VERDICT]
    keys.append(AssetCheckKey(key(kind, "reembedded"), "buckets_done"))
    found = instance.event_log_storage.get_latest_asset_check_execution_by_key(keys)
    return {
        check.name: _seen(data)
        for check, record in found.items()
        if record.event and record.event.dagster_event
        if isinstance(data := record.event.dagster_event.event_specific_data, AssetCheckEvaluation)
    }


def _seen(found: AssetCheckEvaluation) -> Seen:
    text = found.description or ("passed" if found.passed else "failed")
    return Seen(GREEN, "INFO", text) if found.passed else Seen("red", found.severity.value, text)


def _post(url: str, turn: Turn) -> str | None:
    """None when it was taken (2xx), else what went wrong; never the address."""
    try:
        status = httpx.post(url, json=turn, timeout=TIMEOUT_SECONDS).status_code
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        return f"the webhook did not answer ({type(error).__name__})"
    return None if 200 <= status < 300 else f"the webhook answered {status}"
